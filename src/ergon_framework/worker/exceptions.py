"""The exceptions that user code raises, and those that the loops raise.

An exception of user code classifies a failure: BUSINESS (the work is impossible), SYSTEM (technical) or TIMEOUT, and
whether and when a retry may help. An exception of a loop has the report of what the loop did until then.
"""

from __future__ import annotations

from typing import Any

from ergon_framework.errors import Category, ConnectionLostError, ErgonError

__all__ = [
    "BusinessError",
    "Category",
    "ConnectionLostError",
    "FetchException",
    "FetchTimeoutException",
    "LoopStalled",
    "LoopTimeout",
    "TransactionException",
]


class TransactionException(ErgonError):
    """A failure of one transaction, with its category: SYSTEM unless it, or its class, says otherwise.

    The category may stand alone or first: ``TransactionException(Category.BUSINESS)`` and
    ``TransactionException(Category.BUSINESS, "no such order")``.

    ``retry_after`` is the least number of seconds before another attempt. ``final`` means that no further attempt is
    made, and ``not_attempted`` that nothing was attempted, so that no attempt is counted. ``temporary`` means that a
    service is unavailable: the transaction is redelivered later without counting an attempt. ``code`` is a short
    identifier for programs.

    ``still_running`` is true if the call that timed out had not exited when the exception handler got this error: it
    may still act. ``attempts_made`` and ``error_type`` are set if an executor, a process that runs handlers, made the
    attempts: their number, and the type of the error as the executor named it.
    """

    still_running: bool = False
    attempts_made: int | None = None
    error_type: str | None = None

    def __init__(
        self,
        message: str | Category = "",
        category: str | Category | None = None,
        *,
        retry_after: float | None = None,
        final: bool | None = None,
        not_attempted: bool | None = None,
        temporary: bool | None = None,
        code: str | None = None,
    ) -> None:
        if isinstance(message, Category):
            message, category = _parse_category_first(message, category)
        super().__init__(
            message,
            category=category,
            retry_after=retry_after,
            final=final,
            not_attempted=not_attempted,
            temporary=temporary,
            code=code,
        )


def _parse_category_first(category: Category, message: str | None) -> tuple[str, Category]:
    """Return message and category of an exception whose first argument is *category*."""
    if message is None or message is category:
        return f"{category.value} failure", category
    if isinstance(message, Category):
        raise TypeError(f"failure has two categories, {category.value} and {message.value}; pass one of them")
    return message, category


class BusinessError(TransactionException):
    """The short form of a BUSINESS failure: the work is impossible, the system works."""

    category = Category.BUSINESS

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message, code=code)


class FetchException(ErgonError):
    """The connector could not be read and the fetch attempts are used up; the loop has ended."""

    code = "fetch"
    report: Any = None


class FetchTimeoutException(FetchException):
    """The last permitted fetch timed out."""

    category = Category.TIMEOUT
    code = "fetch_timeout"


class LoopTimeout(ErgonError, TimeoutError):
    """The loop's own timeout has passed.

    ``report`` has the number of transactions by outcome for a consume loop, and every outcome for a produce call.
    """

    category = Category.TIMEOUT
    code = "loop_timeout"

    def __init__(self, message: str = "", report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class LoopStalled(ErgonError):
    """Calls that timed out and did not exit hold every slot; ``report.still_running`` is their number."""

    code = "loop_stalled"

    def __init__(self, message: str = "", report: Any = None) -> None:
        super().__init__(message)
        self.report = report
