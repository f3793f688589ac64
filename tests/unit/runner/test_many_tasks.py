"""Several tasks in one process: event loops, restarts, health and results."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from threading import Event, Thread

import pytest

from ergon_framework import ConfigurationError, ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.cli import summary
from ergon_framework.errors import ConnectionLostError
from ergon_framework.runner.exit import RunExit
from ergon_framework.runner.process import ParentCommand, Process, RunResult
from ergon_framework.runner.settings import RestartSettings
from ergon_framework.runner.supervisor import SupervisorResult
from ergon_framework.runner.task_runner import StopSignal, TaskResult, TaskSetup
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.worker.report import Outcome, OutcomeKind, Report, StopReason
from tests.log_events import get_event

RESTART = RestartSettings(backoff=0.01, cap=0.02, attempts=2)
ONCE = ConsumerPolicy()
STREAMING = ConsumerPolicy.load({"loop": {"streaming": True, "drain_timeout": 5.0}})


def make_task(name, handle, variant="def", *, count=1, queue=None, **options):
    queue = queue or MemoryConnector(name)
    queue.dispatch([Transaction(id=f"{name}-{number}") for number in range(count)])

    def call(order):
        return handle()

    async def call_async(order):
        return handle()

    return consumer(queue, name=name, **options)(call if variant == "def" else call_async)


def make_process(tasks, policy=ONCE, **options):
    setups = [TaskSetup(task, policy) for task in tasks]
    return Process(setups, **{"restart": RESTART, "event_loop_timeout": 0.1} | options)


def stop_when(process, condition):
    """Stop the process once *condition* is true, or after 20 s."""

    def watch():
        deadline = time.monotonic() + 20
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.handle_command(ParentCommand.STOP)

    Thread(target=watch, daemon=True).start()


def test_async_tasks_share_a_thread_and_isolated_and_sync_tasks_have_their_own():
    threads = {}

    def note(name):
        return lambda: threads.setdefault(name, threading.current_thread())

    tasks = [make_task(name, note(name), "async def") for name in ("a", "b", "alone")]
    tasks[-1].isolated = True
    tasks += [make_task(name, note(name)) for name in ("s", "t")]
    result = make_process(tasks).run()
    assert (result.exit, [each.report.stop_reason for each in result.tasks]) == (RunExit.OK, [StopReason.EMPTY] * 5)
    assert threads["a"] == threads["b"]
    assert len(set(threads.values())) == 4


def test_one_stop_drains_all_tasks_and_the_longest_drain_timeout_counts():
    go, running = Event(), []
    tasks = [make_task("fast", lambda: None), make_task("slow", lambda: (running.append(1), go.wait(10)), count=2)]
    policies = [
        ConsumerPolicy.load({"loop": {"streaming": True, "drain_timeout": seconds, "concurrency": {"value": 1}}})
        for seconds in (0.0, 10.0)
    ]
    process = Process([TaskSetup(*pair) for pair in zip(tasks, policies, strict=True)])
    stop_when(process, lambda: running)
    stopping = "stopping: draining"

    def release():
        while stopping not in process.health().reasons:
            time.sleep(0.005)
        go.set()

    Thread(target=release, daemon=True).start()
    result = process.run()
    assert [(each.name, each.report.stop_reason) for each in result.tasks] == [("fast", "stop"), ("slow", "stop")]
    assert (result.exit, result.tasks[1].report.counts[OutcomeKind.SUCCEEDED]) == (RunExit.OK, 1)


class BreakingQueue(MemoryConnector):
    """A queue whose fetch fails a number of times, with an error that ends the loop."""

    def __init__(self, name, failures):
        super().__init__(name)
        self.failures = failures
        self.opened = 0

    def open(self):
        self.opened += 1

    async def open_async(self):
        self.open()

    def fetch_transactions(self, batch_size, **extra):
        if self.failures:
            self.failures -= 1
            raise ConfigurationError("no such table")
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size, **extra):
        return self.fetch_transactions(batch_size)


@pytest.mark.parametrize("variant", ["def", "async def"])
def test_a_streaming_loop_that_ends_with_an_error_is_restarted_while_others_continue(variant, caplog):
    handled, others, reasons = [], [], []
    queue = BreakingQueue("broken", failures=4)
    broken = make_task("broken", lambda: handled.append(1), variant, queue=queue)
    process = make_process([broken, make_task("other", lambda: others.append(1), variant)], STREAMING)
    restarts = count_restarts("broken")

    def is_done():
        reasons.extend(process.health().reasons)
        return handled and others

    stop_when(process, is_done)
    result = process.run()
    assert (result.exit, queue.opened, count_restarts("broken") - restarts) == (RunExit.OK, 5, 4)
    assert any(
        reason.startswith("task broken: the loop ended and is restarted: FetchException: the connector could not")
        for reason in reasons
    )
    restarted = [record for record in caplog.records if get_event(record) == "loop restarted"]
    assert [(record.task, record.error_type) for record in restarted] == [("broken", "FetchException")] * 4
    assert [record.delay for record in restarted] == [0.01, 0.02, 0.02, 0.02]
    assert result.tasks[0].report.started == 1


def count_restarts(task):
    return sum(value for labels, value in get_registry().read(names.LOOPS_RESTARTED) if labels["ergon.task"] == task)


@pytest.mark.parametrize("variant", ["def", "async def"])
def test_the_only_task_of_a_process_fails_after_as_many_quick_ends_as_a_process_may_have(variant):
    queue = BreakingQueue("broken", failures=100)
    result = make_process([make_task("broken", lambda: None, variant, queue=queue)], STREAMING).run()
    assert (result.exit, type(result.tasks[0].error).__name__) == (RunExit.FAILED, "FetchException")
    assert queue.opened == RESTART.attempts


def test_a_loop_that_is_not_streaming_fails_once_and_the_others_end_by_themselves():
    queue = BreakingQueue("broken", failures=100)
    others = []
    process = make_process([make_task("broken", int, queue=queue), make_task("other", lambda: others.append(1))])
    result = process.run()
    assert (result.exit, queue.opened, len(others)) == (RunExit.FAILED, 1, 1)
    assert result.tasks[1].error is None


@pytest.mark.parametrize("variant", ["def", "async def"])
def test_a_stop_ends_the_wait_for_a_restart(variant):
    queue = BreakingQueue("broken", failures=100)
    restart = RestartSettings(backoff=3600.0, cap=0.0)
    process = make_process([make_task("broken", int, variant, queue=queue)], STREAMING, restart=restart)
    stop_when(process, lambda: any("restarted" in each for each in process.health().reasons))
    result = process.run()
    assert (result.exit, result.tasks[0].report.stop_reason) == (RunExit.OK, StopReason.STOP)


def test_a_configuration_error_ends_the_process_and_drains_the_others():
    def fail_startup():
        raise ConfigurationError("no such service")

    broken = make_task("broken", int, lifespan=fail_startup)
    process = make_process([broken, make_task("other", int, count=0)], STREAMING)
    result = process.run()
    assert (result.exit, str(result.tasks[0].error)) == (RunExit.USAGE, "no such service")
    assert result.tasks[1].report.stop_reason is StopReason.STOP


def test_the_limit_counts_over_restarts():
    class HalfQueue(BreakingQueue):
        def fetch_transactions(self, batch_size, **extra):
            if self.failures == 1 and self.opened == 1 and self.depth().ready == 3:
                self.failures = 0
                raise ConfigurationError("no such table")
            return MemoryConnector.fetch_transactions(self, 2)

    handled = []
    policy = ConsumerPolicy.load({"loop": {"streaming": True, "limit": 3, "concurrency": {"value": 2}}})
    queue = HalfQueue("half", failures=1)
    result = make_process([make_task("half", lambda: handled.append(1), queue=queue, count=5)], policy).run()
    assert (len(handled), queue.opened, result.tasks[0].report.started) == (3, 2, 3)
    assert result.tasks[0].report.counts[OutcomeKind.SUCCEEDED] == 3


class UnopenableQueue(MemoryConnector):
    def open(self):
        raise ConnectionLostError("no line")

    async def open_async(self):
        self.open()


def test_many_async_tasks_whose_server_is_down_do_not_delay_each_other():
    tasks = [make_task(f"down-{number}", int, "async def", queue=UnopenableQueue("q")) for number in range(40)]
    handled = []
    process = make_process([*tasks, make_task("up", lambda: handled.append(1), "async def")], STREAMING)
    stop_when(process, lambda: handled and all("cannot be opened" in each for each in process.health().reasons))
    result = process.run()
    assert (result.exit, len(handled)) == (RunExit.OK, 1)


@pytest.mark.spec("RUN-02")
def test_a_blocked_event_loop_is_named_with_its_task_while_sync_and_isolated_tasks_go_on():
    observed, release, progress = [], Event(), {"sync": 0, "isolated": 0}

    def block():
        release.wait(20)

    def work(name):
        def handle():
            if observed:
                progress[name] += 1

        return handle

    blocking = make_task("blocking", block, "async def")
    bystander = make_task("bystander", int, "async def", count=0)
    isolated = make_task("isolated", work("isolated"), "async def", count=0)
    isolated.isolated = True
    sync = make_task("sync", work("sync"), count=0)
    process = make_process([bystander, blocking, isolated, sync], STREAMING)

    def observe():
        deadline = time.monotonic() + 15
        while process.health().live and time.monotonic() < deadline:
            time.sleep(0.01)
        observed.append(process.health())
        for task in (isolated, sync):
            task.connector.dispatch([Transaction(id="late")])
        while not all(progress.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        release.set()
        process.handle_command(ParentCommand.STOP)

    Thread(target=observe, daemon=True).start()
    process.run()
    assert "by process of blocking, in " in observed[0].reasons[0]
    assert "block" in observed[0].reasons[0].partition(", in ")[2]
    assert progress == {"sync": 1, "isolated": 1}


def test_a_block_outside_all_steps_names_the_first_tasks_of_the_event_loop():
    observed = []

    def block_until_seen():
        deadline = time.monotonic() + 10
        while process.health().live and time.monotonic() < deadline:
            time.sleep(0.01)
        observed.append(process.health().reasons[0])

    @asynccontextmanager
    async def lifespan():
        block_until_seen()
        yield {}

    tasks = [make_task(f"task-{number}", int, "async def", count=0) for number in range(4)]
    tasks.append(make_task("late", int, "async def", count=0, lifespan=lifespan))
    process = make_process(tasks)
    process.run()
    assert "by something inside task-0, task-1, task-2 and 2 more, in " in observed[0]


def test_an_event_loop_that_cannot_start_fails_its_tasks(monkeypatch):
    def fail():
        raise OSError("too many open files")

    monkeypatch.setattr("ergon_framework.runner.process._loop_factory", lambda: fail)
    result = make_process([make_task(name, int, "async def") for name in "ab"]).run()
    assert [str(each.error) for each in result.tasks] == ["too many open files"] * 2


def test_a_task_that_failed_makes_the_process_unready_while_another_runs():
    @contextmanager
    def lifespan():
        raise SystemExit(3)
        yield

    process = make_process([make_task("gone", int, lifespan=lifespan), make_task("other", int, count=0)], STREAMING)
    observed = []

    def is_named():
        observed.append(process.health())
        return observed[-1].reasons == ("task gone: ended: SystemExit: 3",)

    stop_when(process, is_named)
    result = process.run()
    assert (observed[-1].ready, result.exit) == (False, RunExit.FAILED)


def test_a_stop_signal_ends_waits_on_threads_and_event_loops():
    signal = StopSignal()

    async def wait():
        assert not await signal.wait_async(0.01)
        waiting = asyncio.create_task(signal.wait_async(60.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(signal.set)
        assert await waiting
        return await signal.wait_async(60.0)

    assert asyncio.run(wait())
    assert signal.wait(60.0)
    assert signal.is_set


# -- reports --------------------------------------------------------------------------------------


def make_report(started, failures=0):
    report = Report(stop_reason=StopReason.EMPTY, started=started)
    for number in range(failures):
        report.add(Outcome(Transaction(id=f"order-{number}"), OutcomeKind.FAILED))
    return report


def test_the_report_of_several_tasks_is_a_list_with_the_most_severe_exit_code(capsys):
    tasks = (TaskResult("a", make_report(1)), TaskResult("b", make_report(2), OSError("x")))
    result = RunResult(tasks)
    data = json.loads(summary.to_json_line(result))
    assert (data["exit_code"], [(each["task"], each["exit_code"]) for each in data["tasks"]]) == (
        1,
        [("a", 0), ("b", 1)],
    )
    summary.show(result)
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")] == ["a", "b"]


def test_the_failures_of_all_tasks_together_are_limited():
    tasks = tuple(TaskResult(f"task-{number}", make_report(20, failures=20)) for number in range(40))
    data = summary.process_data(RunResult(tasks))
    assert sum(len(each["failures"]) for each in data["tasks"]) == summary.MAX_MERGED_FAILURES


def test_the_reports_of_several_processes_are_merged_by_task(capsys):
    process = summary.process_data(RunResult((TaskResult("a", make_report(1)), TaskResult("b", make_report(2)))))
    result = SupervisorResult(RunExit.OK, [process, process], restarts=1, reason="stopped")
    merged = summary.merge_reports("app", result)
    assert (merged["processes"], merged["restarts"], merged["error"]) == (2, 1, "stopped")
    assert [(each["task"], each["started"]) for each in merged["tasks"]] == [("a", 2), ("b", 4)]
    summary.show_all(result)
    assert "processes  2, restarts: 1" in capsys.readouterr().out
    assert summary.merge_reports("app", SupervisorResult(RunExit.FLAPPING))["task"] == "app"


def test_log_records_of_a_failed_loop_hide_credentials(caplog):
    class LeakyQueue(BreakingQueue):
        def fetch_transactions(self, batch_size, **extra):
            raise ConfigurationError("no line to db, password=hidden")

    with caplog.at_level(logging.ERROR):
        make_process([make_task("leaky", int, queue=LeakyQueue("leaky", 1))], STREAMING).run()
    (record,) = [record for record in caplog.records if get_event(record) == "loop restarted"]
    assert "password=hidden" not in record.error
