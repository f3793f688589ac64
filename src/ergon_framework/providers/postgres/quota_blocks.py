"""Quota blocks: calls that a process reserves in advance and makes without a round trip.

A reservation counts its calls as used; the unused calls of a block are returned when the block ends. If the process
crashes, they stay counted until their window (minute, hour, day or month) ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from pydantic import Field

from ergon_framework.policy import Count, Policy
from ergon_framework.providers.quota import QuotaBlock, Window
from ergon_framework.providers.state import ProviderScope

#: The limits per minute, hour, day and month, in this order; None means no limit.
WindowLimits = tuple[int | None, ...]

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class BlockPolicy(Policy):
    """The number of calls that a process reserves in one block, and the duration of the block."""

    size: Count = Field(default=100, description="Maximum calls that a process reserves in one block.")
    lease: float = Field(default=10.0, gt=0, le=3600, description="Seconds after which a block expires.")


class UnusedQuota(NamedTuple):
    """The unused calls of a block that has ended: its reservation, and their number."""

    reservation: int
    unspent: int


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """A block that the server granted at *at*, requested at *sent* by the monotonic clock of this process."""

    reservation: int
    granted: int
    window: Window
    at: float
    until: float
    sent: float


class QuotaBlockCache:
    """The quota block of one scope in this process; safe from any thread."""

    def __init__(self, scope: ProviderScope, limits: WindowLimits) -> None:
        self.scope = scope
        self.limits = limits
        self._lock = threading.Lock()
        self._block: QuotaBlock | None = None
        self._leased_block: LeasedBlock | None = None
        self._is_renewing = False

    def take(self, clock: float) -> int | None:
        """Take one call and return the reservation of its block; None if there is no call to take."""
        with self._lock:
            if self._block is None or self._leased_block is None:
                return None
            block = self._block.take(_to_server_time(self._leased_block, clock))
            if block is None:
                return None
            self._block = block
            return self._leased_block.reservation

    def refund(self, reservation: int) -> None:
        """Return a call that was not made; it stays used if its block has ended."""
        with self._lock:
            if (
                self._block is not None
                and self._leased_block is not None
                and self._leased_block.reservation == reservation
            ):
                self._block = replace(self._block, left=self._block.left + 1)

    def has_quota(self, clock: float) -> bool:
        """Return whether there is a call to take."""
        with self._lock:
            block, leased_block = self._block, self._leased_block
            return (
                block is not None
                and leased_block is not None
                and block.take(_to_server_time(leased_block, clock)) is not None
            )

    def start_renewal(self) -> tuple[bool, UnusedQuota | None]:
        """Return whether the caller must fetch the next block, and the ended block to release for it."""
        with self._lock:
            if self._is_renewing:
                return False, None
            self._is_renewing = True
            return True, self._remove_block()

    def set_next(self, leased_block: LeasedBlock | None) -> None:
        """End the renewal with the next block, or None if there is none."""
        with self._lock:
            self._is_renewing = False
            if leased_block is not None:
                until = _EPOCH + timedelta(seconds=leased_block.until)
                self._leased_block, self._block = (
                    leased_block,
                    QuotaBlock(leased_block.window, leased_block.granted, until),
                )

    def pop_expired(self, clock: float) -> UnusedQuota | None:
        """Remove the block if it has expired, because no further call may ask for the next one."""
        with self._lock:
            if (
                self._leased_block is None
                or self._is_renewing
                or _to_server_time(self._leased_block, clock).timestamp() < self._leased_block.until
            ):
                return None
            return self._remove_block()

    def drain(self) -> UnusedQuota | None:
        """Remove the block at shutdown, and return its unused calls."""
        with self._lock:
            return self._remove_block()

    def _remove_block(self) -> UnusedQuota | None:
        leased_block, block = self._leased_block, self._block
        self._leased_block = self._block = None
        return (
            None if leased_block is None else UnusedQuota(leased_block.reservation, 0 if block is None else block.left)
        )


def _to_server_time(leased_block: LeasedBlock, clock: float) -> datetime:
    """Return an upper bound of the server's time: as if it had answered at the moment of the request."""
    return _EPOCH + timedelta(seconds=leased_block.at + clock - leased_block.sent)
