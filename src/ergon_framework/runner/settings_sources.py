"""Sources of settings: a file and the environment, parsed into plain trees that record the source of each value.

A model is the class of a section of the settings; its fields are the keys that the section may have. The source of a
value is named in errors. Some sections hold names that users choose, such as queues: ``[queues.orders]``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from ergon_framework.errors import ConfigurationError
from ergon_framework.policy import Policy, find_renamed_key
from ergon_framework.telemetry import redaction

if TYPE_CHECKING:
    from pydantic import ValidationError

#: The configuration file in the current folder.
FILE_NAME = "ergon.toml"
#: The prefix of the framework's variables, and the separator between two keys.
PREFIX = "ERGON_"
SEPARATOR = "__"
#: Maximum size of the file, length of a variable, and number of keys in a chain.
MAX_FILE_BYTES = 1_000_000
MAX_VALUE_CHARS = 65_536
MAX_KEY_DEPTH = 12
#: Up to this many keys of a section are all named in the error for an unknown key.
_MAX_NAMED_KEYS = 5

Keys: TypeAlias = tuple[str, ...]
#: The model whose keys a mapping may have, by the settings class and the key of the mapping: the settings keep the
#: policy of a task as a plain mapping, because only the task shows which policy it is.
KeyModels: TypeAlias = Mapping[tuple[type[Policy], str], type[Policy]]

_PASSWORD_KEYWORD = re.compile(r"(?:^|[\s?&;])(?:password|passwd|pwd|sslpassword)\s*=", re.IGNORECASE)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^\s/@:]*:[^\s/@]+@")
#: Redaction patterns look like the secrets that they hide.
_PATTERN_KEYS = ("telemetry", "redact_patterns")
#: The user of a NATS address without a password is a token.
_TOKEN_IN_ADDRESS = re.compile(r"^\s*(?:nats|tls|wss?)://[^\s/@:]+@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SettingsTree:
    """A tree of plain mappings, and the source of each key."""

    tree: dict[str, Any] = field(default_factory=dict, repr=False)
    origin: str = ""
    #: Environment variables by the keys that they set.
    variables: Mapping[Keys, str] = field(default_factory=dict)

    def merge(self, override: SettingsTree) -> SettingsTree:
        """Return both trees merged; *override* takes precedence for a key in both."""
        return SettingsTree(
            merge_settings(self.tree, override.tree), self.origin, {**self.variables, **override.variables}
        )

    def source_of(self, keys: Keys) -> str:
        """Return the source of the value at *keys*."""
        variables = [
            name for path, name in self.variables.items() if path[: len(keys)] == keys or keys[: len(path)] == path
        ]
        return variables[0] if variables else self.origin


def merge_settings(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return both trees merged; *override* takes precedence for a value in both."""
    result = dict(base)
    for key, value in override.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merge_settings(old, value) if both and old is not None else value
    return result


# -- the file -------------------------------------------------------------------------------------


def from_file(path: Path, *, required: bool) -> SettingsTree:
    """Read the TOML file; return an empty tree if it does not exist and is not *required*."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        if not required:
            return SettingsTree(origin=str(path))
        raise ConfigurationError(f"there is no configuration file {path}; create one, or omit --config") from error
    except OSError as error:
        raise ConfigurationError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"the configuration file {path} is longer than {MAX_FILE_BYTES} bytes; check the path")
    try:
        tree = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the configuration file {path} is not TOML: {error}") from error
    for keys, problem in _find_secrets(tree, ()):
        raise ConfigurationError(
            f"{path}: {'.'.join(keys)} {problem}; secrets come from the environment only: remove it from the file and "
            f"set {env_variable_name(keys)}"
        )
    return SettingsTree(tree, str(path))


def _find_secrets(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """Yield the keys of each value that is, or contains, a secret, with a description of the problem."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            # The name of an address is a secret name, but an address is a secret only if it contains a password.
            # The path of a file with a secret is not a secret.
            is_location = key == "dsn" or key.endswith("_file")
            if redaction.is_secret_name(key) and not is_location and not isinstance(item, Mapping):
                yield (*keys, key), "is named like a secret"
            yield from _find_secrets(item, (*keys, key))
    elif isinstance(value, list):
        for item in value:
            yield from _find_secrets(item, keys)
    elif (
        isinstance(value, str)
        and keys != _PATTERN_KEYS
        and (_PASSWORD_IN_ADDRESS.search(value) or _PASSWORD_KEYWORD.search(value))
    ):
        yield keys, "holds a password"
    elif isinstance(value, str) and _TOKEN_IN_ADDRESS.search(value):
        yield keys, "holds a token"
    elif isinstance(value, str) and keys != _PATTERN_KEYS and _holds_secret(value):
        yield keys, "holds a secret"


def _holds_secret(value: str) -> bool:
    """Return whether *value* is an address with a secret, also one whose name is percent-encoded."""
    return "://" in value and redaction.mask_credentials(value) != value


# -- the environment ------------------------------------------------------------------------------


def from_environment(environ: Mapping[str, str], model: type[Policy], key_models: KeyModels) -> SettingsTree:
    """Read the variables ``ERGON_A__B``. A name without a double underscore belongs to another program."""
    tree: dict[str, Any] = {}
    variables: dict[Keys, str] = {}
    misspellings = {
        env_variable_name(keys).replace(SEPARATOR, "_"): env_variable_name(keys)
        for keys in known_keys(model, key_models)
    }
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        if SEPARATOR not in name:
            if name in misspellings:
                raise ConfigurationError(
                    f"environment variable {name} is not a setting: two underscores separate two keys; "
                    f"set {misspellings[name]}"
                )
            continue
        keys = tuple(name.removeprefix(PREFIX).lower().split(SEPARATOR))
        if not all(keys) or len(keys) > MAX_KEY_DEPTH:
            raise ConfigurationError(f"{name} contains no key; write it like ERGON_RUN__PROCESSES")
        if len(environ[name]) > MAX_VALUE_CHARS:
            raise ConfigurationError(f"{name} is longer than {MAX_VALUE_CHARS} characters; shorten the value")
        _set_value(tree, keys, parse_value(environ[name]), name=name)
        variables[keys] = name
    return SettingsTree(tree, "the environment", variables)


def parse_value(value: str) -> Any:
    """Parse a number, a boolean, a list or a table in TOML syntax, or ``null``; any other value is text."""
    if value.strip() == "null":
        return None
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return value
    # A value of several lines may parse as several keys; it is text then, like a value of any other type.
    return (
        parsed["value"]
        if len(parsed) == 1 and isinstance(parsed["value"], bool | int | float | str | list | dict)
        else value
    )


def _set_value(tree: dict[str, Any], keys: Keys, value: Any, *, name: str) -> None:
    """Set *value* at *keys* in *tree*; *name* is the variable, for errors."""
    node = tree
    for key in keys[:-1]:
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(
                f"{name} sets a part of what another variable sets as a whole; keep one of the two"
            )
        node = inner
    if keys[-1] in node:
        raise ConfigurationError(f"{name} sets as a whole what another variable sets a part of; keep one of the two")
    node[keys[-1]] = value


def env_variable_name(keys: Keys) -> str:
    """Return the environment variable that sets *keys*."""
    return PREFIX + SEPARATOR.join(keys).upper()


# -- known keys -----------------------------------------------------------------------------------


def known_keys(model: type[Policy], key_models: KeyModels, parents: Keys = ()) -> Iterator[Keys]:
    """Yield every chain of keys that ends in a value; names that users choose are omitted."""
    for key in model.model_fields:
        section = _section_model(model, key, key_models)
        if section is None:
            yield (*parents, key)
        elif not _has_named_children(model, key):
            yield from known_keys(section, key_models, (*parents, key))


def unknown_key_errors(settings_tree: SettingsTree, model: type[Policy], key_models: KeyModels) -> list[str]:
    """Return a sentence for each unknown key: the key, its source, and its new name or the nearest known key."""
    return [
        f"{settings_tree.source_of(keys)}: unknown key {'.'.join(keys)!r}"
        f"{_describe_correction(keys, section, model, key_models)}"
        for keys, section in _find_unknown(settings_tree.tree, model, key_models, ())
    ]


def _find_unknown(
    tree: Mapping[str, Any], model: type[Policy], key_models: KeyModels, parents: Keys
) -> Iterator[tuple[Keys, type[Policy]]]:
    """Yield the keys that lead to each unknown key, and the model of the section that it is in."""
    for key, value in tree.items():
        if key not in model.model_fields:
            yield (*parents, key), model
            continue
        section = _section_model(model, key, key_models)
        if section is None or not isinstance(value, Mapping):
            continue
        if not _has_named_children(model, key):
            yield from _find_unknown(value, section, key_models, (*parents, key))
            continue
        for name, item in value.items():
            if isinstance(item, Mapping):
                yield from _find_unknown(item, section, key_models, (*parents, key, name))


def _section_model(model: type[Policy], key: str, key_models: KeyModels) -> type[Policy] | None:
    annotation = model.model_fields[key].annotation
    section = key_models.get((model, key)) or _mapping_value_model(annotation) or annotation
    return section if isinstance(section, type) and issubclass(section, Policy) else None


def _has_named_children(model: type[Policy], key: str) -> bool:
    """Return whether the keys below are names that users choose."""
    return _mapping_value_model(model.model_fields[key].annotation) is not None


def _mapping_value_model(annotation: Any) -> type[Policy] | None:
    """Return the policy type of the values of a mapping from names to policies; None for other types."""
    value_type = (get_args(annotation) or (None,))[-1]
    return value_type if isinstance(value_type, type) and issubclass(value_type, Policy) else None


def _describe_correction(keys: Keys, section: type[Policy], model: type[Policy], key_models: KeyModels) -> str:
    new = find_renamed_key(keys[-1], section)
    if new is not None:
        return f": it is called {'.'.join((*keys[:-1], new))!r}"
    return f"; {_describe_nearest(keys, list(section.model_fields), model, key_models)}"


def _describe_nearest(keys: Keys, siblings: list[str], model: type[Policy], key_models: KeyModels) -> str:
    near = get_close_matches(keys[-1], siblings, n=1)
    if near:
        return f"did you mean {'.'.join((*keys[:-1], near[0]))!r}?"
    # The right key in the wrong section is the next most common mistake.
    ends = {path[-1]: path for path in known_keys(model, key_models)}
    far = get_close_matches(keys[-1], ends, n=1)
    if not far:
        return f"known keys here: {', '.join(siblings)}"
    question = f"did you mean {'.'.join(ends[far[0]])!r}?"
    # A wrong key in the right section: a few known keys can all be named.
    return (
        f"{'.'.join(keys[:-1])} has {', '.join(siblings)}; {question}"
        if keys[:-1] and len(siblings) <= _MAX_NAMED_KEYS
        else question
    )


def explain_validation_error(error: ValidationError, settings_tree: SettingsTree) -> str:
    """Describe each invalid value and its source; text is not repeated, because it may be secret."""
    faults = []
    for fault in error.errors(include_url=False):
        keys = tuple(str(part) for part in fault["loc"])
        value = fault["input"]
        shown = f", not {value!r:.40}" if isinstance(value, int | float | None) else ""
        faults.append(
            f"{settings_tree.source_of(keys)}: {'.'.join(keys)}: {fault['msg'].removeprefix('Value error, ')}{shown}"
        )
    return "; ".join(faults)
