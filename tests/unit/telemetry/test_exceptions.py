"""Exceptions carry their classification, their code and the report, wherever they are raised."""

from __future__ import annotations

import pytest

from ergon_framework.worker.exceptions import (
    BusinessError,
    Category,
    FetchException,
    FetchTimeoutException,
    LoopStalled,
    LoopTimeout,
    TransactionException,
)


@pytest.mark.parametrize(
    "kind, category, code",
    [
        (TransactionException, Category.SYSTEM, None),
        (BusinessError, Category.BUSINESS, None),
        (FetchException, Category.SYSTEM, "fetch"),
        (FetchTimeoutException, Category.TIMEOUT, "fetch_timeout"),
        (LoopTimeout, Category.TIMEOUT, "loop_timeout"),
        (LoopStalled, Category.SYSTEM, "loop_stalled"),
    ],
)
def test_an_error_without_arguments_has_the_defaults_of_its_class(kind, category, code):
    error = kind()
    assert (error.category, error.code, str(error)) == (category, code, "")
    assert (error.final, error.retry_after) == (False, None)


@pytest.mark.parametrize("kind", [TransactionException, BusinessError, LoopTimeout, LoopStalled])
def test_an_error_keeps_its_message(kind):
    assert str(kind("out of paper")) == "out of paper"


def test_a_transaction_exception_keeps_every_argument():
    error = TransactionException("down", Category.TIMEOUT, retry_after=7.5, final=True, code="offline")
    assert (error.category, error.retry_after, error.final, error.code) == (Category.TIMEOUT, 7.5, True, "offline")


def test_a_business_error_keeps_its_code():
    assert BusinessError("no", code="unknown_customer").code == "unknown_customer"


def test_still_running_is_false_by_default():
    assert TransactionException("down").still_running is False


@pytest.mark.parametrize("kind", [LoopTimeout, LoopStalled])
def test_a_loop_error_has_the_report_of_the_loop(kind):
    report = object()
    error = kind("over", report)
    assert (str(error), error.report) == ("over", report)
    assert kind("over").report is None


def test_a_fetch_error_has_no_report_until_the_loop_adds_it():
    assert FetchException("down").report is None


def test_a_loop_timeout_is_a_timeout_error():
    assert isinstance(LoopTimeout("over"), TimeoutError)
