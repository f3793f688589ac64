"""Records: transactions and dead letters of a side of facts, as its tables have them.

A fact may be longer, and be called otherwise, than a header can hold, and it must be possible to keep it all the same:
so the envelope is written as a text of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from ergon_framework.connectors.base import DeadLetter, Delivery
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.deadletters import DeadLetterRecord, Envelope
from ergon_framework.connectors.postgres.burials import Row
from ergon_framework.connectors.postgres.headers import texts
from ergon_framework.connectors.postgres.settling import fitting
from ergon_framework.facts.side import Buried
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction

#: The header of a dead letter that has its envelope.
ENVELOPE: Final = "ergon-envelope"
#: In an envelope: the body is not plain JSON but the codec's.
_CODED: Final = "coded"


def written(transaction: Transaction, codec: Codec) -> tuple[str, bytes]:
    """*transaction* as a text and a body."""
    envelope = Envelope.model_validate(transaction).model_dump(mode="json")
    try:
        body = json.dumps(transaction.payload).encode()
    except (TypeError, ValueError):
        body, envelope[_CODED] = codec.encode(transaction)[0], True
    return json.dumps(envelope), body


def read(envelope: str, body: bytes, codec: Codec) -> Transaction:
    """The transaction that was written so."""
    given = json.loads(envelope)
    fields = Envelope.model_validate(given)
    payload = codec.decode(body, {"ergon-id": fields.id}).payload if given.get(_CODED) else json.loads(body)
    return Transaction(payload=payload, **{name: getattr(fields, name) for name in Envelope.model_fields})


def burial(buried: Sequence[Buried], codec: Codec) -> dict[str, list[Any]]:
    """The columns of dead letters."""
    records = [each.record for each in buried]
    envelopes = [record.envelope for record in records]
    failures = [record.failure for record in records]
    kept = [written(record.transaction(), codec) for record in records]
    return {
        "offsets": [each.offset for each in buried],
        "asides": [each.aside for each in buried],
        "names": fitting(envelope.id for envelope in envelopes),
        "reasons": fitting(record.reason for record in records),
        "ats": [record.at for record in records],
        "deliveries": [record.deliveries for record in records],
        "types": fitting(envelope.type for envelope in envelopes),
        "keys": fitting(envelope.key for envelope in envelopes),
        "tenants": fitting(envelope.tenant for envelope in envelopes),
        "correlations": fitting(envelope.correlation for envelope in envelopes),
        "tasks": fitting(None if failure is None else failure.task_name for failure in failures),
        "error_types": fitting(None if failure is None else failure.error_type for failure in failures),
        "categories": [None if failure is None else failure.category.value for failure in failures],
        "failures": [None if failure is None else failure.model_dump_json() for failure in failures],
        "headers": [_headers(record.envelope, text) for record, (text, _) in zip(records, kept, strict=True)],
        "bodies": [body for _, body in kept],
    }


def _headers(envelope: Envelope, text: str) -> str:
    # What people look for in a table, and the text of all; escapes in that text are none in this one.
    name, correlation = fitting([envelope.id, envelope.correlation])
    named = {"ergon-id": name, "ergon-correlation": correlation, ENVELOPE: text}
    return json.dumps({header: value for header, value in named.items() if value is not None})


def record(row: Row, queue: str, codec: Codec) -> DeadLetterRecord:
    """The dead letter of *row*."""
    transaction = read(texts(row.headers)[ENVELOPE], row.body or b"", codec)
    letter = DeadLetter(row.reason, None if row.failure is None else Failure.model_validate_json(row.failure))
    delivery = Delivery(transaction, row.place, row.deliveries)
    return DeadLetterRecord.of(delivery, letter, queue=queue, at=row.at, place=str(row.place))
