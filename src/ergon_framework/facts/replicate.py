"""Replicating: the one script that copies the facts of another zone here, for threads and for asyncio. It never acts.

What the destination has confirmed is the truth; the cursor at the source says only what may be dropped there.
So the facts come first, behind the destination's end, then the artifacts they name, then the facts go into the
forward buffer, and only what that has confirmed without a gap is confirmed at the source. Every call may be cut,
done twice, or never come back: whatever is not known is asked again, and nothing is passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.engine.effects import Script, interrupt, wait
from ergon_framework.engine.outcome import Answer, Ok, Stopped
from ergon_framework.facts.asking import HELD, Asking, Step
from ergon_framework.facts.boundary import Appended, Behind, LogState
from ergon_framework.facts.carry import Carrying, CopyMeans, Failed, Name
from ergon_framework.facts.errors import ArtifactRefused, OffsetGone
from ergon_framework.facts.model import ArtifactReference, Cursor, FactConfirmation, Pair, StoredFact
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.recognise import other, refusal, unknown, wrong
from ergon_framework.facts.replica import FaultyError, Lag, ReplicaState, Status, Trouble, judge

if TYPE_CHECKING:
    from ergon_framework.engine.slots import Slots

#: Facts of the first fetch: nobody knows yet how large they are.
_FIRST: Final = 32
#: Of which nothing is left to be done when it is broken off.
_READING: Final = frozenset((Step.END, Step.FETCH, Step.KNOWN, Step.COPY, Step.SURVEY))
#: Seconds that calls which were broken off have to leave.
_LAST: Final = 1.0


@dataclass(frozen=True, slots=True)
class Means:
    """By what the script is carried out: calls of both stores, of either flavour."""

    fetch_facts: Callable[..., Any]
    confirm_receipt: Callable[[str, Pair, Cursor], Any]
    survey: Callable[[], Any]
    end_of: Callable[[Pair], Any]
    get_fact: Callable[[str, str], Any]
    forward_facts: Callable[[Sequence[StoredFact]], Any]
    artifacts: CopyMeans


class _Wake:
    """Facts may have come."""


class Replication(Asking):
    """The facts of one pair of zones on their way from *source* to *destination*, which *means* speaks to."""

    def __init__(
        self,
        pair: Pair,
        means: Means,
        *,
        name: str,
        policy: ReplicationPolicy,
        slots: Slots,
        changed: Callable[[ReplicaState], None],
    ) -> None:
        super().__init__(policy=policy, slots=slots)
        self._pair = pair
        self._means = means
        self._name = name
        self._changed = changed
        self._carrying = Carrying(means.artifacts, policy=policy, slots=slots)
        #: What the destination has confirmed; None while nobody knows.
        self._end: Cursor | None = None
        #: Its offset as it was known last.
        self._offset = 0
        #: Behind which the next fetch goes on.
        self._fetched = Cursor("", 0)
        #: Behind which the last fetch was made.
        self._asked_behind = self._fetched
        #: The source is to show that it is the one that was read from: by the last fact that this zone has.
        self._stranger = True
        self._last: StoredFact | None = None
        #: What it has shown, while nobody here remembers it and the destination has to be asked.
        self._shown: StoredFact | None = None
        #: The source has answered what may mean that it is another, and it is being looked at once more.
        self._suspected = False
        #: Counts how often all that was fetched was thrown away: an answer from before is of no use.
        self._round = 0
        self._limit = min(_FIRST, policy.batch)
        #: Fetched, and of which no artifact was asked for yet; and those whose artifacts are here.
        self._raw: deque[StoredFact] = deque()
        self._ready: list[StoredFact] = []
        self._confirmed = 0
        self._registered = False
        self._idle_until = 0.0
        self._survey_at = 0.0
        self._woken = False
        self._ringing = False
        self._stopping = False
        self._caught_up = False
        #: What the source has said last: its end, what waits there, and when that was, by both clocks.
        self._told_last: tuple[int, Behind, float] | None = None
        self._heard: float = slots.senses.wall()
        self._passed_bytes = 0
        self._status = Status.STARTING
        self._since = slots.senses.wall()
        #: Facts that were forwarded, as far as the destination confirmed them anew or again.
        self.forwarded = 0

    # -- what others see ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Facts may have come; from any thread."""
        # Said once is said: a store that is appended to ten thousand times a second calls as often.
        if not self._ringing:
            self._ringing = True
            self._slots.signal(self._mailbox, _Wake())

    def state(self) -> ReplicaState:
        """How it is, as of now; any thread may ask."""
        return ReplicaState(
            name=self._name,
            pair=self._pair,
            status=self._status,
            since=self._since,
            offset=self._offset,
            confirmed=self._confirmed,
            lag=self._lag(),
            trouble=self._trouble(),
        )

    @property
    def caught_up(self) -> bool:
        """Whether the source had nothing more when it was last asked."""
        return self._caught_up

    @property
    def carried(self) -> tuple[int, int]:
        """Artifacts that were copied, and bytes of them."""
        return self._carrying.copied, self._carrying.bytes

    def _lag(self) -> Lag | None:
        asked = self._told_last
        if asked is None:
            return None
        last, behind, at = asked
        facts = max(0, last - max(self._offset, behind.offset))
        now = self._slots.senses.wall()
        waiting = now - behind.since_unix_ms / 1000 if facts and behind.since_unix_ms is not None else 0.0
        # Nobody knows what has come at the source since it was last heard of.
        silent = now - self._heard if self._courses[Step.FETCH].trouble is not None else 0.0
        return Lag(
            facts=facts,
            bytes=max(0, behind.bytes - self._passed_bytes) if facts else 0,
            seconds=max(0.0, waiting, silent),
            asked_at=at,
        )

    # -- the loop -------------------------------------------------------------------------------------

    def run(self) -> Script[None]:
        """Copy until it is stopped; then what is under way may end, and the rest goes on at the next start."""
        while True:
            yield from self._begin()
            came = yield from wait(self._mailbox, until=self._due())
            if isinstance(came, Stopped):
                break
            self._take(came)
        self._stopping = True
        yield from self._drain()
        self._enter(Status.STOPPED)

    def _begin(self) -> Script[None]:
        """Begin all that can be done now."""
        if self._held + self._carrying.held >= HELD:
            return
        if not self._halted:
            if self._end is None:
                yield from self._ask(Step.END, self._means.end_of, (self._pair,), self._ended)
            else:
                yield from self._fetch()
                yield from self._recognise()
                yield from self._carry()
                yield from self._forward()
        # Also of one that stands still: what is here is here, and how far behind it is does not stop to matter.
        yield from self._confirm()
        if self._clock() >= self._survey_at and Step.SURVEY not in self._busy:
            yield from self._ask(Step.SURVEY, self._means.survey, (), self._surveyed)
            if not self._halted:
                yield from self._look()

    def _due(self) -> float:
        """When there is something to do, if nobody says anything before."""
        moments = [self._survey_at, *(course.until for course in self._courses.values()), self._idle_until]
        now = self._clock()
        return min((moment for moment in moments if moment > now), default=now + self._policy.survey)

    def _take(self, came: Sequence[Any]) -> None:
        for item in came:
            if isinstance(item, _Wake):
                self._ringing, self._woken, self._idle_until = False, True, 0.0
            elif (returned := self._returned(item)) is not None:
                self._heed(*returned)
        self._show()

    def _drain(self) -> Script[None]:
        """Let what is written under way come back, and have it confirmed at the source; then leave all the rest."""
        until = self._clock() + self._policy.drain
        for slot in self._slots_of(_READING):
            yield from interrupt(slot)
        while self._clock() < until:
            yield from self._confirm()
            if not self._any(Step.FORWARD, Step.CONFIRM):
                break
            came = yield from wait(self._mailbox, until=until)
            if isinstance(came, Stopped):
                break
            self._take(came)
        for slot in self._slots_of(tuple(Step)):
            yield from interrupt(slot)
        # Those that can be cancelled are gone in a moment; a thread is not waited for.
        until = self._clock() + _LAST
        while self._busy and self._clock() < until:
            came = yield from wait(self._mailbox, until=until)
            if isinstance(came, Stopped):
                return
            self._take(came)

    # -- what came of it ------------------------------------------------------------------------------

    def _heed(self, step: Step, told: Callable[[Any], None], answer: Answer) -> None:
        if isinstance(answer, Ok):
            if step.at_source and step is not Step.COPY:
                self._heard = self._slots.senses.wall()
            told(answer.value)
            return
        if isinstance(answer, Stopped):
            return  # this replicator is stopping
        error = self._error(step, answer)
        if step is Step.FORWARD:
            # Some of it may be there, or come there later: the store is asked what it has.
            self._start_over()
        if step is Step.FETCH and isinstance(error, OffsetGone) and self._asked_behind != self._fetched:
            # It keeps nothing any more by which it could be recognised, which is as it should be.
            self._stranger = False
            return
        if step is Step.SURVEY:
            # It only tells how far behind this zone is, and holds up nothing.
            self._survey_at = self._clock() + self._policy.survey
            return
        self._found(step, judge(error, at_source=step.at_source))

    def _found(self, step: Step, trouble: Trouble) -> None:
        """Something failed. What the source is to blame for is looked at twice before the pair stands still.

        What this zone has may be more than is remembered here, because another replicator of the same pair has come
        further, and the source has dropped that; or less, because a backup of its store was put back a moment ago.
        """
        if trouble.status.halted and step in {Step.FETCH, Step.KNOWN} and not self._suspected:
            self._suspected = True
            self._start_over()
            return
        self._failed(step, trouble)

    def _failed(self, step: Step, trouble: Trouble) -> None:
        super()._failed(step, trouble)
        self._stranger = self._stranger or step in {Step.FETCH, Step.KNOWN}
        self._caught_up = False

    def _start_over(self) -> None:
        """Nobody knows any more what the destination has."""
        self._end = None
        self._round += 1
        self._raw.clear()
        self._ready = []
        self._stranger, self._shown = True, None

    # -- where it is ----------------------------------------------------------------------------------

    def _look(self) -> Script[None]:
        """See whether the destination still has what it has confirmed: while nothing is forwarded nobody else would."""
        if self._end is not None and not self._ready and Step.FORWARD not in self._busy:
            yield from self._ask(Step.END, self._means.end_of, (self._pair,), partial(self._seen, self._end))

    def _seen(self, before: Cursor, end: Cursor | None) -> None:
        self._courses[Step.END].well()
        if self._end == before != (end or Cursor("", 0)) and Step.FORWARD not in self._busy:
            # A backup of the destination was put back.
            self._start_over()

    def _ended(self, end: Cursor | None) -> None:
        self._courses[Step.END].well()
        self._end = self._fetched = Cursor("", 0) if end is None else end
        self._offset = self._end.offset
        # A store that was put back from a backup has less than the source believes, and never asks to have it believed.
        self._confirmed = min(self._confirmed, self._end.offset)

    # -- fetching -------------------------------------------------------------------------------------

    def _fetch(self) -> Script[None]:
        """One batch is fetched while the one before it is forwarded, and never more."""
        if self._raw or self._ready or self._any(Step.FETCH, Step.COPY):
            return
        if self._clock() < max(self._idle_until, self._courses[Step.COPY].until):
            return
        after = behind = self._fetched
        if self._stranger and after.offset:
            if Step.FORWARD in self._busy:
                return  # it is recognised by what is here, and nobody knows yet what that is
            behind = Cursor(after.epoch, after.offset - 1)
        self._woken, self._asked_behind = False, behind
        fetch = partial(self._means.fetch_facts, after=behind)
        told = partial(self._got, self._round, after, behind)
        count = self._limit + after.offset - behind.offset
        yield from self._ask(Step.FETCH, fetch, (self._name, self._pair, count), told)

    def _got(self, asked_in: int, after: Cursor, behind: Cursor, facts: Sequence[StoredFact]) -> None:
        self._registered = True
        if asked_in != self._round:
            return
        found = wrong(self._pair, behind, after.epoch if after.offset else "", facts)
        if found is None and behind != after:
            found = other(facts, after, self._last)
        if found is not None:
            self._found(Step.FETCH, judge(found, at_source=True))
            return
        self._courses[Step.FETCH].well()
        self._stranger = False
        if behind != after:
            facts = self._took(facts)
        self._suspected = self._suspected and self._shown is not None
        at_end = after == self._end
        self._caught_up = not facts and at_end
        if facts:
            self._raw.extend(facts)
            self._fetched = facts[-1].cursor
            self._suit(facts)
        else:
            self._courses[Step.COPY].well()
            if at_end:
                # There is nothing left that could have failed.
                self._courses[Step.FORWARD].well()
            if not self._woken:
                self._idle_until = self._clock() + self._policy.idle(self._slots.senses.dice)

    # -- recognising the source -----------------------------------------------------------------------

    def _took(self, facts: Sequence[StoredFact]) -> Sequence[StoredFact]:
        """Those that are new; the one that was shown is compared with what is here, before anything follows it."""
        remembered = self._last is not None and self._last.offset == facts[0].offset
        if not remembered and self._policy.recognise:
            self._shown = facts[0]
        return facts[1:]

    def _recognise(self) -> Script[None]:
        if self._shown is not None:
            shown = self._shown.envelope
            told = partial(self._known, self._shown)
            yield from self._ask(Step.KNOWN, self._means.get_fact, (shown.from_zone, shown.message_id), told)

    def _known(self, shown: StoredFact, confirmation: FactConfirmation | None) -> None:
        self._courses[Step.KNOWN].well()
        if self._shown is not shown:
            return
        self._shown = None
        found = unknown(shown, confirmation)
        if found is None:
            self._suspected = False
        else:
            self._found(Step.KNOWN, judge(found, at_source=True))

    def _suit(self, facts: Sequence[StoredFact]) -> None:
        """Ask for as many the next time as will be of the size that was meant, if they are like these."""
        size = sum(map(_size, facts))
        fitting = max(1, int(len(facts) * self._policy.batch_bytes / max(1, size)))
        self._limit = min(self._policy.batch, fitting, self._limit * 2)

    # -- artifacts ------------------------------------------------------------------------------------

    def _carry(self) -> Script[None]:
        """Have the artifacts here before the facts that name them."""
        if not self._raw or self._ready or self._shown is not None or not self._may(Step.COPY):
            return
        batch: list[StoredFact] = []
        references: list[ArtifactReference] = []
        size = 0
        for stored in self._raw:
            reference = stored.fact.artifact
            if reference is not None:
                if references and size + reference.size > self._policy.copy_bytes:
                    break
                references.append(reference)
                size += reference.size
            batch.append(stored)
        told = partial(self._brought, self._round, batch)
        if not references:
            told({})
            return
        yield from self._beside(Step.COPY, self._carried(references, told))

    def _carried(
        self, references: Sequence[ArtifactReference], told: Callable[[Any], None]
    ) -> Script[tuple[Step, Callable[[Any], None], Answer]]:
        failed = yield from self._carrying.run(references)
        return Step.COPY, told, Ok(failed)

    def _brought(self, asked_in: int, batch: Sequence[StoredFact], failed: Mapping[Name, Failed]) -> None:
        if asked_in != self._round:
            return
        first = next((place for place, stored in enumerate(batch) if _missing(stored, failed)), len(batch))
        # Facts before it have nothing to wait for; those behind it may not overtake it.
        self._ready = list(batch[:first])
        for _ in self._ready:
            self._raw.popleft()
        if first < len(batch) and not self._stopping:
            stored, why = batch[first], _missing(batch[first], failed)
            assert why is not None  # noqa: S101 - that is how it was found
            # Fetched once more before the next attempt: the source may be another by then.
            self._raw.clear()
            self._fetched = Cursor(stored.epoch, stored.offset - 1)
            trouble = judge(
                why.error, at_source=why.at_source, message_id=stored.envelope.message_id, offset=stored.offset
            )
            self._failed(Step.COPY, trouble)
        elif first == len(batch):
            self._courses[Step.COPY].well()

    # -- forwarding -----------------------------------------------------------------------------------

    def _forward(self) -> Script[None]:
        if not self._ready or not self._may(Step.FORWARD):
            return
        batch, self._ready = self._ready, []
        told = partial(self._forwarded, self._round, batch)
        yield from self._ask(Step.FORWARD, self._means.forward_facts, (batch,), told)
        # What follows was waiting for its turn.
        yield from self._fetch()
        yield from self._carry()

    def _forwarded(self, asked_in: int, batch: Sequence[StoredFact], answers: Sequence[Appended]) -> None:
        """Go on behind all that was confirmed without a gap; what was not is looked at, and never passed over."""
        if asked_in != self._round:
            return  # the store is being asked what it has
        taken, refused = 0, None
        if len(answers) == len(batch):
            for stored, answer in zip(batch, answers, strict=True):
                refused = refusal(stored, answer)
                if refused is not None:
                    break
                taken += 1
        else:
            refused = FaultyError(f"{len(batch)} facts were forwarded and {len(answers)} were answered")
        if taken:
            self._last = batch[taken - 1]
            self._end = self._last.cursor
            self._offset = self._end.offset
            self.forwarded += taken
            self._passed_bytes += sum(map(_size, batch[:taken]))
        if refused is None:
            self._courses[Step.FORWARD].well()
            return
        stored = batch[min(taken, len(batch) - 1)]
        if isinstance(refused, ArtifactRefused) and stored.fact.artifact is not None:
            self._carrying.doubt(Name.of(stored.fact.artifact))
        trouble = judge(refused, at_source=False, message_id=stored.envelope.message_id, offset=stored.offset)
        if not trouble.status.halted:
            self._start_over()
        if taken:
            self._courses[Step.FORWARD].well()
        self._failed(Step.FORWARD, trouble)

    # -- confirming -----------------------------------------------------------------------------------

    def _confirm(self) -> Script[None]:
        end = self._end
        if end is None or not self._registered or end.offset <= self._confirmed:
            return
        if self._stranger or self._shown is not None:
            return  # of another store it would confirm facts that nobody here has seen
        if self._courses[Step.CONFIRM].halted:
            return
        told = partial(self._told, end)
        yield from self._ask(Step.CONFIRM, self._means.confirm_receipt, (self._name, self._pair, end), told)

    def _told(self, cursor: Cursor, _: None) -> None:
        self._courses[Step.CONFIRM].well()
        self._confirmed = max(self._confirmed, cursor.offset)

    # -- telling --------------------------------------------------------------------------------------

    def _surveyed(self, states: Sequence[LogState]) -> None:
        self._courses[Step.SURVEY].well()
        now = self._clock()
        self._survey_at = now + self._policy.survey
        last, behind = 0, Behind(0, 0, 0, None)
        for state in states:
            if state.pair == self._pair:
                last, behind = state.last, state.readers.get(self._name) or Behind(0, state.last, state.bytes, None)
        self._told_last = last, behind, self._slots.senses.wall()
        self._passed_bytes = 0

    def _show(self) -> None:
        trouble = self._trouble()
        if trouble is not None:
            self._enter(trouble.status)
        elif self._end is not None and self._registered:
            self._enter(Status.FOLLOWING)

    def _enter(self, status: Status) -> None:
        if status is not self._status:
            self._status, self._since = status, self._slots.senses.wall()
            self._changed(self.state())


def _missing(stored: StoredFact, failed: Mapping[Name, Failed]) -> Failed | None:
    reference = stored.fact.artifact
    return None if reference is None else failed.get(Name.of(reference))


def _size(stored: StoredFact) -> int:
    return len(stored.fact.object_json)
