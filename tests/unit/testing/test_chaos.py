"""The chaos kit: a task with a defect is found out, one without is not, and what is told is enough to see it again."""

from __future__ import annotations

import asyncio
import re

import pytest

from ergon_framework import ConsumerPolicy, Transaction, consumer, queue
from ergon_framework.errors import ConfigurationError
from ergon_framework.testing import mishaps
from ergon_framework.testing.chaos import Effects, NotOnce, owed_by, survives
from ergon_framework.testing.trial import Trial

orders = queue("orders")
POLICY = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 4, "timeout": 30}}}})
ORDERS = [Transaction(f"order-{number}", {"cents": 20}) for number in range(3)]


class Bank:
    """Honours keys: the same charge under the same key happens once."""

    def __init__(self, effects):
        self.effects = effects

    def charge(self, order, key):
        self.effects.happen(order, key=key)


class AsyncBank(Bank):
    async def charge(self, order, key):
        await asyncio.sleep(0.5)
        super().charge(order, key)


@consumer(orders, policy=POLICY)
def sound(order, transaction, bank):
    bank.charge(transaction.id, transaction.derive("charge"))


@consumer(orders, policy=POLICY)
async def sound_async(order, transaction, bank):
    await bank.charge(transaction.id, transaction.derive("charge"))


@consumer(orders, policy=POLICY)
def doubling(order, transaction, bank):
    # The defect: a new key for every attempt, so that the bank cannot know that it is the same charge.
    bank.charge(transaction.id, None)


@consumer(orders, policy=POLICY)
async def doubling_async(order, transaction, bank):
    await bank.charge(transaction.id, None)


@consumer(orders, policy=POLICY)
def losing(order, transaction, bank):
    try:
        bank.charge(transaction.id, transaction.derive("charge"))
    except Exception:
        return  # the defect: it is acked, and was never charged


@consumer(orders, policy=POLICY)
def sending_again(order, transaction, bank):
    bank.charge(transaction.id, transaction.derive("charge"))
    if order.get("again"):
        orders.dispatch([transaction.replace(payload={})])


def of(task, kind=Bank, given=ORDERS):
    def make(effects):
        trial = Trial(task, bank=kind(effects))
        trial.send(*given)
        return trial

    return make


owes = owed_by(ORDERS, lambda transaction: transaction.id)


@pytest.mark.parametrize("task, kind", [(sound, Bank), (sound_async, AsyncBank)])
def test_a_task_without_a_defect_survives(task, kind):
    survived = survives(of(task, kind), runs=60, owes=owes)
    assert (survived.runs, survived.mishaps > 60, survived.deaths > 5) == (60, True, True)


@pytest.mark.parametrize("task, kind", [(doubling, Bank), (doubling_async, AsyncBank)])
def test_a_double_effect_is_caught_with_the_smallest_plan(task, kind):
    with pytest.raises(NotOnce) as caught:
        survives(of(task, kind), runs=100, seed=3)
    told = str(caught.value)
    assert re.search(r"the effect 'order-\d' happened 2 times", told)
    assert re.search(r"seed 3, run \d+; the smallest plan", told)
    # One mishap is enough, and so no more are told.
    assert len(re.findall(r"\d+: \w+\(", told)) == 1


def test_what_is_told_shows_it_again():
    with pytest.raises(NotOnce) as caught:
        survives(of(doubling), runs=100)
    plan, seed = re.search(r"faults = (\{.*\})\n.*seed=(\d+)", str(caught.value), re.DOTALL).groups()
    words = {name: getattr(mishaps, name) for name in ("raises", "loses", "takes", "hangs", "dies", "dies_after")}
    effects = Effects()
    trial = Trial(doubling, bank=Bank(effects), seed=int(seed), faults=eval(plan, words | vars(mishaps)))
    trial.send(*ORDERS)
    trial.run()
    assert max(effects.counts.values()) == 2


def test_an_effect_that_is_missing_is_caught():
    with pytest.raises(NotOnce, match=r"was acked, but the effect 'order-.' did not happen"):
        survives(of(losing), runs=100, owes=owes)


def test_a_transaction_that_is_there_twice_is_caught_without_any_mishap():
    given = [Transaction("order-1", {"again": True})]
    with pytest.raises(NotOnce, match=r"without any mishap: the transaction 'order-1' ended more than once"):
        survives(of(sending_again, given=given))


def test_one_seed_is_the_same_chaos_again():
    assert survives(of(sound), runs=20, seed=5) == survives(of(sound), runs=20, seed=5)
    assert survives(of(sound), runs=20, seed=5) != survives(of(sound), runs=20, seed=6)


def test_an_effect_under_one_key_happens_once():
    effects = Effects()
    assert [effects.happen("a", key="k"), effects.happen("a", key="k"), effects.happen("b"), effects.happen("b")] == [
        True,
        False,
        True,
        True,
    ]
    assert effects.counts == {"a": 1, "b": 2}


def test_what_a_dead_worker_does_does_not_happen():
    effects = Effects()
    effects.alive = lambda: False
    assert (effects.happen("a"), effects.counts) == (False, {})


@pytest.mark.parametrize("how", [{"runs": 0}, {"mishaps": 0}])
def test_chaos_without_any_is_refused(how):
    with pytest.raises(ConfigurationError, match="at least one run and one mishap"):
        survives(of(sound), **how)


def test_a_trial_that_does_nothing_is_refused():
    def make(effects):
        trial = Trial(sound, bank=Bank(effects))
        trial.run = lambda: trial._result
        return trial

    with pytest.raises(ConfigurationError, match="made no call at all"):
        survives(make)
