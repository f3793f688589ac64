"""The script of the settler; the test sends every result and checks which settlements share a call or are retried."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Defer,
    Delivery,
    Release,
    Settlement,
    SettleResult,
)
from ergon_framework.engine.effects import NEVER, AwaitExit, Call, Err, Expired, Interrupted, Ok, Sleep, Wait
from ergon_framework.engine.retry import FailedAttempt
from ergon_framework.engine.scheduler import Mailbox
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Failure, HandlerError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from ergon_framework.worker.policies import SettlePolicy
from ergon_framework.worker.report import Outcome, OutcomeKind, Report
from ergon_framework.worker.settle import (
    CLOSE_EVENT,
    SETTLED_EVENT,
    PendingSettlement,
    Settler,
    failure_record,
    requires_exited_call,
    settlement_for,
)

RESULT_SETTLED, RESULT_LOST, RESULT_FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED


class SettleObserver(LoopObserver):
    """Writes down what was settled and who ended."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.outcomes: list[Outcome] = []

    def on_settled(self, results: Any, seconds: float) -> None:
        self.groups.append((list(results), seconds))

    def on_transaction_end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class SettlerHarness:
    """A settler, the clock it looks at, and its script, which waits for something to settle."""

    def __init__(self, *, random_value: float = 0.5, on_outcome: Any = None, **policy: Any) -> None:
        self.now = 7.0
        self.report, self.observer = Report(), SettleObserver()
        self.mailbox = Mailbox(ThreadDriver(1))
        self.settler = Settler(
            lambda settlings: None,
            SettlePolicy.load({"linger": 0.0, **policy}),
            clock=Clock(monotonic=lambda: self.now, random=lambda: random_value),
            mailbox=self.mailbox,
            report=self.report,
            observer=self.observer,
            on_outcome=on_outcome,
        )
        self.script = self.settler.run()
        self.effect: Any = next(self.script)
        assert self.is_idle
        self.is_over = False

    def answer(self, answer: Any, *, at: float | None = None) -> SettlerHarness:
        self.now = self.now if at is None else at
        if isinstance(answer, list):
            answer = self._put(answer)
        try:
            self.effect = self.script.send(answer)
        except StopIteration:
            self.effect, self.is_over = None, True
        return self

    def _put(self, items: list[Any]) -> list[Any]:
        """Put *items* as a loop does, and take them as the mailbox does for a settler that waits."""
        for each in items:
            if each is CLOSE_EVENT:
                self.settler.close()
            else:
                self.settler.enqueue(each)
        return self.mailbox.take()

    @property
    def is_idle(self) -> bool:
        effect = self.effect
        return isinstance(effect, Wait) and (effect.mailbox, effect.count, effect.until) == (self.mailbox, 1, NEVER)

    @property
    def sent_receipts(self) -> list[str] | None:
        """The receipts that the present call is about."""
        return [each.receipt for each, _ in self.effect.args[0]] if isinstance(self.effect, Call) else None


def make_item(
    name: str,
    settlement: Settlement | None = Ack(),  # noqa: B008 - frozen
    kind: OutcomeKind = OutcomeKind.SUCCEEDED,
) -> PendingSettlement:
    transaction = Transaction(id=name)
    return PendingSettlement(Delivery(transaction, name), settlement, Outcome(transaction, kind))


# -- who shares a call ----------------------------------------------------------------------------


def test_the_first_settlement_waits_briefly_for_a_full_batch() -> None:
    harness = SettlerHarness(batch_size=4, linger=0.002)
    harness.answer([make_item("a")])
    assert (harness.effect.mailbox, harness.effect.count, harness.effect.until) == (harness.mailbox, 3, 7.002)
    assert harness.settler.pending == 1
    harness.answer([make_item("b")], at=7.002)
    assert harness.sent_receipts == ["a", "b"]
    assert harness.settler.pending == 2
    assert harness.effect.until == 37.002
    assert harness.effect.step == "settle"
    assert harness.answer(Ok([RESULT_SETTLED, RESULT_SETTLED]), at=8.0).is_idle
    assert harness.settler.pending == 0
    assert harness.report.settled == {"settled": 2}
    assert harness.observer.groups == [([RESULT_SETTLED, RESULT_SETTLED], pytest.approx(0.998))]


def test_a_full_batch_is_sent_immediately() -> None:
    harness = SettlerHarness(batch_size=2, linger=0.002)
    assert harness.answer([make_item("a"), make_item("b")]).sent_receipts == ["a", "b"]


def test_without_a_linger_a_settlement_is_sent_immediately() -> None:
    assert SettlerHarness(batch_size=2).answer([make_item("a")]).sent_receipts == ["a"]


def test_a_closing_settler_sends_immediately() -> None:
    harness = SettlerHarness(batch_size=5, linger=0.002).answer([make_item("a"), CLOSE_EVENT])
    assert harness.sent_receipts == ["a"]
    assert harness.answer(Ok([RESULT_SETTLED])).is_over


def test_a_close_during_the_linger_sends_the_batch_and_ends() -> None:
    harness = SettlerHarness(batch_size=5, linger=0.002).answer([make_item("a")]).answer([CLOSE_EVENT])
    assert harness.sent_receipts == ["a"]
    assert harness.answer(Ok([RESULT_SETTLED])).is_over


def test_more_than_a_batch_is_sent_in_several_calls() -> None:
    harness = SettlerHarness(batch_size=2).answer([make_item(name) for name in "abcde"])
    for receipts, pending in (("ab", 5), ("cd", 3), ("e", 1)):
        assert harness.sent_receipts == list(receipts)
        assert harness.settler.pending == pending
        harness.answer(Ok([RESULT_SETTLED] * len(receipts)))
    assert harness.is_idle
    assert harness.settler.pending == 0


def test_an_interrupt_during_the_linger_leaves_settlements_to_the_broker() -> None:
    harness = SettlerHarness(batch_size=5, linger=0.002)
    harness.answer([first := make_item("a")])
    assert harness.answer(Interrupted()).is_idle
    assert (first.outcome.kind, first.outcome.reason) == (OutcomeKind.RELEASED, "failed")
    assert harness.observer.groups == []
    harness.answer([make_item("b")])
    assert harness.answer([]).sent_receipts == ["b"], "the moment of the next one was not interrupted"


@pytest.mark.spec("DX-05")
def test_every_enqueued_settlement_is_pending_until_it_is_finished() -> None:
    harness = SettlerHarness()
    one = PendingSettlement(
        Delivery(Transaction(id="a"), "a"), later := Defer(3.0), outcome := Outcome(Transaction(id="a"))
    )
    harness.settler.enqueue(one)
    harness.settler.enqueue(PendingSettlement(Delivery(Transaction(id="b"), "b"), Ack(), None))
    assert harness.settler.pending == 2
    assert [each.delivery.receipt for each in harness.mailbox.take()] == ["a", "b"]
    assert harness.settler.pending == 2, "also when a waiting settler has taken them"
    assert outcome.settlement is later
    slot: Any = object()
    assert harness.mailbox.register_waiter(slot, 9), "these are not urgent"
    harness.mailbox.clear_waiter()
    harness.settler.close()
    assert not harness.mailbox.register_waiter(slot, 9), "but this is"


# -- which are retried ----------------------------------------------------------------------------


def test_only_failed_settlements_are_retried_and_each_keeps_its_own_result() -> None:
    items = [make_item(name) for name in "abcd"]
    harness = SettlerHarness().answer([*items, CLOSE_EVENT])
    harness.answer(Ok([RESULT_FAILED, RESULT_SETTLED, RESULT_LOST, RESULT_FAILED]))
    assert (type(harness.effect), harness.effect.until) == (Sleep, 7.1)
    assert harness.answer(None, at=7.1).sent_receipts == ["a", "d"]
    harness.answer(Ok([RESULT_SETTLED, RESULT_FAILED]))
    assert harness.effect.until == pytest.approx(7.3)
    assert harness.answer(None, at=8.0).sent_receipts == ["d"]
    assert harness.answer(Ok([RESULT_LOST])).is_over
    kinds = [(one.outcome.kind, one.outcome.reason) for one in items]
    assert kinds == [
        (OutcomeKind.SUCCEEDED, None),
        (OutcomeKind.SUCCEEDED, None),
        (OutcomeKind.RELEASED, "lost"),
        (OutcomeKind.RELEASED, "lost"),
    ]
    assert harness.report.settled == {"settled": 2, "lost": 2}
    assert [results for results, _ in harness.observer.groups] == [
        [RESULT_FAILED, RESULT_SETTLED, RESULT_LOST, RESULT_FAILED],
        [RESULT_SETTLED, RESULT_FAILED],
        [RESULT_LOST],
    ]


def test_a_settlement_has_its_retry_budget_and_no_wait_after_the_last_attempt() -> None:
    harness = SettlerHarness().answer([one := make_item("a"), CLOSE_EVENT])
    for wait in (0.1, 0.2, 0.4, 0.8):
        harness.answer(Ok([RESULT_FAILED]))
        assert harness.effect.until == pytest.approx(harness.now + wait)
        harness.answer(None, at=harness.now + wait)
    assert harness.answer(Ok([RESULT_FAILED])).is_over
    assert (one.outcome.kind, one.outcome.reason) == (OutcomeKind.RELEASED, "failed")
    assert harness.report.settled == {"failed": 1}


def test_waits_between_attempts_have_the_jitter_of_the_policy() -> None:
    harness = (
        SettlerHarness(random_value=1.0, retry={"jitter": 0.5}).answer([make_item("a")]).answer(Ok([RESULT_FAILED]))
    )
    assert harness.effect.until == pytest.approx(7.15)


def test_an_interrupt_between_two_attempts_ends_the_retries() -> None:
    harness = SettlerHarness().answer([make_item("a"), CLOSE_EVENT]).answer(Ok([RESULT_FAILED]))
    assert harness.answer(Interrupted()).is_over
    assert harness.report.settled == {"failed": 1}


@pytest.mark.parametrize(
    "answer", [Err(OSError("down")), Ok([]), Ok([RESULT_SETTLED]), Ok([RESULT_SETTLED] * 3), Ok(None)]
)
def test_an_answer_of_the_wrong_length_is_a_failure_of_all(answer: Any) -> None:
    harness = SettlerHarness().answer([make_item("a"), make_item("b")]).answer(answer)
    assert isinstance(harness.effect, Sleep)
    assert harness.observer.groups == [([RESULT_FAILED, RESULT_FAILED], 0.0)]
    assert harness.answer(None).sent_receipts == ["a", "b"]


def test_a_timed_out_call_gets_its_grace_period_and_is_retried() -> None:
    harness = SettlerHarness().answer([make_item("a")])
    call = harness.effect
    assert call.until == 37.0
    harness.answer(Expired(call), at=37.0)
    assert (type(harness.effect), harness.effect.call, harness.effect.until) == (AwaitExit, call, 42.0)
    harness.answer(True, at=38.0)
    assert (type(harness.effect), harness.effect.until) == (Sleep, 38.1)
    assert harness.answer(None).sent_receipts == ["a"]


def test_an_interrupted_call_gets_no_grace_period_and_is_not_retried() -> None:
    harness = SettlerHarness().answer([make_item("a"), CLOSE_EVENT])
    call = harness.effect
    harness.answer(Interrupted(call), at=9.0)
    assert (type(harness.effect), harness.effect.call, harness.effect.until) == (AwaitExit, call, 9.0)
    assert harness.answer(False).is_over


def test_an_interrupt_before_the_call_leaves_no_call_to_wait_for() -> None:
    assert SettlerHarness().answer([make_item("a"), CLOSE_EVENT]).answer(Interrupted()).is_over


def test_a_settlement_without_a_timeout_has_no_deadline() -> None:
    assert SettlerHarness(retry={"timeout": None}).answer([make_item("a")]).effect.until == NEVER


# -- what is noted --------------------------------------------------------------------------------


def test_a_kept_claim_is_not_sent_and_changes_no_result() -> None:
    items = [
        make_item("a", None, OutcomeKind.RELEASED),
        make_item("b"),
        make_item("c", None, OutcomeKind.RELEASED),
        make_item("d"),
    ]
    harness = SettlerHarness().answer([*items, CLOSE_EVENT])
    assert harness.sent_receipts == ["b", "d"]
    assert harness.answer(Ok([RESULT_LOST, RESULT_SETTLED])).is_over
    assert [(one.outcome.kind, one.outcome.reason) for one in items] == [
        (OutcomeKind.RELEASED, None),
        (OutcomeKind.RELEASED, "lost"),
        (OutcomeKind.RELEASED, None),
        (OutcomeKind.SUCCEEDED, None),
    ]
    assert harness.report.settled == {"kept": 2, "lost": 1, "settled": 1}


def test_there_is_no_call_when_all_claims_are_kept() -> None:
    harness, kept, lost = SettlerHarness(), make_item("a", None), make_item("b", None)
    lost.outcome.reason = "lost"
    harness.settler.claims.update({"a": kept.delivery, "b": lost.delivery})
    assert harness.answer([kept, lost]).is_idle
    assert harness.report.settled == {"kept": 2}
    assert list(harness.settler.claims) == ["a"], "one that is kept because its body runs is still renewed"


def test_a_settled_claim_is_removed_and_its_outcome_is_reported() -> None:
    reported: list[Outcome] = []
    harness = SettlerHarness(on_outcome=reported.append)
    one, rejected = make_item("a"), PendingSettlement(Delivery(Transaction(id="b"), "b"), DeadLetter("expired"), None)
    harness.settler.claims.update({"a": one.delivery, "b": rejected.delivery, "c": one.delivery})
    harness.answer([one, rejected]).answer(Ok([RESULT_SETTLED, RESULT_SETTLED]))
    assert list(harness.settler.claims) == ["c"]
    assert reported == harness.observer.outcomes == [one.outcome]
    assert harness.report.counts[OutcomeKind.SUCCEEDED] == harness.report.finished == 1


def test_a_loop_that_waits_for_capacity_is_notified_once() -> None:
    harness, loop_mailbox = SettlerHarness(), Mailbox(ThreadDriver(1))
    harness.settler.notify_when_drained = loop_mailbox
    harness.answer([make_item("a")])
    assert len(loop_mailbox) == 0, "there is no room yet"
    harness.answer(Ok([RESULT_SETTLED]))
    slot: Any = object()
    assert not loop_mailbox.register_waiter(slot, 9), "it is urgent"
    assert loop_mailbox.take() == [SETTLED_EVENT]
    harness.answer([make_item("b")]).answer(Ok([RESULT_SETTLED]))
    assert len(loop_mailbox) == 0


# -- what becomes of a delivery -------------------------------------------------------------------


def make_outcome(kind: OutcomeKind, error: Any = None, settlement: Any = None) -> Outcome:
    result = Outcome(Transaction(id="1"), kind)
    result.error, result.settlement = error, settlement
    return result


def decide_settlement(kind: OutcomeKind, error: Any = None, settlement: Any = None, **policy: Any) -> Settlement:
    return settlement_for(make_outcome(kind, error, settlement), SettlePolicy.load(policy))


def test_the_outcome_decides_if_no_settlement_was_requested() -> None:
    assert decide_settlement(OutcomeKind.SUCCEEDED) == Ack()
    assert decide_settlement(OutcomeKind.RELEASED) == Release()
    assert decide_settlement(OutcomeKind.RELEASED, BusinessError("no")) == Release()
    assert decide_settlement(OutcomeKind.FAILED) == Release(), "nothing is known to be wrong"


@pytest.mark.parametrize("category", Category)
def test_the_policy_of_its_category_acks_or_dead_letters_a_failure(category: Category) -> None:
    error, code = TransactionException("no", category), category.value.lower()
    for kind in (OutcomeKind.FAILED, OutcomeKind.EXCEPTION_HANDLER_FAILED):
        assert decide_settlement(kind, error) == DeadLetter(code)
        assert decide_settlement(kind, error, **{f"on_{code}": "ack"}) == Ack()
    others = {f"on_{other.value.lower()}": "ack" for other in Category if other is not category}
    assert decide_settlement(OutcomeKind.FAILED, error, **others) == DeadLetter(code)


def test_a_dead_letter_has_the_code_of_its_error() -> None:
    assert decide_settlement(OutcomeKind.FAILED, BusinessError("no", code="sold_out")) == DeadLetter("sold_out")


@pytest.mark.parametrize("kind", [OutcomeKind.SUCCEEDED, OutcomeKind.FAILED, OutcomeKind.RELEASED])
@pytest.mark.parametrize("requested", [Ack(), Defer(3.0), DeadLetter("odd")])
def test_a_settlement_that_a_handler_requested_takes_precedence(kind: OutcomeKind, requested: Settlement) -> None:
    assert decide_settlement(kind, BusinessError("no"), requested) is requested


def test_only_settlements_that_redeliver_require_an_exited_call() -> None:
    settlements = (Ack(), DeadLetter("odd"), Defer(1.0), Release())
    assert [requires_exited_call(each) for each in settlements] == [False, False, True, True]


# -- the failure record ---------------------------------------------------------------------------


def test_a_failure_record_contains_everything_known() -> None:
    outcome = Outcome(
        Transaction(id="1", source="orders", tenant="acme", correlation="c-1", attempts=1),
        OutcomeKind.EXCEPTION_HANDLER_FAILED,
    )
    error = TransactionException("it broke", Category.TIMEOUT, final=True, code="slow")
    error.__cause__ = KeyError("k")
    outcome.error, outcome.attempts, outcome.processed = error, 4, True
    outcome.handler_error = TransactionException("no ticket", Category.SYSTEM, code="tickets")
    outcome.abandoned_calls = (Call("process", abs, ()),)
    outcome.failed_attempts = [
        FailedAttempt("process", 3, error, occurred_at=9.0),
        FailedAttempt("exception", 0, BusinessError("x"), occurred_at=10.0),
    ]
    attempt = Attempt(attempt=3, category=Category.TIMEOUT, code="slow", error="it broke", at=9.0)
    delivery = Delivery(outcome.transaction, "r", deliveries=6)
    assert failure_record(outcome, delivery, "too_slow", task="mail", occurred_at=12.0, trace_id="t-1") == Failure(
        task_name="mail",
        transaction_id="1",
        source="orders",
        tenant_id="acme",
        correlation_id="c-1",
        idempotency_key="1",
        reason_code="too_slow",
        error_type="KeyError",
        error_message="it broke",
        attempts=4,
        occurred_at=12.0,
        category=Category.TIMEOUT,
        step="process",
        final=True,
        still_running=True,
        succeeded_steps=("process",),
        deliveries=6,
        trace_id="t-1",
        history=(attempt,),
        handler_error=HandlerError(
            error_type="TransactionException", error_message="no ticket", category=Category.SYSTEM, code="tickets"
        ),
    )


@pytest.mark.spec("DX-03")
def test_the_step_of_a_record_is_that_of_its_error() -> None:
    outcome = Outcome(Transaction(id="1"), OutcomeKind.FAILED)
    outcome.error = BusinessError("no")
    assert make_record(outcome).step is None
    outcome.failed_attempts = [
        FailedAttempt("process", 0, outcome.error, occurred_at=1.0),
        FailedAttempt("exception", 0, outcome.error, occurred_at=2.0),
    ]
    assert make_record(outcome).step == "process"


def make_record(outcome: Outcome) -> Failure:
    return failure_record(outcome, Delivery(outcome.transaction, "r"), "expired", task="mail", occurred_at=12.0)


def test_a_record_without_an_error_names_the_decision() -> None:
    outcome = Outcome(Transaction(id="1"))
    record = make_record(outcome)
    assert (record.category, record.reason_code, record.error_type) == (Category.SYSTEM, "expired", "DeadLetter")
    assert (record.error_message, record.final, record.step, record.trace_id) == ("expired", False, None, None)
    assert (record.correlation_id, record.still_running, record.deliveries) == ("1", False, 1)
    outcome.processed = True
    assert make_record(outcome).category is Category.BUSINESS


def test_a_record_of_an_error_without_a_cause_names_the_error_itself() -> None:
    outcome = Outcome(Transaction(id="1"), OutcomeKind.FAILED)
    outcome.error = BusinessError("no")
    record = make_record(outcome)
    assert (record.error_type, record.error_message) == ("BusinessError", "no")
    assert (record.reason_code, record.final) == ("expired", False)


def test_particulars_of_an_error_are_recorded_unless_the_engine_knows_better() -> None:
    class RejectedError(BusinessError):
        pass

    outcome = Outcome(Transaction(id="1", tenant="acme"), OutcomeKind.FAILED)
    error = RejectedError("no")
    error.details = {
        "provider_name": "rank",
        "campaign_id": None,
        "idempotency_key": "1/rank.fetch",
        "tenant_id": "another tenant",
    }
    outcome.error = error
    record = make_record(outcome)
    assert (record.provider_name, record.campaign_id, record.tenant_id) == ("rank", None, "acme")
    assert record.idempotency_key == "1/rank.fetch"
    error.details = {"idempotency_key": None, "provider_name": "rank"}
    assert make_record(outcome).idempotency_key == "1", "what it does not know it does not take away"
