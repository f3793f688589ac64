"""Codec: encodes a transaction as bytes (its payload) and headers (all other fields), and decodes it.

The wire names are in one table, ``WIRE``; ``docs/spec/wire.md`` is its readable form, and a test compares the two.
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

from ergon_framework._util.strict_json import RepeatedKeyError, parse_finite, reject_constant, reject_repeated_keys
from ergon_framework.connectors.base import ConnectorError, MissingKeyError, UndecodableError
from ergon_framework.connectors.payload_json import MAX_DEPTH, PayloadError, encode_payload, to_json
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.transaction import MAX_HISTORY, Transaction

#: Maximum bytes of a body that is read or written unless the codec is configured otherwise.
MAX_BYTES: Final = 1024 * 1024


class UnencodableError(ConnectorError):
    """A transaction cannot be encoded; a retry cannot help."""

    final = True
    code = "unencodable"


# -- the table ----------------------------------------------------------------------------------


class HeaderFormat(StrEnum):
    """The format of a header's value.

    An id is visible ASCII; a text has no control characters and no outer blanks; a count is decimal digits, an integer
    may have a minus sign before them; a time is ISO 8601 in UTC; history and deferral are JSON; a trace is text, and an
    invalid one is ignored instead of rejected.
    """

    #: The hash function of an enumeration takes as long as writing a header.
    __hash__ = str.__hash__

    ID = "id"
    TEXT = "text"
    COUNT = "count"
    INTEGER = "integer"
    TIME = "time"
    HISTORY = "history"
    DEFERRAL = "deferral"
    TRACE = "trace"


class HeaderSpec(NamedTuple):
    """One header: the transaction's field that it carries, its format, and its largest length."""

    field: str
    header: str
    format: HeaderFormat
    max_chars: int
    #: The value of the transaction's field when the header is missing; such a value is not written either.
    default: Any = None


#: The header with the earliest time of a delivery.
NOT_BEFORE: Final = "ergon-not-before"

WIRE: Final = (
    HeaderSpec("id", "ergon-id", HeaderFormat.ID, 256),
    HeaderSpec("source", "ergon-source", HeaderFormat.TEXT, 256, ""),
    HeaderSpec("type", "ergon-type", HeaderFormat.TEXT, 256, ""),
    HeaderSpec("schema_version", "ergon-schema-version", HeaderFormat.COUNT, 9, 1),
    HeaderSpec("key", "ergon-key", HeaderFormat.TEXT, 256),
    HeaderSpec("tenant", "ergon-tenant", HeaderFormat.TEXT, 256),
    HeaderSpec("correlation", "ergon-correlation", HeaderFormat.TEXT, 256),
    HeaderSpec("causation", "ergon-causation", HeaderFormat.ID, 256),
    HeaderSpec("created_at", "ergon-created-at", HeaderFormat.TIME, 35),
    HeaderSpec("expires_at", "ergon-expires-at", HeaderFormat.TIME, 35),
    HeaderSpec("attempts", "ergon-attempts", HeaderFormat.COUNT, 9, 0),
    HeaderSpec("history", "ergon-history", HeaderFormat.HISTORY, 16384, ()),
    HeaderSpec("deferral", "ergon-deferral", HeaderFormat.DEFERRAL, 8192),
    HeaderSpec("not_before", NOT_BEFORE, HeaderFormat.TIME, 35),
    HeaderSpec("priority", "ergon-priority", HeaderFormat.INTEGER, 9, 0),
    HeaderSpec("trace", "traceparent", HeaderFormat.TRACE, 512),
    HeaderSpec("trace", "tracestate", HeaderFormat.TRACE, 4096),
    HeaderSpec("trace", "baggage", HeaderFormat.TRACE, 8192),
)

#: The id of the key that encrypts the body, and the encrypted error texts of history and deferral.
ENCRYPTION_KEY: Final = "ergon-encryption-key"
ENCRYPTED_ERRORS: Final = "ergon-encrypted-errors"
#: The headers that carry progress from one delivery to the next, and the delay; a replay of a dead letter drops them.
PROGRESS_HEADERS: Final = ("ergon-attempts", "ergon-history", "ergon-deferral", NOT_BEFORE, ENCRYPTED_ERRORS)
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch
_FIELD_HEADERS: Final = tuple(row for row in WIRE if row.format is not HeaderFormat.TRACE)
_TRACE_HEADERS: Final = tuple(row for row in WIRE if row.format is HeaderFormat.TRACE)


# -- the formats: each reader returns a value or raises ValueError ---------------------------------

_VISIBLE = re.compile(r"[!-~]+").fullmatch
# Line separators are rejected with the control characters: the headers of some brokers end at them.
_INVALID_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]").search
_DIGITS = re.compile(r"[0-9]+").fullmatch
_INTEGER = re.compile(r"-?[0-9]+").fullmatch
_TIMESTAMP = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|\+00:00)").fullmatch
_ATTEMPTS: Final = TypeAdapter(tuple[Attempt, ...])


def _read_id(text: str) -> str:
    if not _VISIBLE(text):
        raise ValueError
    return text


def _read_text(text: str) -> str:
    # Leading and trailing blanks are rejected because several brokers strip them in transit.
    if not text or text != text.strip() or _INVALID_CHARACTER(text):
        raise ValueError
    return text


def _read_count(text: str) -> int:
    if not _DIGITS(text):
        raise ValueError
    return int(text)


def _read_integer(text: str) -> int:
    if not _INTEGER(text):
        raise ValueError
    return int(text)


def _read_time(text: str) -> float:
    second, dot, rest = text.partition(".")
    fraction = rest[:-1] if rest[-1:] == "Z" else ""
    if not (dot and fraction.isdigit() and fraction.isascii() and len(fraction) <= 9):  # noqa: PLR2004 - nanoseconds
        # A format that this codec does not write: without a fraction, or with an offset.
        match = _TIMESTAMP(text)
        if not match:
            raise ValueError
        second, fraction = text[:19], (match[1] or ".0")[1:]
    # To the microsecond, the precision of a datetime.
    return (_parse_second(second) * 1_000_000 + int(fraction[:6].ljust(6, "0"))) / 1_000_000


@lru_cache(64)
def _parse_second(second: str) -> int:
    """Return *second* as seconds since the epoch; cached like ``_format_second``."""
    if not _TIMESTAMP(f"{second}Z"):
        raise ValueError
    return int(datetime.fromisoformat(second).replace(tzinfo=UTC).timestamp())


def _read_history(text: str) -> tuple[Attempt, ...]:
    return _ATTEMPTS.validate_python(_DECODER.decode(text))[-MAX_HISTORY:]


def _read_deferral(text: str) -> Deferral:
    return Deferral.model_validate(_DECODER.decode(text))


# Each writer rejects what its reader above would reject, so that everything written can be read.


def _write_id(text: Any) -> str:
    encoded = str(text)
    if not _VISIBLE(encoded):
        raise ValueError
    return encoded


def _write_text(text: Any) -> str:
    return _read_text(str(text))


def _write_count(count: Any) -> str:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise TypeError
    return str(count)


def _write_integer(number: Any) -> str:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError
    return str(number)


def _write_time(timestamp: float) -> str:
    second = math.floor(timestamp)
    micros = round((timestamp - second) * 1_000_000)
    if micros == 1_000_000:  # noqa: PLR2004 - microseconds per second
        second, micros = second + 1, 0
    return f"{_format_second(second)}.{micros:06d}Z"


@lru_cache(64)
def _format_second(second: int) -> str:
    """Format a whole second; cached: many messages are sent in one second, and calendar code is slow."""
    return datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")


def _write_history(history: tuple[Attempt, ...]) -> str:
    max_chars = next(row.max_chars for row in WIRE if row.format is HeaderFormat.HISTORY)
    items = [attempt.model_dump(mode="json") for attempt in history[-MAX_HISTORY:]]
    while len(text := _ASCII_ENCODER.encode(items)) > max_chars:
        # The latest attempts explain the most, so the oldest are dropped first.
        del items[0]
    return text


def _write_deferral(deferral: Deferral) -> str:
    return _ASCII_ENCODER.encode(deferral.model_dump(mode="json"))


_READER_BY_FORMAT: Final[dict[HeaderFormat, Callable[[str], Any]]] = {
    HeaderFormat.ID: _read_id,
    HeaderFormat.TEXT: _read_text,
    HeaderFormat.COUNT: _read_count,
    HeaderFormat.INTEGER: _read_integer,
    HeaderFormat.TIME: _read_time,
    HeaderFormat.HISTORY: _read_history,
    HeaderFormat.DEFERRAL: _read_deferral,
    HeaderFormat.TRACE: _read_text,
}
_WRITER_BY_FORMAT: Final[dict[HeaderFormat, Callable[[Any], str]]] = {
    HeaderFormat.ID: _write_id,
    HeaderFormat.TEXT: _write_text,
    HeaderFormat.COUNT: _write_count,
    HeaderFormat.INTEGER: _write_integer,
    HeaderFormat.TIME: _write_time,
    HeaderFormat.HISTORY: _write_history,
    HeaderFormat.DEFERRAL: _write_deferral,
}
#: By header, all that is needed to read it, prepared once because it is used for every header of every message.
#: Trace headers have no reader, because they are never rejected.
_READER_BY_HEADER: Final[dict[str, tuple[str, Callable[[str], Any] | None, int, HeaderSpec]]] = {
    row.header: (
        row.field,
        None if row.format is HeaderFormat.TRACE else _READER_BY_FORMAT[row.format],
        row.max_chars,
        row,
    )
    for row in WIRE
}
# The same value in nearly every message of a queue.
_READER_BY_HEADER["ergon-source"] = "source", lru_cache(64)(_read_text), *_READER_BY_HEADER["ergon-source"][2:]
#: The fields that nearly every transaction has, and those that few have: one comparison shows that the rare ones all
#: have their defaults.
_COMMON_HEADERS: Final = tuple(row for row in _FIELD_HEADERS if row.field in {"id", "source", "created_at"})
_RARE_HEADERS: Final = tuple(row for row in _FIELD_HEADERS if row not in _COMMON_HEADERS)
_get_common: Final = attrgetter(*(row.field for row in _COMMON_HEADERS))
_get_rare: Final = attrgetter(*(row.field for row in _RARE_HEADERS))
_RARE_DEFAULTS: Final = tuple(row.default for row in _RARE_HEADERS)


# -- JSON, strictly -------------------------------------------------------------------------------


_ASCII_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(
    parse_float=parse_finite, parse_constant=reject_constant, object_pairs_hook=reject_repeated_keys
)
#: The inner part of the decoder, which reads one value and returns its end.
_scan_value: Final[Callable[[str, int], tuple[Any, int]]] = _DECODER.scan_once  # type: ignore[attr-defined] # not in its stubs


def _from_json(text: str) -> Any:
    """Parse *text*, by the short way if nothing surrounds the value, the common case."""
    try:
        value, end = _scan_value(text, 0)
    except StopIteration:
        end = -1
    return value if end == len(text) else _DECODER.decode(text)


# Every branch is possessive and the closing quote optional, so that no input causes backtracking.
_FIND_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL).finditer


def _is_too_deep(body: bytes) -> bool:
    """Return whether the brackets of *body* nest deeper than MAX_DEPTH; called before the recursive parser."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _FIND_BRACKETS(body):
        bracket = match[0][:1]
        if bracket in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif bracket in b"]}":
            depth -= 1
    return False


# -- the codec ------------------------------------------------------------------------------------


class Codec(Protocol):
    """Encodes a transaction as a body and headers, and decodes it."""

    @property
    def max_bytes(self) -> int | None:
        """The largest body that it accepts; None for no limit."""

    def encode(self, transaction: Transaction) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of *transaction*, or raise UnencodableError."""

    def decode(self, body: bytes, headers: Mapping[str, str], *, source: str = "") -> Transaction:
        """Return the transaction; *source* is its source if no header names one.

        Raises UndecodableError, or MissingKeyError for an encrypted message whose key the codec does not have.
        """


class JsonCodec:
    """JSON bodies, strictly: UTF-8, no NaN, no repeated key in an object, bounded in size and depth.

    It can encode everything that it has decoded. It also encodes models, dataclasses, and values such as datetime and
    Decimal, each in one canonical form; it decodes the types of JSON, from which a task reads its declared type.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {max_bytes!r}")
        self._max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    def encode(self, transaction: Transaction) -> tuple[bytes, dict[str, str]]:
        return self._encode_body(transaction), write_headers(transaction)

    def decode(self, body: bytes, headers: Mapping[str, str], *, source: str = "") -> Transaction:
        if ENCRYPTION_KEY in headers:
            raise MissingKeyError.for_key(read_key_id(headers))
        fields = read_headers(headers)
        fields.setdefault("source", source)
        return Transaction(payload=self._decode_body(body), **fields)

    def _encode_body(self, transaction: Transaction) -> bytes:
        problem = ""
        try:
            body = encode_payload(transaction.payload)
        except PayloadError as error:
            problem = str(error)
        except (TypeError, ValueError, RecursionError) as error:
            # The error itself is not kept, because it may quote the payload.
            problem = f"it is a {type(transaction.payload).__name__} ({type(error).__name__})"
        if problem:
            raise UnencodableError(
                f"the payload of transaction {transaction.id!r} cannot be written as JSON: {problem}"
            )
        if reason := self._find_problem(body):
            raise UnencodableError(f"the payload of transaction {transaction.id!r} {reason}")
        return body

    def _decode_body(self, body: bytes) -> Any:
        reason = self._find_problem(body)
        if not reason:
            try:
                payload = _from_json(body.decode())
                if b"\\u" in body:
                    # JSON can escape half a surrogate pair, but UTF-8 cannot encode it again.
                    to_json(payload).encode()
            except UnicodeError as error:
                reason = f"is not UTF-8 or has half a surrogate pair (at {error.start})"  # type: ignore[attr-defined]
            except json.JSONDecodeError as error:
                reason = f"is not JSON (at character {error.pos})"
            except RepeatedKeyError:
                reason = "has a duplicate key in an object"
            except (ValueError, RecursionError):
                reason = "contains a number that JSON or a float cannot represent"
        # Raised outside the handlers: a JSONDecodeError carries the whole document with it.
        if reason:
            # The log entry and the dead letter have the id and the queue.
            raise UndecodableError(f"the body ({len(body)} bytes) {reason}; correct the producer of the message")
        return payload

    def _find_problem(self, body: bytes) -> str:
        if len(body) > self._max_bytes:
            return f"is {len(body)} bytes, the maximum is {self._max_bytes}"
        if _is_too_deep(body):
            return f"is nested more than {MAX_DEPTH} levels deep"
        return ""


def write_headers(transaction: Transaction) -> dict[str, str]:
    """Return the envelope of *transaction* as headers, for any codec; raise UnencodableError if it does not fit."""
    headers: dict[str, str] = {}
    _write_fields(_COMMON_HEADERS, _get_common(transaction), headers, transaction.id)
    rare_values = _get_rare(transaction)
    if rare_values != _RARE_DEFAULTS:
        _write_fields(_RARE_HEADERS, rare_values, headers, transaction.id)
    if transaction.trace:
        for row in _TRACE_HEADERS:
            value = transaction.trace.get(row.header)
            if value is not None and _is_valid_trace(row, value):
                headers[row.header] = value
    return headers


def _write_fields(rows: tuple[HeaderSpec, ...], values: tuple[Any, ...], headers: dict[str, str], name: str) -> None:
    """Write *values*, the fields of *rows*, into *headers*, without those that have their default."""
    for (field, header, header_format, max_chars, default), value in zip(rows, values, strict=True):
        if value is None or value == default:
            continue
        try:
            text = _WRITER_BY_FORMAT[header_format](value)
        except (TypeError, ValueError, OverflowError, OSError):
            text = None
        if text is None or len(text) > max_chars:
            raise UnencodableError(
                f"{field} of transaction {name[:64]!r} does not fit header {header!r}, which holds "
                f"a {header_format.value} of at most {max_chars} characters"
            )
        headers[header] = text


def read_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an envelope, for any codec; UndecodableError if a header is missing or invalid.

    Headers that are not in the table are ignored, and so is an invalid trace header: a broken trace starts from
    scratch, as W3C Trace Context requires, and the message stays readable.
    """
    fields: dict[str, Any] = {}
    trace: dict[str, str] = {}
    raw_headers: Mapping[str, Any] = headers  # brokers have headers that are not text
    # Iterates over the message's headers and not the table: a message has four or five headers.
    for name, text in raw_headers.items():
        entry = _READER_BY_HEADER.get(name)
        if entry is None or text is None:
            continue
        field, reader, max_chars, row = entry
        if reader is None:
            if _is_valid_trace(row, text):
                trace[name] = text
            continue
        if isinstance(text, str) and len(text) <= max_chars:
            try:
                fields[field] = reader(text)
                continue
            except (ValueError, RecursionError):
                pass  # raised below, outside the handler: the cause would quote the value
        raise _unreadable_error(row, text)
    if "id" not in fields:
        raise UndecodableError(
            "header 'ergon-id' is missing; without it a redelivery cannot be detected; set it in the producer"
        )
    if trace:
        fields["trace"] = trace
    return fields


def read_not_before(headers: Mapping[str, Any]) -> float | None:
    """Return the earliest time of a delivery that *headers* state; None if they state none, or an invalid one."""
    text = headers.get(NOT_BEFORE)
    try:
        return _read_time(text) if isinstance(text, str) else None
    except ValueError:
        return None


def remove_progress(headers: Mapping[str, str]) -> dict[str, str]:
    """Return *headers* without progress: no attempts, no history, no deferrals, no delay."""
    return {name: text for name, text in headers.items() if name not in PROGRESS_HEADERS}


def read_key_id(headers: Mapping[str, str]) -> str:
    """Return the id of the key that encrypts the body of a message; UndecodableError if it is not a key id."""
    key_id: Any = headers[ENCRYPTION_KEY]
    if not is_key_id(key_id):
        raise UndecodableError(f"header {ENCRYPTION_KEY!r} is not the id of a key")
    return str(key_id)


def is_key_id(text: object) -> bool:
    """Return whether *text* can be the id of a key: 1 to 64 letters, digits, dots, underscores and hyphens."""
    return isinstance(text, str) and _KEY_ID(text) is not None


def _unreadable_error(row: HeaderSpec, text: Any) -> UndecodableError:
    size = f"{len(text)} characters" if isinstance(text, str) else f"a {type(text).__name__}"
    return UndecodableError(
        f"header {row.header!r} ({size}) is not a {row.format.value} of at most {row.max_chars} characters"
    )


def _is_valid_trace(row: HeaderSpec, text: Any) -> bool:
    return (
        isinstance(text, str)
        and 0 < len(text) <= row.max_chars
        and text == text.strip()
        and not _INVALID_CHARACTER(text)
    )


# -- messages that could not be decoded -------------------------------------------------------------


class DecodeResult(NamedTuple):
    """The result of decoding a message: its transaction, or a stand-in with the bytes and the error."""

    transaction: Transaction
    error: UndecodableError | MissingKeyError | None = None


def decode(codec: Codec, body: bytes, headers: Mapping[str, str], *, source: str) -> DecodeResult:
    """Decode a message with *codec*, and never raise: one bad message must not stop a batch.

    The stand-in's id is the header's if that is valid, else derived from body and headers, so that it is the same at
    every delivery. Without the key of a message, its envelope is still read.
    """
    problem: UndecodableError | MissingKeyError
    try:
        return DecodeResult(codec.decode(body, headers, source=source))
    except (UndecodableError, MissingKeyError) as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - the boundary to a third-party codec
        problem = UndecodableError(f"the codec failed on a body of {len(body)} bytes with {type(error).__name__}")
        if ENCRYPTION_KEY in headers and is_key_id(headers[ENCRYPTION_KEY]):
            problem = MissingKeyError.for_key(headers[ENCRYPTION_KEY])
    if isinstance(problem, MissingKeyError):
        problem.errors = headers.get(ENCRYPTED_ERRORS)
        try:
            return DecodeResult(Transaction(payload=body, **{"source": source, **read_headers(headers)}), problem)
        except UndecodableError as error:
            # Waiting for the key is pointless: the envelope, which would record since when it waits, is invalid too.
            problem = error
    header_id = headers.get("ergon-id")
    return DecodeResult(
        Transaction(body, id=header_id if _is_valid_id(header_id) else _derive_id(body, headers), source=source),
        problem,
    )


def encode_unchanged(codec: Codec, transaction: Transaction) -> tuple[bytes, dict[str, str]]:
    """Encode a transaction that was read from a message.

    UnencodableError if its payload is the body of a message that could not be decoded: the codec would encode these
    bytes as a value, and the message would become another one.
    """
    body, headers = codec.encode(transaction)
    if isinstance(transaction.payload, bytes | bytearray):
        payload = decode(codec, body, headers, source=transaction.source).transaction.payload
        if payload != transaction.payload:
            raise UnencodableError(
                f"the payload of transaction {transaction.id[:64]!r} is the body of a message that could not be decoded"
            )
    return body, headers


def _is_valid_id(text: str | None) -> TypeGuard[str]:
    """Return whether a header can be an id."""
    return isinstance(text, str) and bool(text) and len(text) <= WIRE[0].max_chars and bool(_VISIBLE(text))


def describe_unread(size: int, headers: Mapping[str, str], *, source: str, limit: int | None) -> DecodeResult:
    """Return the envelope of a message whose body of *size* bytes was not loaded, with an error if over *limit*."""
    problem = None
    if limit is not None and size > limit:
        problem = UndecodableError(
            f"the body ({size} bytes) is over the maximum of {limit} and was not loaded; "
            "to admit it, raise max_bytes of the codec and replay the dead letter"
        )
    try:
        fields = read_headers(headers)
    except UndecodableError:
        header_id = headers.get("ergon-id")
        fields = {"id": header_id if _is_valid_id(header_id) else _derive_id(str(size).encode(), headers)}
    fields.setdefault("source", source)
    return DecodeResult(Transaction(payload=None, **fields), problem)


def _derive_id(body: bytes, headers: Mapping[str, str]) -> str:
    digest = hashlib.sha256(repr(sorted((str(name), str(text)) for name, text in headers.items())).encode())
    digest.update(body)
    return f"undecodable-{digest.hexdigest()[:32]}"
