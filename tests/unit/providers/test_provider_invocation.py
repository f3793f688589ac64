"""What a task is sent with: whose it is, its key and its budget, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.providers.deadletter import FIELDS, dead_letter, message
from ergon_framework.providers.errors import ProviderDependencyError, ProviderTimeoutError
from ergon_framework.providers.invocation import CAUSE, HEADER, LONGEST_KEY, NAMES, Called, header, identified, read

CALLED = Called("rank.snapshot", "rank", "rank_snapshot", "snapshot", 30.0)


def invocation(ours=None, kwargs=None, *, task_id="t-1", root_id=None, **headers):
    return read(CALLED, task_id=task_id, headers={HEADER: ours, **headers}, kwargs=kwargs, root_id=root_id)


@pytest.mark.spec("PRV-12")
def test_the_default_key_follows_from_the_task_and_its_operation():
    assert invocation().key == invocation().key
    assert invocation(task_id="t-2").key != invocation().key
    other = Called("rank.snapshot", "rank", "rank_snapshot", "refresh", 30.0)
    assert read(other, task_id="t-1", headers=None, kwargs=None).key != invocation().key


@pytest.mark.spec("PRV-12")
def test_a_given_key_is_the_key():
    assert invocation({"idempotency_key": "k"}).key == invocation(kwargs={"idempotency_key": "k"}).key == "k"


def test_what_is_not_given_has_a_default():
    found = invocation(root_id="root")
    assert (found.tenant_id, found.campaign_id, found.budget, found.refused) == ("default", None, 30.0, None)
    assert (found.correlation_id, invocation().correlation_id) == ("root", "t-1")


@pytest.mark.spec("DX-29")
def test_the_failure_of_an_earlier_delivery_is_read_within_limits():
    found = invocation({CAUSE: ["timeout", "no answer"]})
    assert (type(found.cause), str(found.cause), found.refused) == (ProviderTimeoutError, "no answer", None)
    for odd in (None, "timeout", ["timeout"], ["timeout", 1], ["no such", "x"], {"timeout": "x"}):
        assert invocation({CAUSE: odd}).cause is None
    assert invocation("odd").cause is None
    assert len(str(invocation({CAUSE: ["timeout", "x" * 10_000]}).cause)) <= 500


def test_the_header_comes_before_the_arguments():
    found = invocation({"tenant_id": "a"}, {"tenant_id": "b", "campaign_id": "c", "correlation_id": "no"})
    assert (found.tenant_id, found.campaign_id, found.correlation_id) == ("a", "c", "t-1")


def test_a_budget_can_only_be_shortened():
    assert invocation({"timeout_budget_seconds": 2}).budget == 2
    found = invocation({"timeout_budget_seconds": 31})
    assert found.budget == 30.0
    assert "shorten" in str(found.refused)


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
        ("idempotency_key", "k" * (LONGEST_KEY + 1)),
        ("correlation_id", ["x"]),
        ("timeout_budget_seconds", 0),
        ("timeout_budget_seconds", True),
        ("timeout_budget_seconds", float("nan")),
        ("timeout_budget_seconds", "9"),
    ],
)
def test_odd_values_are_refused_by_name_and_replaced(name, value):
    found = invocation({name: value})
    assert str(found.refused).startswith(name)
    assert found.refused.sent is False
    assert {**vars_of(found), "refused": None} == vars_of(invocation())
    with pytest.raises(ValueError, match=name):
        header({name: value})


def vars_of(found):
    return {name: getattr(found, name) for name in found.__slots__}


def test_a_header_of_another_shape_is_refused():
    assert "names and values" in str(invocation("tenant").refused)


@given(st.dictionaries(st.sampled_from(NAMES), st.none() | st.text() | st.integers() | st.floats()), st.text())
def test_whatever_arrives_there_is_an_invocation_that_can_be_written_down(ours, task_id):
    found = read(CALLED, task_id=task_id, headers={HEADER: ours, "traceparent": 1}, kwargs=None)
    letter = dead_letter(found, ProviderDependencyError("down"), attempts=1, now=0.0)
    assert set(json.loads(message(letter))) == set(FIELDS)
    assert "\0" not in "".join(str(field) for field in letter)


def test_an_odd_id_is_known_by_its_digest():
    assert (identified("plain"), identified(7)) == ("plain", "7")
    odd = identified("a\0b")
    assert odd.startswith("sha256-")
    assert odd == identified("a\0b") != identified("a\0c")


def test_only_a_sound_trace_is_carried():
    found = invocation(None, traceparent="00-1-2-03", tracestate="x" * 10_000, baggage=None)
    assert found.trace == {"traceparent": "00-1-2-03"}


def test_a_sender_gives_only_what_he_has():
    assert header({"tenant_id": "a", "campaign_id": None}) == {"tenant_id": "a"}


@pytest.mark.spec("PRV-13")
def test_a_dead_letter_tells_of_the_call_that_failed():
    error = ProviderDependencyError("down")
    error.particulars = {"operation": "other\0", "idempotency_key": "k", "campaign_id": None}
    letter = dead_letter(invocation({"campaign_id": "c"}), error, attempts=9, now=1.5)
    assert (letter.operation, letter.idempotency_key, letter.campaign_id, letter.attempts) == ("other?", "k", "c", 0)
    assert json.loads(message(letter))["occurred_at"] == "1970-01-01T00:00:01.500000+00:00"
