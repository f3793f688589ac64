"""The headers of a sent task: its scope, key and budget, and which values are rejected."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.providers.celery.invocation import (
    CAUSE_FIELD,
    FIELD_NAMES,
    HEADER,
    MAX_KEY_CHARS,
    CallSpec,
    build_header,
    normalize_task_id,
    read_invocation,
)
from ergon_framework.providers.dead_letter import MESSAGE_FIELDS, build_dead_letter, to_json
from ergon_framework.providers.errors import ProviderDependencyError, ProviderTimeoutError

CALLED = CallSpec("rank.snapshot", "rank", "rank_snapshot", "snapshot", 30.0)


def parse_invocation(header_value=None, kwargs=None, *, task_id="t-1", root_id=None, **headers):
    return read_invocation(
        CALLED, task_id=task_id, headers={HEADER: header_value, **headers}, kwargs=kwargs, root_id=root_id
    )


@pytest.mark.spec("PRV-12")
def test_the_default_key_follows_from_the_task_and_its_operation():
    assert parse_invocation().key == parse_invocation().key
    assert parse_invocation(task_id="t-2").key != parse_invocation().key
    other = CallSpec("rank.snapshot", "rank", "rank_snapshot", "refresh", 30.0)
    assert read_invocation(other, task_id="t-1", headers=None, kwargs=None).key != parse_invocation().key


@pytest.mark.spec("PRV-12")
def test_a_given_key_is_the_key():
    assert (
        parse_invocation({"idempotency_key": "k"}).key == parse_invocation(kwargs={"idempotency_key": "k"}).key == "k"
    )


def test_missing_fields_have_defaults():
    result = parse_invocation(root_id="root")
    assert (result.tenant_id, result.campaign_id, result.budget, result.rejection) == ("default", None, 30.0, None)
    assert (result.correlation_id, parse_invocation().correlation_id) == ("root", "t-1")


@pytest.mark.spec("DX-29")
def test_the_failure_of_an_earlier_delivery_is_read_within_limits():
    result = parse_invocation({CAUSE_FIELD: ["timeout", "no answer"]})
    assert (type(result.cause), str(result.cause), result.rejection) == (ProviderTimeoutError, "no answer", None)
    for invalid in (None, "timeout", ["timeout"], ["timeout", 1], ["no such", "x"], {"timeout": "x"}):
        assert parse_invocation({CAUSE_FIELD: invalid}).cause is None
    assert parse_invocation("odd").cause is None
    assert len(str(parse_invocation({CAUSE_FIELD: ["timeout", "x" * 10_000]}).cause)) <= 500


def test_the_header_comes_before_the_arguments():
    result = parse_invocation({"tenant_id": "a"}, {"tenant_id": "b", "campaign_id": "c", "correlation_id": "no"})
    assert (result.tenant_id, result.campaign_id, result.correlation_id) == ("a", "c", "t-1")


def test_a_budget_can_only_be_shortened():
    assert parse_invocation({"timeout_budget_seconds": 2}).budget == 2
    result = parse_invocation({"timeout_budget_seconds": 31})
    assert result.budget == 30.0
    assert "must not exceed" in str(result.rejection)


@pytest.mark.spec("PRV-12")
@pytest.mark.parametrize(
    "name, value",
    [
        ("tenant_id", ""),
        ("tenant_id", 7),
        ("tenant_id", "a\nb"),
        ("campaign_id", "c" * 201),
        ("campaign_id", "\ud800"),
        ("idempotency_key", "with blank"),
        ("idempotency_key", "ä"),
        ("idempotency_key", "k" * (MAX_KEY_CHARS + 1)),
        ("correlation_id", ["x"]),
        ("timeout_budget_seconds", 0),
        ("timeout_budget_seconds", True),
        ("timeout_budget_seconds", float("nan")),
        ("timeout_budget_seconds", "9"),
    ],
)
def test_invalid_values_are_rejected_by_name_and_replaced(name, value):
    result = parse_invocation({name: value})
    assert str(result.rejection).startswith(name)
    assert result.rejection.sent is False
    assert {**to_dict(result), "rejection": None} == to_dict(parse_invocation())
    with pytest.raises(ValueError, match=name):
        build_header({name: value})


def to_dict(instance):
    return {name: getattr(instance, name) for name in instance.__slots__}


def test_a_header_of_another_shape_is_refused():
    assert "must be a mapping" in str(parse_invocation("tenant").rejection)


@given(st.dictionaries(st.sampled_from(FIELD_NAMES), st.none() | st.text() | st.integers() | st.floats()), st.text())
def test_any_headers_are_an_invocation_with_a_valid_dead_letter(header_value, task_id):
    result = read_invocation(CALLED, task_id=task_id, headers={HEADER: header_value, "traceparent": 1}, kwargs=None)
    letter = build_dead_letter(result, ProviderDependencyError("down"), attempts=1, now=0.0)
    assert set(json.loads(to_json(letter))) == set(MESSAGE_FIELDS)
    assert "\0" not in "".join(str(field) for field in letter)


def test_an_invalid_id_is_replaced_by_its_digest():
    assert (normalize_task_id("plain"), normalize_task_id(7)) == ("plain", "7")
    replaced = normalize_task_id("a\0b")
    assert replaced.startswith("sha256-")
    assert replaced == normalize_task_id("a\0b") != normalize_task_id("a\0c")


def test_only_a_valid_trace_is_passed_on():
    result = parse_invocation(None, traceparent="00-1-2-03", tracestate="x" * 10_000, baggage=None)
    assert result.trace == {"traceparent": "00-1-2-03"}


def test_a_header_omits_missing_values():
    assert build_header({"tenant_id": "a", "campaign_id": None}) == {"tenant_id": "a"}


@pytest.mark.spec("PRV-13")
def test_a_dead_letter_describes_the_call_that_failed():
    error = ProviderDependencyError("down")
    error.details = {"operation": "other\0", "idempotency_key": "k", "campaign_id": None}
    letter = build_dead_letter(parse_invocation({"campaign_id": "c"}), error, attempts=9, now=1.5)
    assert (letter.operation, letter.idempotency_key, letter.campaign_id, letter.attempts) == ("other?", "k", "c", 0)
    assert json.loads(to_json(letter))["occurred_at"] == "1970-01-01T00:00:01.500000+00:00"
