"""The supervisor with real processes, each with a few lines of code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from ergon_framework.runner import supervisor as module
from ergon_framework.runner.exit import RunExit
from ergon_framework.runner.settings import RunSettings
from ergon_framework.runner.supervisor import Supervisor
from ergon_framework.telemetry import names
from tests.log_events import get_event

#: Prefix of every child; its code uses *number*, *runs* (of this process slot, from 1) and *told*.
CHILD_PREFIX = """
import json, os, signal, sys, time
number, orders, reports = map(int, sys.argv[1:4])
os.chdir(sys.argv[4])
with open(f"ran-{number}", "a") as file:
    file.write(f"{os.getpid()}\\n")
runs = len(open(f"ran-{number}").readlines())
def report(kind, **told):
    os.write(reports, json.dumps({"kind": kind, **told}).encode() + b"\\n")
def told():
    return os.read(orders, 100).decode().split()
def ended(end, code=0):
    report("ended", tasks=[{"task": "charge", "stop_reason": end}])
    sys.exit(code)
def loaded(drain=30.0):
    report("loaded", drain=drain)
"""


class SupervisorHarness:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signals: list[tuple[signal.Signals, int, float]] = []
        self.supervisor: Supervisor | None = None

    def run(self, program, processes=2, **settings):
        command = lambda *ends: [sys.executable, "-c", CHILD_PREFIX + program, *map(str, ends), str(self.folder)]  # noqa: E731
        restart = {"backoff": 0.01, "attempts": 3, "stable_after": 30.0} | settings.pop("restart", {})
        run_settings = RunSettings.load({"processes": processes, "restart": restart, **settings})
        self.supervisor = Supervisor(command, run_settings, on_signal=lambda *said: self.signals.append(said))
        return self.supervisor.run()

    def call_when_file_exists(self, file_name, action):
        """Run *act* as soon as the file *sign* exists."""

        def wait_for_file():
            deadline = time.monotonic() + 20
            while not (self.folder / file_name).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            action()

        Thread(target=wait_for_file, daemon=True).start()

    def pids(self, number):
        path = self.folder / f"ran-{number}"
        return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


@pytest.fixture
def harness(tmp_path):
    return SupervisorHarness(tmp_path)


def has_exited(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def send_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.spec("RUN-01")
def test_the_run_ends_when_every_process_has_ended_normally(harness):
    result = harness.run("loaded(); ended('empty')", processes=3)
    assert (result.exit, result.restarts, result.reason) == (RunExit.OK, 0, None)
    assert [report["tasks"][0]["stop_reason"] for report in result.reports] == ["empty"] * 3
    assert all(len(harness.pids(number)) == 1 for number in (1, 2, 3))


@pytest.mark.spec("RUN-01")
@pytest.mark.parametrize("code", [RunExit.TIMEOUT, RunExit.LEFT_BEHIND])
def test_the_most_severe_exit_code_of_the_processes_is_that_of_the_run(harness, code):
    end = "timeout" if code is RunExit.TIMEOUT else "empty"
    result = harness.run(f"loaded(); ended('{end}', {code.value} if number == 2 else 0)")
    assert (result.exit, result.restarts) == (code, 0)


@pytest.mark.spec("RUN-01")
@pytest.mark.parametrize(
    "exit_statement",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "sys.exit(1)",
        "ended('stop')",
        "ended('fetch', 1)",
        "os.write(reports, b'[]\\n{\\n'); sys.exit(0)",
    ],
)
def test_a_process_that_exits_unexpectedly_is_replaced(harness, exit_statement):
    result = harness.run(f"""
loaded()
if number == 2 and runs == 1:
    {exit_statement}
ended("empty")
""")
    assert (result.exit, result.restarts) == (RunExit.OK, 1)
    assert (len(harness.pids(1)), len(harness.pids(2))) == (1, 2)


@pytest.mark.spec("RUN-01")
def test_repeated_immediate_crashes_end_the_run_and_name_the_cause(harness):
    result = harness.run("""
loaded()
if number == 2:
    os.kill(os.getpid(), signal.SIGKILL)
told()
ended("stop")
""")
    assert (result.exit, result.restarts) == (RunExit.FLAPPING, 2)
    assert "process 2 exited 3 times in a row, each time within 30 s of its start" in result.reason
    assert "before it had fetched work, the last time with SIGKILL" in result.reason
    assert all(has_exited(pid) for pid in harness.pids(1) + harness.pids(2))


@pytest.mark.spec("SEC-16")
@pytest.mark.parametrize("processes", [1, 2])
def test_crashes_of_processes_that_had_fetched_work_never_end_the_run(harness, processes):
    # As many as three poison messages cost that kill their process ten times each.
    result = harness.run(
        "loaded(); report('fetched'); ended('empty') if runs > 15 else os._exit(66)",
        processes=processes,
        restart={"attempts": 5},
    )
    assert (result.exit, result.restarts, result.reason) == (RunExit.OK, 15 * processes, None)


@pytest.mark.spec("SEC-16")
def test_work_fetched_by_an_earlier_process_does_not_excuse_a_later_crash(harness):
    program = "loaded(); report('fetched') if runs == 1 else None; ended('empty') if runs > 10 else os._exit(66)"
    result = harness.run(program, processes=1)
    assert (result.exit, result.restarts) == (RunExit.FLAPPING, 3)
    assert "exited 3 times in a row" in result.reason


@pytest.mark.spec("SEC-16")
def test_the_default_delays_between_crashes_with_work_do_not_grow(harness, caplog):
    program = "loaded(); report('fetched'); ended('empty') if runs > 4 else os._exit(66)"
    harness.run(program, processes=1, restart={"backoff": 0.02, "multiplier": 1000.0})
    delays = [record.delay for record in caplog.records if get_event(record) == "process exited unexpectedly"]
    assert delays == [0.02] * 4


@pytest.mark.spec("RUN-01")
def test_a_process_that_ran_long_enough_may_crash_any_number_of_times(harness):
    result = harness.run(
        "loaded(); ended('empty') if runs > 5 else sys.exit(1)", processes=1, restart={"stable_after": 0.0}
    )
    assert (result.exit, result.restarts) == (RunExit.OK, 5)


def test_the_delays_before_a_replacement_grow():
    restart = RunSettings().restart
    assert [restart.delay(crashes) for crashes in (0, 1, 2, 10)] == [0.5, 1.0, 2.0, 30.0]


def test_a_task_that_cannot_be_loaded_is_tried_once_by_one_process(harness):
    result = harness.run("sys.exit(2)", processes=4)
    assert (result.exit, result.restarts, result.reports) == (RunExit.USAGE, 0, [])
    assert [len(harness.pids(number)) for number in (1, 2, 3, 4)] == [1, 0, 0, 0]


def test_a_task_that_cannot_be_loaded_later_ends_no_healthy_process(harness):
    result = harness.run("""
if number == 1:
    report("health", live=True, ready=True)
    loaded()
    while not os.path.exists("third"):
        time.sleep(0.01)
    ended("empty")
if runs < 3:
    sys.exit(runs)
open("third", "w").close()
ended("empty")
""")
    assert (result.exit, result.restarts) == (RunExit.OK, 2)


STOP_PROGRAM = """
loaded(drain={drain})
open(f"up-{{number}}", "w").close()
heard = told()
open(f"heard-{{number}}", "w").write(" ".join(heard))
"""


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_signal_sends_a_stop_command_to_every_process(harness):
    harness.call_when_file_exists("up-2", send_sigterm)
    result = harness.run(STOP_PROGRAM.format(drain=7) + "ended('stop')")
    assert (result.exit, [report["tasks"][0]["stop_reason"] for report in result.reports]) == (
        RunExit.OK,
        ["stop", "stop"],
    )
    assert [(harness.folder / f"heard-{number}").read_text() for number in (1, 2)] == ["stop", "stop"]
    assert harness.signals == [(signal.SIGTERM, 1, 7.0)]


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_second_signal_sends_the_stop_now_command(harness):
    harness.call_when_file_exists("up-1", send_sigterm)
    harness.call_when_file_exists("heard-1", send_sigterm)
    result = harness.run(STOP_PROGRAM.format(drain=60) + "assert told() == ['hurry']; ended('stop')", processes=1)
    assert result.exit is RunExit.OK
    assert [times for _, times, _ in harness.signals] == [1, 2]


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_process_that_does_not_exit_is_killed(harness, monkeypatch):
    monkeypatch.setattr(module, "KILL_DELAY_SECONDS", 0.2)
    harness.call_when_file_exists("up-2", send_sigterm)
    started_at = time.monotonic()
    result = harness.run(STOP_PROGRAM.format(drain=0.1) + "time.sleep(3600) if number == 2 else ended('stop')")
    assert (result.exit, len(result.reports)) == (RunExit.FORCED, 1)
    assert time.monotonic() - started_at < 10
    assert all(has_exited(pid) for pid in harness.pids(1) + harness.pids(2))


def test_a_stop_does_not_wait_for_a_pending_replacement(harness):
    def check_and_stop():
        deadline = time.monotonic() + 20
        while "process 2: died, is replaced" not in harness.supervisor.health().reasons and time.monotonic() < deadline:
            time.sleep(0.01)
        send_sigterm()

    harness.call_when_file_exists("ran-2", check_and_stop)
    result = harness.run(
        "loaded(); sys.exit(1) if number == 2 else (told(), ended('stop'))", restart={"backoff": 60.0, "cap": 0.0}
    )
    assert result.exit is RunExit.OK
    assert len(harness.pids(2)) == 1


@pytest.mark.spec("RUN-02")
def test_the_supervisor_is_ready_when_all_are_and_not_live_when_one_is_not(harness):
    def wait_for_health(*expected):
        deadline = time.monotonic() + 20
        while harness.supervisor.health() not in expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return harness.supervisor.health()

    observed = []

    def check_and_stop():
        observed.append(wait_for_health(module.ProcessHealth(live=True, ready=True)))
        (harness.folder / "on").touch()
        observed.append(wait_for_health(module.ProcessHealth(live=False, ready=False, reasons=("process 2: held",))))
        send_sigterm()

    harness.call_when_file_exists("up-2", check_and_stop)
    harness.run("""
loaded()
open(f"up-{number}", "w").close()
report("health", live=True, ready=True, reasons=[])
while number == 2 and not os.path.exists("on"):
    time.sleep(0.01)
if number == 2:
    report("health", live=False, ready=False, reasons=["held"])
told()
ended("stop")
""")
    assert observed == [
        module.ProcessHealth(live=True, ready=True),
        module.ProcessHealth(live=False, ready=False, reasons=("process 2: held",)),
    ]
    assert harness.supervisor.health().reasons == ("stopping",)


@pytest.mark.spec("RUN-02")
def test_a_process_without_reports_for_too_long_is_not_live(harness):
    observed = []

    def check_and_stop():
        deadline = time.monotonic() + 20
        while harness.supervisor.health().live and time.monotonic() < deadline:
            time.sleep(0.01)
        observed.append(harness.supervisor.health())
        send_sigterm()

    harness.call_when_file_exists("up-1", check_and_stop)
    harness.run(
        "loaded(); open('up-1', 'w').close(); told(); ended('stop')", processes=1, probes={"heartbeat_timeout": 0.1}
    )
    assert "process 1: no report for" in observed[0].reasons[0]


def test_a_process_that_cannot_be_started_counts_as_a_crash(tmp_path):
    run_settings = RunSettings.load({"processes": 2, "restart": {"attempts": 2, "backoff": 0.01}})
    result = Supervisor(lambda *_: [str(tmp_path / "none")], run_settings).run()
    assert result.exit is RunExit.FLAPPING


def test_only_valid_fields_of_a_health_report_are_used():
    fields = {"live": 1, "ready": True, "reasons": ["x" * 1000, 3, *["y"] * 100]}
    health = module.ProcessHealth.from_dict(json.loads(json.dumps(fields)))
    assert (health.live, health.ready, len(health.reasons), len(health.reasons[0])) == (False, True, 20, 300)
    assert module.ProcessHealth.from_dict({}).reasons == ()


@pytest.mark.spec("RUN-04")
def test_metrics_of_exited_processes_are_kept_and_crashes_are_counted(harness):
    name = f"charge-{harness.folder.name}"
    program = f"""
report("loaded", drain=30.0, task={name!r})
report("metrics", numbers=[["{names.FETCHES.name}", [{name!r}], 10]], last=True)
if runs == 1 and number == 1:
    report("metrics", numbers=[["{names.FETCHES.name}", [{name!r}], 99]], last=False)
    sys.exit(1)
ended("empty")
"""
    result = harness.run(program)
    assert result.exit == RunExit.OK
    counts = {key: value for key, value in harness.supervisor.metrics.read().items() if key[1] == (name,)}
    assert counts == {(names.FETCHES.name, (name,)): 30, (names.PROCESSES_DIED.name, (name,)): 1}
