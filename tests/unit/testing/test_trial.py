"""A trial: a task of a user's in memory and in virtual time, with what is to go wrong at which call."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager

import pytest

from ergon_framework import (
    BusinessError,
    ConnectionLost,
    ConsumerMixin,
    ConsumerPolicy,
    Later,
    MemoryConnector,
    Task,
    Transaction,
    consumer,
    producer,
    queue,
)
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.facts import Facts
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.providers.base import ProviderBase
from ergon_framework.testing.mishaps import answers, dies, dies_after, hangs, loses, raises, takes
from ergon_framework.testing.trial import Trial

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


@consumer(orders, policy=POLICY)
def charge(order, transaction, bank):
    if order["cents"] <= 0:
        raise BusinessError("it costs nothing", code="no_price")
    bank.charge(transaction.derive("charge"), order["cents"])
    parcels.dispatch([parcels.transaction({"of": transaction.id})])


@consumer(orders, policy=POLICY, name="charge_async")
async def charge_async(order, transaction, bank):
    if order["cents"] <= 0:
        raise BusinessError("it costs nothing", code="no_price")
    await bank.charge(transaction.derive("charge"), order["cents"])
    await parcels.dispatch_async([parcels.transaction({"of": transaction.id})])


@pytest.fixture(params=["def", "async def"])
def trial(request):
    """Makes a trial with one order in it, of either variant."""
    task, bank = (charge, Bank) if request.param == "def" else (charge_async, AsyncBank)

    def make(cents=20, **options):
        made = Trial(task, queues=[parcels], bank=bank(), **options)
        made.send(Transaction("order-1", {"cents": cents}))
        return made

    return make


def test_what_came_of_it_is_plain_data(trial):
    result = trial().run()
    assert result.ends == {"order-1": "acked"}
    assert result.attempts == {"order-1": 1}
    assert result.payloads("parcels") == [{"of": "order-1"}]
    assert [call.args[1] for call in result.calls_of("bank.charge")] == [20]
    assert [call.transaction for call in result.calls_of("bank.charge")] == ["order-1"]
    assert [outcome.kind for outcome in result.outcomes] == ["succeeded"]
    assert (result.deaths, result.errors, result.left, list(result.dead)) == (0, [], [], [])


def test_a_dead_letter_has_its_reason(trial):
    result = trial(cents=0).run()
    assert (result.ends, result.reasons) == ({"order-1": "dead"}, {"order-1": "no_price"})
    assert result.calls_of("bank.charge") == []


@pytest.mark.parametrize("place", ["process", "bank.charge", "dispatch"])
def test_a_call_that_raises_is_made_again(trial, place):
    result = trial(faults={place: {0: raises(ConnectionError("planned"))}}).run()
    assert (result.ends, result.attempts["order-1"]) == ({"order-1": "acked"}, 2)
    assert len(result.payloads("parcels")) == 1
    assert str(result.calls_of(place)[0].error) == "planned"


def test_a_lost_answer_leaves_what_was_done(trial):
    result = trial(faults={"dispatch": {0: loses()}}).run()
    assert (result.ends, len(result.payloads("parcels"))) == ({"order-1": "acked"}, 2)


def test_every_call_may_meet_the_same(trial):
    result = trial(faults={"bank.charge": raises(ConnectionError("planned"))}).run()
    assert (result.ends, result.attempts["order-1"]) == ({"order-1": "dead"}, 3)


def test_a_call_that_takes_its_time_takes_virtual_time(trial):
    result = trial(faults={"bank.charge": {0: takes(7.5)}}).run()
    assert 7.5 <= result.seconds < 9
    assert result.attempts["order-1"] == 1


def test_a_call_that_hangs_is_given_up_in_virtual_time(trial, request):
    result = trial(faults={"bank.charge": {0: hangs()}}).run()
    # A coroutine is cancelled and tried again; a thread cannot be, and no second attempt runs beside it.
    cancelled = "async" in request.node.name
    assert result.ends == {"order-1": "acked" if cancelled else "dead"}
    assert result.attempts["order-1"] == (2 if cancelled else 1)
    assert 10 <= result.seconds < 60


@pytest.mark.parametrize("gone, paid", [(dies(), 1), (dies_after(), 2)])
def test_another_worker_goes_on_where_one_died(trial, gone, paid):
    made = trial(faults={"bank.charge": {0: gone}})
    result = made.run()
    assert (result.ends, result.deaths) == ({"order-1": "acked"}, 1)
    assert result.seconds >= 30  # the claim of the dead one had to end
    bank = made._services["bank"]
    assert (len(bank.paid), len(set(bank.paid))) == (paid, 1)


@pytest.mark.parametrize("place", ["fetch", "settle"])
@pytest.mark.parametrize(
    "mishap", [raises(ConnectionLost("planned")), loses(), dies(), dies_after(), hangs(), takes(40)]
)
def test_whatever_the_queue_does_the_order_ends_once(trial, place, mishap):
    result = trial(faults={place: {0: mishap}}).run()
    assert result.ends == {"order-1": "acked"}
    assert result.acked == {"order-1": 1}


def test_handlers_of_the_outcome_can_fail_too():
    told = []

    @consumer(orders, policy=POLICY)
    def work(order):
        raise BusinessError("never")

    @work.on_failure
    def failed(order, error):
        told.append(str(error))

    made = Trial(work, faults={"exception": {0: raises(OSError("planned"))}})
    made.send(Transaction("order-1"))
    assert made.run().ends == {"order-1": "dead"}
    assert told == ["never"]


def test_what_is_put_off_comes_back_in_virtual_time():
    seen = []

    @consumer(orders)
    def work(order, transaction):
        seen.append(transaction.id)
        return Later(3600) if len(seen) == 1 else None

    made = Trial(work)
    made.send(Transaction("order-1"))
    result = made.run()
    assert (result.ends, len(seen), result.seconds >= 3600) == ({"order-1": "acked"}, 2, True)


def test_what_never_ends_is_left():
    @consumer(orders)
    def work(order):
        return Later(60)

    made = Trial(work)
    made.send(Transaction("order-1"))
    assert made.run(rounds=5).ends == {"order-1": "left"}


def test_all_is_as_it_was_afterwards(trial):
    trial().run()
    assert (charge.connector, charge_async.connector) == (orders, orders)
    assert "process_transaction" not in vars(charge)
    assert "bank" not in charge.services
    assert vars(parcels)["_found"] is None


def test_a_connector_that_is_no_name_is_stood_in_for_too():
    boxes = MemoryConnector("boxes")

    @consumer(MemoryConnector("orders"))
    def pack(order):
        boxes.dispatch([boxes.transaction(order)])

    made = Trial(pack, queues=[boxes])
    made.send(Transaction("order-1", {"n": 1}))
    assert made.run().payloads("boxes") == [{"n": 1}]
    assert boxes.depth().ready == 0


def test_a_service_that_is_missing_is_named():
    made = Trial(charge)
    made.send(Transaction("order-1", {"cents": 1}))
    with pytest.raises(ConfigurationError, match="no service 'bank'"):
        made.run()


def test_a_function_is_a_service_too():
    @consumer(orders)
    def work(order, mail):
        mail("ada")

    made = Trial(work, mail=lambda to: None, faults={"mail": {0: raises(OSError("planned"))}})
    made.send(Transaction("order-1"))
    assert [call.args for call in made.run().calls_of("mail")] == [("ada",), ("ada",)]


def test_what_has_no_methods_of_its_own_cannot_be_watched():
    with pytest.raises(ConfigurationError, match="'rates' cannot be watched: a dict"):
        Trial(charge, watch={"rates": {}})


def test_a_mishap_that_nothing_met_is_told(trial):
    result = trial(faults={"bank.charge": {0: takes(1), 7: dies()}, "exception": hangs()}).run()
    assert result.unmet == [("bank.charge", 7), ("exception", 0)]


@pytest.mark.parametrize("variant", ["def", "async def"])
def test_the_lifespan_is_entered_if_that_is_wanted_and_what_is_given_goes_over_it(variant):
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

    made = Trial(work, lifespan=True, bank="fake")
    made.send(Transaction("order-1"))
    made.run()
    assert seen == ["open", ("fake", 2), "closed"]


def test_a_class_is_a_task_too():
    class Mail(ConsumerMixin, Task):
        def process_transaction(self, transaction):
            return self.services.post.send(transaction.payload)

    class Post:
        def send(self, to):
            return to

    made = Trial(Mail(orders, post=None), post=Post(), faults={"post.send": {0: raises(OSError("planned"))}})
    made.send(Transaction("letter-1", "ada"))
    result = made.run()
    assert (result.ends, len(result.calls_of("post.send"))) == ({"letter-1": "acked"}, 2)


class Payments(ProviderBase):
    provider_name = "payments"
    capability = "charging"

    def _execute_impl(self, **_):
        raise AssertionError("nobody calls the real one")


def test_providers_and_facts_that_are_globals_are_watched():
    payments, boundary = Payments(), MemoryBoundary()
    facts = Facts(boundary, zone="shop")

    @consumer(orders, policy=POLICY)
    def work(order, transaction):
        paid = payments.call("charge", {"cents": order["cents"]})
        facts.append("headquarters", subject=f"order:{transaction.id}", predicate="paid", object=paid)

    plan = {"payments.call": answers({"status": "paid"}), "facts.append": {0: loses()}}
    made = Trial(work, watch={"payments": payments, "facts": facts}, faults=plan)
    made.send(Transaction("order-1", {"cents": 20}))
    result = made.run()
    assert result.ends == {"order-1": "acked"}
    assert [call.result for call in result.calls_of("payments.call")] == [{"status": "paid"}] * 2
    first, again = (call.result for call in result.calls_of("facts.append"))
    assert (first.offset, again.offset, again.duplicate) == (1, 1, True)


def test_a_provider_has_books_of_the_trial_and_not_of_the_process():
    class Synthetic(Payments):
        def _execute_impl(self, **_):
            made.append(1)
            return {"status": "paid"}

    payments, made = Synthetic(), []

    @consumer(orders)
    def work(order):
        payments.call("charge", {})

    for times in (1, 2):
        tried = Trial(work, watch={"payments": payments}, faults={"payments.call": {0: loses()}})
        tried.send(Transaction("order-1"))
        # The second attempt is played back within a trial, and the same order in the next one is not.
        assert (tried.run().attempts["order-1"], len(made)) == (2, times)


@pytest.mark.parametrize(
    "plan, said",
    [
        ({"proces": {0: dies()}}, "nothing can go wrong at 'proces'; known places are fetch, process"),
        ({"bnak.charge": {0: dies()}}, "bank.METHOD; give the trial 'bnak' as a service, bnak=…, or in watch="),
        ({"bank.chrage": {0: dies()}}, "did you mean 'charge'?"),
        ({"bank.pay": {0: dies()}}, "it has charge"),
        ({"bank": {0: dies()}}, "nothing can go wrong at 'bank'"),
        ({"process": {-1: dies()}}, "calls count from 0"),
        ({"process": {0: OSError("raw")}}, "is made by raises"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(plan, said):
    with pytest.raises(ConfigurationError) as caught:
        Trial(charge, bank=Bank(), faults=plan)
    assert said in str(caught.value)


def test_a_service_that_reaches_nobody_is_refused_before_a_real_one_is_called():
    with pytest.raises(ConfigurationError, match="charge takes no service 'bnak'; it takes: bank"):
        Trial(charge, bnak=Bank())


def test_a_call_takes_a_time_that_can_be_waited_for():
    with pytest.raises(ConfigurationError, match="from 0 to 86400"):
        takes(-1)


def test_only_consumers_are_tried():
    @producer(orders)
    def make(order):
        return order

    with pytest.raises(ConfigurationError, match="for a consumer, not for a FunctionProducer"):
        Trial(make)


def test_one_seed_is_one_run(trial):
    def places(seed):
        return [(call.place, call.at) for call in trial(seed=seed, faults={"bank.charge": {0: hangs()}}).run().calls]

    assert places(7) == places(7)


def test_a_trial_within_an_event_loop_is_refused(trial):
    async def main():
        trial().run()

    with pytest.raises(ConfigurationError, match="from a plain function"):
        asyncio.run(main())


def test_a_coroutine_of_a_dead_worker_does_nothing_more():
    made_after_death = []

    class Stubborn(AsyncBank):
        async def charge(self, key, cents):
            try:
                await asyncio.sleep(5)
            finally:
                if made.dead:
                    with pytest.raises(ConnectionLost):
                        await parcels.dispatch_async([parcels.transaction("from the dead")])
                    made_after_death.append(key)

    # The second order fails, and with it the worker dies, while the first one is still being charged.
    made = Trial(charge_async, queues=[parcels], bank=Stubborn(), faults={"process": {1: dies_after()}})
    made.send(Transaction("order-1", {"cents": 1}), Transaction("order-2", {"cents": 0}))
    result = made.run()
    assert (result.deaths, len(made_after_death)) == (1, 1)
    assert result.ends == {"order-1": "acked", "order-2": "dead"}
    assert result.payloads("parcels") == [{"of": "order-1"}]


def test_an_error_is_an_answer_that_can_be_lost_too(trial):
    result = trial(cents=0, faults={"process": {0: loses()}}).run()
    assert (result.attempts["order-1"], result.reasons) == (2, {"order-1": "no_price"})
