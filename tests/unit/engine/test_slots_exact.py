"""The core that all drivers share, driven by hand: who takes which ticket, and what is left afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.engine.effects import (
    NEVER,
    Afterwards,
    Call,
    Gone,
    Interrupt,
    Script,
    Sleep,
    Spawn,
    Wait,
    afterwards,
    call,
    gone,
    interrupt,
    sleep,
    spawn,
    wait,
)
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Done, Freed, Mailbox, Slot, Slots
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction

OK = Ok("value")


class Desk(Slots):
    """A driver that only writes down what it is asked to do."""

    def __init__(self) -> None:
        self.now = 10.0
        super().__init__(Senses(clock=lambda: self.now))
        self.resumed: list[tuple[Slot, Any]] = []
        self.poked: list[float] = []
        self.finished: list[tuple[Any, BaseException | None]] = []
        self.meant: list[float] = []

    def stop(self) -> None:
        self.halt()

    def signal(self, mailbox: Mailbox, item: Any) -> None:
        mailbox.put(item, urgent=True)

    def resume(self, slot: Slot, answer: Any) -> None:
        self.resumed.append((slot, answer))
        self.meant.append(self.watcher.wakes_at)

    def _poke(self, until: float) -> None:
        self.poked.append(until)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        self.finished.append((value, error))

    def take(self) -> list[tuple[Slot, Any]]:
        """What was resumed since this was asked last."""
        resumed, self.resumed = self.resumed, []
        return resumed

    def begin(self, *effects: Any, told: Mailbox | None = None) -> Tape:
        """A script that asks for *effects* one after the other, at the first that waits."""
        tape = Tape(self, effects, told)
        assert self.take() == [(tape.slot, None)]
        tape.go(None)
        return tape


class Tape:
    """A script in progress, and all that it was told."""

    def __init__(self, desk: Desk, effects: tuple[Any, ...], told: Mailbox | None) -> None:
        self.desk = desk
        self.effects = effects
        self.heard: list[Any] = []
        self.call: Call | None = None
        self.slot = desk.start(self._script(), told=told)

    def _script(self) -> Script[str]:
        for effect in self.effects:
            self.heard.append((yield effect))
        return "end"

    def go(self, answer: Any) -> Call | None:
        self.call = self.desk.advance(self.slot, answer)
        return self.call

    def resumed(self) -> Any:
        """The one answer with which it is to go on."""
        ((slot, answer),) = self.desk.take()
        assert slot is self.slot
        return answer

    @property
    def parked(self) -> tuple[Any, float]:
        return self.slot.ticket, self.slot.due


def made(until: float = NEVER, **given: Any) -> Call:
    return Call("x", abs, (1,), until, Scope(Transaction("1"), "x", 0), **given)


@pytest.fixture
def desk() -> Desk:
    return Desk()


# -- beginning ----------------------------------------------------------------------------------


def test_a_driver_begins_with_nothing(desk: Desk) -> None:
    assert (desk.live, desk.fenced, desk.came_late(), desk.closed) == (set(), 0, 0, False)
    assert (desk.watcher.wakes_at, desk.senses.clock(), desk.clock()) == (NEVER, 10.0, 10.0)
    assert len(desk.mailbox()) == 0


def test_a_started_script_is_live_and_goes_on_with_nothing(desk: Desk) -> None:
    script: Script[None] = iter(())  # type: ignore[assignment]
    slot = desk.start(script)
    assert desk.take() == [(slot, None)]
    assert desk.live == {slot}
    assert (slot.script, slot.told, slot.counted) == (script, None, False)
    assert (slot.ticket, slot.due, slot.bodies, slot.ended, slot.interrupted) == (None, NEVER, 0, False, 0)


def test_spawning_answers_with_a_slot_that_knows_whom_to_tell(desk: Desk) -> None:
    box = desk.mailbox()
    child: Script[None] = iter(())  # type: ignore[assignment]
    root = desk.begin(Spawn(child, box, counted=True), Sleep(NEVER))
    (spawned,) = root.heard
    assert (spawned.script, spawned.told, spawned.counted) == (child, box, True)
    assert desk.live == {root.slot, spawned}
    assert desk.take() == [(spawned, None)]


def test_a_halt_interrupts_the_first_script_and_no_other(desk: Desk) -> None:
    root = desk.begin(Sleep(NEVER))
    desk.begin(Sleep(NEVER), told=desk.mailbox())
    desk.halt()
    assert isinstance(root.resumed(), Stopped)
    assert desk.start(iter(())).interrupted == 0, "it was meant for that one"  # type: ignore[arg-type]


def test_a_halt_before_the_beginning_waits_for_the_first_script(desk: Desk) -> None:
    desk.halt()
    other = desk.begin(Sleep(NEVER), told=desk.mailbox())
    assert (other.heard, desk.take()) == ([], [])
    root = desk.begin(Sleep(NEVER), Sleep(NEVER))
    assert [type(answer) for answer in root.heard] == [Stopped]
    assert root.slot.interrupted == 0


@pytest.mark.parametrize("effects", [(made(), made(), made()), (Sleep(NEVER), Sleep(NEVER), Sleep(NEVER))])
def test_as_many_effects_are_stopped_as_there_were_interrupts(desk: Desk, effects: tuple[Any, ...]) -> None:
    desk.halt()
    desk.halt()
    root = Tape(desk, effects, None)
    assert root.slot.interrupted == 2
    root.go(None)
    assert [type(answer) for answer in root.heard] == [Stopped, Stopped]
    assert (root.slot.ticket, root.slot.interrupted) == (effects[2], 0)


def test_interrupts_are_counted_while_a_script_decides(desk: Desk) -> None:
    tape = Tape(desk, (Sleep(NEVER), made(), Sleep(NEVER)), None)
    desk.interrupt(tape.slot)
    desk.interrupt(tape.slot)
    assert tape.slot.interrupted == 2
    tape.go(None)
    assert [type(answer) for answer in tape.heard] == [Stopped, Stopped]


# -- calls --------------------------------------------------------------------------------------


def test_a_call_is_handed_out_and_its_slot_holds_the_ticket(desk: Desk) -> None:
    effect = made(15.0)
    root = desk.begin(effect)
    assert root.call is effect
    assert root.parked == (effect, 15.0)
    assert (desk.poked, desk.resumed) == ([15.0], [])


@pytest.mark.parametrize("wakes_at, poked", [(16.0, [15.0]), (15.0, []), (14.0, [])])
@pytest.mark.parametrize("effect", [made(15.0), Sleep(15.0)])
def test_only_what_is_due_before_the_watcher_wakes_pokes_it(
    desk: Desk, effect: Any, wakes_at: float, poked: list[float]
) -> None:
    desk.watcher.wakes_at = wakes_at
    desk.begin(effect)
    assert desk.poked == poked


@pytest.mark.parametrize("effect", [made(), Sleep(NEVER)])
def test_what_is_never_due_pokes_nobody(desk: Desk, effect: Any) -> None:
    desk.begin(effect)
    assert desk.poked == []


def test_a_body_that_comes_back_in_time_is_the_answer(desk: Desk) -> None:
    late: list[Any] = []
    effect = made(15.0, late=late.append)
    root = desk.begin(effect)
    desk.now = 14.0
    assert desk.returned(root.slot, effect, OK) is OK
    assert root.parked == (None, NEVER)
    assert (root.slot.bodies, desk.fenced, effect.left, late) == (0, 0, False, [])
    assert effect.scope is not None
    assert not effect.scope.cancelled


def test_a_body_that_comes_back_at_its_deadline_has_expired(desk: Desk) -> None:
    late: list[Any] = []
    effect = made(15.0, late=late.append)
    root = desk.begin(effect)
    desk.now = 15.0
    answer = desk.returned(root.slot, effect, OK)
    assert isinstance(answer, Expired)
    assert answer.body is effect
    assert root.parked == (None, NEVER)
    assert (root.slot.bodies, desk.fenced, desk.came_late(), effect.left, late) == (0, 1, 1, True, ["value"])
    assert effect.scope is not None
    assert effect.scope.cancelled
    assert desk.live == {root.slot}
    assert desk.take() == []


def test_a_pending_interrupt_answers_the_next_call_before_it_is_made(desk: Desk) -> None:
    first, second = made(), made()
    tape = Tape(desk, (first, second), None)
    desk.interrupt(tape.slot)
    assert tape.slot.interrupted == 1
    assert tape.go(None) is second
    (stopped,) = tape.heard
    assert isinstance(stopped, Stopped)
    assert (stopped.body, tape.slot.interrupted, tape.slot.bodies) == (None, 0, 0)


def test_what_a_fenced_body_returns_is_told_and_what_it_raises_is_not(desk: Desk) -> None:
    late: list[Any] = []
    for answer in (OK, Err(ValueError("no"))):
        effect = made(late=late.append)
        root = desk.begin(effect, Sleep(NEVER))
        desk.interrupt(root.slot)
        assert desk.returned(root.slot, effect, answer) is None
        assert effect.left
        desk.take()
    assert (late, desk.fenced) == (["value"], 2)


def test_a_fenced_value_that_nobody_wants_is_dropped(desk: Desk) -> None:
    effect = made()
    root = desk.begin(effect, Sleep(NEVER))
    desk.interrupt(root.slot)
    assert desk.returned(root.slot, effect, OK) is None


def test_a_fenced_body_takes_nothing_from_the_effect_that_is_waited_for_now(desk: Desk) -> None:
    box = desk.mailbox()
    effect, pause = made(), Sleep(20.0)
    tape = desk.begin(effect, pause, told=box)
    desk.interrupt(tape.slot)
    tape.go(tape.resumed())
    assert desk.returned(tape.slot, effect, OK) is None
    assert tape.parked == (pause, 20.0)
    assert (desk.take(), len(box), desk.live) == ([], 0, {tape.slot})


# -- time ---------------------------------------------------------------------------------------


def test_whoever_is_due_is_answered_and_nobody_else(desk: Desk) -> None:
    box, effect = desk.mailbox(), made(15.0)
    box.put("here")
    tapes = [
        desk.begin(effect),
        desk.begin(Sleep(15.0)),
        desk.begin(Gone(made(), 15.0)),
        desk.begin(Wait(box, 2, 15.0)),
    ]
    later = [desk.begin(made(15.5)), desk.begin(Sleep(15.5))]
    desk.now = 14.5
    desk.expire()
    assert desk.take() == []
    desk.now = 15.0
    desk.expire()
    answers = dict(desk.take())
    called, slept, went, waited = (answers.pop(tape.slot) for tape in tapes)
    assert not answers
    assert isinstance(called, Expired)
    assert (called.body, slept, went, waited) == (effect, None, False, ["here"])
    assert [tape.parked for tape in tapes] == [(None, NEVER)] * 4
    assert [tape.slot.bodies for tape in tapes] == [1, 0, 0, 0]
    assert [tape.slot.due for tape in later] == [15.5, 15.5]
    assert effect.scope is not None
    assert effect.scope.cancelled
    box.put("late")
    box.put("later")
    assert desk.take() == [], "nobody waits any more"


@pytest.mark.parametrize("until, parked", [(9.0, False), (10.0, False), (10.5, True)])
def test_a_wait_whose_time_is_over_is_answered_at_once(desk: Desk, until: float, parked: bool) -> None:
    box = desk.mailbox()
    for effect, answer in ((Sleep(until), None), (Gone(made(), until), False), (Wait(box, 1, until), [])):
        tape = desk.begin(effect, Sleep(NEVER))
        assert tape.heard == ([] if parked else [answer])
        assert (tape.slot.ticket is effect) is parked
        assert (tape.slot.due == until) is parked
    box.put("x")
    assert len(desk.take()) == parked, "who was answered waits no more"


def test_the_watcher_answers_what_is_due_and_looks_again_at_the_nearest(desk: Desk) -> None:
    first = desk.begin(Sleep(12.0))
    desk.begin(Sleep(30.0))
    desk.begin(Sleep(20.0))
    desk.watcher.wakes_at = 12.0
    desk.now = 12.0
    desk.meant.clear()
    assert desk.watcher.look(desk) == 20.0
    assert desk.watcher.wakes_at == 20.0
    assert first.resumed() is None
    assert desk.meant == [NEVER], "while it looks, whatever begins pokes it"


def test_a_watcher_with_nobody_to_look_after_sleeps_for_ever(desk: Desk) -> None:
    desk.watcher.wakes_at = 12.0
    assert desk.watcher.look(desk) == NEVER
    assert desk.watcher.wakes_at == NEVER


# -- leaving ------------------------------------------------------------------------------------


def abandoned(desk: Desk, *, told: Mailbox | None, until: float = NEVER) -> tuple[Tape, Call]:
    """A script that waits for the body of its interrupted call to leave."""
    effect = made()
    tape = desk.begin(effect, Gone(effect, until), told=told)
    desk.interrupt(tape.slot)
    tape.go(tape.resumed())
    return tape, effect


def test_a_body_that_leaves_answers_whoever_waits_for_it(desk: Desk) -> None:
    box = desk.mailbox()
    tape, effect = abandoned(desk, told=box, until=30.0)
    assert tape.slot.due == 30.0
    assert desk.returned(tape.slot, effect, OK) is None
    assert tape.resumed() is True
    assert tape.parked == (None, NEVER)
    assert (tape.slot.bodies, len(box), desk.live) == (0, 0, {tape.slot})


def test_another_body_that_leaves_answers_nobody(desk: Desk) -> None:
    first, second = made(), made()
    tape = desk.begin(first, second, Gone(second, NEVER))
    for _ in range(2):
        desk.interrupt(tape.slot)
        tape.go(tape.resumed())
    assert tape.slot.bodies == 2
    desk.returned(tape.slot, first, OK)
    assert (desk.take(), tape.slot.bodies) == ([], 1)
    desk.returned(tape.slot, second, OK)
    assert (tape.resumed(), tape.slot.bodies) == (True, 0)


def test_a_body_is_asked_to_leave_once(desk: Desk) -> None:
    asked: list[str] = []
    effect = made()
    effect.cancel = lambda: asked.append("please")
    tape = desk.begin(Gone(effect, 10.0), Gone(effect, 10.0), Gone(made(), 10.0))
    assert (tape.heard, asked, effect.cancel) == ([False, False, False], ["please"], None)


def test_a_body_that_has_left_is_not_asked(desk: Desk) -> None:
    asked: list[str] = []
    effect = made()
    effect.cancel = lambda: asked.append("please")
    effect.left = True
    tape = desk.begin(Gone(effect, 30.0), Gone(effect, 10.0))
    assert (tape.heard, asked) == ([True, True], [])


def test_a_body_is_asked_to_leave_also_by_a_script_that_is_interrupted(desk: Desk) -> None:
    asked: list[str] = []
    effect = made()
    effect.cancel = lambda: asked.append("please")
    tape = Tape(desk, (Gone(effect, NEVER), Sleep(NEVER)), None)
    desk.interrupt(tape.slot)
    tape.go(None)
    assert [type(answer) for answer in tape.heard] == [Stopped]
    assert (asked, tape.slot.interrupted) == (["please"], 0)


# -- ending -------------------------------------------------------------------------------------


def test_the_end_of_the_first_script_is_the_end(desk: Desk) -> None:
    root = desk.begin()
    assert (root.call, root.slot.ended, desk.live, desk.finished) == (None, True, set(), [("end", None)])


def test_the_end_of_a_spawned_script_is_told(desk: Desk) -> None:
    box = desk.mailbox()
    tape = desk.begin(told=box)
    (done,) = box.take()
    assert isinstance(done, Done)
    assert (done.slot, done.value, done.freed) == (tape.slot, "end", True)
    assert (tape.slot.ended, desk.live, desk.finished) == (True, set(), [])


def test_a_script_that_leaves_a_body_behind_is_freed_when_that_leaves(desk: Desk) -> None:
    box = desk.mailbox()
    first, second = made(), made()
    tape = desk.begin(first, second, told=box)
    for _ in range(2):
        desk.interrupt(tape.slot)
        tape.go(tape.resumed())
    (done,) = box.take()
    assert (done.freed, tape.slot.ended, desk.live) == (False, True, {tape.slot})
    desk.returned(tape.slot, first, OK)
    assert (len(box), desk.live) == (0, {tape.slot})
    desk.returned(tape.slot, second, OK)
    (freed,) = box.take()
    assert isinstance(freed, Freed)
    assert (freed.slot, desk.live) == (tape.slot, set())
    assert (desk.take(), desk.fenced) == ([], 2)


def test_the_first_scripts_last_body_frees_nobody(desk: Desk) -> None:
    effect = made()
    root = desk.begin(effect)
    desk.interrupt(root.slot)
    root.go(root.resumed())
    assert desk.live == {root.slot}
    assert desk.returned(root.slot, effect, OK) is None
    assert (desk.live, desk.finished, desk.take()) == (set(), [("end", None)], [])


@pytest.mark.parametrize("error", [LookupError("defect"), KeyboardInterrupt()])
def test_a_script_that_breaks_ends_everything_with_its_error(desk: Desk, error: BaseException) -> None:
    def broken() -> Script[None]:
        yield Sleep(10.0)
        raise error

    box = desk.mailbox()
    slot = desk.start(broken(), told=box)
    assert desk.advance(slot, None) is None
    assert (desk.finished, slot.ended, desk.live, len(box)) == ([(None, error)], True, set(), 0)


def test_an_interrupt_of_a_script_that_has_ended_is_nothing(desk: Desk) -> None:
    tape = desk.begin(told=desk.mailbox())
    desk.interrupt(tape.slot)
    assert (desk.take(), tape.slot.interrupted) == ([], 0)


# -- interrupting -------------------------------------------------------------------------------


def test_an_interrupted_call_leaves_its_body_behind(desk: Desk) -> None:
    effect = made(15.0)
    root = desk.begin(effect)
    desk.interrupt(root.slot)
    stopped = root.resumed()
    assert isinstance(stopped, Stopped)
    assert stopped.body is effect
    assert root.parked == (None, NEVER)
    assert (root.slot.bodies, root.slot.interrupted, effect.left) == (1, 0, False)
    assert effect.scope is not None
    assert effect.scope.cancelled


def test_an_interrupted_call_needs_no_scope(desk: Desk) -> None:
    effect = Call("x", abs, (1,))
    root = desk.begin(effect)
    desk.interrupt(root.slot)
    assert root.resumed().body is effect


@pytest.mark.parametrize("effect", [Sleep(15.0), Gone(made(), 15.0)])
def test_an_interrupted_wait_ends_without_a_body(desk: Desk, effect: Any) -> None:
    root = desk.begin(effect)
    desk.interrupt(root.slot)
    stopped = root.resumed()
    assert isinstance(stopped, Stopped)
    assert stopped.body is None
    assert root.parked == (None, NEVER)
    assert root.slot.bodies == 0


def test_a_script_interrupts_another_and_is_answered_nothing(desk: Desk) -> None:
    other = desk.begin(Sleep(NEVER), told=desk.mailbox())
    root = desk.begin(Interrupt(other.slot), Sleep(NEVER))
    assert root.heard == [None]
    assert isinstance(other.resumed(), Stopped)


# -- closing ------------------------------------------------------------------------------------


def test_closing_fences_every_body_and_takes_every_ticket(desk: Desk) -> None:
    effect = made(15.0)
    calling, sleeping = desk.begin(effect), desk.begin(Sleep(15.0))
    running = desk.start(iter(()))  # type: ignore[arg-type]
    desk.take()
    desk.close()
    assert desk.closed is True
    assert (calling.parked, sleeping.parked) == ((None, NEVER), (None, NEVER))
    assert (calling.slot.bodies, sleeping.slot.bodies, running.bodies) == (1, 0, 0)
    assert effect.scope is not None
    assert effect.scope.cancelled
    assert desk.returned(calling.slot, effect, OK) is None
    desk.now = 99.0
    desk.expire()
    assert (desk.take(), desk.fenced) == ([], 1)


# -- mailboxes ----------------------------------------------------------------------------------


def test_a_mailbox_answers_at_its_count_and_not_before(desk: Desk) -> None:
    box = desk.mailbox()
    effect = Wait(box, 2, 30.0)
    root = desk.begin(effect, Wait(box))
    box.put("a")
    assert (desk.take(), len(box), root.parked) == ([], 1, (effect, 30.0))
    box.put("b")
    assert root.resumed() == ["a", "b"]
    assert (len(box), root.parked) == (0, (None, NEVER))
    box.put("c")
    assert (desk.take(), len(box)) == ([], 1), "it is not waiting now"
    root.go(["a", "b"])
    assert root.heard == [["a", "b"], ["c"]], "one is enough where no number is given"


def test_a_mailbox_that_holds_enough_answers_at_once_with_all(desk: Desk) -> None:
    box = desk.mailbox()
    for item in "abc":
        box.put(item)
    root = desk.begin(Wait(box, 2), Wait(box))
    assert root.heard == [["a", "b", "c"]]
    box.put("d")
    assert root.resumed() == ["d"]


def test_something_urgent_ends_the_wait_whatever_the_count(desk: Desk) -> None:
    box = desk.mailbox()
    root = desk.begin(Wait(box, 9), Wait(box, 9))
    box.put("a")
    box.put("b", urgent=True)
    assert root.resumed() == ["a", "b"]
    root.go(["a", "b"])
    box.put("c")
    assert desk.take() == [], "the urgency is over"


def test_something_urgent_that_came_before_the_wait_is_not_forgotten(desk: Desk) -> None:
    box = desk.mailbox()
    box.put("a", urgent=True)
    box.put("b")
    root = desk.begin(Wait(box, 9), Wait(box, 9))
    assert root.heard == [["a", "b"]]
    assert root.slot.ticket is root.effects[1]


def test_an_interrupted_wait_leaves_what_was_there(desk: Desk) -> None:
    box = desk.mailbox()
    root = desk.begin(Wait(box, 2, 30.0))
    box.put("a")
    desk.interrupt(root.slot)
    stopped = root.resumed()
    assert isinstance(stopped, Stopped)
    assert (stopped.body, root.parked) == (None, (None, NEVER))
    box.put("b")
    assert (desk.take(), len(box)) == ([], 2)


def test_a_pending_interrupt_answers_the_next_wait_and_only_that(desk: Desk) -> None:
    box = desk.mailbox()
    box.put("a")
    tape = Tape(desk, (Wait(box), Wait(box)), None)
    desk.interrupt(tape.slot)
    tape.go(None)
    stopped, items = tape.heard
    assert (type(stopped), items) == (Stopped, ["a"])


def test_a_mailbox_says_whether_there_is_anything_to_wait_for(desk: Desk) -> None:
    box, slot = desk.mailbox(), Slot(iter(()), told=None, counted=False)  # type: ignore[arg-type]
    assert box.await_by(slot, 1) is True
    box.leave()
    box.put("a")
    assert box.await_by(slot, 2) is True
    assert box.await_by(slot, 1) is False


# -- afterwards ---------------------------------------------------------------------------------


def test_what_comes_afterwards_is_done_at_once_where_no_body_is_left(desk: Desk) -> None:
    done: list[str] = []
    box = desk.mailbox()
    tape = desk.begin(Afterwards(lambda: done.append(f"then, before {len(box)} are told")), told=box)
    assert (tape.heard, done, len(box)) == ([None], ["then, before 0 are told"], 1)


def test_what_comes_afterwards_waits_for_the_last_body_and_nobody_else_has_to_hear_of_it(desk: Desk) -> None:
    done: list[str] = []
    box, first, second = desk.mailbox(), made(11.0), made(11.0)
    tape = desk.begin(first, second, Afterwards(lambda: done.append(f"before {len(box)}")), told=box)
    for body in (first, second):
        desk.now += 2.0
        body.until = tape.slot.due = desk.now
        desk.expire()
        tape.go(tape.resumed())
    assert (done, tape.slot.ended) == ([], True)
    assert desk.returned(tape.slot, first, OK) is None
    assert done == []
    assert desk.returned(tape.slot, second, OK) is None
    assert done == ["before 1"]
    assert [type(each) for each in box.take()] == [Done, Freed]


def test_the_first_script_may_have_something_done_afterwards_too(desk: Desk) -> None:
    done: list[str] = []
    body = made(11.0)
    tape = desk.begin(body, Afterwards(lambda: done.append("then")))
    desk.now = 11.0
    desk.expire()
    tape.go(tape.resumed())
    assert desk.returned(tape.slot, body, OK) is None
    assert done == ["then"]


# -- words --------------------------------------------------------------------------------------


def test_the_typed_helpers_ask_for_their_effect_and_return_its_answer(desk: Desk) -> None:
    box, body, slot = desk.mailbox(), made(), Slot(iter(()), told=None, counted=False)  # type: ignore[arg-type]
    child: Script[None] = iter(())  # type: ignore[assignment]
    scripts: list[tuple[Script[Any], type, dict[str, Any]]] = [
        (call(body), Call, {"step": "x", "fn": abs, "args": (1,), "until": NEVER, "left": False, "cancel": None}),
        (sleep(3.0), Sleep, {"until": 3.0}),
        (gone(body, 3.0), Gone, {"body": body, "until": 3.0}),
        (wait(box), Wait, {"mailbox": box, "count": 1, "until": NEVER}),
        (wait(box, count=2, until=3.0), Wait, {"mailbox": box, "count": 2, "until": 3.0}),
        (spawn(child, told=box, counted=True), Spawn, {"script": child, "told": box, "counted": True}),
    ]
    for script, kind, fields in scripts:
        effect = next(script)
        assert type(effect) is kind
        assert {name: getattr(effect, name) for name in fields} == fields
        answer = object()
        with pytest.raises(StopIteration) as stop:
            script.send(answer)
        assert stop.value.value is answer
    meant = next(afterwards(desk.stop))
    assert isinstance(meant, Afterwards)
    assert meant.then == desk.stop
    asked = next(interrupt(slot))
    assert isinstance(asked, Interrupt)
    assert asked.slot is slot
