"""The produce call: every transaction of a list through its lifecycle, one batch after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.engine.effects import NEVER, Script, spawn, wait
from ergon_framework.engine.outcome import Stopped
from ergon_framework.engine.slots import Done, Freed, Mailbox
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.crew import Crew
from ergon_framework.task.drain import drain_end
from ergon_framework.task.exceptions import LoopStalled, LoopTimeout
from ergon_framework.task.lifecycle import Course, Start, lifecycle
from ergon_framework.task.report import End, Kind, Outcome, ProduceReport
from ergon_framework.task.watch import Onlooker
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from ergon_framework.task.mixins.policies import ProducerPolicy


#: What makes two transactions with one id the same work.
_CONTENT: Final = ("payload", "type", "schema_version", "key", "tenant")


class Production:
    """One produce call over one list."""

    #: It fetches nothing, so nothing can keep it from that.
    trouble: str | None = None
    #: It fetches nothing.
    in_hand = 0

    def __init__(
        self,
        course: Course,
        transactions: Sequence[Transaction],
        policy: ProducerPolicy,
        *,
        mailbox: Callable[[], Mailbox],
        fenced: Callable[[], int],
        start: Start = lifecycle,
        watch: Onlooker | None = None,
    ) -> None:
        self._fenced = fenced
        self._start_lifecycle = start
        self._course = course
        self._clock = course.senses.clock
        # A copy: the caller may change the list meanwhile.
        self._transactions = _check(transactions)
        self._distinct = _select_distinct(self._transactions)
        self._loop = policy.loop
        self._watch = watch or Onlooker()
        self.mailbox = mailbox()
        self._deadline = NEVER
        self._outcomes: dict[tuple[str, str], Outcome] = {}
        self._crew: Crew[Transaction] = Crew(
            policy.loop.concurrency.value, patience=policy.loop.drain_timeout, clock=self._clock
        )
        self._started = 0
        #: Why the call ends; the reason of the outcomes that it releases.
        self._end = End.DONE

    @property
    def live(self) -> bool:
        """False when every slot has been held by abandoned bodies for too long."""
        return self._crew.live

    def _slots(self) -> tuple[int, int, int]:
        return len(self._crew.flights), len(self._crew.bodies), 0

    def run(self) -> Script[ProduceReport]:
        """Produce until all have their outcome, or until there is a reason to end; one outcome per input."""
        self._watch.began(self._slots)
        if self._loop.timeout is not None:
            self._deadline = self._clock() + self._loop.timeout
        end = End.DONE
        for batch in self._batches():
            self._watch.batch(len(batch))
            end = yield from self._batch(deque(batch))
            if end is not End.DONE:
                break
        self._watch.over(end)
        return self._reported(end)

    def _batches(self) -> list[list[Transaction]]:
        """The distinct transactions, in order, split; the same transaction twice runs once."""
        size = self._loop.batch.size
        return [self._distinct[start : start + size] for start in range(0, len(self._distinct), size)]

    def _batch(self, waiting: deque[Transaction]) -> Script[End]:
        """Start as slots become free; end when all of the batch have ended."""
        while waiting or self._crew.flights:
            while waiting and self._crew.free > 0 and not self._at_limit():
                yield from self._start(waiting.popleft())
            if waiting and self._at_limit():
                return (yield from self._drain(End.LIMIT))
            events = yield from wait(self.mailbox, until=min(self._deadline, self._crew.stall_ends))
            end = yield from self._why_end(events)
            if end is not None:
                return (yield from self._drain(end))
        return End.DONE

    def _at_limit(self) -> bool:
        return self._loop.limit is not None and self._started >= self._loop.limit

    def _start(self, transaction: Transaction) -> Script[None]:
        self._started += 1
        script = self._start_lifecycle(self._course, transaction, self._watch.begin(transaction, None))
        slot = yield from spawn(script, told=self.mailbox, counted=True)
        self._crew.flights[slot] = transaction

    def _why_end(self, events: list[Any] | Stopped) -> Script[End | None]:
        if isinstance(events, Stopped):
            return End.STOP
        yield from self._hear(events)
        if self._clock() >= self._deadline:
            return End.TIMEOUT
        return None if self._crew.live else End.STALLED

    def _hear(self, events: list[Done | Freed]) -> Script[None]:
        for event in events:
            if isinstance(event, Done):
                outcome: Outcome = event.value
                if outcome.kind is Kind.RELEASED:
                    outcome.reason = self._end.value
                self._outcomes[_name(self._crew.flights[event.slot])] = outcome
                self._watch.ended(outcome)
            self._crew.hear(event)
        yield from ()

    def _drain(self, end: End) -> Script[End]:
        """Let what runs come to its end within its time, then stop it."""
        until = NEVER if end is End.LIMIT else self._drain_end(end)
        asked = end is End.STOP
        while self._crew.flights and self._clock() < until:
            events = yield from wait(self.mailbox, until=min(until, self._deadline if until == NEVER else NEVER))
            why = yield from self._why_end(events)
            if why is End.STOP and asked:
                break  # a second stop: no more patience
            asked = asked or why is End.STOP
            if why is not None and until == NEVER:
                end = why
                until = self._drain_end(end)
        self._end = end
        yield from self._crew.dismiss(self.mailbox, self._hear)
        return end

    def _drain_end(self, end: End) -> float:
        return drain_end(self._loop, end, now=self._clock(), deadline=self._deadline)

    def _reported(self, end: End) -> ProduceReport:
        outcomes = [self._outcomes.get(_name(given)) or _never_started(given, end) for given in self._transactions]
        report = ProduceReport(outcomes, end=end, abandoned=len(self._crew.bodies), fenced=self._fenced())
        if end is End.TIMEOUT:
            raise LoopTimeout(
                f"the call's {self._loop.timeout} s are over; {report.count(Kind.RELEASED)} were released, "
                f"of which {report.released_started} had started",
                report,
            )
        if end is End.STALLED:
            raise LoopStalled(
                f"all {self._crew.concurrency} slots are held by bodies that timed out and did not leave "
                f"for {self._loop.drain_timeout} s",
                report,
            )
        return report


def _check(transactions: Sequence[Transaction]) -> tuple[Transaction, ...]:
    if isinstance(transactions, Transaction) or not isinstance(transactions, Iterable):
        raise ConfigurationError(
            f"input of produce_transactions is a {type(transactions).__name__}; pass a list of transactions"
        )
    given = tuple(transactions)
    for position, transaction in enumerate(given):
        if not isinstance(transaction, Transaction):
            raise ConfigurationError(
                f"input of produce_transactions is invalid: position {position} is a {type(transaction).__name__}; "
                "wrap the payload: Transaction(id, payload)"
            )
    return given


def _select_distinct(transactions: Sequence[Transaction]) -> list[Transaction]:
    """List each transaction once, in order; raise if two different ones have the same source and id."""
    first: dict[tuple[str, str], int] = {}
    for position, transaction in enumerate(transactions):
        earlier = first.setdefault(_name(transaction), position)
        if not _is_same(transactions[earlier], transaction):
            raise ConfigurationError(
                f"input of produce_transactions is invalid: two different transactions have the id {transaction.id!r}, "
                f"at positions {earlier} and {position}; give each its own id"
            )
    return [transactions[position] for position in first.values()]


def _is_same(one: Transaction, other: Transaction) -> bool:
    """Whether both are the same work; creation time and trace are ignored."""
    if one is other:
        return True
    try:
        return all(bool(getattr(one, name) == getattr(other, name)) for name in _CONTENT)
    except Exception:  # noqa: BLE001 - a payload may refuse to be compared, and is then not known to be the same
        return False


def _never_started(transaction: Transaction, end: End) -> Outcome:
    outcome = Outcome(transaction, Kind.RELEASED, reason=end.value)
    outcome.attempts = 0
    return outcome


def _name(transaction: Transaction) -> tuple[str, str]:
    return transaction.source, transaction.id
