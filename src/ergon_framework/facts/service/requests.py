"""Requests: the bytes that a caller sends, read and checked. What is wrong with them is told, and nothing is believed.

It knows no connection and no store, so that a fuzzer can be let loose on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from ergon_framework.facts.boundary import Appending
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import (
    SIZE,
    Cursor,
    ObjectName,
    Pair,
    Stored,
    check_message_id,
    check_reader,
    check_zone,
)
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.batches import read_facts
from ergon_framework.facts.service.messages import read_appending, read_cursor, read_pair, read_stored

#: The most facts in one call, and the most bytes in one message; each single fact that the model allows fits.
FACTS: Final = 1_000
MESSAGE: Final = 4 * 1024 * 1024
#: The most bytes of a request that brings neither facts nor bytes of an artifact.
PLAIN: Final = 64 * 1024
#: The longest name of somebody on whose behalf an operator acts.
BY: Final = 256

M = TypeVar("M", bound=Message)
CheckZones: TypeAlias = Callable[[Collection[str]], None]


class Fetch(NamedTuple):
    """Who wants to read what."""

    reader: str
    pair: Pair
    limit: int
    after: Cursor | None


class Put(NamedTuple):
    """Which artifact is going to come."""

    bucket: str
    key: str
    expected: Stored | None
    begin: int
    zone: str


def parse(kind: type[M], data: bytes, limit: int = PLAIN) -> M:
    """The message that *data* is, of at most *limit* bytes."""
    if len(data) > limit:
        raise InvalidFactError(f"a {kind.__name__} has at most {limit:,} bytes, and this one has {len(data):,}")
    try:
        message: M = kind.FromString(data)
    except DecodeError as error:
        raise InvalidFactError(f"the request is no {kind.__name__} of ergon.facts.v1: {error}") from error
    return message


def _any_zone(zones: Collection[str]) -> None:
    """Let all of *zones* append."""


def append_fact(data: bytes, check_zones: CheckZones = _any_zone) -> Appending:
    """*check_zones* is called with the zones in whose name it is appended, before what takes long."""
    message = parse(wire.Appending, data, MESSAGE)
    check_zones({message.envelope.from_zone} - {""})
    return read_appending(message)


def append_facts(data: bytes, check_zones: CheckZones = _any_zone) -> Sequence[Appending | InvalidFactError]:
    """One that is malformed is an error of its own, and its neighbours are not; *check_zones* as above."""
    facts = parse(wire.AppendFactsRequest, data, MESSAGE).facts
    if len(facts.message_ids) > FACTS:
        raise InvalidFactError(
            f"one call appends at most {FACTS:,} facts, and this one brings {len(facts.message_ids):,}"
        )
    # An empty name is no zone; reading the facts says so.
    check_zones(set(facts.from_zones) - {""})
    return read_facts(facts)


def get_fact(data: bytes) -> tuple[str, str]:
    request = parse(wire.GetFactRequest, data)
    check_zone("from_zone", request.from_zone)
    check_message_id(request.message_id)
    return request.from_zone, request.message_id


def fetch_facts(data: bytes) -> Fetch:
    request = parse(wire.FetchFactsRequest, data)
    check_reader(request.reader)
    if request.limit < 0:
        raise InvalidFactError(f"limit is a number of facts, not {request.limit}")
    after = read_cursor(request.after) if request.HasField("after") else None
    return Fetch(request.reader, read_pair(request.pair), min(request.limit, FACTS), after)


def confirm_receipt(data: bytes) -> tuple[str, Pair, Cursor]:
    request = parse(wire.ConfirmReceiptRequest, data)
    check_reader(request.reader)
    if not request.HasField("cursor"):
        # Taken for offset 0 it would confirm nothing, and look as if it had.
        raise InvalidFactError("a receipt has a cursor, and this one has none; give that of the last fact")
    return request.reader, read_pair(request.pair), read_cursor(request.cursor)


def cursor_of(data: bytes) -> tuple[str, Pair]:
    request = parse(wire.CursorOfRequest, data)
    check_reader(request.reader)
    return request.reader, read_pair(request.pair)


def end_of(data: bytes) -> Pair:
    return read_pair(parse(wire.EndOfRequest, data).pair)


def cursor_at(data: bytes) -> tuple[Pair, int]:
    request = parse(wire.CursorAtRequest, data)
    if not 0 <= request.unix_ms <= SIZE:
        raise InvalidFactError(f"unix_ms is a number of milliseconds since 1970, not {request.unix_ms}")
    return read_pair(request.pair), request.unix_ms


def retire_reader(data: bytes) -> tuple[str, Pair, str]:
    request = parse(wire.RetireReaderRequest, data)
    check_reader(request.reader)
    if len(request.by) > BY or not request.by.isprintable():
        raise InvalidFactError(f"by is the name of somebody, of at most {BY} visible characters")
    return request.reader, read_pair(request.pair), request.by


def received(data: bytes) -> Put:
    request = parse(wire.ReceivedRequest, data)
    name = ObjectName.check(request.bucket, request.key, request.zone)
    return Put(name.bucket, name.key, read_stored(request.expected), 0, name.zone)


def put_part(data: bytes) -> Put | bytes | int:
    """One message of an upload: its header, a piece, or how many bytes its pieces had."""
    request = parse(wire.PutObjectRequest, data, MESSAGE)
    part = request.WhichOneof("part")
    if part == "header":
        header = request.header
        name = ObjectName.check(header.bucket, header.key, header.zone)
        expected = read_stored(header.expected) if header.HasField("expected") else None
        if header.begin < 0 or header.begin > (0 if expected is None else expected.size):
            raise InvalidFactError(
                f"an upload begins at a byte that is expected, not at {header.begin}; ask Received first, and say "
                "what is expected"
            )
        return Put(name.bucket, name.key, expected, header.begin, name.zone)
    if part == "piece":
        piece: bytes = request.piece
        return piece
    if part == "end":
        size: int = request.end.size
        return size
    raise InvalidFactError("a message of an upload has a header, a piece or an end, and this one has none")


def get_object(data: bytes) -> tuple[ObjectName, int]:
    request = parse(wire.GetObjectRequest, data)
    name = ObjectName.check(request.bucket, request.key, request.zone)
    if not 0 <= request.begin <= SIZE:
        raise InvalidFactError(f"begin is a byte of the artifact, not {request.begin}")
    return name, request.begin
