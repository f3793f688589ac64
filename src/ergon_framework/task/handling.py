"""Handling: one delivery, from its start to its being handed over to be settled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import NEVER, Script, gone
from ergon_framework.failure import Failure
from ergon_framework.task.lifecycle import Course, lifecycle
from ergon_framework.task.report import Kind, Outcome
from ergon_framework.task.settle import Item, Settler, decide, failure_of, needs_absence
from ergon_framework.task.watch import Onlooker

if TYPE_CHECKING:
    from ergon_framework.task.mixins.policies import SettlePolicy


class Handling:
    """What all deliveries of a loop are handled with."""

    def __init__(self, course: Course, policy: SettlePolicy, settler: Settler, *, name: str, watch: Onlooker) -> None:
        self._course = course
        self._senses = course.senses
        self._policy = policy
        self._settler = settler
        self._name = name
        self._watch = watch
        #: Receipts of claims that are gone while their deliveries are still here.
        self.lost: set[Any] = set()

    def run(self, delivery: Delivery) -> Script[None]:
        """Take *delivery* through its lifecycle and have it settled."""
        transaction = delivery.transaction
        outcome = yield from lifecycle(self._course, transaction, self._watch.begin(transaction, delivery))
        if delivery.receipt in self.lost:
            outcome.kind, outcome.reason = Kind.RELEASED, "lost"
            self._settler.put(Item(delivery, None, outcome))
            return
        settlement = decide(outcome, self._policy, self.failure_of)
        body = outcome.body
        if body is not None and not body.left and needs_absence(settlement):
            # Somebody else must not begin while the body is still in there. When the loop ends it
            # is asked to leave, but there is no time left to wait for it.
            until = self._senses.clock() if outcome.reason == "stop" else NEVER
            if (yield from gone(body, until)) is not True:
                self._settler.put(Item(delivery, None, outcome))
                return
        self._settler.put(Item(delivery, settlement, outcome))

    def failure_of(self, outcome: Outcome) -> Failure:
        """The failure record of *outcome*."""
        trace_id = self._watch.trace_id(outcome)
        return failure_of(outcome, task=self._name, at=self._senses.wall(), trace_id=trace_id)
