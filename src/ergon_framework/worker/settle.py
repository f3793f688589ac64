"""Settling: what happens to a delivery in its broker after its outcome (ack, redelivery, dead letter or release).

A delivery is a fetched transaction; its claim is the exclusive right to process it, and its receipt is the connector's
handle of the claim. A script, a generator that a driver runs next to the lifecycles, sends the settlements of many
transactions in one call to the connector. If claims are leases, which expire unless they are renewed, another script
renews all of them from fetch to settlement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

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
from ergon_framework.engine.effects import NEVER, Call, Expired, Interrupted, Ok, Script, await_exit, call, sleep, wait
from ergon_framework.errors import Category, ErgonError, get_details
from ergon_framework.failure import Failure, HandlerError, describe_error
from ergon_framework.telemetry.options import DEFAULT_OPTIONS, TelemetryOptions
from ergon_framework.worker.report import Outcome, OutcomeKind, Report, attempt_history
from ergon_framework.worker.spans import get_tracebacks

if TYPE_CHECKING:
    from ergon_framework.clock import Clock
    from ergon_framework.engine.scheduler import Mailbox
    from ergon_framework.worker.events import LoopObserver
    from ergon_framework.worker.policies import SettlePolicy


def renew_leases(
    extend: Callable[[Sequence[Delivery]], Any],
    claims: dict[Any, Delivery],
    *,
    lease: float,
    clock: Clock,
    on_lost: Callable[[list[Any]], None],
) -> Script[None]:
    """Extend all *claims*, deliveries by receipt, three times per *lease* seconds, until interrupted.

    *extend* returns the new end of each claim, None for a lost one; *on_lost* gets the receipts of lost claims. A call
    that fails or hangs is repeated at the next interval: one such call does not end a claim.
    """
    interval = lease / 3
    due = clock.monotonic() + interval
    while True:
        if (yield from sleep(due)) is not None:
            return
        due = clock.monotonic() + interval
        leased = [delivery for delivery in list(claims.values()) if delivery.lease_until is not None]
        if not leased:
            continue
        answer = yield from call(Call("extend", extend, (leased,), due))
        if isinstance(answer, Expired | Interrupted) and answer.call is not None:
            # Cancels the call where the driver can, and does not wait for its exit.
            yield from await_exit(answer.call, clock.monotonic())
        if isinstance(answer, Interrupted):
            return
        # Not strict below: a faulty connector may return fewer ends, and the others are renewed at the next interval.
        if isinstance(answer, Ok) and isinstance(answer.value, Sequence):
            lost_receipts = [
                delivery.receipt for delivery, until in zip(leased, answer.value, strict=False) if until is None
            ]
            for delivery, until in zip(leased, answer.value, strict=False):
                delivery.lease_until = until or delivery.lease_until
            if lost_receipts:
                on_lost(lost_receipts)


# -- settlement -------------------------------------------------------------------------------------

#: Put into the settler's mailbox to make the settler end.
CLOSE_EVENT: Final = object()
_ACK: Final = Ack()
#: Constants, because enum member access is slow and each settlement needs them.
_SUCCEEDED: Final = OutcomeKind.SUCCEEDED
_SETTLED: Final = SettleResult.SETTLED
_FAILED: Final = SettleResult.FAILED
#: The names of results in a report. None: no settlement was sent, because the claim is lost, or is kept while a call of
#: its transaction still runs; the broker redelivers the transaction when the claim ends.
_RESULT_NAMES: Final = {None: "kept"} | {result: result.value for result in SettleResult}
_RELEASE: Final = Release()

#: Put into the loop's mailbox when a group was settled and the loop waits for that.
SETTLED_EVENT: Final = object()


class PendingSettlement:
    """One delivery that waits for its settlement.

    Without a settlement its claim is kept or lost, and only the outcome is recorded. Without an outcome it is settled
    without a lifecycle: it was rejected.
    """

    __slots__ = ("delivery", "outcome", "settlement")

    def __init__(self, delivery: Delivery, settlement: Settlement | None, outcome: Outcome | None) -> None:
        self.delivery = delivery
        self.settlement = settlement
        self.outcome = outcome


def settlement_for(outcome: Outcome, policy: SettlePolicy) -> Settlement:
    """Return the settlement that a handler returned, or else that of the policy."""
    if outcome.settlement is not None:
        return outcome.settlement
    if outcome.kind is _SUCCEEDED:
        return _ACK
    if outcome.kind is OutcomeKind.RELEASED or outcome.error is None:
        return _RELEASE
    by_category = {
        Category.BUSINESS: policy.on_business,
        Category.SYSTEM: policy.on_system,
        Category.TIMEOUT: policy.on_timeout,
    }
    if by_category[outcome.error.category] == "ack":
        return _ACK
    return DeadLetter(outcome.error.code or outcome.error.category.value.lower())


def failure_record(
    outcome: Outcome,
    delivery: Delivery,
    reason: str,
    *,
    task: str,
    occurred_at: float,
    trace_id: str | None = None,
    options: TelemetryOptions = DEFAULT_OPTIONS,
) -> Failure:
    """Return the failure record of *outcome*, which is dead-lettered because of *reason*."""
    transaction, error = outcome.transaction, outcome.error
    cause = None if error is None else error.__cause__ or error
    traceback, handler_traceback = get_tracebacks(outcome, options)
    fields: dict[str, Any] = {
        "task_name": task,
        "transaction_id": transaction.id,
        "source": transaction.source,
        "tenant_id": transaction.tenant,
        "correlation_id": transaction.correlation or transaction.id,
        "idempotency_key": transaction.id,
        "reason_code": reason,
        "error_type": "DeadLetter" if cause is None else type(cause).__name__,
        "error_message": reason if error is None else describe_error(error, values=options.record_payloads),
        "attempts": outcome.attempts,
        "occurred_at": occurred_at,
        "category": _choose_category(outcome) if error is None else error.category,
        "step": outcome.failed_step,
        "final": error is not None and error.final,
        "still_running": outcome.still_running,
        "succeeded_steps": outcome.succeeded_steps,
        "deliveries": delivery.deliveries,
        "trace_id": trace_id,
        "history": attempt_history(outcome),
        "traceback": traceback,
        "handler_error": _to_handler_error(outcome.handler_error, handler_traceback, options),
    }
    try:
        return Failure(**fields | _collect_details(error, fields))
    except ValidationError:  # a user's subclass may set any details
        return Failure(**fields)


def _to_handler_error(
    error: ErgonError | None, traceback: str | None, options: TelemetryOptions
) -> HandlerError | None:
    if error is None:
        return None
    return HandlerError(
        error_type=type(error.__cause__ or error).__name__,
        error_message=describe_error(error, values=options.record_payloads),
        category=error.category,
        code=error.code,
        traceback=traceback,
    )


def _collect_details(error: ErgonError | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that *error*, or the ErgonError that caused it, adds to *fields*; known fields stay."""
    while error is not None and not get_details(error):
        error = error.__cause__ if isinstance(error.__cause__, ErgonError) else None
    if error is None:
        return {}
    added = get_details(error).items()
    return {
        name: value
        for name, value in added
        if value is not None and (name in _OVERRIDABLE_FIELDS or name not in fields)
    }


#: Fields of a failure record that an error may set, because it knows them better than the task.
_OVERRIDABLE_FIELDS: Final = frozenset({"idempotency_key"})


def _choose_category(outcome: Outcome) -> Category:
    """Return BUSINESS after process has succeeded (a handler decided), else SYSTEM (the broker or clock decided)."""
    return Category.BUSINESS if outcome.processed else Category.SYSTEM


class Settler:
    """Queues settlements and sends them to the broker, many at a time."""

    def __init__(
        self,
        settle: Callable[[Sequence[SettlementRequest]], Any],
        policy: SettlePolicy,
        *,
        clock: Clock,
        mailbox: Mailbox,
        report: Report,
        observer: LoopObserver,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._settle = settle
        self._policy = policy
        self._clock = clock
        self._mailbox = mailbox
        self._report = report
        self._observer = observer
        #: The delivery of every claim, from its fetch to its settlement, by receipt.
        self.claims: dict[Any, Delivery] = {}
        self._on_outcome = on_outcome
        #: Every queued item that is not finished. A set, because any worker thread adds and another one removes.
        self._unfinished: set[PendingSettlement] = set()
        #: After an interrupt, no more settlements are sent to the broker.
        self._was_interrupted = False
        #: The mailbox to notify when a group was settled; set by a loop that waits for it.
        self.notify_when_drained: Mailbox | None = None

    @property
    def pending(self) -> int:
        """The number of transactions between the end of their lifecycle and their settlement.

        The length of the mailbox is not enough: a waiting settler has taken its items before it runs.
        """
        return len(self._unfinished)

    def enqueue(self, item: PendingSettlement) -> None:
        """Queue *item* for settlement."""
        if item.outcome is not None:
            item.outcome.settlement = item.settlement
        self._unfinished.add(item)
        self._mailbox.put(item)

    def close(self) -> None:
        """Make the settler settle all queued items and end."""
        self._mailbox.put(CLOSE_EVENT, urgent=True)

    def run(self) -> Script[None]:
        """Settle until closed; after an interrupt, unsettled items are left to the broker's redelivery."""
        policy, monotonic = self._policy, self._clock.monotonic
        closing = False
        while not closing:
            items = yield from wait(self._mailbox)
            if isinstance(items, Interrupted):
                return
            if CLOSE_EVENT not in items and len(items) < policy.batch_size and policy.linger > 0:
                extra_items = yield from wait(
                    self._mailbox, count=policy.batch_size - len(items), until=monotonic() + policy.linger
                )
                self._was_interrupted = isinstance(extra_items, Interrupted)
                items += [] if isinstance(extra_items, Interrupted) else extra_items
            closing = CLOSE_EVENT in items
            yield from self._settle_items([item for item in items if item is not CLOSE_EVENT])

    def _settle_items(self, items: list[PendingSettlement]) -> Script[None]:
        """Settle *items* in groups of the batch size, and notify a loop that waits for that."""
        size = self._policy.batch_size
        for start in range(0, len(items), size):
            group = items[start : start + size]
            to_settle = [item for item in group if item.settlement is not None]
            results = iter((yield from self._settle_with_retries(to_settle)))
            for item in group:
                self._finish(item, None if item.settlement is None else next(results))
                self._unfinished.remove(item)
        mailbox, self.notify_when_drained = self.notify_when_drained, None
        if mailbox is not None:
            mailbox.put(SETTLED_EVENT, urgent=True)

    def _settle_with_retries(self, items: list[PendingSettlement]) -> Script[list[SettleResult]]:
        """Send settlements, retrying failed ones until the attempts are used up; return one result each."""
        retry, clock = self._policy.retry, self._clock
        results = [_FAILED] * len(items)
        number, unsettled = 0, list(range(len(items)))
        while unsettled and self._may_try_again(number):
            answers = yield from self._settle_once([items[index] for index in unsettled])
            for index, answer in zip(unsettled, answers, strict=True):
                results[index] = answer
            if _FAILED not in answers:
                break
            unsettled = [index for index in unsettled if results[index] is _FAILED]
            number += 1
            delay = retry.delay(number - 1, clock.random)
            if self._may_try_again(number) and (yield from sleep(clock.monotonic() + delay)) is not None:
                self._was_interrupted = True
        return results

    def _may_try_again(self, number: int) -> bool:
        return not self._was_interrupted and number < self._policy.retry.max_attempts

    def _settle_once(self, items: list[PendingSettlement]) -> Script[list[SettleResult]]:
        """Send settlements in one call; return one result each."""
        retry, monotonic = self._policy.retry, self._clock.monotonic
        started_at = monotonic()
        until = NEVER if retry.timeout is None else started_at + retry.timeout
        effect = Call("settle", self._settle, ([(item.delivery, item.settlement) for item in items],), until)
        answer = yield from call(effect)
        was_interrupted = isinstance(answer, Interrupted)
        if isinstance(answer, Interrupted | Expired) and answer.call is not None:
            has_exited = yield from await_exit(
                answer.call, monotonic() + (0.0 if was_interrupted else retry.exit_grace)
            )
            if isinstance(has_exited, Interrupted):
                was_interrupted = True
        self._was_interrupted = was_interrupted
        # An answer must have one result per item; one of another length says nothing about any item.
        answers = list(answer.value) if isinstance(answer, Ok) and isinstance(answer.value, Sequence) else []
        if len(answers) != len(items):
            answers = [_FAILED] * len(items)
        self._observer.on_settled(answers, monotonic() - started_at)
        return answers

    def _finish(self, item: PendingSettlement, result: SettleResult | None) -> None:
        """Record the *result* of an item and its outcome; None means that no settlement was sent."""
        if item.settlement is not None or item.outcome is None or item.outcome.reason == "lost":
            # A claim that is kept because its call still runs is renewed as long as the loop runs.
            self.claims.pop(item.delivery.receipt, None)
        result_name = _RESULT_NAMES[result]
        self._report.settled[result_name] = self._report.settled.get(result_name, 0) + 1
        outcome = item.outcome
        if outcome is None:
            return
        if result is not None and result is not _SETTLED:
            # The settlement was lost or has failed: the broker redelivers the transaction, whatever its outcome was
            # here.
            outcome.kind = OutcomeKind.RELEASED
            outcome.reason = result.value
        self._report.add(outcome)
        self._observer.on_transaction_end(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)


def requires_exited_call(settlement: Settlement) -> bool:
    """Return whether *settlement* may redeliver the transaction.

    It must then wait until the transaction's call has exited: the redelivered transaction would run next to it.
    """
    return isinstance(settlement, Defer | Release)
