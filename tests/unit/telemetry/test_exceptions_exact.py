"""What is raised carries its verdict, its word for machines and the report, whoever raises it."""

from __future__ import annotations

import pytest

from ergon_framework.task.exceptions import (
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
def test_an_error_without_particulars_is_its_class_s_verdict_and_says_nothing(kind, category, code):
    error = kind()
    assert (error.category, error.code, str(error)) == (category, code, "")
    assert (error.final, error.retry_after) == (False, None)


@pytest.mark.parametrize("kind", [TransactionException, BusinessError, LoopTimeout, LoopStalled])
def test_an_error_says_what_it_was_given_to_say(kind):
    assert str(kind("out of paper")) == "out of paper"


def test_a_transaction_exception_keeps_every_particular():
    error = TransactionException("down", Category.TIMEOUT, retry_after=7.5, final=True, code="offline")
    assert (error.category, error.retry_after, error.final, error.code) == (Category.TIMEOUT, 7.5, True, "offline")


def test_a_business_error_keeps_its_code():
    assert BusinessError("no", code="unknown_customer").code == "unknown_customer"


def test_no_body_still_runs_unless_the_engine_says_so():
    assert TransactionException("down").still_running is False


@pytest.mark.parametrize("kind", [LoopTimeout, LoopStalled])
def test_the_end_of_a_loop_comes_with_its_report(kind):
    report = object()
    error = kind("over", report)
    assert (str(error), error.report) == ("over", report)
    assert kind("over").report is None


def test_a_fetch_that_failed_has_no_report_until_the_loop_adds_it():
    assert FetchException("down").report is None


def test_the_time_of_a_loop_is_a_timeout_to_those_who_know_nothing_of_this_package():
    assert isinstance(LoopTimeout("over"), TimeoutError)
