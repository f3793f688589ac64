"""ConnectorUnderTest: the adapter through which the conformance suite uses a connector and injects faults.

A claim is a client's exclusive right to a fetched message until it is settled (acked, deferred, released or
dead-lettered); a claim with a lease expires unless it is renewed. An inbox is a connector's record of processed ids, an
outbox dispatches messages within a database transaction of the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from ergon_framework.testing.conformance.check import Check

#: The durability of the server's settings is unknown.
UNKNOWN_DURABILITY: Final = object()


class Server(Protocol):
    """The broker's process and its network. Every method blocks until it is done, and may be called twice."""

    def stop(self) -> None:
        """Stop the server cleanly."""

    def kill(self) -> None:
        """Kill the server immediately, as SIGKILL does."""

    def start(self) -> None:
        """Start the server with its data, and wait until it answers."""

    def partition_network(self) -> None:
        """Drop every packet to and from the server; connections stay open."""

    def heal_network(self) -> None:
        """Undo ``partition_network``."""


class Outbox(Protocol):
    """An open transaction of the caller's database that also dispatches messages."""

    def dispatch(self, transactions: Sequence[Transaction]) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class ConnectorUnderTest(ABC):
    """A connector under test; only ``client`` is required, the rest has defaults.

    The suite skips checks of features that are missing, and reports them as not applicable.
    """

    #: The broker's process, if the suite may stop, kill and disconnect it.
    server: Server | None = None
    #: The supported faults of the server.
    faults: Sequence[str] = ("stop", "kill", "partition_network")
    #: Whether transactions are encoded to bytes, so that some cannot be sent.
    encodes: bool = True
    #: Whether ``receive`` is supported.
    receives: bool = False
    #: Seconds within which every call must return, also while the connection is lost.
    call_timeout: float = 20.0
    #: Seconds within which an expected delivery must arrive.
    arrival: float = 15.0
    #: Lease in seconds for checks with outages: a short outage should not end it.
    outage_lease: float = 3.0
    #: The expected value of ``capabilities.durable`` for the server's setup.
    durable: Any = UNKNOWN_DURABILITY
    #: Further checks, only for this connector.
    checks: Sequence[Check] = ()

    @abstractmethod
    def client(self, queue: str, *, lease: float) -> Connector | AsyncConnector:
        """Create a new client of *queue*, as another process would; it is not open yet.

        All clients of one queue compete for its messages. The queue is empty when its name is used
        for the first time; *lease* is the same for all of its clients.
        """

    def crash(self, client: Connector | AsyncConnector) -> None:  # noqa: B027 - optional
        """Make *client* stop as if its process had been killed: it settles, renews and closes nothing.

        A client without background activity needs no action. The suite later asks a crashed client once
        to settle its claims, and closes it at the end.
        """

    def receive(self, queue: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Put a message of a third-party producer into *queue*, bypassing the connector."""
        raise NotImplementedError

    def inbox(self, task: Any) -> Any | None:  # noqa: ARG002
        """Return the consumer *task* with the inbox enabled, or None if this is not supported."""
        return None

    def outbox(self, queue: str) -> AbstractContextManager[Outbox] | None:  # noqa: ARG002
        """Open a transaction of the caller's database that dispatches to *queue*; return None if not supported."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Release all resources after the suite."""
