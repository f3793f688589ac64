"""Provider state in memory: exact under threads, bounded, and usable after a fork."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.circuit_breaker import BreakerPolicy, BreakerState
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderError,
    ProviderQuotaExceededError,
)
from ergon_framework.providers.idempotency import StoredResult
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.process_state import process_state
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.state import (
    AdmissionRequest,
    AdmittedAttempt,
    AttemptResult,
    KeyInFlight,
    ProviderScope,
    ReplayedResult,
)

SCOPE = ProviderScope("acme", "payments", "charging")
NOW = 1_700_000_000.0


def make_request(*, key=None, number=1, now=NOW, owner="me", account=SCOPE, fingerprint="f", doubt=False, **fields):
    return AdmissionRequest(
        scope=account,
        policy=ProviderPolicy(**fields),
        tenant_id=account.tenant_id or "acme",
        idempotency_key=key,
        fingerprint=fingerprint,
        owner=owner,
        attempt_number=number,
        lease=10.0,
        now=now,
        outcome_unknown=doubt,
    )


def make_conclusion(*, error=None, value=None, last=True, doubt=False, now=NOW):
    return AttemptResult(
        now=now,
        is_last=last,
        outcome_unknown=doubt,
        error=error,
        stored_result=None if value is None else StoredResult(value),
    )


class CountingProvider(ProviderBase):
    provider_name, capability = "payments", "charging"

    def __init__(self, act=lambda: {"ok": True}, **options):
        super().__init__(**options)
        self.act, self.call_count, self.lock = act, 0, threading.Lock()

    def _execute_impl(self, **_):
        with self.lock:
            self.call_count += 1
        return self.act()


def run_concurrently(count, threads, act):
    """Call *act* *count* times from *threads* threads that start together, and return every result."""
    barrier = threading.Barrier(threads)

    def work(share):
        barrier.wait()
        return [act() for _ in range(share)]

    shares = [count // threads + (n < count % threads) for n in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads switch everywhere, not only where they wait
    try:
        with ThreadPoolExecutor(threads) as pool:
            return [one for results in pool.map(work, shares) for one in results]
    finally:
        sys.setswitchinterval(interval)


def call_or_error(call):
    try:
        return call()
    except ProviderError as error:
        return error


# -- concurrency ----------------------------------------------------------------------------------


@pytest.mark.spec("PRV-19")
@pytest.mark.parametrize("limit", [0, 1, 370])
def test_a_limit_admits_exactly_as_many_from_sixteen_threads(limit):
    provider = CountingProvider(
        state_store=MemoryProviderState(), policy=ProviderPolicy(quota=QuotaPolicy(month=limit))
    )
    results = run_concurrently(400, 16, lambda: call_or_error(partial(provider.call, "charge", {})))
    assert provider.call_count == limit
    assert sum(isinstance(one, ProviderQuotaExceededError) for one in results) == 400 - limit


@pytest.mark.spec("PRV-22")
def test_two_hundred_equal_keys_in_sixteen_threads_make_one_call():
    release = threading.Event()
    threading.Timer(0.05, release.set).start()

    def act():
        release.wait(5)
        return {"id": "ch_1"}

    provider = CountingProvider(act, state_store=MemoryProviderState())
    results = run_concurrently(200, 16, lambda: provider.call("charge", {"amount": 1}, key="k"))
    assert provider.call_count == 1
    assert results == [{"id": "ch_1"}] * 200


@pytest.mark.spec("PRV-20")
def test_faults_are_counted_across_objects_and_threads():
    def act():
        raise ProviderDependencyError("down")

    provider_state = MemoryProviderState()
    rules = ProviderPolicy(retry=RetryPolicy(max_attempts=1), breaker=BreakerPolicy(failure_threshold=5))
    providers = []

    def call():
        provider = CountingProvider(act, state_store=provider_state, policy=rules)  # a new one for each request
        providers.append(provider)
        return call_or_error(partial(provider.call, "charge", {}))

    run_concurrently(60, 4, call)
    assert 5 <= sum(provider.call_count for provider in providers) <= 5 + 3, "the threshold, and what was in flight"
    assert provider_state.get_breaker(SCOPE._replace(tenant_id="default")).state is BreakerState.OPEN


@pytest.mark.spec("PRV-20")
def test_providers_without_explicit_state_share_the_state_of_the_process():
    name = f"shared-{os.getpid()}"

    class One(CountingProvider):
        provider_name = name

    class Other(AsyncProviderBase):
        provider_name, capability = name, "charging"

        async def _execute_impl(self, **_):
            return {}

    class Unprepared(ProviderBase):
        provider_name, capability = name, "charging"

        def __init__(self):
            """A provider that does not call the initializer of its base."""

        def _execute_impl(self, **_):
            return {"fine": True}

    assert One().state_store is One().state_store is Other().state_store is Unprepared().state_store is process_state()
    assert Unprepared().call("x") == {"fine": True}


# -- the port -------------------------------------------------------------------------------------


def test_the_parts_of_an_admission_are_all_or_none():
    provider_state = MemoryProviderState()
    limits = {"quota": QuotaPolicy(minute=5, hour=0)}
    with pytest.raises(ProviderQuotaExceededError):
        provider_state.admit(make_request(key="k", **limits))
    assert provider_state.get_quota(SCOPE, WindowKind.MINUTE) is None
    assert provider_state.get_quota(SCOPE, WindowKind.HOUR).last_exhausted_at is not None
    assert isinstance(provider_state.admit(make_request(key="k", owner="you")), AdmittedAttempt), "the key was released"


def test_a_key_is_claimed_once_for_all_attempts():
    provider_state = MemoryProviderState()
    first = provider_state.admit(make_request(key="k"))
    assert provider_state.admit(make_request(key="k", owner="you")) == KeyInFlight(NOW + 10.0)
    provider_state.complete(first, make_conclusion(error=ProviderDependencyError("no"), last=False))
    second = provider_state.admit(make_request(key="k", number=2))
    assert isinstance(second, AdmittedAttempt)
    provider_state.complete(second, make_conclusion(value={"id": 1}))
    assert provider_state.admit(make_request(key="k", owner="you")) == ReplayedResult(StoredResult({"id": 1}))


def test_a_refund_goes_to_the_window_it_came_from():
    provider_state, limits = MemoryProviderState(), {"quota": QuotaPolicy(minute=5)}
    first = provider_state.admit(make_request(**limits))
    provider_state.admit(make_request(now=NOW + 60, **limits))
    provider_state.complete(first, make_conclusion(error=ProviderConnectionError("refused", sent=False)))
    assert provider_state.get_quota(SCOPE, WindowKind.MINUTE).used_count == 1, "that of a past window is dropped"


def test_a_changed_limit_counts_from_the_next_call():
    provider_state = MemoryProviderState()
    provider_state.admit(make_request(quota=QuotaPolicy(minute=1)))
    provider_state.admit(make_request(quota=QuotaPolicy(minute=2)))
    state = provider_state.get_quota(SCOPE, WindowKind.MINUTE)
    assert (state.limit_count, state.used_count) == (2, 2)


def test_the_state_that_a_breaker_enters_is_returned():
    provider_state, rules = (
        MemoryProviderState(),
        {"breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=5.0)},
    )
    fault = make_conclusion(error=ProviderDependencyError("down"))
    assert provider_state.complete(provider_state.admit(make_request(**rules)), fault) is BreakerState.OPEN
    probe = provider_state.admit(make_request(now=NOW + 5, **rules))
    assert provider_state.get_breaker(SCOPE).state is BreakerState.HALF_OPEN
    assert provider_state.complete(probe, make_conclusion(now=NOW + 5)) is None, (
        "the outcome is unknown: the probe's permit is free again"
    )
    probe = provider_state.admit(make_request(now=NOW + 5, **rules))
    assert provider_state.complete(probe, make_conclusion(value={}, now=NOW + 6)) is BreakerState.CLOSED


def test_a_value_that_is_not_json_is_kept_too():
    provider_state, value = MemoryProviderState(), {"when": {1, 2}}
    provider_state.complete(provider_state.admit(make_request(key="k")), make_conclusion(value=value))
    value["when"].add(3)
    assert provider_state.admit(make_request(key="k", owner="you")).stored_result.value == {"when": {1, 2}}


def test_tenants_and_providers_do_not_share_keys():
    provider_state = MemoryProviderState()
    provider_state.complete(provider_state.admit(make_request(key="k")), make_conclusion(value={}))
    for account in (SCOPE._replace(tenant_id="other"), SCOPE._replace(provider_name="other")):
        assert isinstance(provider_state.admit(make_request(key="k", account=account)), AdmittedAttempt)


# -- bounds ---------------------------------------------------------------------------------------


def test_the_oldest_results_are_evicted_but_no_call_in_flight():
    provider_state = MemoryProviderState(max_keys=3)
    in_flight = provider_state.admit(make_request(key="alive"))
    for number in range(10):
        provider_state.complete(provider_state.admit(make_request(key=f"k{number}")), make_conclusion(value={}))
    assert len(provider_state._keys) == 3
    assert isinstance(provider_state.admit(make_request(key="alive", owner="you")), KeyInFlight)
    assert isinstance(provider_state.admit(make_request(key="k9", owner="you")), ReplayedResult)
    assert isinstance(provider_state.admit(make_request(key="k0", owner="you")), AdmittedAttempt)
    provider_state.complete(in_flight, make_conclusion(error=ProviderBadRequestError("no")))


def test_open_breakers_and_current_windows_are_never_evicted():
    provider_state = MemoryProviderState(max_scopes=3)
    limits = {"quota": QuotaPolicy(minute=9), "breaker": BreakerPolicy(failure_threshold=2)}
    fault = make_conclusion(error=ProviderDependencyError("down"))
    for _ in range(2):
        provider_state.complete(provider_state.admit(make_request(**limits)), fault)
    for number in range(9):
        account = SCOPE._replace(tenant_id=f"t{number}")
        provider_state.complete(provider_state.admit(make_request(account=account, **limits)), fault)
    assert len(provider_state._breakers) == 3
    assert provider_state.get_breaker(SCOPE).state is BreakerState.OPEN
    assert len(provider_state._quotas) == 10
    provider_state.admit(make_request(account=SCOPE._replace(tenant_id="last"), now=NOW + 60, **limits))
    assert len(provider_state._quotas) == 1, "those that are over are"


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.spec("PRV-24")
def test_a_forked_child_can_call_despite_a_held_lock_and_has_its_own_random_source():
    provider_state = MemoryProviderState()
    rules = ProviderPolicy(retry=RetryPolicy(max_attempts=2, base_delay_seconds=0.01, jitter_ratio=1.0))

    def measure_delay():
        def act():
            raise ProviderDependencyError("down")

        error = call_or_error(
            partial(CountingProvider(act, state_store=provider_state, policy=rules).call, "charge", {})
        )
        return f"{error.attempts[0].delay:.9f}"

    delays = {measure_delay()}
    provider_state._lock.acquire()
    for _ in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os.write(writer, measure_delay().encode())
            os._exit(0)
        os.waitpid(child, 0)
        delays.add(os.read(reader, 100).decode())
        os.close(reader)
        os.close(writer)
    assert len(delays) == 3
    assert "" not in delays


@pytest.mark.spec("PRV-24")
def test_jitter_differs_between_processes():
    """In the earlier implementation every process waited for the same time, so all retried together."""
    code = (
        "from ergon_framework.engine.inline import InlineRunner\n"
        "from ergon_framework.providers.retry import RetryPolicy\n"
        "print(RetryPolicy().compute_delay(1, InlineRunner().clock.random))"
    )
    env = os.environ | {"PYTHONHASHSEED": "0"}
    delays = {subprocess.check_output([sys.executable, "-c", code], env=env) for _ in range(3)}
    assert len(delays) == 3


# -- providers ------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-01")
@pytest.mark.parametrize("base", [ProviderBase, AsyncProviderBase])
def test_a_provider_is_abstract_and_has_a_name_and_a_capability(base):
    with pytest.raises(TypeError, match="abstract"):
        base()

    class Nameless(base):
        capability = "x"

        def _execute_impl(self, **_): ...

    with pytest.raises(ConfigurationError, match="provider_name"):
        Nameless()


def test_a_quota_policy_lists_the_windows_that_have_a_limit():
    assert QuotaPolicy(day=3, minute=0).limits == ((WindowKind.MINUTE, 0), (WindowKind.DAY, 3))
    assert ProviderPolicy.load({"quota": {"hour": 7}}).quota.limits == ((WindowKind.HOUR, 7),)
    assert ProviderPolicy().quota.limits == ()


# -- references after a failure -------------------------------------------------------------------


class CountingAsyncProvider(AsyncProviderBase):
    provider_name, capability = "payments", "charging"

    def __init__(self, act, **options):
        super().__init__(**options)
        self.act = act

    async def _execute_impl(self, **_):
        await asyncio.sleep(0)
        return self.act()


class EagerCountingProvider(CountingAsyncProvider):
    def _execute_impl(self, **_):
        self.act()
        return asyncio.sleep(0, {})


@pytest.mark.parametrize("kind", [CountingProvider, CountingAsyncProvider, EagerCountingProvider])
@pytest.mark.parametrize("failures", [1, 3], ids=["retried", "given up"])
def test_nothing_of_a_failed_attempt_waits_for_the_garbage_collector(kind, failures):
    """The exceptions of clients hold sockets."""
    references, collected = [], threading.Semaphore(0)

    class Answer:
        pass

    class Broken(ConnectionResetError):
        def __init__(self):
            super().__init__("gone")
            self.response = Answer()
            references.append(weakref.ref(self.response, lambda _: collected.release()))

    def act():
        if len(references) == failures:
            return {}
        raise Broken

    provider = kind(
        act, state_store=MemoryProviderState(), policy=ProviderPolicy(retry=RetryPolicy(base_delay_seconds=0.0))
    )

    async def call():
        with suppress(ProviderError):
            result = provider.call("charge", {})
            if asyncio.iscoroutine(result):
                await result

    gc.collect()
    gc.disable()
    try:
        asyncio.run(call())
        # Polled because the thread that made the call may not have exited yet.
        assert all(collected.acquire(timeout=5) for _ in range(failures))
    finally:
        gc.enable()
