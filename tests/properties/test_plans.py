"""Thousands of planned faults: in every world the engine does what the oracle predicts."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest

from ergon_framework.engine import retry
from ergon_framework.errors import Category
from ergon_framework.task import consumer, producer
from ergon_framework.testing.virtual_time import VirtualLoop
from ergon_framework.worker import lifecycle
from ergon_framework.worker.admission import DeliveryAdmission
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.lifecycle import classify
from tests.properties.plans import Behaviour, Plan, TransactionPlan, count_features, plan_from_seed
from tests.properties.runner import (
    check_general_rules,
    compare_run,
    explain,
    run_in_asyncio,
    run_in_simulation,
    run_in_threads,
    run_with_unreliable_broker,
)

pytestmark = pytest.mark.invariant

#: Plans per world; the seeds of the worlds do not overlap, so that no plan runs twice.
PLANS = {"threads": 800, "asyncio": 1_200, "simulated threads": 1_000, "simulated asyncio": 1_000}
PARTS = 4
#: Fewer are enough to detect a deliberately broken engine; `make mutants` sets that.
if "ERGON_PLANS" in os.environ:
    PLANS = dict.fromkeys(PLANS, int(os.environ["ERGON_PLANS"]) // len(PLANS))


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.close()


def run_in(world, plan, loop):
    if world == "threads":
        return run_in_threads(plan)
    if world == "asyncio":
        return run_in_asyncio(plan, loop)
    return run_in_simulation(plan, world.removeprefix("simulated "))


def get_seeds(world, part):
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
def test_every_plan_ends_as_the_oracle_predicts(world, part, loop):
    for seed in get_seeds(world, part):
        run = run_in(world, plan_from_seed(seed), loop)
        problems = compare_run(run)
        assert not problems, explain(run, problems, world)


def test_the_plans_contain_every_fault():
    seeds = itertools.chain.from_iterable(get_seeds(world, part) for world in PLANS for part in range(PARTS))
    counts = count_features(plan_from_seed(seed) for seed in seeds)
    print({name: f"{count / counts['plans']:.0%}" for name, count in counts.items()})
    assert counts["plans"] >= 3_000
    for name in ("hang", "shutdown", "duplicate", "odd"):
        assert counts[name] >= 0.2 * counts["plans"], (name, counts)


@pytest.mark.spec("CON-24")
def test_all_drivers_decide_the_same_when_handler_calls_behave_the_same(loop):
    compared = 0
    for seed in range(900_000, 900_150):
        # Only tasks can be cancelled; where all calls ignore that, the drivers must not differ.
        plan = ignore_cancellation(plan_from_seed(seed))
        runs = [run_in(world, plan, loop) for world in PLANS]
        if any(run.plan.stop_at is not None or run.record.raised for run in runs):
            continue  # the progress of each then depends on the exact time of the stop
        first, *others = [list_decisions(run) for run in runs]
        assert all(other == first for other in others), f"seed {seed}"
        compared += 1
    assert compared > 50


@pytest.mark.spec("CON-21", "CON-29", "CON-30", "CON-34", "CON-36")
@pytest.mark.parametrize("part", range(PARTS))
def test_with_any_broker_faults_every_delivery_ends_once_and_the_loop_in_time(part):
    for seed in range(part, 1_500, PARTS):
        plan = plan_from_seed(seed)
        if plan.kind == "consume":
            unreliable_run = run_with_unreliable_broker(plan)
            problems = check_general_rules(unreliable_run)
            assert not problems, explain(unreliable_run.run, problems, "simulation with an unreliable broker")


@pytest.mark.spec("CON-36")
@pytest.mark.parametrize("kind", ["consume", "produce"])
def test_the_first_stop_after_a_loop_timeout_does_not_cut_the_drain_short(kind):
    main = "process" if kind == "consume" else "produce"
    loop = {"concurrency": {"value": 1}, "batch": {"size": 1}, "timeout_drain": 5.0, "timeout": 2.0}
    policy = {"loop": loop, "steps": {main: {"retry": {"timeout": 10.0}}}}
    plan = Plan(0, kind, policy, (TransactionPlan("t0", process=(Behaviour(4.0),)),), stop_at=3.0)
    for run in (run_in_simulation(plan, "threads"), run_in_threads(plan)):
        assert compare_run(run) == []
        assert [one.outcome for one in run.record.outcomes] == ["succeeded"]


@pytest.mark.spec("CON-30", "CON-36")
def test_deliveries_of_a_fetch_that_returns_after_the_stop_are_released():
    loop = {"concurrency": {"value": 2}, "batch": {"size": 1}, "drain_timeout": 8.0}
    policy = {"loop": loop, "steps": {"process": {"retry": {"timeout": 10.0}}}}
    transactions = (TransactionPlan("t0", process=(Behaviour(5.0),)), TransactionPlan("t1"))
    plan = Plan(0, "consume", policy, transactions, stop_at=1.0, faults=("ok", ("slow", 2.0)))
    for run in (run_in_simulation(plan, "threads"), run_in_threads(plan)):
        assert compare_run(run) == []
        late = next(one for one in run.record.outcomes if one.delivery == 1)
        assert (late.outcome, late.reason) == ("released", "late")


def ignore_cancellation(plan):
    def ignore_in_behaviours(behaviours):
        return tuple(replace(one, on_cancel="ignores") for one in behaviours)

    return replace(
        plan,
        transactions=tuple(
            replace(
                one,
                process=ignore_in_behaviours(one.process),
                success=ignore_in_behaviours(one.success),
                exception=ignore_in_behaviours(one.exception),
            )
            for one in plan.transactions
        ),
    )


def list_decisions(run):
    """Return the decisions for each position at its first start: every call and the outcome, without times."""
    outcomes = {one.delivery: one for one in run.record.outcomes}
    decisions_by_position = {}
    for number, delivery in enumerate(run.record.deliveries):
        if delivery.started is not None:
            calls = tuple((one.step, one.attempt, one.error_category, one.still_running) for one in delivery.calls)
            one = outcomes[number]
            decisions_by_position.setdefault(
                delivery.position, (calls, one.outcome, one.category, one.attempts, one.processed)
            )
    return decisions_by_position


# -- a deliberately broken engine is detected -------------------------------------------------------------


def classify_as_system(error):
    return TransactionException(str(error), Category.SYSTEM)


def skip_exit_wait(body, until):
    return True
    yield


def deny_untried(error):
    return False


def admit_without_ids(self, delivery, admit=DeliveryAdmission.admit):
    self._ids.clear()
    return admit(self, delivery)


DEFECTS = {
    "business failures are retried": ((consumer, "classify", classify_as_system),),
    "a producer retries business failures": ((producer, "classify", classify_as_system),),
    "handlers fail as business": ((consumer, "classify_handler", classify), (producer, "classify_handler", classify)),
    "an open breaker costs an attempt": ((retry, "_is_unattempted", deny_untried),),
    "a settlement does not wait for the call to exit": ((retry, "await_exit", skip_exit_wait),),
    "a release does not wait for the call to exit": ((lifecycle, "requires_exited_call", lambda settlement: False),),
    "one id runs twice at once": ((DeliveryAdmission, "admit", admit_without_ids),),
}


@pytest.mark.parametrize("broken", DEFECTS)
def test_a_deliberately_broken_engine_is_detected(broken, monkeypatch):
    for target, name, defect in DEFECTS[broken]:
        monkeypatch.setattr(target, name, defect)
    assert any(has_problems(seed) for seed in range(300))


def has_problems(seed):
    try:
        return bool(compare_run(run_in_simulation(plan_from_seed(seed), "threads")))
    except Exception:  # a broken engine may also crash
        return True
