"""The one failure record."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ergon_framework.errors import Category
from ergon_framework.failure import MAX_MESSAGE_CHARS, Attempt, Failure, describe_error


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


REQUIRED_FIELDS = {
    "task_name": "charge",
    "reason_code": "declined",
    "error_type": "BusinessError",
    "attempts": 1,
    "occurred_at": 1.0,
    "transaction_id": "order-7",
    "category": Category.BUSINESS,
}
PROVIDER_FIELDS = {
    "tenant_id",
    "campaign_id",
    "task_name",
    "provider_name",
    "capability",
    "operation",
    "idempotency_key",
    "correlation_id",
    "reason_code",
    "error_type",
    "error_message",
    "attempts",
    "occurred_at",
}


def test_the_record_holds_the_thirteen_fields_of_a_provider_and_more():
    assert set(Failure.model_fields) > PROVIDER_FIELDS
    assert len(PROVIDER_FIELDS) == 13


def test_a_record_survives_being_written_and_read():
    attempt = Attempt(attempt=0, category=Category.SYSTEM, code="busy", error="busy", at=0.5, delay=1.0)
    failure = Failure(**REQUIRED_FIELDS, history=(attempt,), succeeded_steps=("process",), detail={"queue": "orders"})
    assert Failure.model_validate_json(failure.model_dump_json()) == failure


def test_a_reader_ignores_fields_of_a_newer_writer():
    assert Failure.model_validate(REQUIRED_FIELDS | {"invented_later": 1}) == Failure(**REQUIRED_FIELDS)
    assert Attempt.model_validate({"attempt": 0, "category": "SYSTEM", "invented_later": 1}).attempt == 0


@pytest.mark.parametrize("missing", REQUIRED_FIELDS)
def test_every_required_field_must_be_given(missing):
    with pytest.raises(ValidationError, match=missing):
        Failure(**{name: value for name, value in REQUIRED_FIELDS.items() if name != missing})


def test_a_record_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Failure(**REQUIRED_FIELDS).attempts = 2
    with pytest.raises(ValidationError, match="frozen"):
        Attempt(attempt=0, category=Category.SYSTEM).attempt = 2


def test_attempts_below_zero_are_rejected():
    with pytest.raises(ValidationError, match="attempts"):
        Failure(**REQUIRED_FIELDS | {"attempts": -1})


def test_records_do_not_share_their_details():
    one, other = Failure(**REQUIRED_FIELDS), Failure(**REQUIRED_FIELDS)
    one.detail["x"] = 1
    assert other.detail == {}


# -- describe -------------------------------------------------------------------------------------


def test_an_error_is_described_by_its_message():
    assert describe_error(ValueError("card declined")) == "card declined"


def test_an_error_without_a_message_is_described_by_its_class():
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_an_error_without_a_readable_message_is_still_described():
    assert describe_error(Mute()) == "Mute with an unreadable message"


@pytest.mark.parametrize(
    "length, expected",
    [
        (MAX_MESSAGE_CHARS - 1, MAX_MESSAGE_CHARS - 1),
        (MAX_MESSAGE_CHARS, MAX_MESSAGE_CHARS),
        (MAX_MESSAGE_CHARS + 1, MAX_MESSAGE_CHARS),
    ],
)
def test_a_description_has_at_most_five_hundred_characters(length, expected):
    description = describe_error(ValueError("x" * length))
    assert len(description) == expected <= 500
    assert description.endswith("…") == (length > MAX_MESSAGE_CHARS)


@pytest.mark.parametrize("characters", ["\udce9", "\0", "\ud800" * MAX_MESSAGE_CHARS, "\0" * MAX_MESSAGE_CHARS])
def test_every_description_can_be_stored_in_a_record(characters):
    # File names that are not UTF-8 contain lone surrogates; some stores reject NUL.
    description = describe_error(OSError(f"no such file: {characters}"))
    failure = Failure(**REQUIRED_FIELDS, error_message=description)
    assert Failure.model_validate_json(failure.model_dump_json()).error_message == description
    assert "\0" not in description
    assert description.startswith("no such file: \\")
