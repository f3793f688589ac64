"""The private server does what tests of outages count on."""

from __future__ import annotations

import os
import threading

import psycopg
import pytest

from tests.servers import postgres as module
from tests.servers.packets import PacketDrop, PacketDropError
from tests.servers.postgres import PostgresServerError, _list_children


def _count_rows(dsn):
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        return connection.execute("SELECT count(*) FROM kept").fetchone()[0]


def _insert_row(dsn):
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
        connection.execute("INSERT INTO kept VALUES (1)")


def test_each_process_has_a_separate_server(postgres):
    dsn = postgres.create_database("of_this_test")
    _insert_row(dsn)
    assert _count_rows(dsn) == 1
    assert postgres.pid != os.getpid()


def test_a_database_that_is_created_again_is_empty(postgres):
    dsn = postgres.create_database("made_twice")
    _insert_row(dsn)
    with psycopg.connect(dsn):
        assert postgres.create_database("made_twice") == dsn
    with pytest.raises(psycopg.errors.UndefinedTable):
        _count_rows(dsn)


def test_a_restarted_server_has_its_data_and_port(new_postgres):
    server = new_postgres()
    dsn = server.create_database("kept")
    _insert_row(dsn)
    server.stop("fast")
    with pytest.raises(psycopg.OperationalError):
        _count_rows(dsn)
    with pytest.raises(PostgresServerError, match="start"):
        _ = server.pid
    server.start()
    server.restart("immediate")
    assert _count_rows(dsn) == 1
    old_pid = server.pid
    children = _list_children(old_pid)
    assert children
    server.kill()
    assert not [pid for pid in [old_pid, *children] if module._is_running(pid)]
    server.start()
    assert _count_rows(dsn) == 1
    assert server.pid != old_pid


def test_fsync_is_on_unless_a_test_disables_it(new_postgres, postgres):
    with psycopg.connect(new_postgres().dsn()) as connection:
        assert connection.execute("SHOW fsync").fetchone()[0] == "on"
        assert connection.execute("SHOW max_connections").fetchone()[0] == "200"
    with psycopg.connect(postgres.dsn()) as connection:
        assert connection.execute("SHOW fsync").fetchone()[0] == "off"


def test_a_partitioned_connection_gets_no_answer_and_continues_when_healed(new_postgres):
    server = new_postgres()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT 1")
        server.partition_network()
        answers = []
        query_thread = threading.Thread(target=lambda: answers.append(connection.execute("SELECT 42").fetchone()[0]))
        query_thread.start()
        query_thread.join(0.5)
        assert answers == []
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.dsn(), connect_timeout=2)
        server.heal_network()
        query_thread.join(30)
        assert answers == [42]


def test_a_rejected_packet_drop_names_the_required_rights():
    drop = PacketDrop(1)
    with pytest.raises(PacketDropError, match="NET_ADMIN"):
        raise drop._to_error(PermissionError(1, "Operation not permitted"))
    assert not drop.is_cut


def test_a_missing_server_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(module.Path, "glob", lambda *_: [])
    monkeypatch.setattr(module.shutil, "which", lambda *_: None)
    with pytest.raises(PostgresServerError, match="install the server"):
        module.find_binaries()
