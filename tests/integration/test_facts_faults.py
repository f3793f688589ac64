"""Facts in PostgreSQL when processes and servers are killed, and when an older state is put back."""

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

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.errors import EpochChanged, OffsetAhead
from ergon_framework.facts.model import Cursor, Envelope, Fact, Pair
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.schema.migrate import upgrade

pytestmark = pytest.mark.invariant

PAIR = Pair("Plant A", "HQ")
KILLS = 100
PATIENCE = 60.0


def stated(number):
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.of(f"order:{number}", "paid", {"number": number})


@pytest.mark.spec("FAC-03", "FAC-15", "FAC-25")
def test_a_process_killed_at_a_hundred_points_and_run_again_appends_each_fact_once(database):
    script = Path(__file__).parent / "fact_killing.py"
    done = subprocess.run(
        [sys.executable, script, database, str(KILLS), "7"], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["dense"], told["once"], told["kept"]) == (True, True, True)
    assert told["confirmed"] > KILLS, "they came to something between the kills"
    assert told["repeated"] > 0, "and something was appended again"


@pytest.mark.spec("FAC-02", "FAC-15")
def test_what_was_confirmed_before_the_server_was_killed_is_there_after_it(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    told, half, over = {}, threading.Event(), threading.Event()

    def append(number):
        while True:
            try:
                return boundary.append_fact(*stated(number))
            except ConnectionLost:
                assert not over.wait(0.02), "the server did not come back"

    def write(first):
        for number in range(first, first + 150):
            confirmation = append(number)
            assert told.setdefault(number, confirmation.offset) == confirmation.offset
            if len(told) > 150:
                half.set()

    with PostgresBoundary(server.dsn()) as boundary:
        epoch = boundary.epoch
        threads = [threading.Thread(target=write, args=(1000 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        assert half.wait(PATIENCE)
        server.kill()
        server.start()
        for thread in threads:
            thread.join(PATIENCE)
        over.set()
        facts = boundary.fetch_facts("look", PAIR, 1000)
        assert boundary.epoch == epoch, "a crash is no restore"
    assert [each.offset for each in facts] == list(range(1, 601))
    assert {each.envelope.message_id: each.offset for each in facts} == {f"m-{n}": o for n, o in told.items()}


# -- an older state -----------------------------------------------------------------------------------


def copied(server, name):
    """The folder of a server that is not running, put aside; the returned function puts it back."""
    kept = server.folder / name
    shutil.copytree(server._data, kept, symlinks=True)

    def put_back():
        shutil.rmtree(server._data)
        kept.rename(server._data)
        for path in (server._data, *server._data.rglob("*")):
            shutil.chown(path, *owner(server))

    return put_back


def owner(server):
    user = server.as_user()
    return (user["user"], user["group"]) if user else (None, None)


@pytest.mark.spec("FAC-15")
def test_a_folder_that_was_copied_back_is_noticed_by_whoever_has_seen_more(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    boundary = PostgresBoundary(server.dsn())
    boundary.append_facts([stated(1), stated(2)])
    server.stop()
    put_back = copied(server, "backup")
    server.start()
    lost = boundary.append_fact(*stated("lost"))
    assert lost.offset == 3
    server.stop()
    put_back()
    server.start()
    stranger = PostgresBoundary(server.dsn())
    assert stranger.epoch == lost.epoch, "nothing in the folder tells of it"
    with pytest.raises(OffsetAhead, match=r"offset 3 .* was never given; the last is 2"):
        stranger.fetch_facts("reader", PAIR, 10, after=Cursor(lost.epoch, 3))
    told = boundary.append_fact(*stated("other"))
    assert told.offset == 3
    assert told.epoch == boundary.epoch != lost.epoch
    with pytest.raises(EpochChanged):
        stranger.fetch_facts("reader", PAIR, 10, after=Cursor(lost.epoch, 3))
    assert stranger.epoch == told.epoch
    with psycopg.connect(server.dsn()) as connection:
        whys = [why for (why,) in connection.execute("select why from ergon.fact_epochs order by id")]
    assert whys[-1] == "an older state was put back: it had given higher offsets"
    boundary.close()
    stranger.close()


@pytest.mark.spec("FAC-15")
def test_a_recovery_to_an_earlier_moment_is_a_new_epoch(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    boundary = PostgresBoundary(server.dsn())
    before = boundary.append_fact(*stated(1))
    server.stop()
    # As a recovery from an archive ends: on another timeline.
    (server._data / "recovery.signal").touch()
    server._settings["restore_command"] = "false"
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        while connection.execute("select pg_is_in_recovery()").fetchone() != (False,):
            pass
    told = boundary.append_fact(*stated(2))
    assert told.offset == 2
    assert told.epoch != before.epoch
    boundary.close()


@pytest.mark.spec("FAC-15")
def test_a_database_that_was_copied_and_renamed_is_a_new_epoch(postgres, databases):
    dsn = databases.borrow()
    name, copy = dsn.rpartition("/")[2], "facts_copied"
    boundary = PostgresBoundary(dsn, accept_loss=True)
    before = boundary.append_fact(*stated(1))
    boundary.close()
    postgres.create_database(copy, like=name)
    lost = PostgresBoundary(dsn, accept_loss=True)
    lost.append_fact(*stated(2))
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        for words in ("drop database {old} with (force)", "alter database {new} rename to {old}"):
            connection.execute(sql.SQL(words).format(old=sql.Identifier(name), new=sql.Identifier(copy)))
    with PostgresBoundary(dsn, accept_loss=True) as stranger:
        assert stranger.epoch != before.epoch, "one who has seen nothing notices too"
    # The same object as before: it has never been told.
    told = lost.append_fact(*stated(3))
    assert told.epoch != before.epoch
    assert told.offset == 2
    lost.close()
