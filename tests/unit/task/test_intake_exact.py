"""Intake, admission and handling: the exact place, reason and record of every delivery."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Delivery, Later, MissingKeyError, Release, UndecodableError
from ergon_framework.engine.attempts import Step
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.effects import Gone
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Mailbox
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.task.admission import Admission
from ergon_framework.task.handling import Handling
from ergon_framework.task.intake import Intake
from ergon_framework.task.lifecycle import Course, classify, classify_handler, expired
from ergon_framework.task.mixins.policies import ConsumerPolicy, RetryPolicy
from ergon_framework.task.report import Kind, Outcome, Report
from ergon_framework.task.settle import Item, Settler
from ergon_framework.task.watch import Onlooker
from ergon_framework.transaction import Transaction


class Looking(Onlooker):
    """Knows the trace of everything, and writes down who was refused and who began."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def refused(self, delivery: Delivery, reason: str) -> None:
        self.told.append((delivery.receipt, reason))

    def begin(self, transaction: Transaction, delivery: Delivery | None) -> None:
        self.told.append((transaction, delivery))

    def trace_id(self, outcome: Outcome) -> str:
        return f"trace of {outcome.transaction.id}"


class World:
    """An intake with two slots; the clock stands at 50, the day's at 1050."""

    def __init__(self, *, process: Any = None, **loop: Any) -> None:
        self.now = 50.0
        self.watch, self.report = Looking(), Report()
        senses = Senses(clock=lambda: self.now, wall=lambda: 1_000.0 + self.now)
        policy = ConsumerPolicy.load({"loop": {"concurrency": {"value": 2}, **loop}})
        retry = RetryPolicy(**{"max_attempts": 1} | (process or {}))
        handler = {"classify": classify_handler, "expired": expired}
        course = Course(
            Step("process", abs, retry, classify=classify, expired=expired, defers=True),
            Step("success", abs, retry, **handler),
            Step("exception", abs, retry, **handler),
            senses=senses,
            plain=True,
        )
        self.box = Mailbox(Threads(1))
        settle = policy.steps.settle
        settler = Settler(abs, settle, senses=senses, mailbox=self.box, report=self.report, watch=self.watch)
        self.handling = Handling(course, settle, settler, name="mail", watch=self.watch)
        self.intake = Intake(policy.loop, self.handling, settler, senses=senses, report=self.report, watch=self.watch)

    def takes(self, *deliveries: Delivery) -> World:
        for delivery in deliveries:
            self.intake.take(delivery)
        return self

    def settling(self) -> list[Item]:
        return self.box.take()

    def handles(self, delivery: Delivery, *answers: Any) -> Any:
        """Run a lifecycle with these answers, some of which are made of the effect; what it waits for in the end."""
        script = self.handling.run(delivery)
        effect = next(script)
        for answer in answers:
            try:
                effect = script.send(answer(effect) if callable(answer) else answer)
            except StopIteration:
                return None
        return effect


def delivery(name: str, deliveries: int = 1, **fields: Any) -> Delivery:
    return Delivery(Transaction(name, **fields), name, deliveries)


@pytest.mark.spec("CNN-14")
def test_what_the_inbox_knows_is_acked_before_anything_else_is_asked() -> None:
    world, one = World(), delivery("a", deliveries=99)
    one.done, one.error = True, UndecodableError("garbage")
    (item,) = world.takes(one).settling()
    assert (item.settlement, item.outcome, world.report.refused) == (Ack(), None, {"done": 1})


# -- refused --------------------------------------------------------------------------------------


def test_what_cannot_be_decoded_is_refused_with_its_error() -> None:
    world, one = World(), delivery("a", deliveries=99)
    one.error = UndecodableError("garbage")
    (item,) = world.takes(one).settling()
    assert world.report.refused == {"undecodable": 1}
    assert world.watch.told == [("a", "undecodable")]
    failure = item.settlement.failure
    assert (item.outcome, item.settlement.reason) == (None, "undecodable")
    assert (failure.reason_code, failure.error_type, failure.error_message) == (
        "undecodable",
        "UndecodableError",
        "garbage",
    )
    assert (failure.deliveries, failure.task_name, failure.occurred_at) == (99, "mail", 1_050.0)
    assert (failure.trace_id, failure.final) == ("trace of a", True)
    assert list(world.intake.claims) == ["a"], "it is renewed until it is settled"


@pytest.mark.spec("SEC-26")
@pytest.mark.invariant
def test_a_message_without_its_key_is_deferred_for_as_long_as_an_unavailable_service() -> None:
    world, one, two = World(max_deferral=100), delivery("a", attempts=2), delivery("b")
    one.error = two.error = MissingKeyError.of("2026-05")
    two.done = True
    put_off, known = world.takes(one, two).settling()
    deferral = Deferral(count=1, since=1_050.0, at=1_050.0, until=1_150.0, code="missing_key", error=str(one.error))
    assert put_off.settlement == Later(30.0, 2, (), deferral)
    assert (put_off.outcome.kind, put_off.outcome.reason, put_off.outcome.error) == (
        "deferred",
        "missing_key",
        one.error,
    )
    assert (known.settlement, world.report.refused) == (Ack(), {"done": 1})


@pytest.mark.spec("SEC-26")
@pytest.mark.invariant
def test_a_message_whose_key_stays_missing_is_a_dead_letter_that_names_the_key() -> None:
    world = World(max_deferral=100)
    past = Deferral(count=4, since=960.0, at=1_040.0, until=1_060.0, code="missing_key")
    early, late = delivery("a", deferral=past), delivery("b", deferral=past)
    early.error = late.error = MissingKeyError.of("2026-05")
    (put_off,) = world.takes(early).settling()
    assert (put_off.settlement.delay, put_off.settlement.deferral.count) == (10.0, 5)
    world.now = 60.0
    (item,) = world.takes(late).settling()
    assert (item.settlement.reason, world.report.refused) == ("missing_key", {"missing_key": 1})
    failure = item.settlement.failure
    assert (failure.reason_code, failure.error_type) == ("missing_key", "MissingKeyError")
    for words in ("'2026-05'", "ERGON_ENCRYPTION__KEYS", "replay"):
        assert words in failure.error_message


@pytest.mark.spec("SEC-26")
@pytest.mark.parametrize("name, fields", [("max_deliveries", {"deliveries": 4}), ("expired", {"expires_at": 1_050.0})])
def test_the_limits_of_other_messages_hold_without_the_key(name: str, fields: Any) -> None:
    world, one = World(max_deliveries=3), delivery("a", **fields)
    one.error = MissingKeyError.of("2026-05")
    (item,) = world.takes(one).settling()
    assert (item.settlement.reason, world.report.refused) == (name, {name: 1})
    assert "'2026-05'" in item.settlement.failure.error_message


@pytest.mark.spec("SEC-26")
@pytest.mark.parametrize("times", [{"since": 1e15}, {"since": 0.0, "exempt": 1e15}])
def test_no_producer_can_make_a_deferral_last_for_ever(times: dict[str, float]) -> None:
    forged = Deferral(**{"count": 1, "at": 0.0, "until": 1e15, **times})
    world, one = World(max_deferral=100), delivery("a", deferral=forged)
    one.error = MissingKeyError.of("invented")
    (put_off,) = world.takes(one).settling()
    assert put_off.settlement.deferral.until == 1_150.0
    world.now += 100.0
    one.transaction = put_off.settlement.apply(one.transaction)
    (item,) = world.takes(one).settling()
    assert item.settlement.reason == "missing_key"


def test_one_delivery_too_many_is_refused() -> None:
    world = World(max_deliveries=3).takes(delivery("a", 3), delivery("b", 4), delivery("c", 5))
    assert world.report.refused == {"max_deliveries": 2}
    codes = [(item.settlement.reason, item.settlement.failure.reason_code) for item in world.settling()]
    assert codes == [("max_deliveries", "max_deliveries")] * 2
    assert len(world.intake) == 1


def test_what_has_expired_is_refused_from_that_moment_on() -> None:
    world = World()
    world.takes(delivery("a", expires_at=1_050.1), delivery("b", expires_at=1_050.0), delivery("c", expires_at=1.0))
    assert world.report.refused == {"expired": 2}
    failure = world.settling()[0].settlement.failure
    assert (failure.reason_code, failure.category, failure.deliveries) == ("expired", Category.SYSTEM, 1)
    assert len(world.intake) == 1


# -- the limit ------------------------------------------------------------------------------------


def test_room_is_what_the_limit_leaves_after_those_who_started_and_those_who_wait() -> None:
    assert World().intake.room == float("inf")
    world = World(limit=5)
    world.report.started = 2
    assert world.takes(delivery("a")).intake.room == 2


def test_what_the_limit_does_not_allow_is_given_back() -> None:
    world = World(limit=1).takes(delivery("a"), delivery("b"))
    (item,) = world.settling()
    assert (item.delivery.receipt, item.settlement) == ("b", Release())
    assert (item.outcome.kind, item.outcome.reason) == (Kind.RELEASED, "limit")
    assert len(world.intake) == 1


# -- obstacles ------------------------------------------------------------------------------------


def test_an_id_in_flight_comes_again_later_with_all_that_it_carried() -> None:
    past = (Attempt(attempt=0, category=Category.SYSTEM),)
    world = World(identity_delay=2.5).takes(delivery("a"))
    again = Delivery(Transaction("a", attempts=4, history=past), "second")
    (item,) = world.takes(again).settling()
    assert item.settlement == Later(2.5, attempts=4, history=past)
    assert (item.delivery, item.outcome.kind, item.outcome.reason) == (again, Kind.DEFERRED, "identity")
    assert item.outcome.settlement is item.settlement


def test_a_key_with_too_many_waiting_comes_again_later() -> None:
    world = World().takes(*(delivery(name, key="hot") for name in "abcd"))
    (item,) = world.settling()
    assert (item.delivery.receipt, item.outcome.reason) == ("d", "key")
    assert (len(world.intake), world.intake.ready) == (3, 1)


def test_without_a_key_nobody_waits_for_anybody() -> None:
    admission = Admission(1)
    items = [delivery(name) for name in "abc"]
    assert [admission.admit(each) for each in items] == [None] * 3
    assert (admission.ready, admission.head) == (3, items[0])
    admission.left(admission.next())
    assert (admission.ready, list(admission)) == (2, items[1:])


def test_those_who_wait_for_keys_are_counted_until_they_are_next() -> None:
    admission = Admission(2)
    items = [delivery(name, key="k") for name in "abc"]
    for each in items:
        admission.admit(each)
    assert (len(admission), list(admission)) == (3, items)
    admission.left(admission.next())
    assert (len(admission), admission.ready) == (2, 1)
    assert admission.admit(delivery("d", key="k")) is None, "one place is free again"
    assert admission.admit(delivery("e", key="k")) == "key"


def test_after_clearing_there_is_room_for_a_key_again() -> None:
    admission = Admission(1)
    for name in "ab":
        admission.admit(delivery(name, key="k"))
    assert len(admission.clear()) == 2
    assert (len(admission), admission.head) == (0, None)
    assert admission.admit(delivery("c", key="k")) is None


# -- given back -----------------------------------------------------------------------------------


def test_a_lost_claim_is_not_given_back_but_dropped() -> None:
    world = World().takes(delivery("a"), delivery("b"), delivery("c"))
    world.handling.lost.update({"a", "b"})
    head = world.intake.head()
    assert head is not None
    assert head.receipt == "c"
    dropped = [(item.delivery.receipt, item.settlement, item.outcome.reason) for item in world.settling()]
    assert dropped == [("a", None, "lost"), ("b", None, "lost")]
    assert world.handling.lost == set()
    assert len(world.intake) == 1
    world.takes(delivery("a"))
    assert len(world.intake) == 2, "its id is in flight no longer"


def test_a_head_whose_claim_is_held_stays() -> None:
    world = World().takes(delivery("a"), delivery("b"))
    world.handling.lost.add("b")
    assert world.intake.head() is world.intake.next()
    assert world.settling() == []


def test_everybody_who_waits_is_given_back_with_the_reason() -> None:
    world = World().takes(delivery("a"), delivery("b"))
    world.handling.lost.add("b")
    world.intake.clear("stop")
    given = [(item.delivery.receipt, item.settlement, item.outcome.reason) for item in world.settling()]
    assert given == [("a", Release(), "stop"), ("b", None, "stop")]
    assert len(world.intake) == 0


def test_only_lost_claims_of_those_who_are_here_are_remembered() -> None:
    world = World().takes(delivery("a"))
    world.handling.lost.update({"a", "b", "c"})
    world.intake.remember_lost([delivery("b")])
    assert world.handling.lost == {"a", "b"}
    world.intake.left(delivery("b"))
    assert world.handling.lost == {"a"}


@pytest.mark.spec("DX-08")
def test_a_delivery_without_a_transaction_is_given_back_without_an_outcome() -> None:
    world = World()
    world.intake.give_back(delivery("a"), "fetch")
    world.intake.give_back(Delivery("junk", "b"), "fetch")  # type: ignore[arg-type]
    given = [(item.delivery.receipt, item.settlement, item.outcome is None) for item in world.settling()]
    assert given == [("a", Release(), False), ("b", Release(), True)]


# -- handling -------------------------------------------------------------------------------------


def test_a_success_is_done() -> None:
    world, one = World(), delivery("a")
    assert world.handles(one, Ok("made")) is None
    assert world.watch.told == [(one.transaction, one)]
    (item,) = world.settling()
    assert (item.delivery, item.settlement, item.outcome.kind) == (one, Ack(), Kind.SUCCEEDED)
    assert item.outcome.settlement == Ack()


def test_a_failure_is_a_dead_letter_with_its_record() -> None:
    world = World()
    world.handles(delivery("a", 7), Err(ValueError("no")), Ok(None))
    (item,) = world.settling()
    assert isinstance(item.settlement, DeadLetter)
    failure = item.settlement.failure
    assert failure is not None
    assert (failure.task_name, failure.occurred_at, failure.trace_id) == ("mail", 1_050.0, "trace of a")
    assert (failure.reason_code, failure.deliveries, failure.attempts) == ("system", 7, 1)


def test_a_dead_letter_that_was_asked_for_gets_its_record_unless_it_has_one() -> None:
    world = World()
    world.handles(delivery("a", 7), Ok(DeadLetter("odd")))
    (item,) = world.settling()
    record = item.settlement.failure
    assert (item.settlement.reason, record.reason_code, record.deliveries) == ("odd", "odd", 7)
    own = DeadLetter("odd", record.model_copy(update={"attempts": 9}))
    world.handles(delivery("b"), Ok(own))
    (item,) = world.settling()
    assert item.settlement is own


@pytest.mark.parametrize("answer", [Ok("made"), Stopped()])
def test_a_lifecycle_whose_claim_was_lost_settles_nothing(answer: Any) -> None:
    world = World()
    world.handling.lost.add("a")
    world.handles(delivery("a"), answer)
    (item,) = world.settling()
    assert (item.settlement, item.outcome.kind, item.outcome.reason) == (None, Kind.RELEASED, "lost")


def test_a_stopped_body_is_asked_to_leave_but_not_waited_for() -> None:
    world = World()
    effect = world.handles(delivery("a"), Stopped)
    assert isinstance(effect, Gone)
    assert effect.until == 50.0
    world.handles(delivery("b"), Stopped, True)
    world.handles(delivery("c"), Stopped, False)
    world.handles(delivery("d"), Stopped, Stopped())
    settled = {item.delivery.receipt: item.settlement for item in world.settling()}
    assert settled == {"b": Release(), "c": None, "d": None}, "one that is still in there keeps its claim"


def test_a_body_that_stays_is_waited_for_before_somebody_else_may_begin() -> None:
    world = World()
    leave, _ = (world.handles(delivery(name), Expired, False, Ok(Later(1.0))).then for name in "ab")
    assert world.settling() == []
    leave()
    (item,) = world.settling()
    assert (item.delivery.receipt, item.settlement) == ("a", Later(1.0))
    leave()
    assert world.settling() == [], "once"


def test_a_claim_whose_body_stays_to_the_end_is_kept() -> None:
    world = World()
    leave = world.handles(delivery("a"), Expired, False, Ok(Later(1.0))).then
    world.handling.give_up()
    leave()
    (item,) = world.settling()
    assert (item.delivery.receipt, item.settlement, item.outcome.settlement) == ("a", None, None)
    world.handling.give_up()
    assert world.settling() == []


def test_nobody_waits_for_a_body_that_nobody_will_meet() -> None:
    world = World()
    assert world.handles(delivery("a"), Expired, False, Ok(None)) is None
    (item,) = world.settling()
    assert isinstance(item.settlement, DeadLetter)
    assert item.settlement.failure.still_running


def test_a_body_that_has_left_meanwhile_is_not_waited_for() -> None:
    world = World()
    script = world.handling.run(delivery("a"))
    body = next(script)
    script.send(Expired(body))
    script.send(False)
    body.left = True
    with pytest.raises(StopIteration):
        script.send(Ok(Later(1.0)))
    assert world.settling()[0].settlement == Later(1.0)
