"""One worker process of several: the same run, which reports to its parent instead of printing a summary.

The parent is the supervisor in ``ergon run --processes N``: it starts the processes, sends them commands through one
pipe, and reads their reports (health, metrics, end) from another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from threading import Lock, Thread
from typing import Any

import typer

from ergon_framework.cli.run import (
    Options,
    configure_process,
    load_tasks_and_policies,
    log_stage,
    prepare_tasks,
    print_errors,
)
from ergon_framework.cli.summary import process_data
from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.runner.child_pipe import ParentPipe
from ergon_framework.runner.exit import RunExit
from ergon_framework.runner.process import ParentCommand, Process
from ergon_framework.runner.shutdown import exit_process, flush_telemetry, force_exit_at_deadline
from ergon_framework.runner.signals import STOP_SIGNALS
from ergon_framework.telemetry import multiprocess
from ergon_framework.telemetry.metrics import snapshot
from ergon_framework.telemetry.user_metrics import collect_families


class ParentCommands:
    """Passes the parent's commands to the process; before the process exists nothing was fetched, so it just exits."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Process | None = None

    def __call__(self, command: ParentCommand) -> None:
        with self._lock:
            if self._process is None:
                os._exit(RunExit.OK)
            self._process.handle_command(command)

    def attach(self, process: Process) -> None:
        with self._lock:
            self._process = process


def main(arguments_json: str) -> int:
    """Run the tasks described by *arguments_json* from the parent; return the exit code."""
    arguments = json.loads(arguments_json)
    commands, pipe = ParentCommands(), ParentPipe(arguments["orders"], arguments["reports"])
    pipe.listen(commands)
    # Until Process.run() handles signals: nothing was fetched before that, so nothing has to be drained.
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: os._exit(RunExit.OK))
    options = Options(**arguments["options"])
    try:
        settings = options.resolve_settings()
        configure_process(options, settings)
        loaded = load_tasks_and_policies(options, settings)
        with prepare_tasks(loaded, options, settings, number=arguments["number"]) as prepared:
            process = Process(
                prepared.setups,
                on_stage=partial(log_stage, number=arguments["number"]),
                supervised=True,
                event_loop_timeout=settings.run.probes.event_loop_timeout,
                restart=settings.run.restart,
                on_first_fetch=partial(_report_fetch, pipe),
            )
            commands.attach(process)
            pipe.report("loaded", {"drain": prepared.drain_timeout, "task": loaded[0][0].name})
            # Only the parent publishes the metrics of a process, and without a probe port it is never scraped.
            metrics_reporter = MetricsReporter(pipe, enabled=settings.run.probes.port is not None)
            interval = settings.run.probes.interval
            Thread(target=_report_health, args=(pipe, process, interval), name="ergon-beat", daemon=True).start()
            Thread(target=_report_metrics, args=(metrics_reporter, interval), name="ergon-metrics", daemon=True).start()
            result = process.run()
            prepared.finish(result)
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return RunExit.USAGE
    force_exit_at_deadline(result)  # from here on, the process ends at its deadline whatever the rest does
    print_errors(result)
    metrics_reporter.report(last=True)
    pipe.report("ended", process_data(result))
    flush_telemetry(result)
    return exit_process(result)


def _report_fetch(pipe: ParentPipe) -> None:
    """Report to the parent that this process has work, before the work can end the process."""
    # On a thread: a stopped parent does not read the pipe, and the loop must not wait for it.
    thread = Thread(target=pipe.report, args=("fetched", {}), name="ergon-fetched", daemon=True)
    thread.start()
    thread.join(_FETCH_REPORT_SECONDS)


class MetricsReporter:
    """Reports all metrics so far to the parent: complete, and nothing after the last report."""

    def __init__(self, pipe: ParentPipe, *, enabled: bool) -> None:
        self._pipe = pipe
        self._lock = Lock()
        self._enabled = enabled

    def report(self, *, last: bool = False) -> None:
        with self._lock:
            if self._enabled:
                for part in multiprocess.serialize_report(snapshot(), collect_families()):
                    self._pipe.report("metrics", part)
            self._enabled = self._enabled and not last


def _report_metrics(metrics_reporter: MetricsReporter, interval: float) -> None:
    """Report the metrics to the parent periodically, apart from the health: a collector of user code may be slow."""
    while True:
        metrics_reporter.report()
        time.sleep(interval)


def _report_health(pipe: ParentPipe, process: Process, interval: float) -> None:
    """Report the health to the parent: immediately when it changes, and periodically while it does not."""
    last_health: dict[str, Any] = {}
    reported_at = 0.0
    while True:
        health = process.health().to_dict()
        now = time.monotonic()
        if health != last_health or now - reported_at >= interval:
            pipe.report("health", health)
            last_health, reported_at = health, now
        time.sleep(min(interval, HEALTH_POLL_SECONDS))


#: Seconds between two checks of the process's own health.
HEALTH_POLL_SECONDS = 0.1
#: Maximum seconds that the first transaction of a process waits for the report to the parent.
_FETCH_REPORT_SECONDS = 1.0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
