"""``ergon run --processes``: real processes, a queue that they share, and signals to each of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from ergon_framework.runner.exits import Exit
from tests.integration.running import ERGON, Running
from tests.signals.world import World

FLAVOURS = ("sync", "async")


def acked(world):
    return sorted(what for what in world.named("Ack") if what.endswith(":settled"))


@pytest.mark.spec("RUN-01", "CON-36")
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_signal_drains_every_process_and_nobody_stays(flavour):
    with World(flavour=flavour, processes=2, state="handler", drain=30.0) as world:
        world.dispatch(4)
        world.start()
        world.reached("began")
        # The whole group, as a terminal does it: for each of them it is one stop all the same.
        world.signal(signal.SIGINT, group=True)
        world.heard()
        world.sign("go")
        assert world.ended() == Exit.OK
        assert world.alive() == []
        assert len(acked(world)) == 2
        assert len(world.left()) == 2
        told = json.loads(world.said.splitlines()[-1])
    assert (told["processes"], told["restarts"], told["ends"]) == (2, 0, {"stop": 2})
    assert (told["started"], told["counts"]["succeeded"], told["exit_code"]) == (2, 2, 0)


@pytest.mark.spec("RUN-01")
def test_a_process_that_is_killed_is_replaced_and_its_work_comes_again():
    with World(flavour="sync", processes=2, state="killed", drain=30.0) as world:
        world.dispatch(2)
        world.start()
        world.reached("began")
        os.kill(min(world.pids("began")), signal.SIGKILL)
        world.wait("again", lambda: any(line.word == "fetched" and line.count == 2 for line in world.journal))
        world.sign("go")
        world.wait("all done", lambda: not world.left())
        world.signal(signal.SIGTERM)
        assert world.ended() == Exit.OK
        assert json.loads(world.said.splitlines()[-1])["restarts"] == 1
        assert len(world.pids("began")) == 3


@pytest.mark.spec("RUN-01")
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_when_the_parent_is_killed_its_processes_drain_and_leave(flavour):
    with World(flavour=flavour, processes=2, state="handler", drain=30.0) as world:
        world.dispatch(4)
        world.start()
        world.reached("began")
        world.signal(signal.SIGKILL)
        world.ended()
        world.sign("go")
        world.wait("nobody is left", lambda: world.alive() == [])
        assert len(acked(world)) == 2
        assert len(world.left()) == 2


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_second_signal_hurries_all_of_them():
    with World(flavour="sync", processes=2, state="never", drain=60.0) as world:
        world.dispatch(2)
        world.start()
        world.reached("began")
        world.signal(signal.SIGTERM)
        world.heard()
        world.signal(signal.SIGTERM)
        assert world.ended() == Exit.LEFT_BEHIND
        assert world.alive() == []


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_process_that_is_signalled_itself_takes_all_signals_as_one_stop(monkeypatch):
    monkeypatch.setenv("ERGON_LOGGING__LEVEL", "info")
    with World(flavour="sync", processes=2, state="handler", drain=30.0) as world:
        world.dispatch(2)
        world.start()
        world.reached("began")
        pid = min(world.pids("began"))
        os.kill(pid, signal.SIGTERM)
        world.wait("draining", lambda: "stage=draining" in world.said)
        os.kill(pid, signal.SIGINT)
        world.signal(signal.SIGTERM)
        world.heard()
        world.sign("go")
        assert world.ended() == Exit.OK
        assert len(acked(world)) == 2


DYING = """
import os
os.kill(os.getpid(), 9)
"""


@pytest.mark.spec("RUN-01")
def test_a_task_that_dies_when_it_is_loaded_ends_the_run_with_the_reason(tmp_path):
    (tmp_path / "ergon.toml").write_text("[run]\nprocesses = 2\nrestart = {backoff = 0.01, attempts = 2}\n")
    with Running(tmp_path, DYING) as process:
        code, _ = process.ended()
    assert code == Exit.FLAPPING
    assert any("process 1 died 2 times in a row" in line and "SIGKILL" in line for line in process.said)


@pytest.mark.spec("RUN-01")
def test_a_task_that_cannot_be_loaded_is_told_once(tmp_path):
    with Running(tmp_path, "", "--processes", "3") as process:
        code, _ = process.ended()
    assert code == Exit.USAGE
    assert ["has no 'task'" in line for line in process.said if not line.startswith("time=")] == [True]


@pytest.mark.spec("RUN-03")
@pytest.mark.parametrize(
    "text, said",
    [("[run]\nproceses = 2\n", "did you mean 'run.processes'?"), ('[postgres]\npassword = "x"\n', "environment only")],
)
def test_a_configuration_that_is_wrong_starts_nothing(tmp_path, text, said):
    (tmp_path / "ergon.toml").write_text(text, encoding="utf-8")
    with Running(tmp_path, "orders(1)\n@consumer(queue)\ndef task(order): ...\n") as process:
        code, _ = process.ended()
    assert (code, process.notes) == (Exit.USAGE, [])
    assert any(said in line for line in process.said)


def test_going_on_and_ending_at_once_are_not_both_meant(tmp_path):
    words = [*ERGON, "run", "app:task", "--streaming", "--once"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.USAGE
    assert "give one of the two" in " ".join(done.stderr.split())
