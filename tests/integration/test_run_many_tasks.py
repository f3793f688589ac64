"""Check several tasks in one ``ergon run``: real processes, real queues, one of them with a poison message."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from ergon_framework import queue as queue_named
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.runner import queues
from ergon_framework.runner.exit import RunExit
from ergon_framework.transaction import Transaction
from tests.integration.brokers import LEASE_SECONDS, is_empty
from tests.integration.running import ErgonProcess
from tests.integration.test_run_probes import query_probe, wait_for_port

TASK_COUNT = 40
TIMEOUT_SECONDS = 120.0
MAX_DELIVERIES = 3
#: The default of run.probes.event_loop_timeout is 5 s.
BLOCKED_WITHIN_SECONDS = 15.0

APP = """
import asyncio, os, time
from pathlib import Path
from ergon_framework import ConsumerPolicy, consumer, queue

POLICY = ConsumerPolicy.load({
    "loop": {"streaming": True, "concurrency": {"value": 2}, "batch": {"size": 10}, "max_deliveries": 3,
             "drain_timeout": 20.0, "empty_queue": {"backoff": 0.2, "cap": 0.2}},
})

def note(name, transaction):
    with open(f"done-{name}", "a") as file:
        file.write(transaction.id + chr(10))

def perform(name, order, transaction):
    if order.get("poison"):
        os._exit(66)
    note(name, transaction)
"""
SYNC_TASK = """
@consumer(queue("{queue}"), policy=POLICY, name="{name}")
def {name}(order, transaction: Transaction):
    time.sleep(order.get("seconds", 0.02))
    perform("{name}", order, transaction)
"""
ASYNC_TASK = """
def block_for(seconds):
    time.sleep(seconds)

@consumer(queue("{queue}"), policy=POLICY, name="{name}")
async def {name}(order, transaction: Transaction):
    if order.get("block"):
        block_for(60)
    await asyncio.sleep(order.get("seconds", 0.02))
    perform("{name}", order, transaction)
"""


class Shop:
    """Tasks with a queue each on one server, in one ``ergon run app``."""

    def __init__(self, folder, url, monkeypatch):
        self.folder = folder
        self.source = APP
        self.queues = {}
        self._url = url
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.setattr(queues, "_chosen", [])
        (folder / "ergon.toml").write_text("", encoding="utf-8")

    def add(self, name, template, *, isolated=False):
        queue_name = f"queue_{name}"
        self._monkeypatch.setenv(f"ERGON_QUEUES__{queue_name.upper()}__URL", self._url)
        # Short, so that the claims of a crashed process expire soon.
        with (self.folder / "ergon.toml").open("a", encoding="utf-8") as file:
            file.write(f"[queues.{queue_name}.options]\nlease = {LEASE_SECONDS}\n")
        self.source += template.format(queue=queue_name, name=name)
        if isolated:
            self.source += f"\n{name}.isolated = True\n"
        self.queues[name] = queue_named(queue_name)
        return self

    def dispatch(self, name, *ids, **payload):
        self.queues[name].dispatch([Transaction(payload, id=each) for each in ids])

    def run(self, *options):
        return ErgonProcess(self.folder, self.source, *options, command=("run", "app"))

    def list_done(self, name):
        path = Path(self.folder, f"done-{name}")
        return path.read_text(encoding="utf-8").split() if path.exists() else []

    def list_dead(self, name):
        return {letter.id: letter.reason for letter in self.queues[name].list_dead(DeadLetterQuery(), limit=1_000)}

    def close(self):
        for each in self.queues.values():
            each.close()


@pytest.fixture
def shop(new_redis, tmp_path, monkeypatch):
    made = Shop(tmp_path, new_redis().url, monkeypatch)
    yield made
    made.close()


def wait_until(condition, *, seconds=TIMEOUT_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@pytest.mark.spec("RUN-02")
def test_a_blocked_event_loop_is_named_with_task_and_function_while_other_tasks_go_on(shop):
    shop.add("blocking", ASYNC_TASK).add("bystander", ASYNC_TASK).add("threaded", SYNC_TASK)
    shop.add("apart", ASYNC_TASK, isolated=True)
    with shop.run("--probe-port", "0") as process:
        port = wait_for_port(process)
        wait_until(lambda: query_probe(port, "/ready")[0] == 200)
        shop.dispatch("blocking", "b", block=True)
        began = time.monotonic()
        wait_until(lambda: query_probe(port, "/ready")[0] == 503, seconds=BLOCKED_WITHIN_SECONDS)
        assert time.monotonic() - began < BLOCKED_WITHIN_SECONDS
        (reason, *_) = query_probe(port, "/ready")[1]["reasons"]
        assert "by process of blocking, in app.block_for < app.blocking" in reason
        for name in ("threaded", "apart", "bystander"):
            shop.dispatch(name, *(f"{name}-{number}" for number in range(20)))
        wait_until(lambda: len(shop.list_done("threaded")) == len(shop.list_done("apart")) == 20)
        assert shop.list_done("bystander") == []
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        lines = [line for line in metrics.splitlines() if line.startswith("ergon_loop_blocked_total{")]
        counted = {line.rpartition(" ")[0] for line in lines if float(line.rpartition(" ")[2])}
        assert counted == {'ergon_loop_blocked_total{ergon_step="process",ergon_task="blocking"}'}


@pytest.mark.spec("CON-36", "RUN-01")
@pytest.mark.invariant
@pytest.mark.parametrize("processes", ["1", "2"])
def test_one_signal_drains_all_tasks_within_the_grace(shop, processes):
    names = [f"task_{number}" for number in range(TASK_COUNT)]
    for number, name in enumerate(names):
        shop.add(name, ASYNC_TASK if number % 2 else SYNC_TASK)
        shop.dispatch(name, *(f"{name}-{each}" for each in range(4)), seconds=3.0)
    with shop.run("--json", "--processes", processes) as process:
        wait_until(lambda: all(shop.queues[name].depth().in_flight for name in names))
        process.send_signal(signal.SIGTERM)
        code, seconds = process.wait_for_exit()
        report = json.loads(process.output[-1])
    assert (code, seconds < 20.0) == (RunExit.OK, True)
    assert {each["task"] for each in report["tasks"]} == set(names)
    for name in names:
        depth = shop.queues[name].depth()
        done = shop.list_done(name)
        assert (len(done), len(set(done)), depth.ready, depth.in_flight) == (4 - depth.ready, len(done), depth.ready, 0)
    succeeded = sum(each["counts"]["succeeded"] for each in report["tasks"])
    assert succeeded == sum(len(shop.list_done(name)) for name in names) > 0


@pytest.mark.spec("CNN-11", "SEC-16")
@pytest.mark.invariant
@pytest.mark.parametrize("template", [SYNC_TASK, ASYNC_TASK], ids=["sync", "async"])
def test_one_poison_message_among_forty_tasks_becomes_the_only_dead_letter(shop, template):
    names = [f"task_{number}" for number in range(TASK_COUNT)]
    for number, name in enumerate(names):
        shop.add(name, template if name == "task_7" else (ASYNC_TASK if number % 2 else SYNC_TASK))
        shop.dispatch(name, *(f"{name}-{each}" for each in range(15)), seconds=0.2)
    shop.dispatch("task_7", "poison", poison=True)
    exits = 0
    deadline = time.monotonic() + TIMEOUT_SECONDS

    def is_finished():
        return all(is_empty(shop.queues[name].depth()) for name in names) and shop.queues["task_7"].depth().dead

    while not is_finished():
        with shop.run() as process:
            while process.is_running and not is_finished():
                assert time.monotonic() < deadline, {name: shop.queues[name].depth() for name in names}
                time.sleep(0.1)
            if process.is_running:
                process.send_signal(signal.SIGTERM)
            code, _ = process.wait_for_exit()
            assert code in {66, RunExit.OK}
            exits += code == 66
    assert {name: shop.list_dead(name) for name in names if shop.list_dead(name)} == {
        "task_7": {"poison": "max_deliveries"}
    }
    assert exits == MAX_DELIVERIES
    assert all(len(set(shop.list_done(name))) == 15 for name in names)
