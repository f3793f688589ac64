"""The consume loop: fetch as much as there is capacity for, start it immediately, and shut down cleanly.

The loop is a script: a generator that yields effects, such as starting the lifecycle of a transaction or waiting for
events in its mailbox, for a driver to perform. A delivery is a fetched transaction with its claim, the exclusive right
to process it until it is settled (acked, deferred, released or dead-lettered in the broker). A claim may be a lease,
which expires unless it is renewed. The backlog holds the deliveries that have not started. The slot table records what
occupies the slots of a loop, one transaction each. The loop is stalled while abandoned calls, which timed out and did
not exit, occupy all slots. When it stops, it drains: running work may end within a limited time, the rest is released.

The delivery handler runs the lifecycles. Its ``postponed`` settlements would redeliver a transaction whose call still
runs, so they wait until that call has exited. Two fields of the policy are easily confused: ``drain_timeout`` limits
the drain after a stop, ``timeout_drain`` the drain after the loop's own timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import NEVER, Interrupted, Script, Spawn, interrupt, spawn, wait
from ergon_framework.engine.scheduler import Mailbox, ScriptEnded, Slot, SlotFreed
from ergon_framework.gates import Gate, first_pause
from ergon_framework.worker.admission import Backlog
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.exceptions import FetchException, LoopStalled, LoopTimeout
from ergon_framework.worker.fetch import Fetcher
from ergon_framework.worker.lifecycle import DeliveryHandler, LifecycleSpec, LifecycleStarter, run_lifecycle
from ergon_framework.worker.report import Outcome, Report, StopReason
from ergon_framework.worker.running import drain_end
from ergon_framework.worker.settle import Settler, renew_leases
from ergon_framework.worker.solo import SoloMember, SoloRun

if TYPE_CHECKING:
    from ergon_framework.worker.policies import ConsumerPolicy


T = TypeVar("T")

#: Handles the events of a loop's mailbox.
EventHandler: TypeAlias = Callable[[list[Any]], Script[None]]


class SlotTable(Generic[T]):
    """The occupied slots of a loop: a slot is free again when the last call of its transaction has exited."""

    def __init__(self, concurrency: int, *, stall_timeout: float, clock: Callable[[], float]) -> None:
        self.concurrency = concurrency
        self._stall_timeout = stall_timeout
        self._clock = clock
        #: Running lifecycles.
        self.running: dict[Slot, T] = {}
        #: Ended lifecycles with an abandoned call that still runs.
        self.abandoned: dict[Slot, T] = {}
        self._stalled_since: float | None = None
        #: The loop was stalled for too long and starts nothing more: a supervisor must restart the process.
        self._is_stalled = False

    @property
    def free(self) -> int:
        return 0 if self._is_stalled else self.concurrency - len(self.running) - len(self.abandoned)

    def handle_event(self, event: ScriptEnded | SlotFreed) -> T | None:
        """Record *event*; return the entry whose slot is now free, if there is one."""
        if type(event) is ScriptEnded and event.freed and not self.abandoned:
            return self.running.pop(event.slot)  # the common case, which cannot be stalled
        if isinstance(event, SlotFreed):
            # A helper script (fetch, settle, lease renewal) may also have abandoned a call; it is not in this table.
            freed = self.abandoned.pop(event.slot, None)
        elif event.freed:
            freed = self.running.pop(event.slot)
        else:
            freed = None
            self.abandoned[event.slot] = self.running.pop(event.slot)
        self._is_stalled = not self.live
        if self._is_stalled:
            return freed  # _stalled_since is kept, so the loop stays stalled: its calls have hung once
        if len(self.abandoned) < self.concurrency:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self._clock()
        return freed

    @property
    def stall_deadline(self) -> float:
        """The time at which the loop has been unable to start work for too long."""
        return NEVER if self._stalled_since is None else self._stalled_since + self._stall_timeout

    @property
    def live(self) -> bool:
        """Whether the loop can start work: false after abandoned calls have held every slot for too long."""
        return self._clock() < self.stall_deadline

    def interrupt_all(self, mailbox: Mailbox, handle_events: EventHandler) -> Script[None]:
        """Interrupt all running lifecycles, and handle their ends."""
        for slot in list(self.running):
            yield from interrupt(slot)
        # An interrupted lifecycle makes no further call and waits for nothing, so it ends soon.
        yield from process_events_until(lambda: not self.running, mailbox, handle_events)


def process_events_until(condition: Callable[[], bool], mailbox: Mailbox, handle_events: EventHandler) -> Script[None]:
    """Handle events until *condition* returns true; interrupts do not end it."""
    while not condition():
        events = yield from wait(mailbox)
        if not isinstance(events, Interrupted):
            yield from handle_events(events)


# -- the consume loop -------------------------------------------------------------------------------

#: Event: new messages may have arrived.
WAKE_EVENT: Final = object()
#: Event: a solo run of another loop begins or ends, or that of this one may begin.
SOLO_EVENT: Final = object()

#: Seconds that settlements may still take after the drain, the wait for running work at shutdown.
FLUSH_TIMEOUT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ClaimsLost:
    """Event: these claims are lost."""

    receipts: Sequence[Any]


def _accept_writes() -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorCalls:
    """The calls of a connector that the loop makes, in the variant of the driver."""

    fetch: Callable[[int], Any]
    settle: Callable[[Any], Any]
    extend: Callable[[Any], Any]
    #: Seconds after which an unrenewed claim ends; None if claims need no renewal.
    lease: float | None = None
    #: Returns why the server rejects writes although it is readable; None if it accepts them.
    write_refusal: Callable[[], str | None] = _accept_writes


class ConsumeLoop:
    """One run of a consume loop."""

    def __init__(
        self,
        spec: LifecycleSpec,
        connector_calls: ConnectorCalls,
        policy: ConsumerPolicy,
        *,
        name: str,
        create_mailbox: Callable[[], Mailbox],
        late_results: Callable[[], int],
        start: LifecycleStarter = run_lifecycle,
        gates: tuple[Gate, ...] = (),
        observer: LoopObserver | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        on_fetch: Callable[[], None] | None = None,
        solo_run: SoloRun | None = None,
    ) -> None:
        self._clock = spec.clock
        self._connector_calls = connector_calls
        self._policy = policy
        self._loop = policy.loop
        self._late_results = late_results
        self._gates = gates
        self._on_fetch = on_fetch
        self._observer = observer = observer or LoopObserver()
        self.mailbox = create_mailbox()
        self.report = Report()
        self._settler = Settler(
            connector_calls.settle,
            policy.steps.settle,
            clock=spec.clock,
            mailbox=create_mailbox(),
            report=self.report,
            observer=observer,
            on_outcome=on_outcome,
        )
        self._delivery_handler = DeliveryHandler(
            spec, policy.steps.settle, self._settler, name=name, observer=observer, start=start
        )
        self._backlog = Backlog(
            policy.loop, self._delivery_handler, self._settler, clock=spec.clock, report=self.report, observer=observer
        )
        self._slot_table: SlotTable[Delivery] = SlotTable(
            policy.loop.concurrency.value, stall_timeout=policy.loop.drain_timeout, clock=spec.clock.monotonic
        )
        self._deadline = NEVER
        #: The slots of the scripts that settle and renew leases, until these end.
        self._helpers: set[Slot] = set()
        #: Whether messages may have arrived since the last fetch, and whether an event that says so is in the mailbox.
        self._was_woken = False
        self._is_wake_pending = False
        #: The running transaction is on its last permitted delivery and runs alone: a crash then has no other cause.
        self._runs_alone = False
        #: This loop's part in the solo runs of the process; a loop by itself is the only member.
        self._solo = SoloMember(
            solo_run or SoloRun(spec.clock.monotonic),
            partial(self.mailbox.put_from_any_thread, SOLO_EVENT),
            spec.clock.monotonic,
        )
        #: No fetch follows: waiting deliveries are not released for a solo run of another loop.
        self._is_draining = False
        self._fetch_error: FetchException | None = None
        self._fetcher: Fetcher | None = None

    @property
    def live(self) -> bool:
        """Whether the loop can start work: false after abandoned calls have held every slot for too long."""
        return self._slot_table.live

    @property
    def not_fetching_reason(self) -> str | None:
        """Why work cannot be fetched or settled; None if an empty queue is the only reason."""
        last_error = None if self._fetcher is None else self._fetcher.last_error
        if last_error is not None:
            return f"the connector cannot be read: {last_error}"
        rejection = self._connector_calls.write_refusal()
        return self.report.paused if rejection is None else f"the connector accepts no new messages: {rejection}"

    @property
    def in_flight(self) -> int:
        """The number of fetched transactions without an outcome; a snapshot if read from another thread."""
        return len(self._slot_table.running) + len(self._backlog)

    def wake(self, signal: Callable[[Mailbox, Any], None]) -> None:
        """Notify the loop that messages may have arrived; further calls before it reacts have no effect."""
        if not self._is_wake_pending:
            self._is_wake_pending = True
            signal(self.mailbox, WAKE_EVENT)

    def _count_slots(self) -> tuple[int, int, int]:
        return len(self._slot_table.running), len(self._slot_table.abandoned), len(self._backlog)

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> Script[Report]:
        """Consume until there is a reason to end; return the report, or raise with it attached."""
        self._observer.on_loop_start(self._count_slots)
        self._solo.join()
        if self._loop.timeout is not None:
            self._deadline = self._clock.monotonic() + self._loop.timeout
        settle_slot = yield from spawn(self._settler.run(), notify=self.mailbox, counted=False)
        self._helpers.add(settle_slot)
        renew_slot = None
        if self._connector_calls.lease is not None:
            script = renew_leases(
                self._connector_calls.extend,
                self._backlog.claims,
                lease=self._connector_calls.lease,
                clock=self._clock,
                on_lost=self._on_claims_lost,
            )
            renew_slot = yield from spawn(script, notify=self.mailbox, counted=False)
            self._helpers.add(renew_slot)
        self._fetcher = fetcher = self._create_fetcher()
        end = yield from self._fetch_and_start(fetcher)
        end, until = yield from self._drain(end)
        # A late fetch result brings claims, which would stay claimed for a lease if they were not released here. The
        # wait is short, and does not exceed the drain, except after a timeout, whose drain may be over already.
        fetch_deadline = max(until, self._deadline + FLUSH_TIMEOUT_SECONDS) if end is StopReason.TIMEOUT else until
        yield from fetcher.await_abandoned_fetch(min(fetch_deadline, self._clock.monotonic() + FLUSH_TIMEOUT_SECONDS))
        yield from self._flush(settle_slot, renew_slot, until)
        self.report.stop_reason = end
        self.report.still_running = len(self._slot_table.abandoned)
        self.report.late_results = self._late_results()
        self._observer.on_loop_end(end)
        self.leave()
        return self._conclude(end)

    def leave(self) -> None:
        """Leave the solo runs of the process; to be called as well if the driver of the loop fails."""
        self._solo.leave()

    def _conclude(self, end: StopReason) -> Report:
        """Return the report, or raise the error that *end* stands for, with the report."""
        report = self.report
        if self._fetch_error is not None:
            self._fetch_error.report = report
            raise self._fetch_error
        if end is StopReason.TIMEOUT:
            finished = report.finished
            raise LoopTimeout(f"loop timed out after {self._loop.timeout} s; {finished} transactions had ended", report)
        if end is StopReason.STALLED:
            raise LoopStalled(
                f"all {self._slot_table.concurrency} slots are occupied by calls that timed out and did not exit "
                f"for {self._loop.drain_timeout} s; run work that may hang in an executor process",
                report,
            )
        return report

    def _create_fetcher(self) -> Fetcher:
        return Fetcher(
            self._connector_calls.fetch,
            self._policy.steps.fetch.retry,
            clock=self._clock,
            deadline=self._deadline,
            retries_lost_connections=self._loop.streaming,
            release=self._backlog.release,
            on_retry=self._observer.on_fetch_retry,
        )

    def _fetch_and_start(self, fetcher: Fetcher) -> Script[StopReason]:
        """Fetch and start transactions until there is a reason to end."""
        empty_fetches = 0
        while True:
            capacity = yield from self._await_capacity()
            if isinstance(capacity, StopReason):
                return capacity
            pause = first_pause(self._gates) if self._gates else None
            self._set_pause(None if pause is None else pause.reason)
            if pause is not None:
                end = yield from self._idle(pause.seconds)
                if end is not None:
                    return end
                continue
            result = yield from self._fetch(fetcher, capacity)
            if isinstance(result, StopReason):
                return result
            if result:
                empty_fetches = 0
                for delivery in result:
                    self._backlog.add(delivery)
                yield from self._start_waiting()
                continue
            if not self._loop.streaming:
                return StopReason.EMPTY
            end = yield from self._idle(self._loop.empty_queue.delay(empty_fetches))
            empty_fetches += 1
            if end is not None:
                return end

    def _fetch(self, fetcher: Fetcher, capacity: int) -> Script[list[Delivery] | StopReason]:
        """Fetch up to *capacity* deliveries; return them, or why the loop ends."""
        report = self.report
        self._was_woken = False
        self._observer.on_batch(capacity)
        calls_before = fetcher.calls
        result = yield from fetcher.run(capacity, self._observer.on_fetch_start())
        report.fetches += fetcher.calls > calls_before
        if isinstance(result, FetchException):
            self._observer.on_fetch_end(None, result)
            self._fetch_error = result
            return StopReason.FETCH
        if isinstance(result, StopReason):
            self._observer.on_fetch_end(None, None)
            return result
        self._observer.on_fetch_end(result, None)
        if not result:
            report.empty_fetches += 1
        elif len(result) > self._loop.batch.size:
            self._observer.on_oversized_batch(self._loop.batch.size, len(result))
        if result and self._on_fetch is not None:
            self._on_fetch()
        return result

    def _set_pause(self, reason: str | None) -> None:
        if reason != self.report.paused:
            self.report.paused = reason
            self._observer.on_pause(reason)

    # -- waiting --------------------------------------------------------------------------------

    def _await_capacity(self) -> Script[int | StopReason]:
        """Wait until a fetch is worthwhile, and return the number of transactions to request."""
        monotonic, loop, half_slots = self._clock.monotonic, self._loop, (self._slot_table.concurrency + 1) // 2
        # Half of the prefetch capacity: an early request, so that no slot waits for its result.
        max_request = min(loop.batch.size, (self._slot_table.concurrency + loop.prefetch + 1) // 2)
        until: float | None = None
        if len(self.mailbox):
            # Handle the events of the last fetch first: callers may wait for them, and the next fetch may be long.
            early_end = yield from self._listen(until=monotonic())
            if early_end is not None:
                return early_end
        while True:
            if loop.limit is not None and self.report.started >= loop.limit:
                return StopReason.LIMIT
            capacity, free = self._count_capacity(), self._slot_table.free
            if capacity > 0 and (
                free >= half_slots or (loop.prefetch and capacity >= min(max_request, self._backlog.remaining_limit))
            ):
                return capacity
            if capacity <= 0 or (free == 0 and self._backlog.ready_count):
                # No slot is idle, so a fetch for less than half would only add a round trip.
                end = yield from self._listen()
            else:
                # A short wait for more free slots costs nothing: a fetch takes longer than the wait.
                until = monotonic() + loop.linger if until is None else until
                if monotonic() >= until:
                    return capacity
                end = yield from self._listen(count=half_slots - free, until=until)
            if end is not None:
                return end

    def _idle(self, seconds: float) -> Script[StopReason | None]:
        """Wait *seconds*, or until messages may have arrived."""
        until = self._clock.monotonic() + seconds
        while True:
            # Listens at least once, also for 0 seconds: a stop is received only while the loop listens.
            end = yield from self._listen(until=until)
            if end is not None:
                return end
            if self._was_woken or self._clock.monotonic() >= until:
                break
        self._was_woken = False
        return None

    def _listen(self, *, count: int = 1, until: float = NEVER) -> Script[StopReason | None]:
        """Wait for events, handle them and start ready work; return why the loop ends, if it does."""
        monotonic = self._clock.monotonic
        # A stall ends a loop that is not streaming; a streaming one continues, and its probe shows that it is not live.
        stall_deadline = NEVER if self._loop.streaming else self._slot_table.stall_deadline
        until = min(until, self._deadline, self._solo.deadline, stall_deadline)
        events = yield from wait(self.mailbox, count=count, until=until)
        if isinstance(events, Interrupted):
            return StopReason.STOP
        yield from self._handle_events(events)
        yield from self._start_waiting()
        if monotonic() >= self._deadline:
            return StopReason.TIMEOUT
        if not self.live and not self._loop.streaming:
            return StopReason.STALLED
        return None

    def _count_capacity(self) -> int:
        """Return the number of transactions to request: the loop fetches none that could not start."""
        if (
            self._runs_alone
            or self._solo.is_held
            or self._backlog.has_last_delivery
            or self._has_pending_settlements(self._policy.steps.settle.max_pending)
        ):
            return 0
        free = self._slot_table.free + self._loop.prefetch - self._backlog.ready_count
        return int(min(self._loop.batch.size, free, self._backlog.remaining_limit))

    # -- what happened --------------------------------------------------------------------------

    def _handle_events(self, events: list[Any]) -> Script[None]:
        """Handle *events*; one that no branch handles, a settled group, only had to end the wait."""
        for event in events:
            event_type = type(event)
            if event_type is ScriptEnded and event.slot in self._helpers:
                self._helpers.discard(event.slot)
            elif event_type is ScriptEnded or event_type is SlotFreed:
                freed = self._slot_table.handle_event(event)
                if freed is not None:
                    self._backlog.forget(freed)
            elif event is WAKE_EVENT:
                self._was_woken, self._is_wake_pending = True, False
            elif event_type is ClaimsLost:
                yield from self._interrupt_lost(event.receipts)
        # A transaction on its last permitted delivery runs alone until it is settled: if the process were killed
        # before, the transaction would be dead-lettered, although other work may have killed the process.
        if self._runs_alone and not self._slot_table.running and not self._has_pending_settlements():
            self._runs_alone = False
            self._solo.finish()

    def mark_lost(self, receipts: Iterable[Any], signal: Callable[[Mailbox, Any], None]) -> None:
        """Mark these claims as lost, effective immediately; callable from any thread."""
        lost_receipts = tuple(receipts)
        self._delivery_handler.lost_receipts.update(lost_receipts)
        signal(self.mailbox, ClaimsLost(lost_receipts))

    def _interrupt_lost(self, receipts: Sequence[Any]) -> Script[None]:
        for slot, delivery in list(self._slot_table.running.items()):
            if delivery.receipt in receipts:
                yield from interrupt(slot)
        self._backlog.prune_lost((*self._slot_table.running.values(), *self._slot_table.abandoned.values()))

    def _on_claims_lost(self, receipts: list[Any]) -> None:
        self.mark_lost(receipts, _put_urgently)

    # -- starting -------------------------------------------------------------------------------

    def _start_waiting(self) -> Script[None]:
        """Start waiting deliveries, as far as there are free slots."""
        if (self._solo.is_held or self._solo.paused_at is not None) and self._pause_for_solo():
            return
        free = self._slot_table.free
        while free > 0 and self._can_start():
            free -= 1
            delivery = self._backlog.pop_next()
            self.report.started += 1
            # The bare effect, not spawn(): a generator per transaction would take as long as the effect itself.
            slot: Slot = yield Spawn(self._delivery_handler.run(delivery), self.mailbox, counted=True)
            self._slot_table.running[slot] = delivery

    def _can_start(self) -> bool:
        """Return whether the next delivery may start next to the running ones.

        The last permitted delivery of a transaction runs alone in the process: if it kills the process, no other
        transaction loses a delivery. So the other waiting deliveries are released first.
        """
        if self._runs_alone:
            return False
        head = self._backlog.peek()
        if head is None:
            self._solo.finish()  # the claim of a delivery that waited for its solo run may be lost
            return False
        if head.deliveries < self._loop.max_deliveries:
            return True
        if len(self._backlog) > 1:
            self._backlog.release_all_but_next("alone")
        if self._slot_table.running or self._has_pending_settlements():
            self._solo.finish()  # the settlement of a call that exits late; the request follows it
            return False
        start = self._solo.try_start()
        if start is None:
            return False
        self._runs_alone = True
        self._observer.on_solo_start(head, start)
        return True

    def _pause_for_solo(self) -> bool:
        """Start nothing during a solo run of another loop; return False once it is over, or takes too long."""
        solo = self._solo
        if solo.is_held and solo.pause():
            if not self._is_draining:
                self._backlog.release_ready("alone")
            if not self._slot_table.running and not self._has_pending_settlements():
                solo.confirm()
            return True
        pause = solo.resume()
        if pause is not None:
            self._observer.on_solo_pause_end(pause)
        return False

    def _has_pending_settlements(self, minimum: int = 1) -> bool:
        """Return whether *minimum* or more settlements are pending; if so, the settler notifies the loop's mailbox."""
        if self._settler.pending < minimum:
            return False
        # The order matters: later settlements notify the mailbox, earlier ones show in the count.
        self._settler.notify_when_drained = self.mailbox
        return self._settler.pending >= minimum

    # -- the end --------------------------------------------------------------------------------

    def _drain(self, end: StopReason) -> Script[tuple[StopReason, float]]:
        """Let running work end and release the rest; return the stop reason, and when the drain has to end.

        A loop that ends because the queue is empty, or because of its limit, first runs its backlog without a time
        limit; a stop, a timeout or a stall during that time starts the limited drain.
        """
        monotonic = self._clock.monotonic
        self._is_draining = True
        #: The end of the drain; and the end of the wait for abandoned calls whose settlements wait for their exit, in a
        #: drain that has no end of its own.
        until = abandon_deadline = NEVER
        if end not in (StopReason.EMPTY, StopReason.LIMIT):
            until = self._release_waiting(end)
        stop_requested = end is StopReason.STOP
        # A stalled loop does not wait for abandoned calls: all its slots are occupied by calls that do not exit.
        while (
            self._slot_table.running
            or len(self._backlog)
            or (self._delivery_handler.postponed and end is not StopReason.STALLED)
        ):
            if monotonic() >= min(until, abandon_deadline):
                break
            if until == abandon_deadline == NEVER and not self._slot_table.running and not len(self._backlog):
                abandon_deadline = monotonic() + self._loop.drain_timeout
            new_end = yield from self._listen_until(until, abandon_deadline)
            if new_end is None:
                continue
            if stop_requested:
                until = monotonic()  # a second stop: end the drain, and keep settling short
                break
            stop_requested = new_end is StopReason.STOP
            if until == NEVER:
                end, abandon_deadline = new_end, NEVER
                until = self._release_waiting(end)
        self._delivery_handler.stop_reason = end
        yield from self._slot_table.interrupt_all(self.mailbox, self._handle_events)
        self._delivery_handler.keep_postponed_claims()
        return end, min(until, abandon_deadline)

    def _listen_until(self, until: float, abandon_deadline: float) -> Script[StopReason | None]:
        """Wait for events during the drain and handle them; return a new reason to end, if there is one.

        As long as the drain has no end (*until* is NEVER), waiting deliveries are started too.
        """
        if until == NEVER:
            return (yield from self._listen(until=abandon_deadline))
        events = yield from wait(self.mailbox, until=until)
        if isinstance(events, Interrupted):
            return StopReason.STOP
        yield from self._handle_events(events)
        return None

    def _release_waiting(self, end: StopReason) -> float:
        """Release deliveries that have not started; return the end of the drain."""
        self._backlog.release_all(end.value)
        if not self._runs_alone:
            self._solo.finish()
        if end is StopReason.FETCH:
            return NEVER
        return drain_end(self._loop, end, now=self._clock.monotonic(), deadline=self._deadline)

    def _flush(self, settle_slot: Slot, renew_slot: Slot | None, until: float) -> Script[None]:
        """Settle everything that is pending, then stop the lease renewal."""
        self._settler.close()
        monotonic = self._clock.monotonic
        # A drain without a time limit (the queue was empty, or the limit was reached) has no end: settlements may then
        # take until the end of the loop's own timeout and of the drain time that belongs to it.
        until = (
            max(monotonic(), self._deadline + self._loop.timeout_drain if until == NEVER else until)
            + FLUSH_TIMEOUT_SECONDS
        )
        while settle_slot in self._helpers:
            events = yield from wait(self.mailbox, until=until)
            if isinstance(events, Interrupted):
                until = min(until, monotonic() + FLUSH_TIMEOUT_SECONDS)
                continue
            yield from self._handle_events(events)
            if monotonic() >= until:
                yield from interrupt(settle_slot)
                until = NEVER
        if renew_slot is not None:
            yield from interrupt(renew_slot)
            yield from process_events_until(lambda: renew_slot not in self._helpers, self.mailbox, self._handle_events)


def _put_urgently(mailbox: Mailbox, item: Any) -> None:
    mailbox.put(item, urgent=True)
