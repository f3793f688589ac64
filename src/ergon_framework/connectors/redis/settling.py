"""Settling: what a group of claims becomes, in one step of the server, each fenced by owner and count."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Delivery,
    Later,
    Release,
    Settlement,
    SettleResult,
    Settling,
)
from ergon_framework.connectors.codec import Codec, UnencodableError
from ergon_framework.connectors.encryption import write_envelope
from ergon_framework.connectors.redis import scripts
from ergon_framework.connectors.redis.burials import encode_dead_letter
from ergon_framework.connectors.redis.claiming import GROUP, Claiming
from ergon_framework.connectors.redis.keys import Keys
from ergon_framework.connectors.redis.messages import CHANGING, DELIVERIES
from ergon_framework.connectors.redis.operation import Operation
from ergon_framework.connectors.redis.receipt import Receipt
from ergon_framework.failure import Failure

#: The place of a settlement in its group, with whose claim it is about.
_Placed: TypeAlias = tuple[int, Receipt]

#: Most settlements of one step: the server does nothing else meanwhile.
_STEP: Final = 500
_MEMORY_FULL: Final = "m"
_ANSWERS: Final = {
    "s": SettleResult.SETTLED,
    "l": SettleResult.LOST,
    "f": SettleResult.FAILED,
    _MEMORY_FULL: SettleResult.FAILED,
}
_CHANGING: Final = json.dumps(CHANGING)
_NOTHING: Final = ("", "", "")
_FORGOTTEN: Final = 10_000


class Settler:
    """Settles for one queue."""

    def __init__(
        self, keys: Keys, claiming: Claiming, *, codec: Codec, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._codec = codec
        self._keys = (keys.stream, keys.later, keys.due, keys.free, keys.dead, keys.bell)
        self._claiming = claiming
        self._clock = clock
        #: Settlements that were sent and never answered, and until when nobody else can have had what they are about.
        self._doubted: dict[Receipt, tuple[Settlement, float]] = {}

    def doubt(self, settlings: Sequence[Settling]) -> None:
        """Whether these were carried out nobody knows."""
        now = self._clock()
        if len(self._doubted) > _FORGOTTEN:
            self._doubted = {receipt: told for receipt, told in self._doubted.items() if told[1] > now}
        for delivery, how in settlings:
            if isinstance(delivery.receipt, Receipt):
                self._doubted[delivery.receipt] = (how, delivery.lease_until or now)

    def settle(self, settlings: Sequence[Settling]) -> Operation[tuple[list[SettleResult], bool]]:
        """One result each; and whether something has become ready by it."""
        results = [SettleResult.FAILED] * len(settlings)
        acks: dict[str, list[_Placed]] = {}
        others: dict[str, list[tuple[_Placed, tuple[Any, ...]]]] = {}
        ready = False
        for index, (delivery, how) in enumerate(settlings):
            receipt = delivery.receipt
            if not isinstance(receipt, Receipt):
                results[index] = SettleResult.LOST
            elif type(how) is Ack:
                acks.setdefault(receipt.consumer, []).append((index, receipt))
            elif (told := _words(delivery, how, self._codec)) is not None:
                others.setdefault(receipt.consumer, []).append(((index, receipt), told))
                ready = ready or isinstance(how, Release) or (isinstance(how, Later) and how.delay <= 0)
        for consumer, placed in acks.items():
            for start in range(0, len(placed), _STEP):
                step = placed[start : start + _STEP]
                claims = [part for _, receipt in step for part in (receipt.id, receipt.times)]
                answer = yield from scripts.SETTLE.run(self._keys, GROUP, consumer, len(step), *claims)
                self._note(step, answer, settlings, results)
        for consumer, settled in others.items():
            for start in range(0, len(settled), _STEP):
                some = settled[start : start + _STEP]
                parts = [part for _, words in some for part in words]
                answer = yield from scripts.SETTLE.run(self._keys, GROUP, consumer, 0, *parts)
                self._note([one for one, _ in some], answer, settlings, results)
        return results, ready

    def _note(
        self, step: Sequence[_Placed], answer: bytes, settlings: Sequence[Settling], results: list[SettleResult]
    ) -> None:
        doubted, held = self._doubted, self._claiming.held
        for (index, receipt), letter in zip(step, answer.decode(), strict=True):
            if letter == "s" and not doubted and held.get(receipt.id) is receipt:  # as nearly all are
                held.pop(receipt.id, None)
                results[index] = SettleResult.SETTLED
                continue
            if letter == _MEMORY_FULL:
                self._claiming.memory_full = True
            result = _ANSWERS[letter]
            if result is SettleResult.LOST and self._done_before(receipt, settlings[index][1]):
                result = SettleResult.SETTLED
            if result is not SettleResult.FAILED:
                self._claiming.settled(receipt)
                self._doubted.pop(receipt, None)
            results[index] = result

    def extend(self, deliveries: Sequence[Delivery], lease: float) -> Operation[list[float | None]]:
        """Renew the claims that are still held; when each ends then, None for one that is gone."""
        ends: list[float | None] = [None] * len(deliveries)
        mine: dict[str, list[_Placed]] = {}
        for index, delivery in enumerate(deliveries):
            if isinstance(delivery.receipt, Receipt):
                mine.setdefault(delivery.receipt.consumer, []).append((index, delivery.receipt))
        for consumer, placed in mine.items():
            for start in range(0, len(placed), _STEP):
                step = placed[start : start + _STEP]
                until = self._clock() + lease
                claims = [part for _, receipt in step for part in (receipt.id, receipt.times)]
                answer = yield from scripts.EXTEND.run(self._keys[:1], GROUP, consumer, *claims)
                for (index, receipt), letter in zip(step, answer.decode(), strict=True):
                    if letter == "1":
                        ends[index] = until
                    else:
                        self._claiming.settled(receipt)
        return ends

    def _done_before(self, receipt: Receipt, how: Settlement) -> bool:
        """Whether it is gone because an earlier settlement of ours was carried out and its answer lost.

        Until the lease ends nobody else takes it.
        """
        told = self._doubted.get(receipt)
        return told is not None and told[0] == how and self._clock() < told[1]


def _words(delivery: Delivery, how: Any, codec: Codec) -> tuple[Any, ...] | None:
    """What the script is told of a settlement; None for what it cannot be told."""
    receipt = delivery.receipt
    try:
        if isinstance(how, Release):
            return ("release", receipt.id, receipt.times, *_NOTHING)
        if isinstance(how, Later):
            delay = round(how.delay * 1000)
            return ("later", receipt.id, receipt.times, delay, *_changes(delivery, how, codec))
        if isinstance(how, DeadLetter) and (how.failure is None or isinstance(how.failure, Failure)):
            return ("dead", receipt.id, receipt.times, encode_dead_letter(delivery, how, codec), "", "")
        if isinstance(how, Ack):  # a kind of it
            return ("ack", receipt.id, receipt.times, *_NOTHING)
    except (UnencodableError, UnicodeError, ValueError):
        return None
    return None


def _changes(delivery: Delivery, later: Later, codec: Codec) -> tuple[str, str]:
    """The names of the fields that go, and those that come in their place; what could not be read stays as it was."""
    free = delivery.receipt.deliveries - 1
    changed = {DELIVERIES: str(free)} if free else {}
    if not delivery.receipt.readable:
        return json.dumps([DELIVERIES]), _flat(changed)
    headers = write_envelope(codec, delivery, later)
    return _CHANGING, _flat(changed | {name: headers[name] for name in CHANGING if name in headers})


def _flat(fields: dict[str, str]) -> str:
    return json.dumps([part for pair in fields.items() for part in pair])
