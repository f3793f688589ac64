"""Provider state in PostgreSQL compared with provider state in memory: any sequence of calls has equal answers."""

from __future__ import annotations

import asyncio
import itertools

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.circuit_breaker import BreakerPolicy, BreakerState
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderError,
    ProviderInternalError,
)
from ergon_framework.providers.idempotency import KeyInFlightState, KeyUnknown, StoredResult
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.postgres import admin
from ergon_framework.providers.state import (
    AdmissionRequest,
    AdmittedAttempt,
    AttemptResult,
    KeyInFlight,
    ProviderScope,
    ReplayedResult,
)
from tests.servers.controlled import ControlledProviderState, create_controlled_database, list_scope_names

#: A Monday at noon; a window of each kind starts here or nearly.
NOON_UNIX_SECONDS = 1_699_876_800.0
_numbers = itertools.count(1)

ATTEMPT_ENDS = {
    "success": lambda: (None, StoredResult({"n": 1, "deep": [1.5, {"ü": None}]}, 201)),
    "fault": lambda: (ProviderDependencyError("down"), None),
    "fault not sent": lambda: (ProviderConnectionError("refused", sent=False), None),
    "refused": lambda: (ProviderBadRequestError("no"), None),
    "ours": lambda: (ProviderInternalError("oops"), None),
    "unknown outcome": lambda: (None, None),
}

quotas = st.builds(
    QuotaPolicy,
    minute=st.sampled_from([None, None, 0, 1, 2, 3]),
    hour=st.sampled_from([None, None, 3]),
    day=st.sampled_from([None, 2, 4]),
    month=st.sampled_from([None, None, 5]),
)
policies = st.builds(
    ProviderPolicy,
    quota=quotas,
    breaker=st.builds(
        BreakerPolicy,
        failure_threshold=st.integers(1, 3),
        open_cooldown_seconds=st.sampled_from([0.0, 10.0, 30.0]),
        half_open_max_calls=st.integers(1, 2),
        probe_lease_seconds=st.sampled_from([5.0, 20.0]),
    ),
    keep=st.sampled_from([0.0, 40.0, 1000.0]),
)
admissions = st.tuples(
    st.just("admit"),
    st.booleans(),  # under which of the two policies
    st.sampled_from([None, "k1", "k2"]),
    st.sampled_from(["f", "f", "g"]),
    st.sampled_from(["me", "you"]),
    st.sampled_from([1, 1, 1, 2]),
    st.booleans(),  # outcome unknown
)
conclusions = st.tuples(
    st.just("conclude"), st.integers(0, 5), st.sampled_from(sorted(ATTEMPT_ENDS)), st.booleans(), st.booleans()
)
waits = st.tuples(st.just("wait"), st.sampled_from([0.25, 4.0, 6.0, 10.0, 31.0, 61.0, 3600.0, 90_000.0]))
overrides = st.tuples(
    st.just("say"), st.sampled_from(["force_open", "disable", "lift"]), st.sampled_from([5.0, 15.0, 100.0])
)
action_lists = st.lists(
    st.one_of(admissions, admissions, conclusions, conclusions, waits, overrides), min_size=3, max_size=25
)


@pytest.fixture(scope="module")
def environment(postgres):
    dsn = create_controlled_database(postgres)
    provider_state = ControlledProviderState(dsn)
    with asyncio.Runner() as runner:
        yield dsn, provider_state, runner
        runner.run(provider_state.close_async())
    provider_state.close()


class StateComparison:
    """One account in both provider states."""

    def __init__(self, environment, policy_pair, scope):
        self.dsn, self.shared, self.runner = environment
        self.memory = MemoryProviderState()
        tenant = f"tenant-{next(_numbers)}"
        self.tenant = tenant
        self.account = ProviderScope(tenant if scope == "tenant" else None, f"p-{tenant}", "charging")
        self.policy_pair = policy_pair
        self.now = NOON_UNIX_SECONDS
        self.attempts = []
        self.sync_turns = itertools.cycle([True, False])

    def admit(self, policy_index, key, fingerprint, owner, *rest):
        number, is_outcome_unknown = rest
        request = AdmissionRequest(
            scope=self.account,
            policy=self.policy_pair[policy_index],
            tenant_id=self.tenant,
            idempotency_key=key,
            fingerprint=fingerprint,
            owner=owner if key else "",
            attempt_number=number,
            lease=8.0,
            now=self.now,
            outcome_unknown=is_outcome_unknown,
        )
        expected, actual = (
            catch_provider_error(lambda: self.memory.admit(request)),
            catch_provider_error(lambda: self._admit(request)),
        )
        assert describe_answer(actual) == describe_answer(expected)
        if isinstance(expected, AdmittedAttempt):
            self.attempts.append((expected, actual, False))

    def _admit(self, request):
        if next(self.sync_turns):
            return self.shared.admit(request)
        return self.runner.run(self.shared.admit_async(request))

    def conclude(self, index, end_name, last, doubt):
        if not self.attempts:
            return
        attempt = self.attempts.pop(index % len(self.attempts))
        expected, actual, has_ended = attempt
        # An attempt ends once. If no other follows where one was promised, a later conclude reports that.
        error, stored_result = (None, None) if has_ended else ATTEMPT_ENDS[end_name]()
        last = last or has_ended or stored_result is not None
        if not last:
            self.attempts.append((expected, actual, True))
        conclusion = AttemptResult(
            now=self.now, is_last=last, outcome_unknown=doubt, error=error, stored_result=stored_result
        )
        expected_state = self.memory.complete(expected, conclusion)
        if next(self.sync_turns):
            actual_state = self.shared.complete(actual, conclusion)
        else:
            actual_state = self.runner.run(self.shared.complete_async(actual, conclusion))
        # The next caller detects that a cooldown is over; that caller may have nothing to report.
        assert actual_state == expected_state or (actual_state is None and expected_state is BreakerState.HALF_OPEN)

    def wait(self, seconds):
        self.now += seconds
        self.shared.set_clock(self.now)

    def say(self, action, seconds):
        self.shared.set_clock(self.now)
        before = breakers.advance(self.memory.get_breaker(self.account), self.now)
        audit_fields = {"actor": "ops", "reason": "a test"}
        if action == "lift":
            after = breakers.clear_override(before)
            admin.clear_override(self.dsn, self.account, **audit_fields)
        else:
            after = getattr(breakers, action)(before, until=self.now + seconds)
            getattr(admin, action)(self.dsn, self.account, seconds=seconds, **audit_fields)
        self.memory._put_breaker(self.account, after)

    def compare(self):
        """Compare what is stored, once expired entries are gone."""
        self.shared.set_clock(self.now)
        expected = breakers.advance(self.memory.get_breaker(self.account), self.now)
        assert breakers.advance(self.shared.get_breaker(self.account), self.now) == expected
        for (_, kind), state in self.memory._quotas.items():
            if self.now < state.window.end.timestamp():
                row = self.shared.get_quota(self.account, kind)
                assert (0 if row is None else row.used_count) == state.used_count
        expected_rows = {key: to_row(entry) for (_, _, key), entry in self.memory._keys.items()}
        rows = self.shared.clock_connection.execute(
            "select key, fingerprint, state, case when state = 'in_flight' then owner end,"
            " extract(epoch from until)::float8, prior_call_unknown and state = 'in_flight', value, http_status"
            " from ergon.provider_keys where tenant_id = %s",
            [self.tenant],
        ).fetchall()
        assert {row[0]: row[1:] for row in rows} == expected_rows


def catch_provider_error(call):
    try:
        return call()
    except ProviderError as error:
        return error


def describe_answer(answer):
    """Return everything a caller can see of an answer."""
    match answer:
        case AdmittedAttempt():
            return "admitted", answer.permit.generation, answer.permit.probe
        case ReplayedResult():
            return "replayed", answer.stored_result
        case KeyInFlight():
            return "busy", answer.until
        case ProviderError():
            fields = (str(answer), answer.code, answer.sent, answer.not_attempted, answer.final, answer.retry_after)
            return type(answer), *fields, getattr(answer, "open_until", None)
    raise AssertionError(answer)


def to_row(entry):
    if isinstance(entry, KeyInFlightState):
        return entry.fingerprint, "in_flight", entry.owner, entry.until, entry.outcome_unknown, None, None
    if isinstance(entry, KeyUnknown):
        return entry.fingerprint, "unknown", None, entry.until, False, None, None
    return (
        entry.fingerprint,
        "done",
        None,
        entry.until,
        False,
        entry.stored_result.value,
        entry.stored_result.http_status,
    )


@pytest.mark.spec("PRV-05", "PRV-06", "PRV-09", "PRV-19", "PRV-20", "PRV-22", "PRV-32")
@settings(
    max_examples=settings().max_examples * 2 // 5,  # each makes many round trips to a real server
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(policy_pair=st.tuples(policies, policies), scope=st.sampled_from(["tenant", "provider"]), actions=action_lists)
def test_memory_and_postgres_state_answer_every_sequence_alike(environment, policy_pair, scope, actions):
    comparison = StateComparison(environment, policy_pair, scope)
    for name, *arguments in actions:
        getattr(comparison, name)(*arguments)
        comparison.compare()


@pytest.mark.spec("PRV-19")
def test_the_database_rejects_quota_counts_that_do_not_add_up(environment):
    _, provider_state, _ = environment
    with pytest.raises(psycopg.errors.CheckViolation):
        provider_state.clock_connection.execute(
            "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end,"
            " limit_count, used_count, remaining_count) values ('t', 'p', 'c', now(), now(), 10, 1, 10)"
        )
    assert list_scope_names(ProviderScope(None, "p", "c")) == ["*", "p", "c"]
