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
from ergon_framework.executors.isolation import run_in_executor
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.worker.report import OutcomeKind
from tests.log_events import get_event
from tests.unit.object_codec import ObjectCodec

PROGRAM = str(Path(__file__).with_name("stubborn.py"))
COMMAND = ExecutorCommand(
    words=(sys.executable, "-S", PROGRAM, "0", "stubborn"), environment={"PATH": os.environ["PATH"]}
)
POOL = PoolPolicy(size=2, grace=0.2)
RETRY = {"max_attempts": 2, "timeout": 0.3, "backoff": 0, "exit_grace": 3.0}
POLICY = ConsumerPolicy.load({"loop": {"concurrency": {"value": 4}}, "steps": {"process": {"retry": RETRY}}})


def run_consumer(variant, handler, *payloads, policy=POLICY, command=COMMAND, pool=POOL, codec=None):
    """Run a function consumer over *payloads*; what its handlers were told, by transaction."""
    connector, results = MemoryConnector("orders", codec=codec), {}
    connector.dispatch([Transaction(payload, id=str(number)) for number, payload in enumerate(payloads)])

    if variant == "sync":

        @consumer(connector, policy=policy, name="orders")
        def task(payload): ...

        @task.on_success
        def record_success(payload, result, transaction):
            results[transaction.id] = result

        @task.on_failure
        def record_failure(payload, error, transaction):
            results[transaction.id] = error

        report = run_in_executor(task, command, handler=handler, pool=pool).run()
    else:

        @consumer(connector, policy=policy, name="orders")
        async def task(payload): ...

        @task.on_success
        async def record_success(payload, result, transaction):
            results[transaction.id] = result

        @task.on_failure
        async def record_failure(payload, error, transaction):
            results[transaction.id] = error

        report = asyncio.run(run_in_executor(task, command, handler=handler, pool=pool).run())
    return [results[key] for key in sorted(results)], report


@pytest.fixture(params=["sync", "async"])
def variant(request):
    return request.param


@pytest.mark.spec("EXE-28")
def test_the_process_step_runs_in_the_pool_and_its_result_reaches_the_success_handler(variant):
    results, report = run_consumer(variant, "echo", {"n": 1}, {"n": 2}, {"n": 3})
    assert results == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert report.still_running == 0


@pytest.mark.spec("EXE-18", "EXE-28")
def test_a_hanging_call_is_killed_and_other_calls_are_not_disturbed(variant):
    started_at = time.monotonic()
    results, report = run_consumer(variant, "sleep", 300, 0.1, 0.1, pool=PoolPolicy(size=3, grace=0.2))
    assert [type(each).__name__ for each in results] == ["TransactionException", "NoneType", "NoneType"]
    assert (results[0].category, results[0].still_running) == (Category.TIMEOUT, False)
    assert report.still_running == 0
    # Two attempts of 0.3 s, each followed by a grace of 0.2 s that SIGTERM does not shorten.
    assert 2 * (0.3 + 0.2) <= time.monotonic() - started_at < 2 * (0.3 + 0.2) + 2.5


@pytest.mark.spec("EXE-28")
def test_a_job_that_kills_its_executor_fails_after_its_attempts(variant):
    results, _ = run_consumer(variant, "crash_with", None)
    assert (results[0].category, results[0].final, results[0].code) == (Category.SYSTEM, True, "handler_not_found")
    results, report = run_consumer(variant, "exit", 9)
    assert (results[0].category, results[0].code) == (Category.SYSTEM, "executor_died")
    assert report.failures[-1].attempts == 2


@pytest.mark.spec("EXE-20", "EXE-28")
@pytest.mark.parametrize(
    "arguments, message",
    [
        (("./there-is-no-such-program",), "exited before its first answer, with exit code 127"),
        ((sys.executable, "-S", "-c", "import sys; sys.stdin.read()"), "has not answered within 1.5 s"),
    ],
)
def test_a_transaction_without_a_running_executor_is_redelivered_without_an_attempt(
    variant, arguments, message, caplog
):
    settings = {"steps": {"process": {"retry": {"max_attempts": 1, "timeout": 2.0}}}}
    command = ExecutorCommand(words=arguments, environment={"PATH": os.environ["PATH"]})
    policy, started_at = ConsumerPolicy.load(settings), time.monotonic()
    results, report = run_consumer(
        variant, "echo", 1, policy=policy, command=command, pool=PoolPolicy(size=1, grace=0.2)
    )
    assert time.monotonic() - started_at < 10
    # No handler was told of a failure, and no attempt was made.
    assert (results, report.counts[OutcomeKind.DEFERRED], report.still_running) == ([], 1, 0)
    assert message in next(record for record in caplog.records if get_event(record) == "executor not started").error


@pytest.mark.spec("EXE-20", "EXE-28")
def test_a_transaction_is_redelivered_without_an_attempt_while_all_executors_are_busy(variant, caplog):
    """Its step's time runs while it waits: it would end as one that took too long, and had never begun."""
    caplog.set_level(logging.DEBUG)
    settings = {
        "loop": {"concurrency": {"value": 3}},
        "steps": {"process": {"retry": {"max_attempts": 1, "timeout": 2.0}}},
    }
    policy, pool = ConsumerPolicy.load(settings), PoolPolicy(size=1, grace=0.2)
    results, report = run_consumer(variant, "sleep", 1.2, 1.2, 1.2, policy=policy, pool=pool)
    assert (results, report.counts[OutcomeKind.DEFERRED], list(report.failures)) == ([None], 2, [])
    assert [record.code for record in caplog.records if hasattr(record, "code")] == ["executors_busy"] * 2


@pytest.mark.spec("EXE-28")
def test_a_payload_that_cannot_be_sent_is_final(variant):
    results, report = run_consumer(variant, "echo", object(), codec=ObjectCodec())
    assert (results[0].final, results[0].code, report.failures[-1].attempts) == (True, "bad_line", 1)


class ClassTask(ConsumerMixin, Task):
    """A task of the class form, with a lifespan of its own."""

    seen = None

    @contextmanager
    def lifespan(self):
        yield {"colour": "red"}

    def process_transaction(self, transaction):
        raise AssertionError("it runs in the executor")

    def handle_transaction_success(self, transaction, result):
        type(self).seen = (result, self.services.colour, self.name)


class AsyncClassTask(AsyncConsumerMixin, AsyncTask):
    seen = None

    @asynccontextmanager
    async def lifespan(self):
        yield {"colour": "red"}

    async def process_transaction(self, transaction):
        raise AssertionError("it runs in the executor")

    async def handle_transaction_success(self, transaction, result):
        type(self).seen = (result, self.services.colour, self.name)


@pytest.mark.spec("EXE-28")
@pytest.mark.parametrize("kind", [ClassTask, AsyncClassTask])
def test_a_task_of_the_class_form_keeps_its_lifespan_services_and_name(kind):
    connector = MemoryConnector("orders")
    connector.dispatch([Transaction("value", id="1")])
    task = kind(connector, policy=POLICY)
    isolated_task = run_in_executor(task, COMMAND, handler="echo", pool=POOL)
    report = isolated_task.run() if kind is ClassTask else asyncio.run(isolated_task.run())
    assert not report.failures
    assert type(isolated_task).seen == ("value", "red", kind.__name__)
    assert type(task) is kind


def test_only_a_consumer_can_be_isolated():
    @producer(MemoryConnector("orders"))
    def make(payload): ...

    with pytest.raises(ConfigurationError, match="not a consumer"):
        run_in_executor(make, COMMAND)
