"""Settle a group of claims in one step of the server, each fenced by its consumer and claim count.

A settlement says what happens to a claimed message: it is acked, released, deferred or dead-lettered. A claim is
identified by its consumer and by the claim count of the entry, which every claim increases: a settlement with an older
count changes nothing (fencing). A script names one consumer, so settlements are grouped by the consumer of their
claims.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Defer,
    Delivery,
    Release,
    Settlement,
    SettlementRequest,
    SettleResult,
)
from ergon_framework.connectors.codec import Codec, UnencodableError
from ergon_framework.connectors.encryption import write_envelope
from ergon_framework.connectors.redis import scripts
from ergon_framework.connectors.redis.claims import GROUP, ClaimManager, RedisReceipt
from ergon_framework.connectors.redis.connection import Operation
from ergon_framework.connectors.redis.dead_letters import encode_dead_letter
from ergon_framework.connectors.redis.messages import CHANGING_HEADERS, DELIVERIES_HEADER, QueueKeys
from ergon_framework.failure import Failure

#: The index of a settlement in its group, and the receipt that it settles.
_IndexedReceipt: TypeAlias = tuple[int, RedisReceipt]

#: Maximum number of settlements in one step: the server is blocked meanwhile.
_MAX_STEP_SETTLEMENTS: Final = 500
_MEMORY_FULL: Final = "m"
_RESULT_BY_LETTER: Final = {
    "s": SettleResult.SETTLED,
    "l": SettleResult.LOST,
    "f": SettleResult.FAILED,
    _MEMORY_FULL: SettleResult.FAILED,
}
_CHANGING_HEADERS_JSON: Final = json.dumps(CHANGING_HEADERS)
_NO_VALUES: Final = ("", "", "")
#: The number of remembered settlements with unknown outcome above which expired ones are dropped.
_MAX_UNCONFIRMED: Final = 10_000


class RedisSettler:
    """Settles the deliveries of one queue."""

    def __init__(
        self, keys: QueueKeys, claims: ClaimManager, *, codec: Codec, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._codec = codec
        self._keys = (keys.stream, keys.later, keys.due, keys.free, keys.dead, keys.bell)
        self._claims = claims
        self._clock = clock
        #: Settlements that were sent and never confirmed, and until when no other consumer can have claimed them.
        self._unconfirmed: dict[RedisReceipt, tuple[Settlement, float]] = {}

    def mark_unknown(self, requests: Sequence[SettlementRequest]) -> None:
        """Record that the outcome of these settlements is unknown."""
        now = self._clock()
        if len(self._unconfirmed) > _MAX_UNCONFIRMED:
            self._unconfirmed = {
                receipt: unconfirmed for receipt, unconfirmed in self._unconfirmed.items() if unconfirmed[1] > now
            }
        for delivery, settlement in requests:
            if isinstance(delivery.receipt, RedisReceipt):
                self._unconfirmed[delivery.receipt] = (settlement, delivery.lease_until or now)

    def settle(self, requests: Sequence[SettlementRequest]) -> Operation[tuple[list[SettleResult], bool]]:
        """Settle all; return one result each, and whether a message has become ready by it."""
        results = [SettleResult.FAILED] * len(requests)
        acks: dict[str, list[_IndexedReceipt]] = {}
        others: dict[str, list[tuple[_IndexedReceipt, tuple[Any, ...]]]] = {}
        ready = False
        for index, (delivery, settlement) in enumerate(requests):
            receipt = delivery.receipt
            if not isinstance(receipt, RedisReceipt):
                results[index] = SettleResult.LOST
            elif type(settlement) is Ack:
                acks.setdefault(receipt.consumer, []).append((index, receipt))
            elif (script_arguments := _encode_settlement(delivery, settlement, self._codec)) is not None:
                others.setdefault(receipt.consumer, []).append(((index, receipt), script_arguments))
                ready = (
                    ready
                    or isinstance(settlement, Release)
                    or (isinstance(settlement, Defer) and settlement.delay <= 0)
                )
        for consumer, indexed in acks.items():
            for start in range(0, len(indexed), _MAX_STEP_SETTLEMENTS):
                step = indexed[start : start + _MAX_STEP_SETTLEMENTS]
                claims = [part for _, receipt in step for part in (receipt.id, receipt.claim_count)]
                answer = yield from scripts.SETTLE.run(self._keys, GROUP, consumer, len(step), *claims)
                self._apply_answer(step, answer, requests, results)
        for consumer, encoded in others.items():
            for start in range(0, len(encoded), _MAX_STEP_SETTLEMENTS):
                chunk = encoded[start : start + _MAX_STEP_SETTLEMENTS]
                parts = [part for _, arguments in chunk for part in arguments]
                answer = yield from scripts.SETTLE.run(self._keys, GROUP, consumer, 0, *parts)
                self._apply_answer([indexed_receipt for indexed_receipt, _ in chunk], answer, requests, results)
        return results, ready

    def _apply_answer(
        self,
        step: Sequence[_IndexedReceipt],
        answer: bytes,
        requests: Sequence[SettlementRequest],
        results: list[SettleResult],
    ) -> None:
        """Write the results of one step into *results*; *answer* has one letter for each of its receipts."""
        unconfirmed, held = self._unconfirmed, self._claims.held
        for (index, receipt), letter in zip(step, answer.decode(), strict=True):
            if letter == "s" and not unconfirmed and held.get(receipt.id) is receipt:  # the common case
                held.pop(receipt.id, None)
                results[index] = SettleResult.SETTLED
                continue
            if letter == _MEMORY_FULL:
                self._claims.memory_full = True
            result = _RESULT_BY_LETTER[letter]
            if result is SettleResult.LOST and self._was_settled_before(receipt, requests[index][1]):
                result = SettleResult.SETTLED
            if result is not SettleResult.FAILED:
                self._claims.mark_settled(receipt)
                self._unconfirmed.pop(receipt, None)
            results[index] = result

    def extend(self, deliveries: Sequence[Delivery], lease: float) -> Operation[list[float | None]]:
        """Renew the claims that still exist; return the end of each, None for one that is lost."""
        ends: list[float | None] = [None] * len(deliveries)
        receipts_by_consumer: dict[str, list[_IndexedReceipt]] = {}
        for index, delivery in enumerate(deliveries):
            if isinstance(delivery.receipt, RedisReceipt):
                receipts_by_consumer.setdefault(delivery.receipt.consumer, []).append((index, delivery.receipt))
        for consumer, indexed in receipts_by_consumer.items():
            for start in range(0, len(indexed), _MAX_STEP_SETTLEMENTS):
                step = indexed[start : start + _MAX_STEP_SETTLEMENTS]
                until = self._clock() + lease
                claims = [part for _, receipt in step for part in (receipt.id, receipt.claim_count)]
                answer = yield from scripts.EXTEND.run(self._keys[:1], GROUP, consumer, *claims)
                for (index, receipt), letter in zip(step, answer.decode(), strict=True):
                    if letter == "1":
                        ends[index] = until
                    else:
                        self._claims.mark_settled(receipt)
        return ends

    def _was_settled_before(self, receipt: RedisReceipt, settlement: Settlement) -> bool:
        """Return whether an earlier settlement of this worker was executed and its answer lost.

        Until the lease ends, no other consumer claims the entry.
        """
        unconfirmed = self._unconfirmed.get(receipt)
        return unconfirmed is not None and unconfirmed[0] == settlement and self._clock() < unconfirmed[1]


def _encode_settlement(delivery: Delivery, settlement: Any, codec: Codec) -> tuple[Any, ...] | None:
    """Return the script arguments of a settlement; None if it cannot be encoded."""
    receipt = delivery.receipt
    try:
        if isinstance(settlement, Release):
            return ("release", receipt.id, receipt.claim_count, *_NO_VALUES)
        if isinstance(settlement, Defer):
            delay = round(settlement.delay * 1000)
            return ("later", receipt.id, receipt.claim_count, delay, *_encode_changes(delivery, settlement, codec))
        if isinstance(settlement, DeadLetter) and (
            settlement.failure is None or isinstance(settlement.failure, Failure)
        ):
            return ("dead", receipt.id, receipt.claim_count, encode_dead_letter(delivery, settlement, codec), "", "")
        if isinstance(settlement, Ack):  # a subclass
            return ("ack", receipt.id, receipt.claim_count, *_NO_VALUES)
    except (UnencodableError, UnicodeError, ValueError):
        return None
    return None


def _encode_changes(delivery: Delivery, later: Defer, codec: Codec) -> tuple[str, str]:
    """Return the fields to remove, and those to add; an undecodable message keeps its own."""
    counted = delivery.receipt.deliveries - 1
    changed = {DELIVERIES_HEADER: str(counted)} if counted else {}
    if not delivery.receipt.readable:
        return json.dumps([DELIVERIES_HEADER]), _to_flat_json(changed)
    headers = write_envelope(codec, delivery, later)
    return _CHANGING_HEADERS_JSON, _to_flat_json(
        changed | {name: headers[name] for name in CHANGING_HEADERS if name in headers}
    )


def _to_flat_json(fields: dict[str, str]) -> str:
    return json.dumps([part for pair in fields.items() for part in pair])
