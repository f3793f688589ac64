"""Tasks: what a user writes. A task has a connector, services by name, a policy and a lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from difflib import get_close_matches
from typing import Any, Self

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import ConfigurationError
from ergon_framework.task.defaults import kinds_of, wrong_policy_error
from ergon_framework.task.gates import Gate
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.report import Report


class Services(Mapping[str, Any]):
    """What was injected, by name; nothing of one transaction belongs here."""

    def __init__(self, given: Mapping[str, Any], *, owner: str) -> None:
        self._given = dict(given)
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        try:
            return self._given[name]
        except KeyError:
            near = get_close_matches(name, self._given, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self._given) or 'none'}"
            raise ConfigurationError(
                f"{self._owner} has no service {name!r}; {hint} -- give it to the task, or yield it from its lifespan."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __repr__(self) -> str:
        return f"Services({', '.join(self._given)})"


class _Base:
    connector: Connector | AsyncConnector
    policy: ConsumerPolicy | ProducerPolicy | None = None
    gates: Sequence[Gate] = ()

    def __init__(
        self,
        connector: Connector | AsyncConnector | None = None,
        *,
        policy: ConsumerPolicy | ProducerPolicy | None = None,
        gates: Sequence[Gate] | None = None,
        **services: Any,
    ) -> None:
        if connector is not None:
            self.connector = connector
        if getattr(self, "connector", None) is None:
            raise ConfigurationError(f"{self.name} has no connector; pass one: {type(self).__name__}(connector)")
        if not isinstance(self.connector, Connector | AsyncConnector):
            raise ConfigurationError(f"{self.name} was given a {type(self.connector).__name__} as its connector")
        if policy is not None:
            self.policy = policy
        kinds = tuple(kinds_of(self) or (ConsumerPolicy, ProducerPolicy))
        if self.policy is not None and not isinstance(self.policy, kinds):
            raise wrong_policy_error(self, self.policy, *kinds)
        if gates is not None:
            self.gates = gates
        self.services = Services(services, owner=self.name)

    @property
    def name(self) -> str:
        """What this task is called in spans, metrics, logs and dead letters."""
        return type(self).__name__

    def _require_consumer(self) -> Self:
        if ConsumerPolicy not in kinds_of(self):
            raise ConfigurationError(
                f"{self.name} cannot run: it does not consume; call produce_transactions(transactions) of a producer "
                "within opened(), or have ergon run produce from JSON lines"
            )
        return self

    def _given(self, more: Mapping[str, Any] | None) -> Services:
        return Services({**self.services, **(more or {})}, owner=self.name)


class Task(_Base):
    """The base of sync tasks; combine it with ConsumerMixin, ProducerMixin, or both."""

    def lifespan(self) -> AbstractContextManager[Mapping[str, Any] | None]:
        """Clients and pools that live as long as the task runs; what it yields becomes services."""
        return _nothing()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The lifespan, and the connector open."""
        connector, before = as_sync(self.connector), self.services
        with self.lifespan() as more:
            try:
                self.services = self._given(more)
                connector.open()
                try:
                    yield
                finally:
                    connector.close()
            finally:
                self.services = before

    def run(self, policy: ConsumerPolicy | None = None) -> Report:
        """Consume within the lifespan, under *policy* or the task's own."""
        task: Any = self._require_consumer()
        with self.opened():
            report: Report = task.consume_transactions(policy)
            return report


class AsyncTask(_Base):
    """The base of async tasks; combine it with AsyncConsumerMixin, AsyncProducerMixin, or both."""

    def lifespan(self) -> AbstractAsyncContextManager[Mapping[str, Any] | None]:
        return _nothing_async()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The lifespan, and the connector open."""
        connector, before = as_async(self.connector), self.services
        async with self.lifespan() as more:
            try:
                self.services = self._given(more)
                await connector.open_async()
                try:
                    yield
                finally:
                    await connector.close_async()
            finally:
                self.services = before

    async def run(self, policy: ConsumerPolicy | None = None) -> Report:
        """Consume within the lifespan, under *policy* or the task's own."""
        task: Any = self._require_consumer()
        async with self.opened():
            report: Report = await task.consume_transactions(policy)
            return report


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


@asynccontextmanager
async def _nothing_async() -> AsyncIterator[None]:
    yield None
