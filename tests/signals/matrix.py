"""The signal matrix: real processes in every state, ended in every way; ``make signals``.

One line per cell on stderr, one line of JSON at the end, exit code 1 where a target is missed. A cell
brings a run into its state, sends the signal, and measures the time until the process has
exited. Then it checks for lost orders, counted releases and remaining processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.database.migrate import upgrade
from ergon_framework.runner.exit import RunExit
from tests.servers.postgres import PrivatePostgres
from tests.signals.file_queue import LEASE_SECONDS
from tests.signals.world import DATABASE, EventTimeout, MatrixRun

#: Long enough for a busy machine, short enough for sixty cells.
DRAIN_SECONDS = 2.0
#: Seconds after the grace period that a run may take, with one process and with several: as the guide says.
EXIT_SECONDS_BY_PROCESSES = {1: 1.0, 4: 2.0}
#: For handlers that are released and end on their own, so the drain may be long.
LONG_DRAIN_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class State:
    """A state in which the signal arrives: how it is reached, and what must be true afterwards."""

    name: str
    #: The journal's word for a process in this state.
    event: str
    orders: bool = True
    drain: float = DRAIN_SECONDS
    #: Minimum seconds after the signal, and maximum seconds without those that the guide adds.
    min_seconds: float = 0.0
    max_seconds: float = 0.0
    codes: tuple[RunExit, ...] = (RunExit.OK,)
    #: The result of each order: done, released, or claimed until the lease is over.
    outcome: str = "done"
    #: Actions once the state is reached, and after the signal.
    before: Callable[[MatrixRun], None] | None = None
    after: Callable[[MatrixRun], None] | None = None


def _take_queue_down(run: MatrixRun) -> None:
    run.take_queue_down()
    run.create_file("on")
    run.wait_until_reached("unsettled")


def _start_settling(run: MatrixRun) -> None:
    # Together: a settling worker has a free slot, and would take another one's order.
    run.create_file("on")
    run.wait_until_reached("settling")


def _release_handlers(run: MatrixRun) -> None:
    run.wait_for_signal_message()
    run.create_file("go")


STATES = (
    # An idle run exits immediately: none of the grace period is used.
    State("idle", "idle", orders=False),
    State("fetching", "fetching", orders=False),
    State("backoff", "began", min_seconds=DRAIN_SECONDS, max_seconds=DRAIN_SECONDS, outcome="released"),
    State("handler", "began", drain=LONG_DRAIN_SECONDS, after=_release_handlers),
    State(
        "never",
        "began",
        min_seconds=DRAIN_SECONDS,
        max_seconds=DRAIN_SECONDS,
        codes=(RunExit.LEFT_BEHIND,),
        outcome="claimed",
    ),
    State("settle", "began", drain=LONG_DRAIN_SECONDS, before=_start_settling, after=_release_handlers),
    # Closing without a server takes the remaining time, and on a busy machine more: both exit codes are correct.
    State(
        "down",
        "began",
        min_seconds=DRAIN_SECONDS,
        max_seconds=DRAIN_SECONDS,
        codes=(RunExit.LEFT_BEHIND, RunExit.FORCED),
        outcome="claimed",
        before=_take_queue_down,
    ),
)


@dataclass(slots=True)
class Cell:
    """One cell: its name, measurements and missed targets."""

    name: str
    server: PrivatePostgres | None
    measurements: dict[str, Any] = field(default_factory=dict)
    missed_targets: list[str] = field(default_factory=list)

    def create_run(self, **options: Any) -> MatrixRun:
        return MatrixRun(server=self.server, **options)

    def expect(self, condition: bool, message: str) -> None:
        if not condition:
            self.missed_targets.append(message)


# -- a signal in a state --------------------------------------------------------------------------


def check_signal(
    cell: Cell, state: State, *, flavour: str, processes: int, number: signal.Signals, group: bool
) -> None:
    """Send *number* while every process is in *state*."""
    with cell.create_run(flavour=flavour, processes=processes, state=state.name, drain=state.drain) as run:
        if state.orders:
            # One each, and some that no process may claim any more.
            run.dispatch(processes + 3)
        run.start()
        run.wait_until_reached(state.event)
        if state.before is not None:
            state.before(run)
        start = time.monotonic()
        run.signal(number, group=group)
        if state.after is not None:
            state.after(run)
        code = run.wait_for_exit()
        seconds = time.monotonic() - start
        cell.measurements |= {"seconds": round(seconds, 3), "exit": code}
        cell.expect(code in state.codes, f"exit code {code}, not {[expected.value for expected in state.codes]}")
        limit = state.max_seconds + EXIT_SECONDS_BY_PROCESSES[processes]
        cell.expect(state.min_seconds <= seconds <= limit, f"{seconds:.2f} s, not {state.min_seconds:g} to {limit:g}")
        check_no_process_left(cell, run)
        run.restart_queue()
        if state.orders:
            check_no_order_lost(cell, run, outcome=state.outcome)


def check_no_process_left(cell: Cell, run: MatrixRun) -> None:
    """Check that no process remains."""
    alive = run.list_processes()
    cell.measurements["orphans"] = len(alive)
    cell.expect(not alive, f"still there: {alive}")


def check_no_order_lost(cell: Cell, run: MatrixRun, *, outcome: str) -> None:
    """Check that every order is done or still queued, never both, and that none was claimed after the signal."""
    done = {subject.partition(":")[0] for subject in run.list_subjects("Ack") if subject.endswith(":settled")}
    started, queued = set(run.list_subjects("began")), run.list_queued()
    cell.expect(done | queued == run.ids, f"lost: {sorted(run.ids - done - queued)}")
    cell.expect(not done & queued, f"done and still there: {sorted(done & queued)}")
    cell.expect(done == (started if outcome == "done" else set()), f"begun: {sorted(started)}, done: {sorted(done)}")
    # A settling transaction holds no slot, so another one may have begun.
    is_one_per_process = len(started) == run.processes or bool(run.list_subjects("settling"))
    cell.expect(is_one_per_process, f"{len(started)} begun by {run.processes} processes")
    cell.expect(run.queue.depth().dead == 0, "dead letters")
    # Released orders are available immediately, abandoned ones when the lease is over.
    released = run.fetch_again(started & queued, 1.0) if outcome == "released" else {}
    deliveries = run.fetch_again(queued - set(released), LEASE_SECONDS + 5.0) | released
    # A first delivery is number 1: a higher number was counted although no handler ran.
    cost = max((deliveries[name] - 1 for name in started & queued), default=0)
    cell.measurements["cost_of_the_untouched"] = max((deliveries[name] - 1 for name in queued - started), default=0)
    cell.measurements["cost"] = cost
    cell.expect(cost == (1 if outcome == "claimed" else 0), f"a cost of {cost} deliveries")
    cell.expect(
        all(deliveries[name] == 1 for name in queued - started), f"untouched, but delivered before: {deliveries}"
    )


# -- processes that are killed --------------------------------------------------------------------


def check_child_kill(cell: Cell, *, flavour: str) -> None:
    """SIGKILL one of four: it is replaced, and its order is redelivered when the lease is over."""
    with cell.create_run(flavour=flavour, processes=4, state="killed", drain=LONG_DRAIN_SECONDS) as run:
        run.dispatch(4)
        run.start()
        run.wait_until_reached("began")
        victim = next(line for line in run.journal if line.event == "began")
        start = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        run.wait("replaced", lambda: len(run.list_pids("fetched") | run.list_pids("idle")) >= 5)
        cell.measurements["replaced"] = round(time.monotonic() - start, 3)
        redelivery = (victim.subject, 2)
        run.wait(
            "again",
            lambda: redelivery in {(line.subject, line.count) for line in run.journal if line.event == "fetched"},
        )
        cell.measurements["again"] = round(time.monotonic() - start, 3)
        run.create_file("go")
        run.wait("all done", lambda: not run.list_queued())
        run.signal(signal.SIGTERM)
        code = run.wait_for_exit()
        cell.measurements |= {"seconds": cell.measurements["replaced"], "exit": code, "cost": 1}
        cell.expect(code == RunExit.OK, f"exit code {code}")
        cell.expect(len(run.list_subjects("Ack")) == 4, f"acks: {run.list_subjects('Ack')}")
        check_no_process_left(cell, run)


def check_parent_kill(cell: Cell, *, flavour: str, processes: int, state: str) -> None:
    """SIGKILL the parent: its processes drain and exit. A single process is killed itself."""
    drain = DRAIN_SECONDS if state == "never" else LONG_DRAIN_SECONDS
    with cell.create_run(flavour=flavour, processes=processes, state=state, drain=drain) as run:
        run.dispatch(processes + 3)
        run.start()
        run.wait_until_reached("began")
        start = time.monotonic()
        run.signal(signal.SIGKILL)
        code = run.wait_for_exit()
        if state == "handler" and processes > 1:
            run.create_file("go")
        run.wait("no process is left", lambda: not run.list_processes())
        seconds = time.monotonic() - start
        cell.measurements |= {"seconds": round(seconds, 3), "exit": code}
        limit = DRAIN_SECONDS + EXIT_SECONDS_BY_PROCESSES[processes]
        cell.expect(seconds <= limit, f"{seconds:.2f} s, not below {limit:g}")
        check_no_process_left(cell, run)
        check_no_order_lost(cell, run, outcome="done" if state == "handler" and processes > 1 else "claimed")


# -- the matrix -----------------------------------------------------------------------------------


def iter_cells() -> Iterator[tuple[str, Callable[[Cell], None]]]:
    for flavour in ("sync", "async"):
        for processes in (1, 4):
            for state in STATES:
                for number in (signal.SIGTERM, signal.SIGINT):
                    # Ctrl-C in a terminal reaches the whole group, SIGTERM of an orchestrator the first process.
                    group = number is signal.SIGINT
                    name = f"{flavour} {processes} {state.name} {number.name}"
                    yield (
                        name,
                        _bind(check_signal, state, flavour=flavour, processes=processes, number=number, group=group),
                    )
            for state_name in ("handler", "never"):
                yield (
                    f"{flavour} {processes} {state_name} SIGKILL-parent",
                    _bind(check_parent_kill, flavour=flavour, processes=processes, state=state_name),
                )
        yield f"{flavour} 4 handler SIGKILL-child", _bind(check_child_kill, flavour=flavour)


def _bind(check: Callable[..., None], *arguments: Any, **options: Any) -> Callable[[Cell], None]:
    return lambda cell: check(cell, *arguments, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression that the names of cells must match")
    parser.add_argument("--queue", choices=("postgres", "file"), default="postgres", help="what holds the orders")
    options = parser.parse_args()
    with database_server(options.queue) as server:
        finished = [
            run_cell(Cell(name, server), check) for name, check in iter_cells() if re.search(options.only, name)
        ]
    print(json.dumps({"queue": options.queue, **summarize(finished)}))
    return 1 if any(cell.missed_targets for cell in finished) or not finished else 0


@contextmanager
def database_server(queue: str) -> Iterator[PrivatePostgres | None]:
    """Start a private server, if one is needed."""
    if queue == "file":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="ergon-postgres-"))
    server = PrivatePostgres(folder)
    try:
        server.start()
        upgrade(server.create_database(DATABASE))
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def run_cell(cell: Cell, check: Callable[[Cell], None]) -> Cell:
    try:
        check(cell)
    except EventTimeout as error:
        cell.missed_targets.append(str(error))
    verdict = "; ".join(cell.missed_targets) or "good"
    print(f"{cell.name:<40} {json.dumps(cell.measurements)} {verdict}", file=sys.stderr, flush=True)
    return cell


def summarize(finished: list[Cell]) -> dict[str, Any]:
    slowest: dict[str, float] = {}
    for cell in finished:
        _, processes, state, signal_name = cell.name.split()
        key = f"{state} {signal_name} x{processes}"
        slowest[key] = max(slowest.get(key, 0.0), cell.measurements.get("seconds", 0.0))
    return {
        "cells": len(finished),
        "missed": {cell.name: cell.missed_targets for cell in finished if cell.missed_targets},
        "load": round(os.getloadavg()[1], 1),
        "orphans": sum(cell.measurements.get("orphans", 0) for cell in finished),
        "cost_of_a_release": max(
            (cell.measurements.get("cost", 0) for cell in finished if " backoff " in cell.name), default=0
        ),
        "slowest": slowest,
    }


if __name__ == "__main__":
    sys.exit(main())
