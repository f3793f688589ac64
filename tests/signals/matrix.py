"""The signal matrix: real processes in every state, ended in every way; ``make signals``.

One line per cell on stderr, one line of JSON at the end, exit code 1 where a bar is missed. A cell
brings a run into its state, sends the signal, and measures how long it takes until the process is
gone. Then it looks: was anything lost, what did a release cost, is anybody still there.
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

from ergon_framework.runner.exits import Exit
from ergon_framework.schema.migrate import upgrade
from tests.servers.postgres import PrivatePostgres
from tests.signals.file_queue import LEASE
from tests.signals.world import DATABASE, Missed, World

#: Long enough for a machine that is busy, short enough for sixty cells.
DRAIN = 2.0
#: How long after the grace a run may take, with one process and with several: as the guide says.
AFTER = {1: 1.0, 4: 2.0}
#: What work that is let go is given: it ends by itself, so the drain may be long.
LONG = 20.0


@dataclass(frozen=True, slots=True)
class State:
    """A state to be found in: how it is reached, and what has to be true afterwards."""

    name: str
    #: The word of the journal that says that a process is in it.
    word: str
    orders: bool = True
    drain: float = DRAIN
    #: At least, and at most before what the guide adds, in seconds after the signal.
    least: float = 0.0
    most: float = 0.0
    codes: tuple[Exit, ...] = (Exit.OK,)
    #: What becomes of each order: done, released, or claimed until the lease is over.
    fate: str = "done"
    #: What is done when the state is reached, and when the signal was heard.
    before: Callable[[World], None] | None = None
    after: Callable[[World], None] | None = None


def _down(world: World) -> None:
    world.down()
    world.sign("on")
    world.reached("unsettled")


def _settling(world: World) -> None:
    # Together: who settles holds no slot, and would take another one's order.
    world.sign("on")
    world.reached("settling")


def _go(world: World) -> None:
    world.heard()
    world.sign("go")


STATES = (
    # Whoever has nothing to wait for leaves at once: none of the grace is used.
    State("idle", "idle", orders=False),
    State("fetching", "fetching", orders=False),
    State("backoff", "began", least=DRAIN, most=DRAIN, fate="released"),
    State("handler", "began", drain=LONG, after=_go),
    State("never", "began", least=DRAIN, most=DRAIN, codes=(Exit.LEFT_BEHIND,), fate="claimed"),
    State("settle", "began", drain=LONG, before=_settling, after=_go),
    # Closing without a server takes what is left of the time, and on a busy machine more: both codes tell the truth.
    State(
        "down",
        "began",
        least=DRAIN,
        most=DRAIN,
        codes=(Exit.LEFT_BEHIND, Exit.FORCED),
        fate="claimed",
        before=_down,
    ),
)


@dataclass(slots=True)
class Cell:
    """One cell: its name, what was measured, and what was missed."""

    name: str
    server: PrivatePostgres | None
    figures: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def world(self, **given: Any) -> World:
        return World(server=self.server, **given)

    def expect(self, good: bool, said: str) -> None:
        if not good:
            self.missed.append(said)


# -- a signal in a state --------------------------------------------------------------------------


def signalled(cell: Cell, state: State, *, flavour: str, processes: int, number: signal.Signals, group: bool) -> None:
    """Send *number* while every process is in *state*."""
    with cell.world(flavour=flavour, processes=processes, state=state.name, drain=state.drain) as world:
        if state.orders:
            # One each, and some that nobody may touch any more.
            world.dispatch(processes + 3)
        world.start()
        world.reached(state.word)
        if state.before is not None:
            state.before(world)
        began = time.monotonic()
        world.signal(number, group=group)
        if state.after is not None:
            state.after(world)
        code = world.ended()
        seconds = time.monotonic() - began
        cell.figures |= {"seconds": round(seconds, 3), "exit": code}
        cell.expect(code in state.codes, f"exit code {code}, not {[known.value for known in state.codes]}")
        limit = state.most + AFTER[processes]
        cell.expect(state.least <= seconds <= limit, f"{seconds:.2f} s, not {state.least:g} to {limit:g}")
        nobody_left(cell, world)
        world.up()
        if state.orders:
            nothing_lost(cell, world, fate=state.fate)


def nobody_left(cell: Cell, world: World) -> None:
    """No process stays behind."""
    alive = world.alive()
    cell.figures["orphans"] = len(alive)
    cell.expect(not alive, f"still there: {alive}")


def nothing_lost(cell: Cell, world: World, *, fate: str) -> None:
    """Every order is done or still in the queue, never both, and nothing was taken after the signal."""
    done = {what.partition(":")[0] for what in world.named("Ack") if what.endswith(":settled")}
    begun, left = set(world.named("began")), world.left()
    cell.expect(done | left == world.ids, f"lost: {sorted(world.ids - done - left)}")
    cell.expect(not done & left, f"done and still there: {sorted(done & left)}")
    cell.expect(done == (begun if fate == "done" else set()), f"begun: {sorted(begun)}, done: {sorted(done)}")
    # While its settlement is under way a transaction holds no slot: another may have been begun.
    few = len(begun) == world.processes or bool(world.named("settling"))
    cell.expect(few, f"{len(begun)} begun by {world.processes} processes")
    cell.expect(world.queue.depth().dead == 0, "dead letters")
    # What was given back is there at once, what was only left when the lease is over.
    given_back = world.delivered_again(begun & left, 1.0) if fate == "released" else {}
    again = world.delivered_again(left - set(given_back), LEASE + 5.0) | given_back
    # A first delivery is number 1: whatever is above was counted against work that nobody has done.
    cost = max((again[name] - 1 for name in begun & left), default=0)
    cell.figures["cost_of_the_untouched"] = max((again[name] - 1 for name in left - begun), default=0)
    cell.figures["cost"] = cost
    cell.expect(cost == (1 if fate == "claimed" else 0), f"a cost of {cost} deliveries")
    cell.expect(all(again[name] == 1 for name in left - begun), f"untouched, but delivered before: {again}")


# -- processes that are killed --------------------------------------------------------------------


def child_killed(cell: Cell, *, flavour: str) -> None:
    """SIGKILL of one of four: it is replaced, and its order comes again when the lease is over."""
    with cell.world(flavour=flavour, processes=4, state="killed", drain=LONG) as world:
        world.dispatch(4)
        world.start()
        world.reached("began")
        victim = next(line for line in world.journal if line.word == "began")
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        world.wait("replaced", lambda: len(world.pids("fetched") | world.pids("idle")) >= 5)
        cell.figures["replaced"] = round(time.monotonic() - began, 3)
        again = (victim.what, 2)
        world.wait(
            "again", lambda: again in {(line.what, line.count) for line in world.journal if line.word == "fetched"}
        )
        cell.figures["again"] = round(time.monotonic() - began, 3)
        world.sign("go")
        world.wait("all done", lambda: not world.left())
        world.signal(signal.SIGTERM)
        code = world.ended()
        cell.figures |= {"seconds": cell.figures["replaced"], "exit": code, "cost": 1}
        cell.expect(code == Exit.OK, f"exit code {code}")
        cell.expect(len(world.named("Ack")) == 4, f"acks: {world.named('Ack')}")
        nobody_left(cell, world)


def parent_killed(cell: Cell, *, flavour: str, processes: int, state: str) -> None:
    """SIGKILL of the parent: its processes drain and leave. Alone, it is the process itself that is killed."""
    drain = DRAIN if state == "never" else LONG
    with cell.world(flavour=flavour, processes=processes, state=state, drain=drain) as world:
        world.dispatch(processes + 3)
        world.start()
        world.reached("began")
        began = time.monotonic()
        world.signal(signal.SIGKILL)
        code = world.ended()
        if state == "handler" and processes > 1:
            world.sign("go")
        world.wait("nobody", lambda: not world.alive())
        seconds = time.monotonic() - began
        cell.figures |= {"seconds": round(seconds, 3), "exit": code}
        limit = DRAIN + AFTER[processes]
        cell.expect(seconds <= limit, f"{seconds:.2f} s, not below {limit:g}")
        nobody_left(cell, world)
        nothing_lost(cell, world, fate="done" if state == "handler" and processes > 1 else "claimed")


# -- the matrix -----------------------------------------------------------------------------------


def cells() -> Iterator[tuple[str, Callable[[Cell], None]]]:
    for flavour in ("sync", "async"):
        for processes in (1, 4):
            for state in STATES:
                for number in (signal.SIGTERM, signal.SIGINT):
                    # Ctrl-C in a terminal reaches the whole group, SIGTERM of an orchestrator the first process.
                    group = number is signal.SIGINT
                    name = f"{flavour} {processes} {state.name} {number.name}"
                    yield (
                        name,
                        _bound(signalled, state, flavour=flavour, processes=processes, number=number, group=group),
                    )
            for state_name in ("handler", "never"):
                yield (
                    f"{flavour} {processes} {state_name} SIGKILL-parent",
                    _bound(parent_killed, flavour=flavour, processes=processes, state=state_name),
                )
        yield f"{flavour} 4 handler SIGKILL-child", _bound(child_killed, flavour=flavour)


def _bound(act: Callable[..., None], *given: Any, **named: Any) -> Callable[[Cell], None]:
    return lambda cell: act(cell, *given, **named)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression that the names of cells must match")
    parser.add_argument("--queue", choices=("postgres", "file"), default="postgres", help="what holds the orders")
    given = parser.parse_args()
    with served(given.queue) as server:
        ran = [judged(Cell(name, server), act) for name, act in cells() if re.search(given.only, name)]
    print(json.dumps({"queue": given.queue, **summary(ran)}))
    return 1 if any(cell.missed for cell in ran) or not ran else 0


@contextmanager
def served(queue: str) -> Iterator[PrivatePostgres | None]:
    """A server of our own, if there is to be one."""
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


def judged(cell: Cell, act: Callable[[Cell], None]) -> Cell:
    try:
        act(cell)
    except Missed as error:
        cell.missed.append(str(error))
    verdict = "; ".join(cell.missed) or "good"
    print(f"{cell.name:<40} {json.dumps(cell.figures)} {verdict}", file=sys.stderr, flush=True)
    return cell


def summary(ran: list[Cell]) -> dict[str, Any]:
    slowest: dict[str, float] = {}
    for cell in ran:
        _, processes, state, how = cell.name.split()
        key = f"{state} {how} x{processes}"
        slowest[key] = max(slowest.get(key, 0.0), cell.figures.get("seconds", 0.0))
    return {
        "cells": len(ran),
        "missed": {cell.name: cell.missed for cell in ran if cell.missed},
        "load": round(os.getloadavg()[1], 1),
        "orphans": sum(cell.figures.get("orphans", 0) for cell in ran),
        "cost_of_a_release": max((cell.figures.get("cost", 0) for cell in ran if " backoff " in cell.name), default=0),
        "slowest": slowest,
    }


if __name__ == "__main__":
    sys.exit(main())
