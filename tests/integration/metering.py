"""Databases with the provider schema, attempts to write into them, and a proxy that cuts a connection at a word."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

import psycopg

from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import NOT_CALLED_REASONS, AttemptOutcome
from ergon_framework.providers.models import AttemptRecord
from ergon_framework.providers.postgres import rollups as minutes

TIMEOUT_SECONDS = 30.0
_numbers = itertools.count(1)
ALL_TIME = (datetime(1970, 1, 2, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC))


def make_attempt(**fields):
    defaults = {
        "tenant_id": "acme",
        "task_execution_id": None,
        "provider_name": "pay",
        "capability": "charging",
        "operation": "charge",
        "idempotency_key": None,
        "correlation_id": f"c{next(_numbers)}",
        "attempt_number": 1,
        "max_attempts": 3,
        "duration_ms": 12.5,
        "timeout_budget_ms": 30_000.0,
        "outcome": AttemptOutcome.SUCCESS,
        "reason_code": None,
        "retryable": False,
        "http_status": 200,
        "created_at": time.time(),
    }
    return AttemptRecord(**defaults | fields)


def make_random_attempt(rng: random.Random, *, now: float, tenants: int = 3, span: float = 400.0) -> AttemptRecord:
    """Return a random attempt of the last *span* seconds."""
    code = rng.choice([None, None, None, *ReasonCode])
    outcome = (
        AttemptOutcome.SUCCESS
        if code is None
        else rng.choice([AttemptOutcome.RETRY, AttemptOutcome.FAILED, AttemptOutcome.DEAD_LETTER])
    )
    return make_attempt(
        tenant_id=f"t{rng.randrange(tenants)}",
        provider_name=rng.choice(["pay", "rank"]),
        capability=rng.choice(["a", "b"]),
        task_execution_id=rng.choice([None, "e1", f"e{rng.randrange(50)}"]),
        duration_ms=rng.choice([0.0, 1.0, 1.25, 100_000.0, rng.expovariate(0.01), rng.uniform(0, 200_000)]),
        outcome=outcome,
        reason_code=code,
        created_at=now - rng.choice([0.0, 60.0, rng.uniform(0, span)]),
    )


def query(dsn, statement, *values):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []


def count_rows(dsn):
    return query(dsn, "select count(*) from ergon.provider_execution_metrics")[0][0]


def read_rollups(dsn):
    """Return the minute roll-ups as stored, and as recomputed from the rows."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return minutes.load_rollups(connection, *ALL_TIME), minutes.recompute_rollups(connection, *ALL_TIME)


def count_calls(rollups):
    return sum(one.calls.total + one.calls.refused + one.calls.dead_letter for one in rollups.values())


def wait_until(condition, message="it did not happen"):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.02)
    return value


def is_rejected(row):
    return row.reason_code in NOT_CALLED_REASONS


class CuttingProxy:
    """A proxy between a client and the server at *port* that cuts the connection *times* times at a word of the client.

    ``before``: the server never receives it; otherwise the server receives it, and its answer is lost.
    """

    def __init__(self, port, *, word=b"commit", before=False, times=1):
        self._port, self._word, self._before, self.remaining_cuts = port, word, before, times
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            cut = threading.Event()
            self._sockets += [client, server]
            for source, target, is_request in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._forward, args=(source, target, cut, is_request), daemon=True).start()

    def _forward(self, source, target, cut, is_request):
        try:
            while data := source.recv(65_536):
                if is_request and self.remaining_cuts > 0 and self._word in data:
                    self.remaining_cuts -= 1
                    cut.set()
                    if self._before:
                        break
                    target.sendall(data)
                    # The server's answer has arrived by then and is dropped here.
                    time.sleep(0.2)
                    break
                if not is_request and cut.is_set():
                    continue
                target.sendall(data)
        except OSError:
            pass
        for endpoint in (source, target):
            with suppress(OSError):
                endpoint.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.close()
        for endpoint in self._sockets:
            endpoint.close()


@contextmanager
def cutting_proxy(dsn, port, **options):
    """Yield the address of the same database through a proxy, and the proxy."""
    proxy = CuttingProxy(port, **options)
    try:
        yield dsn.replace(f":{port}/", f":{proxy.port}/") + "?sslmode=disable&gssencmode=disable", proxy
    finally:
        proxy.close()
