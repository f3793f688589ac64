"""The doorbell sleeps for seconds on end, and yet is there at once when it is wanted."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psycopg
import pytest

from ergon_framework.connectors.postgres.doorbell import Doorbell
from ergon_framework.schema.lines import Lines

#: What it sleeps for without being woken is five seconds; this is far less, and more than a busy machine needs.
SOON = 3.0


@pytest.fixture
def lines(database):
    with psycopg.connect(database, autocommit=True) as connection:
        for number, name in enumerate(("first", "second"), 1):
            connection.execute("insert into ergon.queue (id, name) values (%s, %s)", (number, name))
    lines = Lines(database)
    yield lines
    lines.close()


def asleep(doorbell):
    """Until it listens and has told whoever sends; its first look rings by itself."""
    rung = threading.Event()
    unhang = doorbell.hang(1, rung.set)
    assert rung.wait(20)
    # Nothing is to be seen of a thread that waits: by then it does.
    time.sleep(0.3)
    rung.clear()
    return rung, unhang


def sleepers(database):
    with psycopg.connect(database) as connection:
        return {queue for (queue,) in connection.execute("select queue from ergon.sleeper")}


def test_a_reminder_rings_when_it_is_due_and_not_before(lines):
    doorbell = Doorbell(lines)
    rung, unhang = asleep(doorbell)
    began = time.monotonic()
    doorbell.remind(1, 0.5)
    doorbell.remind(1, 60.0)
    assert rung.wait(20)
    assert 0.5 <= time.monotonic() - began < SOON
    unhang()


def test_a_second_queue_is_made_known_at_once(lines, database):
    doorbell = Doorbell(lines)
    _, unhang = asleep(doorbell)
    began, rung = time.monotonic(), threading.Event()
    also = doorbell.hang(2, rung.set)
    assert rung.wait(20)
    assert time.monotonic() - began < SOON
    assert sleepers(database) == {1, 2}
    unhang()
    also()


def test_a_notice_rings_at_once(lines, database):
    doorbell = Doorbell(lines)
    rung, unhang = asleep(doorbell)
    began = time.monotonic()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("select pg_notify('ergon', '1')")
    assert rung.wait(20)
    assert time.monotonic() - began < SOON
    unhang()


def test_it_ends_when_nobody_wants_to_hear_it_and_begins_again(lines):
    doorbell = Doorbell(lines)
    _, unhang = asleep(doorbell)
    thread, began = doorbell._thread, time.monotonic()
    unhang()
    thread.join(20)
    assert time.monotonic() - began < SOON
    assert doorbell._hearing is None
    rung, unhang = asleep(doorbell)
    doorbell.remind(1, 0.0)
    assert rung.wait(20)
    unhang()


def test_a_doorbell_that_waits_costs_nothing(lines):
    doorbell = Doorbell(lines)
    _, unhang = asleep(doorbell)
    task = doorbell._thread.native_id

    def switches():
        status = Path(f"/proc/self/task/{task}/status").read_text()
        return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)

    before = switches()
    time.sleep(2.0)
    # Looking five times a second it was ten, and each of them with a way through the driver.
    assert switches() - before <= 4
    unhang()
