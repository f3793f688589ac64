"""The scheduler that all drivers share, without a driver: what resolves a pending effect, and what is left."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.engine.effects import (
    NEVER,
    AwaitExit,
    Call,
    Err,
    Expired,
    Interrupt,
    Interrupted,
    Ok,
    OnExit,
    Script,
    Sleep,
    Spawn,
    Wait,
    await_exit,
    call,
    interrupt,
    on_exit,
    sleep,
    spawn,
    wait,
)
from ergon_framework.engine.scheduler import Mailbox, Scheduler, ScriptEnded, Slot, SlotFreed
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction

OK_RESULT = Ok("value")


class RecordingScheduler(Scheduler):
    """A driver that only writes down what it is asked to do."""

    def __init__(self) -> None:
        self.now = 10.0
        super().__init__(Clock(monotonic=lambda: self.now))
        self.resumed: list[tuple[Slot, Any]] = []
        self.timer_requests: list[float] = []
        self.finished: list[tuple[Any, BaseException | None]] = []
        self.wake_times: list[float] = []

    def stop(self) -> None:
        self.interrupt_root()

    def put_from_any_thread(self, mailbox: Mailbox, item: Any) -> None:
        mailbox.put(item, urgent=True)

    def resume(self, slot: Slot, answer: Any) -> None:
        self.resumed.append((slot, answer))
        self.wake_times.append(self.deadline_timer.wakes_at)

    def _reschedule_timer(self, until: float) -> None:
        self.timer_requests.append(until)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        self.finished.append((value, error))

    def pop_resumed(self) -> list[tuple[Slot, Any]]:
        """What was resumed since this was asked last."""
        resumed, self.resumed = self.resumed, []
        return resumed

    def start_script(self, *effects: Any, notify: Mailbox | None = None) -> ScriptProbe:
        """A script that asks for *effects* one after the other, at the first that waits."""
        probe = ScriptProbe(self, effects, notify)
        assert self.pop_resumed() == [(probe.slot, None)]
        probe.step(None)
        return probe


class ScriptProbe:
    """A script in progress, and all that it was told."""

    def __init__(self, scheduler: RecordingScheduler, effects: tuple[Any, ...], notify: Mailbox | None) -> None:
        self.scheduler = scheduler
        self.effects = effects
        self.answers: list[Any] = []
        self.next_call: Call | None = None
        self.slot = scheduler.start(self._script(), notify=notify)

    def _script(self) -> Script[str]:
        for effect in self.effects:
            self.answers.append((yield effect))
        return "end"

    def step(self, answer: Any) -> Call | None:
        self.next_call = self.scheduler.step(self.slot, answer)
        return self.next_call

    def pop_answer(self) -> Any:
        """The one answer with which it is to go on."""
        ((slot, answer),) = self.scheduler.pop_resumed()
        assert slot is self.slot
        return answer

    @property
    def waiting_on(self) -> tuple[Any, float]:
        return self.slot.pending_effect, self.slot.due


def make_call(until: float = NEVER, **options: Any) -> Call:
    return Call("x", abs, (1,), until, Scope(Transaction(id="1"), "x", 0), **options)


@pytest.fixture
def scheduler() -> RecordingScheduler:
    return RecordingScheduler()


# -- beginning ----------------------------------------------------------------------------------


def test_a_new_scheduler_is_empty(scheduler: RecordingScheduler) -> None:
    assert (scheduler.live_slots, scheduler.late_results, scheduler.late_result_count(), scheduler.closed) == (
        set(),
        0,
        0,
        False,
    )
    assert (scheduler.deadline_timer.wakes_at, scheduler.time_source.monotonic(), scheduler.monotonic()) == (
        NEVER,
        10.0,
        10.0,
    )
    assert len(scheduler.create_mailbox()) == 0


def test_a_started_script_is_live_and_resumed_with_none(scheduler: RecordingScheduler) -> None:
    script: Script[None] = iter(())  # type: ignore[assignment]
    slot = scheduler.start(script)
    assert scheduler.pop_resumed() == [(slot, None)]
    assert scheduler.live_slots == {slot}
    assert (slot.script, slot.notify, slot.counted) == (script, None, False)
    assert (slot.pending_effect, slot.due, slot.abandoned_calls, slot.ended, slot.pending_interrupts) == (
        None,
        NEVER,
        0,
        False,
        0,
    )


def test_spawn_returns_a_slot_with_the_mailbox_to_notify(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    child: Script[None] = iter(())  # type: ignore[assignment]
    root = scheduler.start_script(Spawn(child, box, counted=True), Sleep(NEVER))
    (spawned,) = root.answers
    assert (spawned.script, spawned.notify, spawned.counted) == (child, box, True)
    assert scheduler.live_slots == {root.slot, spawned}
    assert scheduler.pop_resumed() == [(spawned, None)]


def test_a_halt_interrupts_the_first_script_and_no_other(scheduler: RecordingScheduler) -> None:
    root = scheduler.start_script(Sleep(NEVER))
    scheduler.start_script(Sleep(NEVER), notify=scheduler.create_mailbox())
    scheduler.interrupt_root()
    assert isinstance(root.pop_answer(), Interrupted)
    assert scheduler.start(iter(())).pending_interrupts == 0, "it was meant for that one"  # type: ignore[arg-type]


def test_a_halt_before_the_start_interrupts_the_first_script(scheduler: RecordingScheduler) -> None:
    scheduler.interrupt_root()
    other = scheduler.start_script(Sleep(NEVER), notify=scheduler.create_mailbox())
    assert (other.answers, scheduler.pop_resumed()) == ([], [])
    root = scheduler.start_script(Sleep(NEVER), Sleep(NEVER))
    assert [type(answer) for answer in root.answers] == [Interrupted]
    assert root.slot.pending_interrupts == 0


@pytest.mark.parametrize(
    "effects", [(make_call(), make_call(), make_call()), (Sleep(NEVER), Sleep(NEVER), Sleep(NEVER))]
)
def test_as_many_effects_are_stopped_as_there_were_interrupts(
    scheduler: RecordingScheduler, effects: tuple[Any, ...]
) -> None:
    scheduler.interrupt_root()
    scheduler.interrupt_root()
    root = ScriptProbe(scheduler, effects, None)
    assert root.slot.pending_interrupts == 2
    root.step(None)
    assert [type(answer) for answer in root.answers] == [Interrupted, Interrupted]
    assert (root.slot.pending_effect, root.slot.pending_interrupts) == (effects[2], 0)


def test_interrupts_are_counted_while_a_script_runs(scheduler: RecordingScheduler) -> None:
    probe = ScriptProbe(scheduler, (Sleep(NEVER), make_call(), Sleep(NEVER)), None)
    scheduler.interrupt(probe.slot)
    scheduler.interrupt(probe.slot)
    assert probe.slot.pending_interrupts == 2
    probe.step(None)
    assert [type(answer) for answer in probe.answers] == [Interrupted, Interrupted]


# -- calls --------------------------------------------------------------------------------------


def test_a_call_is_returned_and_is_the_pending_effect_of_its_slot(scheduler: RecordingScheduler) -> None:
    effect = make_call(15.0)
    root = scheduler.start_script(effect)
    assert root.next_call is effect
    assert root.waiting_on == (effect, 15.0)
    assert (scheduler.timer_requests, scheduler.resumed) == ([15.0], [])


@pytest.mark.parametrize("wakes_at, timer_requests", [(16.0, [15.0]), (15.0, []), (14.0, [])])
@pytest.mark.parametrize("effect", [make_call(15.0), Sleep(15.0)])
def test_only_an_effect_due_before_the_next_timer_reschedules_it(
    scheduler: RecordingScheduler, effect: Any, wakes_at: float, timer_requests: list[float]
) -> None:
    scheduler.deadline_timer.wakes_at = wakes_at
    scheduler.start_script(effect)
    assert scheduler.timer_requests == timer_requests


@pytest.mark.parametrize("effect", [make_call(), Sleep(NEVER)])
def test_an_effect_without_a_deadline_does_not_reschedule_the_timer(scheduler: RecordingScheduler, effect: Any) -> None:
    scheduler.start_script(effect)
    assert scheduler.timer_requests == []


def test_a_value_before_the_deadline_is_the_result(scheduler: RecordingScheduler) -> None:
    late: list[Any] = []
    effect = make_call(15.0, on_late_result=late.append)
    root = scheduler.start_script(effect)
    scheduler.now = 14.0
    assert scheduler.accept_result(root.slot, effect, OK_RESULT) is OK_RESULT
    assert root.waiting_on == (None, NEVER)
    assert (root.slot.abandoned_calls, scheduler.late_results, effect.exited, late) == (0, 0, False, [])
    assert effect.scope is not None
    assert not effect.scope.cancelled


def test_a_value_at_the_deadline_is_late_and_the_call_expires(scheduler: RecordingScheduler) -> None:
    late: list[Any] = []
    effect = make_call(15.0, on_late_result=late.append)
    root = scheduler.start_script(effect)
    scheduler.now = 15.0
    answer = scheduler.accept_result(root.slot, effect, OK_RESULT)
    assert isinstance(answer, Expired)
    assert answer.call is effect
    assert root.waiting_on == (None, NEVER)
    assert (root.slot.abandoned_calls, scheduler.late_results, scheduler.late_result_count(), effect.exited, late) == (
        0,
        1,
        1,
        True,
        ["value"],
    )
    assert effect.scope is not None
    assert effect.scope.cancelled
    assert scheduler.live_slots == {root.slot}
    assert scheduler.pop_resumed() == []


def test_a_pending_interrupt_ends_the_next_call_before_it_is_made(scheduler: RecordingScheduler) -> None:
    first, second = make_call(), make_call()
    probe = ScriptProbe(scheduler, (first, second), None)
    scheduler.interrupt(probe.slot)
    assert probe.slot.pending_interrupts == 1
    assert probe.step(None) is second
    (stopped,) = probe.answers
    assert isinstance(stopped, Interrupted)
    assert (stopped.call, probe.slot.pending_interrupts, probe.slot.abandoned_calls) == (None, 0, 0)


def test_the_late_value_of_a_call_goes_to_its_callback_and_a_late_error_does_not(scheduler: RecordingScheduler) -> None:
    late: list[Any] = []
    for answer in (OK_RESULT, Err(ValueError("no"))):
        effect = make_call(on_late_result=late.append)
        root = scheduler.start_script(effect, Sleep(NEVER))
        scheduler.interrupt(root.slot)
        assert scheduler.accept_result(root.slot, effect, answer) is None
        assert effect.exited
        scheduler.pop_resumed()
    assert (late, scheduler.late_results) == (["value"], 2)


def test_a_late_value_without_a_callback_is_dropped(scheduler: RecordingScheduler) -> None:
    effect = make_call()
    root = scheduler.start_script(effect, Sleep(NEVER))
    scheduler.interrupt(root.slot)
    assert scheduler.accept_result(root.slot, effect, OK_RESULT) is None


def test_a_late_call_result_does_not_resolve_the_next_effect(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    effect, pause = make_call(), Sleep(20.0)
    probe = scheduler.start_script(effect, pause, notify=box)
    scheduler.interrupt(probe.slot)
    probe.step(probe.pop_answer())
    assert scheduler.accept_result(probe.slot, effect, OK_RESULT) is None
    assert probe.waiting_on == (pause, 20.0)
    assert (scheduler.pop_resumed(), len(box), scheduler.live_slots) == ([], 0, {probe.slot})


# -- time ---------------------------------------------------------------------------------------


def test_only_due_effects_expire(scheduler: RecordingScheduler) -> None:
    box, effect = scheduler.create_mailbox(), make_call(15.0)
    box.put("here")
    probes = [
        scheduler.start_script(effect),
        scheduler.start_script(Sleep(15.0)),
        scheduler.start_script(AwaitExit(make_call(), 15.0)),
        scheduler.start_script(Wait(box, 2, 15.0)),
    ]
    later = [scheduler.start_script(make_call(15.5)), scheduler.start_script(Sleep(15.5))]
    scheduler.now = 14.5
    scheduler.expire_due()
    assert scheduler.pop_resumed() == []
    scheduler.now = 15.0
    scheduler.expire_due()
    answers = dict(scheduler.pop_resumed())
    called, slept, went, waited = (answers.pop(probe.slot) for probe in probes)
    assert not answers
    assert isinstance(called, Expired)
    assert (called.call, slept, went, waited) == (effect, None, False, ["here"])
    assert [probe.waiting_on for probe in probes] == [(None, NEVER)] * 4
    assert [probe.slot.abandoned_calls for probe in probes] == [1, 0, 0, 0]
    assert [probe.slot.due for probe in later] == [15.5, 15.5]
    assert effect.scope is not None
    assert effect.scope.cancelled
    box.put("late")
    box.put("later")
    assert scheduler.pop_resumed() == [], "no script waits any more"


@pytest.mark.parametrize("until, is_waiting", [(9.0, False), (10.0, False), (10.5, True)])
def test_a_wait_with_a_past_deadline_ends_immediately(
    scheduler: RecordingScheduler, until: float, is_waiting: bool
) -> None:
    box = scheduler.create_mailbox()
    for effect, answer in ((Sleep(until), None), (AwaitExit(make_call(), until), False), (Wait(box, 1, until), [])):
        probe = scheduler.start_script(effect, Sleep(NEVER))
        assert probe.answers == ([] if is_waiting else [answer])
        assert (probe.slot.pending_effect is effect) is is_waiting
        assert (probe.slot.due == until) is is_waiting
    box.put("x")
    assert len(scheduler.pop_resumed()) == is_waiting, "who was answered waits no more"


def test_the_timer_expires_due_effects_and_fires_again_at_the_next_deadline(scheduler: RecordingScheduler) -> None:
    first = scheduler.start_script(Sleep(12.0))
    scheduler.start_script(Sleep(30.0))
    scheduler.start_script(Sleep(20.0))
    scheduler.deadline_timer.wakes_at = 12.0
    scheduler.now = 12.0
    scheduler.wake_times.clear()
    assert scheduler.deadline_timer.fire_due(scheduler) == 20.0
    assert scheduler.deadline_timer.wakes_at == 20.0
    assert first.pop_answer() is None
    assert scheduler.wake_times == [NEVER], "while it looks, whatever begins pokes it"


def test_a_timer_without_deadlines_never_fires(scheduler: RecordingScheduler) -> None:
    scheduler.deadline_timer.wakes_at = 12.0
    assert scheduler.deadline_timer.fire_due(scheduler) == NEVER
    assert scheduler.deadline_timer.wakes_at == NEVER


# -- leaving ------------------------------------------------------------------------------------


def start_abandoned(
    scheduler: RecordingScheduler, *, notify: Mailbox | None, until: float = NEVER
) -> tuple[ScriptProbe, Call]:
    """A script that waits for its interrupted call to exit."""
    effect = make_call()
    probe = scheduler.start_script(effect, AwaitExit(effect, until), notify=notify)
    scheduler.interrupt(probe.slot)
    probe.step(probe.pop_answer())
    return probe, effect


def test_the_exit_of_a_call_ends_the_wait_for_it(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    probe, effect = start_abandoned(scheduler, notify=box, until=30.0)
    assert probe.slot.due == 30.0
    assert scheduler.accept_result(probe.slot, effect, OK_RESULT) is None
    assert probe.pop_answer() is True
    assert probe.waiting_on == (None, NEVER)
    assert (probe.slot.abandoned_calls, len(box), scheduler.live_slots) == (0, 0, {probe.slot})


def test_the_exit_of_another_call_does_not_end_the_wait(scheduler: RecordingScheduler) -> None:
    first, second = make_call(), make_call()
    probe = scheduler.start_script(first, second, AwaitExit(second, NEVER))
    for _ in range(2):
        scheduler.interrupt(probe.slot)
        probe.step(probe.pop_answer())
    assert probe.slot.abandoned_calls == 2
    scheduler.accept_result(probe.slot, first, OK_RESULT)
    assert (scheduler.pop_resumed(), probe.slot.abandoned_calls) == ([], 1)
    scheduler.accept_result(probe.slot, second, OK_RESULT)
    assert (probe.pop_answer(), probe.slot.abandoned_calls) == (True, 0)


def test_a_call_is_cancelled_once(scheduler: RecordingScheduler) -> None:
    cancel_requests: list[str] = []
    effect = make_call()
    effect.cancel = lambda: cancel_requests.append("please")
    probe = scheduler.start_script(AwaitExit(effect, 10.0), AwaitExit(effect, 10.0), AwaitExit(make_call(), 10.0))
    assert (probe.answers, cancel_requests, effect.cancel) == ([False, False, False], ["please"], None)


def test_an_exited_call_is_not_cancelled(scheduler: RecordingScheduler) -> None:
    cancel_requests: list[str] = []
    effect = make_call()
    effect.cancel = lambda: cancel_requests.append("please")
    effect.exited = True
    probe = scheduler.start_script(AwaitExit(effect, 30.0), AwaitExit(effect, 10.0))
    assert (probe.answers, cancel_requests) == ([True, True], [])


def test_an_interrupted_script_also_cancels_its_call(scheduler: RecordingScheduler) -> None:
    cancel_requests: list[str] = []
    effect = make_call()
    effect.cancel = lambda: cancel_requests.append("please")
    probe = ScriptProbe(scheduler, (AwaitExit(effect, NEVER), Sleep(NEVER)), None)
    scheduler.interrupt(probe.slot)
    probe.step(None)
    assert [type(answer) for answer in probe.answers] == [Interrupted]
    assert (cancel_requests, probe.slot.pending_interrupts) == (["please"], 0)


# -- ending -------------------------------------------------------------------------------------


def test_the_end_of_the_first_script_is_the_end_of_the_run(scheduler: RecordingScheduler) -> None:
    root = scheduler.start_script()
    assert (root.next_call, root.slot.ended, scheduler.live_slots, scheduler.finished) == (
        None,
        True,
        set(),
        [("end", None)],
    )


def test_the_end_of_a_spawned_script_notifies_its_mailbox(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    probe = scheduler.start_script(notify=box)
    (done,) = box.take()
    assert isinstance(done, ScriptEnded)
    assert (done.slot, done.value, done.freed) == (probe.slot, "end", True)
    assert (probe.slot.ended, scheduler.live_slots, scheduler.finished) == (True, set(), [])


def test_a_slot_with_abandoned_calls_is_freed_when_they_exit(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    first, second = make_call(), make_call()
    probe = scheduler.start_script(first, second, notify=box)
    for _ in range(2):
        scheduler.interrupt(probe.slot)
        probe.step(probe.pop_answer())
    (done,) = box.take()
    assert (done.freed, probe.slot.ended, scheduler.live_slots) == (False, True, {probe.slot})
    scheduler.accept_result(probe.slot, first, OK_RESULT)
    assert (len(box), scheduler.live_slots) == (0, {probe.slot})
    scheduler.accept_result(probe.slot, second, OK_RESULT)
    (freed,) = box.take()
    assert isinstance(freed, SlotFreed)
    assert (freed.slot, scheduler.live_slots) == (probe.slot, set())
    assert (scheduler.pop_resumed(), scheduler.late_results) == ([], 2)


def test_the_last_call_of_the_first_script_sends_no_notification(scheduler: RecordingScheduler) -> None:
    effect = make_call()
    root = scheduler.start_script(effect)
    scheduler.interrupt(root.slot)
    root.step(root.pop_answer())
    assert scheduler.live_slots == {root.slot}
    assert scheduler.accept_result(root.slot, effect, OK_RESULT) is None
    assert (scheduler.live_slots, scheduler.finished, scheduler.pop_resumed()) == (set(), [("end", None)], [])


@pytest.mark.parametrize("error", [LookupError("defect"), KeyboardInterrupt()])
def test_an_error_in_a_script_ends_the_run(scheduler: RecordingScheduler, error: BaseException) -> None:
    def fail() -> Script[None]:
        yield Sleep(10.0)
        raise error

    box = scheduler.create_mailbox()
    slot = scheduler.start(fail(), notify=box)
    assert scheduler.step(slot, None) is None
    assert (scheduler.finished, slot.ended, scheduler.live_slots, len(box)) == ([(None, error)], True, set(), 0)


def test_interrupting_an_ended_script_does_nothing(scheduler: RecordingScheduler) -> None:
    probe = scheduler.start_script(notify=scheduler.create_mailbox())
    scheduler.interrupt(probe.slot)
    assert (scheduler.pop_resumed(), probe.slot.pending_interrupts) == ([], 0)


# -- interrupting -------------------------------------------------------------------------------


def test_an_interrupted_call_is_abandoned(scheduler: RecordingScheduler) -> None:
    effect = make_call(15.0)
    root = scheduler.start_script(effect)
    scheduler.interrupt(root.slot)
    stopped = root.pop_answer()
    assert isinstance(stopped, Interrupted)
    assert stopped.call is effect
    assert root.waiting_on == (None, NEVER)
    assert (root.slot.abandoned_calls, root.slot.pending_interrupts, effect.exited) == (1, 0, False)
    assert effect.scope is not None
    assert effect.scope.cancelled


def test_an_interrupted_call_needs_no_scope(scheduler: RecordingScheduler) -> None:
    effect = Call("x", abs, (1,))
    root = scheduler.start_script(effect)
    scheduler.interrupt(root.slot)
    assert root.pop_answer().call is effect


@pytest.mark.parametrize("effect", [Sleep(15.0), AwaitExit(make_call(), 15.0)])
def test_an_interrupted_wait_abandons_no_call(scheduler: RecordingScheduler, effect: Any) -> None:
    root = scheduler.start_script(effect)
    scheduler.interrupt(root.slot)
    stopped = root.pop_answer()
    assert isinstance(stopped, Interrupted)
    assert stopped.call is None
    assert root.waiting_on == (None, NEVER)
    assert root.slot.abandoned_calls == 0


def test_a_script_can_interrupt_another(scheduler: RecordingScheduler) -> None:
    other = scheduler.start_script(Sleep(NEVER), notify=scheduler.create_mailbox())
    root = scheduler.start_script(Interrupt(other.slot), Sleep(NEVER))
    assert root.answers == [None]
    assert isinstance(other.pop_answer(), Interrupted)


# -- closing ------------------------------------------------------------------------------------


def test_close_abandons_every_call_and_clears_every_pending_effect(scheduler: RecordingScheduler) -> None:
    effect = make_call(15.0)
    calling, sleeping = scheduler.start_script(effect), scheduler.start_script(Sleep(15.0))
    running = scheduler.start(iter(()))  # type: ignore[arg-type]
    scheduler.pop_resumed()
    scheduler.close()
    assert scheduler.closed is True
    assert (calling.waiting_on, sleeping.waiting_on) == ((None, NEVER), (None, NEVER))
    assert (calling.slot.abandoned_calls, sleeping.slot.abandoned_calls, running.abandoned_calls) == (1, 0, 0)
    assert effect.scope is not None
    assert effect.scope.cancelled
    assert scheduler.accept_result(calling.slot, effect, OK_RESULT) is None
    scheduler.now = 99.0
    scheduler.expire_due()
    assert (scheduler.pop_resumed(), scheduler.late_results) == ([], 1)


# -- mailboxes ----------------------------------------------------------------------------------


def test_a_mailbox_ends_the_wait_at_its_count_and_not_before(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    effect = Wait(box, 2, 30.0)
    root = scheduler.start_script(effect, Wait(box))
    box.put("a")
    assert (scheduler.pop_resumed(), len(box), root.waiting_on) == ([], 1, (effect, 30.0))
    box.put("b")
    assert root.pop_answer() == ["a", "b"]
    assert (len(box), root.waiting_on) == (0, (None, NEVER))
    box.put("c")
    assert (scheduler.pop_resumed(), len(box)) == ([], 1), "it is not waiting now"
    root.step(["a", "b"])
    assert root.answers == [["a", "b"], ["c"]], "one is enough where no number is given"


def test_a_mailbox_with_enough_items_returns_all_immediately(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    for item in "abc":
        box.put(item)
    root = scheduler.start_script(Wait(box, 2), Wait(box))
    assert root.answers == [["a", "b", "c"]]
    box.put("d")
    assert root.pop_answer() == ["d"]


def test_an_urgent_item_ends_the_wait_whatever_the_count(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    root = scheduler.start_script(Wait(box, 9), Wait(box, 9))
    box.put("a")
    box.put("b", urgent=True)
    assert root.pop_answer() == ["a", "b"]
    root.step(["a", "b"])
    box.put("c")
    assert scheduler.pop_resumed() == [], "the urgency is over"


def test_an_urgent_item_before_the_wait_is_not_lost(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    box.put("a", urgent=True)
    box.put("b")
    root = scheduler.start_script(Wait(box, 9), Wait(box, 9))
    assert root.answers == [["a", "b"]]
    assert root.slot.pending_effect is root.effects[1]


def test_an_interrupted_wait_keeps_the_items(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    root = scheduler.start_script(Wait(box, 2, 30.0))
    box.put("a")
    scheduler.interrupt(root.slot)
    stopped = root.pop_answer()
    assert isinstance(stopped, Interrupted)
    assert (stopped.call, root.waiting_on) == (None, (None, NEVER))
    box.put("b")
    assert (scheduler.pop_resumed(), len(box)) == ([], 2)


def test_a_pending_interrupt_ends_only_the_next_wait(scheduler: RecordingScheduler) -> None:
    box = scheduler.create_mailbox()
    box.put("a")
    probe = ScriptProbe(scheduler, (Wait(box), Wait(box)), None)
    scheduler.interrupt(probe.slot)
    probe.step(None)
    stopped, items = probe.answers
    assert (type(stopped), items) == (Interrupted, ["a"])


def test_registering_a_waiter_fails_if_there_are_enough_items(scheduler: RecordingScheduler) -> None:
    box, slot = scheduler.create_mailbox(), Slot(iter(()), notify=None, counted=False)  # type: ignore[arg-type]
    assert box.register_waiter(slot, 1) is True
    box.clear_waiter()
    box.put("a")
    assert box.register_waiter(slot, 2) is True
    assert box.register_waiter(slot, 1) is False


# -- afterwards ---------------------------------------------------------------------------------


def test_on_exit_runs_immediately_without_an_abandoned_call(scheduler: RecordingScheduler) -> None:
    done: list[str] = []
    box = scheduler.create_mailbox()
    probe = scheduler.start_script(OnExit(lambda: done.append(f"then, before {len(box)} are told")), notify=box)
    assert (probe.answers, done, len(box)) == ([None], ["then, before 0 are told"], 1)


def test_on_exit_runs_after_the_exit_of_the_last_abandoned_call(scheduler: RecordingScheduler) -> None:
    done: list[str] = []
    box, first, second = scheduler.create_mailbox(), make_call(11.0), make_call(11.0)
    probe = scheduler.start_script(first, second, OnExit(lambda: done.append(f"before {len(box)}")), notify=box)
    for effect in (first, second):
        scheduler.now += 2.0
        effect.until = probe.slot.due = scheduler.now
        scheduler.expire_due()
        probe.step(probe.pop_answer())
    assert (done, probe.slot.ended) == ([], True)
    assert scheduler.accept_result(probe.slot, first, OK_RESULT) is None
    assert done == []
    assert scheduler.accept_result(probe.slot, second, OK_RESULT) is None
    assert done == ["before 1"]
    assert [type(each) for each in box.take()] == [ScriptEnded, SlotFreed]


def test_on_exit_also_runs_for_the_first_script(scheduler: RecordingScheduler) -> None:
    done: list[str] = []
    effect = make_call(11.0)
    probe = scheduler.start_script(effect, OnExit(lambda: done.append("then")))
    scheduler.now = 11.0
    scheduler.expire_due()
    probe.step(probe.pop_answer())
    assert scheduler.accept_result(probe.slot, effect, OK_RESULT) is None
    assert done == ["then"]


# -- words --------------------------------------------------------------------------------------


def test_the_typed_helpers_yield_their_effect_and_return_its_result(scheduler: RecordingScheduler) -> None:
    box, call_effect, slot = scheduler.create_mailbox(), make_call(), Slot(iter(()), notify=None, counted=False)  # type: ignore[arg-type]
    child: Script[None] = iter(())  # type: ignore[assignment]
    scripts: list[tuple[Script[Any], type, dict[str, Any]]] = [
        (
            call(call_effect),
            Call,
            {"step": "x", "fn": abs, "args": (1,), "until": NEVER, "exited": False, "cancel": None},
        ),
        (sleep(3.0), Sleep, {"until": 3.0}),
        (await_exit(call_effect, 3.0), AwaitExit, {"call": call_effect, "until": 3.0}),
        (wait(box), Wait, {"mailbox": box, "count": 1, "until": NEVER}),
        (wait(box, count=2, until=3.0), Wait, {"mailbox": box, "count": 2, "until": 3.0}),
        (spawn(child, notify=box, counted=True), Spawn, {"script": child, "notify": box, "counted": True}),
    ]
    for script, kind, fields in scripts:
        effect = next(script)
        assert type(effect) is kind
        assert {name: getattr(effect, name) for name in fields} == fields
        answer = object()
        with pytest.raises(StopIteration) as stop:
            script.send(answer)
        assert stop.value.value is answer
    on_exit_effect = next(on_exit(scheduler.stop))
    assert isinstance(on_exit_effect, OnExit)
    assert on_exit_effect.callback == scheduler.stop
    interrupt_effect = next(interrupt(slot))
    assert isinstance(interrupt_effect, Interrupt)
    assert interrupt_effect.slot is slot
