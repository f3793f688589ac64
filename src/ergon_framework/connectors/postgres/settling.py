"""Settling: what a group of claims becomes, each fenced by its worker and token."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg

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
from ergon_framework.connectors.encryption import hide_failure, keys_of, write_envelope
from ergon_framework.connectors.postgres import statements
from ergon_framework.connectors.postgres.receipt import Receipt
from ergon_framework.failure import Failure
from ergon_framework.schema.failures import unavailability_of
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.claiming import Claiming
    from ergon_framework.connectors.postgres.tenure import Tenure

#: The place of a settlement in its group, with what it settles.
_Placed: TypeAlias = tuple[int, Delivery, Any]

#: Message, worker and token.
_Claim: TypeAlias = tuple[int, int, int]

#: Longest text that is kept of a reason or of a name.
_LONGEST = 1000


class Settler:
    """Settles for one queue."""

    def __init__(self, tenure: Tenure, claiming: Claiming, *, codec: Codec, inbox: bool) -> None:
        self._tenure = tenure
        self._claiming = claiming
        self._codec = codec
        self._inbox = inbox
        #: Claims whose settlement was sent and never answered.
        self._uncertain: set[Receipt] = set()
        #: What nobody could be told. Those who asked may have given up, and an instance that lives keeps its claims.
        self._owed: dict[Receipt, Settling] = {}
        #: Claims whose settlement has failed, each with the time at which it returns unless it is settled or extended.
        self._failed: dict[Receipt, float] = {}

    def owe(self, settlings: Sequence[Settling]) -> None:
        """Keep what could not be said, to be said with the next claim."""
        for delivery, how in settlings:
            if isinstance(delivery.receipt, Receipt):
                self._owed[delivery.receipt] = (delivery, how)

    def pay(self, queue: int) -> Operation[None]:
        """Settle what is owed; whoever asks for it once more is told that it is settled."""
        worker = self._tenure.worker
        # What an earlier instance owed came back to the queue when that instance was taken away.
        self._uncertain -= {receipt for receipt in list(self._uncertain) if receipt.worker != worker}
        taken = [self._owed.pop(receipt, None) for receipt in list(self._owed)]
        owed = [one for one in taken if one is not None and one[0].receipt.worker == worker]
        try:
            results, _ = yield from self.settle(queue, owed)
        except BaseException as error:
            # Whatever else the server has against it, it would have again, and no claim would ever be made.
            if not isinstance(error, psycopg.Error) or _may_pass(error):
                self.owe(owed)
            else:
                self._note_failed(owed)
            raise
        settled = zip(owed, results, strict=True)
        self._uncertain |= {delivery.receipt for (delivery, _), result in settled if result is SettleResult.SETTLED}

    @property
    def owes(self) -> bool:
        return bool(self._owed)

    def _note_failed(self, settlings: Iterable[Settling]) -> None:
        """Let these claims return with the lease unless they are settled; other renewals would keep them."""
        for delivery, _ in settlings:
            if isinstance(delivery.receipt, Receipt):
                self._failed.setdefault(delivery.receipt, self._tenure.until)

    def extend_failed(self, receipts: Iterable[Receipt], until: float) -> None:
        """Extend the claims of *receipts* whose settlement has failed: the caller is going to settle them."""
        self._failed |= {receipt: until for receipt in receipts if receipt in self._failed}

    def return_failed(self, queue: int) -> Operation[bool]:
        """Return claims whose settlement has failed and whose lease is over; return whether there were any."""
        now, worker = time.monotonic(), self._tenure.worker
        due = [receipt for receipt, end in list(self._failed.items()) if end <= now]
        mine = [receipt for receipt in due if receipt.worker == worker]
        if mine:
            emptied = self._find_emptied(mine)
            yield BEGIN
            yield Query(statements.RETURN, _claim_parameters(mine, queue, emptied))
            yield Query(statements.WAKE, {"queue": queue})
            yield COMMIT
            self._claiming.settled(mine, emptied)
        # What an earlier instance held came back when that instance was taken away.
        for receipt in due:
            self._failed.pop(receipt, None)
        return bool(mine)

    def settle(self, queue: int, settlings: Sequence[Settling]) -> Operation[tuple[list[SettleResult], bool]]:
        """One result each; and whether something has become ready by it."""
        results = [SettleResult.FAILED] * len(settlings)
        groups = self._grouped(settlings, results)
        try:
            ready = yield from self._settled(queue, groups, results)
        except psycopg.DataError:
            # One of them cannot be written. Each for itself: the others are not to pay for it.
            yield ROLLBACK
            ready = False
            for kind, placed in groups.items():
                for one in placed:
                    try:
                        ready = (yield from self._settled(queue, {kind: [one]}, results)) or ready
                    except psycopg.DataError:
                        yield ROLLBACK
        answered = zip(settlings, results, strict=True)
        self._note_failed([settling for settling, result in answered if result is SettleResult.FAILED])
        return results, ready

    def _settled(
        self, queue: int, groups: dict[type[Settlement], list[_Placed]], results: list[SettleResult]
    ) -> Operation[bool]:
        receipts = {delivery.receipt for placed in groups.values() for _, delivery, _ in placed}
        emptied = self._emptied(groups)
        try:
            found, ready = yield from self._told(queue, groups, emptied)
            settled = found | (yield from self._settled_before(receipts, found))
        except psycopg.DataError:
            raise
        except BaseException:
            self._uncertain |= receipts
            raise
        for placed in groups.values():
            for index, delivery, _ in placed:
                results[index] = SettleResult.SETTLED if _claim(delivery.receipt) in settled else SettleResult.LOST
        self._uncertain -= receipts
        for receipt in receipts:
            self._owed.pop(receipt, None)
            self._failed.pop(receipt, None)
        self._claiming.settled(receipts, emptied)
        return ready

    def _told(
        self, queue: int, groups: dict[type[Settlement], list[_Placed]], emptied: set[tuple[int, int]]
    ) -> Operation[tuple[set[_Claim], bool]]:
        """Which messages were settled, all in one transaction; and whether something became ready by it."""
        kinds = list(groups)
        # Only the last statement may find a claim empty: the others still need its row.
        queries = [self._query(kind, queue, groups[kind], emptied if kind is kinds[-1] else ()) for kind in kinds]
        keys = sorted({key for kind in (Ack, DeadLetter) for key in _keys(groups.get(kind, ()))})
        ready = bool(groups.get(Release)) or any(how.delay <= 0 for *_, how in groups.get(Later, ()))
        found: set[_Claim] = set()
        if len(queries) == 1 and not keys and not ready:
            rows = yield queries[0]
            return set(rows), False
        yield BEGIN
        if keys:
            yield Query(statements.LOCK_SETTLED, {"queue": queue, "keys": keys})
        for query in queries:
            rows = yield query
            found |= set(rows)
        if keys and (yield Query(statements.UNBLOCK, {"queue": queue, "keys": keys})):
            ready = True
        if ready:
            yield Query(statements.WAKE, {"queue": queue})
        yield COMMIT
        return found, ready

    def _settled_before(self, receipts: set[Receipt], found: set[_Claim]) -> Operation[set[_Claim]]:
        """Those that are gone because an earlier settlement of ours was not answered.

        Nobody takes from an instance that lives. Whether it does the server knows: we may have slept.
        """
        doubted = {receipt for receipt in receipts & self._uncertain if _claim(receipt) not in found}
        if not doubted:
            return set()
        rows = yield Query(statements.LIVING, {"workers": list({receipt.worker for receipt in doubted})})
        living = {row[0] for row in rows}
        return {_claim(receipt) for receipt in doubted if receipt.worker in living}

    def _emptied(self, groups: dict[type[Settlement], list[_Placed]]) -> set[tuple[int, int]]:
        return self._find_emptied(delivery.receipt for placed in groups.values() for _, delivery, _ in placed)

    def _find_emptied(self, receipts: Iterable[Receipt]) -> set[tuple[int, int]]:
        """The claims of which nothing is left once all of these are settled, or was left before."""
        settled: dict[tuple[int, int], set[int]] = {}
        for receipt in receipts:
            settled.setdefault((receipt.worker, receipt.token), set()).add(receipt.id)
        emptied = {claim for claim, ids in settled.items() if self._claiming.held.get(claim, ids) <= ids}
        return emptied | self._claiming.left_over

    def _query(
        self, kind: type[Settlement], queue: int, placed: list[_Placed], emptied: Collection[tuple[int, int]]
    ) -> Query:
        receipts = [delivery.receipt for _, delivery, _ in placed]
        given = _claim_parameters(receipts, queue, emptied)
        if kind is Ack:
            keyed = any(receipt.key is not None for receipt in receipts)
            return Query(statements.ACK[keyed, self._inbox], given)
        if kind is Release:
            return Query(statements.RELEASE, given)
        if kind is Later:
            later = {"delays": [how.delay for *_, how in placed], "headers": [self._headers(one) for one in placed]}
            return Query(statements.LATER, {**given, **later})
        return Query(statements.DEAD, {**given, **_burial(placed, self._codec)})

    def _grouped(
        self, settlings: Sequence[Settling], results: list[SettleResult]
    ) -> dict[type[Settlement], list[_Placed]]:
        """By kind; what is no claim of ours is lost, what is no settlement has failed."""
        groups: dict[type[Settlement], list[_Placed]] = {}
        for index, (delivery, how) in enumerate(settlings):
            if not isinstance(delivery.receipt, Receipt):
                results[index] = SettleResult.LOST
                continue
            kind = next((known for known in (Ack, Release, Later, DeadLetter) if isinstance(how, known)), None)
            if kind is None or not self._writable(delivery, how):
                continue
            groups.setdefault(kind, []).append((index, delivery, how))
        return groups

    def _writable(self, delivery: Delivery, how: Any) -> bool:
        if isinstance(how, DeadLetter):
            return how.failure is None or isinstance(how.failure, Failure)
        if isinstance(how, Later):
            try:
                self._headers((0, delivery, how))
            except UnencodableError:
                return False
        return True

    def _headers(self, placed: _Placed) -> str | None:
        """The envelope that a transaction comes back with; what could not be read comes back as it was."""
        _, delivery, how = placed
        if not delivery.receipt.readable:
            return None
        return json.dumps(write_envelope(self._codec, delivery, how))


def _claim(receipt: Receipt) -> _Claim:
    return receipt.id, receipt.worker, receipt.token


def _may_pass(error: psycopg.Error) -> bool:
    return isinstance(error, psycopg.OperationalError) or bool(unavailability_of(error))


def _claim_parameters(receipts: Sequence[Receipt], queue: int, emptied: Collection[tuple[int, int]]) -> dict[str, Any]:
    """Return the parameters by which a statement finds the claims of *receipts*."""
    return {
        "ids": _numbers(receipt.id for receipt in receipts),
        "ranks": _numbers("null" if receipt.rank is None else receipt.rank for receipt in receipts),
        "workers": _numbers(receipt.worker for receipt in receipts),
        "tokens": _numbers(receipt.token for receipt in receipts),
        "empty_workers": _numbers(worker for worker, _ in emptied),
        "empty_tokens": _numbers(token for _, token in emptied),
        "queue": queue,
    }


def _numbers(numbers: Iterable[int | str]) -> str:
    """As the server writes an array of numbers: a tenth of what the driver takes for the same."""
    return "{" + ",".join(map(str, numbers)) + "}"


def _keys(placed: Iterable[_Placed]) -> Iterator[str]:
    for _, delivery, _ in placed:
        if delivery.receipt.key is not None:
            yield delivery.receipt.key


def _burial(placed: list[_Placed], codec: Codec) -> dict[str, list[Any]]:
    dead: list[tuple[Delivery, DeadLetter]] = [(delivery, how) for _, delivery, how in placed]
    failures = [hide_failure(keys_of(codec), how.failure) for _, how in dead]
    return {
        "reasons": fitting(how.reason for _, how in dead),
        "names": fitting(delivery.transaction.id for delivery, _ in dead),
        "types": fitting(delivery.transaction.type for delivery, _ in dead),
        "tenants": fitting(delivery.transaction.tenant for delivery, _ in dead),
        "correlations": fitting(delivery.transaction.correlation for delivery, _ in dead),
        "tasks": fitting(None if failure is None else failure.task_name for failure in failures),
        "error_types": fitting(None if failure is None else failure.error_type for failure in failures),
        "categories": [None if failure is None else failure.category.value for failure in failures],
        "readables": [delivery.receipt.readable for delivery, _ in dead],
        "failures": [None if failure is None else failure.model_dump_json() for failure in failures],
    }


def fitting(texts: Iterable[str | None]) -> list[str | None]:
    """What a text column can hold: neither zeros nor halves of characters."""
    return [
        None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()[:_LONGEST]
        for text in texts
    ]
