"""``ergon top`` before real workers: in a file, in a narrow terminal, and where something does not answer."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time

import psycopg
import pytest

from ergon_framework.cli.top_work import TopExit
from ergon_framework.facts.model import Envelope, Fact, Pair
from ergon_framework.facts.stores.postgres import PostgresBoundary
from tests.integration.observing import PATIENCE, World
from tests.integration.running import ERGON, Running
from tests.servers.postgres import free_port

pytestmark = pytest.mark.spec("RUN-04")

APP = """
import itertools
orders(5)

@consumer(queue, policy=policy())
def task(order):
    say("worked")
"""


def top(*options, **environ):
    """Exit code, stdout and stderr of one call."""
    done = subprocess.run(
        [*ERGON, "top", *options],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def whole(shown):
    """Whether a frame shows something of all that the world has."""
    tasks = {row["task"]: row for row in shown["tasks"]}
    charge = tasks.get("charge")
    return (
        charge is not None
        and charge["processes"] == 2
        and all(charge["rates"].get(outcome, 0) > 0 for outcome in ("succeeded", "failed"))
        and charge["retries"] > 0
        and charge["mean"] is not None
        and tasks.get("jobs.python", {"rates": {}})["rates"].get("succeeded", 0) > 0
        and {("broken/charging", "open"), ("well/charging", "closed")}
        <= {(row["provider"], row["breaker"]) for row in shown["providers"]}
        and any(row["exhausted"] for row in shown["providers"])
        and [row["kind"] for row in shown["executors"]] == ["python"]
        and any((row["status"], row["from_zone"]) == ("following", "plant") for row in shown["replicas"])
    )


def test_everything_that_the_fleet_does_is_shown_and_who_does_not_answer_is_named(tmp_path, database):
    dead = f"http://127.0.0.1:{free_port()}"
    with World(tmp_path / "world", database) as world:
        urls = [word for port in world.ports for word in ("--url", f"http://127.0.0.1:{port}")]
        known, end = {}, time.monotonic() + PATIENCE
        while not whole(known or {"tasks": []}):
            assert time.monotonic() < end, (known, world.said())
            code, said, _ = top("--json", *urls, "--url", dead, ERGON_POSTGRES__DSN=database)
            assert code == TopExit.OK
            known = json.loads(said)
        queues = {row["queue"]: row for row in known["queues"]}
        # By their names in the database, and not once more as those of tasks.
        assert {"orders"} <= set(queues)
        assert not any(row["of_task"] and row["queue"] == "charge" for row in known["queues"])
        assert queues["orders"]["dead"] > 0
        assert list(known["unreached"]) == [dead]
        assert "see that it runs" in known["unreached"][dead]
        subprocess.run(
            [*ERGON, "pause", "orders", "--reason", "to be seen"],
            env={**os.environ, "ERGON_POSTGRES__DSN": database},
            capture_output=True,
            check=True,
            timeout=60,
        )
        while "2 of 2" not in said:
            assert time.monotonic() < end, said
            code, said, _ = top("--once", *urls, "--interval", "0.5", COLUMNS="60", ERGON_POSTGRES__DSN=database)
        assert code == TopExit.OK
    assert max(map(len, said.splitlines())) <= 60
    assert re.search(r"^PAUSED +OBEY", said, re.MULTILINE)
    assert "\x1b" not in said


def test_without_a_database_the_queue_is_that_of_its_task_and_a_file_gets_one_frame(tmp_path):
    (tmp_path / "ergon.toml").write_text("[run.metrics]\ndepth = 0.2\n")
    with Running(tmp_path, APP, "--probe-port", "0") as process:
        process.wait_for("probes on")
        address = process.said[-1].split()[-1]
        end, said = time.monotonic() + PATIENCE, ""
        while "of task" not in said:
            assert time.monotonic() < end, said
            code, said, _ = top("--url", address, "--interval", "0.2")
            assert code == TopExit.OK
        assert "1 of 1 sources answer" in said
        process.send()
        process.ended()


def test_on_a_terminal_frames_are_written_over_each_other_until_a_signal_comes(tmp_path):
    with Running(tmp_path, APP, "--probe-port", "0") as process:
        process.wait_for("probes on")
        address = process.said[-1].split()[-1]
        for number in (signal.SIGINT, signal.SIGTERM):
            code, shown = _seen(address, number)
            assert code == TopExit.OK
            enter, *frames = re.split(r"\x1b\[H", shown)
            assert enter.startswith("\x1b[?1049h")
            assert frames[-1].endswith("\x1b[?25h\x1b[?1049l")
            for frame in frames[1:-1]:
                lines = re.sub(r"\x1b\[\??\d*[A-Za-z]", "", frame).splitlines()
                assert len(lines) < 12
                assert max(map(len, lines)) <= 44
        process.send()
        process.ended()


def _seen(address, number):
    """What a terminal of 44 columns and 12 lines is sent until three frames were there and a signal came."""
    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 44, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    process = subprocess.Popen(
        # As one in the background of a script is started: Ctrl-C is ignored unless it is asked for.
        ["/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh", *ERGON, "top", "--url", address, "--interval", "0.2"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=other,
        stderr=subprocess.STDOUT,
    )
    os.close(other)
    shown, sent, until = b"", False, time.monotonic() + PATIENCE
    try:
        while time.monotonic() < until:
            try:
                piece = os.read(own, 65_536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
            if not sent and shown.count(b"\x1b[H") > 4:
                process.send_signal(number)
                sent = True
        return process.wait(PATIENCE), shown.decode().replace("\r\n", "\n")
    finally:
        process.kill()
        process.wait()
        os.close(own)


def test_where_nothing_answers_it_says_so_and_fails(tmp_path):
    url, dsn = f"127.0.0.1:{free_port()}", f"postgresql://ann:secret@127.0.0.1:{free_port()}/shop"
    code, said, complained = top("--once", "--interval", "0.2", "--url", url, ERGON_POSTGRES__DSN=dsn)
    assert code == TopExit.FAILED
    assert "0 of 2 sources answer" in said
    assert f"! http://{url} cannot be reached" in said
    assert "! the database cannot be reached" in said
    assert "secret" not in said + complained


def test_what_an_older_schema_lacks_is_named_and_the_rest_is_shown(database):
    with PostgresBoundary(database, accept_loss=True) as boundary:
        envelope = Envelope(message_id="m-1", from_zone="plant", to_zone="hub", produced_at_unix_ms=0)
        boundary.append_fact(envelope, Fact.of("order", "is", 1))
        boundary.fetch_facts("ledger", Pair("plant", "hub"), 1)
    with psycopg.connect(database) as connection:
        connection.execute(
            "insert into ergon.provider_breakers (tenant_id, provider_name, capability, state) "
            "values ('a', 'bank', 'charging', 'open'), ('b', 'bank', 'charging', 'half_open')"
        )
        connection.execute("drop table ergon.pause")
    code, said, _ = top("--json", "--interval", "0.2", ERGON_POSTGRES__DSN=database)
    shown = json.loads(said)
    assert (code, shown["unreached"], list(shown["unsaid"])) == (TopExit.OK, {}, ["pauses of the database"])
    assert [(row["provider"], row["breaker"]) for row in shown["providers"]] == [("bank/charging", "open")]
    (reader,) = shown["replicas"]
    assert (reader["replica"], reader["facts"], reader["status"]) == ("ledger", 1, "reader")
    assert 0 <= reader["seconds"] < 60


def test_who_names_nothing_to_look_at_is_told_what_to_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said, complained = top()
    assert (code, said) == (TopExit.USAGE, "")
    assert "give --url" in complained
    code, said, _ = top("--json")
    assert (code, json.loads(said)["exit_code"]) == (TopExit.USAGE, 2)
