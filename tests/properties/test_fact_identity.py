"""Canonical JSON and digests, for any value: one text for one value, and readable by anybody."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.facts.identity import WHOLE, canonical, canonical_parsed, digest, number, parse

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers(-WHOLE, WHOLE) | FLOATS | TEXTS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5))

#: Number::toString of ECMAScript: whole or with a point below 10^21 and from 10^-6 on, else one digit and a power.
WRITTEN = re.compile(r"-?(0|[1-9]\d{0,20}|(0|[1-9]\d{0,20})\.\d*[1-9]|[1-9](\.\d*[1-9])?e(\+\d+|-\d+))").fullmatch


def shuffled(value, random):
    if isinstance(value, dict):
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffled(value[key], random) for key in keys}
    return [shuffled(item, random) for item in value] if isinstance(value, list) else value


def numerically(value):
    """*value* with every number as a float: JSON has one kind."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, dict):
        return {key: numerically(item) for key, item in value.items()}
    return [numerically(item) for item in value]


@pytest.mark.spec("FAC-03")
@given(VALUES, st.randoms(use_true_random=False))
def test_the_order_of_keys_and_the_blanks_change_nothing(value, random):
    text = json.dumps(shuffled(value, random), indent=1)
    assert canonical(parse(text)) == canonical(value)


#: Where the library's encoder and RFC 8785 part: astral keys, halves of pairs, powers of ten, fractions of nothing.
MOODY = st.sampled_from(["\U0001f600", "\ufb33", "€", "e-5", "10.0", "1.0,", "é", "\x7f", "/", '"', "\\", "\u2028"])
MOODS = st.recursive(
    LEAVES | MOODY | st.sampled_from([0.0, -0.0, 1.0, 1e15, 1e16, 1e21, 1e-5, 1e-7, 10.05, -3.0]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS | MOODY, inner, max_size=5),
)


@pytest.mark.spec("FAC-03")
@given(MOODS, st.booleans())
def test_the_short_way_of_writing_ends_where_the_long_one_does(value, escaped):
    read = parse(json.dumps(value, ensure_ascii=escaped))
    assert canonical_parsed(read) == canonical(read)


@pytest.mark.spec("FAC-03")
@given(VALUES)
def test_any_reader_of_json_reads_the_same_value(value):
    assert numerically(json.loads(canonical(value))) == numerically(value)


@pytest.mark.spec("FAC-03")
@given(FLOATS)
def test_a_number_keeps_its_value_and_has_the_shape_of_ecmascript(value):
    written = number(value)
    assert float(written) == value
    assert WRITTEN(written), written
    plain = "e" not in written
    assert plain == (value == 0 or 1e-6 <= abs(value) < 1e21)


@pytest.mark.spec("FAC-03")
@given(FLOATS)
def test_no_shorter_text_means_the_same_number(value):
    digits = re.sub(r"e.*|[-.]", "", number(value)).strip("0")
    if len(digits) > 1:
        assert float(f"{value:.{len(digits) - 2}e}") != value or math.isinf(value)


@pytest.mark.spec("FAC-03")
@given(VALUES, VALUES)
def test_two_values_have_one_digest_only_if_they_are_one(one, other):
    stated = {"from_zone": "a", "to_zone": "b", "subject": "s", "predicate": "p"}

    def of(value):
        return digest(**stated, object_json=json.dumps(value))

    assert (of(one) == of(other)) == (_typed(one) == _typed(other))


def _typed(value):
    """*value* so that 1 and True, which are equal in Python, differ."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return (type(value).__name__, value)
    return ("number", float(value))
