"""A plan says what user code, connector and operator do in one run; a record says what the run did.

A plan is drawn from a seed and is pure data, so that the same plan can be executed on every driver
and be predicted by the oracle. All times are virtual seconds. Durations are drawn from a continuous
range: two independent times practically never coincide, and where they do the oracle reports it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from ergon_framework.worker.exceptions import Category, TransactionException

Kind = Literal["consume", "produce"]
Flavour = Literal["threads", "asyncio"]
Step = Literal["process", "produce", "success", "exception"]
Does = Literal[
    "ok",
    "business",
    "system",
    "system_exc",
    "timeout_exc",
    "user_timeout",
    "system_exit",
    "keyboard_interrupt",
    "cancelled",
]
Settles = Literal["ack", "dead_letter"] | tuple[Literal["later"], float]
Fault = Literal["ok", "error", "lost_connection"] | tuple[Literal["slow"], float]

BASE_EXCEPTION_KINDS: frozenset[str] = frozenset({"system_exit", "keyboard_interrupt", "cancelled"})
WITH_VERDICT: frozenset[str] = frozenset({"business", "system_exc", "timeout_exc"})


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one call of user code does: it takes its time, then returns or raises.

    ``retry_after``, ``final`` and ``later`` count only where ``does`` is one of ``WITH_VERDICT``. ``settles`` is
    what a success or exception handler returns when it is ok; None leaves it to the policy.
    ``on_cancel`` matters in asyncio only: "leaves" ends immediately when cancelled, "ignores" continues
    until ``takes`` is over. A thread always continues. A hang is a behaviour with a large ``takes``.
    """

    takes: float = 0.0
    does: Does = "ok"
    retry_after: float | None = None
    final: bool = False
    settles: Settles | None = None
    on_cancel: Literal["leaves", "ignores"] = "leaves"
    later: bool = False

    def make_error(self) -> BaseException | None:
        """Return a new instance of the error that this behaviour raises, or None if it returns."""
        category = _CATEGORIES.get(self.does)
        if category is not None:
            return TransactionException(
                self.does, category, retry_after=self.retry_after, final=self.final, not_attempted=self.later
            )
        exception_class = _PLAIN_EXCEPTIONS.get(self.does)
        return exception_class(self.does) if exception_class else None


_CATEGORIES = {"business": Category.BUSINESS, "system_exc": Category.SYSTEM, "timeout_exc": Category.TIMEOUT}
_PLAIN_EXCEPTIONS: dict[str, Callable[[str], BaseException]] = {
    "system": RuntimeError,
    "user_timeout": TimeoutError,
    "system_exit": SystemExit,
    "keyboard_interrupt": KeyboardInterrupt,
    "cancelled": asyncio.CancelledError,
}
OK = Behaviour()


@dataclass(frozen=True, slots=True)
class TransactionPlan:
    """One position of the input and what user code does with it.

    Call n of a step behaves as element n of its tuple, counted in order of calls (not by attempt
    index); beyond the tuple a call is ok in 0 s. Calls are counted per position: a duplicate id has
    an equal plan at its own position. ``process`` is also the producer's produce step. ``attempts``
    are those already counted at earlier deliveries.
    """

    id: str
    key: str | None = None
    attempts: int = 0
    process: tuple[Behaviour, ...] = ()
    success: tuple[Behaviour, ...] = ()
    exception: tuple[Behaviour, ...] = ()

    def for_redelivery(self, calls: Mapping[str, int], *, attempts: int) -> TransactionPlan:
        """Return this transaction for its next delivery, after ``calls[step]`` calls of each step."""
        call_count = calls.get("process", 0) + calls.get("produce", 0)
        return replace(
            self,
            attempts=attempts,
            process=self.process[call_count:],
            success=self.success[calls.get("success", 0) :],
            exception=self.exception[calls.get("exception", 0) :],
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides one run.

    ``policy`` is a plain nested dict for ConsumerPolicy or ProducerPolicy. ``stop_at`` is when the
    operator asks for shutdown, counted from the beginning of the loop. Fetch call n meets
    ``faults[n]``; beyond the tuple it is ok. A fetch that is slow answers after that time.
    """

    seed: int
    kind: Kind
    policy: dict[str, Any]
    transactions: tuple[TransactionPlan, ...]
    stop_at: float | None = None
    faults: tuple[Fault, ...] = ()


# What a run did ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One call of user code: which step, which 0-based attempt index, when.

    The last two are for the exception handler only: the category of the exception that it received,
    and that exception's ``still_running``; for the other steps they are None.
    """

    step: Step
    attempt: int
    at: float
    error_category: str | None = None
    still_running: bool | None = None


@dataclass(frozen=True, slots=True)
class HandlerCallRecord:
    """One handler call, recorded by user code itself: it started at ``call.at``.

    ``left`` is infinite if the call had not returned when the record was closed; a runner should let virtual
    time continue after the loop's end, so that late returns are recorded. ``result`` is what user code did,
    regardless of the engine's reaction. ``late`` is how much longer the call ran than planned: only the
    machine delays a sleeping handler.
    """

    call: Call
    left: float = math.inf
    result: Literal["ok", "raised", "cancelled", "running"] = "ok"
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """One delivery of a consumer, or one run of a producer.

    Consumer: one per transaction that a fetch returned, in that order, whether or not
    it started; a redelivery is a separate delivery. Producer: one per run that really started.
    ``position`` is the index into ``plan.transactions``; ``transaction`` is what was delivered, with
    the attempts carried and the behaviours still to come (see ``for_redelivery``); ``fetch`` is the
    index into ``RunRecord.fetches`` (None for producers); ``started`` is when its worker started.
    """

    position: int
    transaction: TransactionPlan
    fetch: int | None = None
    started: float | None = None
    bodies: tuple[HandlerCallRecord, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls, in the order in which they started."""
        return tuple(body.call for body in self.bodies)


@dataclass(frozen=True, slots=True)
class OutcomeRecord:
    """One outcome that the engine reported.

    ``delivery`` is the index into ``RunRecord.deliveries``, or None for a producer's transaction that
    never started. ``at`` is when the outcome was decided, ``reason`` why it was released.
    """

    delivery: int | None
    outcome: str
    at: float
    category: str | None = None
    attempts: int = 0
    processed: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """One call of the connector's fetch: when, how many were requested, how many were returned."""

    at: float
    asked: int
    got: int
    fault: Fault = "ok"


@dataclass(frozen=True, slots=True)
class SettlementRecord:
    """One settlement that reached the connector: "ack", "dead_letter", "release" or ("later", delay)."""

    delivery: int
    at: float
    what: str | tuple[str, float]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a runner recorded of one run.

    ``starts`` are indexes into ``deliveries`` in the order in which workers started. Consumer
    ``outcomes`` come in any order; a producer's are those of its report, one per input, in order.
    ``ended`` is when the call of the loop returned, ``raised`` the class name of what it raised,
    ``reason`` the reported end reason (producers: None is fine).
    """

    flavour: Flavour
    deliveries: tuple[DeliveryRecord, ...]
    outcomes: tuple[OutcomeRecord, ...]
    ended: float
    starts: tuple[int, ...] = ()
    fetches: tuple[FetchRecord, ...] = ()
    settlements: tuple[SettlementRecord, ...] = ()
    began: float = 0.0
    raised: str | None = None
    reason: str | None = None


# Drawing a plan ------------------------------------------------------------------------------------


class _RandomChoices:
    """A seeded source of choices."""

    __slots__ = ("random",)

    def __init__(self, seed: int) -> None:
        self.random = Random(seed).random

    def chance(self, share: float) -> bool:
        return self.random() < share

    def seconds(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def integer(self, low: int, high: int) -> int:
        """Return a whole number from *low* to *high*, both included."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, options: tuple[Any, ...]) -> Any:
        return options[int(self.random() * len(options))]


_HANDLERS = ("success", "exception")
_FAILURE_CHOICES: tuple[Does, ...] = (
    *("system",) * 5,
    *("system_exc",) * 5,
    *("timeout_exc",) * 3,
    *("user_timeout",) * 3,
    *("business",) * 3,
)
_BASE_EXCEPTION_CHOICES: tuple[Does, ...] = ("system_exit", "keyboard_interrupt", "cancelled")


def plan_from_seed(seed: int) -> Plan:
    """Return the plan of *seed*; equal seeds give equal plans."""
    draw = _RandomChoices(seed)
    kind: Kind = "consume" if draw.chance(0.6) else "produce"
    policy = _draw_policy(draw, kind)
    count = draw.integer(1, 6)
    has_keys = kind == "consume" and draw.chance(0.35)
    transactions = [_draw_transaction(draw, policy, name=f"t{n}", has_key=has_keys) for n in range(count)]
    if draw.chance(0.3):
        _insert_behaviour(draw, transactions, behaviour=_draw_hang, policy=policy)
    if draw.chance(0.35):
        _insert_behaviour(draw, transactions, behaviour=_draw_base_exception, policy=policy)
    if draw.chance(0.3):
        _duplicate_transaction(draw, transactions)
    stop_at = draw.seconds(0.05, 7.0) if draw.chance(0.35) else None
    loop = policy["loop"]
    if draw.chance(0.2):
        loop["limit"] = draw.integer(0, len(transactions) + 1)
    if kind == "consume" and stop_at is not None and draw.chance(0.15):
        loop["streaming"] = True  # only a loop with a planned stop may stream: it has no other end
    faults = _draw_faults(draw) if kind == "consume" and draw.chance(0.2) else ()
    return Plan(seed, kind, policy, tuple(transactions), stop_at, faults)


def _draw_policy(draw: _RandomChoices, kind: Kind) -> dict[str, Any]:
    main_step = "process" if kind == "consume" else "produce"
    loop: dict[str, Any] = {
        "concurrency": {"value": draw.integer(1, 4)},
        "batch": {"size": draw.integer(1, 4)},
        "drain_timeout": 0.0 if draw.chance(0.05) else draw.seconds(0.3, 8.0),
    }
    if draw.chance(0.5):
        loop["timeout_drain"] = draw.seconds(0.3, 8.0)
    if draw.chance(0.4):
        loop["transaction_timeout"] = draw.seconds(0.5, 8.0)
    if draw.chance(0.06):
        loop["timeout"] = draw.seconds(0.5, 9.0)
    steps: dict[str, Any] = {name: {"retry": _draw_retry(draw)} for name in (main_step, *_HANDLERS)}
    if kind == "consume":
        loop["streaming"] = False
        loop["duplicate_delay"] = draw.seconds(0.2, 2.0)
        steps["fetch"] = {"retry": {"max_attempts": draw.integer(2, 4), "timeout": 20.0, "backoff": 0.1, "cap": 1.0}}
        steps["settle"] = {
            f"on_{category}": "ack" if draw.chance(0.3) else "dead_letter"
            for category in ("business", "system", "timeout")
        }
    return {"loop": loop, "steps": steps}


def _draw_retry(draw: _RandomChoices) -> dict[str, Any]:
    return {
        "max_attempts": draw.integer(1, 4),
        "timeout": draw.seconds(0.4, 3.0),
        "backoff": 0.0 if draw.chance(0.2) else draw.seconds(0.05, 1.0),
        "multiplier": 1.0 if draw.chance(0.3) else draw.seconds(1.0, 3.0),
        "cap": 0.0 if draw.chance(0.3) else draw.seconds(0.2, 3.0),
        "max_inline_delay": 30.0 if draw.chance(0.3) else draw.seconds(0.2, 3.0),
        "exit_grace": draw.seconds(0.2, 1.5),
    }


def _draw_transaction(draw: _RandomChoices, policy: dict[str, Any], *, name: str, has_key: bool) -> TransactionPlan:
    steps = policy["steps"]
    main_retry = steps["process" if "process" in steps else "produce"]["retry"]
    return TransactionPlan(
        id=name,
        key=draw.pick(("red", "blue", None)) if has_key else None,
        attempts=draw.integer(1, main_retry["max_attempts"]) if draw.chance(0.1) else 0,
        process=_draw_behaviours(draw, main_retry, failure_share=0.5, is_handler=False),
        success=_draw_behaviours(draw, steps["success"]["retry"], failure_share=0.3, is_handler=True),
        exception=_draw_behaviours(draw, steps["exception"]["retry"], failure_share=0.3, is_handler=True),
    )


def _draw_behaviours(
    draw: _RandomChoices, retry: dict[str, Any], *, failure_share: float, is_handler: bool
) -> tuple[Behaviour, ...]:
    """Return some failing calls, at most as many as the step may make, then one that is ok."""
    failure_count = draw.integer(1, retry["max_attempts"]) if draw.chance(failure_share) else 0
    calls = [_draw_hang(draw, retry) if draw.chance(0.06) else _draw_failure(draw, retry) for _ in range(failure_count)]
    if failure_count < retry["max_attempts"]:
        settles = _draw_settlement(draw) if is_handler and draw.chance(0.3) else None
        calls.append(Behaviour(_draw_short_time(draw, retry), settles=settles, on_cancel=_draw_on_cancel(draw)))
    return tuple(calls)


def _draw_failure(draw: _RandomChoices, retry: dict[str, Any]) -> Behaviour:
    does = draw.pick(_FAILURE_CHOICES)
    retry_after, final, later = None, False, False
    if does in WITH_VERDICT:
        final, later = draw.chance(0.15), draw.chance(0.15)
        if draw.chance(0.35):
            is_deferred = draw.chance(0.5)
            retry_after = retry["max_inline_delay"] + draw.seconds(0.1, 2.0) if is_deferred else draw.seconds(0.05, 1.5)
    return Behaviour(_draw_short_time(draw, retry), does, retry_after, final, None, _draw_on_cancel(draw), later)


def _draw_base_exception(draw: _RandomChoices, retry: dict[str, Any]) -> Behaviour:
    return Behaviour(_draw_short_time(draw, retry), draw.pick(_BASE_EXCEPTION_CHOICES), on_cancel=_draw_on_cancel(draw))


def _draw_hang(draw: _RandomChoices, retry: dict[str, Any]) -> Behaviour:
    """Return a call that exceeds its timeout: within the grace, somewhat beyond it, or far beyond it."""
    timeout, grace = retry["timeout"], retry["exit_grace"]
    choice = draw.random()
    if choice < 0.4:
        takes = timeout + draw.seconds(0.02, grace)
    elif choice < 0.8:
        takes = timeout + grace + draw.seconds(0.02, 5.0)
    else:
        takes = draw.seconds(100.0, 300.0)
    does: Does = "ok" if draw.chance(0.6) else draw.pick(_FAILURE_CHOICES)
    return Behaviour(takes, does, on_cancel=_draw_on_cancel(draw))


def _draw_short_time(draw: _RandomChoices, retry: dict[str, Any]) -> float:
    return 0.0 if draw.chance(0.2) else draw.seconds(0.01, 0.7) * retry["timeout"]


def _draw_on_cancel(draw: _RandomChoices) -> Literal["leaves", "ignores"]:
    return "leaves" if draw.chance(0.6) else "ignores"


def _draw_settlement(draw: _RandomChoices) -> Settles:
    choice = draw.random()
    if choice < 0.5:
        return ("later", draw.seconds(0.1, 5.0))
    return "ack" if choice < 0.75 else "dead_letter"


def _insert_behaviour(
    draw: _RandomChoices,
    transactions: list[TransactionPlan],
    *,
    behaviour: Callable[[_RandomChoices, dict[str, Any]], Behaviour],
    policy: dict[str, Any],
) -> None:
    """Put a behaviour where its step will certainly call it."""
    index = draw.integer(0, len(transactions) - 1)
    steps, transaction, choice = policy["steps"], transactions[index], draw.random()
    if choice < 0.6:
        retry = steps["process" if "process" in steps else "produce"]["retry"]
        transactions[index] = replace(
            transaction, process=_prepend_behaviour(behaviour(draw, retry), transaction.process, retry)
        )
    elif choice < 0.8:
        retry = steps["success"]["retry"]
        transactions[index] = replace(
            transaction, process=(), success=_prepend_behaviour(behaviour(draw, retry), transaction.success, retry)
        )
    else:
        retry = steps["exception"]["retry"]
        business = (Behaviour(does="business"),)
        transactions[index] = replace(
            transaction,
            process=business,
            exception=_prepend_behaviour(behaviour(draw, retry), transaction.exception, retry),
        )


def _prepend_behaviour(first: Behaviour, rest: tuple[Behaviour, ...], retry: dict[str, Any]) -> tuple[Behaviour, ...]:
    return (first, *rest)[: retry["max_attempts"]]


def _duplicate_transaction(draw: _RandomChoices, transactions: list[TransactionPlan]) -> None:
    if len(transactions) == 6:
        transactions.pop()
    duplicate = transactions[draw.integer(0, len(transactions) - 1)]
    transactions.insert(draw.integer(0, len(transactions)), duplicate)


def _draw_faults(draw: _RandomChoices) -> tuple[Fault, ...]:
    def draw_fault() -> Fault:
        choice = draw.random()
        if choice < 0.5:
            return "ok"
        if choice < 0.7:
            return ("slow", draw.seconds(0.05, 3.0))
        return "error" if choice < 0.87 else "lost_connection"

    return tuple(draw_fault() for _ in range(draw.integer(1, 4)))


# Counting what was drawn ---------------------------------------------------------------------------


def count_features(plans: Iterable[Plan]) -> dict[str, int]:
    """Return how many of *plans* contain each feature, and under "plans" how many there are."""
    counts = dict.fromkeys(("plans", *_FEATURES), 0)
    for plan in plans:
        counts["plans"] += 1
        for name, has_feature in _FEATURES.items():
            counts[name] += has_feature(plan)
    return counts


def _make_predicate(test: Callable[[Behaviour, dict[str, Any]], bool], *names: str) -> Callable[[Plan], bool]:
    """Return a predicate: a plan has a behaviour in these steps that passes *test* under its retry policy."""

    def has_behaviour(plan: Plan) -> bool:
        main_step = "process" if plan.kind == "consume" else "produce"
        for name in names:
            retry = plan.policy["steps"][main_step if name == "process" else name]["retry"]
            for transaction in plan.transactions:
                if any(test(behaviour, retry) for behaviour in getattr(transaction, name)):
                    return True
        return False

    return has_behaviour


_ALL_STEPS = ("process", *_HANDLERS)
_is_deferring = _make_predicate(lambda b, retry: (b.retry_after or 0.0) > retry["max_inline_delay"], "process")
_FEATURES: dict[str, Callable[[Plan], bool]] = {
    "hang": _make_predicate(lambda b, retry: b.takes > retry["timeout"], *_ALL_STEPS),
    "shutdown": lambda plan: plan.stop_at is not None,
    "duplicate": lambda plan: len({t.id for t in plan.transactions}) < len(plan.transactions),
    "odd": _make_predicate(lambda b, _: b.does in BASE_EXCEPTION_KINDS, *_ALL_STEPS),
    "outlives_grace": _make_predicate(lambda b, retry: b.takes > retry["timeout"] + retry["exit_grace"], *_ALL_STEPS),
    "business": _make_predicate(lambda b, _: b.does == "business", "process"),
    "beyond_hold": lambda plan: plan.kind == "consume" and _is_deferring(plan),
    "final": _make_predicate(lambda b, _: b.final, *_ALL_STEPS),
    "later": _make_predicate(lambda b, _: b.later, "process"),
    "handler_failure": _make_predicate(lambda b, _: b.does != "ok", *_HANDLERS),
    "own_settlement": _make_predicate(lambda b, _: b.settles is not None, *_HANDLERS),
    "lifecycle": lambda plan: plan.policy["loop"].get("transaction_timeout") is not None,
    "loop_timeout": lambda plan: plan.policy["loop"].get("timeout") is not None,
    "limit": lambda plan: plan.policy["loop"].get("limit") is not None,
    "key": lambda plan: any(t.key for t in plan.transactions),
    "carried": lambda plan: any(t.attempts for t in plan.transactions),
    "fetch_fault": lambda plan: any(fault != "ok" for fault in plan.faults),
    "streaming": lambda plan: bool(plan.policy["loop"].get("streaming")),
    "produce": lambda plan: plan.kind == "produce",
}
