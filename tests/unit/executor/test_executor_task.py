"""Isolation: the process step of any consumer in an executor, with everything else as it was."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from ergon_framework import AsyncTask, Category, ConsumerPolicy, MemoryConnector, Task, Transaction, consumer, producer
from ergon_framework.errors import ConfigurationError
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command
from ergon_framework.executor.task import isolated
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.report import Kind
from tests.log_events import event_of

PROGRAM = str(Path(__file__).with_name("stubborn.py"))
COMMAND = Command(words=(sys.executable, "-S", PROGRAM, "0", "stubborn"), environment={"PATH": os.environ["PATH"]})
POOL = PoolPolicy(size=2, grace=0.2)
RETRY = {"max_attempts": 2, "timeout": 0.3, "backoff": 0, "abandon_grace": 3.0}
POLICY = ConsumerPolicy.load({"loop": {"concurrency": {"value": 4}}, "steps": {"process": {"retry": RETRY}}})


def consumed(flavour, handler, *payloads, policy=POLICY, command=COMMAND, pool=POOL):
    """Run a function consumer over *payloads*; what its handlers were told, by transaction."""
    connector, told = MemoryConnector("orders"), {}
    connector.dispatch([Transaction(str(number), payload) for number, payload in enumerate(payloads)])

    if flavour == "sync":

        @consumer(connector, policy=policy, name="orders")
        def task(payload): ...

        @task.on_success
        def done(payload, result, transaction):
            told[transaction.id] = result

        @task.on_failure
        def failed(payload, error, transaction):
            told[transaction.id] = error

        report = isolated(task, command, handler=handler, pool=pool).run()
    else:

        @consumer(connector, policy=policy, name="orders")
        async def task(payload): ...

        @task.on_success
        async def done(payload, result, transaction):
            told[transaction.id] = result

        @task.on_failure
        async def failed(payload, error, transaction):
            told[transaction.id] = error

        report = asyncio.run(isolated(task, command, handler=handler, pool=pool).run())
    return [told[key] for key in sorted(told)], report


@pytest.fixture(params=["sync", "async"])
def flavour(request):
    return request.param


@pytest.mark.spec("EXE-28")
def test_the_process_step_runs_in_the_pool_and_its_result_reaches_the_success_handler(flavour):
    told, report = consumed(flavour, "echo", {"n": 1}, {"n": 2}, {"n": 3})
    assert told == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert report.abandoned == 0


@pytest.mark.spec("EXE-18", "EXE-28")
def test_a_body_that_hangs_is_killed_and_its_neighbours_are_not_disturbed(flavour):
    began = time.monotonic()
    told, report = consumed(flavour, "sleep", 300, 0.1, 0.1, pool=PoolPolicy(size=3, grace=0.2))
    assert [type(each).__name__ for each in told] == ["TransactionException", "NoneType", "NoneType"]
    assert (told[0].category, told[0].still_running) == (Category.TIMEOUT, False)
    assert report.abandoned == 0
    # Two attempts of 0.3 s, each followed by a grace of 0.2 s that SIGTERM does not shorten.
    assert 2 * (0.3 + 0.2) <= time.monotonic() - began < 2 * (0.3 + 0.2) + 2.5


@pytest.mark.spec("EXE-28")
def test_a_job_that_kills_its_executor_fails_after_its_attempts(flavour):
    told, _ = consumed(flavour, "crash_with", None)
    assert (told[0].category, told[0].final, told[0].code) == (Category.SYSTEM, True, "handler_not_found")
    told, report = consumed(flavour, "exit", 9)
    assert (told[0].category, told[0].code) == (Category.SYSTEM, "executor_died")
    assert report.failures[-1].attempts == 2


@pytest.mark.spec("EXE-20", "EXE-28")
@pytest.mark.parametrize(
    "words, said",
    [
        (("./there-is-no-such-program",), "ended before its first answer, with exit code 127"),
        ((sys.executable, "-S", "-c", "import sys; sys.stdin.read()"), "has not announced itself within 1.5 s"),
    ],
)
def test_what_found_no_executor_up_comes_back_later_at_no_cost(flavour, words, said, caplog):
    patient = {"steps": {"process": {"retry": {"max_attempts": 1, "timeout": 2.0}}}}
    command = Command(words=words, environment={"PATH": os.environ["PATH"]})
    policy, began = ConsumerPolicy.load(patient), time.monotonic()
    told, report = consumed(flavour, "echo", 1, policy=policy, command=command, pool=PoolPolicy(size=1, grace=0.2))
    assert time.monotonic() - began < 10
    # No handler was told of a failure, and no attempt was made.
    assert (told, report.counts[Kind.DEFERRED], report.abandoned) == ([], 1, 0)
    assert said in next(record for record in caplog.records if event_of(record) == "executor not started").error


@pytest.mark.spec("EXE-20", "EXE-28")
def test_what_finds_all_executors_busy_comes_back_later_at_no_cost(flavour, caplog):
    """Its step's time runs while it waits: it would end as one that took too long, and had never begun."""
    caplog.set_level(logging.DEBUG)
    hasty = {
        "loop": {"concurrency": {"value": 3}},
        "steps": {"process": {"retry": {"max_attempts": 1, "timeout": 2.0}}},
    }
    policy, pool = ConsumerPolicy.load(hasty), PoolPolicy(size=1, grace=0.2)
    told, report = consumed(flavour, "sleep", 1.2, 1.2, 1.2, policy=policy, pool=pool)
    assert (told, report.counts[Kind.DEFERRED], list(report.failures)) == ([None], 2, [])
    assert [record.code for record in caplog.records if hasattr(record, "code")] == ["executors_busy"] * 2


@pytest.mark.spec("EXE-28")
def test_a_payload_that_cannot_be_sent_is_final(flavour):
    told, report = consumed(flavour, "echo", object())
    assert (told[0].final, told[0].code, report.failures[-1].attempts) == (True, "bad_line", 1)


class Mine(ConsumerMixin, Task):
    """A task of the class form, with a lifespan of its own."""

    seen = None

    @contextmanager
    def lifespan(self):
        yield {"colour": "red"}

    def process_transaction(self, transaction):
        raise AssertionError("it runs in the executor")

    def handle_transaction_success(self, transaction, result):
        type(self).seen = (result, self.services.colour, self.name)


class MineAsync(AsyncConsumerMixin, AsyncTask):
    seen = None

    @asynccontextmanager
    async def lifespan(self):
        yield {"colour": "red"}

    async def process_transaction(self, transaction):
        raise AssertionError("it runs in the executor")

    async def handle_transaction_success(self, transaction, result):
        type(self).seen = (result, self.services.colour, self.name)


@pytest.mark.spec("EXE-28")
@pytest.mark.parametrize("kind", [Mine, MineAsync])
def test_a_task_of_the_class_form_keeps_its_lifespan_services_and_name(kind):
    connector = MemoryConnector("orders")
    connector.dispatch([Transaction("1", "value")])
    task = kind(connector, policy=POLICY)
    made = isolated(task, COMMAND, handler="echo", pool=POOL)
    report = made.run() if kind is Mine else asyncio.run(made.run())
    assert not report.failures
    assert type(made).seen == ("value", "red", kind.__name__)
    assert type(task) is kind


def test_only_a_consumer_can_be_isolated():
    @producer(MemoryConnector("orders"))
    def make(payload): ...

    with pytest.raises(ConfigurationError, match="no consumer"):
        isolated(make, COMMAND)
