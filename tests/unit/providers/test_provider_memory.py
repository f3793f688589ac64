"""Books in memory: exact under threads, bounded, and usable after a fork."""

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
from ergon_framework.providers.books import Account, Admitted, Asked, Busy, Concluded, Replayed
from ergon_framework.providers.circuit_breaker import BreakerPolicy, BreakerState
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderDependencyError,
    ProviderError,
    ProviderQuotaExceededError,
)
from ergon_framework.providers.idempotency import Kept
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.process_state import process_books
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy

ACCOUNT = Account("acme", "payments", "charging")
NOW = 1_700_000_000.0


def asked(*, key=None, number=1, now=NOW, owner="me", account=ACCOUNT, fingerprint="f", doubt=False, **fields):
    return Asked(
        account=account,
        policy=ProviderPolicy(**fields),
        tenant_id=account.tenant_id or "acme",
        idempotency_key=key,
        fingerprint=fingerprint,
        owner=owner,
        attempt_number=number,
        lease=10.0,
        now=now,
        doubt=doubt,
    )


def ended(*, error=None, value=None, last=True, doubt=False, now=NOW):
    return Concluded(now=now, last=last, doubt=doubt, error=error, kept=None if value is None else Kept(value))


class Counting(ProviderBase):
    provider_name, capability = "payments", "charging"

    def __init__(self, act=lambda: {"ok": True}, **given):
        super().__init__(**given)
        self.act, self.made, self.lock = act, 0, threading.Lock()

    def _execute_impl(self, **_):
        with self.lock:
            self.made += 1
        return self.act()


def at_once(count, threads, act):
    """*act* called *count* times from *threads* threads that begin together; what came of each."""
    begin = threading.Barrier(threads)

    def work(share):
        begin.wait()
        return [act() for _ in range(share)]

    shares = [count // threads + (n < count % threads) for n in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns everywhere, and not only where they wait
    try:
        with ThreadPoolExecutor(threads) as pool:
            return [one for found in pool.map(work, shares) for one in found]
    finally:
        sys.setswitchinterval(interval)


def came(call):
    try:
        return call()
    except ProviderError as error:
        return error


# -- together -------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-19")
@pytest.mark.parametrize("limit", [0, 1, 370])
def test_a_limit_admits_exactly_as_many_from_sixteen_threads(limit):
    provider = Counting(books=MemoryBooks(), policy=ProviderPolicy(quota=QuotaPolicy(month=limit)))
    results = at_once(400, 16, lambda: came(partial(provider.call, "charge", {})))
    assert provider.made == limit
    assert sum(isinstance(one, ProviderQuotaExceededError) for one in results) == 400 - limit


@pytest.mark.spec("PRV-22")
def test_two_hundred_equal_keys_in_sixteen_threads_make_one_call():
    hold = threading.Event()
    threading.Timer(0.05, hold.set).start()

    def act():
        hold.wait(5)
        return {"id": "ch_1"}

    provider = Counting(act, books=MemoryBooks())
    results = at_once(200, 16, lambda: provider.call("charge", {"amount": 1}, key="k"))
    assert provider.made == 1
    assert results == [{"id": "ch_1"}] * 200


@pytest.mark.spec("PRV-20")
def test_faults_are_counted_across_objects_and_threads():
    def act():
        raise ProviderDependencyError("down")

    books = MemoryBooks()
    rules = ProviderPolicy(retry=RetryPolicy(max_attempts=1), breaker=BreakerPolicy(failure_threshold=5))
    made = []

    def call():
        provider = Counting(act, books=books, policy=rules)  # a new one for each request
        made.append(provider)
        return came(partial(provider.call, "charge", {}))

    at_once(60, 4, call)
    assert 5 <= sum(provider.made for provider in made) <= 5 + 3, "the threshold, and what was in flight"
    assert books.breaker(ACCOUNT._replace(tenant_id="default")).state is BreakerState.OPEN


@pytest.mark.spec("PRV-20")
def test_providers_that_were_given_no_books_share_the_processes_own():
    name = f"shared-{os.getpid()}"

    class One(Counting):
        provider_name = name

    class Other(AsyncProviderBase):
        provider_name, capability = name, "charging"

        async def _execute_impl(self, **_):
            return {}

    class Unprepared(ProviderBase):
        provider_name, capability = name, "charging"

        def __init__(self):
            """Forgets its base."""

        def _execute_impl(self, **_):
            return {"fine": True}

    assert One().books is One().books is Other().books is Unprepared().books is process_books()
    assert Unprepared().call("x") == {"fine": True}


# -- the port -------------------------------------------------------------------------------------


def test_the_parts_of_an_admission_are_all_or_none():
    books = MemoryBooks()
    limits = {"quota": QuotaPolicy(minute=5, hour=0)}
    with pytest.raises(ProviderQuotaExceededError):
        books.admit(asked(key="k", **limits))
    assert books.quota(ACCOUNT, WindowKind.MINUTE) is None
    assert books.quota(ACCOUNT, WindowKind.HOUR).last_exhausted_at is not None
    assert isinstance(books.admit(asked(key="k", owner="you")), Admitted), "the key was given back"


def test_a_key_is_claimed_once_for_all_attempts():
    books = MemoryBooks()
    first = books.admit(asked(key="k"))
    assert books.admit(asked(key="k", owner="you")) == Busy(NOW + 10.0)
    books.conclude(first, ended(error=ProviderDependencyError("no"), last=False))
    second = books.admit(asked(key="k", number=2))
    assert isinstance(second, Admitted)
    books.conclude(second, ended(value={"id": 1}))
    assert books.admit(asked(key="k", owner="you")) == Replayed(Kept({"id": 1}))


def test_a_refund_goes_to_the_window_it_came_from():
    books, limits = MemoryBooks(), {"quota": QuotaPolicy(minute=5)}
    first = books.admit(asked(**limits))
    books.admit(asked(now=NOW + 60, **limits))
    books.conclude(first, ended(error=ProviderConnectionError("refused", sent=False)))
    assert books.quota(ACCOUNT, WindowKind.MINUTE).used_count == 1, "that of a past window is dropped"


def test_a_changed_limit_counts_from_the_next_call():
    books = MemoryBooks()
    books.admit(asked(quota=QuotaPolicy(minute=1)))
    books.admit(asked(quota=QuotaPolicy(minute=2)))
    state = books.quota(ACCOUNT, WindowKind.MINUTE)
    assert (state.limit_count, state.used_count) == (2, 2)


def test_the_state_that_a_breaker_has_entered_is_told():
    books, rules = MemoryBooks(), {"breaker": BreakerPolicy(failure_threshold=1, open_cooldown_seconds=5.0)}
    fault = ended(error=ProviderDependencyError("down"))
    assert books.conclude(books.admit(asked(**rules)), fault) is BreakerState.OPEN
    probe = books.admit(asked(now=NOW + 5, **rules))
    assert books.breaker(ACCOUNT).state is BreakerState.HALF_OPEN
    assert books.conclude(probe, ended(now=NOW + 5)) is None, "nobody knows: the probe's place is free again"
    probe = books.admit(asked(now=NOW + 5, **rules))
    assert books.conclude(probe, ended(value={}, now=NOW + 6)) is BreakerState.CLOSED


def test_a_value_that_is_no_json_is_kept_all_the_same():
    books, odd = MemoryBooks(), {"when": {1, 2}}
    books.conclude(books.admit(asked(key="k")), ended(value=odd))
    odd["when"].add(3)
    assert books.admit(asked(key="k", owner="you")).kept.value == {"when": {1, 2}}


def test_tenants_and_providers_do_not_share_keys():
    books = MemoryBooks()
    books.conclude(books.admit(asked(key="k")), ended(value={}))
    for account in (ACCOUNT._replace(tenant_id="other"), ACCOUNT._replace(provider_name="other")):
        assert isinstance(books.admit(asked(key="k", account=account)), Admitted)


# -- bounds ---------------------------------------------------------------------------------------


def test_the_oldest_results_are_given_up_but_nobody_in_flight():
    books = MemoryBooks(keys=3)
    in_flight = books.admit(asked(key="alive"))
    for number in range(10):
        books.conclude(books.admit(asked(key=f"k{number}")), ended(value={}))
    assert len(books._keys) == 3
    assert isinstance(books.admit(asked(key="alive", owner="you")), Busy)
    assert isinstance(books.admit(asked(key="k9", owner="you")), Replayed)
    assert isinstance(books.admit(asked(key="k0", owner="you")), Admitted)
    books.conclude(in_flight, ended(error=ProviderBadRequestError("no")))


def test_breakers_that_are_not_closed_and_windows_that_last_are_never_given_up():
    books = MemoryBooks(accounts=3)
    limits = {"quota": QuotaPolicy(minute=9), "breaker": BreakerPolicy(failure_threshold=2)}
    fault = ended(error=ProviderDependencyError("down"))
    for _ in range(2):
        books.conclude(books.admit(asked(**limits)), fault)
    for number in range(9):
        account = ACCOUNT._replace(tenant_id=f"t{number}")
        books.conclude(books.admit(asked(account=account, **limits)), fault)
    assert len(books._breakers) == 3
    assert books.breaker(ACCOUNT).state is BreakerState.OPEN
    assert len(books._quotas) == 10
    books.admit(asked(account=ACCOUNT._replace(tenant_id="last"), now=NOW + 60, **limits))
    assert len(books._quotas) == 1, "those that are over are"


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.spec("PRV-24")
def test_a_forked_child_can_call_though_somebody_held_the_lock_and_rolls_its_own_dice():
    books = MemoryBooks()
    rules = ProviderPolicy(retry=RetryPolicy(max_attempts=2, base_delay_seconds=0.01, jitter_ratio=1.0))

    def waits():
        def act():
            raise ProviderDependencyError("down")

        error = came(partial(Counting(act, books=books, policy=rules).call, "charge", {}))
        return f"{error.attempts[0].delay:.9f}"

    told = {waits()}
    books._lock.acquire()
    for _ in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os.write(writer, waits().encode())
            os._exit(0)
        os.waitpid(child, 0)
        told.add(os.read(reader, 100).decode())
        os.close(reader)
        os.close(writer)
    assert len(told) == 3
    assert "" not in told


@pytest.mark.spec("PRV-24")
def test_jitter_differs_between_processes():
    """In the earlier implementation every process waited alike, so that all came back at once."""
    code = (
        "from ergon_framework.engine.drivers.caller import Caller\n"
        "from ergon_framework.providers.retry import RetryPolicy\n"
        "print(RetryPolicy().delay(1, Caller().senses.dice))"
    )
    env = os.environ | {"PYTHONHASHSEED": "0"}
    told = {subprocess.check_output([sys.executable, "-c", code], env=env) for _ in range(3)}
    assert len(told) == 3


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


# -- what is left behind --------------------------------------------------------------------------


class CountingAsync(AsyncProviderBase):
    provider_name, capability = "payments", "charging"

    def __init__(self, act, **given):
        super().__init__(**given)
        self.act = act

    async def _execute_impl(self, **_):
        await asyncio.sleep(0)
        return self.act()


class CountingBeforeItIsAwaited(CountingAsync):
    def _execute_impl(self, **_):
        self.act()
        return asyncio.sleep(0, {})


@pytest.mark.parametrize("kind", [Counting, CountingAsync, CountingBeforeItIsAwaited])
@pytest.mark.parametrize("failures", [1, 3], ids=["retried", "given up"])
def test_nothing_of_a_failed_attempt_waits_for_the_garbage_collector(kind, failures):
    """The exceptions of clients hold sockets."""
    seen, gone = [], threading.Semaphore(0)

    class Answer:
        pass

    class Broken(ConnectionResetError):
        def __init__(self):
            super().__init__("gone")
            self.response = Answer()
            seen.append(weakref.ref(self.response, lambda _: gone.release()))

    def act():
        if len(seen) == failures:
            return {}
        raise Broken

    provider = kind(act, books=MemoryBooks(), policy=ProviderPolicy(retry=RetryPolicy(base_delay_seconds=0.0)))

    async def call():
        with suppress(ProviderError):
            result = provider.call("charge", {})
            if asyncio.iscoroutine(result):
                await result

    gc.collect()
    gc.disable()
    try:
        asyncio.run(call())
        # Waited for, because the thread that made the call may still be on its way out of it.
        assert all(gone.acquire(timeout=5) for _ in range(failures))
    finally:
        gc.enable()
