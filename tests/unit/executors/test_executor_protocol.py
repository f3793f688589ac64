"""The wire: what is read, what is refused and why, and that nothing of it depends on luck."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergon_framework.executors import json_lines
from ergon_framework.executors.json_lines import _CHUNK_CHARS as PIECE
from ergon_framework.executors.json_lines import MAX_DEPTH, MAX_LINE_BYTES, LineError, LineErrorReason
from ergon_framework.executors.protocol import (
    MAX_MESSAGE_CHARS,
    MAX_TRACEBACK_BYTES,
    ErrorType,
    ExecutionContext,
    ExecutionOutcome,
    ExecutionRequest,
    InvalidMessage,
    Status,
    format_request_line,
    read_outcome,
    read_request,
    truncate_utf8_tail,
    write_outcome,
    write_request,
)
from tools.schemas import FOLDER, MESSAGES, build_schema

CONTEXT = {"job_id": "job-1", "attempt": 1, "enqueue_time": "2025-01-01T12:00:00Z", "queue_name": "default"}
REQUEST = {
    "protocol_version": "1",
    "job_id": "job-1",
    "function_name": "my_handler",
    "args": [1, "two"],
    "kwargs": {"flag": True},
    "context": CONTEXT
    | {"deadline": "2025-01-01T12:05:00Z", "trace_context": {"traceparent": "..."}, "worker_id": "rrq_worker_123"},
}


def encode(value, **changes):
    return json.dumps(value | changes).encode()


def nest_lists(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


# -- requests -------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-01", "EXE-02", "EXE-03")
def test_the_request_of_the_specification_is_parsed():
    parsed = read_request(encode(REQUEST) + b"\n")
    assert (parsed.job_id, parsed.function_name, parsed.args, parsed.kwargs) == (
        "job-1",
        "my_handler",
        [1, "two"],
        {"flag": True},
    )
    assert parsed.context.attempt == 1
    assert parsed.context.enqueue_time == datetime(2025, 1, 1, 12, tzinfo=UTC)
    assert parsed.context.deadline == datetime(2025, 1, 1, 12, 5, tzinfo=UTC)
    assert (parsed.context.queue_name, parsed.context.worker_id) == ("default", "rrq_worker_123")
    assert parsed.context.carrier == {"traceparent": "..."}


@pytest.mark.spec("EXE-01")
def test_an_encoded_request_has_exactly_the_fields_of_the_specification():
    written = write_request(read_request(encode(REQUEST)))
    assert json.loads(written) == REQUEST
    assert written.count(b"\n") == 1
    assert written.endswith(b"}\n")


@pytest.mark.spec("EXE-02")
def test_unknown_fields_are_ignored():
    expected = read_request(encode(REQUEST))
    assert read_request(encode(REQUEST, later={"v": 2}, context=REQUEST["context"] | {"shard": 7})) == expected
    assert read_outcome(b'{"job_id":"a","status":"success","since":1}').status is Status.SUCCESS


@pytest.mark.spec("EXE-03")
def test_optional_fields_may_be_absent_or_null():
    bare = {name: value for name, value in CONTEXT.items() if name != "queue_name"}
    parsed = read_request(encode(REQUEST, context=bare)).context
    assert (parsed.queue_name, parsed.deadline, parsed.trace_context, parsed.worker_id) == ("default", None, None, None)
    nulls = CONTEXT | {"deadline": None, "trace_context": None, "worker_id": None}
    assert read_request(encode(REQUEST, context=nulls)).context == parsed


@pytest.mark.spec("EXE-02")
def test_another_version_is_distinguished_from_a_bad_request():
    parsed = read_request(encode(REQUEST, protocol_version="2", args="whatever comes then"))
    assert (parsed.reason, parsed.job_id, parsed.error_type) == (
        LineErrorReason.UNSUPPORTED_VERSION,
        "job-1",
        ErrorType.UNSUPPORTED_VERSION,
    )


@pytest.mark.spec("EXE-02", "EXE-03")
@pytest.mark.parametrize(
    "changes, field",
    [
        ({"protocol_version": 1}, "protocol_version"),
        ({"protocol_version": None}, "protocol_version"),
        ({"function_name": ""}, "function_name"),
        ({"function_name": 7}, "function_name"),
        ({"args": {}}, "args"),
        ({"kwargs": []}, "kwargs"),
        ({"context": []}, "context"),
        ({"context": CONTEXT | {"job_id": "job-2"}}, "context.job_id"),
        ({"context": CONTEXT | {"attempt": 0}}, "context.attempt"),
        ({"context": CONTEXT | {"attempt": True}}, "context.attempt"),
        ({"context": CONTEXT | {"attempt": "1"}}, "context.attempt"),
        ({"context": CONTEXT | {"enqueue_time": 1735732800}}, "context.enqueue_time"),
        ({"context": CONTEXT | {"enqueue_time": "2025-01-01T12:00:00"}}, "context.enqueue_time"),
        ({"context": CONTEXT | {"enqueue_time": "2025-01-01T12:00:00+02:00"}}, "context.enqueue_time"),
        ({"context": CONTEXT | {"enqueue_time": "2025-02-30T12:00:00Z"}}, "context.enqueue_time"),
        ({"context": CONTEXT | {"deadline": "soon"}}, "context.deadline"),
        ({"context": CONTEXT | {"trace_context": "00-1"}}, "context.trace_context"),
    ],
)
def test_a_bad_field_is_named_with_the_job_and_without_its_value(changes, field):
    parsed = read_request(encode(REQUEST, **changes))
    assert isinstance(parsed, InvalidMessage)
    assert (parsed.reason, parsed.job_id, parsed.error_type) == (
        LineErrorReason.BAD_FIELD,
        "job-1",
        ErrorType.BAD_REQUEST,
    )
    assert field in parsed.message
    assert "soon" not in parsed.message


@pytest.mark.spec("EXE-02")
@pytest.mark.parametrize("name", ["protocol_version", "job_id", "function_name", "args", "kwargs", "context"])
def test_a_request_with_a_missing_field_is_rejected(name):
    parsed = read_request(encode({key: value for key, value in REQUEST.items() if key != name}))
    assert name in parsed.message
    assert parsed.job_id == (None if name == "job_id" else "job-1")


@pytest.mark.parametrize(
    "value", ["2025-01-01T12:00:00Z", "2025-01-01T12:00:00+00:00", "2025-01-01T12:00:00.000000001Z"]
)
def test_times_are_rfc_3339_in_utc(value):
    parsed = read_request(encode(REQUEST, context=CONTEXT | {"enqueue_time": value}))
    assert parsed.context.enqueue_time == datetime(2025, 1, 1, 12, tzinfo=UTC)


def test_a_time_without_its_zone_cannot_be_sent():
    with pytest.raises(ValueError, match="zone"):
        ExecutionContext(job_id="a", attempt=1, enqueue_time=datetime(2025, 1, 1))  # noqa: DTZ001 - the point


def test_an_invalid_trace_does_not_fail_the_job():
    carrier = {"traceparent": 7, "tracestate": "x" * 5000, "baggage": "a=1", "x-other": "y"}
    parsed = read_request(encode(REQUEST, context=CONTEXT | {"trace_context": carrier}))
    assert parsed.context.carrier == {"baggage": "a=1"}


# -- lines that are none --------------------------------------------------------------------------


@pytest.mark.spec("EXE-02", "EXE-25")
@pytest.mark.parametrize(
    "text, reason, job_id",
    [
        (b"", LineErrorReason.NOT_JSON, None),
        (b"hello", LineErrorReason.NOT_JSON, None),
        (b"[1]", LineErrorReason.NOT_AN_OBJECT, None),
        (b'"job_id"', LineErrorReason.NOT_AN_OBJECT, None),
        (b'{"job_id": "a", "status": "succ', LineErrorReason.NOT_JSON, None),
        (b'{"job_id": "a", "st{"job_id": "b", "status": "success"}', LineErrorReason.NOT_JSON, None),
        (b'{"job_id": "a"}{"job_id": "b"}', LineErrorReason.NOT_JSON, None),
        (b'{"job_id": "a", "result": NaN}', LineErrorReason.NOT_JSON, "a"),
        (b'{"job_id": "a", "result": [-Infinity]}', LineErrorReason.NOT_JSON, "a"),
        (b'{"job_id": "a", "result": 1e999}', LineErrorReason.NOT_JSON, "a"),
        (b'{"job_id": "a", "result": ' + b"9" * 5000 + b"}", LineErrorReason.NOT_JSON, "a"),
        (b'{"job_id": "a", "result": {"x": 1, "x": 2}}', LineErrorReason.REPEATED_KEY, "a"),
        (b'{"job_id": "a", "job_id": "b"}', LineErrorReason.REPEATED_KEY, None),
        (b'{"job_id": "a", "result": {"job_id": "b"}, "result": 1}', LineErrorReason.REPEATED_KEY, "a"),
        (b'{"job_id": "a", "result": "\\ud800"}', LineErrorReason.LONE_SURROGATE, "a"),
        (b'{"job_id": "\\udfff", "status": "success"}', LineErrorReason.LONE_SURROGATE, None),
        (b'{"job_id": "a", "result": "\xff"}', LineErrorReason.NOT_UTF8, "a"),
        (b'{"job_id": "a", "result": "\xed\xa0\x80"}', LineErrorReason.NOT_UTF8, "a"),
        (b"\xef\xbb\xbf{}", LineErrorReason.NOT_JSON, None),
        (b'{"job_id": 7, "status": "success"}', LineErrorReason.BAD_FIELD, None),
        (b'{"job_id": "a", "status": "done"}', LineErrorReason.BAD_FIELD, "a"),
        (b'{"job_id": "a", "status": "retry", "retry_after_seconds": "5"}', LineErrorReason.BAD_FIELD, "a"),
        (
            b'{"job_id": "a", "status": "retry", "retry_after_seconds": 1' + b"0" * 400 + b"}",
            LineErrorReason.BAD_FIELD,
            "a",
        ),
        (b'{"job_id": "", "status": "success"}', LineErrorReason.BAD_FIELD, None),
        (b'{"job_id": "' + b"x" * 2000 + b'", "status": "success"}', LineErrorReason.BAD_FIELD, None),
        (b'{"result": {"job_id": "b"}, "status": "success"}', LineErrorReason.BAD_FIELD, None),
        (b'{"status": 1, "result": "\\"job_id\\": \\"b\\"", "job_id": "a"}', LineErrorReason.BAD_FIELD, "a"),
        (b'{"status": 1, "result": "{[", "job_id": "a"}', LineErrorReason.BAD_FIELD, "a"),
        (b'{"status": 1, ' + b'"x": {"job_id": "b"}, ' * 20 + b'"job_id": "a"}', LineErrorReason.REPEATED_KEY, "a"),
        (b'{"{"job_id": "b", "status": "success", "result": "]"}', LineErrorReason.NOT_JSON, None),
    ],
)
def test_an_invalid_line_has_a_reason_and_a_job_id_only_if_it_is_certain(text, reason, job_id):
    parsed = read_outcome(text)
    assert (parsed.reason, parsed.job_id, parsed.size) == (reason, job_id, len(text))
    assert len(parsed.message) < 300


@pytest.mark.spec("EXE-25")
def test_the_depth_is_counted_with_the_message_itself():
    fits = write_outcome(ExecutionOutcome(job_id="a", status=Status.SUCCESS, result=nest_lists(MAX_DEPTH - 1)))
    assert read_outcome(fits).result == nest_lists(MAX_DEPTH - 1)
    with pytest.raises(LineError) as caught:
        write_outcome(ExecutionOutcome(job_id="a", status=Status.SUCCESS, result=nest_lists(MAX_DEPTH)))
    assert caught.value.reason is LineErrorReason.TOO_DEEP
    parsed = read_outcome(b'{"job_id":"a","status":"success","result":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}")
    assert (parsed.reason, parsed.job_id) == (LineErrorReason.TOO_DEEP, "a")


@pytest.mark.spec("EXE-25")
def test_brackets_in_strings_and_sibling_arrays_do_not_count_as_depth():
    result = ["[{" * 500, '"[' * 500, "\\[" * 500, [[] for _ in range(500)]]
    outcome = ExecutionOutcome(job_id="a", status=Status.SUCCESS, result=result)
    assert read_outcome(write_outcome(outcome)) == outcome


@pytest.mark.spec("EXE-25")
@pytest.mark.parametrize("depth", [1_000, 300_000])
def test_deeply_nested_brackets_are_rejected_without_recursion(depth):
    for text in (b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth, b'"' + b'\\"' * depth):
        assert read_outcome(text).reason in {LineErrorReason.NOT_JSON, LineErrorReason.TOO_DEEP}


@pytest.mark.spec("EXE-25")
def test_a_line_has_at_most_16_mebibytes_in_both_directions():
    frame = len(write_outcome(ExecutionOutcome(job_id="a", status=Status.SUCCESS, result=""))) - 1
    fits = ExecutionOutcome(job_id="a", status=Status.SUCCESS, result="x" * (MAX_LINE_BYTES - frame))
    assert read_outcome(write_outcome(fits)[:-1]) == fits
    with pytest.raises(LineError) as caught:
        write_outcome(fits.model_copy(update={"result": fits.result + "x"}))
    assert caught.value.reason is LineErrorReason.TOO_LONG
    parsed = read_outcome(b" " * (MAX_LINE_BYTES + 1))
    assert (parsed.reason, parsed.job_id, parsed.size) == (LineErrorReason.TOO_LONG, None, MAX_LINE_BYTES + 1)


# -- writing --------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-25")
@pytest.mark.parametrize(
    "result, reason",
    [
        (math.nan, LineErrorReason.NOT_JSON),
        ([math.inf], LineErrorReason.NOT_JSON),
        (object(), LineErrorReason.NOT_JSON),
        ({1, 2}, LineErrorReason.NOT_JSON),
        ({(1, 2): 3}, LineErrorReason.NOT_JSON),
        (10**5000, LineErrorReason.NOT_JSON),
        ("\ud800", LineErrorReason.LONE_SURROGATE),
        ({"\udfff": 1}, LineErrorReason.LONE_SURROGATE),
        (nest_lists(100_000), LineErrorReason.TOO_DEEP),
    ],
    ids=lambda value: value.value if isinstance(value, LineErrorReason) else type(value).__name__,
)
def test_a_result_that_cannot_be_sent_is_rejected_with_its_reason(result, reason):
    with pytest.raises(LineError) as caught:
        write_outcome(ExecutionOutcome.model_construct(job_id="a", status=Status.SUCCESS, result=result))
    assert caught.value.reason is reason


def test_a_value_that_contains_itself_is_rejected():
    circle = []
    circle.append(circle)
    with pytest.raises(LineError) as caught:
        json_lines.format_line({"result": circle})
    assert caught.value.reason is LineErrorReason.NOT_JSON


@pytest.mark.spec("EXE-01")
@pytest.mark.parametrize("character", ["\n", "\r", "\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_no_character_splits_a_line_for_any_reader(character):
    outcome = ExecutionOutcome(job_id="a", status=Status.SUCCESS, result=f"one{character}two")
    written = write_outcome(outcome)
    assert len(written.decode().splitlines()) == 1
    assert read_outcome(written) == outcome


@pytest.mark.spec("EXE-04")
def test_an_outcome_always_has_its_six_fields_and_the_extension_only_if_there_is_a_traceback():
    six = {"job_id", "status", "result", "error_message", "error_type", "retry_after_seconds"}
    assert set(json.loads(write_outcome(ExecutionOutcome(job_id="a", status=Status.SUCCESS)))) == six
    with_trace = ExecutionOutcome(job_id="a", status=Status.ERROR, error_traceback="Traceback")
    assert set(json.loads(write_outcome(with_trace))) == six | {"error_traceback"}


@pytest.mark.spec("EXE-25")
@pytest.mark.parametrize("character", ["x", "ü", "€", "😀"])
def test_a_traceback_is_truncated_at_a_character_and_keeps_its_end(character):
    truncated = truncate_utf8_tail("begin" + character * MAX_TRACEBACK_BYTES + "end", MAX_TRACEBACK_BYTES)
    assert MAX_TRACEBACK_BYTES - 4 < len(truncated.encode()) <= MAX_TRACEBACK_BYTES
    assert truncated.endswith(character + "end")
    assert "\ufffd" not in truncated
    assert read_outcome(
        encode({"job_id": "a", "status": "error", "error_traceback": character * 99_999})
    ).error_traceback


def test_a_third_party_extension_field_is_ignored():
    assert read_outcome(b'{"job_id":"a","status":"error","error_traceback":{"frames":[]}}').error_traceback is None


def test_the_message_of_an_error_is_also_truncated_when_it_is_parsed():
    parsed = read_outcome(
        encode({"job_id": "a", "status": "error", "error_message": "m" * 9000, "error_type": "t" * 9000})
    )
    assert (len(parsed.error_message), len(parsed.error_type)) == (MAX_MESSAGE_CHARS, 1024)
    assert read_outcome(write_outcome(parsed)) == parsed


def test_an_error_with_an_unencodable_message_is_not_lost():
    outcome = ExecutionOutcome.model_construct(
        job_id="a", status=Status.ERROR, error_message="\ud800" + "x" * 99_999, error_type="\udfff"
    )
    parsed = read_outcome(write_outcome(outcome))
    assert parsed.error_message.startswith("\\ud800xxx")
    assert len(parsed.error_message) <= MAX_MESSAGE_CHARS + 5
    assert parsed.error_type == "\\udfff"


# -- at random ------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)
ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)
moments = st.datetimes(datetime(1971, 1, 1), datetime(9000, 1, 1)).map(lambda naive: naive.replace(tzinfo=UTC))  # noqa: DTZ001


@st.composite
def requests(draw):
    job_id = draw(ids)
    context = ExecutionContext(
        job_id=job_id,
        attempt=draw(st.integers(1, 2**31 - 1)),
        enqueue_time=draw(moments),
        queue_name=draw(ids),
        deadline=draw(st.none() | moments),
        trace_context=draw(st.none() | st.dictionaries(text, text, max_size=3)),
        worker_id=draw(st.none() | ids),
    )
    args, kwargs = draw(st.lists(json_values, max_size=3)), draw(st.dictionaries(text, json_values, max_size=3))
    return ExecutionRequest.make(draw(ids), context=context, args=args, kwargs=kwargs)


outcomes = st.builds(
    ExecutionOutcome,
    job_id=ids,
    status=st.sampled_from(Status),
    result=json_values,
    error_message=st.none() | text,
    error_type=st.none() | ids,
    retry_after_seconds=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    error_traceback=st.none() | text,
)


@pytest.mark.spec("EXE-01", "EXE-02", "EXE-03")
@settings(max_examples=50, deadline=None)
@given(requests())
def test_every_request_is_equal_after_a_round_trip(request_):
    assert read_request(write_request(request_)) == request_


@pytest.mark.spec("EXE-02", "EXE-03")
@pytest.mark.parametrize(
    "invalid_fields",
    [
        {"function_name": ""},
        {"function_name": 7},
        {"job_id": "j" * 1025},
        {"job_id": None},
        {"attempt_number": 0},
        {"attempt_number": 2**31},
        {"attempt_number": True},
        {"queue_name": ""},
        {"worker_id": ""},
        {"kwargs": {1: 2}},
    ],
)
def test_a_call_follows_the_rules_of_the_request_that_it_writes(invalid_fields):
    call = {"function_name": "f", "job_id": "a", "attempt_number": 1, "enqueue_time": datetime(2025, 1, 1, tzinfo=UTC)}
    assert isinstance(read_request(format_request_line(**call)), ExecutionRequest)
    with pytest.raises(LineError) as caught:
        format_request_line(**call | invalid_fields)
    assert caught.value.reason is LineErrorReason.BAD_FIELD


@pytest.mark.spec("EXE-01", "EXE-04")
@settings(max_examples=50, deadline=None)
@given(outcomes)
def test_every_outcome_is_equal_after_a_round_trip(outcome):
    assert read_outcome(write_outcome(outcome)) == outcome


fragments = st.sampled_from(b'{ } [ ] " \\ : , "job_id" "a" "b" NaN 1e999 \\ud800 \xff'.split(b" "))


@pytest.mark.spec("EXE-02", "EXE-10")
@settings(max_examples=100, deadline=None)
@given(st.lists(fragments | st.binary(max_size=8), max_size=40).map(b"".join))
def test_any_input_is_a_message_or_a_reason(text):
    for read in (read_request, read_outcome):
        parsed = read(text)
        if isinstance(parsed, InvalidMessage):
            assert parsed.size == len(text)
            assert parsed.job_id is None or parsed.job_id.encode()
        else:
            assert parsed.job_id


@pytest.mark.spec("EXE-10")
@settings(max_examples=50, deadline=None)
@given(outcomes, st.data())
def test_a_truncated_line_belongs_to_no_job(outcome, data):
    written = write_outcome(outcome)[:-1]
    parsed = read_outcome(written[: data.draw(st.integers(0, len(written) - 1))])
    assert isinstance(parsed, InvalidMessage)
    assert parsed.job_id is None


@pytest.mark.spec("EXE-10")
@settings(max_examples=50, deadline=None)
@given(outcomes, outcomes, st.data())
def test_two_interleaved_lines_are_the_outcome_of_no_job(first, second, data):
    one, two = write_outcome(first)[:-1], write_outcome(second)[:-1]
    parsed = read_outcome(one[: data.draw(st.integers(1, len(one)))] + two)
    assert isinstance(parsed, InvalidMessage)
    assert parsed.job_id is None


def test_a_deadline_keeps_its_microseconds():
    due = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=1)
    context = ExecutionContext(job_id="a", attempt=1, enqueue_time=due, deadline=due)
    request = ExecutionRequest.make("f", context=context)
    assert read_request(write_request(request)).context.deadline == due


# -- the schemas in the documents -----------------------------------------------------------------


@pytest.mark.spec("EXE-02", "EXE-04")
@pytest.mark.parametrize("name", MESSAGES)
def test_the_documented_schemas_are_those_of_the_code(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == build_schema(name), "run python tools/schemas.py"


def test_the_schemas_require_the_documented_fields():
    request, outcome = (json.loads(build_schema(name)) for name in MESSAGES)
    assert set(request["required"]) == {"protocol_version", "job_id", "function_name", "args", "kwargs", "context"}
    assert set(request["$defs"]["ExecutionContext"]["required"]) == {"job_id", "attempt", "enqueue_time"}
    assert set(outcome["required"]) == {"job_id", "status"}
    assert outcome["$defs"]["Status"]["enum"] == ["success", "retry", "timeout", "error"]


# -- long lines -----------------------------------------------------------------------------------


def read_or_reason(data, *, yielding):
    try:
        return json_lines.parse_line(data, yielding=yielding)
    except LineError as error:
        return error.reason


#: Bytes of an array that is read in more than one piece.
LONG_ARRAY_BYTES = 3 * PIECE // 2
TEXTS = st.text(alphabet=st.sampled_from('[]{},:"\\ \n\u2028aé0123456789-+.eEntrufalsINy'), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.spec("EXE-25")
@settings(max_examples=200)
@given(VALUES, TEXTS, st.integers(0, 200), st.booleans())
def test_a_line_has_the_same_value_read_in_one_call_or_in_chunks(value, noise, position, ascii_only):
    encoded = json.dumps({"job_id": "a", "result": value}, ensure_ascii=ascii_only)
    for text in (encoded, encoded[:position] + noise + encoded[position:], noise):
        data = text.encode(errors="surrogatepass")
        assert is_same(read_or_reason(data, yielding=True), read_or_reason(data, yielding=False))
        assert json_lines.extract_job_id(data, yielding=True) == json_lines.extract_job_id(data)


def is_same(first, second):
    # What is wrong in two ways may be refused for either.
    return isinstance(first, LineErrorReason) and isinstance(second, LineErrorReason) if first != second else True


@pytest.mark.spec("EXE-25")
@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "null",
        "[]",
        "{}",
        '""',
        '{"a": [1, {"b": "},"}]}',
        '"],"',
        "[1, [2, 3]]",
        " 1.5 ",
        '"\\ud83d\\ude00"',
        "[" * 62 + "]" * 62,
    ],
)
@pytest.mark.parametrize(
    "end", ["", ",", ", ]", ', {"a": 1, "a": 2}', ", NaN", ', "\\ud83d"', ", " + "[" * 63 + "]" * 63]
)
def test_a_long_array_has_the_same_value_read_in_one_call_or_in_chunks(unit, end):
    units = [unit] * (LONG_ARRAY_BYTES // (len(unit) + 1))
    data = ('{"job_id": "a", "result": [' + ",".join(units) + end + "]}").encode()
    assert is_same(read_or_reason(data, yielding=True), read_or_reason(data, yielding=False))
    assert json_lines.extract_job_id(data, yielding=True) == json_lines.extract_job_id(data)
