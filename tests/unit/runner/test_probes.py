from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from contextlib import suppress

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner import probes
from ergon_framework.runner.probes import ProcessHealth, serve_probes
from ergon_framework.runner.settings import ProbeSettings
from ergon_framework.telemetry import names

HEALTHY = ProcessHealth(live=True, ready=True)
NOT_READY = ProcessHealth(live=True, ready=False, reasons=("the connector cannot be read: ConnectionLostError",))
NOT_LIVE = ProcessHealth(live=False, ready=False, reasons=("held",))


def send_request(port, path, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read(), response
    finally:
        connection.close()


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize(
    "health, live, ready",
    [(HEALTHY, 200, 200), (NOT_READY, 200, 503), (NOT_LIVE, 503, 503)],
    ids=["good", "away", "stuck"],
)
def test_live_and_ready_respond_with_their_reasons(health, live, ready):
    with serve_probes(ProbeSettings(port=0), lambda: health) as port:
        assert send_request(port, "/live")[0] == live
        status, body, response = send_request(port, "/ready?verbose=1")
        assert status == ready
        assert json.loads(body) == health.to_dict()
        assert (response.headers["Content-Type"], response.headers["Server"]) == ("application/json", "ergon")
        assert send_request(port, "/ready", "HEAD")[:2] == (ready, b"")


@pytest.mark.parametrize("path, method, status", [("/", "GET", 404), ("/live/x", "GET", 404), ("/live", "POST", 501)])
def test_other_requests_are_rejected(path, method, status):
    with serve_probes(ProbeSettings(port=0), lambda: HEALTHY) as port:
        assert send_request(port, path, method)[0] == status


@pytest.mark.spec("RUN-04")
def test_metrics_are_served_in_the_prometheus_format():
    numbers = {(names.FETCHES.name, ("charge",)): 3}
    with serve_probes(ProbeSettings(port=0), lambda: 1 / 0, lambda: numbers) as port:
        status, body, response = send_request(port, "/metrics?x=1")
        assert (status, response.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b'\nergon_fetches_total{ergon_task="charge"} 3.0\n' in body
        assert send_request(port, "/metrics", "HEAD")[:2] == (200, b"")


def test_without_the_library_the_metrics_response_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    with serve_probes(ProbeSettings(port=0), lambda: HEALTHY) as port:
        status, body, _ = send_request(port, "/metrics")
        assert status == 501
        assert "pip install 'ergon-framework[prometheus]'" in json.loads(body)["missing"]


def test_a_request_that_is_too_long_is_rejected():
    with serve_probes(ProbeSettings(port=0), lambda: HEALTHY) as port:
        assert send_request(port, "/" + "x" * 70_000)[0] == 414
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 101)
            assert client.recv(100).startswith(b"HTTP/1.0 414")


def test_a_silent_client_is_disconnected_and_delays_no_other(monkeypatch):
    monkeypatch.setattr(probes, "REQUEST_TIMEOUT_SECONDS", 0.2)
    with (
        serve_probes(ProbeSettings(port=0), lambda: HEALTHY) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        assert send_request(port, "/live")[0] == 200
        client.settimeout(10)
        assert client.recv(100) == b""


@pytest.mark.spec("SEC-09")
def test_a_client_that_sends_slowly_is_disconnected(monkeypatch):
    monkeypatch.setattr(probes, "REQUEST_TIMEOUT_SECONDS", 0.3)
    with (
        serve_probes(ProbeSettings(port=0), lambda: HEALTHY) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.settimeout(0.05)
        started_at = time.monotonic()
        while time.monotonic() - started_at < 10:
            try:
                client.sendall(b"x")
                assert client.recv(100) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            break
        assert time.monotonic() - started_at < 10


@pytest.mark.spec("SEC-09")
@pytest.mark.parametrize("client_count", [64, 600])
def test_slow_clients_delay_no_probe(monkeypatch, client_count):
    # All of them stay within their time limit until the end.
    monkeypatch.setattr(probes, "REQUEST_TIMEOUT_SECONDS", 60.0)
    clients = []
    try:
        with serve_probes(ProbeSettings(port=0), lambda: HEALTHY) as port:
            for _ in range(client_count):
                clients.append(socket.create_connection(("127.0.0.1", port), timeout=10))
                clients[-1].sendall(b"GET /live HT")
            started_at = time.monotonic()
            assert [send_request(port, "/live")[0] for _ in range(20)] == [200] * 20
            assert time.monotonic() - started_at < 2
    finally:
        for client in clients:
            client.close()


@pytest.mark.spec("SEC-09")
def test_slow_metrics_delay_no_probe():
    started, released = threading.Event(), threading.Event()

    def read_metrics():
        started.set()
        released.wait(20)
        return {}

    with serve_probes(ProbeSettings(port=0), lambda: HEALTHY, read_metrics) as port:
        with socket.create_connection(("127.0.0.1", port)) as metrics_client:
            metrics_client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert started.wait(10)
            assert send_request(port, "/live")[0] == 200
        released.set()
        assert send_request(port, "/metrics")[0] == 200


def test_failing_metrics_get_no_response_and_probes_continue():
    with serve_probes(ProbeSettings(port=0), lambda: HEALTHY, lambda: 1 / 0) as port:
        for _ in range(2):
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                send_request(port, "/metrics")
        assert send_request(port, "/live")[0] == 200


def test_a_client_over_the_limit_replaces_the_oldest(monkeypatch):
    monkeypatch.setattr(probes, "MAX_CONNECTIONS", 1)
    with (
        serve_probes(ProbeSettings(port=0), lambda: HEALTHY) as port,
        socket.create_connection(("127.0.0.1", port)) as first,
    ):
        first.sendall(b"GET /live")
        assert send_request(port, "/live")[0] == 200
        first.settimeout(10)
        with suppress(ConnectionError):
            assert first.recv(100) == b""


def test_a_failing_health_check_gets_no_response_and_probes_continue():
    failures = iter([1])
    with serve_probes(ProbeSettings(port=0), lambda: HEALTHY if next(failures, None) is None else 1 / 0) as port:
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            send_request(port, "/live")
        assert send_request(port, "/live")[0] == 200


def test_an_occupied_port_is_an_error_with_the_remedy():
    with (
        serve_probes(ProbeSettings(port=0), lambda: HEALTHY) as port,
        pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another"),
        serve_probes(ProbeSettings(port=port), lambda: HEALTHY),
    ):
        pass


def test_without_settings_there_is_no_probe():
    with serve_probes(ProbeSettings(), lambda: 1 / 0) as port:
        assert port is None


@pytest.mark.spec("RUN-02")
def test_the_probe_file_shows_the_health_is_updated_and_is_removed_at_the_end(tmp_path):
    path = tmp_path / "probe.json"
    health = [HEALTHY]
    with serve_probes(ProbeSettings(file=str(path), interval=0.01), lambda: health[0]):
        first = json.loads(path.read_text(encoding="utf-8"))
        assert (first["live"], first["ready"], first["reasons"]) == (True, True, [])
        health[0] = NOT_LIVE
        deadline = time.monotonic() + 10
        while json.loads(path.read_text(encoding="utf-8"))["live"] and time.monotonic() < deadline:
            time.sleep(0.01)
        later = json.loads(path.read_text(encoding="utf-8"))
        assert (later["live"], later["reasons"]) == (False, ["held"])
        assert later["at"] > first["at"]
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_probe_file_is_an_error(tmp_path):
    settings = ProbeSettings(file=str(tmp_path / "none" / "probe.json"))
    with (
        pytest.raises(ConfigurationError, match="cannot be written: No such file"),
        serve_probes(settings, lambda: HEALTHY),
    ):
        pass
