"""Deliberately broken replicators, one broken rule each: the checks of the zones must detect every one of them."""

from __future__ import annotations

from ergon_framework.engine.effects import NEVER, Call, call
from ergon_framework.facts import replication
from ergon_framework.facts.artifact_copy import ArtifactCopier
from ergon_framework.facts.errors import EpochChanged, FactConflict
from ergon_framework.facts.model import Cursor, FactConfirmation
from ergon_framework.facts.replication import CallKind, Replication


class ConfirmsFetchedFacts(Replication):
    """The source may drop facts that exist nowhere else."""

    def _confirm(self):
        previous_end, self._end = self._end, self._fetch_cursor
        yield from super()._confirm()
        self._end = previous_end


class ConfirmsUnansweredForwards(Replication):
    """Counts a forward as done when it starts."""

    def _forward(self):
        last = self._ready_facts[-1].cursor if self._ready_facts else None
        yield from super()._forward()
        if last is not None and CallKind.FORWARD in self._running:
            self._end = last


class SkipsRejectedFacts(Replication):
    """Continues after a batch whatever the destination has answered."""

    def _accept_forwards(self, generation, batch, results):
        results = [make_confirmation(stored) for stored in batch]
        super()._accept_forwards(generation, batch, results)


class TrustsItsOwnOffset(Replication):
    """Never queries the destination again for its last offset."""

    def _start_over(self):
        previous_end, previous_fetched = self._end, self._fetch_cursor
        super()._start_over()
        self._end, self._fetch_cursor = previous_end, previous_fetched


class ForwardsBeforeArtifacts(Replication):
    def _copy_artifacts(self):
        batch = list(self._fetched_facts)
        if batch and not self._ready_facts:
            self._accept_copies(self._generation, batch, {})
        return
        yield


class SkipsLostArtifacts(Replication):
    """Discards a fact whose artifact cannot be copied."""

    def _accept_copies(self, generation, batch, failures):
        for stored in [stored for stored in batch if replication._find_failure(stored, failures)]:
            if generation == self._generation:
                self._fetched_facts.remove(stored)
        super()._accept_copies(
            generation, [stored for stored in batch if not replication._find_failure(stored, failures)], {}
        )


class NeverTimesOut(Replication):
    """A call that never returns never times out."""

    def _await_call(self, kind, effect, on_result):
        answer = yield from call(Call(effect.step, effect.fn, effect.args, NEVER))
        return kind, on_result, answer


class ContinuesInAnotherEpoch(Replication):
    """Reads a restored source as if it were unchanged."""

    def _fetch(self):
        end = self._fetch_cursor
        self._fetch_cursor = Cursor(self._calls.fetch_facts.__self__.epoch, end.offset)
        yield from super()._fetch()
        self._fetch_cursor = end

    def _record_failure(self, kind, problem):
        if not isinstance(problem.error, EpochChanged):
            super()._record_failure(kind, problem)


class SkipsConflicts(Replication):
    def _accept_forwards(self, generation, batch, results):
        accepted_answers = [
            make_confirmation(stored) if isinstance(answer, FactConflict) else answer
            for stored, answer in zip(batch, results, strict=True)
        ]
        super()._accept_forwards(generation, batch, accepted_answers)


class TrustsTheEpoch(Replication):
    """Never verifies that the source has a fact of the destination."""

    _is_unverified = property(lambda self: False, lambda self, value: None)


class NeverConfirms(Replication):
    """The source keeps every fact without limit."""

    def _confirm(self):
        return
        yield


class _RestartingCopier(ArtifactCopier):
    def _copy_artifact(self, copy):
        received = self._calls.uploaded_bytes
        self._calls = type(self._calls)(_return_zero, self._calls.copy)
        try:
            return (yield from super()._copy_artifact(copy))
        finally:
            self._calls = type(self._calls)(received, self._calls.copy)


class RestartsInterruptedCopies(Replication):
    """An interrupted artifact never arrives over a connection that breaks half way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        copier = self._copier
        self._copier = _RestartingCopier(copier._calls, policy=copier._policy, scheduler=copier._scheduler)


def _return_zero(*_):
    return 0


def make_confirmation(stored):
    return FactConfirmation(
        message_id=stored.envelope.message_id,
        offset=stored.offset,
        epoch=stored.epoch,
        digest=stored.digest,
        buffer="ISB",
    )
