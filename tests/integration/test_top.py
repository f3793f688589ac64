"""Check ``ergon top`` with real workers: in a file, in a narrow terminal, and with a source that does not respond."""

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

from ergon_framework.cli.top import TopExit
from ergon_framework.facts.model import Envelope, Fact, ZonePair
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.integration.observing import TIMEOUT_SECONDS, ObservedSystem
from tests.integration.running import ERGON, ErgonProcess
from tests.servers.postgres import free_port

pytestmark = pytest.mark.spec("RUN-04")

APP_MODULE = """
import itertools
orders(5)

@consumer(queue, policy=policy())
def task(order):
    say("worked")
"""


def run_top(*options, **environ):
    """Return exit code, stdout and stderr of one call."""
    result = subprocess.run(
        [*ERGON, "top", *options],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return result.returncode, result.stdout, result.stderr


def is_complete(frame):
    """Return whether *frame* shows some of every kind of activity."""
    tasks = {row["task"]: row for row in frame["tasks"]}
    charge = tasks.get("charge")
    return (
        charge is not None
        and charge["processes"] == 2
        and all(charge["rates"].get(outcome, 0) > 0 for outcome in ("succeeded", "failed"))
        and charge["retries"] > 0
        and charge["mean"] is not None
        and tasks.get("jobs.python", {"rates": {}})["rates"].get("succeeded", 0) > 0
        and {("broken/charging", "open"), ("well/charging", "closed")}
        <= {(row["provider"], row["breaker"]) for row in frame["providers"]}
        and any(row["exhausted"] for row in frame["providers"])
        and [row["kind"] for row in frame["executors"]] == ["python"]
        and any((row["status"], row["from_zone"]) == ("following", "plant") for row in frame["replicas"])
    )


def test_all_fleet_activity_is_shown_and_unavailable_sources_are_named(tmp_path, database):
    dead = f"http://127.0.0.1:{free_port()}"
    with ObservedSystem(tmp_path / "world", database) as world:
        urls = [argument for port in world.ports for argument in ("--url", f"http://127.0.0.1:{port}")]
        frame, deadline = {}, time.monotonic() + TIMEOUT_SECONDS
        while not is_complete(frame or {"tasks": []}):
            assert time.monotonic() < deadline, (frame, world.read_logs())
            code, output, _ = run_top("--json", *urls, "--url", dead, ERGON_POSTGRES__DSN=database)
            assert code == TopExit.OK
            frame = json.loads(output)
        queues = {row["queue"]: row for row in frame["queues"]}
        # By their names in the database, and not again under the names of tasks.
        assert {"orders"} <= set(queues)
        assert not any(row["of_task"] and row["queue"] == "charge" for row in frame["queues"])
        assert queues["orders"]["dead"] > 0
        assert list(frame["unavailable"]) == [dead]
        assert "check that it runs" in frame["unavailable"][dead]
        subprocess.run(
            [*ERGON, "pause", "orders", "--reason", "to be seen"],
            env={**os.environ, "ERGON_POSTGRES__DSN": database},
            capture_output=True,
            check=True,
            timeout=60,
        )
        while not re.search(r"^orders +2/2", output, re.MULTILINE):
            assert time.monotonic() < deadline, output
            code, output, _ = run_top(
                "--one-frame", *urls, "--interval", "0.5s", COLUMNS="60", ERGON_POSTGRES__DSN=database
            )
        assert code == TopExit.OK
    assert max(map(len, output.splitlines())) <= 60
    assert re.search(r"^PAUSED +APPLIED", output, re.MULTILINE)
    assert "\x1b" not in output


def test_without_a_database_the_queue_is_that_of_its_task_and_a_file_gets_one_frame(tmp_path):
    (tmp_path / "ergon.toml").write_text("[run.metrics]\ndepth = 0.2\n")
    with ErgonProcess(tmp_path, APP_MODULE, "--probe-port", "0") as process:
        process.wait_for("probes on")
        address = process.output[-1].split()[-1]
        deadline, output = time.monotonic() + TIMEOUT_SECONDS, ""
        while "of task" not in output:
            assert time.monotonic() < deadline, output
            code, output, _ = run_top("--url", address, "--interval", "0.2s")
            assert code == TopExit.OK
        assert "1/1 sources up" in output
        process.send_signal()
        process.wait_for_exit()


def test_frames_on_a_terminal_overwrite_each_other_until_a_signal(tmp_path):
    with ErgonProcess(tmp_path, APP_MODULE, "--probe-port", "0") as process:
        process.wait_for("probes on")
        address = process.output[-1].split()[-1]
        for number in (signal.SIGINT, signal.SIGTERM):
            code, output = _run_in_terminal(address, number)
            assert code == TopExit.OK
            enter, *frames = re.split(r"\x1b\[H", output)
            assert enter.startswith("\x1b[?1049h")
            assert frames[-1].endswith("\x1b[?25h\x1b[?1049l")
            for frame in frames[1:-1]:
                lines = re.sub(r"\x1b\[\??\d*[A-Za-z]", "", frame).splitlines()
                assert len(lines) < 12
                assert max(map(len, lines)) <= 44
        process.send_signal()
        process.wait_for_exit()


def _run_in_terminal(address, number):
    """Return the exit code and the output of a terminal of 44 columns and 12 lines with a signal after three frames."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 44, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    process = subprocess.Popen(
        # Started as a background job of a script: Ctrl-C is ignored unless the program handles it.
        ["/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh", *ERGON, "top", "--url", address, "--interval", "0.2s"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=subprocess.STDOUT,
    )
    os.close(terminal)
    output, is_signalled, deadline = b"", False, time.monotonic() + TIMEOUT_SECONDS
    try:
        while time.monotonic() < deadline:
            try:
                chunk = os.read(controller, 65_536)
            except OSError:
                break
            if not chunk:
                break
            output += chunk
            if not is_signalled and output.count(b"\x1b[H") > 4:
                process.send_signal(number)
                is_signalled = True
        return process.wait(TIMEOUT_SECONDS), output.decode().replace("\r\n", "\n")
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def test_without_any_response_the_command_reports_it_and_fails(tmp_path):
    url, dsn = f"127.0.0.1:{free_port()}", f"postgresql://ann:secret@127.0.0.1:{free_port()}/shop"
    code, output, errors = run_top("--one-frame", "--interval", "0.2s", "--url", url, ERGON_POSTGRES__DSN=dsn)
    assert code == TopExit.FAILED
    assert "0/2 sources up" in output
    assert f"! http://{url} is unavailable" in output
    assert "! PostgreSQL is unavailable" in output
    assert "secret" not in output + errors


def test_data_missing_in_an_older_schema_is_named_and_the_rest_is_shown(database):
    with PostgresBoundary(database, accept_loss=True) as boundary:
        envelope = Envelope(message_id="m-1", from_zone="plant", to_zone="hub", produced_at_unix_ms=0)
        boundary.append_fact(envelope, Fact.create("order", "is", 1))
        boundary.fetch_facts("ledger", ZonePair("plant", "hub"), 1)
    with psycopg.connect(database) as connection:
        connection.execute(
            "insert into ergon.provider_breakers (tenant_id, provider_name, capability, state) "
            "values ('a', 'bank', 'charging', 'open'), ('b', 'bank', 'charging', 'half_open')"
        )
        connection.execute("drop table ergon.pause")
    code, output, _ = run_top("--json", "--interval", "0.2s", ERGON_POSTGRES__DSN=database)
    frame = json.loads(output)
    assert (code, frame["unavailable"], list(frame["incomplete"])) == (TopExit.OK, {}, ["PostgreSQL pauses"])
    assert [(row["provider"], row["breaker"]) for row in frame["providers"]] == [("bank/charging", "open")]
    (reader,) = frame["replicas"]
    assert (reader["replica"], reader["lag"], reader["status"]) == ("ledger", 1, "reader")
    assert 0 <= reader["oldest"] < 60


def test_without_a_source_the_command_names_the_required_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, errors = run_top()
    assert (code, output) == (TopExit.USAGE, "")
    assert "no source to query: pass --url" in errors
    code, output, _ = run_top("--json")
    assert (code, json.loads(output)["exit_code"]) == (TopExit.USAGE, 2)
