"""Failures: what an error of the client means to whoever asked, told without quoting what was sent."""

from __future__ import annotations

from typing import Final

from redis import exceptions

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError

#: Longest part of the server's own words that is passed on.
_LONGEST: Final = 200
MEMORY_FULL: Final = "the server's memory is full and it takes nothing more; consume what is there or raise maxmemory"
_REFUSED: Final = ("NOAUTH", "WRONGPASS", "NOPERM")
#: The first word of what a server answers that is there but cannot serve: it starts, fails over, or moves a slot.
_AWAY: Final = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED", "NOREPLICAS")
#: The same where the client has a class for it, and has taken that word away.
_UNREACHED: Final = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError, OSError)


def translated(error: Exception) -> ErgonError:
    """*error* in our words."""
    words = str(error)[:_LONGEST]
    first = words.partition(" ")[0]
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError) or first in _REFUSED:
        return ConfigurationError(f"the server refuses: {words}; check the user, the password and its rights")
    if away := _away(error, words, first):
        return ConnectionLost(away)
    if first == "WRONGTYPE":
        return ConfigurationError(f"a key of the queue holds something else: {words}; choose another name")
    return ConnectorError(f"the server answered with {type(error).__name__}: {words}")


def _away(error: Exception, words: str, first: str) -> str:
    """Why the server cannot be asked now; empty where it can."""
    if isinstance(error, exceptions.ReadOnlyError) or first == "READONLY":
        return "the server is a replica and takes no writes; it may become the primary, else give the primary's address"
    if isinstance(error, exceptions.AskError | exceptions.TryAgainError):
        return "the cluster is moving the queue to another node; ask again"
    if isinstance(error, exceptions.OutOfMemoryError) or first == "OOM":
        return MEMORY_FULL
    if first == "MISCONF":
        return f"the server cannot write to its disk, which may be full, and takes no writes: {words}"
    if isinstance(error, _UNREACHED) or first in _AWAY:
        return f"the server is out of reach: {words}"
    return ""
