"""The private pooler restarts when it exits unexpectedly, and records that; a stopped one stays down."""

from __future__ import annotations

import os
import signal
import time

import psycopg
import pytest

from tests.servers import pgbouncer as module
from tests.servers.pgbouncer import PrivatePgBouncer


@pytest.fixture
def deaths(monkeypatch):
    records = []
    monkeypatch.setattr(module, "DEATHS", records)
    return records


def _is_answering_within(pooler, timeout):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            with psycopg.connect(pooler.dsn("postgres"), connect_timeout=2) as connection:
                return connection.execute("select 1").fetchone() == (1,)
        except psycopg.OperationalError:
            time.sleep(0.02)
    return False


def test_a_pooler_that_exits_is_restarted_and_recorded(postgres, new_folder, deaths):
    pooler = PrivatePgBouncer(new_folder("pooler"), postgres)
    pooler.start()
    try:
        first = pooler.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while not deaths and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [record.partition(":")[0] for record in deaths] == ["pgbouncer ended by itself with -9"]
        assert _is_answering_within(pooler, timeout=20)
        assert pooler.pid not in (None, first)
    finally:
        pooler.stop()
    assert len(deaths) == 1  # stop() is not an unexpected exit
    assert not _is_answering_within(pooler, timeout=0.2)


def test_the_last_fatal_log_line_is_recorded(postgres, new_folder):
    pooler = PrivatePgBouncer(folder := new_folder("pooler"), postgres)
    assert pooler._read_last_log_line() == "it left no log"
    (folder / "pgbouncer.log").write_text("one\nFATAL bad state: 11\nkernel file descriptor limit\n")
    assert pooler._read_last_log_line() == "FATAL bad state: 11"
    (folder / "pgbouncer.log").write_text("one\ntwo\n")
    assert pooler._read_last_log_line() == "two"
