"""How an error that ends a command is told to people."""

from __future__ import annotations

from ergon_framework.errors import ConnectionLost, ErgonError, text


def explained(error: ErgonError) -> str:
    """The words of *error*; of a server that was not reached also who says which setting names it, and what to do."""
    words = text(error)
    return f"{words} -- to see which setting names it, and what to do: ergon doctor" if _unreached(error) else words


def _unreached(error: ErgonError) -> bool:
    return isinstance(error, ConnectionLost) and "ergon " not in text(error)
