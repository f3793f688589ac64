"""What zones hand to each other: facts in their envelopes, references to artifacts, and what a boundary confirms.

Everything here is frozen and checked when it is made, and everything has a limit: what exists can be
stored by every store, and written to every wire.
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
from ergon_framework.facts.identity import canonical, canonical_parsed, digest_written, parse

#: The longest of each, in characters; of JSON in bytes.
MESSAGE_ID: Final = 256
ZONE: Final = 64
SUBJECT: Final = 512
PREDICATE: Final = 256
OBJECT_JSON: Final = 1024 * 1024
CORRELATION: Final = 256
#: How many labels there may be, and how long a name and a value; a trace carrier and a history must fit.
LABELS: Final = 32
LABEL_NAME: Final = 128
LABEL_VALUE: Final = 16_384
READER: Final = 256
BUCKET: Final = 63
KEY: Final = 1024
MEDIA_TYPE: Final = 256
FILE_NAME: Final = 256
#: Bytes of one artifact: the largest whole number that every reader of JSON understands.
SIZE: Final = 2**53

# Controls, separators of lines, and halves of surrogate pairs.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]").search
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*").fullmatch
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}").fullmatch
#: The names of readers begin with it that read back what their own zone has sent. All others belong to the receiver: a
#: caller that confirms in the name of another zone's reader would let retention take what that reader never had.
SENDER: Final = "sender:"
#: What makes an object a reference to an artifact.
_REFERENCE: Final = frozenset(("bucket", "key", "digest", "size"))


class Buffer(StrEnum):
    """The four buffers of a boundary between an inner zone and an outer one.

    Facts from the outer zone are stored in the ISB and forwarded to the IFB, where the inner zone reads
    them; facts from the inner zone are stored in the ESB and forwarded to the EFB. A confirmation is
    about a store buffer, and never about a forward buffer.
    """

    ISB = "ISB"
    IFB = "IFB"
    ESB = "ESB"
    EFB = "EFB"


class Side(StrEnum):
    """On which side of the boundary a store is, and so which two of the four buffers it holds."""

    INNER = "inner"
    OUTER = "outer"

    @property
    def store_buffer(self) -> Buffer:
        """Where its own zone appends."""
        return Buffer.ESB if self is Side.INNER else Buffer.ISB

    @property
    def forward_buffer(self) -> Buffer:
        """Where facts of the other zone arrive."""
        return Buffer.IFB if self is Side.INNER else Buffer.EFB


class Pair(NamedTuple):
    """From which zone to which: offsets are counted for each pair."""

    from_zone: str
    to_zone: str


#: One for all facts of a pair: there are few pairs, and many facts to be told apart by them.
_pair: Final = lru_cache(1024)(Pair)


class Cursor(NamedTuple):
    """How far somebody has come: all up to and including *offset*, in that *epoch* of the store; 0 is nothing."""

    epoch: str
    offset: int


_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, init=False)
class Envelope:
    """What stands around a fact. Only the id and the zones are part of its identity; of the rest the first wins."""

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
        if not isinstance(moment, int) or isinstance(moment, bool) or not 0 <= moment <= SIZE:
            raise InvalidFactError(
                f"produced_at_unix_ms is a whole number of milliseconds since 1970, not {moment!r:.40}"
            )
        if correlation_id is not None:
            _check_text("correlation_id", correlation_id, CORRELATION)
        if causation_id is not None:
            _check_text("causation_id", causation_id, CORRELATION)
        # All at once: one by one, as something frozen is filled, takes three times as long, and there are many.
        self.__dict__.update(
            message_id=message_id,
            from_zone=from_zone,
            to_zone=to_zone,
            produced_at_unix_ms=produced_at_unix_ms,
            correlation_id=correlation_id,
            causation_id=causation_id,
            # A copy that nobody can change: the caller's mapping is the caller's.
            labels=MappingProxyType(_labels(labels)) if len(labels) else _NO_LABELS,
        )

    @classmethod
    def _sound(
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
        """One of which all but the labels is known to be as it must be: ``table`` has seen to it for many at once."""
        made = object.__new__(cls)
        made.__dict__.update(
            message_id=message_id,
            from_zone=from_zone,
            to_zone=to_zone,
            produced_at_unix_ms=produced_at_unix_ms,
            correlation_id=correlation_id,
            causation_id=causation_id,
            labels=MappingProxyType(_labels(labels)) if labels else _NO_LABELS,
        )
        return made

    @property
    def pair(self) -> Pair:
        return _pair(self.from_zone, self.to_zone)

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only view cannot be pickled.
        return _rebuilt, (vars(self) | {"labels": dict(self.labels)},)


def _rebuilt(fields: dict[str, Any]) -> Envelope:
    return Envelope(**fields)


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > LABELS:
        raise InvalidFactError(f"a fact has at most {LABELS} labels, not {len(labels)}; put the rest into its object")
    for name, value in labels.items():
        _check_text("the name of a label", name, LABEL_NAME)
        _check_text(f"the label {name!r}", value, LABEL_VALUE, least=0)
    return dict(labels)


@dataclass(frozen=True, kw_only=True, init=False)
class Fact:
    """A statement: *subject*, *predicate* and an object, as JSON text which is kept as it was given."""

    subject: str
    predicate: str
    object_json: str

    def __init__(self, *, subject: str, predicate: str, object_json: str) -> None:
        _check_text("subject", subject, SUBJECT)
        _check_text("predicate", predicate, PREDICATE)
        given: Any = object_json
        if not isinstance(given, str):
            raise InvalidFactError(f"object_json is JSON as text, not {type(given).__name__}; see Fact.of")
        # A character has at most four bytes: most texts need not be encoded to be known to be short enough.
        if 4 * len(object_json) > OBJECT_JSON and len(object_json.encode(errors="replace")) > OBJECT_JSON:
            raise InvalidFactError(
                f"object_json has more than {OBJECT_JSON:,} bytes; store an artifact, and refer to it in the fact"
            )
        # Whatever has no canonical form has no digest, and could never be compared. Made once, and kept.
        value = parse(object_json)
        self.__dict__.update(
            subject=subject,
            predicate=predicate,
            object_json=object_json,
            _written=canonical_parsed(value, size=len(object_json)),
            _named=reference(value),
        )

    @classmethod
    def _sound(
        cls, subject: str, predicate: str, object_json: str, written: str, named: ArtifactReference | None
    ) -> Self:
        """One of which all is known to be as it must be; *written* is its object in canonical form."""
        made = object.__new__(cls)
        made.__dict__.update(
            subject=subject, predicate=predicate, object_json=object_json, _written=written, _named=named
        )
        return made

    @classmethod
    def of(cls, subject: str, predicate: str, object: Any = None) -> Self:  # noqa: A002 - the document's word
        """A fact whose object is a plain value of Python."""
        canonical(object)  # says better than json does what is wrong with a value
        written = json.dumps(object, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return cls(subject=subject, predicate=predicate, object_json=written)

    @property
    def object(self) -> Any:
        """The object as a plain value; each time a new one, which its reader may change."""
        return parse(self.object_json)

    @property
    def artifact(self) -> ArtifactReference | None:
        """What it refers to, if its object is a reference."""
        named: ArtifactReference | None = self.__dict__["_named"]
        return named

    @property
    def _canonical(self) -> str:
        written: str = self.__dict__["_written"]
        return written


def digest_of(envelope: Envelope, fact: Fact) -> str:
    """What two appends with one id must have in common."""
    return digest_written(
        from_zone=envelope.from_zone,
        to_zone=envelope.to_zone,
        subject=fact.subject,
        predicate=fact.predicate,
        written=fact._canonical,  # noqa: SLF001 - fact and digest are one thing
    )


# -- artifacts ------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """What a store confirms of an artifact, once it is durable."""

    digest: str
    size: int


class ObjectName(NamedTuple):
    """The name of an artifact in one store: a bucket and a key of its owner.

    The owner is the zone that stored it; the empty text means the zones that the store belongs to.
    """

    zone: str
    bucket: str
    key: str

    @classmethod
    def check(cls, bucket: str, key: str, zone: str = "") -> ObjectName:
        """Return the name; InvalidFactError if an artifact cannot have it."""
        if zone != "":
            check_zone("zone", zone)
        check_place(bucket, key)
        return cls(zone, bucket, key)

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}" + (f" of zone {self.zone!r}" if self.zone else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactReference:
    """The name of an artifact, and by what it is recognised."""

    bucket: str
    key: str
    digest: str
    size: int
    media_type: str | None = None
    file_name: str | None = None

    def __post_init__(self) -> None:
        check_place(self.bucket, self.key)
        check_stored(self.digest, self.size)
        for name, longest in (("media_type", MEDIA_TYPE), ("file_name", FILE_NAME)):
            value = getattr(self, name)
            if value is not None:
                _check_text(name, value, longest)

    def as_object(self) -> dict[str, Any]:
        """The object of a fact that refers to it."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


def reference(value: Any) -> ArtifactReference | None:
    """What *value*, the object of a fact, refers to: a reference has bucket, key, digest and size, and all four.

    Whatever it has besides is kept in the fact, and means nothing here.
    """
    if not isinstance(value, dict) or not value.keys() >= _REFERENCE:
        return None
    known = {name: value[name] for name in ArtifactReference.__slots__ if name in value}
    return ArtifactReference(**known)


# -- what a boundary answers ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, init=False)
class FactConfirmation:
    """The fact is durable in the store buffer, at an offset that will never change. It says nothing else.

    Not that it reached a forward buffer, nor a consumer, nor that anybody accepted it. ``duplicate`` when
    it was there before: the rest is then what the first append was told.
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
        # As that of an envelope.
        self.__dict__.update(
            message_id=message_id, offset=offset, epoch=epoch, digest=digest, buffer=buffer, duplicate=duplicate
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFact:
    """A fact as it is read: with the offset and epoch of the store where it was appended first."""

    envelope: Envelope
    fact: Fact
    digest: str
    offset: int
    epoch: str
    stored_at_unix_ms: int

    @property
    def cursor(self) -> Cursor:
        """Of somebody who has come as far as this."""
        return Cursor(self.epoch, self.offset)


# -- checks ---------------------------------------------------------------------------------------------


def check_message_id(message_id: str) -> None:
    """Whether a fact can have that id."""
    given: Any = message_id
    if not isinstance(given, str) or not 1 <= len(given) <= MESSAGE_ID or not _is_visible(given):
        raise InvalidFactError(
            f"a message_id has 1 to {MESSAGE_ID} visible ASCII characters and no blanks, and is not "
            f"{_shown(message_id)}; business_id() makes one of any business fields"
        )


def check_zone(name: str, zone: str) -> None:
    """Whether a zone can be called so; *name* is what it is the zone of."""
    _check_text(name, zone, ZONE)
    if zone != zone.strip():
        raise InvalidFactError(f"{name} is {zone!r}; blanks at the ends are lost on the way, leave them out")


def check_reader(reader: str) -> None:
    """Whether a reader can be called so."""
    _check_text("the name of a reader", reader, READER)


def zone_of_reader(reader: str, pair: Pair) -> str:
    """Return the zone that a reader of *pair* belongs to."""
    return pair.from_zone if reader.startswith(SENDER) else pair.to_zone


def check_stored(digest: str, size: int) -> None:
    """Whether an artifact can be recognised by these."""
    given: Any = digest
    if not isinstance(given, str) or not _DIGEST(given):
        raise InvalidFactError(f"a digest is 'sha256:' and 64 hexadecimal digits, not {given!r:.40}")
    number: Any = size
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= SIZE:
        raise InvalidFactError(f"the size of an artifact is a whole number of bytes, not {number!r:.40}")


def check_place(bucket: str, key: str) -> None:
    """Whether an artifact can have that name, on every file system and object store."""
    given: Any = bucket
    if not isinstance(given, str) or len(bucket) > BUCKET or not _BUCKET(bucket):
        raise InvalidFactError(
            f"a bucket has 1 to {BUCKET} letters, digits, dots, hyphens and underscores and begins with a letter or "
            f"digit, and is not {_shown(bucket)}"
        )
    _check_text("key", key, KEY)
    if len(key.encode()) > KEY:
        raise InvalidFactError(f"the key of an artifact has at most {KEY} bytes, and this one {len(key.encode())}")
    if "\\" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidFactError(
            f"the key {_shown(key)} could lead out of its bucket: leave out backslashes, empty parts, '.' and '..'"
        )


def _is_visible(text: str) -> bool:
    """Whether it has only visible characters of ASCII."""
    return text.isascii() and text.isprintable() and " " not in text


def _check_text(name: str, value: str, longest: int, *, least: int = 1) -> None:
    given: Any = value
    # Whatever can be printed is fit, and this is known at once; some of what cannot is fit too, such as broad blanks.
    if isinstance(given, str) and least <= len(given) <= longest and given.isprintable():
        return
    if not isinstance(given, str):
        raise InvalidFactError(f"{name} is a text, not {type(value).__name__}")
    if not least <= len(value) <= longest:
        raise InvalidFactError(f"{name} has {least} to {longest} characters, not {len(value)}: {_shown(value)}")
    if found := _UNFIT(value):
        raise InvalidFactError(f"{name} holds {found.group()!r}, which is no visible character; leave it out")


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


def contiguous(facts: Iterable[StoredFact], after: int) -> bool:
    """Whether the offsets of *facts* follow each other and *after*, without a gap."""
    return all(stored.offset == place for place, stored in enumerate(facts, after + 1))
