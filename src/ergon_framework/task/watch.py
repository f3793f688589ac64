"""Who may look on: the loop tells it what happens, and it never decides anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ergon_framework.telemetry.options import DEFAULTS, TelemetryOptions

if TYPE_CHECKING:
    from ergon_framework.connectors.base import Delivery, SettleResult
    from ergon_framework.engine.attempts import Note, StepWatch
    from ergon_framework.task.lifecycle import Watch
    from ergon_framework.task.report import End, Outcome
    from ergon_framework.transaction import Transaction


class Onlooker:
    """Sees nothing; what wants to see overrides. No method may raise, wait or be slow.

    ``begin`` and what it returns are called wherever the transaction runs, on several threads at
    once in the threaded variant; ``ended`` and ``settled`` by whoever settles; the rest by the loop.
    """

    #: What may be recorded.
    options: TelemetryOptions = DEFAULTS

    def began(self, slots: Callable[[], tuple[int, int, int]]) -> None:
        """The loop begins; *slots* says at any time how many run, are abandoned, and wait for a slot."""

    def batch(self, size: int) -> None:
        """A round begins: up to *size* transactions are asked for, or given."""

    def fetching(self) -> StepWatch | None:
        """A fetch begins."""
        return None

    def on_fetch_retry(self, number: int, error: BaseException, delay: float) -> None:
        """Attempt *number* at a fetch failed, and another follows after *delay* seconds."""

    def fetched(self, deliveries: Sequence[Delivery] | None, error: BaseException | None) -> None:
        """It brought *deliveries*, or failed for good; neither when the loop ends in the middle of it."""

    def breach(self, asked: int, got: int) -> None:
        """The connector returned more than the batch size it was given."""

    def paused(self, reason: str | None) -> None:
        """A gate holds the loop, or (None) holds it no longer."""

    def begin(self, transaction: Transaction, delivery: Delivery | None) -> Watch | None:  # noqa: ARG002 - for those who look
        """A lifecycle begins; None when nobody records this one."""
        return None

    def on_retry(self, transaction: Transaction, note: Note) -> None:
        """An attempt at a step failed, and another follows; called wherever the transaction runs."""

    def trace_id(self, outcome: Outcome) -> str | None:  # noqa: ARG002 - for those who look
        """The trace in which a lifecycle that is over can be found, between its end and ``ended``."""
        return None

    def refused(self, delivery: Delivery, reason: str) -> None:
        """A delivery was settled before its lifecycle."""

    def settled(self, results: list[SettleResult], seconds: float) -> None:
        """A group was settled."""

    def ended(self, outcome: Outcome) -> None:
        """A transaction has its final outcome."""

    def over(self, end: End) -> None:
        """The loop has ended."""
