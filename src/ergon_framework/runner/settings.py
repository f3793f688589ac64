"""Settings of ``ergon.toml`` and the environment, as one frozen tree that rejects unknown keys.

A class is one section of the file; it inherits from ``Policy``, the base of all frozen models that reject unknown keys.
The environment takes precedence over the file: ``ERGON_RUN__PROCESSES`` sets ``processes`` of the section ``run``.
``settings_sources`` reads both, rejects secrets in the file, and records the source of each value until it is
validated, so that an error names the source that needs a correction.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import Field, Strict, ValidationError, field_validator, model_validator

from ergon_framework import redaction
from ergon_framework.connectors import login as broker_login
from ergon_framework.connectors.encryption import KEYS_VARIABLE
from ergon_framework.connectors.registry import url_scheme
from ergon_framework.database import login
from ergon_framework.engine.retry import backoff_delay
from ergon_framework.errors import ConfigurationError
from ergon_framework.policy import Count, Policy, Seconds
from ergon_framework.providers.http.settings import ApiSettings
from ergon_framework.runner import settings_sources
from ergon_framework.worker.policies import (
    ConsumerPolicy,
    ConsumerSteps,
    ProducePolicy,
    ProducerPolicy,
    TimeLimit,
)

P = TypeVar("P", ConsumerPolicy, ProducerPolicy)

#: Maximum number of processes on one machine; a higher number is assumed to be a mistake.
MAX_PROCESSES = 1024

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]


class UnknownQueueError(ConfigurationError):
    """A queue was requested by a name that is not configured."""


class RestartSettings(Policy):
    """How an exited process is replaced, and a streaming loop that ended with an error is restarted."""

    backoff: Seconds = Field(default=0.5, description="Seconds to wait before the first replacement.")
    multiplier: float = Field(default=2.0, ge=1, description="Factor between two consecutive waits.")
    cap: Seconds = Field(default=30.0, description="Longest wait in seconds; 0 means no cap.")
    stable_after: Seconds = Field(
        default=10.0, description="Seconds that a process must run for its exit not to count as quick."
    )
    attempts: Count = Field(
        default=5, description="Consecutive quick exits of one process, each before it fetched work, that end the run."
    )

    def delay(self, exits: int) -> float:
        """Return the seconds to wait after *exits* quick exits in a row, the first being 0."""
        return backoff_delay(exits, backoff=self.backoff, multiplier=self.multiplier, cap=self.cap)


class ProbeSettings(Policy):
    """How a run reports that it is live and ready."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address of /live, /ready and /metrics.")
    port: Port | None = Field(
        default=None, description="Port of /live, /ready and /metrics; 0 selects a free one, null disables them."
    )
    file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A file that is rewritten at every interval; null writes none."
    )
    interval: Annotated[float, Field(gt=0, le=60)] = Field(default=1.0, description="Seconds between two checks.")
    event_loop_timeout: TimeLimit = Field(
        default=5.0, description="Seconds a handler may block the event loop before the process is not live."
    )
    heartbeat_timeout: Annotated[float, Field(gt=0)] = Field(
        default=15.0, description="Seconds without a report to its parent after which a process is not live."
    )


class MetricsSettings(Policy):
    """Metrics of the queue, in addition to those that the consume loop of a task reports itself."""

    depth: Annotated[float, Field(gt=0)] | None = Field(
        default=15.0, description="Interval in seconds between two measurements of the queue depth; null disables them."
    )


class JournalSettings(Policy):
    """The database journal of the outcome of each transaction."""

    enabled: bool = Field(default=False, description="Record the outcome of each transaction for ergon why.")
    days: Annotated[float, Field(gt=0, le=3650)] = Field(default=14.0, description="Days after which a row is deleted.")
    max_buffered: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=10_000, description="Maximum number of rows that a process buffers while the database does not answer."
    )


class RunSettings(Policy):
    """How ``ergon run`` runs."""

    processes: Annotated[int, Field(ge=1, le=MAX_PROCESSES)] = Field(default=1, description="Number of processes.")
    drain_timeout: Seconds | None = Field(
        default=None, description="Seconds to wait for running work at shutdown; null uses the task's policy."
    )
    pausable: bool = Field(
        default=True,
        description="Apply ergon pause if a database is configured; needs one extra connection per task and process.",
    )
    restart: RestartSettings = Field(
        default=RestartSettings(), description="How exited processes and loops are restarted."
    )
    probes: ProbeSettings = Field(default=ProbeSettings(), description="How a run reports that it is live and ready.")
    metrics: MetricsSettings = Field(default=MetricsSettings(), description="Metrics of the queue.")
    journal: JournalSettings = Field(default=JournalSettings(), description="The database journal of outcomes.")


class TaskSettings(Policy):
    """Settings of one task."""

    policy: Mapping[str, Any] = Field(
        default_factory=dict, repr=False, description="Policy keys that override those of the task."
    )


class LoggingSettings(Policy):
    """How the command logs to stderr."""

    level: Level = Field(default="info", description="Minimum level of log records.")
    format: Literal["text", "json"] = Field(
        default="text", description="`text`: a line of logfmt. `json`: one JSON object per line."
    )


class TelemetrySettings(Policy):
    """Telemetry of a task under ``ergon run``."""

    tracebacks: bool = Field(default=True, description="Keep tracebacks of errors in logs, spans and failure records.")
    redact_names: tuple[str, ...] = Field(
        default=(), description="Names of secrets besides the built-in ones, in any style; a list of text."
    )
    redact_patterns: tuple[str, ...] = Field(
        default=(), description="Regular expressions of secret text; the whole match is hidden. A list of text."
    )

    @field_validator("redact_names", "redact_patterns", mode="before")
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("redact_names")
    @classmethod
    def _check_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            redaction.check_name(name)
        return value

    @field_validator("redact_patterns")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            redaction.compile_pattern(pattern)
        return value


class PostgresSettings(Policy):
    """The PostgreSQL database of queues without an address of their own, and of all stored state."""

    dsn: str | None = Field(
        default=None, repr=False, description="Address of the database; with a password, in the environment only."
    )
    user_file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="File with the user, read before every new connection; needs password_file."
    )
    password_file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="File with the password, read before every new connection."
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.user_file and not self.password_file:
            raise ValueError("user_file is set without password_file; set both, or name the user in dsn")
        if self.password_file and not self.dsn:
            raise ValueError("password_file is set without dsn; set dsn to the address without the password")
        return self


class ProviderSettings(Policy):
    """The stored state of providers: external services that tasks call."""

    task_table: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Table of task executions that attempts refer to; ergon db upgrade sets it up."
    )


class EncryptionSettings(Policy):
    """Encryption of payloads and failures where they are stored."""

    keys: str | None = Field(
        default=None, repr=False, description="ID:BASE64 of each key, the current one first; in the environment only."
    )
    require: Annotated[bool, Strict()] = Field(
        default=False, description="Reject messages that are not encrypted; in the environment only."
    )


class BrokerSettings(Policy):
    """The default server of queues without an address, with credentials that may change while a process runs."""

    url: str | None = Field(
        default=None,
        repr=False,
        description="Address of the server for queues without one; with a password, in the environment only.",
    )
    user_file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="File with the user, read before every new connection; needs password_file."
    )
    password_file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="File with the password, read before every new connection."
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.user_file and not self.password_file:
            raise ValueError("user_file is set without password_file; set both, or name the user in url")
        if self.password_file and not self.url:
            raise ValueError("password_file is set without url; set url to the address without the password")
        return self


class QueueSettings(Policy):
    """The location of one queue."""

    url: str | None = Field(
        default=None, repr=False, description="Address of the broker; with a password, in the environment only."
    )
    options: Mapping[str, Any] = Field(
        default_factory=dict, repr=False, description="Further options of the connector."
    )

    @field_validator("url")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None and not url_scheme(value):
            raise ValueError("an address begins with a scheme, for example amqp://localhost")
        return value


class Settings(Policy):
    """Everything that can be configured from outside the program."""

    run: RunSettings = Field(default=RunSettings(), description="How ergon run runs.")
    tasks: Mapping[str, TaskSettings] = Field(default_factory=dict, description="Settings of each task, by name.")
    queues: Mapping[str, QueueSettings] = Field(default_factory=dict, description="Location of each queue, by name.")
    logging: LoggingSettings = Field(default=LoggingSettings(), description="How the command logs.")
    telemetry: TelemetrySettings = Field(default=TelemetrySettings(), description="What is recorded of a task.")
    postgres: PostgresSettings = Field(default=PostgresSettings(), description="The PostgreSQL database.")
    encryption: EncryptionSettings = Field(default=EncryptionSettings(), description="Encryption at rest.")
    providers: ProviderSettings = Field(default=ProviderSettings(), description="The stored state of providers.")
    rabbitmq: BrokerSettings = Field(default=BrokerSettings(), description="The RabbitMQ server.")
    nats: BrokerSettings = Field(default=BrokerSettings(), description="The NATS server.")
    redis: BrokerSettings = Field(default=BrokerSettings(), description="The Redis server.")
    api: ApiSettings = Field(default=ApiSettings(), description="Tokens that the health API of providers accepts.")

    def policy(self, task: str, own: P) -> P:
        """Return *own* with the settings of the task called *task*."""
        # The environment is case-insensitive, so task names are too.
        changes = [section.policy for name, section in self.tasks.items() if name.casefold() == task.casefold()]
        merged: dict[str, Any] = own.model_dump()
        for change in changes:
            merged = settings_sources.merge_settings(merged, change)
        try:
            policy = type(own).load(merged) if changes else own
        except ConfigurationError as error:
            raise ConfigurationError(f"the settings of task {task!r} are invalid: {error}") from error
        if self.run.drain_timeout is None:
            return policy
        loop = policy.loop.model_copy(update={"drain_timeout": self.run.drain_timeout})
        return policy.model_copy(update={"loop": loop})

    def queue(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return the address and the options of the queue *name*; raise UnknownQueueError if it has no address."""
        # Case-insensitive as for tasks; and an environment variable has no hyphens.
        sections = [
            section
            for queue_name, section in self.queues.items()
            if _normalize_name(queue_name) == _normalize_name(name)
        ]
        urls = [section.url for section in sections if section.url]
        if not urls:
            configured = (
                ", ".join(sorted(queue_name for queue_name, section in self.queues.items() if section.url)) or "none"
            )
            variable = settings_sources.env_variable_name(("queues", _normalize_name(name), "url"))
            raise UnknownQueueError(
                f"queue {name!r} has no address: write url = … below [queues.{name}] in {settings_sources.FILE_NAME}, "
                f"or set {variable}; known queues: {configured}"
            )
        options: dict[str, Any] = {}
        for section in sections:
            options = settings_sources.merge_settings(options, section.options)
        return urls[-1], options


def _normalize_name(name: str) -> str:
    return name.casefold().replace("-", "_")


def load_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Load the settings of *path*, or ``ergon.toml`` in the current folder, and *environ*, or the process's own."""
    file = settings_sources.from_file(
        path if path is not None else Path(settings_sources.FILE_NAME), required=path is not None
    )
    if "encryption" in file.tree:
        raise ConfigurationError(
            f"{file.origin}: encryption is configured by the environment only, because it has keys: remove the section "
            f"from the file and set {KEYS_VARIABLE}"
        )
    tree = file.merge(
        settings_sources.from_environment(os.environ if environ is None else environ, Settings, KEY_MODELS)
    )
    faults = settings_sources.unknown_key_errors(tree, Settings, KEY_MODELS)
    if faults:
        raise ConfigurationError("; ".join(faults))
    try:
        loaded = Settings.model_validate(tree.tree)
    except ValidationError as error:
        raise ConfigurationError(settings_sources.explain_validation_error(error, tree)) from error
    if environ is None:
        _use_redaction(loaded)
        login.configure(loaded.postgres.dsn, loaded.postgres.user_file, loaded.postgres.password_file)
        for section, broker in (("rabbitmq", loaded.rabbitmq), ("nats", loaded.nats), ("redis", loaded.redis)):
            broker_login.configure(section, broker.url, broker.user_file, broker.password_file)
    return loaded


def _use_redaction(loaded: Settings) -> None:
    """Apply the redaction rules of *loaded* to this process, and hide the passwords of its addresses."""
    redaction.configure(loaded.telemetry.redact_names, loaded.telemetry.redact_patterns)
    brokers = [each.url for each in (loaded.rabbitmq, loaded.nats, loaded.redis)]
    for address in (loaded.postgres.dsn, *brokers, *(each.url for each in loaded.queues.values())):
        if address:
            redaction.learn_address(address)


def database_dsn(path: Path | None = None) -> str:
    """Return the address of the database from the same sources; raise ConfigurationError if there is none."""
    dsn = load_settings(path).postgres.dsn
    if not dsn:
        raise ConfigurationError(
            "no database is configured; set ERGON_POSTGRES__DSN, for example to postgresql://owner@localhost:5432/shop"
        )
    return dsn


class _TaskSteps(ConsumerSteps):
    """The steps of consumers and producers."""

    produce: ProducePolicy = ProducePolicy()


class _TaskPolicy(ConsumerPolicy):
    """The keys that ``[tasks.NAME.policy]`` may have, of a consumer or a producer.

    Only unknown keys are found with it; the task's own policy rejects the keys of the other kind.
    """

    steps: _TaskSteps = _TaskSteps()


#: The model whose keys a mapping may have, by the settings class and the key of the mapping.
KEY_MODELS: Mapping[tuple[type[Policy], str], type[Policy]] = {
    (TaskSettings, "policy"): _TaskPolicy,
}
