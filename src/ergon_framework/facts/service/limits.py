"""Limits: what one caller, one connection and all of them together may use of a facts service."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass, replace
from typing import Any, Final

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.service.access import MAX_READERS
from ergon_framework.facts.service.requests import MESSAGE
from ergon_framework.facts.service.uploads import MAX_UPLOADS
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")

MEBIBYTE: Final = 1024 * 1024
#: Files that the process has open besides connections of callers: its store, artifacts, logs, probes.
OWN_FILES: Final = 768
#: Bytes of metadata that are sent and taken; a fault has to fit.
METADATA: Final = 16 * 1024
#: Bits of the compression algorithms that a connection accepts: none, or those that gRPC has.
_NO_COMPRESSION: Final = 0b001
_COMPRESSION: Final = 0b111


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one caller and all of them together may take; times are in seconds."""

    #: Calls at once, of all callers and those included who only listen; and of one connection.
    calls: int = 1_000
    streams: int = 100
    #: Readers that a zone may have here that is no zone of the store; each holds up retention until it is retired.
    readers: int = MAX_READERS
    #: Artifacts that a zone may upload at the same time.
    uploads: int = MAX_UPLOADS
    #: Calls that end by themselves, and streams, of one identity at once. An identity is the names in a certificate.
    calls_per_identity: int = 200
    streams_per_identity: int = 100
    #: Bytes of the requests of one identity that are being handled.
    bytes_per_identity: int = 64 * MEBIBYTE
    #: Connections at once, of all callers and those included that have shown no certificate yet.
    connections: int = 4_000
    #: Connections of one identity at once, and those of one address that have not shown an identity by a call.
    connections_per_identity: int = 400
    connections_per_address: int = 500
    #: How long a connection may stay open without an identity.
    identification: float = 10.0
    #: How long a handshake may take.
    handshake: float = 5.0
    #: Whether compressed messages are accepted.
    compression: bool = False
    #: How long a call may take, and how long a stream may stand still.
    patience: float = 30.0
    #: After that a connection is replaced, so that a handshake looks at the certificate anew; and how long its calls
    #: may go on after it.
    age: float = 300.0
    age_grace: float = 30.0
    #: How often a silent connection is asked whether somebody is there, and how long for an answer.
    keepalive: float = 20.0
    keepalive_patience: float = 10.0
    #: How often the store is asked whether it is there.
    look: float = 5.0

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
        if self.bytes_per_identity < MESSAGE:
            raise ConfigurationError(
                f"bytes_per_identity of the limits is at least {MESSAGE:,}, the largest request, not "
                f"{self.bytes_per_identity:,}"
            )

    def fitted(self) -> Limits:
        """Return these limits with as many connections as the process may have files open, besides its own.

        The limits of connections of one identity and of one address shrink in the same proportion.
        A process that has no descriptor left accepts no connection at all, so the limit of connections has to be met
        first. The soft limit of the process is raised as far as it may be.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = self.connections + OWN_FILES
        if soft != resource.RLIM_INFINITY and soft < needed:
            soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft == resource.RLIM_INFINITY or soft >= needed:
            return self
        fitting = max(1, soft - OWN_FILES)
        fields = {
            Field.ROOM: "connections",
            Field.LIMIT: fitting,
            Field.REASON: f"the process may open {soft} files; raise its limit to {needed} (ulimit -n, LimitNOFILE)",
        }
        logs.say(logging.WARNING, Event.LIMIT_REACHED, fields, to=log)
        return replace(
            self,
            connections=fitting,
            connections_per_identity=max(1, self.connections_per_identity * fitting // self.connections),
            connections_per_address=max(1, self.connections_per_address * fitting // self.connections),
        )

    def options(self) -> list[tuple[str, Any]]:
        """As gRPC wants to hear them."""
        return [
            ("grpc.max_receive_message_length", MESSAGE),
            ("grpc.max_metadata_size", METADATA),
            ("grpc.absolute_max_metadata_size", METADATA),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.server_handshake_timeout_ms", int(self.handshake * 1000)),
            ("grpc.compression_enabled_algorithms_bitset", _COMPRESSION if self.compression else _NO_COMPRESSION),
            ("grpc.max_connection_age_ms", int(self.age * 1000)),
            ("grpc.max_connection_age_grace_ms", int(self.age_grace * 1000)),
            ("grpc.keepalive_time_ms", int(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_patience * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            # Whoever asks more often than this is sent away.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # Two services on one port would each have half of the callers.
            ("grpc.so_reuseport", 0),
        ]
