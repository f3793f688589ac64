"""A handler with a provider call, a process step in an executor and a fact is SIGKILLed at random, on each broker.

Whatever was repeated, each effect is there once for each transaction: one charge, one fact, one result that counts.
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

from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.facts.model import Pair
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.providers.synthetic import Behaviour, SyntheticUpstream
from ergon_framework.transaction import Transaction
from tests.integration.brokers import BROKERS, is_empty, named
from tests.integration.running import ERGON

pytestmark = pytest.mark.invariant

ORDERS = 40
CONCURRENCY = 4
EXECUTORS = 2
PAIR = Pair("Plant A", "HQ")
#: Seconds that what is left after the kills may take; and those without a word after which nobody waits for one.
PATIENCE, SILENCE = 240.0, 60.0
#: How far a worker has come when it is killed. Half of the times it stays there until then, else it goes on.
POINTS = ["called", "charged", "appended", "counted"]
KILLS = [(point, stays) for point in POINTS for stays in (True, False)]

HANDLERS = """
import os
from types import SimpleNamespace
from ergon_framework.executor.registry import Registry
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.sql.books import PostgresBooks
from ergon_framework.providers.synthetic import SyntheticProvider

registry = Registry()
bank = SimpleNamespace(address=("127.0.0.1", int(os.environ["BANK"])))
# A killed caller's key is free 5 s after the timeout. A bank that seems slow on a crowded machine is well all the same.
policy = ProviderPolicy(timeout=3.0, breaker=BreakerPolicy(failure_threshold=1000))
payments = SyntheticProvider(bank, books=PostgresBooks(), policy=policy)

@registry.handler("charge")
def charge(order: dict) -> dict:
    paid = payments.call("charge", order)
    return {"charge": paid["charge"], "amount": order["amount"]}
"""
APP = """
import json, os, threading
import psycopg
from ergon_framework import ConsumerPolicy, consumer, queue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.executor.task import isolated
from ergon_framework.facts.facts import Facts
from ergon_framework.facts.stores.postgres import PostgresBoundary

DSN = os.environ["ERGON_POSTGRES__DSN"]
facts = Facts(PostgresBoundary(DSN, accept_loss=True), zone="{zone}")
# Never opened: it only writes marks, on the handler's own connections.
inbox = PostgresQueue("counted", dsn=DSN, inbox=True)
policy = ConsumerPolicy.load({{
    "loop": {{"streaming": True, "concurrency": {{"value": {concurrency}}}, "batch": {{"size": {concurrency}}},
              "empty_queue": {{"backoff": 0.05, "cap": 0.1}}, "transaction_timeout": 120.0,
              # Being killed is not the transaction's fault.
              "max_deliveries": 1000}},
    # Whoever comes while a dead one still has the key asks again until it is free.
    "steps": {{"process": {{"retry": {{"max_attempts": 100, "timeout": 20.0, "backoff": 0.5, "cap": 0.5}}}}}},
}})

def say(point, *words):
    # Short enough to be written as one, whoever else writes.
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
        if inbox.mark_on(connection):
            connection.execute("insert into effect values (%s)", [json.dumps([transaction.id, result])])
    say("counted", transaction.id)

executor = Command(words={words!r}, environment=dict(os.environ))
task = isolated(charge, executor, pool=PoolPolicy(size={executors}))
"""


class Diary:
    """What has happened, as told by workers and the bank, for whoever waits for it."""

    def __init__(self):
        self._changed = threading.Condition()
        self.lines = []

    def note(self, *words):
        with self._changed:
            self.lines.append(words)
            self._changed.notify_all()

    def told(self, point):
        return [line for line in self.lines if line[0] == point]

    def called_again(self):
        """Who was called for after the result was there."""
        charged, again = set(), []
        for point, name, *_ in self.lines:
            if point == "charged":
                charged.add(name)
            elif point == "called" and name in charged:
                again.append(name)
        return again

    def wait_for(self, point, count, *, since):
        """Until so many lines of that kind were noted, or nothing at all for too long."""
        with self._changed:
            while sum(line[0] == point for line in self.lines[since:]) < count:
                if not self._changed.wait(SILENCE):
                    return


class Bank(SyntheticUpstream):
    """Charges once for each key, and answers a second request with the first one's charge."""

    def __init__(self, diary):
        self._diary = diary
        self.charges = {}
        #: While it is not set, nobody is answered.
        self.answers = threading.Event()
        self.answers.set()
        super().__init__()

    def arrived(self, received):
        super().arrived(received)
        order = received.payload["order"]
        with self._lock:
            charge = self.charges.setdefault((received.idempotency_key, order), f"charge-{len(self.charges)}")
        self._diary.note("called", order)
        self.answers.wait(SILENCE)
        return Behaviour(body={"charge": charge})


class Worker:
    """One life of ``ergon run``; what it says goes to the diary."""

    def __init__(self, diary, *, stay=""):
        self.began = len(diary.lines)
        self._diary = diary
        environment = {**os.environ, "STAY": stay}
        self._process = subprocess.Popen(
            [*ERGON, "run", "app:task"], stdout=subprocess.PIPE, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self._process.stdout as said:
            for line in said:
                # Not what a killed one had no time to end, nor what the command says of itself.
                if line.endswith("\n") and line.startswith(tuple(POINTS)):
                    self._diary.note(*line.split())

    def kill(self):
        self._process.kill()
        self._gone()

    def end(self):
        """In good order: what it held is acked, or back in the queue."""
        self._process.terminate()
        assert self._gone() == 0

    def _gone(self):
        code = self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


class Trial:
    """Forty orders through eight kills and what is left of them."""

    def __init__(self, queue, dsn, diary, bank):
        self._queue, self._dsn, self._diary, self._bank = queue, dsn, diary, bank

    def torment(self, dice):
        """Kill one worker after the other when it has come so far."""
        for point, stays in dice.sample(KILLS, len(KILLS)):
            worker = Worker(self._diary, stay=point if stays else "")
            try:
                if stays and point == "called":
                    self._bank.answers.clear()
                self._diary.wait_for(point, dice.randint(1, EXECUTORS), since=worker.began)
                time.sleep(0.0 if stays else dice.uniform(0.0, 0.02))
            finally:
                worker.kill()
                self._bank.answers.set()

    def finish(self):
        """Leave workers in peace until nothing is left, also of what they hold without the broker telling."""
        until = time.monotonic() + PATIENCE
        while True:
            worker = Worker(self._diary)
            try:
                while not (is_empty(depth := self._queue.depth()) and len(self.counted()) >= ORDERS):
                    assert not depth.dead
                    assert time.monotonic() < until, f"{depth} and {len(self.counted())} counted"
                    time.sleep(0.05)
                worker.end()
            finally:
                worker.kill()
            if is_empty(self._queue.depth()):
                return

    def counted(self):
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            return [json.loads(name) for (name,) in connection.execute("select name from effect")]

    def facts(self):
        boundary = PostgresBoundary(self._dsn, accept_loss=True)
        found = boundary.fetch_facts("look", PAIR, 10 * ORDERS)
        boundary.close()
        return found


def prepare(folder, queue, dsn, bank, monkeypatch):
    words = (*ERGON, "executor", "run", "--handlers", "handlers:registry")
    told = {"name": queue.name, "concurrency": CONCURRENCY, "executors": EXECUTORS, "words": words}
    told |= {"zone": PAIR.from_zone, "to_zone": PAIR.to_zone}
    (folder / "app.py").write_text(APP.format(**told), encoding="utf-8")
    (folder / "handlers.py").write_text(HANDLERS, encoding="utf-8")
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    monkeypatch.setenv("BANK", str(bank.port))


@pytest.mark.spec("PRV-22", "FAC-03", "EXE-28", "CNN-14")
@pytest.mark.parametrize("broker", BROKERS)
def test_each_effect_is_there_once_however_often_its_handler_was_killed(
    broker, database, request, tmp_path, monkeypatch
):
    queue, diary = named(broker, request, tmp_path, monkeypatch), Diary()
    orders = {f"order-{number}": {"order": f"order-{number}", "amount": number} for number in range(ORDERS)}
    with Bank(diary) as bank:
        prepare(tmp_path, queue, database, bank, monkeypatch)
        queue.dispatch([Transaction(name, payload) for name, payload in orders.items()])
        trial = Trial(queue, database, diary, bank)
        trial.torment(random.Random(7))
        left = ORDERS - len(trial.counted())
        trial.finish()
    dead = queue.list_dead(DeadLetterQuery())
    queue.close()
    assert not dead
    # One charge, and its result counted once: a second charge would have had another key.
    assert sorted(order for _, order in bank.charges) == sorted(orders)
    assert len({key for key, _ in bank.charges}) == ORDERS
    results = {name: {"charge": charge, "amount": orders[name]["amount"]} for (_, name), charge in bank.charges.items()}
    assert sorted(trial.counted()) == sorted([name, result] for name, result in results.items())
    # One fact with that result, at one offset, whoever was told of it.
    stored = trial.facts()
    assert {each.fact.subject: json.loads(each.fact.object_json) for each in stored} == results
    assert [each.offset for each in stored] == list(range(1, ORDERS + 1))
    said = {(name, int(offset), message_id) for _, name, offset, message_id in diary.told("appended")}
    assert said == {(each.fact.subject, each.offset, each.envelope.message_id) for each in stored}
    # The kills have hit what they were for; but nobody calls again once there is a result.
    assert left > 0
    for point in POINTS:
        assert len(diary.told(point)) > ORDERS, point
    assert not diary.called_again()
