"""Burials: the dead letters of a queue, as messages of a stream of their own.

A dead letter is the message as it came, byte for byte, with one header more that says why it is here.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery, MissingKeyError
from ergon_framework.connectors.codec import PROGRESS, Codec, decode
from ergon_framework.connectors.deadletters import (
    Became,
    DeadLetterQuery,
    DeadLetterRecord,
    ReplayResult,
    number,
)
from ergon_framework.connectors.encryption import (
    hide_errors,
    hide_failure,
    keys_of,
    reveal_errors,
    reveal_failure,
)
from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.claim import Claim
from ergon_framework.connectors.nats.dispatching import check_size
from ergon_framework.connectors.nats.frames import Heard
from ergon_framework.connectors.nats.line import Line, Request
from ergon_framework.connectors.nats.naming import Names
from ergon_framework.errors import ConnectionLost
from ergon_framework.telemetry import logs
from ergon_framework.transaction import Transaction

_log = logging.getLogger(__name__)

_RECORD: Final = "Ergon-Dead"
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_LAST: Final = re.compile(r"wrong last sequence: ([0-9]+)")
#: What the client agrees to send.
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
#: What a replay leaves behind: nothing is counted against it.
_COUNTED: Final = frozenset(PROGRESS)
_GONE: Final = frozenset({api.NO_MESSAGE, api.NO_SUCH_SEQUENCE})
#: In the record's header only what the message itself does not say.
_ELSEWHERE: Final = {"payload", "raw", "headers", "place"}
#: In the record's header: the encrypted texts of the errors of its envelope.
_ERRORS: Final = "errors"


def burial(
    names: Names, queue: str, delivery: Delivery, claim: Claim, settlement: DeadLetter, *, codec: Codec
) -> Request:
    """What puts a message aside; asked for twice it happens once."""
    transaction = delivery.transaction
    history, deferral, errors = hide_errors(keys_of(codec), transaction, transaction.history, transaction.deferral)
    if isinstance(delivery.error, MissingKeyError):
        # The texts of its errors need the same key: they stay as they are.
        history, deferral, errors = transaction.history, transaction.deferral, delivery.error.errors
    hidden = replace(delivery, transaction=transaction.replace(history=history, deferral=deferral))
    letter = replace(settlement, failure=hide_failure(keys_of(codec), settlement.failure))
    record = DeadLetterRecord.of(hidden, letter, queue=queue, at=time.time())
    told = record.model_dump(mode="json", exclude=_ELSEWHERE) | {"readable": claim.readable}
    if errors is not None:
        told[_ERRORS] = errors
    headers = {
        **own(claim.headers),
        _RECORD: json.dumps(told),
        _EXPECTED: "0",
    }
    return Request(f"{names.dead_subject}.{claim.key}", claim.body, headers)


def there_already(error: api.ApiError) -> int:
    """The number of the dead letter that stands in the way of another one of the same message; 0 if none does.

    >>> there_already(api.ApiError("wrong last sequence: 17", number=api.WRONG_LAST_SEQUENCE))
    17
    """
    found = _LAST.search(str(error)) if error.number == api.WRONG_LAST_SEQUENCE else None
    return int(found[1]) if found else 0


def beside(request: Request | None) -> Request | None:
    """*request*, whether or not there is one already."""
    if request is None:
        return None
    headers = {name: text for name, text in (request.headers or {}).items() if name != _EXPECTED}
    return request._replace(headers=headers)


def fitted(request: Request, most: int) -> Request | None:
    """*request* within what the server takes, if need be with less of the story; None where that does not help."""
    if request.size <= most or request.headers is None:
        return request if request.size <= most else None
    told = json.loads(request.headers.get(_RECORD, "{}"))
    if not told:
        return None
    for shorten in (_drop_tracebacks, _drop_history, _drop_failure):
        shorten(told)
        shorter = request._replace(headers={**request.headers, _RECORD: json.dumps(told)})
        if shorter.size <= most:
            return shorter
    return None


def _drop_tracebacks(record: dict[str, Any]) -> None:
    for error in (record["failure"], (record["failure"] or {}).get("handler_error")):
        if error:
            error["traceback"] = None


def _drop_history(record: dict[str, Any]) -> None:
    record["envelope"]["history"] = []
    record["envelope"]["deferral"] = None
    record.pop(_ERRORS, None)
    if record["failure"]:
        record["failure"]["history"] = []


def _drop_failure(record: dict[str, Any]) -> None:
    record["failure"] = None


def own(headers: dict[str, str]) -> dict[str, str]:
    """A message's headers without the server's, which would mean something once more, and those that cannot be sent."""
    return {
        name: text for name, text in headers.items() if _NAME(name) and not name.startswith("Nats-") and name != _RECORD
    }


def refused(queue: str, why: str) -> None:
    """Say that a dead letter or a note was not taken; its claim is kept."""
    logs.say(logging.ERROR, "a settlement could not be kept", {"queue": queue, "error": why}, to=_log)


def untidy(queue: str, count: int) -> None:
    """Say what is left behind; it is never read again."""
    logs.say(logging.WARNING, "notes of settled messages were left behind", {"queue": queue, "notes": count}, to=_log)


# -- listing ----------------------------------------------------------------------------------------


async def listed(
    line: Line, names: Names, name: str, codec: Codec, query: DeadLetterQuery, *, after: str | None, limit: int
) -> list[DeadLetterRecord]:
    """One page of the dead letters that *query* means."""
    found: list[DeadLetterRecord] = []
    last = 0 if after is None else number(after)
    if limit < 1:
        return found
    letters = api.scan(line, names.dead, after=last)
    try:
        async for letter in letters:
            record = _record(letter, name, codec)
            if query.matches(record):
                found.append(record)
                if len(found) >= limit:
                    break
    finally:
        await letters.aclose()  # type: ignore[attr-defined] # a generator has it
    return found


def _record(letter: api.Stored, name: str, codec: Codec) -> DeadLetterRecord:
    headers = own(letter.headers)
    told: dict[str, Any] = json.loads(letter.headers.get(_RECORD, "{}"))
    transaction, error = decode(codec, letter.body, headers, source=name)
    readable = bool(told.pop("readable", False)) and error is None
    if not told:
        # Somebody else's message in our stream: shown, so that it can be thrown away.
        stranger = Delivery(transaction, None)
        return DeadLetterRecord.of(
            stranger, DeadLetter("stranger"), queue=name, at=letter.at, headers=headers, place=str(letter.seq)
        )
    content = {"payload": transaction.payload} if readable else {"raw": letter.body, "headers": headers}
    errors = told.pop(_ERRORS, None)
    record = DeadLetterRecord.model_validate({**told, **content, "place": str(letter.seq)})
    envelope, whose = record.envelope, record.transaction()
    history, deferral = reveal_errors(keys_of(codec), whose, envelope.history, envelope.deferral, errors)
    changes = {
        "failure": reveal_failure(keys_of(codec), record.failure),
        "envelope": envelope.model_copy(update={"history": history, "deferral": deferral}),
    }
    return record.model_copy(update=changes)


# -- moving -----------------------------------------------------------------------------------------


async def replayed(line: Line, names: Names, codec: Codec, queue: str, places: Sequence[str]) -> list[ReplayResult]:
    """Back into the queue. First there, then no longer here: what dies in between is in both, never in none."""
    moving = _Moving(places)
    letters: dict[str, api.Stored] = {}
    for place, told in await moving.asked(line, lambda seq: api.request(f"STREAM.MSG.GET.{names.dead}", seq=seq)):
        letters[place] = api.stored(told)
    sent = [_sent(names, codec, queue, letter) for letter in letters.values()]
    for place, answer in zip(letters, await line.ask_all(sent), strict=True):
        moving.read(place, answer)
    return await _deleted(line, names, moving, Became.REPLAYED)


def _sent(names: Names, codec: Codec, queue: str, letter: api.Stored) -> Request:
    headers = {name: text for name, text in own(letter.headers).items() if name not in _COUNTED}
    transaction, _ = decode(codec, letter.body, headers, source=queue)
    headers["Nats-Msg-Id"] = _message_id(letter)
    return Request(names.of(transaction.id), letter.body, headers)


def _message_id(letter: api.Stored) -> str:
    """Return an id by which the server drops a second copy, of a concurrent move or of one after a crash."""
    return f"replay.{letter.subject}.{letter.seq}.{letter.at}"


async def replace_dead(line: Line, names: Names, place: str, transaction: Transaction, *, codec: Codec) -> ReplayResult:
    """Publish *transaction*, then delete the dead letter at *place*; the second of two that do so publishes nothing."""
    moving = _Moving([place])
    for _, told in await moving.asked(line, lambda seq: api.request(f"STREAM.MSG.GET.{names.dead}", seq=seq)):
        body, headers = codec.encode(transaction)
        headers["Nats-Msg-Id"] = _message_id(api.stored(told))
        request = Request(names.of(transaction.id), body, headers)
        check_size(transaction, request, line.max_payload)
        (answer,) = await line.ask_all([request])
        published = moving.read(place, answer)
        (result,) = await _deleted(line, names, moving, Became.REPLAYED)
        if published is None:
            return result
        if published.get("duplicate"):
            return ReplayResult(place, Became.GONE)
        # Another operator, whose correction was a duplicate, may have deleted the dead letter first.
        return ReplayResult(place, Became.REPLAYED) if result.became is Became.GONE else result
    return moving.results[place]


async def discarded(line: Line, names: Names, places: Sequence[str]) -> list[ReplayResult]:
    """Away."""
    return await _deleted(line, names, _Moving(places), Became.DISCARDED)


async def _deleted(line: Line, names: Names, moving: _Moving, became: Became) -> list[ReplayResult]:
    for place, _ in await moving.asked(
        line, lambda seq: api.request(f"STREAM.MSG.DELETE.{names.dead}", seq=seq, no_erase=not line.forgets)
    ):
        moving.results[place] = ReplayResult(place, became)
    # What the server says of a number that it does not have depends on what else it has.
    for place, result in moving.results.items():
        if result.became is Became.FAILED and not await _is_there(line, names, place):
            moving.results[place] = ReplayResult(place, Became.GONE)
    return moving.told()


async def _is_there(line: Line, names: Names, place: str) -> bool:
    try:
        await api.call(line, f"STREAM.MSG.GET.{names.dead}", seq=number(place))
    except api.ApiError as error:
        return error.number not in _GONE
    return True


class _Moving:
    """Dead letters on their way, and what became of those that have arrived or never will."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._seqs = {place: _seq(place) for place in places}
        self.results: dict[str, ReplayResult] = {
            place: ReplayResult(place, Became.GONE) for place, seq in self._seqs.items() if seq is None
        }

    async def asked(self, line: Line, request: Callable[[int], Request]) -> list[tuple[str, dict[str, Any]]]:
        """The answers to *request* for all that are still on their way; the others have a result."""
        moving = [(place, seq) for place, seq in self._seqs.items() if seq is not None and place not in self.results]
        answers = await line.ask_all([request(seq) for _, seq in moving])
        read = [(place, self.read(place, answer)) for (place, _), answer in zip(moving, answers, strict=True)]
        return [(place, told) for place, told in read if told is not None]

    def read(self, place: str, answer: Heard | None) -> dict[str, Any] | None:
        """What was answered; None for an error, which is the result then."""
        try:
            return api.read(answer)
        except api.ApiError as error:
            became = Became.GONE if error.number in _GONE else Became.FAILED
            self.results[place] = ReplayResult(place, became, "" if became is Became.GONE else str(error))
        except ConnectionLost as error:
            self.results[place] = ReplayResult(place, Became.FAILED, str(error))
        return None

    def told(self) -> list[ReplayResult]:
        """One result each, in order; what was named twice was moved once."""
        seen: set[str] = set()
        told = []
        for place in self._places:
            told.append(ReplayResult(place, Became.GONE) if place in seen else self.results[place])
            seen.add(place)
        return told


def _seq(place: str) -> int | None:
    """The number of *place*; None for what no dead letter here can have as its place."""
    try:
        return number(place) or None
    except ConnectorError:
        return None
