"""BoundaryClient: the sync client of a remote boundary; several threads may call it concurrently.

A boundary stores facts and artifacts of zones; a remote one is served by ``facts.service.server``. A call whose
connection was lost has an unknown outcome: the caller repeats it with the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import grpc

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.append import to_chunks
from ergon_framework.facts.boundary import (
    AppendResult,
    BlobSource,
    Boundary,
    BoundaryCapabilities,
    LogState,
    NewFact,
    PruneResult,
    Unlisten,
)
from ergon_framework.facts.model import Cursor, Envelope, Fact, FactConfirmation, StoredArtifact, StoredFact, ZonePair
from ergon_framework.facts.service import calls, errors
from ergon_framework.facts.service.calls import SERVICE, RpcCall
from ergon_framework.facts.service.channel import ReconnectingChannel, ServiceAddress
from ergon_framework.facts.service.transfer import RemoteDownload, RemoteUpload, download, upload
from ergon_framework.facts.service.wakeup import ServiceListener
from ergon_framework.facts.service.wire import encode

T = TypeVar("T")


class BoundaryClient(Boundary):
    """A store behind a service. A lost connection raises ConnectionLostError: the outcome is then unknown.

    ``epoch`` and ``capabilities`` are queried once; ``describe`` queries them again.
    """

    def __init__(self, address: ServiceAddress) -> None:
        self._channel = ReconnectingChannel(address)
        self._deadline = address.deadline
        self._listener = ServiceListener(address)
        self._description: tuple[str, BoundaryCapabilities] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client; running calls are cancelled."""
        self._listener.close()
        self._channel.close()

    def describe(self) -> tuple[str, BoundaryCapabilities]:
        """Query the current epoch and capabilities of the store."""
        self._description = self._call(calls.describe())
        return self._description

    @property
    def epoch(self) -> str:
        return (self._description or self.describe())[0]

    @property
    def capabilities(self) -> BoundaryCapabilities:
        return (self._description or self.describe())[1]

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        return self._listener.listen(wake)

    # -- facts ----------------------------------------------------------------------------------------

    def append_fact(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        return self._call(calls.append_fact(envelope, fact))

    def append_facts(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        return [result for rpc_call in calls.append_facts(facts) for result in self._call(rpc_call)]

    def forward_facts(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:  # noqa: ARG002 - unused
        raise calls.not_supported_error("forwarding facts")

    def get_fact(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return self._call(calls.get_fact(from_zone, message_id))

    # -- reading --------------------------------------------------------------------------------------

    def fetch_facts(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        if max_readers is not None:
            raise calls.not_supported_error("a limit of readers")
        return self._call(calls.fetch_facts(reader, pair, limit, after))

    def confirm_receipt(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        self._call(calls.confirm_receipt(reader, pair, cursor))

    def get_cursor(self, reader: str, pair: ZonePair) -> Cursor | None:
        return self._call(calls.get_cursor(reader, pair))

    def last_offset(self, pair: ZonePair) -> Cursor | None:
        return self._call(calls.last_offset(pair))

    def cursor_at_time(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        return self._call(calls.cursor_at_time(pair, unix_ms))

    def retire_reader(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:
        return self._call(calls.retire_reader(reader, pair, by))

    def list_logs(self) -> Sequence[LogState]:
        return self._call(calls.list_logs())

    # -- artifacts ------------------------------------------------------------------------------------

    def put_object(
        self,
        bucket: str,
        key: str,
        blob: BlobSource,
        *,
        expected: StoredArtifact | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> StoredArtifact:
        artifact = RemoteUpload(bucket, key, to_chunks(blob), expected, begin, zone)
        return upload(artifact, self._channel, uploaded_bytes=partial(self.uploaded_bytes, zone=zone))

    def uploaded_bytes(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:
        return self._call(calls.uploaded_bytes(bucket, key, expected, zone))

    def get_object(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> Iterator[bytes]:
        return download(RemoteDownload(bucket, key, begin, zone), self._channel)

    # -- retention ------------------------------------------------------------------------------------

    def prune(self, before_unix_ms: int) -> PruneResult:  # noqa: ARG002 - unused
        raise calls.not_supported_error("retention")

    def _call(self, rpc_call: RpcCall[T]) -> T:
        with self._channel.open() as lease:
            call: Any = lease.get_stub("unary_unary", SERVICE + rpc_call.method)
            try:
                data = call(encode(rpc_call.request), timeout=self._deadline)
            except grpc.RpcError as error:
                rpc_error: Any = error
                raise errors.to_client_error(rpc_error, rpc_call.method) from error
            except ValueError as error:
                # gRPC raises ValueError when the channel is closed.
                raise ConnectionLostError(
                    f"{rpc_call.method} was not sent: the client is closed; create a new one"
                ) from error
        return rpc_call.to_result(data)
