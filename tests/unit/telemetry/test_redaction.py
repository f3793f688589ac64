"""Redaction hides values with the name of a secret, and everything when its hook fails."""

from __future__ import annotations

import pytest

from ergon_framework.telemetry.redaction import (
    HIDDEN,
    is_secret_name,
    mask_credentials,
    redact,
    redacted_message,
    redacted_repr,
)


@pytest.mark.spec("CON-26")
@pytest.mark.parametrize(
    "key", ["password", "db_password", "apiKey", "api-key", "ACCESS_TOKEN", "Authorization", "secrets", "user.cookie"]
)
def test_secret_names_are_recognised(key):
    assert is_secret_name(key)


@pytest.mark.parametrize("key", ["author", "compass", "tokens_used_by", "id", "ergon.result.value", "passenger"])
def test_other_names_are_not_secret(key):
    assert is_secret_name(key) == (key == "tokens_used_by")


@pytest.mark.spec("CON-26")
@pytest.mark.parametrize(
    "text, redacted",
    [
        ("amqp://guest:pw@host/x", f"amqp://{HIDDEN}@host/x"),
        ("password=pw next", f"password={HIDDEN} next"),
        ('{"api_key": "pw", "id": 7}', f'{{"api_key": {HIDDEN}, "id": 7}}'),
        ("Order(token='pw', id=7)", f"Order(token={HIDDEN}, id=7)"),
        ("Authorization: Bearer pw", f"Authorization: {HIDDEN}"),
        ("see https://example.org/a", "see https://example.org/a"),
        ("no such customer", "no such customer"),
    ],
)
def test_masking_credentials_is_idempotent(text, redacted):
    assert mask_credentials(text) == redacted
    assert mask_credentials(redacted) == redacted


def test_nested_values_are_redacted_by_their_own_keys():
    value = {"id": 7, "auth": {"user": "u"}, "parts": [{"token": "t", "n": 1}]}
    assert redact("value", value) == {"id": 7, "auth": HIDDEN, "parts": [{"token": HIDDEN, "n": 1}]}


def test_a_value_under_a_secret_key_is_hidden_whatever_it_is():
    assert redact("password", {"a": 1}) == HIDDEN


def test_bytes_are_redacted_as_text():
    assert redacted_repr(redact, "value", b"token=abc") == f"token={HIDDEN}"


def test_a_shown_value_has_at_most_500_characters():
    assert redacted_repr(redact, "value", "x" * 501) == "x" * 499 + "…"
    assert redacted_repr(redact, "value", "x" * 500) == "x" * 500


@pytest.mark.spec("CON-26")
def test_an_error_in_the_hook_hides_everything():
    def hook(key, value):
        raise KeyError(value)

    assert redacted_repr(hook, "value", "payload") == HIDDEN


def test_a_value_that_contains_itself_is_hidden():
    value = []
    value.append(value)
    assert redacted_repr(redact, "value", value) == HIDDEN


@pytest.mark.spec("CON-16")
def test_a_message_has_at_most_500_characters():
    assert len(redacted_message(redact, "key", RuntimeError("é" * 1000))) == 500
