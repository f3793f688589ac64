"""Handling: one delivery, from its start to its being handed over to be settled."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import DeadLetter, Delivery
from ergon_framework.engine.effects import Script, afterwards, gone
from ergon_framework.failure import Failure
from ergon_framework.task.lifecycle import Course, Start, lifecycle
from ergon_framework.task.report import End, Kind, Outcome
from ergon_framework.task.settle import Item, Settler, decide, failure_of, needs_absence
from ergon_framework.task.watch import Onlooker

if TYPE_CHECKING:
    from ergon_framework.task.mixins.policies import SettlePolicy


class Handling:
    """What all deliveries of a loop are handled with."""

    def __init__(
        self,
        course: Course,
        policy: SettlePolicy,
        settler: Settler,
        *,
        name: str,
        watch: Onlooker,
        start: Start = lifecycle,
    ) -> None:
        self._start = start
        self._course = course
        self._senses = course.senses
        self._policy = policy
        self._settler = settler
        self._name = name
        self._watch = watch
        #: Receipts of claims that are gone while their deliveries are still here.
        self.lost: set[Any] = set()
        #: What may bring a transaction back while its body still runs, by receipt: somebody else must not begin yet.
        self.postponed: dict[Any, Item] = {}
        #: Why the loop stops what runs; the reason of the outcomes that it releases.
        self.ending = End.STOP

    def run(self, delivery: Delivery) -> Script[None]:
        """Take *delivery* through its lifecycle and have it settled."""
        transaction = delivery.transaction
        outcome = yield from self._start(self._course, transaction, self._watch.begin(transaction, delivery))
        if delivery.receipt in self.lost:
            outcome.kind, outcome.reason = Kind.RELEASED, "lost"
            self._settler.put(Item(delivery, None, outcome))
            return
        stopped = outcome.kind is Kind.RELEASED
        if stopped:
            outcome.reason = self.ending.value
        settlement = decide(outcome, self._policy)
        if type(settlement) is DeadLetter and settlement.failure is None:
            settlement = DeadLetter(settlement.reason, self.failure_of(outcome, delivery, settlement.reason))
        body = outcome.body
        item = Item(delivery, settlement, outcome)
        if body is None or body.left or not needs_absence(settlement):
            self._settler.put(item)
        elif stopped:
            # It is asked to leave, but there is no time left to wait for it.
            has_left = yield from gone(body, self._senses.clock())
            self._settler.put(item if has_left is True else Item(delivery, None, outcome))
        else:
            self.postponed[delivery.receipt] = item
            # Not by way of the loop, which may be in a long fetch just then.
            yield from afterwards(partial(self._end, delivery.receipt, kept=False))

    def _end(self, receipt: Any, *, kept: bool) -> None:
        """Settle what was put off, unless somebody else has: bodies leave on threads of their own."""
        item = self.postponed.pop(receipt, None)
        if item is not None:
            self._settler.put(Item(item.delivery, None, item.outcome) if kept else item)

    def give_up(self) -> None:
        """The loop ends: claims whose bodies have not left are kept, and end with the process."""
        for receipt in list(self.postponed):
            self._end(receipt, kept=True)

    def failure_of(self, outcome: Outcome, delivery: Delivery, reason: str) -> Failure:
        """The failure record of *outcome*."""
        trace_id = self._watch.trace_id(outcome)
        return failure_of(
            outcome,
            delivery,
            reason,
            task=self._name,
            at=self._senses.wall(),
            trace_id=trace_id,
            options=self._watch.options,
        )
