"""BoundaryService: handles each call of the protocol: parses it, checks the caller's rights, calls the store.

A store keeps facts, numbered by offsets within a pair of zones, and artifacts, which are files. A reader confirms the
facts that it has processed, up to a cursor (epoch and offset).

A fetch returns as many facts as fit into one answer, without loading many more.

*who* is the identity in the caller's certificate. ``CallAdmission`` limits the calls, threads and request bytes of an
identity; ``RejectionHandler`` ends a failed call with its error, and logs or counts it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.boundary import AsyncBoundary, ObjectInfo
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown, FactError, InvalidFactError, LimitExceeded
from ergon_framework.facts.model import ObjectName, StoredFact
from ergon_framework.facts.service import boundary_pb2 as pb
from ergon_framework.facts.service import errors, requests, wire
from ergon_framework.facts.service.access import AccessPolicy, Identity, RevocationList, parse_certificate
from ergon_framework.facts.service.admission import CallAdmission
from ergon_framework.facts.service.connections import Connections
from ergon_framework.facts.service.errors import RejectionHandler
from ergon_framework.facts.service.limits import Limits, UploadSlots
from ergon_framework.facts.service.requests import MAX_MESSAGE_BYTES, FetchRequest
from ergon_framework.facts.service.wire import max_encoded_size

#: Facts in the first fetch, before their size is known; each has at most about 3 MiB.
FIRST_FETCH_FACTS: Final = 64


async def fetch_within_limit(
    store: AsyncBoundary, request: FetchRequest, *, max_readers: int | None = None
) -> list[StoredFact]:
    """Return at most ``request.limit`` facts and MAX_MESSAGE_BYTES bytes; at least one fact, if there is one."""
    facts: list[StoredFact] = []
    size, after = 0, request.after
    count = min(request.limit, FIRST_FETCH_FACTS)
    while True:
        try:
            stored = await store.fetch_facts_async(
                request.reader, request.pair, count, after=after, max_readers=max_readers
            )
        except FactError:
            if not facts:
                raise
            return facts  # the facts before the error are valid, and the next call receives the error
        for each in stored:
            # A character of the epoch has at most four bytes.
            size += max_encoded_size(each.envelope, each.fact) + 4 * len(each.epoch)
            if facts and size > MAX_MESSAGE_BYTES:
                return facts
            facts.append(each)
        if len(stored) < count or len(facts) >= request.limit:
            return facts
        after = stored[-1].cursor
        # As many more as fit if the rest has the size of the first ones.
        capacity = (MAX_MESSAGE_BYTES - size) * len(facts) // size
        count = max(1, min(request.limit - len(facts), capacity))


# -- service ----------------------------------------------------------------------------------------

T = TypeVar("T")

SERVICE_NAME: Final = "ergon.facts.v1.Boundary"
#: Maximum bytes of artifact content in one message.
MAX_CHUNK_BYTES: Final = 1024 * 1024
#: Seconds for which the service reads on from a sender whose upload was rejected, so that it receives the reason.
LINGER_SECONDS: Final = 5.0
#: Seconds after which the certificate of a listening caller is checked again.
RECHECK_SECONDS: Final = 1.0
#: Largest request, in bytes, that is parsed and hashed on the event loop, which takes a few milliseconds at most.
MAX_ON_LOOP_BYTES: Final = 4 * 1024


class BoundaryService:
    """Offers a store to remote callers, within *limits*."""

    def __init__(
        self,
        store: AsyncBoundary,
        access: AccessPolicy,
        revoked: RevocationList,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        limits = limits or Limits()
        self._store = store
        self._access = access
        self._revoked = revoked
        self._timeout = limits.call_timeout
        self._clock = clock
        self._upload_slots = UploadSlots(limits.uploads)
        self.admission = CallAdmission(limits)
        self.rejections = RejectionHandler()
        self.connections = Connections(limits, self.rejections)
        self._is_stopping = False
        self._wakeups: set[asyncio.Event] = set()

    def release(self) -> None:
        """Disconnect callers that only listen; all other calls may finish."""
        self._is_stopping = True
        for wakeup in self._wakeups:
            wakeup.set()

    def close(self) -> None:
        """Stop the threads, and log the rejections that were only counted."""
        self.admission.close()
        self.rejections.report(everything=True)

    # -- facts ----------------------------------------------------------------------------------------

    async def _describe(self, who: Identity, data: bytes) -> Message:  # noqa: ARG002 - open to every identity
        requests.parse(pb.DescribeRequest, data)
        return wire.write_description(self._store.epoch, self._store.capabilities)

    async def _append_fact(self, who: Identity, data: bytes) -> Message:
        envelope, fact = await self._parse_facts(who, data, requests.parse_append_fact)
        return wire.write_confirmation(await self._store.append_fact_async(envelope, fact))

    async def _append_facts(self, who: Identity, data: bytes) -> Message:
        parsed = await self._parse_facts(who, data, requests.parse_append_facts)
        valid = [each for each in parsed if not isinstance(each, FactError)]
        stored = iter(await self._store.append_facts_async(valid) if valid else ())
        results = [each if isinstance(each, FactError) else next(stored) for each in parsed]
        return wire.write_append_answer(results)

    async def _parse_facts(self, who: Identity, data: bytes, parse: Callable[[bytes, requests.CheckZones], T]) -> T:
        """Parse facts; their zones are checked against the caller's rights before they are made canonical."""

        def work() -> T:
            return parse(data, partial(self._access.check_append, who))

        return work() if len(data) <= MAX_ON_LOOP_BYTES else await self.admission.run(who, work)

    async def _get_fact(self, who: Identity, data: bytes) -> Message:
        from_zone, message_id = requests.parse_get_fact(data)
        self._access.check_lookup(who, from_zone)
        confirmation = await self._store.get_fact_async(from_zone, message_id)
        return pb.GetFactAnswer(confirmation=None if confirmation is None else wire.write_confirmation(confirmation))

    # -- reading --------------------------------------------------------------------------------------

    async def _fetch_facts(self, who: Identity, data: bytes) -> Message:
        request = requests.parse_fetch_facts(data)
        self._access.check_read(who, request.pair, request.reader)
        # A fetch registers the reader: no caller may add zone pairs that do not concern this store.
        if not self._access.concerns(request.pair) and await self._store.last_offset_async(request.pair) is None:
            raise self._access.unknown_pair_error(request.pair)
        max_readers = self._access.max_readers(request.pair, request.reader)
        async with self.admission.fetch_slots(who):
            return wire.write_fetch_answer(await fetch_within_limit(self._store, request, max_readers=max_readers))

    async def _confirm_receipt(self, who: Identity, data: bytes) -> Message:
        reader, pair, cursor = requests.parse_confirm_receipt(data)
        self._access.check_read(who, pair, reader)
        await self._store.confirm_receipt_async(reader, pair, cursor)
        return pb.ConfirmReceiptAnswer()

    async def _get_cursor(self, who: Identity, data: bytes) -> Message:
        reader, pair = requests.parse_get_cursor(data)
        self._access.check_cursor(who, pair)
        return _to_cursor_answer(await self._store.get_cursor_async(reader, pair))

    async def _last_offset(self, who: Identity, data: bytes) -> Message:
        pair = requests.parse_last_offset(data)
        self._access.check_cursor(who, pair)
        return _to_cursor_answer(await self._store.last_offset_async(pair))

    async def _cursor_at_time(self, who: Identity, data: bytes) -> Message:
        pair, unix_ms = requests.parse_cursor_at_time(data)
        self._access.check_cursor(who, pair)
        return _to_cursor_answer(await self._store.cursor_at_time_async(pair, unix_ms))

    async def _retire_reader(self, who: Identity, data: bytes) -> Message:
        reader, pair, by = requests.parse_retire_reader(data)
        operator = self._access.require_operator(who)
        # The operator in the certificate is proven; the name in the request is only appended to it.
        name = f"{operator} ({by})" if by and by != operator else operator
        return pb.RetireReaderAnswer(retired=await self._store.retire_reader_async(reader, pair, by=name))

    async def _list_logs(self, who: Identity, data: bytes) -> Message:
        requests.parse(pb.SurveyRequest, data)
        visible_logs = self._access.filter_visible(who, await self._store.list_logs_async())
        return pb.SurveyAnswer(logs=map(wire.write_log, visible_logs))

    async def _watch(self, who: Identity, data: bytes, context: Any) -> None:
        """Send a message whenever facts may have arrived, until the caller loses its access or the service stops."""
        requests.parse(pb.WatchRequest, data)
        loop, wakeup = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # Called from any thread; a closed loop has no listening caller left.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(wakeup.set)

        self._wakeups.add(wakeup)
        unlisten = self._store.listen(wake)
        # Facts that arrived before the caller listened are announced too.
        wakeup.set()
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(wakeup.wait(), RECHECK_SECONDS)
                self.admit(who)
                if self._is_stopping:
                    raise ConnectionLostError("the service is stopping; listen to another one, or retry later")
                if wakeup.is_set():
                    wakeup.clear()
                    await self._write(context, pb.Ring())
        finally:
            unlisten()
            self._wakeups.discard(wakeup)

    # -- artifacts ------------------------------------------------------------------------------------

    async def _put_object(self, who: Identity, incoming: AsyncIterator[bytes]) -> pb.Stored:
        self._access.check_put(who)
        header = requests.parse_put_part(await self._receive(incoming))
        if not isinstance(header, requests.PutRequest):
            raise InvalidFactError("an upload must begin with a header that names its target")
        owner = self._access.check_put(who, header.zone)
        slot = self._upload_slots.take(self._access.own_zones(who))
        async with aclosing(self._receive_chunks(who, incoming)) as pieces:
            with slot:
                stored = await self._store.put_object_async(
                    header.bucket, header.key, pieces, expected=header.expected, begin=header.begin, zone=owner
                )
        return wire.write_artifact(stored)

    async def _receive_chunks(self, who: Identity, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        size = 0
        while True:
            part = requests.parse_put_part(await self._receive(incoming))
            self.admit(who)
            if isinstance(part, bytes):
                size += len(part)
                yield part
            elif part == size:
                return
            else:
                raise InvalidFactError(
                    f"an upload must end with its size, and {size} bytes were received; data is missing"
                )

    async def _receive(self, incoming: AsyncIterator[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                return await anext(incoming)
        except StopAsyncIteration:
            raise ConnectionLostError("the upload broke off before its end; call Received and resume there") from None

    async def _uploaded_bytes(self, who: Identity, data: bytes) -> Message:
        request = requests.parse_uploaded_bytes(data)
        owner = self._access.check_put(who, request.zone)
        assert request.expected is not None  # noqa: S101 - the parser requires it
        size = await self._store.uploaded_bytes_async(request.bucket, request.key, request.expected, zone=owner)
        return pb.ReceivedAnswer(size=size)

    async def _get_object(self, who: Identity, data: bytes, context: Any) -> None:
        name, begin = requests.parse_get_object(data)
        info = await self._stat_object(who, name)
        header = pb.GetObjectHeader(stored=None if info is None else wire.write_artifact(info.stored))
        await self._write(context, pb.GetObjectAnswer(header=header))
        owner = name.zone if info is None else info.zone
        stream: Any = self._store.get_object_async(name.bucket, name.key, begin=begin, zone=owner)
        async with aclosing(stream):
            async for piece in stream:
                for start in range(0, len(piece), MAX_CHUNK_BYTES):
                    self.admit(who)
                    await self._write(context, pb.GetObjectAnswer(piece=piece[start : start + MAX_CHUNK_BYTES]))

    async def _stat_object(self, who: Identity, name: ObjectName) -> ObjectInfo | None:
        """Return the first artifact of that name that the caller may read; None if it is missing and the caller's."""
        rejection: ArtifactUnknown | None = None
        for owner in self._access.list_owners(who, name.zone):
            info = await self._store.stat_object_async(name.bucket, name.key, zone=owner)
            if info is not None:
                try:
                    self._access.check_get(who, name.bucket, name.key, info)
                except ArtifactUnknown as error:
                    rejection = error
                else:
                    return info
        if rejection is not None:
            raise rejection
        self._access.check_get(who, name.bucket, name.key, None)
        return None

    async def _write(self, context: Any, answer: Message) -> None:
        async with asyncio.timeout(self._timeout):
            await context.write(wire.encode(answer))

    # -- server ---------------------------------------------------------------------------------------

    def make_handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all calls. It takes bytes, so that invalid requests are answered instead of logged.

        All calls are registered as taking a stream, also those that take one request: the caller is then identified,
        or rejected, before any byte of a request is received. There is no difference on the wire.
        """
        unary = {
            "Describe": self._describe,
            "AppendFact": self._append_fact,
            "AppendFacts": self._append_facts,
            "GetFact": self._get_fact,
            "FetchFacts": self._fetch_facts,
            "ConfirmReceipt": self._confirm_receipt,
            "CursorOf": self._get_cursor,
            "EndOf": self._last_offset,
            "CursorAt": self._cursor_at_time,
            "RetireReader": self._retire_reader,
            "Survey": self._list_logs,
            "Received": self._uploaded_bytes,
        }
        # Checks of the caller's rights that are made before the request is read.
        prechecks: dict[str, Callable[[Identity], object]] = {
            "AppendFact": self._access.check_append_any,
            "AppendFacts": self._access.check_append_any,
            "RetireReader": self._access.require_operator,
            "Received": self._access.check_put,
        }
        streams = {"Watch": self._watch, "GetObject": self._get_object}
        handlers = {
            **{
                name: grpc.stream_unary_rpc_method_handler(self._make_unary_handler(name, call, prechecks.get(name)))
                for name, call in unary.items()
            },
            **{
                name: grpc.stream_stream_rpc_method_handler(self._make_stream_handler(name, call))
                for name, call in streams.items()
            },
            "PutObject": grpc.stream_stream_rpc_method_handler(self._upload),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)

    def _make_unary_handler(
        self,
        name: str,
        call: Callable[[Identity, bytes], Awaitable[Message]],
        precheck: Callable[[Identity], object] | None,
    ) -> Any:
        async def handle(incoming: AsyncIterator[bytes], context: Any) -> bytes:
            async with self.rejections.abort_on_error(name, context):
                who = self.identify(context)
                if precheck is not None:
                    precheck(who)
                with self.admission.admit(who, stream=False) as caller:
                    async with asyncio.timeout(self._timeout), caller.request(aiter(incoming)) as data:
                        return wire.encode(await call(who, data))
            raise AssertionError  # a rejection has ended the call

        return handle

    def _make_stream_handler(self, name: str, call: Callable[[Identity, bytes, Any], Awaitable[None]]) -> Any:
        async def handle(incoming: AsyncIterator[bytes], context: Any) -> None:
            async with self.rejections.abort_on_error(name, context):
                who = self.identify(context)
                with self.admission.admit(who, stream=True) as caller:
                    async with asyncio.timeout(self._timeout), caller.request(aiter(incoming)) as request:
                        data = request
                    await call(who, data, context)

        return handle

    async def _upload(self, incoming: AsyncIterator[bytes], context: Any) -> None:
        """Handle an upload; of a rejected one the rest is read, so that the sender receives the reason."""
        parts = aiter(incoming)
        is_admitted = False

        async def drain_upload(error: FactError) -> None:
            if not is_admitted:
                return
            await self._write(context, pb.PutObjectAnswer(fault=errors.to_wire(error)))
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    async for _ in parts:
                        pass

        # Encloses the error handling: a sender whose upload is drained still counts as a stream of its identity.
        with ExitStack() as stack:
            async with self.rejections.abort_on_error("PutObject", context, before_abort=drain_upload):
                who = self.identify(context)
                stack.enter_context(self.admission.admit(who, stream=True))
                is_admitted = True
                stored = await self._put_object(who, parts)
                await self._write(context, pb.PutObjectAnswer(stored=stored))

    def identify(self, context: Any) -> Identity:
        """Return the identity of the caller; a connection with a rejected identity is closed soon."""
        try:
            who = self._read_identity(context)
        except AccessDenied:
            self.connections.reject(context.peer())
            raise
        self.connections.identify(context.peer(), who)
        return who

    def record_identity(self, context: Any) -> None:
        """Record the identity of the caller, if it has one that is admitted."""
        with suppress(AccessDenied, LimitExceeded):
            self.connections.identify(context.peer(), self._read_identity(context))

    def _read_identity(self, context: Any) -> Identity:
        """Return the identity; the handshake has verified the certificate, this checks what may have changed since."""
        certificates = context.auth_context().get("x509_pem_cert")
        if not certificates:
            raise AccessDenied("there is no certificate on this connection; mutual TLS is needed")
        who = parse_certificate(certificates[0])
        self.admit(who)
        return who

    def admit(self, who: Identity) -> None:
        """Raise AccessDenied unless the certificate of *who* is valid now and not revoked."""
        who.check(self._clock())
        self._revoked.check(who)


def _to_cursor_answer(cursor: Any) -> Message:
    return pb.CursorAnswer(cursor=None if cursor is None else wire.write_cursor(cursor))
