"""The contract of a connector: what a broker must be able to do, and a record of how it does it.

A connector is written in one flavour or in both. The sync flavour has the plain names, the async
flavour the same names with ``_async``; ``bridge`` supplies the missing one. Every method may
raise ``ConnectionLost`` when the line is down; no method may answer "nothing there" instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeAlias

from ergon_framework.connectors.audit import leave_rows
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.failure import Attempt, Deferral, Failure
from ergon_framework.redaction import redact_text
from ergon_framework.telemetry.context import carried
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:  # its records are made of what is defined here
    from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, ReplayResult


class ConnectorError(ErgonError):
    """A broker refused or could not do what it was asked."""

    code = "connector"


class UndecodableError(ConnectorError):
    """The bytes of a message cannot be read as a transaction; trying again cannot help."""

    final = True
    code = "undecodable"


class MissingKeyError(ConnectorError):
    """A message is encrypted with a key that this process does not have; the message itself may be intact."""

    code = "missing_key"
    #: The id of the key.
    key_id: str = ""
    #: The texts of the errors in history and deferral as the message has them, encrypted; None if it has none.
    errors: str | None = None

    @classmethod
    def of(cls, key_id: str) -> Self:
        error = cls(
            f"a message is encrypted with the key {key_id!r}, which this process does not have; add the key to "
            "ERGON_ENCRYPTION__KEYS, restart the process, and replay the message if it is a dead letter"
        )
        error.key_id = key_id
        return error


@dataclass(slots=True)
class Delivery:
    """A transaction and the claim on it. The user sees only the transaction.

    ``receipt`` is the connector's own: hashable, unique per delivery, opaque to everybody else.
    ``deliveries`` counts from 1 and is the broker's, so that it survives crashes. ``lease_until``
    is when the claim ends, in seconds of the monotonic clock; None where it does not end by
    itself. ``error`` is set when the message could not be decoded, or not without a key that is missing here; the
    payload is then its bytes, or None where the body is too large to be loaded.
    ``done`` is set when the connector's inbox knows that this transaction has succeeded before.
    """

    transaction: Transaction
    receipt: Any
    deliveries: int = 1
    lease_until: float | None = None
    error: UndecodableError | MissingKeyError | None = None
    done: bool = False


# -- settlements: what may become of a delivery -----------------------------------------------


class Settlement:
    """What is to become of a delivery."""

    __slots__ = ()


@dataclass(slots=True, frozen=True)
class Ack(Settlement):
    """It is done; never deliver it again."""


@dataclass(slots=True, frozen=True)
class Later(Settlement):
    """Deliver it again after *delay* seconds, held by the broker; it costs no delivery.

    ``attempts``, ``history`` and ``deferral`` are what the transaction carries from then on.
    """

    delay: float
    attempts: int = 0
    history: tuple[Attempt, ...] = ()
    deferral: Deferral | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.delay < float("inf"):  # also refuses NaN
            raise ValueError(f"a delay must be a finite number of seconds >= 0, not {self.delay!r}")

    @classmethod
    def unchanged(cls, delay: float, transaction: Transaction) -> Self:
        """Return a settlement that brings *transaction* back unchanged."""
        return cls(delay, transaction.attempts, transaction.history, transaction.deferral)

    def apply(self, transaction: Transaction) -> Transaction:
        """Return *transaction* as it comes back."""
        return transaction.replace(attempts=self.attempts, history=self.history, deferral=self.deferral)


@dataclass(slots=True, frozen=True)
class DeadLetter(Settlement):
    """Put it aside with the reason; somebody has to look at it."""

    reason: str
    failure: Failure | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise TypeError(f"the reason of a dead letter is a text, not {type(self.reason).__name__}")
        object.__setattr__(self, "reason", redact_text(self.reason))


@dataclass(slots=True, frozen=True)
class Release(Settlement):
    """Give the claim back as if it had never been taken: no delivery and no attempt is counted."""


class SettleResult(StrEnum):
    """What became of one settlement."""

    SETTLED = "settled"
    #: The claim was gone: somebody else has, or will have, the transaction.
    LOST = "lost"
    #: The broker refused this one; asking again may help.
    FAILED = "failed"


Settling: TypeAlias = tuple[Delivery, Settlement]


# -- what a connector is ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a connector's broker can do; the exam reads it, and the docs' table is made of it."""

    mode: Literal["queue", "log"]
    #: Claims can be extended while work goes on.
    renewable: bool
    #: Seconds after which an unrenewed claim ends; None where it ends with the connection.
    lease: float | None
    #: A release, deferral or Later takes the delivery count back.
    release_is_free: bool
    #: Delayed transactions are held by the broker, not in this process.
    delays: bool
    #: Dead letters are kept here, and can be listed, replayed and discarded.
    dead_letters: bool
    #: How a stale worker's settlement is refused.
    fenced_by: Literal["token", "channel", "generation", "clock"]
    #: What was acknowledged survives a power loss; None means unknown, and unknown is not durable.
    durable: bool | None
    priority: bool = False
    ordered_by_key: bool = False
    #: An id is taken once and for ever: dispatching it again adds nothing.
    once_per_id: bool = False
    max_payload: int | None = None
    #: Seconds after which the broker ends a claim although its holder lives, where nobody can renew it; else None.
    deadline: float | None = None
    #: A dead letter is replayed in one step; otherwise a crash in the middle may leave it in both places.
    replays_at_once: bool = True


@dataclass(frozen=True, slots=True)
class Depth:
    """How much is there: ``oldest_age`` is in seconds, None when nothing is ready."""

    ready: int
    delayed: int = 0
    in_flight: int = 0
    dead: int = 0
    oldest_age: float | None = None


class Confirmation(NamedTuple):
    """The broker has the transaction; ``duplicate`` when it had it already. Cheap: one is made for every message."""

    transaction_id: str
    duplicate: bool = False
    detail: Mapping[str, Any] = MappingProxyType({})


class Listener(Protocol):
    """Who wants to know; both methods are called from any thread and return at once."""

    def wake(self) -> None:
        """Something may have arrived."""

    def lost(self, receipts: Sequence[Any]) -> None:
        """These claims are gone."""


Unlisten: TypeAlias = Callable[[], None]


class _Described(ABC):
    #: The other flavour, once somebody asked the bridge for it.
    bridged: Any = None
    #: Whether replays and discards leave audit rows by themselves; a connector that writes its own says True.
    writes_audit: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The two flavours below have no dead letters themselves.
        if cls.__module__ != __name__ and not cls.writes_audit:
            leave_rows(cls)

    @property
    @abstractmethod
    def name(self) -> str:
        """The queue's name: the source of its transactions' ids, and a label of metrics."""

    @property
    def server_address(self) -> str | None:
        """Return the address of the server without credentials; None where there is none, or it is not configured."""
        return None

    @property
    def write_refusal(self) -> str | None:
        """Return why the server takes no new messages although it can be read; None if the latest calls show none."""
        return None

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    def listen(self, listener: Listener) -> Unlisten:  # noqa: ARG002 - a connector without signals has no use for it
        """Tell *listener* about arrivals and lost claims until the returned function is called."""
        return _nothing

    def limit_deliveries(self, most: int) -> None:  # noqa: B027 - a connector that loads nothing has no use for it
        """Note that a consumer dead-letters what was delivered more than *most* times.

        Such a message is fetched without its body where the broker allows that: the body may be what ended the
        processes before. Its delivery has the envelope, and a payload of None.
        """

    def stamped(self, transaction: Transaction) -> Transaction:
        """*transaction* as it is to be sent: with this queue as its source, and the trace that is current here.

        What it has of its own is kept. The source makes ids unique: without it, two queues' orders
        number 7 would share every id that is derived from theirs.
        """
        transaction = carried(transaction)
        return transaction if transaction.source else transaction.replace(source=self.name)

    def transaction(self, payload: Any = None, **fields: Any) -> Transaction:
        """A new transaction for this queue, as ``Transaction.new`` makes it."""
        return Transaction.new(payload, source=self.name, **fields)

    def _keeps_none(self) -> ConfigurationError:
        return ConfigurationError(
            f"the connector of {self.name!r} keeps no dead letters that could be listed, replayed or discarded"
        )

    def _replaces_none(self) -> ConfigurationError:
        return ConfigurationError(
            f"the connector of {self.name!r} cannot replace a dead letter: it has no replace_dead; discard the dead "
            "letter and dispatch the corrected transaction"
        )


def _nothing() -> None: ...


def _until(delivery: Delivery) -> float:
    return float("inf") if delivery.lease_until is None else delivery.lease_until


class Connector(_Described):
    """The sync flavour; it is called from several threads at once."""

    @abstractmethod
    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        """At most *batch_size* deliveries; with ``wait=seconds`` it may wait that long for the first."""

    @abstractmethod
    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        """Settle many; one result each, in order. One that fails spoils no other."""

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        """Renew claims: the new ``lease_until`` of each, None for one that is gone.

        A claim that does not end by itself answers infinity: None already means gone.
        """
        return [_until(delivery) for delivery in deliveries]

    @abstractmethod
    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Hand over many; returns when the broker has confirmed every one of them."""

    def depth(self) -> Depth | None:
        """How much is there; None where the broker cannot say."""
        return None

    def queued(self, ids: Collection[str]) -> Collection[str] | None:  # noqa: ARG002 - whoever can say it needs it
        """Which of these transactions are ready, delayed or in flight; None where the broker cannot say."""
        return None

    def list_dead(
        self,
        query: DeadLetterQuery,  # noqa: ARG002 - for those who keep some
        *,
        after: str | None = None,  # noqa: ARG002 - as above
        limit: int = 100,  # noqa: ARG002 - as above
    ) -> Sequence[DeadLetterRecord]:
        """At most *limit* of the dead letters that *query* means, the oldest first.

        With *after*, only those behind that place, whether or not there still is one at it. This and
        the next two also work on a log that was not opened: opening takes its partitions over.
        """
        raise self._keeps_none()

    def replay_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:  # noqa: ARG002 - as above
        """Put dead letters back into their queue: the same id and correlation, nothing counted against them.

        One result each, in order; one that fails spoils no other. Each is moved in one step of the
        broker: a crash at any moment finds it in one of the two, never in both or in none. Where the
        broker has no such step (``replays_at_once`` is false), or a log keeps its dead letters in
        another system's side store, a crash may leave it in both, never in none.
        """
        raise self._keeps_none()

    def discard_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:  # noqa: ARG002 - as above
        """Throw dead letters away; one result each, in order."""
        raise self._keeps_none()

    def replace_dead(self, place: str, transaction: Transaction) -> ReplayResult:  # noqa: ARG002 - as above
        """Dispatch *transaction* in place of the dead letter at *place*, and remove that one.

        If several callers replace, replay or discard one dead letter at the same time, one of them moves it; the others
        get GONE, and nothing of theirs is sent. A crash in between has the effects that ``replay_dead`` names.
        """
        raise self._replaces_none()

    def open(self) -> None:
        """Connect, and check that what is there is what was configured."""

    def close(self) -> None:
        """Disconnect; claims still held end as the broker ends them."""


class AsyncConnector(_Described):
    """The async flavour of the same contract."""

    @abstractmethod
    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]: ...

    @abstractmethod
    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]: ...

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return [_until(delivery) for delivery in deliveries]

    @abstractmethod
    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]: ...

    async def depth_async(self) -> Depth | None:
        return None

    async def queued_async(self, ids: Collection[str]) -> Collection[str] | None:  # noqa: ARG002 - as its twin
        return None

    async def list_dead_async(
        self,
        query: DeadLetterQuery,  # noqa: ARG002 - as its twin
        *,
        after: str | None = None,  # noqa: ARG002 - as its twin
        limit: int = 100,  # noqa: ARG002 - as its twin
    ) -> Sequence[DeadLetterRecord]:
        raise self._keeps_none()

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:  # noqa: ARG002 - as its twin
        raise self._keeps_none()

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:  # noqa: ARG002 - as its twin
        raise self._keeps_none()

    async def replace_dead_async(self, place: str, transaction: Transaction) -> ReplayResult:  # noqa: ARG002 - as its twin
        raise self._replaces_none()

    async def open_async(self) -> None: ...

    async def close_async(self) -> None: ...
