"""Kill a handler with a provider call, an executor step and a fact at random points, on each broker.

Whatever is repeated, each effect exists once per transaction: one charge, one fact, one counted result.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time

import psycopg
import pytest

from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from ergon_framework.testing.fake_provider import Behaviour, FakeProviderServer
from ergon_framework.transaction import Transaction
from tests.integration.brokers import BROKERS, create_named_queue, is_empty
from tests.integration.running import ERGON

pytestmark = pytest.mark.invariant

ORDER_COUNT = 40
CONCURRENCY = 4
EXECUTOR_COUNT = 2
PAIR = ZonePair("Plant A", "HQ")
#: Limit in seconds for the work left after the kills, and for the time without an event before a wait is abandoned.
COMPLETION_TIMEOUT_SECONDS, SILENCE_SECONDS = 240.0, 60.0
#: How far a worker has come when it is killed. Half of the times it waits at that point, else it continues.
KILL_POINTS = ["called", "charged", "appended", "counted"]
KILLS = [(point, stays) for point in KILL_POINTS for stays in (True, False)]

HANDLERS_MODULE = """
import os
from types import SimpleNamespace
from ergon_framework.executors.registry import HandlerRegistry
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.postgres.state import PostgresProviderState
from ergon_framework.testing.fake_provider import FakeProvider

registry = HandlerRegistry()
bank = SimpleNamespace(address=("127.0.0.1", int(os.environ["BANK"])))
# A killed caller's key is free 5 s after the timeout. A bank that seems slow on a crowded machine is well all the same.
policy = ProviderPolicy(timeout=3.0, breaker=BreakerPolicy(failure_threshold=1000))
payments = FakeProvider(bank, state_store=PostgresProviderState(), policy=policy)

@registry.handler("charge")
def charge(order: dict) -> dict:
    paid = payments.call("charge", order)
    return {"charge": paid["charge"], "amount": order["amount"]}
"""
APP_TEMPLATE = """
import json, os, threading
import psycopg
from ergon_framework import ConsumerPolicy, consumer, queue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.isolation import run_in_executor
from ergon_framework.facts.append import Facts
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

DSN = os.environ["ERGON_POSTGRES__DSN"]
facts = Facts(PostgresBoundary(DSN, accept_loss=True), zone="{zone}")
# Never opened: it only writes marks, on the handler's own connections.
inbox = PostgresQueue("counted", dsn=DSN, inbox=True)
policy = ConsumerPolicy.load({{
    "loop": {{"streaming": True, "concurrency": {{"value": {concurrency}}}, "batch": {{"size": {concurrency}}},
              "empty_queue": {{"backoff": 0.05, "cap": 0.1}}, "transaction_timeout": 120.0,
              # Being killed is not the transaction's fault.
              "max_deliveries": 1000}},
    # A call that finds the key of a killed worker in use is retried until the key is free.
    "steps": {{"process": {{"retry": {{"max_attempts": 100, "timeout": 20.0, "backoff": 0.5, "cap": 0.5}}}}}},
}})

def say(point, *words):
    # Short enough for an atomic write next to other writers.
    os.write(1, (" ".join(map(str, (point, *words))) + chr(10)).encode())
    if os.environ.get("STAY") == point:
        threading.Event().wait()

@consumer(queue("{name}"), policy=policy)
def charge(order): ...

@charge.on_success
def charged(order, result, transaction):
    say("charged", transaction.id)
    told = facts.append("{to_zone}", subject=transaction.id, predicate="paid", object=result)
    say("appended", transaction.id, told.offset, told.message_id)
    with psycopg.connect(DSN) as connection:
        if inbox.record_processed_on(connection):
            connection.execute("insert into effect values (%s)", [json.dumps([transaction.id, result])])
    say("counted", transaction.id)

executor = ExecutorCommand(words={words!r}, environment=dict(os.environ))
task = run_in_executor(charge, executor, pool=PoolPolicy(size={executors}))
"""


class EventLog:
    """The events that workers and the bank report; callers can wait for them."""

    def __init__(self):
        self._changed = threading.Condition()
        self.entries = []

    def record(self, *fields):
        with self._changed:
            self.entries.append(fields)
            self._changed.notify_all()

    def select(self, point):
        return [entry for entry in self.entries if entry[0] == point]

    def list_repeated_calls(self):
        """Return the orders for which the bank was called again after it had answered."""
        charged, repeated = set(), []
        for point, name, *_ in self.entries:
            if point == "charged":
                charged.add(name)
            elif point == "called" and name in charged:
                repeated.append(name)
        return repeated

    def wait_for(self, point, count, *, since):
        """Wait until *count* lines of kind *point* follow *since*, or until no event arrives for SILENCE_SECONDS."""
        with self._changed:
            while sum(entry[0] == point for entry in self.entries[since:]) < count:
                if not self._changed.wait(SILENCE_SECONDS):
                    return


class Bank(FakeProviderServer):
    """A bank that charges once for each key and answers a second request with the first one's charge."""

    def __init__(self, events):
        self._events = events
        self.charges = {}
        #: While it is not set, no request is answered.
        self.may_answer = threading.Event()
        self.may_answer.set()
        super().__init__()

    def record_request(self, received):
        super().record_request(received)
        order = received.payload["order"]
        with self._lock:
            charge = self.charges.setdefault((received.idempotency_key, order), f"charge-{len(self.charges)}")
        self._events.record("called", order)
        self.may_answer.wait(SILENCE_SECONDS)
        return Behaviour(body={"charge": charge})


class Worker:
    """One process of ``ergon run``; its output goes to the event log."""

    def __init__(self, events, *, stay=""):
        self.start_index = len(events.entries)
        self._events = events
        environment = {**os.environ, "STAY": stay}
        self._process = subprocess.Popen(
            [*ERGON, "run", "app:task"], stdout=subprocess.PIPE, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self._process.stdout as stdout:
            for line in stdout:
                # Skip lines cut off by a kill and lines of the command itself.
                if line.endswith("\n") and line.startswith(tuple(KILL_POINTS)):
                    self._events.record(*line.split())

    def kill(self):
        self._process.kill()
        self._wait()

    def stop(self):
        """Stop cleanly: its claims are acked or back in the queue."""
        self._process.terminate()
        assert self._wait() == 0

    def _wait(self):
        code = self._process.wait(COMPLETION_TIMEOUT_SECONDS)
        self._reader.join(COMPLETION_TIMEOUT_SECONDS)
        return code


class KillRun:
    """Forty orders, eight kills, and the work left after them."""

    def __init__(self, queue, dsn, events, bank):
        self._queue, self._dsn, self._events, self._bank = queue, dsn, events, bank

    def kill_workers(self, rng):
        """Kill one worker after the other when it has reached its point."""
        for point, stays in rng.sample(KILLS, len(KILLS)):
            worker = Worker(self._events, stay=point if stays else "")
            try:
                if stays and point == "called":
                    self._bank.may_answer.clear()
                self._events.wait_for(point, rng.randint(1, EXECUTOR_COUNT), since=worker.start_index)
                time.sleep(0.0 if stays else rng.uniform(0.0, 0.02))
            finally:
                worker.kill()
                self._bank.may_answer.set()

    def run_until_empty(self):
        """Run workers until nothing is left, including claims that the broker has not yet returned."""
        deadline = time.monotonic() + COMPLETION_TIMEOUT_SECONDS
        while True:
            worker = Worker(self._events)
            try:
                while not (is_empty(depth := self._queue.depth()) and len(self.read_counted()) >= ORDER_COUNT):
                    assert not depth.dead
                    assert time.monotonic() < deadline, f"{depth} and {len(self.read_counted())} counted"
                    time.sleep(0.05)
                worker.stop()
            finally:
                worker.kill()
            if is_empty(self._queue.depth()):
                return

    def read_counted(self):
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            return [json.loads(name) for (name,) in connection.execute("select name from effect")]

    def read_facts(self):
        boundary = PostgresBoundary(self._dsn, accept_loss=True)
        facts = boundary.fetch_facts("look", PAIR, 10 * ORDER_COUNT)
        boundary.close()
        return facts


def prepare(folder, queue, dsn, bank, monkeypatch):
    command = (*ERGON, "executor", "run", "--handlers", "handlers:registry")
    parameters = {"name": queue.name, "concurrency": CONCURRENCY, "executors": EXECUTOR_COUNT, "words": command}
    parameters |= {"zone": PAIR.from_zone, "to_zone": PAIR.to_zone}
    (folder / "app.py").write_text(APP_TEMPLATE.format(**parameters), encoding="utf-8")
    (folder / "handlers.py").write_text(HANDLERS_MODULE, encoding="utf-8")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    monkeypatch.setenv("BANK", str(bank.port))


@pytest.mark.spec("PRV-22", "FAC-03", "EXE-28", "CNN-14")
@pytest.mark.parametrize("broker", BROKERS)
def test_each_effect_exists_once_however_often_its_handler_was_killed(broker, database, request, tmp_path, monkeypatch):
    queue, events = create_named_queue(broker, request, tmp_path, monkeypatch), EventLog()
    orders = {f"order-{number}": {"order": f"order-{number}", "amount": number} for number in range(ORDER_COUNT)}
    with Bank(events) as bank:
        prepare(tmp_path, queue, database, bank, monkeypatch)
        queue.dispatch([Transaction(payload, id=name) for name, payload in orders.items()])
        kill_run = KillRun(queue, database, events, bank)
        kill_run.kill_workers(random.Random(7))
        left_count = ORDER_COUNT - len(kill_run.read_counted())
        kill_run.run_until_empty()
    dead = queue.list_dead(DeadLetterQuery())
    queue.close()
    assert not dead
    # One charge, and its result counted once: a second charge would have had another key.
    assert sorted(order for _, order in bank.charges) == sorted(orders)
    assert len({key for key, _ in bank.charges}) == ORDER_COUNT
    results = {name: {"charge": charge, "amount": orders[name]["amount"]} for (_, name), charge in bank.charges.items()}
    assert sorted(kill_run.read_counted()) == sorted([name, result] for name, result in results.items())
    # One fact with that result, at one offset, in the report of every worker.
    stored = kill_run.read_facts()
    assert {each.fact.subject: json.loads(each.fact.object_json) for each in stored} == results
    assert [each.offset for each in stored] == list(range(1, ORDER_COUNT + 1))
    reported = {(name, int(offset), message_id) for _, name, offset, message_id in events.select("appended")}
    assert reported == {(each.fact.subject, each.offset, each.envelope.message_id) for each in stored}
    # The kills have reached their points, but no call follows a result.
    assert left_count > 0
    for point in KILL_POINTS:
        assert len(events.select(point)) > ORDER_COUNT, point
    assert not events.list_repeated_calls()
