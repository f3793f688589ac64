"""Redaction: nothing that a user wrote is recorded without having passed a hook."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ergon_framework.failure import MESSAGE, describe

#: What stands in the place of what must not be seen.
HIDDEN: Final = "[hidden]"

#: Gets the key under which a value would be recorded; answers what may be recorded of it.
Redact: TypeAlias = Callable[[str, Any], Any]

_WORDS: Final = (
    r"pass(?:word|wd|phrase|code)?|pwd|secret|token|api[-_ ]?key|access[-_ ]?key|private[-_ ]?key|auth(?:orization)?"
    r"|credentials?|cookie|session[-_ ]?id|signature|dsn"
)
#: A word of its own within a key: "db_password" and "apiToken", but not "compass" or "author".
_SECRET_KEY: Final = re.compile(rf"(?:^|[^a-z])(?:{_WORDS})s?(?:$|[^a-z])", re.IGNORECASE)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_ADDRESS: Final = re.compile(r"(://)[^\s/@]+@")
_BEARER: Final = re.compile(r"\b(bearer|basic)\s+[^\s,;'\"]+", re.IGNORECASE)
_ASSIGNED: Final = re.compile(
    rf"((?:\b|_)(?:{_WORDS})s?[\"']?\s*[=:]\s*)({re.escape(HIDDEN)}|\"[^\"]*\"|'[^']*'|[^\s,;&)}}\]]+)", re.IGNORECASE
)


def redact(key: str, value: Any) -> Any:
    """The default hook: hides what has a secret's name, in mappings at any depth and in text."""
    if secret(key):
        return HIDDEN
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {str(name): redact(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(key, item) for item in value]
    return value


def secret(key: str) -> bool:
    """Whether *key* looks like the name of a secret."""
    return _SECRET_KEY.search(_HUMP.sub("_", key)) is not None


def masked(text: str) -> str:
    """*text* without the credentials of addresses and without what is assigned to a secret's name."""
    text = _IN_ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def shown(hook: Redact, key: str, value: Any) -> str:
    """What may be recorded of *value*, as short text. A hook that breaks hides everything."""
    try:
        kept = hook(key, _readable(value))
        return _short(kept if isinstance(kept, str) else masked(repr(kept)))
    except Exception:  # noqa: BLE001 - the hook is foreign code; when in doubt nothing is shown
        return HIDDEN


def message(hook: Redact, key: str, error: BaseException, *, values: bool = False) -> str:
    """What may be recorded of an error's message: at most 500 characters; *values* as for ``describe``."""
    return shown(hook, key, describe(error, values=values))


def _readable(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes | bytearray) else value


def _short(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MESSAGE else text[: MESSAGE - 1] + "…"
