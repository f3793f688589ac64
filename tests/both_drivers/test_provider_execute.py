"""ProviderBase.execute and its async variant: the order of an attempt, the one deadline, and the results and errors."""

from __future__ import annotations

import pickle

import pytest

from ergon_framework.errors import Category, ConfigurationError, ErgonError
from ergon_framework.providers.circuit_breaker import BreakerPolicy, BreakerState
from ergon_framework.providers.errors import (
    ProviderAuthError,
    ProviderBadRequestError,
    ProviderCircuitOpenError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderInternalError,
    ProviderQuotaExceededError,
    ProviderRateLimitError,
    ProviderResponseFormatError,
    ProviderTimeoutError,
    ReasonCode,
)
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.models import ProviderExecutionResult, ProviderReply
from ergon_framework.providers.policy import QuotaPolicy
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.state import ProviderScope
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction
from tests.both_drivers.provider_harness import (
    HANG,
    NO_JITTER_RETRY,
    Act,
    Ask,
    answer_after,
    call_once,
    fail_with,
    make_policy,
    run_story,
)
from tests.log_events import list_events

SCOPE = ProviderScope("acme", "payments", "charging")


def make_outage_error():
    return ProviderDependencyError("down", http_status=503)


def make_connection_refused():
    return ConnectionRefusedError("no")


def make_scope(clock, *, deadline=None, **fields):
    return Scope(Transaction(id="order-7", source="shop", **fields), "process", 0, deadline, clock)


# -- results and errors ---------------------------------------------------------------------------


@pytest.mark.spec("PRV-01", "PRV-02", "PRV-28")
def test_a_success_returns_the_normalised_result(variant):
    call = Ask(campaign="spring", context={"correlation_id": "c1", "idempotency_key": "k1"})
    result, world = call_once(variant, Act(0.25, value=ProviderReply({"id": 1}, 201)), ask=call)
    assert isinstance(result, ProviderExecutionResult)
    assert (result.provider_name, result.capability, result.operation) == ("payments", "charging", "charge")
    assert (result.tenant_id, result.campaign_id) == ("acme", "spring")
    assert (result.correlation_id, result.idempotency_key) == ("c1", "k1")
    assert (result.value, result.outcome, result.reason_code) == ({"id": 1}, AttemptOutcome.SUCCESS, None)
    assert (result.attempts, result.http_status, result.replayed) == (1, 201, False)
    assert result.duration_ms == pytest.approx(250.0)
    (row,) = world.state_store.list_attempts()
    assert (row.outcome, row.reason_code, row.retryable, row.http_status) == (AttemptOutcome.SUCCESS, None, False, 201)
    assert (row.attempt_number, row.max_attempts, row.timeout_budget_ms) == (1, 3, 20_000.0)
    assert (row.correlation_id, row.idempotency_key, row.tenant_id) == ("c1", "k1", "acme")


@pytest.mark.spec("PRV-08", "PRV-21", "PRV-28")
def test_a_failure_raises_the_canonical_error_that_carries_its_result_and_is_final(variant):
    error, world = call_once(variant, *[fail_with(make_outage_error)] * 3)
    assert type(error) is ProviderDependencyError
    assert (error.final, error.not_attempted, error.category) == (True, False, Category.SYSTEM)
    assert [attempt.delay for attempt in error.attempts] == [1.0, 2.0, None]
    assert (error.result.outcome, error.result.reason_code) == (
        AttemptOutcome.FAILED,
        ReasonCode.DEPENDENCY_UNAVAILABLE,
    )
    assert (error.result.value, error.result.attempts, error.result.http_status) == (None, 3, 503)
    assert world.times == [0.0, 1.0, 3.0]
    assert [row.outcome for row in world.state_store.list_attempts()] == [
        AttemptOutcome.RETRY,
        AttemptOutcome.RETRY,
        AttemptOutcome.FAILED,
    ]
    assert [row.reason_code for row in world.state_store.list_attempts()] == [ReasonCode.DEPENDENCY_UNAVAILABLE] * 3


@pytest.mark.spec("PRV-25")
def test_a_raised_error_keeps_all_its_fields_when_pickled(variant):
    error, _ = call_once(variant, fail_with(lambda: ProviderBadRequestError("no", http_status=422)))
    unpickled = pickle.loads(pickle.dumps(error))
    assert (unpickled.http_status, unpickled.final, unpickled.result.reason_code) == (422, True, ReasonCode.BAD_REQUEST)
    assert unpickled.result.attempts == 1
    assert unpickled.attempts[0].error.http_status == 422


@pytest.mark.spec("PRV-04", "PRV-08")
@pytest.mark.parametrize(
    "kind, call_count",
    [
        (ProviderTimeoutError, 3),
        (ProviderConnectionError, 3),
        (ProviderDependencyError, 3),
        (ProviderRateLimitError, 3),
        (ProviderAuthError, 1),
        (ProviderBadRequestError, 1),
        (ProviderResponseFormatError, 1),
        (ProviderInternalError, 1),
    ],
)
def test_only_transient_errors_are_retried_and_the_last_error_is_final(variant, kind, call_count):
    error, world = call_once(variant, *[fail_with(lambda: kind("no"))] * 5)
    assert (type(error), len(world.requests), error.final, error.not_attempted) == (kind, call_count, True, False)


@pytest.mark.spec("PRV-03")
def test_every_error_of_a_client_is_raised_as_a_canonical_error_with_its_cause(variant):
    error, _ = call_once(variant, *[fail_with(lambda: ConnectionResetError("gone"))] * 3)
    assert type(error) is ProviderConnectionError
    assert isinstance(error.__cause__, ConnectionResetError)


@pytest.mark.parametrize("value", [None, [], "paid"])
def test_an_answer_that_is_not_a_dict_is_invalid_and_does_not_count_for_the_breaker(variant, value):
    error, world = call_once(variant, Act(value=value))
    assert (type(error), len(world.requests)) == (ProviderResponseFormatError, 1)
    assert world.state_store.get_breaker(SCOPE).consecutive_failures == 0


@pytest.mark.spec("PRV-08")
def test_a_call_succeeds_after_a_transient_failure(variant):
    result, world = call_once(variant, fail_with(make_outage_error), answer_after(0.5))
    assert (result.value, result.attempts, world.times) == ({"status": "paid"}, 2, [0.0, 1.0])
    assert [attempt.delay for attempt in result.attempt_history] == [1.0, None]


def test_an_error_object_raised_twice_does_not_keep_the_classification_of_the_first_call(variant):
    shared = ProviderDependencyError("the same object each time")
    results = []

    def story(world):
        results.append((yield Ask()))
        results.append((yield Ask()))

    world = run_story(variant, story, *[fail_with(lambda: shared)] * 6, breaker=BreakerPolicy(failure_threshold=100))
    assert len(world.requests) == 6
    assert [error.final for error in results] == [True, True]
    assert (shared.final, shared.result, shared.attempts) == (False, None, ())


# -- one deadline ---------------------------------------------------------------------------------


@pytest.mark.spec("PRV-21")
def test_a_call_that_hangs_is_abandoned_within_the_budget(variant):
    error, world = call_once(variant, HANG, timeout=2.0)
    assert (type(error), error.final, error.sent, error.fault) == (ProviderTimeoutError, True, True, True)
    assert world.call_times == [(0.0, pytest.approx(1.95))]
    assert len(world.requests) == 1


@pytest.mark.spec("PRV-21")
@pytest.mark.parametrize(
    "timeout, remaining, budget", [(3.0, None, 3.0), (3.0, 2.0, 2.0), (None, 4.0, 4.0), (99.0, None, 20.0)]
)
def test_the_budget_is_the_shortest_of_call_timeout_policy_timeout_and_handler_deadline(
    variant, timeout, remaining, budget
):
    results = []

    def story(world):
        deadline = None if remaining is None else world.clock() + remaining
        results.append(
            (yield Ask(handler_scope=make_scope(world.clock, deadline=deadline), context={"timeout": timeout}))
        )

    world = run_story(variant, story, HANG)
    (started_at, ended_at) = world.call_times[0]
    assert type(results[0]) is ProviderTimeoutError
    assert budget - 0.06 <= ended_at - started_at <= budget
    assert world.requests[0].context.timeout == pytest.approx(ended_at - started_at)
    assert world.requests[0].scope.deadline == pytest.approx(ended_at)
    assert world.requests[0].scope.cancelled, "a cancelled scope lets the call stop"


@pytest.mark.spec("PRV-21")
def test_the_budget_is_checked_before_a_call_and_not_after_it(variant):
    """The earlier implementation checked its budget after the call."""
    errors = []

    def story(world):
        errors.append((yield Ask(context={"timeout": 0.0})))
        errors.append((yield Ask(handler_scope=make_scope(world.clock, deadline=world.clock()))))

    world = run_story(variant, story)
    assert world.requests == []
    assert [type(error) for error in errors] == [ProviderTimeoutError] * 2
    assert [(error.sent, error.final, error.not_attempted) for error in errors] == [(False, False, False)] * 2
    assert world.state_store.list_attempts() == []


@pytest.mark.spec("PRV-21")
def test_a_wait_that_does_not_fit_the_budget_is_not_started(variant):
    error, world = call_once(variant, *[fail_with(make_outage_error, takes=1.5)] * 3, timeout=4.0)
    assert world.times == [0.0, 2.5]
    assert world.call_times == [(0.0, pytest.approx(3.95))], "the second call is abandoned, and a third has no room"
    assert error.final


@pytest.mark.spec("PRV-24")
def test_retry_after_is_the_minimum_wait(variant):
    result, world = call_once(variant, fail_with(lambda: ProviderRateLimitError("slowly", retry_after=5.0)), Act())
    assert (result.attempts, world.times) == (2, [0.0, 5.0])


@pytest.mark.spec("PRV-21", "PRV-24")
def test_a_retry_after_beyond_the_budget_is_left_to_the_caller(variant):
    error, world = call_once(variant, fail_with(lambda: ProviderRateLimitError("slowly", retry_after=60.0)))
    assert (len(world.requests), error.final, error.not_attempted, error.retry_after) == (1, False, False, 60.0)
    assert world.call_times == [(0.0, 0.0)], "it is not slept in part"


def test_an_abandoned_handler_makes_no_call(variant):
    results = []

    def story(world):
        cancelled_scope = make_scope(world.clock)
        cancelled_scope.cancel()
        results.append((yield Ask(handler_scope=cancelled_scope)))

    assert run_story(variant, story).requests == []
    assert type(results[0]) is ProviderTimeoutError


# -- quota ----------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-02", "PRV-19")
def test_every_attempt_uses_quota(variant):
    """The earlier implementation never reserved quota."""
    quota_options = {"quota": QuotaPolicy(minute=10, day=100)}
    _, world = call_once(variant, fail_with(make_outage_error), fail_with(make_outage_error), Act(), **quota_options)
    assert world.state_store.get_quota(SCOPE, WindowKind.MINUTE).used_count == 3
    assert world.state_store.get_quota(SCOPE, WindowKind.DAY).used_count == 3
    _, world = call_once(variant, HANG, **quota_options)
    assert world.state_store.get_quota(SCOPE, WindowKind.MINUTE).used_count == 1, "it may have been carried out"


@pytest.mark.spec("PRV-19")
def test_the_quota_of_an_unsent_request_is_refunded(variant):
    _, world = call_once(variant, *[fail_with(make_connection_refused)] * 3, quota=QuotaPolicy(minute=10))
    assert len(world.requests) == 3
    assert world.state_store.get_quota(SCOPE, WindowKind.MINUTE).used_count == 0


@pytest.mark.spec("PRV-19", "PRV-17")
def test_an_exhausted_quota_fails_fast_and_is_deferrable_if_nothing_was_sent(variant):
    def story(world):
        for _ in range(3):
            yield Ask()

    world = run_story(variant, story, quota=QuotaPolicy(minute=2))
    assert len(world.requests) == 2
    error = world.results[2]
    assert (type(error), error.reason_code) == (ProviderQuotaExceededError, ReasonCode.QUOTA_EXHAUSTED)
    assert (error.not_attempted, error.final, error.sent, error.attempts) == (True, False, False, ())
    assert 0 < error.retry_after <= 60
    row = world.state_store.list_attempts()[-1]
    assert (row.outcome, row.reason_code, row.duration_ms) == (AttemptOutcome.FAILED, ReasonCode.QUOTA_EXHAUSTED, 0.0)
    assert world.state_store.get_hour("acme", "payments", "charging", now=world.wall()).calls.refused == 1


@pytest.mark.spec("PRV-19")
def test_a_quota_exhausted_by_earlier_attempts_is_not_deferrable(variant):
    error, world = call_once(variant, fail_with(make_outage_error), quota=QuotaPolicy(minute=1))
    assert len(world.requests) == 1
    assert (type(error), error.not_attempted, error.final) == (ProviderQuotaExceededError, False, False)


@pytest.mark.spec("PRV-18", "PRV-19")
@pytest.mark.parametrize("scope, call_count", [("tenant", 4), ("provider", 2)])
def test_each_tenant_has_its_own_quota_unless_the_provider_shares_one(variant, scope, call_count):
    def story(world):
        for tenant in ("acme", "acme", "acme", "other", "other", "other"):
            yield Ask(tenant=tenant)

    assert len(run_story(variant, story, quota=QuotaPolicy(minute=2), scope=scope).requests) == call_count


# -- the breaker ----------------------------------------------------------------------------------

FRAGILE_BREAKER = {"breaker": BreakerPolicy(failure_threshold=2, open_cooldown_seconds=30.0)}


@pytest.mark.spec("PRV-02", "PRV-05", "PRV-17", "PRV-20")
def test_the_breaker_opens_across_objects_fails_fast_and_recovers_by_a_probe(variant):
    """The earlier implementation built a breaker for each request, so that none ever opened."""

    def story(world):
        for provider in (0, 1, 0, 1):
            yield Ask(provider=provider)
        yield 30.0
        yield Ask(provider=1)
        yield Ask(provider=0)

    world = run_story(
        variant, story, *[fail_with(make_outage_error)] * 2, retry=RetryPolicy(max_attempts=1), **FRAGILE_BREAKER
    )
    assert len(world.requests) == 4, "two faults, none while it is open, one probe, one more"
    rejection = world.results[2]
    assert (type(rejection), rejection.not_attempted, rejection.final) == (ProviderCircuitOpenError, True, False)
    assert rejection.retry_after == pytest.approx(30.0)
    assert rejection.open_until == pytest.approx(world.wall())
    assert [type(one).__name__ for one in world.results[4:]] == ["ProviderExecutionResult"] * 2
    assert world.state_store.get_breaker(SCOPE).state is BreakerState.CLOSED


@pytest.mark.spec("PRV-20", "PRV-31")
def test_the_breaker_is_checked_before_every_attempt_and_blocked_calls_use_no_quota(variant):
    error, world = call_once(
        variant, *[fail_with(make_outage_error)] * 5, quota=QuotaPolicy(minute=10), **FRAGILE_BREAKER
    )
    assert len(world.requests) == 2
    assert (type(error), error.not_attempted, error.final) == (ProviderCircuitOpenError, True, False)
    assert [type(attempt.error) for attempt in error.attempts] == [ProviderDependencyError] * 2
    assert world.state_store.get_quota(SCOPE, WindowKind.MINUTE).used_count == 2
    assert [row.reason_code for row in world.state_store.list_attempts()][-1] is ReasonCode.CIRCUIT_OPEN


@pytest.mark.spec("PRV-20")
@pytest.mark.parametrize("kind", [ProviderBadRequestError, ProviderAuthError, ProviderRateLimitError])
def test_only_faults_of_the_provider_count(variant, kind):
    def story(world):
        for _ in range(4):
            yield Ask()

    once_each = RetryPolicy(max_attempts=1)
    world = run_story(variant, story, *[fail_with(lambda: kind("no"))] * 4, retry=once_each, **FRAGILE_BREAKER)
    assert len(world.requests) == 4


@pytest.mark.spec("PRV-18", "PRV-20")
@pytest.mark.parametrize("scope, call_count", [("tenant", 3), ("provider", 2)])
def test_the_breaker_of_one_tenant_does_not_block_another(variant, scope, call_count):
    def story(world):
        for tenant in ("acme", "acme", "other"):
            yield Ask(tenant=tenant)

    once_each = RetryPolicy(max_attempts=1)
    world = run_story(
        variant,
        story,
        fail_with(make_outage_error),
        fail_with(make_outage_error),
        retry=once_each,
        scope=scope,
        **FRAGILE_BREAKER,
    )
    assert len(world.requests) == call_count


# -- keys -----------------------------------------------------------------------------------------

KEY_CONTEXT = {"idempotency_key": "k1"}


@pytest.mark.spec("PRV-22")
def test_a_key_makes_one_call_and_its_complete_result_is_replayed(variant):
    results = []

    def story(world):
        results.append((yield Ask(context=KEY_CONTEXT)))
        results[0].value["status"] = "changed by the caller"
        yield 5.0
        results.append((yield Ask(context=KEY_CONTEXT, provider=1)))

    world = run_story(
        variant, story, Act(0.25, value=ProviderReply({"status": "paid"}, 201)), quota=QuotaPolicy(minute=9)
    )
    first, second = results
    assert len(world.requests) == 1
    assert (second.value, second.http_status) == ({"status": "paid"}, 201)
    assert (first.replayed, second.replayed, second.attempts) == (False, True, 0)
    assert world.state_store.get_quota(SCOPE, WindowKind.MINUTE).used_count == 1
    assert world.requests[0].context.idempotency_key == "k1"


@pytest.mark.spec("PRV-22")
def test_a_failure_is_not_replayed(variant):
    results = []

    def story(world):
        results.append((yield Ask(context=KEY_CONTEXT)))
        results.append((yield Ask(context=KEY_CONTEXT)))

    run_story(variant, story, fail_with(lambda: ProviderBadRequestError("no")), Act())
    assert type(results[0]) is ProviderBadRequestError
    assert results[1].replayed is False


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize(
    "first, allowed",
    [
        (Act(), False),
        (fail_with(make_outage_error), False),
        (fail_with(lambda: ConnectionResetError("in the middle")), False),
        (HANG, False),
        (fail_with(lambda: ProviderBadRequestError("no")), True),
        (fail_with(lambda: ProviderAuthError("no")), True),
        (fail_with(make_connection_refused), True),
    ],
)
def test_another_payload_under_a_key_is_an_error_unless_the_first_call_definitely_failed(variant, first, allowed):
    results = []

    def story(world):
        yield Ask(context=KEY_CONTEXT)
        results.append((yield Ask(payload={"amount": 99}, context=KEY_CONTEXT)))

    world = run_story(variant, story, first, retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(minute=9))
    if allowed:
        assert results[0].value == {"status": "paid"}
    else:
        assert (type(results[0]), results[0].code) == (ProviderBadRequestError, "idempotency_conflict")
        assert results[0].category is Category.BUSINESS
        assert len(world.requests) == 1
        assert world.state_store.get_quota(SCOPE, WindowKind.MINUTE).used_count == 1


@pytest.mark.spec("PRV-22")
def test_a_failure_with_unknown_outcome_may_be_retried_with_the_same_payload(variant):
    results = []

    def story(world):
        yield Ask(context=KEY_CONTEXT)
        results.append((yield Ask(context=KEY_CONTEXT)))

    run_story(variant, story, fail_with(make_outage_error), Act(), retry=RetryPolicy(max_attempts=1))
    assert results[0].replayed is False


@pytest.mark.spec("PRV-22")
def test_a_breaker_that_ends_a_call_with_unknown_outcome_does_not_free_its_key(variant):
    results = []

    def story(world):
        results.append((yield Ask(context=KEY_CONTEXT)))
        yield 60.0
        results.append((yield Ask(payload={"amount": 99}, context=KEY_CONTEXT)))
        results.append((yield Ask(context=KEY_CONTEXT)))

    run_story(variant, story, fail_with(make_outage_error), fail_with(make_outage_error), **FRAGILE_BREAKER)
    assert type(results[0]) is ProviderCircuitOpenError
    assert results[1].code == "idempotency_conflict"
    assert results[2].value == {"status": "paid"}


@pytest.mark.spec("PRV-22")
def test_a_payload_that_is_not_json_is_rejected_before_quota_is_used(variant):
    error, world = call_once(
        variant, ask=Ask(payload={"when": object()}, context=KEY_CONTEXT), quota=QuotaPolicy(minute=9)
    )
    assert (type(error), error.code, world.requests) == (ProviderBadRequestError, "payload_not_json", [])


@pytest.mark.spec("PRV-22")
def test_a_killed_owner_loses_the_key_when_its_lease_ends(variant):
    """The owner never concludes: its process was killed during its call."""
    state_store = MemoryProviderState()
    results = []

    def story(world):
        state_store.complete = lambda admitted, concluded: None
        yield Ask(context=KEY_CONTEXT)
        del state_store.complete
        results.append((yield Ask(context=KEY_CONTEXT | {"timeout": 1.0})))
        yield 30.0
        results.append((yield Ask(context=KEY_CONTEXT)))

    run_story(variant, story, state_store=state_store)
    busy, retried = results
    assert (type(busy), busy.code, busy.not_attempted, busy.final) == (ProviderTimeoutError, "in_flight", True, False)
    assert 0 < busy.retry_after <= 25.0
    assert retried.replayed is False


# -- the scope ------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-22")
def test_inside_a_handler_key_and_correlation_come_from_the_transaction(variant):
    def story(world):
        for _ in range(2):
            yield Ask(handler_scope=make_scope(world.clock, correlation="process-1"))

    world = run_story(variant, story)
    results = world.results
    key = Transaction(id="order-7", source="shop").derive("payments.charge")
    assert [result.idempotency_key for result in results] == [key, key]
    assert [result.replayed for result in results] == [False, True], "a second delivery finds what the first one did"
    assert results[0].correlation_id == "process-1"
    assert world.requests[0].context.correlation_id == "process-1"


@pytest.mark.spec("PRV-22")
def test_a_second_call_of_an_operation_in_one_handler_needs_a_name(variant):
    results = []

    def story(world):
        handler = make_scope(world.clock)
        results.append((yield Ask(handler_scope=handler)))
        results.append((yield Ask(handler_scope=handler)))
        results.append((yield Ask(handler_scope=handler, context={"name": "tip"})))

    world = run_story(variant, story)
    assert type(results[1]) is ConfigurationError
    assert results[2].idempotency_key == Transaction(id="order-7", source="shop").derive("payments.charge/tip")
    assert len(world.requests) == 2


def test_outside_a_handler_there_is_no_key_but_a_correlation(variant):
    result, world = call_once(variant)
    assert result.idempotency_key is None
    assert len(result.correlation_id) == 32
    assert world.requests[0].context.correlation_id == result.correlation_id
    assert world.requests[0].scope is None


# -- provider state is unavailable ----------------------------------------------------------------


@pytest.mark.spec("PRV-19")
@pytest.mark.parametrize("failure", [OSError("database gone"), ErgonError("lost")])
def test_no_call_is_made_if_provider_state_is_unavailable(variant, failure):
    state_store = MemoryProviderState()

    def admit(asked):
        raise failure

    state_store.admit = admit
    error, world = call_once(variant, state_store=state_store)
    assert (type(error), error.code, error.sent) == (ProviderInternalError, "provider_state_unavailable", False)
    assert (error.final, error.not_attempted, world.requests) == (False, False, [])
    assert error.__cause__ is failure


class RemoteProviderState(MemoryProviderState):
    """Provider state behind a network, which may not respond."""

    may_block = True

    def __init__(self, hanging_step=""):
        super().__init__()
        self.hanging_step, self.world = hanging_step, None

    def admit(self, request):
        if self.hanging_step == "admit":
            self.world.sleep(1e6)
        return super().admit(request)

    def complete(self, admitted, result):
        if self.hanging_step == "conclude":
            self.world.sleep(1e6)
        return super().complete(admitted, result)

    async def admit_async(self, request):
        if self.hanging_step == "admit":
            await self.world.sleep(1e6)
        return MemoryProviderState.admit(self, request)

    async def complete_async(self, admitted, result):
        if self.hanging_step == "conclude":
            await self.world.sleep(1e6)
        return MemoryProviderState.complete(self, admitted, result)


@pytest.mark.spec("PRV-21")
@pytest.mark.parametrize("hanging_step, expected", [("", "result"), ("admit", "error"), ("conclude", "result")])
def test_provider_state_that_does_not_respond_delays_a_call_by_at_most_its_budget(variant, hanging_step, expected):
    state_store, results = RemoteProviderState(hanging_step), []

    def story(world):
        state_store.world = world
        results.append((yield Ask(context=KEY_CONTEXT)))

    world = run_story(variant, story, answer_after(1.0), state_store=state_store, timeout=5.0)
    (started_at, ended_at) = world.call_times[0]
    assert ended_at - started_at == pytest.approx(1.0 if not hanging_step else 5.0)
    assert isinstance(results[0], ProviderExecutionResult if expected == "result" else ProviderInternalError)


@pytest.mark.spec("PRV-26")
def test_a_result_is_returned_even_if_it_could_not_be_recorded(variant, caplog):
    state_store = MemoryProviderState()

    def raise_error(*_):
        raise OSError("password=secret")

    state_store.complete = raise_error
    state_store.record = raise_error
    result, _ = call_once(variant, state_store=state_store)
    assert result.value == {"status": "paid"}
    assert "provider state update failed" in list_events(caplog.records)
    assert "secret" not in caplog.text


@pytest.mark.spec("PRV-26")
def test_attempt_records_beyond_the_capacity_are_dropped_and_counted(variant):
    state_store = MemoryProviderState(max_rows=3)

    def story(world):
        for _ in range(5):
            yield Ask()

    run_story(variant, story, state_store=state_store)
    assert (len(state_store.list_attempts()), state_store.dropped) == (3, 2)


# -- jitter ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-24")
def test_waits_differ_with_the_random_source(variant):
    jittery = make_policy(retry=NO_JITTER_RETRY.model_copy(update={"jitter_ratio": 0.5}))
    waits = {
        call_once(variant, fail_with(make_outage_error), policy=jittery, seed=seed)[1].times[1] for seed in range(5)
    }
    assert len(waits) == 5
    assert all(0.5 <= wait <= 1.5 for wait in waits)
