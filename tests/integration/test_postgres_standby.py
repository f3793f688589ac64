"""A standby: what its promotion can cost is said before it happens, and what is said is true."""

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
from ergon_framework.schema.migrate import upgrade
from ergon_framework.transaction import Transaction
from tests.integration.running import ERGON

pytestmark = pytest.mark.spec("SEC-19")

SAFE = "a power loss costs nothing that was confirmed"
LOSS = "the promotion of a standby can cost confirmed work"
PATIENCE = 60.0
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "postgres.md"


def durability(dsn):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.open()
    try:
        assert queue.capabilities.durable is True
        return queue.durability
    finally:
        queue.close()


def doctor(folder, dsn):
    """The finding about standbys, if there is one."""
    env, command = {**os.environ, "ERGON_POSTGRES__DSN": dsn}, [*ERGON, "doctor", "--json"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    (database,) = [each for each in json.loads(done.stdout)["examined"] if each["name"] == "database"]
    return [each for each in database["findings"] if each["what"] == "standby"]


def make_synchronous(server):
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("alter system set synchronous_standby_names = 's1'")
        admin.execute("select pg_reload_conf()")
        wait(lambda: admin.execute("select sync_state from pg_stat_replication").fetchall() == [("sync",)])


def wait(holds):
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def pair(new_postgres, new_folder):
    """A primary with our tables, and a standby that has caught up with it."""
    primary = new_postgres()
    upgrade(primary.dsn())
    standby = primary.create_standby(new_folder("standby"), name="s1")
    try:
        yield primary, standby
    finally:
        standby.kill()


def test_an_address_without_a_standby_has_nothing_to_say_about_one(database, tmp_path):
    assert LOSS not in durability_words(database)
    assert doctor(tmp_path, database) == []


def durability_words(dsn):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.open()
    words = queue.durability
    queue.close()
    return words


def test_the_guide_says_what_a_promotion_can_cost():
    _, _, rest = GUIDE.read_text(encoding="utf-8").partition("### Standbys")
    rows = [line for line in rest.partition("\n#")[0].splitlines() if line.startswith("| asynchronous")]
    assert len(rows) == 1
    assert "can cost confirmed work" in rows[0]


def test_an_address_with_several_hosts_says_what_a_promotion_can_cost(database, tmp_path):
    port = psycopg.conninfo.conninfo_to_dict(database)["port"]
    several = database.replace(f"127.0.0.1:{port}", f"127.0.0.1:{port},127.0.0.1:{port}")
    assert f"; {LOSS}: no standby is synchronous" in durability_words(several)
    (finding,) = doctor(tmp_path, several)
    assert finding["weight"] == "warning"


@pytest.mark.invariant
def test_an_asynchronous_standby_can_lose_confirmed_work_and_is_announced(pair, tmp_path):
    primary, standby = pair
    assert durability(primary.dsn()) == (
        f"{SAFE}; {LOSS}: no standby is synchronous (synchronous_standby_names is empty)"
    )
    (finding,) = doctor(tmp_path, primary.dsn())
    assert (finding["weight"], LOSS in finding["seen"]) == ("warning", True)
    assert "synchronous_standby_names" in finding["do"]
    assert lost_by_a_promotion(primary, standby) == 10


@pytest.mark.invariant
def test_a_synchronous_standby_loses_nothing_and_needs_no_warning(pair, tmp_path):
    primary, standby = pair
    make_synchronous(primary)
    assert durability(primary.dsn()) == SAFE
    (finding,) = doctor(tmp_path, primary.dsn())
    assert finding["weight"] == "fine"
    local = f"{primary.dsn()}?options={quote('-c synchronous_commit=local')}"
    assert f"; {LOSS}: commits do not wait for it (synchronous_commit is local)" in durability(local)
    assert lost_by_a_promotion(primary, standby, behind=False) == 0


def lost_by_a_promotion(primary, standby, *, behind=True):
    """How many confirmed transactions are missing after the primary was killed and the standby promoted."""
    queue = PostgresQueue("orders", dsn=primary.dsn())
    queue.dispatch([Transaction("before", {})])
    with psycopg.connect(standby.dsn(), autocommit=True) as reader:
        wait(lambda: reader.execute("select count(*) from ergon.ready").fetchone() == (1,))
    receivers = standby.pids_of("walreceiver")
    assert len(receivers) == 1
    if behind:
        os.kill(receivers[0], signal.SIGSTOP)
    queue.dispatch([Transaction(f"order-{number}", {}) for number in range(10)])
    primary.kill()
    queue.close()
    if behind:
        # What is still in the socket of a standby that was cut off never reaches it.
        os.kill(receivers[0], signal.SIGKILL)
        wait(lambda: standby.is_running and _answers(standby))
    standby.promote()
    with psycopg.connect(standby.dsn()) as reader:
        (found,) = reader.execute("select count(*) from ergon.ready").fetchone()
    return 11 - found


def _answers(server):
    try:
        psycopg.connect(server.dsn(), connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True
