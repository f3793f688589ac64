"""NatsQueue: a queue in JetStream, the message store of a NATS server.

A fetch claims messages: a claim is a worker's right to settle one delivery until its lease ends (``nats.claims``). The
state of a deferred or released message (counted deliveries, attempts, history) is stored in a stream of its own.
The client is asynchronous; threads use it through the sync-to-async bridge (``connectors.bridge``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
import urllib.request
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Defer,
    Delivery,
    Depth,
    Listener,
    Release,
    SettlementRequest,
    SettleResult,
    UndecodableError,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec, decode, describe_unread, read_not_before
from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.foreign_codec import ForeignCodec
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.login import BrokerLogin, find_source
from ergon_framework.connectors.nats import api, dead_letters
from ergon_framework.connectors.nats.address import split_addresses
from ergon_framework.connectors.nats.claims import DUE, EARLY, LoopHeartbeat, NatsClaim, parse_message_state
from ergon_framework.connectors.nats.client import (
    ConnectSettings,
    ServerClient,
    acquire_client,
    connect,
    release_client,
)
from ergon_framework.connectors.nats.connection import Connection
from ergon_framework.connectors.nats.inspect import NatsDurability, assess_durability, diagnose
from ergon_framework.connectors.nats.publish import MAX_HEADER_BYTES, Dispatcher
from ergon_framework.connectors.nats.pull import PullRequests
from ergon_framework.connectors.nats.settle import NatsSettler
from ergon_framework.connectors.nats.streams import (
    CONSUMER,
    StreamConfig,
    StreamStorage,
    ensure_streams,
    stream_names,
)
from ergon_framework.connectors.outage import public_address
from ergon_framework.connectors.wakeup import WakeupHub
from ergon_framework.diagnostics import Diagnostic, WallClock
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.redaction import learn_address
from ergon_framework.telemetry import logs
from ergon_framework.transaction import MAX_DELAY_SECONDS, Transaction

_log = logging.getLogger(__name__)

#: The environment variable with the server's address, used if the program passes none.
URL_VARIABLE: Final = "ERGON_NATS__URL"
#: Seconds that a received message, which no fetch is waiting for, may stay in this process before it is released.
_UNREQUESTED_GRACE_SECONDS: Final = 1.0
#: After a redelivery, fetch one message at a time until this many new ones arrived: a poison message, which ends the
#: process, must not count a delivery for others.
_CAUTIOUS_FETCHES: Final = 50
#: Tolerated difference between clocks, in seconds, before a delivery counts as too early.
_CLOCK_TOLERANCE_SECONDS: Final = 1.0
#: Message states that are read to tell delayed messages from those in flight.
_MAX_STATES_READ: Final = 10_000


class _Session:
    """A connection on which the queue was checked, and its pull requests."""

    def __init__(self, connection: Connection, pulls: PullRequests, known_keys: set[str]) -> None:
        self.connection = connection
        self.pulls = pulls
        #: Keys of the message states that existed when the connection was made: a server that was killed loses
        #: its delivery counts, and would present these messages as new.
        self.known_keys = known_keys


class NatsQueue(AsyncConnector):
    """One queue of a NATS server or cluster; its streams are created when it is first opened.

    The address is *url*, or the environment's ``ERGON_NATS__URL``; several are separated by commas. Claims last for
    *lease* seconds, which is the consumer's ``ack_wait`` and so the same for all workers. *subjects* are additional
    subjects of other producers. *replicas* is the number of servers that store each new stream. Dead letters are kept
    for *dead_days*, without limit if None. A call may take *timeout* seconds for each response of the server; a
    dispatch retries for *patience* seconds. *monitor* is the server's monitoring address, which shows its durability.
    *credentials* returns the user and the password, and is called before every new connection; a password without a
    user is a token. *ca_file* has the trusted authorities for TLS in place of the system's. *options* are passed to the
    client: a TLS context of your own for example. With *erase* acked messages are also erased;
    None does so where a killed server would restore them (before 2.10). One fetch brings *max_fetch_bytes* at most, and
    always at least one message.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        lease: float = 30.0,
        codec: Codec | None = None,
        subjects: Sequence[str] = (),
        replicas: int = 1,
        dead_days: float | None = None,
        timeout: float = 5.0,
        patience: float = 10.0,
        monitor: str | None = None,
        options: Mapping[str, Any] | None = None,
        erase: bool | None = None,
        max_fetch_bytes: int = MAX_FETCH_BYTES,
        credentials: CredentialsSource | None = None,
        ca_file: str | None = None,
    ) -> None:
        if not 0 < len(name) <= 200:  # noqa: PLR2004 - the same limit on every broker
            raise ConfigurationError(f"queue name {name!r:.40} must have 1 to 200 characters, not {len(name)}")
        for option, seconds in (("lease", lease), ("timeout", timeout), ("patience", patience)):
            if not 0 < seconds < math.inf:
                raise ConfigurationError(f"{option} must be a finite number of seconds > 0, not {seconds!r}")
        if monitor is not None and not monitor.startswith(("http://", "https://")):
            raise ConfigurationError(f"monitor must be the server's http monitoring address, not {monitor!r}")
        self._name = name
        self._url = url
        self._lease = lease
        self._codec = select_codec(codec)
        self._timeout = timeout
        self._limits = FetchLimits(max_fetch_bytes)
        #: New messages that must still arrive, one per fetch, before a fetch requests several again.
        self._cautious_fetches = 0
        self._monitor = monitor
        self._options = dict(options or {})
        self._credentials = credentials
        self._ca_file = ca_file
        self._names = stream_names(name)
        self._layout = StreamConfig(self._names, lease, tuple(subjects), replicas, dead_days)
        self._arrivals = WakeupHub()
        self._listener_count = 0
        self._durability: NatsDurability | None = None
        #: Bytes that the server accepts, once that is known.
        self._server_max_bytes: int | None = None
        self._client: ServerClient | None = None
        self._session: _Session | None = None
        self._open_lock: asyncio.Lock | None = None
        self._close_count = 0
        #: Received and not yet fetched; fetched and not yet settled.
        self._buffer: deque[NatsClaim] = deque()
        self._held: set[NatsClaim] = set()
        self._heartbeat = LoopHeartbeat(lease, self._on_tick)
        self._background: set[asyncio.Task[Any]] = set()
        self._settler = NatsSettler(
            name,
            self._names,
            codec=self._codec,
            held=self._held,
            owner=self,
            get_connection=self._get_connection,
            erase=erase,
        )
        self._dispatcher = Dispatcher(
            self._names, self._codec, get_connection=self._get_checked_connection, patience=patience
        )

    def __repr__(self) -> str:
        return f"NatsQueue({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def server_address(self) -> str | None:
        addresses = split_addresses(self._url or os.environ.get(URL_VARIABLE) or "")
        return ",".join(filter(None, map(public_address, addresses))) or None

    @property
    def server_host(self) -> str | None:
        """Host and port of the server of the newest connection; None before the first one."""
        return None if self._client is None else self._client.host

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the server; durability is known once the queue was opened."""
        return Capabilities(
            mode="queue",
            renewable=True,
            lease=self._lease,
            release_uncounted=True,
            delays=True,
            dead_letters=True,
            # JetStream accepts the ack of an expired claim, so the worker's clock must reject it.
            fenced_by="clock",
            atomic_replay=False,
            durable=None if self._durability is None else self._durability.durable,
            max_payload=self._max_body_bytes,
        )

    @property
    def _max_body_bytes(self) -> int | None:
        """The largest body that codec and server accept; the server's limit includes headers."""
        codec_max, server_max = (
            self._codec.max_bytes,
            None if self._server_max_bytes is None else max(1, self._server_max_bytes - MAX_HEADER_BYTES),
        )
        return min((each for each in (codec_max, server_max) if each is not None), default=None)

    @property
    def durability(self) -> str | None:
        """A description of what a power loss could lose; None before the queue was opened."""
        return None if self._durability is None else self._durability.message

    # -- opening and closing ------------------------------------------------------------------------

    def _get_client(self) -> ServerClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client.loop is not loop or self._client.pid != os.getpid():
            # Another loop, or a forked child: the old client must not be used, and its buffered claims are redelivered.
            # Held claims stay valid until their leases end, because any connection can send their acks.
            self._session, self._open_lock = None, asyncio.Lock()
            self._heartbeat.stop()
            self._buffer.clear()
            self._client = acquire_client(
                self._parse_addresses(),
                timeout=self._timeout,
                credentials=self._find_credentials(),
                ca_file=self._ca_file,
                options=self._options,
                owner=self,
            )
        return self._client

    def _parse_addresses(self) -> list[str]:
        url = self._url or os.environ.get(URL_VARIABLE)
        if not url:
            raise ConfigurationError(f"queue {self._name!r} has no server address: set {URL_VARIABLE} or pass url=…")
        learn_address(url)
        return split_addresses(url)

    def _find_credentials(self) -> CredentialsSource | None:
        return self._credentials or find_source("nats", self._url)

    async def _get_connection(self) -> Connection:
        return await self._get_client().connection()

    async def _get_checked_connection(self) -> Connection:
        return (await self._get_session()).connection

    async def _get_session(self) -> _Session:
        """Return a session with a live connection, on which the queue was checked."""
        client = self._get_client()
        session = self._session
        if session is not None and not session.connection.is_lost:
            return session
        assert self._open_lock is not None  # noqa: S101 - created with the client
        async with self._open_lock:
            session = self._session
            if session is None or session.connection.is_lost:
                session = self._session = await self._open(await client.connection())
            return session

    async def _open(self, connection: Connection) -> _Session:
        """Check or create the streams on a new connection, and subscribe to receive messages."""
        streams = await ensure_streams(connection, self._layout)
        self._server_max_bytes = connection.max_payload
        if self._durability is None:
            await self._assess_durability(connection, streams.storage)
        known_keys: set[str] = set()
        if streams.state_count:
            prefix_chars = len(self._names.state_subject) + 1
            async for message in api.scan(connection, self._names.states, bodies=False):
                known_keys.add(message.subject[prefix_chars:])
        pulls = PullRequests(
            connection,
            self._names.work,
            self._buffer,
            owner=self,
            lease=self._lease,
            max_bytes=self._limits.max_bytes,
            heartbeat=self._heartbeat,
            wake=self._arrivals.notify,
            has_listeners=lambda: self._listener_count > 0,
        )
        await pulls.begin()
        # A loop that waits for a wakeup learns immediately that the connection is lost.
        connection.on_lost(self._arrivals.notify)
        return _Session(connection, pulls, known_keys)

    async def _assess_durability(self, connection: Connection, storage: StreamStorage) -> None:
        monitored = None
        if self._monitor is not None:
            monitored = await asyncio.to_thread(_read_monitoring, self._monitor, self._timeout)
        self._durability = assess_durability(version=connection.version, storage=storage, monitored=monitored)
        level = logging.INFO if self._durability.durable else logging.WARNING
        logs.log_event(
            level,
            "nats durability",
            {"queue": self._name, "durable": self._durability.durable, "summary": self._durability.message},
            to=_log,
            keep_none=True,
        )

    async def open_async(self) -> None:
        """Connect, create or check the queue's streams, and log the durability of the server's settings."""
        await self._get_session()

    async def close_async(self) -> None:
        """Disconnect. Claims that are still held are redelivered when their leases end."""
        self._close_count += 1
        session, self._session = self._session, None
        client, self._client = self._client, None
        self._heartbeat.stop()
        if session is not None and not session.connection.is_lost:
            await session.pulls.end()
            await self._release(list(self._buffer), session.connection)
        elif session is not None:
            session.pulls.interrupt()
        self._buffer.clear()
        for claim in list(self._held):
            claim.owner = None
        self._held.clear()
        self._arrivals.interrupt()
        if client is not None and release_client(client):
            await client.close()

    def listen(self, listener: Listener) -> Unlisten:
        unlisten = self._arrivals.listen(listener)
        self._listener_count += 1

        def stop_listening() -> None:
            unlisten()
            self._listener_count -= 1

        return stop_listening

    # -- the heartbeat --------------------------------------------------------------------------------

    def _on_tick(self) -> bool:
        """Drop expired claims and release those that no fetch is waiting for; return whether to continue ticking."""
        now = time.monotonic()
        expired = [claim for claim in self._held if claim.until <= now]
        for claim in expired:
            claim.owner = None
            self._held.discard(claim)
        if expired:
            self._arrivals.notify_lost(expired)
        session = self._session
        if self._buffer and (session is None or not session.pulls.is_fetching):
            stale = now + self._lease - min(_UNREQUESTED_GRACE_SECONDS, self._lease / 4)
            unrequested = [claim for claim in self._buffer if claim.until <= stale]
            if unrequested:
                for claim in unrequested:
                    self._buffer.remove(claim)
                self._run_in_background(self._release(unrequested))
        return bool(self._held or self._buffer) or (session is not None and session.pulls.is_waiting)

    def _run_in_background(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release(self, claims: Sequence[NatsClaim], connection: Connection | None = None) -> None:
        """Release buffered claims that were not handed out; their deliveries are not counted.

        A release writes the whole state of the message, so its earlier state is loaded first.
        """
        if not claims:
            return
        try:
            connection = connection or await self._get_connection()
            await self._load_states(connection, claims)
            transaction = Transaction(id="released")
            await self._settler.settle([(Delivery(transaction, claim), Release()) for claim in claims], connection)
        except (ConnectionLostError, api.ApiError) as error:
            logs.log_event(
                logging.WARNING,
                "release failed",
                {"queue": self._name, "deliveries": len(claims), "error": type(error).__name__},
                to=_log,
            )

    # -- fetch ----------------------------------------------------------------------------------------

    def limit_deliveries(self, max_deliveries: int) -> None:
        self._limits.raise_max_deliveries(max_deliveries)

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        """Return ready transactions, the oldest first; a priority is ignored."""
        if batch_size < 1:
            return []
        close_count, end = self._close_count, time.monotonic() + wait
        while True:
            session = await self._get_session()
            if not self._buffer:
                await session.pulls.fetch(1 if self._cautious_fetches else batch_size, max(0.0, end - time.monotonic()))
            if self._close_count != close_count:
                return []
            deliveries, has_deferred = await self._take_buffered(session, batch_size)
            # Behind messages that came before their time, others may be due.
            if deliveries or (time.monotonic() >= end and not has_deferred):
                break
        if not deliveries and self._listener_count:
            await session.pulls.ensure_outstanding()
        return deliveries

    async def _take_buffered(self, session: _Session, count: int) -> tuple[list[Delivery], bool]:
        """Hand out at most *count* claims of the buffer; expired ones are dropped, too early ones deferred again.

        The second value says whether any were deferred.
        """
        buffer, now = self._buffer, time.monotonic()
        claims: list[NatsClaim] = []
        while buffer and len(claims) < count:
            claim = buffer.popleft()
            if claim.until > now:
                claims.append(claim)
        known_keys = session.known_keys
        redelivered = [
            claim for claim in claims if claim.server_delivery_count > 1 or (known_keys and claim.key in known_keys)
        ]
        early = [claim for claim in claims if (read_not_before(claim.headers) or 0.0) > time.time()]
        try:
            if redelivered:
                await self._load_states(session.connection, redelivered)
            if redelivered or early:
                await self._defer_again(session.connection, list({*redelivered, *early}))
        except BaseException:
            buffer.extendleft(reversed(claims))
            raise
        # A claim that was deferred again has no owner any more.
        owned = [claim for claim in claims if claim.owner is self]
        selected, remaining = self._select(owned)
        buffer.extendleft(reversed(remaining))
        if selected and selected[0].counted_deliveries > 1 and buffer:
            # The selected message was delivered before, and decoding it may end this process: that must not count a
            # delivery for the other claims.
            unselected = list(buffer)
            buffer.clear()
            try:
                await self._release(unselected, session.connection)
            except BaseException:
                buffer.extendleft(reversed(selected))
                raise
        return [self._to_delivery(claim) for claim in selected], len(owned) < len(claims)

    def _select(self, claims: Sequence[NatsClaim]) -> tuple[Sequence[NatsClaim], Sequence[NatsClaim]]:
        """Return the claims to hand out now, and the others: a redelivered message is handed out alone."""
        redelivered = [claim for claim in claims if claim.counted_deliveries > 1]
        self._cautious_fetches = (
            _CAUTIOUS_FETCHES if redelivered else max(0, self._cautious_fetches - len(claims)) if claims else 0
        )
        if not redelivered:
            return claims, ()
        new = [claim for claim in claims if claim.counted_deliveries <= 1]
        return (new, redelivered) if new else (redelivered[:1], redelivered[1:])

    def _to_delivery(self, claim: NatsClaim) -> Delivery:
        message, error = claim.message, None
        headers = message.headers
        self._held.add(claim)
        if self._limits.exceeds(claim.counted_deliveries):
            # It will be dead-lettered, and decoding it may be what ended the earlier processes.
            transaction, _ = describe_unread(len(message.data), headers, source=self._name, limit=None)
            return Delivery(transaction, claim, claim.counted_deliveries, claim.until)
        try:
            transaction = self._codec.decode(message.data, headers, source=self._name)
        except Exception:  # noqa: BLE001 - decode() below classifies the error
            transaction, error = decode(self._codec, message.data, headers, source=self._name)
        claim.readable = not isinstance(error, UndecodableError)
        if claim.state is not None and claim.readable:
            transaction = claim.state.apply_to(transaction, error, self._codec)
        return Delivery(transaction, claim, claim.counted_deliveries, claim.until, error)

    async def _load_states(self, connection: Connection, claims: Sequence[NatsClaim]) -> None:
        """Load the message states of *claims*, and correct their delivery counts."""
        subject = self._names.state_subject
        unloaded = [claim for claim in claims if claim.state is None]
        requests = [
            api.request(f"STREAM.MSG.GET.{self._names.states}", last_by_subj=f"{subject}.{claim.key}")
            for claim in unloaded
        ]
        for claim, answer in zip(unloaded, await connection.request_many(requests), strict=True):
            try:
                stored = api.parse_stored_message(api.parse_response(answer))
            except api.ApiError as error:
                if error.number != api.NO_MESSAGE:
                    raise
                continue
            claim.state_seq = stored.seq
            try:
                claim.state = parse_message_state(stored.body)
            except (ValueError, KeyError, TypeError):
                # Invalid, written by other code: the message is delivered without its state instead of never.
                logs.log_event(
                    logging.WARNING, "message state unreadable", {"queue": self._name, "sequence": stored.seq}, to=_log
                )
                continue
            claim.counted_deliveries = claim.state.count_deliveries(claim.server_delivery_count)

    async def _defer_again(self, connection: Connection, claims: Sequence[NatsClaim]) -> None:
        """Defer again for the rest of the delay: a server that was killed loses delays and delivers too early.

        It delivers a delayed message as soon as it has it, because it can only delay a redelivery.
        """
        now = time.time()
        early: list[SettlementRequest] = []
        for claim in claims:
            state, due = claim.state, read_not_before(claim.headers) or 0.0
            if state is not None and state.due > now + _CLOCK_TOLERANCE_SECONDS:
                due = max(due, state.due)
            if due > now:
                claim.keep_state = True
                early.append(
                    (Delivery(Transaction(id="early"), claim), Defer(min(due - now + 0.001, MAX_DELAY_SECONDS)))
                )
        if early:
            await self._settler.settle(early, connection)

    # -- settle and renew -----------------------------------------------------------------------------

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return await self._settler.settle(requests) if requests else []

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._settler.extend(deliveries, self._lease) if deliveries else []

    # -- dispatch -------------------------------------------------------------------------------------

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Publish all, or none if one cannot be encoded. The same id twice makes two messages."""
        if not transactions:
            return []
        return await self._dispatcher.dispatch([self.prepare(transaction) for transaction in transactions])

    # -- state ----------------------------------------------------------------------------------------

    async def depth_async(self) -> Depth:
        """Return the depth; released messages count as in flight until fetched again, as the server cannot tell."""
        connection, names = await self._get_checked_connection(), self._names
        consumer = await api.call(connection, f"CONSUMER.INFO.{names.work}.{CONSUMER}")
        dead = await api.call(connection, f"STREAM.INFO.{names.dead}")
        states = await api.call(connection, f"STREAM.INFO.{names.states}")
        ready, pending = int(consumer["num_pending"]), int(consumer["num_ack_pending"])
        deferred, early = await self._count_deferred(connection) if states["state"]["messages"] else (0, 0)
        not_due = await self._count_not_due(connection) if ready or deferred else 0
        # Delayed messages that no worker has fetched and deferred yet are new ones for the server.
        unfetched = min(ready, max(0, not_due - early))
        delayed = min(deferred - early + not_due, pending + unfetched)
        ready -= unfetched
        return Depth(
            ready=ready,
            delayed=delayed,
            in_flight=max(0, pending - (delayed - unfetched)),
            dead=int(dead["state"]["messages"]),
            oldest_age=await self._read_oldest_age(connection, int(consumer["delivered"]["stream_seq"]))
            if ready
            else None,
        )

    async def _count_not_due(self, connection: Connection) -> int:
        """Return the number of messages that were dispatched with a delay and are not due yet."""
        now_ms, count = time.time() * 1000, 0
        answer = await api.call(
            connection, f"STREAM.INFO.{self._names.work}", subjects_filter=f"{self._names.subject}.*.*"
        )
        for subject, messages in (answer["state"].get("subjects") or {}).items():
            due = subject.rpartition(".")[2]
            if due.isdigit() and int(due) > now_ms:
                count += int(messages)
        return count

    async def _count_deferred(self, connection: Connection) -> tuple[int, int]:
        """Return the number of deferred messages, and of those among them that came before their time."""
        now, count, early, scanned = time.time(), 0, 0, 0
        states = api.scan(connection, self._names.states, bodies=False)
        async for message in states:
            scanned += 1
            due = message.headers.get(DUE)
            if due is not None and float(due) > now:
                count += 1
                early += EARLY in message.headers
            if scanned >= _MAX_STATES_READ:
                break
        await states.aclose()  # type: ignore[attr-defined] # generators have it
        return count, early

    async def _read_oldest_age(self, connection: Connection, last_delivered_seq: int) -> float | None:
        try:
            response = await api.call(
                connection, f"STREAM.MSG.GET.{self._names.work}", seq=last_delivered_seq + 1, next_by_subj=">"
            )
        except api.ApiError as error:
            if error.number != api.NO_MESSAGE:
                raise
            return None  # fetched in the meantime
        stored = api.parse_stored_message(response)
        return max(0.0, time.time() - max(stored.at, read_not_before(stored.headers) or 0.0))

    async def find_queued_async(self, ids: Collection[str]) -> Collection[str] | None:
        """Find ids by subject; None for third-party messages, whose subject does not contain the id."""
        if isinstance(getattr(self._codec, "inner", self._codec), ForeignCodec):
            return None
        connection, id_list = await self._get_checked_connection(), list(ids)
        # A delayed message has a subject below that of its transaction.
        subjects = [f"{self._names.subject_for(each)}{suffix}" for each in id_list for suffix in ("", ".*")]
        requests = [api.request(f"STREAM.MSG.GET.{self._names.work}", last_by_subj=subject) for subject in subjects]
        queued_ids = set()
        names = [each for each in id_list for _ in range(2)]
        for each, answer in zip(names, await connection.request_many(requests), strict=True):
            try:
                api.parse_response(answer)
            except api.ApiError as error:
                if error.number != api.NO_MESSAGE:
                    raise
                continue
            queued_ids.add(each)
        return queued_ids

    def diagnose(self, wall: WallClock) -> Sequence[Diagnostic]:
        """Diagnose the server and the queue; missing streams are not created."""
        return asyncio.run(self._diagnose(wall))

    async def _diagnose(self, wall: WallClock) -> Sequence[Diagnostic]:
        login = BrokerLogin(self._find_credentials())
        settings = ConnectSettings(self._timeout, login, self._ca_file, self._options)
        connection = await connect(deque(self._parse_addresses()), settings)
        try:
            monitored = None
            if self._monitor is not None:
                monitored = await asyncio.to_thread(_read_monitoring, self._monitor, self._timeout)
            limit = self._limits.max_bytes
            return await diagnose(connection, self._layout, self._name, limit=limit, monitored=monitored, wall=wall)
        finally:
            await connection.close()

    # -- dead letters ---------------------------------------------------------------------------------

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        connection = await self._get_checked_connection()
        return await dead_letters.list_dead(
            connection, self._names, self._name, self._codec, query, after=after, limit=limit
        )

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        connection = await self._get_checked_connection()
        return await dead_letters.replay_dead(connection, self._names, self._codec, self._name, handles)

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await dead_letters.discard_dead(await self._get_checked_connection(), self._names, handles)

    async def replace_dead_async(self, handle: str, transaction: Transaction) -> ReplayResult:
        connection = await self._get_checked_connection()
        return await dead_letters.replace_dead(
            connection, self._names, handle, self._prepare_replacement(transaction), codec=self._codec
        )


def _read_monitoring(address: str, timeout: float) -> dict[str, Any] | None:
    """Return the JetStream configuration that the server reports; None if it reports none."""
    try:
        # The scheme was checked by the queue's constructor.
        with urllib.request.urlopen(f"{address.rstrip('/')}/varz", timeout=timeout) as answer:  # noqa: S310
            response = json.load(answer)
    except (OSError, ValueError) as error:
        logs.log_event(logging.WARNING, "nats monitoring unavailable", {"error": type(error).__name__}, to=_log)
        return None
    config = (response.get("jetstream") or {}).get("config")
    return config if isinstance(config, dict) else None
