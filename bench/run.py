"""What the engine costs per transaction on top of a bare loop, side by side in one run.

    python bench/run.py                 every scene, one line of JSON at the end, exit 1 where a bar is missed
    python bench/run.py --quick         a tenth of the work: to see that it runs, not to judge by
    python bench/run.py --profile NAME  where one variant (asyncio, threads) spends its time; --scene chooses the scene

Each scene has a process of its own, because a tracer provider is there for good once it is set. In it the engine and
the bare loop take turns, so both see the same machine; a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import bare

from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.transaction import Transaction

ROUNDS = 7
WARM_UP = 1_000
#: Transactions a second that the asyncio variant has to reach without telemetry.
RATE = 25_000


@dataclass(frozen=True)
class Scene:
    transactions: int
    #: Microseconds that the engine may add to a transaction; None is printed and not judged.
    bars: dict[str, float | None]
    #: A loop that streams has a trace per batch; one that does not has a single one, and a sampler little to choose.
    streaming: bool = False


SCENES = {
    "plain": Scene(20_000, {"asyncio": 20.0, "threads": 30.0}),
    "recorded": Scene(5_000, {"asyncio": 250.0, "threads": None}, streaming=True),
    "sampled": Scene(20_000, {"asyncio": 40.0, "threads": None}, streaming=True),
}


# -- what is measured ------------------------------------------------------------------------------


class Threaded(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


class Async(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


def engine_threads(connector, policy):
    task = Threaded()
    task.connector = connector
    return task.consume_transactions(policy).started


def engine_asyncio(connector, policy):
    task = Async()
    task.connector = connector
    return asyncio.run(task.consume_transactions(policy)).started


def bare_threads(connector, _policy):
    return bare.consume(connector, Threaded().process_transaction)


def bare_asyncio(connector, _policy):
    return asyncio.run(bare.consume_async(connector, Async().process_transaction))


VARIANTS = {"asyncio": (engine_asyncio, bare_asyncio), "threads": (engine_threads, bare_threads)}


def filled(count):
    connector = MemoryConnector("bench")
    connector.dispatch([Transaction(f"t{number}") for number in range(count)])
    return connector


def policy_of(count, streaming):
    # The defaults, but that a loop which streams has to be told when it is enough.
    return ConsumerPolicy.load({"loop": {"streaming": True, "limit": count}} if streaming else {})


def timed(loop, count, *, streaming=False):
    """Seconds per transaction: of the clock, and of the processor."""
    connector = filled(count)
    policy = policy_of(count, streaming)
    gc.collect()
    began, used = time.perf_counter(), time.process_time()
    done = loop(connector, policy)
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    depth = connector.depth()
    if (done, depth.ready, depth.in_flight, depth.dead) != (count, 0, 0, 0):
        raise RuntimeError(f"{loop.__name__} left {depth} behind after {done} of {count} transactions")
    return seconds / count, cpu / count


# -- one scene -------------------------------------------------------------------------------------


def trace(sampler):
    """Traces as an application switches them on, up to an exporter that throws everything away."""
    from opentelemetry import trace  # noqa: PLC0415 - only the scenes with telemetry may load the SDK
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult  # noqa: PLC0415

    class Nowhere(SpanExporter):
        exported = 0

        def export(self, spans):
            Nowhere.exported += len(spans)
            return SpanExportResult.SUCCESS

    # A full queue of spans is part of the picture here and not worth a line each.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)
    return provider, Nowhere


def prepared(name):
    if name == "plain":
        return None
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased  # noqa: PLC0415

    return trace(ALWAYS_ON if name == "recorded" else ParentBased(TraceIdRatioBased(0.01)))


def play(name, share):
    """All rounds of one scene; the last line it prints is its JSON."""
    scene, telemetry = SCENES[name], prepared(name)
    count = max(WARM_UP, int(scene.transactions * share))
    rounds = {variant: {"engine": [], "bare": []} for variant in VARIANTS}
    for loops in VARIANTS.values():
        for loop in loops:
            timed(loop, WARM_UP, streaming=scene.streaming)
    for number in range(ROUNDS):
        for variant, (engine, floor) in VARIANTS.items():
            pair = [("engine", engine), ("bare", floor)]
            # Who goes first would otherwise always meet the machine in the same state.
            for side, loop in pair if number % 2 == 0 else pair[::-1]:
                rounds[variant][side].append(timed(loop, count, streaming=scene.streaming))
        print(f"{name}: round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    figures = {variant: summed(sides, scene.bars[variant]) for variant, sides in rounds.items()}
    spans = None
    if telemetry is not None:
        provider, exporter = telemetry
        provider.force_flush()
        spans = exporter.exported
    ok = spans != 0 and all(figure["ok"] for figure in figures.values())
    print(json.dumps({"transactions": count, "rounds": ROUNDS, "spans": spans, "variants": figures, "ok": ok}))


def summed(sides, bar):
    engine, floor = ([seconds for seconds, _ in sides[side]] for side in ("engine", "bare"))
    # Neighbours in time are compared, so that what slows the machine for a while slows both.
    differences = [mine - theirs for mine, theirs in zip(engine, floor, strict=True)]
    cpu = [mine - theirs for (_, mine), (_, theirs) in zip(sides["engine"], sides["bare"], strict=True)]
    added = statistics.median(differences) * 1e6
    return {
        "engine_us": round(statistics.median(engine) * 1e6, 2),
        "bare_us": round(statistics.median(floor) * 1e6, 2),
        "engine_per_second": round(1 / statistics.median(engine)),
        "bare_per_second": round(1 / statistics.median(floor)),
        "ratio": round(statistics.median(engine) / statistics.median(floor), 2),
        "added_us": round(added, 2),
        "added_us_range": [round(min(differences) * 1e6, 2), round(max(differences) * 1e6, 2)],
        "added_cpu_us": round(statistics.median(cpu) * 1e6, 2),
        "bar_us": bar,
        "ok": bar is None or added <= bar,
    }


# -- all scenes ------------------------------------------------------------------------------------


def staged(name, share):
    command = [sys.executable, str(Path(__file__)), "--scene", name, "--share", str(share)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return json.loads(ran.stdout.splitlines()[-1])


def shown(name, scene):
    print(f"\n{name}: {scene['transactions']} transactions, median of {scene['rounds']} rounds")
    if scene["spans"] is not None:
        empty = "" if scene["spans"] else "  MISSED: without a span nothing was measured"
        print(f"  spans exported: {scene['spans']:,}{empty}")
    for variant, figures in scene["variants"].items():
        bar = "" if figures["bar_us"] is None else f"  bar {figures['bar_us']:g}  {'ok' if figures['ok'] else 'MISSED'}"
        low, high = figures["added_us_range"]
        print(
            f"  {variant:8} engine {figures['engine_us']:7.1f} µs ({figures['engine_per_second']:>7,}/s)"
            f"   bare {figures['bare_us']:6.1f} µs ({figures['bare_per_second']:>7,}/s)   x{figures['ratio']:<5}"
            f"  added {figures['added_us']:6.1f} µs ({low} to {high}; processor {figures['added_cpu_us']}){bar}"
        )


def compare(share):
    scenes = {}
    for name in SCENES:
        scenes[name] = staged(name, share)
        shown(name, scenes[name])
    rate = scenes["plain"]["variants"]["asyncio"]["engine_per_second"]
    enough = rate >= RATE
    print(f"\nasyncio in memory: {rate:,} transactions/s, bar {RATE:,}  {'ok' if enough else 'MISSED'}")
    ok = enough and all(scene["ok"] for scene in scenes.values())
    summary = {
        "python": platform.python_version(),
        "scenes": scenes,
        "rate": {"asyncio_per_second": rate, "bar": RATE, "ok": enough},
        "ok": ok,
    }
    print(json.dumps(summary))
    return 0 if ok else 1


def profile(variant, name):
    """The functions of one scene's engine by their own time; on threads, those of all threads."""
    import cProfile  # noqa: PLC0415 - a profiler belongs to no measurement
    import pstats  # noqa: PLC0415
    import threading  # noqa: PLC0415

    prepared(name)
    profiles = []

    def begin(*_):
        sys.setprofile(None)
        own = cProfile.Profile(time.thread_time)
        profiles.append(own)
        own.enable()

    connector = filled(SCENES[name].transactions)
    policy = policy_of(SCENES[name].transactions, SCENES[name].streaming)
    if variant == "threads":
        if sys.version_info >= (3, 12):
            sys.exit(
                "threads can be profiled up to Python 3.11 only: later profilers add the threads' clocks up wrongly"
            )
        threading.setprofile(begin)
    begin()
    VARIANTS[variant][0](connector, policy)
    for own in profiles:
        own.disable()
    threading.setprofile(None)
    stats = pstats.Stats(profiles[0])
    for other in profiles[1:]:
        other.create_stats()
        if other.stats:
            stats.add(other)
    stats.sort_stats("tottime").print_stats(30)


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--scene", choices=SCENES, help="run one scene in this process")
    options.add_argument("--share", type=float, default=1.0, help="share of the transactions to run")
    options.add_argument("--quick", action="store_true", help="a tenth of the work")
    options.add_argument("--profile", choices=VARIANTS, help="show where one variant spends its time")
    given = options.parse_args()
    if given.profile:
        profile(given.profile, given.scene or "plain")
        return 0
    if given.scene:
        play(given.scene, given.share)
        return 0
    return compare(0.1 if given.quick else given.share)


if __name__ == "__main__":
    sys.exit(main())
