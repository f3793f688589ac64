"""Facts that are made of a table are those that the model makes one by one; what is malformed is told of each."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.facts import table
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import OBJECT_JSON, Envelope, Fact, digest_of
from ergon_framework.facts.table import Table, read, read_each

DIGEST = "sha256:" + "ab" * 32
REFERENCE = f'{{"size":7,"bucket":"files","key":"a/b.pdf","digest":"{DIGEST}"}}'
SOUND = {
    "message_id": "m-1",
    "from_zone": "Werk Süd",
    "to_zone": "HQ",
    "produced_at_unix_ms": 7,
    "correlation_id": None,
    "causation_id": None,
    "labels": {},
    "subject": "order:7",
    "predicate": "paid",
    "object_json": '{"total": 12.50, "lines": [1, "ü"]}',
}
COLUMNS = {
    "message_ids": "message_id",
    "from_zones": "from_zone",
    "to_zones": "to_zone",
    "produced": "produced_at_unix_ms",
    "correlations": "correlation_id",
    "causations": "causation_id",
    "subjects": "subject",
    "predicates": "predicate",
    "objects": "object_json",
}
#: Values of one field, sound and not.
VALUES = [
    *[("message_id", value) for value in ("", "x" * 256, "x" * 257, "a b", "grün", "a\x1f", "!~")],
    *[("from_zone", value) for value in ("", "z" * 64, "z" * 65, " a", "a ", "a\nb", "A B", "\u3000a\u3000b")],
    *[("to_zone", value) for value in ("", "\x7f", "a\u2028")],
    *[("produced_at_unix_ms", value) for value in (-1, 0, 2**53, 2**53 + 1)],
    *[("correlation_id", value) for value in ("", "c", "x" * 257, "a\0")],
    *[("causation_id", value) for value in ("", "c", "x" * 257)],
    *[("labels", value) for value in ({"a": "b"}, {"": "b"}, {"a": "\n"}, {f"l{n}": "" for n in range(33)})],
    *[("subject", value) for value in ("", "s" * 512, "s" * 513, "a\u3000b", "a\nb", "\ud800")],
    *[("predicate", value) for value in ("", "p" * 257, "a\u0085")],
    *[("object_json", value) for value in ("", "{", "null", '{"a":1,"a":2}', "1e999", REFERENCE, '"\\ud800"')],
    *[("object_json", REFERENCE.replace(old, new)) for old, new in (('"a/', '"../'), ("7", "-1"), ("sha256:", ""))],
    ("object_json", '"' + "x" * (OBJECT_JSON // 4) + '"'),
    ("object_json", '"' + "x" * OBJECT_JSON + '"'),
]


def of(rows):
    return Table(
        **{column: [row[name] for row in rows] for column, name in COLUMNS.items()},
        labels={place: row["labels"] for place, row in enumerate(rows) if row["labels"]},
    )


def alone(row):
    """What the model makes of *row*."""
    stated = {name: row[name] for name in ("subject", "predicate", "object_json")}
    try:
        return Envelope(**{name: value for name, value in row.items() if name not in stated}), Fact(**stated)
    except InvalidFactError as error:
        return error


def alike(got, wanted):
    if isinstance(wanted, InvalidFactError):
        return type(got) is type(wanted) and str(got) == str(wanted)
    return (
        got == wanted
        and vars(got[0]).keys() == vars(wanted[0]).keys()
        and vars(got[1]) == vars(wanted[1])
        and hash(got[0]) == hash(wanted[0])
        and digest_of(*got) == digest_of(*wanted)
        and got[1].artifact == wanted[1].artifact
    )


@pytest.mark.spec("FAC-01")
@pytest.mark.parametrize("field, value", VALUES, ids=lambda value: ascii(value)[:24])
def test_one_value_is_judged_as_alone_and_spoils_no_neighbour(field, value):
    rows = [SOUND, SOUND | {"message_id": "m-2", field: value}, SOUND | {"message_id": "m-3"}]
    got = read_each(of(rows))
    assert [alike(each, alone(row)) for each, row in zip(got, rows, strict=True)] == [True] * 3
    assert not any(isinstance(each, InvalidFactError) for each in (got[0], got[2]))


@given(st.lists(st.lists(st.sampled_from([pair for pair in VALUES if len(str(pair)) < 2_000]), max_size=2), max_size=5))
def test_any_mixture_is_judged_as_alone(changes):
    rows = [SOUND | {"message_id": f"m-{n}"} | dict(change) for n, change in enumerate(changes)]
    got = read_each(of(rows))
    assert len(got) == len(rows)
    assert all(alike(each, alone(row)) for each, row in zip(got, rows, strict=True))


def test_what_is_sound_is_not_made_one_by_one(monkeypatch):
    monkeypatch.setattr(table, "_one", lambda *_: pytest.fail("made by itself"))
    rows = [
        SOUND | {"message_id": f"m-{n}", "object_json": text, "labels": labels, "correlation_id": correlation}
        for n, (text, labels, correlation) in enumerate(
            [("1", {}, None), (REFERENCE, {"a": "b"}, "c"), ('"🙂"', {}, None)]
        )
    ]
    got = read_each(of(rows))
    assert [envelope.correlation_id for envelope, _ in got] == [None, "c", None]
    assert [fact.artifact is None for _, fact in got] == [True, False, True]


def test_where_all_must_be_sound_the_first_that_is_not_is_raised_and_no_other_looked_at(monkeypatch):
    rows = [SOUND, SOUND | {"subject": ""}, SOUND | {"object_json": "{"}]
    with pytest.raises(InvalidFactError, match="subject has 1 to 512"):
        read(of(rows))
    monkeypatch.setattr(table, "_or_error", lambda *_: pytest.fail("an error for each"))
    with pytest.raises(InvalidFactError):
        read(of(rows * 10))


@pytest.mark.spec("FAC-01")
def test_what_was_made_at_once_is_as_frozen_as_any_other():
    ((envelope, fact),) = read(of([SOUND | {"labels": {"a": "b"}}]))
    with pytest.raises(AttributeError):
        envelope.message_id = "x"
    with pytest.raises(AttributeError):
        fact.subject = "x"
    with pytest.raises(TypeError):
        envelope.labels["a"] = "c"
    assert pickle.loads(pickle.dumps((envelope, fact))) == (envelope, fact)
