"""Check for the optional libraries of the service and its clients."""

from __future__ import annotations

from ergon_framework.errors import require_extra


def require_grpc() -> None:
    """Raise an error that names the missing extra, before a later import fails."""
    require_extra("grpc", "grpc")
    require_extra("grpc", "grpc_health")
    require_extra("grpc", "google.protobuf")
    require_extra("grpc", "cryptography")
