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
from ergon_framework.errors import ConnectionLost
from ergon_framework.runner import leaving
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.health import Health
from ergon_framework.runner.leaving import flush, guard, leave
from ergon_framework.runner.process import Ended, Order, Process
from ergon_framework.runner.stages import Stage
from ergon_framework.runner.stopping import Stopping
from ergon_framework.runner.telling import Teller
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


# -- orders, stages and health --------------------------------------------------------------------


def stages_of(process_of):
    """The stages that a process goes through, and the process."""
    stages = []
    return process_of(stages.append), stages


def told_all(stages, last):
    until = time.monotonic() + 10
    while last not in stages and time.monotonic() < until:
        time.sleep(0.01)
    return [stage.value for stage in stages]


@pytest.mark.spec("RUN-01", "CON-36")
def test_an_order_to_stop_is_a_drain_and_every_stage_is_told_in_order(flavour):
    process, stages = stages_of(
        lambda told: Process(
            made(flavour, lambda: (process.order(Order.STOP), told_all(stages, Stage.DRAINING))),
            rules(streaming=True),
            on_stage=told,
            supervised=True,
        )
    )
    ended = process.run()
    assert (ended.exit, ended.report.end, ended.report.started) == (Exit.OK, End.STOP, 1)
    assert told_all(stages, Stage.LEAVING) == ["draining", "leaving"]


@pytest.mark.spec("RUN-01", "CON-36")
def test_when_the_drain_is_over_what_is_left_is_released():
    body = Event()
    try:
        process, stages = stages_of(
            lambda told: Process(
                made("def", lambda: (process.order(Order.STOP), body.wait())), rules(drain_timeout=0.2), on_stage=told
            )
        )
        assert process.run().exit is Exit.LEFT_BEHIND
        assert told_all(stages, Stage.LEAVING) == ["draining", "releasing", "leaving"]
    finally:
        body.set()


@pytest.mark.spec("RUN-01", "CON-36")
def test_who_does_not_leave_is_told_as_killed():
    body = Event()
    try:
        process, stages = stages_of(
            lambda told: Process(
                made("async def", lambda: (process.order(Order.STOP), body.wait())),
                rules(drain_timeout=0.0),
                on_stage=told,
            )
        )
        assert process.run().exit is Exit.FORCED
        assert told_all(stages, Stage.KILLED) == ["draining", "releasing", "killed"]
    finally:
        body.set()


@pytest.mark.spec("RUN-01", "CON-36")
def test_an_order_to_hurry_ends_the_drain_even_if_it_is_the_first(flavour):
    body = Event()
    try:
        task = made("def", lambda: (process.order(Order.HURRY), body.wait()))
        process = Process(task, rules(drain_timeout=60.0), supervised=True)
        began = time.monotonic()
        assert process.run().exit is Exit.LEFT_BEHIND
        assert time.monotonic() - began < 10
    finally:
        body.set()


@pytest.mark.spec("RUN-01", "CON-36")
def test_with_a_parent_a_second_signal_hurries_nobody():
    heard, go = [], Event()

    def told(signal_, times):
        heard.append(times)
        if times == 2:
            go.set()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    task = made("def", lambda: (os.kill(os.getpid(), signal.SIGTERM), go.wait(10)))
    ended = Process(task, rules(drain_timeout=60.0), on_signal=told, supervised=True).run()
    assert (ended.exit, ended.report.counts["succeeded"], heard) == (Exit.OK, 1, [1, 2])


@pytest.mark.spec("RUN-02")
def test_health_follows_the_run(flavour):
    seen = []
    task = made(flavour, lambda: seen.append(process.health()))
    process = Process(task, rules(limit=1), blocked=60.0)
    assert process.health() == Health(live=True, ready=False, reasons=("starting",))
    process.run()
    assert seen == [Health(live=True, ready=True)]
    assert process.health() == Health(live=True, ready=False, reasons=("stopping: leaving",))


@pytest.mark.spec("RUN-02")
def test_a_process_whose_slots_are_all_held_is_not_live():
    body, found = Event(), []

    def look():
        until = time.monotonic() + 10
        while process.health().live and time.monotonic() < until:
            time.sleep(0.01)
        found.append(process.health())
        process.order(Order.STOP)

    policy = ConsumerPolicy.load(
        {
            "loop": {"concurrency": {"value": 1}, "streaming": True, "drain_timeout": 0.1},
            "steps": {"process": {"retry": {"timeout": 0.05, "abandon_grace": 0.0, "max_attempts": 1}}},
        }
    )
    try:
        process = Process(made("def", body.wait), policy)
        Thread(target=look, daemon=True).start()
        process.run()
    finally:
        body.set()
    assert (found[0].live, found[0].ready) == (False, False)
    assert "every slot is held by a handler that timed out" in found[0].reasons[0]


@pytest.mark.spec("RUN-02")
def test_a_process_whose_event_loop_is_held_is_not_live_and_says_what_holds_it():
    found = []

    def look():
        until = time.monotonic() + 10
        while process.health().live and time.monotonic() < until:
            time.sleep(0.01)
        found.append(process.health())

    process = Process(made("async def", look), rules(limit=1), blocked=0.1)
    process.run()
    assert (found[0].live, found[0].ready) == (False, False)
    assert "by process of handle_async, in " in found[0].reasons[0]


class Away(MemoryConnector):
    """Has no line until it is let go."""

    def __init__(self):
        super().__init__("orders")
        self.found = Event()

    def fetch_transactions(self, batch_size, **extra):
        if not self.found.is_set():
            raise ConnectionLost("no line to db:5432, password=hidden")
        return super().fetch_transactions(batch_size, **extra)


@pytest.mark.spec("RUN-02")
def test_a_process_without_a_line_to_its_broker_is_live_but_not_ready():
    found = []

    def look():
        for ready in (False, True):
            until = time.monotonic() + 10
            while (seen := process.health()).reasons == ("starting",) or (seen.ready is not ready):
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
            found.append(seen)
            queue.found.set()
        process.order(Order.STOP)

    queue = Away()
    policy = ConsumerPolicy.load({"loop": {"streaming": True}, "steps": {"fetch": {"retry": {"backoff": 0.01}}}})
    process = Process(consumer(queue)(lambda order: None), policy)
    Thread(target=look, daemon=True).start()
    process.run()
    why = "the connector cannot be read: ConnectionLost: no line to db:5432, password=[hidden]"
    away = Health(live=True, ready=False, reasons=(why,))
    assert found == [away, Health(live=True, ready=True)]


class Unopened(MemoryConnector):
    """Cannot be opened until it is let go."""

    def __init__(self):
        super().__init__("orders")
        self.available = Event()
        self.attempts = 0

    def open(self):
        self.attempts += 1
        if not self.available.is_set():
            raise ConnectionLost("the disk of the database is full, password=hidden")

    async def open_async(self):
        self.open()


async def handle_async(order): ...


OPENING = ConsumerPolicy.load({"loop": {"streaming": True}, "steps": {"fetch": {"retry": {"backoff": 0.01}}}})
HANDLERS = {"def": lambda order: None, "async def": handle_async}


def wait_for_health(process, reason):
    until = time.monotonic() + 10
    while process.health().reasons != reason and time.monotonic() < until:
        time.sleep(0.01)
    return process.health()


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize("flavour", HANDLERS)
def test_a_start_waits_for_a_server_that_is_unavailable_and_names_the_cause(flavour):
    queue, found = Unopened(), []
    process = Process(consumer(queue)(HANDLERS[flavour]), OPENING)
    why = "the connector cannot be opened: ConnectionLost: the disk of the database is full, password=[hidden]"

    def look():
        found.append(wait_for_health(process, (why,)))
        queue.available.set()
        found.append(wait_for_health(process, ()))
        process.order(Order.STOP)

    Thread(target=look, daemon=True).start()
    ended = process.run()
    assert (ended.exit, ended.error) == (Exit.OK, None)
    assert found == [Health(live=True, ready=False, reasons=(why,)), Health(live=True, ready=True)]
    assert queue.attempts > 1


@pytest.mark.spec("SEC-15", "CON-36")
@pytest.mark.parametrize("flavour", HANDLERS)
def test_a_stop_ends_a_start_that_waits(flavour):
    queue = Unopened()
    retry = {"backoff": 3600.0, "cap": 0.0}
    loop = {"streaming": True, "drain_timeout": 5.0}
    policy = ConsumerPolicy.load({"loop": loop, "steps": {"fetch": {"retry": retry}}})
    process = Process(consumer(queue)(HANDLERS[flavour]), policy)

    def look():
        until = time.monotonic() + 10
        while process.health().reasons == ("starting",) and time.monotonic() < until:
            time.sleep(0.01)
        process.order(Order.STOP)

    Thread(target=look, daemon=True).start()
    ended = process.run()
    assert (ended.exit, ended.report.end, queue.attempts) == (Exit.OK, End.STOP, 1)


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize("flavour", HANDLERS)
def test_a_run_that_ends_with_its_queue_does_not_wait_at_its_start(flavour):
    queue = Unopened()
    process = Process(consumer(queue)(HANDLERS[flavour]), ConsumerPolicy())
    limit = Timer(10, process.order, [Order.STOP])
    limit.start()
    ended = process.run()
    limit.cancel()
    assert (ended.exit, type(ended.error), queue.attempts) == (Exit.FAILED, ConnectionLost, 1)


@contextmanager
def life():
    yield {}


@asynccontextmanager
async def life_async():
    yield {}


@pytest.mark.parametrize(
    "flavour, span, said",
    [
        ("async def", life, "is sync and its handlers are not; declare it with @asynccontextmanager"),
        ("def", life_async, "is async and its handlers are not; declare it with @contextmanager"),
    ],
    indirect=["flavour"],
)
def test_a_lifespan_of_the_other_flavour_is_told_in_words(flavour, span, said):
    ended = Process(made(flavour, lambda: None, lifespan=span), rules()).run()
    assert ended.exit is Exit.USAGE
    assert said in str(ended.error)


def test_a_type_error_inside_a_lifespan_is_the_users_own(flavour):
    def broken():
        raise TypeError("no pool")

    ended = Process(made(flavour, lambda: None, lifespan=broken), rules()).run()
    assert (ended.exit, str(ended.error)) == (Exit.FAILED, "no pool")


@pytest.mark.parametrize("stage", Stage)
def test_the_guide_lists_every_stage_with_what_happens_in_it(stage):
    guide = Path(__file__).parents[3] / "docs" / "guides" / "run.md"
    assert f"| {stage.value} | {stage.meaning} |" in guide.read_text(encoding="utf-8")


def test_a_teller_speaks_in_order_and_survives_what_fails():
    said, done = [], Event()
    teller = Teller()
    for call in (lambda: said.append(1), lambda: 1 / 0, lambda: said.append(2), done.set):
        teller.tell(call)
    assert done.wait(10)
    assert said == [1, 2]
