"""Metering: databases with the schema, attempts to be written into them, and a line that can be cut at a word."""

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
from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.health import NOT_CALLED, Outcome
from ergon_framework.providers.sql import minutes

PATIENCE = 30.0
_numbers = itertools.count(1)
ALWAYS = (datetime(1970, 1, 2, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC))


def attempt(**fields):
    plain = {
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
        "outcome": Outcome.SUCCESS,
        "reason_code": None,
        "retryable": False,
        "http_status": 200,
        "created_at": time.time(),
    }
    return AttemptRow(**plain | fields)


def chance(dice: random.Random, *, now: float, tenants: int = 3, span: float = 400.0) -> AttemptRow:
    """Any attempt of the last *span* seconds."""
    code = dice.choice([None, None, None, *ReasonCode])
    outcome = Outcome.SUCCESS if code is None else dice.choice([Outcome.RETRY, Outcome.FAILED, Outcome.DEAD_LETTER])
    return attempt(
        tenant_id=f"t{dice.randrange(tenants)}",
        provider_name=dice.choice(["pay", "rank"]),
        capability=dice.choice(["a", "b"]),
        task_execution_id=dice.choice([None, "e1", f"e{dice.randrange(50)}"]),
        duration_ms=dice.choice([0.0, 1.0, 1.25, 100_000.0, dice.expovariate(0.01), dice.uniform(0, 200_000)]),
        outcome=outcome,
        reason_code=code,
        created_at=now - dice.choice([0.0, 60.0, dice.uniform(0, span)]),
    )


def ask(dsn, statement, *values):
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(statement, values or None)
        return found.fetchall() if found.description else []


def rows_of(dsn):
    return ask(dsn, "select count(*) from ergon.provider_execution_metrics")[0][0]


def both(dsn):
    """The minutes as they were added up, and as the rows give them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return minutes.stored(connection, *ALWAYS), minutes.recomputed(connection, *ALWAYS)


def counted(tallies):
    return sum(one.calls.total + one.calls.refused + one.calls.dead_letter for one in tallies.values())


def until(condition, what="it did not happen"):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def is_refused(row):
    return row.reason_code in NOT_CALLED


class Wire:
    """Between a client and the server at *port*: it cuts the line at a word that the client says, so often.

    ``before``: the server never hears it; otherwise it hears it, and its answer is lost.
    """

    def __init__(self, port, *, word=b"commit", before=False, times=1):
        self._port, self._word, self._before, self.left = port, word, before, times
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._lines = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            cut = threading.Event()
            self._lines += [client, server]
            for source, target, hears in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._carry, args=(source, target, cut, hears), daemon=True).start()

    def _carry(self, source, target, cut, hears):
        try:
            while data := source.recv(65_536):
                if hears and self.left > 0 and self._word in data:
                    self.left -= 1
                    cut.set()
                    if self._before:
                        break
                    target.sendall(data)
                    # The server's answer has come by then; it stays here.
                    time.sleep(0.2)
                    break
                if not hears and cut.is_set():
                    continue
                target.sendall(data)
        except OSError:
            pass
        for line in (source, target):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.close()
        for line in self._lines:
            line.close()


@contextmanager
def wired(dsn, port, **how):
    """The address of the same database by way of a wire, and the wire."""
    wire = Wire(port, **how)
    try:
        yield dsn.replace(f":{port}/", f":{wire.port}/") + "?sslmode=disable&gssencmode=disable", wire
    finally:
        wire.close()
