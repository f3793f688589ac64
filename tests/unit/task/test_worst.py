"""The worst case that is reckoned is the worst case that the engine reaches, and never less."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.engine.effects import sleep
from ergon_framework.errors import ConfigurationError
from ergon_framework.scope import current
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.worst import refuse_too_long, worst_case
from ergon_framework.testing.simulation import Simulation
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.spec("RUN-07")
#: By how much a body leaves before its grace ends.
EARLY = 1e-6

retries = st.fixed_dictionaries(
    {
        "max_attempts": st.integers(1, 5),
        "timeout": st.floats(0.1, 30.0),
        "backoff": st.floats(0.0, 20.0),
        "multiplier": st.floats(1.0, 3.0),
        "cap": st.floats(0.0, 60.0),
        "hold": st.floats(0.0, 40.0),
        "abandon_grace": st.floats(0.01, 5.0),
    }
)
limits = st.one_of(st.none(), st.floats(1.0, 200.0))


def made(process=None, success=None, exception=None, **loop):
    given = {"process": process, "success": success, "exception": exception}
    steps = {name: {"retry": retry} for name, retry in given.items() if retry is not None}
    return ConsumerPolicy.load({"steps": steps, "loop": loop})


class Slow(ConsumerMixin):
    """Every body of it runs into its timeout, and leaves just before its grace is over."""

    def __init__(self, simulation, policy):
        self.connector = MemoryConnector("slow", clock=simulation.clock)
        self._simulation = simulation
        self._steps = policy.steps

    def _linger(self, step):
        self._simulation.takes(step.retry.timeout + step.retry.abandon_grace - EARLY)

    def process_transaction(self, transaction):
        self._linger(self._steps.process)

    def handle_transaction_exception(self, transaction, exc):
        self._linger(self._steps.exception)


class AlmostSlow(Slow):
    """Its last attempts come back just in time, so that the success handler has its turn at being slow."""

    def process_transaction(self, transaction):
        retry = self._steps.process.retry
        if current().attempt + 1 < retry.max_attempts:
            self._linger(self._steps.process)
        else:
            self._simulation.takes(retry.timeout - EARLY)

    def handle_transaction_success(self, transaction, result):
        self._linger(self._steps.success)


def consumed(kind, policy):
    """The stretches of time between two deferrals, from the first attempt of each to its end."""
    simulation = Simulation()
    task = kind(simulation, policy)
    task.connector.dispatch([Transaction("one", source="slow")])
    stretches = []
    while task.connector.depth().ready + task.connector.depth().delayed:
        before = len(simulation.trace)
        simulation.consume(task, policy)
        moments = simulation.trace[before:]
        began = [moment.at for moment in moments if moment.step == "process" and moment.what == "begins"]
        settled = [moment.at for moment in moments if moment.step == "settle" and moment.what == "returns"]
        if began:
            stretches.append(settled[-1] - began[0])
        else:
            simulation.run(sleep(simulation.clock() + 200.0))
    return stretches


@given(process=retries, exception=retries, whole=limits)
@settings(max_examples=100, deadline=None)
def test_a_delivery_whose_every_attempt_times_out_takes_just_that_long(process, exception, whole):
    policy = made(process, exception=exception, transaction_timeout=whole)
    worst = worst_case(policy)
    longest = min(worst.process.held, worst.lifecycle) + worst.exception.held
    stretches = consumed(Slow, policy)
    assert max(stretches) <= longest + 1e-9
    if whole is None:  # a limit may fall into a wait, which then does not begin
        assert max(stretches) == pytest.approx(longest, abs=0.01) or len(stretches) > 1
    assert max(stretches) <= worst.busy


@given(process=retries, success=retries, exception=retries, whole=limits)
@settings(max_examples=100, deadline=None)
def test_nor_does_one_whose_success_handler_is_slow_too_take_longer(process, success, exception, whole):
    policy = made(process, success, exception, transaction_timeout=whole)
    assert max(consumed(AlmostSlow, policy)) <= worst_case(policy).busy


def test_a_transaction_is_never_called_more_often_than_reckoned():
    policy = made({"max_attempts": 4, "timeout": 1.0, "backoff": 100.0, "cap": 0.0, "hold": 50.0})
    worst = worst_case(policy)
    simulation = Simulation()
    task = Slow(simulation, policy)
    task.connector.dispatch([Transaction("one", source="slow")])
    while task.connector.depth().ready + task.connector.depth().delayed:
        simulation.consume(task, policy)
        simulation.run(sleep(simulation.clock() + 50.0))
    assert sum(moment.what == "begins" and moment.step == "process" for moment in simulation.trace) == worst.calls == 4


# -- by hand ----------------------------------------------------------------------------------------


def test_the_defaults_by_hand():
    worst = worst_case(ConsumerPolicy())
    assert worst.process.held == 3 * (60 + 5) + 1 + 2
    assert worst.settle.held == pytest.approx(5 * (30 + 5) + 0.1 + 0.2 + 0.4 + 0.8 + 0.002)
    assert worst.busy == pytest.approx(3 * 198 + worst.settle.held)
    assert worst.held == 2 * worst.busy
    assert (worst.calls, worst.calls_with_crashes) == (3, 30)


def test_each_step_has_its_name_and_its_own_figures():
    retry = {"max_attempts": 1, "backoff": 0.0}
    worst = worst_case(
        made(
            retry | {"timeout": 1.0, "abandon_grace": 0.25},
            retry | {"timeout": 2.0, "abandon_grace": 0.5},
            retry | {"timeout": 4.0, "abandon_grace": 0.125},
            transaction_timeout=10.0,
        )
    )
    assert [(step.name, step.timeout, step.grace) for step in worst.steps] == [
        ("process", 1.0, 0.25),
        ("success", 2.0, 0.5),
        ("exception", 4.0, 0.125),
        ("settle", 30.0, 5.0),
    ]
    assert worst.lifecycle == 10.0 + 0.5


def test_a_wait_beyond_hold_is_the_brokers_and_ends_a_delivery():
    worst = worst_case(made({"max_attempts": 4, "timeout": 1.0, "abandon_grace": 0.0, "backoff": 10.0, "hold": 20.0}))
    assert [wait.slept for wait in worst.process.waits] == [10.0, 20.0, None]
    assert worst.process.held == 1 + 10 + 1 + 20 + 1
    assert worst.process.deferred == 30.0


def test_jitter_may_make_a_wait_longer_but_not_longer_than_hold():
    worst = worst_case(made({"max_attempts": 2, "timeout": 1.0, "backoff": 10.0, "jitter": 0.5, "hold": 12.0}))
    (wait,) = worst.process.waits
    assert (wait.planned, wait.shortest, wait.longest, wait.slept) == (10.0, 5.0, 15.0, 12.0)
    assert worst.process.deferred == 15.0


def test_a_body_without_a_limit_may_take_for_ever_unless_the_transaction_has_one():
    assert worst_case(made({"timeout": None})).busy == inf
    assert worst_case(made({"timeout": None}, transaction_timeout=10.0)).busy < 500


def test_what_is_held_beyond_the_slots_waits_for_them():
    assert worst_case(made(prefetch=25)).queued == 4


# -- at the start -----------------------------------------------------------------------------------


class Stern(MemoryConnector):
    """A broker that takes deliveries back after a while and cannot be asked for more."""

    @property
    def capabilities(self):
        return replace(super().capabilities, renewable=False, lease=None, deadline=30.0)


class Work(ConsumerMixin):
    def __init__(self):
        self.connector = Stern("orders")
        self.seen = []

    def process_transaction(self, transaction):
        self.seen.append(transaction)


class AsyncWork(AsyncConsumerMixin):
    def __init__(self):
        self.connector = Stern("orders")
        self.seen = []

    async def process_transaction(self, transaction):
        self.seen.append(transaction)


def ran(task, policy=None):
    done = task.consume_transactions(policy)
    return asyncio.run(done) if asyncio.iscoroutine(done) else done


SHORT = {"max_attempts": 1, "timeout": 1.0, "abandon_grace": 0.1}


@pytest.mark.spec("CNN-06")
@pytest.mark.parametrize("kind", [Work, AsyncWork])
def test_a_policy_that_the_broker_cannot_hold_is_refused_before_anything_is_fetched(kind):
    task = kind()
    task.connector.dispatch([Transaction("one", source="orders")])
    with pytest.raises(ConfigurationError, match=r"'orders' takes a delivery back after 30 s .* held for 1,5\d\d s"):
        ran(task)
    assert task.connector.depth().ready == 1


@pytest.mark.spec("CNN-06")
@pytest.mark.parametrize("kind", [Work, AsyncWork])
def test_one_that_it_can_hold_runs(kind):
    task = kind()
    task.connector.dispatch([Transaction("one", source="orders")])
    steps = {name: {"retry": SHORT} for name in ("process", "success", "exception", "settle")}
    assert ran(task, ConsumerPolicy.load({"steps": steps})).finished == 1
    assert [transaction.id for transaction in task.seen] == ["one"]


def test_for_ever_is_said_as_such():
    able = Stern("orders").capabilities
    with pytest.raises(ConfigurationError, match="held for ever"):
        refuse_too_long(made({"timeout": None}), able, queue="orders")


def test_without_a_deadline_every_policy_can_be_held():
    able = Stern("orders").capabilities
    refuse_too_long(made({"timeout": None}), replace(able, deadline=None), queue="orders")


def test_what_takes_just_as_long_as_the_deadline_is_too_long():
    policy = ConsumerPolicy()
    able = replace(Stern("orders").capabilities, deadline=worst_case(policy).held)
    with pytest.raises(ConfigurationError):
        refuse_too_long(policy, able, queue="orders")
    refuse_too_long(policy, replace(able, deadline=able.deadline + 1), queue="orders")


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize(
    "rules, limit, deferrals",
    [
        ({}, 3600.0, 124),
        ({}, 0.0, 0),
        ({}, 1.0, 1),
        ({}, 1.5, 2),
        ({"multiplier": 1.0}, 10.0, 10),
        ({"backoff": 0.0}, 10.0, inf),
        ({"backoff": 1e-310, "multiplier": 1.0}, 10.0, inf),
        ({"multiplier": 1.0, "jitter": 0.5}, 10.0, 20),
        ({"backoff": 1e-3, "multiplier": 1.0001, "cap": 0.0}, 3600.0, 1_330_000),
    ],
)
def test_the_deferrals_that_are_reckoned_are_those_that_can_be(rules, limit, deferrals):
    found = worst_case(made(rules, max_deferral=limit))
    assert found.max_deferral == limit
    assert found.deferrals == (deferrals if deferrals < 1e6 or deferrals == inf else pytest.approx(deferrals, rel=0.2))
