"""Settling: a step of the engine's own, grouped, with a life of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

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
from ergon_framework.engine.effects import NEVER, Call, Script, call, gone, sleep, wait
from ergon_framework.engine.outcome import Expired, Ok, Stopped
from ergon_framework.errors import Category, ErgonError, particulars_of
from ergon_framework.failure import Failure, HandlerError, describe
from ergon_framework.task.lifecycle import history
from ergon_framework.task.report import Kind, Outcome, Report
from ergon_framework.task.watched import tracebacks_of
from ergon_framework.telemetry.options import DEFAULTS, TelemetryOptions

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Senses
    from ergon_framework.engine.slots import Mailbox
    from ergon_framework.task.mixins.policies import SettlePolicy
    from ergon_framework.task.watch import Onlooker

CLOSE: Final = object()
_ACK: Final = Ack()
#: Looked up once: members of an enumeration are found slowly, and these are asked for all the time.
_SUCCEEDED: Final = Kind.SUCCEEDED
_SETTLED: Final = SettleResult.SETTLED
_FAILED: Final = SettleResult.FAILED
#: What a result is called in a report; None is a claim that was kept.
_WORDS: Final = {None: "kept"} | {result: result.value for result in SettleResult}
_RELEASE: Final = Release()

#: Put into the loop's mailbox when a group was settled and the loop waits for that.
SETTLED: Final = object()


class Item:
    """One delivery on its way to being settled; without a settlement its claim is kept, or is gone."""

    __slots__ = ("delivery", "outcome", "settlement")

    def __init__(self, delivery: Delivery, settlement: Settlement | None, outcome: Outcome | None) -> None:
        self.delivery = delivery
        self.settlement = settlement
        self.outcome = outcome


def decide(outcome: Outcome, policy: SettlePolicy) -> Settlement:
    """What is to become of a delivery: what a handler asked for, or else what the policy says."""
    if outcome.settlement is not None:
        return outcome.settlement
    if outcome.kind is _SUCCEEDED:
        return _ACK
    if outcome.kind is Kind.RELEASED or outcome.error is None:
        return _RELEASE
    by_category = {
        Category.BUSINESS: policy.on_business,
        Category.SYSTEM: policy.on_system,
        Category.TIMEOUT: policy.on_timeout,
    }
    if by_category[outcome.error.category] == "ack":
        return _ACK
    return DeadLetter(outcome.error.code or outcome.error.category.value.lower())


def failure_of(
    outcome: Outcome,
    delivery: Delivery,
    reason: str,
    *,
    task: str,
    at: float,
    trace_id: str | None = None,
    options: TelemetryOptions = DEFAULTS,
) -> Failure:
    """The failure record of *outcome*, which is put aside because of *reason*."""
    transaction, error = outcome.transaction, outcome.error
    cause = None if error is None else error.__cause__ or error
    traceback, handler_traceback = tracebacks_of(outcome, options)
    told: dict[str, Any] = {
        "task_name": task,
        "transaction_id": transaction.id,
        "source": transaction.source,
        "tenant_id": transaction.tenant,
        "correlation_id": transaction.correlation or transaction.id,
        "idempotency_key": transaction.id,
        "reason_code": reason,
        "error_type": "DeadLetter" if cause is None else type(cause).__name__,
        "error_message": reason if error is None else describe(error, values=options.record_payloads),
        "attempts": outcome.attempts,
        "occurred_at": at,
        "category": _without_error(outcome) if error is None else error.category,
        "step": outcome.failed_step,
        "final": error is not None and error.final,
        "still_running": outcome.still_running,
        "succeeded_steps": outcome.succeeded_steps,
        "deliveries": delivery.deliveries,
        "trace_id": trace_id,
        "history": history(outcome),
        "traceback": traceback,
        "handler_error": _handler_error(outcome.handler_error, handler_traceback, options),
    }
    try:
        return Failure(**told | _particulars(error, told))
    except ValidationError:  # a subclass of a user may say anything in its particulars
        return Failure(**told)


def _handler_error(error: ErgonError | None, traceback: str | None, options: TelemetryOptions) -> HandlerError | None:
    if error is None:
        return None
    return HandlerError(
        error_type=type(error.__cause__ or error).__name__,
        error_message=describe(error, values=options.record_payloads),
        category=error.category,
        code=error.code,
        traceback=traceback,
    )


def _particulars(error: ErgonError | None, told: Mapping[str, Any]) -> dict[str, Any]:
    """What *error*, or the error of ours that caused it, adds to *told*; what we know ourselves it cannot change."""
    while error is not None and not particulars_of(error):
        error = error.__cause__ if isinstance(error.__cause__, ErgonError) else None
    if error is None:
        return {}
    added = particulars_of(error).items()
    return {name: value for name, value in added if value is not None and (name in _THEIRS or name not in told)}


#: Known to whoever made the effect better than to the task that asked for it.
_THEIRS: Final = frozenset({"idempotency_key"})


def _without_error(outcome: Outcome) -> Category:
    """Once process has succeeded it was a handler's own decision; before, it was the broker's or the clock's."""
    return Category.BUSINESS if outcome.processed else Category.SYSTEM


class Settler:
    """Takes what is to be settled and tells the broker, many at a time."""

    def __init__(
        self,
        settle: Callable[[Sequence[Settling]], Any],
        policy: SettlePolicy,
        *,
        senses: Senses,
        mailbox: Mailbox,
        report: Report,
        watch: Onlooker,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._settle = settle
        self._policy = policy
        self._senses = senses
        self._mailbox = mailbox
        self._report = report
        self._watch = watch
        #: Every claim that is held, from fetch to settle.
        self.claims: dict[Any, Delivery] = {}
        self._on_outcome = on_outcome
        #: Every item that was put and is not finished. A set, because any worker thread puts and one other finishes.
        self._unfinished: set[Item] = set()
        #: Interrupted: the broker is told nothing more.
        self._hurried = False
        #: Whom to tell when there is room again; set by a loop that waits for it.
        self.blocked: Mailbox | None = None

    @property
    def pending(self) -> int:
        """How many are between their lifecycle's end and being settled.

        The mailbox cannot say: a settler that waits has taken its items before it runs.
        """
        return len(self._unfinished)

    def put(self, item: Item) -> None:
        """Have *item* settled."""
        if item.outcome is not None:
            item.outcome.settlement = item.settlement
        self._unfinished.add(item)
        self._mailbox.put(item)

    def close(self) -> None:
        """Settle what is there, and end."""
        self._mailbox.put(CLOSE, urgent=True)

    def run(self) -> Script[None]:
        """Until it is closed; interrupted, it leaves what is unsettled to the broker's own redelivery."""
        policy, clock = self._policy, self._senses.clock
        closing = False
        while not closing:
            items = yield from wait(self._mailbox)
            if isinstance(items, Stopped):
                return
            if CLOSE not in items and len(items) < policy.group and policy.linger > 0:
                more = yield from wait(self._mailbox, count=policy.group - len(items), until=clock() + policy.linger)
                self._hurried = isinstance(more, Stopped)
                items += [] if isinstance(more, Stopped) else more
            closing = CLOSE in items
            yield from self._settled([item for item in items if item is not CLOSE])

    def _settled(self, items: list[Item]) -> Script[None]:
        size = self._policy.group
        for start in range(0, len(items), size):
            group = items[start : start + size]
            told = [item for item in group if item.settlement is not None]
            results = iter((yield from self._told(told)))
            for item in group:
                self._finished(item, None if item.settlement is None else next(results))
                self._unfinished.remove(item)
        blocked, self.blocked = self.blocked, None
        if blocked is not None:
            blocked.put(SETTLED, urgent=True)

    def _told(self, items: list[Item]) -> Script[list[SettleResult]]:
        """Tell the broker, again for those that failed, until the budget is spent; one result each."""
        retry, senses = self._policy.retry, self._senses
        results = [_FAILED] * len(items)
        number, waiting = 0, list(range(len(items)))
        while waiting and self._goes_on(number):
            answers = yield from self._asked([items[index] for index in waiting])
            for index, answer in zip(waiting, answers, strict=True):
                results[index] = answer
            if _FAILED not in answers:
                break
            waiting = [index for index in waiting if results[index] is _FAILED]
            number += 1
            delay = retry.delay(number - 1, senses.dice)
            if self._goes_on(number) and (yield from sleep(senses.clock() + delay)) is not None:
                self._hurried = True
        return results

    def _goes_on(self, number: int) -> bool:
        return not self._hurried and number < self._policy.retry.max_attempts

    def _asked(self, items: list[Item]) -> Script[list[SettleResult]]:
        """Tell the broker once."""
        retry, clock = self._policy.retry, self._senses.clock
        began = clock()
        until = NEVER if retry.timeout is None else began + retry.timeout
        effect = Call("settle", self._settle, ([(item.delivery, item.settlement) for item in items],), until)
        answer = yield from call(effect)
        hurried = isinstance(answer, Stopped)
        if isinstance(answer, Stopped | Expired) and answer.body is not None:
            left = yield from gone(answer.body, clock() + (0.0 if hurried else retry.abandon_grace))
            if isinstance(left, Stopped):
                hurried = True
        self._hurried = hurried
        # One result each; an answer of another length says nothing about anyone.
        answers = list(answer.value) if isinstance(answer, Ok) and isinstance(answer.value, Sequence) else []
        if len(answers) != len(items):
            answers = [_FAILED] * len(items)
        self._watch.settled(answers, clock() - began)
        return answers

    def _finished(self, item: Item, result: SettleResult | None) -> None:
        if item.settlement is not None or item.outcome is None or item.outcome.reason == "lost":
            # A claim that is kept because its body still runs is renewed as long as the loop lives.
            self.claims.pop(item.delivery.receipt, None)
        word = _WORDS[result]
        self._report.settled[word] = self._report.settled.get(word, 0) + 1
        outcome = item.outcome
        if outcome is None:
            return
        if result is not None and result is not _SETTLED:
            # Whatever was done here, the broker will bring the transaction again.
            outcome.kind = Kind.RELEASED
            outcome.reason = result.value
        self._report.add(outcome)
        self._watch.ended(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)


def needs_absence(settlement: Settlement) -> bool:
    """Whether *settlement* may bring the transaction back, and so needs that its body has left."""
    return isinstance(settlement, Later | Release)
