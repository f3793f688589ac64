"""``ergon db`` where no database is needed: what it says about what is missing or wrong."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.db import DbExit
from ergon_framework.schema import migrate
from tests.servers.postgres import free_port

SECRET = "open-sesame"


def run(*words):
    return CliRunner().invoke(app, ["db", *words])


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)


@pytest.mark.parametrize("command", ["upgrade", "check"])
def test_without_an_address_it_says_where_to_put_one(command):
    done = run(command)
    assert done.exit_code == DbExit.FAILED
    assert "set ERGON_POSTGRES__DSN" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["upgrade", "check"])
def test_a_database_out_of_reach_is_told_without_its_password(command, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", f"postgresql://app:{SECRET}@127.0.0.1:{free_port()}/shop")
    done = run(command)
    assert done.exit_code == DbExit.FAILED
    assert "cannot be reached" in done.stderr
    assert "refused" in done.stderr
    assert done.stderr.endswith("what to do: ergon doctor\n")
    assert SECRET not in done.output


@pytest.mark.parametrize("address", ["postgresql://app:{}@[host/shop", "mysql://app:{}@host/shop", "{} nonsense"])
def test_an_address_that_cannot_be_read_is_told_without_repeating_it(address, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", address.format(SECRET))
    done = run("check")
    assert done.exit_code == DbExit.FAILED
    assert "it looks like postgresql://" in done.stderr
    assert SECRET not in done.output


def test_the_address_may_stand_in_the_file(tmp_path):
    address = f"postgresql://app@127.0.0.1:{free_port()}/shop"
    (tmp_path / "other.toml").write_text(f'[postgres]\ndsn = "{address}"\n', encoding="utf-8")
    assert "cannot be reached" in run("check", "--config", "other.toml").stderr


def test_as_json_an_error_is_an_object_too():
    done = run("check", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == told["exit_code"] == DbExit.FAILED
    assert "ERGON_POSTGRES__DSN" in told["error"]
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["upgrade", "check", "sql"])
def test_without_its_libraries_it_says_what_to_install(command, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setitem(sys.modules, "alembic", None)
    done = run(command)
    assert done.exit_code == DbExit.FAILED
    assert "pip install 'ergon-framework[postgres]'" in done.stderr


def test_the_statements_need_no_database():
    done = run("sql")
    assert done.exit_code == DbExit.OK
    assert done.stdout == migrate.sql()
    assert done.stdout.startswith("BEGIN;")
    assert done.stdout.rstrip().endswith("COMMIT;")


def test_the_statements_since_a_revision_leave_out_what_came_before():
    done = run("sql", "--since", "0001")
    assert done.exit_code == DbExit.OK
    assert "create table ergon.content" not in done.stdout.lower()
    assert "create table ergon.provider_keys" in done.stdout.lower()


def test_an_unknown_revision_is_told_with_the_known_ones():
    done = run("sql", "--since", "9999")
    assert done.exit_code == DbExit.FAILED
    assert "there is no revision '9999'; the revisions are 0001" in done.stderr


@pytest.mark.parametrize("command", ["upgrade", "check", "sql"])
def test_every_help_has_an_example_and_the_exit_codes(command):
    said = " ".join(run(command, "--help").stdout.split())
    assert "Example: " in said
    assert f"ergon db {command}" in said.partition("Example: ")[2]
    assert "Exit codes: 0 " in said


def test_every_exit_code_has_a_meaning():
    assert all(code.meaning for code in DbExit)
