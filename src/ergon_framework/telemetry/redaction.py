"""Redaction: nothing that a user wrote is recorded without having passed a hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ergon_framework.failure import MESSAGE, describe
from ergon_framework.redaction import HIDDEN
from ergon_framework.redaction import is_secret_name as secret
from ergon_framework.redaction import redact_text as masked

__all__ = ["HIDDEN", "Redact", "masked", "message", "redact", "secret", "shown"]

#: Gets the key under which a value would be recorded; answers what may be recorded of it.
Redact: TypeAlias = Callable[[str, Any], Any]


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


def shown(hook: Redact, key: str, value: Any) -> str:
    """What may be recorded of *value*, as short text. A hook that breaks hides everything."""
    try:
        kept = hook(key, _readable(value))
        return _short(kept if isinstance(kept, str) else masked(repr(kept)))
    except Exception:  # noqa: BLE001 - the hook is foreign code; when in doubt nothing is shown
        return HIDDEN


def message(hook: Redact, key: str, error: BaseException, *, values: bool = False) -> str:
    """What may be recorded of an error's message: at most 500 characters; *values* as for ``describe``."""
    told = describe(error, values=values)
    # The default hook would apply the same rules again.
    return told if hook is redact else shown(hook, key, told)


def _readable(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes | bytearray) else value


def _short(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MESSAGE else text[: MESSAGE - 1] + "…"
