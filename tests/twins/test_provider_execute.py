"""ProviderBase.execute and its twin: the order of an attempt, the one deadline, and what comes out."""

from __future__ import annotations

import pickle

import pytest

from ergon_framework.errors import Category, ConfigurationError, ErgonError
from ergon_framework.providers.books import Account
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
from ergon_framework.providers.execution import ProviderExecutionResult, Reply
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import QuotaPolicy
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction
from tests.log_events import events_of
from tests.twins.providing import HANG, STEADY, Act, Ask, fails, once, policy, slow, tell

ACCOUNT = Account("acme", "payments", "charging")


def down():
    return ProviderDependencyError("down", http_status=503)


def refused():
    return ConnectionRefusedError("no")


def below(clock, *, deadline=None, **fields):
    return Scope(Transaction("order-7", source="shop", **fields), "process", 0, deadline, clock)


# -- what comes out -------------------------------------------------------------------------------


@pytest.mark.spec("PRV-01", "PRV-02", "PRV-28")
def test_a_success_returns_the_normalised_result(flavour):
    ask = Ask(campaign="spring", context={"correlation_id": "c1", "idempotency_key": "k1"})
    result, world = once(flavour, Act(0.25, value=Reply({"id": 1}, 201)), ask=ask)
    assert isinstance(result, ProviderExecutionResult)
    assert (result.provider_name, result.capability, result.operation) == ("payments", "charging", "charge")
    assert (result.tenant_id, result.campaign_id) == ("acme", "spring")
    assert (result.correlation_id, result.idempotency_key) == ("c1", "k1")
    assert (result.value, result.outcome, result.reason_code) == ({"id": 1}, Outcome.SUCCESS, None)
    assert (result.attempts, result.http_status, result.replayed) == (1, 201, False)
    assert result.duration_ms == pytest.approx(250.0)
    (row,) = world.books.rows()
    assert (row.outcome, row.reason_code, row.retryable, row.http_status) == (Outcome.SUCCESS, None, False, 201)
    assert (row.attempt_number, row.max_attempts, row.timeout_budget_ms) == (1, 3, 20_000.0)
    assert (row.correlation_id, row.idempotency_key, row.tenant_id) == ("c1", "k1", "acme")


@pytest.mark.spec("PRV-08", "PRV-21", "PRV-28")
def test_a_failure_raises_the_canonical_error_that_carries_its_result_and_is_final(flavour):
    error, world = once(flavour, *[fails(down)] * 3)
    assert type(error) is ProviderDependencyError
    assert (error.final, error.later, error.category) == (True, False, Category.SYSTEM)
    assert [tried.delay for tried in error.attempts] == [1.0, 2.0, None]
    assert (error.result.outcome, error.result.reason_code) == (Outcome.FAILED, ReasonCode.DEPENDENCY_UNAVAILABLE)
    assert (error.result.value, error.result.attempts, error.result.http_status) == (None, 3, 503)
    assert world.times == [0.0, 1.0, 3.0]
    assert [row.outcome for row in world.books.rows()] == [Outcome.RETRY, Outcome.RETRY, Outcome.FAILED]
    assert [row.reason_code for row in world.books.rows()] == [ReasonCode.DEPENDENCY_UNAVAILABLE] * 3


@pytest.mark.spec("PRV-25")
def test_what_is_raised_travels_to_another_process_whole(flavour):
    error, _ = once(flavour, fails(lambda: ProviderBadRequestError("no", http_status=422)))
    there = pickle.loads(pickle.dumps(error))
    assert (there.http_status, there.final, there.result.reason_code) == (422, True, ReasonCode.BAD_REQUEST)
    assert there.result.attempts == 1
    assert there.attempts[0].error.http_status == 422


@pytest.mark.spec("PRV-04", "PRV-08")
@pytest.mark.parametrize(
    "kind, made",
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
def test_only_what_may_get_better_is_tried_again_and_in_the_end_all_is_final(flavour, kind, made):
    error, world = once(flavour, *[fails(lambda: kind("no"))] * 5)
    assert (type(error), len(world.made), error.final, error.later) == (kind, made, True, False)


@pytest.mark.spec("PRV-03")
def test_whatever_a_client_raises_comes_out_canonical_with_its_cause(flavour):
    error, _ = once(flavour, *[fails(lambda: ConnectionResetError("gone"))] * 3)
    assert type(error) is ProviderConnectionError
    assert isinstance(error.__cause__, ConnectionResetError)


@pytest.mark.parametrize("value", [None, [], "paid"])
def test_an_answer_that_is_no_dict_is_no_answer_and_no_fault_of_the_providers(flavour, value):
    error, world = once(flavour, Act(value=value))
    assert (type(error), len(world.made)) == (ProviderResponseFormatError, 1)
    assert world.books.breaker(ACCOUNT).consecutive_failures == 0


@pytest.mark.spec("PRV-08")
def test_a_transient_failure_is_survived(flavour):
    result, world = once(flavour, fails(down), slow(0.5))
    assert (result.value, result.attempts, world.times) == ({"status": "paid"}, 2, [0.0, 1.0])
    assert [tried.delay for tried in result.tried] == [1.0, None]


def test_an_error_that_is_raised_twice_does_not_carry_the_first_verdict_into_the_second_call(flavour):
    shared = ProviderDependencyError("the same object each time")
    came = []

    def story(world):
        came.append((yield Ask()))
        came.append((yield Ask()))

    world = tell(flavour, story, *[fails(lambda: shared)] * 6, breaker=BreakerPolicy(failure_threshold=100))
    assert len(world.made) == 6
    assert [error.final for error in came] == [True, True]
    assert (shared.final, shared.result, shared.attempts) == (False, None, ())


# -- one deadline ---------------------------------------------------------------------------------


@pytest.mark.spec("PRV-21")
def test_a_call_that_hangs_is_abandoned_within_the_budget(flavour):
    error, world = once(flavour, HANG, timeout=2.0)
    assert (type(error), error.final, error.sent, error.fault) == (ProviderTimeoutError, True, True, True)
    assert world.asked == [(0.0, pytest.approx(1.95))]
    assert len(world.made) == 1


@pytest.mark.spec("PRV-21")
@pytest.mark.parametrize(
    "given, left, budget", [(3.0, None, 3.0), (3.0, 2.0, 2.0), (None, 4.0, 4.0), (99.0, None, 20.0)]
)
def test_the_shortest_of_what_was_given_the_policy_and_the_handlers_deadline_is_the_budget(
    flavour, given, left, budget
):
    came = []

    def story(world):
        deadline = None if left is None else world.clock() + left
        came.append((yield Ask(below=below(world.clock, deadline=deadline), context={"timeout": given})))

    world = tell(flavour, story, HANG)
    (began, ended) = world.asked[0]
    assert type(came[0]) is ProviderTimeoutError
    assert budget - 0.06 <= ended - began <= budget
    assert world.made[0].context.timeout == pytest.approx(ended - began)
    assert world.made[0].scope.deadline == pytest.approx(ended)
    assert world.made[0].scope.cancelled, "whoever looks can leave"


@pytest.mark.spec("PRV-21")
def test_the_budget_is_asked_before_a_call_and_not_after_it(flavour):
    """The earlier implementation looked at its budget when the call was over."""
    expired = []

    def story(world):
        expired.append((yield Ask(context={"timeout": 0.0})))
        expired.append((yield Ask(below=below(world.clock, deadline=world.clock()))))

    world = tell(flavour, story)
    assert world.made == []
    assert [type(error) for error in expired] == [ProviderTimeoutError] * 2
    assert [(error.sent, error.final, error.later) for error in expired] == [(False, False, False)] * 2
    assert world.books.rows() == []


@pytest.mark.spec("PRV-21")
def test_a_wait_that_does_not_fit_the_budget_is_not_begun(flavour):
    error, world = once(flavour, *[fails(down, takes=1.5)] * 3, timeout=4.0)
    assert world.times == [0.0, 2.5]
    assert world.asked == [(0.0, pytest.approx(3.95))], "the second call is abandoned, and a third has no room"
    assert error.final


@pytest.mark.spec("PRV-24")
def test_retry_after_is_the_least_wait(flavour):
    result, world = once(flavour, fails(lambda: ProviderRateLimitError("slowly", retry_after=5.0)), Act())
    assert (result.attempts, world.times) == (2, [0.0, 5.0])


@pytest.mark.spec("PRV-21", "PRV-24")
def test_a_pause_that_is_longer_than_the_budget_is_left_to_whoever_has_the_time(flavour):
    error, world = once(flavour, fails(lambda: ProviderRateLimitError("slowly", retry_after=60.0)))
    assert (len(world.made), error.final, error.later, error.retry_after) == (1, False, False, 60.0)
    assert world.asked == [(0.0, 0.0)], "it is not slept in part"


def test_a_handler_that_nobody_waits_for_any_more_makes_no_call(flavour):
    came = []

    def story(world):
        gone = below(world.clock)
        gone.cancel()
        came.append((yield Ask(below=gone)))

    assert tell(flavour, story).made == []
    assert type(came[0]) is ProviderTimeoutError


# -- quota ----------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-02", "PRV-19")
def test_every_attempt_is_charged(flavour):
    """The earlier implementation never reserved anything."""
    limited = {"quota": QuotaPolicy(minute=10, day=100)}
    _, world = once(flavour, fails(down), fails(down), Act(), **limited)
    assert world.books.quota(ACCOUNT, WindowKind.MINUTE).used_count == 3
    assert world.books.quota(ACCOUNT, WindowKind.DAY).used_count == 3
    _, world = once(flavour, HANG, **limited)
    assert world.books.quota(ACCOUNT, WindowKind.MINUTE).used_count == 1, "it may have been carried out"


@pytest.mark.spec("PRV-19")
def test_what_was_never_sent_is_refunded(flavour):
    _, world = once(flavour, *[fails(refused)] * 3, quota=QuotaPolicy(minute=10))
    assert len(world.made) == 3
    assert world.books.quota(ACCOUNT, WindowKind.MINUTE).used_count == 0


@pytest.mark.spec("PRV-19", "PRV-17")
def test_a_spent_quota_fails_fast_and_is_later_if_nothing_was_sent(flavour):
    def story(world):
        for _ in range(3):
            yield Ask()

    world = tell(flavour, story, quota=QuotaPolicy(minute=2))
    assert len(world.made) == 2
    error = world.came[2]
    assert (type(error), error.reason_code) == (ProviderQuotaExceededError, ReasonCode.QUOTA_EXHAUSTED)
    assert (error.later, error.final, error.sent, error.attempts) == (True, False, False, ())
    assert 0 < error.retry_after <= 60
    row = world.books.rows()[-1]
    assert (row.outcome, row.reason_code, row.duration_ms) == (Outcome.FAILED, ReasonCode.QUOTA_EXHAUSTED, 0.0)
    assert world.books.hour("acme", "payments", "charging", now=world.wall()).calls.refused == 1


@pytest.mark.spec("PRV-19")
def test_a_quota_that_is_spent_by_the_attempts_before_costs_an_attempt(flavour):
    error, world = once(flavour, fails(down), quota=QuotaPolicy(minute=1))
    assert len(world.made) == 1
    assert (type(error), error.later, error.final) == (ProviderQuotaExceededError, False, False)


@pytest.mark.spec("PRV-18", "PRV-19")
@pytest.mark.parametrize("scope, made", [("tenant", 4), ("provider", 2)])
def test_each_tenant_has_its_own_quota_unless_the_provider_has_one_for_all(flavour, scope, made):
    def story(world):
        for tenant in ("acme", "acme", "acme", "other", "other", "other"):
            yield Ask(tenant=tenant)

    assert len(tell(flavour, story, quota=QuotaPolicy(minute=2), scope=scope).made) == made


# -- the breaker ----------------------------------------------------------------------------------

FRAIL = {"breaker": BreakerPolicy(failure_threshold=2, open_cooldown_seconds=30.0)}


@pytest.mark.spec("PRV-02", "PRV-05", "PRV-17", "PRV-20")
def test_the_breaker_opens_across_objects_fails_fast_and_recovers_by_a_probe(flavour):
    """The earlier implementation built a breaker for each request, so that none ever opened."""

    def story(world):
        for provider in (0, 1, 0, 1):
            yield Ask(provider=provider)
        yield 30.0
        yield Ask(provider=1)
        yield Ask(provider=0)

    world = tell(flavour, story, *[fails(down)] * 2, retry=RetryPolicy(max_attempts=1), **FRAIL)
    assert len(world.made) == 4, "two faults, none while it is open, one probe, one more"
    refused = world.came[2]
    assert (type(refused), refused.later, refused.final) == (ProviderCircuitOpenError, True, False)
    assert refused.retry_after == pytest.approx(30.0)
    assert refused.open_until == pytest.approx(world.wall())
    assert [type(one).__name__ for one in world.came[4:]] == ["ProviderExecutionResult"] * 2
    assert world.books.breaker(ACCOUNT).state is BreakerState.CLOSED


@pytest.mark.spec("PRV-20", "PRV-31")
def test_the_breaker_is_asked_before_every_attempt_and_what_it_holds_back_is_not_charged(flavour):
    error, world = once(flavour, *[fails(down)] * 5, quota=QuotaPolicy(minute=10), **FRAIL)
    assert len(world.made) == 2
    assert (type(error), error.later, error.final) == (ProviderCircuitOpenError, True, False)
    assert [type(tried.error) for tried in error.attempts] == [ProviderDependencyError] * 2
    assert world.books.quota(ACCOUNT, WindowKind.MINUTE).used_count == 2
    assert [row.reason_code for row in world.books.rows()][-1] is ReasonCode.CIRCUIT_OPEN


@pytest.mark.spec("PRV-20")
@pytest.mark.parametrize("kind", [ProviderBadRequestError, ProviderAuthError, ProviderRateLimitError])
def test_only_faults_of_the_provider_count(flavour, kind):
    def story(world):
        for _ in range(4):
            yield Ask()

    once_each = RetryPolicy(max_attempts=1)
    world = tell(flavour, story, *[fails(lambda: kind("no"))] * 4, retry=once_each, **FRAIL)
    assert len(world.made) == 4


@pytest.mark.spec("PRV-18", "PRV-20")
@pytest.mark.parametrize("scope, made", [("tenant", 3), ("provider", 2)])
def test_one_tenants_breaker_does_not_hold_back_another(flavour, scope, made):
    def story(world):
        for tenant in ("acme", "acme", "other"):
            yield Ask(tenant=tenant)

    once_each = RetryPolicy(max_attempts=1)
    world = tell(flavour, story, fails(down), fails(down), retry=once_each, scope=scope, **FRAIL)
    assert len(world.made) == made


# -- keys -----------------------------------------------------------------------------------------

KEYED = {"idempotency_key": "k1"}


@pytest.mark.spec("PRV-22")
def test_a_key_makes_one_call_and_its_result_is_played_back_whole(flavour):
    came = []

    def story(world):
        came.append((yield Ask(context=KEYED)))
        came[0].value["status"] = "changed by whoever got it"
        yield 5.0
        came.append((yield Ask(context=KEYED, provider=1)))

    world = tell(flavour, story, Act(0.25, value=Reply({"status": "paid"}, 201)), quota=QuotaPolicy(minute=9))
    first, second = came
    assert len(world.made) == 1
    assert (second.value, second.http_status) == ({"status": "paid"}, 201)
    assert (first.replayed, second.replayed, second.attempts) == (False, True, 0)
    assert world.books.quota(ACCOUNT, WindowKind.MINUTE).used_count == 1
    assert world.made[0].context.idempotency_key == "k1"


@pytest.mark.spec("PRV-22")
def test_a_failure_is_not_played_back(flavour):
    came = []

    def story(world):
        came.append((yield Ask(context=KEYED)))
        came.append((yield Ask(context=KEYED)))

    tell(flavour, story, fails(lambda: ProviderBadRequestError("no")), Act())
    assert type(came[0]) is ProviderBadRequestError
    assert came[1].replayed is False


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize(
    "first, allowed",
    [
        (Act(), False),
        (fails(down), False),
        (fails(lambda: ConnectionResetError("in the middle")), False),
        (HANG, False),
        (fails(lambda: ProviderBadRequestError("no")), True),
        (fails(lambda: ProviderAuthError("no")), True),
        (fails(refused), True),
    ],
)
def test_another_payload_under_a_key_is_an_error_unless_the_first_call_definitely_failed(flavour, first, allowed):
    came = []

    def story(world):
        yield Ask(context=KEYED)
        came.append((yield Ask(payload={"amount": 99}, context=KEYED)))

    world = tell(flavour, story, first, retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(minute=9))
    if allowed:
        assert came[0].value == {"status": "paid"}
    else:
        assert (type(came[0]), came[0].code) == (ProviderBadRequestError, "idempotency_conflict")
        assert came[0].category is Category.BUSINESS
        assert len(world.made) == 1
        assert world.books.quota(ACCOUNT, WindowKind.MINUTE).used_count == 1


@pytest.mark.spec("PRV-22")
def test_a_failure_in_doubt_may_be_tried_again_with_the_same_payload(flavour):
    came = []

    def story(world):
        yield Ask(context=KEYED)
        came.append((yield Ask(context=KEYED)))

    tell(flavour, story, fails(down), Act(), retry=RetryPolicy(max_attempts=1))
    assert came[0].replayed is False


@pytest.mark.spec("PRV-22")
def test_a_breaker_that_ends_a_call_in_doubt_does_not_free_its_key_for_another_payload(flavour):
    came = []

    def story(world):
        came.append((yield Ask(context=KEYED)))
        yield 60.0
        came.append((yield Ask(payload={"amount": 99}, context=KEYED)))
        came.append((yield Ask(context=KEYED)))

    tell(flavour, story, fails(down), fails(down), **FRAIL)
    assert type(came[0]) is ProviderCircuitOpenError
    assert came[1].code == "idempotency_conflict"
    assert came[2].value == {"status": "paid"}


@pytest.mark.spec("PRV-22")
def test_a_payload_that_cannot_be_recognised_again_is_refused_before_anything_is_charged(flavour):
    error, world = once(flavour, ask=Ask(payload={"when": object()}, context=KEYED), quota=QuotaPolicy(minute=9))
    assert (type(error), error.code, world.made) == (ProviderBadRequestError, "payload_not_json", [])


@pytest.mark.spec("PRV-22")
def test_an_owner_that_died_loses_the_key_when_its_lease_ends(flavour):
    """One that never concludes: the process was killed in the middle of its call."""
    books = MemoryBooks()
    came = []

    def story(world):
        books.conclude = lambda admitted, concluded: None
        yield Ask(context=KEYED)
        del books.conclude
        came.append((yield Ask(context=KEYED | {"timeout": 1.0})))
        yield 30.0
        came.append((yield Ask(context=KEYED)))

    tell(flavour, story, books=books)
    busy, again = came
    assert (type(busy), busy.code, busy.later, busy.final) == (ProviderTimeoutError, "in_flight", True, False)
    assert 0 < busy.retry_after <= 25.0
    assert again.replayed is False


# -- the scope ------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-22")
def test_below_a_handler_the_key_and_the_correlation_are_the_transactions(flavour):
    def story(world):
        for _ in range(2):
            yield Ask(below=below(world.clock, correlation="process-1"))

    world = tell(flavour, story)
    came = world.came
    key = Transaction("order-7", source="shop").derive("payments.charge")
    assert [result.idempotency_key for result in came] == [key, key]
    assert [result.replayed for result in came] == [False, True], "a second delivery finds what the first one did"
    assert came[0].correlation_id == "process-1"
    assert world.made[0].context.correlation_id == "process-1"


@pytest.mark.spec("PRV-22")
def test_a_second_call_of_an_operation_in_one_handler_needs_a_name(flavour):
    came = []

    def story(world):
        handler = below(world.clock)
        came.append((yield Ask(below=handler)))
        came.append((yield Ask(below=handler)))
        came.append((yield Ask(below=handler, context={"name": "tip"})))

    world = tell(flavour, story)
    assert type(came[1]) is ConfigurationError
    assert came[2].idempotency_key == Transaction("order-7", source="shop").derive("payments.charge/tip")
    assert len(world.made) == 2


def test_outside_a_handler_there_is_no_key_but_a_correlation(flavour):
    result, world = once(flavour)
    assert result.idempotency_key is None
    assert len(result.correlation_id) == 32
    assert world.made[0].context.correlation_id == result.correlation_id
    assert world.made[0].scope is None


# -- the books are out of order -------------------------------------------------------------------


@pytest.mark.spec("PRV-19")
@pytest.mark.parametrize("broken", [OSError("database gone"), ErgonError("lost")])
def test_without_admission_there_is_no_call(flavour, broken):
    books = MemoryBooks()

    def admit(asked):
        raise broken

    books.admit = admit
    error, world = once(flavour, books=books)
    assert (type(error), error.code, error.sent) == (ProviderInternalError, "books_unavailable", False)
    assert (error.final, error.later, world.made) == (False, False, [])
    assert error.__cause__ is broken


class Remote(MemoryBooks):
    """Books that are somewhere else, and may not answer."""

    waits = True

    def __init__(self, silent=""):
        super().__init__()
        self.silent, self.world = silent, None

    def admit(self, asked):
        if self.silent == "admit":
            self.world.sleep(1e6)
        return super().admit(asked)

    def conclude(self, admitted, concluded):
        if self.silent == "conclude":
            self.world.sleep(1e6)
        return super().conclude(admitted, concluded)

    async def admit_async(self, asked):
        if self.silent == "admit":
            await self.world.sleep(1e6)
        return MemoryBooks.admit(self, asked)

    async def conclude_async(self, admitted, concluded):
        if self.silent == "conclude":
            await self.world.sleep(1e6)
        return MemoryBooks.conclude(self, admitted, concluded)


@pytest.mark.spec("PRV-21")
@pytest.mark.parametrize("silent, comes", [("", "result"), ("admit", "error"), ("conclude", "result")])
def test_books_that_do_not_answer_cost_no_more_than_the_budget(flavour, silent, comes):
    books, came = Remote(silent), []

    def story(world):
        books.world = world
        came.append((yield Ask(context=KEYED)))

    world = tell(flavour, story, slow(1.0), books=books, timeout=5.0)
    (began, ended) = world.asked[0]
    assert ended - began == pytest.approx(1.0 if not silent else 5.0)
    assert isinstance(came[0], ProviderExecutionResult if comes == "result" else ProviderInternalError)


@pytest.mark.spec("PRV-26")
def test_a_result_stands_though_it_could_not_be_written_down(flavour, caplog):
    books = MemoryBooks()

    def broken(*_):
        raise OSError("password=secret")

    books.conclude = broken
    books.record = broken
    result, _ = once(flavour, books=books)
    assert result.value == {"status": "paid"}
    assert "books failed" in events_of(caplog.records)
    assert "secret" not in caplog.text


@pytest.mark.spec("PRV-26")
def test_what_there_is_no_room_for_is_dropped_and_counted(flavour):
    books = MemoryBooks(rows=3)

    def story(world):
        for _ in range(5):
            yield Ask()

    tell(flavour, story, books=books)
    assert (len(books.rows()), books.dropped) == (3, 2)


# -- jitter ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-24")
def test_waits_differ_with_the_dice(flavour):
    jittery = policy(retry=STEADY.model_copy(update={"jitter_ratio": 0.5}))
    waits = {once(flavour, fails(down), policy=jittery, seed=seed)[1].times[1] for seed in range(5)}
    assert len(waits) == 5
    assert all(0.5 <= wait <= 1.5 for wait in waits)
