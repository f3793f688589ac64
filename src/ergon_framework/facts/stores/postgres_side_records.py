"""Transactions and dead letters of fact consumers, as the tables store them.

A fact may have longer values and other names than a header can hold, and it must be possible to store it all the
same: so the envelope is stored as a separate text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from ergon_framework.connectors.base import DeadLetter, Delivery
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.deadletters import DeadLetterRecord, TransactionEnvelope
from ergon_framework.connectors.postgres.burials import DeadLetterRow
from ergon_framework.connectors.postgres.headers import headers_as_text
from ergon_framework.connectors.postgres.settling import sanitize_text
from ergon_framework.facts.side import DeadLetterChange
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction

#: The header of a dead letter that contains its envelope.
ENVELOPE_HEADER: Final = "ergon-envelope"
#: Key in an envelope: the body is encoded by the codec instead of as plain JSON.
_CODED_KEY: Final = "coded"


def serialize_transaction(transaction: Transaction, codec: Codec) -> tuple[str, bytes]:
    """Return *transaction* as the text of its envelope and a body."""
    envelope = TransactionEnvelope.model_validate(transaction).model_dump(mode="json")
    try:
        body = json.dumps(transaction.payload).encode()
    except (TypeError, ValueError):
        body, envelope[_CODED_KEY] = codec.encode(transaction)[0], True
    return json.dumps(envelope), body


def deserialize_transaction(envelope: str, body: bytes, codec: Codec) -> Transaction:
    """Return the transaction that serialize_transaction() has written."""
    data = json.loads(envelope)
    fields = TransactionEnvelope.model_validate(data)
    payload = codec.decode(body, {"ergon-id": fields.id}).payload if data.get(_CODED_KEY) else json.loads(body)
    return Transaction(payload=payload, **{name: getattr(fields, name) for name in TransactionEnvelope.model_fields})


def dead_letter_columns(changes: Sequence[DeadLetterChange], codec: Codec) -> dict[str, list[Any]]:
    """Return the columns of dead letters."""
    records = [change.record for change in changes]
    envelopes = [record.envelope for record in records]
    failures = [record.failure for record in records]
    serialized = [serialize_transaction(record.transaction(), codec) for record in records]
    return {
        "offsets": [change.offset for change in changes],
        "asides": [change.was_deferred for change in changes],
        "names": sanitize_text(envelope.id for envelope in envelopes),
        "reasons": sanitize_text(record.reason for record in records),
        "ats": [record.at for record in records],
        "deliveries": [record.deliveries for record in records],
        "types": sanitize_text(envelope.type for envelope in envelopes),
        "keys": sanitize_text(envelope.key for envelope in envelopes),
        "tenants": sanitize_text(envelope.tenant for envelope in envelopes),
        "correlations": sanitize_text(envelope.correlation for envelope in envelopes),
        "tasks": sanitize_text(None if failure is None else failure.task_name for failure in failures),
        "error_types": sanitize_text(None if failure is None else failure.error_type for failure in failures),
        "categories": [None if failure is None else failure.category.value for failure in failures],
        "failures": [None if failure is None else failure.model_dump_json() for failure in failures],
        "headers": [
            _build_headers(record.envelope, text) for record, (text, _) in zip(records, serialized, strict=True)
        ],
        "bodies": [body for _, body in serialized],
    }


def _build_headers(envelope: TransactionEnvelope, text: str) -> str:
    # The columns that people search for, and the whole envelope as text; escapes in that text stay as they are.
    transaction_id, correlation = sanitize_text([envelope.id, envelope.correlation])
    headers = {"ergon-id": transaction_id, "ergon-correlation": correlation, ENVELOPE_HEADER: text}
    return json.dumps({header: value for header, value in headers.items() if value is not None})


def row_to_dead_letter(row: DeadLetterRow, queue: str, codec: Codec) -> DeadLetterRecord:
    """Return the dead letter of *row*."""
    transaction = deserialize_transaction(headers_as_text(row.headers)[ENVELOPE_HEADER], row.body or b"", codec)
    letter = DeadLetter(row.reason, None if row.failure is None else Failure.model_validate_json(row.failure))
    delivery = Delivery(transaction, row.handle, row.deliveries)
    return DeadLetterRecord.from_delivery(delivery, letter, queue=queue, at=row.at, handle=str(row.handle))
