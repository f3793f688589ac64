"""The private pooler comes back by itself when it dies, and says so; when it is stopped it stays away."""

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
    told = []
    monkeypatch.setattr(module, "DEATHS", told)
    return told


def _answers(pooler, within):
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            with psycopg.connect(pooler.dsn("postgres"), connect_timeout=2) as connection:
                return connection.execute("select 1").fetchone() == (1,)
        except psycopg.OperationalError:
            time.sleep(0.02)
    return False


def test_a_pooler_that_dies_comes_back_and_its_death_is_told(postgres, new_folder, deaths):
    pooler = PrivatePgBouncer(new_folder("pooler"), postgres)
    pooler.start()
    try:
        first = pooler.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 10
        while not deaths and time.monotonic() < end:
            time.sleep(0.01)
        assert [told.partition(":")[0] for told in deaths] == ["pgbouncer ended by itself with -9"]
        assert _answers(pooler, within=20)
        assert pooler.pid not in (None, first)
    finally:
        pooler.stop()
    assert len(deaths) == 1  # being stopped is no death
    assert not _answers(pooler, within=0.2)


def test_its_last_words_are_the_fatal_ones(postgres, new_folder):
    pooler = PrivatePgBouncer(folder := new_folder("pooler"), postgres)
    assert pooler._last_words() == "it left no log"
    (folder / "pgbouncer.log").write_text("one\nFATAL bad state: 11\nkernel file descriptor limit\n")
    assert pooler._last_words() == "FATAL bad state: 11"
    (folder / "pgbouncer.log").write_text("one\ntwo\n")
    assert pooler._last_words() == "two"
