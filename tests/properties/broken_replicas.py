"""Replicators that are broken on purpose, one rule each: whoever watches the zones must notice every one of them."""

from __future__ import annotations

from ergon_framework.engine.effects import NEVER, Call, call
from ergon_framework.facts import replicate
from ergon_framework.facts.carry import Carrying
from ergon_framework.facts.errors import EpochChanged, FactConflict
from ergon_framework.facts.model import Cursor, FactConfirmation
from ergon_framework.facts.replicate import Replication, Step


class ConfirmsWhatItHasFetched(Replication):
    """The source may drop facts that are nowhere else."""

    def _confirm(self):
        kept, self._end = self._end, self._fetched
        yield from super()._confirm()
        self._end = kept


class ConfirmsWhatItHasSent(Replication):
    """Counts a forward as done when it was begun."""

    def _forward(self):
        last = self._ready[-1].cursor if self._ready else None
        yield from super()._forward()
        if last is not None and Step.FORWARD in self._busy:
            self._end = last


class PassesOverRefusals(Replication):
    """Goes on behind a batch whatever the destination has answered."""

    def _forwarded(self, asked_in, batch, answers):
        answers = [stored_as(stored) for stored in batch]
        super()._forwarded(asked_in, batch, answers)


class BelievesItsMemory(Replication):
    """Never asks the destination again what it has."""

    def _start_over(self):
        kept, fetched = self._end, self._fetched
        super()._start_over()
        self._end, self._fetched = kept, fetched


class PutsFactsBeforeArtifacts(Replication):
    def _carry(self):
        batch = list(self._raw)
        if batch and not self._ready:
            self._brought(self._round, batch, {})
        return
        yield


class PassesOverLostArtifacts(Replication):
    """What cannot be copied is forgotten, with its fact."""

    def _brought(self, asked_in, batch, failed):
        for stored in [stored for stored in batch if replicate._missing(stored, failed)]:
            if asked_in == self._round:
                self._raw.remove(stored)
        super()._brought(asked_in, [stored for stored in batch if not replicate._missing(stored, failed)], {})


class WaitsForEver(Replication):
    """A call that never comes back is never given up."""

    def _asked(self, step, made, told):
        answer = yield from call(Call(made.step, made.fn, made.args, NEVER))
        return step, told, answer


class GoesOnInAnotherEpoch(Replication):
    """Reads a restored source as if it were the old one."""

    def _fetch(self):
        end = self._fetched
        self._fetched = Cursor(self._means.fetch_facts.__self__.epoch, end.offset)
        yield from super()._fetch()
        self._fetched = end

    def _failed(self, step, trouble):
        if not isinstance(trouble.error, EpochChanged):
            super()._failed(step, trouble)


class PassesOverConflicts(Replication):
    def _forwarded(self, asked_in, batch, answers):
        taken = [
            stored_as(stored) if isinstance(answer, FactConflict) else answer
            for stored, answer in zip(batch, answers, strict=True)
        ]
        super()._forwarded(asked_in, batch, taken)


class TrustsTheEpoch(Replication):
    """Never has a source show a fact that is here."""

    _stranger = property(lambda self: False, lambda self, value: None)


class NeverConfirms(Replication):
    """The source keeps everything for ever."""

    def _confirm(self):
        return
        yield


class _FromTheBeginning(Carrying):
    def _copied(self, copy):
        received = self._means.received
        self._means = type(self._means)(_nothing, self._means.copy)
        try:
            return (yield from super()._copied(copy))
        finally:
            self._means = type(self._means)(received, self._means.copy)


class CopiesFromTheBeginning(Replication):
    """An artifact that breaks off half way never arrives over a line that breaks off half way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        kept = self._carrying
        self._carrying = _FromTheBeginning(kept._means, policy=kept._policy, slots=kept._slots)


def _nothing(*_):
    return 0


def stored_as(stored):
    return FactConfirmation(
        message_id=stored.envelope.message_id,
        offset=stored.offset,
        epoch=stored.epoch,
        digest=stored.digest,
        buffer="ISB",
    )
