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
from ergon_framework.cli.output import configure_logging
from ergon_framework.runner.exit import RunExit
from ergon_framework.runner.process import ParentCommand, RunResult, ShutdownStage
from ergon_framework.runner.supervisor import SupervisorResult
from ergon_framework.runner.task_runner import TaskResult
from ergon_framework.worker.policies import ConsumerPolicy
from ergon_framework.worker.report import Report, StopReason

APP = """
from ergon_framework import BusinessError, MemoryConnector, Transaction, consumer

queue = MemoryConnector("orders")
queue.dispatch([Transaction("good", id="order-1"), Transaction("[bold]", id="order-2")])

@consumer(queue)
def charge(order):
    if order != "good":
        raise BusinessError(f"declined {order}")
"""


@pytest.fixture
def run_cli(tmp_path, monkeypatch):
    (tmp_path / "cliapp.py").write_text(APP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # It would end this process, that of the tests, when the time of the command is over.
    monkeypatch.setattr("ergon_framework.cli.run.force_exit_at_deadline", lambda _ended: None)
    yield lambda *words: CliRunner().invoke(app, words)
    sys.modules.pop("cliapp", None)


def test_the_summary_counts_outcomes_and_names_failures(run_cli):
    result = run_cli("run", "cliapp:charge")
    assert result.exit_code == RunExit.OK
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()] == [
        ["charge"],
        ["ended", "the queue was empty"],
        ["succeeded", "1"],
        ["failed", "1"],
        ["order-2", "BUSINESS: declined [bold] (1 attempt)"],
    ]


def test_json_is_one_line_with_the_report(run_cli):
    result = run_cli("run", "cliapp:charge", "--json", "--limit", "1", "--once")
    report = json.loads(result.stdout)
    assert (report["task"], report["stop_reason"], report["started"], report["exit_code"]) == ("charge", "limit", 1, 0)


@pytest.mark.parametrize("arguments", [("run", "cliapp:nothing"), ("run", "cliapp:charge", "--limit", "-1"), ("rum",)])
def test_an_invalid_run_command_is_a_usage_error(run_cli, arguments):
    assert run_cli(*arguments).exit_code == RunExit.USAGE


def test_help_shows_an_example_and_version_the_version(run_cli):
    assert "ergon run app:charge --streaming" in run_cli("run", "--help").stdout
    assert "run" in run_cli("--help").stdout
    assert run_cli("--version").stdout.startswith("ergon ")


def test_on_a_terminal_the_summary_is_a_table_without_markup_in_errors(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(summary, "Console", lambda: Console(force_terminal=True, width=80))
    report = Report(stop_reason=StopReason.STOP, still_running=2, rejected={"expired": 3})
    summary.show(RunResult((TaskResult("charge", report),)))
    output = capsys.readouterr().out
    assert all(text in output for text in ("charge", "stopped by a signal", "still running", "rejected, expired"))


@pytest.mark.parametrize(
    "result, expected",
    [
        (RunResult((TaskResult("charge", None),), forced=True), "exited while the task was still running"),
        (RunResult((TaskResult("charge", None, OSError("x")),)), "failed"),
    ],
)
def test_without_a_report_the_summary_states_the_result(result, expected, capsys):
    summary.show(result)
    assert expected in capsys.readouterr().out
    assert json.loads(summary.to_json_line(result))["exit_code"] == result.exit


def test_without_its_libraries_the_command_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == RunExit.USAGE
    assert "ergon-framework[cli]" in capsys.readouterr().err


def test_the_command_is_the_app(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ergon", "--version"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("ergon ")


def test_the_help_has_the_whole_sentence_of_each_command():
    help_text = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert (
        "run Run tasks until their queues or input are empty, their limit is reached, or a signal arrives." in help_text
    )
    assert "..." not in help_text.partition("Commands:")[2]


@pytest.mark.parametrize("level, is_enabled", [("INFO", False), ("ERROR", False), ("DEBUG", True)])
def test_verbose_client_libraries_log_at_debug_only(level, is_enabled):
    client = logging.getLogger("pika")
    previous_level = client.level
    client.setLevel(logging.NOTSET)
    try:
        configure_logging(level)
        assert client.isEnabledFor(logging.ERROR) is is_enabled
    finally:
        client.setLevel(previous_level)


def test_a_level_that_the_program_set_for_a_library_stays():
    client = logging.getLogger("pika")
    previous_level = client.level
    client.setLevel(logging.INFO)
    try:
        configure_logging("WARNING")
        assert client.level == logging.INFO
    finally:
        client.setLevel(previous_level)


# -- several processes, settings and probes -------------------------------------------------------


def test_several_processes_print_one_summary(run_cli, tmp_path):
    # The standard library has a module of this name too: it must not shadow the modules that a process starts with.
    (tmp_path / "queue.py").write_text("raise SystemExit(9)", encoding="utf-8")
    result = run_cli("run", "cliapp:charge", "--processes", "2")
    assert result.exit_code == RunExit.OK
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()] == [
        ["charge"],
        ["ended", "the queue was empty"],
        ["processes", "2, restarts: 0"],
        ["succeeded", "2"],
        ["failed", "2"],
        ["order-2", "BUSINESS: declined [bold] (1 attempt)"],
        ["order-2", "BUSINESS: declined [bold] (1 attempt)"],
    ]


def test_several_processes_print_one_line_of_json(run_cli):
    report = json.loads(run_cli("run", "cliapp:charge", "--processes", "2", "--json").stdout)
    assert (report["task"], report["exit_code"], report["processes"], report["restarts"]) == ("charge", 0, 2, 0)
    assert (report["stop_reasons"], report["started"], report["counts"]["failed"]) == ({"empty": 2}, 4, 2)


def test_the_reason_for_giving_up_is_printed_without_a_report(run_cli, tmp_path):
    (tmp_path / "cliapp.py").write_text("import os; os._exit(9)", encoding="utf-8")
    (tmp_path / "ergon.toml").write_text("[run]\nrestart = {attempts = 1}\n", encoding="utf-8")
    result = run_cli("run", "cliapp:charge", "--processes", "2")
    assert (result.exit_code, result.stdout) == (RunExit.FLAPPING, "")
    assert "process 1 exited 1 times in a row" in result.stderr
    assert "exit code 9" in result.stderr


def test_the_summary_of_several_processes_names_rejections_and_running_calls(capsys):
    report = {"task": "charge", "stop_reason": None, "still_running": 1, "rejected": {"expired": 2}}
    reports = [{"tasks": [report]}, {"tasks": [report]}]
    summary.show_all(SupervisorResult(RunExit.FORCED, reports, reason="it would not end"))
    output = capsys.readouterr().out
    assert all(text in output for text in ("it would not end", "still running      2", "rejected, expired  4"))


def test_options_override_the_configuration_file(run_cli, tmp_path):
    text = "[tasks.charge.policy.loop]\nlimit = 1\n[run.probes]\nfile = 'probe'\n[logging]\nlevel = 'error'\n"
    (tmp_path / "other.toml").write_text(text, encoding="utf-8")
    arguments = ("run", "cliapp:charge", "--json", "--config", "other.toml")
    assert json.loads(run_cli(*arguments).stdout)["started"] == 1
    assert json.loads(run_cli(*arguments, "--limit", "0").stdout)["started"] == 0


def test_a_random_probe_port_is_printed(run_cli):
    assert "ergon: probes on http://127.0.0.1:" in run_cli("run", "cliapp:charge", "--probe-port", "0").stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--streaming", "--once", "--limit", "0"), "exclude each other; pass one of the two"),
        (("--config", "none.toml"), "there is no configuration file none.toml"),
        (("--probe-file", "none/probe"), "cannot be written"),
        (("--processes", "0"), "--processes"),
    ],
)
def test_incompatible_options_are_usage_errors(run_cli, arguments, message):
    result = run_cli("run", "cliapp:charge", *arguments)
    assert result.exit_code == RunExit.USAGE
    assert message in " ".join(result.stderr.split())


@pytest.mark.spec("RUN-03")
def test_an_unknown_variable_is_a_usage_error(run_cli, monkeypatch):
    monkeypatch.setenv("ERGON_RUN__PROCESES", "2")
    result = run_cli("run", "cliapp:charge")
    assert result.exit_code == RunExit.USAGE
    assert "did you mean 'run.processes'?" in result.stderr


@pytest.mark.spec("DX-13")
@pytest.mark.parametrize("processes", [1, 2])
def test_each_process_logs_one_start_line(run_cli, tmp_path, processes):
    command = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()", "run", "cliapp:charge"]
    command += ["--log-level", "info", "--processes", str(processes)]
    env = {**os.environ, "ERGON_LOGGING__FORMAT": "json"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
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
    run.log_stage(ShutdownStage.DRAINING)
    run.log_stage(ShutdownStage.KILLED, number=2)
    assert [(record.levelname, record.stage) for record in caplog.records] == [
        ("INFO", "draining"),
        ("ERROR", "killed"),
    ]
    assert caplog.records[1].number == 2


def test_a_stop_command_before_loading_exits_and_later_commands_reach_the_process(monkeypatch):
    exit_codes, commands = [], child.ParentCommands()

    class ProcessExited(BaseException): ...

    def record_exit(code):
        exit_codes.append(code)
        raise ProcessExited

    monkeypatch.setattr(child.os, "_exit", record_exit)
    with pytest.raises(ProcessExited):
        commands(ParentCommand.STOP)
    assert exit_codes == [RunExit.OK]
    received = []
    commands.attach(
        type("Process", (), {"handle_command": lambda _, parent_command: received.append(parent_command)})()
    )
    commands(ParentCommand.STOP_NOW)
    assert received == [ParentCommand.STOP_NOW]


MANY_APP = """
from ergon_framework import MemoryConnector, Transaction, consumer

def fill(name):
    queue = MemoryConnector(name)
    queue.dispatch([Transaction(id="1"), Transaction(id="2")])
    return queue

@consumer(fill("orders"))
def charge(order): ...

@consumer(fill("letters"))
async def email(letter): ...
"""


def test_a_module_runs_all_its_tasks_with_the_settings_of_each(run_cli, tmp_path):
    (tmp_path / "cliapp.py").write_text(MANY_APP, encoding="utf-8")
    (tmp_path / "ergon.toml").write_text("[tasks.email.policy.loop]\nlimit = 1\n", encoding="utf-8")
    result = run_cli("run", "cliapp", "--json")
    report = json.loads(result.stdout)
    assert [(each["task"], each["started"], each["stop_reason"]) for each in report["tasks"]] == [
        ("charge", 2, "empty"),
        ("email", 1, "limit"),
    ]
    assert report["exit_code"] == result.exit_code == RunExit.OK


@pytest.mark.parametrize(
    "option, message",
    [(("--policy", "policy.toml"), "ergon.toml"), (("--input", "-"), "--input is for one producer")],
)
def test_an_option_of_one_task_is_refused_for_several(run_cli, tmp_path, option, message):
    (tmp_path / "cliapp.py").write_text(MANY_APP, encoding="utf-8")
    result = run_cli("run", "cliapp:charge", "cliapp:email", *option)
    assert (result.exit_code, message in result.stderr) == (RunExit.USAGE, True)
