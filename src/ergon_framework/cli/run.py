"""``ergon run``: load the tasks, run them in one or several processes, and report the result.

With several processes, this one is their supervisor: it runs no user code, and starts each of them as ``cli.child``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from signal import Signals
from typing import Annotated, Any, TypeVar

import typer

from ergon_framework.cli.output import configure_logging, explain_error
from ergon_framework.cli.summary import merge_reports, show, show_all, to_json_line
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.runner import otlp, queues
from ergon_framework.runner.exit import RunExit
from ergon_framework.runner.loading import is_consumer, is_producer, load_policy, load_task, load_tasks
from ergon_framework.runner.probes import STARTING, ProcessHealth, serve_probes
from ergon_framework.runner.process import Process, RunResult, ShutdownStage
from ergon_framework.runner.produce import STDIN, create_input_producer
from ergon_framework.runner.provider_state import close_provider_state, open_provider_state
from ergon_framework.runner.queue_depth import should_measure
from ergon_framework.runner.services import JournalRecorder, journals_for, pause_gates
from ergon_framework.runner.services import check_journal_settings as check_journal
from ergon_framework.runner.settings import Settings, load_settings
from ergon_framework.runner.shutdown import exit_process, flush_telemetry, force_exit_at_deadline
from ergon_framework.runner.supervisor import Supervisor
from ergon_framework.runner.task_runner import Runnable, TaskSetup
from ergon_framework.task.context import choose_policy
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.multiprocess import MultiprocessMetrics
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.options import disable_tracebacks
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy

log = logging.getLogger(f"{LIBRARY}.runner")

P = TypeVar("P", ConsumerPolicy, ProducerPolicy)


class LogLevel(StrEnum):
    """Log levels, named as in the standard library."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevelOption = Annotated[LogLevel | None, typer.Option(show_default="info", help="Minimum log level.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options from the command line; None leaves the value to the environment, the file and the task."""

    #: ``MODULE:TASK`` of each task, or ``MODULE`` for all consumers of a module.
    tasks: Sequence[str]
    streaming: bool | None = None
    limit: int | None = None
    policy: str | None = None
    log_level: str | None = None
    config: str | None = None
    processes: int | None = None
    probe_port: int | None = None
    probe_file: str | None = None
    input: str | None = None

    def resolve_settings(self) -> Settings:
        """Return the settings of file and environment, overridden by the command line."""
        settings = load_settings(None if self.config is None else Path(self.config))
        probe_options = {"port": self.probe_port, "file": self.probe_file}
        probes = settings.run.probes.model_copy(
            update={key: value for key, value in probe_options.items() if value is not None}
        )
        changes: dict[str, Any] = {"probes": probes}
        if self.processes is not None:
            changes["processes"] = self.processes
        return settings.model_copy(update={"run": settings.run.model_copy(update=changes)})


def run_task(options: Options, *, as_json: bool) -> int:
    """Run the task and return the exit code; does not return if a handler call is still running at the end."""
    try:
        settings = options.resolve_settings()
        configure_process(options, settings)
        return (
            _run_many(options, settings, as_json=as_json)
            if settings.run.processes > 1
            else _run_one(options, settings, as_json)
        )
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return RunExit.USAGE


def configure_process(options: Options, settings: Settings) -> None:
    """Configure logging, and register the queues by their names in the settings."""
    configure_logging((options.log_level or settings.logging.level).upper(), settings.logging.format)
    queues.set_settings(settings)


def load_tasks_and_policies(
    options: Options, settings: Settings
) -> list[tuple[Runnable, ConsumerPolicy | ProducerPolicy]]:
    """Return the tasks, each with its policy: consumers, or one producer with its input."""
    check_journal(settings)
    tasks = load_tasks(options.tasks)
    if len(tasks) > 1:
        _check_options_of_many(options)
    elif options.input is not None or not is_consumer(tasks[0]):
        _prepare_task(tasks[0], settings)
        return [_load_producer(tasks[0], options, settings)]
    return [_prepare_consumer(task, options, settings) for task in tasks]


def _check_options_of_many(options: Options) -> None:
    if options.input is not None:
        raise ConfigurationError("--input is for one producer; name it: MODULE:PRODUCER")
    if options.policy is not None:
        raise ConfigurationError(
            "--policy is for one task; write the policies of several tasks below [tasks.NAME.policy] in ergon.toml"
        )


def load_consumer(options: Options, settings: Settings) -> tuple[Runnable, ConsumerPolicy]:
    """Return the only consumer of *options* and its policy."""
    check_journal(settings)
    return _prepare_consumer(load_task(options.tasks[0]), options, settings)


def _prepare_consumer(task: Runnable, options: Options, settings: Settings) -> tuple[Runnable, ConsumerPolicy]:
    _prepare_task(task, settings)
    policy = _resolve_policy(task, ConsumerPolicy, options, settings)
    if options.streaming is not None:
        loop = policy.loop.model_copy(update={"streaming": options.streaming})
        policy = policy.model_copy(update={"loop": loop})
    return task, policy


def _prepare_task(task: Runnable, settings: Settings) -> None:
    if not settings.telemetry.tracebacks:
        disable_tracebacks(task)
    if isinstance(task.connector, queues.NamedQueue):
        # Resolve the queue now, so that an unknown queue name is reported before the task starts.
        _ = task.connector.connector


def _load_producer(task: Runnable, options: Options, settings: Settings) -> tuple[Runnable, ProducerPolicy]:
    """Return the producer with its input, and its policy; one input belongs to one process."""
    if not is_producer(task):
        raise ConfigurationError(f"{options.tasks[0]!r} only consumes, from its queue; --input is for producers")
    if options.streaming is not None:
        raise ConfigurationError("--streaming and --once are for consumers; a producer ends with its input")
    if settings.run.processes > 1:
        raise ConfigurationError("a producer runs in one process, which reads the input; omit --processes")
    policy = _resolve_policy(task, ProducerPolicy, options, settings)
    return create_input_producer(task, options.input or STDIN), policy


def _resolve_policy(task: Runnable, kind: type[P], options: Options, settings: Settings) -> P:
    if options.policy is None:
        policy = settings.policy(task.name, choose_policy(task, None, kind))
    else:
        policy = load_policy(Path(options.policy), kind)
    if options.limit is None:
        return policy
    return policy.model_copy(update={"loop": policy.loop.model_copy(update={"limit": options.limit})})


def configure_telemetry(
    tasks: Sequence[Runnable], options: Options, settings: Settings, *, number: int | None = None
) -> list[float | None]:
    """Export telemetry as the environment says; return the queue-depth interval of each task in process *number*."""
    exports_metrics = settings.run.probes.port is not None or "metrics" in otlp.requested_signals()
    # The service that a trace names: the task, or the module of several tasks.
    otlp.configure_otlp(tasks[0].name if len(tasks) == 1 else options.tasks[0].partition(":")[0])
    return [
        settings.run.metrics.depth if exports_metrics and should_measure(task, number=number) else None
        for task in tasks
    ]


def print_errors(result: RunResult) -> None:
    """Print the error of each task: the framework's explain themselves, other errors need their traceback."""
    if result.forced:
        typer.echo(f"ergon: {RunExit.FORCED.meaning}", err=True)
    for task in result.tasks:
        label = "" if len(result.tasks) == 1 else f"task {task.name}: "
        if isinstance(task.error, ErgonError):
            typer.echo(f"ergon: {label}{explain_error(task.error)}", err=True)
        elif task.error is not None:
            typer.echo(label + "".join(traceback.format_exception(task.error)).rstrip(), err=True)


@dataclass(frozen=True, slots=True)
class PreparedTasks:
    """Tasks that are ready to run, with their journals."""

    setups: list[TaskSetup]
    journals: list[JournalRecorder]

    @property
    def drain_timeout(self) -> float:
        """The longest drain timeout of all tasks."""
        return max(setup.policy.loop.drain_timeout for setup in self.setups)

    def finish(self, result: RunResult) -> None:
        """Write the rest of journals and provider state, within the time before the process must exit."""
        for journal in self.journals:
            journal.finish(result.deadline)
        close_provider_state(result.deadline)


@contextmanager
def prepare_tasks(
    loaded: Sequence[tuple[Runnable, ConsumerPolicy | ProducerPolicy]],
    options: Options,
    settings: Settings,
    *,
    number: int | None = None,
) -> Iterator[PreparedTasks]:
    """Open what the tasks of process *number* share with its surroundings: gates, journals and telemetry."""
    tasks = [task for task, _ in loaded]
    for task, policy in loaded:
        open_provider_state(task, settings)
        log_worker_start(task, policy, number=number)
    depths = configure_telemetry(tasks, options, settings, number=number)
    with pause_gates(tasks, settings) as gates, journals_for(tasks, settings) as journals:
        setups = [
            TaskSetup(task, policy, gates=gates[index], on_outcome=journals[index].on_outcome, depth=depths[index])
            for index, (task, policy) in enumerate(loaded)
        ]
        yield PreparedTasks(setups, journals)


def log_worker_start(task: Runnable, policy: ConsumerPolicy | ProducerPolicy, *, number: int | None = None) -> None:
    """Log the start of a worker with its task; *number* is the number of the process among several."""
    fields = {
        Field.TASK: task.name,
        Field.QUEUE: getattr(task.connector, "name", None),
        Field.CONCURRENCY: policy.loop.concurrency.value,
        Field.VERSION: version("ergon-framework"),
        Field.NUMBER: number,
        Field.PID: os.getpid(),
    }
    logs.log_event(logging.INFO, Event.WORKER_STARTED, fields, to=log)


def log_stage(stage: ShutdownStage, *, number: int | None = None) -> None:
    """Log the start of a shutdown stage."""
    level = logging.ERROR if stage is ShutdownStage.KILLED else logging.INFO
    fields = {Field.STAGE: stage.value} if number is None else {Field.STAGE: stage.value, Field.NUMBER: number}
    logs.log_event(level, Event.PROCESS_STOPPING, fields, to=log)


# -- one process ----------------------------------------------------------------------------------


def _run_one(options: Options, settings: Settings, as_json: bool) -> int:  # noqa: FBT001 - one caller, by position
    # A list, because the probes call check_health() before the process exists.
    running: list[Process] = []

    def check_health() -> ProcessHealth:
        return running[0].health() if running else STARTING

    with serve_probes(settings.run.probes, check_health, MultiprocessMetrics().read) as port:
        _print_probe_address(port, settings)
        loaded = load_tasks_and_policies(options, settings)
        with prepare_tasks(loaded, options, settings) as prepared:
            process = Process(
                prepared.setups,
                on_signal=_make_signal_handler(prepared.drain_timeout),
                on_stage=log_stage,
                event_loop_timeout=settings.run.probes.event_loop_timeout,
                restart=settings.run.restart,
            )
            running.append(process)
            result = process.run()
            prepared.finish(result)
        force_exit_at_deadline(result)  # from here on, the process ends at its deadline whatever the rest does
        print_errors(result)
        if as_json:
            typer.echo(to_json_line(result))
        else:
            show(result)
    flush_telemetry(result)
    return exit_process(result)


def _make_signal_handler(grace: float) -> Callable[[Signals, int], None]:
    return lambda signal, times: _print_signal(signal, times, grace)


def _print_signal(signal: Signals, times: int, grace: float) -> None:
    if times == 1:
        message = f"running work has {grace:g} s to finish; a second signal stops it immediately"
        typer.echo(f"ergon: {signal.name}: {message}", err=True)
    else:
        typer.echo(f"ergon: {signal.name}: stopping now", err=True)


# -- several processes ----------------------------------------------------------------------------


def _run_many(options: Options, settings: Settings, *, as_json: bool) -> int:
    supervisor = Supervisor(_build_command(options), settings.run, on_signal=_print_signal)
    metrics = supervisor.metrics
    with serve_probes(settings.run.probes, supervisor.health, metrics.read, metrics.read_families) as port:
        _print_probe_address(port, settings)
        result = supervisor.run()
    if result.reason is not None:
        typer.echo(f"ergon: {result.reason}", err=True)
    if as_json:
        typer.echo(json.dumps(merge_reports(", ".join(options.tasks), result)))
    elif result.reports:
        show_all(result)
    return result.exit


def _build_command(options: Options) -> Callable[[int, int, int], Sequence[str]]:
    def command(number: int, command_fd: int, report_fd: int) -> Sequence[str]:
        arguments_json = json.dumps(
            {"number": number, "orders": command_fd, "reports": report_fd, "options": asdict(options)}
        )
        # -P: without it, python -m puts the current directory before the installed packages.
        return [sys.executable, "-P", "-m", "ergon_framework.cli.child", arguments_json]

    return command


def _print_probe_address(port: int | None, settings: Settings) -> None:
    """Print the address of the probes if the system chose the port."""
    if port is not None and settings.run.probes.port == 0:
        typer.echo(f"ergon: probes on http://{settings.run.probes.host}:{port}", err=True)
