"""Limits of a facts service: what one caller, one connection, one zone and all callers together may use.

A caller is identified by its certificate; a zone is the site or network that a fact comes from or is for.
"""

from __future__ import annotations

import logging
import resource
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.errors import LimitExceeded
from ergon_framework.facts.service.access import MAX_READERS
from ergon_framework.facts.service.requests import MAX_MESSAGE_BYTES
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

#: Maximum concurrent uploads of a zone.
MAX_UPLOADS = 16


class UploadSlots:
    """Counts the uploads of each zone; for one event loop."""

    def __init__(self, limit: int = MAX_UPLOADS) -> None:
        self._limit = limit
        self._uploads: Counter[str] = Counter()

    @contextmanager
    def take(self, zones: Collection[str]) -> Iterator[None]:
        """Count an upload of *zones* until the context exits; raise LimitExceeded if a zone has reached its limit."""
        for zone in zones:
            if self._uploads[zone] >= self._limit:
                raise LimitExceeded(
                    f"zone {zone!r} has {self._uploads[zone]} uploads running, and {self._limit} is the limit; wait "
                    "until one has ended"
                )
        self._uploads.update(zones)
        try:
            yield
        finally:
            self._uploads.subtract(zones)


# -- limits -----------------------------------------------------------------------------------------

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")

MEBIBYTE: Final = 1024 * 1024
#: Open files that the process needs besides connections of callers: its store, artifacts, logs, probes.
RESERVED_FILES: Final = 768
#: Maximum bytes of metadata, sent and received; the error that a failed call returns must fit.
MAX_METADATA_BYTES: Final = 16 * 1024
#: Bits of the compression algorithms that a connection accepts: none, or all that gRPC has.
_NO_COMPRESSION: Final = 0b001
_COMPRESSION: Final = 0b111


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits for one caller and for all callers together; times are in seconds."""

    #: Concurrent calls of all callers, including streams; and concurrent streams of one connection.
    calls: int = 1_000
    streams: int = 100
    #: Readers of a zone to which the store does not belong; each blocks retention until it is retired.
    readers: int = MAX_READERS
    #: Concurrent artifact uploads of a zone.
    uploads: int = MAX_UPLOADS
    #: Concurrent calls with one result, and concurrent streams, of one identity: the names in a certificate.
    calls_per_identity: int = 200
    streams_per_identity: int = 100
    #: Bytes of the requests of one identity that are being handled.
    bytes_per_identity: int = 64 * MEBIBYTE
    #: Concurrent connections of all callers, including those that have shown no certificate yet.
    connections: int = 4_000
    #: Concurrent connections of one identity, and of one address without an identity shown by a call.
    connections_per_identity: int = 400
    connections_per_address: int = 500
    #: Maximum time that a connection may stay open without an identity.
    identification: float = 10.0
    #: Maximum duration of a handshake.
    handshake: float = 5.0
    #: Whether compressed messages are accepted.
    compression: bool = False
    #: Maximum duration of a call, and maximum time without progress of a stream.
    call_timeout: float = 30.0
    #: Age at which a connection is replaced, so that a new handshake checks the certificate again; and the time that
    #: its calls may continue afterwards.
    age: float = 300.0
    age_grace: float = 30.0
    #: Interval of keepalive pings on an idle connection, and the time to wait for an answer.
    keepalive: float = 20.0
    keepalive_timeout: float = 10.0
    #: Interval of the checks whether the store answers.
    check_interval: float = 5.0

    def __post_init__(self) -> None:
        for name in (
            "calls",
            "streams",
            "calls_per_identity",
            "streams_per_identity",
            "connections",
            "connections_per_identity",
            "connections_per_address",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} of the limits is at least 1, not {getattr(self, name)}")
        if self.bytes_per_identity < MAX_MESSAGE_BYTES:
            raise ConfigurationError(
                f"bytes_per_identity of the limits is at least {MAX_MESSAGE_BYTES:,}, the largest request, not "
                f"{self.bytes_per_identity:,}"
            )

    def fit_to_open_files(self) -> Limits:
        """Return these limits, with no more connections than the process may have open files besides its own.

        The limits of connections of one identity and of one address shrink in the same proportion. A process without a
        free descriptor accepts no connection at all, so the limit of connections must be reached first. The soft limit
        of the process is raised as far as allowed.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = self.connections + RESERVED_FILES
        if soft != resource.RLIM_INFINITY and soft < needed:
            soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft == resource.RLIM_INFINITY or soft >= needed:
            return self
        fitting = max(1, soft - RESERVED_FILES)
        fields = {
            Field.CAPACITY: "connections",
            Field.LIMIT: fitting,
            Field.REASON: f"the process may open {soft} files; raise its limit to {needed} (ulimit -n, LimitNOFILE)",
        }
        logs.log_event(logging.WARNING, Event.LIMIT_REACHED, fields, to=log)
        return replace(
            self,
            connections=fitting,
            connections_per_identity=max(1, self.connections_per_identity * fitting // self.connections),
            connections_per_address=max(1, self.connections_per_address * fitting // self.connections),
        )

    def options(self) -> list[tuple[str, Any]]:
        """Return the limits as gRPC server options."""
        return [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.server_handshake_timeout_ms", int(self.handshake * 1000)),
            ("grpc.compression_enabled_algorithms_bitset", _COMPRESSION if self.compression else _NO_COMPRESSION),
            ("grpc.max_connection_age_ms", int(self.age * 1000)),
            ("grpc.max_connection_age_grace_ms", int(self.age_grace * 1000)),
            ("grpc.keepalive_time_ms", int(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            # Connections of clients that ping more often than this are closed.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # Two services on one port would each receive half of the callers.
            ("grpc.so_reuseport", 0),
        ]
