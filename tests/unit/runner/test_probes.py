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
from ergon_framework.runner.health import Health
from ergon_framework.runner.probes import probed
from ergon_framework.runner.settings import ProbeSettings
from ergon_framework.telemetry import names

GOOD = Health(live=True, ready=True)
AWAY = Health(live=True, ready=False, reasons=("the connector cannot be read: ConnectionLost",))
STUCK = Health(live=False, ready=False, reasons=("held",))


def asked(port, path, method="GET"):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        line.request(method, path)
        answer = line.getresponse()
        return answer.status, answer.read(), answer
    finally:
        line.close()


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize(
    "health, live, ready", [(GOOD, 200, 200), (AWAY, 200, 503), (STUCK, 503, 503)], ids=["good", "away", "stuck"]
)
def test_live_and_ready_are_answered_with_their_reasons(health, live, ready):
    with probed(ProbeSettings(port=0), lambda: health) as port:
        assert asked(port, "/live")[0] == live
        status, body, answer = asked(port, "/ready?verbose=1")
        assert status == ready
        assert json.loads(body) == health.told()
        assert (answer.headers["Content-Type"], answer.headers["Server"]) == ("application/json", "ergon")
        assert asked(port, "/ready", "HEAD")[:2] == (ready, b"")


@pytest.mark.parametrize("path, method, status", [("/", "GET", 404), ("/live/x", "GET", 404), ("/live", "POST", 501)])
def test_anything_else_is_not_answered(path, method, status):
    with probed(ProbeSettings(port=0), lambda: GOOD) as port:
        assert asked(port, path, method)[0] == status


@pytest.mark.spec("RUN-04")
def test_metrics_are_answered_as_prometheus_reads_them():
    numbers = {(names.FETCHES.name, ("charge",)): 3}
    with probed(ProbeSettings(port=0), lambda: 1 / 0, lambda: numbers) as port:
        status, body, answer = asked(port, "/metrics?x=1")
        assert (status, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b'\nergon_fetches_total{ergon_task="charge"} 3.0\n' in body
        assert asked(port, "/metrics", "HEAD")[:2] == (200, b"")


def test_without_the_library_metrics_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    with probed(ProbeSettings(port=0), lambda: GOOD) as port:
        status, body, _ = asked(port, "/metrics")
        assert status == 501
        assert "pip install 'ergon-framework[prometheus]'" in json.loads(body)["missing"]


def test_a_request_that_is_too_long_is_refused():
    with probed(ProbeSettings(port=0), lambda: GOOD) as port:
        assert asked(port, "/" + "x" * 70_000)[0] == 414
        with socket.create_connection(("127.0.0.1", port), timeout=10) as many:
            many.sendall(b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 101)
            assert many.recv(100).startswith(b"HTTP/1.0 414")


def test_a_caller_that_says_nothing_is_left_and_keeps_nobody_else(monkeypatch):
    monkeypatch.setattr(probes, "TIME_LIMIT", 0.2)
    with probed(ProbeSettings(port=0), lambda: GOOD) as port, socket.create_connection(("127.0.0.1", port)) as silent:
        assert asked(port, "/live")[0] == 200
        silent.settimeout(10)
        assert silent.recv(100) == b""


@pytest.mark.spec("SEC-09")
def test_a_caller_that_sends_slowly_is_left_too(monkeypatch):
    monkeypatch.setattr(probes, "TIME_LIMIT", 0.3)
    with probed(ProbeSettings(port=0), lambda: GOOD) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(0.05)
        began = time.monotonic()
        while time.monotonic() - began < 10:
            try:
                slow.sendall(b"x")
                assert slow.recv(100) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            break
        assert time.monotonic() - began < 10


@pytest.mark.spec("SEC-09")
@pytest.mark.parametrize("callers", [64, 600])
def test_slow_callers_delay_no_probe(monkeypatch, callers):
    # All of them are within their time until the end.
    monkeypatch.setattr(probes, "TIME_LIMIT", 60.0)
    slow = []
    try:
        with probed(ProbeSettings(port=0), lambda: GOOD) as port:
            for _ in range(callers):
                slow.append(socket.create_connection(("127.0.0.1", port), timeout=10))
                slow[-1].sendall(b"GET /live HT")
            began = time.monotonic()
            assert [asked(port, "/live")[0] for _ in range(20)] == [200] * 20
            assert time.monotonic() - began < 2
    finally:
        for each in slow:
            each.close()


@pytest.mark.spec("SEC-09")
def test_metrics_that_take_long_delay_no_probe():
    began, over = threading.Event(), threading.Event()

    def read():
        began.set()
        over.wait(20)
        return {}

    with probed(ProbeSettings(port=0), lambda: GOOD, read) as port:
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert began.wait(10)
            assert asked(port, "/live")[0] == 200
        over.set()
        assert asked(port, "/metrics")[0] == 200


def test_metrics_that_cannot_be_read_are_not_answered():
    with probed(ProbeSettings(port=0), lambda: GOOD, lambda: 1 / 0) as port:
        for _ in range(2):
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                asked(port, "/metrics")
        assert asked(port, "/live")[0] == 200


def test_more_callers_than_there_can_be_take_the_place_of_the_oldest(monkeypatch):
    monkeypatch.setattr(probes, "PLACES", 1)
    with probed(ProbeSettings(port=0), lambda: GOOD) as port, socket.create_connection(("127.0.0.1", port)) as first:
        first.sendall(b"GET /live")
        assert asked(port, "/live")[0] == 200
        first.settimeout(10)
        with suppress(ConnectionError):
            assert first.recv(100) == b""


def test_a_check_that_fails_answers_nobody_and_ends_nothing():
    answers = iter([1])
    with probed(ProbeSettings(port=0), lambda: GOOD if next(answers, None) is None else 1 / 0) as port:
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            asked(port, "/live")
        assert asked(port, "/live")[0] == 200


def test_a_port_that_is_taken_is_told_with_the_way_out():
    with (
        probed(ProbeSettings(port=0), lambda: GOOD) as port,
        pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another"),
        probed(ProbeSettings(port=port), lambda: GOOD),
    ):
        pass


def test_without_settings_there_is_no_probe():
    with probed(ProbeSettings(), lambda: 1 / 0) as port:
        assert port is None


@pytest.mark.spec("RUN-02")
def test_the_file_says_how_it_is_is_written_again_and_is_gone_at_the_end(tmp_path):
    path = tmp_path / "probe.json"
    health = [GOOD]
    with probed(ProbeSettings(file=str(path), interval=0.01), lambda: health[0]):
        first = json.loads(path.read_text(encoding="utf-8"))
        assert (first["live"], first["ready"], first["reasons"]) == (True, True, [])
        health[0] = STUCK
        until = time.monotonic() + 10
        while json.loads(path.read_text(encoding="utf-8"))["live"] and time.monotonic() < until:
            time.sleep(0.01)
        later = json.loads(path.read_text(encoding="utf-8"))
        assert (later["live"], later["reasons"]) == (False, ["held"])
        assert later["at"] > first["at"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    settings = ProbeSettings(file=str(tmp_path / "none" / "probe.json"))
    with pytest.raises(ConfigurationError, match="cannot be written: No such file"), probed(settings, lambda: GOOD):
        pass
