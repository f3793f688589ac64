"""Sending: the methods of a consumer that put payloads into its queue.

A payload becomes a transaction, which the connector dispatches; with a connection it is written in the caller's open
database transaction (an outbox). Inside a handler the id is derived from the transaction that is being handled, so that
a second run of the handler sends the same transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from ergon_framework.connectors.base import AsyncConnector, Confirmation, Connector
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction

PayloadT = TypeVar("PayloadT")
PayloadT_contra = TypeVar("PayloadT_contra", contravariant=True)

#: Returns the id, or the key, of one payload.
GetText: TypeAlias = Callable[[PayloadT], str]


class CommonOptions(TypedDict, total=False):
    """The options of every method that sends."""

    #: The name of this effect of a handler, which tells several transactions for one queue apart.
    name: str
    #: The transaction starts no earlier than after this time, in seconds or as a timedelta.
    delay: float | timedelta
    #: The transaction starts no earlier than at this time, an aware datetime or seconds since the epoch.
    at: datetime | float
    #: Higher starts earlier, where the broker has priorities.
    priority: int
    #: The tenant; inside a handler, that of its transaction by default.
    tenant: str
    #: A connection with an open database transaction, in which the message is written.
    connection: Any


class SendOptions(CommonOptions, total=False):
    """The options of ``send`` and ``send_async``."""

    #: Identifies the transaction across retries of the sender, such as the number of an order.
    id: str
    #: Transactions with one key run one at a time.
    key: str


class TakesPayload(Protocol[PayloadT_contra]):
    """A function whose first parameter is the payload."""

    def __call__(self, payload: PayloadT_contra, /, *args: Any, **kwargs: Any) -> Any: ...


class TakesTransactionAndPayload(Protocol[PayloadT_contra]):
    """A function whose first parameter is the transaction, and whose second is the payload."""

    def __call__(
        self, transaction: Transaction[Any], payload: PayloadT_contra, /, *args: Any, **kwargs: Any
    ) -> Any: ...


class TakesTransaction(Protocol):
    """A function whose first parameter is the transaction."""

    def __call__(self, transaction: Transaction[Any], /, *args: Any, **kwargs: Any) -> Any: ...


class TakesNothing(Protocol):
    """A function without parameters."""

    def __call__(self) -> Any: ...


class Sender:
    """The methods that send to the queue of a consumer; a payload has the type of its function's parameter."""

    connector: Connector | AsyncConnector
    #: The type of the transactions that are sent.
    _type: str = ""

    @overload
    def send(
        self: TakesTransactionAndPayload[PayloadT], payload: PayloadT, **options: Unpack[SendOptions]
    ) -> Confirmation: ...
    @overload
    def send(self: TakesTransaction, payload: Any, **options: Unpack[SendOptions]) -> Confirmation: ...
    @overload
    def send(self: TakesPayload[PayloadT], payload: PayloadT, **options: Unpack[SendOptions]) -> Confirmation: ...
    @overload
    def send(self: TakesNothing, payload: Any = None, **options: Unpack[SendOptions]) -> Confirmation: ...
    def send(self, payload: Any = None, **options: Unpack[SendOptions]) -> Confirmation:
        """Send *payload* to the queue of this task; return when the broker has confirmed it.

        *id* identifies it across retries of the sender: pass one that your data determines, such as an order number.
        Without it, the id is derived from the transaction that is being handled (with *name* to tell several apart), or
        random outside a handler. Transactions with one *key* run one at a time. It starts no earlier than *delay*
        seconds from now, or *at* that time. With *connection*, it is written in the open database transaction of that
        connection, and exists if that commits.
        """
        transaction = _create(self.connector, payload, options, type=self._type)
        return _send(self.connector, [transaction], options, instead="send_async")[0]

    @overload
    async def send_async(
        self: TakesTransactionAndPayload[PayloadT], payload: PayloadT, **options: Unpack[SendOptions]
    ) -> Confirmation: ...
    @overload
    async def send_async(self: TakesTransaction, payload: Any, **options: Unpack[SendOptions]) -> Confirmation: ...
    @overload
    async def send_async(
        self: TakesPayload[PayloadT], payload: PayloadT, **options: Unpack[SendOptions]
    ) -> Confirmation: ...
    @overload
    async def send_async(self: TakesNothing, payload: Any = None, **options: Unpack[SendOptions]) -> Confirmation: ...
    async def send_async(self, payload: Any = None, **options: Unpack[SendOptions]) -> Confirmation:
        """Send *payload* as ``send`` does, from async code."""
        transaction = _create(self.connector, payload, options, type=self._type)
        return (await _send_async(self.connector, [transaction], options))[0]

    @overload
    def send_many(
        self: TakesTransactionAndPayload[PayloadT],
        payloads: Iterable[PayloadT],
        *,
        id: GetText[PayloadT] | None = None,
        key: GetText[PayloadT] | None = None,
        **options: Unpack[CommonOptions],
    ) -> Sequence[Confirmation]: ...
    @overload
    def send_many(
        self: TakesTransaction,
        payloads: Iterable[Any],
        *,
        id: GetText[Any] | None = None,
        key: GetText[Any] | None = None,
        **options: Unpack[CommonOptions],
    ) -> Sequence[Confirmation]: ...
    @overload
    def send_many(
        self: TakesPayload[PayloadT],
        payloads: Iterable[PayloadT],
        *,
        id: GetText[PayloadT] | None = None,
        key: GetText[PayloadT] | None = None,
        **options: Unpack[CommonOptions],
    ) -> Sequence[Confirmation]: ...
    def send_many(
        self,
        payloads: Iterable[Any],
        *,
        id: GetText[Any] | None = None,  # noqa: A002 - the name of the envelope field
        key: GetText[Any] | None = None,
        **options: Unpack[CommonOptions],
    ) -> Sequence[Confirmation]:
        """Send *payloads* in one call of the broker; return one confirmation each, in order.

        *id* and *key* are functions that return the id and the key of one payload. The other options are those of
        ``send``, and apply to each.
        """
        transactions = _create_many(self.connector, payloads, options, type=self._type, get_id=id, get_key=key)
        return _send(self.connector, transactions, options, instead="send_many_async")

    @overload
    async def send_many_async(
        self: TakesTransactionAndPayload[PayloadT],
        payloads: Iterable[PayloadT],
        *,
        id: GetText[PayloadT] | None = None,
        key: GetText[PayloadT] | None = None,
        **options: Unpack[CommonOptions],
    ) -> Sequence[Confirmation]: ...
    @overload
    async def send_many_async(
        self: TakesTransaction,
        payloads: Iterable[Any],
        *,
        id: GetText[Any] | None = None,
        key: GetText[Any] | None = None,
        **options: Unpack[CommonOptions],
    ) -> Sequence[Confirmation]: ...
    @overload
    async def send_many_async(
        self: TakesPayload[PayloadT],
        payloads: Iterable[PayloadT],
        *,
        id: GetText[PayloadT] | None = None,
        key: GetText[PayloadT] | None = None,
        **options: Unpack[CommonOptions],
    ) -> Sequence[Confirmation]: ...
    async def send_many_async(
        self,
        payloads: Iterable[Any],
        *,
        id: GetText[Any] | None = None,  # noqa: A002 - the name of the envelope field
        key: GetText[Any] | None = None,
        **options: Unpack[CommonOptions],
    ) -> Sequence[Confirmation]:
        """Send *payloads* as ``send_many`` does, from async code."""
        transactions = _create_many(self.connector, payloads, options, type=self._type, get_id=id, get_key=key)
        return await _send_async(self.connector, transactions, options)


_OPTION_NAMES = tuple(SendOptions.__annotations__)


def _create(
    connector: Connector | AsyncConnector,
    payload: Any,
    options: Mapping[str, Any],
    *,
    type: str,  # noqa: A002 - the name of the envelope field
) -> Transaction:
    """Return the transaction that carries *payload*; options that are None keep their defaults."""
    for option in options:
        if option not in _OPTION_NAMES:
            near = get_close_matches(option, _OPTION_NAMES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are: {', '.join(_OPTION_NAMES)}"
            raise ConfigurationError(f"sending has no option {option!r}; {hint}")
    fields: dict[str, Any] = {"type": type} if type else {}
    fields |= {option: value for option, value in options.items() if option != "connection" and value is not None}
    return connector.transaction(payload, **fields)


def _create_many(
    connector: Connector | AsyncConnector,
    payloads: Iterable[Any],
    options: Mapping[str, Any],
    *,
    type: str,  # noqa: A002 - the name of the envelope field
    get_id: GetText[Any] | None,
    get_key: GetText[Any] | None,
) -> list[Transaction]:
    """Return a transaction for each payload; the effect name of each has its position."""
    name = options.get("name") or (f"{connector.name}/{type}" if type else connector.name)
    return [
        _create(
            connector,
            payload,
            {
                **options,
                "name": f"{name}#{number}",
                "id": None if get_id is None else get_id(payload),
                "key": None if get_key is None else get_key(payload),
            },
            type=type,
        )
        for number, payload in enumerate(payloads)
    ]


def _send(
    connector: Connector | AsyncConnector,
    transactions: Sequence[Transaction],
    options: Mapping[str, Any],
    *,
    instead: str,
) -> Sequence[Confirmation]:
    """Dispatch *transactions*, on the caller's connection if there is one; *instead* is the async method."""
    if _is_in_event_loop():
        raise ConfigurationError(
            f"sending to queue {connector.name!r} here would block the event loop; in async code: await {instead}(...)"
        )
    connection = options.get("connection")
    if connection is None:
        return as_sync(connector).dispatch(transactions)
    confirmations: Sequence[Confirmation] = _get_outbox(connector, "dispatch_on")(connection, transactions)
    return confirmations


async def _send_async(
    connector: Connector | AsyncConnector, transactions: Sequence[Transaction], options: Mapping[str, Any]
) -> Sequence[Confirmation]:
    """Dispatch *transactions*, on the caller's async connection if there is one."""
    connection = options.get("connection")
    if connection is None:
        return await as_async(connector).dispatch_async(transactions)
    dispatch_on = _get_outbox(connector, "dispatch_on_async")
    confirmations: Sequence[Confirmation] = await dispatch_on(connection, transactions)
    return confirmations


def _get_outbox(connector: Connector | AsyncConnector, method: str) -> Any:
    dispatch_on = getattr(connector, method, None)
    if dispatch_on is None:
        raise ConfigurationError(
            f"queue {connector.name!r} cannot be written in a database transaction: its connector has no {method}; "
            "send to a PostgresQueue, and let a relay move its messages to this queue"
        )
    return dispatch_on


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
