"""The produce call: runs every transaction of a list through its lifecycle, one batch after the other.

The lifecycle of a produced transaction is the produce step, then the success or the exception step. The call is a
script: a generator that yields effects (start, wait, interrupt) for a driver, which performs them with threads or
asyncio. Each running lifecycle occupies a slot. An abandoned call has timed out but still runs, and keeps its slot
until it exits; the result that it returns then is late, and discarded. A call is stalled when abandoned calls have
occupied all slots for the drain timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.engine.effects import NEVER, Interrupted, Script, spawn, wait
from ergon_framework.engine.scheduler import Mailbox, ScriptEnded, SlotFreed
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.consume import SlotTable
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.exceptions import LoopStalled, LoopTimeout
from ergon_framework.worker.lifecycle import LifecycleSpec, LifecycleStarter, run_lifecycle
from ergon_framework.worker.report import Outcome, OutcomeKind, ProduceReport, StopReason
from ergon_framework.worker.running import drain_end

if TYPE_CHECKING:
    from ergon_framework.worker.policies import ProducerPolicy


#: Two transactions with one id and the same values of these fields are the same work.
_CONTENT_FIELDS: Final = ("payload", "type", "schema_version", "key", "tenant")


class ProduceRun:
    """One produce call for one list, and its state for the probes (see ``worker.running.RunningLoop``)."""

    #: Always None and 0: a produce call fetches nothing, so it never stops fetching and has no claims.
    not_fetching_reason: str | None = None
    in_flight = 0

    def __init__(
        self,
        spec: LifecycleSpec,
        transactions: Sequence[Transaction],
        policy: ProducerPolicy,
        *,
        create_mailbox: Callable[[], Mailbox],
        late_results: Callable[[], int],
        start: LifecycleStarter = run_lifecycle,
        observer: LoopObserver | None = None,
    ) -> None:
        """Prepare a call; *late_results* returns how many abandoned calls have returned so far."""
        self._late_results = late_results
        self._start_lifecycle = start
        self._spec = spec
        self._monotonic = spec.clock.monotonic
        # A copy: the caller may change the list during the call.
        self._transactions = _check_transactions(transactions)
        self._distinct = _select_distinct(self._transactions)
        self._loop = policy.loop
        self._observer = observer or LoopObserver()
        self.mailbox = create_mailbox()
        self._deadline = NEVER
        self._outcomes: dict[tuple[str, str], Outcome] = {}
        self._slot_table: SlotTable[Transaction] = SlotTable(
            policy.loop.concurrency.value, stall_timeout=policy.loop.drain_timeout, clock=self._monotonic
        )
        self._started = 0
        #: Why the call ends; the reason of the outcomes that it releases.
        self._stop_reason = StopReason.DONE

    @property
    def live(self) -> bool:
        """Whether the call can start work: false after abandoned calls have held every slot for too long."""
        return self._slot_table.live

    def _count_slots(self) -> tuple[int, int, int]:
        """Return the running, abandoned and waiting transactions; a produce call has no backlog of waiting ones."""
        return len(self._slot_table.running), len(self._slot_table.abandoned), 0

    def run(self) -> Script[ProduceReport]:
        """Produce until all have an outcome, or there is a reason to end; return one outcome per input."""
        self._observer.on_loop_start(self._count_slots)
        if self._loop.timeout is not None:
            self._deadline = self._monotonic() + self._loop.timeout
        end = StopReason.DONE
        for batch in self._split_batches():
            self._observer.on_batch(len(batch))
            end = yield from self._run_batch(deque(batch))
            if end is not StopReason.DONE:
                break
        self._observer.on_loop_end(end)
        return self._conclude(end)

    def _split_batches(self) -> list[list[Transaction]]:
        """Split the distinct transactions into batches, in order; a transaction that occurs twice runs once."""
        size = self._loop.batch.size
        return [self._distinct[start : start + size] for start in range(0, len(self._distinct), size)]

    def _run_batch(self, waiting: deque[Transaction]) -> Script[StopReason]:
        """Start transactions as slots become free; return when all of the batch have ended."""
        while waiting or self._slot_table.running:
            while waiting and self._slot_table.free > 0 and not self._is_at_limit():
                yield from self._start(waiting.popleft())
            if waiting and self._is_at_limit():
                return (yield from self._drain(StopReason.LIMIT))
            events = yield from wait(self.mailbox, until=min(self._deadline, self._slot_table.stall_deadline))
            end = yield from self._find_end(events)
            if end is not None:
                return (yield from self._drain(end))
        return StopReason.DONE

    def _is_at_limit(self) -> bool:
        return self._loop.limit is not None and self._started >= self._loop.limit

    def _start(self, transaction: Transaction) -> Script[None]:
        self._started += 1
        script = self._start_lifecycle(self._spec, transaction, self._observer.on_transaction_start(transaction, None))
        # counted: the slot is one of the loop's concurrency.
        slot = yield from spawn(script, notify=self.mailbox, counted=True)
        self._slot_table.running[slot] = transaction

    def _find_end(self, events: list[Any] | Interrupted) -> Script[StopReason | None]:
        """Handle *events*; return why the produce call ends, None if it continues."""
        if isinstance(events, Interrupted):
            return StopReason.STOP
        yield from self._handle_events(events)
        if self._monotonic() >= self._deadline:
            return StopReason.TIMEOUT
        return None if self._slot_table.live else StopReason.STALLED

    def _handle_events(self, events: list[ScriptEnded | SlotFreed]) -> Script[None]:
        for event in events:
            if isinstance(event, ScriptEnded):
                outcome: Outcome = event.value
                if outcome.kind is OutcomeKind.RELEASED:
                    outcome.reason = self._stop_reason.value
                self._outcomes[_get_identity(self._slot_table.running[event.slot])] = outcome
                self._observer.on_transaction_end(outcome)
            self._slot_table.handle_event(event)
        yield from ()  # makes this a generator, as interrupt_all() requires

    def _drain(self, end: StopReason) -> Script[StopReason]:
        """Let running work end within its time, then stop it; after LIMIT within the time of the whole call.

        No stall deadline is needed: in a stalled produce call every slot holds an abandoned handler call, and the drain
        waits only for lifecycles that still run.
        """
        until = NEVER if end is StopReason.LIMIT else self._compute_drain_end(end)
        stop_requested = end is StopReason.STOP
        while self._slot_table.running and self._monotonic() < until:
            events = yield from wait(self.mailbox, until=min(until, self._deadline if until == NEVER else NEVER))
            new_end = yield from self._find_end(events)
            if new_end is StopReason.STOP and stop_requested:
                break  # a second stop ends the drain
            stop_requested = stop_requested or new_end is StopReason.STOP
            if new_end is not None and until == NEVER:
                end = new_end
                until = self._compute_drain_end(end)
        self._stop_reason = end
        yield from self._slot_table.interrupt_all(self.mailbox, self._handle_events)
        return end

    def _compute_drain_end(self, end: StopReason) -> float:
        return drain_end(self._loop, end, now=self._monotonic(), deadline=self._deadline)

    def _conclude(self, end: StopReason) -> ProduceReport:
        """Return the report with one outcome per input, or raise the error that *end* stands for, with the report."""
        outcomes = [
            self._outcomes.get(_get_identity(transaction)) or _create_unstarted_outcome(transaction, end)
            for transaction in self._transactions
        ]
        report = ProduceReport(
            outcomes, stop_reason=end, still_running=len(self._slot_table.abandoned), late_results=self._late_results()
        )
        if end is StopReason.TIMEOUT:
            raise LoopTimeout(
                f"call timed out after {self._loop.timeout} s; {report.count(OutcomeKind.RELEASED)} were released, "
                f"of which {report.released_started} had started",
                report,
            )
        if end is StopReason.STALLED:
            raise LoopStalled(
                f"all {self._slot_table.concurrency} slots are occupied by calls that timed out and did not exit "
                f"for {self._loop.drain_timeout} s",
                report,
            )
        return report


def _check_transactions(transactions: Sequence[Transaction]) -> tuple[Transaction, ...]:
    if isinstance(transactions, Transaction) or not isinstance(transactions, Iterable):
        raise ConfigurationError(
            f"input of produce_transactions is a {type(transactions).__name__}; pass a list of transactions"
        )
    checked = tuple(transactions)
    for position, transaction in enumerate(checked):
        if not isinstance(transaction, Transaction):
            raise ConfigurationError(
                f"input of produce_transactions is invalid: position {position} is a {type(transaction).__name__}; "
                "wrap the payload: Transaction(id, payload)"
            )
    return checked


def _select_distinct(transactions: Sequence[Transaction]) -> list[Transaction]:
    """List each transaction once, in order; raise if two different ones have the same source and id."""
    first: dict[tuple[str, str], int] = {}
    for position, transaction in enumerate(transactions):
        earlier = first.setdefault(_get_identity(transaction), position)
        if not _is_same_work(transactions[earlier], transaction):
            raise ConfigurationError(
                f"input of produce_transactions is invalid: two different transactions have the id {transaction.id!r}, "
                f"at positions {earlier} and {position}; give each its own id"
            )
    return [transactions[position] for position in first.values()]


def _is_same_work(one: Transaction, other: Transaction) -> bool:
    """Return whether both are the same work; creation time and trace are ignored."""
    if one is other:
        return True
    try:
        return all(bool(getattr(one, name) == getattr(other, name)) for name in _CONTENT_FIELDS)
    except Exception:  # noqa: BLE001 - a payload may not support comparison, and then counts as different
        return False


def _create_unstarted_outcome(transaction: Transaction, end: StopReason) -> Outcome:
    outcome = Outcome(transaction, OutcomeKind.RELEASED, reason=end.value)
    outcome.attempts = 0
    return outcome


def _get_identity(transaction: Transaction) -> tuple[str, str]:
    return transaction.source, transaction.id
