"""``ergon run``: load the task, run it in this process or in several, say how it ended."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

import typer

from ergon_framework.cli.logs import configure
from ergon_framework.cli.summary import as_line, show, show_all, summed
from ergon_framework.cli.telling import explained
from ergon_framework.errors import ConfigurationError, ErgonError, text
from ergon_framework.runner import exporting, queues
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.health import STARTING, Health
from ergon_framework.runner.journalling import check as check_journal
from ergon_framework.runner.journalling import journalled
from ergon_framework.runner.leaving import flush, guard, leave
from ergon_framework.runner.loading import is_consumer, is_producer, load_policy, load_runnable, load_task
from ergon_framework.runner.measuring import looks
from ergon_framework.runner.pausing import pausable
from ergon_framework.runner.probes import probed
from ergon_framework.runner.process import Ended, Process, Runnable
from ergon_framework.runner.producing import STDIN, create_input_producer
from ergon_framework.runner.provider_state import close_provider_state, open_provider_state
from ergon_framework.runner.settings import Settings, settings
from ergon_framework.runner.stages import Stage
from ergon_framework.runner.supervisor import Supervisor
from ergon_framework.task.defaults import choose_policy
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.options import without_tracebacks
from ergon_framework.telemetry.sums import Sums

log = logging.getLogger(f"{LIBRARY}.runner")

P = TypeVar("P", ConsumerPolicy, ProducerPolicy)


class LogLevel(StrEnum):
    """What the standard library calls its levels."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; None leaves it to the environment, the file and the task."""

    task: str
    streaming: bool | None = None
    limit: int | None = None
    policy: str | None = None
    log_level: str | None = None
    config: str | None = None
    processes: int | None = None
    probe_port: int | None = None
    probe_file: str | None = None
    input: str | None = None

    def settings(self) -> Settings:
        """What file and environment say, and over it what the command line says."""
        found = settings(None if self.config is None else Path(self.config))
        given = {"port": self.probe_port, "file": self.probe_file}
        probes = found.run.probes.model_copy(update={key: value for key, value in given.items() if value is not None})
        changes: dict[str, Any] = {"probes": probes}
        if self.processes is not None:
            changes["processes"] = self.processes
        return found.model_copy(update={"run": found.run.model_copy(update=changes)})


def run_task(options: Options, *, as_json: bool) -> int:
    """Run the task; the exit code. Does not return if a handler is still running at the end."""
    try:
        found = options.settings()
        prepare(options, found)
        return (
            _run_many(options, found, as_json=as_json) if found.run.processes > 1 else _run_one(options, found, as_json)
        )
    except ConfigurationError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        return Exit.USAGE


def prepare(options: Options, found: Settings) -> None:
    """Configure the logs, and let queues be found by the names that the settings give them."""
    configure((options.log_level or found.logging.level).upper(), found.logging.format)
    queues.use(found)


def load(options: Options, found: Settings) -> tuple[Runnable, ConsumerPolicy | ProducerPolicy]:
    """The task, and the policy that it is to obey."""
    check_journal(found)
    task = load_runnable(options.task)
    if options.input is not None or not is_consumer(task):
        _prepare_task(task, found)
        return _load_producer(task, options, found)
    return load_consumer(options, found)


def load_consumer(options: Options, found: Settings) -> tuple[Runnable, ConsumerPolicy]:
    """Return the consumer and its policy."""
    check_journal(found)
    task = load_task(options.task)
    _prepare_task(task, found)
    rules = _rules(task, ConsumerPolicy, options, found)
    if options.streaming is not None:
        loop = rules.loop.model_copy(update={"streaming": options.streaming})
        rules = rules.model_copy(update={"loop": loop})
    return task, rules


def _prepare_task(task: Runnable, found: Settings) -> None:
    if not found.telemetry.tracebacks:
        without_tracebacks(task)
    if isinstance(task.connector, queues.NamedQueue):
        # A queue that nobody can find is a mistake of the settings, told before anything has begun.
        _ = task.connector.connector


def _load_producer(task: Runnable, options: Options, found: Settings) -> tuple[Runnable, ProducerPolicy]:
    """Return the producer with its input, and its policy; one input belongs to one process."""
    if not is_producer(task):
        raise ConfigurationError(f"{options.task!r} only consumes, from its queue; --input is for producers")
    if options.streaming is not None:
        raise ConfigurationError("--streaming and --once are for consumers; a producer ends with its input")
    if found.run.processes > 1:
        raise ConfigurationError("a producer runs in one process, which reads the input; leave --processes out")
    rules = _rules(task, ProducerPolicy, options, found)
    return create_input_producer(task, options.input or STDIN), rules


def _rules(task: Runnable, kind: type[P], options: Options, found: Settings) -> P:
    if options.policy is None:
        policy = found.policy(task.name, choose_policy(task, None, kind))
    else:
        policy = load_policy(Path(options.policy), kind)
    if options.limit is None:
        return policy
    return policy.model_copy(update={"loop": policy.loop.model_copy(update={"limit": options.limit})})


def look(task: Runnable, found: Settings, *, number: int | None = None) -> float | None:
    """Have telemetry go where the environment says; how often process *number* is to look at its queue, if at all."""
    read = found.run.probes.port is not None or "metrics" in exporting.wanted()
    exporting.export(task.name)
    return found.run.metrics.depth if read and looks(task, number=number) else None


def tell(ended: Ended) -> None:
    """Say what went wrong: an error of ours explains itself, any other needs its traceback."""
    if ended.forced:
        typer.echo(f"ergon: {Exit.FORCED.meaning}", err=True)
    elif isinstance(ended.error, ErgonError):
        typer.echo(f"ergon: {explained(ended.error)}", err=True)
    elif ended.error is not None:
        typer.echo("".join(traceback.format_exception(ended.error)).rstrip(), err=True)


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
    logs.say(logging.INFO, Event.WORKER_STARTED, fields, to=log)


def enter(stage: Stage, *, number: int | None = None) -> None:
    """Log that a stage of the stop has begun."""
    level = logging.ERROR if stage is Stage.KILLED else logging.INFO
    fields = {Field.STAGE: stage.value} if number is None else {Field.STAGE: stage.value, Field.NUMBER: number}
    logs.say(level, Event.PROCESS_STOPPING, fields, to=log)


# -- one process ----------------------------------------------------------------------------------


def _run_one(options: Options, found: Settings, as_json: bool) -> int:  # noqa: FBT001 - told by position, once
    running: list[Process] = []

    def check() -> Health:
        return running[0].health() if running else STARTING

    with probed(found.run.probes, check, Sums().read) as port:
        _answers(port, found)
        task, rules = load(options, found)
        open_provider_state(task, found)
        log_worker_start(task, rules)
        with pausable(task, found) as gates, journalled(task, found) as journal:
            process = Process(
                task,
                rules,
                on_signal=_telling(rules),
                on_stage=enter,
                blocked=found.run.probes.blocked,
                depth=look(task, found),
                gates=gates,
                on_outcome=journal.on_outcome,
            )
            running.append(process)
            ended = process.run()
            journal.finish(ended.deadline)
            close_provider_state(ended.deadline)
        guard(ended)
        tell(ended)
        if as_json:
            typer.echo(as_line(task.name, ended))
        else:
            show(task.name, ended)
    flush(ended)
    return leave(ended)


def _telling(policy: ConsumerPolicy | ProducerPolicy) -> Callable[[Signals, int], None]:
    return lambda signal, times: _heard(signal, times, policy.loop.drain_timeout)


def _heard(signal: Signals, times: int, grace: float) -> None:
    if times == 1:
        said = f"running work has {grace:g} s to finish; a second signal ends it at once"
        typer.echo(f"ergon: {signal.name}: {said}", err=True)
    else:
        typer.echo(f"ergon: {signal.name}: ending now", err=True)


# -- several --------------------------------------------------------------------------------------


def _run_many(options: Options, found: Settings, *, as_json: bool) -> int:
    supervisor = Supervisor(_command(options), found.run, on_signal=_heard)
    with probed(found.run.probes, supervisor.health, supervisor.sums.read) as port:
        _answers(port, found)
        ran = supervisor.run()
    if ran.why is not None:
        typer.echo(f"ergon: {ran.why}", err=True)
    name = next((report["task"] for report in ran.reports if "task" in report), options.task)
    if as_json:
        typer.echo(json.dumps(summed(name, ran)))
    elif ran.reports:
        show_all(name, ran)
    return ran.exit


def _command(options: Options) -> Callable[[int, int, int], Sequence[str]]:
    def command(number: int, orders: int, reports: int) -> Sequence[str]:
        given = json.dumps({"number": number, "orders": orders, "reports": reports, "options": asdict(options)})
        # -P: python -m would put the current folder in front of the installed packages.
        return [sys.executable, "-P", "-m", "ergon_framework.cli.child", given]

    return command


def _answers(port: int | None, found: Settings) -> None:
    """Say where the probes are answered, if that was left to chance."""
    if port is not None and found.run.probes.port == 0:
        typer.echo(f"ergon: probes on http://{found.run.probes.host}:{port}", err=True)
