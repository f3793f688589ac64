"""One record for every dead letter: it can be stored as JSON and made into a transaction again."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ergon_framework.connectors.base import DeadLetter, Delivery
from ergon_framework.connectors.dead_letters import DeadLetterRecord, TransactionEnvelope
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Failure
from ergon_framework.transaction import Transaction

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
FULL_TRANSACTION = Transaction(
    {"total": 12},
    id="order-7",
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
    trace={"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"},
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


def make_record(transaction=FULL_TRANSACTION, failure=FAILURE, **extra):
    delivery = Delivery(transaction, "receipt", deliveries=2)
    return DeadLetterRecord.from_delivery(delivery, DeadLetter("declined", failure), queue="orders", at=9.0, **extra)


@pytest.mark.spec("CNN-08")
@pytest.mark.parametrize(
    "transaction", [FULL_TRANSACTION, Transaction(b"\xff\x00", id="raw"), Transaction(id="bare")], ids=repr
)
def test_a_record_survives_json_and_restores_its_transaction(transaction):
    stored = make_record(transaction, headers={"ergon-id": "x"})
    parsed = DeadLetterRecord.model_validate_json(stored.model_dump_json())
    assert parsed == stored
    assert parsed.transaction() == transaction


@pytest.mark.spec("CNN-08")
def test_a_record_has_transaction_reason_deliveries_and_time():
    stored = make_record()
    assert (stored.id, stored.queue, stored.reason, stored.deliveries, stored.at) == (
        "order-7",
        "orders",
        "declined",
        2,
        9.0,
    )
    assert (stored.failure, stored.envelope.attempts, stored.envelope.history) == (FAILURE, 4, FULL_TRANSACTION.history)


def test_the_trace_id_is_that_of_the_failure_or_else_of_the_message():
    assert make_record().trace_id == "f" * 32
    assert make_record(failure=None).trace_id == TRACE_ID
    assert make_record(Transaction(id="a"), failure=None).trace_id is None
    assert make_record(Transaction(id="a", trace={"traceparent": "nonsense"}), failure=None).trace_id is None


def test_a_replay_keeps_everything_except_attempts_and_history():
    assert make_record().to_new_transaction() == FULL_TRANSACTION.replace(attempts=0, history=())


def test_a_record_is_frozen():
    with pytest.raises(ValidationError):
        make_record().reason = "other"


def test_the_envelope_has_every_field_but_the_payload():
    assert set(TransactionEnvelope.model_fields) == set(Transaction.__mro__[1].__slots__) - {"payload"}
