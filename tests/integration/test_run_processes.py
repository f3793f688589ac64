"""Check ``ergon run --processes``: real processes, a shared queue, and signals to each of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from ergon_framework.runner.exit import RunExit
from tests.integration.running import ERGON, ErgonProcess
from tests.signals.world import MatrixRun

VARIANTS = ("sync", "async")


def list_acked(world):
    return sorted(entry for entry in world.list_subjects("Ack") if entry.endswith(":settled"))


@pytest.mark.spec("RUN-01", "CON-36")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_signal_drains_every_process_and_none_remains(variant):
    with MatrixRun(flavour=variant, processes=2, state="handler", drain=30.0) as world:
        world.dispatch(4)
        world.start()
        world.wait_until_reached("began")
        # The whole process group, as a terminal does it: each process still treats it as one stop.
        world.signal(signal.SIGINT, group=True)
        world.wait_for_signal_message()
        world.create_file("go")
        assert world.wait_for_exit() == RunExit.OK
        assert world.list_processes() == []
        assert len(list_acked(world)) == 2
        assert len(world.list_queued()) == 2
        report = json.loads(world.output.splitlines()[-1])
    assert (report["processes"], report["restarts"], report["stop_reasons"]) == (2, 0, {"stop": 2})
    assert (report["started"], report["counts"]["succeeded"], report["exit_code"]) == (2, 2, 0)


@pytest.mark.spec("RUN-01")
def test_a_killed_process_is_replaced_and_its_work_is_redelivered():
    with MatrixRun(flavour="sync", processes=2, state="killed", drain=30.0) as world:
        world.dispatch(2)
        world.start()
        world.wait_until_reached("began")
        os.kill(min(world.list_pids("began")), signal.SIGKILL)
        world.wait("again", lambda: any(line.event == "fetched" and line.count == 2 for line in world.journal))
        world.create_file("go")
        world.wait("all done", lambda: not world.list_queued())
        world.signal(signal.SIGTERM)
        assert world.wait_for_exit() == RunExit.OK
        assert json.loads(world.output.splitlines()[-1])["restarts"] == 1
        assert len(world.list_pids("began")) == 3


@pytest.mark.spec("RUN-01")
@pytest.mark.parametrize("variant", VARIANTS)
def test_processes_drain_and_exit_when_their_parent_is_killed(variant):
    with MatrixRun(flavour=variant, processes=2, state="handler", drain=30.0) as world:
        world.dispatch(4)
        world.start()
        world.wait_until_reached("began")
        world.signal(signal.SIGKILL)
        world.wait_for_exit()
        world.create_file("go")
        world.wait("no process is left", lambda: world.list_processes() == [])
        assert len(list_acked(world)) == 2
        assert len(world.list_queued()) == 2


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_second_signal_stops_all_processes_immediately():
    with MatrixRun(flavour="sync", processes=2, state="never", drain=60.0) as world:
        world.dispatch(2)
        world.start()
        world.wait_until_reached("began")
        world.signal(signal.SIGTERM)
        world.wait_for_signal_message()
        world.signal(signal.SIGTERM)
        assert world.wait_for_exit() == RunExit.LEFT_BEHIND
        assert world.list_processes() == []


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_process_signalled_directly_treats_all_signals_as_one_stop(monkeypatch):
    monkeypatch.setenv("ERGON_LOGGING__LEVEL", "info")
    with MatrixRun(flavour="sync", processes=2, state="handler", drain=30.0) as world:
        world.dispatch(2)
        world.start()
        world.wait_until_reached("began")
        pid = min(world.list_pids("began"))
        os.kill(pid, signal.SIGTERM)
        world.wait("draining", lambda: "stage=draining" in world.output)
        os.kill(pid, signal.SIGINT)
        world.signal(signal.SIGTERM)
        world.wait_for_signal_message()
        world.create_file("go")
        assert world.wait_for_exit() == RunExit.OK
        assert len(list_acked(world)) == 2


CRASHING_MODULE = """
import os
os.kill(os.getpid(), 9)
"""


@pytest.mark.spec("RUN-01")
def test_a_task_that_crashes_at_import_ends_the_run_with_the_reason(tmp_path):
    (tmp_path / "ergon.toml").write_text("[run]\nprocesses = 2\nrestart = {backoff = 0.01, attempts = 2}\n")
    with ErgonProcess(tmp_path, CRASHING_MODULE) as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.FLAPPING
    assert any("process 1 exited 2 times in a row" in line and "SIGKILL" in line for line in process.output)


@pytest.mark.spec("RUN-01")
def test_a_task_that_cannot_be_loaded_is_reported_once(tmp_path):
    with ErgonProcess(tmp_path, "", "--processes", "3") as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.USAGE
    assert ["has no 'task'" in line for line in process.output if not line.startswith("time=")] == [True]


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "text, message",
    [("[run]\nproceses = 2\n", "did you mean 'run.processes'?"), ('[postgres]\npassword = "x"\n', "environment only")],
)
def test_an_invalid_configuration_starts_nothing(tmp_path, text, message):
    (tmp_path / "ergon.toml").write_text(text, encoding="utf-8")
    with ErgonProcess(tmp_path, "orders(1)\n@consumer(queue)\ndef task(order): ...\n") as process:
        code, _ = process.wait_for_exit()
    assert (code, process.notes) == (RunExit.USAGE, [])
    assert any(message in line for line in process.output)


def test_streaming_and_once_are_mutually_exclusive(tmp_path):
    command = [*ERGON, "run", "app:task", "--streaming", "--once"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == RunExit.USAGE
    assert "pass one of the two" in " ".join(result.stderr.split())
