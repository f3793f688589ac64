"""Check the probes of a real ``ergon run``, over HTTP and in a file."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.error
import urllib.request

import pytest

from ergon_framework.runner.exit import RunExit
from tests.integration.running import ErgonProcess

TASK_MODULE = """
import os
from pathlib import Path
from ergon_framework.errors import ConnectionLostError

class Away(Noted):
    def fetch_transactions(self, batch_size, **extra):
        if Path("away").exists():
            raise ConnectionLostError("no line")
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size, **extra):
        if Path("away").exists():
            raise ConnectionLostError("no line")
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


def query_probe(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait_for_status(port, path, status):
    deadline = time.monotonic() + 20
    while True:
        response = query_probe(port, path)
        if response[0] == status or time.monotonic() > deadline:
            assert response[0] == status, response
            return response[1]
        time.sleep(0.02)


def wait_for_port(process):
    process.wait_for("probes on http://127.0.0.1:")
    return int(re.search(r":(\d+)$", process.output[-1])[1])


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize("variant", ["def", "async def"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_idle_worker_is_ready_and_without_a_broker_it_is_live_but_not_ready(tmp_path, variant, processes):
    source = TASK_MODULE + f"\n@consumer(queue, policy=RULES)\n{variant} task(order): ...\n"
    with ErgonProcess(tmp_path, source, "--probe-port", "0", "--processes", processes) as process:
        port = wait_for_port(process)
        assert wait_for_status(port, "/ready", 200) == {"live": True, "ready": True, "reasons": []}
        (tmp_path / "away").touch()
        report = wait_for_status(port, "/ready", 503)
        assert all("the connector cannot be read: ConnectionLostError" in reason for reason in report["reasons"])
        assert query_probe(port, "/live")[0] == 200
        (tmp_path / "away").unlink()
        wait_for_status(port, "/ready", 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait_for_exit()[0] == RunExit.OK


@pytest.mark.spec("RUN-02")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_handler_that_blocks_the_event_loop_is_reported_and_the_process_is_not_live(tmp_path, processes):
    (tmp_path / "ergon.toml").write_text('[run.probes]\nevent_loop_timeout = 0.5\nfile = "probe"\ninterval = 0.05\n')
    source = TASK_MODULE + "orders = queue.dispatch([Transaction(id='order-1')])\n"
    source += "\n@consumer(queue, policy=RULES)\nasync def task(order):\n    hold()\n"
    with ErgonProcess(tmp_path, source, "--probe-port", "0", "--processes", processes) as process:
        port = wait_for_port(process)
        report = wait_for_status(port, "/live", 503)
        assert any("by process of task, in app.hold < app.task" in reason for reason in report["reasons"])
        process.wait_for("event loop blocked")
        assert "functions=\"['app.hold', 'app.task']\"" in process.output[-1]
        deadline = time.monotonic() + 20
        while (probe := json.loads((tmp_path / "probe").read_text(encoding="utf-8")))["live"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert any(reason.endswith("by process of task, in app.hold < app.task") for reason in probe["reasons"])
        (tmp_path / "on").touch()
        wait_for_status(port, "/ready", 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait_for_exit()[0] == RunExit.OK
    assert not (tmp_path / "probe").exists()
