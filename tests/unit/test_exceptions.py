"""The exceptions that user code raises, and those that the loops raise."""

from __future__ import annotations

import pickle

import pytest

from ergon_framework.errors import ErgonError
from ergon_framework.worker import exceptions
from ergon_framework.worker.exceptions import (
    BusinessError,
    Category,
    ConnectionLostError,
    FetchException,
    FetchTimeoutException,
    LoopStalled,
    LoopTimeout,
    TransactionException,
)


class Declined(BusinessError):
    code = "declined"


class OutOfStock(TransactionException):
    category = Category.BUSINESS
    retry_after = 60.0


def get_verdict(error):
    return error.category, error.retry_after, error.final, error.code


@pytest.mark.spec("CON-44")
@pytest.mark.parametrize("category", Category)
def test_a_transaction_fails_with_the_category_it_is_given(category):
    assert TransactionException("broken", category).category is category
    assert TransactionException("broken", category=category).category is category


@pytest.mark.spec("CON-44", "DX-06")
@pytest.mark.parametrize("category", Category)
def test_a_category_in_place_of_the_message_is_the_category(category):
    error = TransactionException(category, code="sold_out", retry_after=3)
    assert get_verdict(error) == (category, 3, False, "sold_out")
    assert str(error) == f"{category.value} failure"
    restored = pickle.loads(pickle.dumps(error))
    assert (str(restored), get_verdict(restored)) == (str(error), get_verdict(error))


@pytest.mark.spec("DX-06")
def test_a_category_may_stand_before_its_message():
    error = TransactionException(Category.BUSINESS, "no such order")
    assert (error.category, str(error)) == (Category.BUSINESS, "no such order")
    named = TransactionException(Category.BUSINESS, category=Category.BUSINESS)
    assert (named.category, str(named)) == (Category.BUSINESS, "BUSINESS failure")


@pytest.mark.spec("DX-06")
def test_two_categories_that_differ_are_rejected():
    with pytest.raises(TypeError, match="SYSTEM and BUSINESS"):
        TransactionException(Category.SYSTEM, Category.BUSINESS)


@pytest.mark.spec("DX-06")
def test_a_text_that_is_the_name_of_a_category_stays_a_message():
    error = TransactionException("BUSINESS")
    assert (error.category, str(error)) == (Category.SYSTEM, "BUSINESS")
    assert TransactionException("broken", "BUSINESS").category is Category.BUSINESS


@pytest.mark.spec("CON-44")
def test_a_transaction_exception_without_a_category_is_a_system_failure():
    assert get_verdict(TransactionException("broken")) == (Category.SYSTEM, None, False, None)


@pytest.mark.spec("CON-44")
def test_a_transaction_exception_carries_its_whole_verdict():
    error = TransactionException("busy", Category.TIMEOUT, retry_after=3, final=True, code="busy")
    assert get_verdict(error) == (Category.TIMEOUT, 3, True, "busy")


@pytest.mark.spec("CON-44")
def test_a_business_error_is_a_business_failure_with_a_code():
    assert get_verdict(BusinessError("card declined", code="declined")) == (Category.BUSINESS, None, False, "declined")
    assert get_verdict(BusinessError("card declined")) == (Category.BUSINESS, None, False, None)
    assert isinstance(BusinessError(), TransactionException)


@pytest.mark.spec("CON-44")
def test_a_users_own_class_holds_its_verdict():
    assert get_verdict(Declined("no")) == (Category.BUSINESS, None, False, "declined")
    assert get_verdict(OutOfStock("no")) == (Category.BUSINESS, 60.0, False, None)
    assert get_verdict(OutOfStock("no", Category.SYSTEM, retry_after=0)) == (Category.SYSTEM, 0, False, None)


def test_a_handler_call_is_not_running_by_default():
    assert TransactionException("late", Category.TIMEOUT).still_running is False


def test_a_fetch_timeout_is_a_fetch_failure():
    error = FetchTimeoutException("no answer")
    assert isinstance(error, FetchException)
    assert get_verdict(error) == (Category.TIMEOUT, None, False, "fetch_timeout")
    assert get_verdict(FetchException("refused")) == (Category.SYSTEM, None, False, "fetch")
    assert error.report is None


def test_a_lost_connection_is_no_fetch_failure():
    assert not issubclass(ConnectionLostError, FetchException)


def test_a_loop_timeout_is_the_built_in_timeout_with_a_report():
    error = LoopTimeout("over", {"done": 3})
    assert isinstance(error, TimeoutError)
    assert (str(error), error.report) == ("over", {"done": 3})
    assert get_verdict(error) == (Category.TIMEOUT, None, False, "loop_timeout")


def test_a_stalled_loop_raises_an_error_with_a_report():
    error = LoopStalled("stuck", report=["a"])
    assert not isinstance(error, TimeoutError)
    assert (str(error), error.report) == ("stuck", ["a"])
    assert get_verdict(error) == (Category.SYSTEM, None, False, "loop_stalled")


@pytest.mark.parametrize(
    "error",
    [
        TransactionException("a", Category.TIMEOUT, retry_after=2, final=True, code="c"),
        BusinessError("a", code="c"),
        Declined("a"),
        OutOfStock("a"),
        FetchException("a"),
        FetchTimeoutException("a"),
        LoopTimeout("a", {"done": 3}),
        LoopStalled("a", {"done": 3}),
        ConnectionLostError("a"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_exception_arrives_in_another_process_as_it_was(error):
    error.__cause__ = ValueError("below")
    error.still_running = True
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is type(error)
    assert str(restored) == "a"
    assert get_verdict(restored) == get_verdict(error)
    assert vars(restored) == vars(error)
    assert repr(restored.__cause__) == "ValueError('below')"


def test_every_exported_exception_derives_from_ergon_error():
    kinds = [getattr(exceptions, name) for name in exceptions.__all__ if name != "Category"]
    assert kinds
    assert all(issubclass(kind, ErgonError) for kind in kinds)
