"""Texts that are understood at once are understood as each of them by itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ergon_framework.facts import columns, identity
from ergon_framework.facts.columns import parse_objects
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.identity import canonical_json, parse_strict_json

#: What the fast reader takes, or may take, otherwise than the rules want it.
IRREGULAR_DOCUMENTS = (
    *('{"a":1,"a":2}', '{"a":"\\u0022","b":1,"b":2}', '{"a":{"b":1,"b":1}}', '{"a":1,"\\u0061":2}'),
    *("9007199254740992", "9007199254740993", "-9007199254740993", "1" * 400, "123456789012345"),
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "[1,NaN]"),
    *("-0", "-0.0", "1.0", "10.05", "1e5", "1E5", "1e-7", "1e-3", "1e21", "0.1000000000000000055", "12.50", "0.00001"),
    *("01", "1.", ".5", "+1", "1e", "--1", "0x1", "1_0"),
    *(
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        '"\ud800"',
        '"\\u001f"',
        '["a","\\u001f","b"]',
        '"\x1f"',
        "\x1f",
        '"\n"',
        '"\t"',
    ),
    *('"\\/"', '"\\n\\""', '"\\\\"', '"\\x"', '"v1.0 e+1"', '"\x7f\u2028"', "'a'", '"a', 'a"', '"\\"'),
    *(
        '{"\ufb33":1,"\U0001f600":2}',
        '{"é":1,"e":2}',
        '{"b":1,"a":2}',
        '{ "a" : [ 1 , 2 ] }',
        " 1",
        "1 ",
        "\ufeff1",
        "\xa01",
    ),
    *("[" * 63 + "]" * 63, "[" * 64 + "]" * 64, "[" * 65 + "]" * 65, "[" * 66 + "]" * 66, "[" * 300 + "]" * 300),
    *(
        "",
        " ",
        "{",
        "[1",
        "1,2",
        "1 2",
        "[3",
        "4]",
        "{}",
        "[]",
        "null",
        "true",
        "nul",
        "[1,]",
        '{"a":1,}',
        "{'a':1}",
        "//",
    ),
)


def parse_one_by_one(documents):
    """Value and canonical form of each, or None if one has none."""
    try:
        values = [parse_strict_json(text) for text in documents]
        return repr(values), [canonical_json(value) for value in values]
    except InvalidFactError:
        return None


def parse_together(documents):
    try:
        values, written = parse_objects(documents)
    except InvalidFactError:
        return None
    return repr(list(values)), list(written)


@pytest.mark.spec("FAC-03")
@pytest.mark.parametrize("text", IRREGULAR_DOCUMENTS, ids=lambda text: ascii(text)[:40])
def test_irregular_json_means_the_same_alone_and_in_a_batch(text):
    assert parse_together([text]) == parse_one_by_one([text])
    around = ['{"b":1,"a":[2.5,"x"]}', text, '"y"']
    assert parse_together(around) == parse_one_by_one(around)


@pytest.mark.spec("FAC-03")
@given(st.lists(st.sampled_from(IRREGULAR_DOCUMENTS), max_size=6))
@example(["1,2", "[3", "4]"])
@example([])
def test_any_batch_of_irregular_json_means_the_same(documents):
    assert parse_together(documents) == parse_one_by_one(documents)


def _json_documents():
    """JSON as third parties may write it: numbers in many forms, blanks, keys in any order and more than once."""
    numbers = st.integers(-(10**17), 10**17).map(str)
    numbers |= st.floats(allow_nan=False, allow_infinity=False).map(repr)
    numbers |= st.builds("{:.{}f}".format, st.floats(-1e16, 1e16), st.integers(0, 20))
    numbers |= st.builds("{:.{}e}".format, st.floats(-1e16, 1e16), st.integers(0, 20))
    plain = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\'), max_size=4)
    strings = plain.map('"{}"'.format) | st.sampled_from(('"\\n"', '"\\u0022"', '"\\""', '"\\u00e9"'))
    keys = st.sampled_from(('"a"', '"b"', '"é"', '"\ufb33"', '"\U0001f600"')) | strings

    def nest(inner):
        blank = st.sampled_from(("", "", "", " ", "\n"))
        lists = st.lists(inner, max_size=4).map(",".join).map("[{}]".format)
        pairs = st.builds("{}:{}{}".format, keys, blank, inner)
        return lists | st.lists(pairs, max_size=4).map(",".join).map("{{{}}}".format)

    return st.recursive(numbers | strings | st.sampled_from(("null", "true", "false")), nest, max_leaves=12)


@pytest.mark.spec("FAC-03")
@given(st.lists(_json_documents(), max_size=5))
def test_any_json_means_the_same_in_a_batch(documents):
    assert parse_together(documents) == parse_one_by_one(documents)


def test_common_json_is_not_parsed_one_by_one(monkeypatch):
    monkeypatch.setattr(columns, "parse_strict_json", lambda text: pytest.fail(f"{text} was read by itself"))
    values, written = parse_objects(
        ['{"total":12.5,"lines":[1,2,3],"text":"a \\"b\\" c\\n"}', '{"text":"grün 🙂","x":1.0}']
    )
    assert values == [{"total": 12.5, "lines": [1, 2, 3], "text": 'a "b" c\n'}, {"text": "grün 🙂", "x": 1.0}]
    assert written == ['{"lines":[1,2,3],"text":"a \\"b\\" c\\n","total":12.5}', '{"text":"grün 🙂","x":1}']


@pytest.mark.spec("SEC-06")
@pytest.mark.parametrize(
    "documents",
    [
        [json.dumps({f"{place * 7919 % 100_003:x}": place for place in range(20_000)})],
        ['{"b":1,"a":[1.5]}'] * 10_000,
        ['"small"', json.dumps({"deep": {f"{place}": 0 for place in range(20_000, 0, -1)}}), "1", "2"],
        ['"' + "x" * 100_000 + '"', '"' + "y" * 70_000 + '"'],
    ],
)
def test_no_call_of_the_encoder_blocks_other_threads_for_long(monkeypatch, documents):
    chunks, encode = [], identity.encode_json

    def record(value):
        chunks.append(encode(value))
        return chunks[-1]

    monkeypatch.setattr(columns, "encode_json", record)
    monkeypatch.setattr(identity, "encode_json", record)
    values, written = parse_objects(documents)
    assert [identity.canonical_json_of_parsed(parse_strict_json(text), size=len(text)) for text in documents] == written
    assert (values, written) == (
        [parse_strict_json(text) for text in documents],
        [canonical_json(value) for value in values],
    )
    # Between two texts stands one more.
    assert max(map(len, chunks), default=0) <= 2 * identity.MAX_ENCODER_CHARS


@pytest.mark.parametrize(
    "text",
    [
        "[" + ",".join('{"n":[1]}' for _ in range(100)) + "]",
        '"' + "[" * 100 + '"',
        '{"text":"' + "[" * 100 + '","lines":[' + ",".join(["[]"] * 100) + "]}",
        '["' + "]" * 100 + '",' + '"\\"[",' * 80 + "[" * 63 + "1" + "]" * 63 + "]",
    ],
)
def test_wide_json_is_not_rejected_as_deep(monkeypatch, text):
    expected = parse_one_by_one([text])
    monkeypatch.setattr(columns, "canonical_json", lambda _: pytest.fail("written value by value"))
    monkeypatch.setattr(identity, "canonical_json", lambda _: pytest.fail("written value by value"))
    assert parse_together([text]) == expected
    assert identity.canonical_json_of_parsed(parse_strict_json(text)) == expected[1][0]


@pytest.mark.parametrize(
    "text",
    [
        '["' + "]" * 100 + '",' + "[" * 64 + "1" + "]" * 64 + "]",
        '["\\"' + "]" * 100 + '",' + '{"a":' * 65 + "1" + "}" * 65 + "]",
    ],
)
def test_brackets_in_strings_do_not_hide_the_depth(text):
    with pytest.raises(InvalidFactError, match="more than 64 levels"):
        parse_objects([text])


def test_the_first_document_without_a_canonical_form_is_reported():
    with pytest.raises(InvalidFactError, match="'b' occurs twice"):
        parse_objects(["1", '{"b":1,"b":2}', "{"])
