"""``ergon db`` where no database is needed: messages about missing or invalid settings."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.db import DbExit
from ergon_framework.database import migrate
from tests.servers.postgres import free_port

SECRET = "open-sesame"


def run_db(*arguments):
    return CliRunner().invoke(app, ["db", *arguments])


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)


@pytest.mark.parametrize("command", ["upgrade", "check"])
def test_without_an_address_the_error_names_the_setting(command):
    result = run_db(command)
    assert result.exit_code == DbExit.FAILED
    assert "set ERGON_POSTGRES__DSN" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["upgrade", "check"])
def test_an_unreachable_database_is_reported_without_its_password(command, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://app:{SECRET}@127.0.0.1:{free_port()}/shop")
    result = run_db(command)
    assert result.exit_code == DbExit.FAILED
    assert "is unavailable" in result.stderr
    assert "refused" in result.stderr
    assert result.stderr.endswith("to find its setting and the remedy, run: ergon doctor\n")
    assert SECRET not in result.output


@pytest.mark.parametrize("address", ["postgresql://app:{}@[host/shop", "mysql://app:{}@host/shop", "{} nonsense"])
def test_an_invalid_address_is_reported_without_repeating_it(address, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", address.format(SECRET))
    result = run_db("check")
    assert result.exit_code == DbExit.FAILED
    assert "expected something like postgresql://" in result.stderr
    assert SECRET not in result.output


def test_the_address_may_be_set_in_the_file(tmp_path):
    address = f"postgresql://app@127.0.0.1:{free_port()}/shop"
    (tmp_path / "other.toml").write_text(f'[postgres]\ndsn = "{address}"\n', encoding="utf-8")
    assert "is unavailable" in run_db("check", "--config", "other.toml").stderr


def test_an_error_is_an_object_in_json():
    result = run_db("check", "--json")
    output = json.loads(result.stdout)
    assert result.exit_code == output["exit_code"] == DbExit.FAILED
    assert "ERGON_POSTGRES__DSN" in output["error"]
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["upgrade", "check", "sql"])
def test_without_its_libraries_the_error_names_the_extra_to_install(command, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", "postgresql://unknown@127.0.0.1:1/none")
    monkeypatch.setitem(sys.modules, "alembic", None)
    result = run_db(command)
    assert result.exit_code == DbExit.FAILED
    assert "pip install 'ergon-framework[postgres]'" in result.stderr


def test_the_statements_need_no_database():
    result = run_db("sql")
    assert result.exit_code == DbExit.OK
    assert result.stdout == migrate.sql()
    assert result.stdout.startswith("BEGIN;")
    assert result.stdout.rstrip().endswith("COMMIT;")


def test_the_statements_since_a_revision_omit_earlier_revisions():
    result = run_db("sql", "--from-revision", "0001")
    assert result.exit_code == DbExit.OK
    assert "create table ergon.content" not in result.stdout.lower()
    assert "create table ergon.provider_keys" in result.stdout.lower()


def test_an_unknown_revision_is_reported_with_the_known_ones():
    result = run_db("sql", "--from-revision", "9999")
    assert result.exit_code == DbExit.FAILED
    assert "there is no revision '9999'; the revisions are 0001" in result.stderr


@pytest.mark.parametrize("command", ["upgrade", "check", "sql"])
def test_every_help_has_an_example_and_the_exit_codes(command):
    help_text = " ".join(run_db(command, "--help").stdout.split())
    assert "Example: " in help_text
    assert f"ergon db {command}" in help_text.partition("Example: ")[2]
    assert "Exit codes: 0 " in help_text


def test_every_exit_code_has_a_meaning():
    assert all(code.meaning for code in DbExit)
