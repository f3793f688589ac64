"""Burials: the dead letters of a queue, in a stream of their own: listed, replayed and thrown away where they lie."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery, MissingKeyError
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import hide_failure, keys_of, reveal_failure
from ergon_framework.connectors.redis import scripts
from ergon_framework.connectors.redis.keys import Keys
from ergon_framework.connectors.redis.messages import CHANGING, Messages
from ergon_framework.connectors.redis.operation import Operation, Together
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction

#: What every field begins with that is about the death and not the message.
_ABOUT: Final = "ergon-dead-"
#: Longest reason that is kept.
_LONGEST: Final = 1000
_PLACE = re.compile(r"[0-9]{1,20}-[0-9]{1,20}").fullmatch
_AT_ONCE: Final = 500
_BECAME: Final = {"g": Became.GONE, "f": Became.FAILED, "s": Became.REPLAYED}


def encode_dead_letter(delivery: Delivery, letter: DeadLetter, codec: Codec) -> str:
    """The fields that are added to a message that is buried, as JSON."""
    about = {
        "id": delivery.transaction.id,
        "reason": letter.reason.encode(errors="replace").decode()[:_LONGEST],
        "deliveries": str(delivery.receipt.deliveries),
        "readable": str(int(delivery.receipt.readable)),
    }
    failure = hide_failure(keys_of(codec), letter.failure)
    if failure is not None:
        about["failure"] = failure.model_dump_json()
    return json.dumps([part for name, text in about.items() for part in (_ABOUT + name, text)])


def listed(
    keys: Keys, messages: Messages, name: str, query: DeadLetterQuery, *, after: str | None, limit: int, load: int
) -> Operation[Sequence[DeadLetterRecord]]:
    """One page of the dead letters that *query* means; bodies that the codec refuses, or over *load*, by their size."""
    if after is not None and not _PLACE(after):
        raise ConnectorError(f"{after[:20]!r} is no place of a dead letter here; give one that was listed")
    # A place begins with the moment at which it was given, so that the times of a query are bounds.
    behind = _moment(query.since) if after is None else f"({after}"
    found: list[DeadLetterRecord] = []
    largest = min(load, messages.largest)
    while len(found) < limit:
        entries = yield from scripts.LIST.run(
            (keys.dead,), behind, _until(query), _AT_ONCE, messages.body, largest, load
        )
        for entry in entries:
            record = _record(entry, messages, name)
            if query.matches(record) and len(found) < limit:
                found.append(record)
        if not entries:
            break
        behind = f"({entries[-1][0].decode()}"
    return found


def _moment(seconds: float | None) -> str:
    return "-" if seconds is None or seconds < 0 else f"{int(seconds * 1000)}-0"


def _until(query: DeadLetterQuery) -> str:
    if query.until is None:
        return "+"
    return f"{max(0, int(query.until * 1000) + 1)}-0"


def _record(entry: Sequence[Any], messages: Messages, name: str) -> DeadLetterRecord:
    place, fields, size = entry[0].decode(), entry[1], entry[2]
    about: dict[str, str] = {}
    own: list[bytes] = []
    pairs = iter(fields)
    prefix = _ABOUT.encode()
    for field, value in zip(pairs, pairs, strict=True):
        if field.startswith(prefix):
            about[field[len(prefix) :].decode(errors="replace")] = value.decode(errors="replace")
        else:
            own += (field, value)
    body, headers = messages.split(own)
    transaction, error = messages.read(body, headers) if size < 0 else messages.describe(size, headers)
    readable = error is None and about.get("readable") != "0"
    if not readable and not isinstance(error, MissingKeyError):
        transaction = Transaction(about.get("id") or transaction.id, body if size < 0 else None, source=name)
    failure = None if "failure" not in about else Failure.model_validate_json(about["failure"])
    letter = DeadLetter(about.get("reason", ""), reveal_failure(keys_of(messages.codec), failure))
    return DeadLetterRecord.of(
        Delivery(transaction, place, int(about.get("deliveries", 1))),
        letter,
        queue=name,
        at=int(place.partition("-")[0]) / 1000,
        headers=None if readable else headers,
        place=place,
        size=None if size < 0 else size,
    )


def replayed(keys: Keys, places: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
    """Back into the queue, with nothing counted against them."""
    known = [place for place in places if _PLACE(place)]
    letters = ""
    for start in range(0, len(known), _AT_ONCE):
        some = known[start : start + _AT_ONCE]
        answer = yield from scripts.REPLAY.run((keys.stream, keys.dead), len(CHANGING), *CHANGING, *some)
        letters += answer.decode()
    return _results(places, [_BECAME[letter] for letter in letters])


def discarded(keys: Keys, places: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
    """Away."""
    known = [place for place in places if _PLACE(place)]
    answers = (yield Together([("XDEL", keys.dead, place) for place in known])) if known else []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return _results(places, [Became.DISCARDED if answer else Became.GONE for answer in answers])


def replace_dead(keys: Keys, place: str, fields: Sequence[str | bytes]) -> Operation[ReplayResult]:
    """Add the message of *fields* to the queue in place of a dead letter, in one step."""
    became: list[Became] = []
    if _PLACE(place):
        answer = yield from scripts.REPLACE.run((keys.stream, keys.dead), place, *fields)
        became = [_BECAME[answer.decode()]]
    return _results([place], became)[0]


def _results(places: Sequence[str], became: Sequence[Became]) -> list[ReplayResult]:
    """One each, in order; what no dead letter here can have as its place is not there."""
    left = iter(became)
    results = []
    for place in places:
        one = next(left) if _PLACE(place) else Became.GONE
        words = "the server takes nothing more; its memory may be full" if one is Became.FAILED else ""
        results.append(ReplayResult(place, one, words))
    return results


def queued(keys: Keys, messages: Messages, ids: Collection[str]) -> Operation[set[str]]:
    """Which of these transactions are in the queue; all of it is looked through."""
    there: set[str] = set()
    for stream in (keys.stream, keys.later) if ids else ():
        behind = "-"
        while True:
            last, found, unnamed = yield from scripts.LOOK.run((stream,), behind, _AT_ONCE, "ergon-id", *ids)
            there |= {name.decode() for name in found}
            # Somebody else's: what its id is only the codec can say.
            there |= {messages.read(*messages.split(fields))[0].id for fields in unnamed} & set(ids)
            if last is None:
                break
            behind = f"({last.decode()}"
    return there
