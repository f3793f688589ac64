"""Facts: the common way to append facts, inside a handler and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.engine.drivers.caller import AsyncInlineRunner, InlineRunner
from ergon_framework.engine.senses import Clock
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.labels import with_trace
from ergon_framework.facts.model import Envelope, FactConfirmation, check_zone
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.facts.publish import BoundaryCalls, Publication, Upload, publish

_caller: Final = InlineRunner()
_async_caller: Final = AsyncInlineRunner()


class _Facts:
    """The common part of the sync and async variants: everything except how a store is called."""

    def __init__(self, zone: str, max_retries: int | None) -> None:
        check_zone("the zone of Facts", zone)
        self._zone = zone
        self._retry = AppendRetry() if max_retries is None else AppendRetry.with_retries(max_retries)

    @property
    def zone(self) -> str:
        """The zone that the facts come from."""
        return self._zone

    def _build_publication(
        self,
        to_zone: str,
        subject: str,
        predicate: str,
        *,
        object: Any,  # noqa: A002 - the term of the source document
        artifact: Upload | None,
        name: str | None,
        message_id: str | None,
        labels: Mapping[str, str] | None,
        correlation_id: str | None,
        produced_at: datetime | None,
        clock: Clock,
    ) -> Publication:
        outer = scope.current()
        if message_id is None:
            if outer is None:
                raise ConfigurationError(
                    "a fact that is appended outside a handler has no transaction to derive its id from: give it "
                    "message_id=business_id(...), made of what names the event, so that a second run makes the same"
                )
            message_id = outer.derive(name or f"{to_zone}/{subject}/{predicate}")
        created_at = None if outer is None else outer.transaction.created_at
        if correlation_id is None and outer is not None:
            correlation_id = outer.correlation
        envelope = Envelope(
            message_id=message_id,
            from_zone=self._zone,
            to_zone=to_zone,
            produced_at_unix_ms=_to_unix_ms(produced_at, clock.wall() if created_at is None else created_at),
            correlation_id=correlation_id,
            causation_id=None if outer is None else outer.transaction_id,
            labels=with_trace(labels or {}),
        )
        return Publication.create(envelope, subject=subject, predicate=predicate, object=object, artifact=artifact)


class Facts(_Facts):
    """Appends the facts of one zone to its boundary, from threads.

    A failed append is retried as ``AppendRetry`` says, within the handler's deadline. *max_retries* limits the number
    of retries; with 0 the error is raised immediately, for the calling engine to retry.
    """

    def __init__(
        self, boundary: Boundary, *, zone: str, max_retries: int | None = None, caller: InlineRunner | None = None
    ) -> None:
        super().__init__(zone, max_retries)
        self._calls = BoundaryCalls(boundary.put_object, boundary.append_fact, boundary.get_fact)
        self._caller = caller or _caller

    def append(
        self,
        to_zone: str,
        *,
        subject: str,
        predicate: str,
        object: Any = None,  # noqa: A002 - the term of the source document
        artifact: Upload | None = None,
        name: str | None = None,
        message_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        produced_at: datetime | None = None,
    ) -> FactConfirmation:
        """Append one fact; return when the store buffer has it. Delivery to readers is not confirmed.

        Inside a handler the id is derived from the transaction, so that a second run appends the same fact. A second
        fact with the same subject and predicate in one handler needs its own *name*. An *artifact* is stored first,
        and the reference to it becomes the fact's object.

        *correlation_id* defaults to that of the transaction; *produced_at* defaults to the creation time of the
        transaction, or to now outside a handler. Neither is part of the fact's identity; the first envelope is kept.
        """
        clock = self._caller.clock
        publication = self._build_publication(
            to_zone,
            subject,
            predicate,
            object=object,
            artifact=artifact,
            name=name,
            message_id=message_id,
            labels=labels,
            correlation_id=correlation_id,
            produced_at=produced_at,
            clock=clock,
        )
        script = publish(publication, self._calls, retry=self._retry, clock=clock, outer=scope.current())
        return _require_confirmation(self._caller.run(script))


class AsyncFacts(_Facts):
    """Appends the facts of one zone to its boundary, from asyncio; same guarantees as ``Facts``."""

    def __init__(
        self,
        boundary: AsyncBoundary,
        *,
        zone: str,
        max_retries: int | None = None,
        caller: AsyncInlineRunner | None = None,
    ) -> None:
        super().__init__(zone, max_retries)
        self._calls = BoundaryCalls(boundary.put_object_async, boundary.append_fact_async, boundary.get_fact_async)
        self._caller = caller or _async_caller

    async def append(
        self,
        to_zone: str,
        *,
        subject: str,
        predicate: str,
        object: Any = None,  # noqa: A002 - the term of the source document
        artifact: Upload | None = None,
        name: str | None = None,
        message_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        produced_at: datetime | None = None,
    ) -> FactConfirmation:
        """Append one fact; see ``Facts.append``."""
        clock = self._caller.clock
        publication = self._build_publication(
            to_zone,
            subject,
            predicate,
            object=object,
            artifact=artifact,
            name=name,
            message_id=message_id,
            labels=labels,
            correlation_id=correlation_id,
            produced_at=produced_at,
            clock=clock,
        )
        script = publish(publication, self._calls, retry=self._retry, clock=clock, outer=scope.current())
        return _require_confirmation(await self._caller.run(script))


def _to_unix_ms(produced_at: datetime | None, default: float) -> int:
    if produced_at is None:
        return int(default * 1000)
    if produced_at.tzinfo is None:
        raise ConfigurationError(
            f"produced_at={produced_at.isoformat()} has no time zone: give datetime.now(UTC) or another aware datetime"
        )
    return int(produced_at.timestamp() * 1000)


def _require_confirmation(confirmation: FactConfirmation | None) -> FactConfirmation:
    # An interrupted script returns None, and then the runner has already raised the cause.
    if confirmation is None:
        raise ConfigurationError("a stopped append came back without having been stopped")
    return confirmation
