"""The schema: one chain, upgraded by anybody who may, in any way, and still good for the release before."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.db import DbExit
from ergon_framework.schema import migrate
from ergon_framework.schema.revisions import CHAIN, NEEDED, suffices
from tests.integration.previous.keep import keep

HERE = Path(__file__).parent
PREVIOUS = HERE / "previous"
VERSIONS = Path(migrate.__file__).parent / "migrations" / "versions"
_numbers = itertools.count(1)


@pytest.fixture
def dsn(postgres):
    """An empty database."""
    return postgres.create_database(f"schema_{next(_numbers)}")


def execute(dsn, *statements):
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            rows = connection.execute(statement)
        return rows.fetchall() if rows.description else []


def run(monkeypatch, dsn, *words):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    return CliRunner().invoke(app, ["db", *words])


def dumped(postgres, dsn):
    """The schema as PostgreSQL itself writes it down."""
    command = [postgres.binaries / "pg_dump", "--schema-only", "--no-owner", dsn]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Newer ones guard the dump with a random word.
    return re.sub(r"^\\(un)?restrict .*$", "", text, flags=re.MULTILINE)


def role(dsn, name, *grants):
    """The address of the same database for a role with no rights but *grants*."""
    execute(dsn, f"create role {name} login", *(grant.format(role=name) for grant in grants))
    return dsn.replace("//postgres@", f"//{name}@")


# -- one chain ----------------------------------------------------------------------------------------


@pytest.mark.spec("RUN-08")
def test_there_is_one_chain_and_the_list_is_the_files():
    assert tuple(migrate.revisions()) == CHAIN
    files = sorted(path.name for path in VERSIONS.glob("r*.py"))
    assert [name[1:5] for name in files] == list(CHAIN)


@pytest.mark.spec("RUN-08")
def test_what_is_needed_is_in_the_chain_and_all_from_there_on_suffices():
    at = CHAIN.index(NEEDED)
    assert [suffices(revision) for revision in CHAIN] == [False] * at + [True] * (len(CHAIN) - at)
    assert not suffices(None)


# -- upgrade, check, sql ------------------------------------------------------------------------------


@pytest.mark.spec("RUN-08")
def test_an_upgrade_makes_the_tables_and_a_second_one_changes_nothing(postgres, dsn, monkeypatch):
    assert run(monkeypatch, dsn, "check").exit_code == DbExit.BEHIND
    first = run(monkeypatch, dsn, "upgrade")
    assert (first.exit_code, first.stdout) == (DbExit.OK, f"upgraded from nothing to {CHAIN[-1]}\n")
    made = dumped(postgres, dsn)
    assert "CREATE TABLE ergon.content" in made
    second = run(monkeypatch, dsn, "upgrade")
    assert (second.exit_code, second.stdout) == (DbExit.OK, f"the database is up to date, at revision {CHAIN[-1]}\n")
    assert dumped(postgres, dsn) == made
    assert run(monkeypatch, dsn, "check").exit_code == DbExit.OK


def test_checking_changes_nothing(postgres, dsn, monkeypatch):
    before = dumped(postgres, dsn)
    done = run(monkeypatch, dsn, "check")
    assert "has no tables of Ergon yet; missing: 0001" in done.stdout
    assert "run: ergon db upgrade" in done.stdout
    assert dumped(postgres, dsn) == before


def test_as_json_each_says_what_it_found_and_did(dsn, monkeypatch):
    told = [json.loads(run(monkeypatch, dsn, word, "--json").stdout) for word in ("check", "upgrade", "check")]
    assert told[0] == {
        "found": None,
        "missing": list(CHAIN),
        "needed": NEEDED,
        "newest": CHAIN[-1],
        "suffices": False,
        "newer": False,
        "exit_code": 1,
    }
    assert told[1] == {"found": None, "applied": list(CHAIN), "newer": False, "exit_code": 0}
    assert told[2] == {**told[0], "found": CHAIN[-1], "missing": [], "suffices": True, "exit_code": 0}


def test_of_several_who_upgrade_at_once_one_does_it_and_the_others_wait(dsn):
    words = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()", "db", "upgrade", "--json"]
    env = {**os.environ, "ERGON_POSTGRES__DSN": dsn}
    running = [subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [json.loads(one.communicate(timeout=60)[0]) for one in running]
    assert sorted(str(one.get("found", one)) for one in told) == [CHAIN[-1]] * 3 + ["None"]
    assert migrate.check(dsn).missing == ()


def test_whoever_comes_second_waits_for_the_first_to_end(dsn):
    with psycopg.connect(dsn) as first, ThreadPoolExecutor(1) as pool:
        first.execute("select pg_advisory_xact_lock(%s)", [migrate._TURN])
        second = pool.submit(migrate.upgrade, dsn)
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        while execute(dsn, waiting) != [(1,)]:
            assert not second.done()
        first.rollback()
        assert second.result(30).found is None


@pytest.mark.spec("RUN-08")
def test_the_printed_statements_make_the_same_schema(postgres, dsn, monkeypatch):
    migrate.upgrade(dsn)
    by_hand = postgres.create_database(f"schema_{next(_numbers)}")
    script = run(monkeypatch, "", "sql").stdout
    psql = [postgres.binaries / "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", by_hand]
    subprocess.run(psql, input=script, text=True, check=True, capture_output=True)
    assert dumped(postgres, by_hand) == dumped(postgres, dsn)
    assert migrate.check(by_hand) == migrate.check(dsn)


def test_a_failed_upgrade_leaves_nothing_behind(postgres, dsn, monkeypatch):
    execute(dsn, "create schema ergon", "create table ergon.inbox (mine int)")
    before = dumped(postgres, dsn)
    done = run(monkeypatch, dsn, "upgrade")
    assert done.exit_code == DbExit.FAILED
    assert 'nothing was changed: relation "inbox" already exists' in done.stderr
    assert "create table" not in done.output
    assert dumped(postgres, dsn) == before


# -- who may ------------------------------------------------------------------------------------------


def test_the_owner_of_the_database_needs_no_more_rights(dsn):
    owner = role(dsn, "owner_of_it", f"alter database {dsn.rpartition('/')[2]} owner to {{role}}")
    migrate.upgrade(owner)
    assert execute(owner, "select rolsuper from pg_roles where rolname = current_user") == [(False,)]
    smoke(owner)


def test_a_schema_that_was_made_for_us_is_enough(dsn):
    given = role(dsn, "given_a_schema", "create schema ergon authorization {role}")
    migrate.upgrade(given)
    smoke(given)


def test_a_worker_needs_no_right_to_change_the_schema(dsn):
    migrate.upgrade(dsn)
    grants = re.search(r"^-- grants\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert grants
    worker = role(dsn, "shop_worker", grants[1])
    smoke(worker)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(worker, "drop table ergon.inbox")


GUIDE = HERE.parents[1] / "docs" / "guides" / "postgres.md"


def test_without_the_right_it_says_which_one_is_missing_and_whom_to_ask(dsn, monkeypatch):
    stranger = role(dsn, "stranger")
    done = run(monkeypatch, stranger, "upgrade")
    assert done.exit_code == DbExit.FAILED
    assert "permission denied for database" in done.stderr
    assert "ergon db sql" in done.stderr
    migrate.upgrade(dsn)
    done = run(monkeypatch, stranger, "check")
    assert done.exit_code == DbExit.FAILED
    assert "permission denied for schema ergon" in done.stderr


def test_a_database_that_is_not_there_is_named(dsn, monkeypatch):
    done = run(monkeypatch, dsn + "_not", "check")
    assert done.exit_code == DbExit.FAILED
    assert "_not" in done.stderr
    assert "does not exist" in done.stderr


def test_a_database_that_only_reads_is_told(dsn, monkeypatch):
    execute(dsn, f"alter database {dsn.rpartition('/')[2]} set default_transaction_read_only = on")
    done = run(monkeypatch, dsn, "upgrade")
    assert done.exit_code == DbExit.FAILED
    assert "is it a standby?" in done.stderr


def test_an_upgrade_that_is_cut_off_changes_nothing(dsn, monkeypatch):
    with psycopg.connect(dsn) as first, ThreadPoolExecutor(1) as pool:
        first.execute("select pg_advisory_xact_lock(%s)", [migrate._TURN])
        second = pool.submit(run, monkeypatch, dsn, "upgrade")
        victims = "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and not granted"
        while not execute(dsn, victims):
            assert not second.done()
        assert "broke off, and nothing was changed" in second.result(30).stderr
    assert migrate.check(dsn).found is None


def test_an_address_in_keywords_means_what_it_means_to_the_driver(postgres, dsn):
    name = dsn.rpartition("/")[2]
    words = f"host=127.0.0.1 port={postgres.port} user=postgres dbname='{name}' options='-c search_path=public'"
    migrate.upgrade(words)
    assert migrate.check(dsn).missing == ()


# -- releases beside each other -----------------------------------------------------------------------


@pytest.mark.spec("RUN-08")
def test_a_schema_of_a_later_release_is_left_alone_and_worked_on(postgres, dsn, monkeypatch):
    migrate.upgrade(dsn)
    execute(dsn, "update ergon.revision set version_num = '9999'", "alter table ergon.worker add column later int")
    before = dumped(postgres, dsn)
    for word in ("upgrade", "check"):
        done = run(monkeypatch, dsn, word)
        assert done.exit_code == DbExit.OK
        assert "revision 9999, which a later release has made" in done.stdout
    assert dumped(postgres, dsn) == before
    smoke(dsn)


def test_a_worker_before_the_upgrade_is_told_to_upgrade(dsn):
    with pytest.raises(AssertionError, match="run: ergon db upgrade"):
        smoke(dsn)


def smoke(dsn, archive=None):
    """The smoke test of the release in *archive*, or of this one, in a process of its own."""
    path = str(archive) if archive else os.pathsep.join([str(PREVIOUS), str(HERE.parents[1] / "src")])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_", "ERGON_"))}
    done = subprocess.run(
        [sys.executable, "-m", "smoke", dsn],
        env={**env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "smoke passed\n"), done.stdout + done.stderr


def chain_of(archive):
    """The chain that the release in *archive* knows."""
    code = zipfile.ZipFile(archive).read("ergon_framework/schema/revisions.py").decode()
    found: dict[str, object] = {}
    exec(compile(code, str(archive), "exec"), found)
    return found["CHAIN"]


KEPT = sorted(PREVIOUS.glob("*.zip"))


@pytest.mark.spec("RUN-08")
@pytest.mark.parametrize("archive", [None, *KEPT], ids=lambda archive: archive.stem if archive else "this release")
def test_the_code_of_the_release_before_runs_on_the_new_schema(archive, dsn, tmp_path):
    migrate.upgrade(dsn)
    smoke(dsn, archive or keep(tmp_path))


@pytest.mark.spec("RUN-08")
def test_whoever_adds_a_migration_keeps_the_release_before_it():
    older = [archive for archive in KEPT if (chain := chain_of(archive)) != CHAIN and chain == CHAIN[: len(chain)]]
    assert len(CHAIN) == 1 or older, (
        "there is a new migration, and no release to try it with: pack the last release with "
        "tests/integration/previous/keep.py in its checkout, and put the archive here"
    )


def test_a_kept_release_runs_its_own_code(dsn, tmp_path):
    archive = keep(tmp_path)
    assert keep(tmp_path).read_bytes() == archive.read_bytes()
    assert chain_of(archive) == CHAIN
    with zipfile.ZipFile(archive, "a") as packed, pytest.warns(UserWarning, match="Duplicate name"):
        packed.writestr("smoke.py", "import ergon_framework; print(ergon_framework.__file__)")
    with pytest.raises(AssertionError, match=re.escape(f"{archive}/ergon_framework/__init__.py")):
        smoke(dsn, archive)


def test_a_migration_that_breaks_the_release_before_is_caught(dsn, tmp_path):
    migrate.upgrade(dsn)
    execute(dsn, "alter table ergon.content add column later int not null")
    with pytest.raises(AssertionError, match="NotNullViolation"):
        smoke(dsn, keep(tmp_path))
