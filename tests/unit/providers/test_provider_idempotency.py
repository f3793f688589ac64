"""One key, one call: pure rules."""

from __future__ import annotations

import pytest

from ergon_framework.providers.errors import (
    BY_REASON,
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderInternalError,
    ReasonCode,
)
from ergon_framework.providers.idempotency import (
    Claimed,
    Done,
    Held,
    InFlight,
    Kept,
    Unknown,
    claim,
    doubtful,
    fail,
    fingerprint,
    succeed,
)

KEPT = Kept({"id": 1}, 201)


def ask(entry, *, fingerprint="f", owner="me", now=100.0):
    return claim(entry, fingerprint=fingerprint, owner=owner, now=now, lease=10.0)


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize(
    "entry, answer",
    [
        (None, Claimed(InFlight("f", "me", 110.0))),
        (InFlight("f", "you", 100.1), Held(100.1)),
        (InFlight("f", "you", 100.0), Claimed(InFlight("f", "me", 110.0, doubt=True))),
        (InFlight("f", "me", 105.0), Claimed(InFlight("f", "me", 110.0))),
        (InFlight("f", "me", 105.0, doubt=True), Claimed(InFlight("f", "me", 110.0, doubt=True))),
        (Done("f", KEPT, 100.1), KEPT),
        (Done("f", KEPT, 100.0), Claimed(InFlight("f", "me", 110.0))),
        (Unknown("f", 200.0), Claimed(InFlight("f", "me", 110.0, doubt=True))),
        (Unknown("f", 100.0), Claimed(InFlight("f", "me", 110.0))),
    ],
)
def test_who_gets_a_key(entry, answer):
    assert ask(entry) == answer


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize(
    "entry, refused",
    [
        (InFlight("f", "you", 200.0), True),
        (InFlight("f", "you", 99.0), True),
        (Done("f", KEPT, 200.0), True),
        (Done("f", KEPT, 100.0), False),
        (Unknown("f", 200.0), True),
        (Unknown("f", 100.0), False),
    ],
)
def test_another_payload_is_an_error_while_the_first_call_may_have_been_made(entry, refused):
    if not refused:
        assert isinstance(ask(entry, fingerprint="g"), Claimed)
        return
    with pytest.raises(ProviderBadRequestError) as caught:
        ask(entry, fingerprint="g")
    assert (caught.value.code, caught.value.sent) == ("idempotency_conflict", False)


def test_how_a_call_ends():
    mine = InFlight("f", "me", 110.0)
    assert succeed(mine, owner="me", kept=KEPT, until=500.0) == Done("f", KEPT, 500.0)
    assert fail(mine, owner="me", doubt=True, until=500.0) == Unknown("f", 500.0)
    assert fail(mine, owner="me", doubt=False, until=500.0) is None


@pytest.mark.parametrize("entry", [None, InFlight("f", "you", 110.0), Done("f", KEPT, 500.0), Unknown("f", 500.0)])
def test_who_has_lost_the_key_changes_nothing(entry):
    assert succeed(entry, owner="me", kept=Kept({}), until=900.0) is entry
    assert fail(entry, owner="me", doubt=False, until=900.0) is entry


def test_only_a_refusal_and_what_was_never_sent_leave_no_doubt():
    certain = {ReasonCode.BAD_REQUEST, ReasonCode.AUTH_FAILED, ReasonCode.RATE_LIMITED}
    certain |= {ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED}
    assert {reason for reason, kind in BY_REASON.items() if not doubtful(kind("no"))} == certain
    assert not doubtful(ProviderConnectionError("refused", sent=False))
    assert doubtful(ProviderInternalError("who knows"))


def test_a_fingerprint_is_of_operation_and_payload_whatever_their_order():
    assert fingerprint("charge", {"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint(
        "charge", {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert len({fingerprint("charge", {"a": 1}), fingerprint("refund", {"a": 1}), fingerprint("charge", {"a": 2})}) == 3


@pytest.mark.parametrize("payload", [{"a": object()}, {"a": float("nan")}, {"a": {1, 2}}])
def test_what_is_no_json_has_no_fingerprint(payload):
    with pytest.raises(ProviderBadRequestError) as caught:
        fingerprint("charge", payload)
    assert caught.value.code == "payload_not_json"


@pytest.mark.spec("PRV-22")
@pytest.mark.parametrize("entry", [InFlight("f", "you", 100.0), Unknown("f", 200.0)])
def test_a_doubt_is_not_settled_by_a_later_call_that_failed(entry):
    mine = ask(entry).entry
    assert fail(mine, owner="me", doubt=False, until=300.0) == Unknown("f", 300.0)
    done = succeed(mine, owner="me", kept=KEPT, until=300.0)
    assert done == Done("f", KEPT, 300.0)
