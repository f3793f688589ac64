"""RpcCall: one call of the Boundary gRPC service as a request and a parser of its answer, for both clients.

The sync and the async client send the same ``RpcCall``. Each function below has the name and the parameters of the
boundary's method (``facts.boundary``); the RPC names in ``boundary.proto`` are fixed and partly differ. A log is the
sequence of facts from one zone to another (a pair), and a cursor is a position in it: the epoch and the offset of a
fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from ergon_framework.facts.boundary import AppendResult, BoundaryCapabilities, LogState, NewFact
from ergon_framework.facts.errors import NotSupportedRemotely, ServiceError
from ergon_framework.facts.model import Cursor, Envelope, Fact, FactConfirmation, StoredArtifact, StoredFact, ZonePair
from ergon_framework.facts.service import boundary_pb2 as pb
from ergon_framework.facts.service import wire
from ergon_framework.facts.service.requests import MAX_FACTS, MAX_MESSAGE_BYTES

T = TypeVar("T")

SERVICE: Final = "/ergon.facts.v1.Boundary/"


@dataclass(frozen=True, slots=True)
class RpcCall(Generic[T]):
    """One call: the name of its RPC, its request, and the type and parser of its answer."""

    method: str
    request: Message
    answer: type[Message]
    parse: Callable[[Any], T]

    def to_result(self, data: bytes) -> T:
        try:
            return self.parse(self.answer.FromString(data))
        except (DecodeError, ValueError) as error:
            raise ServiceError(
                f"the answer to {self.method} is invalid: {error}; check that the server is an Ergon service of a "
                "compatible release"
            ) from error


def describe() -> RpcCall[tuple[str, BoundaryCapabilities]]:
    return RpcCall("Describe", pb.DescribeRequest(), pb.Description, wire.read_description)


def append_fact(envelope: Envelope, fact: Fact) -> RpcCall[FactConfirmation]:
    request = wire.write_appending(envelope, fact)
    return RpcCall("AppendFact", request, pb.Confirmation, wire.read_confirmation)


def append_facts(facts: Sequence[NewFact]) -> Iterator[RpcCall[Sequence[AppendResult]]]:
    """Yield as many calls as the limits of one call require."""
    facts = list(facts)
    begin = size = 0
    for index, (envelope, fact) in enumerate(facts):
        added = wire.max_encoded_size(envelope, fact)
        if index > begin and (index - begin >= MAX_FACTS or size + added > MAX_MESSAGE_BYTES):
            yield _append_batch(facts[begin:index])
            begin, size = index, 0
        size += added
    if begin < len(facts):
        yield _append_batch(facts[begin:])


def _append_batch(facts: Sequence[NewFact]) -> RpcCall[Sequence[AppendResult]]:
    request = pb.AppendFactsRequest()
    wire.fill_facts(facts, request.facts)
    message_ids = [envelope.message_id for envelope, _ in facts]
    return RpcCall(
        "AppendFacts", request, pb.AppendFactsAnswer, lambda answer: wire.read_append_answer(answer, message_ids)
    )


def get_fact(from_zone: str, message_id: str) -> RpcCall[FactConfirmation | None]:
    request = pb.GetFactRequest(from_zone=from_zone, message_id=message_id)
    return RpcCall("GetFact", request, pb.GetFactAnswer, _parse_fact)


def _parse_fact(answer: pb.GetFactAnswer) -> FactConfirmation | None:
    return wire.read_confirmation(answer.confirmation) if answer.HasField("confirmation") else None


def fetch_facts(reader: str, pair: ZonePair, limit: int, after: Cursor | None) -> RpcCall[Sequence[StoredFact]]:
    limit = max(0, min(limit, MAX_FACTS))
    request = pb.FetchFactsRequest(
        reader=reader,
        pair=wire.write_pair(pair),
        limit=limit,
        after=None if after is None else wire.write_cursor(after),
    )
    return RpcCall("FetchFacts", request, pb.FetchFactsAnswer, lambda answer: wire.read_fetch_answer(answer, limit))


def confirm_receipt(reader: str, pair: ZonePair, cursor: Cursor) -> RpcCall[None]:
    request = pb.ConfirmReceiptRequest(reader=reader, pair=wire.write_pair(pair), cursor=wire.write_cursor(cursor))
    return RpcCall("ConfirmReceipt", request, pb.ConfirmReceiptAnswer, lambda _: None)


def get_cursor(reader: str, pair: ZonePair) -> RpcCall[Cursor | None]:
    """Request the position of the last fact whose receipt *reader* has confirmed."""
    request = pb.CursorOfRequest(reader=reader, pair=wire.write_pair(pair))
    return RpcCall("CursorOf", request, pb.CursorAnswer, _parse_cursor)


def last_offset(pair: ZonePair) -> RpcCall[Cursor | None]:
    """Request the position of the last fact of *pair*; None if its log has never had one."""
    return RpcCall("EndOf", pb.EndOfRequest(pair=wire.write_pair(pair)), pb.CursorAnswer, _parse_cursor)


def cursor_at_time(pair: ZonePair, unix_ms: int) -> RpcCall[Cursor | None]:
    """Request the position of the last retained fact that was stored before *unix_ms*."""
    request = pb.CursorAtRequest(pair=wire.write_pair(pair), unix_ms=unix_ms)
    return RpcCall("CursorAt", request, pb.CursorAnswer, _parse_cursor)


def _parse_cursor(answer: pb.CursorAnswer) -> Cursor | None:
    return wire.read_cursor(answer.cursor) if answer.HasField("cursor") else None


def retire_reader(reader: str, pair: ZonePair, by: str) -> RpcCall[bool]:
    request = pb.RetireReaderRequest(reader=reader, pair=wire.write_pair(pair), by=by)
    return RpcCall("RetireReader", request, pb.RetireReaderAnswer, lambda answer: bool(answer.retired))


def list_logs() -> RpcCall[Sequence[LogState]]:
    """Request the state of every log that the caller may see, with its readers."""
    return RpcCall(
        "Survey",
        pb.SurveyRequest(),
        pb.SurveyAnswer,
        lambda answer: [wire.read_log(log) for log in answer.logs],
    )


def uploaded_bytes(bucket: str, key: str, expected: StoredArtifact, zone: str = "") -> RpcCall[int]:
    """Request how many bytes the store has of an interrupted upload of *expected*; uploads of one name may differ."""
    request = pb.ReceivedRequest(bucket=bucket, key=key, expected=wire.write_artifact(expected), zone=zone)
    return RpcCall("Received", request, pb.ReceivedAnswer, lambda answer: int(answer.size))


def not_supported_error(operation: str) -> NotSupportedRemotely:
    """Return the error for an operation that is available only where the store is."""
    return NotSupportedRemotely(
        f"{operation} is not supported over the network: run it in the zone that has the store, as its replicator "
        "does, which pulls the facts of other zones"
    )
