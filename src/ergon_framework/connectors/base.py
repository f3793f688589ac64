"""The connector contract: the operations of a broker, and a description of its capabilities.

A connector implements the sync variant, the async variant or both. The sync variant has the plain names, the async
variant the same names with ``_async``; ``bridge`` supplies the missing one. Every method may raise
``ConnectionLostError`` when the connection is lost; no method may return an empty result instead.

A fetch claims transactions: a claim is a worker's exclusive right to process a delivered transaction until it settles
it or loses the claim. A claim with a time limit is a lease; a worker that has lost its claim is stale. A dead letter is
a transaction that failed and is kept for an operator.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, Self, TypeAlias, Unpack

from ergon_framework.connectors.audit import audit_methods
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.failure import Attempt, Deferral, Failure
from ergon_framework.redaction import redact_text
from ergon_framework.telemetry.context import with_current_trace
from ergon_framework.transaction import EnvelopeFields, PayloadT, Transaction

if TYPE_CHECKING:  # these records are built from the definitions in this module
    from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, ReplayResult


class ConnectorError(ErgonError):
    """A broker rejected a request or could not execute it."""

    code = "connector"


class UndecodableError(ConnectorError):
    """The bytes of a message cannot be decoded as a transaction; a retry cannot help."""

    final = True
    code = "undecodable"


class MissingKeyError(ConnectorError):
    """A message is encrypted with a key that this process does not have; the message itself may be intact."""

    code = "missing_key"
    #: The id of the missing key.
    key_id: str = ""
    #: The encrypted error texts of history and deferral, as the message carries them; None if it has none.
    errors: str | None = None

    @classmethod
    def for_key(cls, key_id: str) -> Self:
        error = cls(
            f"a message is encrypted with the key {key_id!r}, which this process does not have; add the key to "
            "ERGON_ENCRYPTION__KEYS, restart the process, and replay the message if it is a dead letter"
        )
        error.key_id = key_id
        return error


@dataclass(slots=True)
class Delivery:
    """A transaction and the claim on it. The user sees only the transaction.

    ``receipt`` belongs to the connector: hashable, unique per delivery, opaque to all other code.
    ``deliveries`` counts from 1 and comes from the broker, so that it survives crashes. ``lease_until`` is the end of
    the claim in seconds of the monotonic clock; None if the claim has no time limit. ``error`` is set when the message
    could not be decoded, also for a key that is missing here; the payload is then its bytes, or None if the body is
    too large to be loaded. ``done`` is set when the connector's inbox knows that this transaction succeeded before.
    """

    transaction: Transaction
    receipt: Any
    deliveries: int = 1
    lease_until: float | None = None
    error: UndecodableError | MissingKeyError | None = None
    done: bool = False


# -- settlements: the possible results of a delivery -------------------------------------------


class Settlement:
    """The base class of settlements: the instruction for one delivery."""

    __slots__ = ()


@dataclass(slots=True, frozen=True)
class Ack(Settlement):
    """Acknowledge the delivery: the broker never delivers the transaction again."""


@dataclass(slots=True, frozen=True)
class Defer(Settlement):
    """Redeliver after *delay* seconds; the broker holds the transaction, and the delivery is not counted.

    ``attempts``, ``history`` and ``deferral`` are what the transaction carries from then on.
    """

    delay: float
    attempts: int = 0
    history: tuple[Attempt, ...] = ()
    deferral: Deferral | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.delay < float("inf"):  # also rejects NaN
            raise ValueError(f"a delay must be a finite number of seconds >= 0, not {self.delay!r}")

    @classmethod
    def from_transaction(cls, delay: float, transaction: Transaction) -> Self:
        """Return a settlement that redelivers *transaction* unchanged."""
        return cls(delay, transaction.attempts, transaction.history, transaction.deferral)

    def apply(self, transaction: Transaction) -> Transaction:
        """Return *transaction* as it is redelivered."""
        return transaction.replace(attempts=self.attempts, history=self.history, deferral=self.deferral)


@dataclass(slots=True, frozen=True)
class DeadLetter(Settlement):
    """Dead-letter the transaction with the reason; an operator has to inspect it."""

    reason: str
    failure: Failure | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise TypeError(f"the reason of a dead letter must be a str, not {type(self.reason).__name__}")
        object.__setattr__(self, "reason", redact_text(self.reason))


@dataclass(slots=True, frozen=True)
class Release(Settlement):
    """Release the claim as if it had never been taken: no delivery and no attempt is counted."""


class SettleResult(StrEnum):
    """The result of one settlement."""

    #: The broker has the settlement. Where it does not confirm that it has stored it (``confirms_settlements`` is
    #: false), a crash of the broker right afterwards may deliver the transaction again.
    SETTLED = "settled"
    #: The claim is lost: another worker has, or will have, the transaction.
    LOST = "lost"
    #: The broker rejected this settlement; a retry may help.
    FAILED = "failed"


SettlementRequest: TypeAlias = tuple[Delivery, Settlement]


# -- the connector ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a connector's broker; the conformance suite and the table in the docs are built from it."""

    #: "queue": the broker settles messages one by one; "log": a consumer reads a log from its committed position on.
    mode: Literal["queue", "log"]
    #: Claims can be extended while the work continues.
    renewable: bool
    #: Seconds after which an unrenewed claim ends; None if it ends with the connection.
    lease: float | None
    #: A delivery that ends with Release or Defer is not counted in the delivery count.
    release_uncounted: bool
    #: The broker, not this process, holds delayed transactions. A queue then also accepts transactions that are due
    #: later; a log does not, because it delivers in the order of its records.
    delays: bool
    #: Dead letters are kept here and can be listed, replayed and discarded.
    dead_letters: bool
    #: How the settlement of a stale worker is rejected: by the claim's token, because its channel was closed, by the
    #: generation of its log partition, or only by the worker's own clock.
    fenced_by: Literal["token", "channel", "generation", "clock"]
    #: Acknowledged work survives a power loss; None means unknown, and unknown is not durable.
    durable: bool | None
    #: The queue delivers by priority, then by age; None if that is unknown before the queue is opened.
    priority: bool | None = False
    #: The broker delivers the messages of one ordering key one at a time, in order, to all workers together.
    ordered_by_key: bool = False
    #: An id is accepted once, forever: a second dispatch of it adds nothing.
    deduplicates_ids: bool = False
    #: Bytes of the largest body; None if nothing limits it.
    max_payload: int | None = None
    #: Seconds after which the broker ends a claim of a live worker where claims cannot be renewed; else None.
    deadline: float | None = None
    #: ``settle`` returns when the broker has confirmed that it stored the settlements. If false, it returns when the
    #: broker has received them: a crash of the broker right afterwards may deliver settled transactions again.
    confirms_settlements: bool = True
    #: A dead letter is replayed atomically; otherwise a crash during the replay may leave it in both places.
    atomic_replay: bool = True


@dataclass(frozen=True, slots=True)
class Depth:
    """The number of transactions by state; ``oldest_age`` is in seconds, None when nothing is ready."""

    ready: int
    delayed: int = 0
    in_flight: int = 0
    dead: int = 0
    oldest_age: float | None = None


class Confirmation(NamedTuple):
    """The broker stored the transaction; ``duplicate`` if it had it already. A tuple: one is created per message."""

    transaction_id: str
    duplicate: bool = False
    detail: Mapping[str, Any] = MappingProxyType({})


class Listener(Protocol):
    """A receiver of a connector's signals; both methods are called from any thread and return immediately."""

    def wake(self) -> None:
        """Wake up: a transaction may have arrived."""

    def on_lost(self, receipts: Sequence[Any]) -> None:
        """Handle the loss of the claims with these receipts."""


Unlisten: TypeAlias = Callable[[], None]


class _ConnectorBase(ABC):
    #: The bridge that supplies the missing variant, once it was needed.
    bridged: Any = None
    #: Whether the connector itself writes the audit rows of replays and discards, as PostgreSQL does in the same
    #: database transaction; otherwise the methods of a subclass are wrapped below to write them.
    writes_audit: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Not the two variants below: their own methods for dead letters only raise.
        if cls.__module__ != __name__:
            _check_arguments(cls)
            if not cls.writes_audit:
                audit_methods(cls)

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the queue: the source of its transactions' ids, and a label of metrics."""

    @property
    def server_address(self) -> str | None:
        """The address of the server without credentials; None if it has none or none is configured."""
        return None

    @property
    def server_host(self) -> str | None:
        """Host and port of the server of the newest connection, of several in the address; None if it is unknown."""
        return None

    @property
    def write_refusal(self) -> str | None:
        """Why the server rejects new messages while workers can fetch, such as full memory; None if it accepts them."""
        return None

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    def listen(self, listener: Listener) -> Unlisten:  # noqa: ARG002 - a connector without signals does not use it
        """Notify *listener* of arrivals and lost claims until the returned function is called."""
        return _do_nothing

    def limit_deliveries(self, max_deliveries: int) -> None:  # noqa: B027 - a connector that loads nothing does not use it
        """Set the number of deliveries after which a consumer dead-letters a message: *max_deliveries*.

        A message over that number is fetched without its body where the broker allows that, because the body may have
        ended the earlier processes. Its delivery has the envelope, and a payload of None.
        """

    def prepare(self, transaction: Transaction) -> Transaction:
        """Return *transaction* as it is sent: with this queue as its source, and the current trace.

        A source and a trace that it already has are kept. The source makes ids unique: without it, order number 7 of
        two queues would share every id that is derived from theirs. Raises ConfigurationError for a delay or a priority
        that this connector does not have.
        """
        if transaction.not_before is not None or transaction.priority:
            self._check_options(transaction)
        transaction = with_current_trace(transaction)
        return transaction if transaction.source else transaction.replace(source=self.name)

    def _check_options(self, transaction: Transaction) -> None:
        """Reject a delay or a priority that this connector does not have."""
        capabilities = self.capabilities
        if transaction.compute_delay(time.time()) and not (capabilities.delays and capabilities.mode == "queue"):
            raise ConfigurationError(
                f"the connector of {self.name!r} cannot delay transaction {transaction.id!r}: its broker holds no "
                "messages back; dispatch it without delay, or to a queue whose capabilities.delays is true"
            )
        # None means that the connector knows it once the queue is open, and checks it itself.
        if transaction.priority and capabilities.priority is False:
            raise self._no_priority_error(transaction)

    def _no_priority_error(self, transaction: Transaction) -> ConfigurationError:
        return ConfigurationError(
            f"the connector of {self.name!r} has no priorities, but transaction {transaction.id!r} has priority "
            f"{transaction.priority}; dispatch it without one, use a second queue for urgent work, or PostgreSQL, or "
            "RabbitMQ from version 4.0 on"
        )

    def _prepare_replacement(self, transaction: Transaction) -> Transaction:
        """Return *transaction* as it is sent in place of a dead letter: due at once."""
        return self.prepare(transaction if transaction.not_before is None else transaction.replace(not_before=None))

    def transaction(
        self,
        payload: PayloadT = None,  # type: ignore[assignment] # as in Transaction
        *,
        name: str | None = None,
        delay: float | timedelta | None = None,
        at: float | datetime | None = None,
        **fields: Unpack[EnvelopeFields],
    ) -> Transaction[PayloadT]:
        """Return a new transaction for this queue, created by ``Transaction.new``."""
        fields.setdefault("source", self.name)
        return Transaction.new(payload, name=name, delay=delay, at=at, **fields)

    def _no_dead_letters_error(self) -> ConfigurationError:
        return ConfigurationError(
            f"the connector of {self.name!r} keeps no dead letters that could be listed, replayed or discarded"
        )

    def _no_replacement_error(self) -> ConfigurationError:
        return ConfigurationError(
            f"the connector of {self.name!r} cannot replace a dead letter: it has no replace_dead; discard the dead "
            "letter and dispatch the corrected transaction"
        )


def _do_nothing() -> None: ...


def _check_arguments(connector: type[_ConnectorBase]) -> None:
    """Make the methods that dispatch reject everything but transactions with an error that names ``send``."""
    for name, position in _TRANSACTIONS_POSITION.items():
        method = vars(connector).get(name)
        if method is not None:
            setattr(connector, name, _check_transactions(method, position))


#: The methods that dispatch, and the position of the transactions in their arguments, after the connector itself.
_TRANSACTIONS_POSITION: Final = {"dispatch": 1, "dispatch_async": 1, "dispatch_on": 2, "dispatch_on_async": 2}


def _check_transactions(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def check(*args: Any, **kwargs: Any) -> Any:
        transactions = args[position] if len(args) > position else kwargs.get("transactions", ())
        if isinstance(transactions, Transaction):
            raise TypeError(f"{method.__name__} takes a sequence of transactions: pass [transaction]")
        for transaction in transactions if isinstance(transactions, list | tuple) else ():
            if not isinstance(transaction, Transaction):
                raise TypeError(
                    f"{method.__name__} takes transactions, not {type(transaction).__name__}: send a payload with "
                    "send(payload) of its task, or create a transaction with transaction(payload) of the queue"
                )
        return method(*args, **kwargs)

    return check


def _get_lease_end(delivery: Delivery) -> float:
    return float("inf") if delivery.lease_until is None else delivery.lease_until


class Connector(_ConnectorBase):
    """The sync variant of the contract; it is called from several threads at the same time."""

    @abstractmethod
    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        """Return at most *batch_size* deliveries; with ``wait=seconds`` it may wait that long for the first."""

    @abstractmethod
    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        """Settle several deliveries; return one result each, in order. One failure does not affect the others."""

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        """Renew claims; return the new ``lease_until`` of each, None for a claim that is lost.

        The result for a claim without a time limit is infinity, because None means that the claim is lost.
        """
        return [_get_lease_end(delivery) for delivery in deliveries]

    @abstractmethod
    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Send transactions; return when the broker has confirmed every one of them."""

    def depth(self) -> Depth | None:
        """Return the number of transactions by state; None if the broker cannot report it."""
        return None

    def find_queued(self, ids: Collection[str]) -> Collection[str] | None:  # noqa: ARG002 - for connectors that can tell
        """Return which of these transactions are ready, delayed or in flight; None if the broker cannot report it."""
        return None

    def list_dead(
        self,
        query: DeadLetterQuery,  # noqa: ARG002 - for connectors that keep dead letters
        *,
        after: str | None = None,  # noqa: ARG002 - for connectors that keep dead letters
        limit: int = 100,  # noqa: ARG002 - for connectors that keep dead letters
    ) -> Sequence[DeadLetterRecord]:
        """Return at most *limit* of the dead letters that match *query*, the oldest first.

        With *after*, only those after that handle, whether or not a dead letter with it still exists. This method,
        ``replay_dead`` and ``discard_dead`` also work on a log that was not opened, because opening takes over
        partitions from running workers.
        """
        raise self._no_dead_letters_error()

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:  # noqa: ARG002 - as in list_dead
        """Put dead letters back into their queue: the same id and correlation, with attempts and history reset.

        Returns one result each, in order; one failure does not affect the others. Each move is one atomic operation of
        the broker: after a crash the letter is in exactly one of the two places. Where the broker has no such operation
        (``atomic_replay`` is false), or a log keeps its dead letters in the store of another system, a crash may leave
        it in both, never in neither.
        """
        raise self._no_dead_letters_error()

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:  # noqa: ARG002 - as in list_dead
        """Delete dead letters; return one result each, in order."""
        raise self._no_dead_letters_error()

    def replace_dead(self, handle: str, transaction: Transaction) -> ReplayResult:  # noqa: ARG002 - as in list_dead
        """Dispatch *transaction* in place of the dead letter with *handle*, and remove the dead letter.

        If several callers replace, replay or discard one dead letter at the same time, one of them moves it; the others
        get GONE, and nothing of theirs is sent. A crash during the call has the effects that ``replay_dead`` names.
        """
        raise self._no_replacement_error()

    def open(self) -> None:
        """Connect, and check that the server's objects match the configuration."""

    def close(self) -> None:
        """Disconnect; the broker ends the claims that are still held."""


class AsyncConnector(_ConnectorBase):
    """The async variant of the same contract."""

    @abstractmethod
    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]: ...

    @abstractmethod
    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]: ...

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return [_get_lease_end(delivery) for delivery in deliveries]

    @abstractmethod
    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]: ...

    async def depth_async(self) -> Depth | None:
        return None

    async def find_queued_async(self, ids: Collection[str]) -> Collection[str] | None:  # noqa: ARG002 - as the sync variant
        return None

    async def list_dead_async(
        self,
        query: DeadLetterQuery,  # noqa: ARG002 - as the sync variant
        *,
        after: str | None = None,  # noqa: ARG002 - as the sync variant
        limit: int = 100,  # noqa: ARG002 - as the sync variant
    ) -> Sequence[DeadLetterRecord]:
        raise self._no_dead_letters_error()

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:  # noqa: ARG002 - as the sync variant
        raise self._no_dead_letters_error()

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:  # noqa: ARG002 - as the sync variant
        raise self._no_dead_letters_error()

    async def replace_dead_async(self, handle: str, transaction: Transaction) -> ReplayResult:  # noqa: ARG002 - as the sync variant
        raise self._no_replacement_error()

    async def open_async(self) -> None: ...

    async def close_async(self) -> None: ...
