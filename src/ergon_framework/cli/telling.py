"""Explanation of an error that ends a command."""

from __future__ import annotations

from ergon_framework.errors import ConnectionLostError, ErgonError, error_message


def explain_error(error: ErgonError) -> str:
    """Return the message of *error*; for an unavailable server it adds the command that names the setting."""
    message = error_message(error)
    return (
        f"{message} -- to see which setting names it, and what to do: ergon doctor"
        if _is_unreachable(error)
        else message
    )


def _is_unreachable(error: ErgonError) -> bool:
    return isinstance(error, ConnectionLostError) and "ergon " not in error_message(error)
