"""The consume loop's script, answered by hand: every wait has its exact moment, every fetch its exact size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ergon_framework.connectors.base import Ack, Delivery, Later, Release, SettleResult
from ergon_framework.engine.attempts import Step
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.effects import NEVER, Afterwards, Call, Interrupt, Sleep, Spawn, Wait
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Done, Freed, Mailbox, Slot
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.consume import FLUSH, WAKE, Broker, Consumption, Lost
from ergon_framework.task.exceptions import FetchException, LoopStalled, LoopTimeout
from ergon_framework.task.gates import Pause
from ergon_framework.task.lifecycle import Course, classify, classify_handler, expired
from ergon_framework.task.mixins.policies import ConsumerPolicy, RetryPolicy
from ergon_framework.task.report import End, Kind, Outcome
from ergon_framework.task.settle import SETTLED, Item
from ergon_framework.task.watch import Onlooker
from ergon_framework.transaction import Transaction


def items(*names: str, deliveries: int = 1, key: str | None = None) -> list[Delivery]:
    return [Delivery(Transaction(name, key=key), name, deliveries) for name in names]


def never_called(*_: Any) -> None:
    raise AssertionError("the driver is the test")


class Looking(Onlooker):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.slots: Any = None
        self.told: list[Any] = []

    def began(self, slots: Any) -> None:
        self.slots = slots

    def batch(self, size: int) -> None:
        self.told.append(("batch", size))

    def fetched(self, deliveries: Any, error: BaseException | None) -> None:
        self.told.append(("fetched", deliveries, error))

    def breach(self, asked: int, got: int) -> None:
        self.told.append(("breach", asked, got))

    def paused(self, reason: str | None) -> None:
        self.told.append(("paused", reason))

    def over(self, end: End) -> None:
        self.told.append(("over", end))


class Loop:
    """A consume loop whose driver is the test: spawns are answered here, everything else there."""

    def __init__(
        self, *, now: float = 0.0, lease: float | None = None, gates: Any = (), settle: Any = None, **loop: Any
    ) -> None:
        self.now = now
        self.watch = Looking()
        self.outcomes: list[Outcome] = []
        self.boxes: list[Mailbox] = []
        self.spawned: list[Spawn] = []
        self.slots: list[Slot] = []
        self.interrupted: list[Slot] = []
        self.effect: Any = None
        self.result: Any = None
        policy = ConsumerPolicy.load({"loop": loop, "steps": {"settle": settle or {}}})
        senses = Senses(clock=lambda: self.now, wall=lambda: 1_000.0 + self.now, dice=lambda: 0.5)
        retry = RetryPolicy()
        handler = {"classify": classify_handler, "expired": expired}
        self.loop = Consumption(
            Course(
                Step("process", never_called, retry, classify=classify, expired=expired, defers=True),
                Step("success", never_called, retry, **handler),
                Step("exception", never_called, retry, **handler),
                senses=senses,
            ),
            Broker(fetch=lambda _: None, settle=never_called, extend=never_called, lease=lease),
            policy,
            name="task",
            mailbox=self._mailbox,
            fenced=lambda: 3,
            gates=gates,
            watch=self.watch,
            on_outcome=self.outcomes.append,
        )
        self.trouble_before = self.loop.trouble
        self.script = self.loop.run()
        self.on(None)

    def _mailbox(self) -> Mailbox:
        self.boxes.append(box := Mailbox(Threads(1)))
        return box

    def on(self, answer: Any, *, at: float | None = None) -> Loop:
        """Answer, and go on to the next effect that waits."""
        self.now = self.now if at is None else at
        if isinstance(self.effect, Call) and not (isinstance(answer, Stopped) and answer.body is None):
            self.effect.fn(*self.effect.args)  # a driver would have called it
        try:
            self.effect = self.script.send(answer)
            while isinstance(self.effect, Spawn | Interrupt):
                self.effect = self.script.send(self._at_once(self.effect))
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
        return self

    def _at_once(self, effect: Spawn | Interrupt) -> Slot | None:
        if isinstance(effect, Interrupt):
            self.interrupted.append(effect.slot)
            return None
        self.spawned.append(effect)
        self.slots.append(slot := Slot(effect.script, told=effect.told, counted=effect.counted))
        return slot

    def brings(self, *deliveries: Delivery, at: float | None = None) -> Loop:
        assert isinstance(self.effect, Call)
        return self.on(Ok(list(deliveries)), at=at)

    def hears(self, *events: Any, at: float | None = None) -> Loop:
        assert isinstance(self.effect, Wait)
        assert self.effect.mailbox is self.loop.mailbox
        return self.on(list(events), at=at)

    def done(self, number: int, *, freed: bool = True) -> Done:
        return Done(self.slots[number], None, freed=freed)

    @property
    def flights(self) -> int:
        return self.watch.slots()[0]

    @property
    def asked(self) -> int | None:
        """How many the present fetch asks for."""
        return self.effect.args[0] if isinstance(self.effect, Call) else None

    @property
    def waits(self) -> tuple[int, float] | None:
        """For how many events, and until when."""
        return (self.effect.count, self.effect.until) if isinstance(self.effect, Wait) else None

    def settling(self) -> list[Item]:
        return self.boxes[1].take()

    def ends(self) -> Any:
        return self.hears(self.done(0)).result


def concurrency(value: int, **more: Any) -> dict[str, Any]:
    return {"concurrency": {"value": value}, **more}


# -- how many are fetched, and when ---------------------------------------------------------------


def test_the_loop_begins_with_its_settler_and_a_fetch_for_all_slots() -> None:
    loop = Loop(now=100.0)
    assert [(spawn.counted, spawn.told) for spawn in loop.spawned] == [(False, loop.loop.mailbox)]
    assert (loop.effect.step, loop.effect.args, loop.effect.until) == ("fetch", (10,), 130.0)


@pytest.mark.parametrize("slots, half", [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_fetch_waits_a_moment_until_half_of_the_slots_are_free(slots: int, half: int) -> None:
    loop = Loop(**concurrency(slots, batch={"size": 20}))
    loop.brings(*items(*"abcde"[:slots]))
    assert loop.waits == (1, NEVER), "nothing is free, so nothing is worth a fetch"
    for free in range(1, half):
        loop.hears(loop.done(free), at=5.0)
        assert loop.waits == (half - free, 5.002)
    loop.hears(loop.done(half), at=5.0)
    assert loop.asked == half


def test_a_moment_is_not_prolonged_by_what_happens_in_it() -> None:
    loop = Loop(**concurrency(6))
    loop.brings(*items(*"abcdef"))
    loop.hears(loop.done(1), at=5.0)
    assert loop.waits == (2, 5.002)
    loop.hears(at=5.001)
    assert loop.waits == (2, 5.002)
    loop.hears(loop.done(2), at=5.0015)
    assert loop.waits == (1, 5.002)
    loop.hears(at=5.002)
    assert loop.asked == 2, "at its very end it is over"


def test_a_stop_ends_the_moment_and_the_loop() -> None:
    loop = Loop(**concurrency(4)).brings(*items(*"abcd"))
    loop.hears(loop.done(1), at=5.0)
    assert loop.waits == (1, 5.002)
    loop.on(Stopped())
    assert loop.waits == (1, 35.0), "it drains"
    loop.hears(loop.done(2), loop.done(3), loop.done(4))
    assert loop.ends().end is End.STOP


def test_a_loop_that_has_not_begun_has_no_trouble() -> None:
    assert Loop().trouble_before is None


def test_every_delivery_is_one_of_those_that_concurrency_bounds() -> None:
    loop = Loop().brings(*items("a", "b"))
    assert [(spawn.counted, spawn.told) for spawn in loop.spawned[1:]] == [(True, loop.loop.mailbox)] * 2


def test_a_fetch_is_never_larger_than_a_batch() -> None:
    assert Loop(**concurrency(8, batch={"size": 3})).asked == 3


def test_what_is_held_beyond_the_slots_counts_against_prefetch() -> None:
    loop = Loop(**concurrency(1, prefetch=5, batch={"size": 20}))
    assert loop.asked == 6
    loop.brings(*items("a", "b"))
    assert loop.watch.slots() == (1, 0, 1)
    assert loop.asked == 4


def test_a_reserve_is_filled_up_when_half_of_what_may_be_held_is_missing() -> None:
    loop = Loop(**concurrency(2, prefetch=6, batch={"size": 20}))
    assert loop.asked == 8
    loop.brings(*items(*"abcdefgh"))
    for number in (1, 2, 3):
        assert loop.waits == (1, NEVER), "no slot is idle, so a small fetch would only be one more"
        loop.hears(loop.done(number), at=5.0)
    assert (loop.waits, loop.watch.slots()) == ((1, NEVER), (2, 0, 3))
    assert loop.hears(loop.done(4), at=5.0).asked == 4, "while both slots still have work for a while"


def test_room_for_a_whole_batch_is_enough_where_there_is_a_reserve() -> None:
    loop = Loop(**concurrency(2, prefetch=10, batch={"size": 3}))
    for names in ("abc", "def", "ghi", "jkl"):
        assert loop.asked == 3
        loop.brings(*items(*names))
    for number in (1, 2):
        loop.hears(loop.done(number), at=5.0)
        assert loop.waits == (1, NEVER)
    assert loop.hears(loop.done(3), at=5.0).asked == 3, "though half of what may be held would be six"


def test_a_limit_is_never_overstepped() -> None:
    loop = Loop(**concurrency(1, prefetch=5, limit=4, batch={"size": 20}))
    assert loop.asked == 4
    loop.brings(*items("a", "b"))
    assert loop.asked == 2, "one runs and one waits"
    loop.brings(*items("c", "d", "e"))
    (given_back,) = loop.settling()
    assert (given_back.delivery.receipt, given_back.outcome.reason) == ("e", "limit")
    assert isinstance(given_back.settlement, Release)
    assert loop.waits == (1, NEVER), "it is used up though three have not started"
    for number in (1, 2, 3):
        loop.hears(loop.done(number))
    assert loop.loop.report.started == 4
    loop.hears(loop.done(4))
    assert loop.ends().end is End.LIMIT


def test_a_stop_before_the_connector_is_called_counts_no_fetch() -> None:
    loop = Loop()
    loop.on(Stopped())
    assert loop.ends().fetches == 0
    loop = Loop()
    loop.on(Stopped(loop.effect))
    loop.on(False)
    loop.on(False)
    assert loop.ends().fetches == 1


@pytest.mark.spec("CON-36", "CON-30")
@pytest.mark.parametrize("drain, until", [(30.0, 8.5), (0.25, 8.25)])
def test_a_fetch_that_was_left_behind_is_given_a_moment_of_the_drain(drain: float, until: float) -> None:
    loop = Loop(drain_timeout=drain, now=8.0)
    body = loop.effect
    loop.on(Stopped(body))
    loop.on(False)
    assert (loop.effect.body, loop.effect.until) == (body, until)
    body.late(items("a"))
    (item,) = loop.settling()
    assert (item.outcome.reason, item.outcome.kind) == ("late", Kind.RELEASED)
    loop.on(True)
    assert loop.ends().end is End.STOP


def test_a_fetch_that_has_left_is_not_waited_for_again() -> None:
    loop = Loop(drain_timeout=0.0, now=8.0)
    loop.on(Stopped(loop.effect))
    loop.on(True)
    assert loop.waits == (1, 8.5), "that is the settler"


@pytest.mark.spec("CON-34")
def test_what_happened_during_a_fetch_is_heard_before_the_next_one() -> None:
    loop = Loop(streaming=True, **concurrency(3, batch={"size": 2}))
    loop.brings(*items("a", key="k"))
    loop.loop.mailbox.put(loop.done(1))
    loop.brings(*items("b", key="k"))
    assert loop.waits == (1, 0.0)
    loop.hears(*loop.loop.mailbox.take())
    assert (loop.flights, loop.asked) == (1, 2)


def test_a_stop_that_came_during_a_fetch_is_heard_before_the_next_one() -> None:
    loop = Loop(streaming=True, **concurrency(3))
    loop.brings(*items("a"))
    loop.loop.mailbox.put(loop.done(1))
    loop.brings(*items("b"))
    loop.on(Stopped())
    loop.hears(*loop.loop.mailbox.take(), loop.done(2))
    assert loop.ends().end is End.STOP


def test_a_limit_of_nothing_fetches_nothing() -> None:
    report = Loop(limit=0).ends()
    assert (report.end, report.fetches) == (End.LIMIT, 0)


def test_more_than_a_batch_is_a_breach_and_is_started_as_slots_become_free() -> None:
    loop = Loop(**concurrency(2, batch={"size": 2}))
    fetched = items("a", "b", "c")
    loop.brings(*fetched)
    assert loop.watch.told == [("batch", 2), ("fetched", fetched, None), ("breach", 2, 3)]
    assert loop.watch.slots() == (2, 0, 1)
    loop.hears(loop.done(1))
    assert loop.watch.slots() == (2, 0, 0)


def test_a_full_batch_is_no_breach() -> None:
    loop = Loop(**concurrency(2, batch={"size": 2})).brings(*items("a", "b"))
    assert [told[0] for told in loop.watch.told] == ["batch", "fetched"]


# -- waiting for work -----------------------------------------------------------------------------


def test_each_silence_in_a_row_is_waited_out_longer() -> None:
    loop = Loop(streaming=True)
    for wait in (0.5, 1.0, 2.0):
        assert loop.brings().waits == (1, loop.now + wait)
        loop.hears(at=loop.now + wait)
    loop.brings(*items("a"))
    assert loop.brings().waits == (1, loop.now + 0.5), "something came, so it begins anew"
    assert loop.loop.report.empty_fetches == 4
    assert loop.loop.report.fetches == 5


def test_an_idle_loop_goes_on_waiting_when_something_else_happens() -> None:
    loop = Loop(streaming=True).brings(*items("a")).brings()
    loop.hears(loop.done(1), at=0.3)
    assert loop.waits == (1, 0.5)
    assert loop.hears(WAKE, at=0.4).asked == 10


def test_an_arrival_is_news_once() -> None:
    loop = Loop(**concurrency(1, streaming=True)).brings(*items("a"))
    loop.hears(WAKE, loop.done(1))
    assert loop.brings().waits == (1, 0.5), "it was heard before that fetch, and is answered by it"
    assert loop.hears(at=0.2).waits == (1, 0.5)


def test_an_arrival_is_told_again_once_it_was_heard() -> None:
    loop, signals = Loop(streaming=True), []
    for _ in range(2):
        loop.loop.wake(lambda mailbox, item: signals.append((mailbox, item)))
    assert signals == [(loop.loop.mailbox, WAKE)]
    loop.brings().hears(WAKE)
    loop.loop.wake(lambda mailbox, item: signals.append((mailbox, item)))
    assert len(signals) == 2


def test_a_gate_is_asked_again_after_its_seconds_or_at_an_arrival() -> None:
    answers = [Pause("full", 4.0), Pause("full", 2.0), None]
    loop = Loop(gates=(lambda: answers.pop(0),), now=10.0)
    assert loop.waits == (1, 14.0)
    assert loop.loop.report.paused == "full"
    assert loop.hears(at=10.5).waits == (1, 14.0), "nothing has arrived"
    loop.hears(WAKE, at=11.0)
    assert loop.waits == (1, 13.0), "the arrival was answered by asking"
    assert loop.hears(at=12.0).waits == (1, 13.0)
    assert loop.hears(at=13.0).asked == 10
    assert loop.watch.told == [("paused", "full"), ("paused", None), ("batch", 10)]
    assert loop.loop.report.paused is None


def test_a_loop_that_is_held_can_be_stopped() -> None:
    loop = Loop(gates=(lambda: Pause("full"),)).on(Stopped())
    assert loop.ends().end is End.STOP


# -- the loop's own time --------------------------------------------------------------------------


def test_the_loops_time_counts_from_its_start_and_bounds_every_wait() -> None:
    loop = Loop(now=100.0, timeout=10.0, streaming=True)
    assert loop.effect.until == 110.0
    loop.brings(at=109.8)
    assert loop.waits == (1, 110.0)
    loop.hears(at=110.0)
    assert loop.waits == (1, 110.0 + FLUSH), "only the settler is left, and the loop's time is over"
    with pytest.raises(LoopTimeout, match=r"the loop's 10.0 s are over; 0 transactions had ended") as caught:
        loop.ends()
    assert caught.value.report.end is End.TIMEOUT
    assert loop.watch.told[-1] == ("over", End.TIMEOUT)


@pytest.mark.spec("DX-19")
def test_by_default_nothing_is_waited_for_once_the_loops_time_is_over() -> None:
    loop = Loop(**concurrency(1, timeout=10.0)).brings(*items("a")).hears(at=10.0)
    assert loop.interrupted == [loop.slots[1]]
    loop.hears(loop.done(1))
    assert loop.waits == (1, 10.0 + FLUSH)


@pytest.mark.spec("DX-19")
def test_the_loops_time_bounds_the_drain_of_a_stop_too() -> None:
    loop = Loop(**concurrency(1, timeout=10.0)).brings(*items("a")).on(Stopped(), at=5.0)
    assert (loop.waits, loop.interrupted) == ((1, 10.0), [])
    loop.hears(at=10.0)
    assert loop.interrupted == [loop.slots[1]]


def test_what_has_not_begun_is_given_back_when_the_time_is_over() -> None:
    loop = Loop(**concurrency(1, prefetch=1, timeout=10.0, timeout_drain=7.0)).brings(*items("a", "b"))
    assert loop.waits == (1, 10.0)
    loop.hears(at=10.0)
    assert [(item.delivery.receipt, item.outcome.reason) for item in loop.settling()] == [("b", "timeout")]
    assert loop.waits == (1, 17.0), "what runs is given the time of a drain"
    loop.hears(at=16.9)
    assert (loop.waits, loop.interrupted) == ((1, 17.0), [])
    loop.hears(at=17.0)
    assert loop.interrupted == [loop.slots[1]]
    loop.hears(loop.done(1))
    assert loop.waits == (1, 17.5)


def test_a_loop_that_found_nothing_more_still_has_its_time_for_what_runs() -> None:
    loop = Loop(timeout=10.0, timeout_drain=30.0).brings(*items("a")).brings()
    assert loop.waits == (1, 10.0)
    loop.hears(at=10.0)
    assert loop.waits == (1, 40.0)
    loop.hears(loop.done(1), at=12.0)
    assert loop.waits == (1, 40.5)
    with pytest.raises(LoopTimeout):
        loop.ends()


@pytest.mark.parametrize("timeout, until", [(None, NEVER), (10.0, 10.5)])
def test_a_loop_that_ends_by_itself_settles_until_its_own_time_is_over(timeout: float | None, until: float) -> None:
    loop = Loop(timeout=timeout).brings()
    assert loop.waits == (1, until)
    report = loop.ends()
    assert (report.end, report.fenced, report.abandoned) == (End.EMPTY, 3, 0)
    assert loop.watch.told[-1] == ("over", End.EMPTY)


# -- slots that are lost --------------------------------------------------------------------------


def test_a_stalled_loop_ends_after_its_patience() -> None:
    loop = Loop(**concurrency(1)).brings(*items("a"))
    loop.hears(loop.done(1, freed=False), at=5.0)
    assert loop.waits == (1, 35.0)
    assert loop.watch.slots() == (0, 1, 0)
    loop.hears(at=34.0)
    assert (loop.waits, loop.loop.live) == ((1, 35.0), True)
    loop.hears(at=35.0)
    assert not loop.loop.live
    assert loop.waits == (1, 65.5)
    with pytest.raises(LoopStalled, match=r"all 1 slots are held .* for 30.0 s") as caught:
        loop.ends()
    assert (caught.value.report.end, caught.value.report.abandoned) == (End.STALLED, 1)


def test_a_streaming_loop_that_is_stalled_only_says_so() -> None:
    loop = Loop(**concurrency(1, streaming=True)).brings(*items("a"))
    loop.hears(loop.done(1, freed=False), at=5.0)
    assert loop.waits == (1, NEVER)
    loop.hears(WAKE, at=35.0)
    assert (loop.waits, loop.loop.live) == ((1, NEVER), False)


def test_a_body_that_leaves_frees_its_slot_and_its_id() -> None:
    loop = Loop(**concurrency(1)).brings(*items("a"))
    loop.hears(loop.done(1, freed=False))
    loop.hears(Freed(loop.slots[1]))
    assert loop.asked == 1
    loop.brings(*items("a"))
    assert loop.flights == 1


# -- the last permitted delivery runs alone -------------------------------------------------------


def test_the_last_permitted_delivery_waits_until_nobody_else_runs() -> None:
    loop = Loop(**concurrency(3, max_deliveries=3))
    loop.brings(*items("a", deliveries=2), *items("b", deliveries=3), *items("c"))
    assert loop.watch.slots() == (1, 0, 1), "c goes back, so that it is not held when b takes the process with it"
    assert loop.waits == (1, NEVER), "nothing more is fetched for it to wait for"
    loop.hears(loop.done(1))
    loop.hears(WAKE)
    assert (loop.waits, loop.watch.slots()) == ((1, NEVER), (0, 0, 1)), "and b waits until that is settled"
    (back,) = loop.settling()
    assert (back.delivery.receipt, back.settlement, back.outcome.reason) == ("c", Release(), "alone")


@pytest.mark.spec("CNN-11")
def test_who_waited_behind_the_last_permitted_delivery_may_come_again() -> None:
    loop = Loop(**concurrency(3, max_deliveries=3))
    loop.brings(*items("a", key="k", deliveries=3), *items("b", "c", key="l"), *items("d"), *items("e", key="k"))
    assert loop.watch.slots() == (0, 0, 1)
    settle(loop)
    assert loop.hears(*loop.loop.mailbox.take()).watch.slots() == (1, 0, 0)
    assert loop.waits == (1, NEVER), "nothing is fetched while it runs"
    loop.hears(loop.done(1))
    loop.brings(*items("b", "c", key="l"), *items("d"), *items("e", key="k"))
    assert loop.watch.slots() == (3, 0, 1), "all of them start but the second of a key"


@pytest.mark.spec("SEC-13")
def test_nothing_is_fetched_until_the_last_permitted_delivery_is_settled() -> None:
    loop = Loop(**concurrency(3, max_deliveries=3))
    loop.brings(*items("a", deliveries=3))
    assert loop.watch.slots() == (1, 0, 0)
    loop.loop._settler.put(Item(items("a", deliveries=3)[0], Ack(), None))
    loop.hears(loop.done(1))
    assert (loop.waits, loop.watch.slots()) == ((1, NEVER), (0, 0, 0)), "a fetch that ends the process would cost it"
    settle(loop)
    loop.hears(*loop.loop.mailbox.take())
    assert loop.asked == 3


@pytest.mark.spec("SEC-13")
def test_nothing_is_fetched_while_a_last_permitted_delivery_waits_behind_others() -> None:
    loop = Loop(**concurrency(1, max_deliveries=3), prefetch=4)
    loop.brings(*items("a"), *items("b"), *items("c", deliveries=3))
    assert loop.watch.slots() == (1, 0, 2)
    assert loop.waits == (1, NEVER), "there is room for two more, and c would be lost with the process"


@pytest.mark.spec("CNN-11", "DX-05")
def test_the_last_permitted_delivery_waits_until_everybody_else_is_settled() -> None:
    loop = Loop(**concurrency(3, max_deliveries=3))
    settler = loop.spawned[0].script
    next(settler)
    loop.brings(*items("a", deliveries=3), *items("b", deliveries=3))
    # A mailbox hands its items to a waiting settler at once: from here on the mailbox is empty.
    taken = loop.settling()
    assert [(item.delivery.receipt, item.settlement) for item in taken] == [("b", Release())]
    assert loop.hears(WAKE).watch.slots() == (0, 0, 1), "the release of b has not even been sent"
    assert settler.send(taken).count == 99, "the settler waits a moment for more"
    assert loop.hears(WAKE).watch.slots() == (0, 0, 1)
    sent = settler.send([])
    assert (sent.step, loop.hears(WAKE).watch.slots()) == ("settle", (0, 0, 1)), "sent and not answered"
    settler.send(Ok([SettleResult.SETTLED]))
    assert loop.hears(*loop.loop.mailbox.take()).watch.slots() == (1, 0, 0)
    assert loop.waits == (1, NEVER), "nothing is fetched while it runs"


def settle(loop: Loop) -> None:
    """Do the settler's work by hand."""
    script = loop.spawned[0].script
    next(script)
    given = loop.settling()
    effect = script.send(given)
    if isinstance(effect, Wait):
        effect = script.send([])
    script.send(Ok([SettleResult.SETTLED] * len(effect.args[0])))


def test_what_waits_for_others_to_be_settled_is_not_forgotten_at_the_end() -> None:
    loop = Loop(**concurrency(1, prefetch=3, max_deliveries=3))
    loop.brings(*items("a", "b")).brings(*items("c", deliveries=3))
    loop.hears(loop.done(1))
    loop.loop._settler.put(Item(items("x")[0], Release(), None))
    loop.hears(loop.done(2))
    assert (loop.waits, loop.watch.slots()) == ((1, NEVER), (0, 0, 1))
    settle(loop)
    loop.hears(*loop.loop.mailbox.take())
    assert loop.flights == 1


def test_an_empty_fetch_lets_what_is_held_start_before_the_loop_ends() -> None:
    loop = Loop(**concurrency(1, prefetch=5)).brings(*items("a", "b")).brings()
    assert (loop.waits, loop.watch.slots()) == ((1, NEVER), (1, 0, 1))
    loop.hears(loop.done(1))
    assert (loop.waits, loop.watch.slots()) == ((1, NEVER), (1, 0, 0))
    loop.hears(loop.done(2))
    assert loop.ends().end is End.EMPTY


# -- bodies that are to leave before their transactions go back -----------------------------------


def postpone(loop: Loop, number: int) -> Callable[[], None]:
    """Have the lifecycle of a delivery end with Later while its body stays; what is done once that has left."""
    script = loop.spawned[number].script
    body = next(script)
    script.send(Expired(body))
    script.send(False)
    effect = script.send(Ok(Later(1.0)))
    assert isinstance(effect, Afterwards)
    with pytest.raises(StopIteration):
        script.send(None)
    return effect.then


def test_a_loop_that_found_nothing_more_waits_a_drains_time_for_bodies() -> None:
    loop = Loop(drain_timeout=7.0).brings(*items("a")).brings()
    leave = postpone(loop, 1)
    loop.hears(loop.done(1, freed=False), at=5.0)
    assert (loop.waits, loop.settling()) == ((1, 12.0), [])
    loop.hears(at=6.0)
    assert loop.waits == (1, 12.0), "what happens meanwhile does not prolong it"
    leave()
    assert [(item.delivery.receipt, item.settlement) for item in loop.boxes[1].take()] == [("a", Later(1.0))]
    loop.hears(Freed(loop.slots[1]), at=7.0)
    assert loop.ends().end is End.EMPTY


@pytest.mark.spec("CON-36")
def test_a_stop_while_it_waits_for_bodies_is_a_stop_and_its_drain_begins_then() -> None:
    loop = Loop(drain_timeout=7.0).brings(*items("a")).brings()
    postpone(loop, 1)
    loop.hears(loop.done(1, freed=False), at=5.0)
    loop.on(Stopped(), at=11.0)
    assert loop.waits == (1, 18.0)
    loop.hears(at=18.0)
    assert loop.ends().end is End.STOP


@pytest.mark.spec("CON-12")
def test_the_loop_s_own_time_may_end_while_it_waits_for_bodies() -> None:
    loop = Loop(timeout_drain=7.0, timeout=8.0).brings(*items("a")).brings()
    postpone(loop, 1)
    loop.hears(loop.done(1, freed=False), at=5.0)
    assert loop.waits == (1, 8.0)
    loop.hears(at=8.0)
    assert loop.waits == (1, 15.0)
    loop.hears(at=15.0)
    with pytest.raises(LoopTimeout):
        loop.ends()


def test_a_body_that_does_not_leave_in_that_time_keeps_its_claim() -> None:
    loop = Loop(drain_timeout=7.0).brings(*items("a")).brings()
    postpone(loop, 1)
    loop.hears(loop.done(1, freed=False), at=5.0)
    loop.hears(at=12.0)
    assert [(item.delivery.receipt, item.settlement) for item in loop.settling()[:1]] == [("a", None)]
    report = loop.ends()
    assert (report.end, report.abandoned) == (End.EMPTY, 1)


def test_a_stalled_loop_waits_for_no_body_any_more() -> None:
    loop = Loop(**concurrency(1)).brings(*items("a"))
    postpone(loop, 1)
    loop.hears(loop.done(1, freed=False), at=5.0)
    assert loop.waits == (1, 35.0)
    loop.hears(at=35.0)
    assert loop.waits == (1, 65.5), "only the settler is left"
    assert loop.settling()[0].settlement is None
    with pytest.raises(LoopStalled):
        loop.ends()


def test_a_wait_of_no_length_still_hears_what_happened() -> None:
    loop = Loop(streaming=True, empty_queue={"backoff": 0.0}).brings()
    assert loop.waits == (1, 0.0)
    assert loop.hears().asked == 10


# -- too many to settle ---------------------------------------------------------------------------


def test_nothing_is_fetched_while_as_many_as_permitted_wait_to_be_settled() -> None:
    loop = Loop(settle={"pending": 2, "group": 2, "linger": 0.0})
    loop.brings(*items("a", deliveries=11))
    assert loop.asked == 10, "one may still come"
    loop.brings(*items("b", deliveries=11))
    assert loop.waits == (1, NEVER)
    settle(loop)
    told = loop.loop.mailbox.take()
    assert told == [SETTLED]
    assert loop.hears(*told).asked == 10


def test_a_loop_that_does_not_wait_for_it_is_not_told_what_was_settled() -> None:
    loop = Loop(settle={"pending": 2, "group": 2, "linger": 0.0}).brings(*items("a", deliveries=11))
    settle(loop)
    assert len(loop.loop.mailbox) == 0


# -- claims that are lost -------------------------------------------------------------------------


def signal(mailbox: Mailbox, item: Any) -> None:
    mailbox.put(item)


def test_only_the_one_whose_claim_is_lost_is_interrupted() -> None:
    loop = Loop(**concurrency(2)).brings(*items("a", "b"))
    loop.loop.lose(["b"], signal)
    (event,) = loop.loop.mailbox.take()
    assert (type(event), event.receipts) == (Lost, ("b",))
    loop.hears(event)
    assert loop.interrupted == [loop.slots[2]]
    handling = loop.spawned[2].script
    next(handling)
    with pytest.raises(StopIteration):
        handling.send(Stopped())
    (item,) = loop.settling()
    assert (item.settlement, item.outcome.kind, item.outcome.reason) == (None, Kind.RELEASED, "lost")


def test_one_that_waits_is_dropped_when_its_claim_is_lost() -> None:
    loop = Loop(**concurrency(1, prefetch=2)).brings(*items("a", "b", "c"))
    loop.loop.lose(["b"], signal)
    loop.hears(*loop.loop.mailbox.take())
    loop.hears(loop.done(1))
    (item,) = loop.settling()
    assert (item.delivery.receipt, item.settlement, item.outcome.reason) == ("b", None, "lost")
    assert loop.watch.slots() == (1, 0, 0), "c runs in its place"


def test_a_lost_claim_that_nobody_holds_is_forgotten() -> None:
    loop = Loop(**concurrency(2, streaming=True)).brings()
    loop.loop.lose(["a"], signal)
    loop.hears(*loop.loop.mailbox.take(), WAKE)
    loop.brings(*items("a"))
    assert (loop.flights, loop.settling()) == (1, [])


def test_a_claim_that_cannot_be_renewed_is_lost_at_once() -> None:
    loop = Loop(lease=30.0)
    renewing = loop.spawned[1]
    assert (renewing.counted, renewing.told) == (False, loop.loop.mailbox)
    delivery = Delivery(Transaction("a"), "a", lease_until=30.0)
    loop.brings(delivery)
    assert next(renewing.script).until == 10.0
    loop.now = 10.0
    extend = renewing.script.send(None)
    assert (extend.step, extend.args) == ("extend", ([delivery],))
    assert isinstance(renewing.script.send(Ok([None])), Sleep)
    assert not loop.loop.mailbox.await_by(loop.slots[0], 99), "whatever it waits for, this is urgent"
    (event,) = loop.loop.mailbox.take()
    assert event.receipts == ("a",)


# -- the end --------------------------------------------------------------------------------------


def test_a_stop_gives_back_what_is_held_and_lets_the_rest_drain() -> None:
    loop = Loop(**concurrency(1, prefetch=1), now=50.0).brings(*items("a", "b"))
    loop.on(Stopped())
    assert [(item.delivery.receipt, item.outcome.reason) for item in loop.settling()] == [("b", "stop")]
    assert loop.waits == (1, 80.0)
    loop.hears(loop.done(1), at=60.0)
    assert loop.waits == (1, 80.5)
    assert loop.ends().end is End.STOP


def test_a_second_stop_ends_the_drain_at_once() -> None:
    loop = Loop().brings(*items("a")).on(Stopped()).on(Stopped(), at=4.0)
    assert loop.interrupted == [loop.slots[1]]
    assert loop.waits == (1, NEVER), "who was interrupted answers soon"
    loop.hears(loop.done(1))
    assert loop.waits == (1, 4.5)
    assert loop.ends().end is End.STOP


def test_a_first_stop_in_a_drain_for_another_reason_changes_nothing() -> None:
    loop = Loop(timeout=10.0, timeout_drain=30.0).brings(*items("a")).brings()
    loop.hears(at=10.0)
    loop.on(Stopped(), at=11.0)
    assert (loop.waits, loop.interrupted) == ((1, 40.0), [])
    loop.on(Stopped(), at=12.0)
    assert loop.interrupted == [loop.slots[1]]
    loop.hears(loop.done(1))
    with pytest.raises(LoopTimeout):
        loop.ends()


def test_a_stop_while_the_last_ones_run_begins_a_drain() -> None:
    loop = Loop().brings(*items("a")).brings()
    loop.on(Stopped(), at=20.0)
    assert loop.waits == (1, 50.0)
    loop.on(Stopped(), at=21.0)
    assert loop.interrupted == [loop.slots[1]]
    loop.hears(loop.done(1))
    assert loop.waits == (1, 21.5)
    assert loop.ends().end is End.STOP


def test_a_fetch_that_failed_ends_the_loop_but_not_what_runs() -> None:
    loop = Loop(**concurrency(1, prefetch=3)).brings(*items("a", "b"))
    loop.on(Err(ConfigurationError("no such queue")))
    error = loop.watch.told[-1][2]
    assert isinstance(error, FetchException)
    assert loop.watch.told[-1] == ("fetched", None, error)
    assert [(item.delivery.receipt, item.outcome.reason) for item in loop.settling()] == [("b", "fetch")]
    assert loop.waits == (1, NEVER)
    loop.hears(loop.done(1))
    assert loop.waits == (1, NEVER)
    with pytest.raises(FetchException) as caught:
        loop.ends()
    assert caught.value is error
    assert (error.report.end, error.report.fetches, error.report.empty_fetches) == (End.FETCH, 2, 0)


def test_a_fetch_that_is_stopped_says_neither_deliveries_nor_an_error() -> None:
    loop = Loop()
    loop.on(Stopped())
    assert loop.watch.told[-1] == ("fetched", None, None)
    assert loop.ends().end is End.STOP


def test_what_a_fetch_brings_too_late_is_given_back() -> None:
    loop = Loop(timeout=10.0)
    call = loop.effect
    loop.on(Expired(call), at=10.0)
    call.late(items("a"))
    (item,) = loop.settling()
    assert (item.outcome.reason, item.outcome.kind) == ("late", Kind.RELEASED)


def test_a_settler_that_takes_too_long_is_interrupted_and_then_waited_for() -> None:
    loop = Loop(drain_timeout=0.0, now=8.0).on(Stopped())
    assert loop.waits == (1, 8.5)
    loop.hears(at=8.4)
    assert (loop.waits, loop.interrupted) == ((1, 8.5), [])
    loop.hears(at=8.5)
    assert (loop.waits, loop.interrupted) == ((1, NEVER), [loop.slots[0]])
    assert loop.ends().end is End.STOP


def test_a_stop_leaves_the_settler_only_a_moment() -> None:
    loop = Loop(now=8.0).brings().on(Stopped())
    assert loop.waits == (1, 8.5)
    loop.on(Stopped(), at=8.3)
    assert loop.waits == (1, 8.5), "a stop never gives it more"
    loop.hears(at=8.5)
    assert loop.interrupted == [loop.slots[0]]


def test_renewing_ends_when_everything_is_settled() -> None:
    loop = Loop(lease=30.0).brings()
    assert len(loop.boxes[1]) == 1, "the settler was told to close"
    loop.hears(loop.done(0))
    assert loop.interrupted == [loop.slots[1]]
    assert loop.waits == (1, NEVER)
    loop.on(Stopped())
    assert loop.hears(loop.done(1)).result.end is End.EMPTY
