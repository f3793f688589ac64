"""Settle a group of claims, each fenced by its worker and token.

A settlement says what happens to a claimed message: it is acked, released, deferred or dead-lettered. A claim is the
row of one fetch, found by the worker instance and a token; a worker that has lost its claim finds no row, so that its
settlement changes nothing (fencing).

The ClaimManager knows the unsettled messages of each claim (``held``) and the empty claims whose rows still exist
(``left_over``). A settlement that takes the last messages of a claim also deletes its row: such claims are *emptied*.
The WorkerLease is the instance of this process, with the end of its lease. An Operation is a generator that yields
queries and receives their rows; a thread or an event loop runs it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg

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
from ergon_framework.connectors.encryption import get_codec_keys, hide_failure, write_envelope
from ergon_framework.connectors.postgres import sql
from ergon_framework.connectors.postgres.claims import PostgresReceipt
from ergon_framework.database.errors import get_unavailability_cause
from ergon_framework.database.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query
from ergon_framework.failure import Failure

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.claims import ClaimManager
    from ergon_framework.connectors.postgres.client import WorkerLease

#: The index of a settlement in its group, its delivery and the settlement.
_IndexedSettlement: TypeAlias = tuple[int, Delivery, Any]

#: Ids of message, worker and token.
_Claim: TypeAlias = tuple[int, int, int]

#: The longest stored text of a reason or a name.
_MAX_TEXT_CHARS = 1000


class PostgresSettler:
    """Settles the deliveries of one queue."""

    def __init__(self, worker_lease: WorkerLease, claims: ClaimManager, *, codec: Codec, inbox: bool) -> None:
        self._worker_lease = worker_lease
        self._claims = claims
        self._codec = codec
        self._inbox = inbox
        #: Claims whose settlement was sent and never confirmed.
        self._uncertain: set[PostgresReceipt] = set()
        #: Unsent settlements. The caller may have given up, and a living worker instance keeps its claims.
        self._unsent: dict[PostgresReceipt, SettlementRequest] = {}
        #: Claims whose settlement has failed, each with the time at which it returns unless settled or extended.
        self._failed: dict[PostgresReceipt, float] = {}

    def queue_unsent(self, requests: Sequence[SettlementRequest]) -> None:
        """Queue unsent settlements; they are flushed with the next claim."""
        for delivery, settlement in requests:
            if isinstance(delivery.receipt, PostgresReceipt):
                self._unsent[delivery.receipt] = (delivery, settlement)

    def flush_unsent(self, queue: int) -> Operation[None]:
        """Flush the unsent settlements; a caller that repeats one then gets the result SETTLED."""
        worker = self._worker_lease.worker
        # The claims of an earlier instance returned to the queue when that instance expired.
        self._uncertain -= {receipt for receipt in list(self._uncertain) if receipt.worker != worker}
        popped = [self._unsent.pop(receipt, None) for receipt in list(self._unsent)]
        unsent = [request for request in popped if request is not None and request[0].receipt.worker == worker]
        try:
            results, _ = yield from self.settle(queue, unsent)
        except BaseException as error:
            # A permanent rejection would repeat with every claim, so those settlements are not queued again.
            if not isinstance(error, psycopg.Error) or _is_temporary(error):
                self.queue_unsent(unsent)
            else:
                self._mark_failed(unsent)
            raise
        settled = zip(unsent, results, strict=True)
        self._uncertain |= {delivery.receipt for (delivery, _), result in settled if result is SettleResult.SETTLED}

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def _mark_failed(self, requests: Iterable[SettlementRequest]) -> None:
        """Let these claims end with the current lease unless they are settled before.

        The process renews one lease for all its claims, which would keep these for as long as it runs.
        """
        for delivery, _ in requests:
            if isinstance(delivery.receipt, PostgresReceipt):
                self._failed.setdefault(delivery.receipt, self._worker_lease.until)

    def extend_failed(self, receipts: Iterable[PostgresReceipt], until: float) -> None:
        """Extend the claims of *receipts* whose settlement has failed: the caller is going to settle them."""
        self._failed |= {receipt: until for receipt in receipts if receipt in self._failed}

    def return_failed(self, queue: int) -> Operation[bool]:
        """Put messages back whose settlement has failed and whose lease is over; return whether there were any."""
        now, worker = time.monotonic(), self._worker_lease.worker
        due = [receipt for receipt, end in list(self._failed.items()) if end <= now]
        own_receipts = [receipt for receipt in due if receipt.worker == worker]
        if own_receipts:
            emptied = self._find_emptied(own_receipts)
            yield BEGIN
            yield Query(sql.RETURN_CLAIMS, _build_claim_parameters(own_receipts, queue, emptied))
            yield Query(sql.NOTIFY_LISTENERS, {"queue": queue})
            yield COMMIT
            self._claims.mark_settled(own_receipts, emptied)
        # The claims of an earlier instance returned when that instance expired.
        for receipt in due:
            self._failed.pop(receipt, None)
        return bool(own_receipts)

    def settle(self, queue: int, requests: Sequence[SettlementRequest]) -> Operation[tuple[list[SettleResult], bool]]:
        """Settle all; return one result each, and whether a message has become ready by it."""
        results = [SettleResult.FAILED] * len(requests)
        groups = self._group(requests, results)
        try:
            ready = yield from self._settle_groups(queue, groups, results)
        except psycopg.DataError:
            # One settlement cannot be written. They are settled one by one, so that the others succeed.
            yield ROLLBACK
            ready = False
            for kind, indexed in groups.items():
                for single in indexed:
                    try:
                        ready = (yield from self._settle_groups(queue, {kind: [single]}, results)) or ready
                    except psycopg.DataError:
                        yield ROLLBACK
        answers = zip(requests, results, strict=True)
        self._mark_failed([request for request, result in answers if result is SettleResult.FAILED])
        return results, ready

    def _settle_groups(
        self, queue: int, groups: dict[type[Settlement], list[_IndexedSettlement]], results: list[SettleResult]
    ) -> Operation[bool]:
        """Settle *groups*, write into *results*, and return whether a message has become ready by it."""
        receipts = {delivery.receipt for indexed in groups.values() for _, delivery, _ in indexed}
        emptied = self._find_emptied_by(groups)
        try:
            executed, ready = yield from self._execute(queue, groups, emptied)
            settled = executed | (yield from self._find_settled_before(receipts, executed))
        except psycopg.DataError:
            raise
        except BaseException:
            self._uncertain |= receipts
            raise
        for indexed in groups.values():
            for index, delivery, _ in indexed:
                results[index] = SettleResult.SETTLED if _to_claim(delivery.receipt) in settled else SettleResult.LOST
        self._uncertain -= receipts
        for receipt in receipts:
            self._unsent.pop(receipt, None)
            self._failed.pop(receipt, None)
        self._claims.mark_settled(receipts, emptied)
        return ready

    def _execute(
        self, queue: int, groups: dict[type[Settlement], list[_IndexedSettlement]], emptied: set[tuple[int, int]]
    ) -> Operation[tuple[set[_Claim], bool]]:
        """Settle in one database transaction; return the settled claims, and whether a message became ready by it."""
        kinds = list(groups)
        # Only the last statement may delete an emptied claim: the others still need its row.
        queries = [self._build_query(kind, queue, groups[kind], emptied if kind is kinds[-1] else ()) for kind in kinds]
        keys = sorted({key for kind in (Ack, DeadLetter) for key in _iterate_keys(groups.get(kind, ()))})
        ready = bool(groups.get(Release)) or any(settlement.delay <= 0 for *_, settlement in groups.get(Defer, ()))
        executed: set[_Claim] = set()
        if len(queries) == 1 and not keys and not ready:
            rows = yield queries[0]
            return set(rows), False
        yield BEGIN
        if keys:
            yield Query(sql.LOCK_SETTLED_KEYS, {"queue": queue, "keys": keys})
        for query in queries:
            rows = yield query
            executed |= set(rows)
        if keys and (yield Query(sql.UNBLOCK_KEYS, {"queue": queue, "keys": keys})):
            ready = True
        if ready:
            yield Query(sql.NOTIFY_LISTENERS, {"queue": queue})
        yield COMMIT
        return executed, ready

    def _find_settled_before(self, receipts: set[PostgresReceipt], executed: set[_Claim]) -> Operation[set[_Claim]]:
        """Return the claims that are missing because an earlier settlement of this worker was not confirmed.

        A living worker instance loses no claim, so a claim that is missing was settled. The server decides whether the
        instance lives, because this process may have been suspended.
        """
        uncertain = {receipt for receipt in receipts & self._uncertain if _to_claim(receipt) not in executed}
        if not uncertain:
            return set()
        rows = yield Query(sql.SELECT_LIVING_WORKERS, {"workers": list({receipt.worker for receipt in uncertain})})
        living = {row[0] for row in rows}
        return {_to_claim(receipt) for receipt in uncertain if receipt.worker in living}

    def _find_emptied_by(self, groups: dict[type[Settlement], list[_IndexedSettlement]]) -> set[tuple[int, int]]:
        return self._find_emptied(delivery.receipt for indexed in groups.values() for _, delivery, _ in indexed)

    def _find_emptied(self, receipts: Iterable[PostgresReceipt]) -> set[tuple[int, int]]:
        """Return the claims that are empty once all *receipts* are settled, and those that were empty before."""
        settled: dict[tuple[int, int], set[int]] = {}
        for receipt in receipts:
            settled.setdefault((receipt.worker, receipt.token), set()).add(receipt.id)
        emptied = {claim for claim, ids in settled.items() if self._claims.held.get(claim, ids) <= ids}
        return emptied | self._claims.left_over

    def _build_query(
        self,
        kind: type[Settlement],
        queue: int,
        indexed: list[_IndexedSettlement],
        emptied: Collection[tuple[int, int]],
    ) -> Query:
        """Build the statement for all settlements of one *kind*; *emptied* are the claims whose rows it deletes."""
        receipts = [delivery.receipt for _, delivery, _ in indexed]
        parameters = _build_claim_parameters(receipts, queue, emptied)
        if kind is Ack:
            has_keys = any(receipt.key is not None for receipt in receipts)
            return Query(sql.ACK[has_keys, self._inbox], parameters)
        if kind is Release:
            return Query(sql.RELEASE, parameters)
        if kind is Defer:
            defer_parameters = {
                "delays": [settlement.delay for *_, settlement in indexed],
                "headers": [self._encode_envelope(indexed_settlement) for indexed_settlement in indexed],
            }
            return Query(sql.DEFER, {**parameters, **defer_parameters})
        return Query(sql.DEAD_LETTER, {**parameters, **_build_dead_letter_parameters(indexed, self._codec)})

    def _group(
        self, requests: Sequence[SettlementRequest], results: list[SettleResult]
    ) -> dict[type[Settlement], list[_IndexedSettlement]]:
        """Group by kind; a receipt of another connector has the result LOST, an invalid settlement FAILED."""
        groups: dict[type[Settlement], list[_IndexedSettlement]] = {}
        for index, (delivery, settlement) in enumerate(requests):
            if not isinstance(delivery.receipt, PostgresReceipt):
                results[index] = SettleResult.LOST
                continue
            kind = next(
                (candidate for candidate in (Ack, Release, Defer, DeadLetter) if isinstance(settlement, candidate)),
                None,
            )
            if kind is None or not self._is_writable(delivery, settlement):
                continue
            groups.setdefault(kind, []).append((index, delivery, settlement))
        return groups

    def _is_writable(self, delivery: Delivery, settlement: Any) -> bool:
        if isinstance(settlement, DeadLetter):
            return settlement.failure is None or isinstance(settlement.failure, Failure)
        if isinstance(settlement, Defer):
            try:
                self._encode_envelope((0, delivery, settlement))
            except UnencodableError:
                return False
        return True

    def _encode_envelope(self, indexed: _IndexedSettlement) -> str | None:
        """Return the envelope of a deferred transaction; None for an undecodable one, which keeps its headers."""
        _, delivery, settlement = indexed
        if not delivery.receipt.readable:
            return None
        return json.dumps(write_envelope(self._codec, delivery, settlement))


def _to_claim(receipt: PostgresReceipt) -> _Claim:
    return receipt.id, receipt.worker, receipt.token


def _is_temporary(error: psycopg.Error) -> bool:
    return isinstance(error, psycopg.OperationalError) or bool(get_unavailability_cause(error))


def _build_claim_parameters(
    receipts: Sequence[PostgresReceipt], queue: int, emptied: Collection[tuple[int, int]]
) -> dict[str, Any]:
    """Return the parameters by which a statement finds the claims of *receipts*."""
    return {
        "ids": _render_array(receipt.id for receipt in receipts),
        "ranks": _render_array("null" if receipt.rank is None else receipt.rank for receipt in receipts),
        "workers": _render_array(receipt.worker for receipt in receipts),
        "tokens": _render_array(receipt.token for receipt in receipts),
        "empty_workers": _render_array(worker for worker, _ in emptied),
        "empty_tokens": _render_array(token for _, token in emptied),
        "queue": queue,
    }


def _render_array(numbers: Iterable[int | str]) -> str:
    """Render *numbers* as an array literal of the server: a tenth of the time of the driver's conversion."""
    return "{" + ",".join(map(str, numbers)) + "}"


def _iterate_keys(indexed: Iterable[_IndexedSettlement]) -> Iterator[str]:
    for _, delivery, _ in indexed:
        if delivery.receipt.key is not None:
            yield delivery.receipt.key


def _build_dead_letter_parameters(indexed: list[_IndexedSettlement], codec: Codec) -> dict[str, list[Any]]:
    dead_letters: list[tuple[Delivery, DeadLetter]] = [(delivery, settlement) for _, delivery, settlement in indexed]
    failures = [hide_failure(get_codec_keys(codec), settlement.failure) for _, settlement in dead_letters]
    return {
        "reasons": sanitize_text(settlement.reason for _, settlement in dead_letters),
        "names": sanitize_text(delivery.transaction.id for delivery, _ in dead_letters),
        "types": sanitize_text(delivery.transaction.type for delivery, _ in dead_letters),
        "tenants": sanitize_text(delivery.transaction.tenant for delivery, _ in dead_letters),
        "correlations": sanitize_text(delivery.transaction.correlation for delivery, _ in dead_letters),
        "tasks": sanitize_text(None if failure is None else failure.task_name for failure in failures),
        "error_types": sanitize_text(None if failure is None else failure.error_type for failure in failures),
        "categories": [None if failure is None else failure.category.value for failure in failures],
        "readables": [delivery.receipt.readable for delivery, _ in dead_letters],
        "failures": [None if failure is None else failure.model_dump_json() for failure in failures],
    }


def sanitize_text(texts: Iterable[str | None]) -> list[str | None]:
    """Replace what a text column cannot hold, NULs and lone surrogates, and cut each text to its maximum length."""
    return [
        None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()[:_MAX_TEXT_CHARS]
        for text in texts
    ]
