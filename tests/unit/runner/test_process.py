from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event, Thread, Timer

import pytest

from ergon_framework import ConfigurationError, ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.errors import ConnectionLostError
from ergon_framework.runner import shutdown
from ergon_framework.runner.exit import RunExit
from ergon_framework.runner.probes import ProcessHealth
from ergon_framework.runner.process import ParentCommand, Process, RunResult, ShutdownStage
from ergon_framework.runner.settings import RestartSettings
from ergon_framework.runner.shutdown import exit_process, flush_telemetry, force_exit_at_deadline
from ergon_framework.runner.signals import BackgroundCaller
from ergon_framework.runner.task_runner import StopRequest, TaskResult, TaskSetup
from ergon_framework.worker.report import Report, StopReason


def make_policy(**loop):
    return ConsumerPolicy.load({"loop": {"concurrency": {"value": 1}, **loop}})


def make_task(variant, action, **options):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction(id="order-1"), Transaction(id="order-2")])

    def handle(order):
        action()

    async def handle_async(order):
        action()

    return consumer(queue, **options)(handle if variant == "def" else handle_async)


def make_process(task, policy, *, depth=None, **options):
    restart = RestartSettings(backoff=0.01, attempts=2)
    return Process([TaskSetup(task, policy, depth=depth)], restart=restart, **options)


OK_TASK = TaskResult("charge", Report())


@pytest.fixture(params=["def", "async def"])
def variant(request):
    return request.param


def test_a_run_ends_when_the_queue_is_empty(variant):
    result = make_process(make_task(variant, lambda: None), make_policy()).run()
    assert (result.exit, result.tasks[0].report.stop_reason, result.tasks[0].report.finished) == (
        RunExit.OK,
        StopReason.EMPTY,
        2,
    )
    assert not result.has_abandoned_work


@pytest.mark.spec("CON-36")
def test_a_signal_stops_the_loop_and_restores_the_signal_handlers(variant):
    previous_handler = signal.getsignal(signal.SIGTERM)
    signalled = Event()
    task = make_task(variant, lambda: (os.kill(os.getpid(), signal.SIGTERM), signalled.wait(10)))
    result = make_process(task, make_policy(streaming=True), on_signal=lambda *_: signalled.set()).run()
    assert (result.exit, result.tasks[0].report.stop_reason, result.tasks[0].report.started) == (
        RunExit.OK,
        StopReason.STOP,
        1,
    )
    assert signal.getsignal(signal.SIGTERM) is previous_handler


@pytest.mark.spec("CON-46")
def test_a_handler_call_that_does_not_exit_is_abandoned():
    release = Event()
    on_signal = lambda *_: None  # noqa: E731 - a listener that has nothing to say
    try:
        task = make_task("def", lambda: (os.kill(os.getpid(), signal.SIGTERM), release.wait()))
        result = make_process(task, make_policy(drain_timeout=0.05), on_signal=on_signal).run()
        assert (result.exit, result.has_abandoned_work) == (RunExit.LEFT_BEHIND, True)
    finally:
        release.set()


@pytest.mark.spec("CON-46")
def test_a_task_that_does_not_end_forces_the_exit():
    release = Event()
    try:
        task = make_task("async def", lambda: (os.kill(os.getpid(), signal.SIGTERM), release.wait()))
        result = make_process(task, make_policy(drain_timeout=0.0)).run()
        assert (result.exit, result.tasks[0].report) == (RunExit.FORCED, None)
    finally:
        release.set()


def test_an_error_of_the_lifespan_fails_the_run(variant):
    def fail_startup():
        raise OSError("no pool")

    result = make_process(make_task(variant, lambda: None, lifespan=fail_startup), make_policy()).run()
    assert (result.exit, repr(result.tasks[0].error)) == (RunExit.FAILED, "OSError('no pool')")


def test_a_loop_timeout_has_a_report_and_its_own_exit_code(variant):
    result = make_process(make_task(variant, lambda: None), make_policy(streaming=True, timeout=0.05)).run()
    assert (result.exit, result.tasks[0].report.stop_reason) == (RunExit.TIMEOUT, StopReason.TIMEOUT)


class StoppableTask:
    def __init__(self, error=None):
        self.stop_count = 0
        self._error = error

    def stop(self):
        self.stop_count += 1
        if self._error is not None:
            raise self._error


@pytest.mark.spec("CON-36")
def test_a_stop_before_the_loop_stops_it_once_at_its_gate():
    task = StoppableTask()
    request = StopRequest(task)
    request.stop()
    assert task.stop_count == 0
    assert request.gate().reason == "the process is stopping"
    assert request.gate() is not None
    assert task.stop_count == 1


def test_every_stop_request_during_the_loop_stops_it_immediately():
    task = StoppableTask()
    request = StopRequest(task)
    assert request.gate() is None
    request.stop()
    request.stop()
    assert task.stop_count == 2


def test_a_stop_after_the_event_loop_closed_is_ignored():
    request = StopRequest(StoppableTask(RuntimeError("Event loop is closed")))
    request.gate()
    request.stop()


# -- exit -----------------------------------------------------------------------------------------


def test_the_force_exit_timer_exits_at_the_deadline_with_the_code():
    exit_codes = []
    force_exit_at_deadline(RunResult((OK_TASK,), deadline=time.monotonic()), force_exit=exit_codes.append).join(10)
    assert exit_codes == [RunExit.OK]


def test_without_abandoned_work_the_exit_is_normal():
    assert exit_process(RunResult((OK_TASK,))) == RunExit.OK


def test_with_abandoned_work_the_exit_does_not_wait(monkeypatch, capsys):
    exit_codes = []
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    monkeypatch.setattr(shutdown.logging, "shutdown", lambda: None)
    exit_process(RunResult((TaskResult("charge", Report(still_running=1)),), deadline=time.monotonic() + 10))
    assert exit_codes == [RunExit.LEFT_BEHIND]


class TelemetryProvider:
    def __init__(self, force_flush):
        self.force_flush = force_flush


def test_telemetry_is_flushed_within_the_remaining_time(monkeypatch):
    timeouts = []
    trace = type(sys)("trace")
    trace.get_tracer_provider = lambda: TelemetryProvider(timeouts.append)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
    monkeypatch.delitem(sys.modules, "opentelemetry.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry._logs", type(sys)("logs"))
    flush_telemetry(RunResult((OK_TASK,), deadline=time.monotonic() + 2))
    (timeout_ms,) = timeouts
    assert 0 < timeout_ms <= 2000


def test_an_exporter_that_hangs_or_fails_does_not_block_the_exit(monkeypatch):
    release = Event()
    trace, metrics = type(sys)("trace"), type(sys)("metrics")
    trace.get_tracer_provider = lambda: TelemetryProvider(lambda _: release.wait())
    metrics.get_meter_provider = lambda: TelemetryProvider(lambda _: 1 / 0)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", metrics)
    flush_telemetry(RunResult((OK_TASK,), deadline=time.monotonic() + 0.05))
    release.set()


def test_a_configuration_error_of_the_task_is_a_usage_error(variant):
    def fail_startup():
        raise ConfigurationError("no such service")

    result = make_process(make_task(variant, lambda: None, lifespan=fail_startup), make_policy()).run()
    assert result.exit is RunExit.USAGE


# -- commands, stages and health ------------------------------------------------------------------


def make_recorded_process(make_process):
    """Return the process and the list of its stages."""
    stages = []
    return make_process(stages.append), stages


def wait_for_stage(stages, expected_stage):
    deadline = time.monotonic() + 10
    while expected_stage not in stages and time.monotonic() < deadline:
        time.sleep(0.01)
    return [stage.value for stage in stages]


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_stop_command_drains_and_every_stage_is_reported_in_order(variant):
    process, stages = make_recorded_process(
        lambda record_stage: make_process(
            make_task(
                variant,
                lambda: (process.handle_command(ParentCommand.STOP), wait_for_stage(stages, ShutdownStage.DRAINING)),
            ),
            make_policy(streaming=True),
            on_stage=record_stage,
            supervised=True,
        )
    )
    result = process.run()
    assert (result.exit, result.tasks[0].report.stop_reason, result.tasks[0].report.started) == (
        RunExit.OK,
        StopReason.STOP,
        1,
    )
    assert wait_for_stage(stages, ShutdownStage.EXITING) == ["draining", "exiting"]


@pytest.mark.spec("RUN-01", "CON-36")
def test_after_the_drain_remaining_claims_are_released():
    release = Event()
    try:
        process, stages = make_recorded_process(
            lambda record_stage: make_process(
                make_task("def", lambda: (process.handle_command(ParentCommand.STOP), release.wait())),
                make_policy(drain_timeout=0.2),
                on_stage=record_stage,
            )
        )
        assert process.run().exit is RunExit.LEFT_BEHIND
        assert wait_for_stage(stages, ShutdownStage.EXITING) == ["draining", "releasing", "exiting"]
    finally:
        release.set()


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_process_that_does_not_exit_is_reported_as_killed():
    release = Event()
    try:
        process, stages = make_recorded_process(
            lambda record_stage: make_process(
                make_task("async def", lambda: (process.handle_command(ParentCommand.STOP), release.wait())),
                make_policy(drain_timeout=0.0),
                on_stage=record_stage,
            )
        )
        assert process.run().exit is RunExit.FORCED
        assert wait_for_stage(stages, ShutdownStage.KILLED) == ["draining", "releasing", "killed"]
    finally:
        release.set()


@pytest.mark.spec("RUN-01", "CON-36")
def test_a_stop_now_command_ends_the_drain_even_as_the_first_command(variant):
    release = Event()
    try:
        task = make_task("def", lambda: (process.handle_command(ParentCommand.STOP_NOW), release.wait()))
        process = make_process(task, make_policy(drain_timeout=60.0), supervised=True)
        started_at = time.monotonic()
        assert process.run().exit is RunExit.LEFT_BEHIND
        assert time.monotonic() - started_at < 10
    finally:
        release.set()


@pytest.mark.spec("RUN-01", "CON-36")
def test_with_a_parent_a_second_signal_does_not_shorten_the_drain():
    signal_counts, second_signal = [], Event()

    def record_signal(signal_, count):
        signal_counts.append(count)
        if count == 2:
            second_signal.set()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    task = make_task("def", lambda: (os.kill(os.getpid(), signal.SIGTERM), second_signal.wait(10)))
    result = make_process(task, make_policy(drain_timeout=60.0), on_signal=record_signal, supervised=True).run()
    assert (result.exit, result.tasks[0].report.counts["succeeded"], signal_counts) == (RunExit.OK, 1, [1, 2])


@pytest.mark.spec("RUN-02")
def test_health_follows_the_run(variant):
    observed = []
    task = make_task(variant, lambda: observed.append(process.health()))
    process = make_process(task, make_policy(limit=1), event_loop_timeout=60.0)
    assert process.health() == ProcessHealth(live=True, ready=False, reasons=("starting",))
    process.run()
    assert observed == [ProcessHealth(live=True, ready=True)]
    assert process.health() == ProcessHealth(live=True, ready=False, reasons=("stopping: exiting",))


@pytest.mark.spec("RUN-02")
def test_a_process_whose_slots_are_all_blocked_is_not_live():
    release, observed = Event(), []

    def observe_health():
        deadline = time.monotonic() + 10
        while process.health().live and time.monotonic() < deadline:
            time.sleep(0.01)
        observed.append(process.health())
        process.handle_command(ParentCommand.STOP)

    policy = ConsumerPolicy.load(
        {
            "loop": {"concurrency": {"value": 1}, "streaming": True, "drain_timeout": 0.1},
            "steps": {"process": {"retry": {"timeout": 0.05, "exit_grace": 0.0, "max_attempts": 1}}},
        }
    )
    try:
        process = make_process(make_task("def", release.wait), policy)
        Thread(target=observe_health, daemon=True).start()
        process.run()
    finally:
        release.set()
    assert (observed[0].live, observed[0].ready) == (False, False)
    assert "every slot is occupied by a handler call that still runs after its timeout" in observed[0].reasons[0]


@pytest.mark.spec("RUN-02")
def test_a_process_whose_event_loop_is_blocked_is_not_live_and_names_the_cause():
    observed = []

    def observe_health():
        deadline = time.monotonic() + 10
        while process.health().live and time.monotonic() < deadline:
            time.sleep(0.01)
        observed.append(process.health())

    process = make_process(make_task("async def", observe_health), make_policy(limit=1), event_loop_timeout=0.1)
    process.run()
    assert (observed[0].live, observed[0].ready) == (False, False)
    assert "by process of handle_async, in " in observed[0].reasons[0]


class DisconnectedQueue(MemoryConnector):
    """A queue without a connection until it is released."""

    def __init__(self):
        super().__init__("orders")
        self.connected = Event()

    def fetch_transactions(self, batch_size, **extra):
        if not self.connected.is_set():
            raise ConnectionLostError("no line to db:5432, password=hidden")
        return super().fetch_transactions(batch_size, **extra)


@pytest.mark.spec("RUN-02")
def test_a_process_without_a_connection_to_its_broker_is_live_but_not_ready():
    observed = []

    def observe_health():
        for ready in (False, True):
            deadline = time.monotonic() + 10
            while (health := process.health()).reasons == ("starting",) or (health.ready is not ready):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            observed.append(health)
            queue.connected.set()
        process.handle_command(ParentCommand.STOP)

    queue = DisconnectedQueue()
    policy = ConsumerPolicy.load({"loop": {"streaming": True}, "steps": {"fetch": {"retry": {"backoff": 0.01}}}})
    process = make_process(consumer(queue)(lambda order: None), policy)
    Thread(target=observe_health, daemon=True).start()
    process.run()
    reason = "the connector cannot be read: ConnectionLostError: no line to db:5432, password=[hidden]"
    unavailable = ProcessHealth(live=True, ready=False, reasons=(reason,))
    assert observed == [unavailable, ProcessHealth(live=True, ready=True)]


class UnopenableQueue(MemoryConnector):
    """A queue that cannot be opened until it is released."""

    def __init__(self):
        super().__init__("orders")
        self.available = Event()
        self.attempts = 0

    def open(self):
        self.attempts += 1
        if not self.available.is_set():
            raise ConnectionLostError("the disk of the database is full, password=hidden")

    async def open_async(self):
        self.open()


async def handle_async(order): ...


OPEN_RETRY_POLICY = ConsumerPolicy.load({"loop": {"streaming": True}, "steps": {"fetch": {"retry": {"backoff": 0.01}}}})
HANDLERS_BY_VARIANT = {"def": lambda order: None, "async def": handle_async}


def wait_for_health(process, reason):
    deadline = time.monotonic() + 10
    while process.health().reasons != reason and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.health()


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize("variant", HANDLERS_BY_VARIANT)
def test_a_start_waits_for_a_server_that_is_unavailable_and_names_the_cause(variant):
    queue, observed = UnopenableQueue(), []
    process = make_process(consumer(queue)(HANDLERS_BY_VARIANT[variant]), OPEN_RETRY_POLICY)
    reason = "the connector cannot be opened: ConnectionLostError: the disk of the database is full, password=[hidden]"

    def observe_health():
        observed.append(wait_for_health(process, (reason,)))
        queue.available.set()
        observed.append(wait_for_health(process, ()))
        process.handle_command(ParentCommand.STOP)

    Thread(target=observe_health, daemon=True).start()
    result = process.run()
    assert (result.exit, result.tasks[0].error) == (RunExit.OK, None)
    assert observed == [ProcessHealth(live=True, ready=False, reasons=(reason,)), ProcessHealth(live=True, ready=True)]
    assert queue.attempts > 1


@pytest.mark.spec("SEC-15", "CON-36")
@pytest.mark.parametrize("variant", HANDLERS_BY_VARIANT)
def test_a_stop_ends_a_start_that_waits(variant):
    queue = UnopenableQueue()
    retry = {"backoff": 3600.0, "cap": 0.0}
    loop = {"streaming": True, "drain_timeout": 5.0}
    policy = ConsumerPolicy.load({"loop": loop, "steps": {"fetch": {"retry": retry}}})
    process = make_process(consumer(queue)(HANDLERS_BY_VARIANT[variant]), policy)

    def observe_health():
        deadline = time.monotonic() + 10
        while process.health().reasons == ("starting",) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.handle_command(ParentCommand.STOP)

    Thread(target=observe_health, daemon=True).start()
    result = process.run()
    assert (result.exit, result.tasks[0].report.stop_reason, queue.attempts) == (RunExit.OK, StopReason.STOP, 1)


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize("variant", HANDLERS_BY_VARIANT)
def test_a_run_that_ends_with_its_queue_does_not_wait_at_its_start(variant):
    queue = UnopenableQueue()
    process = make_process(consumer(queue)(HANDLERS_BY_VARIANT[variant]), ConsumerPolicy())
    limit = Timer(10, process.handle_command, [ParentCommand.STOP])
    limit.start()
    result = process.run()
    limit.cancel()
    assert (result.exit, type(result.tasks[0].error), queue.attempts) == (RunExit.FAILED, ConnectionLostError, 1)


@contextmanager
def empty_lifespan():
    yield {}


@asynccontextmanager
async def empty_lifespan_async():
    yield {}


@pytest.mark.parametrize(
    "variant, lifespan, message",
    [
        ("async def", empty_lifespan, "is sync and its handlers are not; declare it with @asynccontextmanager"),
        ("def", empty_lifespan_async, "is async and its handlers are not; declare it with @contextmanager"),
    ],
    indirect=["variant"],
)
def test_a_lifespan_of_the_other_variant_is_rejected_with_an_explanation(variant, lifespan, message):
    result = make_process(make_task(variant, lambda: None, lifespan=lifespan), make_policy()).run()
    assert result.exit is RunExit.USAGE
    assert message in str(result.tasks[0].error)


def test_a_type_error_inside_a_lifespan_is_reported_unchanged(variant):
    def fail_startup():
        raise TypeError("no pool")

    result = make_process(make_task(variant, lambda: None, lifespan=fail_startup), make_policy()).run()
    assert (result.exit, str(result.tasks[0].error)) == (RunExit.FAILED, "no pool")


@pytest.mark.parametrize("stage", ShutdownStage)
def test_the_guide_lists_every_stage_with_what_happens_in_it(stage):
    guide = Path(__file__).parents[3] / "docs" / "guides" / "run.md"
    assert f"| {stage.value} | {stage.meaning} |" in guide.read_text(encoding="utf-8")


def test_a_background_caller_runs_calls_in_order_and_continues_after_errors():
    results, done = [], Event()
    caller = BackgroundCaller()
    for call in (lambda: results.append(1), lambda: 1 / 0, lambda: results.append(2), done.set):
        caller.call(call)
    assert done.wait(10)
    assert results == [1, 2]
