"""Dispatching: the statements that put transactions into a queue, for our connections and for the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.codec import Codec, to_json
from ergon_framework.connectors.postgres.callers import Template
from ergon_framework.transaction import Transaction

# Casts are written out, because some libraries read a colon as the beginning of a name.
_BY_FUNCTION: Final = """
select ergon.put(
    cast({queue} as text), cast({id} as text), cast(cast({headers} as text) as jsonb), cast({body} as bytea),
    cast({key} as text), cast({priority} as smallint)
)
"""
#: What the function does, for a queue whose number is known. Where its plan is kept it spares the server the call and
#: the look for the name; where none is, it would be planned for every message, and the function is not.
_BY_INSERT: Final = """
insert into ergon.ready (queue, rank, transaction_id, key, headers, body)
values (
    case
        when exists (
            select 1 from ergon.sleeper s where s.queue = cast({number} as integer) and s.until > now()
        )
        then ergon.ring(cast({number} as integer)) else cast({number} as integer)
    end,
    - cast({priority} as smallint), cast({id} as text), cast({key} as text), cast(cast({headers} as text) as jsonb),
    cast({body} as bytea)
)
"""
ONE: Final = Template(_BY_FUNCTION, _BY_INSERT)
NAMED: Final = Template(_BY_FUNCTION)
MANY: Final = Template("""
select ergon.put_many(
    cast({queue} as text), cast({ids} as text[]), cast(cast({headers} as text[]) as jsonb[]),
    cast({bodies} as bytea[]), cast({keys} as text[]), cast({priorities} as smallint[])
)
""")


class Dispatch(NamedTuple):
    """A statement with its parameters, not yet in the words of any library."""

    template: Template
    parameters: dict[str, Any]
    #: Of the transactions, in order.
    ids: list[str]


def dispatch(
    queue: str, number: int | None, transactions: Sequence[Transaction], *, codec: Codec, priorities: Sequence[int]
) -> Dispatch:
    """What puts *transactions* into *queue*, by its number if that is known.

    UnencodableError if one of them cannot be written.
    """
    if len(transactions) == 1:
        # By far the most frequent, and lists of one cost as much as lists of ten.
        (transaction,) = transactions
        body, envelope = codec.encode(transaction)
        one = {
            "queue": queue,
            "number": number,
            "id": transaction.id,
            "headers": to_json(envelope),
            "body": body,
            "key": transaction.key,
            "priority": priorities[0],
        }
        return Dispatch(NAMED if number is None else ONE, one, [transaction.id])
    written = [codec.encode(transaction) for transaction in transactions]
    ids = [transaction.id for transaction in transactions]
    return Dispatch(
        MANY,
        {
            "queue": queue,
            "ids": ids,
            "headers": [to_json(headers) for _, headers in written],
            "bodies": [body for body, _ in written],
            "keys": [transaction.key for transaction in transactions],
            "priorities": list(priorities),
        },
        ids,
    )
