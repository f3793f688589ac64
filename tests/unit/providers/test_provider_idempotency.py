"""One key, one call: pure rules."""

from __future__ import annotations

import pytest

from ergon_framework.providers.errors import (
    ERROR_BY_REASON,
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderInternalError,
    ReasonCode,
)
from ergon_framework.providers.idempotency import (
    KeyClaimed,
    KeyCompleted,
    KeyHeld,
    KeyInFlightState,
    KeyUnknown,
    StoredResult,
    claim_key,
    complete_key,
    compute_fingerprint,
    fail_key,
    is_outcome_unknown,
)

KEPT = StoredResult({"id": 1}, 201)


def request_key(entry, *, fingerprint="f", owner="me", now=100.0):
    return claim_key(entry, fingerprint=fingerprint, owner=owner, now=now, lease=10.0)


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize(
    "entry, expected",
    [
        (None, KeyClaimed(KeyInFlightState("f", "me", 110.0))),
        (KeyInFlightState("f", "you", 100.1), KeyHeld(100.1)),
        (KeyInFlightState("f", "you", 100.0), KeyClaimed(KeyInFlightState("f", "me", 110.0, outcome_unknown=True))),
        (KeyInFlightState("f", "me", 105.0), KeyClaimed(KeyInFlightState("f", "me", 110.0))),
        (
            KeyInFlightState("f", "me", 105.0, outcome_unknown=True),
            KeyClaimed(KeyInFlightState("f", "me", 110.0, outcome_unknown=True)),
        ),
        (KeyCompleted("f", KEPT, 100.1), KEPT),
        (KeyCompleted("f", KEPT, 100.0), KeyClaimed(KeyInFlightState("f", "me", 110.0))),
        (KeyUnknown("f", 200.0), KeyClaimed(KeyInFlightState("f", "me", 110.0, outcome_unknown=True))),
        (KeyUnknown("f", 100.0), KeyClaimed(KeyInFlightState("f", "me", 110.0))),
    ],
)
def test_a_key_is_claimed_held_or_replayed(entry, expected):
    assert request_key(entry) == expected


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize(
    "entry, refused",
    [
        (KeyInFlightState("f", "you", 200.0), True),
        (KeyInFlightState("f", "you", 99.0), True),
        (KeyCompleted("f", KEPT, 200.0), True),
        (KeyCompleted("f", KEPT, 100.0), False),
        (KeyUnknown("f", 200.0), True),
        (KeyUnknown("f", 100.0), False),
    ],
)
def test_another_payload_is_an_error_while_the_first_call_may_have_been_made(entry, refused):
    if not refused:
        assert isinstance(request_key(entry, fingerprint="g"), KeyClaimed)
        return
    with pytest.raises(ProviderBadRequestError) as caught:
        request_key(entry, fingerprint="g")
    assert (caught.value.code, caught.value.sent) == ("idempotency_conflict", False)


def test_a_finished_call_updates_its_key():
    mine = KeyInFlightState("f", "me", 110.0)
    assert complete_key(mine, owner="me", stored_result=KEPT, until=500.0) == KeyCompleted("f", KEPT, 500.0)
    assert fail_key(mine, owner="me", outcome_unknown=True, until=500.0) == KeyUnknown("f", 500.0)
    assert fail_key(mine, owner="me", outcome_unknown=False, until=500.0) is None


@pytest.mark.parametrize(
    "entry", [None, KeyInFlightState("f", "you", 110.0), KeyCompleted("f", KEPT, 500.0), KeyUnknown("f", 500.0)]
)
def test_a_caller_that_lost_its_key_changes_nothing(entry):
    assert complete_key(entry, owner="me", stored_result=StoredResult({}), until=900.0) is entry
    assert fail_key(entry, owner="me", outcome_unknown=False, until=900.0) is entry


def test_only_rejected_and_unsent_calls_have_a_certain_outcome():
    certain = {ReasonCode.BAD_REQUEST, ReasonCode.AUTH_FAILED, ReasonCode.RATE_LIMITED}
    certain |= {ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED}
    assert {reason for reason, kind in ERROR_BY_REASON.items() if not is_outcome_unknown(kind("no"))} == certain
    assert not is_outcome_unknown(ProviderConnectionError("refused", sent=False))
    assert is_outcome_unknown(ProviderInternalError("who knows"))


def test_a_fingerprint_is_of_operation_and_payload_in_any_order():
    assert compute_fingerprint("charge", {"a": 1, "b": {"c": 2, "d": 3}}) == compute_fingerprint(
        "charge", {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert (
        len(
            {
                compute_fingerprint("charge", {"a": 1}),
                compute_fingerprint("refund", {"a": 1}),
                compute_fingerprint("charge", {"a": 2}),
            }
        )
        == 3
    )


@pytest.mark.parametrize("payload", [{"a": object()}, {"a": float("nan")}, {"a": {1, 2}}])
def test_a_payload_that_is_not_json_has_no_fingerprint(payload):
    with pytest.raises(ProviderBadRequestError) as caught:
        compute_fingerprint("charge", payload)
    assert caught.value.code == "payload_not_json"


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize("entry", [KeyInFlightState("f", "you", 100.0), KeyUnknown("f", 200.0)])
def test_an_unknown_outcome_stays_unknown_after_a_later_failure(entry):
    mine = request_key(entry).entry
    assert fail_key(mine, owner="me", outcome_unknown=False, until=300.0) == KeyUnknown("f", 300.0)
    done = complete_key(mine, owner="me", stored_result=KEPT, until=300.0)
    assert done == KeyCompleted("f", KEPT, 300.0)
