"""Checks whether the answers of two stores are consistent with the queried facts. It makes no calls itself."""

from __future__ import annotations

from collections.abc import Sequence

from ergon_framework.facts.boundary import AppendResult
from ergon_framework.facts.errors import EpochChanged, FactError
from ergon_framework.facts.model import Cursor, FactConfirmation, StoredFact, ZonePair, fact_digest, is_contiguous
from ergon_framework.facts.replica import InconsistentStoreError


def check_fetch(pair: ZonePair, after: Cursor, epoch: str, facts: Sequence[StoredFact]) -> FactError | None:
    """Return the error in a source's answer to a fetch after that cursor; None if the answer is valid.

    *epoch* is that of the facts that are here, empty if there are none.
    """
    if not is_contiguous(facts, after.offset):
        return InconsistentStoreError(
            f"the source was asked for what follows offset {after.offset} and handed out "
            f"{[stored.offset for stored in facts][:3]}; offsets have no gaps, so its store is defective"
        )
    for stored in facts:
        if stored.envelope.pair != pair:
            return InconsistentStoreError(
                f"the source was asked for facts of {pair} and handed out one of {stored.envelope.pair}"
            )
        if epoch and stored.epoch != epoch:
            return EpochChanged(
                f"facts here are of epoch {epoch!r} and the source hands out epoch {stored.epoch!r}: it was put back "
                "from a backup, and offsets may mean other facts; compare the two before you go on"
            )
        if fact_digest(stored.envelope, stored.fact) != stored.digest:
            return InconsistentStoreError(
                f"the fact {stored.envelope.message_id!r} at offset {stored.offset} came with a digest that is not its "
                "own: it was damaged at the source or on the way"
            )
    return None


def check_same_source(facts: Sequence[StoredFact], end: Cursor, remembered: StoredFact | None) -> FactError | None:
    """Return the error if the source is not the one read before; *facts* starts with its fact at this zone's *end*.

    *remembered* is the last fact of the source known here. None if the source may be the same.
    """
    if not facts:
        return source_changed_error(f"it has no fact at offset {end.offset}, which is here")
    first = facts[0]
    if remembered is None or remembered.offset != first.offset:
        return None
    if (remembered.envelope.message_id, remembered.digest) != (first.envelope.message_id, first.digest):
        return source_changed_error(f"it has another fact at offset {end.offset} than the one that is here")
    return None


def check_confirmation(stored: StoredFact, confirmation: FactConfirmation | None) -> FactError | None:
    """Return the same error, judged by the destination's confirmation for the id that the source returned."""
    message_id = stored.envelope.message_id
    if confirmation is None:
        return source_changed_error(f"it has {message_id!r} at offset {stored.offset}, which is not here")
    if (confirmation.digest, confirmation.offset) != (stored.digest, stored.offset):
        return source_changed_error(
            f"it has {message_id!r} at offset {stored.offset}, which is here at {confirmation.offset}"
        )
    return None


def source_changed_error(reason: str) -> EpochChanged:
    """Return the error for a source that is not the one read before."""
    return EpochChanged(
        f"the source is not the one that was read from: {reason}; it was put back from a backup, and offsets may mean "
        "other facts; compare the two before you go on"
    )


def check_forwarded(stored: StoredFact, result: AppendResult) -> FactError | None:
    """Return why the destination does not have *stored* at its offset and epoch; None if it has."""
    if not isinstance(result, FactConfirmation):
        return result
    if (result.epoch, result.offset) == (stored.epoch, stored.offset):
        return None
    # The same fact elsewhere: offsets were assigned again, which happens after a backup was restored.
    return EpochChanged(
        f"the fact {stored.envelope.message_id!r} has offset {stored.offset} in epoch {stored.epoch!r} and is here at "
        f"{result.offset} in {result.epoch!r}: one of the two stores was put back from a backup"
    )
