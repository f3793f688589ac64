"""Facts: the everyday form of appending, below a handler and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.engine.drivers.caller import AsyncCaller, Caller
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.labels import with_trace
from ergon_framework.facts.model import Envelope, FactConfirmation, check_zone
from ergon_framework.facts.policy import AppendRetry
from ergon_framework.facts.publish import Means, Publication, Upload, publish

_caller: Final = Caller()
_async_caller: Final = AsyncCaller()


class _Facts:
    """What both variants share: everything but how a store is called."""

    def __init__(self, zone: str, max_retries: int | None) -> None:
        check_zone("the zone of Facts", zone)
        self._zone = zone
        self._retry = AppendRetry() if max_retries is None else AppendRetry.times(max_retries)

    @property
    def zone(self) -> str:
        """Where its facts come from."""
        return self._zone

    def _publication(
        self,
        to_zone: str,
        subject: str,
        predicate: str,
        *,
        object: Any,  # noqa: A002 - the document's word
        artifact: Upload | None,
        name: str | None,
        message_id: str | None,
        labels: Mapping[str, str] | None,
        correlation_id: str | None,
        produced_at: datetime | None,
        senses: Senses,
    ) -> Publication:
        below = scope.current()
        if message_id is None:
            if below is None:
                raise ConfigurationError(
                    "a fact that is appended outside a handler has no transaction to derive its id from: give it "
                    "message_id=business_id(...), made of what names the event, so that a second run makes the same"
                )
            message_id = below.derive(name or f"{to_zone}/{subject}/{predicate}")
        created = None if below is None else below.transaction.created_at
        if correlation_id is None and below is not None:
            correlation_id = below.correlation
        envelope = Envelope(
            message_id=message_id,
            from_zone=self._zone,
            to_zone=to_zone,
            produced_at_unix_ms=_unix_ms(produced_at, senses.wall() if created is None else created),
            correlation_id=correlation_id,
            causation_id=None if below is None else below.transaction_id,
            labels=with_trace(labels or {}),
        )
        return Publication.of(envelope, subject=subject, predicate=predicate, object=object, artifact=artifact)


class Facts(_Facts):
    """Appends the facts of one zone to its boundary, from threads.

    What fails is tried again as ``AppendRetry`` says, within the handler's deadline; with *max_retries* so
    often at most, and with 0 the error comes out at once for the engine above to try again.
    """

    def __init__(
        self, boundary: Boundary, *, zone: str, max_retries: int | None = None, caller: Caller | None = None
    ) -> None:
        super().__init__(zone, max_retries)
        self._means = Means(boundary.put_object, boundary.append_fact, boundary.get_fact)
        self._caller = caller or _caller

    def append(
        self,
        to_zone: str,
        *,
        subject: str,
        predicate: str,
        object: Any = None,  # noqa: A002 - the document's word
        artifact: Upload | None = None,
        name: str | None = None,
        message_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        produced_at: datetime | None = None,
    ) -> FactConfirmation:
        """Append one fact; it returns when the store buffer has it, and says nothing of who will read it.

        Below a handler its id is derived from the transaction, so that a second run appends the same fact. A
        second fact of one subject and predicate in one handler needs a *name* of its own. An *artifact* is
        stored first, and the reference to it is the fact's object.

        *correlation_id* defaults to the transaction's, *produced_at* to the time when the transaction was made, or
        to now outside a handler. Neither is part of the fact's identity; the first envelope is kept.
        """
        senses = self._caller.senses
        publication = self._publication(
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
            senses=senses,
        )
        script = publish(publication, self._means, retry=self._retry, senses=senses, outer=scope.current())
        return _ended(self._caller.perform(script))


class AsyncFacts(_Facts):
    """Appends the facts of one zone to its boundary, from asyncio; the same promises."""

    def __init__(
        self, boundary: AsyncBoundary, *, zone: str, max_retries: int | None = None, caller: AsyncCaller | None = None
    ) -> None:
        super().__init__(zone, max_retries)
        self._means = Means(boundary.put_object_async, boundary.append_fact_async, boundary.get_fact_async)
        self._caller = caller or _async_caller

    async def append(
        self,
        to_zone: str,
        *,
        subject: str,
        predicate: str,
        object: Any = None,  # noqa: A002 - the document's word
        artifact: Upload | None = None,
        name: str | None = None,
        message_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        produced_at: datetime | None = None,
    ) -> FactConfirmation:
        """See Facts."""
        senses = self._caller.senses
        publication = self._publication(
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
            senses=senses,
        )
        script = publish(publication, self._means, retry=self._retry, senses=senses, outer=scope.current())
        return _ended(await self._caller.perform(script))


def _unix_ms(produced_at: datetime | None, default: float) -> int:
    if produced_at is None:
        return int(default * 1000)
    if produced_at.tzinfo is None:
        raise ConfigurationError(
            f"produced_at={produced_at.isoformat()} has no time zone: give datetime.now(UTC) or another aware datetime"
        )
    return int(produced_at.timestamp() * 1000)


def _ended(confirmation: FactConfirmation | None) -> FactConfirmation:
    # A script that was stopped answers nothing, and then the caller has raised what stopped it.
    if confirmation is None:
        raise ConfigurationError("a stopped append came back without having been stopped")
    return confirmation
