"""What a real ``ergon run`` has counted, over all its processes, as Prometheus reads it."""

from __future__ import annotations

import os
import signal
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.running import Running
from tests.integration.test_run_probes import port_of

#: Each process has a queue of its own, with more orders whenever the folder has another file "more-N".
TASK = """
import os
from pathlib import Path

class Fed(MemoryConnector):
    fed = 0

    def fetch_transactions(self, batch_size, **extra):
        while Path(f"more-{self.fed + 1}").exists():
            self.fed += 1
            now, name = time.time(), f"order-{os.getpid()}-{self.fed}"
            self.dispatch([Transaction(f"{name}-{n}", {}, created_at=now) for n in range(10)])
        if Path("die").exists() and Path("die").read_text() == str(os.getpid()):
            raise RuntimeError("a defect of the queue")
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size, **extra):
        return self.fetch_transactions(batch_size, **extra)

queue = Fed("orders")
RULES = ConsumerPolicy.load({
    "loop": {"streaming": True, "drain_timeout": 0.4, "empty_queue": {"backoff": 0.05, "cap": 0.05}},
    "steps": {"fetch": {"retry": {"max_attempts": 1}}},
})
Path(f"pid-{os.getpid()}").touch()
"""


def metrics(port):
    """Every series of /metrics, by its name and the values of its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def until(port, expected):
    """Wait until the series are as *expected*, and see that no counter goes back on the way."""
    end = time.monotonic() + PATIENCE
    last = {}
    while True:
        found = metrics(port)
        for key, value in last.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert found.get(key, 0) >= value, key
        last = found
        if {key: found.get(key) for key in expected} == expected:
            return found
        assert time.monotonic() < end, {key: found.get(key) for key in expected}
        time.sleep(0.2)


PATIENCE = 90.0
DONE = ("ergon_transactions_total", "succeeded", "task")
DIED = ("ergon_processes_died_total", "task")
UP = ("ergon_processes", "task")
WAITS = ("ergon_queue_wait_seconds_count", "task")


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("flavour", ["def", "async def"])
def test_processes_are_added_up_and_what_a_killed_one_has_counted_stays(tmp_path, flavour):
    (tmp_path / "ergon.toml").write_text("[run.probes]\ninterval = 0.2\n[run.restart]\nbackoff = 0.05\n")
    source = TASK + f"\n@consumer(queue, policy=RULES)\n{flavour} task(order): ...\n"
    with Running(tmp_path, source, "--probe-port", "0", "--processes", "2") as process:
        port = port_of(process)
        (tmp_path / "more-1").touch()
        until(port, {UP: 2, DONE: 20, DIED: 0})
        os.kill(int(next(tmp_path.glob("pid-*")).name.removeprefix("pid-")), signal.SIGKILL)
        # Its successor finds the same file and does its ten again.
        until(port, {UP: 2, DONE: 30, DIED: 1})
        (tmp_path / "more-2").touch()
        found = until(port, {UP: 2, DONE: 50, DIED: 1})
        assert found[WAITS] > 0


@pytest.mark.spec("RUN-04")
def test_the_last_word_of_a_process_that_ends_by_itself_is_heard(tmp_path):
    # After the first word of each, no further one is due while the test lasts.
    (tmp_path / "ergon.toml").write_text("[run.probes]\ninterval = 60\n[run.restart]\nbackoff = 0.05\n")
    handle = """
def task(order):
    with open(f"handled-{os.getpid()}", "a") as file:
        file.write("x")
"""
    source = TASK + "\n@consumer(queue, policy=RULES)" + handle
    with Running(tmp_path, source, "--probe-port", "0", "--processes", "2") as process:
        port = port_of(process)
        (tmp_path / "more-1").touch()
        end = time.monotonic() + PATIENCE
        while not (done := [path for path in tmp_path.glob("handled-*") if path.stat().st_size == 10]):
            assert time.monotonic() < end
            time.sleep(0.02)
        (tmp_path / "die").write_text(done[0].name.removeprefix("handled-"), encoding="utf-8")
        found = until(port, {DIED: 1})
        assert found[DONE] >= 10


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("flavour", ["def", "async def"])
def test_one_process_tells_what_it_counts_and_how_full_its_queue_is(tmp_path, flavour):
    (tmp_path / "ergon.toml").write_text("[run.metrics]\ndepth = 0.05\n")
    source = TASK + f"\n@consumer(queue, policy=RULES)\n{flavour} task(order): ...\n"
    with Running(tmp_path, source, "--probe-port", "0") as process:
        port = port_of(process)
        (tmp_path / "more-1").touch()
        found = until(port, {UP: 1, DONE: 10, DIED: 0, ("ergon_queue_depth", "ready", "task"): 0})
        assert ("ergon_queue_lag_seconds", "task") in found
