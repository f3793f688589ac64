"""Outage log: one event when the server of a queue becomes unavailable, and one when it answers again.

``public_address`` returns the address of a server as logs may show it: without credentials.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

from ergon_framework.errors import ConnectionLostError
from ergon_framework.failure import describe_error
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.redaction import mask_credentials

if TYPE_CHECKING:
    from ergon_framework.connectors.base import AsyncConnector, Connector

log: Final = logging.getLogger(f"{LIBRARY}.connectors")
#: Guards all outage logs of this process.
_lock = threading.Lock()


GetHost: TypeAlias = Callable[[], str | None]


def get_no_host() -> None:
    """Return None, the host of a caller that knows none."""


class OutageLog:
    """Log the outages of one queue of this process once, for all loops and threads that use it; thread-safe.

    A call that began before the last change is ignored: its result says nothing about the time after the change.
    """

    def __init__(self, queue: str, address: str | None) -> None:
        self._fields = {Field.QUEUE: queue, Field.ADDRESS: address}
        self._lost = False
        #: When the connection was last lost or restored, by the monotonic clock.
        self._changed_at = -inf

    def note_failure(self, error: ConnectionLostError, *, began: float, get_host: GetHost = get_no_host) -> None:
        """Record that a call that began at *began*, a time of the monotonic clock, has lost its connection.

        *get_host* returns the host and port of that server, if it is known.
        """
        with _lock:
            if self._lost or began < self._changed_at:
                return
            self._lost, self._changed_at = True, time.monotonic()
        cause = {Field.ERROR: mask_credentials(describe_error(error)), Field.ERROR_TYPE: type(error).__name__}
        logs.log_event(logging.WARNING, Event.CONNECTION_LOST, self._fields | _host_field(get_host()) | cause, to=log)

    def note_answer(self, *, began: float, get_host: GetHost = get_no_host) -> None:
        """Record that the server has answered a call that began at *began*; *get_host* as in ``note_failure``."""
        with _lock:
            if not self._lost or began < self._changed_at:
                return
            now = time.monotonic()
            seconds, self._lost, self._changed_at = now - self._changed_at, False, now
        fields = self._fields | _host_field(get_host()) | {Field.SECONDS: round(seconds, 3)}
        logs.log_event(logging.INFO, Event.CONNECTION_RESTORED, fields, to=log)


def _host_field(host: str | None) -> dict[str, str]:
    return {} if host is None else {Field.HOST: host}


class ConnectorOutage:
    """The outage log of the queue of *connector*, with the host of its newest connection in each event."""

    def __init__(self, connector: Connector | AsyncConnector) -> None:
        self._connector = connector
        self._log = outage_log(connector.name, connector.server_address)

    def note_failure(self, error: ConnectionLostError, *, began: float) -> None:
        self._log.note_failure(error, began=began, get_host=self._get_host)

    def note_answer(self, *, began: float) -> None:
        self._log.note_answer(began=began, get_host=self._get_host)

    def _get_host(self) -> str | None:
        return self._connector.server_host


_outages: Final[dict[tuple[str, str | None], OutageLog]] = {}


def outage_log(queue: str, address: str | None) -> OutageLog:
    """Return the log of *queue* at *address*: one per queue in this process."""
    with _lock:
        return _outages.setdefault((queue, address), OutageLog(queue, address))


def public_address(url: str | None, *, scheme: str = "") -> str | None:
    """Return *url*, which may name several hosts, without credentials and options; None if it is missing or invalid.

    *scheme* is the default for an address without one.

    >>> public_address("redis+sentinel://app:pw@one:26379,two:26379/orders/0?socket_timeout=2")
    'redis+sentinel://one:26379,two:26379/orders/0'
    """
    if not url:
        return None
    try:
        parts = urlsplit(url if "://" in url else f"{scheme}://{url}")
        netloc = parts.netloc.rpartition("@")[2]
        # A password with an unescaped slash ends up in the path, and a comma before it separates no hosts.
        is_split = "@" in parts.path
        hosts = ",".join(map(_public_host, [netloc] if is_split else netloc.split(",")))
    except ValueError:
        return None
    path = "" if is_split else parts.path
    return f"{parts.scheme}://{hosts}{path}"


def _public_host(netloc: str) -> str:
    """Return host and port of *netloc*; ValueError for a port that is none, which may be a part of a password."""
    parts = urlsplit(f"//{netloc}")
    port = "" if parts.port is None else f":{parts.port}"
    return f"{f'[{parts.hostname}]' if ':' in (parts.hostname or '') else parts.hostname or ''}{port}"


def _reset_after_fork() -> None:
    """Clear outages in a forked child, which opens its own connections; the parent may have held the lock."""
    global _lock  # noqa: PLW0603 - a lock that another process holds cannot be released
    _lock = threading.Lock()
    _outages.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
