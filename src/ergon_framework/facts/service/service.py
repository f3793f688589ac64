"""BoundaryService: each call of the protocol, from its bytes over the caller's rights to the store, and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.boundary import AsyncBoundary, KnownObject
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown, FactError, InvalidFactError, LimitExceeded
from ergon_framework.facts.model import ObjectName
from ergon_framework.facts.service import batches, faults, identity, messages, requests
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.access import Access
from ergon_framework.facts.service.admission import Admission
from ergon_framework.facts.service.connections import Connections
from ergon_framework.facts.service.fetching import fetched
from ergon_framework.facts.service.identity import Identity
from ergon_framework.facts.service.limits import Limits
from ergon_framework.facts.service.refusals import Refusals
from ergon_framework.facts.service.revoked import Revoked
from ergon_framework.facts.service.uploads import UploadSlots

T = TypeVar("T")

NAME: Final = "ergon.facts.v1.Boundary"
#: The largest piece of an artifact in one message.
PIECE: Final = 1024 * 1024
#: Seconds for which somebody who goes on sending what was refused is listened to, so that he can hear why.
LINGER: Final = 5.0
#: Seconds after which somebody who only listens is looked at again.
LOOK: Final = 1.0
#: The largest request, in bytes, that is read and hashed on the event loop; it takes a few milliseconds at most.
MAX_ON_LOOP: Final = 4 * 1024


class BoundaryService:
    """A store as others may use it, within *limits*."""

    def __init__(
        self,
        store: AsyncBoundary,
        access: Access,
        revoked: Revoked,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        limits = limits or Limits()
        self._store = store
        self._access = access
        self._revoked = revoked
        self._patience = limits.patience
        self._clock = clock
        self._upload_slots = UploadSlots(limits.uploads)
        self.admission = Admission(limits)
        self.refusals = Refusals()
        self.connections = Connections(limits, self.refusals)
        self._leaving = False
        self._bells: set[asyncio.Event] = set()

    def leave(self) -> None:
        """Whoever only listens is sent away; everybody else may finish."""
        self._leaving = True
        for bell in self._bells:
            bell.set()

    def close(self) -> None:
        """End the threads, and log the refusals that were only counted."""
        self.admission.close()
        self.refusals.report(everything=True)

    # -- facts ----------------------------------------------------------------------------------------

    async def _describe(self, who: Identity, data: bytes) -> Message:  # noqa: ARG002 - everybody with a name may
        requests.parse(wire.DescribeRequest, data)
        return messages.write_description(self._store.epoch, self._store.capabilities)

    async def _append_fact(self, who: Identity, data: bytes) -> Message:
        envelope, fact = await self._read(who, data, requests.append_fact)
        return messages.write_confirmation(await self._store.append_fact_async(envelope, fact))

    async def _append_facts(self, who: Identity, data: bytes) -> Message:
        given = await self._read(who, data, requests.append_facts)
        sound = [each for each in given if not isinstance(each, FactError)]
        stored = iter(await self._store.append_facts_async(sound) if sound else ())
        results = [each if isinstance(each, FactError) else next(stored) for each in given]
        return batches.write_answer(results)

    async def _read(self, who: Identity, data: bytes, read: Callable[[bytes, requests.CheckZones], T]) -> T:
        """Read facts, whose zones are compared with the rights of *who* before they are brought into canonical form."""

        def work() -> T:
            return read(data, partial(self._access.append, who))

        return work() if len(data) <= MAX_ON_LOOP else await self.admission.run(who, work)

    async def _get_fact(self, who: Identity, data: bytes) -> Message:
        from_zone, message_id = requests.get_fact(data)
        self._access.ask(who, from_zone)
        found = await self._store.get_fact_async(from_zone, message_id)
        return wire.GetFactAnswer(confirmation=None if found is None else messages.write_confirmation(found))

    # -- reading --------------------------------------------------------------------------------------

    async def _fetch_facts(self, who: Identity, data: bytes) -> Message:
        fetch = requests.fetch_facts(data)
        self._access.read(who, fetch.pair, fetch.reader)
        # Fetching registers: nobody adds pairs of zones that this store has nothing to do with.
        if not self._access.concerns(fetch.pair) and await self._store.end_of_async(fetch.pair) is None:
            raise self._access.unknown(fetch.pair)
        most = self._access.max_readers(fetch.pair, fetch.reader)
        async with self.admission.fetching(who):
            return batches.write_fetched(await fetched(self._store, fetch, max_readers=most))

    async def _confirm_receipt(self, who: Identity, data: bytes) -> Message:
        reader, pair, cursor = requests.confirm_receipt(data)
        self._access.read(who, pair, reader)
        await self._store.confirm_receipt_async(reader, pair, cursor)
        return wire.ConfirmReceiptAnswer()

    async def _cursor_of(self, who: Identity, data: bytes) -> Message:
        reader, pair = requests.cursor_of(data)
        self._access.look(who, pair)
        return _cursor(await self._store.cursor_of_async(reader, pair))

    async def _end_of(self, who: Identity, data: bytes) -> Message:
        pair = requests.end_of(data)
        self._access.look(who, pair)
        return _cursor(await self._store.end_of_async(pair))

    async def _cursor_at(self, who: Identity, data: bytes) -> Message:
        pair, unix_ms = requests.cursor_at(data)
        self._access.look(who, pair)
        return _cursor(await self._store.cursor_at_async(pair, unix_ms))

    async def _retire_reader(self, who: Identity, data: bytes) -> Message:
        reader, pair, by = requests.retire_reader(data)
        operator = self._access.operate(who)
        # The certificate is what was proven; whatever else was said stands beside it.
        name = f"{operator} ({by})" if by and by != operator else operator
        return wire.RetireReaderAnswer(retired=await self._store.retire_reader_async(reader, pair, by=name))

    async def _survey(self, who: Identity, data: bytes) -> Message:
        requests.parse(wire.SurveyRequest, data)
        seen = self._access.visible(who, await self._store.survey_async())
        return wire.SurveyAnswer(logs=map(messages.write_log, seen))

    async def _watch(self, who: Identity, data: bytes, context: Any) -> None:
        requests.parse(wire.WatchRequest, data)
        loop, bell = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # From any thread; a loop that is closed has nobody left who listens.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(bell.set)

        self._bells.add(bell)
        unlisten = self._store.listen(wake)
        bell.set()
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(bell.wait(), LOOK)
                self.admit(who)
                if self._leaving:
                    raise ConnectionLost("the service is being stopped; listen to another one, or again later")
                if bell.is_set():
                    bell.clear()
                    await self._write(context, wire.Ring())
        finally:
            unlisten()
            self._bells.discard(bell)

    # -- artifacts ------------------------------------------------------------------------------------

    async def _put_object(self, who: Identity, incoming: AsyncIterator[bytes]) -> wire.Stored:
        self._access.put(who)
        header = requests.put_part(await self._next(incoming))
        if not isinstance(header, requests.Put):
            raise InvalidFactError("an upload begins with a header that says where it goes")
        owner = self._access.put(who, header.zone)
        slot = self._upload_slots.take(self._access.own_zones(who))
        async with aclosing(self._pieces(who, incoming)) as pieces:
            with slot:
                stored = await self._store.put_object_async(
                    header.bucket, header.key, pieces, expected=header.expected, begin=header.begin, zone=owner
                )
        return messages.write_stored(stored)

    async def _pieces(self, who: Identity, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        size = 0
        while True:
            part = requests.put_part(await self._next(incoming))
            self.admit(who)
            if isinstance(part, bytes):
                size += len(part)
                yield part
            elif part == size:
                return
            else:
                raise InvalidFactError(
                    f"an upload ends with how many bytes it had, which are {size}; something is missing"
                )

    async def _next(self, incoming: AsyncIterator[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._patience):
                return await anext(incoming)
        except StopAsyncIteration:
            raise ConnectionLost("the upload broke off before its end; ask Received, and go on from there") from None

    async def _received(self, who: Identity, data: bytes) -> Message:
        asked = requests.received(data)
        owner = self._access.put(who, asked.zone)
        assert asked.expected is not None  # noqa: S101 - the request has been read
        size = await self._store.received_async(asked.bucket, asked.key, asked.expected, zone=owner)
        return wire.ReceivedAnswer(size=size)

    async def _get_object(self, who: Identity, data: bytes, context: Any) -> None:
        name, begin = requests.get_object(data)
        known = await self._known_object(who, name)
        header = wire.GetObjectHeader(stored=None if known is None else messages.write_stored(known.stored))
        await self._write(context, wire.GetObjectAnswer(header=header))
        owner = name.zone if known is None else known.zone
        stream: Any = self._store.get_object_async(name.bucket, name.key, begin=begin, zone=owner)
        async with aclosing(stream):
            async for piece in stream:
                for start in range(0, len(piece), PIECE):
                    self.admit(who)
                    await self._write(context, wire.GetObjectAnswer(piece=piece[start : start + PIECE]))

    async def _known_object(self, who: Identity, name: ObjectName) -> KnownObject | None:
        """Return the first artifact of that name that *who* may read; None if it is missing, and its own."""
        refused: ArtifactUnknown | None = None
        for owner in self._access.owners(who, name.zone):
            known = await self._store.known_object_async(name.bucket, name.key, zone=owner)
            if known is not None:
                try:
                    self._access.get(who, name.bucket, name.key, known)
                except ArtifactUnknown as error:
                    refused = error
                else:
                    return known
        if refused is not None:
            raise refused
        self._access.get(who, name.bucket, name.key, None)
        return None

    async def _write(self, context: Any, answer: Message) -> None:
        async with asyncio.timeout(self._patience):
            await context.write(messages.written(answer))

    # -- around it ------------------------------------------------------------------------------------

    def handler(self) -> grpc.GenericRpcHandler:
        """All calls, for a server. They are given bytes: what is malformed is to be told, not to be logged.

        All of them are registered as taking a stream, also those that take one request: so the caller is known, and
        refused, before anything of a request is received. On the wire there is no difference.
        """
        unary = {
            "Describe": self._describe,
            "AppendFact": self._append_fact,
            "AppendFacts": self._append_facts,
            "GetFact": self._get_fact,
            "FetchFacts": self._fetch_facts,
            "ConfirmReceipt": self._confirm_receipt,
            "CursorOf": self._cursor_of,
            "EndOf": self._end_of,
            "CursorAt": self._cursor_at,
            "RetireReader": self._retire_reader,
            "Survey": self._survey,
            "Received": self._received,
        }
        # What is asked of the caller's rights before the request is known.
        first: dict[str, Callable[[Identity], object]] = {
            "AppendFact": self._access.append_any,
            "AppendFacts": self._access.append_any,
            "RetireReader": self._access.operate,
            "Received": self._access.put,
        }
        streams = {"Watch": self._watch, "GetObject": self._get_object}
        handlers = {
            **{
                name: grpc.stream_unary_rpc_method_handler(self._unary(name, call, first.get(name)))
                for name, call in unary.items()
            },
            **{name: grpc.stream_stream_rpc_method_handler(self._stream(name, call)) for name, call in streams.items()},
            "PutObject": grpc.stream_stream_rpc_method_handler(self._upload),
        }
        return grpc.method_handlers_generic_handler(NAME, handlers)

    def _unary(
        self,
        name: str,
        call: Callable[[Identity, bytes], Awaitable[Message]],
        first: Callable[[Identity], object] | None,
    ) -> Any:
        async def handle(incoming: AsyncIterator[bytes], context: Any) -> bytes:
            async with self.refusals.told(name, context):
                who = self.identify(context)
                if first is not None:
                    first(who)
                with self.admission.admit(who, stream=False) as caller:
                    async with asyncio.timeout(self._patience), caller.request(aiter(incoming)) as data:
                        return messages.written(await call(who, data))
            raise AssertionError  # what was refused has ended the call

        return handle

    def _stream(self, name: str, call: Callable[[Identity, bytes, Any], Awaitable[None]]) -> Any:
        async def handle(incoming: AsyncIterator[bytes], context: Any) -> None:
            async with self.refusals.told(name, context):
                who = self.identify(context)
                with self.admission.admit(who, stream=True) as caller:
                    async with asyncio.timeout(self._patience), caller.request(aiter(incoming)) as request:
                        data = request
                    await call(who, data, context)

        return handle

    async def _upload(self, incoming: AsyncIterator[bytes], context: Any) -> None:
        parts = aiter(incoming)
        is_admitted = False

        async def hear_out(error: FactError) -> None:
            if not is_admitted:
                return
            await self._write(context, wire.PutObjectAnswer(fault=faults.write(error)))
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    async for _ in parts:
                        pass

        # Around the refusal: a sender that is heard out keeps its place among the streams of its identity.
        with ExitStack() as admitted:
            async with self.refusals.told("PutObject", context, first=hear_out):
                who = self.identify(context)
                admitted.enter_context(self.admission.admit(who, stream=True))
                is_admitted = True
                stored = await self._put_object(who, parts)
                await self._write(context, wire.PutObjectAnswer(stored=stored))

    def identify(self, context: Any) -> Identity:
        """Return the identity of the caller; a connection whose identity is refused is closed soon."""
        try:
            who = self._read_identity(context)
        except AccessDenied:
            self.connections.refuse(context.peer())
            raise
        self.connections.identify(context.peer(), who)
        return who

    def recognise(self, context: Any) -> None:
        """Note the identity of the caller, if it has one that is let in."""
        with suppress(AccessDenied, LimitExceeded):
            self.connections.identify(context.peer(), self._read_identity(context))

    def _read_identity(self, context: Any) -> Identity:
        """The handshake has checked the certificate; what may have changed since is checked here."""
        found = context.auth_context().get("x509_pem_cert")
        if not found:
            raise AccessDenied("there is no certificate on this connection; mutual TLS is needed")
        who = identity.read(found[0])
        self.admit(who)
        return who

    def admit(self, who: Identity) -> None:
        """Raise AccessDenied unless the certificate of *who* holds now and is not revoked."""
        who.check(self._clock())
        self._revoked.check(who)


def _cursor(found: Any) -> Message:
    return wire.CursorAnswer(cursor=None if found is None else messages.write_cursor(found))
