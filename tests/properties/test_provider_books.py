"""Books in PostgreSQL against books in memory: whatever happens, in any order and at any time, both answer the same."""

from __future__ import annotations

import asyncio
import itertools

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.books import Account, Admitted, Asked, Busy, Concluded, Replayed
from ergon_framework.providers.circuit_breaker import BreakerPolicy, BreakerState
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderError,
    ProviderInternalError,
)
from ergon_framework.providers.idempotency import InFlight, Kept, Unknown
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.sql import operator
from tests.servers.steered import SteeredBooks, names, steered_database

#: A Monday at noon; a window of each kind begins here or nearly.
NOON = 1_699_876_800.0
_numbers = itertools.count(1)

ENDS = {
    "success": lambda: (None, Kept({"n": 1, "deep": [1.5, {"ü": None}]}, 201)),
    "fault": lambda: (ProviderDependencyError("down"), None),
    "fault not sent": lambda: (ProviderConnectionError("refused", sent=False), None),
    "refused": lambda: (ProviderBadRequestError("no"), None),
    "ours": lambda: (ProviderInternalError("oops"), None),
    "nobody knows": lambda: (None, None),
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
    st.booleans(),  # in doubt
)
conclusions = st.tuples(
    st.just("conclude"), st.integers(0, 5), st.sampled_from(sorted(ENDS)), st.booleans(), st.booleans()
)
passing = st.tuples(st.just("wait"), st.sampled_from([0.25, 4.0, 6.0, 10.0, 31.0, 61.0, 3600.0, 90_000.0]))
said = st.tuples(
    st.just("say"), st.sampled_from(["force_open", "disable", "lift"]), st.sampled_from([5.0, 15.0, 100.0])
)
steps = st.lists(st.one_of(admissions, admissions, conclusions, conclusions, passing, said), min_size=3, max_size=25)


@pytest.fixture(scope="module")
def stage(postgres):
    dsn = steered_database(postgres)
    books = SteeredBooks(dsn)
    with asyncio.Runner() as runner:
        yield dsn, books, runner
        runner.run(books.close_async())
    books.close()


class Both:
    """One account, kept twice."""

    def __init__(self, stage, rules, scope):
        self.dsn, self.shared, self.runner = stage
        self.memory = MemoryBooks()
        tenant = f"tenant-{next(_numbers)}"
        self.tenant = tenant
        self.account = Account(tenant if scope == "tenant" else None, f"p-{tenant}", "charging")
        self.rules = rules
        self.now = NOON
        self.admitted = []
        self.turn = itertools.cycle([True, False])

    def admit(self, other, key, fingerprint, owner, *more):
        number, doubt = more
        asked = Asked(
            account=self.account,
            policy=self.rules[other],
            tenant_id=self.tenant,
            idempotency_key=key,
            fingerprint=fingerprint,
            owner=owner if key else "",
            attempt_number=number,
            lease=8.0,
            now=self.now,
            doubt=doubt,
        )
        expected, found = told(lambda: self.memory.admit(asked)), told(lambda: self._admit(asked))
        assert said_of(found) == said_of(expected)
        if isinstance(expected, Admitted):
            self.admitted.append((expected, found, False))

    def _admit(self, asked):
        if next(self.turn):
            return self.shared.admit(asked)
        return self.runner.run(self.shared.admit_async(asked))

    def conclude(self, which, end, last, doubt):
        if not self.admitted:
            return
        attempt = self.admitted.pop(which % len(self.admitted))
        expected, found, already = attempt
        # An attempt ends once. If no other follows where one was promised, that is said of it afterwards.
        error, kept = (None, None) if already else ENDS[end]()
        last = last or already or kept is not None
        if not last:
            self.admitted.append((expected, found, True))
        concluded = Concluded(now=self.now, last=last, doubt=doubt, error=error, kept=kept)
        entered = self.memory.conclude(expected, concluded)
        if next(self.turn):
            answer = self.shared.conclude(found, concluded)
        else:
            answer = self.runner.run(self.shared.conclude_async(found, concluded))
        # That a cooldown is over is found out by whoever comes next, which need not be one with nothing to say.
        assert answer == entered or (answer is None and entered is BreakerState.HALF_OPEN)

    def wait(self, seconds):
        self.now += seconds
        self.shared.set_clock(self.now)

    def say(self, action, seconds):
        self.shared.set_clock(self.now)
        before = breakers.advance(self.memory.breaker(self.account), self.now)
        about = {"actor": "ops", "reason": "a test"}
        if action == "lift":
            after = breakers.lift(before)
            operator.lift(self.dsn, self.account, **about)
        else:
            after = getattr(breakers, action)(before, until=self.now + seconds)
            getattr(operator, action)(self.dsn, self.account, seconds=seconds, **about)
        self.memory._put_breaker(self.account, after)

    def compare(self):
        """What is stored, once time has done its part."""
        self.shared.set_clock(self.now)
        expected = breakers.advance(self.memory.breaker(self.account), self.now)
        assert breakers.advance(self.shared.breaker(self.account), self.now) == expected
        for (_, kind), state in self.memory._quotas.items():
            if self.now < state.window.end.timestamp():
                row = self.shared.quota(self.account, kind)
                assert (0 if row is None else row.used_count) == state.used_count
        entries = {key: shown(entry) for (_, _, key), entry in self.memory._keys.items()}
        rows = self.shared.line.execute(
            "select key, fingerprint, state, case when state = 'in_flight' then owner end,"
            " extract(epoch from until)::float8, doubt and state = 'in_flight', value, http_status"
            " from ergon.provider_keys where tenant_id = %s",
            [self.tenant],
        ).fetchall()
        assert {row[0]: row[1:] for row in rows} == entries


def told(call):
    try:
        return call()
    except ProviderError as error:
        return error


def said_of(answer):
    """All that a caller can see of an answer."""
    match answer:
        case Admitted():
            return "admitted", answer.leave.generation, answer.leave.probe
        case Replayed():
            return "replayed", answer.kept
        case Busy():
            return "busy", answer.until
        case ProviderError():
            seen = (str(answer), answer.code, answer.sent, answer.later, answer.final, answer.retry_after)
            return type(answer), *seen, getattr(answer, "open_until", None)
    raise AssertionError(answer)


def shown(entry):
    if isinstance(entry, InFlight):
        return entry.fingerprint, "in_flight", entry.owner, entry.until, entry.doubt, None, None
    if isinstance(entry, Unknown):
        return entry.fingerprint, "unknown", None, entry.until, False, None, None
    return entry.fingerprint, "done", None, entry.until, False, entry.kept.value, entry.kept.http_status


@pytest.mark.spec("PRV-05", "PRV-06", "PRV-09", "PRV-19", "PRV-20", "PRV-22", "PRV-32")
@settings(
    max_examples=settings().max_examples * 2 // 5,  # each is many visits to a real server
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rules=st.tuples(policies, policies), scope=st.sampled_from(["tenant", "provider"]), happens=steps)
def test_whatever_happens_both_books_answer_the_same(stage, rules, scope, happens):
    both = Both(stage, rules, scope)
    for name, *arguments in happens:
        getattr(both, name)(*arguments)
        both.compare()


@pytest.mark.spec("PRV-19")
def test_used_and_remaining_make_up_the_limit_whatever_was_written(stage):
    _, books, _ = stage
    with pytest.raises(psycopg.errors.CheckViolation):
        books.line.execute(
            "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end,"
            " limit_count, used_count, remaining_count) values ('t', 'p', 'c', now(), now(), 10, 1, 10)"
        )
    assert names(Account(None, "p", "c")) == ["*", "p", "c"]
