"""Intake: what was fetched gets its place: in the line for a slot, in that of its key, or on the way back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ergon_framework.connectors.base import Ack, DeadLetter, Delivery, Later, MissingKeyError, Release, UndecodableError
from ergon_framework.failure import Deferral, describe
from ergon_framework.task.admission import Admission
from ergon_framework.task.handling import Handling
from ergon_framework.task.report import Kind, Outcome, Report
from ergon_framework.task.settle import Item, Settler
from ergon_framework.task.watch import Onlooker
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Senses
    from ergon_framework.task.mixins.policies import ConsumerLoopPolicy

#: The reason of what the inbox acks.
DONE = "done"
#: The reason of what is encrypted with a key that is missing here, and the longest time until it comes again.
MISSING_KEY = "missing_key"
MISSING_KEY_DELAY_SECONDS = 30.0


class Intake:
    """Everybody who was fetched and has not started."""

    def __init__(
        self,
        policy: ConsumerLoopPolicy,
        handling: Handling,
        settler: Settler,
        *,
        senses: Senses,
        report: Report,
        watch: Onlooker,
    ) -> None:
        self._policy = policy
        self._handling = handling
        self._settler = settler
        self._senses = senses
        self._report = report
        self._watch = watch
        self._admission = Admission(policy.concurrency.value)
        #: Whether one of those who wait may be on its last permitted delivery.
        self._may_hold_last = False
        #: Takes the head out of the line.
        self.next = self._admission.next
        #: Every claim that is held, from fetch to settle.
        self.claims = settler.claims

    def __len__(self) -> int:
        return len(self._admission)

    @property
    def ready(self) -> int:
        """How many wait for nothing but a slot."""
        return self._admission.ready

    @property
    def room(self) -> float:
        """How many more the limit allows."""
        limit = self._policy.limit
        return float("inf") if limit is None else limit - self._report.started - len(self._admission)

    @property
    def holds_last(self) -> bool:
        """Whether one of those who wait is on its last permitted delivery."""
        if self._may_hold_last:
            most = self._policy.max_deliveries
            self._may_hold_last = any(delivery.deliveries >= most for delivery in self._admission)
        return self._may_hold_last

    def take(self, delivery: Delivery) -> None:
        """Give *delivery* its place."""
        transaction, policy = delivery.transaction, self._policy
        self._may_hold_last = self._may_hold_last or delivery.deliveries >= policy.max_deliveries
        self.claims[delivery.receipt] = delivery
        reason = self._refusal(delivery)
        if reason is None and isinstance(delivery.error, MissingKeyError):
            if self._defer_without_key(delivery, delivery.error):
                return
            reason = MISSING_KEY
        if reason is not None:
            self._refuse(delivery, reason)
            return
        if policy.limit is not None and self.room <= 0:
            self.give_back(delivery, "limit")
            return
        obstacle = self._admission.admit(delivery)
        if obstacle is not None:
            later = Later.unchanged(policy.identity_delay, transaction)
            self._settler.put(Item(delivery, later, Outcome(transaction, Kind.DEFERRED, reason=obstacle)))

    def head(self) -> Delivery | None:
        """The one that is next; those whose claims are gone are dropped on the way to it."""
        head, lost = self._admission.head, self._handling.lost
        while lost and head is not None and head.receipt in lost:
            self._admission.next()
            self.give_back(head, "lost")
            self.left(head)
            head = self._admission.head
        return head

    def left(self, delivery: Delivery) -> None:
        """*delivery* is no longer in flight."""
        lost = self._handling.lost
        if lost:
            lost.discard(delivery.receipt)
        self._admission.left(delivery)

    def give_back(self, delivery: Delivery, reason: str) -> None:
        """Release *delivery*, unless its claim is gone anyway."""
        settlement = None if delivery.receipt in self._handling.lost else Release()
        outcome = None
        # Anything else that a connector returned in its place has no id that a report could name.
        if isinstance(delivery.transaction, Transaction):
            outcome = Outcome(delivery.transaction, Kind.RELEASED, reason=reason)
        self._settler.put(Item(delivery, settlement, outcome))

    def clear_behind(self, reason: str) -> None:
        """Give back everybody who waits but the head."""
        for delivery in self._admission.behind():
            self.give_back(delivery, reason)

    def clear(self, reason: str) -> None:
        """Give back everybody who waits."""
        for delivery in self._admission.clear():
            self.give_back(delivery, reason)

    def remember_lost(self, running: Iterable[Delivery]) -> None:
        """Keep in mind only those lost claims whose deliveries wait here or are *running*.

        Of the others the broker will say that they are lost when they are settled.
        """
        self._handling.lost.intersection_update({each.receipt for each in (*running, *self._admission)})

    def _refusal(self, delivery: Delivery) -> str | None:
        """Why a delivery is settled before any lifecycle, if it is."""
        if delivery.done:
            return DONE
        if isinstance(delivery.error, UndecodableError):
            return "undecodable"
        if delivery.deliveries > self._policy.max_deliveries:
            return "max_deliveries"
        expires_at = delivery.transaction.expires_at
        if expires_at is not None and expires_at <= self._senses.wall():
            return "expired"
        return None

    def _defer_without_key(self, delivery: Delivery, error: MissingKeyError) -> bool:
        """Put *delivery* off at no cost, unless ``loop.max_deferral`` has passed since it was first put off.

        Another worker may have its key, or this one after its next start; no worker ever has an invented one.
        """
        transaction, now = delivery.transaction, self._senses.wall()
        deferral = Deferral.following(
            transaction.deferral, now=now, limit=self._policy.max_deferral, code=MISSING_KEY, error=describe(error)
        )
        if deferral is None:
            return False
        outcome = Outcome(transaction, Kind.DEFERRED, reason=MISSING_KEY)
        outcome.error = error
        delay = min(MISSING_KEY_DELAY_SECONDS, deferral.until - now)
        later = Later(delay, transaction.attempts, transaction.history, deferral)
        self._settler.put(Item(delivery, later, outcome))
        return True

    def _refuse(self, delivery: Delivery, reason: str) -> None:
        self._report.refused[reason] = self._report.refused.get(reason, 0) + 1
        self._watch.refused(delivery, reason)
        if reason == DONE:
            self._settler.put(Item(delivery, Ack(), None))
            return
        outcome = Outcome(delivery.transaction, reason=reason)
        outcome.error = delivery.error
        failure = self._handling.failure_of(outcome, delivery, reason)
        self._settler.put(Item(delivery, DeadLetter(reason, failure), None))
