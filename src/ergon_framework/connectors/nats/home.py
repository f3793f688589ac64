"""Home: what all queues of one server share on one event loop: the line."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ergon_framework.connectors.nats.line import Line, connect

_homes: dict[tuple[Any, ...], Home] = {}
_making = threading.Lock()


class Home:
    """One server, or one cluster, as this event loop knows it."""

    def __init__(
        self, where: tuple[Any, ...], addresses: Sequence[str], *, timeout: float, options: Mapping[str, Any]
    ) -> None:
        self.where = where
        #: Kept, so that no other loop can come to have its number.
        self.loop = asyncio.get_running_loop()
        self.users = 0
        self._addresses = addresses
        self._timeout = timeout
        self._options = options
        self._line: Line | None = None
        self._connecting = asyncio.Lock()

    async def line(self) -> Line:
        """The line, made anew if it was lost."""
        line = self._line
        if line is not None and not line.lost:
            return line
        async with self._connecting:
            if self._line is None or self._line.lost:
                self._line = await connect(self._addresses, timeout=self._timeout, options=self._options)
            return self._line

    async def close(self) -> None:
        if self.loop.is_closed():
            self.abandon()
            return
        line, self._line = self._line, None
        if line is not None:
            await line.close()

    def abandon(self) -> None:
        """Let the line go once the event loop is closed, on which nobody has closed it."""
        line, self._line = self._line, None
        if line is not None:
            line.abandon()


def home_of(addresses: Sequence[str], *, timeout: float, options: Mapping[str, Any], apart: object = None) -> Home:
    """The home of *addresses* on the running event loop, one for all queues there; give it back with ``leave``.

    What has options of its own lives *apart*.
    """
    with _making:
        where = (tuple(addresses), timeout, id(apart) if options else None, id(asyncio.get_running_loop()), os.getpid())
        for known in [known for known in _homes.values() if known.loop.is_closed()]:
            _homes.pop(known.where).abandon()
        home = _homes.get(where)
        if home is None:
            home = _homes[where] = Home(where, addresses, timeout=timeout, options=options)
        home.users += 1
        return home


def leave(home: Home) -> bool:
    """One user less; True for the last one, who turns off the light."""
    with _making:
        home.users -= 1
        if home.users > 0:
            return False
        if _homes.get(home.where) is home:
            del _homes[home.where]
        return True
