"""The private server does what tests of outages count on."""

from __future__ import annotations

import os
import threading

import psycopg
import pytest

from tests.servers import postgres as module
from tests.servers.packets import CannotCutError, PacketDrop
from tests.servers.postgres import PostgresServerError, _children


def _count(dsn):
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        return connection.execute("SELECT count(*) FROM kept").fetchone()[0]


def _write(dsn):
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
        connection.execute("INSERT INTO kept VALUES (1)")


def test_each_process_has_a_server_of_its_own(postgres):
    dsn = postgres.create_database("of_this_test")
    _write(dsn)
    assert _count(dsn) == 1
    assert postgres.pid != os.getpid()


def test_a_database_that_is_made_again_is_empty(postgres):
    dsn = postgres.create_database("made_twice")
    _write(dsn)
    with psycopg.connect(dsn):
        assert postgres.create_database("made_twice") == dsn
    with pytest.raises(psycopg.errors.UndefinedTable):
        _count(dsn)


def test_it_comes_back_with_what_it_had_on_the_same_port(new_postgres):
    server = new_postgres()
    dsn = server.create_database("kept")
    _write(dsn)
    server.stop("fast")
    with pytest.raises(psycopg.OperationalError):
        _count(dsn)
    with pytest.raises(PostgresServerError, match="start"):
        _ = server.pid
    server.start()
    server.restart("immediate")
    assert _count(dsn) == 1
    old = server.pid
    children = _children(old)
    assert children
    server.kill()
    assert not [pid for pid in [old, *children] if module._is_running(pid)]
    server.start()
    assert _count(dsn) == 1
    assert server.pid != old


def test_syncing_is_on_unless_a_test_says_otherwise(new_postgres, postgres):
    with psycopg.connect(new_postgres().dsn()) as connection:
        assert connection.execute("SHOW fsync").fetchone()[0] == "on"
        assert connection.execute("SHOW max_connections").fetchone()[0] == "200"
    with psycopg.connect(postgres.dsn()) as connection:
        assert connection.execute("SHOW fsync").fetchone()[0] == "off"


def test_a_cut_line_is_silent_and_a_mended_one_carries_on(new_postgres):
    server = new_postgres()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT 1")
        server.cut()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(connection.execute("SELECT 42").fetchone()[0]))
        asking.start()
        asking.join(0.5)
        assert answers == []
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.dsn(), connect_timeout=2)
        server.mend()
        asking.join(30)
        assert answers == [42]


def test_a_line_that_cannot_be_cut_says_what_it_takes():
    drop = PacketDrop(1)
    with pytest.raises(CannotCutError, match="NET_ADMIN"):
        raise drop._refused(PermissionError(1, "Operation not permitted"))
    assert not drop.is_cut


def test_a_missing_server_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module.Path, "glob", lambda *_: [])
    monkeypatch.setattr(module.shutil, "which", lambda *_: None)
    with pytest.raises(PostgresServerError, match="install the server"):
        module.find_binaries()
