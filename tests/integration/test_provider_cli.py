"""``ergon provider``: what operators see, what they may say, and how the command ends."""

from __future__ import annotations

import json
import sys
import time

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.provider_work import ProviderExit
from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.sql.retention import _TURN as TURN
from ergon_framework.providers.sql.writer import MetricsWriter
from tests.integration.metering import ask, attempt
from tests.servers.postgres import free_port

SECRET = "open-sesame"
WHO = ["pay", "charging", "--tenant", "acme"]
WHY = ["--reason", "INC-7", "--actor", "ops"]


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


def run(*words, code=ProviderExit.OK, **environ):
    done = CliRunner().invoke(app, ["provider", *words], env=environ)
    assert done.exit_code == code, done.output
    return done.stdout


def told(*words, code=ProviderExit.OK):
    return json.loads(run(*words, "--json", code=code))


def called(dsn):
    writer = MetricsWriter(dsn)
    rows = [attempt(duration_ms=80.0) for _ in range(19)]
    rows.append(attempt(outcome=Outcome.FAILED, reason_code=ReasonCode.TIMEOUT, created_at=time.time() - 60))
    for row in rows:
        writer.record(row)
    assert writer.close(20)


def limited(dsn, used):
    ask(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, used_count, remaining_count) values ('acme', 'pay', 'charging', "
        # By the microseconds the books tell windows of several lengths apart.
        "date_trunc('hour', now()) + interval '1 microsecond', "
        "date_trunc('hour', now()) + interval '1 hour', 100, %s, %s)",
        used,
        100 - used,
    )


@pytest.mark.spec("DX-44")
def test_calls_that_nobody_recorded_are_not_said_to_be_none(dsn):
    limited(dsn, 25)
    assert "not recorded" in run("health", "--tenant", "acme").splitlines()[2]
    writer = MetricsWriter(dsn)
    writer.record(attempt(created_at=time.time() - 7200))
    assert writer.close(20)
    assert "none in the last hour" in run("health", "--tenant", "acme").splitlines()[2]


@pytest.mark.spec("PRV-14")
def test_health_is_a_line_for_each_provider(dsn):
    called(dsn)
    limited(dsn, 25)
    lines = run("health", "--tenant", "acme").splitlines()
    assert lines[0].startswith("acme at ")
    assert lines[1].split()[:3] == ["provider", "capability", "breaker"]
    for word in ("pay", "charging", "closed", "95.0 %", "80 ms", "25/100", "timeout", "ago"):
        assert word in lines[2]
    assert "█" not in lines[2]


def test_on_a_terminal_it_is_a_picture(dsn, monkeypatch, capsys):
    called(dsn)
    limited(dsn, 95)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        app(["provider", "health", "--tenant", "acme"])
    shown = capsys.readouterr().out
    assert "█████████▌" in shown
    assert "● closed" in shown


@pytest.mark.spec("PRV-14")
def test_as_json_it_is_the_contract(dsn):
    called(dsn)
    found = told("health", "--tenant", "acme")
    (one,) = found["providers"]
    assert (found["tenant_id"], one["success_rate_1h"], one["quota"], one["last_error_code"]) == (
        "acme",
        0.95,
        None,
        "timeout",
    )
    assert found["generated_at"].endswith("Z")
    assert told("health", "--tenant", "nobody")["providers"] == []
    assert "has called no provider yet" in run("health", "--tenant", "nobody")


def test_a_check_says_by_its_exit_code_whether_something_is_held_back(dsn):
    called(dsn)
    run("health", "--tenant", "acme", "--check")
    limited(dsn, 100)
    run("health", "--tenant", "acme", "--check", code=ProviderExit.LEFT)
    run("health", "--tenant", "acme")


@pytest.mark.spec("PRV-32")
def test_a_breaker_is_forced_open_disabled_and_lifted(dsn):
    assert "no breakers" in run("breaker", "list")
    (opened,) = told("breaker", "force-open", *WHO, *WHY, "--for", "30m")
    assert (opened["override"], opened["account"]["tenant_id"]) == ("force_open", "acme")
    assert told("health", "--tenant", "acme")["providers"][0]["breaker_state"] == "open"
    assert "force_open" in run("breaker", "list", "--tenant", "acme")
    (disabled,) = told("breaker", "disable", *WHO, *WHY, "--for", "10s")
    assert disabled["override"] == "disable"
    (lifted,) = told("breaker", "lift", *WHO, *WHY)
    assert lifted["override"] is None
    said = told("overrides")
    assert [one["action"] for one in said] == ["lift", "disable", "force_open"]
    assert {(one["actor"], one["reason"]) for one in said} == {("ops", "INC-7")}
    assert "INC-7" in run("overrides", "--tenant", "acme")


@pytest.mark.spec("PRV-32")
def test_the_account_of_all_tenants_is_a_star(dsn):
    run("breaker", "force-open", "pay", "charging", "--tenant", "*", *WHY, "--for", "1h")
    (found,) = told("breaker", "list", "--tenant", "*", "--provider", "pay")
    assert found["account"] == {"tenant_id": "*", "provider_name": "pay", "capability": "charging"}
    assert told("breaker", "list", "--provider", "other") == []


@pytest.mark.spec("PRV-32")
def test_quota_is_listed_and_extended(dsn):
    assert "no quotas" in run("quota", "list")
    limited(dsn, 25)
    assert "25" in run("quota", "list", "--tenant", "acme")
    (found,) = told("quota", "list", "--tenant", "acme")
    assert (found["used_count"], found["kind"]) == (25, "hour")
    run("quota", "extend", *WHO, *WHY, "--calls", "50", "--for", "2h")
    (said,) = told("overrides")
    assert (said["action"], said["calls"]) == ("extend_quota", 50)
    assert told("quota", "lost") == []
    assert "no lost reservations" in run("quota", "lost")


def test_who_says_so_comes_from_the_environment(dsn):
    words = ["breaker", "lift", *WHO, "--reason", "x"]
    run(*words, ERGON_ACTOR="jo")
    run(*words, USER="alex", ERGON_ACTOR="")
    assert [one["actor"] for one in told("overrides")] == ["alex", "jo"]


@pytest.mark.parametrize(
    "words",
    [
        ["breaker", "force-open", *WHO, *WHY],
        ["breaker", "force-open", *WHO, *WHY, "--for", "soon"],
        ["breaker", "force-open", *WHO, *WHY, "--for", "0s"],
        ["breaker", "force-open", *WHO, *WHY, "--for", "99d"],
        ["breaker", "force-open", "pay", "charging", *WHY, "--for", "1h"],
        ["breaker", "lift", *WHO, "--actor", "x"],
        ["breaker", "lift", *WHO, "--actor", "x", "--reason", " "],
        ["quota", "extend", *WHO, *WHY, "--calls", "-1", "--for", "1h"],
        ["health"],
    ],
)
def test_a_word_that_cannot_be_meant_changes_nothing(dsn, words):
    run(*words, code=ProviderExit.FAILED)
    assert told("overrides") == []


@pytest.mark.spec("PRV-26")
def test_retention_says_what_it_did(dsn):
    done = told("retention")
    assert len(done["made"]) == 5
    assert "partitions made 0, dropped 0; rows removed 0" in run("retention")
    with psycopg.connect(dsn) as other:
        other.execute("select pg_advisory_xact_lock(%s)", [TURN])
        assert "somebody else is at it" in run("retention", code=ProviderExit.LEFT)


@pytest.mark.parametrize(
    "words", [["health", "--tenant", "acme"], ["quota", "list"], ["breaker", "list"], ["overrides"], ["retention"]]
)
def test_a_database_out_of_reach_is_told_without_its_password(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://app:{SECRET}@127.0.0.1:{free_port()}/shop")
    done = CliRunner().invoke(app, ["provider", *words])
    assert (done.exit_code, done.stdout) == (ProviderExit.FAILED, "")
    assert "out of reach" in done.stderr
    assert SECRET not in done.output
    broken = json.loads(CliRunner().invoke(app, ["provider", *words, "--json"]).stdout)
    assert broken["exit_code"] == ProviderExit.FAILED
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    assert "set ERGON_POSTGRES__DSN" in CliRunner().invoke(app, ["provider", *words]).stderr


def test_a_database_without_the_tables_is_told_what_to_do(postgres, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", postgres.dsn())
    done = CliRunner().invoke(app, ["provider", "health", "--tenant", "acme"])
    assert done.exit_code == ProviderExit.FAILED
    assert "ergon db upgrade" in done.stderr


def test_what_a_table_holds_is_not_obeyed_by_a_terminal(dsn):
    ask(
        dsn,
        "insert into ergon.provider_health_states (tenant_id, provider_name, capability) values ('acme', %s, '[red]x')",
        "\x1b[31mpay",
    )
    shown = run("health", "--tenant", "acme")
    assert "\x1b" not in shown
    assert "[red]x" in shown


COMMANDS = ["health", "quota list", "quota extend", "quota lost", "breaker list", "breaker force-open"]
COMMANDS += ["breaker disable", "breaker lift", "overrides", "retention"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_and_the_exit_codes(command):
    shown = " ".join(CliRunner().invoke(app, ["provider", *command.split(), "--help"]).stdout.split())
    assert f"ergon provider {command}" in shown.partition("Example: ")[2]
    assert "Exit codes: 0 " in shown


def test_every_exit_code_has_a_meaning():
    assert all(code.meaning for code in ProviderExit)
