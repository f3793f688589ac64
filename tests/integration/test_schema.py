"""Check the schema: one chain, upgraded in any supported way, and usable by the previous release."""

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
from alembic import command
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.db import DbExit
from ergon_framework.database import migrate
from ergon_framework.database.revisions import REQUIRED_REVISION, REVISIONS, is_compatible
from tests.integration.previous.keep import pack_release

HERE = Path(__file__).parent
PREVIOUS_PATH = HERE / "previous"
VERSIONS_PATH = Path(migrate.__file__).parent / "migrations" / "versions"
_numbers = itertools.count(1)


@pytest.fixture
def dsn(postgres):
    """Return the address of an empty database."""
    return postgres.create_database(f"schema_{next(_numbers)}")


def execute(dsn, *statements):
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            rows = connection.execute(statement)
        return rows.fetchall() if rows.description else []


def run_db(monkeypatch, dsn, *arguments):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    return CliRunner().invoke(app, ["db", *arguments])


def dump_schema(postgres, dsn):
    """Return the schema as PostgreSQL itself dumps it."""
    command = [postgres.binaries / "pg_dump", "--schema-only", "--no-owner", dsn]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Newer versions guard the dump with a random word.
    return re.sub(r"^\\(un)?restrict .*$", "", text, flags=re.MULTILINE)


def run_alembic(dsn, direction, revision):
    with migrate._connect(dsn) as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        getattr(command, direction)(config, revision)
        connection.commit()


def create_role(dsn, name, *grants):
    """Return the address of the same database for a new role with no rights but *grants*."""
    execute(dsn, f"create role {name} login", *(grant.format(role=name) for grant in grants))
    return dsn.replace("//postgres@", f"//{name}@")


# -- one chain ----------------------------------------------------------------------------------------


@pytest.mark.spec("RUN-08")
def test_there_is_one_chain_and_it_lists_all_files():
    assert tuple(migrate.revisions()) == REVISIONS
    files = sorted(path.name for path in VERSIONS_PATH.glob("r*.py"))
    assert [name[1:5] for name in files] == list(REVISIONS)


@pytest.mark.spec("RUN-08")
def test_the_required_revision_and_all_later_ones_suffice():
    index = REVISIONS.index(REQUIRED_REVISION)
    assert [is_compatible(revision) for revision in REVISIONS] == [False] * index + [True] * (len(REVISIONS) - index)
    assert not is_compatible(None)


@pytest.mark.spec("RUN-08")
@pytest.mark.parametrize("revision", ["base", *REVISIONS[:-1]])
def test_a_downgrade_and_an_upgrade_make_the_same_schema(postgres, dsn, revision):
    migrate.upgrade(dsn)
    schema = dump_schema(postgres, dsn)
    run_alembic(dsn, "downgrade", revision)
    assert migrate.check(dsn).revision == (None if revision == "base" else revision)
    if revision == "base":
        rest = "select relname::text from pg_class where relnamespace = 'ergon'::regnamespace and relkind <> 'i'"
        assert execute(dsn, rest) == [("revision",)]
        assert execute(dsn, "select 1 from pg_proc where pronamespace = 'ergon'::regnamespace") == []
    else:
        alone = postgres.create_database(f"schema_{next(_numbers)}")
        migrate.upgrade(alone, revision)
        assert dump_schema(postgres, dsn) == dump_schema(postgres, alone)
    migrate.upgrade(dsn)
    assert dump_schema(postgres, dsn) == schema


# -- upgrade, check, sql ------------------------------------------------------------------------------


@pytest.mark.spec("RUN-08")
def test_an_upgrade_creates_the_tables_and_a_second_one_changes_nothing(postgres, dsn, monkeypatch):
    assert run_db(monkeypatch, dsn, "check").exit_code == DbExit.OUTDATED
    first = run_db(monkeypatch, dsn, "upgrade")
    assert (first.exit_code, first.stdout) == (DbExit.OK, f"database schema created (revision {REVISIONS[-1]})\n")
    schema = dump_schema(postgres, dsn)
    assert "CREATE TABLE ergon.content" in schema
    second = run_db(monkeypatch, dsn, "upgrade")
    assert (second.exit_code, second.stdout) == (
        DbExit.OK,
        f"the database is up to date, at revision {REVISIONS[-1]}\n",
    )
    assert dump_schema(postgres, dsn) == schema
    assert run_db(monkeypatch, dsn, "check").exit_code == DbExit.OK


def test_checking_changes_nothing(postgres, dsn, monkeypatch):
    before = dump_schema(postgres, dsn)
    result = run_db(monkeypatch, dsn, "check")
    assert "has no Ergon tables; missing: 0001" in result.stdout
    assert "run: ergon db upgrade" in result.stdout
    assert dump_schema(postgres, dsn) == before


def test_check_and_upgrade_report_revisions_as_json(dsn, monkeypatch):
    reports = [
        json.loads(run_db(monkeypatch, dsn, subcommand, "--json").stdout)
        for subcommand in ("check", "upgrade", "check")
    ]
    assert reports[0] == {
        "found": None,
        "missing": list(REVISIONS),
        "needed": REQUIRED_REVISION,
        "newest": REVISIONS[-1],
        "suffices": False,
        "newer": False,
        "exit_code": 1,
    }
    assert reports[1] == {"found": None, "applied": list(REVISIONS), "newer": False, "exit_code": 0}
    assert reports[2] == {**reports[0], "found": REVISIONS[-1], "missing": [], "suffices": True, "exit_code": 0}


def test_one_of_several_concurrent_upgrades_runs_and_the_others_wait(dsn):
    command = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()", "db", "upgrade", "--json"]
    env = {**os.environ, "ERGON_POSTGRES__DSN": dsn}
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    reports = [json.loads(item.communicate(timeout=60)[0]) for item in processes]
    assert sorted(str(item.get("found", item)) for item in reports) == [REVISIONS[-1]] * 3 + ["None"]
    assert migrate.check(dsn).missing == ()


def test_a_second_upgrade_waits_for_the_first_to_end(dsn):
    with psycopg.connect(dsn) as first, ThreadPoolExecutor(1) as pool:
        first.execute("select pg_advisory_xact_lock(%s)", [migrate._UPGRADE_LOCK_KEY])
        second = pool.submit(migrate.upgrade, dsn)
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        while execute(dsn, waiting) != [(1,)]:
            assert not second.done()
        first.rollback()
        assert second.result(30).revision is None


@pytest.mark.spec("RUN-08")
def test_the_printed_statements_make_the_same_schema(postgres, dsn, monkeypatch):
    migrate.upgrade(dsn)
    manual_dsn = postgres.create_database(f"schema_{next(_numbers)}")
    script = run_db(monkeypatch, "", "sql").stdout
    psql = [postgres.binaries / "psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", manual_dsn]
    subprocess.run(psql, input=script, text=True, check=True, capture_output=True)
    assert dump_schema(postgres, manual_dsn) == dump_schema(postgres, dsn)
    assert migrate.check(manual_dsn) == migrate.check(dsn)


def test_a_failed_upgrade_changes_nothing(postgres, dsn, monkeypatch):
    execute(dsn, "create schema ergon", "create table ergon.inbox (mine int)")
    before = dump_schema(postgres, dsn)
    result = run_db(monkeypatch, dsn, "upgrade")
    assert result.exit_code == DbExit.FAILED
    assert 'nothing was changed: relation "inbox" already exists' in result.stderr
    assert "create table" not in result.output
    assert dump_schema(postgres, dsn) == before


# -- rights -------------------------------------------------------------------------------------------


def test_the_owner_of_the_database_needs_no_other_privileges(dsn):
    owner = create_role(dsn, "owner_of_it", f"alter database {dsn.rpartition('/')[2]} owner to {{role}}")
    migrate.upgrade(owner)
    assert execute(owner, "select rolsuper from pg_roles where rolname = current_user") == [(False,)]
    smoke(owner)


def test_a_schema_created_in_advance_is_enough(dsn):
    schema_owner = create_role(dsn, "given_a_schema", "create schema ergon authorization {role}")
    migrate.upgrade(schema_owner)
    smoke(schema_owner)


def test_a_worker_needs_no_privilege_to_change_the_schema(dsn):
    migrate.upgrade(dsn)
    grants = re.search(r"^-- grants\n(.*?)^```", GUIDE_PATH.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert grants
    worker = create_role(dsn, "shop_worker", grants[1])
    smoke(worker)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(worker, "drop table ergon.inbox")


GUIDE_PATH = HERE.parents[1] / "docs" / "guides" / "postgres.md"


def test_a_missing_privilege_is_named_with_the_remedy(dsn, monkeypatch):
    role_dsn = create_role(dsn, "stranger")
    result = run_db(monkeypatch, role_dsn, "upgrade")
    assert result.exit_code == DbExit.FAILED
    assert "permission denied for database" in result.stderr
    assert "ergon db sql" in result.stderr
    migrate.upgrade(dsn)
    result = run_db(monkeypatch, role_dsn, "check")
    assert result.exit_code == DbExit.FAILED
    assert "permission denied for schema ergon" in result.stderr


def test_a_missing_database_is_named(dsn, monkeypatch):
    result = run_db(monkeypatch, dsn + "_not", "check")
    assert result.exit_code == DbExit.FAILED
    assert "_not" in result.stderr
    assert "does not exist" in result.stderr


def test_a_read_only_database_is_reported(dsn, monkeypatch):
    execute(dsn, f"alter database {dsn.rpartition('/')[2]} set default_transaction_read_only = on")
    result = run_db(monkeypatch, dsn, "upgrade")
    assert result.exit_code == DbExit.FAILED
    assert "on a standby, use the primary instead" in result.stderr


def test_an_interrupted_upgrade_changes_nothing(dsn, monkeypatch):
    with psycopg.connect(dsn) as first, ThreadPoolExecutor(1) as pool:
        first.execute("select pg_advisory_xact_lock(%s)", [migrate._UPGRADE_LOCK_KEY])
        second = pool.submit(run_db, monkeypatch, dsn, "upgrade")
        victims = "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and not granted"
        while not execute(dsn, victims):
            assert not second.done()
        assert "the connection was lost, and nothing was changed" in second.result(30).stderr
    assert migrate.check(dsn).revision is None


def test_a_keyword_address_has_the_meaning_that_the_driver_gives_it(postgres, dsn):
    name = dsn.rpartition("/")[2]
    address = f"host=127.0.0.1 port={postgres.port} user=postgres dbname='{name}' options='-c search_path=public'"
    migrate.upgrade(address)
    assert migrate.check(dsn).missing == ()


# -- releases next to each other ----------------------------------------------------------------------


@pytest.mark.spec("RUN-08")
def test_a_schema_of_a_later_release_is_unchanged_and_usable(postgres, dsn, monkeypatch):
    migrate.upgrade(dsn)
    execute(dsn, "update ergon.revision set version_num = '9999'", "alter table ergon.worker add column later int")
    before = dump_schema(postgres, dsn)
    for subcommand in ("upgrade", "check"):
        result = run_db(monkeypatch, dsn, subcommand)
        assert result.exit_code == DbExit.OK
        assert "revision 9999, created by a later release" in result.stdout
    assert dump_schema(postgres, dsn) == before
    smoke(dsn)


def test_a_worker_on_a_database_not_yet_upgraded_names_the_upgrade_command(dsn):
    with pytest.raises(AssertionError, match="run: ergon db upgrade"):
        smoke(dsn)


def smoke(dsn, archive=None):
    """Run the smoke test of the release in *archive*, or of this one, in a separate process."""
    path = str(archive) if archive else os.pathsep.join([str(PREVIOUS_PATH), str(HERE.parents[1] / "src")])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_", "ERGON_"))}
    result = subprocess.run(
        [sys.executable, "-m", "smoke", dsn],
        env={**env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "smoke passed\n"), result.stdout + result.stderr


def read_chain(archive):
    """Return the chain that the release in *archive* knows."""
    code = zipfile.ZipFile(archive).read("ergon_framework/database/revisions.py").decode()
    namespace: dict[str, object] = {}
    exec(compile(code, str(archive), "exec"), namespace)
    return namespace["REVISIONS"]


ARCHIVES = sorted(PREVIOUS_PATH.glob("*.zip"))
#: The revisions of the first release, which has no previous one.
FIRST_REVISIONS = ("0001", "0002", "0003", "0004")


@pytest.mark.spec("RUN-08")
@pytest.mark.parametrize("archive", [None, *ARCHIVES], ids=lambda archive: archive.stem if archive else "this release")
def test_the_code_of_the_previous_release_runs_on_the_new_schema(archive, dsn, tmp_path):
    migrate.upgrade(dsn)
    smoke(dsn, archive or pack_release(tmp_path))


@pytest.mark.spec("RUN-08")
def test_a_new_migration_requires_an_archive_of_the_previous_release():
    older_archives = [
        archive
        for archive in ARCHIVES
        if (chain := read_chain(archive)) != REVISIONS and chain == REVISIONS[: len(chain)]
    ]
    assert REVISIONS == FIRST_REVISIONS or older_archives, (
        "there is a new migration, and no release to try it with: pack the last release with "
        "tests/integration/previous/keep.py in its checkout, and put the archive here"
    )


def test_an_archived_release_runs_its_own_code(dsn, tmp_path):
    archive = pack_release(tmp_path)
    assert pack_release(tmp_path).read_bytes() == archive.read_bytes()
    assert read_chain(archive) == REVISIONS
    with zipfile.ZipFile(archive, "a") as packed, pytest.warns(UserWarning, match="Duplicate name"):
        packed.writestr("smoke.py", "import ergon_framework; print(ergon_framework.__file__)")
    with pytest.raises(AssertionError, match=re.escape(f"{archive}/ergon_framework/__init__.py")):
        smoke(dsn, archive)


def test_a_migration_that_breaks_the_previous_release_is_detected(dsn, tmp_path):
    migrate.upgrade(dsn)
    execute(dsn, "alter table ergon.content add column later int not null")
    with pytest.raises(AssertionError, match="NotNullViolation"):
        smoke(dsn, pack_release(tmp_path))
