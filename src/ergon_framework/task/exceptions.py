"""What user code raises, and what the loops raise."""

from __future__ import annotations

from typing import Any

from ergon_framework.errors import Category, ConnectionLost, ErgonError

__all__ = [
    "BusinessError",
    "Category",
    "ConnectionLost",
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

    ``still_running`` is true when the body that timed out had not left when this was handed to
    the exception handler: it may still act. ``attempts_made`` and ``error_type`` are set where an
    executor made the attempts: how many there were, and what it named as the type of the error.
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
        later: bool | None = None,
        temporary: bool | None = None,
        code: str | None = None,
    ) -> None:
        if isinstance(message, Category):
            message, category = _category_first(message, category)
        super().__init__(
            message,
            category=category,
            retry_after=retry_after,
            final=final,
            later=later,
            temporary=temporary,
            code=code,
        )


def _category_first(category: Category, message: str | None) -> tuple[str, Category]:
    """The message and the category of an exception whose first argument is *category*."""
    if message is None or message is category:
        return f"{category.value} failure", category
    if isinstance(message, Category):
        raise TypeError(f"a failure has one category, not {category.value} and {message.value}; pass one of them")
    return message, category


class BusinessError(TransactionException):
    """The short form of a BUSINESS failure: the work is impossible, not the machinery."""

    category = Category.BUSINESS

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message, code=code)


class FetchException(ErgonError):
    """The connector could not be read and the fetch budget is spent; the loop has ended."""

    code = "fetch"
    report: Any = None


class FetchTimeoutException(FetchException):
    """The last permitted fetch did not answer in time."""

    category = Category.TIMEOUT
    code = "fetch_timeout"


class LoopTimeout(ErgonError, TimeoutError):
    """The loop's own time is over; ``report`` says what became of every transaction."""

    category = Category.TIMEOUT
    code = "loop_timeout"

    def __init__(self, message: str = "", report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class LoopStalled(ErgonError):
    """Every slot is held by a body that was abandoned; ``report`` says by which."""

    code = "loop_stalled"

    def __init__(self, message: str = "", report: Any = None) -> None:
        super().__init__(message)
        self.report = report
