"""Pulling: one long-lived inbox to which the server sends what was asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from nats.aio.subscription import Subscription

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.claim import Claim
from ergon_framework.connectors.nats.frames import Heard
from ergon_framework.connectors.nats.line import Line, Round
from ergon_framework.connectors.nats.naming import CONSUMER
from ergon_framework.connectors.nats.ticker import Ticker
from ergon_framework.errors import ConnectionLost

#: Seconds for which the server keeps the request of a loop that waits to be woken.
_STANDING: Final = 30.0
#: Shortest wait that a server is asked for.
_LEAST: Final = 0.005
#: Seconds after a request has run out in which the server may say so.
_GRACE: Final = 0.25
#: Nothing there; the time is over.
_NOTHING: Final = frozenset({"404", "408"})
#: The next message is larger than what is left of the bytes that were asked for.
_TOO_LARGE: Final = "409", "Message Size Exceeds MaxBytes"
#: As many bytes have come as were asked for.
_COMPLETE: Final = "409", "Batch Completed"


class _Ask:
    """One pull request, and who waits for what it brings."""

    __slots__ = ("round", "status", "wanted", "words")

    def __init__(self, waiting: Round, wanted: int) -> None:
        self.round = waiting
        self.wanted = wanted
        self.status = ""
        self.words = ""


class Pulls:
    """The pull requests of one queue over one line.

    What comes goes into *buffer*, whoever asked for it: a fetch that gave up leaves its request
    behind, and the next one finds what that brought.
    """

    def __init__(
        self,
        line: Line,
        stream: str,
        buffer: deque[Claim],
        *,
        owner: object,
        lease: float,
        max_bytes: int,
        ticker: Ticker,
        wake: Callable[[], None],
        listened: Callable[[], bool],
    ) -> None:
        self._line = line
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{CONSUMER}"
        self._buffer = buffer
        self._owner = owner
        self._lease = lease
        #: Bytes that one request may bring.
        self._max_bytes = max_bytes
        self._ticker = ticker
        self._wake = wake
        self._listened = listened
        self._asks: dict[str, _Ask] = {}
        self._tokens = itertools.count(1)
        #: When the oldest request that may still be answered was sent.
        self._asked_at = 0.0
        self._standing = False
        self._stood_at = 0.0
        self._inbox, self._bell = f"{line.inbox()}.", line.inbox()
        self._subscriptions: list[Subscription] = []
        #: Kept, or it would be collected on its way.
        self._again: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Have the inboxes."""
        self._subscriptions = [
            await self._line.subscribe(f"{self._inbox}*", self._heard),
            await self._line.subscribe(self._bell, self._rung),
        ]

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for something that may come."""
        return bool(self._asks) or self._standing

    @property
    def asking(self) -> bool:
        return bool(self._asks)

    async def ask(self, count: int, wait: float) -> None:
        """Ask for *count* and wait until they are there, or all that fits or there is, or *wait* is over."""
        ended = await self._ask({"batch": count, "max_bytes": self._max_bytes}, count, wait)
        if ended == _TOO_LARGE and not self._buffer:
            # Larger than all bytes of a fetch: it comes by itself.
            ended = await self._ask({"batch": 1}, 1, wait)

    async def _ask(self, wanted: dict[str, object], count: int, wait: float) -> tuple[str, str]:
        """Ask for *wanted*; return the status with which the server has ended the request, if it has."""
        # With both of these the server waits for the first, and then sends what there is.
        wanted["no_wait"] = True
        if wait > 0:
            wanted["expires"] = api.nanos(max(wait, _LEAST))
        token = str(next(self._tokens))
        ask = _Ask(self._line.round(1), count)
        if not self._asks:
            self._asked_at = time.monotonic()
        self._asks[token] = ask
        self._ticker.start()
        try:
            await self._line.send_all([(self._subject, f"{self._inbox}{token}", json.dumps(wanted).encode())])
            await self._answered(ask, wait)
        finally:
            del self._asks[token]
        ended = ask.status, ask.words
        if ask.status and ask.status not in _NOTHING and ended not in (_TOO_LARGE, _COMPLETE):
            raise self._refusal(ask)
        return ended

    async def _answered(self, ask: _Ask, wait: float) -> None:
        """Wait in pieces, and look in between whether the server is still there."""
        line = self._line
        end = time.monotonic() + (wait + _GRACE if wait > 0 else line.timeout)
        while not await line.answered(ask.round, timeout=min(2 * line.timeout, max(0.0, end - time.monotonic()))):
            if time.monotonic() < end:
                continue
            if wait <= 0:
                raise ConnectionLost(f"JetStream has not answered a fetch for {line.timeout:g} s")
            # The server is there. A request that runs out while something arrives is dropped without a word (2.9).
            return

    def _refusal(self, ask: _Ask) -> ConnectorError | ConnectionLost:
        if ask.status == "409" and "Exceeded" in ask.words:
            return ConnectorError(
                f"the consumer {CONSUMER!r} allows less than is asked for: {ask.words}; raise it there"
            )
        # Deleted, shut down, led by another now: a new look at the server will tell.
        self._line.drop()
        return ConnectionLost(f"JetStream cannot fetch now: {ask.status} {ask.words}".rstrip())

    async def stand(self) -> None:
        """Leave a request for one with the server, so that whoever listens is woken by what arrives."""
        if self._standing or self._line.lost:
            return
        self._standing = True
        self._stood_at = time.monotonic()
        self._ticker.start()
        request = {"batch": 1, "max_bytes": self._max_bytes, "expires": api.nanos(_STANDING)}
        wanted = json.dumps(request).encode()
        try:
            await self._line.send(self._subject, wanted, reply=self._bell)
        except BaseException:
            self._standing = False
            raise

    def interrupt(self) -> None:
        """Every wait that has begun ends now."""
        for ask in list(self._asks.values()):
            ask.round.end()

    async def end(self) -> None:
        """Take the inboxes away, with what is still on its way to them in the buffer."""
        self._listened = _nobody
        self.interrupt()
        for subscription in self._subscriptions:
            with suppress(Exception):  # a line that is lost has none, and one that is dead does not answer
                async with asyncio.timeout(self._line.timeout):
                    await subscription.drain()  # type: ignore[no-untyped-call] # as it comes
        self._subscriptions = []

    # -- what comes ---------------------------------------------------------------------------------

    def _heard(self, message: Heard) -> None:
        if message.reply:
            buffer = self._buffer
            buffer.append(self._claim(message, self._asked_at))
            for ask in self._asks.values():
                if len(buffer) >= ask.wanted:
                    ask.round.end()
            return
        ended = self._asks.get(message.subject[len(self._inbox) :])
        if ended is not None:
            ended.status, ended.words = message.status
            ended.round.end()

    def _rung(self, message: Heard) -> None:
        self._standing = False
        if message.reply:
            self._buffer.append(self._claim(message, self._stood_at))
            self._wake()
        elif message.status in (_TOO_LARGE, _COMPLETE):
            self._wake()
        elif message.status[0] in _NOTHING and self._listened():
            self._again = asyncio.ensure_future(self._stand_again())

    async def _stand_again(self) -> None:
        with suppress(ConnectionLost):  # whoever fetches next will notice
            await self.stand()

    def _claim(self, message: Heard, asked_at: float) -> Claim:
        before = self._ticker.before
        return Claim(self._owner, message, (max(asked_at, before)) + self._lease)


def _nobody() -> bool:
    return False
