"""Replication: the script that copies the facts of another zone, for threads and for asyncio. It does no I/O itself.

The source is the store of the other zone, the destination that of this zone. A zone pair is the sending and the
receiving zone; its facts are numbered by offsets within an epoch, the incarnation of the store that assigned them. A
script is a generator that yields what is to be done. A survey measures how far the destination is behind.
``ConcurrentCalls`` runs at most one call of each kind; its ``_states`` have the failures of each kind: when it may be
retried, and its problem. A problem that only an operator can resolve blocks the pair.

The confirmations of the destination are authoritative; the cursor at the source only says what may be removed there.
Facts after the destination's end are fetched first, then the artifacts they refer to are copied, then the facts are
forwarded, and only what the destination has confirmed without a gap is confirmed at the source. Every call may be
interrupted, repeated or never return: unknown state is queried again, and no fact is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.engine.effects import CallResult, Interrupted, Ok, Script, interrupt, wait
from ergon_framework.facts.artifact_copy import ArtifactCopier, ArtifactId, CopyCalls, CopyFailed
from ergon_framework.facts.boundary import AppendResult, LogState, ReaderLag
from ergon_framework.facts.concurrent_calls import MAX_ABANDONED_CALLS, CallKind, ConcurrentCalls
from ergon_framework.facts.errors import ArtifactRefused, OffsetGone
from ergon_framework.facts.model import ArtifactReference, Cursor, FactConfirmation, StoredFact, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica_state import (
    InconsistentStoreError,
    Lag,
    ReplicaProblem,
    ReplicaState,
    ReplicaStatus,
    check_confirmation,
    check_fetch,
    check_forwarded,
    check_same_source,
    classify_error,
)

if TYPE_CHECKING:
    from ergon_framework.engine.scheduler import Scheduler

#: Number of facts in the first fetch, because their size is still unknown.
_FIRST_FETCH_FACTS: Final = 32
#: Calls that leave nothing to clean up when they are interrupted.
_INTERRUPTIBLE_KINDS: Final = frozenset(
    (CallKind.LAST_OFFSET, CallKind.FETCH, CallKind.GET_FACT, CallKind.COPY, CallKind.LIST_LOGS)
)
#: Seconds that interrupted calls have to exit.
_EXIT_GRACE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class ReplicationCalls:
    """The calls of both stores that the script makes, sync or async."""

    fetch_facts: Callable[..., Any]
    confirm_receipt: Callable[[str, ZonePair, Cursor], Any]
    list_logs: Callable[[], Any]
    last_offset: Callable[[ZonePair], Any]
    get_fact: Callable[[str, str], Any]
    forward_facts: Callable[[Sequence[StoredFact]], Any]
    artifacts: CopyCalls


class _WakeUp:
    """Notification that facts may have arrived."""


class Replication(ConcurrentCalls):
    """Copies the facts of one zone pair from a source to a destination, with the store calls *calls*."""

    def __init__(
        self,
        pair: ZonePair,
        calls: ReplicationCalls,
        *,
        name: str,
        policy: ReplicationPolicy,
        scheduler: Scheduler,
        on_change: Callable[[ReplicaState], None],
    ) -> None:
        super().__init__(policy=policy, scheduler=scheduler)
        self._pair = pair
        self._calls = calls
        self._name = name
        self._on_change = on_change
        self._copier = ArtifactCopier(calls.artifacts, policy=policy, scheduler=scheduler)
        #: The last cursor confirmed by the destination; None while unknown.
        self._end: Cursor | None = None
        #: The last known offset of the destination.
        self._offset = 0
        #: The next fetch continues after this cursor.
        self._fetch_cursor = Cursor("", 0)
        #: The last fetch continued after this cursor.
        self._last_fetch_after = self._fetch_cursor
        #: Whether the source still has to show that it is the one read before: it must return the last fact that this
        #: zone has, again. Set when the script starts over and after a failed fetch, when the source may be another.
        self._is_unverified = True
        #: The last fact that the destination has confirmed to this script.
        self._last_fact: StoredFact | None = None
        #: The fact that the source returned to show it, until the destination has confirmed that it has the same one.
        #: None if the last fact is in memory, because the two are then compared directly.
        self._proof: StoredFact | None = None
        #: Whether a problem of the source that would block the pair is being checked a second time.
        self._is_rechecking = False
        #: Counts how often fetched facts were discarded: responses of an earlier generation are ignored.
        self._generation = 0
        self._fetch_limit = min(_FIRST_FETCH_FACTS, policy.batch)
        #: Fetched facts whose artifacts are not copied yet, and facts whose artifacts are here.
        self._fetched_facts: deque[StoredFact] = deque()
        self._ready_facts: list[StoredFact] = []
        self._confirmed = 0
        #: Whether a fetch has succeeded, which registers the reader: the source accepts its confirmations from then on.
        self._is_registered = False
        #: No fetch starts before this time, after one that brought nothing; a notification sets it to 0.
        self._idle_until = 0.0
        self._next_survey_at = 0.0
        #: Whether a notification has arrived since the last fetch began: its answer may be older.
        self._was_notified = False
        #: Whether a notification is in the mailbox.
        self._has_pending_wake = False
        self._is_stopping = False
        self._is_caught_up = False
        #: The last survey of the source: its end, the facts waiting there, and the wall-clock time.
        self._last_survey: tuple[int, ReaderLag, float] | None = None
        self._last_contact: float = scheduler.time_source.wall()
        #: Bytes forwarded since the last survey, which counts them as waiting.
        self._forwarded_bytes = 0
        self._status = ReplicaStatus.STARTING
        self._since = scheduler.time_source.wall()
        #: Number of forwarded facts that the destination has confirmed, new ones and duplicates.
        self.forwarded_count = 0

    # -- state ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Report that facts may have arrived; callable from any thread."""
        # One pending notification is enough: a store with ten thousand appends per second calls as often.
        if not self._has_pending_wake:
            self._has_pending_wake = True
            self._scheduler.put_from_any_thread(self._mailbox, _WakeUp())

    def state(self) -> ReplicaState:
        """Return the current state; callable from any thread."""
        return ReplicaState(
            name=self._name,
            pair=self._pair,
            status=self._status,
            since=self._since,
            offset=self._offset,
            confirmed=self._confirmed,
            lag=self._measure_lag(),
            problem=self._current_problem(),
        )

    @property
    def is_caught_up(self) -> bool:
        """Whether the source had no more facts at the last fetch."""
        return self._is_caught_up

    @property
    def copied_artifacts(self) -> tuple[int, int]:
        """The numbers of copied artifacts and of their bytes."""
        return self._copier.copied, self._copier.bytes

    def _measure_lag(self) -> Lag | None:
        survey = self._last_survey
        if survey is None:
            return None
        last, reader_lag, asked_at = survey
        facts = max(0, last - max(self._offset, reader_lag.offset))
        now = self._scheduler.time_source.wall()
        oldest_age = now - reader_lag.since_unix_ms / 1000 if facts and reader_lag.since_unix_ms is not None else 0.0
        # It is unknown what has arrived at the source since the last contact.
        seconds_without_contact = now - self._last_contact if self._states[CallKind.FETCH].problem is not None else 0.0
        return Lag(
            facts=facts,
            bytes=max(0, reader_lag.bytes - self._forwarded_bytes) if facts else 0,
            seconds=max(0.0, oldest_age, seconds_without_contact),
            asked_at=asked_at,
        )

    # -- the loop -------------------------------------------------------------------------------------

    def run(self) -> Script[None]:
        """Copy until stopped; then let running calls end. The next start continues with the rest."""
        while True:
            yield from self._start_calls()
            items = yield from wait(self._mailbox, until=self._next_due())
            if isinstance(items, Interrupted):
                break
            self._process_items(items)
        self._is_stopping = True
        yield from self._drain()
        self._set_status(ReplicaStatus.STOPPED)

    def _start_calls(self) -> Script[None]:
        """Start every call that can be made now."""
        if self._abandoned_count + self._copier.abandoned >= MAX_ABANDONED_CALLS:
            return
        if not self._is_blocked:
            if self._end is None:
                yield from self._start_call(
                    CallKind.LAST_OFFSET, self._calls.last_offset, (self._pair,), self._accept_end
                )
            else:
                yield from self._fetch()
                yield from self._verify_source()
                yield from self._copy_artifacts()
                yield from self._forward()
        # Also while blocked: facts that are here can be confirmed, and the lag stays relevant.
        yield from self._confirm()
        if self._clock() >= self._next_survey_at and CallKind.LIST_LOGS not in self._running:
            yield from self._start_call(CallKind.LIST_LOGS, self._calls.list_logs, (), self._accept_survey)
            if not self._is_blocked:
                yield from self._check_destination()

    def _next_due(self) -> float:
        """Return the time of the next action if no notification arrives before."""
        times = [self._next_survey_at, *(state.retry_at for state in self._states.values()), self._idle_until]
        now = self._clock()
        return min((time for time in times if time > now), default=now + self._policy.survey)

    def _process_items(self, items: Sequence[Any]) -> None:
        for item in items:
            if isinstance(item, _WakeUp):
                self._has_pending_wake, self._was_notified, self._idle_until = False, True, 0.0
            elif (result := self._accept_result(item)) is not None:
                self._handle_result(*result)
        self._update_status()

    def _drain(self) -> Script[None]:
        """Wait for running writes and confirm them at the source, then interrupt all other calls."""
        deadline = self._clock() + self._policy.drain
        for slot in self._list_running_slots(_INTERRUPTIBLE_KINDS):
            yield from interrupt(slot)
        while self._clock() < deadline:
            yield from self._confirm()
            if not self._is_any_running(CallKind.FORWARD, CallKind.CONFIRM):
                break
            items = yield from wait(self._mailbox, until=deadline)
            if isinstance(items, Interrupted):
                break
            self._process_items(items)
        for slot in self._list_running_slots(tuple(CallKind)):
            yield from interrupt(slot)
        # Calls that can be cancelled exit within moments; the script does not wait for threads.
        deadline = self._clock() + _EXIT_GRACE_SECONDS
        while self._running and self._clock() < deadline:
            items = yield from wait(self._mailbox, until=deadline)
            if isinstance(items, Interrupted):
                return
            self._process_items(items)

    # -- results --------------------------------------------------------------------------------------

    def _handle_result(self, kind: CallKind, on_result: Callable[[Any], None], answer: CallResult) -> None:
        """Pass the value of a call to *on_result*, or handle its failure."""
        if isinstance(answer, Ok):
            if kind.is_at_source and kind is not CallKind.COPY:
                self._last_contact = self._scheduler.time_source.wall()
            on_result(answer.value)
            return
        if isinstance(answer, Interrupted):
            return  # this replicator is stopping
        error = self._to_error(kind, answer)
        if kind is CallKind.FORWARD:
            # Some of the facts may be stored, or may be stored later: query the destination.
            self._start_over()
        if kind is CallKind.FETCH and isinstance(error, OffsetGone) and self._last_fetch_after != self._fetch_cursor:
            # The source has removed the fact that would prove its identity, which is normal after retention.
            self._is_unverified = False
            return
        if kind is CallKind.LIST_LOGS:
            # A survey only measures the lag and blocks nothing.
            self._next_survey_at = self._clock() + self._policy.survey
            return
        self._handle_failure(kind, classify_error(error, at_source=kind.is_at_source))

    def _handle_failure(self, kind: CallKind, problem: ReplicaProblem) -> None:
        """Handle a failure; check twice before the pair is blocked by a problem of the source.

        This zone may have more than this script knows, because another replicator of the pair is ahead and the source
        has removed those facts; or less, because a backup of the destination was restored a moment ago.
        """
        if problem.status.needs_operator and kind in {CallKind.FETCH, CallKind.GET_FACT} and not self._is_rechecking:
            self._is_rechecking = True
            self._start_over()
            return
        self._record_failure(kind, problem)

    def _record_failure(self, kind: CallKind, problem: ReplicaProblem) -> None:
        super()._record_failure(kind, problem)
        self._is_unverified = self._is_unverified or kind in {CallKind.FETCH, CallKind.GET_FACT}
        self._is_caught_up = False

    def _start_over(self) -> None:
        """Discard all fetched facts and query the destination again."""
        self._end = None
        self._generation += 1
        self._fetched_facts.clear()
        self._ready_facts = []
        self._is_unverified, self._proof = True, None

    # -- position -------------------------------------------------------------------------------------

    def _check_destination(self) -> Script[None]:
        """Check that the destination still has what it has confirmed; without forwards no other call would show it."""
        if self._end is not None and not self._ready_facts and CallKind.FORWARD not in self._running:
            yield from self._start_call(
                CallKind.LAST_OFFSET, self._calls.last_offset, (self._pair,), partial(self._compare_end, self._end)
            )

    def _compare_end(self, before: Cursor, end: Cursor | None) -> None:
        self._states[CallKind.LAST_OFFSET].reset()
        if self._end == before != (end or Cursor("", 0)) and CallKind.FORWARD not in self._running:
            # A backup of the destination was restored.
            self._start_over()

    def _accept_end(self, end: Cursor | None) -> None:
        self._states[CallKind.LAST_OFFSET].reset()
        self._end = self._fetch_cursor = Cursor("", 0) if end is None else end
        self._offset = self._end.offset
        # A restored destination has less than the source has recorded; the lower offset is not confirmed again.
        self._confirmed = min(self._confirmed, self._end.offset)

    # -- fetching -------------------------------------------------------------------------------------

    def _fetch(self) -> Script[None]:
        """Fetch one batch while the previous one is forwarded, never more."""
        if self._fetched_facts or self._ready_facts or self._is_any_running(CallKind.FETCH, CallKind.COPY):
            return
        if self._clock() < max(self._idle_until, self._states[CallKind.COPY].retry_at):
            return
        after = fetch_after = self._fetch_cursor
        if self._is_unverified and after.offset:
            if CallKind.FORWARD in self._running:
                return  # verification needs the destination's last fact, which is still unknown
            # Fetch the last fact that this zone has again, to verify the source.
            fetch_after = Cursor(after.epoch, after.offset - 1)
        self._was_notified, self._last_fetch_after = False, fetch_after
        fetch = partial(self._calls.fetch_facts, after=fetch_after)
        on_result = partial(self._accept_facts, self._generation, after, fetch_after)
        # One more for the fact that verifies the source.
        count = self._fetch_limit + after.offset - fetch_after.offset
        yield from self._start_call(CallKind.FETCH, fetch, (self._name, self._pair, count), on_result)

    def _accept_facts(self, generation: int, after: Cursor, fetch_after: Cursor, facts: Sequence[StoredFact]) -> None:
        """Check and queue the facts after *after*; *fetch_after* is one fact earlier to verify the source."""
        self._is_registered = True
        if generation != self._generation:
            return
        error = check_fetch(self._pair, fetch_after, after.epoch if after.offset else "", facts)
        if error is None and fetch_after != after:
            error = check_same_source(facts, after, self._last_fact)
        if error is not None:
            self._handle_failure(CallKind.FETCH, classify_error(error, at_source=True))
            return
        self._states[CallKind.FETCH].reset()
        self._is_unverified = False
        if fetch_after != after:
            facts = self._take_new_facts(facts)
        self._is_rechecking = self._is_rechecking and self._proof is not None
        at_end = after == self._end
        self._is_caught_up = not facts and at_end
        if facts:
            self._fetched_facts.extend(facts)
            self._fetch_cursor = facts[-1].cursor
            self._adapt_limit(facts)
        else:
            self._states[CallKind.COPY].reset()
            if at_end:
                # No facts are left to forward, so no forward failure is left either.
                self._states[CallKind.FORWARD].reset()
            if not self._was_notified:
                self._idle_until = self._clock() + self._policy.idle_delay(self._scheduler.time_source.random)

    # -- verifying the source -------------------------------------------------------------------------

    def _take_new_facts(self, facts: Sequence[StoredFact]) -> Sequence[StoredFact]:
        """Return the new facts; keep the first one for comparison with the destination before any fact follows."""
        is_remembered = self._last_fact is not None and self._last_fact.offset == facts[0].offset
        if not is_remembered and self._policy.recognise:
            self._proof = facts[0]
        return facts[1:]

    def _verify_source(self) -> Script[None]:
        if self._proof is not None:
            envelope = self._proof.envelope
            on_result = partial(self._check_proof, self._proof)
            yield from self._start_call(
                CallKind.GET_FACT, self._calls.get_fact, (envelope.from_zone, envelope.message_id), on_result
            )

    def _check_proof(self, proof: StoredFact, confirmation: FactConfirmation | None) -> None:
        self._states[CallKind.GET_FACT].reset()
        if self._proof is not proof:
            return
        self._proof = None
        error = check_confirmation(proof, confirmation)
        if error is None:
            self._is_rechecking = False
        else:
            self._handle_failure(CallKind.GET_FACT, classify_error(error, at_source=True))

    def _adapt_limit(self, facts: Sequence[StoredFact]) -> None:
        """Adapt the next fetch limit so that a batch of similar facts has about the intended size."""
        size = sum(map(_object_size, facts))
        fitting = max(1, int(len(facts) * self._policy.batch_bytes / max(1, size)))
        self._fetch_limit = min(self._policy.batch, fitting, self._fetch_limit * 2)

    # -- artifacts ------------------------------------------------------------------------------------

    def _copy_artifacts(self) -> Script[None]:
        """Copy artifacts before the facts that refer to them are forwarded."""
        if (
            not self._fetched_facts
            or self._ready_facts
            or self._proof is not None
            or not self._can_start(CallKind.COPY)
        ):
            return
        batch: list[StoredFact] = []
        references: list[ArtifactReference] = []
        size = 0
        for stored in self._fetched_facts:
            reference = stored.fact.artifact
            if reference is not None:
                if references and size + reference.size > self._policy.copy_bytes:
                    break
                references.append(reference)
                size += reference.size
            batch.append(stored)
        on_result = partial(self._accept_copies, self._generation, batch)
        if not references:
            on_result({})
            return
        yield from self._spawn(CallKind.COPY, self._run_copies(references, on_result))

    def _run_copies(
        self, references: Sequence[ArtifactReference], on_result: Callable[[Any], None]
    ) -> Script[tuple[CallKind, Callable[[Any], None], CallResult]]:
        failures = yield from self._copier.run(references)
        return CallKind.COPY, on_result, Ok(failures)

    def _accept_copies(
        self, generation: int, batch: Sequence[StoredFact], failures: Mapping[ArtifactId, CopyFailed]
    ) -> None:
        """Make the facts up to the first missing artifact ready to be forwarded; fetch the others again."""
        if generation != self._generation:
            return
        first_missing = next(
            (index for index, stored in enumerate(batch) if _find_failure(stored, failures)), len(batch)
        )
        # Facts before the first missing artifact need not wait; facts after it must not overtake it.
        self._ready_facts = list(batch[:first_missing])
        for _ in self._ready_facts:
            self._fetched_facts.popleft()
        if first_missing < len(batch) and not self._is_stopping:
            stored, failure = batch[first_missing], _find_failure(batch[first_missing], failures)
            assert failure is not None  # noqa: S101 - the index was found by it
            # Fetch the facts again before the next attempt: the source may have been replaced by then.
            self._fetched_facts.clear()
            self._fetch_cursor = Cursor(stored.epoch, stored.offset - 1)
            problem = classify_error(
                failure.error, at_source=failure.at_source, message_id=stored.envelope.message_id, offset=stored.offset
            )
            self._record_failure(CallKind.COPY, problem)
        elif first_missing == len(batch):
            self._states[CallKind.COPY].reset()

    # -- forwarding -----------------------------------------------------------------------------------

    def _forward(self) -> Script[None]:
        if not self._ready_facts or not self._can_start(CallKind.FORWARD):
            return
        batch, self._ready_facts = self._ready_facts, []
        on_result = partial(self._accept_forwards, self._generation, batch)
        yield from self._start_call(CallKind.FORWARD, self._calls.forward_facts, (batch,), on_result)
        # The next batch was waiting for this one.
        yield from self._fetch()
        yield from self._copy_artifacts()

    def _accept_forwards(self, generation: int, batch: Sequence[StoredFact], results: Sequence[AppendResult]) -> None:
        """Continue after the last fact confirmed without a gap; the first unconfirmed one is handled, never skipped."""
        if generation != self._generation:
            return  # the script has started over, and queries the destination for its end
        accepted, rejection = 0, None
        if len(results) == len(batch):
            for stored, result in zip(batch, results, strict=True):
                rejection = check_forwarded(stored, result)
                if rejection is not None:
                    break
                accepted += 1
        else:
            rejection = InconsistentStoreError(
                f"{len(batch)} facts were forwarded and {len(results)} results were returned"
            )
        if accepted:
            self._last_fact = batch[accepted - 1]
            self._end = self._last_fact.cursor
            self._offset = self._end.offset
            self.forwarded_count += accepted
            self._forwarded_bytes += sum(map(_object_size, batch[:accepted]))
        if rejection is None:
            self._states[CallKind.FORWARD].reset()
            return
        stored = batch[min(accepted, len(batch) - 1)]
        if isinstance(rejection, ArtifactRefused) and stored.fact.artifact is not None:
            self._copier.recheck(ArtifactId.from_reference(stored.fact.artifact))
        problem = classify_error(
            rejection, at_source=False, message_id=stored.envelope.message_id, offset=stored.offset
        )
        if not problem.status.needs_operator:
            # The destination may have facts that this script does not know of, or lack some: it is queried again.
            self._start_over()
        if accepted:
            self._states[CallKind.FORWARD].reset()
        self._record_failure(CallKind.FORWARD, problem)

    # -- confirming -----------------------------------------------------------------------------------

    def _confirm(self) -> Script[None]:
        end = self._end
        if end is None or not self._is_registered or end.offset <= self._confirmed:
            return
        if self._is_unverified or self._proof is not None:
            return  # an unverified source could be another store, whose facts this zone has never read
        if self._states[CallKind.CONFIRM].is_blocked:
            return
        on_result = partial(self._accept_receipt, end)
        yield from self._start_call(
            CallKind.CONFIRM, self._calls.confirm_receipt, (self._name, self._pair, end), on_result
        )

    def _accept_receipt(self, cursor: Cursor, _: None) -> None:
        self._states[CallKind.CONFIRM].reset()
        self._confirmed = max(self._confirmed, cursor.offset)

    # -- reporting ------------------------------------------------------------------------------------

    def _accept_survey(self, states: Sequence[LogState]) -> None:
        self._states[CallKind.LIST_LOGS].reset()
        now = self._clock()
        self._next_survey_at = now + self._policy.survey
        last, reader_lag = 0, ReaderLag(0, 0, 0, None)
        for state in states:
            if state.pair == self._pair:
                last, reader_lag = (
                    state.last,
                    state.readers.get(self._name) or ReaderLag(0, state.last, state.bytes, None),
                )
        self._last_survey = last, reader_lag, self._scheduler.time_source.wall()
        self._forwarded_bytes = 0

    def _update_status(self) -> None:
        problem = self._current_problem()
        if problem is not None:
            self._set_status(problem.status)
        elif self._end is not None and self._is_registered:
            self._set_status(ReplicaStatus.FOLLOWING)

    def _set_status(self, status: ReplicaStatus) -> None:
        if status is not self._status:
            self._status, self._since = status, self._scheduler.time_source.wall()
            self._on_change(self.state())


def _find_failure(stored: StoredFact, failures: Mapping[ArtifactId, CopyFailed]) -> CopyFailed | None:
    reference = stored.fact.artifact
    return None if reference is None else failures.get(ArtifactId.from_reference(reference))


def _object_size(stored: StoredFact) -> int:
    return len(stored.fact.object_json)
