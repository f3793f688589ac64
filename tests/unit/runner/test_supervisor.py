"""The supervisor with real processes, each of them a few lines that say what the test needs."""

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
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.settings import RunSettings
from ergon_framework.runner.supervisor import Supervisor
from ergon_framework.telemetry import names
from tests.log_events import event_of

#: What every child begins with; *number*, *runs* (of this place, the first being 1) and *told* are there for its body.
BEGIN = """
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
    report("ended", end=end, task="charge")
    sys.exit(code)
def loaded(drain=30.0):
    report("loaded", drain=drain)
"""


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[tuple[signal.Signals, int, float]] = []
        self.supervisor: Supervisor | None = None

    def run(self, body, processes=2, **settings):
        command = lambda *ends: [sys.executable, "-c", BEGIN + body, *map(str, ends), str(self.folder)]  # noqa: E731
        restart = {"backoff": 0.01, "attempts": 3, "steady": 30.0} | settings.pop("restart", {})
        rules = RunSettings.load({"processes": processes, "restart": restart, **settings})
        self.supervisor = Supervisor(command, rules, on_signal=lambda *said: self.said.append(said))
        return self.supervisor.run()

    def when(self, sign, act):
        """Do *act* as soon as the file *sign* is there."""

        def wait():
            until = time.monotonic() + 20
            while not (self.folder / sign).exists() and time.monotonic() < until:
                time.sleep(0.01)
            act()

        Thread(target=wait, daemon=True).start()

    def pids(self, number):
        path = self.folder / f"ran-{number}"
        return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def term():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.spec("RUN-01")
def test_it_ends_when_every_process_has_ended_as_it_should(world):
    ran = world.run("loaded(); ended('empty')", processes=3)
    assert (ran.exit, ran.restarts, ran.why) == (Exit.OK, 0, None)
    assert [report["end"] for report in ran.reports] == ["empty"] * 3
    assert all(len(world.pids(number)) == 1 for number in (1, 2, 3))


@pytest.mark.spec("RUN-01")
@pytest.mark.parametrize("code", [Exit.TIMEOUT, Exit.LEFT_BEHIND])
def test_the_worst_of_the_codes_is_that_of_the_run(world, code):
    end = "timeout" if code is Exit.TIMEOUT else "empty"
    ran = world.run(f"loaded(); ended('{end}', {code.value} if number == 2 else 0)")
    assert (ran.exit, ran.restarts) == (code, 0)


@pytest.mark.spec("RUN-01")
@pytest.mark.parametrize(
    "death",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "sys.exit(1)",
        "ended('stop')",
        "ended('fetch', 1)",
        "os.write(reports, b'[]\\n{\\n'); sys.exit(0)",
    ],
)
def test_one_that_died_is_replaced(world, death):
    ran = world.run(f"""
loaded()
if number == 2 and runs == 1:
    {death}
ended("empty")
""")
    assert (ran.exit, ran.restarts) == (Exit.OK, 1)
    assert (len(world.pids(1)), len(world.pids(2))) == (1, 2)


@pytest.mark.spec("RUN-01")
def test_one_that_dies_at_once_again_and_again_ends_the_run_and_says_how(world):
    ran = world.run("""
loaded()
if number == 2:
    os.kill(os.getpid(), signal.SIGKILL)
told()
ended("stop")
""")
    assert (ran.exit, ran.restarts) == (Exit.FLAPPING, 2)
    assert "process 2 died 3 times in a row, each time within 30 s of its start" in ran.why
    assert "before it had fetched work, the last time with SIGKILL" in ran.why
    assert all(gone(pid) for pid in world.pids(1) + world.pids(2))


@pytest.mark.spec("SEC-16")
@pytest.mark.parametrize("processes", [1, 2])
def test_deaths_of_processes_that_had_fetched_work_never_end_the_run(world, processes):
    # As many as three poison messages cost that take a process with them ten times each.
    ran = world.run(
        "loaded(); report('fetched'); ended('empty') if runs > 15 else os._exit(66)",
        processes=processes,
        restart={"attempts": 5},
    )
    assert (ran.exit, ran.restarts, ran.why) == (Exit.OK, 15 * processes, None)


@pytest.mark.spec("SEC-16")
def test_work_that_an_earlier_process_had_fetched_excuses_no_later_death(world):
    body = "loaded(); report('fetched') if runs == 1 else None; ended('empty') if runs > 10 else os._exit(66)"
    ran = world.run(body, processes=1)
    assert (ran.exit, ran.restarts) == (Exit.FLAPPING, 3)
    assert "died 3 times in a row" in ran.why


@pytest.mark.spec("SEC-16")
def test_the_default_waits_between_deaths_with_work_do_not_grow(world, caplog):
    body = "loaded(); report('fetched'); ended('empty') if runs > 4 else os._exit(66)"
    world.run(body, processes=1, restart={"backoff": 0.02, "multiplier": 1000.0})
    delays = [record.delay for record in caplog.records if event_of(record) == "process died"]
    assert delays == [0.02] * 4


@pytest.mark.spec("RUN-01")
def test_one_that_had_run_for_long_enough_may_die_any_number_of_times(world):
    ran = world.run("loaded(); ended('empty') if runs > 5 else sys.exit(1)", processes=1, restart={"steady": 0.0})
    assert (ran.exit, ran.restarts) == (Exit.OK, 5)


def test_the_waits_before_a_replacement_grow():
    restart = RunSettings().restart
    assert [restart.delay(deaths) for deaths in (0, 1, 2, 10)] == [0.5, 1.0, 2.0, 30.0]


def test_a_task_that_cannot_be_loaded_is_tried_once_and_by_one(world):
    ran = world.run("sys.exit(2)", processes=4)
    assert (ran.exit, ran.restarts, ran.reports) == (Exit.USAGE, 0, [])
    assert [len(world.pids(number)) for number in (1, 2, 3, 4)] == [1, 0, 0, 0]


def test_a_task_that_was_good_when_the_run_began_ends_no_healthy_process(world):
    ran = world.run("""
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
    assert (ran.exit, ran.restarts) == (Exit.OK, 2)


STOPPED = """
loaded(drain={drain})
open(f"up-{{number}}", "w").close()
heard = told()
open(f"heard-{{number}}", "w").write(" ".join(heard))
"""


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_signal_is_an_order_to_stop_for_all_of_them(world):
    world.when("up-2", term)
    ran = world.run(STOPPED.format(drain=7) + "ended('stop')")
    assert (ran.exit, [report["end"] for report in ran.reports]) == (Exit.OK, ["stop", "stop"])
    assert [(world.folder / f"heard-{number}").read_text() for number in (1, 2)] == ["stop", "stop"]
    assert world.said == [(signal.SIGTERM, 1, 7.0)]


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_second_signal_is_an_order_to_hurry(world):
    world.when("up-1", term)
    world.when("heard-1", term)
    ran = world.run(STOPPED.format(drain=60) + "assert told() == ['hurry']; ended('stop')", processes=1)
    assert ran.exit is Exit.OK
    assert [times for _, times, _ in world.said] == [1, 2]


@pytest.mark.spec("RUN-01", "CON-36")
def test_one_that_does_not_leave_is_killed(world, monkeypatch):
    monkeypatch.setattr(module, "KILL", 0.2)
    world.when("up-2", term)
    began = time.monotonic()
    ran = world.run(STOPPED.format(drain=0.1) + "time.sleep(3600) if number == 2 else ended('stop')")
    assert (ran.exit, len(ran.reports)) == (Exit.FORCED, 1)
    assert time.monotonic() - began < 10
    assert all(gone(pid) for pid in world.pids(1) + world.pids(2))


def test_a_stop_while_one_waits_to_be_replaced_waits_for_nobody(world):
    def look():
        until = time.monotonic() + 20
        while "process 2: died, is replaced" not in world.supervisor.health().reasons and time.monotonic() < until:
            time.sleep(0.01)
        term()

    world.when("ran-2", look)
    ran = world.run(
        "loaded(); sys.exit(1) if number == 2 else (told(), ended('stop'))", restart={"backoff": 60.0, "cap": 0.0}
    )
    assert ran.exit is Exit.OK
    assert len(world.pids(2)) == 1


@pytest.mark.spec("RUN-02")
def test_it_is_ready_when_all_are_and_not_live_when_one_is_not(world):
    def seen(*wanted):
        until = time.monotonic() + 20
        while world.supervisor.health() not in wanted and time.monotonic() < until:
            time.sleep(0.01)
        return world.supervisor.health()

    found = []

    def look():
        found.append(seen(module.Health(live=True, ready=True)))
        (world.folder / "on").touch()
        found.append(seen(module.Health(live=False, ready=False, reasons=("process 2: held",))))
        term()

    world.when("up-2", look)
    world.run("""
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
    assert found == [
        module.Health(live=True, ready=True),
        module.Health(live=False, ready=False, reasons=("process 2: held",)),
    ]
    assert world.supervisor.health().reasons == ("stopping",)


@pytest.mark.spec("RUN-02")
def test_one_that_says_nothing_for_too_long_is_not_live(world):
    found = []

    def look():
        until = time.monotonic() + 20
        while world.supervisor.health().live and time.monotonic() < until:
            time.sleep(0.01)
        found.append(world.supervisor.health())
        term()

    world.when("up-1", look)
    world.run("loaded(); open('up-1', 'w').close(); told(); ended('stop')", processes=1, probes={"silent": 0.1})
    assert "process 1: has said nothing for" in found[0].reasons[0]


def test_a_process_that_cannot_be_started_is_one_that_died(tmp_path):
    rules = RunSettings.load({"processes": 2, "restart": {"attempts": 2, "backoff": 0.01}})
    ran = Supervisor(lambda *_: [str(tmp_path / "none")], rules).run()
    assert ran.exit is Exit.FLAPPING


def test_a_report_is_believed_only_where_it_fits():
    told = {"live": 1, "ready": True, "reasons": ["x" * 1000, 3, *["y"] * 100]}
    health = module.Health.heard(json.loads(json.dumps(told)))
    assert (health.live, health.ready, len(health.reasons), len(health.reasons[0])) == (False, True, 20, 300)
    assert module.Health.heard({}).reasons == ()


@pytest.mark.spec("RUN-04")
def test_what_the_dead_have_counted_is_kept_and_their_deaths_are_counted(world):
    name = f"charge-{world.folder.name}"
    body = f"""
report("loaded", drain=30.0, task={name!r})
report("metrics", numbers=[["{names.FETCHES.name}", [{name!r}], 10]], last=True)
if runs == 1 and number == 1:
    report("metrics", numbers=[["{names.FETCHES.name}", [{name!r}], 99]], last=False)
    sys.exit(1)
ended("empty")
"""
    ran = world.run(body)
    assert ran.exit == Exit.OK
    found = {key: value for key, value in world.supervisor.sums.read().items() if key[1] == (name,)}
    assert found == {(names.FETCHES.name, (name,)): 30, (names.PROCESSES_DIED.name, (name,)): 1}
