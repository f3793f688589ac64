"""Check ``ergon provider``: what it shows to operators, which changes it accepts, and how it exits."""

from __future__ import annotations

import json
import sys
import time

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.provider import ProviderExit
from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.providers.postgres.retention import _RETENTION_LOCK_ID as TURN
from tests.integration.metering import make_attempt, query
from tests.servers.postgres import free_port

SECRET = "open-sesame"
PROVIDER_ARGUMENTS = ["pay", "charging", "--tenant", "acme"]
AUDIT_ARGUMENTS = ["--reason", "INC-7", "--actor", "ops"]


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


def run_provider(*arguments, code=ProviderExit.OK, **environ):
    result = CliRunner().invoke(app, ["provider", *arguments], env=environ)
    assert result.exit_code == code, result.output
    return result.stdout


def run_json(*arguments, code=ProviderExit.OK):
    return json.loads(run_provider(*arguments, "--json", code=code))


def record_calls(dsn):
    writer = MetricsWriter(dsn)
    rows = [make_attempt(duration_ms=80.0) for _ in range(19)]
    rows.append(
        make_attempt(outcome=AttemptOutcome.FAILED, reason_code=ReasonCode.TIMEOUT, created_at=time.time() - 60)
    )
    for row in rows:
        writer.record(row)
    assert writer.close(20)


def insert_quota(dsn, used_count):
    query(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, used_count, remaining_count) values ('acme', 'pay', 'charging', "
        # The state tells windows of several lengths apart by their microseconds.
        "date_trunc('hour', now()) + interval '1 microsecond', "
        "date_trunc('hour', now()) + interval '1 hour', 100, %s, %s)",
        used_count,
        100 - used_count,
    )


@pytest.mark.spec("DX-44")
def test_missing_call_records_are_distinguished_from_no_calls(dsn):
    insert_quota(dsn, 25)
    assert "not recorded" in run_provider("health", "--tenant", "acme").splitlines()[2]
    writer = MetricsWriter(dsn)
    writer.record(make_attempt(created_at=time.time() - 7200))
    assert writer.close(20)
    assert "none in the last hour" in run_provider("health", "--tenant", "acme").splitlines()[2]


@pytest.mark.spec("PRV-14")
def test_health_is_a_line_for_each_provider(dsn):
    record_calls(dsn)
    insert_quota(dsn, 25)
    lines = run_provider("health", "--tenant", "acme").splitlines()
    assert lines[0].startswith("acme at ")
    assert lines[1].split()[:3] == ["provider", "capability", "breaker"]
    for word in ("pay", "charging", "closed", "95.0 %", "80 ms", "25/100", "timeout", "ago"):
        assert word in lines[2]
    assert "█" not in lines[2]


def test_on_a_terminal_health_is_drawn(dsn, monkeypatch, capsys):
    record_calls(dsn)
    insert_quota(dsn, 95)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        app(["provider", "health", "--tenant", "acme"])
    output = capsys.readouterr().out
    assert "█████████▌" in output
    assert "● closed" in output


@pytest.mark.spec("PRV-14")
def test_json_output_follows_the_contract(dsn):
    record_calls(dsn)
    summary = run_json("health", "--tenant", "acme")
    (provider,) = summary["providers"]
    assert (summary["tenant_id"], provider["success_rate_1h"], provider["quota"], provider["last_error_code"]) == (
        "acme",
        0.95,
        None,
        "timeout",
    )
    assert summary["generated_at"].endswith("Z")
    assert run_json("health", "--tenant", "unknown")["providers"] == []
    assert "has called no provider yet" in run_provider("health", "--tenant", "unknown")


def test_a_check_reports_by_its_exit_code_whether_a_provider_is_blocked(dsn):
    record_calls(dsn)
    run_provider("health", "--tenant", "acme", "--check")
    insert_quota(dsn, 100)
    run_provider("health", "--tenant", "acme", "--check", code=ProviderExit.INCOMPLETE)
    run_provider("health", "--tenant", "acme")


@pytest.mark.spec("PRV-32")
def test_a_breaker_is_forced_open_disabled_and_cleared(dsn):
    assert "no breakers" in run_provider("breaker", "list")
    (forced_open,) = run_json("breaker", "force-open", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS, "--for", "30m")
    assert (forced_open["override"], forced_open["account"]["tenant_id"]) == ("force_open", "acme")
    assert run_json("health", "--tenant", "acme")["providers"][0]["breaker_state"] == "open"
    assert "force_open" in run_provider("breaker", "list", "--tenant", "acme")
    (disabled,) = run_json("breaker", "disable", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS, "--for", "10s")
    assert disabled["override"] == "disable"
    (cleared,) = run_json("breaker", "lift", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS)
    assert cleared["override"] is None
    overrides = run_json("overrides")
    assert [one["action"] for one in overrides] == ["lift", "disable", "force_open"]
    assert {(one["actor"], one["reason"]) for one in overrides} == {("ops", "INC-7")}
    assert "INC-7" in run_provider("overrides", "--tenant", "acme")


@pytest.mark.spec("PRV-32")
def test_the_scope_of_all_tenants_is_a_star(dsn):
    run_provider("breaker", "force-open", "pay", "charging", "--tenant", "*", *AUDIT_ARGUMENTS, "--for", "1h")
    (breaker,) = run_json("breaker", "list", "--tenant", "*", "--provider", "pay")
    assert breaker["account"] == {"tenant_id": "*", "provider_name": "pay", "capability": "charging"}
    assert run_json("breaker", "list", "--provider", "other") == []


@pytest.mark.spec("PRV-32")
def test_quota_is_listed_and_extended(dsn):
    assert "no quotas" in run_provider("quota", "list")
    insert_quota(dsn, 25)
    assert "25" in run_provider("quota", "list", "--tenant", "acme")
    (quota,) = run_json("quota", "list", "--tenant", "acme")
    assert (quota["used_count"], quota["kind"]) == (25, "hour")
    run_provider("quota", "extend", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS, "--calls", "50", "--for", "2h")
    (override,) = run_json("overrides")
    assert (override["action"], override["calls"]) == ("extend_quota", 50)
    assert run_json("quota", "lost") == []
    assert "no lost reservations" in run_provider("quota", "lost")


def test_the_actor_comes_from_the_environment(dsn):
    arguments = ["breaker", "lift", *PROVIDER_ARGUMENTS, "--reason", "x"]
    run_provider(*arguments, ERGON_ACTOR="jo")
    run_provider(*arguments, USER="alex", ERGON_ACTOR="")
    assert [one["actor"] for one in run_json("overrides")] == ["alex", "jo"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["breaker", "force-open", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS],
        ["breaker", "force-open", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS, "--for", "soon"],
        ["breaker", "force-open", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS, "--for", "0s"],
        ["breaker", "force-open", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS, "--for", "99d"],
        ["breaker", "force-open", "pay", "charging", *AUDIT_ARGUMENTS, "--for", "1h"],
        ["breaker", "lift", *PROVIDER_ARGUMENTS, "--actor", "x"],
        ["breaker", "lift", *PROVIDER_ARGUMENTS, "--actor", "x", "--reason", " "],
        ["quota", "extend", *PROVIDER_ARGUMENTS, *AUDIT_ARGUMENTS, "--calls", "-1", "--for", "1h"],
        ["health"],
    ],
)
def test_invalid_arguments_change_nothing(dsn, arguments):
    run_provider(*arguments, code=ProviderExit.FAILED)
    assert run_json("overrides") == []


@pytest.mark.spec("PRV-26")
def test_retention_reports_what_it_did(dsn):
    result = run_json("retention")
    assert len(result["made"]) == 5
    assert "partitions created 0, dropped 0; rows deleted 0" in run_provider("retention")
    with psycopg.connect(dsn) as other:
        other.execute("select pg_advisory_xact_lock(%s)", [TURN])
        assert "another process is running retention" in run_provider("retention", code=ProviderExit.INCOMPLETE)


@pytest.mark.parametrize(
    "arguments", [["health", "--tenant", "acme"], ["quota", "list"], ["breaker", "list"], ["overrides"], ["retention"]]
)
def test_an_unavailable_database_is_reported_without_its_password(arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://app:{SECRET}@127.0.0.1:{free_port()}/shop")
    result = CliRunner().invoke(app, ["provider", *arguments])
    assert (result.exit_code, result.stdout) == (ProviderExit.FAILED, "")
    assert "is unavailable" in result.stderr
    assert SECRET not in result.output
    broken = json.loads(CliRunner().invoke(app, ["provider", *arguments, "--json"]).stdout)
    assert broken["exit_code"] == ProviderExit.FAILED
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    assert "set ERGON_POSTGRES__DSN" in CliRunner().invoke(app, ["provider", *arguments]).stderr


def test_a_database_without_the_tables_is_reported_with_the_upgrade_command(postgres, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", postgres.dsn())
    result = CliRunner().invoke(app, ["provider", "health", "--tenant", "acme"])
    assert result.exit_code == ProviderExit.FAILED
    assert "ergon db upgrade" in result.stderr


def test_stored_control_characters_and_markup_are_not_interpreted(dsn):
    query(
        dsn,
        "insert into ergon.provider_health_states (tenant_id, provider_name, capability) values ('acme', %s, '[red]x')",
        "\x1b[31mpay",
    )
    output = run_provider("health", "--tenant", "acme")
    assert "\x1b" not in output
    assert "[red]x" in output


COMMANDS = ["health", "quota list", "quota extend", "quota lost", "breaker list", "breaker force-open"]
COMMANDS += ["breaker disable", "breaker lift", "overrides", "retention"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_and_the_exit_codes(command):
    output = " ".join(CliRunner().invoke(app, ["provider", *command.split(), "--help"]).stdout.split())
    assert f"ergon provider {command}" in output.partition("Example: ")[2]
    assert "Exit codes: 0 " in output


def test_every_exit_code_has_a_meaning():
    assert all(code.meaning for code in ProviderExit)
