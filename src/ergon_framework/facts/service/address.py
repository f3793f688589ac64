"""Address: where a service is, by what it is recognised, and how it is spoken to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ergon_framework.facts.service.files import TlsFiles
from ergon_framework.facts.service.limits import METADATA

#: Bytes of the largest answer: facts come in 4 MiB at most, and a survey of many zones may be larger.
ANSWER: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A service; *host* and port as in ``facts.plant-a.example:7443``, and times in seconds."""

    host: str
    files: TlsFiles
    #: The name in its certificate, where that is not the name of the host.
    name: str | None = None
    #: How long a call may take, and how long an upload or a download may stand still.
    deadline: float = 10.0
    #: How long a store may take to make an upload durable that has come whole.
    seal: float = 120.0
    #: How often a silent connection is asked whether somebody is there, and how long for an answer.
    keepalive: float = 20.0
    keepalive_patience: float = 10.0

    def options(self) -> list[tuple[str, Any]]:
        """As gRPC wants to hear them."""
        named = [] if self.name is None else [("grpc.ssl_target_name_override", self.name)]
        return [
            *named,
            ("grpc.max_receive_message_length", ANSWER),
            ("grpc.max_metadata_size", METADATA),
            ("grpc.keepalive_time_ms", int(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_patience * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # A service that was restarted is found again soon; whoever calls decides for how long he tries.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1_000),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            # Two clients of one program may have certificates of two zones: they share no connection.
            ("grpc.use_local_subchannel_pool", 1),
            # Retries are the caller's, who knows what they cost.
            ("grpc.enable_retries", 0),
        ]
