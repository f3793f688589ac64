"""Codec: how a transaction becomes bytes and headers, and comes back.

The wire names are in one table, ``WIRE``; ``docs/spec/wire.md`` is its readable form and a test
keeps the two equal.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeGuard

from pydantic import TypeAdapter

from ergon_framework.connectors.base import ConnectorError, MissingKeyError, UndecodableError
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.strict_json import RepeatedKeyError, parse_finite, refuse_constant, refuse_repeated_keys
from ergon_framework.transaction import HISTORY, Transaction

#: Largest body that is read or written unless the codec is told otherwise.
MAX_BYTES: Final = 1024 * 1024
#: Deepest nesting of arrays and objects in a body.
MAX_DEPTH: Final = 64


class UnencodableError(ConnectorError):
    """A transaction cannot be written to the wire; trying again cannot help."""

    final = True
    code = "unencodable"


# -- the table ----------------------------------------------------------------------------------


class Form(StrEnum):
    """How a header's value is written."""

    #: An enumeration's own takes as long as writing a header.
    __hash__ = str.__hash__

    ID = "id"
    TEXT = "text"
    COUNT = "count"
    TIME = "time"
    HISTORY = "history"
    DEFERRAL = "deferral"
    TRACE = "trace"


class Wire(NamedTuple):
    """One header: which field of the transaction it carries, in which form, and how long it may be."""

    field: str
    header: str
    form: Form
    longest: int
    #: What the transaction has when the header is not there; such a value is not written either.
    absent: Any = None


WIRE: Final = (
    Wire("id", "ergon-id", Form.ID, 256),
    Wire("source", "ergon-source", Form.TEXT, 256, ""),
    Wire("type", "ergon-type", Form.TEXT, 256, ""),
    Wire("schema_version", "ergon-schema-version", Form.COUNT, 9, 1),
    Wire("key", "ergon-key", Form.TEXT, 256),
    Wire("tenant", "ergon-tenant", Form.TEXT, 256),
    Wire("correlation", "ergon-correlation", Form.TEXT, 256),
    Wire("causation", "ergon-causation", Form.ID, 256),
    Wire("created_at", "ergon-created-at", Form.TIME, 35),
    Wire("expires_at", "ergon-expires-at", Form.TIME, 35),
    Wire("attempts", "ergon-attempts", Form.COUNT, 9, 0),
    Wire("history", "ergon-history", Form.HISTORY, 16384, ()),
    Wire("deferral", "ergon-deferral", Form.DEFERRAL, 8192),
    Wire("trace", "traceparent", Form.TRACE, 512),
    Wire("trace", "tracestate", Form.TRACE, 4096),
    Wire("trace", "baggage", Form.TRACE, 8192),
)

#: The id of the key that a body is encrypted with, and the encrypted texts of errors in history and deferral.
ENCRYPTION_KEY: Final = "ergon-encryption-key"
ENCRYPTED_ERRORS: Final = "ergon-encrypted-errors"
#: What a transaction carries from one delivery to the next, and loses when its dead letter is replayed.
PROGRESS: Final = ("ergon-attempts", "ergon-history", "ergon-deferral", ENCRYPTED_ERRORS)
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch
_FIELDS: Final = tuple(row for row in WIRE if row.form is not Form.TRACE)
_TRACE: Final = tuple(row for row in WIRE if row.form is Form.TRACE)


# -- the forms: each reads or refuses with ValueError ----------------------------------------------

_VISIBLE = re.compile(r"[!-~]+").fullmatch
# Line separators are refused with the controls: some brokers' headers end at them.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]").search
_DIGITS = re.compile(r"[0-9]+").fullmatch
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|\+00:00)").fullmatch
_ATTEMPTS: Final = TypeAdapter(tuple[Attempt, ...])


def _read_id(text: str) -> str:
    if not _VISIBLE(text):
        raise ValueError
    return text


def _read_text(text: str) -> str:
    # Blanks at the ends are refused because several brokers strip them on the way.
    if not text or text != text.strip() or _UNFIT(text):
        raise ValueError
    return text


def _read_count(text: str) -> int:
    if not _DIGITS(text):
        raise ValueError
    return int(text)


def _read_time(text: str) -> float:
    second, dot, rest = text.partition(".")
    fraction = rest[:-1] if rest[-1:] == "Z" else ""
    if not (dot and fraction.isdigit() and fraction.isascii() and len(fraction) <= 9):  # noqa: PLR2004 - nanoseconds
        # As we do not write it: without a fraction, or with an offset.
        found = _MOMENT(text)
        if not found:
            raise ValueError
        second, fraction = text[:19], (found[1] or ".0")[1:]
    # To the microsecond, as a datetime has it.
    return (_moment(second) * 1_000_000 + int(fraction[:6].ljust(6, "0"))) / 1_000_000


@lru_cache(64)
def _moment(second: str) -> int:
    """Remembered, as ``_second`` is."""
    if not _MOMENT(f"{second}Z"):
        raise ValueError
    return int(datetime.fromisoformat(second).replace(tzinfo=UTC).timestamp())


def _read_history(text: str) -> tuple[Attempt, ...]:
    return _ATTEMPTS.validate_python(_DECODER.decode(text))[-HISTORY:]


def _read_deferral(text: str) -> Deferral:
    return Deferral.model_validate(_DECODER.decode(text))


# What is written here can be read above: each writer refuses what its reader would.


def _write_id(text: Any) -> str:
    written = str(text)
    if not _VISIBLE(written):
        raise ValueError
    return written


def _write_text(text: Any) -> str:
    return _read_text(str(text))


def _write_count(count: Any) -> str:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise TypeError
    return str(count)


def _write_time(moment: float) -> str:
    whole = math.floor(moment)
    micros = round((moment - whole) * 1_000_000)
    if micros == 1_000_000:  # noqa: PLR2004 - as many as a second has
        whole, micros = whole + 1, 0
    return f"{_second(whole)}.{micros:06d}Z"


@lru_cache(64)
def _second(moment: int) -> str:
    """Remembered: many are sent in one second, and a calendar is slow."""
    return datetime.fromtimestamp(moment, UTC).isoformat().removesuffix("+00:00")


def _write_history(history: tuple[Attempt, ...]) -> str:
    longest = next(row.longest for row in WIRE if row.form is Form.HISTORY)
    dumped = [attempt.model_dump(mode="json") for attempt in history[-HISTORY:]]
    while len(text := _ASCII_ENCODER.encode(dumped)) > longest:
        # The latest attempts explain the most, so the oldest go first.
        del dumped[0]
    return text


def _write_deferral(deferral: Deferral) -> str:
    return _ASCII_ENCODER.encode(deferral.model_dump(mode="json"))


_READ: Final[dict[Form, Callable[[str], Any]]] = {
    Form.ID: _read_id,
    Form.TEXT: _read_text,
    Form.COUNT: _read_count,
    Form.TIME: _read_time,
    Form.HISTORY: _read_history,
    Form.DEFERRAL: _read_deferral,
    Form.TRACE: _read_text,
}
_WRITE: Final[dict[Form, Callable[[Any], str]]] = {
    Form.ID: _write_id,
    Form.TEXT: _write_text,
    Form.COUNT: _write_count,
    Form.TIME: _write_time,
    Form.HISTORY: _write_history,
    Form.DEFERRAL: _write_deferral,
}
#: By header, what is needed to read it, laid out once: it is asked for every header of every message. What belongs to
#: a trace has no reader, because it is never refused.
_READERS: Final[dict[str, tuple[str, Callable[[str], Any] | None, int, Wire]]] = {
    row.header: (row.field, None if row.form is Form.TRACE else _READ[row.form], row.longest, row) for row in WIRE
}
# The same text in nearly every message of a queue.
_READERS["ergon-source"] = "source", lru_cache(64)(_read_text), *_READERS["ergon-source"][2:]
#: What nearly every transaction has, and what few have: of the second, one comparison says that there is nothing.
_USUAL: Final = tuple(row for row in _FIELDS if row.field in {"id", "source", "created_at"})
_RARE: Final = tuple(row for row in _FIELDS if row not in _USUAL)
_usual: Final = attrgetter(*(row.field for row in _USUAL))
_rare: Final = attrgetter(*(row.field for row in _RARE))
_NOTHING_RARE: Final = tuple(row.absent for row in _RARE)


# -- JSON, strictly -------------------------------------------------------------------------------


def _writer() -> Callable[[Any], str]:
    """Writes JSON as an encoder does, which for every body makes anew what is made once here."""
    encoder = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without it
        return encoder.encode
    parts = make(None, encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)  # noqa: FBT003
    return lambda value: "".join(parts(value, 0))


#: Strict JSON without blanks, of what JSON knows.
to_json: Final = _writer()
_ASCII_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(
    parse_float=parse_finite, parse_constant=refuse_constant, object_pairs_hook=refuse_repeated_keys
)
#: Its inner part, which reads one value and says where that ends.
_scan: Final[Callable[[str, int], tuple[Any, int]]] = _DECODER.scan_once  # type: ignore[attr-defined] # not in its stubs


def _from_json(text: str) -> Any:
    """What *text* says, by the short way where there is nothing around it, as nearly always."""
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        end = -1
    return value if end == len(text) else _DECODER.decode(text)


# Every branch is possessive and the closing quote optional: no input makes it look twice.
_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL).finditer


def _too_deep(body: bytes) -> bool:
    """Whether the brackets of *body* nest deeper than MAX_DEPTH; asked before a recursive reader is."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _BRACKETS(body):
        first = match[0][:1]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif first in b"]}":
            depth -= 1
    return False


# -- the codec ------------------------------------------------------------------------------------


class Codec(Protocol):
    """What turns a transaction into a body and headers, and back."""

    @property
    def max_bytes(self) -> int | None:
        """The largest body it takes; None where it does not care."""

    def encode(self, transaction: Transaction) -> tuple[bytes, dict[str, str]]:
        """The body and the headers of *transaction*, or UnencodableError."""

    def decode(self, body: bytes, headers: Mapping[str, str], *, source: str = "") -> Transaction:
        """The transaction, or UndecodableError; *source* is its source where no header names one.

        MissingKeyError for a message that is encrypted, where the codec does not have its key.
        """


class JsonCodec:
    """JSON bodies, strictly: UTF-8, no NaN, no key twice in an object, bounded in size and depth.

    What it has decoded it can encode again. Typed payloads are not its business: it reads and
    writes what JSON knows.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {max_bytes!r}")
        self._max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    def encode(self, transaction: Transaction) -> tuple[bytes, dict[str, str]]:
        return self._body(transaction), write_headers(transaction)

    def decode(self, body: bytes, headers: Mapping[str, str], *, source: str = "") -> Transaction:
        if ENCRYPTION_KEY in headers:
            raise MissingKeyError.of(read_key_id(headers))
        fields = read_headers(headers)
        fields.setdefault("source", source)
        return Transaction(payload=self._payload(body), **fields)

    def _body(self, transaction: Transaction) -> bytes:
        problem = ""
        try:
            body = to_json(transaction.payload).encode()
        except (TypeError, ValueError, RecursionError) as error:
            # Kept without the error itself, which may quote the payload.
            problem = type(error).__name__
        if problem:
            raise UnencodableError(
                f"the payload of transaction {transaction.id!r} (a {type(transaction.payload).__name__}) cannot be "
                f"written as JSON ({problem}); hand over plain finite JSON values, for a model its dump in JSON mode"
            )
        if reason := self._unfit(body):
            raise UnencodableError(f"the payload of transaction {transaction.id!r} {reason}")
        return body

    def _payload(self, body: bytes) -> Any:
        reason = self._unfit(body)
        if not reason:
            try:
                payload = _from_json(body.decode())
                if b"\\u" in body:
                    # Half a surrogate pair can be escaped into JSON but never written again.
                    to_json(payload).encode()
            except UnicodeError as error:
                reason = f"is not UTF-8 or holds half a character (at {error.start})"  # type: ignore[attr-defined]
            except json.JSONDecodeError as error:
                reason = f"is not JSON (at character {error.pos})"
            except RepeatedKeyError:
                reason = "names one key twice in an object"
            except (ValueError, RecursionError):
                reason = "holds a number that JSON or a float cannot hold"
        # Raised outside the handlers: a JSONDecodeError carries the whole document with it.
        if reason:
            raise UndecodableError(f"a body of {len(body)} bytes {reason}")
        return payload

    def _unfit(self, body: bytes) -> str:
        if len(body) > self._max_bytes:
            return f"takes {len(body)} bytes; the limit is {self._max_bytes}"
        if _too_deep(body):
            return f"nests deeper than {MAX_DEPTH} levels"
        return ""


def write_headers(transaction: Transaction) -> dict[str, str]:
    """The envelope of *transaction* as headers, for any codec; UnencodableError where it does not fit."""
    headers: dict[str, str] = {}
    _write(_USUAL, _usual(transaction), headers, transaction.id)
    rare = _rare(transaction)
    if rare != _NOTHING_RARE:
        _write(_RARE, rare, headers, transaction.id)
    if transaction.trace:
        for row in _TRACE:
            value = transaction.trace.get(row.header)
            if value is not None and _trace_fits(row, value):
                headers[row.header] = value
    return headers


def _write(rows: tuple[Wire, ...], values: tuple[Any, ...], headers: dict[str, str], name: str) -> None:
    for (field, header, form, longest, absent), value in zip(rows, values, strict=True):
        if value is None or value == absent:
            continue
        try:
            text = _WRITE[form](value)
        except (TypeError, ValueError, OverflowError, OSError):
            text = None
        if text is None or len(text) > longest:
            raise UnencodableError(
                f"{field} of transaction {name[:64]!r} does not fit header {header!r}, which holds "
                f"a {form.value} of at most {longest} characters"
            )
        headers[header] = text


def read_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an envelope, for any codec; UndecodableError where a header is missing or hostile.

    Headers that are not in the table are ignored, and so is a trace header that does not fit: a
    broken trace starts anew, as W3C Trace Context asks, and costs nobody the message.
    """
    fields: dict[str, Any] = {}
    trace: dict[str, str] = {}
    given: Mapping[str, Any] = headers  # brokers have headers that are no text
    # Over what is there and not over the table: a message has four headers or five.
    for name, text in given.items():
        known = _READERS.get(name)
        if known is None or text is None:
            continue
        field, read, longest, row = known
        if read is None:
            if _trace_fits(row, text):
                trace[name] = text
            continue
        if isinstance(text, str) and len(text) <= longest:
            try:
                fields[field] = read(text)
                continue
            except (ValueError, RecursionError):
                pass  # said below, outside the handler: the cause would quote the value
        raise _unreadable(row, text)
    if "id" not in fields:
        raise UndecodableError("header 'ergon-id' is missing; without it a redelivery could not be recognised")
    if trace:
        fields["trace"] = trace
    return fields


def remove_progress(headers: Mapping[str, str]) -> dict[str, str]:
    """Return *headers* with nothing counted against their message: no attempts, no history, no deferrals."""
    return {name: text for name, text in headers.items() if name not in PROGRESS}


def read_key_id(headers: Mapping[str, str]) -> str:
    """Return the id of the key that the body of a message is encrypted with; UndecodableError for what is no id."""
    given: Any = headers[ENCRYPTION_KEY]
    if not is_key_id(given):
        raise UndecodableError(f"header {ENCRYPTION_KEY!r} is not the id of a key")
    return str(given)


def is_key_id(text: object) -> bool:
    """Return whether *text* can be the id of a key: 1 to 64 letters, digits, dots, underscores and hyphens."""
    return isinstance(text, str) and _KEY_ID(text) is not None


def _unreadable(row: Wire, text: Any) -> UndecodableError:
    size = f"{len(text)} characters" if isinstance(text, str) else f"a {type(text).__name__}"
    return UndecodableError(
        f"header {row.header!r} ({size}) is not a {row.form.value} of at most {row.longest} characters"
    )


def _trace_fits(row: Wire, text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= row.longest and text == text.strip() and not _UNFIT(text)


# -- what could not be read -------------------------------------------------------------------------


class Decoded(NamedTuple):
    """What came of a message: its transaction, or a stand-in with the bytes and the error."""

    transaction: Transaction
    error: UndecodableError | MissingKeyError | None = None


def decode(codec: Codec, body: bytes, headers: Mapping[str, str], *, source: str) -> Decoded:
    """Read a message with *codec*, and never raise: one bad message must not stop a batch.

    The stand-in's id is the header's where that is sound, else made from body and headers, so
    that it is the same at every delivery. Without the key of a message, its envelope is still read.
    """
    problem: UndecodableError | MissingKeyError
    try:
        return Decoded(codec.decode(body, headers, source=source))
    except (UndecodableError, MissingKeyError) as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - the boundary to a codec that is not ours
        problem = UndecodableError(f"the codec failed on a body of {len(body)} bytes with {type(error).__name__}")
        if ENCRYPTION_KEY in headers and is_key_id(headers[ENCRYPTION_KEY]):
            problem = MissingKeyError.of(headers[ENCRYPTION_KEY])
    if isinstance(problem, MissingKeyError):
        problem.errors = headers.get(ENCRYPTED_ERRORS)
        try:
            return Decoded(Transaction(payload=body, **{"source": source, **read_headers(headers)}), problem)
        except UndecodableError as error:
            # No key makes it readable, and without an envelope no broker could keep since when it waits for one.
            problem = error
    given = headers.get("ergon-id")
    return Decoded(Transaction(given if _is_sound(given) else _digest(body, headers), body, source=source), problem)


def _is_sound(given: str | None) -> TypeGuard[str]:
    """Whether a header can be an id."""
    return isinstance(given, str) and bool(given) and len(given) <= WIRE[0].longest and bool(_VISIBLE(given))


def describe_unread(size: int, headers: Mapping[str, str], *, source: str, limit: int | None) -> Decoded:
    """Return the envelope of a message whose body of *size* bytes was not loaded, with an error if *limit* is less."""
    problem = None
    if limit is not None and size > limit:
        problem = UndecodableError(
            f"a body of {size} bytes is over the limit of {limit} and was not loaded; "
            "to admit it, raise max_bytes of the codec and replay the dead letter"
        )
    try:
        fields = read_headers(headers)
    except UndecodableError:
        given = headers.get("ergon-id")
        fields = {"id": given if _is_sound(given) else _digest(str(size).encode(), headers)}
    fields.setdefault("source", source)
    return Decoded(Transaction(payload=None, **fields), problem)


def _digest(body: bytes, headers: Mapping[str, str]) -> str:
    digest = hashlib.sha256(repr(sorted((str(name), str(text)) for name, text in headers.items())).encode())
    digest.update(body)
    return f"undecodable-{digest.hexdigest()[:32]}"
