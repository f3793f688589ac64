"""Dead letters of Celery tasks on the brokers that Celery users have, with the defaults: real workers, real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest
from kombu import Connection

from ergon_framework.providers.dead_letter import DEAD_LETTER_QUEUE, MESSAGE_FIELDS

ROOT = Path(__file__).parents[2]
APP = "tests.integration.celery_refusals"
COUNT = 100
TIMEOUT_SECONDS = 120.0
SEND = f"from {APP} import snapshot\nfor n in range({COUNT}): print(snapshot.delay({{'n': n}}, tenant_id='acme').id)"


class CeleryWorker:
    """A Celery worker in its own processes, with its log in a file."""

    def __init__(self, env, log):
        self._log = log
        command = [sys.executable, "-m", "celery", "-A", APP, "worker", "-c", "2", "-l", "INFO"]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, env=env, start_new_session=True
            )

    @property
    def log(self):
        return self._log.read_text(encoding="utf-8", errors="replace")

    def stop(self):
        self._process.terminate()
        try:
            self._process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()


def count_published(dsn):
    with psycopg.connect(dsn) as connection:
        query = "select count(*), count(published_at) from ergon.provider_dead_letters"
        return connection.execute(query).fetchone()


def take_messages(broker):
    """Take everything from queue.deadletter."""
    with Connection(broker) as connection, connection.SimpleQueue(DEAD_LETTER_QUEUE) as queue:
        while True:
            try:
                message = queue.get(timeout=1)
            except queue.Empty:
                return
            yield message.properties["message_id"], json.loads(message.body)
            message.ack()


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request):
    return request.getfixturevalue(f"new_{request.param}")().url


@pytest.mark.spec("DX-24", "PRV-13", "PRV-23")
def test_every_terminal_failure_arrives_once_in_the_dead_letter_queue(broker, database, tmp_path):
    env = {**os.environ, "TEST_BROKER": broker, "ERGON_POSTGRES__DSN": database}
    worker = CeleryWorker(env, tmp_path / "worker.log")
    try:
        sent_ids = subprocess.run(
            [sys.executable, "-c", SEND], cwd=ROOT, env=env, check=True, capture_output=True, text=True
        ).stdout.split()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while count_published(database) != (COUNT, COUNT) and time.monotonic() < deadline:
            time.sleep(0.1)
        rows = count_published(database)
    finally:
        worker.stop()
    assert rows == (COUNT, COUNT), worker.log[-3000:]
    arrived = list(take_messages(broker))
    assert Counter(task_id for task_id, _ in arrived) == Counter(sent_ids)
    assert {frozenset(letter) for _, letter in arrived} == {frozenset(MESSAGE_FIELDS)}
    assert {letter["reason_code"] for _, letter in arrived} == {"bad_request"}
