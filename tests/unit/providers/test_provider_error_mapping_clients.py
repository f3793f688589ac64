"""The mapping of exceptions that real clients raise against a misbehaving peer."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import pickle
import socket
import ssl
import urllib.error
import urllib.request

import pytest

from ergon_framework.providers.error_mapping import to_provider_error
from tests.unit.providers.peer import (
    close_connection,
    find_closed_port,
    reset_connection,
    respond,
    serve_peer,
    wait_for_disconnect,
)

#: Long enough for any response that comes, and short enough to wait for one that does not.
TIMEOUT_SECONDS, SHORT_TIMEOUT_SECONDS = 30.0, 0.1
#: Trusts no certificate: loading the machine's certificates takes longer than everything else here.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def get_with_httpx(name, url, timeout_seconds):
    httpx = importlib.import_module(name)
    rules = {"trust_env": False, "follow_redirects": True, "max_redirects": 3, "verify": NO_TLS}
    with httpx.Client(timeout=timeout_seconds, **rules) as client:
        return client.get(url).raise_for_status().json()


def get_with_requests(url, timeout_seconds):
    requests = importlib.import_module("requests")
    with requests.Session() as session:
        session.trust_env = False
        session.max_redirects = 3
        response = session.get(url, timeout=timeout_seconds)
        response.raise_for_status()
        return response.json()


def get_with_urllib3(url, timeout_seconds):
    urllib3 = importlib.import_module("urllib3")
    retries = urllib3.Retry(connect=0, read=0, redirect=3, status=0, other=0, status_forcelist=range(400, 600))
    with urllib3.PoolManager(retries=retries, timeout=timeout_seconds) as pool:
        return pool.request("GET", url).json()


def get_with_urllib(url, timeout_seconds):
    url = url.replace("me:s3cret@", "")  # the client takes this for a part of the port
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_seconds) as response:
            return json.loads(response.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        raise


def get_with_aiohttp(url, timeout_seconds):
    aiohttp = importlib.import_module("aiohttp")

    async def get():
        timeout = aiohttp.ClientTimeout(sock_read=timeout_seconds, sock_connect=timeout_seconds)
        async with (
            aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
            session.get(url, max_redirects=3) as response,
        ):
            return await response.json()

    return asyncio.run(get())


CLIENTS = {
    "httpx": functools.partial(get_with_httpx, "httpx"),
    "httpx2": functools.partial(get_with_httpx, "httpx2"),
    "requests": get_with_requests,
    "urllib3": get_with_urllib3,
    "urllib": get_with_urllib,
    "aiohttp": get_with_aiohttp,
}


@pytest.fixture(params=CLIENTS)
def client(request):
    return CLIENTS[request.param]


def call_and_map_error(client, port, *, scheme="http", host="127.0.0.1", timeout_seconds=TIMEOUT_SECONDS):
    """Return the canonical form of the exception of *client*; it never contains the address, pickled or not."""
    with pytest.raises(Exception) as caught:
        client(f"{scheme}://me:s3cret@{host}:{port}/path?sig=s3cret", timeout_seconds)
    error = to_provider_error(caught.value, now=0.0)
    assert error.__cause__ is caught.value
    assert "s3cret" not in str(error)
    data = pickle.dumps(error)
    assert b"s3cret" not in data
    arrived = pickle.loads(data)
    assert (arrived.reason_code, arrived.http_status, str(arrived)) == (
        error.reason_code,
        error.http_status,
        str(error),
    )
    assert arrived.__cause__ is not None
    return error


@pytest.mark.spec("PRV-03", "PRV-19", "PRV-25")
def test_a_refused_connection_was_not_sent(client):
    error = call_and_map_error(client, find_closed_port())
    assert (error.reason_code, error.sent) == ("connection_error", False)


@pytest.mark.spec("PRV-03", "PRV-19")
def test_an_unknown_host_name_was_not_sent(client, monkeypatch):
    def fail_lookup(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail_lookup)
    error = call_and_map_error(client, 80, host="nowhere.invalid")
    assert (error.reason_code, error.sent) == ("connection_error", False)


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("behaviour", [reset_connection, close_connection])
def test_a_connection_lost_before_the_response_was_sent(client, behaviour):
    with serve_peer(behaviour) as port:
        error = call_and_map_error(client, port)
    assert (error.reason_code, error.sent) == ("connection_error", True)


@pytest.mark.spec("PRV-03")
def test_a_connection_lost_within_the_response_was_sent(client):
    with serve_peer(respond("200 OK", "Content-Type: application/json", body=b'{"a"', length=100)) as port:
        error = call_and_map_error(client, port)
    assert (error.reason_code, error.sent) == ("connection_error", True)


@pytest.mark.spec("PRV-03", "PRV-19")
def test_a_missing_response_is_a_timeout(client):
    with serve_peer(wait_for_disconnect) as port:
        error = call_and_map_error(client, port, timeout_seconds=SHORT_TIMEOUT_SECONDS)
    assert (error.reason_code, error.sent, error.fault) == ("timeout", True, True)


@pytest.mark.spec("PRV-03")
def test_a_peer_without_tls_is_a_connection_error(client):
    with serve_peer(respond("400 Bad Request")) as port:
        error = call_and_map_error(client, port, scheme="https")
    assert error.reason_code == "connection_error"


@pytest.mark.spec("PRV-03", "PRV-24")
@pytest.mark.parametrize(
    "status, code",
    [
        (400, "bad_request"),
        (401, "auth_failed"),
        (403, "auth_failed"),
        (404, "bad_request"),
        (408, "timeout"),
        (409, "bad_request"),
        (422, "bad_request"),
        (425, "rate_limited"),
        (429, "rate_limited"),
        (500, "dependency_unavailable"),
        (503, "dependency_unavailable"),
    ],
)
def test_an_error_status_is_mapped(client, status, code):
    with serve_peer(respond(f"{status} No", "Retry-After: 7", "Content-Type: application/json")) as port:
        error = call_and_map_error(client, port)
    assert (error.reason_code, error.http_status, error.sent) == (code, status, True)
    # urllib3 drops the response before it raises, and the header with it.
    assert error.retry_after == (None if client is get_with_urllib3 else 7)


@pytest.mark.spec("PRV-03")
def test_endless_redirects_are_an_invalid_response(client):
    with serve_peer(respond("302 Found", "Location: /path")) as port:
        error = call_and_map_error(client, port)
    assert error.reason_code == "response_invalid"


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("body", [b"<html>", b"\xff\xfe\xfd", b""])
def test_an_unexpected_body_is_an_invalid_response(client, body):
    with serve_peer(respond("200 OK", "Content-Type: application/json", body=body)) as port:
        if client is get_with_aiohttp and not body:
            assert client(f"http://127.0.0.1:{port}/", TIMEOUT_SECONDS) is None, "it reads an empty body as null"
            return
        error = call_and_map_error(client, port)
    assert error.reason_code == "response_invalid"


@pytest.mark.spec("PRV-03")
def test_a_wrong_content_encoding_is_an_invalid_response(client):
    headers = ("Content-Type: application/json", "Content-Encoding: gzip")
    with serve_peer(respond("200 OK", *headers, body=b"\xffnot gzip")) as port:
        error = call_and_map_error(client, port)
    assert error.reason_code == "response_invalid"


@pytest.mark.parametrize("name", ["httpx", "httpx2"])
def test_an_exhausted_client_pool_is_not_a_provider_fault(name):
    httpx = importlib.import_module(name)

    async def call_twice():
        limits = httpx.Limits(max_connections=1)
        timeout = httpx.Timeout(TIMEOUT_SECONDS, pool=SHORT_TIMEOUT_SECONDS)
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=timeout) as http:
            calls = [asyncio.create_task(http.get(url)) for _ in range(2)]
            done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            pending.pop().cancel()
            return done.pop().exception()

    with serve_peer(wait_for_disconnect) as port:
        url = f"http://127.0.0.1:{port}/"
        error = to_provider_error(asyncio.run(call_twice()), now=0.0)
    assert (error.reason_code, error.sent, error.fault) == ("timeout", False, False)


def test_an_invalid_request_was_never_sent():
    requests = importlib.import_module("requests")
    for url in ("no-scheme", "odd://host", "http://"):
        with pytest.raises(requests.RequestException) as caught:
            requests.get(url, timeout=TIMEOUT_SECONDS)
        error = to_provider_error(caught.value, now=0.0)
        assert (error.reason_code, error.sent) == ("internal_error", False)


# -- a database as a provider ---------------------------------------------------------------------


@pytest.fixture
def database():
    alchemy = importlib.import_module("sqlalchemy")
    engine = alchemy.create_engine(
        "sqlite://", poolclass=alchemy.pool.QueuePool, pool_size=1, max_overflow=0, pool_timeout=0.01
    )
    with engine.begin() as connection:
        connection.execute(alchemy.text("create table t (id integer primary key, n integer not null)"))
    yield alchemy, engine
    engine.dispose()


@pytest.mark.parametrize(
    "statement, code",
    [
        ("insert into t values (1, null) -- s3cret", "bad_request"),
        ("select s3cret from nowhere", "dependency_unavailable"),
    ],
)
def test_a_rejected_statement_is_mapped(database, statement, code):
    alchemy, engine = database
    with engine.begin() as connection, pytest.raises(alchemy.exc.DBAPIError) as caught:
        connection.execute(alchemy.text(statement))
    error = to_provider_error(caught.value, now=0.0)
    assert error.reason_code == code
    assert b"s3cret" not in pickle.dumps(error)


def test_an_exhausted_database_pool_is_not_a_provider_fault(database):
    alchemy, engine = database
    with engine.connect(), pytest.raises(alchemy.exc.TimeoutError) as caught:
        engine.connect()
    error = to_provider_error(caught.value, now=0.0)
    assert (error.reason_code, error.sent, error.fault) == ("timeout", False, False)
