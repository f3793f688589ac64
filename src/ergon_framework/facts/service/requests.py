"""Parse and validate the requests of callers; invalid requests raise InvalidFactError.

A zone pair is the zone that sends facts and the zone that receives them; a reader is a named consumer of such facts,
and a cursor the position up to which it has read. The module knows no connection and no store, so that a fuzzer can
call it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from ergon_framework.facts.boundary import NewFact
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import (
    MAX_JSON_INTEGER,
    Cursor,
    ObjectName,
    StoredArtifact,
    ZonePair,
    check_message_id,
    check_reader,
    check_zone,
)
from ergon_framework.facts.service import boundary_pb2 as pb
from ergon_framework.facts.service.wire import read_appending, read_artifact, read_cursor, read_facts, read_pair

#: Maximum facts in one call, and maximum bytes of one message; each single fact that the model allows fits.
MAX_FACTS: Final = 1_000
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
#: Maximum bytes of a request that contains neither facts nor artifact content.
MAX_PLAIN_REQUEST_BYTES: Final = 64 * 1024
#: Maximum length of the name for which an operator acts.
MAX_BY_CHARS: Final = 256

M = TypeVar("M", bound=Message)
CheckZones: TypeAlias = Callable[[Collection[str]], None]


class FetchRequest(NamedTuple):
    """A request to read facts."""

    reader: str
    pair: ZonePair
    limit: int
    after: Cursor | None


class PutRequest(NamedTuple):
    """The announcement of an artifact upload."""

    bucket: str
    key: str
    expected: StoredArtifact | None
    begin: int
    zone: str


def parse(kind: type[M], data: bytes, limit: int = MAX_PLAIN_REQUEST_BYTES) -> M:
    """Parse *data*, of at most *limit* bytes, as a message of type *kind*."""
    if len(data) > limit:
        raise InvalidFactError(f"a {kind.__name__} has at most {limit:,} bytes, and this one has {len(data):,}")
    try:
        message: M = kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise InvalidFactError(f"the request is not a valid {name} message: {error}") from error
    return message


def _allow_any_zone(zones: Collection[str]) -> None:
    """Allow all *zones* to append."""


def parse_append_fact(data: bytes, check_zones: CheckZones = _allow_any_zone) -> NewFact:
    """Parse one fact; *check_zones* is called with the sending zones before the expensive work."""
    message = parse(pb.Appending, data, MAX_MESSAGE_BYTES)
    check_zones({message.envelope.from_zone} - {""})
    return read_appending(message)


def parse_append_facts(data: bytes, check_zones: CheckZones = _allow_any_zone) -> Sequence[NewFact | InvalidFactError]:
    """Parse facts; an invalid fact is returned as its error. *check_zones* as in parse_append_fact."""
    facts = parse(pb.AppendFactsRequest, data, MAX_MESSAGE_BYTES).facts
    if len(facts.message_ids) > MAX_FACTS:
        raise InvalidFactError(
            f"one call appends at most {MAX_FACTS:,} facts, and this one has {len(facts.message_ids):,}"
        )
    # An empty name is not a zone; reading the facts reports it.
    check_zones(set(facts.from_zones) - {""})
    return read_facts(facts)


def parse_get_fact(data: bytes) -> tuple[str, str]:
    request = parse(pb.GetFactRequest, data)
    check_zone("from_zone", request.from_zone)
    check_message_id(request.message_id)
    return request.from_zone, request.message_id


def parse_fetch_facts(data: bytes) -> FetchRequest:
    request = parse(pb.FetchFactsRequest, data)
    check_reader(request.reader)
    if request.limit < 0:
        raise InvalidFactError(f"limit is a number of facts, not {request.limit}")
    after = read_cursor(request.after) if request.HasField("after") else None
    return FetchRequest(request.reader, read_pair(request.pair), min(request.limit, MAX_FACTS), after)


def parse_confirm_receipt(data: bytes) -> tuple[str, ZonePair, Cursor]:
    request = parse(pb.ConfirmReceiptRequest, data)
    check_reader(request.reader)
    if not request.HasField("cursor"):
        # Read as offset 0 it would confirm nothing, and look successful.
        raise InvalidFactError("a receipt must have a cursor, and this one has none; pass that of the last fact")
    return request.reader, read_pair(request.pair), read_cursor(request.cursor)


def parse_get_cursor(data: bytes) -> tuple[str, ZonePair]:
    request = parse(pb.CursorOfRequest, data)
    check_reader(request.reader)
    return request.reader, read_pair(request.pair)


def parse_last_offset(data: bytes) -> ZonePair:
    return read_pair(parse(pb.EndOfRequest, data).pair)


def parse_cursor_at_time(data: bytes) -> tuple[ZonePair, int]:
    request = parse(pb.CursorAtRequest, data)
    if not 0 <= request.unix_ms <= MAX_JSON_INTEGER:
        raise InvalidFactError(f"unix_ms is a number of milliseconds since 1970, not {request.unix_ms}")
    return read_pair(request.pair), request.unix_ms


def parse_retire_reader(data: bytes) -> tuple[str, ZonePair, str]:
    request = parse(pb.RetireReaderRequest, data)
    check_reader(request.reader)
    if len(request.by) > MAX_BY_CHARS or not request.by.isprintable():
        raise InvalidFactError(f"by must be an operator name of at most {MAX_BY_CHARS} visible characters")
    return request.reader, read_pair(request.pair), request.by


def parse_uploaded_bytes(data: bytes) -> PutRequest:
    request = parse(pb.ReceivedRequest, data)
    name = ObjectName.check(request.bucket, request.key, request.zone)
    return PutRequest(name.bucket, name.key, read_artifact(request.expected), 0, name.zone)


def parse_put_part(data: bytes) -> PutRequest | bytes | int:
    """Parse one message of an upload: its header, a chunk, or the total size of its chunks."""
    request = parse(pb.PutObjectRequest, data, MAX_MESSAGE_BYTES)
    part = request.WhichOneof("part")
    if part == "header":
        header = request.header
        name = ObjectName.check(header.bucket, header.key, header.zone)
        expected = read_artifact(header.expected) if header.HasField("expected") else None
        if header.begin < 0 or header.begin > (0 if expected is None else expected.size):
            raise InvalidFactError(
                f"an upload cannot begin at byte {header.begin}: call Received first, and send the expected "
                "digest and size"
            )
        return PutRequest(name.bucket, name.key, expected, header.begin, name.zone)
    if part == "piece":
        piece: bytes = request.piece
        return piece
    if part == "end":
        size: int = request.end.size
        return size
    raise InvalidFactError("a message of an upload must have a header, a piece or an end, and this one has none")


def parse_get_object(data: bytes) -> tuple[ObjectName, int]:
    request = parse(pb.GetObjectRequest, data)
    name = ObjectName.check(request.bucket, request.key, request.zone)
    if not 0 <= request.begin <= MAX_JSON_INTEGER:
        raise InvalidFactError(f"begin is a byte of the artifact, not {request.begin}")
    return name, request.begin
