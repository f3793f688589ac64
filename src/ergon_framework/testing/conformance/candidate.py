"""Candidate: what a connector's author tells the exam, so that it can treat his broker well and badly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from ergon_framework.testing.conformance.check import Check

#: A candidate that does not know what its server's settings are worth.
UNSAID: Final = object()


class Server(Protocol):
    """The broker's process and the line to it. Every method blocks until it is done, and may be called twice."""

    def stop(self) -> None:
        """End it in good order."""

    def kill(self) -> None:
        """End it at once, as SIGKILL does."""

    def start(self) -> None:
        """Have it running and answering, with what it had."""

    def cut(self) -> None:
        """Lose every packet to and from it; connections stay open."""

    def mend(self) -> None:
        """Undo ``cut``."""


class Outbox(Protocol):
    """An open transaction of the caller's database, and dispatching on it."""

    def dispatch(self, transactions: Sequence[Transaction]) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class Candidate(ABC):
    """A connector that takes the exam; only ``client`` must be written, the rest has defaults.

    What is not offered is not examined, and the marks say so.
    """

    #: The broker's process, if the exam may stop, kill and cut it off.
    server: Server | None = None
    #: Which of the server's faults there are.
    faults: Sequence[str] = ("stop", "kill", "cut")
    #: Whether transactions become bytes on their way, so that some cannot be sent.
    encodes: bool = True
    #: Whether ``receive`` works.
    receives: bool = False
    #: Seconds within which every call must come back, with the line down too.
    patience: float = 20.0
    #: Seconds within which what must come has come.
    arrival: float = 15.0
    #: Seconds for which claims hold in the checks that take the server away: a short outage should not end them.
    outage_lease: float = 3.0
    #: What ``capabilities.durable`` must say of the server as it is set up here.
    durable: Any = UNSAID
    #: Further checks, of this candidate alone.
    checks: Sequence[Check] = ()

    @abstractmethod
    def client(self, queue: str, *, lease: float) -> Connector | AsyncConnector:
        """A new client of *queue*, as another process would have it, not yet opened.

        All clients of one queue compete for what is in it. The queue is empty when its name is
        used for the first time; *lease* is the same for all of its clients.
        """

    def crash(self, client: Connector | AsyncConnector) -> None:  # noqa: B027 - most have nothing to do
        """Have *client* fall silent as if its process had been killed: nothing is settled, renewed or closed.

        Nothing has to be done for a client that does nothing by itself. The exam asks a crashed
        client once more to settle what it held, and closes it in the end.
        """

    def receive(self, queue: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Put a message of some other producer into *queue*, past the connector."""
        raise NotImplementedError

    def dispatch_urgent(self, client: Connector | AsyncConnector, transaction: Transaction) -> bool:  # noqa: ARG002
        """Dispatch *transaction* with a higher priority than others have; False if nobody knows how."""
        return False

    def inbox(self, task: Any) -> Any | None:  # noqa: ARG002
        """*task*, a consumer, with the inbox switched on; None where there is none."""
        return None

    def outbox(self, queue: str) -> AbstractContextManager[Outbox] | None:  # noqa: ARG002
        """A transaction of the caller's own database in which he dispatches to *queue*; None where there is none."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """The exam is over."""
