"""A plan says what user code, connector and operator do in one run; a record says what the run did.

A plan is drawn from a seed and is pure data, so that the same plan can be executed on every driver
and be foretold by the oracle. All times are virtual seconds. Durations are drawn from a continuous
range: two independent instants practically never coincide, and where they do the oracle says so.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from ergon_framework.task.exceptions import Category, TransactionException

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

ODD: frozenset[str] = frozenset({"system_exit", "keyboard_interrupt", "cancelled"})
WITH_VERDICT: frozenset[str] = frozenset({"business", "system_exc", "timeout_exc"})


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one call of user code does: it takes its time, then returns or raises.

    ``retry_after``, ``final`` and ``later`` count only where ``does`` is one of ``WITH_VERDICT``. ``settles`` is
    what a success or exception handler returns when it is ok; None leaves it to the policy.
    ``on_cancel`` matters in asyncio only: "leaves" ends at once when cancelled, "ignores" goes on
    until ``takes`` is over. A thread always goes on. A hang is a behaviour with a large ``takes``.
    """

    takes: float = 0.0
    does: Does = "ok"
    retry_after: float | None = None
    final: bool = False
    settles: Settles | None = None
    on_cancel: Literal["leaves", "ignores"] = "leaves"
    later: bool = False

    def error(self) -> BaseException | None:
        """A new instance of what this behaviour raises, or None if it returns."""
        category = _CATEGORIES.get(self.does)
        if category is not None:
            return TransactionException(
                self.does, category, retry_after=self.retry_after, final=self.final, later=self.later
            )
        plain = _PLAIN.get(self.does)
        return plain(self.does) if plain else None


_CATEGORIES = {"business": Category.BUSINESS, "system_exc": Category.SYSTEM, "timeout_exc": Category.TIMEOUT}
_PLAIN: dict[str, Callable[[str], BaseException]] = {
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

    def redelivered(self, calls: Mapping[str, int], *, attempts: int) -> TransactionPlan:
        """This transaction as its next delivery sees it, after ``calls[step]`` calls of each step."""
        made = calls.get("process", 0) + calls.get("produce", 0)
        return replace(
            self,
            attempts=attempts,
            process=self.process[made:],
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

    The last two are for the exception handler only: the category of the exception that it was told,
    and that exception's ``still_running``; for the other steps they are None.
    """

    step: Step
    attempt: int
    at: float
    told_category: str | None = None
    still_running: bool | None = None


@dataclass(frozen=True, slots=True)
class BodyRecord:
    """The body of one call, written down by user code itself: it entered at ``call.at``.

    ``left`` is infinite if it had not left when the record was closed; a runner should let virtual
    time go on after the loop's end, so that late leavers are seen. ``result`` is what user code did,
    whatever the engine made of it. ``late`` is how much longer it stayed than it meant to: nobody but the
    machine keeps a sleeper.
    """

    call: Call
    left: float = math.inf
    result: Literal["ok", "raised", "cancelled", "running"] = "ok"
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """One delivery of a consumer, or one run of a producer.

    Consumer: one per transaction that a fetch handed over, in the order handed over, whether or not
    it started; a redelivery is a delivery of its own. Producer: one per run that really started.
    ``position`` is the index into ``plan.transactions``; ``transaction`` is what was delivered, with
    the attempts carried and the behaviours still to come (see ``redelivered``); ``fetch`` is the
    index into ``RunRecord.fetches`` (None for producers); ``started`` is when its worker started.
    """

    position: int
    transaction: TransactionPlan
    fetch: int | None = None
    started: float | None = None
    bodies: tuple[BodyRecord, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls in the order in which they were made."""
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
    """One call of the connector's fetch: when, how many were asked for, how many came."""

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
    """What a runner saw of one run.

    ``starts`` are indexes into ``deliveries`` in the order in which workers started. Consumer
    ``outcomes`` come in any order; a producer's are those of its report, one per input, in order.
    ``ended`` is when the call of the loop came back, ``raised`` the class name of what it raised,
    ``reason`` why it says that it ended (producers: None is fine).
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


class _Draw:
    """A seeded source of choices."""

    __slots__ = ("random",)

    def __init__(self, seed: int) -> None:
        self.random = Random(seed).random

    def chance(self, share: float) -> bool:
        return self.random() < share

    def seconds(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def whole(self, low: int, high: int) -> int:
        """A whole number from *low* to *high*, both included."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, options: tuple[Any, ...]) -> Any:
        return options[int(self.random() * len(options))]


_HANDLERS = ("success", "exception")
_FAILURES: tuple[Does, ...] = (
    *("system",) * 5,
    *("system_exc",) * 5,
    *("timeout_exc",) * 3,
    *("user_timeout",) * 3,
    *("business",) * 3,
)
_ODD: tuple[Does, ...] = ("system_exit", "keyboard_interrupt", "cancelled")


def plan_from_seed(seed: int) -> Plan:
    """The plan of *seed*; equal seeds give equal plans."""
    draw = _Draw(seed)
    kind: Kind = "consume" if draw.chance(0.6) else "produce"
    policy = _policy(draw, kind)
    count = draw.whole(1, 6)
    keyed = kind == "consume" and draw.chance(0.35)
    drawn = [_transaction(draw, policy, name=f"t{n}", keyed=keyed) for n in range(count)]
    if draw.chance(0.3):
        _plant(draw, drawn, behaviour=_hang, policy=policy)
    if draw.chance(0.35):
        _plant(draw, drawn, behaviour=_odd, policy=policy)
    if draw.chance(0.3):
        _duplicate(draw, drawn)
    stop_at = draw.seconds(0.05, 7.0) if draw.chance(0.35) else None
    loop = policy["loop"]
    if draw.chance(0.2):
        loop["limit"] = draw.whole(0, len(drawn) + 1)
    if kind == "consume" and stop_at is not None and draw.chance(0.15):
        loop["streaming"] = True  # only a loop that somebody stops may stream: it has no other end
    faults = _faults(draw) if kind == "consume" and draw.chance(0.2) else ()
    return Plan(seed, kind, policy, tuple(drawn), stop_at, faults)


def _policy(draw: _Draw, kind: Kind) -> dict[str, Any]:
    main = "process" if kind == "consume" else "produce"
    loop: dict[str, Any] = {
        "concurrency": {"value": draw.whole(1, 4)},
        "batch": {"size": draw.whole(1, 4)},
        "drain_timeout": 0.0 if draw.chance(0.05) else draw.seconds(0.3, 8.0),
    }
    if draw.chance(0.5):
        loop["timeout_drain"] = draw.seconds(0.3, 8.0)
    if draw.chance(0.4):
        loop["transaction_timeout"] = draw.seconds(0.5, 8.0)
    if draw.chance(0.06):
        loop["timeout"] = draw.seconds(0.5, 9.0)
    steps: dict[str, Any] = {name: {"retry": _retry(draw)} for name in (main, *_HANDLERS)}
    if kind == "consume":
        loop["streaming"] = False
        loop["identity_delay"] = draw.seconds(0.2, 2.0)
        steps["fetch"] = {"retry": {"max_attempts": draw.whole(2, 4), "timeout": 20.0, "backoff": 0.1, "cap": 1.0}}
        steps["settle"] = {
            f"on_{category}": "ack" if draw.chance(0.3) else "dead_letter"
            for category in ("business", "system", "timeout")
        }
    return {"loop": loop, "steps": steps}


def _retry(draw: _Draw) -> dict[str, Any]:
    return {
        "max_attempts": draw.whole(1, 4),
        "timeout": draw.seconds(0.4, 3.0),
        "backoff": 0.0 if draw.chance(0.2) else draw.seconds(0.05, 1.0),
        "multiplier": 1.0 if draw.chance(0.3) else draw.seconds(1.0, 3.0),
        "cap": 0.0 if draw.chance(0.3) else draw.seconds(0.2, 3.0),
        "hold": 30.0 if draw.chance(0.3) else draw.seconds(0.2, 3.0),
        "abandon_grace": draw.seconds(0.2, 1.5),
    }


def _transaction(draw: _Draw, policy: dict[str, Any], *, name: str, keyed: bool) -> TransactionPlan:
    steps = policy["steps"]
    main = steps["process" if "process" in steps else "produce"]["retry"]
    return TransactionPlan(
        id=name,
        key=draw.pick(("red", "blue", None)) if keyed else None,
        attempts=draw.whole(1, main["max_attempts"]) if draw.chance(0.1) else 0,
        process=_story(draw, main, fails=0.5, handler=False),
        success=_story(draw, steps["success"]["retry"], fails=0.3, handler=True),
        exception=_story(draw, steps["exception"]["retry"], fails=0.3, handler=True),
    )


def _story(draw: _Draw, retry: dict[str, Any], *, fails: float, handler: bool) -> tuple[Behaviour, ...]:
    """Some failing calls, as many as the step may make at most, then one that is ok."""
    failing = draw.whole(1, retry["max_attempts"]) if draw.chance(fails) else 0
    calls = [_hang(draw, retry) if draw.chance(0.06) else _failure(draw, retry) for _ in range(failing)]
    if failing < retry["max_attempts"]:
        settles = _settles(draw) if handler and draw.chance(0.3) else None
        calls.append(Behaviour(_short(draw, retry), settles=settles, on_cancel=_on_cancel(draw)))
    return tuple(calls)


def _failure(draw: _Draw, retry: dict[str, Any]) -> Behaviour:
    does = draw.pick(_FAILURES)
    retry_after, final, later = None, False, False
    if does in WITH_VERDICT:
        final, later = draw.chance(0.15), draw.chance(0.15)
        if draw.chance(0.35):
            beyond = draw.chance(0.5)
            retry_after = retry["hold"] + draw.seconds(0.1, 2.0) if beyond else draw.seconds(0.05, 1.5)
    return Behaviour(_short(draw, retry), does, retry_after, final, None, _on_cancel(draw), later)


def _odd(draw: _Draw, retry: dict[str, Any]) -> Behaviour:
    return Behaviour(_short(draw, retry), draw.pick(_ODD), on_cancel=_on_cancel(draw))


def _hang(draw: _Draw, retry: dict[str, Any]) -> Behaviour:
    """A body that outlives its timeout: within the grace, somewhat beyond it, or beyond everything."""
    timeout, grace = retry["timeout"], retry["abandon_grace"]
    lot = draw.random()
    if lot < 0.4:
        takes = timeout + draw.seconds(0.02, grace)
    elif lot < 0.8:
        takes = timeout + grace + draw.seconds(0.02, 5.0)
    else:
        takes = draw.seconds(100.0, 300.0)
    does: Does = "ok" if draw.chance(0.6) else draw.pick(_FAILURES)
    return Behaviour(takes, does, on_cancel=_on_cancel(draw))


def _short(draw: _Draw, retry: dict[str, Any]) -> float:
    return 0.0 if draw.chance(0.2) else draw.seconds(0.01, 0.7) * retry["timeout"]


def _on_cancel(draw: _Draw) -> Literal["leaves", "ignores"]:
    return "leaves" if draw.chance(0.6) else "ignores"


def _settles(draw: _Draw) -> Settles:
    lot = draw.random()
    if lot < 0.5:
        return ("later", draw.seconds(0.1, 5.0))
    return "ack" if lot < 0.75 else "dead_letter"


def _plant(
    draw: _Draw,
    drawn: list[TransactionPlan],
    *,
    behaviour: Callable[[_Draw, dict[str, Any]], Behaviour],
    policy: dict[str, Any],
) -> None:
    """Put a behaviour where its step will call it, so that the plan is not special on paper only."""
    at = draw.whole(0, len(drawn) - 1)
    steps, chosen, lot = policy["steps"], drawn[at], draw.random()
    if lot < 0.6:
        retry = steps["process" if "process" in steps else "produce"]["retry"]
        drawn[at] = replace(chosen, process=_led(behaviour(draw, retry), chosen.process, retry))
    elif lot < 0.8:
        retry = steps["success"]["retry"]
        drawn[at] = replace(chosen, process=(), success=_led(behaviour(draw, retry), chosen.success, retry))
    else:
        retry = steps["exception"]["retry"]
        business = (Behaviour(does="business"),)
        drawn[at] = replace(chosen, process=business, exception=_led(behaviour(draw, retry), chosen.exception, retry))


def _led(first: Behaviour, rest: tuple[Behaviour, ...], retry: dict[str, Any]) -> tuple[Behaviour, ...]:
    return (first, *rest)[: retry["max_attempts"]]


def _duplicate(draw: _Draw, drawn: list[TransactionPlan]) -> None:
    if len(drawn) == 6:
        drawn.pop()
    twin = drawn[draw.whole(0, len(drawn) - 1)]
    drawn.insert(draw.whole(0, len(drawn)), twin)


def _faults(draw: _Draw) -> tuple[Fault, ...]:
    def one() -> Fault:
        lot = draw.random()
        if lot < 0.5:
            return "ok"
        if lot < 0.7:
            return ("slow", draw.seconds(0.05, 3.0))
        return "error" if lot < 0.87 else "lost_connection"

    return tuple(one() for _ in range(draw.whole(1, 4)))


# Counting what was drawn ---------------------------------------------------------------------------


def shares(plans: Iterable[Plan]) -> dict[str, int]:
    """How many of *plans* contain each special thing, and under "plans" how many there are."""
    counts = dict.fromkeys(("plans", *_MARKS), 0)
    for plan in plans:
        counts["plans"] += 1
        for name, has in _MARKS.items():
            counts[name] += has(plan)
    return counts


def _some(test: Callable[[Behaviour, dict[str, Any]], bool], *names: str) -> Callable[[Plan], bool]:
    """Whether a plan has a behaviour, in the steps of these names, that passes *test* under its retry policy."""

    def has(plan: Plan) -> bool:
        main = "process" if plan.kind == "consume" else "produce"
        for name in names:
            retry = plan.policy["steps"][main if name == "process" else name]["retry"]
            for transaction in plan.transactions:
                if any(test(behaviour, retry) for behaviour in getattr(transaction, name)):
                    return True
        return False

    return has


_ALL_STEPS = ("process", *_HANDLERS)
_deferring = _some(lambda b, retry: (b.retry_after or 0.0) > retry["hold"], "process")
_MARKS: dict[str, Callable[[Plan], bool]] = {
    "hang": _some(lambda b, retry: b.takes > retry["timeout"], *_ALL_STEPS),
    "shutdown": lambda plan: plan.stop_at is not None,
    "duplicate": lambda plan: len({t.id for t in plan.transactions}) < len(plan.transactions),
    "odd": _some(lambda b, _: b.does in ODD, *_ALL_STEPS),
    "outlives_grace": _some(lambda b, retry: b.takes > retry["timeout"] + retry["abandon_grace"], *_ALL_STEPS),
    "business": _some(lambda b, _: b.does == "business", "process"),
    "beyond_hold": lambda plan: plan.kind == "consume" and _deferring(plan),
    "final": _some(lambda b, _: b.final, *_ALL_STEPS),
    "later": _some(lambda b, _: b.later, "process"),
    "handler_failure": _some(lambda b, _: b.does != "ok", *_HANDLERS),
    "own_settlement": _some(lambda b, _: b.settles is not None, *_HANDLERS),
    "lifecycle": lambda plan: plan.policy["loop"].get("transaction_timeout") is not None,
    "loop_timeout": lambda plan: plan.policy["loop"].get("timeout") is not None,
    "limit": lambda plan: plan.policy["loop"].get("limit") is not None,
    "key": lambda plan: any(t.key for t in plan.transactions),
    "carried": lambda plan: any(t.attempts for t in plan.transactions),
    "fetch_fault": lambda plan: any(fault != "ok" for fault in plan.faults),
    "streaming": lambda plan: bool(plan.policy["loop"].get("streaming")),
    "produce": lambda plan: plan.kind == "produce",
}
