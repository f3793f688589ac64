"""Check the metrics of a real ``ergon run``, summed over all its processes, as Prometheus reads them."""

from __future__ import annotations

import os
import signal
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.running import ErgonProcess
from tests.integration.test_run_probes import wait_for_port

#: Each process has its own queue, with more orders whenever the folder gets another file "more-N".
TASK_MODULE = """
import os
from pathlib import Path

class Fed(MemoryConnector):
    fed = 0

    def fetch_transactions(self, batch_size, **extra):
        while Path(f"more-{self.fed + 1}").exists():
            self.fed += 1
            now, name = time.time(), f"order-{os.getpid()}-{self.fed}"
            self.dispatch([Transaction({}, id=f"{name}-{n}", created_at=now) for n in range(10)])
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


def read_metrics(port):
    """Return every series of /metrics, by its name and the values of its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_for_series(port, expected):
    """Wait until the series are as *expected*, and check that no counter decreases meanwhile."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    previous = {}
    while True:
        series = read_metrics(port)
        for key, value in previous.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert series.get(key, 0) >= value, key
        previous = series
        if {key: series.get(key) for key in expected} == expected:
            return series
        assert time.monotonic() < deadline, {key: series.get(key) for key in expected}
        time.sleep(0.2)


TIMEOUT_SECONDS = 90.0
SUCCEEDED_SERIES = ("ergon_transactions_total", "succeeded", "task")
DIED_SERIES = ("ergon_processes_died_total", "task")
PROCESSES_SERIES = ("ergon_processes", "task")
QUEUE_WAIT_SERIES = ("ergon_queue_wait_seconds_count", "task")


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("variant", ["def", "async def"])
def test_processes_are_summed_and_the_counts_of_a_killed_one_stay(tmp_path, variant):
    (tmp_path / "ergon.toml").write_text("[run.probes]\ninterval = 0.2\n[run.restart]\nbackoff = 0.05\n")
    source = TASK_MODULE + f"\n@consumer(queue, policy=RULES)\n{variant} task(order): ...\n"
    with ErgonProcess(tmp_path, source, "--probe-port", "0", "--processes", "2") as process:
        port = wait_for_port(process)
        (tmp_path / "more-1").touch()
        wait_for_series(port, {PROCESSES_SERIES: 2, SUCCEEDED_SERIES: 20, DIED_SERIES: 0})
        os.kill(int(next(tmp_path.glob("pid-*")).name.removeprefix("pid-")), signal.SIGKILL)
        # Its successor reads the same file and handles its ten orders again.
        wait_for_series(port, {PROCESSES_SERIES: 2, SUCCEEDED_SERIES: 30, DIED_SERIES: 1})
        (tmp_path / "more-2").touch()
        series = wait_for_series(port, {PROCESSES_SERIES: 2, SUCCEEDED_SERIES: 50, DIED_SERIES: 1})
        assert series[QUEUE_WAIT_SERIES] > 0


@pytest.mark.spec("RUN-04")
def test_the_last_report_of_a_process_that_exits_is_included(tmp_path):
    # After the first report of each process, no further one is due while the test runs.
    (tmp_path / "ergon.toml").write_text("[run.probes]\ninterval = 60\n[run.restart]\nbackoff = 0.05\n")
    handle = """
def task(order):
    with open(f"handled-{os.getpid()}", "a") as file:
        file.write("x")
"""
    source = TASK_MODULE + "\n@consumer(queue, policy=RULES)" + handle
    with ErgonProcess(tmp_path, source, "--probe-port", "0", "--processes", "2") as process:
        port = wait_for_port(process)
        (tmp_path / "more-1").touch()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (files := [path for path in tmp_path.glob("handled-*") if path.stat().st_size == 10]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (tmp_path / "die").write_text(files[0].name.removeprefix("handled-"), encoding="utf-8")
        series = wait_for_series(port, {DIED_SERIES: 1})
        assert series[SUCCEEDED_SERIES] >= 10


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("variant", ["def", "async def"])
def test_one_process_reports_its_counts_and_queue_depth(tmp_path, variant):
    (tmp_path / "ergon.toml").write_text("[run.metrics]\ndepth = 0.05\n")
    source = TASK_MODULE + f"\n@consumer(queue, policy=RULES)\n{variant} task(order): ...\n"
    with ErgonProcess(tmp_path, source, "--probe-port", "0") as process:
        port = wait_for_port(process)
        (tmp_path / "more-1").touch()
        series = wait_for_series(
            port, {PROCESSES_SERIES: 1, SUCCEEDED_SERIES: 10, DIED_SERIES: 0, ("ergon_queue_depth", "ready", "task"): 0}
        )
        assert ("ergon_queue_lag_seconds", "task") in series


USER_METRICS = """
from prometheus_client import Counter, Gauge

charged = Counter("orders_charged", "Charged orders.")
level = Gauge("shelf_level", "Items on the shelf.")

@consumer(queue, policy=RULES)
def task(order):
    charged.inc()
    level.set(3)
"""


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("processes", [1, 2])
def test_metrics_that_user_code_registers_are_on_the_page(tmp_path, processes):
    (tmp_path / "ergon.toml").write_text("[run.probes]\ninterval = 0.2\n[run.restart]\nbackoff = 0.05\n")
    arguments = ("--probe-port", "0", "--processes", str(processes))
    with ErgonProcess(tmp_path, TASK_MODULE + USER_METRICS, *arguments) as process:
        port = wait_for_port(process)
        (tmp_path / "more-1").touch()
        expected = {("orders_charged_total",): 10 * processes, ("shelf_level",): 3 * processes}
        wait_for_series(port, {**expected, PROCESSES_SERIES: processes})
