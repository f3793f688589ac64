"""Redaction hides what has a secret's name, and everything when its hook breaks."""

from __future__ import annotations

import pytest

from ergon_framework.telemetry.redaction import HIDDEN, masked, message, redact, secret, shown


@pytest.mark.spec("CON-26")
@pytest.mark.parametrize(
    "key", ["password", "db_password", "apiKey", "api-key", "ACCESS_TOKEN", "Authorization", "secrets", "user.cookie"]
)
def test_names_of_secrets_are_recognised(key):
    assert secret(key)


@pytest.mark.parametrize("key", ["author", "compass", "tokens_used_by", "id", "ergon.result.value", "passenger"])
def test_other_names_are_not(key):
    assert secret(key) == (key == "tokens_used_by")


@pytest.mark.spec("CON-26")
@pytest.mark.parametrize(
    "text, kept",
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
def test_text_loses_its_credentials_and_nothing_the_second_time(text, kept):
    assert masked(text) == kept
    assert masked(kept) == kept


def test_nested_values_are_redacted_by_their_own_keys():
    value = {"id": 7, "auth": {"user": "u"}, "parts": [{"token": "t", "n": 1}]}
    assert redact("value", value) == {"id": 7, "auth": HIDDEN, "parts": [{"token": HIDDEN, "n": 1}]}


def test_a_value_under_a_secret_key_is_hidden_whatever_it_is():
    assert redact("password", {"a": 1}) == HIDDEN


def test_bytes_are_read_as_text():
    assert shown(redact, "value", b"token=abc") == f"token={HIDDEN}"


def test_what_is_shown_is_short():
    assert shown(redact, "value", "x" * 501) == "x" * 499 + "…"
    assert shown(redact, "value", "x" * 500) == "x" * 500


@pytest.mark.spec("CON-26")
def test_a_hook_that_breaks_hides_everything():
    def hook(key, value):
        raise KeyError(value)

    assert shown(hook, "value", "payload") == HIDDEN


def test_a_value_that_contains_itself_is_hidden():
    value = []
    value.append(value)
    assert shown(redact, "value", value) == HIDDEN


@pytest.mark.spec("CON-16")
def test_a_message_has_at_most_500_characters():
    assert len(message(redact, "key", RuntimeError("é" * 1000))) == 500
