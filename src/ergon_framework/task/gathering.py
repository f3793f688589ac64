"""Gathering: those who send to one connector at the same time share a dispatch.

Whoever comes first leads: it waits for its turn, and all who come until then go with it. Nobody
waits for company, so a single one is sent at once. A group that failed says little about its
members, so each of them then goes alone; only a lost connection is one for all.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from ergon_framework.connectors.base import Confirmation, ConnectorError
from ergon_framework.errors import ConnectionLost
from ergon_framework.transaction import Transaction

Dispatch: TypeAlias = Callable[[Sequence[Transaction]], Sequence[Confirmation]]
AsyncDispatch: TypeAlias = Callable[[Sequence[Transaction]], Awaitable[Sequence[Confirmation]]]


class _Group:
    """Those who go together; *error* is why they have not arrived."""

    __slots__ = ("done", "error", "members")

    def __init__(self, done: Any) -> None:
        self.members: list[Transaction] = []
        self.done = done
        self.error: Exception | None = ConnectorError("whoever led this group left before it was confirmed")

    def join(self, transaction: Transaction) -> bool:
        """True for the first."""
        self.members.append(transaction)
        return len(self.members) == 1

    def must_go_alone(self) -> bool:
        """Whether each has to try again by itself; raises what is the same for all."""
        if self.error is None:
            return False
        if len(self.members) == 1 or isinstance(self.error, ConnectionLost):
            raise self.error
        return True


def check_confirmed(confirmations: Sequence[Confirmation], sent: Sequence[Transaction]) -> None:
    """A connector that returns from a dispatch has confirmed all of it."""
    if len(confirmations) != len(sent):
        raise ConnectorError(f"of {len(sent)} transactions that were dispatched {len(confirmations)} were confirmed")


class Gathering:
    """Sends from many threads."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._open = _Group(threading.Event())

    def send(self, transaction: Transaction) -> None:
        """Returns when the connector has confirmed *transaction*."""
        with self._lock:
            group = self._open
            leads = group.join(transaction)
        if leads:
            self._lead(group)
        else:
            group.done.wait()
        if group.must_go_alone():
            check_confirmed(self._dispatch([transaction]), [transaction])

    def _lead(self, group: _Group) -> None:
        try:
            with self._turn:
                with self._lock:
                    self._open = _Group(threading.Event())
                check_confirmed(self._dispatch(group.members), group.members)
                group.error = None
        except Exception as error:  # noqa: BLE001 - handed to every member, who raise it
            group.error = error
        finally:
            group.done.set()


class AsyncGathering:
    """Sends from many tasks of one event loop."""

    def __init__(self, dispatch: AsyncDispatch) -> None:
        self._dispatch = dispatch
        self._turn = asyncio.Lock()
        self._open = _Group(asyncio.Event())

    async def send(self, transaction: Transaction) -> None:
        group = self._open
        if group.join(transaction):
            await self._lead(group)
        else:
            await group.done.wait()
        if group.must_go_alone():
            check_confirmed(await self._dispatch([transaction]), [transaction])

    async def _lead(self, group: _Group) -> None:
        try:
            async with self._turn:
                self._close(group)
                check_confirmed(await self._dispatch(group.members), group.members)
                group.error = None
        except Exception as error:  # noqa: BLE001 - handed to every member, who raise it
            group.error = error
        finally:
            # A leader that is cancelled takes nobody with it, and nobody joins it any more.
            self._close(group)
            group.done.set()

    def _close(self, group: _Group) -> None:
        if self._open is group:
            self._open = _Group(asyncio.Event())
