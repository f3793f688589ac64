"""``ergon job``: submit, show and control jobs, and the exit codes of the commands."""

from __future__ import annotations

import json
import sys
import threading

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ergon_framework.cli import job_commands
from ergon_framework.cli.app import app
from ergon_framework.cli.job_commands import JobExit
from ergon_framework.connectors.base import DeadLetter
from ergon_framework.errors import Category
from ergon_framework.executors.decision import Complete, Fail, FailureCause
from ergon_framework.jobs import store
from ergon_framework.jobs.client import JobClient
from ergon_framework.jobs.cron import Cron
from tests.integration.jobs import ManualWorker
from tests.servers.postgres import free_port

CAUSE = FailureCause(Category.SYSTEM, "executor_error", "no \x1b[31morder", "LookupError", "Traceback:\n  line \x1b[0m")


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


@pytest.fixture
def worker(dsn):
    manual_worker = ManualWorker(dsn)
    yield manual_worker
    manual_worker.close()


def run_job_command(*arguments, code=JobExit.OK):
    result = CliRunner().invoke(app, ["job", *arguments])
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments, code=JobExit.OK):
    return json.loads(run_job_command(*arguments, "--json", code=code).stdout)


def start_attempt(worker):
    delivery = worker.fetch()[0]
    worker.start(delivery)
    return delivery


def fail_attempt(worker):
    delivery = start_attempt(worker)
    worker.finish(delivery, Fail(CAUSE))
    worker.queue.settle([(delivery, DeadLetter("executor_error"))])


def test_a_job_is_submitted_with_json_arguments_and_shown(dsn, worker):
    arguments = ["charge", '{"id": "o-1"}', "5", '"text"', "--kwargs", '{"currency": "EUR"}', "--tenant", "acme"]
    job_id = run_job_command(
        "submit", *arguments, "--key", "k", "--max-attempts", "4", "--timeout", "2.5s"
    ).stdout.strip()
    [delivery] = worker.fetch()
    assert delivery.transaction.payload.body["args"] == [{"id": "o-1"}, 5, "text"]
    assert delivery.transaction.payload.body["kwargs"] == {"currency": "EUR"}
    job = run_json("show", job_id)
    assert (job["id"], job["state"], job["kind"], job["function_name"]) == (
        job_id,
        "pending",
        "python",
        "charge",
    )
    assert (job["tenant"], job["max_attempts"], job["timeout"], job["unique_key"]) == ("acme", 4, 2.5, "k")
    assert f"ergon why {job_id}" in run_job_command("show", job_id).stdout
    repeated = run_job_command("submit", *arguments, "--key", "k", "--max-attempts", "4")
    assert (repeated.stdout.strip(), "the job already existed and is pending" in repeated.stderr) == (job_id, True)
    conflict = run_job_command("submit", "refund", "--key", "k", "--tenant", "acme", code=JobExit.UNSUCCESSFUL)
    assert "is taken" in conflict.stderr


@pytest.mark.parametrize("delay_options", [["--delay", "15m"], ["--at", "2099-01-01T00:00"]])
def test_a_job_may_be_delayed(dsn, delay_options):
    submitted = run_json("submit", "rust#echo", *delay_options, "--priority", "-3", "--keep", "1d")
    job = run_json("show", submitted["id"])
    assert (submitted["created"], job["state"], job["kind"], job["priority"]) == (True, "pending", "rust", -3)
    assert job["due_at"] > job["created_at"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["echo", "text"], "is not valid JSON"),
        (["echo", "--kwargs", "[]"], "must be a JSON object"),
        (["echo", "--at", "soon"], "invalid time"),
        (["echo", "--delay", "soon"], "invalid duration"),
        (["rust#"], "names no handler"),
    ],
)
def test_an_invalid_submission_reports_the_reason(dsn, arguments, message):
    assert message in run_job_command("submit", *arguments, code=JobExit.FAILED).stderr.replace("\n", " ").replace(
        "│", ""
    )


def test_waiting_shows_the_result_and_the_exit_code_says_how_it_ended(dsn, worker):
    job_id = run_job_command("submit", "echo").stdout.strip()
    delivery = start_attempt(worker)
    finish_timer = threading.Timer(0.3, lambda: worker.finish(delivery, Complete({"charged": "5 EUR"})))
    finish_timer.start()
    output = run_job_command("wait", job_id, "--timeout", "20s").stdout
    finish_timer.join()
    assert "succeeded" in output
    assert '{"charged": "5 EUR"}' in output
    assert run_json("wait", job_id)["result"] == {"charged": "5 EUR"}


def test_waiting_for_a_job_that_fails_shows_its_error_without_control_characters(dsn, worker):
    job_id = run_job_command("submit", "echo").stdout.strip()
    fail_attempt(worker)
    output = run_job_command("wait", job_id, code=JobExit.UNSUCCESSFUL).stdout
    assert "executor_error (LookupError): no" in output
    assert "Traceback:" in output
    assert "\x1b" not in output


def test_a_wait_that_times_out_has_its_own_exit_code(dsn):
    job_id = run_job_command("submit", "echo").stdout.strip()
    timed_out = run_job_command("wait", job_id, "--timeout", "1s", code=JobExit.TIMED_OUT)
    assert "the job had not ended after 1 s" in timed_out.stderr


def test_on_a_terminal_the_wait_shows_the_state_of_the_job(dsn, worker, monkeypatch):
    job_id = run_job_command("submit", "echo").stdout.strip()
    delivery = start_attempt(worker)
    messages = []

    class FinishingStatus:
        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def update(self, message):
            messages.append(message)
            worker.finish(delivery, Complete(1))

    monkeypatch.setattr(job_commands.sys, "stderr", type("Terminal", (), {"isatty": lambda _: True})(), raising=False)
    monkeypatch.setattr(Console, "status", lambda *_, **__: FinishingStatus())
    client = job_commands.importlib.import_module("ergon_framework.jobs.client").JobClient(dsn)
    assert job_commands._wait_for_end(client, job_id, timeout=None).state == "succeeded"
    client.close()
    assert messages[0].startswith("running, attempt 1, 0 s")
    assert sys.stderr is not None


def test_ctrl_c_stops_the_wait_and_not_the_job(dsn, monkeypatch):
    job_id = run_job_command("submit", "echo").stdout.strip()

    def raise_interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(job_commands, "_wait_for_end", raise_interrupt)
    assert "the job continues" in run_job_command("wait", job_id, code=JobExit.STOPPED).stderr
    assert run_json("show", job_id)["state"] == "pending"


def test_jobs_are_cancelled_and_killed(dsn, worker):
    waiting_id = run_job_command("submit", "echo", "--delay", "1h").stdout.strip()
    assert run_job_command("cancel", waiting_id).stdout == "cancelled\n"
    assert run_json("cancel", waiting_id)["state"] == "cancelled"
    running_id = run_job_command("submit", "echo").stdout.strip()
    delivery = start_attempt(worker)
    assert (
        "is running and cannot be cancelled" in run_job_command("cancel", running_id, code=JobExit.UNSUCCESSFUL).stderr
    )
    assert run_job_command("kill", running_id).stdout == "running, kill requested\n"
    worker.finish(delivery, store.KillAttempt())
    assert "was already killed" in run_job_command("kill", running_id, code=JobExit.UNSUCCESSFUL).stderr


def test_a_failed_job_is_replayed(dsn, worker):
    job_id = run_job_command("submit", "echo").stdout.strip()
    assert "is pending; only a failed job" in run_job_command("replay", job_id, code=JobExit.UNSUCCESSFUL).stderr
    fail_attempt(worker)
    assert run_job_command("replay", job_id).stdout == "pending\n"


def test_jobs_are_listed(dsn, worker):
    ids = [run_job_command("submit", name).stdout.strip() for name in ("echo", "rust#send", "echo")]
    fail_attempt(worker)
    lines = run_job_command("list").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["id", *ids[::-1]]
    failed_jobs = [
        json.loads(line) for line in run_job_command("list", "--state", "failed", "--json").stdout.splitlines()
    ]
    assert [job["error"]["code"] for job in failed_jobs] == ["executor_error"]
    assert len(run_job_command("list", "--kind", "rust", "--function", "send").stdout.splitlines()) == 2
    first = run_job_command("list", "--limit", "1")
    assert "there are more jobs; to continue, pass --before " in first.stderr
    last_number = first.stderr.partition("--before ")[2].split()[0]
    assert [line.split()[1] for line in run_job_command("list", "--before", last_number).stdout.splitlines()][
        1:
    ] == ids[1::-1]
    assert run_job_command("list", "--tenant", "missing").stdout == "no jobs match\n"
    assert "invalid job state" in run_job_command("list", "--state", "done", code=JobExit.FAILED).stderr


def test_a_missing_job_and_an_unavailable_database_have_their_own_exit_codes(dsn, monkeypatch):
    for command in ("show", "wait", "cancel", "kill", "replay"):
        assert "there is no job 'missing'" in run_job_command(command, "missing", code=JobExit.UNSUCCESSFUL).stderr
    assert run_json("show", "missing", code=JobExit.UNSUCCESSFUL)["exit_code"] == JobExit.UNSUCCESSFUL
    monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://postgres@127.0.0.1:{free_port()}/x")
    assert "is unavailable" in run_job_command("list", code=JobExit.FAILED).stderr
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    assert "set ERGON_POSTGRES__DSN" in run_job_command("list", code=JobExit.FAILED).stderr


# -- cron -------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_cron_entries_are_listed_paused_resumed_and_run(dsn, worker):
    assert run_job_command("cron", "list").stdout == "there are no cron entries\n"
    with JobClient(dsn) as client:
        client.schedule(Cron("nightly", "0 3 * * *", "echo", [7], zone="Europe/Berlin"))
        client.schedule(Cron("yearly", "0 0 1 1 *", "x"))
    header, nightly, yearly = run_job_command("cron", "list").stdout.splitlines()
    assert header.split() == ["name", "expression", "zone", "kind", "function", "misfire", "next", "last"]
    assert nightly.startswith("nightly  0 3 * * *   Europe/Berlin  python  echo      once     20")
    assert yearly.endswith("-01-01T00:00:00.000Z")
    assert "paused" in run_job_command("cron", "pause", "nightly").stdout
    assert run_json("cron", "pause", "nightly")["enabled"] is False
    assert "paused" not in run_job_command("cron", "resume", "nightly").stdout
    submitted = run_json("cron", "run-now", "nightly")
    assert worker.fetch()[0].transaction.payload.body["args"] == [7]
    assert run_json("show", submitted["id"])["unique_key"] is None
    assert run_job_command("cron", "run-now", "nightly").stdout.strip() != submitted["id"]
    lines = run_job_command("cron", "list", "--json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["nightly", "yearly"]


@pytest.mark.parametrize("command", ["pause", "resume", "run-now"])
def test_a_missing_cron_entry_is_reported(dsn, command):
    assert (
        "there is no cron entry 'missing'"
        in run_job_command("cron", command, "missing", code=JobExit.UNSUCCESSFUL).stderr
    )
