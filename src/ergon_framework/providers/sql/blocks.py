"""Blocks: calls that a process has taken out of the windows beforehand, and spends without a round trip."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from pydantic import Field

from ergon_framework.policy import Count, Policy
from ergon_framework.providers.books import Account
from ergon_framework.providers.quota import Block, Window

#: The limits of minute, hour, day and month, in this order; None is no limit.
Limits = tuple[int | None, ...]

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class BlockPolicy(Policy):
    """How many calls a process takes at once, and for how long."""

    size: Count = Field(default=100, description="The most calls that a process has in hand for one account.")
    lease: float = Field(default=10.0, gt=0, le=3600, description="Seconds after which what is left is worth nothing.")


class Rest(NamedTuple):
    """A block that is over: its reservation, and what was not spent of it."""

    reservation: int
    unspent: int


@dataclass(frozen=True, slots=True)
class Leased:
    """A block as the server gave it at *at*, asked for at *sent* by the monotonic clock of this process."""

    reservation: int
    granted: int
    window: Window
    at: float
    until: float
    sent: float


class Purse:
    """The block of one account in this process; safe from any thread."""

    def __init__(self, account: Account, limits: Limits) -> None:
        self.account = account
        self.limits = limits
        self._lock = threading.Lock()
        self._block: Block | None = None
        self._leased: Leased | None = None
        self._renewing = False

    def take(self, clock: float) -> int | None:
        """One call: the reservation that it is out of; None where there is none to take."""
        with self._lock:
            if self._block is None or self._leased is None:
                return None
            block = self._block.take(_moment(self._leased, clock))
            if block is None:
                return None
            self._block = block
            return self._leased.reservation

    def put_back(self, reservation: int) -> None:
        """A call was not made; if its block is over, it stays spent."""
        with self._lock:
            if self._block is not None and self._leased is not None and self._leased.reservation == reservation:
                self._block = replace(self._block, left=self._block.left + 1)

    def has(self, clock: float) -> bool:
        """Whether there is a call to take."""
        with self._lock:
            block, leased = self._block, self._leased
            return block is not None and leased is not None and block.take(_moment(leased, clock)) is not None

    def renewal(self) -> tuple[bool, Rest | None]:
        """Whether it is for the caller to fetch the next block, and the one that he is to give back for it."""
        with self._lock:
            if self._renewing:
                return False, None
            self._renewing = True
            return True, self._ended()

    def renewed(self, leased: Leased | None) -> None:
        """The next block has come, or has not."""
        with self._lock:
            self._renewing = False
            if leased is not None:
                until = _EPOCH + timedelta(seconds=leased.until)
                self._leased, self._block = leased, Block(leased.window, leased.granted, until)

    def lapsed(self, clock: float) -> Rest | None:
        """What is over because its time is; nobody may come for a next one."""
        with self._lock:
            if self._leased is None or self._renewing or _moment(self._leased, clock).timestamp() < self._leased.until:
                return None
            return self._ended()

    def emptied(self) -> Rest | None:
        """The end: what is to be given back."""
        with self._lock:
            return self._ended()

    def _ended(self) -> Rest | None:
        leased, block = self._leased, self._block
        self._leased = self._block = None
        return None if leased is None else Rest(leased.reservation, 0 if block is None else block.left)


def _moment(leased: Leased, clock: float) -> datetime:
    """The server's time, or later: as if its answer had been under way from the moment it was asked."""
    return _EPOCH + timedelta(seconds=leased.at + clock - leased.sent)
