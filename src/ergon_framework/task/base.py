"""Tasks: the base classes of user tasks.

A task has a connector (its queue), services (objects such as clients, by name), a policy (retries, timeouts,
concurrency), gates (functions that can pause fetching), middleware (context managers around each transaction and each
attempt) and a lifespan (a context manager that opens the services while the task runs). Mixins add the handlers. A
connector has a sync variant, an async variant or both; ``as_sync`` and ``as_async`` return the variant that a task
needs. ``list_policy_types`` returns the policies that a task can run under:
one for consuming, one for producing, according to its mixins.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from difflib import get_close_matches
from typing import Any, Self

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.errors import ConfigurationError
from ergon_framework.gates import Gate
from ergon_framework.task.context import list_policy_types, wrong_policy_error
from ergon_framework.task.keywords import refuse_unknown_keywords
from ergon_framework.task.middleware import AsyncMiddleware, Middleware, check_middleware
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.report import Report


class Services(Mapping[str, Any]):
    """The injected services by name; state of a single transaction does not belong here."""

    def __init__(self, services: Mapping[str, Any], *, owner: str) -> None:
        self._services = dict(services)
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        try:
            return self._services[name]
        except KeyError:
            close_matches = get_close_matches(name, self._services, n=1)
            hint = (
                f"did you mean {close_matches[0]!r}?"
                if close_matches
                else f"available: {', '.join(self._services) or 'none'}"
            )
            raise ConfigurationError(
                f"{self._owner} has no service {name!r}; {hint}; pass it in services= of the task, or yield it from "
                "its lifespan"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._services

    def __iter__(self) -> Iterator[str]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)

    def __repr__(self) -> str:
        return f"Services({', '.join(self._services)})"


class _TaskBase:
    connector: Connector | AsyncConnector
    policy: ConsumerPolicy | ProducerPolicy | None = None
    gates: Sequence[Gate] = ()
    middleware: Sequence[Middleware] | Sequence[AsyncMiddleware] = ()
    #: Whether an async task has an event loop and a thread of its own in ``ergon run``: its handlers then cannot block
    #: other tasks. A sync task always has threads of its own.
    isolated: bool = False

    @refuse_unknown_keywords
    def __init__(
        self,
        connector: Connector | AsyncConnector | None = None,
        *,
        policy: ConsumerPolicy | ProducerPolicy | None = None,
        gates: Sequence[Gate] | None = None,
        middleware: Sequence[Middleware] | Sequence[AsyncMiddleware] | None = None,
        services: Mapping[str, Any] | None = None,
        isolated: bool | None = None,
    ) -> None:
        if connector is not None:
            self.connector = connector
        if getattr(self, "connector", None) is None:
            raise ConfigurationError(f"{self.name} has no connector; pass one: {type(self).__name__}(connector)")
        if not isinstance(self.connector, Connector | AsyncConnector):
            raise ConfigurationError(f"connector of {self.name} is invalid: it is a {type(self.connector).__name__}")
        if policy is not None:
            self.policy = policy
        policy_types = tuple(list_policy_types(self) or (ConsumerPolicy, ProducerPolicy))
        if self.policy is not None and not isinstance(self.policy, policy_types):
            raise wrong_policy_error(self, self.policy, *policy_types)
        if gates is not None:
            self.gates = gates
        if isolated is not None:
            self.isolated = isolated
        if middleware is not None:
            self.middleware = middleware
        if self.middleware:
            check_middleware(self.middleware, task=self.name, is_async=isinstance(self, AsyncTask))
        self.services = Services(services or {}, owner=self.name)

    @property
    def name(self) -> str:
        """The name of this task in spans, metrics, logs and dead letters."""
        return type(self).__name__

    def _require_consumer(self) -> Self:
        if ConsumerPolicy not in list_policy_types(self):
            raise ConfigurationError(
                f"{self.name} cannot run: it does not consume; call produce_transactions(transactions) of a producer "
                "within open(), or produce from JSON lines with ergon run"
            )
        return self

    def _merge_services(self, extra_services: Mapping[str, Any] | None) -> Services:
        return Services({**self.services, **(extra_services or {})}, owner=self.name)


class Task(_TaskBase):
    """The base of sync tasks; combine it with ConsumerMixin, ProducerMixin, or both."""

    def lifespan(self) -> AbstractContextManager[Mapping[str, Any] | None]:
        """Manage clients and pools that live as long as the task runs; the yielded mapping becomes services."""
        return _empty_lifespan()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Enter the lifespan and open the connector."""
        connector, services_before = as_sync(self.connector), self.services
        with self.lifespan() as extra_services:
            try:
                self.services = self._merge_services(extra_services)
                connector.open()
                try:
                    yield
                finally:
                    connector.close()
            finally:
                self.services = services_before

    def run(self, policy: ConsumerPolicy | None = None) -> Report:
        """Consume within the lifespan, under *policy* or the task's own."""
        task: Any = self._require_consumer()
        with self.open():
            report: Report = task.consume_transactions(policy)
            return report


class AsyncTask(_TaskBase):
    """The base of async tasks; combine it with AsyncConsumerMixin, AsyncProducerMixin, or both."""

    def lifespan(self) -> AbstractAsyncContextManager[Mapping[str, Any] | None]:
        return _empty_lifespan_async()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Enter the lifespan and open the connector."""
        connector, services_before = as_async(self.connector), self.services
        async with self.lifespan() as extra_services:
            try:
                self.services = self._merge_services(extra_services)
                await connector.open_async()
                try:
                    yield
                finally:
                    await connector.close_async()
            finally:
                self.services = services_before

    async def run(self, policy: ConsumerPolicy | None = None) -> Report:
        """Consume within the lifespan, under *policy* or the task's own."""
        task: Any = self._require_consumer()
        async with self.open():
            report: Report = await task.consume_transactions(policy)
            return report


@contextmanager
def _empty_lifespan() -> Iterator[None]:
    yield None


@asynccontextmanager
async def _empty_lifespan_async() -> AsyncIterator[None]:
    yield None
