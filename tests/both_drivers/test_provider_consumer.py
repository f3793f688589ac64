"""A provider inside a consumer: who retries, what is deferred, and what the dead letter says."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.connectors.base import DeadLetter, Defer
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import Category
from ergon_framework.gates import Pause
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.errors import (
    ProviderAuthError,
    ProviderBadRequestError,
    ProviderDependencyError,
    ProviderRateLimitError,
)
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy

IMMEDIATE_RETRY = RetryPolicy(max_attempts=3, base_delay_seconds=0.0, jitter_ratio=0.0)
RETRY = {"max_attempts": 3, "backoff": 0.01, "multiplier": 1.0, "max_inline_delay": 30.0}


#: Never set: a handler that waits for it hangs.
NEVER_SET = threading.Event()


class Shop:
    """Orders that are paid through a provider, in either variant."""

    def __init__(self, variant, answer_call, *, max_deliveries=10, max_deferral=None, until=None, **rules):
        self.variant = variant
        self.answer_call = answer_call
        self.calls = []
        self.outcomes = []
        self.paid = []
        self.queue = MemoryConnector("orders")
        self.state_store = MemoryProviderState()
        rules = ProviderPolicy(**({"timeout": 5.0, "retry": IMMEDIATE_RETRY} | rules))
        self.until = until
        loop = {"streaming": until is not None, "max_deliveries": max_deliveries, "concurrency": {"value": 1}}
        if max_deferral is not None:
            loop["max_deferral"] = max_deferral
        loop |= {"timeout": 15.0, "empty_queue": {"backoff": 0.01, "multiplier": 1.0}}
        self.policy = ConsumerPolicy.load({"loop": loop, "steps": {"process": {"retry": RETRY}}})
        shop = self

        def call_upstream(context):
            shop.calls.append(context)
            result = shop.answer_call(len(shop.calls))
            if isinstance(result, BaseException):
                raise result
            return result

        class Payments(ProviderBase):
            provider_name, capability = "payments", "charging"

            def _execute_impl(self, *, context, **_):
                return call_upstream(context)

        class AsyncPayments(AsyncProviderBase):
            provider_name, capability = "payments", "charging"

            async def _execute_impl(self, *, context, **_):
                await asyncio.sleep(0)
                result = call_upstream(context)
                return await result if asyncio.iscoroutine(result) else result

        class Task(ConsumerMixin):
            connector = self.queue

            def process_transaction(self, transaction):
                shop.paid.append(Payments(state_store=shop.state_store, policy=rules).call("charge", {"amount": 1}))

        class AsyncTask(AsyncConsumerMixin):
            connector = self.queue

            async def process_transaction(self, transaction):
                shop.paid.append(
                    await AsyncPayments(state_store=shop.state_store, policy=rules).call("charge", {"amount": 1})
                )

        self.task = Task() if variant == "threads" else AsyncTask()
        provider_class = Payments if variant == "threads" else AsyncPayments
        self.provider = provider_class(state_store=self.state_store, policy=rules)

    def run(self, *ids):
        self.queue.dispatch([Transaction(id=transaction_id, source="orders", tenant="acme") for transaction_id in ids])
        if self.variant == "threads":
            self.task.consume_transactions(self.policy, on_outcome=self._record_outcome)
        else:
            asyncio.run(self.task.consume_transactions(self.policy, on_outcome=self._record_outcome))
        return self

    def _record_outcome(self, outcome):
        self.outcomes.append(outcome)
        if (outcome.transaction.id, outcome.kind.value) == self.until:
            self.task.stop()

    @property
    def kinds(self):
        return [outcome.kind.value for outcome in self.outcomes]


#: A breaker that stays closed.
LENIENT_BREAKER = BreakerPolicy(failure_threshold=1000)


def hang(variant):
    """Answer after the test; a thread cannot be ended, so it returns on its own."""
    return NEVER_SET.wait(5.0) if variant == "threads" else asyncio.sleep(5.0)


def make_payment(number):
    return {"status": "paid", "number": number}


def make_outage_error(_):
    return ProviderDependencyError("down", http_status=503)


@pytest.mark.spec("PRV-21")
def test_a_bad_request_makes_exactly_one_call(variant):
    shop = Shop(variant, lambda _: ProviderBadRequestError("no such card", http_status=422)).run("a")
    assert len(shop.calls) == 1
    assert shop.kinds == ["failed"]
    assert shop.outcomes[0].category is Category.BUSINESS


@pytest.mark.spec("PRV-21")
def test_a_final_provider_failure_is_not_retried_by_the_engine(variant):
    shop = Shop(variant, make_outage_error, max_deferral=0).run("a")
    assert len(shop.calls) == 3, "the provider's three, and not three times three"
    assert (shop.kinds, shop.outcomes[0].attempts) == (["failed"], 1)


@pytest.mark.spec("DX-27", "PRV-21")
def test_a_retryable_failure_defers_without_using_an_attempt_or_a_delivery(variant):
    def answer_call(number):
        return make_payment(number) if number > 9 else make_outage_error(number)

    shop = Shop(variant, answer_call, until=("a", "succeeded"), max_deliveries=1, breaker=LENIENT_BREAKER).run("a")
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
def test_after_max_deferral_the_last_error_is_a_dead_letter(variant):
    shop = Shop(variant, make_outage_error, until=("a", "failed"), max_deferral=0.1, breaker=LENIENT_BREAKER).run("a")
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
def test_the_time_that_a_breaker_is_open_or_half_open_does_not_count_towards_max_deferral(variant):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.1)
    single_attempt = RetryPolicy(max_attempts=1)

    def answer_call(number):
        return make_payment(number) if number > 4 else make_outage_error(number)

    # The first failure meets a closed breaker; the next three are probes of a half-open one.
    shop = Shop(
        variant, answer_call, until=("a", "succeeded"), max_deferral=0.05, breaker=breaker, retry=single_attempt
    ).run("a")
    assert {*shop.kinds[:-1]} == {"deferred"}
    assert {outcome.settlement.deferral.count for outcome in shop.outcomes[:-1]} == {1}
    assert (len(shop.calls), list(shop.queue.dead_letters)) == (5, [])


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize(
    "policy_fields", [{"timeout": 0.5}, {"attempt_timeout": 0.5, "retry": RetryPolicy(max_attempts=1)}]
)
def test_a_provider_that_hangs_defers(variant, policy_fields):
    def answer_call(number):
        return hang(variant) if number == 1 else make_payment(number)

    shop = Shop(variant, answer_call, until=("a", "succeeded"), **policy_fields).run("a")
    assert (shop.kinds, len(shop.paid)) == (["deferred", "succeeded"], 1)
    assert shop.outcomes[0].settlement.deferral.code == "timeout"


@pytest.mark.spec("DX-27")
def test_an_attempt_that_hangs_leaves_time_for_another(variant):
    def answer_call(number):
        return hang(variant) if number == 1 else make_payment(number)

    shop = Shop(variant, answer_call, attempt_timeout=0.05).run("a")
    assert (shop.kinds, len(shop.calls), len(shop.paid)) == (["succeeded"], 2, 1)
    assert 0 < shop.calls[0].timeout <= 0.05


@pytest.mark.spec("DX-27")
def test_a_permanent_failure_is_not_deferred(variant):
    shop = Shop(variant, lambda _: ProviderAuthError("who are you", http_status=401)).run("a")
    assert (shop.kinds, len(shop.calls)) == (["failed"], 1)


@pytest.mark.spec("PRV-13", "PRV-23")
def test_the_dead_letter_arrives_once_and_names_the_failed_call(variant):
    """The earlier implementation lost dead letters."""
    shop = Shop(variant, make_outage_error, max_deferral=0).run("a")
    (record,) = shop.queue.dead_letters
    failure = record.failure
    assert isinstance(shop.outcomes[0].settlement, DeadLetter)
    assert (failure.provider_name, failure.capability, failure.operation) == ("payments", "charging", "charge")
    assert (failure.reason_code, failure.error_type) == ("dependency_unavailable", "ProviderDependencyError")
    assert failure.idempotency_key == Transaction(id="a", source="orders").derive("payments.charge")
    assert (failure.tenant_id, failure.correlation_id, failure.transaction_id) == ("acme", "a", "a")
    assert (failure.task_name, failure.attempts, failure.final) == (type(shop.task).__name__, 1, True)
    assert failure.error_message == "down"
    assert failure.occurred_at == pytest.approx(time.time(), abs=60)
    assert failure.campaign_id is None


@pytest.mark.spec("PRV-31")
def test_an_open_breaker_defers_without_using_attempts_or_dead_lettering(variant):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.15)
    single_attempt = RetryPolicy(max_attempts=1)

    def answer_call(number):
        return make_outage_error(number) if number == 1 else make_payment(number)

    shop = Shop(variant, answer_call, breaker=breaker, retry=single_attempt, until=("b", "succeeded"), max_deliveries=1)
    # The first transaction opens the breaker; the second is deferred until it has closed. Both are paid.
    shop.run("a", "b")
    of_b = [outcome for outcome in shop.outcomes if outcome.transaction.id == "b"]
    assert {outcome.kind.value for outcome in of_b[:-1]} == {"deferred"}
    for outcome in of_b[:-1]:
        assert isinstance(outcome.settlement, Defer)
        assert (outcome.settlement.attempts, outcome.settlement.history, outcome.attempts) == (0, (), 0)
        assert outcome.settlement.delay <= 0.15
        assert outcome.error.code == "circuit_open"
    assert list(shop.queue.dead_letters) == []


@pytest.mark.spec("PRV-31")
def test_no_transaction_is_lost_while_the_breaker_stays_open(variant):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.02)
    shop = Shop(
        variant,
        lambda n: make_payment(n) if n > 4 else make_outage_error(n),
        breaker=breaker,
        until=("a", "succeeded"),
        max_deliveries=1,
    )
    # Each failure opens the breaker again. A delivery makes at most three calls, so one delivery is never enough.
    shop.run("a")
    assert (len(shop.calls), len(shop.kinds) > 1) == (5, True)
    assert {*shop.kinds[:-1]} == {"deferred"}
    assert {outcome.attempts for outcome in shop.outcomes[:-1]} == {0}
    assert list(shop.queue.dead_letters) == []


@pytest.mark.spec("PRV-19")
def test_an_exhausted_quota_defers_without_dead_lettering(variant):
    shop = Shop(variant, make_payment, quota=QuotaPolicy(minute=1)).run("a", "b")
    assert sorted(shop.kinds) == ["deferred", "succeeded"]
    deferred = next(outcome for outcome in shop.outcomes if outcome.kind.value == "deferred")
    assert (deferred.attempts, len(shop.calls)) == (0, 1)
    assert deferred.settlement.delay <= 60.0


@pytest.mark.spec("PRV-24")
def test_the_retry_after_of_a_provider_becomes_the_delay_of_the_deferral(variant):
    shop = Shop(variant, lambda _: ProviderRateLimitError("slowly", retry_after=90.0)).run("a")
    assert (shop.kinds, len(shop.calls)) == (["deferred"], 1)
    assert (shop.outcomes[0].settlement.delay, shop.outcomes[0].attempts) == (90.0, 0)


@pytest.mark.spec("PRV-22")
def test_a_second_delivery_reuses_the_result_of_the_first(variant):
    shop = Shop(variant, make_payment)
    shop.run("a")
    shop.run("a")
    assert (len(shop.calls), shop.kinds) == (1, ["succeeded"] * 2)
    assert shop.paid[0] == shop.paid[1]
    assert shop.calls[0].idempotency_key == Transaction(id="a", source="orders").derive("payments.charge")


@pytest.mark.spec("PRV-31")
@pytest.mark.parametrize("scope, is_paused", [("provider", True), ("tenant", False)])
def test_the_gate_of_a_provider_pauses_while_its_shared_breaker_is_open(variant, scope, is_paused):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=60.0)
    shop = Shop(variant, make_outage_error, breaker=breaker, retry=RetryPolicy(max_attempts=1), scope=scope)

    async def call_gate():
        return shop.provider.gate()

    assert asyncio.run(call_gate()) is None
    shop.run("a")
    pause = asyncio.run(call_gate())
    assert (pause is not None) is is_paused
    if is_paused:
        assert pause == Pause("the breaker of payments is open", 1.0)


@pytest.mark.spec("PRV-31")
def test_a_breaker_that_permits_a_probe_does_not_pause(variant):
    breaker = BreakerPolicy(failure_threshold=1, open_cooldown_seconds=0.0)
    shop = Shop(variant, make_outage_error, breaker=breaker, retry=RetryPolicy(max_attempts=1), scope="provider").run(
        "a"
    )

    async def call_gate():
        return shop.provider.gate()

    assert asyncio.run(call_gate()) is None
