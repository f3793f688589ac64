"""Errors carry their classification and survive pickling to another process."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from ergon_framework.errors import (
    Category,
    ConfigurationError,
    ConnectionLostError,
    ErgonError,
    MissingExtraError,
    error_message,
    require_extra,
)


def round_trip(error):
    """Return the error as another process would receive it."""
    return pickle.loads(pickle.dumps(error))


class Demanding(Exception):
    """An error that can be pickled but not unpickled: a common mistake of third-party exceptions."""

    def __init__(self, place, reason):
        super().__init__(f"{place}: {reason}")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Becoming(Exception):
    """An error that unpickles to something that is not an exception."""

    def __reduce__(self):
        return str, ("not an exception",)


class Special(ErgonError):
    category = Category.BUSINESS
    retry_after = 7.0
    final = True
    code = "special"


# -- classification -------------------------------------------------------------------------------


@pytest.mark.spec("CON-44")
def test_an_error_without_a_classification_may_be_retried_immediately():
    error = ErgonError("broken")
    assert (error.category, error.retry_after, error.final, error.code) == (Category.SYSTEM, None, False, None)
    assert str(error) == "broken"


@pytest.mark.spec("CON-44")
def test_an_error_carries_the_verdict_it_is_given():
    error = ErgonError("busy", category=Category.TIMEOUT, retry_after=1.5, final=True, code="busy")
    assert (error.category, error.retry_after, error.final, error.code) == (Category.TIMEOUT, 1.5, True, "busy")


@pytest.mark.spec("CON-44")
def test_a_class_can_hold_the_verdict_of_its_errors():
    error = Special("no")
    assert (error.category, error.retry_after, error.final, error.code) == (Category.BUSINESS, 7.0, True, "special")


@pytest.mark.spec("CON-44")
def test_an_error_may_differ_from_its_class_without_changing_it():
    error = Special("no", category=Category.SYSTEM, retry_after=0, final=False, code="other")
    assert (error.category, error.retry_after, error.final, error.code) == (Category.SYSTEM, 0, False, "other")
    assert (Special.category, Special.retry_after, Special.final, Special.code) == (
        Category.BUSINESS,
        7.0,
        True,
        "special",
    )


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf")])
def test_an_invalid_retry_after_is_rejected(seconds):
    with pytest.raises(ValueError, match="retry_after must be a finite number of seconds >= 0"):
        ErgonError("broken", retry_after=seconds)


def test_a_category_may_be_given_by_its_name_and_no_other():
    assert ErgonError(category="TIMEOUT").category is Category.TIMEOUT
    with pytest.raises(ValueError, match="LATER"):
        ErgonError(category="LATER")


def test_a_category_is_written_as_its_name():
    assert json.dumps({"category": Category.BUSINESS}) == '{"category": "BUSINESS"}'


@pytest.mark.parametrize(
    "kind, final, code",
    [
        (ConfigurationError, True, "configuration"),
        (MissingExtraError, True, "missing_extra"),
        (ConnectionLostError, False, "connection_lost"),
    ],
)
def test_each_kind_has_its_own_verdict(kind, final, code):
    error = kind("broken")
    assert isinstance(error, ErgonError)
    assert (error.category, error.final, error.code, error.retry_after) == (Category.SYSTEM, final, code, None)


# -- pickling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", [round_trip, copy.copy, copy.deepcopy])
def test_an_error_arrives_with_its_verdict(move):
    error = ErgonError("busy", category=Category.TIMEOUT, retry_after=1.5, final=True, code="busy")
    error.note = "and whatever else was set"
    restored = move(error)
    assert type(restored) is ErgonError
    assert str(restored) == "busy"
    assert vars(restored) == vars(error)
    assert restored.__cause__ is None


@pytest.mark.parametrize("kind", [ConfigurationError, MissingExtraError, ConnectionLostError, Special])
def test_every_kind_arrives_as_itself(kind):
    restored = round_trip(kind("broken", retry_after=2))
    assert type(restored) is kind
    assert (str(restored), restored.code, restored.final, restored.retry_after) == ("broken", kind.code, kind.final, 2)


def test_an_error_arrives_with_the_whole_chain_of_its_causes():
    error = ErgonError("top")
    error.__cause__ = ErgonError("middle", code="m")
    error.__cause__.__cause__ = ValueError("bottom")
    restored = round_trip(error)
    assert (str(restored.__cause__), restored.__cause__.code) == ("middle", "m")
    assert type(restored.__cause__.__cause__) is ValueError
    assert restored.__cause__.__cause__.args == ("bottom",)


def test_pickling_a_chain_of_causes_takes_linear_time():
    # If each level were pickled twice, forty levels would never end.
    error = None
    for level in range(40):
        error, cause = ErgonError(f"level {level}"), error
        error.__cause__ = cause
    restored = round_trip(error)
    for level in reversed(range(40)):
        assert str(restored) == f"level {level}"
        restored = restored.__cause__
    assert restored is None


def make_unpicklable_error():
    return ValueError("holds a lock", threading.Lock())


@pytest.mark.parametrize(
    "cause, expected_text",
    [
        (make_unpicklable_error(), "ValueError: ('holds a lock', <unlocked"),
        (Demanding("shop", "closed"), "Demanding: shop: closed"),
        (Becoming("odd"), "Becoming: odd"),
    ],
    ids=["cannot leave", "cannot arrive", "arrives as something else"],
)
def test_a_cause_that_cannot_be_pickled_arrives_as_its_description(cause, expected_text):
    error = ErgonError("top", code="t")
    error.__cause__ = cause
    restored = round_trip(error)
    assert (str(restored), restored.code) == ("top", "t")
    assert type(restored.__cause__) is ErgonError
    assert str(restored.__cause__).startswith(expected_text)


def test_a_cause_without_a_readable_message_does_not_block_its_error():
    error = ErgonError("top")
    error.__cause__ = Mute(threading.Lock())
    assert str(round_trip(error).__cause__) == "Mute: Mute with an unreadable message"


def test_pickling_an_error_does_not_change_it():
    error = ErgonError("top")
    error.__cause__ = cause = make_unpicklable_error()
    round_trip(error)
    assert error.__cause__ is cause


def test_the_text_of_an_error_is_its_message():
    assert error_message(ValueError("broken")) == "broken"


# -- extras ---------------------------------------------------------------------------------------


def test_an_installed_module_is_returned():
    assert require_extra("anything", "json") is json


def test_a_missing_module_names_the_extra_to_install():
    with pytest.raises(MissingExtraError) as caught:
        require_extra("rabbitmq", "no_such_module_anywhere")
    assert str(caught.value) == (
        "'no_such_module_anywhere' is not installed; run: pip install 'ergon-framework[rabbitmq]'"
    )
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


# -- validation errors ----------------------------------------------------------------------------


class Order(BaseModel):
    total: int


def make_validation_error(value="secret-value"):
    with pytest.raises(ValidationError) as caught:
        Order.model_validate({"total": value})
    return caught.value


@pytest.mark.spec("DX-18")
def test_the_text_of_a_validation_error_has_locations_and_types_and_no_value():
    error = make_validation_error()
    expected = "1 validation error for Order: total: int_parsing"
    assert error_message(error) == expected
    assert error_message(error, values=True) == str(error)
    assert error_message(RuntimeError(error)) == expected
    chained = RuntimeError(f"bad: {error}")
    chained.__cause__ = KeyError("k")
    chained.__cause__.__context__ = error
    assert error_message(chained) == f"bad: {expected}"
    wrapped = ErgonError(error_message(chained))
    wrapped.__cause__ = chained
    assert error_message(wrapped, values=True) == f"bad: {error}"


@pytest.mark.spec("DX-18")
def test_many_faults_are_counted_and_the_value_itself_has_a_name():
    with pytest.raises(ValidationError) as many:
        TypeAdapter(list[int]).validate_python(["secret-value"] * 30)
    assert error_message(many.value).startswith("30 validation errors for list[int]: 0: int_parsing; 1: int_parsing")
    assert error_message(many.value).endswith("; and 20 more")
    with pytest.raises(ValidationError) as bare:
        TypeAdapter(int).validate_python("secret-value")
    assert error_message(bare.value) == "1 validation error for int: value: int_parsing"


@pytest.mark.spec("DX-18")
def test_a_cycle_of_errors_has_a_text():
    first, second = KeyError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    assert error_message(first) == "'a'"
