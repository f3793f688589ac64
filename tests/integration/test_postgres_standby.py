"""Check that what the promotion of a standby can lose is reported in advance, and that the report is true."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.database.migrate import upgrade
from ergon_framework.transaction import Transaction
from tests.integration.running import ERGON

pytestmark = pytest.mark.spec("SEC-19")

NO_LOSS_TEXT = "confirmed data survives a power loss"
PROMOTION_LOSS_TEXT = "the promotion of a standby may lose confirmed work"
TIMEOUT_SECONDS = 60.0
GUIDE_PATH = Path(__file__).parents[2] / "docs" / "guides" / "postgres.md"


def read_durability(dsn):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.open()
    try:
        assert queue.capabilities.durable is True
        return queue.durability
    finally:
        queue.close()


def find_standby_findings(folder, dsn):
    """Return the doctor's finding about standbys, or None."""
    env, command = {**os.environ, "ERGON_POSTGRES__DSN": dsn}, [*ERGON, "doctor", "--json"]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    (database,) = [each for each in json.loads(result.stdout)["targets"] if each["name"] == "database"]
    return [each for each in database["diagnostics"] if each["check"] == "standby"]


def make_synchronous(server):
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("alter system set synchronous_standby_names = 's1'")
        admin.execute("select pg_reload_conf()")
        wait_until(lambda: admin.execute("select sync_state from pg_stat_replication").fetchall() == [("sync",)])


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def primary_and_standby(new_postgres, new_folder):
    """Yield a primary with the tables, and a standby that has caught up with it."""
    primary = new_postgres()
    upgrade(primary.dsn())
    standby = primary.create_standby(new_folder("standby"), name="s1")
    try:
        yield primary, standby
    finally:
        standby.kill()


def test_an_address_without_a_standby_reports_nothing_about_one(database, tmp_path):
    assert PROMOTION_LOSS_TEXT not in read_durability_text(database)
    assert find_standby_findings(tmp_path, database) == []


def read_durability_text(dsn):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.open()
    text = queue.durability
    queue.close()
    return text


def test_the_guide_states_what_a_promotion_can_lose():
    _, _, rest = GUIDE_PATH.read_text(encoding="utf-8").partition("### Standbys")
    rows = [line for line in rest.partition("\n#")[0].splitlines() if line.startswith("| asynchronous")]
    assert len(rows) == 1
    assert "may lose confirmed work" in rows[0]


def test_an_address_with_several_hosts_reports_what_a_promotion_can_lose(database, tmp_path):
    port = psycopg.conninfo.conninfo_to_dict(database)["port"]
    several = database.replace(f"127.0.0.1:{port}", f"127.0.0.1:{port},127.0.0.1:{port}")
    assert f"; {PROMOTION_LOSS_TEXT}: no standby is synchronous" in read_durability_text(several)
    (finding,) = find_standby_findings(tmp_path, several)
    assert finding["severity"] == "warning"


@pytest.mark.invariant
def test_an_asynchronous_standby_can_lose_confirmed_work_and_is_reported(primary_and_standby, tmp_path):
    primary, standby = primary_and_standby
    assert read_durability(primary.dsn()) == (
        f"{NO_LOSS_TEXT}; {PROMOTION_LOSS_TEXT}: no standby is synchronous (synchronous_standby_names is empty)"
    )
    (finding,) = find_standby_findings(tmp_path, primary.dsn())
    assert (finding["severity"], PROMOTION_LOSS_TEXT in finding["observed"]) == ("warning", True)
    assert "synchronous_standby_names" in finding["remedy"]
    assert promote_and_count_lost(primary, standby) == 10


@pytest.mark.invariant
def test_a_synchronous_standby_loses_nothing_and_needs_no_warning(primary_and_standby, tmp_path):
    primary, standby = primary_and_standby
    make_synchronous(primary)
    assert read_durability(primary.dsn()) == NO_LOSS_TEXT
    (finding,) = find_standby_findings(tmp_path, primary.dsn())
    assert finding["severity"] == "ok"
    local = f"{primary.dsn()}?options={quote('-c synchronous_commit=local')}"
    assert f"; {PROMOTION_LOSS_TEXT}: commits do not wait for it (synchronous_commit is local)" in read_durability(
        local
    )
    assert promote_and_count_lost(primary, standby, is_lagging=False) == 0


def promote_and_count_lost(primary, standby, *, is_lagging=True):
    """Return the number of confirmed transactions missing after the primary was killed and the standby promoted."""
    queue = PostgresQueue("orders", dsn=primary.dsn())
    queue.dispatch([Transaction({}, id="before")])
    with psycopg.connect(standby.dsn(), autocommit=True) as connection:
        wait_until(lambda: connection.execute("select count(*) from ergon.ready").fetchone() == (1,))
    receivers = standby.list_pids("walreceiver")
    assert len(receivers) == 1
    if is_lagging:
        os.kill(receivers[0], signal.SIGSTOP)
    queue.dispatch([Transaction({}, id=f"order-{number}") for number in range(10)])
    primary.kill()
    queue.close()
    if is_lagging:
        # Data still in the socket of a disconnected standby never reaches it.
        os.kill(receivers[0], signal.SIGKILL)
        wait_until(lambda: standby.is_running and _is_reachable(standby))
    standby.promote()
    with psycopg.connect(standby.dsn()) as connection:
        (count,) = connection.execute("select count(*) from ergon.ready").fetchone()
    return 11 - count


def _is_reachable(server):
    try:
        psycopg.connect(server.dsn(), connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True
