"""The rules of a lifecycle and of a loop, written a second time and from the requirements only.

``predict`` foretells one delivery, ``differences`` compares a delivery with what was foretold, and
``check_run`` looks for what no run may ever do, whatever was planned. Nothing here knows the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from tests.properties.plan import (
    OK,
    WITH_VERDICT,
    Behaviour,
    BodyRecord,
    Call,
    DeliveryRecord,
    Flavour,
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
TOLERANCE = 1e-6

_RETRY_DEFAULTS = {
    "max_attempts": 3,
    "timeout": 60.0,
    "backoff": 1.0,
    "multiplier": 2.0,
    "cap": 30.0,
    "hold": 30.0,
    "abandon_grace": 5.0,
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """What must become of one delivery.

    ``calls``: every call of user code, in order. ``category``: of the error of the outcome; for failed
    and handler_failed what the exception handler was told, for deferred the error that was deferred,
    else None. ``settlement``: "ack", "dead_letter", ("later", delay), "release", "kept" (nothing is
    sent: a body was still running when the loop ended) or None for producers. ``processed``: process
    had succeeded. ``attempts``: those of process at this delivery plus the carried ones (a producer
    carries none); a released one has as many as it was fetched with. ``ended``: when the outcome was
    decided. ``free``: when its last body leaves; where the settlement is "kept", or a producer was
    released, this is only how long user code would go on by itself. ``ambiguous``: two competing
    instants were too close to call, so this prediction must not be compared.
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
    tolerance: float = TOLERANCE,
) -> Prediction:
    """What becomes of *transaction* if its worker starts at *started*; all times are absolute.

    ``drain_end`` is when the loop stops waiting for what still runs: ``drain_end_of`` tells it for a stop
    and for a loop timeout; a loop that ended earlier while bodies were left running (LoopStalled, say)
    has its own end as ``drain_end``; None if it waited until everything had left. A worker that would
    start at or after *stop_at* never does: its delivery is released untouched.
    """
    life = _Lifecycle(transaction, policy, flavour, kind, started, drain_end, tolerance)
    if stop_at is not None and not life.before(started, stop_at):
        return life.released(at=started)
    try:
        return life.run()
    except _Drained as drained:
        return life.released(at=drained.at)


def drain_end_of(plan: Plan, *, began: float = 0.0) -> float | None:
    """When the drain of *plan* is over, if it is stopped or times out before it has ended by itself."""
    loop = plan.policy["loop"]
    timeout = loop.get("timeout")
    bound = math.inf if timeout is None else timeout + loop.get("timeout_drain", 0.0)
    if plan.stop_at is None or (timeout is not None and timeout <= plan.stop_at):
        end = bound
    else:
        end = min(plan.stop_at + loop.get("drain_timeout", 30.0), bound)
    return None if end == math.inf else began + end


# One lifecycle -------------------------------------------------------------------------------------


class _Drained(Exception):
    """The loop's drain was over before the lifecycle was."""

    def __init__(self, at: float) -> None:
        super().__init__(at)
        self.at = at


@dataclass(frozen=True, slots=True)
class _Failed:
    """An attempt, and then a step, that did not succeed."""

    category: str
    final: bool = False
    retry_after: float = 0.0
    later: bool = False  # nothing was tried
    abandoned: bool = False  # its body was still running when the grace ended
    expired: bool = False  # the lifecycle's own time is over


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A step whose next wait is too long to be slept through."""

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
        self.lifecycle_end = self.started + _or_endless(self.policy["loop"].get("transaction_timeout"))

    def run(self) -> Prediction:
        main: Step = "process" if self.kind == "consume" else "produce"
        budget = _retry(self.policy, main)["max_attempts"]
        result = self._step(main, first=min(self._carried, budget - 1))
        if isinstance(result, _Deferred):
            return self._prediction("deferred", result.category, ("later", result.delay), attempts=result.attempts)
        if isinstance(result, Behaviour):
            self.processed = True
            result = self._step("success", first=0)
        if isinstance(result, Behaviour):
            return self._prediction("succeeded", None, result.settles or "ack")
        return self._fail(result)

    def _fail(self, told: Any) -> Prediction:
        handled = self._step("exception", first=0, told=told)
        default = self.policy["steps"].get("settle", {}).get(f"on_{told.category.lower()}", "dead_letter")
        if isinstance(handled, Behaviour):
            return self._prediction("failed", told.category, handled.settles or default)
        return self._prediction("handler_failed", told.category, default)

    def _step(self, step: Step, *, first: int, told: _Failed | None = None) -> Behaviour | _Failed | _Deferred:
        """Try *step* until it succeeds, gives up or is put off; the clock is then where it ended."""
        retry, attempt = _retry(self.policy, step), first
        while True:
            result = self._attempt(step, attempt, retry=retry, told=told)
            if step == "process" and isinstance(result, _Failed) and _untried(result):
                made = sum(call.step == step for call in self.calls) - 1
                wait = max(_backoff(retry, attempt), result.retry_after)
                return _Deferred(result.category, wait, self._carried + made)
            if isinstance(result, Behaviour) or _gives_up(result, last=attempt + 1 >= retry["max_attempts"]):
                return result
            bound = math.inf if step == "exception" else self.lifecycle_end
            if result.expired or not self.before(self.now, bound):
                return result
            wait = max(_backoff(retry, attempt), result.retry_after)
            if step == "process" and self._longer(wait, retry["hold"]):
                return _Deferred(result.category, wait, attempt + 1)
            if not self.before(self.now + wait, bound):
                return result
            if wait > 0:
                self._pass_until(self.now + wait)
            attempt += 1

    def _attempt(self, step: Step, attempt: int, *, retry: dict[str, Any], told: _Failed | None) -> Behaviour | _Failed:
        entered, bound = self.now, math.inf if step == "exception" else self.lifecycle_end
        if not self.before(entered, bound):
            return _Failed("TIMEOUT", final=True, expired=True)
        behaviour = self._called(step, attempt, told)
        ends, limit = entered + behaviour.takes, entered + _or_endless(retry["timeout"])
        expired = not self.before(limit, bound)  # whose end comes first decides whether a retry may follow
        deadline = min(limit, bound)
        if self.before(ends, deadline):
            self._occupied(ends, until=ends)
            return _result(behaviour, step)
        leaves = deadline if self.flavour == "asyncio" and behaviour.on_cancel == "leaves" else ends
        grace_end = deadline + retry["abandon_grace"]
        in_time = self.before(leaves, grace_end)
        self._occupied(leaves, until=leaves if in_time else grace_end)
        return _Failed("TIMEOUT", abandoned=not in_time, expired=expired and bound < math.inf)

    def _called(self, step: Step, attempt: int, told: _Failed | None) -> Behaviour:
        """Write the call down and return what it does."""
        script = getattr(self.transaction, "process" if step == "produce" else step)
        number = sum(call.step == step for call in self.calls)
        category, running = (told.category, told.abandoned) if told else (None, None)
        self.calls.append(Call(step, attempt, self.now, category, running))
        return script[number] if number < len(script) else OK

    def _occupied(self, leaves: float, *, until: float) -> None:
        self.free = max(self.free, leaves)
        self._pass_until(until)

    def _pass_until(self, instant: float) -> None:
        if self.drain_end is not None and not self.before(instant, self.drain_end):
            raise _Drained(self.drain_end)
        self.now = instant

    def before(self, first: float, second: float) -> bool:
        """Whether *first* comes first; a photo finish makes the prediction ambiguous."""
        if abs(first - second) < self.tolerance:
            self.ambiguous = True
        return first < second

    def _longer(self, wait: float, hold: float) -> bool:
        # Both come from the policy alone, so being equal is no race; being nearly equal is rounding.
        if wait != hold and abs(wait - hold) < self.tolerance:
            self.ambiguous = True
        return wait > hold

    @property
    def _carried(self) -> int:
        return self.transaction.attempts if self.kind == "consume" else 0

    def released(self, *, at: float) -> Prediction:
        """The delivery is given back, unless a body still runs that might act on it."""
        running = bool(self.calls) and not self.before(self.free, at)
        self.now = at
        return self._prediction("released", None, "kept" if running else "release", attempts=self._carried)

    def _prediction(
        self, outcome: Outcome, category: str | None, settlement: Settlement, *, attempts: int | None = None
    ) -> Prediction:
        if isinstance(settlement, tuple) and self.drain_end is not None and not self.before(self.free, self.drain_end):
            settlement = "kept"
        if attempts is None:
            attempts = self._carried + sum(call.step in ("process", "produce") for call in self.calls)
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


def _gives_up(failed: _Failed, *, last: bool) -> bool:
    # Only process and produce can fail as BUSINESS: see _result.
    return failed.category == "BUSINESS" or failed.final or failed.abandoned or last


def _untried(failed: _Failed) -> bool:
    return failed.later and failed.category != "BUSINESS" and not failed.final


def _result(behaviour: Behaviour, step: Step) -> Behaviour | _Failed:
    """How an attempt counts that ended within its time."""
    if behaviour.does == "ok":
        return behaviour
    category = "SYSTEM"
    if step in ("process", "produce"):
        category = {"business": "BUSINESS", "timeout_exc": "TIMEOUT"}.get(behaviour.does, "SYSTEM")
    if behaviour.does not in WITH_VERDICT:
        return _Failed(category)
    return _Failed(category, final=behaviour.final, retry_after=behaviour.retry_after or 0.0, later=behaviour.later)


def _retry(policy: dict[str, Any], step: str) -> dict[str, Any]:
    return {**_RETRY_DEFAULTS, **policy["steps"].get(step, {}).get("retry", {})}


def _backoff(retry: dict[str, Any], attempt: int) -> float:
    wait = float(retry["backoff"] * retry["multiplier"] ** attempt)
    return min(wait, retry["cap"]) if retry["cap"] > 0 else wait


def _or_endless(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


# A delivery against its prediction -----------------------------------------------------------------


def differences(
    prediction: Prediction, delivery: DeliveryRecord, outcome: OutcomeRecord, *, slack: float = TOLERANCE
) -> list[str]:
    """Where a delivery and its outcome are not what was foretold; settlements are compared by the runner."""
    found = [
        f"{name} is {got!r}, foretold was {told!r}"
        for name, got, told in (
            ("outcome", outcome.outcome, prediction.outcome),
            ("category", outcome.category, prediction.category),
            ("processed", outcome.processed, prediction.processed),
            ("attempts", outcome.attempts, prediction.attempts),
        )
        if got != told
    ]
    if abs(outcome.at - prediction.ended) > slack:
        found.append(f"ended at {outcome.at}, foretold was {prediction.ended}")
    made, told_calls = delivery.calls, prediction.calls
    if len(made) != len(told_calls) or not all(
        _same_call(*pair, slack=slack) for pair in zip(made, told_calls, strict=False)
    ):
        found.append(f"calls were {made}, foretold were {told_calls}")
    return found


def _same_call(made: Call, told: Call, *, slack: float) -> bool:
    same = (made.step, made.attempt, made.told_category, made.still_running)
    return same == (told.step, told.attempt, told.told_category, told.still_running) and abs(made.at - told.at) <= slack


# What no run may ever do ---------------------------------------------------------------------------


def check_run(plan: Plan, record: RunRecord, *, slack: float = TOLERANCE) -> list[str]:
    """Every promise of the loop that *record* breaks, one sentence each; *slack* is the clock's grain."""
    run = _Run(plan, record, slack)
    found = [*_concurrency(run), *_bodies(run), *_ends(run), *_errors(run)]
    for number in range(len(record.deliveries)):
        found += _steps(run, number)
    if plan.kind == "consume":
        return [*found, *_outcomes(run), *_fetches(run), *_limit(run), *_settlements(run), *_apart(run)]
    return [*found, *_report(run), *_produced_once(run), *_batches(run), *_limit(run)]


def check_invariants(plan: Plan, record: RunRecord) -> list[str]:
    """Return what was lost, duplicated or overlapping in *record*, by the order of events alone.

    No planned time is compared, so a machine that wakes sleepers late excuses none of it.
    """
    run = _Run(plan, record, 0.0)
    if plan.kind == "produce":
        return [*_overlaps(run), *_produced_once(run)]
    return [*_overlaps(run), *_outcomes(run), *_settled_once(run)]


def _overlaps(run: _Run) -> Iterator[str]:
    """CON-21: no two bodies of one id at a time; an exception handler may run beside a body that was given up."""
    bodies = sorted(
        (
            (delivery.transaction.id, body)
            for delivery in run.record.deliveries
            for body in delivery.bodies
            if body.call.step != "exception"
        ),
        key=lambda one: one[1].call.at,
    )
    for at, (name, later) in enumerate(bodies):
        for other, earlier in bodies[:at]:
            if name == other and later.call.at < earlier.left:
                yield f"id {name!r}: {later.call.step} entered at {later.call.at}, another body left at {earlier.left}"


def _settled_once(run: _Run) -> Iterator[str]:
    """CON-30, CON-36: at most one settlement, and none that gives a running body away."""
    for number in range(len(run.record.deliveries)):
        sent = [settlement for settlement in run.record.settlements if settlement.delivery == number]
        name, left = run.name(number), run.left(number)
        if len(sent) > 1:
            yield f"{name} was settled {len(sent)} times: {[one.what for one in sent]}"
        for one in sent:
            word = one.what if isinstance(one.what, str) else one.what[0]
            if word in ("later", "release") and one.at < left:
                yield f"{name}: {word} was sent at {one.at} though a body ran until {left}"


@dataclass(frozen=True, slots=True)
class _Run:
    """A plan with its record, and what both together tell."""

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
    def batch(self) -> int:
        return int(self.loop.get("batch", {}).get("size", 10))

    @property
    def stop(self) -> float | None:
        """When the loop was told to end, by an operator or by its own timeout, if it had not ended before."""
        stop = _stop_of(self.plan, began=self.record.began)
        return stop if stop is not None and stop <= self.record.ended + self.slack else None

    def name(self, number: int) -> str:
        delivery = self.record.deliveries[number]
        return f"delivery {number} (position {delivery.position}, id {delivery.transaction.id!r})"

    def outcomes_of(self, number: int) -> list[OutcomeRecord]:
        return [outcome for outcome in self.record.outcomes if outcome.delivery == number]

    def left(self, number: int) -> float:
        """When the last body of a delivery left."""
        return max((body.left for body in self.record.deliveries[number].bodies), default=-math.inf)

    def over(self, number: int) -> float:
        """When a delivery gave its slot back: decided, and without a body."""
        decided = min((outcome.at for outcome in self.outcomes_of(number)), default=math.inf)
        return max(decided, self.left(number))

    def deadline(self, number: int, body: BodyRecord) -> float:
        """When the engine's patience with a body ended."""
        limit = body.call.at + _or_endless(_retry(self.plan.policy, body.call.step)["timeout"])
        if body.call.step == "exception":
            return limit
        started = self.record.deliveries[number].started
        return min(limit, (started or 0.0) + _or_endless(self.loop.get("transaction_timeout")))

    def completed(self, number: int, body: BodyRecord) -> bool:
        """Whether a body was ok within its time; what comes later does not count."""
        return body.result == "ok" and body.left <= self.deadline(number, body) + self.slack


def _stop_of(plan: Plan, *, began: float) -> float | None:
    ends = (plan.stop_at, plan.policy["loop"].get("timeout"))
    return min((began + seconds for seconds in ends if seconds is not None), default=None)


def _concurrency(run: _Run) -> Iterator[str]:
    """CON-29, PRO-15: transactions with a running body never exceed the slots."""
    events: list[tuple[float, int]] = []
    for delivery in run.record.deliveries:
        for entered, left in _merged(delivery.bodies):
            if left - run.slack > entered:
                events += [(entered, 1), (left - run.slack, -1)]
    running = 0
    for instant, change in sorted(events):  # who leaves at an instant does so before anybody enters
        running += change
        if running > run.concurrency:
            yield f"{running} transactions had a running body at {instant}, allowed are {run.concurrency}"
            return


def _merged(bodies: tuple[BodyRecord, ...]) -> Iterator[tuple[float, float]]:
    """The spans in which at least one of *bodies* ran."""
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


def _bodies(run: _Run) -> Iterator[str]:
    """CON-21, CON-29: one body of a transaction at a time, but for the exception handler after the grace."""
    for number, delivery in enumerate(run.record.deliveries):
        bodies = sorted(delivery.bodies, key=lambda body: body.call.at)
        for at, later in enumerate(bodies):
            for earlier in bodies[:at]:
                if later.call.at >= earlier.left - run.slack:
                    continue
                if not _may_overlap(run, number, earlier=earlier, later=later):
                    yield (
                        f"{run.name(number)}: {later.call.step} entered at {later.call.at} while "
                        f"{earlier.call.step} of {earlier.call.at} was running until {earlier.left}"
                    )


def _may_overlap(run: _Run, number: int, *, earlier: BodyRecord, later: BodyRecord) -> bool:
    if later.call.step != "exception" or earlier.call.step == "exception":
        return False
    grace = _retry(run.plan.policy, earlier.call.step)["abandon_grace"]
    return bool(later.call.at >= run.deadline(number, earlier) + grace - run.slack)


def _steps(run: _Run, number: int) -> Iterator[str]:
    """CON-22, CON-23, CON-28, CON-45, PRO-14: which step may follow which, and what each outcome needs."""
    delivery, name = run.record.deliveries[number], run.name(number)
    order = {"process": 0, "produce": 0, "success": 1, "exception": 2}
    if any(order[a.step] > order[b.step] for a, b in pairwise(delivery.calls)):
        yield f"{name}: steps ran out of order: {[call.step for call in delivery.calls]}"
    by_rank: list[list[BodyRecord]] = [[], [], []]
    for body in delivery.bodies:
        by_rank[order[body.call.step]].append(body)
    main, success, exception = by_rank
    if delivery.bodies and delivery.started is None:
        yield f"{name}: user code ran though no worker started"
    if delivery.bodies and not main:
        yield f"{name}: a handler ran before {'process' if run.plan.kind == 'consume' else 'produce'}"
    if success and not (main and run.completed(number, main[-1])):
        yield f"{name}: the success handler ran after a failure"
    handled = sum(run.completed(number, body) for body in exception)
    if handled > 1:
        yield f"{name}: the exception handler ran to its end {handled} times"
    for outcome in run.outcomes_of(number)[:1]:
        succeeded = bool(success) and run.completed(number, success[-1]) and not exception
        fits = {
            "succeeded": succeeded,
            "failed": handled == 1,
            "handler_failed": bool(exception) and handled == 0,
            "deferred": not success and not exception,
            "released": True,
        }
        if not fits.get(outcome.outcome, False):
            yield f"{name}: outcome {outcome.outcome!r} does not fit its calls {[c.step for c in delivery.calls]}"


def _ends(run: _Run) -> Iterator[str]:
    """CON-36, PRO-07: after a stop nothing new starts, and the loop is gone when the drain is over."""
    due = drain_end_of(run.plan, began=run.record.began)
    if run.stop is not None and due is not None and run.record.ended > due + run.slack:
        yield f"the loop ended at {run.record.ended}, due was {due}, with the drain"
    for number, delivery in enumerate(run.record.deliveries):
        if run.stop is not None and delivery.started is not None and delivery.started > run.stop + run.slack:
            yield f"{run.name(number)} started at {delivery.started}, after the stop at {run.stop}"
        for body in delivery.bodies:
            if body.call.at > run.record.ended + run.slack:
                yield f"{run.name(number)}: {body.call.step} was called after the loop had ended"


def _errors(run: _Run) -> Iterator[str]:
    """CON-08, CON-19, CON-29, PRO-07: the loop raises only what it has a reason for."""
    raised, ended = run.record.raised, run.record.ended
    timeout = run.loop.get("timeout")
    expired = timeout is not None and ended >= run.record.began + timeout - run.slack
    if raised == "LoopTimeout" and not expired:
        yield f"LoopTimeout at {ended}, but the loop's timeout is {timeout}"
    if raised in ("FetchException", "FetchTimeoutException") and not _fetch_gives_up(run):
        yield f"{raised}, but no fetch failed as often as its budget allows"
    if raised == "LoopStalled":
        held = sum(run.left(number) > ended - run.slack for number in range(len(run.record.deliveries)))
        if held < run.concurrency:
            yield f"LoopStalled with {held} bodies left running in {run.concurrency} slots"
    if raised not in (None, "LoopTimeout", "LoopStalled", "FetchException", "FetchTimeoutException"):
        yield f"the loop raised {raised}"


def _fetch_gives_up(run: _Run) -> bool:
    budget, failed = _retry(run.plan.policy, "fetch")["max_attempts"], 0
    for fetch in run.record.fetches:
        if fetch.fault == "lost_connection" and run.loop.get("streaming"):
            continue  # it spends no budget, and gives none back
        failed = failed + 1 if fetch.fault in ("error", "lost_connection") else 0
        if failed >= budget:
            return True
    return False


def _outcomes(run: _Run) -> Iterator[str]:
    """CON-30: every fetched transaction has exactly one outcome."""
    counts = Counter(outcome.delivery for outcome in run.record.outcomes)
    for number in range(len(run.record.deliveries)):
        if counts[number] != 1:
            yield f"{run.name(number)} has {counts[number]} outcomes"
    strangers = [number for number in counts if number is None or number >= len(run.record.deliveries)]
    if strangers:
        yield f"outcomes for deliveries that were never fetched: {strangers}"
    for number, delivery in enumerate(run.record.deliveries):
        for outcome in run.outcomes_of(number):
            if delivery.started is None and outcome.outcome not in ("released", "deferred"):
                yield f"{run.name(number)} never started but is {outcome.outcome}"


def _fetches(run: _Run) -> Iterator[str]:
    """CON-07, CON-31, CON-36, decision 12: no fetch after the stop, and none for more than there is room for."""
    limit = run.loop.get("limit")
    if limit == 0 and run.record.fetches:
        yield f"limit is 0, but there were {len(run.record.fetches)} fetches"
    for index, fetch in enumerate(run.record.fetches):
        if run.stop is not None and fetch.at > run.stop + run.slack:
            yield f"fetch {index} at {fetch.at} came after the stop at {run.stop}"
        room = {"batch": run.batch, "free slots": run.concurrency - _held(run, index, at=fetch.at)}
        if limit is not None:
            room["limit left"] = limit - sum(
                delivery.started is not None for delivery in run.record.deliveries if (delivery.fetch or 0) < index
            )
        if not 1 <= fetch.asked <= min(room.values()):
            yield f"fetch {index} at {fetch.at} asked for {fetch.asked}; there was {room}"


def _held(run: _Run, fetch: int, *, at: float) -> int:
    """How many slots were surely held at *at* by what earlier fetches had brought."""
    return sum(
        delivery.fetch is not None
        and delivery.fetch < fetch
        and delivery.started is not None
        and delivery.started <= at
        and run.over(number) > at + run.slack
        for number, delivery in enumerate(run.record.deliveries)
    )


def _limit(run: _Run) -> Iterator[str]:
    """CON-31, PRO-12: exactly as many start as the limit and the input allow; an early end excuses fewer."""
    started = sum(delivery.started is not None for delivery in run.record.deliveries)
    if sorted(run.record.starts) != [n for n, d in enumerate(run.record.deliveries) if d.started is not None]:
        yield f"the starts {run.record.starts} are not those of the deliveries"
    limit = _or_endless(run.loop.get("limit"))
    if started > limit:
        yield f"{started} transactions started, the limit is {limit}"
    # A second delivery of an id may have been put off, so only distinct ids are sure to be there; and
    # one whose key is in flight is put off where as many wait for their key as there are slots.
    ids = {transaction.id for transaction in run.plan.transactions}
    begun = {delivery.transaction.id for delivery in run.record.deliveries if delivery.started is not None}
    put_off = {delivery.transaction.id for delivery in run.record.deliveries if delivery.transaction.key} - begun
    sure = min(limit, len(ids - put_off))
    if run.stop is None and run.record.raised is None and started < sure:
        yield f"{started} transactions started, due were {sure}"
    if run.record.reason == "limit" and started != limit:
        yield f"the loop ended at its limit {limit} with {started} started"


def _settlements(run: _Run) -> Iterator[str]:
    """CON-30, CON-31, CON-36, decision 11: one settlement each, none that gives away a running body."""
    for number in range(len(run.record.deliveries)):
        sent = [settlement for settlement in run.record.settlements if settlement.delivery == number]
        name, left = run.name(number), run.left(number)
        if len(sent) > 1:
            yield f"{name} was settled {len(sent)} times: {[one.what for one in sent]}"
        if not sent and left < run.record.ended - run.slack:
            yield f"{name} was left unsettled"
        for one in sent:
            word = one.what if isinstance(one.what, str) else one.what[0]
            if word in ("later", "release") and one.at < left - run.slack:
                yield f"{name}: {word} was sent at {one.at} though a body ran until {left}"
            for outcome in run.outcomes_of(number)[:1]:
                fits = {"released": ("release",), "deferred": ("later",)}
                if word not in fits.get(outcome.outcome, ("ack", "dead_letter", "later")):
                    yield f"{name} is {outcome.outcome} but was settled as {one.what}"


def _apart(run: _Run) -> Iterator[str]:
    """CON-21, CON-34: one id and one key are in flight once at a time, keys in fetch order."""
    started = [run.record.deliveries[number] for number in run.record.starts]
    for later_at, later in enumerate(run.record.starts):
        for earlier_at, earlier in enumerate(run.record.starts[:later_at]):
            first, second = started[earlier_at], started[later_at]
            same_id = first.transaction.id == second.transaction.id
            same_key = first.transaction.key is not None and first.transaction.key == second.transaction.key
            if not (same_id or same_key):
                continue
            if (second.started or 0.0) < run.over(earlier) - run.slack:
                what = "id" if same_id else "key"
                yield f"{run.name(later)} started at {second.started} while {run.name(earlier)} of the same {what} ran"
            if same_key and later < earlier:
                yield f"{run.name(earlier)} started before {run.name(later)} of the same key, which came first"


def _report(run: _Run) -> Iterator[str]:
    """PRO-18: one outcome per input, in order; what never started says why."""
    inputs, outcomes = run.plan.transactions, run.record.outcomes
    if len(outcomes) != len(inputs):
        yield f"{len(outcomes)} outcomes for {len(inputs)} inputs"
        return
    allowed = _reasons(run)
    for position, (transaction, outcome) in enumerate(zip(inputs, outcomes, strict=True)):
        if outcome.delivery is not None:
            told = run.record.deliveries[outcome.delivery].transaction.id
            if told != transaction.id:
                yield f"position {position} is {transaction.id!r} but holds the outcome of {told!r}"
            continue
        if (outcome.outcome, outcome.attempts) != ("released", 0):
            yield f"position {position} never started but is {outcome.outcome} with {outcome.attempts} attempts"
        if outcome.reason not in allowed:
            yield f"position {position} never started because of {outcome.reason!r}; possible is {sorted(allowed)}"


def _reasons(run: _Run) -> set[str]:
    """Why a produced transaction may have been left alone in this run."""
    record = run.record
    timeout, stop_at = run.loop.get("timeout"), run.plan.stop_at
    return {
        reason
        for reason, holds in (
            ("limit", run.loop.get("limit") is not None),
            ("timeout", timeout is not None and record.ended >= record.began + timeout - run.slack),
            ("stop", stop_at is not None and record.ended >= record.began + stop_at - run.slack),
            ("stalled", record.raised == "LoopStalled"),
        )
        if holds
    }


def _produced_once(run: _Run) -> Iterator[str]:
    """PRO-13: one id is run once, and all its positions hold that outcome."""
    runs = Counter(delivery.transaction.id for delivery in run.record.deliveries)
    for name, count in runs.items():
        if count > 1:
            yield f"id {name!r} was produced {count} times"
    held: dict[str, tuple[object, ...]] = {}
    for transaction, outcome in zip(run.plan.transactions, run.record.outcomes, strict=False):
        shared = (outcome.delivery, outcome.outcome, outcome.category, outcome.attempts)
        if held.setdefault(transaction.id, shared) != shared:
            yield f"the positions of id {transaction.id!r} hold different outcomes"


def _batches(run: _Run) -> Iterator[str]:
    """PRO-05: a batch begins when the one before is decided."""
    if len({transaction.id for transaction in run.plan.transactions}) < len(run.plan.transactions):
        return  # whether a repeated id counts towards a batch is nobody's promise
    for later in run.record.starts:
        second = run.record.deliveries[later]
        for earlier in run.record.starts:
            first = run.record.deliveries[earlier]
            if first.position // run.batch >= second.position // run.batch:
                continue
            decided = min((outcome.at for outcome in run.outcomes_of(earlier)), default=math.inf)
            if (second.started or 0.0) < decided - run.slack:
                yield f"{run.name(later)} started before {run.name(earlier)} of an earlier batch was decided"
