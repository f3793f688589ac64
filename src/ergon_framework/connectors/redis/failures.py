"""Translate errors of the client into errors of the framework, without quoting what was sent."""

from __future__ import annotations

from typing import Final

from redis import exceptions

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError

#: Longest part of the server's message that is passed on.
_MAX_MESSAGE_CHARS: Final = 200
MEMORY_FULL: Final = "the server's memory is full and it takes nothing more; consume what is there or raise maxmemory"
_REJECTED_CODES: Final = ("NOAUTH", "WRONGPASS", "NOPERM")
#: Error codes of a reachable server that cannot serve: it starts, fails over, or moves a slot.
_UNAVAILABLE_CODES: Final = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED", "NOREPLICAS")
#: The same errors where the client has a class for them, and has removed the code.
_UNAVAILABLE_ERRORS: Final = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError, OSError)


def translate_error(error: Exception) -> ErgonError:
    """Translate *error* into an error of the framework."""
    message = str(error)[:_MAX_MESSAGE_CHARS]
    code = message.partition(" ")[0]
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError) or code in _REJECTED_CODES:
        return ConfigurationError(f"the server refuses: {message}; check the user, the password and its rights")
    if reason := _describe_outage(error, message, code):
        return ConnectionLostError(reason)
    if code == "WRONGTYPE":
        return ConfigurationError(f"a key of the queue holds something else: {message}; choose another name")
    return ConnectorError(f"the server answered with {type(error).__name__}: {message}")


def _describe_outage(error: Exception, message: str, code: str) -> str:
    """Return why the server is unavailable; empty if it is not."""
    if isinstance(error, exceptions.ReadOnlyError) or code == "READONLY":
        return "the server is a replica and takes no writes; it may become the primary, else give the primary's address"
    if isinstance(error, exceptions.AskError | exceptions.TryAgainError):
        return "the cluster is moving the queue to another node; ask again"
    if isinstance(error, exceptions.OutOfMemoryError) or code == "OOM":
        return MEMORY_FULL
    if code == "MISCONF":
        return f"the server cannot write to its disk, which may be full, and takes no writes: {message}"
    if isinstance(error, _UNAVAILABLE_ERRORS) or code in _UNAVAILABLE_CODES:
        return f"the server is out of reach: {message}"
    return ""
