"""The facts service: a boundary served over gRPC with mutual TLS, and its clients.

A fact is a statement about a subject that one zone (a site or network) sends to another. A boundary stores the facts
between zones, with their artifacts, which are files. Clients of the service have the same methods as a local boundary.
"""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.facts.service.channel import ServiceAddress
    from ergon_framework.facts.service.client import BoundaryClient
    from ergon_framework.facts.service.client_async import AsyncBoundaryClient
    from ergon_framework.facts.service.tls import TlsFiles
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "channel": ("ServiceAddress",),
            "client": ("BoundaryClient",),
            "client_async": ("AsyncBoundaryClient",),
            "tls": ("TlsFiles",),
        },
        extras={
            "channel": ("grpc", "grpc"),
            "client": ("grpc", "grpc"),
            "client_async": ("grpc", "grpc"),
            "tls": ("grpc", "grpc"),
        },
    )

__all__ = [
    "AsyncBoundaryClient",
    "BoundaryClient",
    "ServiceAddress",
    "TlsFiles",
]
