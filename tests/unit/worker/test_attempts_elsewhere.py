"""Attempts that an executor made: the loop reports the count and the error type that the error names."""

from __future__ import annotations

import logging

import pytest

from ergon_framework import Category, MemoryConnector, Transaction, TransactionException, consumer
from ergon_framework.failure import get_error_type


@pytest.mark.spec("DX-35")
@pytest.mark.parametrize("is_deferred, outcome", [(False, "failed"), (True, "deferred")])
def test_an_outcome_has_the_attempts_and_the_type_that_the_error_names(
    caplog: pytest.LogCaptureFixture, is_deferred: bool, outcome: str
) -> None:
    queue = MemoryConnector("orders")
    queue.dispatch([Transaction({}, id="a")])

    @consumer(queue)
    def fail(_order: dict[str, object]) -> None:
        error = TransactionException(
            "no", Category.SYSTEM, final=not is_deferred, not_attempted=is_deferred, retry_after=3600.0
        )
        error.attempts_made, error.error_type = 3, "LookupError"
        raise error

    with caplog.at_level(logging.INFO, logger="ergon_framework.task"):
        fail.run()
    [record] = [record.__dict__ for record in caplog.records if hasattr(record, "outcome")]
    assert (record["outcome"], record["attempts"], record["error_type"]) == (outcome, 3, "LookupError")


@pytest.mark.spec("DX-35")
def test_an_error_without_a_named_type_has_the_class_of_its_cause_or_its_own() -> None:
    error = TransactionException("no")
    assert get_error_type(error) == "TransactionException"
    error.__cause__ = KeyError("x")
    assert get_error_type(error) == "KeyError"
    error.error_type = "OrderError"
    assert get_error_type(error) == "OrderError"
