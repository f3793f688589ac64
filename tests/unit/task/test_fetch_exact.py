"""Fetching, answered by hand: what its watch is told, and which counter each wait obeys."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import Call, Gone, Sleep
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import Category, ConnectionLost, ErgonError
from ergon_framework.task.exceptions import FetchException, FetchTimeoutException
from ergon_framework.task.fetch import Fetcher
from ergon_framework.task.mixins.policies import RetryPolicy
from ergon_framework.task.report import End
from ergon_framework.transaction import Transaction


def delivery(name: str) -> Delivery:
    return Delivery(Transaction(name), name)


class World:
    """A fetcher, its clock, its watch and its script; the clock begins at 40."""

    def __init__(self, *, deadline: float = 1e6, patient: bool = False, dice: float = 0.5, **retry: Any) -> None:
        self.now = 40.0
        self.told: list[Any] = []
        self.released: list[tuple[Any, str]] = []
        self.contexts: list[contextvars.Context] = []
        rules = {"max_attempts": 3, "timeout": 30.0, "backoff": 1.0, "multiplier": 2.0, "cap": 0.0} | retry
        self.fetcher = fetcher = Fetcher(
            abs,
            RetryPolicy(**rules),
            senses=Senses(clock=lambda: self.now, dice=lambda: dice),
            deadline=deadline,
            patient=patient,
            give_back=lambda delivery, reason: self.released.append((delivery.receipt, reason)),
        )
        self.script = fetcher.run(7, self)
        self.result: Any = None
        self.effect: Any = next(self.script)

    def attempt(self, number: int) -> contextvars.Context:
        self.told.append(number)
        self.contexts.append(context := contextvars.Context())
        return context

    def attempted(self, number: int, error: BaseException | None) -> None:
        self.told.append((number, error))

    def on(self, *answers: Any) -> World:
        for answer in answers:
            try:
                self.effect = self.script.send(answer)
            except StopIteration as stop:
                self.effect, self.result = None, stop.value
        return self

    @property
    def sleeps(self) -> float | None:
        return self.effect.until - self.now if isinstance(self.effect, Sleep) else None


def test_every_attempt_is_a_call_in_the_context_of_its_watch() -> None:
    world = World()
    call = world.effect
    assert isinstance(call, Call)
    assert (call.step, call.args, call.until) == ("fetch", (7,), 70.0)
    assert (world.fetcher.calls, call.fn(-7), world.fetcher.calls) == (0, 7, 1)
    assert (call.scope, call.context) == (None, world.contexts[0])
    assert call.late is not None
    call.late([delivery("a"), "junk", Delivery(Transaction("b"), [])])
    call.late(7)
    assert world.released == [("a", "late")]


def test_the_watch_is_told_the_number_and_the_error_of_every_attempt() -> None:
    error = OSError("no")
    world = World().on(Err(error), None, Err(error), None, Ok([first_one := delivery("a")]))
    first, second = world.told[1][1], world.told[3][1]
    assert world.told == [0, (0, first), 1, (1, second), 2, (2, None)]
    assert [type(each) for each in (first, second)] == [FetchException] * 2
    assert first.__cause__ is second.__cause__ is error
    assert world.result == [first_one]


def test_the_watch_is_told_of_no_error_when_the_loop_ends_in_the_middle() -> None:
    world = World().on(Stopped())
    assert (world.told, world.result) == ([0, (0, None)], End.STOP)


def test_the_budget_is_spent_after_its_last_attempt_and_not_before() -> None:
    world = World()
    for wait in (1.0, 2.0):
        assert world.on(Err(OSError("no"))).sleeps == wait
        world.on(None)
    result = world.on(Err(OSError("no"))).result
    assert str(result) == "the connector could not be read: OSError: no"


def test_an_answer_that_is_no_list_is_a_failure_like_any_other() -> None:
    world = World().on(Ok(None))
    assert world.sleeps == 1.0
    told = "the connector could not be read: TypeError: a fetch must return a sequence of deliveries, not NoneType"
    assert str(world.told[-1][1]) == told


@pytest.mark.spec("DX-08")
@pytest.mark.parametrize("value", ["text", b"bytes", 7])
def test_a_text_is_no_list_of_deliveries(value: Any) -> None:
    told = f"TypeError: a fetch must return a sequence of deliveries, not {type(value).__name__}"
    assert str(World().on(Ok(value)).told[-1][1]) == f"the connector could not be read: {told}"


JUNK: list[tuple[Any, str, list[str]]] = [
    (
        Transaction("x"),
        "a Transaction; expected Delivery(transaction, receipt), or a connector derived from SimpleConnector, whose",
        [],
    ),
    (None, "a NoneType; expected Delivery", []),
    (
        Delivery({"n": 1}, "x"),  # type: ignore[arg-type]
        "a Delivery of a dict; expected Delivery(Transaction(id, payload), receipt)",
        ["x"],
    ),
    (Delivery(Transaction("x"), {}), "a Delivery whose receipt is a dict; expected a hashable receipt", []),
    (
        Delivery(Transaction("x"), "x", None),  # type: ignore[arg-type]
        "a Delivery whose deliveries is a NoneType; expected a count from 1",
        ["x"],
    ),
]


@pytest.mark.spec("DX-08", "CON-08")
@pytest.mark.parametrize("junk, told, released", JUNK)
def test_an_item_that_is_no_delivery_ends_the_fetch_and_the_others_are_released(
    junk: Any, told: str, released: list[str]
) -> None:
    world = World().on(Ok([delivery("a"), junk, delivery("b")]))
    assert isinstance(world.result, FetchException), "another attempt would only claim more"
    assert (world.result.final, world.result.code) == (True, "fetch")
    assert f"TypeError: item 2 of 3 is {told}" in str(world.result)
    assert world.released == [(name, "fetch") for name in ("a", *released, "b")]


def unsound() -> ErgonError:
    error = ErgonError("no")
    error.final, error.retry_after = True, "soon"  # type: ignore[assignment]
    return error


def test_a_verdict_that_makes_no_sense_is_not_obeyed() -> None:
    assert World().on(Err(unsound())).sleeps == 1.0


def test_lost_connections_and_other_failures_are_counted_apart() -> None:
    world = World(patient=True)
    down, broken = Err(ConnectionLost("down")), Err(OSError("no"))
    waits = []
    for answer in (down, down, broken, down, broken):
        waits.append(world.on(answer).sleeps)
        world.on(None)
    assert waits == [1.0, 2.0, 1.0, 4.0, 2.0]
    assert [told for told in world.told if isinstance(told, int)] == [0, 0, 0, 1, 1, 2]
    assert isinstance(world.on(broken).result, FetchException)


def test_an_impatient_loop_waits_for_a_lost_connection_as_for_anything_else() -> None:
    world = World()
    assert world.on(Err(ConnectionLost("down"))).sleeps == 1.0
    assert world.on(None, Err(ConnectionLost("down"))).sleeps == 2.0


@pytest.mark.parametrize("patient", [False, True])
def test_waits_vary_where_the_policy_says_so(patient: bool) -> None:
    world = World(patient=patient, dice=1.0, jitter=0.5)
    assert world.on(Err(ConnectionLost("down"))).sleeps == 1.5


def test_a_shorter_wait_that_was_asked_for_shortens_nothing() -> None:
    assert World().on(Err(ConnectionLost("busy", retry_after=0.25))).sleeps == 1.0
    assert World().on(Err(ConnectionLost("busy", retry_after=3.0))).sleeps == 3.0
    assert World(backoff=0.25).on(Err(ConnectionLost("busy"))).sleeps == 0.25


@pytest.mark.parametrize(
    "error, final",
    [
        (ErgonError("no"), False),
        (ErgonError("no", category=Category.TIMEOUT), False),
        (ErgonError("no", category=Category.BUSINESS), True),
        (ErgonError("no", final=True), True),
    ],
)
def test_the_errors_own_verdict_decides_whether_it_is_tried_again(error: ErgonError, final: bool) -> None:
    world = World().on(Err(error))
    assert (world.result is not None) is final
    assert world.told[1][1].final is final


def test_a_call_that_hangs_is_given_its_grace_and_the_wait_begins_after_that() -> None:
    world = World(abandon_grace=4.0)
    call = world.effect
    world.now = 70.0
    world.on(Expired(call))
    assert isinstance(world.effect, Gone)
    assert (world.effect.body, world.effect.until) == (call, 74.0)
    world.now = 72.0
    assert world.on(True).sleeps == 1.0
    error = world.told[-1][1]
    assert (type(error), error.final) == (FetchTimeoutException, False)
    assert str(error) == "the connector did not answer within 30.0 s"


def test_a_call_whose_body_stays_is_the_last() -> None:
    world = World()
    world.now = 70.0
    result = world.on(Expired(world.effect), False).result
    assert (type(result), result.final) == (FetchTimeoutException, True)


def test_a_wait_that_ends_before_the_loops_time_is_followed_by_a_call() -> None:
    world = World(deadline=45.0)
    assert world.on(Err(OSError())).sleeps == 1.0
    world.now = 41.0
    call = world.on(None).effect
    assert isinstance(call, Call)
    assert call.until == 45.0
