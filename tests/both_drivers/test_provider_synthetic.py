"""The whole path in real time: a real server that misbehaves by a script, called through real clients."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.errors import ProviderError, ReasonCode
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.models import ProviderExecutionContext
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.testing.fake_provider import AsyncFakeProvider, Behaviour, FakeProvider, FakeProviderServer
from tests.both_drivers.harness import WakeupDelayMeter

QUICK = RetryPolicy(max_attempts=3, base_delay_seconds=0.005, jitter_ratio=0.0)
DOWN = Behaviour(status=503)
#: Empty: loading the machine's certificates takes longer than the rest of the test, and nothing is encrypted.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class HttpxProvider(ProviderBase):
    provider_name, capability = "synthetic", "echo"

    def __init__(self, upstream, **options):
        super().__init__(**options)
        self._url = upstream.url

    def _execute_impl(self, *, operation, payload, context, **_):
        headers = {"Idempotency-Key": context.idempotency_key} if context.idempotency_key else {}
        response = httpx.post(
            f"{self._url}/{operation}", json=payload, headers=headers, timeout=context.timeout, verify=NO_TLS
        )
        response.raise_for_status()
        return response.json()


class AsyncHttpxProvider(AsyncProviderBase):
    provider_name, capability = "synthetic", "echo"

    def __init__(self, upstream, **options):
        super().__init__(**options)
        self._url = upstream.url

    async def _execute_impl(self, *, operation, payload, context, **_):
        async with httpx.AsyncClient(timeout=context.timeout, verify=NO_TLS) as client:
            response = await client.post(f"{self._url}/{operation}", json=payload)
            response.raise_for_status()
            return response.json()


CLIENTS = {
    "http.client": FakeProvider,
    "streams": AsyncFakeProvider,
    "httpx": HttpxProvider,
    "httpx asyncio": AsyncHttpxProvider,
}


@pytest.fixture(params=CLIENTS)
def client(request):
    return CLIENTS[request.param]


def call_provider(client, *script, then=None, timeout=5.0, **context):
    """Make one call; return its result, its duration and the upstream."""
    state_store = MemoryProviderState()
    policy = ProviderPolicy(timeout=timeout, retry=QUICK)
    arguments = {"tenant_id": "acme", "campaign_id": None, "operation": "charge", "payload": {"amount": 12}}
    arguments["context"] = ProviderExecutionContext(**context)
    with FakeProviderServer(*script, then=then) as upstream:
        provider = client(upstream, state_store=state_store, policy=policy)
        started_at = time.monotonic()
        try:
            result = provider.execute(**arguments)
            if asyncio.iscoroutine(result):
                result = asyncio.run(result)
            duration_seconds = time.monotonic() - started_at
        except ProviderError as error:
            result, duration_seconds = error, error.result.duration_ms / 1000
        return result, duration_seconds, upstream


@pytest.mark.spec("PRV-16", "PRV-17")
def test_a_call_retries_transient_failures(client):
    result, _, upstream = call_provider(client, DOWN, Behaviour(reset=True), correlation_id="c1", idempotency_key="k1")
    assert result.value == {"operation": "charge", "received": {"amount": 12}}
    assert (result.attempts, upstream.calls) == (3, 3)
    assert upstream.requests[0].payload == {"amount": 12}


@pytest.mark.parametrize("kind", [FakeProvider, AsyncFakeProvider])
def test_tenant_correlation_and_key_reach_the_wire(kind):
    result, _, upstream = call_provider(kind, correlation_id="c1", idempotency_key="k1")
    assert (result.http_status, dict(upstream.keys)) == (200, {"k1": 1})
    (request,) = upstream.requests
    assert (request.tenant_id, request.correlation_id, request.operation) == ("acme", "c1", "charge")


@pytest.mark.spec("PRV-03", "PRV-16")
@pytest.mark.parametrize(
    "behaviour, reason, calls",
    [
        (DOWN, ReasonCode.DEPENDENCY_UNAVAILABLE, 3),
        (Behaviour(status=404), ReasonCode.BAD_REQUEST, 1),
        (Behaviour(status=401), ReasonCode.AUTH_FAILED, 1),
        (Behaviour(status=429), ReasonCode.RATE_LIMITED, 3),
        (Behaviour(status=302), ReasonCode.RESPONSE_INVALID, 1),
        (Behaviour(garbage=True), ReasonCode.RESPONSE_INVALID, 1),
        (Behaviour(reset=True), ReasonCode.CONNECTION_ERROR, 3),
    ],
)
def test_each_fault_has_its_reason_code(client, behaviour, reason, calls):
    error, _, upstream = call_provider(client, then=behaviour)
    assert (error.reason_code, error.final, upstream.calls) == (reason, True, calls)


@pytest.mark.spec("PRV-24")
@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_accepts_seconds_and_http_date(client, as_date):
    wait = 1.2 if as_date else 0.1  # a date knows only whole seconds
    result, duration_seconds, upstream = call_provider(client, Behaviour(status=429, wait=wait, as_date=as_date))
    assert (result.attempts, upstream.calls) == (2, 2)
    assert duration_seconds >= (0.1 if not as_date else 0.01)


@pytest.mark.spec("PRV-21")
@pytest.mark.parametrize("behaviour", [Behaviour(hang=True), Behaviour(slow=30.0), Behaviour(latency=30.0)])
def test_a_call_that_hangs_ends_within_the_budget(client, behaviour):
    with WakeupDelayMeter() as wakeup_delay:
        error, duration_seconds, _ = call_provider(client, then=behaviour, timeout=0.4)
    assert error.reason_code is ReasonCode.TIMEOUT
    assert duration_seconds <= 0.4 + 3 * wakeup_delay.late, f"the machine itself was {wakeup_delay.late:.3f} s late"


@pytest.mark.spec("PRV-21")
def test_a_client_without_its_own_timeout_is_abandoned_and_exits_when_the_connection_ends():
    before = threading.active_count()
    with FakeProviderServer(then=Behaviour(hang=True)) as upstream, WakeupDelayMeter() as wakeup_delay:
        provider = FakeProvider(
            upstream, state_store=MemoryProviderState(), policy=ProviderPolicy(timeout=0.2), without_timeout=True
        )
        started_at = time.monotonic()
        with pytest.raises(ProviderError) as caught:
            provider.call("charge", {})
        assert time.monotonic() - started_at <= 0.2 + 3 * wakeup_delay.late
        assert caught.value.reason_code is ReasonCode.TIMEOUT
    assert threading.active_count() <= before + 2, "the upstream's threads are gone, one of the caller's may idle"


@pytest.mark.parametrize("behaviour", [Behaviour(hang=True), Behaviour(slow=30.0), Behaviour(reset=True)])
def test_a_failed_call_closes_its_socket_while_its_error_is_still_referenced(behaviour):
    before = count_open_sockets()
    with FakeProviderServer(then=behaviour) as upstream:
        provider = FakeProvider(upstream, state_store=MemoryProviderState())
        arguments = {"tenant_id": "acme", "campaign_id": None, "operation": "charge", "payload": {}}
        with pytest.raises(OSError) as caught:
            provider._execute_impl(**arguments, context=ProviderExecutionContext(timeout=0.1))
    assert count_open_sockets() == before
    assert caught.value.__traceback__ is not None


def count_open_sockets():
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is closed
            count += stat.S_ISSOCK(os.fstat(int(descriptor.name)).st_mode)
    return count


def test_a_call_to_an_unreachable_upstream_counts_as_not_sent(client):
    with FakeProviderServer() as upstream:
        pass
    provider = client(upstream, state_store=MemoryProviderState(), policy=ProviderPolicy(timeout=2.0, retry=QUICK))

    async def call():
        result = provider.call("charge", {})
        return await result if asyncio.iscoroutine(result) else result

    with pytest.raises(ProviderError) as caught:
        asyncio.run(call())
    assert (caught.value.reason_code, caught.value.sent) == (ReasonCode.CONNECTION_ERROR, False)


@pytest.mark.spec("PRV-22")
def test_two_hundred_calls_with_the_same_key_make_one_request():
    async def main(upstream):
        provider = AsyncFakeProvider(upstream, state_store=MemoryProviderState())
        return await asyncio.gather(*(provider.call("charge", {"amount": 1}, key="k") for _ in range(200)))

    with FakeProviderServer(then=Behaviour(latency=0.05)) as upstream:
        results = asyncio.run(main(upstream))
        assert upstream.calls == 1
    assert results == [{"operation": "charge", "received": {"amount": 1}}] * 200


def test_a_request_cut_off_by_its_sender_does_not_count_as_a_call():
    with FakeProviderServer(Behaviour(status=201)) as upstream:
        head = b"POST /charge HTTP/1.0\r\nIdempotency-Key: k\r\nContent-Length: 8\r\n\r\n"
        for cut in (b"", b'{"n"'):
            with socket.create_connection(upstream.address) as connection:
                connection.sendall(head + cut)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""
        assert (upstream.calls, upstream.requests, dict(upstream.keys)) == (0, [], {})
        with socket.create_connection(upstream.address) as connection:
            connection.sendall(head + b'{"n": 1}')
            assert connection.recv(12) == b"HTTP/1.0 201"


def test_an_upstream_follows_its_script_and_then_the_default():
    with FakeProviderServer(Behaviour(body={"n": 1}), then=Behaviour(body={"n": 2})) as upstream:
        provider = FakeProvider(upstream, state_store=MemoryProviderState())
        assert [provider.call("x")["n"] for _ in range(3)] == [1, 2, 2]
        assert [request.operation for request in upstream.requests] == ["x"] * 3
