"""The circuit breaker: its transitions, probes, fencing, snapshot and operator overrides."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.circuit_breaker import (
    BreakerPolicy,
    BreakerSnapshot,
    BreakerState,
    CallAdmitted,
    CallRefused,
    CircuitBreaker,
    Override,
    OverrideKind,
    Probe,
    admit,
    advance,
    record,
)
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderCircuitOpenError,
    ProviderDependencyError,
)

POLICY = BreakerPolicy(failure_threshold=3, open_cooldown_seconds=10, half_open_max_calls=1, probe_lease_seconds=5)
TWO_PROBES = POLICY.model_copy(update={"half_open_max_calls": 2})


def make_open(policy=POLICY, now=0.0):
    breaker = CircuitBreaker(policy)
    for _ in range(policy.failure_threshold):
        call(breaker, now, fault=True)
    return breaker


def make_half_open(policy=POLICY):
    """Return a breaker that is half open since 10, with its first probe running."""
    breaker = make_open(policy)
    return breaker, breaker.before_call(10.0)


def call(breaker, now, *, fault):
    breaker.after_call(breaker.before_call(now), now, fault=fault)


def expect_rejection(breaker, now):
    with pytest.raises(ProviderCircuitOpenError) as caught:
        breaker.before_call(now)
    return caught.value


# -- the four transitions -------------------------------------------------------------------------


@pytest.mark.spec("PRV-05", "PRV-28")
def test_a_new_breaker_is_closed_and_has_the_five_fields():
    breaker = CircuitBreaker()
    assert breaker.state == "closed"
    assert (breaker.failure_threshold, breaker.open_cooldown_seconds, breaker.half_open_max_calls) == (5, 30, 1)
    assert (breaker.consecutive_failures, breaker.open_until) == (0, None)


@pytest.mark.spec("PRV-05", "PRV-17")
def test_closed_becomes_open_when_the_faults_in_a_row_reach_the_threshold():
    breaker = CircuitBreaker(POLICY)
    for failures in (1, 2):
        call(breaker, 0.0, fault=True)
        assert (breaker.state, breaker.consecutive_failures, breaker.open_until) == ("closed", failures, None)
    call(breaker, 4.0, fault=True)
    assert (breaker.state, breaker.consecutive_failures, breaker.open_until) == ("open", 3, 14.0)


@pytest.mark.spec("PRV-05")
def test_a_success_resets_the_count():
    breaker = CircuitBreaker(POLICY)
    for fault in (True, True, False, True, True):
        call(breaker, 0.0, fault=fault)
    assert (breaker.state, breaker.consecutive_failures) == ("closed", 2)


@pytest.mark.spec("PRV-05", "PRV-17")
def test_open_rejects_immediately_with_the_end_time():
    error = expect_rejection(make_open(), 4.0)
    assert (error.reason_code, error.open_until, error.retry_after) == ("circuit_open", 10.0, 6.0)
    assert (error.sent, error.retryable, error.fault) == (False, False, False)
    assert str(error) == "the breaker is open; the provider is not called"


@pytest.mark.spec("PRV-05", "PRV-17")
def test_open_becomes_half_open_when_the_cooldown_is_over():
    breaker = make_open()
    expect_rejection(breaker, 9.999)
    permit = breaker.before_call(10.0)
    assert breaker.state == "half_open"
    assert permit.probe


@pytest.mark.spec("PRV-05", "PRV-17")
def test_half_open_becomes_closed_when_the_probe_succeeds():
    breaker, permit = make_half_open()
    breaker.after_call(permit, 11.0, fault=False)
    assert (breaker.state, breaker.consecutive_failures, breaker.open_until) == ("closed", 0, None)
    assert not breaker.before_call(11.0).probe


@pytest.mark.spec("PRV-05", "PRV-17")
def test_half_open_becomes_open_when_any_probe_fails():
    breaker, first = make_half_open(TWO_PROBES)
    second = breaker.before_call(10.0)
    breaker.after_call(first, 11.0, fault=False)
    breaker.after_call(second, 12.0, fault=True)
    assert (breaker.state, breaker.open_until) == ("open", 22.0)


@pytest.mark.spec("PRV-05")
def test_all_permitted_probes_must_succeed_and_no_more_are_admitted():
    breaker, first = make_half_open(TWO_PROBES)
    second = breaker.before_call(10.0)
    expect_rejection(breaker, 10.0)
    breaker.after_call(first, 11.0, fault=False)
    assert breaker.state == "half_open"
    expect_rejection(breaker, 11.0)  # one has succeeded and one is running: a third would prove nothing more
    breaker.after_call(second, 11.0, fault=False)
    assert breaker.state == "closed"


def test_a_cooldown_of_zero_has_a_retry_delay_while_a_probe_runs():
    breaker, _ = make_half_open(POLICY.model_copy(update={"open_cooldown_seconds": 0.0}))
    assert expect_rejection(breaker, 12.0).retry_after == 3.0


def test_calls_are_rejected_until_the_lease_of_a_running_probe_ends():
    breaker, _ = make_half_open()
    error = expect_rejection(breaker, 12.0)
    assert (error.open_until, error.retry_after) == (15.0, 3.0)
    assert str(error) == "the breaker is half open; the provider is not called"
    long_lease = CircuitBreaker(POLICY.model_copy(update={"probe_lease_seconds": 500.0}), make_open().snapshot)
    long_lease.before_call(10.0)
    assert expect_rejection(long_lease, 12.0).open_until == 22.0  # at most a cooldown


# -- fencing --------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-20")
@pytest.mark.parametrize("fault", [True, False, None])
def test_a_late_result_from_before_a_transition_is_ignored(fault):
    breaker = CircuitBreaker(POLICY)
    late = breaker.before_call(0.0)
    for _ in range(3):
        call(breaker, 0.0, fault=True)
    before = breaker.snapshot
    breaker.after_call(late, 1.0, fault=fault)
    assert breaker.snapshot is before
    probe = breaker.before_call(10.0)
    before = breaker.snapshot
    breaker.after_call(late, 10.0, fault=fault)
    assert breaker.snapshot is before
    breaker.after_call(probe, 10.0, fault=False)
    before = breaker.snapshot
    breaker.after_call(late, 10.0, fault=fault)  # closed again, but in a later period
    assert breaker.snapshot is before


@pytest.mark.spec("PRV-20")
def test_an_abandoned_probe_expires_and_its_late_result_is_ignored():
    breaker, lost = make_half_open()
    expect_rejection(breaker, 14.999)
    second = breaker.before_call(15.0)
    assert second.probe.number == 2
    for fault in (True, False):
        before = breaker.snapshot
        breaker.after_call(lost, 15.0, fault=fault)
        assert breaker.snapshot is before
    breaker.after_call(second, 16.0, fault=False)
    assert breaker.state == "closed"


def test_a_result_recorded_twice_counts_once():
    breaker, first = make_half_open(TWO_PROBES)
    breaker.after_call(first, 11.0, fault=False)
    breaker.after_call(first, 11.0, fault=False)
    assert (breaker.state, breaker.snapshot.probe_successes) == ("half_open", 1)


@pytest.mark.spec("PRV-20")
def test_a_neutral_result_changes_no_count_and_frees_the_probe():
    breaker = CircuitBreaker(POLICY)
    call(breaker, 0.0, fault=True)
    call(breaker, 0.0, fault=None)
    assert breaker.consecutive_failures == 1
    breaker, permit = make_half_open()
    breaker.after_call(permit, 11.0, fault=None)
    assert (breaker.state, breaker.snapshot.probes) == ("half_open", ())
    assert breaker.before_call(11.0).probe


@pytest.mark.spec("PRV-20")
@given(in_flight=st.integers(0, 20), threshold=st.integers(1, 8))
def test_a_failing_provider_gets_at_most_the_threshold_and_the_calls_in_flight(in_flight, threshold):
    breaker = CircuitBreaker(POLICY.model_copy(update={"failure_threshold": threshold}))
    in_flight_permits, calls = [], 0
    for _ in range(100):
        try:
            in_flight_permits.append(breaker.before_call(1.0))
            calls += 1
        except ProviderCircuitOpenError:
            pass
        if len(in_flight_permits) > in_flight:
            breaker.after_call(in_flight_permits.pop(0), 1.0, fault=True)
    assert calls == threshold + in_flight


def test_a_success_that_changes_nothing_is_the_same_state():
    state = BreakerSnapshot()
    answer = admit(state, POLICY, 0.0)
    assert isinstance(answer, CallAdmitted)
    assert answer.state is state
    assert record(state, POLICY, answer.permit, 1.0, fault=False) is state


# -- the snapshot ---------------------------------------------------------------------------------


@pytest.mark.spec("PRV-06")
def test_a_breaker_resumes_from_its_snapshot():
    breaker = CircuitBreaker(POLICY, BreakerSnapshot.from_dict(json.loads(json.dumps(make_open().snapshot.to_dict()))))
    assert expect_rejection(breaker, 5.0).open_until == 10.0
    permit = breaker.before_call(10.0)
    again = CircuitBreaker(POLICY, BreakerSnapshot.from_dict(json.loads(json.dumps(breaker.snapshot.to_dict()))))
    expect_rejection(again, 11.0)
    again.after_call(permit, 11.0, fault=False)
    assert again.state == "closed"


probes = st.builds(Probe, st.integers(0, 99), st.floats(0, 1e10))
snapshots = st.builds(
    BreakerSnapshot,
    state=st.sampled_from(BreakerState),
    consecutive_failures=st.integers(0, 99),
    open_until=st.none() | st.floats(0, 1e10),
    generation=st.integers(0, 99),
    probes=st.lists(probes, max_size=3).map(tuple),
    probes_begun=st.integers(0, 99),
    probe_successes=st.integers(0, 9),
    override=st.none() | st.builds(Override, st.sampled_from(OverrideKind), st.floats(0, 1e10)),
)


@pytest.mark.spec("PRV-06")
@given(snapshots)
def test_every_snapshot_survives_json(snapshot):
    assert BreakerSnapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))) == snapshot


def test_missing_fields_of_a_snapshot_are_as_in_a_new_breaker():
    assert BreakerSnapshot.from_dict({}) == BreakerSnapshot()
    assert BreakerSnapshot.from_dict({"state": "open", "open_until": 5.0}) == BreakerSnapshot(
        BreakerState.OPEN, open_until=5.0
    )
    with pytest.raises(ValueError, match="ajar"):
        BreakerSnapshot.from_dict({"state": "ajar"})


@given(snapshots, st.floats(0, 2e10), st.integers(1, 4))
def test_every_state_admits_calls_again_in_time(snapshot, now, probes):
    # For any stored row and any earlier policy, no breaker stays open forever.
    policy = POLICY.model_copy(update={"half_open_max_calls": probes})
    for _ in range(3):
        answer = admit(snapshot, policy, now)
        if isinstance(answer, CallAdmitted):
            return
        assert answer.until > now
        # While a probe runs the retry delay may repeat; each of these times is skipped here.
        snapshot, now = answer.state, max(answer.until, *(probe.until for probe in answer.state.probes), 0.0)
    pytest.fail(f"still refused: {snapshot}")


def test_a_lowered_probe_limit_closes_a_breaker_with_enough_successes():
    state = BreakerSnapshot(BreakerState.HALF_OPEN, probe_successes=2, consecutive_failures=3, generation=4)
    answer = admit(state, POLICY, 0.0)
    assert isinstance(answer, CallAdmitted)
    assert (answer.state.state, answer.state.generation, answer.state.consecutive_failures) == ("closed", 5, 0)
    assert answer.permit.generation == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"failure_threshold": 0},
        {"open_cooldown_seconds": -1},
        {"half_open_max_calls": 0},
        {"probe_lease_seconds": 0},
        {"threshold": 5},
    ],
)
def test_a_policy_out_of_bounds_is_refused(fields):
    with pytest.raises(ValidationError):
        BreakerPolicy(**fields)


# -- operator overrides ---------------------------------------------------------------------------


@pytest.mark.spec("PRV-32")
def test_forced_open_lets_nothing_through_until_it_expires():
    breaker = CircuitBreaker(POLICY)
    permit = breaker.before_call(0.0)
    breaker.snapshot = breakers.force_open(breaker.snapshot, until=100.0)
    error = expect_rejection(breaker, 40.0)
    assert (error.open_until, error.retry_after) == (100.0, 60.0)
    assert str(error) == "the breaker is force open; the provider is not called"
    breaker.after_call(permit, 50.0, fault=True)
    assert breaker.consecutive_failures == 0
    assert not breaker.before_call(100.0).probe


@pytest.mark.spec("PRV-32")
def test_disabled_lets_everything_through_and_counts_nothing_until_it_expires():
    breaker = make_open()
    breaker.snapshot = breakers.disable(breaker.snapshot, until=100.0)
    for _ in range(10):
        call(breaker, 5.0, fault=True)
    in_flight_permits = breaker.before_call(99.0)
    assert not in_flight_permits.probe
    probe = breaker.before_call(100.0)  # its cooldown ended long ago
    assert (breaker.state, bool(probe.probe)) == ("half_open", True)
    breaker.after_call(in_flight_permits, 101.0, fault=True)
    assert breaker.state == "half_open"


@pytest.mark.spec("PRV-32")
def test_an_override_can_be_cleared_and_replaced():
    state = breakers.disable(breakers.force_open(BreakerSnapshot(), until=50.0), until=9.0)
    assert isinstance(admit(state, POLICY, 0.0), CallAdmitted)
    assert breakers.clear_override(state).override is None
    assert breakers.clear_override(BreakerSnapshot()) == BreakerSnapshot()
    open_state = breakers.clear_override(breakers.disable(make_open().snapshot, until=50.0))
    assert isinstance(admit(open_state, POLICY, 1.0), CallRefused)


def test_invalidated_probes_hold_no_slots():
    breaker, _ = make_half_open()
    state = breakers.clear_override(breakers.disable(breaker.snapshot, until=11.0))
    answer = admit(state, POLICY, 10.0)
    assert isinstance(answer, CallAdmitted)
    assert answer.permit.probe


@given(snapshots, st.floats(0, 2e10))
def test_a_generation_rises_at_each_transition_and_never_falls(snapshot, now):
    after = advance(snapshot, now)
    assert after.generation >= snapshot.generation
    if (after.state, after.override) != (snapshot.state, snapshot.override):
        assert after.generation > snapshot.generation
    assert advance(after, now) is after


# -- against a model ------------------------------------------------------------------------------


class Model:
    """A second implementation of the breaker that shares nothing with the first."""

    def __init__(self, threshold, cooldown, probes, lease):
        self.threshold, self.cooldown, self.probes, self.lease = threshold, cooldown, probes, lease
        self.phase = "closed"
        self.faults_in_a_row = 0
        self.opens_again = 0.0
        self.running_probes = {}  # ticket -> time of expiry
        self.successful_probes = 0
        self.period = object()

    def change(self, phase, now):
        self.phase, self.period, self.running_probes, self.successful_probes = phase, object(), {}, 0
        if phase == "open":
            self.opens_again = now + self.cooldown
        if phase == "closed":
            self.faults_in_a_row = 0

    def tick(self, now):
        if self.phase == "open" and now >= self.opens_again:
            self.change("half_open", now)
        for ticket in [ticket for ticket, expires_at in self.running_probes.items() if expires_at <= now]:
            del self.running_probes[ticket]

    def ask(self, now):
        self.tick(now)
        if self.phase == "open":
            return None
        ticket = object()
        if self.phase == "half_open":
            if len(self.running_probes) + self.successful_probes >= self.probes:
                return None
            self.running_probes[ticket] = now + self.lease
        return self.period, ticket, self.phase

    def tell(self, answer, now, fault):
        self.tick(now)
        period, ticket, phase = answer
        if period is not self.period:
            return
        if phase == "half_open" and self.running_probes.pop(ticket, None) is None:
            return
        if fault is None:
            return
        if fault:
            self.faults_in_a_row += 1
            if phase == "half_open" or self.faults_in_a_row >= self.threshold:
                self.change("open", now)
        elif phase == "half_open":
            self.successful_probes += 1
            if self.successful_probes >= self.probes:
                self.change("closed", now)
        else:
            self.faults_in_a_row = 0


events = st.lists(
    st.one_of(
        st.just(("ask", 0, None)),
        st.tuples(st.just("tell"), st.integers(0, 10), st.sampled_from([True, True, False, None])),
        st.tuples(st.just("wait"), st.integers(1, 7), st.none()),
        st.just(("restart", 0, None)),
    ),
    max_size=120,
)


@pytest.mark.spec("PRV-05", "PRV-06", "PRV-20")
@given(
    events=events,
    threshold=st.integers(1, 3),
    cooldown=st.integers(0, 9),
    probes=st.integers(1, 3),
    lease=st.integers(1, 9),
)
def test_any_history_matches_the_model(events, threshold, cooldown, probes, lease):
    policy = BreakerPolicy(
        failure_threshold=threshold,
        open_cooldown_seconds=cooldown,
        half_open_max_calls=probes,
        probe_lease_seconds=lease,
    )
    breaker, model, now, in_flight_permits = CircuitBreaker(policy), Model(threshold, cooldown, probes, lease), 0.0, []
    for action, number, fault in events:
        if action == "wait":
            now += number
        elif action == "restart":
            breaker = CircuitBreaker(
                policy, BreakerSnapshot.from_dict(json.loads(json.dumps(breaker.snapshot.to_dict())))
            )
        elif action == "tell" and in_flight_permits:
            permit, answer = in_flight_permits.pop(number % len(in_flight_permits))
            breaker.after_call(permit, now, fault=fault)
            model.tell(answer, now, fault)
        elif action == "ask":
            answer = model.ask(now)
            if answer is None:
                error = expect_rejection(breaker, now)
                assert error.retry_after == error.open_until - now > 0
            else:
                permit = breaker.before_call(now)
                assert bool(permit.probe) == (answer[2] == "half_open")
                in_flight_permits.append((permit, answer))
            assert breaker.state == model.phase
        assert breaker.consecutive_failures == model.faults_in_a_row


# -- the end time that a gate gets ----------------------------------------------------------------


@pytest.mark.spec("PRV-31")
def test_a_gate_gets_an_end_time_only_if_it_is_certain():
    assert breakers.blocked_until(BreakerSnapshot()) is None
    assert breakers.blocked_until(make_open().snapshot) == 10.0
    assert breakers.blocked_until(make_half_open()[0].snapshot) is None, "a probe may be let through"
    assert breakers.blocked_until(breakers.force_open(BreakerSnapshot(), until=99.0)) == 99.0
    assert breakers.blocked_until(breakers.disable(make_open().snapshot, until=99.0)) is None


# -- as in the provider document ------------------------------------------------------------------


@pytest.mark.spec("DX-32", "PRV-28")
def test_a_breaker_is_made_and_used_with_the_names_of_the_document():
    breaker = CircuitBreaker(failure_threshold=2, open_cooldown_seconds=30, half_open_max_calls=1)
    assert (breaker.failure_threshold, breaker.open_cooldown_seconds, breaker.half_open_max_calls) == (2, 30, 1)
    for error in (
        None,
        ProviderDependencyError("down"),
        ProviderBadRequestError("no"),
        ProviderDependencyError("down"),
    ):
        breaker.before_call()
        breaker.after_call(error=error)
    assert (breaker.state, breaker.consecutive_failures) == (BreakerState.CLOSED, 1)
    breaker.before_call()
    breaker.after_call(error=ProviderDependencyError("down"))
    assert breaker.state is BreakerState.OPEN
    with pytest.raises(ProviderCircuitOpenError):
        breaker.before_call()


@pytest.mark.spec("DX-32")
def test_a_breaker_of_the_document_recovers_by_a_probe():
    now = [100.0]
    breaker = CircuitBreaker(POLICY, failure_threshold=1, consecutive_failures=1, open_until=105.0, wall=lambda: now[0])
    assert (breaker.policy.open_cooldown_seconds, breaker.consecutive_failures) == (10, 1)
    with pytest.raises(ProviderCircuitOpenError):
        breaker.before_call()
    now[0] = 105.0
    breaker.before_call()
    breaker.after_call()
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.spec("DX-32")
def test_an_invalid_breaker_is_rejected():
    with pytest.raises(ConfigurationError, match="failure_threshold"):
        CircuitBreaker(failure_threshold=0)
    with pytest.raises(ValueError, match="before_call"):
        CircuitBreaker().after_call()
