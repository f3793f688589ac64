"""The backlog of fetched deliveries: order, reason and record of every delivery."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Delivery, MissingKeyError, Release, UndecodableError
from ergon_framework.engine.effects import AwaitExit, Call, Err, Expired, Interrupted, Ok
from ergon_framework.engine.retry import Step
from ergon_framework.engine.scheduler import Mailbox
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Deferral
from ergon_framework.transaction import Transaction
from ergon_framework.worker.admission import Backlog, DeliveryAdmission
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.lifecycle import DeliveryHandler, LifecycleSpec, classify, classify_handler, timeout_error
from ergon_framework.worker.policies import ConsumerPolicy, RetryPolicy
from ergon_framework.worker.report import Outcome, OutcomeKind, Report
from ergon_framework.worker.settle import PendingSettlement, Settler


class BacklogObserver(LoopObserver):
    """Knows the trace of everything, and writes down who was refused and who began."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_rejected(self, delivery: Delivery, reason: str) -> None:
        self.events.append((delivery.receipt, reason))

    def on_transaction_start(self, transaction: Transaction, delivery: Delivery | None) -> None:
        self.events.append((transaction, delivery))

    def trace_id(self, outcome: Outcome) -> str:
        return f"trace of {outcome.transaction.id}"


class BacklogHarness:
    """An intake with two slots; the clock stands at 50, the day's at 1050."""

    def __init__(self, *, process: Any = None, **loop: Any) -> None:
        self.now = 50.0
        self.observer, self.report = BacklogObserver(), Report()
        clock = Clock(monotonic=lambda: self.now, wall=lambda: 1_000.0 + self.now)
        policy = ConsumerPolicy.load({"loop": {"concurrency": {"value": 2}, **loop}})
        retry = RetryPolicy(**{"max_attempts": 1} | (process or {}))
        handler = {"classify": classify_handler, "timeout_error": timeout_error}
        spec = LifecycleSpec(
            Step("process", abs, retry, classify=classify, timeout_error=timeout_error, defers=True),
            Step("success", abs, retry, **handler),
            Step("exception", abs, retry, **handler),
            clock=clock,
            skips_success=True,
        )
        self.mailbox = Mailbox(ThreadDriver(1))
        settle_policy = policy.steps.settle
        settler = Settler(
            abs, settle_policy, clock=clock, mailbox=self.mailbox, report=self.report, observer=self.observer
        )
        self.delivery_handler = DeliveryHandler(spec, settle_policy, settler, name="mail", observer=self.observer)
        self.backlog = Backlog(
            policy.loop, self.delivery_handler, settler, clock=clock, report=self.report, observer=self.observer
        )

    def add(self, *deliveries: Delivery) -> BacklogHarness:
        for delivery in deliveries:
            self.backlog.add(delivery)
        return self

    def take_settlements(self) -> list[PendingSettlement]:
        return self.mailbox.take()

    def run_lifecycle(self, delivery: Delivery, *answers: Any) -> Any:
        """Run a lifecycle with these answers, some of which are made of the effect; what it waits for in the end."""
        script = self.delivery_handler.run(delivery)
        effect = next(script)
        for answer in answers:
            try:
                effect = script.send(answer(effect) if callable(answer) else answer)
            except StopIteration:
                return None
        return effect


def exit_call(effect: Any) -> bool:
    """Answer the wait for the exit of a call: it has exited."""
    effect.call.exited = True
    return True


def make_delivery(name: str, deliveries: int = 1, **fields: Any) -> Delivery:
    return Delivery(Transaction(id=name, **fields), name, deliveries)


@pytest.mark.spec("CNN-14")
def test_a_delivery_known_to_the_inbox_is_acked_before_other_checks() -> None:
    harness, one = BacklogHarness(), make_delivery("a", deliveries=99)
    one.done, one.error = True, UndecodableError("garbage")
    (item,) = harness.add(one).take_settlements()
    assert (item.settlement, item.outcome, harness.report.rejected) == (Ack(), None, {"done": 1})


# -- refused --------------------------------------------------------------------------------------


def test_an_undecodable_delivery_is_rejected_with_its_error() -> None:
    harness, one = BacklogHarness(), make_delivery("a", deliveries=99)
    one.error = UndecodableError("garbage")
    (item,) = harness.add(one).take_settlements()
    assert harness.report.rejected == {"undecodable": 1}
    assert harness.observer.events == [("a", "undecodable")]
    failure = item.settlement.failure
    assert (item.outcome, item.settlement.reason) == (None, "undecodable")
    assert (failure.reason_code, failure.error_type, failure.error_message) == (
        "undecodable",
        "UndecodableError",
        "garbage",
    )
    assert (failure.deliveries, failure.task_name, failure.occurred_at) == (99, "mail", 1_050.0)
    assert (failure.trace_id, failure.final) == ("trace of a", True)
    assert list(harness.backlog.claims) == ["a"], "it is renewed until it is settled"


@pytest.mark.spec("SEC-26")
@pytest.mark.invariant
def test_a_message_without_its_key_is_deferred_like_for_an_unavailable_service() -> None:
    harness, one, two = BacklogHarness(max_deferral=100), make_delivery("a", attempts=2), make_delivery("b")
    one.error = two.error = MissingKeyError.for_key("2026-05")
    two.done = True
    deferred, acked = harness.add(one, two).take_settlements()
    deferral = Deferral(count=1, since=1_050.0, at=1_050.0, until=1_150.0, code="missing_key", error=str(one.error))
    assert deferred.settlement == Defer(30.0, 2, (), deferral)
    assert (deferred.outcome.kind, deferred.outcome.reason, deferred.outcome.error) == (
        "deferred",
        "missing_key",
        one.error,
    )
    assert (acked.settlement, harness.report.rejected) == (Ack(), {"done": 1})


@pytest.mark.spec("SEC-26")
@pytest.mark.invariant
def test_a_message_whose_key_stays_missing_is_a_dead_letter_that_names_the_key() -> None:
    harness = BacklogHarness(max_deferral=100)
    earlier = Deferral(count=4, since=960.0, at=1_040.0, until=1_060.0, code="missing_key")
    early, late = make_delivery("a", deferral=earlier), make_delivery("b", deferral=earlier)
    early.error = late.error = MissingKeyError.for_key("2026-05")
    (deferred,) = harness.add(early).take_settlements()
    assert (deferred.settlement.delay, deferred.settlement.deferral.count) == (10.0, 5)
    harness.now = 60.0
    (item,) = harness.add(late).take_settlements()
    assert (item.settlement.reason, harness.report.rejected) == ("missing_key", {"missing_key": 1})
    failure = item.settlement.failure
    assert (failure.reason_code, failure.error_type) == ("missing_key", "MissingKeyError")
    for text in ("'2026-05'", "ERGON_ENCRYPTION__KEYS", "replay"):
        assert text in failure.error_message


@pytest.mark.spec("SEC-26")
@pytest.mark.parametrize("name, fields", [("max_deliveries", {"deliveries": 4}), ("expired", {"expires_at": 1_050.0})])
def test_delivery_limits_apply_without_the_encryption_key(name: str, fields: Any) -> None:
    harness, one = BacklogHarness(max_deliveries=3), make_delivery("a", **fields)
    one.error = MissingKeyError.for_key("2026-05")
    (item,) = harness.add(one).take_settlements()
    assert (item.settlement.reason, harness.report.rejected) == (name, {name: 1})
    assert "'2026-05'" in item.settlement.failure.error_message


@pytest.mark.spec("SEC-26")
@pytest.mark.parametrize("times", [{"since": 1e15}, {"since": 0.0, "exempt": 1e15}])
def test_no_producer_can_make_a_deferral_last_forever(times: dict[str, float]) -> None:
    forged = Deferral(**{"count": 1, "at": 0.0, "until": 1e15, **times})
    harness, one = BacklogHarness(max_deferral=100), make_delivery("a", deferral=forged)
    one.error = MissingKeyError.for_key("invented")
    (deferred,) = harness.add(one).take_settlements()
    assert deferred.settlement.deferral.until == 1_150.0
    harness.now += 100.0
    one.transaction = deferred.settlement.apply(one.transaction)
    (item,) = harness.add(one).take_settlements()
    assert item.settlement.reason == "missing_key"


def test_a_delivery_beyond_max_deliveries_is_rejected() -> None:
    harness = BacklogHarness(max_deliveries=3).add(make_delivery("a", 3), make_delivery("b", 4), make_delivery("c", 5))
    assert harness.report.rejected == {"max_deliveries": 2}
    codes = [(item.settlement.reason, item.settlement.failure.reason_code) for item in harness.take_settlements()]
    assert codes == [("max_deliveries", "max_deliveries")] * 2
    assert len(harness.backlog) == 1


def test_an_expired_transaction_is_rejected_from_that_moment_on() -> None:
    harness = BacklogHarness()
    harness.add(
        make_delivery("a", expires_at=1_050.1),
        make_delivery("b", expires_at=1_050.0),
        make_delivery("c", expires_at=1.0),
    )
    assert harness.report.rejected == {"expired": 2}
    failure = harness.take_settlements()[0].settlement.failure
    assert (failure.reason_code, failure.category, failure.deliveries) == ("expired", Category.SYSTEM, 1)
    assert len(harness.backlog) == 1


# -- the limit ------------------------------------------------------------------------------------


def test_the_remaining_limit_excludes_started_and_waiting_deliveries() -> None:
    assert BacklogHarness().backlog.remaining_limit == float("inf")
    harness = BacklogHarness(limit=5)
    harness.report.started = 2
    assert harness.add(make_delivery("a")).backlog.remaining_limit == 2


def test_deliveries_beyond_the_limit_are_released() -> None:
    harness = BacklogHarness(limit=1).add(make_delivery("a"), make_delivery("b"))
    (item,) = harness.take_settlements()
    assert (item.delivery.receipt, item.settlement) == ("b", Release())
    assert (item.outcome.kind, item.outcome.reason) == (OutcomeKind.RELEASED, "limit")
    assert len(harness.backlog) == 1


# -- obstacles ------------------------------------------------------------------------------------


def test_a_duplicate_of_an_id_in_flight_is_deferred_with_its_attempts() -> None:
    earlier = (Attempt(attempt=0, category=Category.SYSTEM),)
    harness = BacklogHarness(duplicate_delay=2.5).add(make_delivery("a"))
    duplicate = Delivery(Transaction(id="a", attempts=4, history=earlier), "second")
    (item,) = harness.add(duplicate).take_settlements()
    assert item.settlement == Defer(2.5, attempts=4, history=earlier)
    assert (item.delivery, item.outcome.kind, item.outcome.reason) == (duplicate, OutcomeKind.DEFERRED, "identity")
    assert item.outcome.settlement is item.settlement


def test_a_delivery_whose_key_has_too_many_waiting_is_deferred() -> None:
    harness = BacklogHarness().add(*(make_delivery(name, key="hot") for name in "abcd"))
    (item,) = harness.take_settlements()
    assert (item.delivery.receipt, item.outcome.reason) == ("d", "key")
    assert (len(harness.backlog), harness.backlog.ready_count) == (3, 1)


def test_deliveries_without_a_key_do_not_wait_for_each_other() -> None:
    admission = DeliveryAdmission(1)
    items = [make_delivery(name) for name in "abc"]
    assert [admission.admit(each) for each in items] == [None] * 3
    assert (admission.ready_count, admission.head) == (3, items[0])
    admission.forget(admission.pop_next())
    assert (admission.ready_count, list(admission)) == (2, items[1:])


def test_deliveries_that_wait_for_keys_are_counted_until_they_are_next() -> None:
    admission = DeliveryAdmission(2)
    items = [make_delivery(name, key="k") for name in "abc"]
    for each in items:
        admission.admit(each)
    assert (len(admission), list(admission)) == (3, items)
    admission.forget(admission.pop_next())
    assert (len(admission), admission.ready_count) == (2, 1)
    assert admission.admit(make_delivery("d", key="k")) is None, "one place is free again"
    assert admission.admit(make_delivery("e", key="k")) == "key"


def test_after_clearing_there_is_capacity_for_a_key_again() -> None:
    admission = DeliveryAdmission(1)
    for name in "ab":
        admission.admit(make_delivery(name, key="k"))
    assert len(admission.take_all()) == 2
    assert (len(admission), admission.head) == (0, None)
    assert admission.admit(make_delivery("c", key="k")) is None


# -- released -------------------------------------------------------------------------------------


def test_a_lost_claim_is_dropped_and_not_released() -> None:
    harness = BacklogHarness().add(make_delivery("a"), make_delivery("b"), make_delivery("c"))
    harness.delivery_handler.lost_receipts.update({"a", "b"})
    head = harness.backlog.peek()
    assert head is not None
    assert head.receipt == "c"
    dropped = [(item.delivery.receipt, item.settlement, item.outcome.reason) for item in harness.take_settlements()]
    assert dropped == [("a", None, "lost"), ("b", None, "lost")]
    assert harness.delivery_handler.lost_receipts == set()
    assert len(harness.backlog) == 1
    harness.add(make_delivery("a"))
    assert len(harness.backlog) == 2, "its id is in flight no longer"


def test_a_next_delivery_with_a_valid_claim_stays() -> None:
    harness = BacklogHarness().add(make_delivery("a"), make_delivery("b"))
    harness.delivery_handler.lost_receipts.add("b")
    assert harness.backlog.peek() is harness.backlog.pop_next()
    assert harness.take_settlements() == []


def test_all_waiting_deliveries_are_released_with_the_reason() -> None:
    harness = BacklogHarness().add(make_delivery("a"), make_delivery("b"))
    harness.delivery_handler.lost_receipts.add("b")
    harness.backlog.release_all("stop")
    released = [(item.delivery.receipt, item.settlement, item.outcome.reason) for item in harness.take_settlements()]
    assert released == [("a", Release(), "stop"), ("b", None, "stop")]
    assert len(harness.backlog) == 0


def test_lost_claims_are_remembered_only_for_deliveries_in_the_backlog_or_in_handling() -> None:
    harness = BacklogHarness().add(make_delivery("a"))
    harness.delivery_handler.lost_receipts.update({"a", "b", "c"})
    harness.backlog.prune_lost([make_delivery("b")])
    assert harness.delivery_handler.lost_receipts == {"a", "b"}
    harness.backlog.forget(make_delivery("b"))
    assert harness.delivery_handler.lost_receipts == {"a"}


@pytest.mark.spec("DX-08")
def test_a_delivery_without_a_transaction_is_released_without_an_outcome() -> None:
    harness = BacklogHarness()
    harness.backlog.release(make_delivery("a"), "fetch")
    harness.backlog.release(Delivery("junk", "b"), "fetch")  # type: ignore[arg-type]
    released = [(item.delivery.receipt, item.settlement, item.outcome is None) for item in harness.take_settlements()]
    assert released == [("a", Release(), False), ("b", Release(), True)]


# -- handling -------------------------------------------------------------------------------------


def test_a_success_is_acked() -> None:
    harness, one = BacklogHarness(), make_delivery("a")
    assert harness.run_lifecycle(one, Ok("made")) is None
    assert harness.observer.events == [(one.transaction, one)]
    (item,) = harness.take_settlements()
    assert (item.delivery, item.settlement, item.outcome.kind) == (one, Ack(), OutcomeKind.SUCCEEDED)
    assert item.outcome.settlement == Ack()


def test_a_failure_is_a_dead_letter_with_its_record() -> None:
    harness = BacklogHarness()
    harness.run_lifecycle(make_delivery("a", 7), Err(ValueError("no")), Ok(None))
    (item,) = harness.take_settlements()
    assert isinstance(item.settlement, DeadLetter)
    failure = item.settlement.failure
    assert failure is not None
    assert (failure.task_name, failure.occurred_at, failure.trace_id) == ("mail", 1_050.0, "trace of a")
    assert (failure.reason_code, failure.deliveries, failure.attempts) == ("system", 7, 1)


def test_a_requested_dead_letter_gets_a_failure_record_unless_it_has_one() -> None:
    harness = BacklogHarness()
    harness.run_lifecycle(make_delivery("a", 7), Ok(DeadLetter("odd")))
    (item,) = harness.take_settlements()
    record = item.settlement.failure
    assert (item.settlement.reason, record.reason_code, record.deliveries) == ("odd", "odd", 7)
    dead_letter = DeadLetter("odd", record.model_copy(update={"attempts": 9}))
    harness.run_lifecycle(make_delivery("b"), Ok(dead_letter))
    (item,) = harness.take_settlements()
    assert item.settlement is dead_letter


@pytest.mark.parametrize("answer", [Ok("made"), Interrupted()])
def test_a_lifecycle_whose_claim_was_lost_settles_nothing(answer: Any) -> None:
    harness = BacklogHarness()
    harness.delivery_handler.lost_receipts.add("a")
    harness.run_lifecycle(make_delivery("a"), answer)
    (item,) = harness.take_settlements()
    assert (item.settlement, item.outcome.kind, item.outcome.reason) == (None, OutcomeKind.RELEASED, "lost")


def test_a_stopped_call_is_interrupted_but_not_awaited() -> None:
    harness = BacklogHarness()
    effect = harness.run_lifecycle(make_delivery("a"), Interrupted)
    assert isinstance(effect, AwaitExit)
    assert effect.until == 50.0
    harness.run_lifecycle(make_delivery("b"), Interrupted, exit_call)
    harness.run_lifecycle(make_delivery("c"), Interrupted, False)
    harness.run_lifecycle(make_delivery("d"), Interrupted, Interrupted())
    settled = {item.delivery.receipt: item.settlement for item in harness.take_settlements()}
    assert settled == {"b": Release(), "c": None, "d": None}, "one that is still in there keeps its claim"


@pytest.mark.spec("CON-36")
def test_a_stopped_handler_does_not_release_a_transaction_whose_process_call_still_runs() -> None:
    harness, calls = BacklogHarness(), []

    def interrupt(call: Call) -> Interrupted:
        calls.append(call)
        return Interrupted(call)

    # The process call timed out and runs on; the exception handler is stopped, and its call exits immediately.
    first = harness.run_lifecycle(make_delivery("a"), Expired, False, interrupt)
    assert isinstance(first, AwaitExit)
    assert first.call is not calls[0], "each of the two is cancelled"
    second = harness.run_lifecycle(make_delivery("b"), Expired, False, interrupt, False)
    assert second.call is calls[1]
    harness.run_lifecycle(make_delivery("c"), Expired, False, interrupt, False, exit_call)
    harness.run_lifecycle(make_delivery("d"), Expired, False, interrupt, exit_call, exit_call)
    settled = {item.delivery.receipt: item.settlement for item in harness.take_settlements()}
    assert settled == {"c": None, "d": Release()}


def test_an_abandoned_call_is_awaited_before_its_delivery_is_deferred() -> None:
    harness = BacklogHarness()
    on_exit, _ = (harness.run_lifecycle(make_delivery(name), Expired, False, Ok(Defer(1.0))).callback for name in "ab")
    assert harness.take_settlements() == []
    on_exit()
    (item,) = harness.take_settlements()
    assert (item.delivery.receipt, item.settlement) == ("a", Defer(1.0))
    on_exit()
    assert harness.take_settlements() == [], "once"


def test_the_claim_of_a_call_that_never_exits_is_kept() -> None:
    harness = BacklogHarness()
    on_exit = harness.run_lifecycle(make_delivery("a"), Expired, False, Ok(Defer(1.0))).callback
    harness.delivery_handler.keep_postponed_claims()
    on_exit()
    (item,) = harness.take_settlements()
    assert (item.delivery.receipt, item.settlement, item.outcome.settlement) == ("a", None, None)
    harness.delivery_handler.keep_postponed_claims()
    assert harness.take_settlements() == []


def test_a_dead_letter_does_not_wait_for_its_abandoned_call() -> None:
    harness = BacklogHarness()
    assert harness.run_lifecycle(make_delivery("a"), Expired, False, Ok(None)) is None
    (item,) = harness.take_settlements()
    assert isinstance(item.settlement, DeadLetter)
    assert item.settlement.failure.still_running


def test_a_call_that_has_exited_meanwhile_is_not_awaited() -> None:
    harness = BacklogHarness()
    script = harness.delivery_handler.run(make_delivery("a"))
    call = next(script)
    script.send(Expired(call))
    script.send(False)
    call.exited = True
    with pytest.raises(StopIteration):
        script.send(Ok(Defer(1.0)))
    assert harness.take_settlements()[0].settlement == Defer(1.0)
