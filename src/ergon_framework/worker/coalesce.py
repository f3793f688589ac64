"""Coalescing: callers that send to one connector at the same time share a dispatch, the call that sends transactions.

A relay uses it: its slots each send one transaction, and a broker confirms many at once much faster. The first caller
of a group dispatches the group: it waits for the previous dispatch, and all callers that arrive until then join its
group. There is no delay for collecting, so a single transaction is sent immediately. A failure of a group says little
about its members, so each of them is then sent alone; only a lost connection fails all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from ergon_framework.connectors.base import Confirmation, ConnectorError
from ergon_framework.errors import ConnectionLostError
from ergon_framework.transaction import Transaction

Dispatch: TypeAlias = Callable[[Sequence[Transaction]], Sequence[Confirmation]]
AsyncDispatch: TypeAlias = Callable[[Sequence[Transaction]], Awaitable[Sequence[Confirmation]]]


class _DispatchGroup:
    """Transactions that are dispatched together; ``error`` is why they are not confirmed, None once they are."""

    __slots__ = ("done", "error", "members")

    def __init__(self, done: Any) -> None:
        self.members: list[Transaction] = []
        self.done = done
        self.error: Exception | None = ConnectorError("the batch was abandoned before it was confirmed")

    def join(self, transaction: Transaction) -> bool:
        """Add *transaction*; return True if it is the first."""
        self.members.append(transaction)
        return len(self.members) == 1

    def must_send_alone(self) -> bool:
        """Return whether each member must be sent alone; raise an error that holds for all of them."""
        if self.error is None:
            return False
        if len(self.members) == 1 or isinstance(self.error, ConnectionLostError):
            raise self.error
        return True


def check_all_confirmed(confirmations: Sequence[Confirmation], sent: Sequence[Transaction]) -> None:
    """Raise ConnectorError unless there is one confirmation for each of *sent*, as every connector must return."""
    if len(confirmations) != len(sent):
        raise ConnectorError(f"dispatch confirmed {len(confirmations)} of {len(sent)} transactions")


class Coalescer:
    """Coalesces the dispatches of many threads."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._lock = threading.Lock()
        self._dispatch_lock = threading.Lock()
        self._open_group = _DispatchGroup(threading.Event())

    def submit(self, transaction: Transaction) -> None:
        """Send *transaction*; return when the connector has confirmed it."""
        with self._lock:
            group = self._open_group
            is_first = group.join(transaction)
        if is_first:
            self._dispatch_group(group)
        else:
            group.done.wait()
        if group.must_send_alone():
            check_all_confirmed(self._dispatch([transaction]), [transaction])

    def _dispatch_group(self, group: _DispatchGroup) -> None:
        try:
            with self._dispatch_lock:
                with self._lock:
                    self._open_group = _DispatchGroup(threading.Event())
                check_all_confirmed(self._dispatch(group.members), group.members)
                group.error = None
        except Exception as error:  # noqa: BLE001 - raised to every caller of the group
            group.error = error
        finally:
            group.done.set()


class AsyncCoalescer:
    """Coalesces the dispatches of many tasks of one event loop."""

    def __init__(self, dispatch: AsyncDispatch) -> None:
        self._dispatch = dispatch
        self._dispatch_lock = asyncio.Lock()
        self._open_group = _DispatchGroup(asyncio.Event())

    async def submit(self, transaction: Transaction) -> None:
        group = self._open_group
        if group.join(transaction):
            await self._dispatch_group(group)
        else:
            await group.done.wait()
        if group.must_send_alone():
            check_all_confirmed(await self._dispatch([transaction]), [transaction])

    async def _dispatch_group(self, group: _DispatchGroup) -> None:
        try:
            async with self._dispatch_lock:
                self._close_group(group)
                check_all_confirmed(await self._dispatch(group.members), group.members)
                group.error = None
        except Exception as error:  # noqa: BLE001 - raised to every caller of the group
            group.error = error
        finally:
            # Cancelling the first caller ends its group: no further caller joins it, and its members send alone.
            self._close_group(group)
            group.done.set()

    def _close_group(self, group: _DispatchGroup) -> None:
        if self._open_group is group:
            self._open_group = _DispatchGroup(asyncio.Event())
