"""ServiceAddress: the location, credentials and timeouts of a remote service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ergon_framework.facts.service.files import TlsFiles
from ergon_framework.facts.service.limits import MAX_METADATA_BYTES

#: Maximum bytes of an answer: facts have at most 4 MiB, and the list of logs of many zones may be larger.
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """A service; *host* includes the port, as in ``facts.plant-a.example:7443``, and times are in seconds."""

    host: str
    files: TlsFiles
    #: The name in its certificate, if it is not the name of the host.
    name: str | None = None
    #: Maximum duration of a call, and maximum time without progress of an upload or download.
    deadline: float = 10.0
    #: Maximum time in which a store makes a completely received upload durable.
    commit_timeout: float = 120.0
    #: Interval of keepalive pings on an idle connection, and the time to wait for an answer.
    keepalive: float = 20.0
    keepalive_timeout: float = 10.0

    def options(self) -> list[tuple[str, Any]]:
        """Return the gRPC channel options."""
        name_options = [] if self.name is None else [("grpc.ssl_target_name_override", self.name)]
        return [
            *name_options,
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.keepalive_time_ms", int(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # Reconnect soon after a service restart; the caller decides how long it retries.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1_000),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            # Two clients of one program may have certificates of two zones, so they must not share a connection.
            ("grpc.use_local_subchannel_pool", 1),
            # The caller retries, because only the caller knows the cost of a retry.
            ("grpc.enable_retries", 0),
        ]
