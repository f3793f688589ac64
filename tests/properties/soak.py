"""The long run: very many plans in virtual time, and some in real time, each held against the oracle.

Real time needs tolerances. Plans are carried out at ``SCALE`` of their planned times, many at once; the
oracle is told that instants closer than ``REAL_SLACK`` may come in either order. A watch beside them
measures how late the machine wakes a sleeper: a plan during which that was more than ``LAG`` is
carried out again, because its times say more about the machine than about the engine. What was lost,
duplicated or overlapping depends on no time: it is checked in every run, also in those.

The last line is JSON. The exit code is 1 if there was any difference, if too many plans could not be
judged, or if the plans held too little trouble.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.testing.virtual import VirtualLoop
from tests.properties.oracle import TOLERANCE, check_invariants
from tests.properties.plan import Plan, plan_from_seed, shares
from tests.properties.world import (
    REAL_SLACK,
    Run,
    explain,
    in_asyncio,
    in_real_asyncio,
    in_real_threads,
    in_simulation,
    in_threads,
    judge,
    scaled,
)

#: Out of twenty consecutive seeds, who gets how many; threads are the dearest.
TURNS = ("threads",) * 3 + ("asyncio",) * 7 + ("simulated threads",) * 5 + ("simulated asyncio",) * 5
CHUNK = 500

SCALE = 0.2
LAG = 0.020
AT_ONCE = {"real threads": 60, "real asyncio": 120}
TRIES = 10
UNJUDGED = 0.02

NEEDED = {"hang": 0.2, "shutdown": 0.2, "duplicate": 0.2, "odd": 0.2}


class Tally:
    """What a chunk, or all of them, came to."""

    def __init__(self) -> None:
        self.worlds: Counter[str] = Counter()
        self.shares: Counter[str] = Counter()
        #: How many deliveries were compared, in virtual and in real time.
        self.deliveries: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        #: How many runs in real time were checked for lost, duplicated and overlapping work.
        self.invariants = 0
        self.unjudged = 0
        self.repeated = 0
        self.differing: list[tuple[int, str, str]] = []

    def note(self, run: Run, world: str, slack: float = TOLERANCE) -> None:
        self.worlds[world] += 1
        found = judge(run, slack=slack, counts=self.deliveries[world.startswith("real")])
        if found:
            self.differing.append((run.plan.seed, world, explain(run, found, world)))

    def check_invariants(self, run: Run, world: str) -> None:
        self.invariants += 1
        broken = check_invariants(run.plan, run.record)
        if broken:
            self.differing.append((run.plan.seed, world, explain(run, broken, world)))

    def add(self, other: Tally) -> None:
        self.invariants += other.invariants
        self.worlds += other.worlds
        self.shares += other.shares
        for mine, theirs in zip(self.deliveries, other.deliveries, strict=True):
            mine.update(theirs)
        self.unjudged += other.unjudged
        self.repeated += other.repeated
        self.differing += other.differing


# -- virtual time -----------------------------------------------------------------------------------------


def virtual_chunk(seeds: Iterable[int]) -> Tally:
    tally, loop = Tally(), VirtualLoop()
    plans = []
    for seed in seeds:
        world, plan = TURNS[seed % len(TURNS)], plan_from_seed(seed)
        plans.append(plan)
        if world == "threads":
            run = in_threads(plan)
        elif world == "asyncio":
            run = in_asyncio(plan, loop)
        else:
            run = in_simulation(plan, "threads" if world.endswith("threads") else "asyncio")
        tally.note(run, world)
    tally.shares += Counter(shares(plans))
    loop.close()
    return tally


# -- real time --------------------------------------------------------------------------------------------


class Watch:
    """Notes when the machine woke a sleeper too late."""

    def __init__(self) -> None:
        #: From when to when each of them overslept: it may notice after a plan that suffered with it has ended.
        self._late: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        nap = LAG / 4
        before = time.monotonic()
        while not self._over.is_set():
            time.sleep(nap)
            now = time.monotonic()
            self.woken(now - before - nap, now)
            before = now

    def woken(self, late: float, now: float) -> None:
        if late > LAG:
            self._late.append((now - late, now))

    def witnessed(self, run: Run) -> Run:
        """*run*, after its bodies were heard: each sleeps as long as its plan says, and nobody else wakes it.

        One core may stand still while the watch's own thread runs on another.
        """
        for delivery in run.record.deliveries:
            for body in delivery.bodies:
                self.woken(body.late, body.left)
        return run

    def disturbed(self, run: Run) -> bool:
        return any(due <= run.record.ended and run.record.began <= woken for due, woken in list(self._late))

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def real_chunk(world: str, seeds: Iterable[int]) -> Tally:
    tally, plans = Tally(), [plan_from_seed(seed) for seed in seeds]
    tally.shares += Counter(shares(plans))
    todo, watch = [scaled(plan, SCALE) for plan in plans], Watch()
    tried = _threads(todo, watch) if world == "real threads" else asyncio.run(_tasks(todo, watch))
    watch.close()
    for runs in tried:
        tally.repeated += len(runs) - 1
        for run in runs:
            tally.check_invariants(run, world)
        if watch.disturbed(runs[-1]):
            tally.unjudged += 1
        else:
            tally.note(runs[-1], world, REAL_SLACK)
    return tally


def _threads(plans: list[Plan], watch: Watch) -> list[list[Run]]:
    def one(plan: Plan) -> list[Run]:
        runs = [watch.witnessed(in_real_threads(plan))]
        while watch.disturbed(runs[-1]) and len(runs) < TRIES:
            runs.append(watch.witnessed(in_real_threads(plan)))
        return runs

    with ThreadPoolExecutor(AT_ONCE["real threads"]) as pool:
        return list(pool.map(one, plans))


async def _tasks(plans: list[Plan], watch: Watch) -> list[list[Run]]:
    places = asyncio.Semaphore(AT_ONCE["real asyncio"])

    async def one(plan: Plan) -> list[Run]:
        async with places:
            runs = [watch.witnessed(await in_real_asyncio(plan))]
            while watch.disturbed(runs[-1]) and len(runs) < TRIES:
                runs.append(watch.witnessed(await in_real_asyncio(plan)))
            return runs

    looking = asyncio.create_task(_loop_watch(watch))
    tried = await asyncio.gather(*(one(plan) for plan in plans))
    looking.cancel()
    return tried


async def _loop_watch(watch: Watch) -> None:
    """The event loop has a lag of its own."""
    nap = LAG / 4
    while True:
        before = time.monotonic()
        await asyncio.sleep(nap)
        watch.woken(time.monotonic() - before - nap, time.monotonic())


# -- the whole --------------------------------------------------------------------------------------------


def hush() -> None:
    """Failing is what these plans are for; nobody needs to read about each."""
    logging.disable(logging.CRITICAL)


def main() -> int:
    options = _options()
    began, virtual, real = time.monotonic(), Tally(), Tally()
    first = options.seed
    chunks = [
        partial(virtual_chunk, range(start, min(start + CHUNK, first + options.plans)))
        for start in range(first, first + options.plans, CHUNK)
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=spawn, initializer=hush) as pool:
        _gather(pool, chunks, virtual, name="virtual", total=options.plans)
    # In one process: in real time several would disturb each other.
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=hush) as pool:
        start, half = first + options.plans, options.real // 2
        worlds = {"real threads": (start, start + half), "real asyncio": (start + half, start + options.real)}
        chunks = [
            partial(real_chunk, world, range(at, min(at + CHUNK, end)))
            for world, (begin, end) in worlds.items()
            for at in range(begin, end, CHUNK)
        ]
        _gather(pool, chunks, real, name="real", total=options.real)
    return _conclude(virtual, real, seconds=time.monotonic() - began, options=options)


def _gather(pool: ProcessPoolExecutor, chunks: list[Any], tally: Tally, *, name: str, total: int) -> None:
    began, shown = time.monotonic(), time.monotonic()
    for done in as_completed([pool.submit(chunk) for chunk in chunks]):
        part = done.result()
        tally.add(part)
        for _, _, text in part.differing:
            # At once: a long run may be cut short, and what it found must not be lost with it.
            print(text, end="\n\n", file=sys.stderr, flush=True)
        if time.monotonic() - shown > 5 or sum(tally.worlds.values()) + tally.unjudged >= total:
            shown = time.monotonic()
            count = sum(tally.worlds.values())
            print(
                f"{name}: {count}/{total} plans, {count / (shown - began):.0f} a second, "
                f"{len(tally.differing)} differing, {tally.repeated} repeated",
                file=sys.stderr,
                flush=True,
            )


def _conclude(virtual: Tally, real: Tally, *, seconds: float, options: argparse.Namespace) -> int:
    both = Tally()
    both.add(virtual)
    both.add(real)
    planned = max(1, both.shares["plans"])
    parts = {name: round(count / planned, 4) for name, count in sorted(both.shares.items()) if name != "plans"}
    missed = [name for name, share in NEEDED.items() if parts.get(name, 0.0) < share]
    judged = sum(both.worlds.values())
    verdict = {
        "plans": judged,
        "differences": len(both.differing),
        "differing": [{"seed": seed, "world": world} for seed, world, _ in both.differing[:100]],
        "worlds": dict(sorted(both.worlds.items())),
        "deliveries": {"virtual": dict(both.deliveries[0]), "real": dict(both.deliveries[1])},
        "shares": parts,
        "missed_shares": missed,
        "unjudged": both.unjudged,
        "repeated": both.repeated,
        "invariants_checked": both.invariants,
        "first_seed": options.seed,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(verdict))
    bad = both.differing or missed or both.unjudged > UNJUDGED * max(1, options.real) or not judged
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=200_000, help="plans in virtual time")
    parser.add_argument("--real", type=int, default=5_000, help="plans in real time")
    parser.add_argument("--seed", type=int, default=1_000_000, help="the first seed; the others follow")
    parser.add_argument("--processes", type=int, default=2, help="processes for virtual time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
