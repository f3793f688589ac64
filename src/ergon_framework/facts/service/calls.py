"""Calls: what a client sends for each call of the contract, and how it reads the answer; the same in both flavours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from ergon_framework.facts.boundary import Appended, Appending, BoundaryCapabilities, LogState
from ergon_framework.facts.errors import NotOffered, ServiceFailed
from ergon_framework.facts.model import Cursor, Envelope, Fact, FactConfirmation, Pair, Stored, StoredFact
from ergon_framework.facts.service import batches, messages
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.requests import FACTS, MESSAGE

T = TypeVar("T")

SERVICE: Final = "/ergon.facts.v1.Boundary/"


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """One call: its name, what is sent, and how the answer is read."""

    method: str
    request: Message
    answer: type[Message]
    read: Callable[[Any], T]

    def result(self, data: bytes) -> T:
        try:
            return self.read(self.answer.FromString(data))
        except (DecodeError, ValueError) as error:
            raise ServiceFailed(f"the answer to {self.method} cannot be read: {error}; ask again") from error


def describe() -> Asked[tuple[str, BoundaryCapabilities]]:
    return Asked("Describe", wire.DescribeRequest(), wire.Description, messages.read_description)


def append_fact(envelope: Envelope, fact: Fact) -> Asked[FactConfirmation]:
    request = messages.write_appending(envelope, fact)
    return Asked("AppendFact", request, wire.Confirmation, messages.read_confirmation)


def append_facts(facts: Sequence[Appending]) -> Iterator[Asked[Sequence[Appended]]]:
    """As many calls as the limits of one call make necessary."""
    facts = list(facts)
    begin = size = 0
    for place, (envelope, fact) in enumerate(facts):
        more = batches.weight(envelope, fact)
        if place > begin and (place - begin >= FACTS or size + more > MESSAGE):
            yield _append_batch(facts[begin:place])
            begin, size = place, 0
        size += more
    if begin < len(facts):
        yield _append_batch(facts[begin:])


def _append_batch(facts: Sequence[Appending]) -> Asked[Sequence[Appended]]:
    request = wire.AppendFactsRequest()
    batches.write_facts(facts, request.facts)
    asked = [envelope.message_id for envelope, _ in facts]
    return Asked("AppendFacts", request, wire.AppendFactsAnswer, lambda answer: batches.read_answer(answer, asked))


def get_fact(from_zone: str, message_id: str) -> Asked[FactConfirmation | None]:
    request = wire.GetFactRequest(from_zone=from_zone, message_id=message_id)
    return Asked("GetFact", request, wire.GetFactAnswer, _found)


def _found(answer: wire.GetFactAnswer) -> FactConfirmation | None:
    return messages.read_confirmation(answer.confirmation) if answer.HasField("confirmation") else None


def fetch_facts(reader: str, pair: Pair, limit: int, after: Cursor | None) -> Asked[Sequence[StoredFact]]:
    limit = max(0, min(limit, FACTS))
    request = wire.FetchFactsRequest(
        reader=reader,
        pair=messages.write_pair(pair),
        limit=limit,
        after=None if after is None else messages.write_cursor(after),
    )
    return Asked("FetchFacts", request, wire.FetchFactsAnswer, lambda answer: batches.read_fetched(answer, limit))


def confirm_receipt(reader: str, pair: Pair, cursor: Cursor) -> Asked[None]:
    request = wire.ConfirmReceiptRequest(
        reader=reader, pair=messages.write_pair(pair), cursor=messages.write_cursor(cursor)
    )
    return Asked("ConfirmReceipt", request, wire.ConfirmReceiptAnswer, lambda _: None)


def cursor_of(reader: str, pair: Pair) -> Asked[Cursor | None]:
    request = wire.CursorOfRequest(reader=reader, pair=messages.write_pair(pair))
    return Asked("CursorOf", request, wire.CursorAnswer, _cursor)


def end_of(pair: Pair) -> Asked[Cursor | None]:
    return Asked("EndOf", wire.EndOfRequest(pair=messages.write_pair(pair)), wire.CursorAnswer, _cursor)


def cursor_at(pair: Pair, unix_ms: int) -> Asked[Cursor | None]:
    request = wire.CursorAtRequest(pair=messages.write_pair(pair), unix_ms=unix_ms)
    return Asked("CursorAt", request, wire.CursorAnswer, _cursor)


def _cursor(answer: wire.CursorAnswer) -> Cursor | None:
    return messages.read_cursor(answer.cursor) if answer.HasField("cursor") else None


def retire_reader(reader: str, pair: Pair, by: str) -> Asked[bool]:
    request = wire.RetireReaderRequest(reader=reader, pair=messages.write_pair(pair), by=by)
    return Asked("RetireReader", request, wire.RetireReaderAnswer, lambda answer: bool(answer.retired))


def survey() -> Asked[Sequence[LogState]]:
    return Asked(
        "Survey",
        wire.SurveyRequest(),
        wire.SurveyAnswer,
        lambda answer: [messages.read_log(log) for log in answer.logs],
    )


def received(bucket: str, key: str, expected: Stored, zone: str = "") -> Asked[int]:
    request = wire.ReceivedRequest(bucket=bucket, key=key, expected=messages.write_stored(expected), zone=zone)
    return Asked("Received", request, wire.ReceivedAnswer, lambda answer: int(answer.size))


def not_offered(what: str) -> NotOffered:
    """What is done where the store is."""
    return NotOffered(
        f"{what} is not offered over the line: the zone that holds the store does it there, as its replicator does "
        "that pulls facts of others"
    )
