"""Credentials that change while a process runs: a connector calls their source before every new connection.

A connection that was authenticated with earlier credentials stays usable. ``Credentials`` learns its password, so that
redaction hides it in all texts of this process, and its repr does not show it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeAlias

from ergon_framework.errors import ConfigurationError
from ergon_framework.redaction import learn_password

#: A password, also a long token, is shorter; a longer file is not one.
MAX_FILE_BYTES: Final = 64 * 1024


class _Login(NamedTuple):
    user: str | None
    password: str


class Credentials(_Login):
    """A user and a password; without a user, the one in the address is used."""

    __slots__ = ()

    def __new__(cls, user: str | None, password: str) -> Self:
        """Create credentials, and hide *password* in all later texts of this process."""
        learn_password(password)
        return super().__new__(cls, user, password)

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, password='[hidden]')"


#: Called before every new connection, by any thread; it may block, so it reads a file rather than a remote service.
CredentialsSource: TypeAlias = Callable[[], Credentials]


def credentials_from_files(
    password_file: str | os.PathLike[str], user_file: str | os.PathLike[str] | None = None
) -> CredentialsSource:
    """Return a source that reads *password_file*, and *user_file* if given, at every call.

    One newline at the end of a file is not part of its value. The source raises ConfigurationError, which names the
    file, if it cannot be read, is empty, is not UTF-8, or is longer than 64 KiB.
    """

    def read() -> Credentials:
        user = None if user_file is None else _read_file(Path(user_file), "user")
        return Credentials(user, _read_file(Path(password_file), "password"))

    return read


def _read_file(path: Path, kind: str) -> str:
    """Return the text of *path*; its content appears in no error."""
    problem = f"{kind} file {str(path)!r}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"{problem} cannot be read: {error.strerror or type(error).__name__}; check the path and its permissions"
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(
            f"{problem} is invalid: it is longer than {MAX_FILE_BYTES} bytes; write the {kind} only"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{problem} is invalid: it is not UTF-8; write the {kind} as text") from None
    text = text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")
    if not text or "\0" in text:
        reason = "it contains a NUL character" if text else "it is empty"
        raise ConfigurationError(f"{problem} is invalid: {reason}; write the {kind} into it")
    return text
