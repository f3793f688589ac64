"""Publish transactions in chunks, each message confirmed, with retries until a time limit.

A confirmation is the server's response that a stream has stored the message. A message that is published again with the
same ``Nats-Msg-Id`` within the server's deduplication window is stored once, so a retry is safe.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ergon_framework.connectors.base import Confirmation
from ergon_framework.connectors.codec import Codec, UnencodableError
from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.connection import Connection, Request
from ergon_framework.connectors.nats.fast_client import RawMessage
from ergon_framework.connectors.nats.streams import StreamNames
from ergon_framework.errors import ConnectionLostError
from ergon_framework.transaction import Transaction

#: Publishes in flight at the same time.
_MAX_IN_FLIGHT: Final = 1000
#: Seconds between two retries: a cluster needs some time to elect a leader.
_RETRY_PAUSE_SECONDS: Final = 0.2
#: Upper limit of the connector's own headers in bytes.
MAX_HEADER_BYTES: Final = 65_536


class Dispatcher:
    """Publishes to one queue; connecting, and each chunk, is retried for *patience* seconds."""

    def __init__(
        self, names: StreamNames, codec: Codec, *, get_connection: Callable[[], Awaitable[Connection]], patience: float
    ) -> None:
        self._names = names
        self._codec = codec
        self._get_connection = get_connection
        self._patience = patience
        # Within its deduplication window the server drops a message whose id it knows. Two dispatches of a transaction
        # must both be stored, so their message ids differ; a retry of one dispatch keeps its message id.
        self._sender = uuid.uuid4().hex[:16]
        self._ordinals = itertools.count(1)

    async def dispatch(self, transactions: Sequence[Transaction]) -> list[Confirmation]:
        """Send all transactions, or none if one cannot be encoded."""
        requests = [self._to_request(transaction) for transaction in transactions]
        connection = await self._connect()
        for transaction, request in zip(transactions, requests, strict=True):
            check_size(transaction, request, connection.max_payload)
        confirmed: list[Confirmation] = []
        for first in range(0, len(requests), _MAX_IN_FLIGHT):
            chunk = slice(first, first + _MAX_IN_FLIGHT)
            confirmed += await self._publish(transactions[chunk], requests[chunk])
        return confirmed

    def _to_request(self, transaction: Transaction) -> Request:
        body, headers = self._codec.encode(transaction)
        headers["Nats-Msg-Id"] = f"{transaction.id}.{self._sender}.{next(self._ordinals)}"
        due = transaction.not_before
        subject = (
            self._names.subject_for(transaction.id)
            if due is None or not transaction.compute_delay(time.time())
            else self._names.delayed_subject_for(transaction.id, due)
        )
        return Request(subject, body, headers)

    async def _connect(self) -> Connection:
        """Return a connection, retrying until the time limit."""
        end = time.monotonic() + self._patience
        while True:
            try:
                return await self._get_connection()
            except ConnectionLostError:
                if time.monotonic() + _RETRY_PAUSE_SECONDS >= end:
                    raise
            await asyncio.sleep(_RETRY_PAUSE_SECONDS)

    async def _publish(self, transactions: Sequence[Transaction], requests: Sequence[Request]) -> list[Confirmation]:
        """Publish one chunk, and repeat what is not confirmed; raise ConnectionLostError at the time limit."""
        confirmed: list[Confirmation | None] = [None] * len(requests)
        problem = ""
        end = time.monotonic() + self._patience
        while True:
            missing = [index for index, confirmation in enumerate(confirmed) if confirmation is None]
            if not missing:
                return [confirmation for confirmation in confirmed if confirmation is not None]
            try:
                connection = await self._get_connection()
                answers = await connection.request_many([requests[index] for index in missing])
                for index, answer in zip(missing, answers, strict=True):
                    confirmed[index], reason = _parse_confirmation(transactions[index].id, answer)
                    problem = reason or problem
            except ConnectionLostError:
                if time.monotonic() + _RETRY_PAUSE_SECONDS >= end:
                    raise
            else:
                unconfirmed = sum(confirmation is None for confirmation in confirmed)
                if unconfirmed and time.monotonic() + _RETRY_PAUSE_SECONDS >= end:
                    raise ConnectionLostError(
                        f"JetStream has not confirmed {unconfirmed} of {len(requests)} transactions{problem}"
                    )
                if not unconfirmed:
                    continue
            await asyncio.sleep(_RETRY_PAUSE_SECONDS)


def _parse_confirmation(name: str, answer: RawMessage | None) -> tuple[Confirmation | None, str]:
    """Return a confirmation, or None and the reason if the server cannot store now, as during a leader election."""
    if answer is None:
        return None, ""
    if b'"error"' in answer.data:
        try:
            api.raise_for_error(answer.data)
        except ConnectionLostError as error:
            return None, f": {error}"
    # A retry whose first try was stored is not reported as a duplicate of another dispatch.
    return Confirmation(name), ""


def check_size(transaction: Transaction, request: Request, max_bytes: int) -> None:
    """Reject a transaction that is too large: the server would close the connection."""
    if len(request.payload) + MAX_HEADER_BYTES <= max_bytes:
        return
    size = request.size
    if size > max_bytes:
        raise UnencodableError(
            f"transaction {transaction.id!r} has {size} bytes with its headers; the NATS limit is {max_bytes} "
            "(max_payload)"
        )
