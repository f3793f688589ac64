"""The script of the consume loop; the test sends the result of every effect and checks each wait and fetch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import Ack, Defer, Delivery, Release, SettleResult
from ergon_framework.engine.effects import (
    NEVER,
    Call,
    Err,
    Expired,
    Interrupt,
    Interrupted,
    Ok,
    OnExit,
    Sleep,
    Spawn,
    Wait,
)
from ergon_framework.engine.retry import Step
from ergon_framework.engine.scheduler import Mailbox, ScriptEnded, Slot, SlotFreed
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import ConfigurationError
from ergon_framework.gates import Pause
from ergon_framework.transaction import Transaction
from ergon_framework.worker.consume import (
    FLUSH_TIMEOUT_SECONDS,
    WAKE_EVENT,
    ClaimsLost,
    ConnectorCalls,
    ConsumeLoop,
)
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.exceptions import FetchException, LoopStalled, LoopTimeout
from ergon_framework.worker.lifecycle import LifecycleSpec, classify, classify_handler, timeout_error
from ergon_framework.worker.policies import ConsumerPolicy, RetryPolicy
from ergon_framework.worker.report import Outcome, OutcomeKind, StopReason
from ergon_framework.worker.settle import SETTLED_EVENT, PendingSettlement
from ergon_framework.worker.solo import SoloMember, SoloRun


def make_deliveries(*names: str, deliveries: int = 1, key: str | None = None) -> list[Delivery]:
    return [Delivery(Transaction(id=name, key=key), name, deliveries) for name in names]


def fail_if_called(*_: Any) -> None:
    raise AssertionError("the driver is the test")


class ConsumeObserver(LoopObserver):
    """Record the events of the loop."""

    def __init__(self) -> None:
        self.read_slots: Any = None
        self.events: list[Any] = []

    def on_loop_start(self, slots: Any) -> None:
        self.read_slots = slots

    def on_batch(self, size: int) -> None:
        self.events.append(("batch", size))

    def on_fetch_end(self, deliveries: Any, error: BaseException | None) -> None:
        self.events.append(("fetched", deliveries, error))

    def on_oversized_batch(self, requested: int, received: int) -> None:
        self.events.append(("breach", requested, received))

    def on_pause(self, reason: str | None) -> None:
        self.events.append(("paused", reason))

    def on_loop_end(self, end: StopReason) -> None:
        self.events.append(("over", end))


class ConsumeHarness:
    """A consume loop whose driver is the test: spawns are answered here, everything else there."""

    def __init__(
        self,
        *,
        now: float = 0.0,
        lease: float | None = None,
        gates: Any = (),
        settle: Any = None,
        solo_run: SoloRun | None = None,
        **loop: Any,
    ) -> None:
        self.now = now
        self.observer = ConsumeObserver()
        self.outcomes: list[Outcome] = []
        self.mailboxes: list[Mailbox] = []
        self.spawned: list[Spawn] = []
        self.slots: list[Slot] = []
        self.interrupted: list[Slot] = []
        self.effect: Any = None
        self.result: Any = None
        policy = ConsumerPolicy.load({"loop": loop, "steps": {"settle": settle or {}}})
        clock = Clock(monotonic=lambda: self.now, wall=lambda: 1_000.0 + self.now, random=lambda: 0.5)
        retry = RetryPolicy()
        handler = {"classify": classify_handler, "timeout_error": timeout_error}
        self.loop = ConsumeLoop(
            LifecycleSpec(
                Step("process", fail_if_called, retry, classify=classify, timeout_error=timeout_error, defers=True),
                Step("success", fail_if_called, retry, **handler),
                Step("exception", fail_if_called, retry, **handler),
                clock=clock,
            ),
            ConnectorCalls(fetch=lambda _: None, settle=fail_if_called, extend=fail_if_called, lease=lease),
            policy,
            name="task",
            create_mailbox=self._create_mailbox,
            late_results=lambda: 3,
            gates=gates,
            observer=self.observer,
            on_outcome=self.outcomes.append,
            solo_run=solo_run,
        )
        self.initial_reason = self.loop.not_fetching_reason
        self.script = self.loop.run()
        self.answer(None)

    def _create_mailbox(self) -> Mailbox:
        self.mailboxes.append(mailbox := Mailbox(ThreadDriver(1)))
        return mailbox

    def answer(self, answer: Any, *, at: float | None = None) -> ConsumeHarness:
        """Answer, and go on to the next effect that waits."""
        self.now = self.now if at is None else at
        if isinstance(self.effect, Call) and not (isinstance(answer, Interrupted) and answer.call is None):
            self.effect.fn(*self.effect.args)  # a driver would have called it
        try:
            self.effect = self.script.send(answer)
            while isinstance(self.effect, Spawn | Interrupt):
                self.effect = self.script.send(self._answer_immediately(self.effect))
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
        return self

    def _answer_immediately(self, effect: Spawn | Interrupt) -> Slot | None:
        if isinstance(effect, Interrupt):
            self.interrupted.append(effect.slot)
            return None
        self.spawned.append(effect)
        self.slots.append(slot := Slot(effect.script, notify=effect.notify, counted=effect.counted))
        return slot

    def answer_fetch(self, *deliveries: Delivery, at: float | None = None) -> ConsumeHarness:
        assert isinstance(self.effect, Call)
        return self.answer(Ok(list(deliveries)), at=at)

    def deliver(self, *events: Any, at: float | None = None) -> ConsumeHarness:
        assert isinstance(self.effect, Wait)
        assert self.effect.mailbox is self.loop.mailbox
        return self.answer(list(events), at=at)

    def make_end_event(self, number: int, *, freed: bool = True) -> ScriptEnded:
        return ScriptEnded(self.slots[number], None, freed=freed)

    @property
    def running_count(self) -> int:
        return self.observer.read_slots()[0]

    @property
    def fetch_size(self) -> int | None:
        """How many the present fetch asks for."""
        return self.effect.args[0] if isinstance(self.effect, Call) else None

    @property
    def pending_wait(self) -> tuple[int, float] | None:
        """For how many events, and until when."""
        return (self.effect.count, self.effect.until) if isinstance(self.effect, Wait) else None

    def take_settlements(self) -> list[PendingSettlement]:
        return self.mailboxes[1].take()

    def finish(self) -> Any:
        return self.deliver(self.make_end_event(0)).result


def make_loop_settings(value: int, **more: Any) -> dict[str, Any]:
    return {"concurrency": {"value": value}, **more}


# -- how many are fetched, and when ---------------------------------------------------------------


def test_the_loop_starts_its_settler_and_fetches_for_all_slots() -> None:
    harness = ConsumeHarness(now=100.0)
    assert [(spawn.counted, spawn.notify) for spawn in harness.spawned] == [(False, harness.loop.mailbox)]
    assert (harness.effect.step, harness.effect.args, harness.effect.until) == ("fetch", (10,), 130.0)


@pytest.mark.parametrize("slots, half", [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_fetch_waits_briefly_until_half_of_the_slots_are_free(slots: int, half: int) -> None:
    harness = ConsumeHarness(**make_loop_settings(slots, batch={"size": 20}))
    harness.answer_fetch(*make_deliveries(*"abcde"[:slots]))
    assert harness.pending_wait == (1, NEVER), "nothing is free, so nothing is worth a fetch"
    for free in range(1, half):
        harness.deliver(harness.make_end_event(free), at=5.0)
        assert harness.pending_wait == (half - free, 5.002)
    harness.deliver(harness.make_end_event(half), at=5.0)
    assert harness.fetch_size == half


def test_events_do_not_prolong_the_fetch_delay() -> None:
    harness = ConsumeHarness(**make_loop_settings(6))
    harness.answer_fetch(*make_deliveries(*"abcdef"))
    harness.deliver(harness.make_end_event(1), at=5.0)
    assert harness.pending_wait == (2, 5.002)
    harness.deliver(at=5.001)
    assert harness.pending_wait == (2, 5.002)
    harness.deliver(harness.make_end_event(2), at=5.0015)
    assert harness.pending_wait == (1, 5.002)
    harness.deliver(at=5.002)
    assert harness.fetch_size == 2, "at its very end it is over"


def test_a_stop_ends_the_fetch_delay_and_the_loop() -> None:
    harness = ConsumeHarness(**make_loop_settings(4)).answer_fetch(*make_deliveries(*"abcd"))
    harness.deliver(harness.make_end_event(1), at=5.0)
    assert harness.pending_wait == (1, 5.002)
    harness.answer(Interrupted())
    assert harness.pending_wait == (1, 35.0), "it drains"
    harness.deliver(harness.make_end_event(2), harness.make_end_event(3), harness.make_end_event(4))
    assert harness.finish().stop_reason is StopReason.STOP


def test_a_loop_that_has_not_started_has_no_not_fetching_reason() -> None:
    assert ConsumeHarness().initial_reason is None


def test_every_delivery_counts_against_the_concurrency() -> None:
    harness = ConsumeHarness().answer_fetch(*make_deliveries("a", "b"))
    assert [(spawn.counted, spawn.notify) for spawn in harness.spawned[1:]] == [(True, harness.loop.mailbox)] * 2


def test_a_fetch_is_never_larger_than_a_batch() -> None:
    assert ConsumeHarness(**make_loop_settings(8, batch={"size": 3})).fetch_size == 3


def test_deliveries_beyond_the_slots_count_against_prefetch() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, prefetch=5, batch={"size": 20}))
    assert harness.fetch_size == 6
    harness.answer_fetch(*make_deliveries("a", "b"))
    assert harness.observer.read_slots() == (1, 0, 1)
    assert harness.fetch_size == 4


def test_the_prefetch_reserve_is_refilled_when_half_of_it_is_missing() -> None:
    harness = ConsumeHarness(**make_loop_settings(2, prefetch=6, batch={"size": 20}))
    assert harness.fetch_size == 8
    harness.answer_fetch(*make_deliveries(*"abcdefgh"))
    for number in (1, 2, 3):
        assert harness.pending_wait == (1, NEVER), "no slot is idle, so a small fetch would only be one more"
        harness.deliver(harness.make_end_event(number), at=5.0)
    assert (harness.pending_wait, harness.observer.read_slots()) == ((1, NEVER), (2, 0, 3))
    assert harness.deliver(harness.make_end_event(4), at=5.0).fetch_size == 4, (
        "while both slots still have work for a while"
    )


def test_with_a_reserve_capacity_for_a_whole_batch_is_enough() -> None:
    harness = ConsumeHarness(**make_loop_settings(2, prefetch=10, batch={"size": 3}))
    for names in ("abc", "def", "ghi", "jkl"):
        assert harness.fetch_size == 3
        harness.answer_fetch(*make_deliveries(*names))
    for number in (1, 2):
        harness.deliver(harness.make_end_event(number), at=5.0)
        assert harness.pending_wait == (1, NEVER)
    assert harness.deliver(harness.make_end_event(3), at=5.0).fetch_size == 3, (
        "though half of what may be held would be six"
    )


def test_a_limit_is_never_exceeded() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, prefetch=5, limit=4, batch={"size": 20}))
    assert harness.fetch_size == 4
    harness.answer_fetch(*make_deliveries("a", "b"))
    assert harness.fetch_size == 2, "one runs and one waits"
    harness.answer_fetch(*make_deliveries("c", "d", "e"))
    (released,) = harness.take_settlements()
    assert (released.delivery.receipt, released.outcome.reason) == ("e", "limit")
    assert isinstance(released.settlement, Release)
    assert harness.pending_wait == (1, NEVER), "it is used up though three have not started"
    for number in (1, 2, 3):
        harness.deliver(harness.make_end_event(number))
    assert harness.loop.report.started == 4
    harness.deliver(harness.make_end_event(4))
    assert harness.finish().stop_reason is StopReason.LIMIT


def test_a_stop_before_the_connector_is_called_counts_no_fetch() -> None:
    harness = ConsumeHarness()
    harness.answer(Interrupted())
    assert harness.finish().fetches == 0
    harness = ConsumeHarness()
    harness.answer(Interrupted(harness.effect))
    harness.answer(False)
    harness.answer(False)
    assert harness.finish().fetches == 1


@pytest.mark.spec("CON-36", "CON-30")
@pytest.mark.parametrize("drain, until", [(30.0, 8.5), (0.25, 8.25)])
def test_an_abandoned_fetch_gets_a_short_part_of_the_drain(drain: float, until: float) -> None:
    harness = ConsumeHarness(drain_timeout=drain, now=8.0)
    call = harness.effect
    harness.answer(Interrupted(call))
    harness.answer(False)
    assert (harness.effect.call, harness.effect.until) == (call, until)
    call.on_late_result(make_deliveries("a"))
    (item,) = harness.take_settlements()
    assert (item.outcome.reason, item.outcome.kind) == ("late", OutcomeKind.RELEASED)
    harness.answer(True)
    assert harness.finish().stop_reason is StopReason.STOP


def test_a_fetch_that_has_exited_is_not_awaited_again() -> None:
    harness = ConsumeHarness(drain_timeout=0.0, now=8.0)
    harness.answer(Interrupted(harness.effect))
    harness.answer(True)
    assert harness.pending_wait == (1, 8.5), "that is the settler"


@pytest.mark.spec("CON-34")
def test_events_during_a_fetch_are_processed_before_the_next_fetch() -> None:
    harness = ConsumeHarness(streaming=True, **make_loop_settings(3, batch={"size": 2}))
    harness.answer_fetch(*make_deliveries("a", key="k"))
    harness.loop.mailbox.put(harness.make_end_event(1))
    harness.answer_fetch(*make_deliveries("b", key="k"))
    assert harness.pending_wait == (1, 0.0)
    harness.deliver(*harness.loop.mailbox.take())
    assert (harness.running_count, harness.fetch_size) == (1, 2)


def test_a_stop_during_a_fetch_is_processed_before_the_next_fetch() -> None:
    harness = ConsumeHarness(streaming=True, **make_loop_settings(3))
    harness.answer_fetch(*make_deliveries("a"))
    harness.loop.mailbox.put(harness.make_end_event(1))
    harness.answer_fetch(*make_deliveries("b"))
    harness.answer(Interrupted())
    harness.deliver(*harness.loop.mailbox.take(), harness.make_end_event(2))
    assert harness.finish().stop_reason is StopReason.STOP


def test_a_limit_of_zero_fetches_nothing() -> None:
    report = ConsumeHarness(limit=0).finish()
    assert (report.stop_reason, report.fetches) == (StopReason.LIMIT, 0)


def test_an_oversized_batch_is_reported_and_started_as_slots_become_free() -> None:
    harness = ConsumeHarness(**make_loop_settings(2, batch={"size": 2}))
    deliveries = make_deliveries("a", "b", "c")
    harness.answer_fetch(*deliveries)
    assert harness.observer.events == [("batch", 2), ("fetched", deliveries, None), ("breach", 2, 3)]
    assert harness.observer.read_slots() == (2, 0, 1)
    harness.deliver(harness.make_end_event(1))
    assert harness.observer.read_slots() == (2, 0, 0)


def test_a_full_batch_is_not_reported_as_oversized() -> None:
    harness = ConsumeHarness(**make_loop_settings(2, batch={"size": 2})).answer_fetch(*make_deliveries("a", "b"))
    assert [events[0] for events in harness.observer.events] == ["batch", "fetched"]


# -- waiting for work -----------------------------------------------------------------------------


def test_consecutive_empty_fetches_wait_longer() -> None:
    harness = ConsumeHarness(streaming=True)
    for wait in (0.5, 1.0, 2.0):
        assert harness.answer_fetch().pending_wait == (1, harness.now + wait)
        harness.deliver(at=harness.now + wait)
    harness.answer_fetch(*make_deliveries("a"))
    assert harness.answer_fetch().pending_wait == (1, harness.now + 0.5), "a delivery arrived, so the backoff is reset"
    assert harness.loop.report.empty_fetches == 4
    assert harness.loop.report.fetches == 5


def test_an_idle_loop_keeps_waiting_after_other_events() -> None:
    harness = ConsumeHarness(streaming=True).answer_fetch(*make_deliveries("a")).answer_fetch()
    harness.deliver(harness.make_end_event(1), at=0.3)
    assert harness.pending_wait == (1, 0.5)
    assert harness.deliver(WAKE_EVENT, at=0.4).fetch_size == 10


def test_an_arrival_notification_counts_once() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, streaming=True)).answer_fetch(*make_deliveries("a"))
    harness.deliver(WAKE_EVENT, harness.make_end_event(1))
    assert harness.answer_fetch().pending_wait == (1, 0.5), "it was heard before that fetch, and is answered by it"
    assert harness.deliver(at=0.2).pending_wait == (1, 0.5)


def test_an_arrival_is_notified_again_after_it_was_processed() -> None:
    harness, signals = ConsumeHarness(streaming=True), []
    for _ in range(2):
        harness.loop.wake(lambda mailbox, item: signals.append((mailbox, item)))
    assert signals == [(harness.loop.mailbox, WAKE_EVENT)]
    harness.answer_fetch().deliver(WAKE_EVENT)
    harness.loop.wake(lambda mailbox, item: signals.append((mailbox, item)))
    assert len(signals) == 2


def test_a_gate_is_called_again_after_its_delay_or_at_an_arrival() -> None:
    answers = [Pause("full", 4.0), Pause("full", 2.0), None]
    harness = ConsumeHarness(gates=(lambda: answers.pop(0),), now=10.0)
    assert harness.pending_wait == (1, 14.0)
    assert harness.loop.report.paused == "full"
    assert harness.deliver(at=10.5).pending_wait == (1, 14.0), "nothing has arrived"
    harness.deliver(WAKE_EVENT, at=11.0)
    assert harness.pending_wait == (1, 13.0), "the arrival was answered by asking"
    assert harness.deliver(at=12.0).pending_wait == (1, 13.0)
    assert harness.deliver(at=13.0).fetch_size == 10
    assert harness.observer.events == [("paused", "full"), ("paused", None), ("batch", 10)]
    assert harness.loop.report.paused is None


def test_a_paused_loop_can_be_stopped() -> None:
    harness = ConsumeHarness(gates=(lambda: Pause("full"),)).answer(Interrupted())
    assert harness.finish().stop_reason is StopReason.STOP


# -- the loop's own time --------------------------------------------------------------------------


def test_the_loop_timeout_counts_from_the_start_and_bounds_every_wait() -> None:
    harness = ConsumeHarness(now=100.0, timeout=10.0, streaming=True)
    assert harness.effect.until == 110.0
    harness.answer_fetch(at=109.8)
    assert harness.pending_wait == (1, 110.0)
    harness.deliver(at=110.0)
    assert harness.pending_wait == (1, 110.0 + FLUSH_TIMEOUT_SECONDS), (
        "only the settler is left, and the loop's time is over"
    )
    with pytest.raises(LoopTimeout, match=r"loop timed out after 10.0 s; 0 transactions had ended") as caught:
        harness.finish()
    assert caught.value.report.stop_reason is StopReason.TIMEOUT
    assert harness.observer.events[-1] == ("over", StopReason.TIMEOUT)


@pytest.mark.spec("DX-19")
def test_by_default_there_is_no_drain_after_the_loop_timeout() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, timeout=10.0)).answer_fetch(*make_deliveries("a")).deliver(at=10.0)
    assert harness.interrupted == [harness.slots[1]]
    harness.deliver(harness.make_end_event(1))
    assert harness.pending_wait == (1, 10.0 + FLUSH_TIMEOUT_SECONDS)


@pytest.mark.spec("DX-19")
def test_the_loop_timeout_bounds_the_drain_of_a_stop() -> None:
    harness = (
        ConsumeHarness(**make_loop_settings(1, timeout=10.0))
        .answer_fetch(*make_deliveries("a"))
        .answer(Interrupted(), at=5.0)
    )
    assert (harness.pending_wait, harness.interrupted) == ((1, 10.0), [])
    harness.deliver(at=10.0)
    assert harness.interrupted == [harness.slots[1]]


def test_waiting_deliveries_are_released_after_the_loop_timeout() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, prefetch=1, timeout=10.0, timeout_drain=7.0)).answer_fetch(
        *make_deliveries("a", "b")
    )
    assert harness.pending_wait == (1, 10.0)
    harness.deliver(at=10.0)
    assert [(item.delivery.receipt, item.outcome.reason) for item in harness.take_settlements()] == [("b", "timeout")]
    assert harness.pending_wait == (1, 17.0), "what runs is given the time of a drain"
    harness.deliver(at=16.9)
    assert (harness.pending_wait, harness.interrupted) == ((1, 17.0), [])
    harness.deliver(at=17.0)
    assert harness.interrupted == [harness.slots[1]]
    harness.deliver(harness.make_end_event(1))
    assert harness.pending_wait == (1, 17.5)


def test_with_an_empty_queue_running_calls_still_have_the_loop_timeout() -> None:
    harness = ConsumeHarness(timeout=10.0, timeout_drain=30.0).answer_fetch(*make_deliveries("a")).answer_fetch()
    assert harness.pending_wait == (1, 10.0)
    harness.deliver(at=10.0)
    assert harness.pending_wait == (1, 40.0)
    harness.deliver(harness.make_end_event(1), at=12.0)
    assert harness.pending_wait == (1, 40.5)
    with pytest.raises(LoopTimeout):
        harness.finish()


@pytest.mark.parametrize("timeout, until", [(None, NEVER), (10.0, 10.5)])
def test_a_loop_that_ends_on_its_own_settles_until_its_timeout(timeout: float | None, until: float) -> None:
    harness = ConsumeHarness(timeout=timeout).answer_fetch()
    assert harness.pending_wait == (1, until)
    report = harness.finish()
    assert (report.stop_reason, report.late_results, report.still_running) == (StopReason.EMPTY, 3, 0)
    assert harness.observer.events[-1] == ("over", StopReason.EMPTY)


# -- slots that are lost --------------------------------------------------------------------------


def test_a_stalled_loop_ends_after_the_stall_timeout() -> None:
    harness = ConsumeHarness(**make_loop_settings(1)).answer_fetch(*make_deliveries("a"))
    harness.deliver(harness.make_end_event(1, freed=False), at=5.0)
    assert harness.pending_wait == (1, 35.0)
    assert harness.observer.read_slots() == (0, 1, 0)
    harness.deliver(at=34.0)
    assert (harness.pending_wait, harness.loop.live) == ((1, 35.0), True)
    harness.deliver(at=35.0)
    assert not harness.loop.live
    assert harness.pending_wait == (1, 65.5)
    with pytest.raises(LoopStalled, match=r"all 1 slots are occupied .* for 30.0 s") as caught:
        harness.finish()
    assert (caught.value.report.stop_reason, caught.value.report.still_running) == (StopReason.STALLED, 1)


def test_a_stalled_streaming_loop_only_reports_it() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, streaming=True)).answer_fetch(*make_deliveries("a"))
    harness.deliver(harness.make_end_event(1, freed=False), at=5.0)
    assert harness.pending_wait == (1, NEVER)
    harness.deliver(WAKE_EVENT, at=35.0)
    assert (harness.pending_wait, harness.loop.live) == ((1, NEVER), False)


def test_a_call_that_exits_frees_its_slot_and_its_id() -> None:
    harness = ConsumeHarness(**make_loop_settings(1)).answer_fetch(*make_deliveries("a"))
    harness.deliver(harness.make_end_event(1, freed=False))
    harness.deliver(SlotFreed(harness.slots[1]))
    assert harness.fetch_size == 1
    harness.answer_fetch(*make_deliveries("a"))
    assert harness.running_count == 1


# -- the last permitted delivery runs alone -------------------------------------------------------


def test_the_last_permitted_delivery_waits_until_no_other_call_runs() -> None:
    harness = ConsumeHarness(**make_loop_settings(3, max_deliveries=3))
    harness.answer_fetch(
        *make_deliveries("a", deliveries=2), *make_deliveries("b", deliveries=3), *make_deliveries("c")
    )
    assert harness.observer.read_slots() == (1, 0, 1), (
        "c goes back, so that it is not held when b takes the process with it"
    )
    assert harness.pending_wait == (1, NEVER), "nothing more is fetched for it to wait for"
    harness.deliver(harness.make_end_event(1))
    harness.deliver(WAKE_EVENT)
    assert (harness.pending_wait, harness.observer.read_slots()) == ((1, NEVER), (0, 0, 1)), (
        "and b waits until that is settled"
    )
    (released,) = harness.take_settlements()
    assert (released.delivery.receipt, released.settlement, released.outcome.reason) == ("c", Release(), "alone")


@pytest.mark.spec("CNN-11")
def test_deliveries_behind_the_last_permitted_one_are_released_and_redelivered() -> None:
    harness = ConsumeHarness(**make_loop_settings(3, max_deliveries=3))
    harness.answer_fetch(
        *make_deliveries("a", key="k", deliveries=3),
        *make_deliveries("b", "c", key="l"),
        *make_deliveries("d"),
        *make_deliveries("e", key="k"),
    )
    assert harness.observer.read_slots() == (0, 0, 1)
    settle_pending(harness)
    assert harness.deliver(*harness.loop.mailbox.take()).observer.read_slots() == (1, 0, 0)
    assert harness.pending_wait == (1, NEVER), "nothing is fetched while it runs"
    harness.deliver(harness.make_end_event(1))
    harness.answer_fetch(*make_deliveries("b", "c", key="l"), *make_deliveries("d"), *make_deliveries("e", key="k"))
    assert harness.observer.read_slots() == (3, 0, 1), "all of them start but the second of a key"


@pytest.mark.spec("SEC-13")
def test_nothing_is_fetched_until_the_last_permitted_delivery_is_settled() -> None:
    harness = ConsumeHarness(**make_loop_settings(3, max_deliveries=3))
    harness.answer_fetch(*make_deliveries("a", deliveries=3))
    assert harness.observer.read_slots() == (1, 0, 0)
    harness.loop._settler.enqueue(PendingSettlement(make_deliveries("a", deliveries=3)[0], Ack(), None))
    harness.deliver(harness.make_end_event(1))
    assert (harness.pending_wait, harness.observer.read_slots()) == ((1, NEVER), (0, 0, 0)), (
        "a fetch that ends the process would cost it"
    )
    settle_pending(harness)
    harness.deliver(*harness.loop.mailbox.take())
    assert harness.fetch_size == 3


@pytest.mark.spec("SEC-13")
def test_nothing_is_fetched_while_a_last_permitted_delivery_waits_behind_others() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, max_deliveries=3), prefetch=4)
    harness.answer_fetch(*make_deliveries("a"), *make_deliveries("b"), *make_deliveries("c", deliveries=3))
    assert harness.observer.read_slots() == (1, 0, 2)
    assert harness.pending_wait == (1, NEVER), "there is room for two more, and c would be lost with the process"


@pytest.mark.spec("CNN-11", "DX-05")
def test_the_last_permitted_delivery_waits_until_all_others_are_settled() -> None:
    harness = ConsumeHarness(**make_loop_settings(3, max_deliveries=3))
    settler = harness.spawned[0].script
    next(settler)
    harness.answer_fetch(*make_deliveries("a", deliveries=3), *make_deliveries("b", deliveries=3))
    # A mailbox hands its items to a waiting settler at once: from here on the mailbox is empty.
    settlements = harness.take_settlements()
    assert [(item.delivery.receipt, item.settlement) for item in settlements] == [("b", Release())]
    assert harness.deliver(WAKE_EVENT).observer.read_slots() == (0, 0, 1), "the release of b has not even been sent"
    assert settler.send(settlements).count == 99, "the settler waits a moment for more"
    assert harness.deliver(WAKE_EVENT).observer.read_slots() == (0, 0, 1)
    call = settler.send([])
    assert (call.step, harness.deliver(WAKE_EVENT).observer.read_slots()) == ("settle", (0, 0, 1)), (
        "sent and not answered"
    )
    settler.send(Ok([SettleResult.SETTLED]))
    assert harness.deliver(*harness.loop.mailbox.take()).observer.read_slots() == (1, 0, 0)
    assert harness.pending_wait == (1, NEVER), "nothing is fetched while it runs"


def settle_pending(harness: ConsumeHarness) -> None:
    """Do the settler's work by hand."""
    script = harness.spawned[0].script
    next(script)
    settlements = harness.take_settlements()
    effect = script.send(settlements)
    if isinstance(effect, Wait):
        effect = script.send([])
    script.send(Ok([SettleResult.SETTLED] * len(effect.args[0])))


def test_a_delivery_that_waits_for_settlements_still_runs_at_the_end() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, prefetch=3, max_deliveries=3))
    harness.answer_fetch(*make_deliveries("a", "b")).answer_fetch(*make_deliveries("c", deliveries=3))
    harness.deliver(harness.make_end_event(1))
    harness.loop._settler.enqueue(PendingSettlement(make_deliveries("x")[0], Release(), None))
    harness.deliver(harness.make_end_event(2))
    assert (harness.pending_wait, harness.observer.read_slots()) == ((1, NEVER), (0, 0, 1))
    settle_pending(harness)
    harness.deliver(*harness.loop.mailbox.take())
    assert harness.running_count == 1


def test_after_an_empty_fetch_waiting_deliveries_start_before_the_loop_ends() -> None:
    harness = (
        ConsumeHarness(**make_loop_settings(1, prefetch=5)).answer_fetch(*make_deliveries("a", "b")).answer_fetch()
    )
    assert (harness.pending_wait, harness.observer.read_slots()) == ((1, NEVER), (1, 0, 1))
    harness.deliver(harness.make_end_event(1))
    assert (harness.pending_wait, harness.observer.read_slots()) == ((1, NEVER), (1, 0, 0))
    harness.deliver(harness.make_end_event(2))
    assert harness.finish().stop_reason is StopReason.EMPTY


# -- bodies that are to leave before their transactions go back -----------------------------------


def postpone(harness: ConsumeHarness, number: int) -> Callable[[], None]:
    """Have the lifecycle of a delivery end with Later while its body stays; what is done once that has left."""
    script = harness.spawned[number].script
    call = next(script)
    script.send(Expired(call))
    script.send(False)
    effect = script.send(Ok(Defer(1.0)))
    assert isinstance(effect, OnExit)
    with pytest.raises(StopIteration):
        script.send(None)
    return effect.callback


def test_with_an_empty_queue_a_loop_waits_one_drain_for_abandoned_calls() -> None:
    harness = ConsumeHarness(drain_timeout=7.0).answer_fetch(*make_deliveries("a")).answer_fetch()
    on_exit = postpone(harness, 1)
    harness.deliver(harness.make_end_event(1, freed=False), at=5.0)
    assert (harness.pending_wait, harness.take_settlements()) == ((1, 12.0), [])
    harness.deliver(at=6.0)
    assert harness.pending_wait == (1, 12.0), "what happens meanwhile does not prolong it"
    on_exit()
    assert [(item.delivery.receipt, item.settlement) for item in harness.mailboxes[1].take()] == [("a", Defer(1.0))]
    harness.deliver(SlotFreed(harness.slots[1]), at=7.0)
    assert harness.finish().stop_reason is StopReason.EMPTY


@pytest.mark.spec("CON-36")
def test_a_stop_while_waiting_for_abandoned_calls_starts_a_new_drain() -> None:
    harness = ConsumeHarness(drain_timeout=7.0).answer_fetch(*make_deliveries("a")).answer_fetch()
    postpone(harness, 1)
    harness.deliver(harness.make_end_event(1, freed=False), at=5.0)
    harness.answer(Interrupted(), at=11.0)
    assert harness.pending_wait == (1, 18.0)
    harness.deliver(at=18.0)
    assert harness.finish().stop_reason is StopReason.STOP


@pytest.mark.spec("CON-12")
def test_the_loop_timeout_may_expire_while_waiting_for_abandoned_calls() -> None:
    harness = ConsumeHarness(timeout_drain=7.0, timeout=8.0).answer_fetch(*make_deliveries("a")).answer_fetch()
    postpone(harness, 1)
    harness.deliver(harness.make_end_event(1, freed=False), at=5.0)
    assert harness.pending_wait == (1, 8.0)
    harness.deliver(at=8.0)
    assert harness.pending_wait == (1, 15.0)
    harness.deliver(at=15.0)
    with pytest.raises(LoopTimeout):
        harness.finish()


def test_a_call_that_does_not_exit_in_time_keeps_its_claim() -> None:
    harness = ConsumeHarness(drain_timeout=7.0).answer_fetch(*make_deliveries("a")).answer_fetch()
    postpone(harness, 1)
    harness.deliver(harness.make_end_event(1, freed=False), at=5.0)
    harness.deliver(at=12.0)
    assert [(item.delivery.receipt, item.settlement) for item in harness.take_settlements()[:1]] == [("a", None)]
    report = harness.finish()
    assert (report.stop_reason, report.still_running) == (StopReason.EMPTY, 1)


def test_a_stalled_loop_does_not_wait_for_abandoned_calls() -> None:
    harness = ConsumeHarness(**make_loop_settings(1)).answer_fetch(*make_deliveries("a"))
    postpone(harness, 1)
    harness.deliver(harness.make_end_event(1, freed=False), at=5.0)
    assert harness.pending_wait == (1, 35.0)
    harness.deliver(at=35.0)
    assert harness.pending_wait == (1, 65.5), "only the settler is left"
    assert harness.take_settlements()[0].settlement is None
    with pytest.raises(LoopStalled):
        harness.finish()


def test_a_wait_of_zero_seconds_still_processes_events() -> None:
    harness = ConsumeHarness(streaming=True, empty_queue={"backoff": 0.0}).answer_fetch()
    assert harness.pending_wait == (1, 0.0)
    assert harness.deliver().fetch_size == 10


# -- too many to settle ---------------------------------------------------------------------------


def test_nothing_is_fetched_while_the_maximum_of_settlements_is_pending() -> None:
    harness = ConsumeHarness(settle={"max_pending": 2, "batch_size": 2, "linger": 0.0})
    harness.answer_fetch(*make_deliveries("a", deliveries=11))
    assert harness.fetch_size == 10, "one may still come"
    harness.answer_fetch(*make_deliveries("b", deliveries=11))
    assert harness.pending_wait == (1, NEVER)
    settle_pending(harness)
    events = harness.loop.mailbox.take()
    assert events == [SETTLED_EVENT]
    assert harness.deliver(*events).fetch_size == 10


def test_a_loop_that_does_not_wait_gets_no_settled_event() -> None:
    harness = ConsumeHarness(settle={"max_pending": 2, "batch_size": 2, "linger": 0.0}).answer_fetch(
        *make_deliveries("a", deliveries=11)
    )
    settle_pending(harness)
    assert len(harness.loop.mailbox) == 0


# -- claims that are lost -------------------------------------------------------------------------


def put_event(mailbox: Mailbox, item: Any) -> None:
    mailbox.put(item)


def test_only_the_call_whose_claim_is_lost_is_interrupted() -> None:
    harness = ConsumeHarness(**make_loop_settings(2)).answer_fetch(*make_deliveries("a", "b"))
    harness.loop.mark_lost(["b"], put_event)
    (event,) = harness.loop.mailbox.take()
    assert (type(event), event.receipts) == (ClaimsLost, ("b",))
    harness.deliver(event)
    assert harness.interrupted == [harness.slots[2]]
    script = harness.spawned[2].script
    next(script)
    with pytest.raises(StopIteration):
        script.send(Interrupted())
    (item,) = harness.take_settlements()
    assert (item.settlement, item.outcome.kind, item.outcome.reason) == (None, OutcomeKind.RELEASED, "lost")


def test_a_waiting_delivery_is_dropped_when_its_claim_is_lost() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, prefetch=2)).answer_fetch(*make_deliveries("a", "b", "c"))
    harness.loop.mark_lost(["b"], put_event)
    harness.deliver(*harness.loop.mailbox.take())
    harness.deliver(harness.make_end_event(1))
    (item,) = harness.take_settlements()
    assert (item.delivery.receipt, item.settlement, item.outcome.reason) == ("b", None, "lost")
    assert harness.observer.read_slots() == (1, 0, 0), "c runs in its place"


def test_an_unknown_lost_claim_is_ignored() -> None:
    harness = ConsumeHarness(**make_loop_settings(2, streaming=True)).answer_fetch()
    harness.loop.mark_lost(["a"], put_event)
    harness.deliver(*harness.loop.mailbox.take(), WAKE_EVENT)
    harness.answer_fetch(*make_deliveries("a"))
    assert (harness.running_count, harness.take_settlements()) == (1, [])


def test_a_claim_that_cannot_be_renewed_is_lost_immediately() -> None:
    harness = ConsumeHarness(lease=30.0)
    renewal = harness.spawned[1]
    assert (renewal.counted, renewal.notify) == (False, harness.loop.mailbox)
    delivery = Delivery(Transaction(id="a"), "a", lease_until=30.0)
    harness.answer_fetch(delivery)
    assert next(renewal.script).until == 10.0
    harness.now = 10.0
    extend = renewal.script.send(None)
    assert (extend.step, extend.args) == ("extend", ([delivery],))
    assert isinstance(renewal.script.send(Ok([None])), Sleep)
    assert not harness.loop.mailbox.register_waiter(harness.slots[0], 99), "whatever it waits for, this is urgent"
    (event,) = harness.loop.mailbox.take()
    assert event.receipts == ("a",)


# -- the end --------------------------------------------------------------------------------------


def test_a_stop_releases_waiting_deliveries_and_drains_running_calls() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, prefetch=1), now=50.0).answer_fetch(*make_deliveries("a", "b"))
    harness.answer(Interrupted())
    assert [(item.delivery.receipt, item.outcome.reason) for item in harness.take_settlements()] == [("b", "stop")]
    assert harness.pending_wait == (1, 80.0)
    harness.deliver(harness.make_end_event(1), at=60.0)
    assert harness.pending_wait == (1, 80.5)
    assert harness.finish().stop_reason is StopReason.STOP


def test_a_second_stop_ends_the_drain_immediately() -> None:
    harness = ConsumeHarness().answer_fetch(*make_deliveries("a")).answer(Interrupted()).answer(Interrupted(), at=4.0)
    assert harness.interrupted == [harness.slots[1]]
    assert harness.pending_wait == (1, NEVER), "who was interrupted answers soon"
    harness.deliver(harness.make_end_event(1))
    assert harness.pending_wait == (1, 4.5)
    assert harness.finish().stop_reason is StopReason.STOP


def test_a_first_stop_in_a_drain_for_another_reason_changes_nothing() -> None:
    harness = ConsumeHarness(timeout=10.0, timeout_drain=30.0).answer_fetch(*make_deliveries("a")).answer_fetch()
    harness.deliver(at=10.0)
    harness.answer(Interrupted(), at=11.0)
    assert (harness.pending_wait, harness.interrupted) == ((1, 40.0), [])
    harness.answer(Interrupted(), at=12.0)
    assert harness.interrupted == [harness.slots[1]]
    harness.deliver(harness.make_end_event(1))
    with pytest.raises(LoopTimeout):
        harness.finish()


def test_a_stop_while_the_last_calls_run_starts_a_drain() -> None:
    harness = ConsumeHarness().answer_fetch(*make_deliveries("a")).answer_fetch()
    harness.answer(Interrupted(), at=20.0)
    assert harness.pending_wait == (1, 50.0)
    harness.answer(Interrupted(), at=21.0)
    assert harness.interrupted == [harness.slots[1]]
    harness.deliver(harness.make_end_event(1))
    assert harness.pending_wait == (1, 21.5)
    assert harness.finish().stop_reason is StopReason.STOP


def test_a_failed_fetch_ends_the_loop_but_not_running_calls() -> None:
    harness = ConsumeHarness(**make_loop_settings(1, prefetch=3)).answer_fetch(*make_deliveries("a", "b"))
    harness.answer(Err(ConfigurationError("no such queue")))
    error = harness.observer.events[-1][2]
    assert isinstance(error, FetchException)
    assert harness.observer.events[-1] == ("fetched", None, error)
    assert [(item.delivery.receipt, item.outcome.reason) for item in harness.take_settlements()] == [("b", "fetch")]
    assert harness.pending_wait == (1, NEVER)
    harness.deliver(harness.make_end_event(1))
    assert harness.pending_wait == (1, NEVER)
    with pytest.raises(FetchException) as caught:
        harness.finish()
    assert caught.value is error
    assert (error.report.stop_reason, error.report.fetches, error.report.empty_fetches) == (StopReason.FETCH, 2, 0)


def test_a_stopped_fetch_reports_neither_deliveries_nor_an_error() -> None:
    harness = ConsumeHarness()
    harness.answer(Interrupted())
    assert harness.observer.events[-1] == ("fetched", None, None)
    assert harness.finish().stop_reason is StopReason.STOP


def test_late_deliveries_of_a_fetch_are_released() -> None:
    harness = ConsumeHarness(timeout=10.0)
    call = harness.effect
    harness.answer(Expired(call), at=10.0)
    call.on_late_result(make_deliveries("a"))
    (item,) = harness.take_settlements()
    assert (item.outcome.reason, item.outcome.kind) == ("late", OutcomeKind.RELEASED)


def test_a_settler_that_takes_too_long_is_interrupted_and_then_awaited() -> None:
    harness = ConsumeHarness(drain_timeout=0.0, now=8.0).answer(Interrupted())
    assert harness.pending_wait == (1, 8.5)
    harness.deliver(at=8.4)
    assert (harness.pending_wait, harness.interrupted) == ((1, 8.5), [])
    harness.deliver(at=8.5)
    assert (harness.pending_wait, harness.interrupted) == ((1, NEVER), [harness.slots[0]])
    assert harness.finish().stop_reason is StopReason.STOP


def test_after_a_stop_the_settler_gets_only_the_flush_timeout() -> None:
    harness = ConsumeHarness(now=8.0).answer_fetch().answer(Interrupted())
    assert harness.pending_wait == (1, 8.5)
    harness.answer(Interrupted(), at=8.3)
    assert harness.pending_wait == (1, 8.5), "a stop never gives it more"
    harness.deliver(at=8.5)
    assert harness.interrupted == [harness.slots[0]]


def test_lease_renewal_ends_when_everything_is_settled() -> None:
    harness = ConsumeHarness(lease=30.0).answer_fetch()
    assert len(harness.mailboxes[1]) == 1, "the settler was told to close"
    harness.deliver(harness.make_end_event(0))
    assert harness.interrupted == [harness.slots[1]]
    assert harness.pending_wait == (1, NEVER)
    harness.answer(Interrupted())
    assert harness.deliver(harness.make_end_event(1)).result.stop_reason is StopReason.EMPTY


def test_a_pause_that_another_thread_has_just_ended_is_over() -> None:
    harness = ConsumeHarness(**make_loop_settings(1))
    assert not harness.loop._pause_for_solo()


def test_a_request_is_withdrawn_when_the_claim_of_the_suspect_is_lost() -> None:
    solo_run = SoloRun(lambda: 0.0)
    other = SoloMember(solo_run, lambda: None, lambda: 0.0)
    other.join()
    harness = ConsumeHarness(**make_loop_settings(3, max_deliveries=3), solo_run=solo_run)
    harness.answer_fetch(*make_deliveries("a", deliveries=3))
    assert (harness.running_count, other.is_held) == (0, True)
    harness.loop.mark_lost(["a"], lambda *_: None)
    harness.deliver(ClaimsLost(("a",)))
    assert (harness.running_count, other.is_held) == (0, False)


def test_a_request_is_withdrawn_for_the_settlement_of_a_call_that_exits_late() -> None:
    solo_run = SoloRun(lambda: 0.0)
    other = SoloMember(solo_run, lambda: None, lambda: 0.0)
    other.join()
    harness = ConsumeHarness(**make_loop_settings(3, max_deliveries=3), solo_run=solo_run)
    harness.answer_fetch(*make_deliveries("a", deliveries=3))
    harness.loop._settler.enqueue(PendingSettlement(make_deliveries("x")[0], Ack(), None))
    harness.deliver(WAKE_EVENT)
    assert (harness.running_count, other.is_held, harness.pending_wait) == (0, False, (1, NEVER))
