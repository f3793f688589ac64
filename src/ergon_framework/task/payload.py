"""Payloads as declared types: reads back what the codec has written for models, dataclasses and other values.

A core schema is pydantic's description of a type, a tree of nodes. Some nodes are rewritten, because pydantic reads
plain JSON differently by default: bytes are base64 here, and fields are found by every name under which they are sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaValidator, core_schema

from ergon_framework.connectors.base import DeadLetter
from ergon_framework.connectors.payload_json import PayloadError, encode_payload
from ergon_framework.errors import Category, ConfigurationError, explain_fault
from ergon_framework.task.signature import MISSING, callable_name, is_async, list_parameters
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException

#: The reason of a dead letter whose payload does not fit its type, as of one that is not JSON.
UNDECODABLE: Final = "undecodable"
_BASE64: Final = core_schema.CoreConfig(val_json_bytes="base64")
#: The keys of a node under which there are other nodes: one, a list, or a dictionary of them.
_CHILD_KEYS: Final = (
    *("schema", "keys_schema", "values_schema", "items_schema", "extras_schema", "extras_keys_schema"),
    *("fields", "choices", "steps", "definitions", "arguments_schema", "var_args_schema", "var_kwargs_schema"),
    *("lax_schema", "strict_schema", "json_schema", "python_schema"),
)
#: Types that JSON has, and what contains them: a union of these alone is read from Python values as from JSON.
_JSON_TYPES: Final = frozenset(
    (
        *("any", "bool", "default", "definition-ref", "dict", "float", "int", "list", "literal", "none", "nullable"),
        *("str", "tagged-union", "union", "dataclass", "dataclass-args", "dataclass-field", "model", "model-field"),
        *("model-fields", "typed-dict", "typed-dict-field", "function-after", "function-before", "function-wrap"),
    )
)
_PLAIN_TYPES: Final = frozenset((str, int, float, bool, type(None)))


class PayloadReader:
    """Reads payloads as the declared type of a task."""

    def __init__(self, model: Any = None) -> None:
        self._adapter: TypeAdapter[Any] | None = None if model is None else TypeAdapter(model)
        #: Built at the first read: a model may refer to a class that is defined after its task.
        self._validate: Callable[[Any], Any] | None = None

    @classmethod
    def for_annotation(cls, model: Any, *, owner: str) -> PayloadReader:
        """Return a reader for *model*; ConfigurationError if no payload can be read as that type."""
        try:
            return cls(model)
        except PydanticUserError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise ConfigurationError(
                f"the payload type of {owner} cannot be read from a message: {reason}; annotate the payload with a "
                "dataclass, a pydantic model, a TypedDict or a plain type, or pass payload="
            ) from error

    def read(self, transaction: Transaction) -> Any:
        """Return the typed payload; one that does not fit is a final BUSINESS failure: no attempt can succeed."""
        if self._adapter is None:
            return transaction.payload
        if self._validate is None:
            self._validate = _build_validate(self._adapter)
        try:
            return self._validate(transaction.payload)
        except ValidationError as error:
            # Locations and rules, not values: messages end up in logs.
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'payload'}: {explain_fault(fault)}"
                for fault in error.errors(include_url=False, include_input=False)
            )
            raise TransactionException(
                f"payload is invalid: {faults}", Category.BUSINESS, final=True, code="invalid_payload"
            ) from None

    def is_valid(self, transaction: Transaction) -> bool:
        """Return whether the payload can be read."""
        try:
            self.read(transaction)
        except TransactionException:
            return False
        return True


def _build_validate(adapter: TypeAdapter[Any]) -> Callable[[Any], Any]:
    """Return the function that reads a payload: the adapter's own, unless its schema needs a change."""
    rewriter = _SchemaRewriter()
    schema: Any = rewriter.rewrite(adapter.core_schema)
    validator: Any = adapter.validator
    if rewriter.is_changed:
        # Otherwise pydantic-core replaces the nodes of models by the validators of their classes.
        validator = SchemaValidator(schema, _BASE64, _use_prebuilt=False)
    if not rewriter.needs_json:
        validate_python: Callable[[Any], Any] = validator.validate_python
        return validate_python

    def validate(payload: Any) -> Any:
        try:
            body = encode_payload(payload)
        except PayloadError:
            body = None  # only a third-party codec delivers such values
        return validator.validate_python(payload) if body is None else validator.validate_json(body)

    return validate


class _SchemaRewriter:
    """Rewrites a core schema for payloads, and finds out how they must be read."""

    def __init__(self) -> None:
        #: Whether the type reads a payload otherwise than its own validator does.
        self.is_changed = False
        self._is_json_only = False
        self._has_union_of_references = False
        self._has_other_types = False

    @property
    def needs_json(self) -> bool:
        """Whether payloads must be read as JSON text.

        There a strict type accepts the text of a date, and a union tells a date from a datetime. Other types are read
        from the Python values of the payload, which is faster.
        """
        return self._is_json_only or (self._has_union_of_references and self._has_other_types)

    def rewrite(self, node: Mapping[str, Any], name: str = "", *, in_union: bool = False) -> dict[str, Any]:
        """Return *node* rewritten; *name* is its key in the dictionary of its parent."""
        kind = node.get("type", "")
        self._classify(kind, node, in_union=in_union)
        in_union = in_union or kind == "union"
        new = dict(node)
        for key in _CHILD_KEYS:
            if key in new:
                new[key] = self._rewrite_children(new[key], in_union=in_union)
        if kind in ("model", "dataclass", "typed-dict"):
            new["config"] = {**(new.get("config") or {}), **_BASE64}
        elif kind in ("model-field", "dataclass-field", "typed-dict-field"):
            self._add_aliases(new, new.get("name", name))
        elif kind in ("enum", "literal"):
            new = self._accept_encoded_members(new)
        return new

    def _rewrite_children(self, child: Any, *, in_union: bool) -> Any:
        if isinstance(child, list):
            return [self._rewrite_item(each, in_union=in_union) for each in child]
        if isinstance(child.get("type"), str):
            return self.rewrite(child, in_union=in_union)
        # By the names of fields, one of which may be called "type", or by the tags of a union.
        return {name: self.rewrite(each, name, in_union=in_union) for name, each in child.items()}

    def _rewrite_item(self, item: Any, *, in_union: bool) -> Any:
        if isinstance(item, tuple):  # a choice of a union, and its label
            return (self.rewrite(item[0], in_union=in_union), *item[1:])
        # A dataclass lists the names of its fields besides their nodes.
        return self.rewrite(item, in_union=in_union) if isinstance(item, dict) else item

    def _classify(self, kind: str, node: Mapping[str, Any], *, in_union: bool) -> None:
        is_other = kind not in _JSON_TYPES
        self._has_other_types = self._has_other_types or is_other
        self._has_union_of_references = self._has_union_of_references or (in_union and kind == "definition-ref")
        self.is_changed = self.is_changed or kind == "bytes"
        if (
            (in_union and is_other)
            or node.get("strict")
            or (node.get("config") or {}).get("strict")
            or (kind == "json-or-python" and node["python_schema"]["type"] == "is-instance")
        ):
            self._is_json_only = True

    def _add_aliases(self, field: dict[str, Any], name: str) -> None:
        """Let *field* be found by all names under which the codec may have written it."""
        accepted = list(_iter_paths(field.get("validation_alias"))) or [[name]]
        sent = [field.get("serialization_alias") or name]
        if field["type"] != "model-field":  # a dataclass or a dictionary is sent with its own names
            sent.append(name)
        missing = [[each] for each in dict.fromkeys(sent) if [each] not in accepted]
        if missing:
            field["validation_alias"] = accepted + missing
            self.is_changed = True

    def _accept_encoded_members(self, node: dict[str, Any]) -> dict[str, Any]:
        """Wrap an enumeration or a literal whose values JSON does not have, such as a tuple or bytes."""
        values = node["members"] if node["type"] == "enum" else node["expected"]
        members: dict[bytes, Any] = {}
        for member in values:
            value = member.value if isinstance(member, Enum) else member
            if type(value) not in _PLAIN_TYPES or (node["type"] == "literal" and isinstance(member, Enum)):
                members.setdefault(encode_payload(value), member)
        for plain in (value for value in values if type(value) in _PLAIN_TYPES):
            members.pop(encode_payload(plain), None)
        if not members:
            return node
        self.is_changed = True
        reference = node.pop("ref", None)

        def find_member(value: Any) -> Any:
            try:
                return members.get(encode_payload(value), value)
            except PayloadError:
                return value

        return dict(core_schema.no_info_before_validator_function(find_member, node, ref=reference))


def _iter_paths(alias: Any) -> Iterator[list[str | int]]:
    """Yield the paths of an alias in a core schema: a name, one path, or several paths."""
    if isinstance(alias, str):
        yield [alias]
    elif alias and isinstance(alias[0], list):
        yield from alias
    elif alias:
        yield alias


# -- methods ----------------------------------------------------------------------------------------


def read_payload_type(method: Callable[..., Any]) -> PayloadReader | None:
    """Return the reader for the type that ``Transaction[...]`` of a method's signature names; None without one."""
    for parameter in list_parameters(method, None)[:1]:
        if parameter.payload_type is not MISSING:
            return PayloadReader.for_annotation(parameter.payload_type, owner=callable_name(method))
    return None


def convert_payload(
    method: Callable[..., Any], reader: PayloadReader | None, *, is_failure: bool = False
) -> Callable[..., Any]:
    """Return *method* with its transaction's payload read by *reader*; unchanged without a reader.

    A failure handler is not called for a payload that does not fit: the transaction is dead-lettered.
    """
    if reader is None:
        return method

    def call(transaction: Transaction, *extra: Any) -> Any:
        if is_failure and not reader.is_valid(transaction):
            return DeadLetter(UNDECODABLE)
        return method(transaction.replace(payload=reader.read(transaction)), *extra)

    return _make_async(call) if is_async(method) else call


def _make_async(call: Callable[..., Any]) -> Callable[..., Any]:
    async def call_async(transaction: Transaction, *extra: Any) -> Any:
        result = call(transaction, *extra)
        return await result if inspect.isawaitable(result) else result

    return call_async
