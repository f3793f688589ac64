"""Credentials are read from their files at every call, and no text shows a password."""

from __future__ import annotations

import logging
import traceback

import pytest

from ergon_framework import redaction
from ergon_framework.connectors import Credentials, credentials_from_files
from ergon_framework.connectors.credentials import MAX_FILE_BYTES
from ergon_framework.errors import ConfigurationError
from ergon_framework.redaction import HIDDEN, redact_text


@pytest.fixture(autouse=True)
def no_known_passwords(monkeypatch):
    monkeypatch.setattr(redaction, "_known_passwords", {})
    monkeypatch.setattr(redaction, "_known_passwords_pattern", None)


@pytest.fixture
def password_file(tmp_path):
    return tmp_path / "password"


def test_a_changed_file_is_read_at_the_next_call(password_file, tmp_path):
    user_file = tmp_path / "user"
    password_file.write_text("f1rst-secret\n")
    user_file.write_text("app\n")
    source = credentials_from_files(password_file, str(user_file))
    assert source() == ("app", "f1rst-secret")
    password_file.write_text("s3cond-secret")
    user_file.write_text("app_2")
    assert source() == Credentials("app_2", "s3cond-secret")


def test_without_a_user_file_the_address_names_the_user(password_file):
    password_file.write_text("f1rst-secret")
    assert credentials_from_files(password_file)().user is None


@pytest.mark.parametrize(
    "content, password",
    [("one\n", "one"), ("one\r\n", "one"), ("one\n\n", "one\n"), (" one ", " one "), ("pässwörd", "pässwörd")],
)
def test_only_one_newline_at_the_end_is_not_part_of_the_password(password_file, content, password):
    password_file.write_bytes(content.encode())
    assert credentials_from_files(password_file)().password == password


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (b"tr0ub\0ador", "NUL"),
        (b"tr0ub\xff\xfeador", "not UTF-8"),
        (b"tr0ubador" + bytes(MAX_FILE_BYTES), "longer than 65536 bytes"),
    ],
)
@pytest.mark.spec("SEC-03")
def test_an_invalid_file_is_named_and_its_content_is_not_shown(password_file, content, reason):
    password_file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=reason) as raised:
        credentials_from_files(password_file)()
    assert str(password_file) in str(raised.value)
    assert "tr0ub" not in "".join(traceback.format_exception(raised.value))


def test_a_missing_file_is_named(password_file):
    with pytest.raises(ConfigurationError, match="No such file") as raised:
        credentials_from_files(password_file)()
    assert str(password_file) in str(raised.value)


@pytest.mark.spec("SEC-02", "SEC-03")
def test_a_password_is_hidden_in_every_later_text(caplog):
    credentials = Credentials("app", "Tr0ub4dor")
    logging.getLogger("test").warning("connecting with %r", credentials)
    assert "Tr0ub4dor" not in f"{credentials} {credentials!r} {caplog.text}"
    assert "app" in repr(credentials)
    assert redact_text("the server said Tr0ub4dor!") == f"the server said {HIDDEN}!"
