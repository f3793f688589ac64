"""The consume loop: fetch what there is room for, start it at once, and end in good order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import NEVER, Script, Spawn, interrupt, spawn, wait
from ergon_framework.engine.outcome import Stopped
from ergon_framework.engine.slots import Done, Freed, Mailbox, Slot
from ergon_framework.task.crew import Crew, hear_until
from ergon_framework.task.drain import drain_end
from ergon_framework.task.exceptions import FetchException, LoopStalled, LoopTimeout
from ergon_framework.task.fetch import Fetcher
from ergon_framework.task.gates import Gate, ask
from ergon_framework.task.handling import Handling
from ergon_framework.task.intake import Intake
from ergon_framework.task.lifecycle import Course, Start, lifecycle
from ergon_framework.task.renew import renew
from ergon_framework.task.report import End, Outcome, Report
from ergon_framework.task.settle import Settler
from ergon_framework.task.watch import Onlooker

if TYPE_CHECKING:
    from ergon_framework.task.mixins.policies import ConsumerPolicy

#: Something may have arrived.
WAKE: Final = object()

#: How long settlements may still take once the drain is over.
FLUSH = 0.5


@dataclass(frozen=True, slots=True)
class Lost:
    """These claims are gone."""

    receipts: Sequence[Any]


def _no_refusal() -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """What the loop needs of a connector: callables of the driver's flavour."""

    fetch: Callable[[int], Any]
    settle: Callable[[Any], Any]
    extend: Callable[[Any], Any]
    #: Seconds after which an unrenewed claim ends; None when there is nothing to renew.
    lease: float | None = None
    #: Returns why the server takes no writes although it can be read; None if it takes them.
    write_refusal: Callable[[], str | None] = _no_refusal


class Consumption:
    """One run of a consume loop."""

    def __init__(
        self,
        course: Course,
        broker: Broker,
        policy: ConsumerPolicy,
        *,
        name: str,
        mailbox: Callable[[], Mailbox],
        fenced: Callable[[], int],
        start: Start = lifecycle,
        gates: tuple[Gate, ...] = (),
        watch: Onlooker | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        on_fetch: Callable[[], None] | None = None,
    ) -> None:
        self._senses = course.senses
        self._broker = broker
        self._policy = policy
        self._loop = policy.loop
        self._fenced = fenced
        self._gates = gates
        self._on_fetch = on_fetch
        self._watch = watch = watch or Onlooker()
        self.mailbox = mailbox()
        self.report = Report()
        self._settler = Settler(
            broker.settle,
            policy.steps.settle,
            senses=course.senses,
            mailbox=mailbox(),
            report=self.report,
            watch=watch,
            on_outcome=on_outcome,
        )
        self._handling = Handling(course, policy.steps.settle, self._settler, name=name, watch=watch, start=start)
        self._intake = Intake(
            policy.loop, self._handling, self._settler, senses=course.senses, report=self.report, watch=watch
        )
        self._crew: Crew[Delivery] = Crew(
            policy.loop.concurrency.value, patience=policy.loop.drain_timeout, clock=course.senses.clock
        )
        self._deadline = NEVER
        self._aides: set[Slot] = set()
        self._woken = False
        self._waking = False
        #: The one that runs is on its last permitted delivery.
        self._alone = False
        self._failure: FetchException | None = None
        self._fetcher: Fetcher | None = None

    @property
    def live(self) -> bool:
        """False when every slot has been held by abandoned bodies for too long."""
        return self._crew.live

    @property
    def trouble(self) -> str | None:
        """Why work cannot come in or be settled; None while there is no reason but an empty queue."""
        failing = None if self._fetcher is None else self._fetcher.failing
        if failing is not None:
            return f"the connector cannot be read: {failing}"
        refusal = self._broker.write_refusal()
        return self.report.paused if refusal is None else f"the connector takes no new messages: {refusal}"

    @property
    def in_hand(self) -> int:
        """How many were fetched and have no outcome yet; whoever looks from another thread sees a moment of it."""
        return len(self._crew.flights) + len(self._intake)

    def wake(self, signal: Callable[[Mailbox, Any], None]) -> None:
        """Something may have arrived; said once, however often the connector says it before it is heard."""
        if not self._waking:
            self._waking = True
            signal(self.mailbox, WAKE)

    def _slots(self) -> tuple[int, int, int]:
        return len(self._crew.flights), len(self._crew.bodies), len(self._intake)

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> Script[Report]:
        """Consume until there is a reason to end; return the report, or raise with it attached."""
        self._watch.began(self._slots)
        if self._loop.timeout is not None:
            self._deadline = self._senses.clock() + self._loop.timeout
        settling = yield from spawn(self._settler.run(), told=self.mailbox, counted=False)
        self._aides.add(settling)
        renewing = None
        if self._broker.lease is not None:
            script = renew(
                self._broker.extend,
                self._intake.claims,
                lease=self._broker.lease,
                senses=self._senses,
                lost=self._losing,
            )
            renewing = yield from spawn(script, told=self.mailbox, counted=False)
            self._aides.add(renewing)
        self._fetcher = fetcher = self._fetching()
        end = yield from self._feed(fetcher)
        end, until = yield from self._drain(end)
        # A fetch that answers now brings claims, which would be held for a lease if they were not released here.
        leaves = max(until, self._deadline + FLUSH) if end is End.TIMEOUT else until
        yield from fetcher.left(min(leaves, self._senses.clock() + FLUSH))
        yield from self._flush(settling, renewing, until)
        self.report.end = end
        self.report.abandoned = len(self._crew.bodies)
        self.report.fenced = self._fenced()
        self._watch.over(end)
        return self._reported(end)

    def _reported(self, end: End) -> Report:
        report = self.report
        if self._failure is not None:
            self._failure.report = report
            raise self._failure
        if end is End.TIMEOUT:
            ended = report.finished
            raise LoopTimeout(f"the loop's {self._loop.timeout} s are over; {ended} transactions had ended", report)
        if end is End.STALLED:
            raise LoopStalled(
                f"all {self._crew.concurrency} slots are held by bodies that timed out and did not leave "
                f"for {self._loop.drain_timeout} s; work that may hang belongs into an executor process",
                report,
            )
        return report

    def _fetching(self) -> Fetcher:
        return Fetcher(
            self._broker.fetch,
            self._policy.steps.fetch.retry,
            senses=self._senses,
            deadline=self._deadline,
            patient=self._loop.streaming,
            give_back=self._intake.give_back,
            on_retry=self._watch.on_fetch_retry,
        )

    def _feed(self, fetcher: Fetcher) -> Script[End]:
        """Fetch and start until there is a reason to end."""
        silence = 0
        while True:
            room = yield from self._room()
            if isinstance(room, End):
                return room
            pause = ask(self._gates) if self._gates else None
            self._hold(None if pause is None else pause.because)
            if pause is not None:
                end = yield from self._idle(pause.seconds)
                if end is not None:
                    return end
                continue
            fetched = yield from self._fetched(fetcher, room)
            if isinstance(fetched, End):
                return fetched
            if fetched:
                silence = 0
                for delivery in fetched:
                    self._intake.take(delivery)
                yield from self._fill()
                continue
            if not self._loop.streaming:
                return End.EMPTY
            end = yield from self._idle(self._loop.empty_queue.delay(silence))
            silence += 1
            if end is not None:
                return end

    def _fetched(self, fetcher: Fetcher, room: int) -> Script[list[Delivery] | End]:
        report = self.report
        self._woken = False
        self._watch.batch(room)
        before = fetcher.calls
        fetched = yield from fetcher.run(room, self._watch.fetching())
        report.fetches += fetcher.calls > before
        if isinstance(fetched, FetchException):
            self._watch.fetched(None, fetched)
            self._failure = fetched
            return End.FETCH
        if isinstance(fetched, End):
            self._watch.fetched(None, None)
            return fetched
        self._watch.fetched(fetched, None)
        if not fetched:
            report.empty_fetches += 1
        elif len(fetched) > self._loop.batch.size:
            self._watch.breach(self._loop.batch.size, len(fetched))
        if fetched and self._on_fetch is not None:
            self._on_fetch()
        return fetched

    def _hold(self, reason: str | None) -> None:
        if reason != self.report.paused:
            self.report.paused = reason
            self._watch.paused(reason)

    # -- waiting --------------------------------------------------------------------------------

    def _room(self) -> Script[int | End]:
        """Wait until it is worth fetching, and say how many may be asked for."""
        clock, loop, half = self._senses.clock, self._loop, (self._crew.concurrency + 1) // 2
        # Of what may be held, where there is a reserve: asked for in good time, so that no slot waits for the answer.
        most = min(loop.batch.size, (self._crew.concurrency + loop.prefetch + 1) // 2)
        until: float | None = None
        if len(self.mailbox):
            # What happened during the last fetch: somebody may be waiting for it, and the next fetch may be long.
            ended = yield from self._listen(until=clock())
            if ended is not None:
                return ended
        while True:
            if loop.limit is not None and self.report.started >= loop.limit:
                return End.LIMIT
            room, free = self._space(), self._crew.free
            if room > 0 and (free >= half or (loop.prefetch and room >= min(most, self._intake.room))):
                return room
            if room <= 0 or (free == 0 and self._intake.ready):
                # No slot is idle: a fetch for less than half would only be one more.
                end = yield from self._listen()
            else:
                # Nothing is lost by waiting a moment for more slots: fetches are dearer than moments.
                until = clock() + loop.linger if until is None else until
                if clock() >= until:
                    return room
                end = yield from self._listen(count=half - free, until=until)
            if end is not None:
                return end

    def _idle(self, seconds: float) -> Script[End | None]:
        """Wait *seconds*, or until something may have arrived."""
        until = self._senses.clock() + seconds
        while True:
            # At least once, however short the wait: this is where a stop is heard.
            end = yield from self._listen(until=until)
            if end is not None:
                return end
            if self._woken or self._senses.clock() >= until:
                break
        self._woken = False
        return None

    def _listen(self, *, count: int = 1, until: float = NEVER) -> Script[End | None]:
        """Hear what happened, and start what can be started; say if that ends the loop."""
        clock = self._senses.clock
        until = min(until, self._deadline, NEVER if self._loop.streaming else self._crew.stall_ends)
        events = yield from wait(self.mailbox, count=count, until=until)
        if isinstance(events, Stopped):
            return End.STOP
        yield from self._hear(events)
        yield from self._fill()
        if clock() >= self._deadline:
            return End.TIMEOUT
        if not self.live and not self._loop.streaming:
            return End.STALLED
        return None

    def _space(self) -> int:
        """How many may be asked for: nothing is fetched that could not start."""
        if self._alone or self._intake.holds_last or self._settling(self._policy.steps.settle.pending):
            return 0
        free = self._crew.free + self._loop.prefetch - self._intake.ready
        return int(min(self._loop.batch.size, free, self._intake.room))

    # -- what happened --------------------------------------------------------------------------

    def _hear(self, events: list[Any]) -> Script[None]:
        for event in events:
            kind = type(event)
            if kind is Done and event.slot in self._aides:
                self._aides.discard(event.slot)
            elif kind is Done or kind is Freed:
                left = self._crew.hear(event)
                if left is not None:
                    self._intake.left(left)
            elif event is WAKE:
                self._woken, self._waking = True, False
            elif kind is Lost:
                yield from self._claims_lost(event.receipts)
        # Until it is settled: a fetch that ends the process would cost it the delivery that it has not got any more.
        self._alone = self._alone and (bool(self._crew.flights) or self._settling())

    def lose(self, receipts: Iterable[Any], signal: Callable[[Mailbox, Any], None]) -> None:
        """These claims are gone, from this moment on; may be said on any thread."""
        gone_ones = tuple(receipts)
        self._handling.lost.update(gone_ones)
        signal(self.mailbox, Lost(gone_ones))

    def _claims_lost(self, receipts: Sequence[Any]) -> Script[None]:
        for slot, delivery in list(self._crew.flights.items()):
            if delivery.receipt in receipts:
                yield from interrupt(slot)
        self._intake.remember_lost((*self._crew.flights.values(), *self._crew.bodies.values()))

    def _losing(self, receipts: list[Any]) -> None:
        self.lose(receipts, _urgently)

    # -- starting -------------------------------------------------------------------------------

    def _fill(self) -> Script[None]:
        """Start what is held, as far as there are slots."""
        free = self._crew.free
        while free > 0 and self._may_start():
            free -= 1
            delivery = self._intake.next()
            self.report.started += 1
            # Bare, not through spawn(): a generator for every transaction would cost as much as the effect.
            slot: Slot = yield Spawn(self._handling.run(delivery), self.mailbox, counted=True)
            self._crew.flights[slot] = delivery

    def _may_start(self) -> bool:
        """Whether the next one may start beside those that run.

        The last permitted delivery of a transaction runs alone: if it takes the process with it,
        nobody else pays for that with a delivery. So those who only wait go back before.
        """
        head = self._intake.head()
        if head is None or self._alone:
            return False
        if head.deliveries < self._loop.max_deliveries:
            return True
        if len(self._intake) > 1:
            self._intake.clear_behind("alone")
        self._alone = not self._crew.flights and not self._settling()
        return self._alone

    def _settling(self, most: int = 1) -> bool:
        """Whether *most* or more are still to be settled; if so, the loop is told when that changes."""
        if self._settler.pending < most:
            return False
        # In this order: what is settled from here on tells us, what was settled before we see.
        self._settler.blocked = self.mailbox
        return self._settler.pending >= most

    # -- the end --------------------------------------------------------------------------------

    def _drain(self, end: End) -> Script[tuple[End, float]]:
        """Let what runs come to its end; give back what must not start. Answers how long that may have taken."""
        clock = self._senses.clock
        #: When the drain is over; when it is no longer worth waiting for bodies whose transactions are to go back.
        until = patience = NEVER
        if end not in (End.EMPTY, End.LIMIT):
            until = self._no_more(end)
        asked = end is End.STOP
        while self._crew.flights or len(self._intake) or (self._handling.postponed and end is not End.STALLED):
            if clock() >= min(until, patience):
                break
            if until == patience == NEVER and not self._crew.flights and not len(self._intake):
                patience = clock() + self._loop.drain_timeout
            ended = yield from self._listen_until(until, patience)
            if ended is None:
                continue
            if asked:
                until = clock()  # a second stop: no more patience, nor much for settling
                break
            asked = ended is End.STOP
            if until == NEVER:
                end, patience = ended, NEVER
                until = self._no_more(end)
        self._handling.ending = end
        yield from self._crew.dismiss(self.mailbox, self._hear)
        self._handling.give_up()
        return end, min(until, patience)

    def _listen_until(self, until: float, patience: float) -> Script[End | None]:
        if until == NEVER:
            return (yield from self._listen(until=patience))
        events = yield from wait(self.mailbox, until=until)
        if isinstance(events, Stopped):
            return End.STOP
        yield from self._hear(events)
        return None

    def _no_more(self, end: End) -> float:
        """Give back what has not begun; the moment when the drain is over."""
        self._intake.clear(end.value)
        if end is End.FETCH:
            return NEVER
        return drain_end(self._loop, end, now=self._senses.clock(), deadline=self._deadline)

    def _flush(self, settling: Slot, renewing: Slot | None, until: float) -> Script[None]:
        """Have everything settled; then nothing needs to be renewed."""
        self._settler.close()
        clock = self._senses.clock
        # A loop that was not told to end has until its own time is over, as if it still drained.
        until = max(clock(), self._deadline + self._loop.timeout_drain if until == NEVER else until) + FLUSH
        while settling in self._aides:
            events = yield from wait(self.mailbox, until=until)
            if isinstance(events, Stopped):
                until = min(until, clock() + FLUSH)
                continue
            yield from self._hear(events)
            if clock() >= until:
                yield from interrupt(settling)
                until = NEVER
        if renewing is not None:
            yield from interrupt(renewing)
            yield from hear_until(lambda: renewing not in self._aides, self.mailbox, self._hear)


def _urgently(mailbox: Mailbox, item: Any) -> None:
    mailbox.put(item, urgent=True)
