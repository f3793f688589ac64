"""Facts made from a table equal those that the model makes one by one; each malformed one is reported."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.facts import columns
from ergon_framework.facts.columns import FactColumns, columns_to_facts, columns_to_results
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import MAX_OBJECT_BYTES, Envelope, Fact, fact_digest

DIGEST = "sha256:" + "ab" * 32
REFERENCE = f'{{"size":7,"bucket":"files","key":"a/b.pdf","digest":"{DIGEST}"}}'
VALID_ROW = {
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
    "produced_at_unix_ms": "produced_at_unix_ms",
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
    ("object_json", '"' + "x" * (MAX_OBJECT_BYTES // 4) + '"'),
    ("object_json", '"' + "x" * MAX_OBJECT_BYTES + '"'),
]


def make_table(rows):
    return FactColumns(
        **{column: [row[name] for row in rows] for column, name in COLUMNS.items()},
        labels={position: row["labels"] for position, row in enumerate(rows) if row["labels"]},
    )


def build_one(row):
    """What the model makes of *row*."""
    fact_fields = {name: row[name] for name in ("subject", "predicate", "object_json")}
    try:
        return Envelope(**{name: value for name, value in row.items() if name not in fact_fields}), Fact(**fact_fields)
    except InvalidFactError as error:
        return error


def is_same(got, expected):
    if isinstance(expected, InvalidFactError):
        return type(got) is type(expected) and str(got) == str(expected)
    return (
        got == expected
        and vars(got[0]).keys() == vars(expected[0]).keys()
        and vars(got[1]) == vars(expected[1])
        and hash(got[0]) == hash(expected[0])
        and fact_digest(*got) == fact_digest(*expected)
        and got[1].artifact == expected[1].artifact
    )


@pytest.mark.spec("FAC-01")
@pytest.mark.parametrize("field, value", VALUES, ids=lambda value: ascii(value)[:24])
def test_a_value_is_validated_as_alone_and_does_not_affect_its_neighbours(field, value):
    rows = [VALID_ROW, VALID_ROW | {"message_id": "m-2", field: value}, VALID_ROW | {"message_id": "m-3"}]
    got = columns_to_results(make_table(rows))
    assert [is_same(each, build_one(row)) for each, row in zip(got, rows, strict=True)] == [True] * 3
    assert not any(isinstance(each, InvalidFactError) for each in (got[0], got[2]))


@given(st.lists(st.lists(st.sampled_from([pair for pair in VALUES if len(str(pair)) < 2_000]), max_size=2), max_size=5))
def test_any_mixture_is_validated_as_alone(changes):
    rows = [VALID_ROW | {"message_id": f"m-{n}"} | dict(change) for n, change in enumerate(changes)]
    got = columns_to_results(make_table(rows))
    assert len(got) == len(rows)
    assert all(is_same(each, build_one(row)) for each, row in zip(got, rows, strict=True))


def test_valid_rows_are_not_built_one_by_one(monkeypatch):
    monkeypatch.setattr(columns, "_build_one", lambda *_: pytest.fail("made by itself"))
    rows = [
        VALID_ROW | {"message_id": f"m-{n}", "object_json": text, "labels": labels, "correlation_id": correlation}
        for n, (text, labels, correlation) in enumerate(
            [("1", {}, None), (REFERENCE, {"a": "b"}, "c"), ('"🙂"', {}, None)]
        )
    ]
    got = columns_to_results(make_table(rows))
    assert [envelope.correlation_id for envelope, _ in got] == [None, "c", None]
    assert [fact.artifact is None for _, fact in got] == [True, False, True]


def test_the_first_invalid_row_is_raised_without_validation_of_the_others(monkeypatch):
    rows = [VALID_ROW, VALID_ROW | {"subject": ""}, VALID_ROW | {"object_json": "{"}]
    with pytest.raises(InvalidFactError, match="subject has 1 to 512"):
        columns_to_facts(make_table(rows))
    monkeypatch.setattr(columns, "_build_or_error", lambda *_: pytest.fail("an error for each"))
    with pytest.raises(InvalidFactError):
        columns_to_facts(make_table(rows * 10))


@pytest.mark.parametrize(
    "first, second",
    [
        ({"object_json": '{"a":1,"a":2}'}, {"from_zone": " a"}),
        ({"labels": {"": "b"}}, {"object_json": "{"}),
        ({"from_zone": "a "}, {"from_zone": " a"}),
        ({"from_zone": " a"}, {"from_zone": "a "}),
        ({"to_zone": "a "}, {"from_zone": " a"}),
    ],
)
def test_the_error_of_the_first_invalid_row_is_raised_in_whichever_column_it_is(first, second):
    rows = [VALID_ROW, VALID_ROW | first, VALID_ROW | second]
    with pytest.raises(InvalidFactError, match=f"^{re.escape(str(build_one(rows[1])))}$"):
        columns_to_facts(make_table(rows))


@pytest.mark.spec("FAC-01")
def test_facts_built_in_one_call_are_frozen():
    ((envelope, fact),) = columns_to_facts(make_table([VALID_ROW | {"labels": {"a": "b"}}]))
    with pytest.raises(AttributeError):
        envelope.message_id = "x"
    with pytest.raises(AttributeError):
        fact.subject = "x"
    with pytest.raises(TypeError):
        envelope.labels["a"] = "c"
    assert pickle.loads(pickle.dumps((envelope, fact))) == (envelope, fact)
