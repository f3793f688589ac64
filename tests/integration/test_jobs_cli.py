"""``ergon job``: what people submit, see and steer, and how the command ends."""

from __future__ import annotations

import json
import sys
import threading

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ergon_framework.cli import job_work
from ergon_framework.cli.app import app
from ergon_framework.cli.job_work import JobExit
from ergon_framework.connectors.base import DeadLetter
from ergon_framework.errors import Category
from ergon_framework.executor.jobs import attempts
from ergon_framework.executor.jobs.client import JobClient
from ergon_framework.executor.jobs.cron import Cron
from ergon_framework.executor.verdict import Blame, Bury, Complete
from tests.integration.jobs import Store
from tests.servers.postgres import free_port

BLAME = Blame(Category.SYSTEM, "executor_error", "no \x1b[31morder", "LookupError", "Traceback:\n  line \x1b[0m")


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


@pytest.fixture
def store(dsn):
    made = Store(dsn)
    yield made
    made.close()


def run(*words, code=JobExit.OK):
    done = CliRunner().invoke(app, ["job", *words])
    assert done.exit_code == code, done.output
    return done


def told(*words, code=JobExit.OK):
    return json.loads(run(*words, "--json", code=code).stdout)


def begun(store):
    delivery = store.fetched()[0]
    store.start(delivery)
    return delivery


def failed(store):
    delivery = begun(store)
    store.finish(delivery, Bury(BLAME))
    store.queue.settle([(delivery, DeadLetter("executor_error"))])


def test_a_job_is_submitted_with_json_arguments_and_shown(dsn, store):
    words = ["charge", '{"id": "o-1"}', "5", '"text"', "--kwargs", '{"currency": "EUR"}', "--tenant", "acme"]
    job_id = run("submit", *words, "--key", "k", "--max-attempts", "4", "--timeout", "2.5").stdout.strip()
    [delivery] = store.fetched()
    assert delivery.transaction.payload.body["args"] == [{"id": "o-1"}, 5, "text"]
    assert delivery.transaction.payload.body["kwargs"] == {"currency": "EUR"}
    found = told("show", job_id)
    assert (found["id"], found["state"], found["kind"], found["function_name"]) == (
        job_id,
        "pending",
        "python",
        "charge",
    )
    assert (found["tenant"], found["max_attempts"], found["timeout"], found["unique_key"]) == ("acme", 4, 2.5, "k")
    assert f"ergon why {job_id}" in run("show", job_id).stdout
    again = run("submit", *words, "--key", "k", "--max-attempts", "4")
    assert (again.stdout.strip(), "it was there before, and is pending" in again.stderr) == (job_id, True)
    taken = run("submit", "refund", "--key", "k", "--tenant", "acme", code=JobExit.NOT)
    assert "is taken" in taken.stderr


@pytest.mark.parametrize("when", [["--delay", "15m"], ["--at", "2099-01-01T00:00"]])
def test_a_job_may_be_for_later(dsn, when):
    made = told("submit", "rust#echo", *when, "--priority", "-3", "--keep", "1d")
    found = told("show", made["id"])
    assert (made["created"], found["state"], found["kind"], found["priority"]) == (True, "pending", "rust", -3)
    assert found["due_at"] > found["created_at"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["echo", "text"], "is no JSON"),
        (["echo", "--kwargs", "[]"], "is a JSON object"),
        (["echo", "--at", "soon"], "is no time"),
        (["echo", "--delay", "soon"], "is no length of time"),
        (["rust#"], "names no handler"),
    ],
)
def test_what_cannot_be_submitted_says_why(dsn, words, said):
    assert said in run("submit", *words, code=JobExit.FAILED).stderr.replace("\n", " ").replace("│", "")


def test_waiting_shows_the_result_and_the_exit_code_says_how_it_ended(dsn, store):
    job_id = run("submit", "echo").stdout.strip()
    delivery = begun(store)
    ending = threading.Timer(0.3, lambda: store.finish(delivery, Complete({"charged": "5 EUR"})))
    ending.start()
    shown = run("wait", job_id, "--timeout", "20s").stdout
    ending.join()
    assert "succeeded" in shown
    assert '{"charged": "5 EUR"}' in shown
    assert told("wait", job_id)["result"] == {"charged": "5 EUR"}


def test_waiting_for_a_job_that_fails_shows_its_error_without_its_control_characters(dsn, store):
    job_id = run("submit", "echo").stdout.strip()
    failed(store)
    shown = run("wait", job_id, code=JobExit.NOT).stdout
    assert "executor_error (LookupError): no" in shown
    assert "Traceback:" in shown
    assert "\x1b" not in shown


def test_waiting_in_vain_has_an_exit_code_of_its_own(dsn):
    job_id = run("submit", "echo").stdout.strip()
    late = run("wait", job_id, "--timeout", "1s", code=JobExit.LATE)
    assert "not over after 1 s" in late.stderr


def test_on_a_terminal_one_sees_where_the_job_is(dsn, store, monkeypatch):
    job_id = run("submit", "echo").stdout.strip()
    delivery = begun(store)
    seen = []

    class Status:
        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def update(self, words):
            seen.append(words)
            store.finish(delivery, Complete(1))

    monkeypatch.setattr(job_work.sys, "stderr", type("Terminal", (), {"isatty": lambda _: True})(), raising=False)
    monkeypatch.setattr(Console, "status", lambda *_, **__: Status())
    client = job_work.importlib.import_module("ergon_framework.executor.jobs.client").JobClient(dsn)
    assert job_work._ended(client, job_id, timeout=None).state == "succeeded"
    client.close()
    assert seen[0].startswith("running, attempt 1, 0 s")
    assert sys.stderr is not None


def test_ctrl_c_stops_the_waiting_and_not_the_job(dsn, monkeypatch):
    job_id = run("submit", "echo").stdout.strip()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(job_work, "_ended", interrupted)
    assert "the job goes on" in run("wait", job_id, code=JobExit.STOPPED).stderr
    assert told("show", job_id)["state"] == "pending"


def test_jobs_are_cancelled_and_killed(dsn, store):
    waiting = run("submit", "echo", "--delay", "1h").stdout.strip()
    assert run("cancel", waiting).stdout == "cancelled\n"
    assert told("cancel", waiting)["state"] == "cancelled"
    running = run("submit", "echo").stdout.strip()
    delivery = begun(store)
    assert "is running and cannot be cancelled" in run("cancel", running, code=JobExit.NOT).stderr
    assert run("kill", running).stdout == "running, and its kill is asked for\n"
    store.finish(delivery, attempts.Kill())
    assert "was killed already" in run("kill", running, code=JobExit.NOT).stderr


def test_a_failed_job_is_replayed(dsn, store):
    job_id = run("submit", "echo").stdout.strip()
    assert "is pending; only one that has failed" in run("replay", job_id, code=JobExit.NOT).stderr
    failed(store)
    assert run("replay", job_id).stdout == "pending\n"


def test_jobs_are_listed(dsn, store):
    ids = [run("submit", name).stdout.strip() for name in ("echo", "rust#send", "echo")]
    failed(store)
    lines = run("list").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["id", *ids[::-1]]
    found = [json.loads(line) for line in run("list", "--state", "failed", "--json").stdout.splitlines()]
    assert [one["error"]["code"] for one in found] == ["executor_error"]
    assert len(run("list", "--kind", "rust", "--function", "send").stdout.splitlines()) == 2
    first = run("list", "--limit", "1")
    assert "there are more; --before " in first.stderr
    number = first.stderr.partition("--before ")[2].split()[0]
    assert [line.split()[1] for line in run("list", "--before", number).stdout.splitlines()][1:] == ids[1::-1]
    assert run("list", "--tenant", "nobody").stdout == "there are no jobs of that kind\n"
    assert "is no state of a job" in run("list", "--state", "done", code=JobExit.FAILED).stderr


def test_who_is_not_there_and_what_is_out_of_reach_have_their_own_codes(dsn, monkeypatch):
    for command in ("show", "wait", "cancel", "kill", "replay"):
        assert "there is no job 'nobody'" in run(command, "nobody", code=JobExit.NOT).stderr
    assert told("show", "nobody", code=JobExit.NOT)["exit_code"] == JobExit.NOT
    monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://postgres@127.0.0.1:{free_port()}/x")
    assert "out of reach" in run("list", code=JobExit.FAILED).stderr
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    assert "set ERGON_POSTGRES__DSN" in run("list", code=JobExit.FAILED).stderr


# -- cron -------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_cron_entries_are_listed_paused_resumed_and_run(dsn, store):
    assert run("cron", "list").stdout == "there are no cron entries\n"
    with JobClient(dsn) as client:
        client.schedule(Cron("nightly", "0 3 * * *", "echo", [7], zone="Europe/Berlin"))
        client.schedule(Cron("yearly", "0 0 1 1 *", "x"))
    head, nightly, yearly = run("cron", "list").stdout.splitlines()
    assert head.split() == ["name", "expression", "zone", "kind", "function", "misfire", "next", "last"]
    assert nightly.startswith("nightly  0 3 * * *   Europe/Berlin  python  echo      once     20")
    assert yearly.endswith("-01-01T00:00:00.000Z")
    assert "paused" in run("cron", "pause", "nightly").stdout
    assert told("cron", "pause", "nightly")["enabled"] is False
    assert "paused" not in run("cron", "resume", "nightly").stdout
    made = told("cron", "run-now", "nightly")
    assert store.fetched()[0].transaction.payload.body["args"] == [7]
    assert told("show", made["id"])["unique_key"] is None
    assert run("cron", "run-now", "nightly").stdout.strip() != made["id"]
    lines = run("cron", "list", "--json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["nightly", "yearly"]


@pytest.mark.parametrize("command", ["pause", "resume", "run-now"])
def test_an_entry_that_is_not_there_is_said(dsn, command):
    assert "there is no cron entry 'nobody'" in run("cron", command, "nobody", code=JobExit.NOT).stderr
