from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ergon_framework.cli import child, run, summary
from ergon_framework.cli import main as command
from ergon_framework.cli.app import app
from ergon_framework.cli.logs import configure
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.process import Ended, Order
from ergon_framework.runner.stages import Stage
from ergon_framework.runner.supervisor import Ran
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import End, Report

APP = """
from ergon_framework import BusinessError, MemoryConnector, Transaction, consumer

queue = MemoryConnector("orders")
queue.dispatch([Transaction("order-1", "good"), Transaction("order-2", "[bold]")])

@consumer(queue)
def charge(order):
    if order != "good":
        raise BusinessError(f"declined {order}")
"""


@pytest.fixture
def ergon(tmp_path, monkeypatch):
    (tmp_path / "cliapp.py").write_text(APP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # It would end this process, the tests' own, when the time of the command is over.
    monkeypatch.setattr("ergon_framework.cli.run.guard", lambda _ended: None)
    yield lambda *words: CliRunner().invoke(app, words)
    sys.modules.pop("cliapp", None)


def test_the_summary_counts_outcomes_and_names_failures(ergon):
    done = ergon("run", "cliapp:charge")
    assert done.exit_code == Exit.OK
    assert [line.split(maxsplit=1) for line in done.stdout.splitlines()] == [
        ["charge"],
        ["ended", "the queue was empty"],
        ["succeeded", "1"],
        ["failed", "1"],
        ["order-2", "BUSINESS: declined [bold] (1 attempt)"],
    ]


def test_json_is_one_line_with_the_report(ergon):
    done = ergon("run", "cliapp:charge", "--json", "--limit", "1", "--once")
    told = json.loads(done.stdout)
    assert (told["task"], told["end"], told["started"], told["exit_code"]) == ("charge", "limit", 1, 0)


@pytest.mark.parametrize("words", [("run", "cliapp:nothing"), ("run", "cliapp:charge", "--limit", "-1"), ("rum",)])
def test_what_cannot_be_run_is_a_usage_error(ergon, words):
    assert ergon(*words).exit_code == Exit.USAGE


def test_help_shows_an_example_and_version_the_version(ergon):
    assert "ergon run app:charge --streaming" in ergon("run", "--help").stdout
    assert "run" in ergon("--help").stdout
    assert ergon("--version").stdout.startswith("ergon ")


def test_on_a_terminal_the_summary_is_a_table_and_an_error_is_no_markup(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(summary, "Console", lambda: Console(force_terminal=True, width=80))
    report = Report(end=End.STOP, abandoned=2, refused={"expired": 3})
    summary.show("charge", Ended(report))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("charge", "stopped by a signal", "still running", "refused, expired"))


@pytest.mark.parametrize(
    "ended, said", [(Ended(None, forced=True), "left without the task"), (Ended(None, OSError("x")), "failed")]
)
def test_without_a_report_the_summary_still_says_how_it_ended(ended, said, capsys):
    summary.show("charge", ended)
    assert said in capsys.readouterr().out
    assert json.loads(summary.as_line("charge", ended))["exit_code"] == ended.exit


def test_without_its_libraries_the_command_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == Exit.USAGE
    assert "ergon-framework[cli]" in capsys.readouterr().err


def test_the_command_is_the_app(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ergon", "--version"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("ergon ")


def test_the_help_has_the_whole_sentence_of_each_command():
    said = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "run Run a task until its queue or input is empty, its limit is reached, or a signal comes." in said
    assert "..." not in said.partition("Commands:")[2]


@pytest.mark.parametrize("level, heard", [("INFO", False), ("ERROR", False), ("DEBUG", True)])
def test_talkative_libraries_are_heard_at_debug_only(level, heard):
    client = logging.getLogger("pika")
    before = client.level
    client.setLevel(logging.NOTSET)
    try:
        configure(level)
        assert client.isEnabledFor(logging.ERROR) is heard
    finally:
        client.setLevel(before)


def test_what_a_program_says_of_its_libraries_stays():
    client = logging.getLogger("pika")
    before = client.level
    client.setLevel(logging.INFO)
    try:
        configure("WARNING")
        assert client.level == logging.INFO
    finally:
        client.setLevel(before)


# -- several processes, settings and probes -------------------------------------------------------


def test_several_processes_are_told_as_one(ergon, tmp_path):
    # A name that the standard library has too: it must not stand in the way of what a process begins with.
    (tmp_path / "queue.py").write_text("raise SystemExit(9)", encoding="utf-8")
    done = ergon("run", "cliapp:charge", "--processes", "2")
    assert done.exit_code == Exit.OK
    assert [line.split(maxsplit=1) for line in done.stdout.splitlines()] == [
        ["charge"],
        ["ended", "the queue was empty"],
        ["processes", "2, replaced 0"],
        ["succeeded", "2"],
        ["failed", "2"],
        ["order-2", "BUSINESS: declined [bold] (1 attempt)"],
        ["order-2", "BUSINESS: declined [bold] (1 attempt)"],
    ]


def test_several_processes_are_one_line_of_json(ergon):
    told = json.loads(ergon("run", "cliapp:charge", "--processes", "2", "--json").stdout)
    assert (told["task"], told["exit_code"], told["processes"], told["restarts"]) == ("charge", 0, 2, 0)
    assert (told["ends"], told["started"], told["counts"]["failed"]) == ({"empty": 2}, 4, 2)


def test_why_a_run_was_given_up_is_told_without_a_report(ergon, tmp_path):
    (tmp_path / "cliapp.py").write_text("import os; os._exit(9)", encoding="utf-8")
    (tmp_path / "ergon.toml").write_text("[run]\nrestart = {attempts = 1}\n", encoding="utf-8")
    done = ergon("run", "cliapp:charge", "--processes", "2")
    assert (done.exit_code, done.stdout) == (Exit.FLAPPING, "")
    assert "process 1 died 1 times in a row" in done.stderr
    assert "exit code 9" in done.stderr


def test_the_rows_of_several_processes_name_what_was_refused_and_what_still_runs(capsys):
    report = {"task": "charge", "end": None, "abandoned": 1, "refused": {"expired": 2}}
    summary.show_all("charge", Ran(Exit.FORCED, [report, report], why="it would not end"))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("it would not end", "still running     2", "refused, expired  4"))


def test_the_file_is_obeyed_and_the_options_win(ergon, tmp_path):
    text = "[tasks.charge.policy.loop]\nlimit = 1\n[run.probes]\nfile = 'probe'\n[logging]\nlevel = 'error'\n"
    (tmp_path / "other.toml").write_text(text, encoding="utf-8")
    words = ("run", "cliapp:charge", "--json", "--config", "other.toml")
    assert json.loads(ergon(*words).stdout)["started"] == 1
    assert json.loads(ergon(*words, "--limit", "0").stdout)["started"] == 0


def test_where_the_probes_are_is_said_when_it_was_left_to_chance(ergon):
    assert "ergon: probes on http://127.0.0.1:" in ergon("run", "cliapp:charge", "--probe-port", "0").stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (("--streaming", "--once", "--limit", "0"), "give one of the two"),
        (("--config", "none.toml"), "there is no configuration file none.toml"),
        (("--probe-file", "none/probe"), "cannot be written"),
        (("--processes", "0"), "--processes"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(ergon, words, said):
    done = ergon("run", "cliapp:charge", *words)
    assert done.exit_code == Exit.USAGE
    assert said in " ".join(done.stderr.split())


@pytest.mark.spec("RUN-03")
def test_an_unknown_variable_is_a_usage_error(ergon, monkeypatch):
    monkeypatch.setenv("ERGON_RUN__PROCESES", "2")
    done = ergon("run", "cliapp:charge")
    assert done.exit_code == Exit.USAGE
    assert "did you mean 'run.processes'?" in done.stderr


@pytest.mark.spec("DX-13")
@pytest.mark.parametrize("processes", [1, 2])
def test_each_process_logs_one_start_line(ergon, tmp_path, processes):
    command = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()", "run", "cliapp:charge"]
    command += ["--log-level", "info", "--processes", str(processes)]
    env = {**os.environ, "ERGON_LOGGING__FORMAT": "json"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    started = [line for line in lines if line["event"] == "worker started"]
    assert len(started) == processes
    for line in started:
        assert (line["level"], line["task"], line["queue"]) == ("info", "charge", "orders")
        assert (line["concurrency"], line["version"]) == (
            ConsumerPolicy().loop.concurrency.value,
            version("ergon-framework"),
        )
    assert len({line["pid"] for line in started}) == processes


def test_a_stage_is_logged_with_the_process_that_entered_it(caplog):
    caplog.set_level(logging.INFO)
    run.enter(Stage.DRAINING)
    run.enter(Stage.KILLED, number=2)
    assert [(record.levelname, record.stage) for record in caplog.records] == [
        ("INFO", "draining"),
        ("ERROR", "killed"),
    ]
    assert caplog.records[1].number == 2


def test_an_order_before_anything_was_loaded_ends_the_process_and_later_ones_go_to_it(monkeypatch):
    left, orders = [], child.Orders()

    class Gone(BaseException): ...

    def leave(code):
        left.append(code)
        raise Gone

    monkeypatch.setattr(child.os, "_exit", leave)
    with pytest.raises(Gone):
        orders(Order.STOP)
    assert left == [Exit.OK]
    heard = []
    orders.go_to(type("Process", (), {"order": lambda _, order: heard.append(order)})())
    orders(Order.HURRY)
    assert heard == [Order.HURRY]
