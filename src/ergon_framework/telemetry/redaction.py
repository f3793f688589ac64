"""Redaction: user data is recorded only after it has passed a hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ergon_framework.failure import MAX_MESSAGE_CHARS, describe_error
from ergon_framework.redaction import HIDDEN, is_secret_name
from ergon_framework.redaction import redact_text as mask_credentials

__all__ = ["HIDDEN", "Redact", "is_secret_name", "mask_credentials", "redact", "redacted_message", "redacted_repr"]

#: Receives the key under which a value would be recorded, and the value; returns what may be recorded of it.
Redact: TypeAlias = Callable[[str, Any], Any]


def redact(key: str, value: Any) -> Any:
    """Hide values with a secret's name, in mappings at any depth and in text; the default hook."""
    if is_secret_name(key):
        return HIDDEN
    if isinstance(value, str):
        return mask_credentials(value)
    if isinstance(value, Mapping):
        return {str(name): redact(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(key, item) for item in value]
    return value


def redacted_repr(hook: Redact, key: str, value: Any) -> str:
    """Return what may be recorded of *value*, as short text. A hook that raises hides everything."""
    try:
        redacted = hook(key, _to_readable(value))
        return _shorten(redacted if isinstance(redacted, str) else mask_credentials(repr(redacted)))
    except Exception:  # noqa: BLE001 - the hook is third-party code; in doubt nothing is recorded
        return HIDDEN


def redacted_message(hook: Redact, key: str, error: BaseException, *, values: bool = False) -> str:
    """Return what may be recorded of an error's message: at most 500 characters; *values* as for ``describe_error``."""
    text = describe_error(error, values=values)
    # The default hook would apply the same rules again.
    return text if hook is redact else redacted_repr(hook, key, text)


def _to_readable(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes | bytearray) else value


def _shorten(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"
