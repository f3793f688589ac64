"""One record for every dead letter: it can be stored as JSON and made into a transaction again."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ergon_framework.connectors.base import DeadLetter, Delivery
from ergon_framework.connectors.deadletters import DeadLetterRecord, Envelope
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Failure
from ergon_framework.transaction import Transaction

TRACE = "0af7651916cd43dd8448eb211c80319c"
FULL = Transaction(
    "order-7",
    {"total": 12},
    source="shop",
    type="order.placed",
    schema_version=2,
    key="customer-1",
    tenant="acme",
    correlation="basket-3",
    causation="click-9",
    created_at=1.0,
    expires_at=2.0,
    attempts=4,
    history=(Attempt(attempt=3, category=Category.SYSTEM, error="busy"),),
    trace={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
)
FAILURE = Failure(
    task_name="charge",
    reason_code="declined",
    error_type="BusinessError",
    attempts=5,
    occurred_at=3.0,
    transaction_id="order-7",
    category=Category.BUSINESS,
    trace_id="f" * 32,
)


def record(transaction=FULL, failure=FAILURE, **extra):
    delivery = Delivery(transaction, "receipt", deliveries=2)
    return DeadLetterRecord.of(delivery, DeadLetter("declined", failure), queue="orders", at=9.0, **extra)


@pytest.mark.spec("CNN-08")
@pytest.mark.parametrize("transaction", [FULL, Transaction("raw", b"\xff\x00"), Transaction("bare")], ids=repr)
def test_a_record_survives_json_and_gives_the_transaction_back(transaction):
    kept = record(transaction, headers={"ergon-id": "x"})
    again = DeadLetterRecord.model_validate_json(kept.model_dump_json())
    assert again == kept
    assert again.transaction() == transaction


@pytest.mark.spec("CNN-08")
def test_a_record_says_what_why_how_often_and_when():
    kept = record()
    assert (kept.id, kept.queue, kept.reason, kept.deliveries, kept.at) == ("order-7", "orders", "declined", 2, 9.0)
    assert (kept.failure, kept.envelope.attempts, kept.envelope.history) == (FAILURE, 4, FULL.history)


def test_the_trace_is_the_failures_or_else_the_messages():
    assert record().trace_id == "f" * 32
    assert record(failure=None).trace_id == TRACE
    assert record(Transaction("a"), failure=None).trace_id is None
    assert record(Transaction("a", trace={"traceparent": "nonsense"}), failure=None).trace_id is None


def test_a_fresh_try_keeps_everything_but_what_counts_against_it():
    assert record().fresh() == FULL.replace(attempts=0, history=())


def test_a_record_is_frozen():
    with pytest.raises(ValidationError):
        record().reason = "other"


def test_the_envelope_has_every_field_but_the_payload():
    assert set(Envelope.model_fields) == set(Transaction.__mro__[1].__slots__) - {"payload"}
