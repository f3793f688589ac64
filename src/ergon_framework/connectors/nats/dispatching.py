"""Dispatching: many publishes at once, each confirmed, tried again for as long as patience lasts."""

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
from ergon_framework.connectors.nats.frames import Heard
from ergon_framework.connectors.nats.line import Line, Request
from ergon_framework.connectors.nats.naming import Names
from ergon_framework.errors import ConnectionLost
from ergon_framework.transaction import Transaction

#: How many are on their way at once.
_IN_FLIGHT: Final = 1000
#: Seconds between two tries: a cluster takes some to choose a leader.
_PAUSE: Final = 0.2
#: No headers of ours are longer than this.
HEADERS: Final = 65_536


class Dispatcher:
    """Sends to one queue."""

    def __init__(self, names: Names, codec: Codec, *, line: Callable[[], Awaitable[Line]], patience: float) -> None:
        self._names = names
        self._codec = codec
        self._line = line
        self._patience = patience
        # Within its window the server swallows an id that it knows, so no two dispatches may share one;
        # and a second try of the same one must.
        self._sender = uuid.uuid4().hex[:16]
        self._ordinals = itertools.count(1)

    async def dispatch(self, transactions: Sequence[Transaction]) -> list[Confirmation]:
        """Hand over all, or none if one cannot be written."""
        requests = [self._request(transaction) for transaction in transactions]
        line = await self._reached()
        for transaction, request in zip(transactions, requests, strict=True):
            check_size(transaction, request, line.max_payload)
        confirmed: list[Confirmation] = []
        for first in range(0, len(requests), _IN_FLIGHT):
            some = slice(first, first + _IN_FLIGHT)
            confirmed += await self._confirmed(transactions[some], requests[some])
        return confirmed

    def _request(self, transaction: Transaction) -> Request:
        body, headers = self._codec.encode(transaction)
        headers["Nats-Msg-Id"] = f"{transaction.id}.{self._sender}.{next(self._ordinals)}"
        return Request(self._names.of(transaction.id), body, headers)

    async def _reached(self) -> Line:
        """A line, within patience."""
        end = time.monotonic() + self._patience
        while True:
            try:
                return await self._line()
            except ConnectionLost:
                if time.monotonic() + _PAUSE >= end:
                    raise
            await asyncio.sleep(_PAUSE)

    async def _confirmed(self, transactions: Sequence[Transaction], requests: Sequence[Request]) -> list[Confirmation]:
        confirmed: list[Confirmation | None] = [None] * len(requests)
        refusal = ""
        end = time.monotonic() + self._patience
        while True:
            missing = [index for index, known in enumerate(confirmed) if known is None]
            if not missing:
                return [known for known in confirmed if known is not None]
            try:
                line = await self._line()
                answers = await line.ask_all([requests[index] for index in missing])
                for index, answer in zip(missing, answers, strict=True):
                    confirmed[index], said = _confirmation(transactions[index].id, answer)
                    refusal = said or refusal
            except ConnectionLost:
                if time.monotonic() + _PAUSE >= end:
                    raise
            else:
                left = sum(known is None for known in confirmed)
                if left and time.monotonic() + _PAUSE >= end:
                    raise ConnectionLost(f"JetStream has not confirmed {left} of {len(requests)} transactions{refusal}")
                if not left:
                    continue
            await asyncio.sleep(_PAUSE)


def _confirmation(name: str, answer: Heard | None) -> tuple[Confirmation | None, str]:
    """Return a confirmation, or None and why the server cannot take it now, as while a leader is being chosen."""
    if answer is None:
        return None, ""
    if b'"error"' in answer.data:
        try:
            api.refuse(answer.data)
        except ConnectionLost as error:
            return None, f": {error}"
    # A second try of ours that was taken the first time is no duplicate of anybody else's.
    return Confirmation(name), ""


def check_size(transaction: Transaction, request: Request, most: int) -> None:
    """Refuse what the server would answer with a cut of the line."""
    if len(request.payload) + HEADERS <= most:
        return
    size = request.size
    if size > most:
        raise UnencodableError(
            f"transaction {transaction.id!r} takes {size} bytes with its headers; NATS takes {most} (max_payload)"
        )
