"""The settler's script, answered by hand: who shares a call, what is told again, and when."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Delivery,
    Later,
    Release,
    Settlement,
    SettleResult,
)
from ergon_framework.engine.attempts import Note
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.effects import NEVER, Call, Gone, Sleep, Wait
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Mailbox
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Failure, HandlerError
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.task.mixins.policies import SettlePolicy
from ergon_framework.task.report import Kind, Outcome, Report
from ergon_framework.task.settle import CLOSE, SETTLED, Item, Settler, decide, failure_of, needs_absence
from ergon_framework.task.watch import Onlooker
from ergon_framework.transaction import Transaction

YES, LOST, NO = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED


class Looking(Onlooker):
    """Writes down what was settled and who ended."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.outcomes: list[Outcome] = []

    def settled(self, results: Any, seconds: float) -> None:
        self.groups.append((list(results), seconds))

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class World:
    """A settler, the clock it looks at, and its script, which waits for something to settle."""

    def __init__(self, *, dice: float = 0.5, on_outcome: Any = None, **policy: Any) -> None:
        self.now = 7.0
        self.report, self.watch = Report(), Looking()
        self.box = Mailbox(Threads(1))
        self.settler = Settler(
            lambda settlings: None,
            SettlePolicy.load({"linger": 0.0, **policy}),
            senses=Senses(clock=lambda: self.now, dice=lambda: dice),
            mailbox=self.box,
            report=self.report,
            watch=self.watch,
            on_outcome=on_outcome,
        )
        self.script = self.settler.run()
        self.effect: Any = next(self.script)
        assert self.idle
        self.over = False

    def on(self, answer: Any, *, at: float | None = None) -> World:
        self.now = self.now if at is None else at
        if isinstance(answer, list):
            answer = self._put(answer)
        try:
            self.effect = self.script.send(answer)
        except StopIteration:
            self.effect, self.over = None, True
        return self

    def _put(self, items: list[Any]) -> list[Any]:
        """Put *items* as a loop does, and take them as the mailbox does for a settler that waits."""
        for each in items:
            if each is CLOSE:
                self.settler.close()
            else:
                self.settler.put(each)
        return self.box.take()

    @property
    def idle(self) -> bool:
        effect = self.effect
        return isinstance(effect, Wait) and (effect.mailbox, effect.count, effect.until) == (self.box, 1, NEVER)

    @property
    def told(self) -> list[str] | None:
        """The receipts that the present call is about."""
        return [each.receipt for each, _ in self.effect.args[0]] if isinstance(self.effect, Call) else None


def item(name: str, settlement: Settlement | None = Ack(), kind: Kind = Kind.SUCCEEDED) -> Item:  # noqa: B008 - frozen
    transaction = Transaction(name)
    return Item(Delivery(transaction, name), settlement, Outcome(transaction, kind))


# -- who shares a call ----------------------------------------------------------------------------


def test_the_first_waits_a_moment_for_others_to_fill_the_group() -> None:
    world = World(group=4, linger=0.002)
    world.on([item("a")])
    assert (world.effect.mailbox, world.effect.count, world.effect.until) == (world.box, 3, 7.002)
    assert world.settler.pending == 1
    world.on([item("b")], at=7.002)
    assert world.told == ["a", "b"]
    assert world.settler.pending == 2
    assert world.effect.until == 37.002
    assert world.effect.step == "settle"
    assert world.on(Ok([YES, YES]), at=8.0).idle
    assert world.settler.pending == 0
    assert world.report.settled == {"settled": 2}
    assert world.watch.groups == [([YES, YES], pytest.approx(0.998))]


def test_a_full_group_waits_for_nobody() -> None:
    world = World(group=2, linger=0.002)
    assert world.on([item("a"), item("b")]).told == ["a", "b"]


def test_without_a_linger_nobody_waits() -> None:
    assert World(group=2).on([item("a")]).told == ["a"]


def test_who_is_to_close_waits_for_nobody() -> None:
    world = World(group=5, linger=0.002).on([item("a"), CLOSE])
    assert world.told == ["a"]
    assert world.on(Ok([YES])).over


def test_who_hears_of_the_close_while_waiting_for_others_settles_and_ends() -> None:
    world = World(group=5, linger=0.002).on([item("a")]).on([CLOSE])
    assert world.told == ["a"]
    assert world.on(Ok([YES])).over


def test_more_than_a_group_is_told_in_several_calls() -> None:
    world = World(group=2).on([item(name) for name in "abcde"])
    for told, pending in (("ab", 5), ("cd", 3), ("e", 1)):
        assert world.told == list(told)
        assert world.settler.pending == pending
        world.on(Ok([YES] * len(told)))
    assert world.idle
    assert world.settler.pending == 0


def test_an_interrupt_while_waiting_for_others_leaves_them_to_the_broker() -> None:
    world = World(group=5, linger=0.002)
    world.on([first := item("a")])
    assert world.on(Stopped()).idle
    assert (first.outcome.kind, first.outcome.reason) == (Kind.RELEASED, "failed")
    assert world.watch.groups == []
    world.on([item("b")])
    assert world.on([]).told == ["b"], "the moment of the next one was not interrupted"


@pytest.mark.spec("DX-05")
def test_everything_that_was_put_is_pending_until_it_is_finished() -> None:
    world = World()
    one = Item(Delivery(Transaction("a"), "a"), later := Later(3.0), outcome := Outcome(Transaction("a")))
    world.settler.put(one)
    world.settler.put(Item(Delivery(Transaction("b"), "b"), Ack(), None))
    assert world.settler.pending == 2
    assert [each.delivery.receipt for each in world.box.take()] == ["a", "b"]
    assert world.settler.pending == 2, "also when a waiting settler has taken them"
    assert outcome.settlement is later
    slot: Any = object()
    assert world.box.await_by(slot, 9), "these are not urgent"
    world.box.leave()
    world.settler.close()
    assert not world.box.await_by(slot, 9), "but this is"


# -- what is told again ---------------------------------------------------------------------------


def test_only_those_that_failed_are_told_again_and_each_keeps_its_own_result() -> None:
    items = [item(name) for name in "abcd"]
    world = World().on([*items, CLOSE])
    world.on(Ok([NO, YES, LOST, NO]))
    assert (type(world.effect), world.effect.until) == (Sleep, 7.1)
    assert world.on(None, at=7.1).told == ["a", "d"]
    world.on(Ok([YES, NO]))
    assert world.effect.until == pytest.approx(7.3)
    assert world.on(None, at=8.0).told == ["d"]
    assert world.on(Ok([LOST])).over
    kinds = [(one.outcome.kind, one.outcome.reason) for one in items]
    assert kinds == [
        (Kind.SUCCEEDED, None),
        (Kind.SUCCEEDED, None),
        (Kind.RELEASED, "lost"),
        (Kind.RELEASED, "lost"),
    ]
    assert world.report.settled == {"settled": 2, "lost": 2}
    assert [results for results, _ in world.watch.groups] == [[NO, YES, LOST, NO], [YES, NO], [LOST]]


def test_a_settlement_has_its_budget_and_no_wait_after_the_last_attempt() -> None:
    world = World().on([one := item("a"), CLOSE])
    for wait in (0.1, 0.2, 0.4, 0.8):
        world.on(Ok([NO]))
        assert world.effect.until == pytest.approx(world.now + wait)
        world.on(None, at=world.now + wait)
    assert world.on(Ok([NO])).over
    assert (one.outcome.kind, one.outcome.reason) == (Kind.RELEASED, "failed")
    assert world.report.settled == {"failed": 1}


def test_waits_between_attempts_vary_where_the_policy_says_so() -> None:
    world = World(dice=1.0, retry={"jitter": 0.5}).on([item("a")]).on(Ok([NO]))
    assert world.effect.until == pytest.approx(7.15)


def test_an_interrupt_between_two_attempts_is_the_end_of_them() -> None:
    world = World().on([item("a"), CLOSE]).on(Ok([NO]))
    assert world.on(Stopped()).over
    assert world.report.settled == {"failed": 1}


@pytest.mark.parametrize("answer", [Err(OSError("down")), Ok([]), Ok([YES]), Ok([YES] * 3), Ok(None)])
def test_an_answer_that_speaks_of_others_speaks_of_nobody(answer: Any) -> None:
    world = World().on([item("a"), item("b")]).on(answer)
    assert isinstance(world.effect, Sleep)
    assert world.watch.groups == [([NO, NO], 0.0)]
    assert world.on(None).told == ["a", "b"]


def test_a_call_that_takes_too_long_is_given_its_grace_and_made_again() -> None:
    world = World().on([item("a")])
    call = world.effect
    assert call.until == 37.0
    world.on(Expired(call), at=37.0)
    assert (type(world.effect), world.effect.body, world.effect.until) == (Gone, call, 42.0)
    world.on(True, at=38.0)
    assert (type(world.effect), world.effect.until) == (Sleep, 38.1)
    assert world.on(None).told == ["a"]


def test_an_interrupted_call_is_asked_to_leave_without_a_grace_and_not_made_again() -> None:
    world = World().on([item("a"), CLOSE])
    call = world.effect
    world.on(Stopped(call), at=9.0)
    assert (type(world.effect), world.effect.body, world.effect.until) == (Gone, call, 9.0)
    assert world.on(False).over


def test_a_call_that_was_interrupted_before_it_was_made_has_no_body_to_leave() -> None:
    assert World().on([item("a"), CLOSE]).on(Stopped()).over


def test_a_settlement_without_a_time_limit_has_none() -> None:
    assert World(retry={"timeout": None}).on([item("a")]).effect.until == NEVER


# -- what is noted --------------------------------------------------------------------------------


def test_a_kept_claim_is_told_to_nobody_and_changes_no_result() -> None:
    items = [item("a", None, Kind.RELEASED), item("b"), item("c", None, Kind.RELEASED), item("d")]
    world = World().on([*items, CLOSE])
    assert world.told == ["b", "d"]
    assert world.on(Ok([LOST, YES])).over
    assert [(one.outcome.kind, one.outcome.reason) for one in items] == [
        (Kind.RELEASED, None),
        (Kind.RELEASED, "lost"),
        (Kind.RELEASED, None),
        (Kind.SUCCEEDED, None),
    ]
    assert world.report.settled == {"kept": 2, "lost": 1, "settled": 1}


def test_nobody_is_called_when_all_claims_are_kept() -> None:
    world, kept, lost = World(), item("a", None), item("b", None)
    lost.outcome.reason = "lost"
    world.settler.claims.update({"a": kept.delivery, "b": lost.delivery})
    assert world.on([kept, lost]).idle
    assert world.report.settled == {"kept": 2}
    assert list(world.settler.claims) == ["a"], "one that is kept because its body runs is still renewed"


def test_a_settled_claim_is_held_no_longer_and_its_outcome_is_told() -> None:
    heard: list[Outcome] = []
    world = World(on_outcome=heard.append)
    one, refused = item("a"), Item(Delivery(Transaction("b"), "b"), DeadLetter("expired"), None)
    world.settler.claims.update({"a": one.delivery, "b": refused.delivery, "c": one.delivery})
    world.on([one, refused]).on(Ok([YES, YES]))
    assert list(world.settler.claims) == ["c"]
    assert heard == world.watch.outcomes == [one.outcome]
    assert world.report.counts[Kind.SUCCEEDED] == world.report.finished == 1


def test_a_loop_that_waits_for_room_is_told_once() -> None:
    world, loop = World(), Mailbox(Threads(1))
    world.settler.blocked = loop
    world.on([item("a")])
    assert len(loop) == 0, "there is no room yet"
    world.on(Ok([YES]))
    slot: Any = object()
    assert not loop.await_by(slot, 9), "it is urgent"
    assert loop.take() == [SETTLED]
    world.on([item("b")]).on(Ok([YES]))
    assert len(loop) == 0


# -- what becomes of a delivery -------------------------------------------------------------------


def outcome(kind: Kind, error: Any = None, settlement: Any = None) -> Outcome:
    made = Outcome(Transaction("1"), kind)
    made.error, made.settlement = error, settlement
    return made


def decided(kind: Kind, error: Any = None, settlement: Any = None, **policy: Any) -> Settlement:
    return decide(outcome(kind, error, settlement), SettlePolicy.load(policy))


def test_the_outcome_decides_where_nobody_asked_for_anything() -> None:
    assert decided(Kind.SUCCEEDED) == Ack()
    assert decided(Kind.RELEASED) == Release()
    assert decided(Kind.RELEASED, BusinessError("no")) == Release()
    assert decided(Kind.FAILED) == Release(), "nothing is known to be wrong"


@pytest.mark.parametrize("category", Category)
def test_a_failure_is_a_dead_letter_or_done_as_the_policy_says_for_its_category(category: Category) -> None:
    error, word = TransactionException("no", category), category.value.lower()
    for kind in (Kind.FAILED, Kind.HANDLER_FAILED):
        assert decided(kind, error) == DeadLetter(word)
        assert decided(kind, error, **{f"on_{word}": "ack"}) == Ack()
    others = {f"on_{other.value.lower()}": "ack" for other in Category if other is not category}
    assert decided(Kind.FAILED, error, **others) == DeadLetter(word)


def test_a_dead_letter_says_the_errors_own_code() -> None:
    assert decided(Kind.FAILED, BusinessError("no", code="sold_out")) == DeadLetter("sold_out")


@pytest.mark.parametrize("kind", [Kind.SUCCEEDED, Kind.FAILED, Kind.RELEASED])
@pytest.mark.parametrize("asked", [Ack(), Later(3.0), DeadLetter("odd")])
def test_what_a_handler_asked_for_comes_first(kind: Kind, asked: Settlement) -> None:
    assert decided(kind, BusinessError("no"), asked) is asked


def test_only_what_may_bring_it_back_needs_that_its_body_has_left() -> None:
    every = (Ack(), DeadLetter("odd"), Later(1.0), Release())
    assert [needs_absence(each) for each in every] == [False, False, True, True]


# -- the failure record ---------------------------------------------------------------------------


def test_a_record_says_everything_that_is_known() -> None:
    made = Outcome(Transaction("1", source="orders", tenant="acme", correlation="c-1", attempts=1), Kind.HANDLER_FAILED)
    error = TransactionException("it broke", Category.TIMEOUT, final=True, code="slow")
    error.__cause__ = KeyError("k")
    made.error, made.attempts, made.processed = error, 4, True
    made.handler_error = TransactionException("no ticket", Category.SYSTEM, code="tickets")
    made.body = Call("process", abs, ())
    made.notes = [Note("process", 3, error, at=9.0), Note("exception", 0, BusinessError("x"), at=10.0)]
    past = Attempt(attempt=3, category=Category.TIMEOUT, code="slow", error="it broke", at=9.0)
    delivery = Delivery(made.transaction, "r", deliveries=6)
    assert failure_of(made, delivery, "too_slow", task="mail", at=12.0, trace_id="t-1") == Failure(
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
        history=(past,),
        handler_error=HandlerError(
            error_type="TransactionException", error_message="no ticket", category=Category.SYSTEM, code="tickets"
        ),
    )


@pytest.mark.spec("DX-03")
def test_the_step_of_a_record_is_that_of_its_error() -> None:
    made = Outcome(Transaction("1"), Kind.FAILED)
    made.error = BusinessError("no")
    assert recorded(made).step is None
    made.notes = [Note("process", 0, made.error, at=1.0), Note("exception", 0, made.error, at=2.0)]
    assert recorded(made).step == "process"


def recorded(made: Outcome) -> Failure:
    return failure_of(made, Delivery(made.transaction, "r"), "expired", task="mail", at=12.0)


def test_a_record_without_an_error_says_who_decided() -> None:
    made = Outcome(Transaction("1"))
    record = recorded(made)
    assert (record.category, record.reason_code, record.error_type) == (Category.SYSTEM, "expired", "DeadLetter")
    assert (record.error_message, record.final, record.step, record.trace_id) == ("expired", False, None, None)
    assert (record.correlation_id, record.still_running, record.deliveries) == ("1", False, 1)
    made.processed = True
    assert recorded(made).category is Category.BUSINESS


def test_a_record_of_an_error_without_a_cause_names_the_error_itself() -> None:
    made = Outcome(Transaction("1"), Kind.FAILED)
    made.error = BusinessError("no")
    record = recorded(made)
    assert (record.error_type, record.error_message) == ("BusinessError", "no")
    assert (record.reason_code, record.final) == ("expired", False)


def test_what_an_error_knows_of_its_effect_is_told_and_what_we_know_better_is_not() -> None:
    class Refused(BusinessError):
        pass

    made = Outcome(Transaction("1", tenant="acme"), Kind.FAILED)
    refused = Refused("no")
    refused.particulars = {
        "provider_name": "rank",
        "campaign_id": None,
        "idempotency_key": "1/rank.fetch",
        "tenant_id": "somebody else",
    }
    made.error = refused
    record = recorded(made)
    assert (record.provider_name, record.campaign_id, record.tenant_id) == ("rank", None, "acme")
    assert record.idempotency_key == "1/rank.fetch"
    refused.particulars = {"idempotency_key": None, "provider_name": "rank"}
    assert recorded(made).idempotency_key == "1", "what it does not know it does not take away"
