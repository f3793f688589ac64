"""Many facts as protocol buffers: whole on both ends, no larger than was thought, and nothing believed."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from ergon_framework.facts.errors import FactConflict, FactError, InvalidFactError, ServiceFailed
from ergon_framework.facts.model import (
    CORRELATION,
    LABEL_NAME,
    LABEL_VALUE,
    LABELS,
    MESSAGE_ID,
    OBJECT_JSON,
    PREDICATE,
    SIZE,
    SUBJECT,
    ZONE,
    Buffer,
    Envelope,
    Fact,
    FactConfirmation,
    Pair,
    StoredFact,
    digest_of,
)
from ergon_framework.facts.service import batches, calls, messages, requests
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.fetching import fetched
from ergon_framework.facts.service.requests import FACTS, MESSAGE, Fetch
from ergon_framework.facts.stores.memory import MemoryBoundary


def stated(number, text='{"total": 1}', from_zone="Plant A", to_zone="HQ", **more):
    envelope = Envelope(
        message_id=f"m-{number}", from_zone=from_zone, to_zone=to_zone, produced_at_unix_ms=number, **more
    )
    return envelope, Fact(subject=f"order:{number}", predicate="paid", object_json=text)


def stored(number, **more):
    envelope, fact = stated(number)
    given = {"digest": digest_of(envelope, fact), "offset": number, "epoch": "e", "stored_at_unix_ms": 100 + number}
    return StoredFact(envelope=envelope, fact=fact, **given | more)


def confirmed(number, **more):
    given = {"message_id": f"m-{number}", "offset": number, "epoch": "e", "digest": "sha256:x", "buffer": Buffer.ESB}
    return FactConfirmation(**given | more)


def requested(facts):
    """The bytes of each call."""
    return [messages.written(asked.request) for asked in calls.append_facts(facts)]


FACTS_OF_ALL_KINDS = [
    stated(1),
    stated(2, "[]", to_zone="Werk Süd", correlation_id="c"),
    stated(3, '"🙂"', from_zone="Plant B", causation_id="m", labels={"a": "b", "c": ""}),
]


@pytest.mark.spec("FAC-01")
@pytest.mark.parametrize("facts", [FACTS_OF_ALL_KINDS, FACTS_OF_ALL_KINDS[:1], FACTS_OF_ALL_KINDS[2:]])
def test_facts_arrive_as_they_were_sent(facts):
    (data,) = requested(facts)
    assert list(requests.append_facts(data)) == facts


def test_nothing_is_asked_for_no_facts():
    assert requested([]) == []
    assert list(requests.append_facts(b"")) == []


def test_facts_of_one_pair_name_it_once():
    facts = wire.AppendFactsRequest.FromString(requested([stated(1), stated(2)])[0]).facts
    assert (list(facts.from_zones), list(facts.to_zones)) == (["Plant A"], ["HQ"])
    assert (list(facts.correlation_ids), list(facts.causation_ids), dict(facts.labels)) == ([], [], {})


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda facts: facts.subjects.pop(), "2 facts have 2 subjects, and not 1"),
        (lambda facts: facts.predicates.append("p"), "2 predicates, and not 3"),
        (lambda facts: facts.from_zones.extend(["a", "b"]), "2 from_zones, and not 3"),
        (lambda facts: facts.ClearField("to_zones"), "2 to_zones, and not 0"),
        # One object for all would be a megabyte that becomes a gigabyte.
        (lambda facts: facts.objects_json.pop(), "2 objects_json, and not 1"),
        (lambda facts: facts.produced_at_unix_ms.append(1), "2 produced_at_unix_ms, and not 3"),
        (lambda facts: facts.correlation_ids.append("c"), "2 correlation_ids, and not 1"),
        (lambda facts: facts.causation_ids.append("c"), "2 causation_ids, and not 1"),
        (lambda facts: facts.labels[2].values.update(a="b"), "2 facts, .* with number 2"),
        (lambda facts: facts.labels[-1].values.update(a="b"), "2 facts, .* with number -1"),
        (lambda facts: facts.message_ids.extend(["m"] * FACTS), "at most 1,000 facts"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change, words):
    (asked,) = calls.append_facts([stated(1), stated(2)])
    change(asked.request.facts)
    with pytest.raises(InvalidFactError, match=words):
        requests.append_facts(messages.written(asked.request))


def test_labels_of_nobody_are_not_read(monkeypatch):
    """A message of a few bytes for each place: none of them is made into anything."""
    request = wire.AppendFactsRequest(facts=wire.Facts(message_ids=["m"]))
    for place in range(10_000):
        request.facts.labels[place].SetInParent()
    monkeypatch.setattr(batches, "dict", lambda _: pytest.fail("a label was read"), raising=False)
    with pytest.raises(InvalidFactError, match="1 facts"):
        requests.append_facts(messages.written(request))


def test_any_sequence_of_facts_can_be_appended():
    assert requested(deque(FACTS_OF_ALL_KINDS)) == requested(FACTS_OF_ALL_KINDS)


# -- sizes ----------------------------------------------------------------------------------------------


def largest(character="\U0001f600"):
    """A fact with as much of everything as the model allows."""
    envelope = Envelope(
        message_id="m" * MESSAGE_ID,
        from_zone=character * ZONE,
        to_zone=character * ZONE,
        produced_at_unix_ms=SIZE,
        correlation_id=character * CORRELATION,
        causation_id=character * CORRELATION,
        labels={f"{n:02}" + character * (LABEL_NAME - 2): character * LABEL_VALUE for n in range(LABELS)},
    )
    text = '"' + character * ((OBJECT_JSON - 2) // len(character.encode())) + '"'
    return envelope, Fact(subject=character * SUBJECT, predicate=character * PREDICATE, object_json=text)


@pytest.mark.parametrize(
    "facts",
    [
        FACTS_OF_ALL_KINDS,
        [largest()],
        [largest("a")],
        [stated(n, "1") for n in range(1, 400)],
        [stated(n, "1", labels={chr(65 + label): "" for label in range(LABELS)}) for n in range(1, 400)],
    ],
)
def test_nothing_is_heavier_than_its_weight(facts):
    most = sum(batches.weight(*each) for each in facts)
    request = wire.AppendFactsRequest()
    batches.write_facts(facts, request.facts)
    assert len(messages.written(request)) <= most
    epochs = ["\U0001f600" * 128 + str(n) for n in range(len(facts))]
    found = [
        StoredFact(
            envelope=envelope, fact=fact, digest="sha256:" + "0" * 64, offset=SIZE, epoch=epoch, stored_at_unix_ms=SIZE
        )
        for (envelope, fact), epoch in zip(facts, epochs, strict=True)
    ]
    assert len(messages.written(batches.write_fetched(found))) <= most + sum(4 * len(epoch) for epoch in epochs)


def test_the_largest_fact_fits_into_one_call():
    (data,) = requested([largest()])
    assert OBJECT_JSON < len(data) <= MESSAGE
    assert list(requests.append_facts(data)) == [largest()]


def test_many_are_cut_into_calls_that_fit():
    given = [stated(n, '"' + "ü" * 100_000 + '"') for n in range(60)] + [stated(n) for n in range(60, 2500)]
    cut = requested(given)
    assert max(map(len, cut)) <= MESSAGE
    assert 4 <= len(cut) <= 8
    assert [each for data in cut for each in requests.append_facts(data)] == given


def test_an_answer_to_a_fetch_fits_and_what_did_not_comes_next():
    store = MemoryBoundary()
    given = [stated(n, '"' + "ü" * 100_000 + '"') for n in range(60)]
    store.append_facts(given)
    pair, got, after = Pair("Plant A", "HQ"), [], None
    while True:
        found = asyncio.run(fetched(store, Fetch("r", pair, 1000, after)))
        assert len(messages.written(batches.write_fetched(found))) <= MESSAGE
        if not found:
            break
        got += [(each.envelope, each.fact) for each in found]
        after = found[-1].cursor
    assert got == given


# -- what came of them ----------------------------------------------------------------------------------

CONFLICT = FactConflict("another payload", from_zone="Plant A", message_id="m-3")


def told(results):
    """As the caller reads them."""
    (asked,) = calls.append_facts([stated(n) for n in range(1, len(results) + 1)])
    return asked.result(messages.written(batches.write_answer(results)))


@pytest.mark.parametrize(
    "results",
    [
        [confirmed(1), confirmed(2), confirmed(3)],
        [confirmed(1, duplicate=True), confirmed(2), confirmed(3, duplicate=True, epoch="before")],
        [confirmed(1), confirmed(2, epoch="another"), confirmed(3, buffer=Buffer.ISB)],
        [confirmed(1, duplicate=True)],
    ],
)
def test_confirmations_arrive_as_they_were_given(results):
    assert told(results) == results


def test_a_refusal_stands_where_its_fact_stood():
    first, second, third, fourth = told([InvalidFactError("no"), confirmed(2), CONFLICT, confirmed(4)])
    assert (second, fourth) == (confirmed(2), confirmed(4))
    assert type(first) is InvalidFactError
    assert isinstance(third, FactConflict)
    assert third.message_id == "m-3"


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.offsets.pop(),
        lambda answer: answer.digests.append("sha256:x"),
        lambda answer: answer.Clear(),
        lambda answer: answer.ClearField("others"),
        lambda answer: answer.others[0].Clear(),
        lambda answer: answer.ClearField("buffer"),
        lambda answer: setattr(answer, "buffer", "XYZ"),
        # Facts are confirmed where they were appended, and not where they arrive.
        lambda answer: setattr(answer, "buffer", "IFB"),
        lambda answer: answer.offsets.__setitem__(1, -7),
        lambda answer: answer.others[1].fault.SetInParent(),
        lambda answer: answer.others[7].fault.SetInParent(),
        lambda answer: answer.offsets.__setitem__(0, 1),
        lambda answer: answer.offsets.__setitem__(1, 0),
        lambda answer: answer.others[0].confirmation.CopyFrom(messages.write_confirmation(confirmed(2))),
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_the_service_s_failure(change):
    answer = batches.write_answer([CONFLICT, confirmed(2)])
    change(answer)
    (asked,) = calls.append_facts([stated(1), stated(2)])
    with pytest.raises(ServiceFailed):
        asked.result(messages.written(answer))


# -- facts that are read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts", [[], [stored(1)], [stored(1), stored(2)], [stored(1), stored(2, epoch="f"), stored(3, digest="damaged")]]
)
def test_fetched_facts_arrive_as_they_were_stored(facts):
    assert list(read(batches.write_fetched(facts))) == facts


def read(answer, limit=10):
    return calls.fetch_facts("r", Pair("Plant A", "HQ"), limit, None).result(messages.written(answer))


@pytest.mark.parametrize("column", ["digests", "offsets", "epochs", "stored_at_unix_ms"])
def test_columns_of_fetched_facts_that_do_not_fit_are_refused(column):
    answer = batches.write_fetched([stored(1), stored(2), stored(3, epoch="f")])
    getattr(answer, column).pop()
    with pytest.raises(ServiceFailed, match=column):
        read(answer)


def test_more_than_was_asked_for_is_not_even_looked_at():
    answer = batches.write_fetched([stored(1), stored(2)])
    answer.facts.objects_json[0] = "{"
    with pytest.raises(ServiceFailed, match="2 facts came where 1 were asked for"):
        read(answer, limit=1)


def test_a_malformed_fact_among_fetched_ones_is_raised():
    answer = batches.write_fetched([stored(1), stored(2)])
    answer.facts.objects_json[1] = "{"
    with pytest.raises(FactError, match="no JSON"):
        read(answer)
