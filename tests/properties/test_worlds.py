"""Thousands of planned misfortunes: in every world the engine does what the oracle says."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest

from ergon_framework.engine import attempts
from ergon_framework.errors import Category
from ergon_framework.task import handling
from ergon_framework.task.admission import Admission
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.lifecycle import classify
from ergon_framework.task.mixins import consumer, producer
from ergon_framework.testing.virtual import VirtualLoop
from tests.properties.plan import Behaviour, Plan, TransactionPlan, plan_from_seed, shares
from tests.properties.world import (
    explain,
    in_asyncio,
    in_simulation,
    in_threads,
    judge,
    judge_promises,
    with_unreliable_broker,
)

pytestmark = pytest.mark.invariant

#: Plans per world; the seeds of the worlds do not overlap, so that no plan is spent twice.
PLANS = {"threads": 800, "asyncio": 1_200, "simulated threads": 1_000, "simulated asyncio": 1_000}
PARTS = 4
#: Fewer are enough to notice an engine that is broken on purpose; `make mutants` asks for that.
if "ERGON_PLANS" in os.environ:
    PLANS = dict.fromkeys(PLANS, int(os.environ["ERGON_PLANS"]) // len(PLANS))


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.close()


def run_in(world, plan, loop):
    if world == "threads":
        return in_threads(plan)
    if world == "asyncio":
        return in_asyncio(plan, loop)
    return in_simulation(plan, world.removeprefix("simulated "))


def seeds_of(world, part):
    base = 100_000 * list(PLANS).index(world)
    return range(base + part, base + PLANS[world], PARTS)


@pytest.mark.spec(
    *("CON-02", "CON-03", "CON-04", "CON-05", "CON-06", "CON-12", "CON-13", "CON-15", "CON-19", "CON-21", "CON-22"),
    *("CON-23", "CON-24", "CON-28", "CON-29", "CON-30", "CON-31", "CON-34", "CON-35", "CON-36", "CON-37", "CON-38"),
    *("CON-39", "CON-44", "CON-45", "PRO-02", "PRO-03", "PRO-04", "PRO-05", "PRO-07", "PRO-08", "PRO-12", "PRO-13"),
    *("PRO-14", "PRO-15", "PRO-18", "PRO-19", "PRV-31"),
)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world", PLANS)
def test_every_plan_ends_as_the_oracle_says(world, part, loop):
    for seed in seeds_of(world, part):
        run = run_in(world, plan_from_seed(seed), loop)
        found = judge(run)
        assert not found, explain(run, found, world)


def test_the_plans_are_full_of_trouble():
    seeds = itertools.chain.from_iterable(seeds_of(world, part) for world in PLANS for part in range(PARTS))
    counts = shares(plan_from_seed(seed) for seed in seeds)
    print({name: f"{count / counts['plans']:.0%}" for name, count in counts.items()})
    assert counts["plans"] >= 3_000
    for name in ("hang", "shutdown", "duplicate", "odd"):
        assert counts[name] >= 0.2 * counts["plans"], (name, counts)


@pytest.mark.spec("CON-24")
def test_all_drivers_decide_the_same_when_bodies_do_the_same(loop):
    compared = 0
    for seed in range(900_000, 900_150):
        # Only tasks can be cancelled; where no body heeds that, nothing is left to tell the drivers apart.
        plan = stubborn(plan_from_seed(seed))
        runs = [run_in(world, plan, loop) for world in PLANS]
        if any(run.plan.stop_at is not None or run.record.raised for run in runs):
            continue  # how far each came then depends on when exactly it was stopped
        first, *others = [decisions(run) for run in runs]
        assert all(other == first for other in others), f"seed {seed}"
        compared += 1
    assert compared > 50


@pytest.mark.spec("CON-21", "CON-29", "CON-30", "CON-34", "CON-36")
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_a_broker_does_every_delivery_ends_once_and_the_loop_in_time(part):
    for seed in range(part, 1_500, PARTS):
        plan = plan_from_seed(seed)
        if plan.kind == "consume":
            seen = with_unreliable_broker(plan)
            found = judge_promises(seen)
            assert not found, explain(seen.run, found, "simulation with an unreliable broker")


@pytest.mark.spec("CON-36")
@pytest.mark.parametrize("kind", ["consume", "produce"])
def test_the_first_stop_after_a_loop_timeout_does_not_cut_the_drain_short(kind):
    main = "process" if kind == "consume" else "produce"
    loop = {"concurrency": {"value": 1}, "batch": {"size": 1}, "timeout_drain": 5.0, "timeout": 2.0}
    policy = {"loop": loop, "steps": {main: {"retry": {"timeout": 10.0}}}}
    plan = Plan(0, kind, policy, (TransactionPlan("t0", process=(Behaviour(4.0),)),), stop_at=3.0)
    for run in (in_simulation(plan, "threads"), in_threads(plan)):
        assert judge(run) == []
        assert [one.outcome for one in run.record.outcomes] == ["succeeded"]


@pytest.mark.spec("CON-30", "CON-36")
def test_what_a_fetch_brings_after_the_stop_is_released():
    loop = {"concurrency": {"value": 2}, "batch": {"size": 1}, "drain_timeout": 8.0}
    policy = {"loop": loop, "steps": {"process": {"retry": {"timeout": 10.0}}}}
    transactions = (TransactionPlan("t0", process=(Behaviour(5.0),)), TransactionPlan("t1"))
    plan = Plan(0, "consume", policy, transactions, stop_at=1.0, faults=("ok", ("slow", 2.0)))
    for run in (in_simulation(plan, "threads"), in_threads(plan)):
        assert judge(run) == []
        late = next(one for one in run.record.outcomes if one.delivery == 1)
        assert (late.outcome, late.reason) == ("released", "late")


def stubborn(plan):
    def story(behaviours):
        return tuple(replace(one, on_cancel="ignores") for one in behaviours)

    return replace(
        plan,
        transactions=tuple(
            replace(one, process=story(one.process), success=story(one.success), exception=story(one.exception))
            for one in plan.transactions
        ),
    )


def decisions(run):
    """What was decided for each position at its first start: every call and the outcome, without times."""
    outcomes = {one.delivery: one for one in run.record.outcomes}
    seen = {}
    for number, delivery in enumerate(run.record.deliveries):
        if delivery.started is not None:
            calls = tuple((one.step, one.attempt, one.told_category, one.still_running) for one in delivery.calls)
            one = outcomes[number]
            seen.setdefault(delivery.position, (calls, one.outcome, one.category, one.attempts, one.processed))
    return seen


# -- the net holds: an engine that is broken on purpose is caught -----------------------------------------


def everything_is_system(error):
    return TransactionException(str(error), Category.SYSTEM)


def has_left(body, until):
    return True
    yield


def never_untried(error):
    return False


def forgets_ids(self, delivery, admit=Admission.admit):
    self._ids.clear()
    return admit(self, delivery)


BREAKS = {
    "business failures are retried": ((consumer, "classify", everything_is_system),),
    "a producer retries business failures": ((producer, "classify", everything_is_system),),
    "handlers fail as business": ((consumer, "classify_handler", classify), (producer, "classify_handler", classify)),
    "an open breaker costs an attempt": ((attempts, "_untried", never_untried),),
    "nobody waits until a body has left": ((attempts, "gone", has_left),),
    "a release gives away a running body": ((handling, "needs_absence", lambda settlement: False),),
    "one id runs twice at once": ((Admission, "admit", forgets_ids),),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_an_engine_that_is_broken_on_purpose_is_caught(broken, monkeypatch):
    for target, name, wrong in BREAKS[broken]:
        monkeypatch.setattr(target, name, wrong)
    assert any(differs(seed) for seed in range(300))


def differs(seed):
    try:
        return bool(judge(in_simulation(plan_from_seed(seed), "threads")))
    except Exception:  # a broken engine may fall over as well
        return True
