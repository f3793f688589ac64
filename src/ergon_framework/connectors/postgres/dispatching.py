"""Dispatching: the statements that put transactions into a queue, for our connections and for the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json import JSONEncoder
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.codec import Codec
from ergon_framework.transaction import Transaction

# Placeholders are written {so}; how they look in the end depends on whose connection it is. Casts are written out,
# because some libraries read a colon as the beginning of a name.
ONE: Final = """
select ergon.put(
    cast({queue} as text), cast({id} as text), cast(cast({headers} as text) as jsonb), cast({body} as bytea),
    cast({key} as text), cast({priority} as smallint)
)
"""
MANY: Final = """
select ergon.put_many(
    cast({queue} as text), cast({ids} as text[]), cast(cast({headers} as text[]) as jsonb[]),
    cast({bodies} as bytea[]), cast({keys} as text[]), cast({priorities} as smallint[])
)
"""

_written: Final[Callable[[Any], str]] = JSONEncoder(separators=(",", ":")).encode


class Dispatch(NamedTuple):
    """A statement with its parameters, not yet in the words of any library."""

    template: str
    parameters: dict[str, Any]
    #: Of the transactions, in order.
    ids: list[str]


def dispatch(queue: str, transactions: Sequence[Transaction], codec: Codec, priorities: Sequence[int]) -> Dispatch:
    """What puts *transactions* into *queue*; UnencodableError if one of them cannot be written."""
    written = [codec.encode(transaction) for transaction in transactions]
    ids = [transaction.id for transaction in transactions]
    if len(ids) == 1:
        # By far the most frequent, and lists of one cost as much as lists of ten.
        ((body, headers),) = written
        one = {"queue": queue, "id": ids[0], "headers": _written(headers), "body": body}
        return Dispatch(ONE, {**one, "key": transactions[0].key, "priority": priorities[0]}, ids)
    return Dispatch(
        MANY,
        {
            "queue": queue,
            "ids": ids,
            "headers": [_written(headers) for _, headers in written],
            "bodies": [body for body, _ in written],
            "keys": [transaction.key for transaction in transactions],
            "priorities": list(priorities),
        },
        ids,
    )
