"""The long run: very many plans in virtual time, and some in real time, each compared with the oracle.

Real time needs tolerances. Plans run at ``TIME_SCALE`` of their planned times, many at once; the
oracle allows times closer than ``REAL_SLACK_SECONDS`` in either order. A monitor next to them
measures how late the machine wakes a thread: a plan during which that was more than ``MAX_LAG_SECONDS`` is
run again, because its times say more about the machine than about the engine. Lost,
duplicated or overlapping work depends on no time: it is checked in every run, also in those.

The last line is JSON. The exit code is 1 if there was any difference, if too many plans could not be
compared, or if the plans contained too few faults.
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

from ergon_framework.testing.virtual_time import VirtualLoop
from tests.properties.oracle import TOLERANCE_SECONDS, check_invariants
from tests.properties.plans import Plan, count_features, plan_from_seed
from tests.properties.runner import (
    REAL_SLACK_SECONDS,
    Run,
    compare_run,
    explain,
    run_in_asyncio,
    run_in_real_asyncio,
    run_in_real_threads,
    run_in_simulation,
    run_in_threads,
    scale_plan,
)

#: The worlds of twenty consecutive seeds; threads are the most expensive.
WORLD_ROTATION = ("threads",) * 3 + ("asyncio",) * 7 + ("simulated threads",) * 5 + ("simulated asyncio",) * 5
CHUNK_SIZE = 500

TIME_SCALE = 0.2
MAX_LAG_SECONDS = 0.020
CONCURRENT_PLANS = {"real threads": 60, "real asyncio": 120}
MAX_RUNS_PER_PLAN = 10
MAX_UNCOMPARED_SHARE = 0.02

REQUIRED_SHARES = {"hang": 0.2, "shutdown": 0.2, "duplicate": 0.2, "odd": 0.2}


class SoakResults:
    """The results of one chunk, or of all chunks."""

    def __init__(self) -> None:
        self.worlds: Counter[str] = Counter()
        self.shares: Counter[str] = Counter()
        #: How many deliveries were compared, in virtual and in real time.
        self.deliveries: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        #: How many runs in real time were checked for lost, duplicated and overlapping work.
        self.invariants = 0
        self.uncompared = 0
        self.repeated = 0
        self.differences: list[tuple[int, str, str]] = []

    def compare(self, run: Run, world: str, slack: float = TOLERANCE_SECONDS) -> None:
        self.worlds[world] += 1
        problems = compare_run(run, slack=slack, counts=self.deliveries[world.startswith("real")])
        if problems:
            self.differences.append((run.plan.seed, world, explain(run, problems, world)))

    def check_invariants(self, run: Run, world: str) -> None:
        self.invariants += 1
        problems = check_invariants(run.plan, run.record)
        if problems:
            self.differences.append((run.plan.seed, world, explain(run, problems, world)))

    def add(self, other: SoakResults) -> None:
        self.invariants += other.invariants
        self.worlds += other.worlds
        self.shares += other.shares
        for mine, theirs in zip(self.deliveries, other.deliveries, strict=True):
            mine.update(theirs)
        self.uncompared += other.uncompared
        self.repeated += other.repeated
        self.differences += other.differences


# -- virtual time -----------------------------------------------------------------------------------------


def run_virtual_chunk(seeds: Iterable[int]) -> SoakResults:
    results, loop = SoakResults(), VirtualLoop()
    plans = []
    for seed in seeds:
        world, plan = WORLD_ROTATION[seed % len(WORLD_ROTATION)], plan_from_seed(seed)
        plans.append(plan)
        if world == "threads":
            run = run_in_threads(plan)
        elif world == "asyncio":
            run = run_in_asyncio(plan, loop)
        else:
            run = run_in_simulation(plan, "threads" if world.endswith("threads") else "asyncio")
        results.compare(run, world)
    results.shares += Counter(count_features(plans))
    loop.close()
    return results


# -- real time --------------------------------------------------------------------------------------------


class LagMonitor:
    """Records when the machine woke a thread or task too late."""

    def __init__(self) -> None:
        #: Due time and actual time of each late wakeup: it may be recorded after an affected plan has ended.
        self._late_wakeups: list[tuple[float, float]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self._thread.start()

    def _measure(self) -> None:
        interval = MAX_LAG_SECONDS / 4
        before = time.monotonic()
        while not self._stopped.is_set():
            time.sleep(interval)
            now = time.monotonic()
            self.record_wakeup(now - before - interval, now)
            before = now

    def record_wakeup(self, lateness: float, now: float) -> None:
        if lateness > MAX_LAG_SECONDS:
            self._late_wakeups.append((now - lateness, now))

    def record_call_delays(self, run: Run) -> Run:
        """Record the delays of the handler calls of *run*: each sleeps for its planned time and is woken by the clock.

        One core may stall while the monitor's own thread runs on another.
        """
        for delivery in run.record.deliveries:
            for body in delivery.bodies:
                self.record_wakeup(body.late, body.left)
        return run

    def is_disturbed(self, run: Run) -> bool:
        return any(due <= run.record.ended and run.record.began <= woken for due, woken in list(self._late_wakeups))

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


def run_real_chunk(world: str, seeds: Iterable[int]) -> SoakResults:
    results, plans = SoakResults(), [plan_from_seed(seed) for seed in seeds]
    results.shares += Counter(count_features(plans))
    scaled_plans, monitor = [scale_plan(plan, TIME_SCALE) for plan in plans], LagMonitor()
    runs_by_plan = (
        _run_on_threads(scaled_plans, monitor)
        if world == "real threads"
        else asyncio.run(_run_on_tasks(scaled_plans, monitor))
    )
    monitor.close()
    for runs in runs_by_plan:
        results.repeated += len(runs) - 1
        for run in runs:
            results.check_invariants(run, world)
        if monitor.is_disturbed(runs[-1]):
            results.uncompared += 1
        else:
            results.compare(runs[-1], world, REAL_SLACK_SECONDS)
    return results


def _run_on_threads(plans: list[Plan], monitor: LagMonitor) -> list[list[Run]]:
    def run_plan(plan: Plan) -> list[Run]:
        runs = [monitor.record_call_delays(run_in_real_threads(plan))]
        while monitor.is_disturbed(runs[-1]) and len(runs) < MAX_RUNS_PER_PLAN:
            runs.append(monitor.record_call_delays(run_in_real_threads(plan)))
        return runs

    with ThreadPoolExecutor(CONCURRENT_PLANS["real threads"]) as pool:
        return list(pool.map(run_plan, plans))


async def _run_on_tasks(plans: list[Plan], monitor: LagMonitor) -> list[list[Run]]:
    slots = asyncio.Semaphore(CONCURRENT_PLANS["real asyncio"])

    async def run_plan(plan: Plan) -> list[Run]:
        async with slots:
            runs = [monitor.record_call_delays(await run_in_real_asyncio(plan))]
            while monitor.is_disturbed(runs[-1]) and len(runs) < MAX_RUNS_PER_PLAN:
                runs.append(monitor.record_call_delays(await run_in_real_asyncio(plan)))
            return runs

    monitor_task = asyncio.create_task(_measure_loop_lag(monitor))
    runs_by_plan = await asyncio.gather(*(run_plan(plan) for plan in plans))
    monitor_task.cancel()
    return runs_by_plan


async def _measure_loop_lag(monitor: LagMonitor) -> None:
    """Measure the lag of the event loop."""
    interval = MAX_LAG_SECONDS / 4
    while True:
        before = time.monotonic()
        await asyncio.sleep(interval)
        monitor.record_wakeup(time.monotonic() - before - interval, time.monotonic())


# -- the program ------------------------------------------------------------------------------------------


def disable_logging() -> None:
    """Disable logging: these plans fail on purpose, and their errors are not of interest."""
    logging.disable(logging.CRITICAL)


def main() -> int:
    options = _parse_options()
    began, virtual, real = time.monotonic(), SoakResults(), SoakResults()
    first = options.seed
    chunks = [
        partial(run_virtual_chunk, range(start, min(start + CHUNK_SIZE, first + options.plans)))
        for start in range(first, first + options.plans, CHUNK_SIZE)
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=spawn, initializer=disable_logging) as pool:
        _collect_results(pool, chunks, virtual, name="virtual", total=options.plans)
    # In one process: in real time several would disturb each other.
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=disable_logging) as pool:
        start, half = first + options.plans, options.real // 2
        worlds = {"real threads": (start, start + half), "real asyncio": (start + half, start + options.real)}
        chunks = [
            partial(run_real_chunk, world, range(at, min(at + CHUNK_SIZE, end)))
            for world, (begin, end) in worlds.items()
            for at in range(begin, end, CHUNK_SIZE)
        ]
        _collect_results(pool, chunks, real, name="real", total=options.real)
    return _report_results(virtual, real, seconds=time.monotonic() - began, options=options)


def _collect_results(
    pool: ProcessPoolExecutor, chunks: list[Any], results: SoakResults, *, name: str, total: int
) -> None:
    began, shown_at = time.monotonic(), time.monotonic()
    for future in as_completed([pool.submit(chunk) for chunk in chunks]):
        chunk_results = future.result()
        results.add(chunk_results)
        for _, _, text in chunk_results.differences:
            # Print immediately: a long run may be interrupted, and its differences must not be lost.
            print(text, end="\n\n", file=sys.stderr, flush=True)
        if time.monotonic() - shown_at > 5 or sum(results.worlds.values()) + results.uncompared >= total:
            shown_at = time.monotonic()
            count = sum(results.worlds.values())
            print(
                f"{name}: {count}/{total} plans, {count / (shown_at - began):.0f} a second, "
                f"{len(results.differences)} differing, {results.repeated} repeated",
                file=sys.stderr,
                flush=True,
            )


def _report_results(virtual: SoakResults, real: SoakResults, *, seconds: float, options: argparse.Namespace) -> int:
    combined = SoakResults()
    combined.add(virtual)
    combined.add(real)
    plan_count = max(1, combined.shares["plans"])
    feature_shares = {
        name: round(count / plan_count, 4) for name, count in sorted(combined.shares.items()) if name != "plans"
    }
    missing = [name for name, share in REQUIRED_SHARES.items() if feature_shares.get(name, 0.0) < share]
    compared_count = sum(combined.worlds.values())
    summary = {
        "plans": compared_count,
        "differences": len(combined.differences),
        "differing": [{"seed": seed, "world": world} for seed, world, _ in combined.differences[:100]],
        "worlds": dict(sorted(combined.worlds.items())),
        "deliveries": {"virtual": dict(combined.deliveries[0]), "real": dict(combined.deliveries[1])},
        "shares": feature_shares,
        "missed_shares": missing,
        "unjudged": combined.uncompared,
        "repeated": combined.repeated,
        "invariants_checked": combined.invariants,
        "first_seed": options.seed,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(summary))
    has_failed = (
        combined.differences
        or missing
        or combined.uncompared > MAX_UNCOMPARED_SHARE * max(1, options.real)
        or not compared_count
    )
    return 1 if has_failed else 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=200_000, help="plans in virtual time")
    parser.add_argument("--real", type=int, default=5_000, help="plans in real time")
    parser.add_argument("--seed", type=int, default=1_000_000, help="the first seed; the others follow")
    parser.add_argument("--processes", type=int, default=2, help="processes for virtual time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
