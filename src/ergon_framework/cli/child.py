"""One of several processes: the same run, with a parent on the line instead of a summary at the end."""

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

from ergon_framework.cli.run import Options, enter, load, log_worker_start, look, prepare, tell
from ergon_framework.cli.summary import told
from ergon_framework.errors import ConfigurationError, text
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.journalling import journalled
from ergon_framework.runner.leaving import flush, guard, leave
from ergon_framework.runner.lifeline import Lifeline
from ergon_framework.runner.pausing import pausable
from ergon_framework.runner.process import Order, Process
from ergon_framework.runner.provider_state import close_provider_state, open_provider_state
from ergon_framework.runner.signals import STOPPING
from ergon_framework.telemetry import sums
from ergon_framework.telemetry.metrics import snapshot


class Orders:
    """Hands the parent's orders to the process; before there is one, nothing was fetched and it may just go."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Process | None = None

    def __call__(self, order: Order) -> None:
        with self._lock:
            if self._process is None:
                os._exit(Exit.OK)
            self._process.order(order)

    def go_to(self, process: Process) -> None:
        with self._lock:
            self._process = process


def main(given: str) -> int:
    """Run the task that *given*, the parent's words, describes; the exit code."""
    words = json.loads(given)
    orders, line = Orders(), Lifeline(words["orders"], words["reports"])
    line.listen(orders)
    for number in STOPPING:
        signal.signal(number, lambda *_: os._exit(Exit.OK))
    options = Options(**words["options"])
    try:
        found = options.settings()
        prepare(options, found)
        task, rules = load(options, found)
        open_provider_state(task, found)
        log_worker_start(task, rules, number=words["number"])
        depth = look(task, found, number=words["number"])
    except ConfigurationError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        return Exit.USAGE
    with pausable(task, found) as gates, journalled(task, found) as journal:
        process = Process(
            task,
            rules,
            on_stage=partial(enter, number=words["number"]),
            supervised=True,
            blocked=found.run.probes.blocked,
            depth=depth,
            gates=gates,
            on_outcome=journal.on_outcome,
            on_first_fetch=partial(_report_fetch, line),
        )
        orders.go_to(process)
        line.report("loaded", {"drain": rules.loop.drain_timeout, "task": task.name})
        # Nobody else hears what a process has counted, and without a port nobody asks.
        counting = Counting(line, on=found.run.probes.port is not None)
        beating = (line, process, counting, found.run.probes.interval)
        Thread(target=_beat, args=beating, name="ergon-beat", daemon=True).start()
        ended = process.run()
        journal.finish(ended.deadline)
        close_provider_state(ended.deadline)
    guard(ended)
    tell(ended)
    counting.tell(last=True)
    line.report("ended", told(task.name, ended))
    flush(ended)
    return leave(ended)


def _report_fetch(line: Lifeline) -> None:
    """Tell the parent that this process has work, before the work can end the process."""
    # On a thread: a parent that is stopped reads nothing, and the loop must not wait for it.
    telling = Thread(target=line.report, args=("fetched", {}), name="ergon-fetched", daemon=True)
    telling.start()
    telling.join(_FETCH_REPORT_SECONDS)


class Counting:
    """Tells the parent all that was counted so far: whole, and nothing after the last word."""

    def __init__(self, line: Lifeline, *, on: bool) -> None:
        self._line = line
        self._lock = Lock()
        self._on = on

    def tell(self, *, last: bool = False) -> None:
        with self._lock:
            for part in sums.told(snapshot()) if self._on else ():
                self._line.report("metrics", part)
            self._on = self._on and not last


def _beat(line: Lifeline, process: Process, counting: Counting, interval: float) -> None:
    """Tell the parent how it is, at once when that changes and again and again while it does not."""
    last: dict[str, Any] = {}
    since = counted = 0.0
    while True:
        health = process.health().told()
        now = time.monotonic()
        if health != last or now - since >= interval:
            line.report("health", health)
            last, since = health, now
        if now - counted >= interval:
            counting.tell()
            counted = now
        time.sleep(min(interval, LOOK))


#: How often a process looks at itself.
LOOK = 0.1
#: How long the first work of a process waits at most for the parent to be told of it.
_FETCH_REPORT_SECONDS = 1.0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
