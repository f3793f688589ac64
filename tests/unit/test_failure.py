"""The one failure record."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ergon_framework.errors import Category
from ergon_framework.failure import MESSAGE, Attempt, Failure, describe


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


LEAST = {
    "task_name": "charge",
    "reason_code": "declined",
    "error_type": "BusinessError",
    "attempts": 1,
    "occurred_at": 1.0,
    "transaction_id": "order-7",
    "category": Category.BUSINESS,
}
THIRTEEN = {
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
    assert set(Failure.model_fields) > THIRTEEN
    assert len(THIRTEEN) == 13


def test_a_record_survives_being_written_and_read():
    attempt = Attempt(attempt=0, category=Category.SYSTEM, code="busy", error="busy", at=0.5, delay=1.0)
    failure = Failure(**LEAST, history=(attempt,), succeeded_steps=("process",), detail={"queue": "orders"})
    assert Failure.model_validate_json(failure.model_dump_json()) == failure


def test_a_reader_ignores_what_a_newer_writer_added():
    assert Failure.model_validate(LEAST | {"invented_later": 1}) == Failure(**LEAST)
    assert Attempt.model_validate({"attempt": 0, "category": "SYSTEM", "invented_later": 1}).attempt == 0


@pytest.mark.parametrize("missing", LEAST)
def test_what_every_failure_has_must_be_told(missing):
    with pytest.raises(ValidationError, match=missing):
        Failure(**{name: value for name, value in LEAST.items() if name != missing})


def test_a_record_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Failure(**LEAST).attempts = 2
    with pytest.raises(ValidationError, match="frozen"):
        Attempt(attempt=0, category=Category.SYSTEM).attempt = 2


def test_attempts_below_zero_are_refused():
    with pytest.raises(ValidationError, match="attempts"):
        Failure(**LEAST | {"attempts": -1})


def test_records_do_not_share_their_details():
    one, other = Failure(**LEAST), Failure(**LEAST)
    one.detail["x"] = 1
    assert other.detail == {}


# -- describe -------------------------------------------------------------------------------------


def test_an_error_is_described_by_its_message():
    assert describe(ValueError("card declined")) == "card declined"


def test_an_error_without_a_message_is_described_by_its_class():
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_an_error_that_cannot_speak_is_still_described():
    assert describe(Mute()) == "Mute without a readable message"


@pytest.mark.parametrize("length, kept", [(MESSAGE - 1, MESSAGE - 1), (MESSAGE, MESSAGE), (MESSAGE + 1, MESSAGE)])
def test_a_description_has_at_most_five_hundred_characters(length, kept):
    described = describe(ValueError("x" * length))
    assert len(described) == kept <= 500
    assert described.endswith("…") == (length > MESSAGE)


@pytest.mark.parametrize("odd", ["\udce9", "\0", "\ud800" * MESSAGE, "\0" * MESSAGE])
def test_every_description_can_be_kept_in_a_record(odd):
    # File names that are not UTF-8 bring lone surrogates; some stores refuse NUL.
    described = describe(OSError(f"no such file: {odd}"))
    failure = Failure(**LEAST, error_message=described)
    assert Failure.model_validate_json(failure.model_dump_json()).error_message == described
    assert "\0" not in described
    assert described.startswith("no such file: \\")
