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
from ergon_framework.providers.execution import ProviderExecutionContext
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.providers.synthetic import AsyncSyntheticProvider, Behaviour, SyntheticProvider, SyntheticUpstream
from tests.twins.world import Pulse

QUICK = RetryPolicy(max_attempts=3, base_delay_seconds=0.005, jitter_ratio=0.0)
DOWN = Behaviour(status=503)
#: Empty: to read the machine's certificates takes a client longer than everything else here, and nothing is encrypted.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Httpx(ProviderBase):
    provider_name, capability = "synthetic", "echo"

    def __init__(self, upstream, **given):
        super().__init__(**given)
        self._url = upstream.url

    def _execute_impl(self, *, operation, payload, context, **_):
        headers = {"Idempotency-Key": context.idempotency_key} if context.idempotency_key else {}
        answer = httpx.post(
            f"{self._url}/{operation}", json=payload, headers=headers, timeout=context.timeout, verify=NO_TLS
        )
        answer.raise_for_status()
        return answer.json()


class AsyncHttpx(AsyncProviderBase):
    provider_name, capability = "synthetic", "echo"

    def __init__(self, upstream, **given):
        super().__init__(**given)
        self._url = upstream.url

    async def _execute_impl(self, *, operation, payload, context, **_):
        async with httpx.AsyncClient(timeout=context.timeout, verify=NO_TLS) as client:
            answer = await client.post(f"{self._url}/{operation}", json=payload)
            answer.raise_for_status()
            return answer.json()


KINDS = {
    "http.client": SyntheticProvider,
    "streams": AsyncSyntheticProvider,
    "httpx": Httpx,
    "httpx asyncio": AsyncHttpx,
}


@pytest.fixture(params=KINDS)
def client(request):
    return KINDS[request.param]


def run(client, *script, then=None, timeout=5.0, **context):
    """One call: what came of it, how long it took, and how often the upstream was asked."""
    books = MemoryBooks()
    rules = ProviderPolicy(timeout=timeout, retry=QUICK)
    asked = {"tenant_id": "acme", "campaign_id": None, "operation": "charge", "payload": {"amount": 12}}
    asked["context"] = ProviderExecutionContext(**context)
    with SyntheticUpstream(*script, then=then) as upstream:
        provider = client(upstream, books=books, policy=rules)
        began = time.monotonic()
        try:
            result = provider.execute(**asked)
            if asyncio.iscoroutine(result):
                result = asyncio.run(result)
            took = time.monotonic() - began
        except ProviderError as error:
            result, took = error, error.result.duration_ms / 1000
        return result, took, upstream


@pytest.mark.spec("PRV-16", "PRV-17")
def test_a_call_survives_transient_failures(client):
    result, _, upstream = run(client, DOWN, Behaviour(reset=True), correlation_id="c1", idempotency_key="k1")
    assert result.value == {"operation": "charge", "received": {"amount": 12}}
    assert (result.attempts, upstream.calls) == (3, 3)
    assert upstream.requests[0].payload == {"amount": 12}


@pytest.mark.parametrize("kind", [SyntheticProvider, AsyncSyntheticProvider])
def test_tenant_correlation_and_key_reach_the_wire(kind):
    result, _, upstream = run(kind, correlation_id="c1", idempotency_key="k1")
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
def test_each_misbehaviour_has_its_reason(client, behaviour, reason, calls):
    error, _, upstream = run(client, then=behaviour)
    assert (error.reason_code, error.final, upstream.calls) == (reason, True, calls)


@pytest.mark.spec("PRV-24")
@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_waited_in_both_of_its_forms(client, as_date):
    wait = 1.2 if as_date else 0.1  # a date knows only whole seconds
    result, took, upstream = run(client, Behaviour(status=429, wait=wait, as_date=as_date))
    assert (result.attempts, upstream.calls) == (2, 2)
    assert took >= (0.1 if not as_date else 0.01)


@pytest.mark.spec("PRV-21")
@pytest.mark.parametrize("behaviour", [Behaviour(hang=True), Behaviour(slow=30.0), Behaviour(latency=30.0)])
def test_a_call_that_hangs_ends_within_the_budget(client, behaviour):
    with Pulse() as pulse:
        error, took, _ = run(client, then=behaviour, timeout=0.4)
    assert error.reason_code is ReasonCode.TIMEOUT
    assert took <= 0.4 + 3 * pulse.late, f"the machine itself was {pulse.late:.3f} s late"


@pytest.mark.spec("PRV-21")
def test_a_client_without_a_timeout_of_its_own_is_abandoned_and_leaves_when_the_line_ends():
    before = threading.active_count()
    with SyntheticUpstream(then=Behaviour(hang=True)) as upstream, Pulse() as pulse:
        provider = SyntheticProvider(upstream, books=MemoryBooks(), policy=ProviderPolicy(timeout=0.2), patient=True)
        began = time.monotonic()
        with pytest.raises(ProviderError) as caught:
            provider.call("charge", {})
        assert time.monotonic() - began <= 0.2 + 3 * pulse.late
        assert caught.value.reason_code is ReasonCode.TIMEOUT
    assert threading.active_count() <= before + 2, "the upstream's threads are gone, one of the caller's may idle"


@pytest.mark.parametrize("behaviour", [Behaviour(hang=True), Behaviour(slow=30.0), Behaviour(reset=True)])
def test_a_call_that_fails_has_closed_its_socket_while_somebody_still_holds_its_error(behaviour):
    before = open_sockets()
    with SyntheticUpstream(then=behaviour) as upstream:
        provider = SyntheticProvider(upstream, books=MemoryBooks())
        asked = {"tenant_id": "acme", "campaign_id": None, "operation": "charge", "payload": {}}
        with pytest.raises(OSError) as caught:
            provider._execute_impl(**asked, context=ProviderExecutionContext(timeout=0.1))
    assert open_sockets() == before
    assert caught.value.__traceback__ is not None


def open_sockets():
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that the listing needed is gone
            found += stat.S_ISSOCK(os.fstat(int(descriptor.name)).st_mode)
    return found


def test_an_upstream_that_is_not_there_was_sent_nothing(client):
    with SyntheticUpstream() as upstream:
        pass
    provider = client(upstream, books=MemoryBooks(), policy=ProviderPolicy(timeout=2.0, retry=QUICK))

    async def call():
        result = provider.call("charge", {})
        return await result if asyncio.iscoroutine(result) else result

    with pytest.raises(ProviderError) as caught:
        asyncio.run(call())
    assert (caught.value.reason_code, caught.value.sent) == (ReasonCode.CONNECTION_ERROR, False)


@pytest.mark.spec("PRV-22")
def test_two_hundred_equal_keys_in_tasks_make_one_call():
    async def main(upstream):
        provider = AsyncSyntheticProvider(upstream, books=MemoryBooks())
        return await asyncio.gather(*(provider.call("charge", {"amount": 1}, key="k") for _ in range(200)))

    with SyntheticUpstream(then=Behaviour(latency=0.05)) as upstream:
        results = asyncio.run(main(upstream))
        assert upstream.calls == 1
    assert results == [{"operation": "charge", "received": {"amount": 1}}] * 200


def test_half_a_request_whose_sender_has_died_is_no_call():
    with SyntheticUpstream(Behaviour(status=201)) as upstream:
        head = b"POST /charge HTTP/1.0\r\nIdempotency-Key: k\r\nContent-Length: 8\r\n\r\n"
        for cut in (b"", b'{"n"'):
            with socket.create_connection(upstream.address) as line:
                line.sendall(head + cut)
                line.shutdown(socket.SHUT_WR)
                assert line.recv(1) == b""
        assert (upstream.calls, upstream.requests, dict(upstream.keys)) == (0, [], {})
        with socket.create_connection(upstream.address) as line:
            line.sendall(head + b'{"n": 1}')
            assert line.recv(12) == b"HTTP/1.0 201"


def test_an_upstream_plays_its_script_and_then_the_rest():
    with SyntheticUpstream(Behaviour(body={"n": 1}), then=Behaviour(body={"n": 2})) as upstream:
        provider = SyntheticProvider(upstream, books=MemoryBooks())
        assert [provider.call("x")["n"] for _ in range(3)] == [1, 2, 2]
        assert [request.operation for request in upstream.requests] == ["x"] * 3
