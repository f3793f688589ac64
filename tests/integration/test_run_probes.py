"""The probes of a real ``ergon run``, over HTTP and in a file."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.error
import urllib.request

import pytest

from ergon_framework.runner.exits import Exit
from tests.integration.running import Running

TASK = """
import os
from pathlib import Path
from ergon_framework.errors import ConnectionLost

class Away(Noted):
    def fetch_transactions(self, batch_size, **extra):
        if Path("away").exists():
            raise ConnectionLost("no line")
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size, **extra):
        if Path("away").exists():
            raise ConnectionLost("no line")
        return await super().fetch_transactions_async(batch_size, **extra)

queue = Away("orders")
RULES = ConsumerPolicy.load({
    "loop": {"streaming": True, "drain_timeout": 0.4, "empty_queue": {"backoff": 0.05, "cap": 0.05}},
    "steps": {"fetch": {"retry": {"backoff": 0.05, "cap": 0.05}}},
})

def hold():
    while not Path("on").exists():
        time.sleep(0.01)
"""


def asked(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def until(port, path, status):
    end = time.monotonic() + 20
    while True:
        found = asked(port, path)
        if found[0] == status or time.monotonic() > end:
            assert found[0] == status, found
            return found[1]
        time.sleep(0.02)


def port_of(process):
    process.wait_for("probes on http://127.0.0.1:")
    return int(re.search(r":(\d+)$", process.said[-1])[1])


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize("flavour", ["def", "async def"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_idle_is_ready_and_without_a_broker_it_is_live_but_not_ready(tmp_path, flavour, processes):
    source = TASK + f"\n@consumer(queue, policy=RULES)\n{flavour} task(order): ...\n"
    with Running(tmp_path, source, "--probe-port", "0", "--processes", processes) as process:
        port = port_of(process)
        assert until(port, "/ready", 200) == {"live": True, "ready": True, "reasons": []}
        (tmp_path / "away").touch()
        told = until(port, "/ready", 503)
        assert all("the connector cannot be read: ConnectionLost" in reason for reason in told["reasons"])
        assert asked(port, "/live")[0] == 200
        (tmp_path / "away").unlink()
        until(port, "/ready", 200)
        process.send(signal.SIGTERM)
        assert process.ended()[0] == Exit.OK


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_handler_that_blocks_the_event_loop_is_named_and_the_process_is_not_live(tmp_path, processes):
    (tmp_path / "ergon.toml").write_text('[run.probes]\nblocked = 0.5\nfile = "probe"\ninterval = 0.05\n')
    source = TASK + "orders = queue.dispatch([Transaction('order-1')])\n"
    source += "\n@consumer(queue, policy=RULES)\nasync def task(order):\n    hold()\n"
    with Running(tmp_path, source, "--probe-port", "0", "--processes", processes) as process:
        port = port_of(process)
        told = until(port, "/live", 503)
        assert any("by process of task, in app.hold < app.task" in reason for reason in told["reasons"])
        process.wait_for("event loop blocked")
        assert "functions=\"['app.hold', 'app.task']\"" in process.said[-1]
        end = time.monotonic() + 20
        while (probe := json.loads((tmp_path / "probe").read_text(encoding="utf-8")))["live"]:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert any(reason.endswith("by process of task, in app.hold < app.task") for reason in probe["reasons"])
        (tmp_path / "on").touch()
        until(port, "/ready", 200)
        process.send(signal.SIGTERM)
        assert process.ended()[0] == Exit.OK
    assert not (tmp_path / "probe").exists()
