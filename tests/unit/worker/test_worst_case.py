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
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.testing.simulation import Simulation
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.worst_case import check_fits_broker_deadline, compute_worst_case

pytestmark = pytest.mark.spec("RUN-07")
#: By how much a body leaves before its grace ends.
EXIT_MARGIN_SECONDS = 1e-6

retry_settings = st.fixed_dictionaries(
    {
        "max_attempts": st.integers(1, 5),
        "timeout": st.floats(0.1, 30.0),
        "backoff": st.floats(0.0, 20.0),
        "multiplier": st.floats(1.0, 3.0),
        "cap": st.floats(0.0, 60.0),
        "max_inline_delay": st.floats(0.0, 40.0),
        "exit_grace": st.floats(0.01, 5.0),
    }
)
timeouts = st.one_of(st.none(), st.floats(1.0, 200.0))


def make_policy(process=None, success=None, exception=None, **loop):
    retries_by_step = {"process": process, "success": success, "exception": exception}
    steps = {name: {"retry": retry} for name, retry in retries_by_step.items() if retry is not None}
    return ConsumerPolicy.load({"steps": steps, "loop": loop})


class SlowConsumer(ConsumerMixin):
    """Every body of it runs into its timeout, and leaves just before its grace is over."""

    def __init__(self, simulation, policy):
        self.connector = MemoryConnector("slow", clock=simulation.monotonic)
        self._simulation = simulation
        self._steps = policy.steps

    def _linger(self, step):
        self._simulation.busy_for(step.retry.timeout + step.retry.exit_grace - EXIT_MARGIN_SECONDS)

    def process_transaction(self, transaction):
        self._linger(self._steps.process)

    def handle_transaction_exception(self, transaction, exc):
        self._linger(self._steps.exception)


class AlmostSlowConsumer(SlowConsumer):
    """Its last attempts come back just in time, so that the success handler has its turn at being slow."""

    def process_transaction(self, transaction):
        retry = self._steps.process.retry
        if current().attempt + 1 < retry.max_attempts:
            self._linger(self._steps.process)
        else:
            self._simulation.busy_for(retry.timeout - EXIT_MARGIN_SECONDS)

    def handle_transaction_success(self, transaction, result):
        self._linger(self._steps.success)


def measure_stretches(kind, policy):
    """The stretches of time between two deferrals, from the first attempt of each to its end."""
    simulation = Simulation()
    task = kind(simulation, policy)
    task.connector.dispatch([Transaction(id="one", source="slow")])
    durations = []
    while task.connector.depth().ready + task.connector.depth().delayed:
        before = len(simulation.trace)
        simulation.consume(task, policy)
        moments = simulation.trace[before:]
        start_times = [moment.at for moment in moments if moment.step == "process" and moment.event == "begins"]
        settle_times = [moment.at for moment in moments if moment.step == "settle" and moment.event == "returns"]
        if start_times:
            durations.append(settle_times[-1] - start_times[0])
        else:
            simulation.run(sleep(simulation.monotonic() + 200.0))
    return durations


@given(process=retry_settings, exception=retry_settings, transaction_timeout=timeouts)
@settings(max_examples=100, deadline=None)
def test_a_delivery_whose_every_attempt_times_out_takes_the_worst_case(process, exception, transaction_timeout):
    policy = make_policy(process, exception=exception, transaction_timeout=transaction_timeout)
    worst = compute_worst_case(policy)
    longest = min(worst.process.held, worst.lifecycle) + worst.exception.held
    durations = measure_stretches(SlowConsumer, policy)
    assert max(durations) <= longest + 1e-9
    if transaction_timeout is None:  # a limit may fall into a wait, which then does not begin
        assert max(durations) == pytest.approx(longest, abs=0.01) or len(durations) > 1
    assert max(durations) <= worst.max_busy_seconds


@given(process=retry_settings, success=retry_settings, exception=retry_settings, transaction_timeout=timeouts)
@settings(max_examples=100, deadline=None)
def test_a_slow_success_handler_does_not_exceed_the_worst_case(process, success, exception, transaction_timeout):
    policy = make_policy(process, success, exception, transaction_timeout=transaction_timeout)
    assert max(measure_stretches(AlmostSlowConsumer, policy)) <= compute_worst_case(policy).max_busy_seconds


def test_a_transaction_is_never_called_more_often_than_computed():
    policy = make_policy({"max_attempts": 4, "timeout": 1.0, "backoff": 100.0, "cap": 0.0, "max_inline_delay": 50.0})
    worst = compute_worst_case(policy)
    simulation = Simulation()
    task = SlowConsumer(simulation, policy)
    task.connector.dispatch([Transaction(id="one", source="slow")])
    while task.connector.depth().ready + task.connector.depth().delayed:
        simulation.consume(task, policy)
        simulation.run(sleep(simulation.monotonic() + 50.0))
    assert sum(moment.event == "begins" and moment.step == "process" for moment in simulation.trace) == worst.calls == 4


# -- by hand ----------------------------------------------------------------------------------------


def test_the_worst_case_of_the_defaults():
    worst = compute_worst_case(ConsumerPolicy())
    assert worst.process.held == 3 * (60 + 5) + 1 + 2
    assert worst.settle.held == pytest.approx(5 * (30 + 5) + 0.1 + 0.2 + 0.4 + 0.8 + 0.002)
    assert worst.max_busy_seconds == pytest.approx(3 * 198 + worst.settle.held)
    assert worst.max_claim_seconds == 2 * worst.max_busy_seconds
    assert (worst.calls, worst.calls_with_crashes) == (3, 30)


def test_each_step_has_its_name_and_its_own_times():
    retry = {"max_attempts": 1, "backoff": 0.0}
    worst = compute_worst_case(
        make_policy(
            retry | {"timeout": 1.0, "exit_grace": 0.25},
            retry | {"timeout": 2.0, "exit_grace": 0.5},
            retry | {"timeout": 4.0, "exit_grace": 0.125},
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


def test_a_delay_beyond_the_inline_limit_ends_the_delivery_and_waits_in_the_broker():
    worst = compute_worst_case(
        make_policy({"max_attempts": 4, "timeout": 1.0, "exit_grace": 0.0, "backoff": 10.0, "max_inline_delay": 20.0})
    )
    assert [wait.slept for wait in worst.process.waits] == [10.0, 20.0, None]
    assert worst.process.held == 1 + 10 + 1 + 20 + 1
    assert worst.process.deferred == 30.0


def test_jitter_may_lengthen_a_delay_up_to_the_inline_limit():
    worst = compute_worst_case(
        make_policy({"max_attempts": 2, "timeout": 1.0, "backoff": 10.0, "jitter": 0.5, "max_inline_delay": 12.0})
    )
    (wait,) = worst.process.waits
    assert (wait.planned, wait.shortest, wait.longest, wait.slept) == (10.0, 5.0, 15.0, 12.0)
    assert worst.process.deferred == 15.0


def test_a_call_without_a_timeout_is_unbounded_unless_the_transaction_has_one():
    assert compute_worst_case(make_policy({"timeout": None})).max_busy_seconds == inf
    assert compute_worst_case(make_policy({"timeout": None}, transaction_timeout=10.0)).max_busy_seconds < 500


def test_prefetched_deliveries_wait_for_slots():
    assert compute_worst_case(make_policy(prefetch=25)).lifecycles_ahead == 4


# -- at the start -----------------------------------------------------------------------------------


class FixedDeadlineQueue(MemoryConnector):
    """A broker that takes deliveries back after a while and cannot be asked for more."""

    @property
    def capabilities(self):
        return replace(super().capabilities, renewable=False, lease=None, deadline=30.0)


class RecordingConsumer(ConsumerMixin):
    def __init__(self):
        self.connector = FixedDeadlineQueue("orders")
        self.seen = []

    def process_transaction(self, transaction):
        self.seen.append(transaction)


class AsyncRecordingConsumer(AsyncConsumerMixin):
    def __init__(self):
        self.connector = FixedDeadlineQueue("orders")
        self.seen = []

    async def process_transaction(self, transaction):
        self.seen.append(transaction)


def run_task(task, policy=None):
    report = task.consume_transactions(policy)
    return asyncio.run(report) if asyncio.iscoroutine(report) else report


SHORT_RETRY = {"max_attempts": 1, "timeout": 1.0, "exit_grace": 0.1}


@pytest.mark.spec("CNN-06")
@pytest.mark.parametrize("kind", [RecordingConsumer, AsyncRecordingConsumer])
def test_a_policy_beyond_the_broker_deadline_is_rejected_before_the_first_fetch(kind):
    task = kind()
    task.connector.dispatch([Transaction(id="one", source="orders")])
    with pytest.raises(
        ConfigurationError, match=r"'orders' redelivers a claim after 30 s .* claims last for 1,5\d\d s"
    ):
        run_task(task)
    assert task.connector.depth().ready == 1


@pytest.mark.spec("CNN-06")
@pytest.mark.parametrize("kind", [RecordingConsumer, AsyncRecordingConsumer])
def test_a_policy_within_the_broker_deadline_runs(kind):
    task = kind()
    task.connector.dispatch([Transaction(id="one", source="orders")])
    steps = {name: {"retry": SHORT_RETRY} for name in ("process", "success", "exception", "settle")}
    assert run_task(task, ConsumerPolicy.load({"steps": steps})).finished == 1
    assert [transaction.id for transaction in task.seen] == ["one"]


def test_the_error_names_an_unbounded_worst_case():
    capabilities = FixedDeadlineQueue("orders").capabilities
    with pytest.raises(ConfigurationError, match="claims last without limit"):
        check_fits_broker_deadline(make_policy({"timeout": None}), capabilities, queue="orders")


def test_without_a_broker_deadline_every_policy_is_accepted():
    capabilities = FixedDeadlineQueue("orders").capabilities
    check_fits_broker_deadline(make_policy({"timeout": None}), replace(capabilities, deadline=None), queue="orders")


def test_a_worst_case_equal_to_the_deadline_is_too_long():
    policy = ConsumerPolicy()
    capabilities = replace(
        FixedDeadlineQueue("orders").capabilities, deadline=compute_worst_case(policy).max_claim_seconds
    )
    with pytest.raises(ConfigurationError):
        check_fits_broker_deadline(policy, capabilities, queue="orders")
    check_fits_broker_deadline(policy, replace(capabilities, deadline=capabilities.deadline + 1), queue="orders")


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize(
    "retry, limit, deferrals",
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
def test_the_computed_deferrals_are_the_maximum(retry, limit, deferrals):
    worst = compute_worst_case(make_policy(retry, max_deferral=limit))
    assert worst.max_deferral == limit
    assert worst.deferrals == (deferrals if deferrals < 1e6 or deferrals == inf else pytest.approx(deferrals, rel=0.2))
