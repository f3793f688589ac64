"""Delivery handling: one delivery, from its start until its settlement is queued."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import DeadLetter, Delivery
from ergon_framework.engine.effects import Script, await_exit, on_exit
from ergon_framework.failure import Failure
from ergon_framework.task.lifecycle import LifecycleSpec, LifecycleStarter, run_lifecycle
from ergon_framework.task.report import Outcome, OutcomeKind, StopReason
from ergon_framework.task.settle import PendingSettlement, Settler, failure_record, requires_exited_call, settlement_for
from ergon_framework.task.watch import LoopObserver

if TYPE_CHECKING:
    from ergon_framework.task.mixins.policies import SettlePolicy


class DeliveryHandler:
    """Handles the deliveries of one loop."""

    def __init__(
        self,
        spec: LifecycleSpec,
        policy: SettlePolicy,
        settler: Settler,
        *,
        name: str,
        observer: LoopObserver,
        start: LifecycleStarter = run_lifecycle,
    ) -> None:
        self._start = start
        self._spec = spec
        self._clock = spec.clock
        self._policy = policy
        self._settler = settler
        self._name = name
        self._observer = observer
        #: Receipts of lost claims whose deliveries are still here.
        self.lost_receipts: set[Any] = set()
        #: By receipt: settlements that may redeliver a transaction whose call still runs; they wait for its exit.
        self.postponed: dict[Any, PendingSettlement] = {}
        #: Why the loop stops running work; the reason of the outcomes that it releases.
        self.stop_reason = StopReason.STOP

    def run(self, delivery: Delivery) -> Script[None]:
        """Run the lifecycle of *delivery* and queue its settlement."""
        transaction = delivery.transaction
        outcome = yield from self._start(
            self._spec, transaction, self._observer.on_transaction_start(transaction, delivery)
        )
        if delivery.receipt in self.lost_receipts:
            outcome.kind, outcome.reason = OutcomeKind.RELEASED, "lost"
            self._settler.enqueue(PendingSettlement(delivery, None, outcome))
            return
        is_released = outcome.kind is OutcomeKind.RELEASED
        if is_released:
            outcome.reason = self.stop_reason.value
        settlement = settlement_for(outcome, self._policy)
        if type(settlement) is DeadLetter and settlement.failure is None:
            settlement = DeadLetter(settlement.reason, self.failure_record(outcome, delivery, settlement.reason))
        abandoned_call = outcome.abandoned_call
        item = PendingSettlement(delivery, settlement, outcome)
        if abandoned_call is None or abandoned_call.exited or not requires_exited_call(settlement):
            self._settler.enqueue(item)
        elif is_released:
            # It is requested to exit, but there is no time left to wait for it.
            has_exited = yield from await_exit(abandoned_call, self._clock.monotonic())
            self._settler.enqueue(item if has_exited is True else PendingSettlement(delivery, None, outcome))
        else:
            self.postponed[delivery.receipt] = item
            # Not through the loop, which may be in a long fetch at that moment.
            yield from on_exit(partial(self._settle_postponed, delivery.receipt, keep_claim=False))

    def _settle_postponed(self, receipt: Any, *, keep_claim: bool) -> None:
        """Queue a postponed settlement, unless it is queued already: calls exit on their own threads."""
        item = self.postponed.pop(receipt, None)
        if item is not None:
            self._settler.enqueue(PendingSettlement(item.delivery, None, item.outcome) if keep_claim else item)

    def keep_postponed_claims(self) -> None:
        """Keep the claims of calls that still run when the loop ends; the claims end with the process."""
        for receipt in list(self.postponed):
            self._settle_postponed(receipt, keep_claim=True)

    def failure_record(self, outcome: Outcome, delivery: Delivery, reason: str) -> Failure:
        """Return the failure record of *outcome*."""
        trace_id = self._observer.trace_id(outcome)
        return failure_record(
            outcome,
            delivery,
            reason,
            task=self._name,
            occurred_at=self._clock.wall(),
            trace_id=trace_id,
            options=self._observer.options,
        )
