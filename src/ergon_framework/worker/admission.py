"""Admission: deliveries between their fetch and their start.

A delivery is a transaction with its claim, the exclusive right to process it. Deliveries wait in the backlog for a
slot, in which one transaction runs at a time, or until no other transaction with their key runs. Some are settled
(acked, deferred or dead-lettered in the broker) instead of started: duplicates, expired, undecodable or too often
delivered ones. A released delivery returns to the broker, which redelivers it without counting a delivery.

The settler sends settlements to the broker. A PendingSettlement without a settlement only records the outcome, one
without an outcome only settles the delivery. A claim is lost if it ended before its settlement, because its lease
expired or the connection was lost: the broker then delivers the message again. The loop adds its receipt to
``lost_receipts`` of the delivery handler, the part that runs lifecycles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Delivery, MissingKeyError, Release, UndecodableError
from ergon_framework.failure import Deferral, describe_error
from ergon_framework.transaction import Transaction
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.lifecycle import DeliveryHandler
from ergon_framework.worker.report import Outcome, OutcomeKind, Report
from ergon_framework.worker.settle import PendingSettlement, Settler

if TYPE_CHECKING:
    from ergon_framework.clock import Clock
    from ergon_framework.worker.policies import ConsumerLoopPolicy


class DeliveryAdmission:
    """The deliveries that were fetched and have no slot yet, and the rules of what may run concurrently.

    One id is in flight at most once. Of one key, one transaction runs; the others wait in fetch order, without a
    slot, and at most as many as there are slots: one hot key must not fill the process with deliveries that cannot
    run.
    """

    def __init__(self, max_waiting_for_key: int) -> None:
        self._max_waiting_for_key = max_waiting_for_key
        self._ready: deque[Delivery] = deque()
        #: Removes and returns the next delivery to start.
        self.pop_next = self._ready.popleft
        self._waiting_by_key: dict[str, deque[Delivery]] = {}
        self._waiting_for_key = 0
        self._ids: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        """Return the number of deliveries that wait for a slot or for their key."""
        return len(self._ready) + self._waiting_for_key

    def __iter__(self) -> Iterator[Delivery]:
        """Yield the waiting deliveries: first those that wait for a slot, then those that wait for their key."""
        yield from self._ready
        for queue in self._waiting_by_key.values():
            yield from queue

    @property
    def ready_count(self) -> int:
        """The number of deliveries that wait only for a slot."""
        return len(self._ready)

    def admit(self, delivery: Delivery) -> str | None:
        """Queue *delivery*, or return what prevents it: its identity or its key."""
        transaction = delivery.transaction
        identity = (transaction.source, transaction.id)
        if identity in self._ids:
            return "identity"
        waiting = None if transaction.key is None else self._waiting_by_key.get(transaction.key)
        if waiting is not None:
            if self._waiting_for_key >= self._max_waiting_for_key:
                return "key"
            self._waiting_for_key += 1
            waiting.append(delivery)
        else:
            if transaction.key is not None:
                self._waiting_by_key[transaction.key] = deque()
            self._ready.append(delivery)
        self._ids.add(identity)
        return None

    @property
    def head(self) -> Delivery | None:
        """The next delivery to start, or None."""
        return self._ready[0] if self._ready else None

    def forget(self, delivery: Delivery) -> None:
        """Forget *delivery*, which is no longer in flight; the next one of its key may start."""
        transaction = delivery.transaction
        self._ids.discard((transaction.source, transaction.id))
        if transaction.key is None:
            return
        waiting = self._waiting_by_key[transaction.key]
        if waiting:
            self._waiting_for_key -= 1
            self._ready.append(waiting.popleft())
        else:
            del self._waiting_by_key[transaction.key]

    def take_all_but_next(self) -> list[Delivery]:
        """Remove and return all waiting deliveries but the next one, and forget them."""
        head = self._ready.popleft()
        # A key is taken by its delivery that runs or is ready. take_all() empties only the queue behind that delivery,
        # so the keys of the ready deliveries that are removed here become free below.
        ready_keys = [delivery.transaction.key for delivery in self._ready if delivery.transaction.key is not None]
        waiting = self.take_all()
        for delivery in waiting:
            self._ids.discard((delivery.transaction.source, delivery.transaction.id))
        for key in ready_keys:
            del self._waiting_by_key[key]
        self._ready.append(head)
        return waiting

    def take_all(self) -> list[Delivery]:
        """Remove and return all waiting deliveries; their ids and keys stay registered, for a loop that ends."""
        waiting = list(self)
        self._ready.clear()
        self._waiting_for_key = 0
        for queue in self._waiting_by_key.values():
            queue.clear()
        return waiting


# -- the backlog ------------------------------------------------------------------------------------

#: The reason for acking a delivery whose id is in the inbox, the connector's record of processed ids.
DONE_REASON = "done"
#: The reason of a delivery whose encryption key is missing here, and the longest delay of its redelivery.
MISSING_KEY_REASON = "missing_key"
MISSING_KEY_DELAY_SECONDS = 30.0


class Backlog:
    """The deliveries of a loop that were fetched and have not started, and the decision about each new one."""

    def __init__(
        self,
        policy: ConsumerLoopPolicy,
        delivery_handler: DeliveryHandler,
        settler: Settler,
        *,
        clock: Clock,
        report: Report,
        observer: LoopObserver,
    ) -> None:
        self._policy = policy
        self._delivery_handler = delivery_handler
        self._settler = settler
        self._clock = clock
        self._report = report
        self._observer = observer
        self._admission = DeliveryAdmission(policy.concurrency.value)
        #: Whether a waiting delivery may be on its last permitted delivery: set when one is added, so that
        #: has_last_delivery searches the backlog only then.
        self._may_have_last_delivery = False
        #: Removes and returns the next delivery to start.
        self.pop_next = self._admission.pop_next
        #: The delivery of every claim, from its fetch to its settlement, by receipt (the connector's handle of it).
        self.claims = settler.claims

    def __len__(self) -> int:
        return len(self._admission)

    @property
    def ready_count(self) -> int:
        """The number of deliveries that wait only for a slot."""
        return self._admission.ready_count

    @property
    def remaining_limit(self) -> float:
        """The number of further transactions that ``loop.limit`` allows: the maximum that the loop starts."""
        limit = self._policy.limit
        return float("inf") if limit is None else limit - self._report.started - len(self._admission)

    @property
    def has_last_delivery(self) -> bool:
        """Whether a waiting delivery is on its last permitted delivery; the loop runs such a transaction alone."""
        if self._may_have_last_delivery:
            max_deliveries = self._policy.max_deliveries
            self._may_have_last_delivery = any(delivery.deliveries >= max_deliveries for delivery in self._admission)
        return self._may_have_last_delivery

    def add(self, delivery: Delivery) -> None:
        """Queue *delivery* for a slot or its key, or settle it."""
        transaction, policy = delivery.transaction, self._policy
        self._may_have_last_delivery = self._may_have_last_delivery or delivery.deliveries >= policy.max_deliveries
        self.claims[delivery.receipt] = delivery
        reason = self._find_rejection(delivery)
        if reason is None and isinstance(delivery.error, MissingKeyError):
            if self._defer_without_key(delivery, delivery.error):
                return
            reason = MISSING_KEY_REASON
        if reason is not None:
            self._reject(delivery, reason)
            return
        if policy.limit is not None and self.remaining_limit <= 0:
            self.release(delivery, "limit")
            return
        obstacle = self._admission.admit(delivery)
        if obstacle is not None:
            defer = Defer.from_transaction(policy.duplicate_delay, transaction)
            self._settler.enqueue(
                PendingSettlement(delivery, defer, Outcome(transaction, OutcomeKind.DEFERRED, reason=obstacle))
            )

    def peek(self) -> Delivery | None:
        """Return the next delivery to start, and release the ones before it whose claims are lost."""
        head, lost = self._admission.head, self._delivery_handler.lost_receipts
        while lost and head is not None and head.receipt in lost:
            self._admission.pop_next()
            self.release(head, "lost")
            self.forget(head)
            head = self._admission.head
        return head

    def forget(self, delivery: Delivery) -> None:
        """Forget *delivery*, which is no longer in flight."""
        lost = self._delivery_handler.lost_receipts
        if lost:
            lost.discard(delivery.receipt)
        self._admission.forget(delivery)

    def release(self, delivery: Delivery, reason: str) -> None:
        """Release *delivery*; if its claim is lost, only record the outcome."""
        settlement = None if delivery.receipt in self._delivery_handler.lost_receipts else Release()
        outcome = None
        # A faulty connector may have returned another object in place of a Transaction; it has no id to report.
        if isinstance(delivery.transaction, Transaction):
            outcome = Outcome(delivery.transaction, OutcomeKind.RELEASED, reason=reason)
        self._settler.enqueue(PendingSettlement(delivery, settlement, outcome))

    def release_all_but_next(self, reason: str) -> None:
        """Release all waiting deliveries but the next one."""
        for delivery in self._admission.take_all_but_next():
            self.release(delivery, reason)

    def release_ready(self, reason: str) -> None:
        """Release the waiting deliveries and forget them, except those whose key a running transaction has."""
        while (head := self._admission.head) is not None:
            self._admission.pop_next()
            self.release(head, reason)
            self.forget(head)

    def release_all(self, reason: str) -> None:
        """Release all waiting deliveries."""
        for delivery in self._admission.take_all():
            self.release(delivery, reason)

    def prune_lost(self, running: Iterable[Delivery]) -> None:
        """Forget lost claims whose deliveries neither wait here nor are *running*.

        The broker reports those as lost when they are settled.
        """
        self._delivery_handler.lost_receipts.intersection_update(
            {each.receipt for each in (*running, *self._admission)}
        )

    def _find_rejection(self, delivery: Delivery) -> str | None:
        """Return why a delivery is settled before its lifecycle; None if it may start."""
        if delivery.done:
            return DONE_REASON
        if isinstance(delivery.error, UndecodableError):
            return "undecodable"
        if delivery.deliveries > self._policy.max_deliveries:
            return "max_deliveries"
        expires_at = delivery.transaction.expires_at
        if expires_at is not None and expires_at <= self._clock.wall():
            return "expired"
        return None

    def _defer_without_key(self, delivery: Delivery, error: MissingKeyError) -> bool:
        """Defer *delivery* without counting an attempt, until ``loop.max_deferral`` after its first deferral.

        Another worker may have the encryption key, or this one after a restart. If a producer invented the id of the
        key, no worker ever has it, so the deferrals end and the transaction is dead-lettered.
        """
        transaction, now = delivery.transaction, self._clock.wall()
        deferral = Deferral.from_previous(
            transaction.deferral,
            now=now,
            limit=self._policy.max_deferral,
            code=MISSING_KEY_REASON,
            error=describe_error(error),
        )
        if deferral is None:
            return False
        outcome = Outcome(transaction, OutcomeKind.DEFERRED, reason=MISSING_KEY_REASON)
        outcome.error = error
        delay = min(MISSING_KEY_DELAY_SECONDS, deferral.until - now)
        defer = Defer(delay, transaction.attempts, transaction.history, deferral)
        self._settler.enqueue(PendingSettlement(delivery, defer, outcome))
        return True

    def _reject(self, delivery: Delivery, reason: str) -> None:
        """Settle a delivery that is not handled: with Ack if it succeeded before, otherwise with DeadLetter."""
        self._report.rejected[reason] = self._report.rejected.get(reason, 0) + 1
        self._observer.on_rejected(delivery, reason)
        if reason == DONE_REASON:
            self._settler.enqueue(PendingSettlement(delivery, Ack(), None))
            return
        outcome = Outcome(delivery.transaction, reason=reason)
        outcome.error = delivery.error
        failure = self._delivery_handler.failure_record(outcome, delivery, reason)
        self._settler.enqueue(PendingSettlement(delivery, DeadLetter(reason, failure), None))
