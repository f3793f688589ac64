"""CeleryProviderTask: a Celery task whose body calls a provider, and which ends once even if its worker is lost.

The provider's ``execute`` retries. Celery retries only a task that meets an open circuit breaker, at the time at which
the breaker may admit calls again. A task that fails permanently leaves one dead letter, which is stored in PostgreSQL
before the failure is reported.
"""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from typing import Any, ClassVar, Final, NoReturn, cast

from ergon_framework import scope
from ergon_framework.errors import ConfigurationError, require_extra

require_extra("celery", "celery")
require_extra("postgres", "psycopg")

from celery import Celery, Task  # noqa: E402 - imported after the check, whose error names the extra to install
from celery.app.task import Context  # noqa: E402

from ergon_framework.providers.celery.delivery import LEDGER_ERRORS, CeleryDelivery, current_delivery  # noqa: E402
from ergon_framework.providers.celery.invocation import FIELD_NAMES, HEADER, CallSpec, build_header, normalize_task_id  # noqa: E402
from ergon_framework.providers.celery.ledger import TaskLedger  # noqa: E402
from ergon_framework.providers.dead_letter import DEAD_LETTER_QUEUE  # noqa: E402
from ergon_framework.providers.errors import ProviderError  # noqa: E402
from ergon_framework.providers.idempotency import effect_name  # noqa: E402
from ergon_framework.providers.models import ProviderExecutionContext, ProviderExecutionResult  # noqa: E402
from ergon_framework.providers.provider import Provider  # noqa: E402
from ergon_framework.telemetry.context import inject_carrier  # noqa: E402

#: Default seconds between the budget and the soft limit, and between the soft limit and the hard limit.
SOFT_LIMIT_MARGIN_SECONDS: Final = 5.0
HARD_LIMIT_MARGIN_SECONDS: Final = 10.0
_JSON: Final = "json"
#: Replaces arguments in logs, events and headers.
_HIDDEN_ARGUMENTS: Final = "..."
#: Celery options with a required value, and the reason.
_REQUIRED_OPTIONS: Final = {
    "acks_late": (True, "a message that is acked early is lost with its worker"),
    "reject_on_worker_lost": (True, "a message that is acked when its worker was lost is lost too"),
    "retry_on_worker_lost": (False, "a retry is a second message with a separate delivery count"),
    "acks_on_failure": (True, "a recorded failure has ended the task"),
    "acks_on_timeout": (True, "a recorded failure has ended the task"),
}


class CeleryProviderTask(Task):  # type: ignore[misc]  # Celery comes without types
    """A base class for tasks, as in ``@app.task(base=CeleryProviderTask, bind=True, provider=...)``.

    ``provider`` is an object that opens no socket before its first call, or a class that is created without
    arguments in each process. ``operation`` is the operation that the task calls, by default the last part of the
    task's name. The body calls ``self.call(...)``, or other providers: tenant, deadline, correlation and keys are
    passed to all of them.
    """

    abstract = True

    provider: ClassVar[Provider | type[Provider] | None] = None
    operation: ClassVar[str | None] = None
    #: Seconds for one delivery, including all calls and their retries.
    timeout_budget_seconds: ClassVar[float] = 30.0
    #: Maximum number of deliveries that may end with their worker; the next one is dead-lettered.
    max_deliveries: ClassVar[int] = 5
    ledger: ClassVar[TaskLedger] = TaskLedger()
    dead_letter_queue: ClassVar[str] = DEAD_LETTER_QUEUE
    #: Seconds between two polls of a worker for unpublished dead letters.
    dead_letter_interval: ClassVar[float] = 5.0

    Request = "ergon_framework.providers.celery.request:CeleryProviderRequest"
    Strategy = "ergon_framework.providers.celery.request:json_only_strategy"
    serializer = _JSON
    acks_late = True
    acks_on_failure = True
    acks_on_timeout = True
    reject_on_worker_lost = True
    retry_on_worker_lost = False
    #: Maximum number of times the task is rescheduled because the breaker is open; 0 for never, None for no limit.
    max_retries: ClassVar[int | None] = 120
    # The log record of the task names the failure, so Celery need not add a traceback.
    throws = (ProviderError,)
    resultrepr_maxsize = 0

    _instance: ClassVar[tuple[int, Provider] | None] = None

    # -- setup --------------------------------------------------------------------------------------

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        if cls is not CeleryProviderTask:
            _check_options(cls, app)
        return super().bind(app)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Register the worker step that publishes dead letters."""
        from ergon_framework.providers.celery.dead_letter_publisher import DeadLetterBootstep  # noqa: PLC0415 - circular import

        super().on_bound(app)
        app.steps["consumer"].add(DeadLetterBootstep)

    @property
    def call_spec(self) -> CallSpec:
        provider = _check_provider(type(self))
        return CallSpec(
            self.name,
            provider.provider_name,
            provider.capability,
            self.operation or self.name.rpartition(".")[2],
            self.timeout_budget_seconds,
            provider.policy.retry.max_attempts,
        )

    # -- sending ------------------------------------------------------------------------------------

    def apply_async(self, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        """Send the task. Options: ``tenant_id``, ``campaign_id``, ``idempotency_key``, ``correlation_id``,
        ``task_execution_id``, ``timeout_budget_seconds``; inside a handler tenant and correlation are inherited.
        """  # noqa: D205 - one sentence
        if options.get("serializer", _JSON) != _JSON:
            raise ConfigurationError(
                f"{self.name} must be sent as JSON, not as {options['serializer']!r}; remove serializer= and send "
                "plain data"
            )
        invocation_values = {name: options.pop(name, None) for name in FIELD_NAMES}
        headers = dict(options.pop("headers", None) or {})
        current_scope = scope.current()
        if current_scope is not None:
            invocation_values["correlation_id"] = invocation_values["correlation_id"] or current_scope.correlation
            if invocation_values["tenant_id"] is None and not (kwargs or {}).get("tenant_id"):
                invocation_values["tenant_id"] = current_scope.tenant
        ergon_header = {**headers.get(HEADER, {}), **build_header(invocation_values)}
        if ergon_header:
            headers[HEADER] = ergon_header
        for name, value in inject_carrier().items():
            headers.setdefault(name, value)
        # Otherwise Celery puts the arguments into logs and events.
        options = {"argsrepr": _HIDDEN_ARGUMENTS, "kwargsrepr": _HIDDEN_ARGUMENTS, **options, "headers": headers}
        return super().apply_async(args, kwargs, *positional, **options)

    # -- running ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request: Context = self.request
        if request.called_directly:
            return super().__call__(*args, **kwargs)
        return CeleryDelivery(self, request).run(lambda: self.run(*args, **kwargs))

    def run(self, payload: dict[str, Any] | None = None, *, tenant_id: Any = None, campaign_id: Any = None) -> Any:
        """Call the task's operation once; the default body."""
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
        """Call the task's provider for the tenant and campaign of the task.

        The key that the task was sent with applies to the task's own operation. A second call of the same operation
        needs its own *name*.
        """
        provider = self._get_provider()
        called_operation = operation or self.call_spec.operation
        delivery, current_scope = current_delivery.get(), scope.current()
        campaign_id = None
        if delivery is not None and current_scope is not None:
            invocation = delivery.invocation
            campaign_id = invocation.campaign_id
            if (
                key is None
                and name is None
                and called_operation == invocation.operation
                and invocation.explicit_key is not None
            ):
                current_scope.derive(
                    effect_name(provider.provider_name, called_operation)
                )  # a second call is an error, as without a given key
                key = invocation.explicit_key
        result = provider.execute(
            operation=called_operation,
            payload={} if payload is None else payload,
            campaign_id=campaign_id,
            context=ProviderExecutionContext(idempotency_key=key, timeout=timeout, name=name),
        )
        # A provider of asyncio is rejected when the task is declared.
        return cast("ProviderExecutionResult", result).value or {}

    def reschedule(self, countdown: int, *, headers: dict[str, Any]) -> Any:
        """Send the running task again after *countdown* seconds; return the Retry exception that the caller must raise.

        Raises Reject if the broker rejects the message.
        """
        return super().retry(countdown=countdown, headers=headers, throw=False)

    def retry(self, *_: Any, **__: Any) -> NoReturn:
        """Reject the call: a task body must not retry."""
        raise ConfigurationError(
            f"{self.name} must not be retried by Celery: execute applies the provider's retry policy, "
            "and its failures are final; raise max_attempts or timeout in the policy"
        )

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Confirm the task in the ledger after Celery has stored the result."""
        super().on_success(retval, task_id, args, kwargs)
        # If this fails, the result backend answers the next delivery, if there is one.
        with suppress(*LEDGER_ERRORS):
            self.ledger.confirm(normalize_task_id(task_id))

    def _get_provider(self) -> Provider:
        cls = type(self)
        provider = cls.provider
        if isinstance(provider, Provider):
            return provider
        instance = cls._instance
        # Resources that a class opens at creation belong to one process.
        if instance is None or instance[0] != os.getpid():
            instance = cls._instance = (os.getpid(), cast("type[Provider]", provider)())
        return instance[1]


def provider_task(
    app: Celery, provider: Provider | type[Provider], operation: str, *, name: str | None = None, **options: Any
) -> Any:
    """Return a complete task: ``delay(payload, tenant_id=...)`` calls *operation* of *provider*."""

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


def _check_provider(cls: type[CeleryProviderTask]) -> Provider | type[Provider]:
    provider = cls.provider
    is_provider = isinstance(provider, Provider) or (inspect.isclass(provider) and issubclass(provider, Provider))
    if is_provider and provider is not None and not provider.is_async:
        return provider
    raise ConfigurationError(
        f"the task {cls.name or cls.__name__} has no provider: @app.task(base=CeleryProviderTask, provider=...), "
        "with an object or a subclass of Provider that is called from threads, not with async def"
    )


def _check_options(cls: type[CeleryProviderTask], app: Celery) -> None:
    """Reject options that would break a guarantee, and set the time limits."""
    task_name = cls.name or cls.__name__
    _check_provider(cls)
    for name, (required, reason) in _REQUIRED_OPTIONS.items():
        if getattr(cls, name) is not required:
            raise ConfigurationError(f"{task_name} needs {name}={required}: {reason}; remove it")
    if getattr(cls, "autoretry_for", ()):
        raise ConfigurationError(
            f"{task_name} must not have autoretry_for: execute applies the provider's retry policy; remove it"
        )
    for setting, serializer in (("serializer", cls.serializer), ("result_serializer", app.conf.result_serializer)):
        if serializer != _JSON:
            raise ConfigurationError(
                f"{task_name} needs JSON, and {setting} is {serializer!r}; remove serializer= and set the app's "
                "result_serializer to 'json'"
            )
    if cls.max_retries is not None and cls.max_retries < 0:
        raise ConfigurationError(f"{task_name}: max_retries must be >= 0 or None, got {cls.max_retries!r}")
    if cls.max_deliveries < 1:
        raise ConfigurationError(f"{task_name}: max_deliveries must be >= 1, got {cls.max_deliveries!r}")
    budget = cls.timeout_budget_seconds
    if not 0 < budget < float("inf"):  # also rejects NaN
        raise ConfigurationError(f"{task_name}: timeout_budget_seconds must be > 0, got {budget!r}")
    cls.soft_time_limit = budget + SOFT_LIMIT_MARGIN_SECONDS if cls.soft_time_limit is None else cls.soft_time_limit
    cls.time_limit = cls.soft_time_limit + HARD_LIMIT_MARGIN_SECONDS if cls.time_limit is None else cls.time_limit
    if not budget < cls.soft_time_limit < cls.time_limit:
        raise ConfigurationError(
            f"{task_name}: timeout_budget_seconds ({budget:g}), soft_time_limit ({cls.soft_time_limit:g}) and "
            f"time_limit ({cls.time_limit:g}) must increase in this order; remove the limits to derive them from the "
            "budget"
        )
