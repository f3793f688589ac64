"""BoundaryClient: a boundary that is somewhere else, in the sync flavour; called from several threads at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import grpc

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.blob import to_pieces
from ergon_framework.facts.boundary import (
    Appended,
    Appending,
    BlobSource,
    Boundary,
    BoundaryCapabilities,
    LogState,
    Pruned,
    Unlisten,
)
from ergon_framework.facts.model import Cursor, Envelope, Fact, FactConfirmation, Pair, Stored, StoredFact
from ergon_framework.facts.service import calls, faults
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.bell import Bell
from ergon_framework.facts.service.calls import SERVICE, Asked
from ergon_framework.facts.service.line import Line
from ergon_framework.facts.service.messages import written
from ergon_framework.facts.service.transfer import Download, Upload
from ergon_framework.facts.service.transfers import download, upload

T = TypeVar("T")


class BoundaryClient(Boundary):
    """A store behind a service. A line that is down is ConnectionLost: nobody knows whether it was done.

    ``epoch`` and ``capabilities`` are asked for once; ``describe`` asks again.
    """

    def __init__(self, address: Address) -> None:
        self._line = Line(address)
        self._deadline = address.deadline
        self._bell = Bell(address)
        self._described: tuple[str, BoundaryCapabilities] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Calls that are under way are cancelled."""
        self._bell.close()
        self._line.close()

    def describe(self) -> tuple[str, BoundaryCapabilities]:
        """The epoch and the capabilities of the store as they are now."""
        self._described = self._ask(calls.describe())
        return self._described

    @property
    def epoch(self) -> str:
        return (self._described or self.describe())[0]

    @property
    def capabilities(self) -> BoundaryCapabilities:
        return (self._described or self.describe())[1]

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        return self._bell.listen(wake)

    # -- facts ----------------------------------------------------------------------------------------

    def append_fact(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        return self._ask(calls.append_fact(envelope, fact))

    def append_facts(self, facts: Sequence[Appending]) -> Sequence[Appended]:
        return [result for asked in calls.append_facts(facts) for result in self._ask(asked)]

    def forward_facts(self, facts: Sequence[StoredFact]) -> Sequence[Appended]:  # noqa: ARG002 - not here
        raise calls.not_offered("forwarding facts")

    def get_fact(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return self._ask(calls.get_fact(from_zone, message_id))

    # -- reading --------------------------------------------------------------------------------------

    def fetch_facts(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        if max_readers is not None:
            raise calls.not_offered("a limit of readers")
        return self._ask(calls.fetch_facts(reader, pair, limit, after))

    def confirm_receipt(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        self._ask(calls.confirm_receipt(reader, pair, cursor))

    def cursor_of(self, reader: str, pair: Pair) -> Cursor | None:
        return self._ask(calls.cursor_of(reader, pair))

    def end_of(self, pair: Pair) -> Cursor | None:
        return self._ask(calls.end_of(pair))

    def cursor_at(self, pair: Pair, unix_ms: int) -> Cursor | None:
        return self._ask(calls.cursor_at(pair, unix_ms))

    def retire_reader(self, reader: str, pair: Pair, *, by: str = "") -> bool:
        return self._ask(calls.retire_reader(reader, pair, by))

    def survey(self) -> Sequence[LogState]:
        return self._ask(calls.survey())

    # -- artifacts ------------------------------------------------------------------------------------

    def put_object(
        self,
        bucket: str,
        key: str,
        blob: BlobSource,
        *,
        expected: Stored | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> Stored:
        given = Upload(bucket, key, to_pieces(blob), expected, begin, zone)
        return upload(given, self._line, received=partial(self.received, zone=zone))

    def received(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:
        return self._ask(calls.received(bucket, key, expected, zone))

    def get_object(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> Iterator[bytes]:
        return download(Download(bucket, key, begin, zone), self._line)

    # -- retention ------------------------------------------------------------------------------------

    def prune(self, before_unix_ms: int) -> Pruned:  # noqa: ARG002 - not here
        raise calls.not_offered("retention")

    def _ask(self, asked: Asked[T]) -> T:
        with self._line.open() as held:
            call: Any = held.call("unary_unary", SERVICE + asked.method)
            try:
                data = call(written(asked.request), timeout=self._deadline)
            except grpc.RpcError as error:
                failed: Any = error
                raise faults.raised(failed, asked.method) from error
            except ValueError as error:
                # So gRPC says that the channel is closed.
                raise ConnectionLost(f"{asked.method} was not sent, the client is closed; make another one") from error
        return asked.result(data)
