from __future__ import annotations

import os
import signal
import sys
import time
from threading import Event

import pytest

from ergon_framework import ConfigurationError, ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.runner import leaving
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.leaving import flush, guard, leave
from ergon_framework.runner.process import Ended, Process
from ergon_framework.runner.stopping import Stopping
from ergon_framework.task.report import End, Report


def rules(**loop):
    return ConsumerPolicy.load({"loop": {"concurrency": {"value": 1}, **loop}})


def made(flavour, body, **options):
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction("order-1"), Transaction("order-2")])

    def handle(order):
        body()

    async def handle_async(order):
        body()

    return consumer(queue, **options)(handle if flavour == "def" else handle_async)


@pytest.fixture(params=["def", "async def"])
def flavour(request):
    return request.param


def test_a_run_ends_when_the_queue_is_empty(flavour):
    ended = Process(made(flavour, lambda: None), rules()).run()
    assert (ended.exit, ended.report.end, ended.report.finished) == (Exit.OK, End.EMPTY, 2)
    assert not ended.left_behind


@pytest.mark.spec("CON-36")
def test_a_signal_stops_the_loop_and_gives_the_handlers_back(flavour):
    before = signal.getsignal(signal.SIGTERM)
    told = Event()
    task = made(flavour, lambda: (os.kill(os.getpid(), signal.SIGTERM), told.wait(10)))
    ended = Process(task, rules(streaming=True), on_signal=lambda *_: told.set()).run()
    assert (ended.exit, ended.report.end, ended.report.started) == (Exit.OK, End.STOP, 1)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.spec("CON-46")
def test_a_body_that_stays_is_left_behind():
    body = Event()
    told = lambda *_: None  # noqa: E731 - a listener that has nothing to say
    try:
        task = made("def", lambda: (os.kill(os.getpid(), signal.SIGTERM), body.wait()))
        ended = Process(task, rules(drain_timeout=0.05), on_signal=told).run()
        assert (ended.exit, ended.left_behind) == (Exit.LEFT_BEHIND, True)
    finally:
        body.set()


@pytest.mark.spec("CON-46")
def test_a_task_that_does_not_end_is_left_without_it():
    body = Event()
    try:
        task = made("async def", lambda: (os.kill(os.getpid(), signal.SIGTERM), body.wait()))
        ended = Process(task, rules(drain_timeout=0.0)).run()
        assert (ended.exit, ended.report) == (Exit.FORCED, None)
    finally:
        body.set()


def test_an_error_of_the_lifespan_is_handed_on(flavour):
    def broken():
        raise OSError("no pool")

    ended = Process(made(flavour, lambda: None, lifespan=broken), rules()).run()
    assert (ended.exit, repr(ended.error)) == (Exit.FAILED, "OSError('no pool')")


def test_the_time_of_a_loop_is_its_report_and_its_error(flavour):
    ended = Process(made(flavour, lambda: None), rules(streaming=True, timeout=0.05)).run()
    assert (ended.exit, ended.report.end) == (Exit.TIMEOUT, End.TIMEOUT)


class Stopped:
    def __init__(self, error=None):
        self.times = 0
        self._error = error

    def stop(self):
        self.times += 1
        if self._error is not None:
            raise self._error


@pytest.mark.spec("CON-36")
def test_a_stop_that_comes_before_the_loop_is_told_once_at_its_gate():
    task = Stopped()
    stopping = Stopping(task)
    stopping.ask()
    assert task.times == 0
    assert stopping.gate().because == "the process is stopping"
    assert stopping.gate() is not None
    assert task.times == 1


def test_a_stop_while_the_loop_runs_is_told_at_once_and_again_when_asked_again():
    task = Stopped()
    stopping = Stopping(task)
    assert stopping.gate() is None
    stopping.ask()
    stopping.ask()
    assert task.times == 2


def test_an_event_loop_that_is_closed_needs_no_stop():
    stopping = Stopping(Stopped(RuntimeError("Event loop is closed")))
    stopping.gate()
    stopping.ask()


# -- leaving --------------------------------------------------------------------------------------


def test_the_guard_leaves_at_the_deadline_with_the_code():
    left = []
    guard(Ended(Report(), deadline=time.monotonic()), leave=left.append).join(10)
    assert left == [Exit.OK]


def test_who_left_nothing_behind_leaves_as_programs_do():
    assert leave(Ended(Report())) == Exit.OK


def test_who_left_something_behind_does_not_wait_for_it(monkeypatch, capsys):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(leaving.logging, "shutdown", lambda: None)
    leave(Ended(Report(abandoned=1), deadline=time.monotonic() + 10))
    assert left == [Exit.LEFT_BEHIND]


class Provider:
    def __init__(self, flushing):
        self.force_flush = flushing


def test_telemetry_is_flushed_within_the_time_that_is_left(monkeypatch):
    given = []
    trace = type(sys)("trace")
    trace.get_tracer_provider = lambda: Provider(given.append)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
    monkeypatch.delitem(sys.modules, "opentelemetry.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry._logs", type(sys)("logs"))
    flush(Ended(Report(), deadline=time.monotonic() + 2))
    (millis,) = given
    assert 0 < millis <= 2000


def test_an_exporter_that_hangs_or_fails_holds_nobody(monkeypatch):
    hung = Event()
    trace, metrics = type(sys)("trace"), type(sys)("metrics")
    trace.get_tracer_provider = lambda: Provider(lambda _: hung.wait())
    metrics.get_meter_provider = lambda: Provider(lambda _: 1 / 0)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", metrics)
    flush(Ended(Report(), deadline=time.monotonic() + 0.05))
    hung.set()


def test_a_task_that_is_set_up_wrongly_is_a_usage_error(flavour):
    def broken():
        raise ConfigurationError("no such service")

    ended = Process(made(flavour, lambda: None, lifespan=broken), rules()).run()
    assert ended.exit is Exit.USAGE
