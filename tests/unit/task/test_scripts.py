"""Scripts need no driver to be tested: effects come out, answers go in."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.connectors.base import Ack, Delivery, SettleResult
from ergon_framework.engine.attempts import Failed, Step, attempts
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.effects import Call, Interrupt, Wait
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Done, Slot
from ergon_framework.errors import Category
from ergon_framework.task.consume import Broker, Consumption
from ergon_framework.task.crew import Crew
from ergon_framework.task.lifecycle import Course, classify, classify_handler, expired, lifecycle
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy, SettlePolicy
from ergon_framework.task.produce import Production
from ergon_framework.task.report import Kind, Outcome, Report
from ergon_framework.task.settle import CLOSE, Item, Settler
from ergon_framework.task.watch import Onlooker
from ergon_framework.transaction import Transaction

TX = Transaction("1")


class World:
    """A clock that the test moves, and no chance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.senses = Senses(clock=lambda: self.now, wall=lambda: 1_000.0 + self.now, dice=lambda: 0.5)


def course(senses: Senses, timeout: float | None = None, **retry: Any) -> Course:
    rules = RetryPolicy(**retry)
    return Course(
        Step("process", abs, rules, classify=classify, expired=expired, defers=True),
        Step("success", abs, rules, classify=classify_handler, expired=expired),
        Step("exception", abs, rules, classify=classify_handler, expired=expired),
        senses=senses,
        timeout=timeout,
    )


def ended(script: Any, answer: Any) -> Any:
    with pytest.raises(StopIteration) as stop:
        script.send(answer)
    return stop.value.value


@pytest.mark.spec("CON-12", "CON-38")
def test_a_success_handler_is_not_begun_when_the_lifecycles_time_is_over() -> None:
    world = World()
    script = lifecycle(course(world.senses, timeout=10.0), TX)
    assert next(script).step == "process"
    world.now = 10.0
    call = script.send(Ok("done"))
    assert call.step == "exception"
    assert (call.args[1].category, call.args[1].still_running) == (Category.TIMEOUT, False)
    outcome = ended(script, Ok(None))
    assert (outcome.kind, outcome.processed, outcome.succeeded_steps) == (Kind.FAILED, True, ("process",))


@pytest.mark.spec("CON-12")
def test_a_lifecycle_that_is_over_retries_nothing_and_defers_nothing() -> None:
    world = World()
    script = lifecycle(course(world.senses, timeout=10.0, hold=0.0), TX)
    call = next(script)
    assert call.until == 10.0, "the step's own 60 s are cut"
    world.now = 10.0
    script.send(Expired(call))
    assert script.send(True).step == "exception"


class Seen:
    """A watch on one step."""

    def __init__(self) -> None:
        self.errors: list[Any] = []

    def attempt(self, number: int) -> None:
        return None

    def attempted(self, number: int, error: BaseException | None) -> None:
        self.errors.append((number, error))


@pytest.mark.spec("CON-16")
def test_a_watch_is_told_of_every_attempt_and_how_it_ended() -> None:
    world, seen = World(), Seen()
    step = Step("process", abs, RetryPolicy(max_attempts=4, backoff=0.0), classify=classify, expired=expired)
    script = attempts(step, (1,), [], TX, world.senses, watch=seen)
    call = next(script)
    error = ValueError("no")
    call = script.send(Err(error))
    script.send(Expired(call))
    call = script.send(True)
    assert isinstance(call, Call)
    script.send(Err(error))
    assert isinstance(ended(script, Stopped()), Stopped)
    (first, late, third, stopped) = seen.errors
    assert first == (0, error)
    assert (late[0], type(late[1])) == (1, TimeoutError)
    assert third == (2, error)
    assert stopped == (3, None)


@pytest.mark.spec("CON-44")
def test_a_failed_step_says_at_which_attempt() -> None:
    world = World()
    step = Step("process", abs, RetryPolicy(max_attempts=1), classify=classify, expired=expired)
    script = attempts(step, (1,), notes := [], TX, world.senses)
    next(script)
    failed = ended(script, Err(ValueError("no")))
    assert isinstance(failed, Failed)
    assert (failed.attempt, failed.body, len(notes)) == (0, None, 1)


def test_those_who_are_dismissed_are_heard_however_often_somebody_interrupts() -> None:
    crew: Crew[str] = Crew(1, patience=1.0, clock=lambda: 0.0)
    slot = Slot(iter(()), told=None, counted=True)  # type: ignore[arg-type]
    crew.flights[slot] = "a"

    def hear(events: list[Any]) -> Any:
        for event in events:
            crew.hear(event)
        yield from ()

    script = crew.dismiss(Threads(1).mailbox(), hear)
    assert isinstance(next(script), Interrupt)
    assert isinstance(script.send(None), Wait)
    assert isinstance(script.send(Stopped()), Wait), "it goes on listening"
    ended(script, [Done(slot, None, freed=True)])
    assert not crew.flights


def settling(world: World, report: Report) -> Settler:
    return Settler(
        lambda settlings: [SettleResult.SETTLED] * len(settlings),
        SettlePolicy.load({"linger": 0.0}),
        senses=world.senses,
        mailbox=Threads(1).mailbox(),
        report=report,
        watch=Onlooker(),
    )


def test_a_settler_that_is_interrupted_while_idle_ends() -> None:
    script = settling(World(), Report()).run()
    assert isinstance(next(script), Wait)
    ended(script, Stopped())


@pytest.mark.spec("CNN-13", "CON-36")
def test_a_settler_that_is_interrupted_while_a_call_is_given_its_grace_tells_the_broker_nothing_more() -> None:
    world, report = World(), Report()
    settler = settling(world, report)
    script = settler.run()
    next(script)
    settler.put(item := Item(Delivery(TX, 1), Ack(), Outcome(TX, Kind.SUCCEEDED)))
    call = script.send([item, CLOSE])
    assert isinstance(call, Call)
    world.now = call.until
    leaving = script.send(Expired(call))
    assert (leaving.body, leaving.until) == (call, world.now + 5.0)
    ended(script, Stopped())
    assert (item.outcome.kind, item.outcome.reason) == (Kind.RELEASED, "failed")
    assert report.settled == {"failed": 1}


# -- without anybody who looks on ---------------------------------------------------------------


def test_a_loop_needs_nobody_to_look_on() -> None:
    driver = Threads(2)
    queue = [[Delivery(Transaction("1"), 1), Delivery(Transaction("2"), 2, deliveries=11)], []]
    broker = Broker(
        fetch=lambda _size: queue.pop(0),
        settle=lambda settlings: [SettleResult.SETTLED] * len(settlings),
        extend=lambda deliveries: deliveries,
    )

    def body(*_args: Any) -> None: ...

    retry = RetryPolicy()
    steps = Course(
        Step("process", body, retry, classify=classify, expired=expired, defers=True),
        Step("success", body, retry, classify=classify_handler, expired=expired),
        Step("exception", body, retry, classify=classify_handler, expired=expired),
        senses=driver.senses,
    )
    loop = Consumption(steps, broker, ConsumerPolicy(), name="task", mailbox=driver.mailbox, fenced=driver.came_late)
    signals: list[Any] = []
    for _ in range(3):
        loop.wake(lambda _mailbox, item: signals.append(item))
    assert len(signals) == 1, "said once until it is heard"
    report = driver.run(loop.run())
    assert (report.counts[Kind.SUCCEEDED], report.refused) == (1, {"max_deliveries": 1})


def test_a_production_says_how_its_slots_are_used() -> None:
    class Looking(Onlooker):
        slots: Any = None

        def began(self, slots: Any) -> None:
            self.slots = slots

    driver, looking, used = Threads(1), Looking(), []

    def body(*_args: Any) -> None:
        used.append((looking.slots(), production.live))

    retry = RetryPolicy()
    steps = Course(
        Step("produce", body, retry, classify=classify, expired=expired),
        Step("success", lambda *_: None, retry, classify=classify_handler, expired=expired),
        Step("exception", body, retry, classify=classify_handler, expired=expired),
        senses=driver.senses,
    )
    production = Production(
        steps, [TX], ProducerPolicy(), mailbox=driver.mailbox, fenced=driver.came_late, watch=looking
    )
    report = driver.run(production.run())
    assert report.count(Kind.SUCCEEDED) == 1
    assert used == [((1, 0, 0), True)]
