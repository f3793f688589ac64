"""The breaker: its transitions, its probes, its fencing, its snapshot and an operator's overrides."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.circuit_breaker import (
    Admitted,
    BreakerPolicy,
    BreakerState,
    CircuitBreaker,
    Override,
    OverrideKind,
    Probe,
    Refused,
    Snapshot,
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
TWO = POLICY.model_copy(update={"half_open_max_calls": 2})


def opened(policy=POLICY, now=0.0):
    breaker = CircuitBreaker(policy)
    for _ in range(policy.failure_threshold):
        call(breaker, now, fault=True)
    return breaker


def half_open(policy=POLICY):
    """Just half open, at 10, with its first probe out."""
    breaker = opened(policy)
    return breaker, breaker.before_call(10.0)


def call(breaker, now, *, fault):
    breaker.after_call(breaker.before_call(now), now, fault=fault)


def refused(breaker, now):
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
def test_a_success_in_between_begins_the_count_anew():
    breaker = CircuitBreaker(POLICY)
    for fault in (True, True, False, True, True):
        call(breaker, 0.0, fault=fault)
    assert (breaker.state, breaker.consecutive_failures) == ("closed", 2)


@pytest.mark.spec("PRV-05", "PRV-17")
def test_open_refuses_at_once_and_says_until_when():
    error = refused(opened(), 4.0)
    assert (error.reason_code, error.open_until, error.retry_after) == ("circuit_open", 10.0, 6.0)
    assert (error.sent, error.retryable, error.fault) == (False, False, False)
    assert str(error) == "the breaker is open; the provider is not called"


@pytest.mark.spec("PRV-05", "PRV-17")
def test_open_becomes_half_open_when_the_cooldown_is_over():
    breaker = opened()
    refused(breaker, 9.999)
    leave = breaker.before_call(10.0)
    assert breaker.state == "half_open"
    assert leave.probe


@pytest.mark.spec("PRV-05", "PRV-17")
def test_half_open_becomes_closed_when_the_probe_succeeds():
    breaker, leave = half_open()
    breaker.after_call(leave, 11.0, fault=False)
    assert (breaker.state, breaker.consecutive_failures, breaker.open_until) == ("closed", 0, None)
    assert not breaker.before_call(11.0).probe


@pytest.mark.spec("PRV-05", "PRV-17")
def test_half_open_becomes_open_when_any_probe_fails():
    breaker, first = half_open(TWO)
    second = breaker.before_call(10.0)
    breaker.after_call(first, 11.0, fault=False)
    breaker.after_call(second, 12.0, fault=True)
    assert (breaker.state, breaker.open_until) == ("open", 22.0)


@pytest.mark.spec("PRV-05")
def test_as_many_probes_must_succeed_as_may_be_out_and_no_more_go_out():
    breaker, first = half_open(TWO)
    second = breaker.before_call(10.0)
    refused(breaker, 10.0)
    breaker.after_call(first, 11.0, fault=False)
    assert breaker.state == "half_open"
    refused(breaker, 11.0)  # one has succeeded and one is out: a third would prove nothing more
    breaker.after_call(second, 11.0, fault=False)
    assert breaker.state == "closed"


def test_with_a_cooldown_of_zero_nobody_is_told_to_come_back_at_once():
    breaker, _ = half_open(POLICY.model_copy(update={"open_cooldown_seconds": 0.0}))
    assert refused(breaker, 12.0).retry_after == 3.0


def test_while_the_probes_are_out_it_is_refused_until_one_of_them_must_have_ended():
    breaker, _ = half_open()
    error = refused(breaker, 12.0)
    assert (error.open_until, error.retry_after) == (15.0, 3.0)
    assert str(error) == "the breaker is half open; the provider is not called"
    patient = CircuitBreaker(POLICY.model_copy(update={"probe_lease_seconds": 500.0}), opened().snapshot)
    patient.before_call(10.0)
    assert refused(patient, 12.0).open_until == 22.0  # no longer than a cooldown


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
    breaker.after_call(late, 10.0, fault=fault)  # closed again, but not the same time
    assert breaker.snapshot is before


@pytest.mark.spec("PRV-20")
def test_an_abandoned_probe_expires_and_its_late_result_is_ignored():
    breaker, lost = half_open()
    refused(breaker, 14.999)
    second = breaker.before_call(15.0)
    assert second.probe.number == 2
    for fault in (True, False):
        before = breaker.snapshot
        breaker.after_call(lost, 15.0, fault=fault)
        assert breaker.snapshot is before
    breaker.after_call(second, 16.0, fault=False)
    assert breaker.state == "closed"


def test_a_result_told_twice_counts_once():
    breaker, first = half_open(TWO)
    breaker.after_call(first, 11.0, fault=False)
    breaker.after_call(first, 11.0, fault=False)
    assert (breaker.state, breaker.snapshot.probe_successes) == ("half_open", 1)


@pytest.mark.spec("PRV-20")
def test_what_says_nothing_of_the_provider_changes_no_count_and_frees_the_probe():
    breaker = CircuitBreaker(POLICY)
    call(breaker, 0.0, fault=True)
    call(breaker, 0.0, fault=None)
    assert breaker.consecutive_failures == 1
    breaker, leave = half_open()
    breaker.after_call(leave, 11.0, fault=None)
    assert (breaker.state, breaker.snapshot.probes) == ("half_open", ())
    assert breaker.before_call(11.0).probe


@pytest.mark.spec("PRV-20")
@given(in_flight=st.integers(0, 20), threshold=st.integers(1, 8))
def test_a_dead_provider_gets_no_more_calls_than_the_threshold_and_those_in_flight(in_flight, threshold):
    breaker = CircuitBreaker(POLICY.model_copy(update={"failure_threshold": threshold}))
    flying, calls = [], 0
    for _ in range(100):
        try:
            flying.append(breaker.before_call(1.0))
            calls += 1
        except ProviderCircuitOpenError:
            pass
        if len(flying) > in_flight:
            breaker.after_call(flying.pop(0), 1.0, fault=True)
    assert calls == threshold + in_flight


def test_a_success_that_changes_nothing_is_the_same_state():
    state = Snapshot()
    answer = admit(state, POLICY, 0.0)
    assert isinstance(answer, Admitted)
    assert answer.state is state
    assert record(state, POLICY, answer.leave, 1.0, fault=False) is state


# -- the snapshot ---------------------------------------------------------------------------------


@pytest.mark.spec("PRV-06")
def test_a_breaker_goes_on_where_its_snapshot_was_taken():
    breaker = CircuitBreaker(POLICY, Snapshot.from_dict(json.loads(json.dumps(opened().snapshot.to_dict()))))
    assert refused(breaker, 5.0).open_until == 10.0
    leave = breaker.before_call(10.0)
    again = CircuitBreaker(POLICY, Snapshot.from_dict(json.loads(json.dumps(breaker.snapshot.to_dict()))))
    refused(again, 11.0)
    again.after_call(leave, 11.0, fault=False)
    assert again.state == "closed"


probes = st.builds(Probe, st.integers(0, 99), st.floats(0, 1e10))
snapshots = st.builds(
    Snapshot,
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
    assert Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))) == snapshot


def test_what_a_stored_snapshot_lacks_is_as_in_a_new_breaker():
    assert Snapshot.from_dict({}) == Snapshot()
    assert Snapshot.from_dict({"state": "open", "open_until": 5.0}) == Snapshot(BreakerState.OPEN, open_until=5.0)
    with pytest.raises(ValueError, match="ajar"):
        Snapshot.from_dict({"state": "ajar"})


@given(snapshots, st.floats(0, 2e10), st.integers(1, 4))
def test_from_any_state_time_leads_to_calls_again(snapshot, now, probes):
    # Whatever a row holds, and whatever the policy was when it was written, nothing stays shut for ever.
    policy = POLICY.model_copy(update={"half_open_max_calls": probes})
    for _ in range(3):
        answer = admit(snapshot, policy, now)
        if isinstance(answer, Admitted):
            return
        assert answer.until > now
        # Where a probe is out it may be asked more often; each of those times is passed over here.
        snapshot, now = answer.state, max(answer.until, *(probe.until for probe in answer.state.probes), 0.0)
    pytest.fail(f"still refused: {snapshot}")


def test_a_policy_that_asks_for_fewer_probes_closes_what_has_had_enough():
    state = Snapshot(BreakerState.HALF_OPEN, probe_successes=2, consecutive_failures=3, generation=4)
    answer = admit(state, POLICY, 0.0)
    assert isinstance(answer, Admitted)
    assert (answer.state.state, answer.state.generation, answer.state.consecutive_failures) == ("closed", 5, 0)
    assert answer.leave.generation == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"failure_threshold": 0},
        {"open_cooldown_seconds": -1},
        {"half_open_max_calls": 0},
        {"probe_lease_seconds": 0},
        {"threshold": 5},
    ],
)
def test_a_policy_out_of_bounds_is_refused(wrong):
    with pytest.raises(ValidationError):
        BreakerPolicy(**wrong)


# -- an operator's word ---------------------------------------------------------------------------


@pytest.mark.spec("PRV-32")
def test_forced_open_lets_nothing_through_until_it_expires():
    breaker = CircuitBreaker(POLICY)
    leave = breaker.before_call(0.0)
    breaker.snapshot = breakers.force_open(breaker.snapshot, until=100.0)
    error = refused(breaker, 40.0)
    assert (error.open_until, error.retry_after) == (100.0, 60.0)
    assert str(error) == "the breaker is force open; the provider is not called"
    breaker.after_call(leave, 50.0, fault=True)
    assert breaker.consecutive_failures == 0
    assert not breaker.before_call(100.0).probe


@pytest.mark.spec("PRV-32")
def test_disabled_lets_everything_through_and_counts_nothing_until_it_expires():
    breaker = opened()
    breaker.snapshot = breakers.disable(breaker.snapshot, until=100.0)
    for _ in range(10):
        call(breaker, 5.0, fault=True)
    flying = breaker.before_call(99.0)
    assert not flying.probe
    probe = breaker.before_call(100.0)  # its cooldown was over long ago
    assert (breaker.state, bool(probe.probe)) == ("half_open", True)
    breaker.after_call(flying, 101.0, fault=True)
    assert breaker.state == "half_open"


@pytest.mark.spec("PRV-32")
def test_an_override_can_be_lifted_and_replaced():
    state = breakers.disable(breakers.force_open(Snapshot(), until=50.0), until=9.0)
    assert isinstance(admit(state, POLICY, 0.0), Admitted)
    assert breakers.lift(state).override is None
    assert breakers.lift(Snapshot()) == Snapshot()
    shut = breakers.lift(breakers.disable(opened().snapshot, until=50.0))
    assert isinstance(admit(shut, POLICY, 1.0), Refused)


def test_probes_that_no_longer_count_hold_no_places():
    breaker, _ = half_open()
    state = breakers.lift(breakers.disable(breaker.snapshot, until=11.0))
    answer = admit(state, POLICY, 10.0)
    assert isinstance(answer, Admitted)
    assert answer.leave.probe


@given(snapshots, st.floats(0, 2e10))
def test_a_generation_rises_at_each_transition_and_never_falls(snapshot, now):
    after = advance(snapshot, now)
    assert after.generation >= snapshot.generation
    if (after.state, after.override) != (snapshot.state, snapshot.override):
        assert after.generation > snapshot.generation
    assert advance(after, now) is after


# -- against a model ------------------------------------------------------------------------------


class Model:
    """The same breaker, written as one would tell it, and with nothing in common with the other."""

    def __init__(self, threshold, cooldown, probes, lease):
        self.threshold, self.cooldown, self.probes, self.lease = threshold, cooldown, probes, lease
        self.word = "closed"
        self.faults_in_a_row = 0
        self.opens_again = 0.0
        self.living = {}  # ticket -> when it dies
        self.good = 0
        self.era = object()

    def change(self, word, now):
        self.word, self.era, self.living, self.good = word, object(), {}, 0
        if word == "open":
            self.opens_again = now + self.cooldown
        if word == "closed":
            self.faults_in_a_row = 0

    def tick(self, now):
        if self.word == "open" and now >= self.opens_again:
            self.change("half_open", now)
        for ticket in [ticket for ticket, dies in self.living.items() if dies <= now]:
            del self.living[ticket]

    def ask(self, now):
        self.tick(now)
        if self.word == "open":
            return None
        ticket = object()
        if self.word == "half_open":
            if len(self.living) + self.good >= self.probes:
                return None
            self.living[ticket] = now + self.lease
        return self.era, ticket, self.word

    def tell(self, answer, now, fault):
        self.tick(now)
        era, ticket, word = answer
        if era is not self.era:
            return
        if word == "half_open" and self.living.pop(ticket, None) is None:
            return
        if fault is None:
            return
        if fault:
            self.faults_in_a_row += 1
            if word == "half_open" or self.faults_in_a_row >= self.threshold:
                self.change("open", now)
        elif word == "half_open":
            self.good += 1
            if self.good >= self.probes:
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
def test_any_history_is_the_one_that_the_model_tells(events, threshold, cooldown, probes, lease):
    policy = BreakerPolicy(
        failure_threshold=threshold,
        open_cooldown_seconds=cooldown,
        half_open_max_calls=probes,
        probe_lease_seconds=lease,
    )
    breaker, model, now, flying = CircuitBreaker(policy), Model(threshold, cooldown, probes, lease), 0.0, []
    for what, number, fault in events:
        if what == "wait":
            now += number
        elif what == "restart":
            breaker = CircuitBreaker(policy, Snapshot.from_dict(json.loads(json.dumps(breaker.snapshot.to_dict()))))
        elif what == "tell" and flying:
            leave, answer = flying.pop(number % len(flying))
            breaker.after_call(leave, now, fault=fault)
            model.tell(answer, now, fault)
        elif what == "ask":
            answer = model.ask(now)
            if answer is None:
                error = refused(breaker, now)
                assert error.retry_after == error.open_until - now > 0
            else:
                leave = breaker.before_call(now)
                assert bool(leave.probe) == (answer[2] == "half_open")
                flying.append((leave, answer))
            assert breaker.state == model.word
        assert breaker.consecutive_failures == model.faults_in_a_row


# -- what a gate is told --------------------------------------------------------------------------


@pytest.mark.spec("PRV-31")
def test_a_gate_is_told_only_of_what_is_certain():
    assert breakers.held_until(Snapshot()) is None
    assert breakers.held_until(opened().snapshot) == 10.0
    assert breakers.held_until(half_open()[0].snapshot) is None, "a probe may be let through"
    assert breakers.held_until(breakers.force_open(Snapshot(), until=99.0)) == 99.0
    assert breakers.held_until(breakers.disable(opened().snapshot, until=99.0)) is None


# -- as the provider document writes it -----------------------------------------------------------


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
def test_what_a_breaker_cannot_be_is_refused():
    with pytest.raises(ConfigurationError, match="failure_threshold"):
        CircuitBreaker(failure_threshold=0)
    with pytest.raises(ValueError, match="before_call"):
        CircuitBreaker().after_call()
