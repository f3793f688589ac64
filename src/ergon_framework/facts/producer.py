"""Producers of facts: the producer engine, whose produce step stores an artifact and appends a fact.

The engine tries again, under ``produce.retry``; one attempt here is one call of each kind. The id of a
fact is that of its transaction, so that every attempt and every run appends the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.engine.drivers.caller import AsyncCaller, Caller
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.labels import with_trace
from ergon_framework.facts.model import Envelope, FactConfirmation, Pair
from ergon_framework.facts.policy import AppendRetry, FactProducerPolicy
from ergon_framework.facts.publish import Means, Publication, publish
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.transaction import Transaction

_ONCE: Final = AppendRetry.times(0)
_STATED: Final = frozenset(("subject", "predicate", "object", "artifact", "labels"))

_caller: Final = Caller()
_async_caller: Final = AsyncCaller()


class _FactProducer:
    """What both variants share: what of a transaction becomes a fact."""

    name: str
    policy: Any = FactProducerPolicy()
    #: Ask the boundary before the first attempt too: for a producer that goes on after a crash.
    asks = False

    def state(self, transaction: Transaction) -> Mapping[str, Any]:
        """What the fact says: subject, predicate and object or artifact (an Upload), and labels if there are any.

        By default the payload says it, under these names.
        """
        stated = transaction.payload
        if not isinstance(stated, Mapping) or not {"subject", "predicate"} <= stated.keys() <= _STATED:
            raise InvalidFactError(
                f"the payload of transaction {transaction.id!r} does not say what the fact is: give it subject, "
                f"predicate and object, or write state() in {type(self).__name__}"
            )
        return stated

    def _publication(self, transaction: Transaction, pair: Pair, senses: Senses) -> Publication:
        stated = self.state(transaction)
        created = senses.wall() if transaction.created_at is None else transaction.created_at
        envelope = Envelope(
            message_id=transaction.id,
            from_zone=pair.from_zone,
            to_zone=pair.to_zone,
            produced_at_unix_ms=int(created * 1000),
            correlation_id=transaction.correlation,
            causation_id=transaction.causation,
            labels=with_trace(stated.get("labels", {})),
        )
        below = scope.current()
        # After a failed attempt nobody knows whether its fact is there.
        asks = self.asks or (below is not None and below.attempt > 0)
        return Publication.of(
            envelope,
            subject=stated["subject"],
            predicate=stated["predicate"],
            object=stated.get("object"),
            artifact=stated.get("artifact"),
            asks=asks,
        )

    def _refused(self, given: object) -> ConfigurationError:
        return ConfigurationError(
            f"{self.name} appends facts, and was given a {type(given).__name__} as its connector; give it a "
            "FactConnector, or an AsyncFactConnector for the async one"
        )


class FactProducer(_FactProducer, ProducerMixin, Task):
    """Appends facts from threads."""

    def produce_transaction(self, transaction: Transaction) -> FactConfirmation | None:
        """One attempt: the artifact, if there is one, and then the fact."""
        connector = self.connector
        if not isinstance(connector, FactConnector):
            raise self._refused(connector)
        boundary, senses = connector.boundary, _caller.senses
        means = Means(boundary.put_object, boundary.append_fact, boundary.get_fact)
        publication = self._publication(transaction, connector.pair, senses)
        return _caller.perform(publish(publication, means, retry=_ONCE, senses=senses, outer=scope.current()))


class AsyncFactProducer(_FactProducer, AsyncProducerMixin, AsyncTask):
    """Appends facts from asyncio; in every other respect the same."""

    async def produce_transaction(self, transaction: Transaction) -> FactConfirmation | None:
        connector = self.connector
        if not isinstance(connector, AsyncFactConnector):
            raise self._refused(connector)
        boundary, senses = connector.boundary, _async_caller.senses
        means = Means(boundary.put_object_async, boundary.append_fact_async, boundary.get_fact_async)
        publication = self._publication(transaction, connector.pair, senses)
        return await _async_caller.perform(
            publish(publication, means, retry=_ONCE, senses=senses, outer=scope.current())
        )
