"""The observer interfaces of a loop and of a transaction: they receive events and never decide.

Telemetry implements them; a loop without telemetry has an observer that ignores all events. A lifecycle is the
processing of one transaction, in steps (process, then success or exception) with attempts. A gate is a check before
each fetch that can pause the loop. A delivery is a fetched transaction; to settle it is to ack, defer, release or
dead-letter it in the broker, which the loop does for groups of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ergon_framework.telemetry.options import DEFAULT_OPTIONS, TelemetryOptions

if TYPE_CHECKING:
    from ergon_framework.connectors.base import Delivery, SettleResult
    from ergon_framework.engine.retry import FailedAttempt, Step, StepObserver, StepResult
    from ergon_framework.transaction import Transaction
    from ergon_framework.worker.report import Outcome, StopReason
    from ergon_framework.worker.solo import SoloPause, SoloStart


class TransactionObserver(Protocol):
    """An observer of one transaction's lifecycle."""

    @property
    def recording(self) -> bool:
        """Whether the observer records the lifecycle."""

    def on_step_start(self, step: Step) -> StepObserver | None:
        """Handle the start of a step; return the observer of its attempts, if any."""

    def on_step_end(self, result: StepResult) -> None:
        """Handle the end of the current step."""

    def on_end(self, outcome: Outcome) -> None:
        """Handle the end of the lifecycle."""


class LoopObserver:
    """An observer that ignores all events; subclasses override the hooks. No hook may raise, wait or be slow.

    ``on_transaction_start`` and the object it returns are called where the transaction runs, on several threads at
    once in the threaded variant; ``on_transaction_end`` and ``on_settled`` by the settler; the rest by the loop.
    """

    #: The options that say what may be recorded.
    options: TelemetryOptions = DEFAULT_OPTIONS

    def on_loop_start(self, slots: Callable[[], tuple[int, int, int]]) -> None:
        """Handle the start of the loop.

        *slots* may be called at any time until the loop ends. It returns the numbers of running transactions, of
        transactions with an abandoned call (one that timed out and still runs), and of waiting ones.
        """

    def on_batch(self, size: int) -> None:
        """Handle the start of a batch: up to *size* transactions are requested, or passed to a produce call."""

    def on_fetch_start(self) -> StepObserver | None:
        """Handle the start of a fetch; return the observer of its attempts, if any."""
        return None

    def on_fetch_retry(self, number: int, error: BaseException, delay: float) -> None:
        """Handle a failed attempt *number* at a fetch that another follows after *delay* seconds."""

    def on_fetch_end(self, deliveries: Sequence[Delivery] | None, error: BaseException | None) -> None:
        """Handle the end of a fetch: *deliveries*, a final *error*, or neither if the loop ends during the fetch."""

    def on_oversized_batch(self, requested: int, received: int) -> None:
        """Handle a connector that returned more deliveries than the batch size that it was given."""

    def on_pause(self, reason: str | None) -> None:
        """Handle a gate that pauses the loop, or the end of the pause (None)."""

    def on_solo_start(self, delivery: Delivery, start: SoloStart) -> None:
        """Handle the start of a transaction on its last permitted delivery, which runs alone in the process."""

    def on_solo_pause_end(self, pause: SoloPause) -> None:
        """Handle the end of a pause for such a transaction of another loop."""

    def on_transaction_start(self, transaction: Transaction, delivery: Delivery | None) -> TransactionObserver | None:  # noqa: ARG002 - for subclasses
        """Handle the start of a lifecycle; return its observer, None if it is not recorded."""
        return None

    def on_retry(self, transaction: Transaction, failed_attempt: FailedAttempt) -> None:
        """Handle a failed attempt at a step that another follows; called where the transaction runs."""

    def trace_id(self, outcome: Outcome) -> str | None:  # noqa: ARG002 - for subclasses
        """Return the trace id of an ended lifecycle, between its end and ``on_transaction_end``."""
        return None

    def on_rejected(self, delivery: Delivery, reason: str) -> None:
        """Handle a delivery that was settled before its lifecycle."""

    def on_settled(self, results: list[SettleResult], seconds: float) -> None:
        """Handle a settled group: the result for each delivery, and the *seconds* that the call took."""

    def on_transaction_end(self, outcome: Outcome) -> None:
        """Handle the final outcome of a transaction."""

    def on_loop_end(self, end: StopReason) -> None:
        """Handle the end of the loop."""
