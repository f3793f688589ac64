from __future__ import annotations

import json
import logging
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ergon_framework.cli import main as command
from ergon_framework.cli import summary
from ergon_framework.cli.app import app
from ergon_framework.cli.logs import Fielded
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.process import Ended
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


def test_a_log_line_ends_with_the_fields_that_were_given():
    record = logging.makeLogRecord({"msg": "transaction failed", "transaction_id": "order-3", "tenant": None})
    assert Fielded("%(message)s").format(record) == "transaction failed transaction_id=order-3"
