"""CeleryProviderTask: a task of Celery whose body calls a provider, and which ends once whatever happens to its worker.

``execute`` retries. Celery retries only a task that meets an open circuit breaker, at the time at which the
breaker may admit calls again. A task that fails for good leaves one dead letter, which is in PostgreSQL before
the failure is reported.
"""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from typing import Any, ClassVar, Final, NoReturn, cast

from ergon_framework import scope
from ergon_framework.errors import ConfigurationError, extra

extra("celery", "celery")
extra("postgres", "psycopg")

from celery import Celery, Task  # noqa: E402 - whoever lacks them is told what to install
from celery.app.task import Context  # noqa: E402

from ergon_framework.providers.base import ProviderBase  # noqa: E402
from ergon_framework.providers.celery_delivery import LEDGER_ERRORS, Delivery, current  # noqa: E402
from ergon_framework.providers.deadletter import QUEUE  # noqa: E402
from ergon_framework.providers.errors import ProviderError  # noqa: E402
from ergon_framework.providers.idempotency import effect  # noqa: E402
from ergon_framework.providers.invocation import HEADER, NAMES, Called, header, identified  # noqa: E402
from ergon_framework.providers.sql.ledger import Ledger  # noqa: E402
from ergon_framework.telemetry.context import outbound  # noqa: E402

#: Seconds between the budget and the soft limit, and between the soft limit and the hard one, unless they are given.
SOFT_MARGIN: Final = 5.0
HARD_MARGIN: Final = 10.0
_JSON: Final = "json"
#: Stands in logs, events and headers for arguments.
_HIDDEN: Final = "..."
#: What must be as it is, and why.
_FIXED: Final = {
    "acks_late": (True, "a message that is acked early is lost with its worker"),
    "reject_on_worker_lost": (True, "a message that is acked when its worker was lost is lost too"),
    "retry_on_worker_lost": (False, "a retry is a second message, with a count of its own"),
    "acks_on_failure": (True, "a failure that is written down is over"),
    "acks_on_timeout": (True, "a failure that is written down is over"),
}


class CeleryProviderTask(Task):  # type: ignore[misc]  # Celery comes without types
    """A base for tasks, as in ``@app.task(base=CeleryProviderTask, bind=True, provider=...)``.

    ``provider`` is an object that opens no socket before it is called, or a class that is made without
    arguments in each process. ``operation`` is what the task calls, by default the last part of its
    name. The body calls ``self.call(...)``, or other providers: tenant, deadline, correlation and keys
    reach all of them.
    """

    abstract = True

    provider: ClassVar[ProviderBase | type[ProviderBase] | None] = None
    operation: ClassVar[str | None] = None
    #: Seconds for a delivery, all calls with their retries included.
    timeout_budget_seconds: ClassVar[float] = 30.0
    #: Deliveries that may end with their worker; the next one is the dead letter.
    max_deliveries: ClassVar[int] = 5
    ledger: ClassVar[Ledger] = Ledger()
    dead_letter_queue: ClassVar[str] = QUEUE
    #: Seconds between two looks of a worker for dead letters that were not published.
    dead_letter_interval: ClassVar[float] = 5.0

    Request = "ergon_framework.providers.celery_request:ProviderRequest"
    Strategy = "ergon_framework.providers.celery_request:json_only"
    serializer = _JSON
    acks_late = True
    acks_on_failure = True
    acks_on_timeout = True
    reject_on_worker_lost = True
    retry_on_worker_lost = False
    #: How often the task may be rescheduled because the breaker is open; 0 for never, None for no limit.
    max_retries: ClassVar[int | None] = 120
    # The envelope says it; Celery need not add a traceback.
    throws = (ProviderError,)
    resultrepr_maxsize = 0

    _made: ClassVar[tuple[int, ProviderBase] | None] = None

    # -- how it is set up ---------------------------------------------------------------------------

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        if cls is not CeleryProviderTask:
            _check(cls, app)
        return super().bind(app)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """See that the worker publishes dead letters."""
        from ergon_framework.providers.celery_feed import DeadLetterStep  # noqa: PLC0415 - it knows us

        super().on_bound(app)
        app.steps["consumer"].add(DeadLetterStep)

    @property
    def called(self) -> Called:
        provider = _provider(type(self))
        return Called(
            self.name,
            provider.provider_name,
            provider.capability,
            self.operation or self.name.rpartition(".")[2],
            self.timeout_budget_seconds,
            provider.policy.retry.max_attempts,
        )

    # -- how it is sent -----------------------------------------------------------------------------

    def apply_async(self, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        """Send it. ``tenant_id``, ``campaign_id``, ``idempotency_key``, ``correlation_id``, ``task_execution_id`` and
        ``timeout_budget_seconds`` may be given as options; below a handler tenant and correlation are inherited.
        """  # noqa: D205 - one sentence
        if options.get("serializer", _JSON) != _JSON:
            raise ConfigurationError(
                f"{self.name} is sent as JSON only, not as {options['serializer']!r}; leave serializer= out and send "
                "plain data"
            )
        given = {name: options.pop(name, None) for name in NAMES}
        headers = dict(options.pop("headers", None) or {})
        below = scope.current()
        if below is not None:
            given["correlation_id"] = given["correlation_id"] or below.correlation
            if given["tenant_id"] is None and not (kwargs or {}).get("tenant_id"):
                given["tenant_id"] = below.tenant
        ours = {**headers.get(HEADER, {}), **header(given)}
        if ours:
            headers[HEADER] = ours
        for name, value in outbound().items():
            headers.setdefault(name, value)
        # Celery puts them into logs and events otherwise.
        options = {"argsrepr": _HIDDEN, "kwargsrepr": _HIDDEN, **options, "headers": headers}
        return super().apply_async(args, kwargs, *positional, **options)

    # -- how it runs --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request: Context = self.request
        if request.called_directly:
            return super().__call__(*args, **kwargs)
        return Delivery(self, request).run(lambda: self.run(*args, **kwargs))

    def run(self, payload: dict[str, Any] | None = None, *, tenant_id: Any = None, campaign_id: Any = None) -> Any:
        """A task without a body of its own: one call of its operation."""
        del tenant_id, campaign_id  # read from the message
        return self.call(None, payload)

    def call(
        self,
        operation: str | None = None,
        payload: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Call the task's provider, for the tenant and the campaign that the task was sent for.

        A key that the task was sent with is that of its own operation. A second call of one operation
        needs a *name* of its own.
        """
        provider = self._provider()
        wanted = operation or self.called.operation
        delivery, below = current.get(), scope.current()
        if delivery is None or below is None:
            return provider.call(wanted, payload, name=name, key=key, timeout=timeout)
        invocation = delivery.invocation
        if key is None and name is None and wanted == invocation.operation and invocation.given_key is not None:
            below.derive(effect(provider.provider_name, wanted))  # a second one is an error, as without a given key
            key = invocation.given_key
        return provider.call(wanted, payload, name=name, key=key, timeout=timeout, campaign=invocation.campaign_id)

    def reschedule(self, countdown: int, *, headers: dict[str, Any]) -> Any:
        """Send the running task again after *countdown* seconds; return the Retry exception that the caller must raise.

        Raises Reject if the broker does not accept it.
        """
        return super().retry(countdown=countdown, headers=headers, throw=False)

    def retry(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a body does not retry."""
        raise ConfigurationError(
            f"{self.name} must not be retried by Celery: execute has tried again as the policy of its provider says, "
            "and what it gave up on is final; give the policy more attempts or more time"
        )

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Celery has stored the result."""
        super().on_success(retval, task_id, args, kwargs)
        # If it fails, the store of results says it to the next delivery, if there is one.
        with suppress(*LEDGER_ERRORS):
            self.ledger.confirm(identified(task_id))

    def _provider(self) -> ProviderBase:
        cls = type(self)
        given = cls.provider
        if isinstance(given, ProviderBase):
            return given
        made = cls._made
        # What a class opens when it is made belongs to one process.
        if made is None or made[0] != os.getpid():
            made = cls._made = (os.getpid(), cast("type[ProviderBase]", given)())
        return made[1]


def provider_task(
    app: Celery, provider: ProviderBase | type[ProviderBase], operation: str, *, name: str | None = None, **options: Any
) -> Any:
    """A whole task: ``delay(payload, tenant_id=...)`` calls *operation* of *provider*."""

    def run(
        self: CeleryProviderTask,
        payload: dict[str, Any] | None = None,
        *,
        tenant_id: Any = None,
        campaign_id: Any = None,
    ) -> Any:
        return CeleryProviderTask.run(self, payload, tenant_id=tenant_id, campaign_id=campaign_id)

    name = name or f"{provider.provider_name}.{operation}"
    options = {"base": CeleryProviderTask, "provider": provider, "operation": operation, **options}
    return app.task(run, bind=True, name=name, shared=False, **options)


def _provider(cls: type[CeleryProviderTask]) -> ProviderBase | type[ProviderBase]:
    given = cls.provider
    if isinstance(given, ProviderBase) or (inspect.isclass(given) and issubclass(given, ProviderBase)):
        return given
    raise ConfigurationError(
        f"the task {cls.name or cls.__name__} needs a provider: @app.task(base=CeleryProviderTask, provider=...), "
        "with an object or a class of ProviderBase"
    )


def _check(cls: type[CeleryProviderTask], app: Celery) -> None:
    """Refuse what would take a promise away, and set the limits."""
    named = cls.name or cls.__name__
    _provider(cls)
    for name, (wanted, why) in _FIXED.items():
        if getattr(cls, name) is not wanted:
            raise ConfigurationError(f"{named} needs {name}={wanted}: {why}; leave it out")
    if getattr(cls, "autoretry_for", ()):
        raise ConfigurationError(
            f"{named} must not have autoretry_for: execute tries again as the provider's policy says; leave it out"
        )
    for place, serializer in (("serializer", cls.serializer), ("result_serializer", app.conf.result_serializer)):
        if serializer != _JSON:
            raise ConfigurationError(
                f"{named} speaks JSON only, and {place} is {serializer!r}; leave serializer= out and set the app's "
                "result_serializer to 'json'"
            )
    if cls.max_retries is not None and cls.max_retries < 0:
        raise ConfigurationError(f"{named}: max_retries is a number of at least 0 or None, not {cls.max_retries!r}")
    if cls.max_deliveries < 1:
        raise ConfigurationError(f"{named}: max_deliveries is a number of at least 1, not {cls.max_deliveries!r}")
    budget = cls.timeout_budget_seconds
    if not 0 < budget < float("inf"):  # also refuses NaN
        raise ConfigurationError(f"{named}: timeout_budget_seconds is a number above 0, not {budget!r}")
    cls.soft_time_limit = budget + SOFT_MARGIN if cls.soft_time_limit is None else cls.soft_time_limit
    cls.time_limit = cls.soft_time_limit + HARD_MARGIN if cls.time_limit is None else cls.time_limit
    if not budget < cls.soft_time_limit < cls.time_limit:
        raise ConfigurationError(
            f"{named}: timeout_budget_seconds ({budget:g}), soft_time_limit ({cls.soft_time_limit:g}) and time_limit "
            f"({cls.time_limit:g}) must rise in this order; leave the limits out to have them follow from the budget"
        )
