"""The test harness: a user's task in memory and in virtual time, with faults at chosen calls."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager

import pytest

from ergon_framework import (
    BusinessError,
    ConnectionLostError,
    ConsumerMixin,
    ConsumerPolicy,
    Defer,
    MemoryConnector,
    Task,
    Transaction,
    consumer,
    producer,
    queue,
)
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.append import Facts
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.providers.base import ProviderBase
from ergon_framework.testing.faults import (
    hangs,
    loses_response,
    raises,
    returns,
    takes_longer,
    worker_dies_after,
    worker_dies_before,
)
from ergon_framework.testing.harness import TaskHarness

POLICY = ConsumerPolicy.load(
    {"loop": {"concurrency": {"value": 2}}, "steps": {"process": {"retry": {"max_attempts": 3, "timeout": 10}}}}
)
orders, parcels = queue("orders"), queue("parcels")


class Bank:
    def __init__(self):
        self.paid = []

    def charge(self, key, cents):
        self.paid.append(key)
        return cents


class AsyncBank(Bank):
    async def charge(self, key, cents):
        await asyncio.sleep(1)
        return super().charge(key, cents)


@consumer(orders, policy=POLICY, services={"bank": None})
def charge(order, transaction, bank):
    if order["cents"] <= 0:
        raise BusinessError("it costs nothing", code="no_price")
    bank.charge(transaction.derive("charge"), order["cents"])
    parcels.dispatch([parcels.transaction({"of": transaction.id})])


@consumer(orders, policy=POLICY, name="charge_async", services={"bank": None})
async def charge_async(order, transaction, bank):
    if order["cents"] <= 0:
        raise BusinessError("it costs nothing", code="no_price")
    await bank.charge(transaction.derive("charge"), order["cents"])
    await parcels.dispatch_async([parcels.transaction({"of": transaction.id})])


@pytest.fixture(params=["def", "async def"])
def make_harness(request):
    """Return a function that creates a harness with one order in it, of either variant."""
    task, bank = (charge, Bank) if request.param == "def" else (charge_async, AsyncBank)

    def make(cents=20, **options):
        harness = TaskHarness(task, queues=[parcels], bank=bank(), **options)
        harness.send(Transaction({"cents": cents}, id="order-1"))
        return harness

    return make


def test_the_result_is_plain_data(make_harness):
    result = make_harness().run()
    assert result.final_states == {"order-1": "acked"}
    assert result.attempts == {"order-1": 1}
    assert result.list_payloads("parcels") == [{"of": "order-1"}]
    assert [call.args[1] for call in result.list_calls("bank.charge")] == [20]
    assert [call.transaction for call in result.list_calls("bank.charge")] == ["order-1"]
    assert [outcome.kind for outcome in result.outcomes] == ["succeeded"]
    assert (result.killed_workers, result.errors, result.remaining, list(result.dead_letters)) == (0, [], [], [])


def test_a_dead_letter_has_its_reason(make_harness):
    result = make_harness(cents=0).run()
    assert (result.final_states, result.dead_letter_reasons) == ({"order-1": "dead"}, {"order-1": "no_price"})
    assert result.list_calls("bank.charge") == []


@pytest.mark.parametrize("call_name", ["process", "bank.charge", "dispatch"])
def test_a_call_that_raises_is_retried(make_harness, call_name):
    result = make_harness(faults={call_name: {0: raises(ConnectionError("planned"))}}).run()
    assert (result.final_states, result.attempts["order-1"]) == ({"order-1": "acked"}, 2)
    assert len(result.list_payloads("parcels")) == 1
    assert str(result.list_calls(call_name)[0].error) == "planned"


def test_a_lost_response_keeps_the_effect(make_harness):
    result = make_harness(faults={"dispatch": {0: loses_response()}}).run()
    assert (result.final_states, len(result.list_payloads("parcels"))) == ({"order-1": "acked"}, 2)


def test_one_fault_can_apply_to_every_call(make_harness):
    result = make_harness(faults={"bank.charge": raises(ConnectionError("planned"))}).run()
    assert (result.final_states, result.attempts["order-1"]) == ({"order-1": "dead"}, 3)


def test_a_slow_call_takes_virtual_time(make_harness):
    result = make_harness(faults={"bank.charge": {0: takes_longer(7.5)}}).run()
    assert 7.5 <= result.seconds < 9
    assert result.attempts["order-1"] == 1


def test_a_call_that_hangs_is_abandoned_in_virtual_time(make_harness, request):
    result = make_harness(faults={"bank.charge": {0: hangs()}}).run()
    # A coroutine is cancelled and retried; a thread cannot be cancelled, and no second attempt runs next to it.
    is_async = "async" in request.node.name
    assert result.final_states == {"order-1": "acked" if is_async else "dead"}
    assert result.attempts["order-1"] == (2 if is_async else 1)
    assert 10 <= result.seconds < 60


@pytest.mark.parametrize("fault, payment_count", [(worker_dies_before(), 1), (worker_dies_after(), 2)])
def test_another_worker_continues_after_one_is_killed(make_harness, fault, payment_count):
    harness = make_harness(faults={"bank.charge": {0: fault}})
    result = harness.run()
    assert (result.final_states, result.killed_workers) == ({"order-1": "acked"}, 1)
    assert result.seconds >= 30  # the claim of the killed worker had to expire
    bank = harness._services["bank"]
    assert (len(bank.paid), len(set(bank.paid))) == (payment_count, 1)


@pytest.mark.parametrize("call_name", ["fetch", "settle"])
@pytest.mark.parametrize(
    "fault",
    [
        raises(ConnectionLostError("planned")),
        loses_response(),
        worker_dies_before(),
        worker_dies_after(),
        hangs(),
        takes_longer(40),
    ],
)
def test_the_order_ends_once_with_any_fault_of_the_queue(make_harness, call_name, fault):
    result = make_harness(faults={call_name: {0: fault}}).run()
    assert result.final_states == {"order-1": "acked"}
    assert result.acked == {"order-1": 1}


def test_handlers_of_the_outcome_can_fail_too():
    errors = []

    @consumer(orders, policy=POLICY)
    def work(order):
        raise BusinessError("never")

    @work.on_failure
    def record_error(order, error):
        errors.append(str(error))

    harness = TaskHarness(work, faults={"exception": {0: raises(OSError("planned"))}})
    harness.send(Transaction(id="order-1"))
    assert harness.run().final_states == {"order-1": "dead"}
    assert errors == ["never"]


def test_a_deferred_transaction_is_redelivered_in_virtual_time():
    seen = []

    @consumer(orders)
    def work(order, transaction):
        seen.append(transaction.id)
        return Defer(3600) if len(seen) == 1 else None

    harness = TaskHarness(work)
    harness.send(Transaction(id="order-1"))
    result = harness.run()
    assert (result.final_states, len(seen), result.seconds >= 3600) == ({"order-1": "acked"}, 2, True)


def test_a_transaction_that_never_ends_is_left():
    @consumer(orders)
    def work(order):
        return Defer(60)

    harness = TaskHarness(work)
    harness.send(Transaction(id="order-1"))
    assert harness.run(max_starts=5).final_states == {"order-1": "left"}


def test_the_task_is_restored_after_a_run(make_harness):
    make_harness().run()
    assert (charge.connector, charge_async.connector) == (orders, orders)
    assert "process_transaction" not in vars(charge)
    assert charge.services["bank"] is None
    assert vars(parcels)["_connector"] is None


def test_a_connector_instance_is_replaced_too():
    boxes = MemoryConnector("boxes")

    @consumer(MemoryConnector("orders"))
    def pack(order):
        boxes.dispatch([boxes.transaction(order)])

    harness = TaskHarness(pack, queues=[boxes])
    harness.send(Transaction({"n": 1}, id="order-1"))
    assert harness.run().list_payloads("boxes") == [{"n": 1}]
    assert boxes.depth().ready == 0


def test_a_service_that_is_missing_is_named():
    @contextmanager
    def clients():
        yield {"bank": Bank()}

    @consumer(orders, lifespan=clients)
    def pay(order, bank): ...

    harness = TaskHarness(pay)
    harness.send(Transaction({"cents": 1}, id="order-1"))
    with pytest.raises(ConfigurationError, match="no service 'bank'"):
        harness.run()


def test_a_function_is_a_service_too():
    @consumer(orders, services={"mail": None})
    def work(order, mail):
        mail("ada")

    harness = TaskHarness(work, mail=lambda to: None, faults={"mail": {0: raises(OSError("planned"))}})
    harness.send(Transaction(id="order-1"))
    assert [call.args for call in harness.run().list_calls("mail")] == [("ada",), ("ada",)]


def test_an_object_without_methods_cannot_be_watched():
    with pytest.raises(ConfigurationError, match="'rates' cannot be recorded: dict"):
        TaskHarness(charge, watch={"rates": {}})


def test_a_fault_that_was_never_applied_is_reported(make_harness):
    result = make_harness(
        faults={"bank.charge": {0: takes_longer(1), 7: worker_dies_before()}, "exception": hangs()}
    ).run()
    assert result.unraised_faults == [("bank.charge", 7), ("exception", 0)]


@pytest.mark.parametrize("variant", ["def", "async def"])
def test_the_lifespan_is_entered_on_request_and_given_services_override_it(variant):
    seen = []

    @contextmanager
    def clients():
        seen.append("open")
        yield {"bank": "real", "rate": 2}
        seen.append("closed")

    @asynccontextmanager
    async def clients_async():
        with clients() as services:
            yield services

    if variant == "def":

        @consumer(orders, lifespan=clients)
        def work(order, bank, rate):
            seen.append((bank, rate))

    else:

        @consumer(orders, lifespan=clients_async)
        async def work(order, bank, rate):
            seen.append((bank, rate))

    harness = TaskHarness(work, lifespan=True, bank="fake")
    harness.send(Transaction(id="order-1"))
    harness.run()
    assert seen == ["open", ("fake", 2), "closed"]


def test_a_class_is_a_task_too():
    class Mail(ConsumerMixin, Task):
        def process_transaction(self, transaction):
            return self.services.post.send(transaction.payload)

    class Post:
        def send(self, to):
            return to

    harness = TaskHarness(
        Mail(orders, services={"post": None}), post=Post(), faults={"post.send": {0: raises(OSError("planned"))}}
    )
    harness.send(Transaction("ada", id="letter-1"))
    result = harness.run()
    assert (result.final_states, len(result.list_calls("post.send"))) == ({"letter-1": "acked"}, 2)


class Payments(ProviderBase):
    provider_name = "payments"
    capability = "charging"

    def _execute_impl(self, **_):
        raise AssertionError("the real method was called")


def test_providers_and_facts_that_are_globals_are_watched():
    payments, boundary = Payments(), MemoryBoundary()
    facts = Facts(boundary, zone="shop")

    @consumer(orders, policy=POLICY)
    def work(order, transaction):
        paid = payments.call("charge", {"cents": order["cents"]})
        facts.append("headquarters", subject=f"order:{transaction.id}", predicate="paid", object=paid)

    plan = {"payments.call": returns({"status": "paid"}), "facts.append": {0: loses_response()}}
    harness = TaskHarness(work, watch={"payments": payments, "facts": facts}, faults=plan)
    harness.send(Transaction({"cents": 20}, id="order-1"))
    result = harness.run()
    assert result.final_states == {"order-1": "acked"}
    assert [call.result for call in result.list_calls("payments.call")] == [{"status": "paid"}] * 2
    first, again = (call.result for call in result.list_calls("facts.append"))
    assert (first.offset, again.offset, again.duplicate) == (1, 1, True)


def test_a_provider_uses_the_state_of_the_harness_and_not_of_the_process():
    class Synthetic(Payments):
        def _execute_impl(self, **_):
            calls.append(1)
            return {"status": "paid"}

    payments, calls = Synthetic(), []

    @consumer(orders)
    def work(order):
        payments.call("charge", {})

    for times in (1, 2):
        harness = TaskHarness(work, watch={"payments": payments}, faults={"payments.call": {0: loses_response()}})
        harness.send(Transaction(id="order-1"))
        # The second attempt is replayed within a harness run, and the same order in the next run is not.
        assert (harness.run().attempts["order-1"], len(calls)) == (2, times)


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"proces": {0: worker_dies_before()}}, "unknown place 'proces': known places are fetch, process"),
        (
            {"bnak.charge": {0: worker_dies_before()}},
            "extend, bank.METHOD; pass 'bnak' to the harness as a service, bnak=…, or in watch=",
        ),
        ({"bank.chrage": {0: worker_dies_before()}}, "did you mean 'charge'?"),
        ({"bank.pay": {0: worker_dies_before()}}, "it has charge"),
        ({"bank": {0: worker_dies_before()}}, "unknown place 'bank'"),
        ({"process": {-1: worker_dies_before()}}, "calls count from 0"),
        ({"process": {0: OSError("raw")}}, "faults are raises"),
    ],
)
def test_an_invalid_plan_is_rejected(plan, message):
    with pytest.raises(ConfigurationError) as caught:
        TaskHarness(charge, bank=Bank(), faults=plan)
    assert message in str(caught.value)


def test_an_unused_service_is_rejected_before_a_real_one_is_called():
    with pytest.raises(ConfigurationError, match="charge uses no service 'bnak'; it uses: bank"):
        TaskHarness(charge, bnak=Bank())


def test_the_delay_of_a_call_must_be_in_range():
    with pytest.raises(ConfigurationError, match="from 0 to 86400"):
        takes_longer(-1)


def test_only_a_consumer_has_a_harness():
    @producer(orders)
    def make(order):
        return order

    with pytest.raises(ConfigurationError, match="the harness needs a consumer, got Producer"):
        TaskHarness(make)


def test_one_seed_is_one_run(make_harness):
    def list_calls(seed):
        return [
            (call.place, call.at) for call in make_harness(seed=seed, faults={"bank.charge": {0: hangs()}}).run().calls
        ]

    assert list_calls(7) == list_calls(7)


def test_a_harness_run_within_an_event_loop_is_rejected(make_harness):
    async def main():
        make_harness().run()

    with pytest.raises(ConfigurationError, match="from a plain function"):
        asyncio.run(main())


def test_a_coroutine_of_a_killed_worker_has_no_more_effects():
    calls_after_kill = []

    class SlowCancelBank(AsyncBank):
        async def charge(self, key, cents):
            try:
                await asyncio.sleep(5)
            finally:
                if harness.is_killed:
                    with pytest.raises(ConnectionLostError):
                        await parcels.dispatch_async([parcels.transaction("from the dead")])
                    calls_after_kill.append(key)

    # The second order fails, and the worker is killed with it while the first one is still being charged.
    harness = TaskHarness(
        charge_async, queues=[parcels], bank=SlowCancelBank(), faults={"process": {1: worker_dies_after()}}
    )
    harness.send(Transaction({"cents": 1}, id="order-1"), Transaction({"cents": 0}, id="order-2"))
    result = harness.run()
    assert (result.killed_workers, len(calls_after_kill)) == (1, 1)
    assert result.final_states == {"order-1": "acked", "order-2": "dead"}
    assert result.list_payloads("parcels") == [{"of": "order-1"}]


def test_an_error_is_a_response_that_can_be_lost_too(make_harness):
    result = make_harness(cents=0, faults={"process": {0: loses_response()}}).run()
    assert (result.attempts["order-1"], result.dead_letter_reasons) == (2, {"order-1": "no_price"})
