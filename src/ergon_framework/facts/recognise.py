"""Recognising: whether what two stores answer can be true of the facts that were asked for. It never acts."""

from __future__ import annotations

from collections.abc import Sequence

from ergon_framework.facts.boundary import Appended
from ergon_framework.facts.errors import EpochChanged, FactError
from ergon_framework.facts.model import Cursor, FactConfirmation, Pair, StoredFact, contiguous, digest_of
from ergon_framework.facts.replica import FaultyError


def wrong(pair: Pair, behind: Cursor, epoch: str, facts: Sequence[StoredFact]) -> FactError | None:
    """What no source may answer to a fetch *behind* that offset; None if all is well.

    *epoch* is that of the facts that are here, empty if there are none.
    """
    if not contiguous(facts, behind.offset):
        return FaultyError(
            f"the source was asked for what follows offset {behind.offset} and handed out "
            f"{[stored.offset for stored in facts][:3]}; offsets have no gaps, so its store is defective"
        )
    for stored in facts:
        if stored.envelope.pair != pair:
            return FaultyError(f"the source was asked for facts of {pair} and handed out one of {stored.envelope.pair}")
        if epoch and stored.epoch != epoch:
            return EpochChanged(
                f"facts here are of epoch {epoch!r} and the source hands out epoch {stored.epoch!r}: it was put back "
                "from a backup, and offsets may mean other facts; compare the two before you go on"
            )
        if digest_of(stored.envelope, stored.fact) != stored.digest:
            return FaultyError(
                f"the fact {stored.envelope.message_id!r} at offset {stored.offset} came with a digest that is not its "
                "own: it was damaged at the source or on the way"
            )
    return None


def other(facts: Sequence[StoredFact], at: Cursor, last: StoredFact | None) -> FactError | None:
    """Why a source is not the one that was read from, which shows *facts* from the one on that is here *at* the end.

    *last* is what is remembered of it. None if it may be the one.
    """
    if not facts:
        return another(f"it has no fact at offset {at.offset}, which is here")
    shown = facts[0]
    if last is None or last.offset != shown.offset:
        return None
    if (last.envelope.message_id, last.digest) != (shown.envelope.message_id, shown.digest):
        return another(f"it has another fact at offset {at.offset} than the one that is here")
    return None


def unknown(shown: StoredFact, confirmation: FactConfirmation | None) -> FactError | None:
    """The same by what the destination has confirmed for the id that the source shows."""
    message_id = shown.envelope.message_id
    if confirmation is None:
        return another(f"it has {message_id!r} at offset {shown.offset}, which is not here")
    if (confirmation.digest, confirmation.offset) != (shown.digest, shown.offset):
        return another(f"it has {message_id!r} at offset {shown.offset}, which is here at {confirmation.offset}")
    return None


def another(what: str) -> EpochChanged:
    """A source that is not the one that was read from."""
    return EpochChanged(
        f"the source is not the one that was read from: {what}; it was put back from a backup, and offsets may mean "
        "other facts; compare the two before you go on"
    )


def refusal(stored: StoredFact, answer: Appended) -> FactError | None:
    """Why the destination does not have *stored* where it belongs; None if it has."""
    if not isinstance(answer, FactConfirmation):
        return answer
    if (answer.epoch, answer.offset) == (stored.epoch, stored.offset):
        return None
    # The same fact elsewhere: offsets were given anew, which is what happens after a backup was put back.
    return EpochChanged(
        f"the fact {stored.envelope.message_id!r} has offset {stored.offset} in epoch {stored.epoch!r} and is here at "
        f"{answer.offset} in {answer.epoch!r}: one of the two stores was put back from a backup"
    )
