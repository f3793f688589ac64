"""The statements that dispatch transactions to a queue, on the framework's connections and on the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.codec import Codec, to_json
from ergon_framework.connectors.postgres.callers import SqlTemplate
from ergon_framework.transaction import Transaction

# Casts are written out, because some libraries parse a colon as the start of a parameter name.
_BY_FUNCTION: Final = """
select ergon.put(
    cast({queue} as text), cast({id} as text), cast(cast({headers} as text) as jsonb), cast({body} as bytea),
    cast({key} as text), cast({priority} as smallint)
)
"""
#: The body of the function, for a queue whose number is known. With a cached plan it saves the call and the lookup of
#: the name; without one it would be planned for every message, unlike the function.
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
ONE_BY_NUMBER: Final = SqlTemplate(_BY_FUNCTION, _BY_INSERT)
ONE_BY_NAME: Final = SqlTemplate(_BY_FUNCTION)
MANY_BY_NAME: Final = SqlTemplate("""
select ergon.put_many(
    cast({queue} as text), cast({ids} as text[]), cast(cast({headers} as text[]) as jsonb[]),
    cast({bodies} as bytea[]), cast({keys} as text[]), cast({priorities} as smallint[])
)
""")


class DispatchStatement(NamedTuple):
    """A statement template with its parameters, not yet rendered for a library."""

    template: SqlTemplate
    parameters: dict[str, Any]
    #: The ids of the transactions, in order.
    ids: list[str]


def build_dispatch(
    queue: str, number: int | None, transactions: Sequence[Transaction], *, codec: Codec, priorities: Sequence[int]
) -> DispatchStatement:
    """Build the statement that inserts *transactions* into *queue*, by its number if that is known.

    Raise UnencodableError if a transaction cannot be encoded.
    """
    if len(transactions) == 1:
        # By far the most frequent case; arrays of one element cost as much as arrays of ten.
        (transaction,) = transactions
        body, envelope = codec.encode(transaction)
        parameters = {
            "queue": queue,
            "number": number,
            "id": transaction.id,
            "headers": to_json(envelope),
            "body": body,
            "key": transaction.key,
            "priority": priorities[0],
        }
        return DispatchStatement(ONE_BY_NAME if number is None else ONE_BY_NUMBER, parameters, [transaction.id])
    encoded = [codec.encode(transaction) for transaction in transactions]
    ids = [transaction.id for transaction in transactions]
    return DispatchStatement(
        MANY_BY_NAME,
        {
            "queue": queue,
            "ids": ids,
            "headers": [to_json(headers) for _, headers in encoded],
            "bodies": [body for body, _ in encoded],
            "keys": [transaction.key for transaction in transactions],
            "priorities": list(priorities),
        },
        ids,
    )
