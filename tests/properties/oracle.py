"""The rules of a lifecycle and of a loop, implemented a second time from the requirements only.

``predict`` predicts one delivery, ``differences`` compares a delivery with its prediction, and
``check_run`` checks the rules that hold in every run, whatever was planned. This module does not use the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from tests.properties.plans import (
    OK,
    WITH_VERDICT,
    Behaviour,
    Call,
    DeliveryRecord,
    Flavour,
    HandlerCallRecord,
    Kind,
    OutcomeRecord,
    Plan,
    RunRecord,
    Step,
    TransactionPlan,
)

__all__ = ["Call", "Outcome", "Prediction", "check_run", "differences", "drain_end_of", "predict"]

Outcome = Literal["succeeded", "failed", "handler_failed", "deferred", "released"]
Settlement = str | tuple[str, float] | None

# Instants closer than this are a race that either side may win.
TOLERANCE_SECONDS = 1e-6
#: Longest wait, after its timeout and drain, for the result of a fetch that is still under way.
LATE_FETCH_SECONDS = 0.5

_RETRY_DEFAULTS = {
    "max_attempts": 3,
    "timeout": 60.0,
    "backoff": 1.0,
    "multiplier": 2.0,
    "cap": 30.0,
    "max_inline_delay": 30.0,
    "exit_grace": 5.0,
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected result of one delivery.

    ``calls``: every call of user code, in order. ``category``: of the error of the outcome; for failed
    and handler_failed the category that the exception handler received, for deferred that of the deferred error,
    else None. ``settlement``: "ack", "dead_letter", ("later", delay), "release", "kept" (nothing is
    sent: a call was still running when the loop ended) or None for producers. ``processed``: process
    had succeeded. ``attempts``: those of process at this delivery plus the carried ones (a producer
    carries none); a released one has as many as it was fetched with. ``ended``: when the outcome was
    decided. ``free``: when its last call returns; where the settlement is "kept", or a producer was
    released, this is only how long user code would run without a cancellation. ``ambiguous``: two competing
    times were too close to decide, so this prediction must not be compared.
    """

    calls: tuple[Call, ...]
    outcome: Outcome
    category: str | None
    settlement: Settlement
    processed: bool
    attempts: int
    ended: float
    free: float
    ambiguous: bool


def predict(
    transaction: TransactionPlan,
    policy: dict[str, Any],
    *,
    flavour: Flavour,
    kind: Kind,
    started: float,
    stop_at: float | None,
    drain_end: float | None,
    tolerance: float = TOLERANCE_SECONDS,
) -> Prediction:
    """Predict the result of *transaction* if its worker starts at *started*; all times are absolute.

    ``drain_end`` is when the loop stops waiting for running calls: ``drain_end_of`` computes it for a stop
    and for a loop timeout; a loop that ended earlier while calls were still running (LoopStalled, say)
    has its own end as ``drain_end``; None if it waited until all calls had returned. A worker that would
    start at or after *stop_at* never does: its delivery is released untouched.
    """
    lifecycle = _Lifecycle(transaction, policy, flavour, kind, started, drain_end, tolerance)
    if stop_at is not None and not lifecycle.is_before(started, stop_at):
        return lifecycle.predict_released(at=started)
    try:
        return lifecycle.run()
    except _DrainEndedError as drain_end_error:
        return lifecycle.predict_released(at=drain_end_error.at)


def drain_end_of(plan: Plan, *, began: float = 0.0) -> float | None:
    """Return the end of the drain of *plan*, if it is stopped or times out before it ends on its own."""
    loop = plan.policy["loop"]
    timeout = loop.get("timeout")
    bound = math.inf if timeout is None else timeout + loop.get("timeout_drain", 0.0)
    if plan.stop_at is None or (timeout is not None and timeout <= plan.stop_at):
        end = bound
    else:
        end = min(plan.stop_at + loop.get("drain_timeout", 30.0), bound)
    return None if end == math.inf else began + end


# One lifecycle -------------------------------------------------------------------------------------


class _DrainEndedError(Exception):
    """The drain of the loop ended before the lifecycle."""

    def __init__(self, at: float) -> None:
        super().__init__(at)
        self.at = at


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt or a step that did not succeed."""

    category: str
    final: bool = False
    retry_after: float = 0.0
    later: bool = False  # the attempt could not start
    abandoned: bool = False  # its call was still running at the end of the grace
    expired: bool = False  # the lifecycle timeout has expired


@dataclass(frozen=True, slots=True)
class _Deferral:
    """A step whose next wait is too long to sleep."""

    category: str
    delay: float
    attempts: int


@dataclass(slots=True)
class _Lifecycle:
    """The state of one prediction: a clock and what has happened so far."""

    transaction: TransactionPlan
    policy: dict[str, Any]
    flavour: Flavour
    kind: Kind
    started: float
    drain_end: float | None
    tolerance: float
    calls: list[Call] = field(default_factory=list)
    free: float = -math.inf
    now: float = 0.0
    lifecycle_end: float = math.inf
    processed: bool = False
    ambiguous: bool = False

    def __post_init__(self) -> None:
        self.now = self.free = self.started
        self.lifecycle_end = self.started + _to_limit(self.policy["loop"].get("transaction_timeout"))

    def run(self) -> Prediction:
        main: Step = "process" if self.kind == "consume" else "produce"
        budget = _get_retry_policy(self.policy, main)["max_attempts"]
        result = self._step(main, first=min(self._carried_attempts, budget - 1))
        if isinstance(result, _Deferral):
            return self._make_prediction("deferred", result.category, ("later", result.delay), attempts=result.attempts)
        if isinstance(result, Behaviour):
            self.processed = True
            result = self._step("success", first=0)
        if isinstance(result, Behaviour):
            return self._make_prediction("succeeded", None, result.settles or "ack")
        return self._fail(result)

    def _fail(self, failure: Any) -> Prediction:
        handler_result = self._step("exception", first=0, failure=failure)
        default = self.policy["steps"].get("settle", {}).get(f"on_{failure.category.lower()}", "dead_letter")
        if isinstance(handler_result, Behaviour):
            return self._make_prediction("failed", failure.category, handler_result.settles or default)
        return self._make_prediction("handler_failed", failure.category, default)

    def _step(self, step: Step, *, first: int, failure: _Failure | None = None) -> Behaviour | _Failure | _Deferral:
        """Attempt *step* until it succeeds, gives up or is deferred; the clock is then at its end."""
        retry, attempt = _get_retry_policy(self.policy, step), first
        while True:
            result = self._attempt(step, attempt, retry=retry, failure=failure)
            if step == "process" and isinstance(result, _Failure) and _is_not_started(result):
                call_count = sum(call.step == step for call in self.calls) - 1
                wait = max(_compute_backoff(retry, attempt), result.retry_after)
                return _Deferral(result.category, wait, self._carried_attempts + call_count)
            if isinstance(result, Behaviour) or _is_last_failure(result, last=attempt + 1 >= retry["max_attempts"]):
                return result
            bound = math.inf if step == "exception" else self.lifecycle_end
            if result.expired or not self.is_before(self.now, bound):
                return result
            wait = max(_compute_backoff(retry, attempt), result.retry_after)
            if step == "process" and self._is_longer(wait, retry["max_inline_delay"]):
                return _Deferral(result.category, wait, attempt + 1)
            if not self.is_before(self.now + wait, bound):
                return result
            if wait > 0:
                self._advance_to(self.now + wait)
            attempt += 1

    def _attempt(
        self, step: Step, attempt: int, *, retry: dict[str, Any], failure: _Failure | None
    ) -> Behaviour | _Failure:
        call_start, bound = self.now, math.inf if step == "exception" else self.lifecycle_end
        if not self.is_before(call_start, bound):
            return _Failure("TIMEOUT", final=True, expired=True)
        behaviour = self._record_call(step, attempt, failure)
        planned_end, limit = call_start + behaviour.takes, call_start + _to_limit(retry["timeout"])
        expired = not self.is_before(limit, bound)  # the earlier limit decides whether a retry may follow
        deadline = min(limit, bound)
        if self.is_before(planned_end, deadline):
            self._run_until(planned_end, until=planned_end)
            return _evaluate_attempt(behaviour, step)
        returned_at = deadline if self.flavour == "asyncio" and behaviour.on_cancel == "leaves" else planned_end
        grace_end = deadline + retry["exit_grace"]
        is_in_time = self.is_before(returned_at, grace_end)
        self._run_until(returned_at, until=returned_at if is_in_time else grace_end)
        return _Failure("TIMEOUT", abandoned=not is_in_time, expired=expired and bound < math.inf)

    def _record_call(self, step: Step, attempt: int, failure: _Failure | None) -> Behaviour:
        """Record the call and return its planned behaviour."""
        behaviours = getattr(self.transaction, "process" if step == "produce" else step)
        index = sum(call.step == step for call in self.calls)
        category, is_running = (failure.category, failure.abandoned) if failure else (None, None)
        self.calls.append(Call(step, attempt, self.now, category, is_running))
        return behaviours[index] if index < len(behaviours) else OK

    def _run_until(self, returned_at: float, *, until: float) -> None:
        self.free = max(self.free, returned_at)
        self._advance_to(until)

    def _advance_to(self, instant: float) -> None:
        if self.drain_end is not None and not self.is_before(instant, self.drain_end):
            raise _DrainEndedError(self.drain_end)
        self.now = instant

    def is_before(self, first: float, second: float) -> bool:
        """Return whether *first* is earlier; nearly equal times make the prediction ambiguous."""
        if abs(first - second) < self.tolerance:
            self.ambiguous = True
        return first < second

    def _is_longer(self, wait: float, max_inline_delay: float) -> bool:
        # Both values come from the policy alone: equality is not a race, and near equality is rounding.
        if wait != max_inline_delay and abs(wait - max_inline_delay) < self.tolerance:
            self.ambiguous = True
        return wait > max_inline_delay

    @property
    def _carried_attempts(self) -> int:
        return self.transaction.attempts if self.kind == "consume" else 0

    def predict_released(self, *, at: float) -> Prediction:
        """Predict a released delivery; its claim is kept while a call that might act on it still runs."""
        is_running = bool(self.calls) and not self.is_before(self.free, at)
        self.now = at
        return self._make_prediction(
            "released", None, "kept" if is_running else "release", attempts=self._carried_attempts
        )

    def _make_prediction(
        self, outcome: Outcome, category: str | None, settlement: Settlement, *, attempts: int | None = None
    ) -> Prediction:
        if (
            isinstance(settlement, tuple)
            and self.drain_end is not None
            and not self.is_before(self.free, self.drain_end)
        ):
            settlement = "kept"
        if attempts is None:
            attempts = self._carried_attempts + sum(call.step in ("process", "produce") for call in self.calls)
        return Prediction(
            calls=tuple(self.calls),
            outcome=outcome,
            category=category,
            settlement=settlement if self.kind == "consume" else None,
            processed=self.processed,
            attempts=attempts,
            ended=self.now,
            free=self.free,
            ambiguous=self.ambiguous,
        )


def _is_last_failure(failure: _Failure, *, last: bool) -> bool:
    # Only process and produce can fail as BUSINESS: see _result.
    return failure.category == "BUSINESS" or failure.final or failure.abandoned or last


def _is_not_started(failure: _Failure) -> bool:
    return failure.later and failure.category != "BUSINESS" and not failure.final


def _evaluate_attempt(behaviour: Behaviour, step: Step) -> Behaviour | _Failure:
    """Return the result of an attempt that ended within its time."""
    if behaviour.does == "ok":
        return behaviour
    category = "SYSTEM"
    if step in ("process", "produce"):
        category = {"business": "BUSINESS", "timeout_exc": "TIMEOUT"}.get(behaviour.does, "SYSTEM")
    if behaviour.does not in WITH_VERDICT:
        return _Failure(category)
    return _Failure(category, final=behaviour.final, retry_after=behaviour.retry_after or 0.0, later=behaviour.later)


def _get_retry_policy(policy: dict[str, Any], step: str) -> dict[str, Any]:
    return {**_RETRY_DEFAULTS, **policy["steps"].get(step, {}).get("retry", {})}


def _compute_backoff(retry: dict[str, Any], attempt: int) -> float:
    wait = float(retry["backoff"] * retry["multiplier"] ** attempt)
    return min(wait, retry["cap"]) if retry["cap"] > 0 else wait


def _to_limit(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


# A delivery against its prediction -----------------------------------------------------------------


def differences(
    prediction: Prediction, delivery: DeliveryRecord, outcome: OutcomeRecord, *, slack: float = TOLERANCE_SECONDS
) -> list[str]:
    """Return the differences of a delivery and its outcome from the prediction; the runner compares settlements."""
    problems = [
        f"{name} is {actual!r}, foretold was {expected!r}"
        for name, actual, expected in (
            ("outcome", outcome.outcome, prediction.outcome),
            ("category", outcome.category, prediction.category),
            ("processed", outcome.processed, prediction.processed),
            ("attempts", outcome.attempts, prediction.attempts),
        )
        if actual != expected
    ]
    if abs(outcome.at - prediction.ended) > slack:
        problems.append(f"ended at {outcome.at}, foretold was {prediction.ended}")
    actual_calls, expected_calls = delivery.calls, prediction.calls
    if len(actual_calls) != len(expected_calls) or not all(
        _is_same_call(*pair, slack=slack) for pair in zip(actual_calls, expected_calls, strict=False)
    ):
        problems.append(f"calls were {actual_calls}, foretold were {expected_calls}")
    return problems


def _is_same_call(actual: Call, expected: Call, *, slack: float) -> bool:
    same = (actual.step, actual.attempt, actual.error_category, actual.still_running)
    return (
        same == (expected.step, expected.attempt, expected.error_category, expected.still_running)
        and abs(actual.at - expected.at) <= slack
    )


# Rules of every run --------------------------------------------------------------------------------


def check_run(plan: Plan, record: RunRecord, *, slack: float = TOLERANCE_SECONDS) -> list[str]:
    """Return every rule of the loop that *record* breaks, one sentence each; *slack* is the clock's resolution."""
    run = _RecordedRun(plan, record, slack)
    problems = [*_check_concurrency(run), *_check_call_overlap(run), *_check_end(run), *_check_raised(run)]
    for number in range(len(record.deliveries)):
        problems += _check_steps(run, number)
    if plan.kind == "consume":
        return [
            *problems,
            *_check_outcomes(run),
            *_check_fetches(run),
            *_check_limit(run),
            *_check_settlements(run),
            *_check_ids_and_keys(run),
        ]
    return [*problems, *_check_report(run), *_check_produced_once(run), *_check_batches(run), *_check_limit(run)]


def check_invariants(plan: Plan, record: RunRecord) -> list[str]:
    """Return what was lost, duplicated or overlapping in *record*, by the order of events alone.

    No planned time is compared, so a machine that wakes threads late excuses none of it.
    """
    run = _RecordedRun(plan, record, 0.0)
    if plan.kind == "produce":
        return [*_find_overlaps(run), *_check_produced_once(run)]
    return [*_find_overlaps(run), *_check_outcomes(run), *_check_settled_once(run)]


def _find_overlaps(run: _RecordedRun) -> Iterator[str]:
    """CON-21: no two calls of one id at a time; an exception handler may run next to an abandoned call."""
    bodies = sorted(
        (
            (delivery.transaction.id, body)
            for delivery in run.record.deliveries
            for body in delivery.bodies
            if body.call.step != "exception"
        ),
        key=lambda one: one[1].call.at,
    )
    for index, (name, later) in enumerate(bodies):
        for other, earlier in bodies[:index]:
            if name == other and later.call.at < earlier.left:
                yield f"id {name!r}: {later.call.step} entered at {later.call.at}, another body left at {earlier.left}"


def _check_settled_once(run: _RecordedRun) -> Iterator[str]:
    """CON-30, CON-36: at most one settlement, and none that releases the claim of a running call."""
    for number in range(len(run.record.deliveries)):
        sent = [settlement for settlement in run.record.settlements if settlement.delivery == number]
        name, left = run.describe_delivery(number), run.get_last_return(number)
        if len(sent) > 1:
            yield f"{name} was settled {len(sent)} times: {[one.what for one in sent]}"
        for one in sent:
            kind = one.what if isinstance(one.what, str) else one.what[0]
            if kind in ("later", "release") and one.at < left:
                yield f"{name}: {kind} was sent at {one.at} though a body ran until {left}"


@dataclass(frozen=True, slots=True)
class _RecordedRun:
    """A plan and its record."""

    plan: Plan
    record: RunRecord
    slack: float

    @property
    def loop(self) -> dict[str, Any]:
        loop: dict[str, Any] = self.plan.policy["loop"]
        return loop

    @property
    def concurrency(self) -> int:
        return int(self.loop.get("concurrency", {}).get("value", 10))

    @property
    def batch_size(self) -> int:
        return int(self.loop.get("batch", {}).get("size", 10))

    @property
    def stop_time(self) -> float | None:
        """The time of the stop by an operator or by the loop timeout, if the loop had not ended before."""
        planned_stop = _get_stop_time(self.plan, began=self.record.began)
        return planned_stop if planned_stop is not None and planned_stop <= self.record.ended + self.slack else None

    def describe_delivery(self, number: int) -> str:
        delivery = self.record.deliveries[number]
        return f"delivery {number} (position {delivery.position}, id {delivery.transaction.id!r})"

    def list_outcomes(self, number: int) -> list[OutcomeRecord]:
        return [outcome for outcome in self.record.outcomes if outcome.delivery == number]

    def get_last_return(self, number: int) -> float:
        """Return when the last call of a delivery returned."""
        return max((body.left for body in self.record.deliveries[number].bodies), default=-math.inf)

    def get_slot_release(self, number: int) -> float:
        """Return when a delivery freed its slot: decided, and without a running call."""
        decided_at = min((outcome.at for outcome in self.list_outcomes(number)), default=math.inf)
        return max(decided_at, self.get_last_return(number))

    def get_deadline(self, number: int, body: HandlerCallRecord) -> float:
        """Return the deadline of a handler call."""
        limit = body.call.at + _to_limit(_get_retry_policy(self.plan.policy, body.call.step)["timeout"])
        if body.call.step == "exception":
            return limit
        started = self.record.deliveries[number].started
        return min(limit, (started or 0.0) + _to_limit(self.loop.get("transaction_timeout")))

    def is_completed(self, number: int, body: HandlerCallRecord) -> bool:
        """Return whether a handler call succeeded within its time; a later result does not count."""
        return body.result == "ok" and body.left <= self.get_deadline(number, body) + self.slack


def _get_stop_time(plan: Plan, *, began: float) -> float | None:
    ends = (plan.stop_at, plan.policy["loop"].get("timeout"))
    return min((began + seconds for seconds in ends if seconds is not None), default=None)


def _check_concurrency(run: _RecordedRun) -> Iterator[str]:
    """CON-29, PRO-15: transactions with a running call never exceed the slots."""
    events: list[tuple[float, int]] = []
    for delivery in run.record.deliveries:
        for entered, left in _merge_spans(delivery.bodies):
            if left - run.slack > entered:
                events += [(entered, 1), (left - run.slack, -1)]
    running = 0
    for instant, change in sorted(events):  # at equal times a call that returns is counted before one that starts
        running += change
        if running > run.concurrency:
            yield f"{running} transactions had a running body at {instant}, allowed are {run.concurrency}"
            return


def _merge_spans(bodies: tuple[HandlerCallRecord, ...]) -> Iterator[tuple[float, float]]:
    """Yield the spans in which at least one of *bodies* ran."""
    current: tuple[float, float] | None = None
    for entered, left in sorted((body.call.at, body.left) for body in bodies):
        if current is not None and entered <= current[1]:
            current = (current[0], max(current[1], left))
            continue
        if current is not None:
            yield current
        current = (entered, left)
    if current is not None:
        yield current


def _check_call_overlap(run: _RecordedRun) -> Iterator[str]:
    """CON-21, CON-29: one call of a transaction at a time, except for the exception handler after the grace."""
    for number, delivery in enumerate(run.record.deliveries):
        bodies = sorted(delivery.bodies, key=lambda body: body.call.at)
        for index, later in enumerate(bodies):
            for earlier in bodies[:index]:
                if later.call.at >= earlier.left - run.slack:
                    continue
                if not _can_overlap(run, number, earlier=earlier, later=later):
                    yield (
                        f"{run.describe_delivery(number)}: {later.call.step} entered at {later.call.at} while "
                        f"{earlier.call.step} of {earlier.call.at} was running until {earlier.left}"
                    )


def _can_overlap(run: _RecordedRun, number: int, *, earlier: HandlerCallRecord, later: HandlerCallRecord) -> bool:
    if later.call.step != "exception" or earlier.call.step == "exception":
        return False
    grace = _get_retry_policy(run.plan.policy, earlier.call.step)["exit_grace"]
    return bool(later.call.at >= run.get_deadline(number, earlier) + grace - run.slack)


def _check_steps(run: _RecordedRun, number: int) -> Iterator[str]:
    """CON-22, CON-23, CON-28, CON-45, PRO-14: which step may follow which, and what each outcome needs."""
    delivery, name = run.record.deliveries[number], run.describe_delivery(number)
    order = {"process": 0, "produce": 0, "success": 1, "exception": 2}
    if any(order[a.step] > order[b.step] for a, b in pairwise(delivery.calls)):
        yield f"{name}: steps ran out of order: {[call.step for call in delivery.calls]}"
    by_rank: list[list[HandlerCallRecord]] = [[], [], []]
    for body in delivery.bodies:
        by_rank[order[body.call.step]].append(body)
    main, success, exceptions = by_rank
    if delivery.bodies and delivery.started is None:
        yield f"{name}: user code ran though no worker started"
    if delivery.bodies and not main:
        yield f"{name}: a handler ran before {'process' if run.plan.kind == 'consume' else 'produce'}"
    if success and not (main and run.is_completed(number, main[-1])):
        yield f"{name}: the success handler ran after a failure"
    handled_count = sum(run.is_completed(number, body) for body in exceptions)
    if handled_count > 1:
        yield f"{name}: the exception handler ran to its end {handled_count} times"
    for outcome in run.list_outcomes(number)[:1]:
        succeeded = bool(success) and run.is_completed(number, success[-1]) and not exceptions
        fits = {
            "succeeded": succeeded,
            "failed": handled_count == 1,
            "handler_failed": bool(exceptions) and handled_count == 0,
            "deferred": not success and not exceptions,
            "released": True,
        }
        if not fits.get(outcome.outcome, False):
            yield f"{name}: outcome {outcome.outcome!r} does not fit its calls {[c.step for c in delivery.calls]}"


def _late_fetch_seconds(run: _RecordedRun, drain_end: float) -> float:
    """Return how long a loop that timed out waits for a fetch that is still under way, whose claims it releases."""
    if run.record.reason != "timeout":
        return 0.0
    ends = [fetch.at + fetch.fault[1] for fetch in run.record.fetches if isinstance(fetch.fault, tuple)]
    return min(LATE_FETCH_SECONDS, max([0.0, *(end - drain_end for end in ends)]))


def _check_end(run: _RecordedRun) -> Iterator[str]:
    """CON-36, PRO-07: after a stop nothing new starts, and the loop has ended at the end of the drain."""
    drain_end = drain_end_of(run.plan, began=run.record.began)
    if run.stop_time is not None and drain_end is not None:
        due = drain_end + _late_fetch_seconds(run, drain_end)
        if run.record.ended > due + run.slack:
            yield f"the loop ended at {run.record.ended}, due was {due}, with the drain"
    for number, delivery in enumerate(run.record.deliveries):
        if run.stop_time is not None and delivery.started is not None and delivery.started > run.stop_time + run.slack:
            yield f"{run.describe_delivery(number)} started at {delivery.started}, after the stop at {run.stop_time}"
        for body in delivery.bodies:
            if body.call.at > run.record.ended + run.slack:
                yield f"{run.describe_delivery(number)}: {body.call.step} was called after the loop had ended"


def _check_raised(run: _RecordedRun) -> Iterator[str]:
    """CON-08, CON-19, CON-29, PRO-07: the loop raises only errors that have a cause in the record."""
    raised, ended = run.record.raised, run.record.ended
    timeout = run.loop.get("timeout")
    has_expired = timeout is not None and ended >= run.record.began + timeout - run.slack
    if raised == "LoopTimeout" and not has_expired:
        yield f"LoopTimeout at {ended}, but the loop's timeout is {timeout}"
    if raised in ("FetchException", "FetchTimeoutException") and not _has_exhausted_fetch(run):
        yield f"{raised}, but no fetch failed as often as its budget allows"
    if raised == "LoopStalled":
        running_count = sum(
            run.get_last_return(number) > ended - run.slack for number in range(len(run.record.deliveries))
        )
        if running_count < run.concurrency:
            yield f"LoopStalled with {running_count} bodies left running in {run.concurrency} slots"
    if raised not in (None, "LoopTimeout", "LoopStalled", "FetchException", "FetchTimeoutException"):
        yield f"the loop raised {raised}"


def _has_exhausted_fetch(run: _RecordedRun) -> bool:
    budget, failure_count = _get_retry_policy(run.plan.policy, "fetch")["max_attempts"], 0
    for fetch in run.record.fetches:
        if fetch.fault == "lost_connection" and run.loop.get("streaming"):
            continue  # it neither uses nor resets attempts
        failure_count = failure_count + 1 if fetch.fault in ("error", "lost_connection") else 0
        if failure_count >= budget:
            return True
    return False


def _check_outcomes(run: _RecordedRun) -> Iterator[str]:
    """CON-30: every fetched transaction has exactly one outcome."""
    counts = Counter(outcome.delivery for outcome in run.record.outcomes)
    for number in range(len(run.record.deliveries)):
        if counts[number] != 1:
            yield f"{run.describe_delivery(number)} has {counts[number]} outcomes"
    unknown_deliveries = [number for number in counts if number is None or number >= len(run.record.deliveries)]
    if unknown_deliveries:
        yield f"outcomes for deliveries that were never fetched: {unknown_deliveries}"
    for number, delivery in enumerate(run.record.deliveries):
        for outcome in run.list_outcomes(number):
            if delivery.started is None and outcome.outcome not in ("released", "deferred"):
                yield f"{run.describe_delivery(number)} never started but is {outcome.outcome}"


def _check_fetches(run: _RecordedRun) -> Iterator[str]:
    """CON-07, CON-31, CON-36, decision 12: no fetch after the stop, and none for more than the free capacity."""
    limit = run.loop.get("limit")
    if limit == 0 and run.record.fetches:
        yield f"limit is 0, but there were {len(run.record.fetches)} fetches"
    for index, fetch in enumerate(run.record.fetches):
        if run.stop_time is not None and fetch.at > run.stop_time + run.slack:
            yield f"fetch {index} at {fetch.at} came after the stop at {run.stop_time}"
        capacity = {
            "batch": run.batch_size,
            "free slots": run.concurrency - _count_occupied_slots(run, index, at=fetch.at),
        }
        if limit is not None:
            capacity["limit left"] = limit - sum(
                delivery.started is not None for delivery in run.record.deliveries if (delivery.fetch or 0) < index
            )
        if not 1 <= fetch.asked <= min(capacity.values()):
            yield f"fetch {index} at {fetch.at} asked for {fetch.asked}; there was {capacity}"


def _count_occupied_slots(run: _RecordedRun, fetch: int, *, at: float) -> int:
    """Return how many slots deliveries of earlier fetches certainly occupied at *at*."""
    return sum(
        delivery.fetch is not None
        and delivery.fetch < fetch
        and delivery.started is not None
        and delivery.started <= at
        and run.get_slot_release(number) > at + run.slack
        for number, delivery in enumerate(run.record.deliveries)
    )


def _check_limit(run: _RecordedRun) -> Iterator[str]:
    """CON-31, PRO-12: exactly as many start as the limit and the input allow; an early end allows fewer."""
    started = sum(delivery.started is not None for delivery in run.record.deliveries)
    if sorted(run.record.starts) != [n for n, d in enumerate(run.record.deliveries) if d.started is not None]:
        yield f"the starts {run.record.starts} are not those of the deliveries"
    limit = _to_limit(run.loop.get("limit"))
    if started > limit:
        yield f"{started} transactions started, the limit is {limit}"
    # A second delivery of an id may be deferred, so only distinct ids are certain to start; a transaction
    # whose key is in flight is deferred when as many wait for their key as there are slots.
    ids = {transaction.id for transaction in run.plan.transactions}
    started_ids = {delivery.transaction.id for delivery in run.record.deliveries if delivery.started is not None}
    deferred_ids = {
        delivery.transaction.id for delivery in run.record.deliveries if delivery.transaction.key
    } - started_ids
    guaranteed_count = min(limit, len(ids - deferred_ids))
    if run.stop_time is None and run.record.raised is None and started < guaranteed_count:
        yield f"{started} transactions started, due were {guaranteed_count}"
    if run.record.reason == "limit" and started != limit:
        yield f"the loop ended at its limit {limit} with {started} started"


def _check_settlements(run: _RecordedRun) -> Iterator[str]:
    """CON-30, CON-31, CON-36, decision 11: one settlement each, none that releases the claim of a running call."""
    ended, drain_end = run.record.ended, drain_end_of(run.plan, began=run.record.began)
    if drain_end is not None and _late_fetch_seconds(run, drain_end):
        # A call that exits while the loop only waits for a fetch has kept its claim.
        ended = min(ended, drain_end)
    for number in range(len(run.record.deliveries)):
        sent = [settlement for settlement in run.record.settlements if settlement.delivery == number]
        name, left = run.describe_delivery(number), run.get_last_return(number)
        if len(sent) > 1:
            yield f"{name} was settled {len(sent)} times: {[one.what for one in sent]}"
        if not sent and left < ended - run.slack:
            yield f"{name} was left unsettled"
        for one in sent:
            kind = one.what if isinstance(one.what, str) else one.what[0]
            if kind in ("later", "release") and one.at < left - run.slack:
                yield f"{name}: {kind} was sent at {one.at} though a body ran until {left}"
            for outcome in run.list_outcomes(number)[:1]:
                fits = {"released": ("release",), "deferred": ("later",)}
                if kind not in fits.get(outcome.outcome, ("ack", "dead_letter", "later")):
                    yield f"{name} is {outcome.outcome} but was settled as {one.what}"


def _check_ids_and_keys(run: _RecordedRun) -> Iterator[str]:
    """CON-21, CON-34: one id and one key are in flight once at a time, keys in fetch order."""
    started = [run.record.deliveries[number] for number in run.record.starts]
    for later_index, later in enumerate(run.record.starts):
        for earlier_index, earlier in enumerate(run.record.starts[:later_index]):
            first, second = started[earlier_index], started[later_index]
            same_id = first.transaction.id == second.transaction.id
            same_key = first.transaction.key is not None and first.transaction.key == second.transaction.key
            if not (same_id or same_key):
                continue
            if (second.started or 0.0) < run.get_slot_release(earlier) - run.slack:
                label = "id" if same_id else "key"
                yield (
                    f"{run.describe_delivery(later)} started at {second.started} while "
                    f"{run.describe_delivery(earlier)} of the same {label} ran"
                )
            if same_key and later < earlier:
                yield (
                    f"{run.describe_delivery(earlier)} started before {run.describe_delivery(later)} of the same key, "
                    "which came first"
                )


def _check_report(run: _RecordedRun) -> Iterator[str]:
    """PRO-18: one outcome per input, in order; a transaction that never started has a reason."""
    inputs, outcomes = run.plan.transactions, run.record.outcomes
    if len(outcomes) != len(inputs):
        yield f"{len(outcomes)} outcomes for {len(inputs)} inputs"
        return
    allowed = _list_allowed_reasons(run)
    for position, (transaction, outcome) in enumerate(zip(inputs, outcomes, strict=True)):
        if outcome.delivery is not None:
            delivered_id = run.record.deliveries[outcome.delivery].transaction.id
            if delivered_id != transaction.id:
                yield f"position {position} is {transaction.id!r} but holds the outcome of {delivered_id!r}"
            continue
        if (outcome.outcome, outcome.attempts) != ("released", 0):
            yield f"position {position} never started but is {outcome.outcome} with {outcome.attempts} attempts"
        if outcome.reason not in allowed:
            yield f"position {position} never started because of {outcome.reason!r}; possible is {sorted(allowed)}"


def _list_allowed_reasons(run: _RecordedRun) -> set[str]:
    """Return the possible reasons for not starting a produced transaction in this run."""
    record = run.record
    timeout, stop_at = run.loop.get("timeout"), run.plan.stop_at
    return {
        reason
        for reason, is_possible in (
            ("limit", run.loop.get("limit") is not None),
            ("timeout", timeout is not None and record.ended >= record.began + timeout - run.slack),
            ("stop", stop_at is not None and record.ended >= record.began + stop_at - run.slack),
            ("stalled", record.raised == "LoopStalled"),
        )
        if is_possible
    }


def _check_produced_once(run: _RecordedRun) -> Iterator[str]:
    """PRO-13: one id is run once, and all its positions hold that outcome."""
    runs = Counter(delivery.transaction.id for delivery in run.record.deliveries)
    for name, count in runs.items():
        if count > 1:
            yield f"id {name!r} was produced {count} times"
    outcomes_by_id: dict[str, tuple[object, ...]] = {}
    for transaction, outcome in zip(run.plan.transactions, run.record.outcomes, strict=False):
        outcome_fields = (outcome.delivery, outcome.outcome, outcome.category, outcome.attempts)
        if outcomes_by_id.setdefault(transaction.id, outcome_fields) != outcome_fields:
            yield f"the positions of id {transaction.id!r} hold different outcomes"


def _check_batches(run: _RecordedRun) -> Iterator[str]:
    """PRO-05: a batch starts after the outcomes of the previous batch are decided."""
    if len({transaction.id for transaction in run.plan.transactions}) < len(run.plan.transactions):
        return  # the specification does not say whether a repeated id counts towards a batch
    for later in run.record.starts:
        second = run.record.deliveries[later]
        for earlier in run.record.starts:
            first = run.record.deliveries[earlier]
            if first.position // run.batch_size >= second.position // run.batch_size:
                continue
            decided_at = min((outcome.at for outcome in run.list_outcomes(earlier)), default=math.inf)
            if (second.started or 0.0) < decided_at - run.slack:
                yield (
                    f"{run.describe_delivery(later)} started before {run.describe_delivery(earlier)} "
                    "of an earlier batch was decided"
                )
