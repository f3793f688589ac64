"""The mapping over what real clients raise at a peer that behaves badly."""

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

from ergon_framework.providers.mapping import canonical
from tests.unit.providers.peer import answers, closed_port, leaves, peer, resets, waits

#: Long enough for any answer that comes, and short enough to wait for one that does not.
PATIENCE, NONE = 30.0, 0.1
#: Trusts nobody: to read the machine's certificates takes a client longer than everything else here.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def over_httpx(name, url, patience):
    httpx = importlib.import_module(name)
    rules = {"trust_env": False, "follow_redirects": True, "max_redirects": 3, "verify": NO_TLS}
    with httpx.Client(timeout=patience, **rules) as client:
        return client.get(url).raise_for_status().json()


def over_requests(url, patience):
    requests = importlib.import_module("requests")
    with requests.Session() as session:
        session.trust_env = False
        session.max_redirects = 3
        response = session.get(url, timeout=patience)
        response.raise_for_status()
        return response.json()


def over_urllib3(url, patience):
    urllib3 = importlib.import_module("urllib3")
    retries = urllib3.Retry(connect=0, read=0, redirect=3, status=0, other=0, status_forcelist=range(400, 600))
    with urllib3.PoolManager(retries=retries, timeout=patience) as pool:
        return pool.request("GET", url).json()


def over_urllib(url, patience):
    url = url.replace("me:s3cret@", "")  # it takes this for a part of the port
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=patience) as response:
            return json.loads(response.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        raise


def over_aiohttp(url, patience):
    aiohttp = importlib.import_module("aiohttp")

    async def get():
        timeout = aiohttp.ClientTimeout(sock_read=patience, sock_connect=patience)
        async with (
            aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
            session.get(url, max_redirects=3) as response,
        ):
            return await response.json()

    return asyncio.run(get())


CLIENTS = {
    "httpx": functools.partial(over_httpx, "httpx"),
    "httpx2": functools.partial(over_httpx, "httpx2"),
    "requests": over_requests,
    "urllib3": over_urllib3,
    "urllib": over_urllib,
    "aiohttp": over_aiohttp,
}


@pytest.fixture(params=CLIENTS)
def client(request):
    return CLIENTS[request.param]


def raised(client, port, *, scheme="http", host="127.0.0.1", patience=PATIENCE):
    """The canonical form of what *client* raises; nothing of the address is told, here or in another process."""
    with pytest.raises(Exception) as caught:
        client(f"{scheme}://me:s3cret@{host}:{port}/path?sig=s3cret", patience)
    found = canonical(caught.value, now=0.0)
    assert found.__cause__ is caught.value
    assert "s3cret" not in str(found)
    data = pickle.dumps(found)
    assert b"s3cret" not in data
    arrived = pickle.loads(data)
    assert (arrived.reason_code, arrived.http_status, str(arrived)) == (
        found.reason_code,
        found.http_status,
        str(found),
    )
    assert arrived.__cause__ is not None
    return found


@pytest.mark.spec("PRV-03", "PRV-19", "PRV-25")
def test_nobody_listens(client):
    found = raised(client, closed_port())
    assert (found.reason_code, found.sent) == ("connection_error", False)


@pytest.mark.spec("PRV-03", "PRV-19")
def test_nobody_knows_the_name(client, monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = raised(client, 80, host="nowhere.invalid")
    assert (found.reason_code, found.sent) == ("connection_error", False)


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("habit", [resets, leaves])
def test_the_line_breaks_instead_of_an_answer(client, habit):
    with peer(habit) as port:
        found = raised(client, port)
    assert (found.reason_code, found.sent) == ("connection_error", True)


@pytest.mark.spec("PRV-03")
def test_the_line_breaks_within_the_answer(client):
    with peer(answers("200 OK", "Content-Type: application/json", body=b'{"a"', length=100)) as port:
        found = raised(client, port)
    assert (found.reason_code, found.sent) == ("connection_error", True)


@pytest.mark.spec("PRV-03", "PRV-19")
def test_no_answer_comes(client):
    with peer(waits) as port:
        found = raised(client, port, patience=NONE)
    assert (found.reason_code, found.sent, found.fault) == ("timeout", True, True)


@pytest.mark.spec("PRV-03")
def test_the_peer_does_not_speak_tls(client):
    with peer(answers("400 Bad Request")) as port:
        found = raised(client, port, scheme="https")
    assert found.reason_code == "connection_error"


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
def test_a_status_says_no(client, status, code):
    with peer(answers(f"{status} No", "Retry-After: 7", "Content-Type: application/json")) as port:
        found = raised(client, port)
    assert (found.reason_code, found.http_status, found.sent) == (code, status, True)
    # urllib3 throws the answer away before it raises, and the header with it.
    assert found.retry_after == (None if client is over_urllib3 else 7)


@pytest.mark.spec("PRV-03")
def test_the_redirects_do_not_end(client):
    with peer(answers("302 Found", "Location: /path")) as port:
        found = raised(client, port)
    assert found.reason_code == "response_invalid"


@pytest.mark.spec("PRV-03")
@pytest.mark.parametrize("body", [b"<html>", b"\xff\xfe\xfd", b""])
def test_the_body_is_not_what_was_agreed_on(client, body):
    with peer(answers("200 OK", "Content-Type: application/json", body=body)) as port:
        if client is over_aiohttp and not body:
            assert client(f"http://127.0.0.1:{port}/", PATIENCE) is None, "it reads an empty body as null"
            return
        found = raised(client, port)
    assert found.reason_code == "response_invalid"


@pytest.mark.spec("PRV-03")
def test_the_body_is_not_encoded_as_it_says(client):
    headers = ("Content-Type: application/json", "Content-Encoding: gzip")
    with peer(answers("200 OK", *headers, body=b"\xffnot gzip")) as port:
        found = raised(client, port)
    assert found.reason_code == "response_invalid"


@pytest.mark.parametrize("name", ["httpx", "httpx2"])
def test_a_pool_that_is_empty_was_our_own_doing(name):
    httpx = importlib.import_module(name)

    async def two():
        limits = httpx.Limits(max_connections=1)
        timeout = httpx.Timeout(PATIENCE, pool=NONE)
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=timeout) as http:
            calls = [asyncio.create_task(http.get(url)) for _ in range(2)]
            done, left = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            left.pop().cancel()
            return done.pop().exception()

    with peer(waits) as port:
        url = f"http://127.0.0.1:{port}/"
        found = canonical(asyncio.run(two()), now=0.0)
    assert (found.reason_code, found.sent, found.fault) == ("timeout", False, False)


def test_a_request_that_cannot_be_made_was_never_sent():
    requests = importlib.import_module("requests")
    for url in ("no-scheme", "odd://host", "http://"):
        with pytest.raises(requests.RequestException) as caught:
            requests.get(url, timeout=PATIENCE)
        found = canonical(caught.value, now=0.0)
        assert (found.reason_code, found.sent) == ("internal_error", False)


# -- a database as a provider ---------------------------------------------------------------------


@pytest.fixture
def database():
    alchemy = importlib.import_module("sqlalchemy")
    engine = alchemy.create_engine(
        "sqlite://", poolclass=alchemy.pool.QueuePool, pool_size=1, max_overflow=0, pool_timeout=0.01
    )
    with engine.begin() as line:
        line.execute(alchemy.text("create table t (id integer primary key, n integer not null)"))
    yield alchemy, engine
    engine.dispose()


@pytest.mark.parametrize(
    "statement, code",
    [
        ("insert into t values (1, null) -- s3cret", "bad_request"),
        ("select s3cret from nowhere", "dependency_unavailable"),
    ],
)
def test_a_database_refuses(database, statement, code):
    alchemy, engine = database
    with engine.begin() as line, pytest.raises(alchemy.exc.DBAPIError) as caught:
        line.execute(alchemy.text(statement))
    found = canonical(caught.value, now=0.0)
    assert found.reason_code == code
    assert b"s3cret" not in pickle.dumps(found)


def test_the_pool_of_a_database_is_empty(database):
    alchemy, engine = database
    with engine.connect(), pytest.raises(alchemy.exc.TimeoutError) as caught:
        engine.connect()
    found = canonical(caught.value, now=0.0)
    assert (found.reason_code, found.sent, found.fault) == ("timeout", False, False)
