"""The chaos kit: a defective task is caught, a correct one passes, and the printed plan reproduces the failure."""

from __future__ import annotations

import asyncio
import re

import pytest

from ergon_framework import ConsumerPolicy, Transaction, consumer, queue
from ergon_framework.errors import ConfigurationError
from ergon_framework.testing import faults
from ergon_framework.testing.chaos import Effects, NotExactlyOnceError, assert_one_effect_per_ack, assert_survives
from ergon_framework.testing.harness import TaskHarness

orders = queue("orders")
POLICY = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 4, "timeout": 30}}}})
ORDERS = [Transaction({"cents": 20}, id=f"order-{number}") for number in range(3)]


class Bank:
    """A bank that honours keys: the same charge under the same key happens once."""

    def __init__(self, effects):
        self.effects = effects

    def charge(self, order, key):
        self.effects.record(order, key=key)


class AsyncBank(Bank):
    async def charge(self, order, key):
        await asyncio.sleep(0.5)
        super().charge(order, key)


@consumer(orders, policy=POLICY, services={"bank": None})
def charge_once(order, transaction, bank):
    bank.charge(transaction.id, transaction.derive("charge"))


@consumer(orders, policy=POLICY, services={"bank": None})
async def charge_once_async(order, transaction, bank):
    await bank.charge(transaction.id, transaction.derive("charge"))


@consumer(orders, policy=POLICY, services={"bank": None})
def charge_per_attempt(order, transaction, bank):
    # The defect: a new key for every attempt, so the bank cannot detect the duplicate charge.
    bank.charge(transaction.id, None)


@consumer(orders, policy=POLICY, services={"bank": None})
async def charge_per_attempt_async(order, transaction, bank):
    await bank.charge(transaction.id, None)


@consumer(orders, policy=POLICY, services={"bank": None})
def charge_and_swallow_errors(order, transaction, bank):
    try:
        bank.charge(transaction.id, transaction.derive("charge"))
    except Exception:
        return  # the defect: it is acked, and was never charged


@consumer(orders, policy=POLICY, services={"bank": None})
def charge_and_send_again(order, transaction, bank):
    bank.charge(transaction.id, transaction.derive("charge"))
    if order.get("again"):
        orders.dispatch([transaction.replace(payload={})])


def make_harness_factory(task, bank_type=Bank, transactions=ORDERS):
    def make(effects):
        harness = TaskHarness(task, bank=bank_type(effects))
        harness.send(*transactions)
        return harness

    return make


check_effects = assert_one_effect_per_ack(ORDERS, lambda transaction: transaction.id)


@pytest.mark.parametrize("task, bank_type", [(charge_once, Bank), (charge_once_async, AsyncBank)])
def test_a_task_without_a_defect_passes_chaos(task, bank_type):
    result = assert_survives(make_harness_factory(task, bank_type), runs=60, required_effects=check_effects)
    assert (result.runs, result.faults > 60, result.killed_workers > 5) == (60, True, True)


@pytest.mark.parametrize("task, bank_type", [(charge_per_attempt, Bank), (charge_per_attempt_async, AsyncBank)])
def test_a_double_effect_is_caught_with_the_smallest_plan(task, bank_type):
    with pytest.raises(NotExactlyOnceError) as caught:
        assert_survives(make_harness_factory(task, bank_type), runs=100, seed=3)
    message = str(caught.value)
    assert re.search(r"the effect 'order-\d' happened 2 times", message)
    assert re.search(r"seed 3, run \d+; smallest plan that reproduces it", message)
    # One fault is enough, so no more are printed.
    assert len(re.findall(r"\d+: \w+\(", message)) == 1


def test_the_printed_plan_reproduces_the_failure():
    with pytest.raises(NotExactlyOnceError) as caught:
        assert_survives(make_harness_factory(charge_per_attempt), runs=100)
    plan, seed = re.search(r"faults = (\{.*\})\n.*seed=(\d+)", str(caught.value), re.DOTALL).groups()
    names = ("raises", "loses_response", "takes_longer", "hangs", "worker_dies_before", "worker_dies_after")
    namespace = {name: getattr(faults, name) for name in names}
    effects = Effects()
    harness = TaskHarness(
        charge_per_attempt, bank=Bank(effects), seed=int(seed), faults=eval(plan, namespace | vars(faults))
    )
    harness.send(*ORDERS)
    harness.run()
    assert max(effects.counts.values()) == 2


def test_an_effect_that_is_missing_is_caught():
    with pytest.raises(NotExactlyOnceError, match=r"was acked, but the effect 'order-.' did not happen"):
        assert_survives(make_harness_factory(charge_and_swallow_errors), runs=100, required_effects=check_effects)


def test_a_transaction_that_ends_twice_is_caught_without_any_fault():
    transactions = [Transaction({"again": True}, id="order-1")]
    with pytest.raises(NotExactlyOnceError, match=r"without any fault: the transaction 'order-1' ended more than once"):
        assert_survives(make_harness_factory(charge_and_send_again, transactions=transactions))


def test_one_seed_gives_the_same_chaos_run():
    assert assert_survives(make_harness_factory(charge_once), runs=20, seed=5) == assert_survives(
        make_harness_factory(charge_once), runs=20, seed=5
    )
    assert assert_survives(make_harness_factory(charge_once), runs=20, seed=5) != assert_survives(
        make_harness_factory(charge_once), runs=20, seed=6
    )


def test_an_effect_under_one_key_happens_once():
    effects = Effects()
    assert [effects.record("a", key="k"), effects.record("a", key="k"), effects.record("b"), effects.record("b")] == [
        True,
        False,
        True,
        True,
    ]
    assert effects.counts == {"a": 1, "b": 2}


def test_an_effect_of_a_killed_worker_is_not_recorded():
    effects = Effects()
    effects.is_alive = lambda: False
    assert (effects.record("a"), effects.counts) == (False, {})


@pytest.mark.parametrize("options", [{"runs": 0}, {"max_faults": 0}])
def test_chaos_without_runs_or_faults_is_rejected(options):
    with pytest.raises(ConfigurationError, match="runs and max_faults must be at least 1"):
        assert_survives(make_harness_factory(charge_once), **options)


def test_a_harness_run_without_calls_is_rejected():
    def make(effects):
        harness = TaskHarness(charge_once, bank=Bank(effects))
        harness.run = lambda: harness._result
        return harness

    with pytest.raises(ConfigurationError, match="made no call"):
        assert_survives(make)
