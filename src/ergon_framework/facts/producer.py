"""Producers of facts: the producer engine, whose produce step stores an artifact and appends a fact.

A fact is appended to the boundary, the interface to this site's store of facts; an artifact is a file that a fact
refers to. The engine retries under ``produce.retry``; one attempt here is one call of each kind. The id of a fact is
that of its transaction, so every attempt and every run appends the same fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.clock import Clock
from ergon_framework.engine.inline import AsyncInlineRunner, InlineRunner
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.append import BoundaryCalls, Publication, publish
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import Envelope, FactConfirmation, ZonePair, with_trace
from ergon_framework.facts.policy import AppendRetry, FactProducerPolicy
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.transaction import Transaction

_SINGLE_ATTEMPT: Final = AppendRetry.with_retries(0)
_FACT_KEYS: Final = frozenset(("subject", "predicate", "object", "artifact", "labels"))

_caller: Final = InlineRunner()
_async_caller: Final = AsyncInlineRunner()


class _FactProducer:
    """The common part of the sync and async variants: how a transaction becomes a fact."""

    name: str
    policy: Any = FactProducerPolicy()
    #: Check the boundary before the first attempt too: for a producer that continues after a crash.
    check_first = False

    def state(self, transaction: Transaction) -> Mapping[str, Any]:
        """Return the content of the fact: subject, predicate, object or artifact (an Upload), and optional labels.

        By default the payload of the transaction provides them, under these names.
        """
        content = transaction.payload
        if not isinstance(content, Mapping) or not {"subject", "predicate"} <= content.keys() <= _FACT_KEYS:
            raise InvalidFactError(
                f"the payload of transaction {transaction.id!r} does not describe a fact: provide subject, "
                f"predicate and object, or override state() in {type(self).__name__}"
            )
        return content

    def _build_publication(self, transaction: Transaction, pair: ZonePair, clock: Clock) -> Publication:
        content = self.state(transaction)
        created_at = clock.wall() if transaction.created_at is None else transaction.created_at
        envelope = Envelope(
            message_id=transaction.id,
            from_zone=pair.from_zone,
            to_zone=pair.to_zone,
            produced_at_unix_ms=int(created_at * 1000),
            correlation_id=transaction.correlation,
            causation_id=transaction.causation,
            labels=with_trace(content.get("labels", {})),
        )
        outer = scope.current()
        # After a failed attempt it is unknown whether the fact was stored.
        check_first = self.check_first or (outer is not None and outer.attempt > 0)
        return Publication.create(
            envelope,
            subject=content["subject"],
            predicate=content["predicate"],
            object=content.get("object"),
            artifact=content.get("artifact"),
            check_first=check_first,
        )

    def _connector_error(self, connector: object) -> ConfigurationError:
        return ConfigurationError(
            f"{self.name} appends facts, and its connector is a {type(connector).__name__}: pass a "
            "FactConnector, or an AsyncFactConnector for the async variant"
        )


class FactProducer(_FactProducer, ProducerMixin, Task):
    """Appends facts, from threads."""

    def produce_transaction(self, transaction: Transaction) -> FactConfirmation | None:
        """Make one attempt: store the artifact, if there is one, then append the fact."""
        connector = self.connector
        if not isinstance(connector, FactConnector):
            raise self._connector_error(connector)
        boundary, clock = connector.boundary, _caller.clock
        calls = BoundaryCalls(boundary.put_object, boundary.append_fact, boundary.get_fact)
        publication = self._build_publication(transaction, connector.pair, clock)
        return _caller.run(publish(publication, calls, retry=_SINGLE_ATTEMPT, clock=clock, outer=scope.current()))


class AsyncFactProducer(_FactProducer, AsyncProducerMixin, AsyncTask):
    """Appends facts, from asyncio; otherwise the same as ``FactProducer``."""

    async def produce_transaction(self, transaction: Transaction) -> FactConfirmation | None:
        connector = self.connector
        if not isinstance(connector, AsyncFactConnector):
            raise self._connector_error(connector)
        boundary, clock = connector.boundary, _async_caller.clock
        calls = BoundaryCalls(boundary.put_object_async, boundary.append_fact_async, boundary.get_fact_async)
        publication = self._build_publication(transaction, connector.pair, clock)
        return await _async_caller.run(
            publish(publication, calls, retry=_SINGLE_ATTEMPT, clock=clock, outer=scope.current())
        )
