"""Batches: many facts, and what came of them, as protocol buffers by columns.

A message for each fact takes several times as long to fill and to read as its values in columns do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeGuard, TypeVar

from ergon_framework.facts import table
from ergon_framework.facts.boundary import Appended, Appending
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import Envelope, Fact, FactConfirmation, Side, StoredFact
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import faults
from ergon_framework.facts.service.messages import read_confirmation, write_confirmation

#: What a fact takes at most besides its texts: their lengths and those of its labels, its numbers, a digest.
_FRAME: Final = 512

_STORE_BUFFERS: Final = {side.store_buffer.value: side.store_buffer for side in Side}

V = TypeVar("V", str, int)


def weight(envelope: Envelope, fact: Fact) -> int:
    """The most bytes that a fact takes on its way."""
    texts = len(envelope.message_id) + len(envelope.from_zone) + len(envelope.to_zone)
    texts += len(fact.subject) + len(fact.predicate)
    texts += len(envelope.correlation_id or "") + len(envelope.causation_id or "")
    if envelope.labels:
        texts += sum(len(name) + len(value) for name, value in envelope.labels.items())
    # A character has at most four bytes; of the object, which may be large, they are counted.
    written = fact.object_json
    return _FRAME + 4 * texts + (len(written) if written.isascii() else len(written.encode()))


# -- facts ----------------------------------------------------------------------------------------------


def write_facts(facts: Sequence[Appending], message: wire.Facts) -> None:
    """Written into *message*, which stands in another one: copying it there takes as long again."""
    envelopes = [envelope for envelope, _ in facts]
    message.message_ids.extend([envelope.message_id for envelope in envelopes])
    message.from_zones.extend(_pressed([envelope.from_zone for envelope in envelopes]))
    message.to_zones.extend(_pressed([envelope.to_zone for envelope in envelopes]))
    message.produced_at_unix_ms.extend([envelope.produced_at_unix_ms for envelope in envelopes])
    message.subjects.extend([fact.subject for _, fact in facts])
    message.predicates.extend([fact.predicate for _, fact in facts])
    message.objects_json.extend([fact.object_json for _, fact in facts])
    message.correlation_ids.extend(_if_any([envelope.correlation_id for envelope in envelopes]))
    message.causation_ids.extend(_if_any([envelope.causation_id for envelope in envelopes]))
    for place, envelope in enumerate(envelopes):
        if envelope.labels:
            message.labels[place].values.update(envelope.labels)


def read_facts(message: wire.Facts) -> Sequence[Appending | InvalidFactError]:
    """One that is malformed is an error of its own, and its neighbours are not; columns that do not fit are refused."""
    try:
        columns = _table(message)
    except ValueError as error:
        raise InvalidFactError(str(error)) from error
    return table.read_each(columns)


def _table(message: wire.Facts) -> table.Table:
    """The columns, which fit together; else a ValueError says why not."""
    count = len(message.message_ids)
    # There may be far more labels than facts; then one of the first that are looked at is nobody's.
    for place in message.labels:
        if not 0 <= place < count:
            raise ValueError(f"there are {count} facts, counted from 0, and labels for the one with number {place}")
    return table.Table(
        message_ids=list(message.message_ids),
        from_zones=_spread("from_zones", message.from_zones, count),
        to_zones=_spread("to_zones", message.to_zones, count),
        produced=_each("produced_at_unix_ms", message.produced_at_unix_ms, count),
        subjects=_each("subjects", message.subjects, count),
        predicates=_each("predicates", message.predicates, count),
        objects=_each("objects_json", message.objects_json, count),
        correlations=_perhaps("correlation_ids", message.correlation_ids, count),
        causations=_perhaps("causation_ids", message.causation_ids, count),
        labels={place: dict(found.values) for place, found in message.labels.items()},
    )


def _pressed(values: list[str]) -> list[str]:
    """One for all, where they are the same."""
    return values[:1] if len(set(values)) == 1 else values


def _if_any(values: Sequence[str | None]) -> list[str]:
    return [value or "" for value in values] if any(values) else []


def _each(name: str, values: Sequence[V], count: int) -> list[V]:
    if len(values) != count:
        raise ValueError(f"{count} facts have {count} {name}, and not {len(values)}")
    return list(values)


def _spread(name: str, values: Sequence[str], count: int) -> list[str]:
    return list(values) * count if len(values) == 1 else _each(name, values, count)


def _perhaps(name: str, values: Sequence[str], count: int) -> list[str | None]:
    return [value or None for value in _each(name, values, count)] if values else [None] * count


# -- what came of them ----------------------------------------------------------------------------------


def write_answer(results: Sequence[Appended]) -> wire.AppendFactsAnswer:
    """What is new by columns, and whatever else came of a fact by itself."""
    answer = wire.AppendFactsAnswer()
    epoch, buffer = next(((result.epoch, result.buffer) for result in results if _is_new(result)), ("", None))
    offsets, digests = [], []
    for place, result in enumerate(results):
        if _is_new(result) and result.epoch == epoch and result.buffer is buffer:
            offsets.append(result.offset)
            digests.append(result.digest)
        else:
            offsets.append(0)
            digests.append("")
            _write_other(answer.others[place], result)
    answer.offsets.extend(offsets)
    answer.digests.extend(digests)
    answer.epoch = epoch
    answer.buffer = "" if buffer is None else buffer.value
    return answer


def _is_new(result: Appended) -> TypeGuard[FactConfirmation]:
    return isinstance(result, FactConfirmation) and not result.duplicate


def _write_other(message: wire.Appended, result: Appended) -> None:
    if isinstance(result, FactConfirmation):
        message.confirmation.CopyFrom(write_confirmation(result))
    else:
        message.fault.CopyFrom(faults.write(result))


def read_answer(message: wire.AppendFactsAnswer, message_ids: Sequence[str]) -> Sequence[Appended]:
    """What came of the facts with these ids; a ValueError says what is wrong with an answer that is none."""
    count = len(message_ids)
    offsets, digests = _each("offsets", message.offsets, count), _each("digests", message.digests, count)
    new = count - offsets.count(0)
    if len(message.others) != count - new:
        raise ValueError(f"{new} of {count} facts are new, and {len(message.others)} are others")
    if not new:
        return [_read_other(message, *each) for each in enumerate(message_ids)]
    if min(offsets) < 0:
        raise ValueError(f"no fact has the offset {min(offsets)}")
    epoch, buffer = message.epoch, _STORE_BUFFERS.get(message.buffer)
    if buffer is None:
        raise ValueError(f"facts are confirmed in {' or '.join(_STORE_BUFFERS)}, and not in {message.buffer!r:.20}")
    return [
        FactConfirmation(message_id=message_id, offset=offset, epoch=epoch, digest=digest, buffer=buffer)
        if offset
        else _read_other(message, place, message_id)
        for place, (message_id, offset, digest) in enumerate(zip(message_ids, offsets, digests, strict=True))
    ]


def _read_other(message: wire.AppendFactsAnswer, place: int, message_id: str) -> Appended:
    other = message.others.get(place)
    kind = None if other is None else other.WhichOneof("result")
    if other is None or kind is None:
        raise ValueError(f"nothing came of the fact with number {place}")
    if kind == "fault":
        return faults.read(other.fault)
    if other.confirmation.message_id != message_id:
        raise ValueError(f"the fact {message_id!r} was confirmed as {other.confirmation.message_id!r:.60}")
    return read_confirmation(other.confirmation)


# -- facts that are read --------------------------------------------------------------------------------


def write_fetched(facts: Sequence[StoredFact]) -> wire.FetchFactsAnswer:
    """Facts with what they have from their store."""
    answer = wire.FetchFactsAnswer()
    write_facts([(stored.envelope, stored.fact) for stored in facts], answer.facts)
    answer.digests.extend([stored.digest for stored in facts])
    answer.offsets.extend([stored.offset for stored in facts])
    answer.stored_at_unix_ms.extend([stored.stored_at_unix_ms for stored in facts])
    answer.epochs.extend(_pressed([stored.epoch for stored in facts]))
    return answer


def read_fetched(message: wire.FetchFactsAnswer, limit: int) -> Sequence[StoredFact]:
    """At most *limit* facts, the first that is malformed is raised; a ValueError if the answer is none."""
    count = len(message.facts.message_ids)
    if count > limit:
        raise ValueError(f"{count} facts came where {limit} were asked for")
    digests, offsets = _each("digests", message.digests, count), _each("offsets", message.offsets, count)
    moments = _each("stored_at_unix_ms", message.stored_at_unix_ms, count)
    epochs = _spread("epochs", message.epochs, count)
    return [
        StoredFact(envelope=envelope, fact=fact, digest=digest, offset=offset, epoch=epoch, stored_at_unix_ms=moment)
        for (envelope, fact), digest, offset, epoch, moment in zip(
            table.read(_table(message.facts)), digests, offsets, epochs, moments, strict=True
        )
    ]
