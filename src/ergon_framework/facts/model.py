"""Model of facts: envelopes, facts, artifact references, and the confirmations of a boundary.

All types are frozen, checked when they are created, and limited in size: every instance can be stored by every store
and encoded for every protocol.

A zone is a site with its own store; a boundary is the interface to that store, through which zones exchange facts. A
reader is a named consumer of the facts from one zone to another, and an epoch the incarnation of a store that assigned
the facts' offsets. Labels are metadata that is stored with a fact but is not part of its identity, such as its trace
context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.identity import (
    canonical_json,
    canonical_json_of_parsed,
    digest_of_canonical,
    parse_strict_json,
)
from ergon_framework.telemetry.context import inject_carrier

#: Maximum lengths in characters; of JSON and of artifact keys in bytes.
MAX_MESSAGE_ID_CHARS: Final = 256
MAX_ZONE_CHARS: Final = 64
MAX_SUBJECT_CHARS: Final = 512
MAX_PREDICATE_CHARS: Final = 256
MAX_OBJECT_BYTES: Final = 1024 * 1024
MAX_CORRELATION_CHARS: Final = 256
#: Maximum number of labels, and length of a name and of a value; a trace carrier and an attempt history must fit.
MAX_LABELS: Final = 32
MAX_LABEL_NAME_CHARS: Final = 128
MAX_LABEL_VALUE_CHARS: Final = 16_384
MAX_READER_CHARS: Final = 256
MAX_BUCKET_CHARS: Final = 63
MAX_KEY_BYTES: Final = 1024
MAX_MEDIA_TYPE_CHARS: Final = 256
MAX_FILE_NAME_CHARS: Final = 256
#: Largest integer that every JSON reader represents exactly; the limit for artifact sizes in bytes and for times in ms.
MAX_JSON_INTEGER: Final = 2**53

# Control characters, line separators, and halves of surrogate pairs.
_find_invalid_character = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]").search
_match_bucket = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*").fullmatch
_match_digest = re.compile(r"sha256:[0-9a-f]{64}").fullmatch
#: Prefix of the names of readers that read back what their own zone has sent; all others belong to the receiver.
#: A caller that confirms as another zone's reader would let retention delete facts which that reader never received.
SENDER_PREFIX: Final = "sender:"
#: An object with all of these keys is a reference to an artifact, a file that a store keeps next to its facts.
_REFERENCE_KEYS: Final = frozenset(("bucket", "key", "digest", "size"))


class Buffer(StrEnum):
    """The four buffers of a boundary between an inner zone and an outer one: ingress or egress, store or forward.

    Facts from the outer zone are stored in the ISB and forwarded to the IFB, where the inner zone reads them; facts
    from the inner zone are stored in the ESB and forwarded to the EFB. A confirmation always refers to a store buffer,
    never to a forward buffer.
    """

    ISB = "ISB"
    IFB = "IFB"
    ESB = "ESB"
    EFB = "EFB"


class BoundarySide(StrEnum):
    """The side of the boundary that a store is on; it decides which two of the four buffers the store holds."""

    INNER = "inner"
    OUTER = "outer"

    @property
    def store_buffer(self) -> Buffer:
        """The buffer that the store's own zone appends to."""
        return Buffer.ESB if self is BoundarySide.INNER else Buffer.ISB

    @property
    def forward_buffer(self) -> Buffer:
        """The buffer that receives the facts of the other zone."""
        return Buffer.IFB if self is BoundarySide.INNER else Buffer.EFB


class ZonePair(NamedTuple):
    """Sending and receiving zone; offsets are counted for each pair."""

    from_zone: str
    to_zone: str


#: Shares one instance among all facts of a pair: pairs are few, and facts are grouped by them often.
_intern_pair: Final = lru_cache(1024)(ZonePair)


class Cursor(NamedTuple):
    """A read position: everything up to and including *offset*, in that *epoch* of the store; offset 0 is nothing."""

    epoch: str
    offset: int


_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, init=False)
class Envelope:
    """The metadata of a fact. Only the id and the zones are part of its identity; of the rest the first append wins."""

    message_id: str
    from_zone: str
    to_zone: str
    produced_at_unix_ms: int
    correlation_id: str | None = None
    causation_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __init__(
        self,
        *,
        message_id: str,
        from_zone: str,
        to_zone: str,
        produced_at_unix_ms: int,
        correlation_id: str | None = None,
        causation_id: str | None = None,
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> None:
        check_message_id(message_id)
        check_zone("from_zone", from_zone)
        check_zone("to_zone", to_zone)
        moment: Any = produced_at_unix_ms
        if not isinstance(moment, int) or isinstance(moment, bool) or not 0 <= moment <= MAX_JSON_INTEGER:
            raise InvalidFactError(
                f"produced_at_unix_ms is a whole number of milliseconds since 1970, not {moment!r:.40}"
            )
        if correlation_id is not None:
            _check_text("correlation_id", correlation_id, MAX_CORRELATION_CHARS)
        if causation_id is not None:
            _check_text("causation_id", causation_id, MAX_CORRELATION_CHARS)
        # One update call: setting the attributes of a frozen instance one by one takes three times as long.
        self.__dict__.update(
            message_id=message_id,
            from_zone=from_zone,
            to_zone=to_zone,
            produced_at_unix_ms=produced_at_unix_ms,
            correlation_id=correlation_id,
            causation_id=causation_id,
            # A read-only copy, because the caller may change its own mapping later.
            labels=MappingProxyType(_check_labels(labels)) if len(labels) else _NO_LABELS,
        )

    @classmethod
    def _from_checked(
        cls,
        *,
        message_id: str,
        from_zone: str,
        to_zone: str,
        produced_at_unix_ms: int,
        correlation_id: str | None,
        causation_id: str | None,
        labels: Mapping[str, str] | None,
    ) -> Self:
        """Create an envelope from fields that ``columns`` has checked in bulk; only the labels are checked here."""
        envelope = object.__new__(cls)
        envelope.__dict__.update(
            message_id=message_id,
            from_zone=from_zone,
            to_zone=to_zone,
            produced_at_unix_ms=produced_at_unix_ms,
            correlation_id=correlation_id,
            causation_id=causation_id,
            labels=MappingProxyType(_check_labels(labels)) if labels else _NO_LABELS,
        )
        return envelope

    @property
    def pair(self) -> ZonePair:
        """The sending and the receiving zone; the log of this pair assigns the fact's offset."""
        return _intern_pair(self.from_zone, self.to_zone)

    def __reduce__(self) -> tuple[Any, ...]:
        # A MappingProxyType cannot be pickled.
        return _rebuild_envelope, (vars(self) | {"labels": dict(self.labels)},)


def _rebuild_envelope(fields: dict[str, Any]) -> Envelope:
    return Envelope(**fields)


def _check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > MAX_LABELS:
        raise InvalidFactError(
            f"a fact has at most {MAX_LABELS} labels, not {len(labels)}; put the rest into its object"
        )
    for name, value in labels.items():
        _check_text("the name of a label", name, MAX_LABEL_NAME_CHARS)
        _check_text(f"the label {name!r}", value, MAX_LABEL_VALUE_CHARS, min_chars=0)
    return dict(labels)


@dataclass(frozen=True, kw_only=True, init=False)
class Fact:
    """A statement: *subject*, *predicate*, and an object as JSON text that is kept unchanged."""

    subject: str
    predicate: str
    object_json: str

    def __init__(self, *, subject: str, predicate: str, object_json: str) -> None:
        _check_text("subject", subject, MAX_SUBJECT_CHARS)
        _check_text("predicate", predicate, MAX_PREDICATE_CHARS)
        unchecked: Any = object_json
        if not isinstance(unchecked, str):
            raise InvalidFactError(f"object_json must be JSON text, not {type(unchecked).__name__}; see Fact.create")
        # A character has at most four bytes, so most texts are known to be short enough without encoding them.
        if 4 * len(object_json) > MAX_OBJECT_BYTES and len(object_json.encode(errors="replace")) > MAX_OBJECT_BYTES:
            raise InvalidFactError(
                f"object_json has more than {MAX_OBJECT_BYTES:,} bytes; store an artifact, and refer to it in the fact"
            )
        # Rejects JSON without a canonical form: it has no digest and cannot be compared. The canonical text is cached.
        value = parse_strict_json(object_json)
        self.__dict__.update(
            subject=subject,
            predicate=predicate,
            object_json=object_json,
            _written=canonical_json_of_parsed(value, size=len(object_json)),
            _named=parse_reference(value),
        )

    @classmethod
    def _from_checked(
        cls, subject: str, predicate: str, object_json: str, canonical_text: str, artifact: ArtifactReference | None
    ) -> Self:
        """Create a fact from checked values; *canonical_text* is the object in canonical form."""
        fact = object.__new__(cls)
        fact.__dict__.update(
            subject=subject, predicate=predicate, object_json=object_json, _written=canonical_text, _named=artifact
        )
        return fact

    @classmethod
    def create(cls, subject: str, predicate: str, object: Any = None) -> Self:  # noqa: A002 - the source document's term
        """Create a fact whose object is a plain Python value."""
        canonical_json(object)  # raises errors that are more precise than those of json.dumps
        object_json = json.dumps(object, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return cls(subject=subject, predicate=predicate, object_json=object_json)

    @property
    def object(self) -> Any:
        """The object as a plain value; each access returns a new one, which the caller may change."""
        return parse_strict_json(self.object_json)

    @property
    def artifact(self) -> ArtifactReference | None:
        """The artifact reference, if the object is one."""
        reference: ArtifactReference | None = self.__dict__["_named"]
        return reference

    @property
    def _canonical_text(self) -> str:
        text: str = self.__dict__["_written"]
        return text


def fact_digest(envelope: Envelope, fact: Fact) -> str:
    """Return the digest that two appends with the same id must share."""
    return digest_of_canonical(
        from_zone=envelope.from_zone,
        to_zone=envelope.to_zone,
        subject=fact.subject,
        predicate=fact.predicate,
        canonical_text=fact._canonical_text,  # noqa: SLF001 - fact and digest belong together
    )


# -- artifacts --------------------------------------------------------------------------------------


class StoredArtifact(NamedTuple):
    """The digest and size of an artifact, confirmed by a store once the artifact is durable."""

    digest: str
    size: int


class ObjectName(NamedTuple):
    """The name of an artifact in one store: a bucket and a key, in the namespace of its owner.

    The owner is the zone that stored the artifact; the empty string stands for the zones that the store belongs to.
    """

    zone: str
    bucket: str
    key: str

    @classmethod
    def check(cls, bucket: str, key: str, zone: str = "") -> ObjectName:
        """Return the name; raise InvalidFactError if an artifact cannot have it."""
        if zone != "":
            check_zone("zone", zone)
        check_artifact_name(bucket, key)
        return cls(zone, bucket, key)

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}" + (f" of zone {self.zone!r}" if self.zone else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactReference:
    """The name of an artifact, and the digest and size that identify its content."""

    bucket: str
    key: str
    digest: str
    size: int
    media_type: str | None = None
    file_name: str | None = None

    def __post_init__(self) -> None:
        check_artifact_name(self.bucket, self.key)
        check_digest_and_size(self.digest, self.size)
        for name, max_chars in (("media_type", MAX_MEDIA_TYPE_CHARS), ("file_name", MAX_FILE_NAME_CHARS)):
            value = getattr(self, name)
            if value is not None:
                _check_text(name, value, max_chars)

    def to_object(self) -> dict[str, Any]:
        """Return the object of a fact that refers to this artifact."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


def parse_reference(value: Any) -> ArtifactReference | None:
    """Return the artifact that *value*, the object of a fact, refers to; None if it is not a reference.

    A reference has all of bucket, key, digest and size. Other keys are kept in the fact and ignored here.
    """
    if not isinstance(value, dict) or not value.keys() >= _REFERENCE_KEYS:
        return None
    fields = {name: value[name] for name in ArtifactReference.__slots__ if name in value}
    return ArtifactReference(**fields)


# -- results of a boundary --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, init=False)
class FactConfirmation:
    """The fact is durable in the store buffer, at an offset that never changes. It confirms nothing else.

    It does not confirm that the fact reached a forward buffer or a consumer, or that a consumer accepted it.
    ``duplicate`` is set when the fact was stored before; the other fields then repeat the first confirmation.
    """

    message_id: str
    offset: int
    epoch: str
    digest: str
    buffer: Buffer
    duplicate: bool = False

    def __init__(
        self, *, message_id: str, offset: int, epoch: str, digest: str, buffer: Buffer, duplicate: bool = False
    ) -> None:
        # One update call, as in Envelope.__init__.
        self.__dict__.update(
            message_id=message_id, offset=offset, epoch=epoch, digest=digest, buffer=buffer, duplicate=duplicate
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFact:
    """A fact as it is read, with the offset and epoch of the store where it was first appended."""

    envelope: Envelope
    fact: Fact
    digest: str
    offset: int
    epoch: str
    stored_at_unix_ms: int

    @property
    def cursor(self) -> Cursor:
        """The cursor of a reader that has read up to this fact."""
        return Cursor(self.epoch, self.offset)


# -- checks -----------------------------------------------------------------------------------------


def check_message_id(message_id: str) -> None:
    """Raise InvalidFactError unless a fact can have that id."""
    unchecked: Any = message_id
    if not isinstance(unchecked, str) or not 1 <= len(unchecked) <= MAX_MESSAGE_ID_CHARS or not _is_visible(unchecked):
        raise InvalidFactError(
            f"a message_id has 1 to {MAX_MESSAGE_ID_CHARS} visible ASCII characters and no blanks, not "
            f"{_format_value(message_id)}; business_id() derives one from business fields"
        )


def check_zone(name: str, zone: str) -> None:
    """Raise InvalidFactError unless a zone can have that name; *name* says in the error which zone is meant."""
    _check_text(name, zone, MAX_ZONE_CHARS)
    if zone != zone.strip():
        raise InvalidFactError(f"{name} {zone!r} begins or ends with blanks, which may be lost in transit; remove them")


def check_reader(reader: str) -> None:
    """Raise InvalidFactError unless a reader can have that name."""
    _check_text("the name of a reader", reader, MAX_READER_CHARS)


def zone_of_reader(reader: str, pair: ZonePair) -> str:
    """Return the zone that a reader of *pair* belongs to."""
    return pair.from_zone if reader.startswith(SENDER_PREFIX) else pair.to_zone


def check_digest_and_size(digest: str, size: int) -> None:
    """Raise InvalidFactError unless *digest* and *size* can identify an artifact."""
    unchecked: Any = digest
    if not isinstance(unchecked, str) or not _match_digest(unchecked):
        raise InvalidFactError(f"a digest is 'sha256:' and 64 hexadecimal digits, not {unchecked!r:.40}")
    number: Any = size
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_JSON_INTEGER:
        raise InvalidFactError(f"the size of an artifact is a whole number of bytes, not {number!r:.40}")


def check_artifact_name(bucket: str, key: str) -> None:
    """Raise InvalidFactError unless an artifact can have that name on every file system and object store."""
    unchecked: Any = bucket
    if not isinstance(unchecked, str) or len(bucket) > MAX_BUCKET_CHARS or not _match_bucket(bucket):
        raise InvalidFactError(
            f"a bucket has 1 to {MAX_BUCKET_CHARS} letters, digits, dots, hyphens and underscores, starts with a "
            f"letter or digit, and is not {_format_value(bucket)}"
        )
    _check_text("key", key, MAX_KEY_BYTES)
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidFactError(
            f"the key of an artifact {key!r:.40} has {len(key.encode())} bytes; the maximum is {MAX_KEY_BYTES}"
        )
    if "\\" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidFactError(
            f"the key {_format_value(key)} could lead out of its bucket: remove backslashes, empty parts, '.' and '..'"
        )


def _is_visible(text: str) -> bool:
    """Return whether *text* has only visible ASCII characters."""
    return text.isascii() and text.isprintable() and " " not in text


def _check_text(name: str, value: str, max_chars: int, *, min_chars: int = 1) -> None:
    unchecked: Any = value
    # Fast path: printable text is always valid. Some text that is not printable is valid too, such as wide spaces.
    if isinstance(unchecked, str) and min_chars <= len(unchecked) <= max_chars and unchecked.isprintable():
        return
    if not isinstance(unchecked, str):
        raise InvalidFactError(f"{name} must be text, not {type(value).__name__}")
    if not min_chars <= len(value) <= max_chars:
        raise InvalidFactError(
            f"{name} has {min_chars} to {max_chars} characters, not {len(value)}: {_format_value(value)}"
        )
    if match := _find_invalid_character(value):
        raise InvalidFactError(f"{name} contains {match.group()!r}, which is not a visible character; remove it")


def _format_value(value: Any) -> str:
    return f"{value!r:.60}"


def is_contiguous(facts: Iterable[StoredFact], after: int) -> bool:
    """Return whether the offsets of *facts* follow *after* and each other without a gap."""
    return all(stored.offset == offset for offset, stored in enumerate(facts, after + 1))


# -- trace labels -----------------------------------------------------------------------------------

#: The names of a trace carrier, as W3C defines them.
TRACE_LABELS: Final = ("traceparent", "tracestate", "baggage")


def with_trace(labels: Mapping[str, str]) -> dict[str, str]:
    """Return *labels* with the current trace, as far as it fits: a trace never makes a fact invalid."""
    result, carrier = dict(labels), inject_carrier()
    for name in TRACE_LABELS:
        value = carrier.get(name, "")
        if value and len(value) <= MAX_LABEL_VALUE_CHARS and value.isprintable() and len(result) < MAX_LABELS:
            # Labels of the caller take precedence over the current trace.
            result.setdefault(name, value)
    return result


def get_trace(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the trace carrier among *labels*."""
    return {name: labels[name] for name in TRACE_LABELS if name in labels}
