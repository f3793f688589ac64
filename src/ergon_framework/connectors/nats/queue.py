"""NatsQueue: a queue in JetStream. The client is asynchronous; threads reach it through the bridge."""

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

from ergon_framework.connectors.arrivals import Arrivals
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Delivery,
    Depth,
    Later,
    Listener,
    Release,
    SettleResult,
    Settling,
    UndecodableError,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec, decode, describe_unread
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.foreign import ForeignCodec
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.nats import api, burials, note
from ergon_framework.connectors.nats.claim import Claim
from ergon_framework.connectors.nats.dispatching import HEADERS, Dispatcher
from ergon_framework.connectors.nats.durability import Durability, judged
from ergon_framework.connectors.nats.examining import examined
from ergon_framework.connectors.nats.home import Home, home_of, leave
from ergon_framework.connectors.nats.layout import Layout, built
from ergon_framework.connectors.nats.line import Line, connect
from ergon_framework.connectors.nats.naming import CONSUMER, names
from ergon_framework.connectors.nats.pulling import Pulls
from ergon_framework.connectors.nats.settling import Settler
from ergon_framework.connectors.nats.ticker import Ticker
from ergon_framework.connectors.outage import public_address
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.finding import Finding, Wall
from ergon_framework.redaction import learn_address
from ergon_framework.telemetry import logs
from ergon_framework.transaction import Transaction

_log = logging.getLogger(__name__)

#: Where the address of the server is looked for if the program does not give one.
VARIABLE: Final = "ERGON_NATS__URL"
#: Seconds that what nobody waits for may lie here before it is given back.
_STRAY: Final = 1.0
#: How many that were never delivered before it takes to ask for several at once, after one that was.
_TRUST: Final = 50
#: Seconds by which clocks may differ before something is said to have come too early.
_EARLY: Final = 1.0
#: How many notes are looked at to tell what is delayed from what is in flight.
_COUNTED: Final = 10_000


class _Session:
    """A line on which the queue was found in order, and what was asked for over it."""

    def __init__(self, line: Line, pulls: Pulls, known: set[str]) -> None:
        self.line = line
        self.pulls = pulls
        #: Keys of notes that were there when the line was made: a server that was killed forgets how often it
        #: has delivered, and would show these as new.
        self.known = known


class NatsQueue(AsyncConnector):
    """One queue of a NATS server or cluster; its streams are made when it is opened first.

    The address is *url*, or the environment's ``ERGON_NATS__URL``; several are separated by commas.
    Claims last for *lease* seconds, which is the consumer's ``ack_wait`` and so the same for all
    workers. *subjects* are those of other producers that the queue takes in besides its own. A call
    may take *timeout* seconds for each answer of the server; a dispatch goes on trying for *patience*.
    *monitor* is the server's monitoring address, by which its durability can be seen. *options* go
    to the client: credentials and TLS for instance. With *erase* acked messages are also erased;
    None does so where a killed server would bring them back (before 2.10). One fetch brings
    *max_fetch_bytes* at most, and always at least one message.
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
    ) -> None:
        if not 0 < len(name) <= 200:  # noqa: PLR2004 - as on every broker
            raise ConfigurationError(f"the name of a queue has 1 to 200 characters, not {len(name)}")
        for words, seconds in (("lease", lease), ("timeout", timeout), ("patience", patience)):
            if not 0 < seconds < math.inf:
                raise ConfigurationError(f"{words} must be a finite number of seconds > 0, not {seconds!r}")
        if monitor is not None and not monitor.startswith(("http://", "https://")):
            raise ConfigurationError(f"monitor is the http address of the server's monitoring, not {monitor!r}")
        self._name = name
        self._url = url
        self._lease = lease
        self._codec = select_codec(codec)
        self._timeout = timeout
        self._limits = FetchLimits(max_fetch_bytes)
        #: How many more that were never delivered before it takes to ask for several at once again.
        self._doubts = 0
        self._monitor = monitor
        self._options = dict(options or {})
        self._names = names(name)
        self._layout = Layout(self._names, lease, tuple(subjects), replicas, dead_days)
        self._arrivals = Arrivals()
        self._listening = 0
        self._durability: Durability | None = None
        #: Bytes that the server takes, once that is known.
        self._taken: int | None = None
        self._home: Home | None = None
        self._session: _Session | None = None
        self._opening: asyncio.Lock | None = None
        self._closing = 0
        #: What came and was not yet fetched; what was fetched and not yet settled.
        self._buffer: deque[Claim] = deque()
        self._held: set[Claim] = set()
        self._ticker = Ticker(lease, self._ticked)
        self._background: set[asyncio.Task[Any]] = set()
        self._settler = Settler(
            name, self._names, codec=self._codec, held=self._held, owner=self, line=self._line, erase=erase
        )
        self._dispatcher = Dispatcher(self._names, self._codec, line=self._ready_line, patience=patience)

    def __repr__(self) -> str:
        return f"NatsQueue({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def server_address(self) -> str | None:
        urls = (self._url or os.environ.get(VARIABLE) or "").split(",")
        return ",".join(filter(None, (public_address(url.strip(), scheme="nats") for url in urls))) or None

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; whether it is durable is known once it was opened."""
        return Capabilities(
            mode="queue",
            renewable=True,
            lease=self._lease,
            release_is_free=True,
            delays=True,
            dead_letters=True,
            fenced_by="clock",
            replays_at_once=False,
            durable=None if self._durability is None else self._durability.durable,
            max_payload=self._largest,
        )

    @property
    def _largest(self) -> int | None:
        """What codec and server take; headers count for the server."""
        own, room = self._codec.max_bytes, None if self._taken is None else max(1, self._taken - HEADERS)
        return min((each for each in (own, room) if each is not None), default=None)

    @property
    def durability(self) -> str | None:
        """In words, what a power loss could cost; None before the queue was opened."""
        return None if self._durability is None else self._durability.words

    # -- coming and going ---------------------------------------------------------------------------

    def _at_home(self) -> Home:
        loop = asyncio.get_running_loop()
        if self._home is None or self._home.loop is not loop or self._home.where[-1] != os.getpid():
            # Another loop, or a forked child: what belonged to the old one is not ours.
            self._session, self._opening = None, asyncio.Lock()
            self._ticker.stop()
            self._buffer.clear()
            self._home = home_of(self._addresses(), timeout=self._timeout, options=self._options, apart=self)
        return self._home

    def _addresses(self) -> list[str]:
        url = self._url or os.environ.get(VARIABLE)
        if not url:
            raise ConfigurationError(
                f"the queue {self._name!r} has no server: set {VARIABLE} in the environment or give url=…"
            )
        learn_address(url)
        return [address.strip() for address in url.split(",") if address.strip()]

    async def _line(self) -> Line:
        return await self._at_home().line()

    async def _ready_line(self) -> Line:
        return (await self._opened()).line

    async def _opened(self) -> _Session:
        """The queue in order on a line that is up."""
        home = self._at_home()
        session = self._session
        if session is not None and not session.line.lost:
            return session
        assert self._opening is not None  # noqa: S101 - made with the home
        async with self._opening:
            session = self._session
            if session is None or session.line.lost:
                session = self._session = await self._open(await home.line())
            return session

    async def _open(self, line: Line) -> _Session:
        found = await built(line, self._layout)
        self._taken = line.max_payload
        if self._durability is None:
            await self._judge(line, found.storage)
        known: set[str] = set()
        if found.notes:
            skipped = len(self._names.note_subject) + 1
            async for each in api.scan(line, self._names.notes, bodies=False):
                known.add(each.subject[skipped:])
        pulls = Pulls(
            line,
            self._names.work,
            self._buffer,
            owner=self,
            lease=self._lease,
            max_bytes=self._limits.max_bytes,
            ticker=self._ticker,
            wake=self._arrivals.arrived,
            listened=lambda: self._listening > 0,
        )
        await pulls.begin()
        # A loop that was waiting to be woken looks at once that the line is gone.
        line.mourn(self._arrivals.arrived)
        return _Session(line, pulls, known)

    async def _judge(self, line: Line, storage: str) -> None:
        monitored = None
        if self._monitor is not None:
            monitored = await asyncio.to_thread(_monitored, self._monitor, self._timeout)
        self._durability = judged(version=line.version, storage=storage, monitored=monitored)
        level = logging.INFO if self._durability.durable else logging.WARNING
        logs.say(
            level,
            "nats durability",
            {"queue": self._name, "durable": self._durability.durable, "words": self._durability.words},
            to=_log,
            keep_none=True,
        )

    async def open_async(self) -> None:
        """Connect; make the queue's streams or check them, and say what the server's settings are worth."""
        await self._opened()

    async def close_async(self) -> None:
        """Disconnect. What is still held comes back to somebody when the lease ends."""
        self._closing += 1
        session, self._session = self._session, None
        home, self._home = self._home, None
        self._ticker.stop()
        if session is not None and not session.line.lost:
            await session.pulls.end()
            await self._give_back(list(self._buffer), session.line)
        elif session is not None:
            session.pulls.interrupt()
        self._buffer.clear()
        for claim in list(self._held):
            claim.owner = None
        self._held.clear()
        self._arrivals.interrupt()
        if home is not None and leave(home):
            await home.close()

    def listen(self, listener: Listener) -> Unlisten:
        unlisten = self._arrivals.listen(listener)
        self._listening += 1

        def leave_off() -> None:
            unlisten()
            self._listening -= 1

        return leave_off

    # -- the clock ------------------------------------------------------------------------------------

    def _ticked(self) -> bool:
        """Let go of what has run out; whether there is anything left to watch."""
        now = time.monotonic()
        expired = [claim for claim in self._held if claim.until <= now]
        for claim in expired:
            claim.owner = None
            self._held.discard(claim)
        if expired:
            self._arrivals.lost(expired)
        session = self._session
        if self._buffer and (session is None or not session.pulls.asking):
            stale = now + self._lease - min(_STRAY, self._lease / 4)
            strays = [claim for claim in self._buffer if claim.until <= stale]
            if strays:
                for claim in strays:
                    self._buffer.remove(claim)
                self._later(self._give_back(strays))
        return bool(self._held or self._buffer) or (session is not None and session.pulls.waiting)

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _give_back(self, claims: Sequence[Claim], line: Line | None = None) -> None:
        """Release what nobody has fetched; it must cost nothing."""
        if not claims:
            return
        try:
            line = line or await self._line()
            await self._with_notes(line, claims)
            stranger = Transaction("released")
            await self._settler.settle([(Delivery(stranger, claim), Release()) for claim in claims], line)
        except (ConnectionLost, api.ApiError) as error:
            logs.say(
                logging.WARNING,
                "what nobody fetched could not be given back; it comes again when its lease ends",
                {"queue": self._name, "deliveries": len(claims), "error": type(error).__name__},
                to=_log,
            )

    # -- fetch ----------------------------------------------------------------------------------------

    def limit_deliveries(self, most: int) -> None:
        self._limits.raise_deliveries(most)

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        """What is ready, the oldest first; a priority means nothing here."""
        if batch_size < 1:
            return []
        closing, end = self._closing, time.monotonic() + wait
        while True:
            session = await self._opened()
            if not self._buffer:
                await session.pulls.ask(1 if self._doubts else batch_size, max(0.0, end - time.monotonic()))
            if self._closing != closing:
                return []
            found = await self._fetched(session, batch_size)
            if found or time.monotonic() >= end:
                break
        if not found and self._listening:
            await session.pulls.stand()
        return found

    async def _fetched(self, session: _Session, count: int) -> list[Delivery]:
        buffer, now = self._buffer, time.monotonic()
        taken: list[Claim] = []
        while buffer and len(taken) < count:
            claim = buffer.popleft()
            if claim.until > now:
                taken.append(claim)
        known = session.known
        again = [claim for claim in taken if claim.delivered > 1 or (known and claim.key in known)]
        try:
            if again:
                await self._with_notes(session.line, again)
                await self._put_off_again(session.line, again)
        except BaseException:
            buffer.extendleft(reversed(taken))
            raise
        chosen, others = self._choose([claim for claim in taken if claim.owner is self])
        buffer.extendleft(reversed(others))
        if chosen and chosen[0].deliveries > 1 and buffer:
            # What is decoded next may end this process: no other claim is to pay for that with a delivery.
            spared = list(buffer)
            buffer.clear()
            try:
                await self._give_back(spared, session.line)
            except BaseException:
                buffer.extendleft(reversed(chosen))
                raise
        return [self._delivery(claim) for claim in chosen]

    def _choose(self, claims: Sequence[Claim]) -> tuple[Sequence[Claim], Sequence[Claim]]:
        """Return those that are handed out now, and the others: what was delivered before is handed out alone."""
        suspects = [claim for claim in claims if claim.deliveries > 1]
        self._doubts = _TRUST if suspects else max(0, self._doubts - len(claims)) if claims else 0
        if not suspects:
            return claims, ()
        fresh = [claim for claim in claims if claim.deliveries <= 1]
        return (fresh, suspects) if fresh else (suspects[:1], suspects[1:])

    def _delivery(self, claim: Claim) -> Delivery:
        message, error = claim.message, None
        headers = message.headers
        self._held.add(claim)
        if self._limits.exceeds(claim.deliveries):
            # It is a dead letter, and decoding it may be what ended the processes before.
            transaction, _ = describe_unread(len(message.data), headers, source=self._name, limit=None)
            return Delivery(transaction, claim, claim.deliveries, claim.until)
        try:
            transaction = self._codec.decode(message.data, headers, source=self._name)
        except Exception:  # noqa: BLE001 - whatever it is, the next line tells it
            transaction, error = decode(self._codec, message.data, headers, source=self._name)
        claim.readable = not isinstance(error, UndecodableError)
        if claim.note is not None and claim.readable:
            transaction = claim.note.apply(transaction, error, self._codec)
        return Delivery(transaction, claim, claim.deliveries, claim.until, error)

    async def _with_notes(self, line: Line, claims: Sequence[Claim]) -> None:
        """Have what was noted of *claims*."""
        subject = self._names.note_subject
        unread = [claim for claim in claims if claim.note is None]
        calls = [
            api.request(f"STREAM.MSG.GET.{self._names.notes}", last_by_subj=f"{subject}.{claim.key}")
            for claim in unread
        ]
        for claim, answer in zip(unread, await line.ask_all(calls), strict=True):
            try:
                stored = api.stored(api.read(answer))
            except api.ApiError as error:
                if error.number != api.NO_MESSAGE:
                    raise
                continue
            claim.note_seq = stored.seq
            try:
                claim.note = note.read(stored.body)
            except (ValueError, KeyError, TypeError):
                # Somebody else's: the message is worth more than what was noted of it.
                logs.say(logging.WARNING, "a note cannot be read", {"queue": self._name, "place": stored.seq}, to=_log)
                continue
            claim.deliveries = claim.note.deliveries(claim.delivered)

    async def _put_off_again(self, line: Line, claims: Sequence[Claim]) -> None:
        """A server that was killed forgets delays too: what comes before its time goes back for the rest of it."""
        now = time.time()
        early: list[Settling] = []
        for claim in claims:
            known = claim.note
            if known is not None and known.due > now + _EARLY:
                claim.readable = False  # its note stays as it is
                early.append((Delivery(Transaction("early"), claim), Later(known.due - now)))
        if early:
            await self._settler.settle(early, line)

    # -- settle and renew -----------------------------------------------------------------------------

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        return await self._settler.settle(settlings) if settlings else []

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._settler.extend(deliveries, self._lease) if deliveries else []

    # -- dispatch -------------------------------------------------------------------------------------

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Hand over all; none if one cannot be written. The same id twice is two messages."""
        if not transactions:
            return []
        return await self._dispatcher.dispatch([self.stamped(transaction) for transaction in transactions])

    # -- what is there --------------------------------------------------------------------------------

    async def depth_async(self) -> Depth:
        """What was given back and not yet fetched again counts as in flight: the server does not tell them apart."""
        line, its = await self._ready_line(), self._names
        consumer = await api.call(line, f"CONSUMER.INFO.{its.work}.{CONSUMER}")
        dead = await api.call(line, f"STREAM.INFO.{its.dead}")
        notes = await api.call(line, f"STREAM.INFO.{its.notes}")
        ready, pending = int(consumer["num_pending"]), int(consumer["num_ack_pending"])
        delayed = await self._delayed(line) if notes["state"]["messages"] else 0
        return Depth(
            ready=ready,
            delayed=min(delayed, pending),
            in_flight=max(0, pending - delayed),
            dead=int(dead["state"]["messages"]),
            oldest_age=await self._age(line, int(consumer["delivered"]["stream_seq"])) if ready else None,
        )

    async def _delayed(self, line: Line) -> int:
        now, count, looked = time.time(), 0, 0
        notes = api.scan(line, self._names.notes, bodies=False)
        async for each in notes:
            looked += 1
            due = each.headers.get(note.DUE)
            if due is not None and float(due) > now:
                count += 1
            if looked >= _COUNTED:
                break
        await notes.aclose()  # type: ignore[attr-defined] # a generator has it
        return count

    async def _age(self, line: Line, delivered: int) -> float | None:
        try:
            told = await api.call(line, f"STREAM.MSG.GET.{self._names.work}", seq=delivered + 1, next_by_subj=">")
        except api.ApiError as error:
            if error.number != api.NO_MESSAGE:
                raise
            return None  # fetched in between
        return max(0.0, time.time() - api.stored(told).at)

    async def queued_async(self, ids: Collection[str]) -> Collection[str] | None:
        """None for foreign messages: they are found by the id in their subject, which those do not have."""
        if isinstance(getattr(self._codec, "inner", self._codec), ForeignCodec):
            return None
        line, asked = await self._ready_line(), list(ids)
        calls = [api.request(f"STREAM.MSG.GET.{self._names.work}", last_by_subj=self._names.of(each)) for each in asked]
        found = set()
        for each, answer in zip(asked, await line.ask_all(calls), strict=True):
            try:
                api.read(answer)
            except api.ApiError as error:
                if error.number != api.NO_MESSAGE:
                    raise
                continue
            found.add(each)
        return found

    def examine(self, wall: Wall) -> Sequence[Finding]:
        """How the server and the queue are; streams are not made if they are not there."""
        return asyncio.run(self._examined(wall))

    async def _examined(self, wall: Wall) -> Sequence[Finding]:
        line = await connect(self._addresses(), timeout=self._timeout, options=self._options)
        try:
            monitored = None
            if self._monitor is not None:
                monitored = await asyncio.to_thread(_monitored, self._monitor, self._timeout)
            limit = self._limits.max_bytes
            return await examined(line, self._layout, self._name, limit=limit, monitored=monitored, wall=wall)
        finally:
            await line.close()

    # -- dead letters ---------------------------------------------------------------------------------

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        line = await self._ready_line()
        return await burials.listed(line, self._names, self._name, self._codec, query, after=after, limit=limit)

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        line = await self._ready_line()
        return await burials.replayed(line, self._names, self._codec, self._name, places)

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return await burials.discarded(await self._ready_line(), self._names, places)

    async def replace_dead_async(self, place: str, transaction: Transaction) -> ReplayResult:
        line = await self._ready_line()
        return await burials.replace_dead(line, self._names, place, self.stamped(transaction), codec=self._codec)


def _monitored(address: str, timeout: float) -> dict[str, Any] | None:
    """What the server says of its JetStream; None if it does not."""
    try:
        # The scheme was checked when the queue was made.
        with urllib.request.urlopen(f"{address.rstrip('/')}/varz", timeout=timeout) as answer:  # noqa: S310
            told = json.load(answer)
    except (OSError, ValueError) as error:
        logs.say(logging.WARNING, "the monitoring of nats does not answer", {"error": type(error).__name__}, to=_log)
        return None
    config = (told.get("jetstream") or {}).get("config")
    return config if isinstance(config, dict) else None
