"""Facts in PostgreSQL when processes and servers are killed, and when an older state is restored."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from ergon_framework.database.migrate import upgrade
from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.errors import EpochChanged, OffsetAhead
from ergon_framework.facts.model import Cursor, Envelope, Fact, ZonePair
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

pytestmark = pytest.mark.invariant

PAIR = ZonePair("Plant A", "HQ")
KILLS = 100
TIMEOUT_SECONDS = 60.0


def make_fact(number):
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.create(f"order:{number}", "paid", {"number": number})


@pytest.mark.spec("FAC-03", "FAC-15", "FAC-25")
def test_a_process_killed_at_a_hundred_points_and_run_again_appends_each_fact_once(database):
    script = Path(__file__).parent / "fact_killing.py"
    process = subprocess.run(
        [sys.executable, script, database, str(KILLS), "7"], capture_output=True, text=True, timeout=180, check=False
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert (result["dense"], result["once"], result["kept"]) == (True, True, True)
    assert result["confirmed"] > KILLS, "they came to something between the kills"
    assert result["repeated"] > 0, "and something was appended again"


@pytest.mark.spec("FAC-02", "FAC-15")
def test_confirmed_facts_remain_after_the_server_is_killed(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    offsets, half_written, finished = {}, threading.Event(), threading.Event()

    def append(number):
        while True:
            try:
                return boundary.append_fact(*make_fact(number))
            except ConnectionLostError:
                assert not finished.wait(0.02), "the server did not come back"

    def write(first):
        for number in range(first, first + 150):
            confirmation = append(number)
            assert offsets.setdefault(number, confirmation.offset) == confirmation.offset
            if len(offsets) > 150:
                half_written.set()

    with PostgresBoundary(server.dsn()) as boundary:
        epoch = boundary.epoch
        threads = [threading.Thread(target=write, args=(1000 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        assert half_written.wait(TIMEOUT_SECONDS)
        server.kill()
        server.start()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
        finished.set()
        facts = boundary.fetch_facts("look", PAIR, 1000)
        assert boundary.epoch == epoch, "a crash does not count as a restore"
    assert [each.offset for each in facts] == list(range(1, 601))
    assert {each.envelope.message_id: each.offset for each in facts} == {f"m-{n}": o for n, o in offsets.items()}


# -- an older state restored ----------------------------------------------------------------------------


def copy_data_folder(server, name):
    """Copy the data directory of a stopped server; the returned function restores it."""
    backup = server.folder / name
    shutil.copytree(server._data, backup, symlinks=True)

    def restore():
        shutil.rmtree(server._data)
        backup.rename(server._data)
        for path in (server._data, *server._data.rglob("*")):
            shutil.chown(path, *get_owner(server))

    return restore


def get_owner(server):
    user = server.get_user_options()
    return (user["user"], user["group"]) if user else (None, None)


@pytest.mark.spec("FAC-15")
def test_a_restored_data_folder_is_detected_by_a_client_that_has_later_offsets(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    boundary = PostgresBoundary(server.dsn())
    boundary.append_facts([make_fact(1), make_fact(2)])
    server.stop()
    restore = copy_data_folder(server, "backup")
    server.start()
    lost = boundary.append_fact(*make_fact("lost"))
    assert lost.offset == 3
    server.stop()
    restore()
    server.start()
    new_client = PostgresBoundary(server.dsn())
    assert new_client.epoch == lost.epoch, "nothing in the folder tells of it"
    with pytest.raises(OffsetAhead, match=r"offset 3 .* was never assigned; the last is 2"):
        new_client.fetch_facts("reader", PAIR, 10, after=Cursor(lost.epoch, 3))
    confirmation = boundary.append_fact(*make_fact("other"))
    assert confirmation.offset == 3
    assert confirmation.epoch == boundary.epoch != lost.epoch
    with pytest.raises(EpochChanged):
        new_client.fetch_facts("reader", PAIR, 10, after=Cursor(lost.epoch, 3))
    assert new_client.epoch == confirmation.epoch
    with psycopg.connect(server.dsn()) as connection:
        reasons = [reason for (reason,) in connection.execute("select reason from ergon.fact_epochs order by id")]
    assert reasons[-1] == "an older state was restored: higher offsets had been assigned"
    boundary.close()
    new_client.close()


@pytest.mark.spec("FAC-15")
def test_a_point_in_time_recovery_starts_a_new_epoch(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    boundary = PostgresBoundary(server.dsn())
    before = boundary.append_fact(*make_fact(1))
    server.stop()
    # As a recovery from an archive ends: on another timeline.
    (server._data / "recovery.signal").touch()
    server._settings["restore_command"] = "false"
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        while connection.execute("select pg_is_in_recovery()").fetchone() != (False,):
            pass
    confirmation = boundary.append_fact(*make_fact(2))
    assert confirmation.offset == 2
    assert confirmation.epoch != before.epoch
    boundary.close()


@pytest.mark.spec("FAC-15")
def test_a_copied_and_renamed_database_starts_a_new_epoch(postgres, databases):
    dsn = databases.borrow()
    name, copy = dsn.rpartition("/")[2], "facts_copied"
    boundary = PostgresBoundary(dsn, accept_loss=True)
    before = boundary.append_fact(*make_fact(1))
    boundary.close()
    postgres.create_database(copy, like=name)
    lost = PostgresBoundary(dsn, accept_loss=True)
    lost.append_fact(*make_fact(2))
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        for statement in ("drop database {old} with (force)", "alter database {new} rename to {old}"):
            connection.execute(sql.SQL(statement).format(old=sql.Identifier(name), new=sql.Identifier(copy)))
    with PostgresBoundary(dsn, accept_loss=True) as new_client:
        assert new_client.epoch != before.epoch, "one who has seen nothing notices too"
    # The same object as before: it was never notified.
    confirmation = lost.append_fact(*make_fact(3))
    assert confirmation.epoch != before.epoch
    assert confirmation.offset == 2
    lost.close()
