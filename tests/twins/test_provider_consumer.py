"""A provider below a consumer: whose retries they are, what is put off, and what the dead letter says."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.connectors.base import DeadLetter, Later
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.engine.pause import Pause
from ergon_framework.errors import Category
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.errors import (
    ProviderAuthError,
    ProviderBadRequestError,
    ProviderDependencyError,
    ProviderRateLimitError,
)
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.transaction import Transaction

EAGER = RetryPolicy(max_attempts=3, base_delay_seconds=0.0, jitter_ratio=0.0)
RETRY = {"max_attempts": 3, "backoff": 0.01, "multiplier": 1.0, "hold": 30.0}


#: Never set: a body that waits for it hangs.
RELEASE = threading.Event()


class Shop:
    """Orders that are paid through a provider, in either variant."""

    def __init__(self, flavour, answers, *, max_deliveries=10, max_deferral=None, until=None, **rules):
        self.flavour = flavour
        self.answers = answers
        self.calls = []
        self.outcomes = []
        self.paid = []
        self.queue = MemoryConnector("orders")
        self.books = MemoryBooks()
        rules = ProviderPolicy(**({"timeout": 5.0, "retry": EAGER} | rules))
        self.until = until
        loop = {"streaming": until is not None, "max_deliveries": max_deliveries, "concurrency": {"value": 1}}
        if max_deferral is not None:
            loop["max_deferral"] = max_deferral
        loop |= {"timeout": 15.0, "empty_queue": {"backoff": 0.01, "multiplier": 1.0}}
        self.policy = ConsumerPolicy.load({"loop": loop, "steps": {"process": {"retry": RETRY}}})
        shop = self

        def answer(context):
            shop.calls.append(context)
            made = shop.answers(len(shop.calls))
            if isinstance(made, BaseException):
                raise made
            return made

        class Payments(ProviderBase):
            provider_name, capability = "payments", "charging"

            def _execute_impl(self, *, context, **_):
                return answer(context)

        class AsyncPayments(AsyncProviderBase):
            provider_name, capability = "payments", "charging"

            async def _execute_impl(self, *, context, **_):
                await asyncio.sleep(0)
                made = answer(context)
                return await made if asyncio.iscoroutine(made) else made

        class Task(ConsumerMixin):
            connector = self.queue

            def process_transaction(self, transaction):
                shop.paid.append(Payments(books=shop.books, policy=rules).call("charge", {"amount": 1}))

        class AsyncTask(AsyncConsumerMixin):
            connector = self.queue

            async def process_transaction(self, transaction):
                shop.paid.append(await AsyncPayments(books=shop.books, policy=rules).call("charge", {"amount": 1}))

        self.task = Task() if flavour == "threads" else AsyncTask()
        self.provider = (Payments if flavour == "threads" else AsyncPayments)(books=self.books, policy=rules)

    def run(self, *ids):
        self.queue.dispatch([Transaction(one, source="orders", tenant="acme") for one in ids])
        if self.flavour == "threads":
            self.task.consume_transactions(self.policy, on_outcome=self._ended)
        else:
            asyncio.run(self.task.consume_transactions(self.policy, on_outcome=self._ended))
        return self

    def _ended(self, outcome):
        self.outcomes.append(outcome)
        if (outcome.transaction.id, outcome.kind.value) == self.until:
            self.task.stop()

    @property
    def kinds(self):
        return [outcome.kind.value for outcome in self.outcomes]


#: A breaker that stays closed.
UNBROKEN = BreakerPolicy(failure_threshold=1000)


def hang(flavour):
    """Answer after the test; a thread cannot be ended, so it leaves by itself."""
    return RELEASE.wait(5.0) if flavour == "threads" else asyncio.sleep(5.0)


def paid(number):
    return {"status": "paid", "number": number}


def down(_):
    return ProviderDependencyError("down", http_status=503)


@pytest.mark.spec("PRV-21")
def test_a_bad_request_makes_exactly_one_call(flavour):
    shop = Shop(flavour, lambda _: ProviderBadRequestError("no such card", http_status=422)).run("a")
    assert len(shop.calls) == 1
    assert shop.kinds == ["failed"]
    assert shop.outcomes[0].category is Category.BUSINESS


@pytest.mark.spec("PRV-21")
def test_what_execute_gave_up_on_is_not_tried_again_by_the_engine(flavour):
    shop = Shop(flavour, down, max_deferral=0).run("a")
    assert len(shop.calls) == 3, "the provider's three, and not three times three"
    assert (shop.kinds, shop.outcomes[0].attempts) == (["failed"], 1)


@pytest.mark.spec("DX-27", "PRV-21")
def test_a_retryable_failure_defers_and_costs_neither_an_attempt_nor_a_delivery(flavour):
    def answers(number):
        return paid(number) if number > 9 else down(number)

    shop = Shop(flavour, answers, until=("a", "succeeded"), max_deliveries=1, breaker=UNBROKEN).run("a")
    assert (shop.kinds, len(shop.calls), len(shop.paid)) == (["deferred"] * 3 + ["succeeded"], 10, 1)
    settlements = [outcome.settlement for outcome in shop.outcomes[:-1]]
    assert [(later.attempts, later.history, later.deferral.count) for later in settlements] == [
        (0, (), 1),
        (0, (), 2),
        (0, (), 3),
    ]
    assert {later.deferral.since for later in settlements} == {settlements[0].deferral.at}
    assert shop.outcomes[-1].attempts == 1
    assert list(shop.queue.dead_letters) == []


@pytest.mark.spec("DX-27")
def test_after_max_deferral_the_last_error_is_a_dead_letter(flavour):
    shop = Shop(flavour, down, until=("a", "failed"), max_deferral=0.1, breaker=UNBROKEN).run("a")
    assert len(shop.kinds) > 2
    assert {*shop.kinds[:-1]} == {"deferred"}
    (record,) = shop.queue.dead_letters
    assert (record.reason, record.failure.error_message, record.failure.attempts) == (
        "dependency_unavailable",
        "down",
        1,
    )
    assert record.failure.occurred_at - record.envelope.deferral.since >= 0.1
    assert record.envelope.deferral.count == len(shop.kinds) - 1


@pytest.mark.spec("DX-27", "PRV-31")
def test_the_time_that_a_breaker_is_open_or_half_open_does_not_count_towards_max_deferral(flavour):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.1)
    once = RetryPolicy(max_attempts=1)

    def answers(number):
        return paid(number) if number > 4 else down(number)

    # The first failure meets a closed breaker; the next three are probes of a half-open one.
    shop = Shop(flavour, answers, until=("a", "succeeded"), max_deferral=0.05, breaker=breaker, retry=once).run("a")
    assert {*shop.kinds[:-1]} == {"deferred"}
    assert {outcome.settlement.deferral.count for outcome in shop.outcomes[:-1]} == {1}
    assert (len(shop.calls), list(shop.queue.dead_letters)) == (5, [])


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize("rules", [{"timeout": 0.5}, {"attempt_timeout": 0.5, "retry": RetryPolicy(max_attempts=1)}])
def test_a_provider_that_hangs_defers(flavour, rules):
    def answers(number):
        return hang(flavour) if number == 1 else paid(number)

    shop = Shop(flavour, answers, until=("a", "succeeded"), **rules).run("a")
    assert (shop.kinds, len(shop.paid)) == (["deferred", "succeeded"], 1)
    assert shop.outcomes[0].settlement.deferral.code == "timeout"


@pytest.mark.spec("DX-27")
def test_an_attempt_that_hangs_leaves_time_for_another(flavour):
    def answers(number):
        return hang(flavour) if number == 1 else paid(number)

    shop = Shop(flavour, answers, attempt_timeout=0.05).run("a")
    assert (shop.kinds, len(shop.calls), len(shop.paid)) == (["succeeded"], 2, 1)
    assert 0 < shop.calls[0].timeout <= 0.05


@pytest.mark.spec("DX-27")
def test_what_cannot_pass_by_itself_is_not_deferred(flavour):
    shop = Shop(flavour, lambda _: ProviderAuthError("who are you", http_status=401)).run("a")
    assert (shop.kinds, len(shop.calls)) == (["failed"], 1)


@pytest.mark.spec("PRV-13", "PRV-23")
def test_the_dead_letter_arrives_once_and_says_which_call_failed(flavour):
    """The earlier implementation lost them."""
    shop = Shop(flavour, down, max_deferral=0).run("a")
    (record,) = shop.queue.dead_letters
    failure = record.failure
    assert isinstance(shop.outcomes[0].settlement, DeadLetter)
    assert (failure.provider_name, failure.capability, failure.operation) == ("payments", "charging", "charge")
    assert (failure.reason_code, failure.error_type) == ("dependency_unavailable", "ProviderDependencyError")
    assert failure.idempotency_key == Transaction("a", source="orders").derive("payments.charge")
    assert (failure.tenant_id, failure.correlation_id, failure.transaction_id) == ("acme", "a", "a")
    assert (failure.task_name, failure.attempts, failure.final) == (type(shop.task).__name__, 1, True)
    assert failure.error_message == "down"
    assert failure.occurred_at == pytest.approx(time.time(), abs=60)
    assert failure.campaign_id is None


@pytest.mark.spec("PRV-31")
def test_an_open_breaker_defers_costs_nothing_and_buries_nobody(flavour):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.15)
    once = RetryPolicy(max_attempts=1)

    def answers(number):
        return down(number) if number == 1 else paid(number)

    shop = Shop(flavour, answers, breaker=breaker, retry=once, until=("b", "succeeded"), max_deliveries=1)
    # The first one opens it; the second finds it open, and comes back when it has closed. Both are paid.
    shop.run("a", "b")
    of_b = [outcome for outcome in shop.outcomes if outcome.transaction.id == "b"]
    assert {outcome.kind.value for outcome in of_b[:-1]} == {"deferred"}
    for outcome in of_b[:-1]:
        assert isinstance(outcome.settlement, Later)
        assert (outcome.settlement.attempts, outcome.settlement.history, outcome.attempts) == (0, (), 0)
        assert outcome.settlement.delay <= 0.15
        assert outcome.error.code == "circuit_open"
    assert list(shop.queue.dead_letters) == []


@pytest.mark.spec("PRV-31")
def test_however_long_the_breaker_stays_open_nothing_is_lost(flavour):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.02)
    shop = Shop(
        flavour, lambda n: paid(n) if n > 4 else down(n), breaker=breaker, until=("a", "succeeded"), max_deliveries=1
    )
    # Each failure opens the breaker again. A delivery makes at most three calls, so one delivery is never enough.
    shop.run("a")
    assert (len(shop.calls), len(shop.kinds) > 1) == (5, True)
    assert {*shop.kinds[:-1]} == {"deferred"}
    assert {outcome.attempts for outcome in shop.outcomes[:-1]} == {0}
    assert list(shop.queue.dead_letters) == []


@pytest.mark.spec("PRV-19")
def test_a_spent_quota_puts_off_and_buries_nobody(flavour):
    shop = Shop(flavour, paid, quota=QuotaPolicy(minute=1)).run("a", "b")
    assert sorted(shop.kinds) == ["deferred", "succeeded"]
    later = next(outcome for outcome in shop.outcomes if outcome.kind.value == "deferred")
    assert (later.attempts, len(shop.calls)) == (0, 1)
    assert later.settlement.delay <= 60.0


@pytest.mark.spec("PRV-24")
def test_a_pause_that_the_provider_asks_for_is_waited_by_the_broker(flavour):
    shop = Shop(flavour, lambda _: ProviderRateLimitError("slowly", retry_after=90.0)).run("a")
    assert (shop.kinds, len(shop.calls)) == (["deferred"], 1)
    assert (shop.outcomes[0].settlement.delay, shop.outcomes[0].attempts) == (90.0, 0)


@pytest.mark.spec("PRV-22")
def test_a_second_delivery_finds_what_the_first_one_did(flavour):
    shop = Shop(flavour, paid)
    shop.run("a")
    shop.run("a")
    assert (len(shop.calls), shop.kinds) == (1, ["succeeded"] * 2)
    assert shop.paid[0] == shop.paid[1]
    assert shop.calls[0].idempotency_key == Transaction("a", source="orders").derive("payments.charge")


@pytest.mark.spec("PRV-31")
@pytest.mark.parametrize("scope, held", [("provider", True), ("tenant", False)])
def test_a_task_that_uses_the_provider_fetches_nothing_while_its_breaker_is_open_for_all(flavour, scope, held):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)
    shop = Shop(flavour, down, breaker=breaker, retry=RetryPolicy(max_attempts=1), scope=scope)

    async def asked():
        return shop.provider.gate()

    assert asyncio.run(asked()) is None
    shop.run("a")
    pause = asyncio.run(asked())
    assert (pause is not None) is held
    if held:
        assert pause == Pause("the breaker of payments is open", 1.0)


@pytest.mark.spec("PRV-31")
def test_a_breaker_that_may_let_a_probe_through_is_no_gate(flavour):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.0)
    shop = Shop(flavour, down, breaker=breaker, retry=RetryPolicy(max_attempts=1), scope="provider").run("a")

    async def asked():
        return shop.provider.gate()

    assert asyncio.run(asked()) is None
