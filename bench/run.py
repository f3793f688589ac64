"""The overhead of the engine per transaction over a bare loop, measured in one run.

    python bench/run.py                 every scenario, one line of JSON at the end, exit 1 where a target is missed
    python bench/run.py --quick         a tenth of the work: to see that it runs, not for figures
    python bench/run.py --profile NAME  where one variant (asyncio, threads) spends its time; --scene chooses one

Each scenario has its own process, because a tracer provider stays set permanently. In it the engine and the bare loop
take turns, so both have the same machine load; a figure is the median over the rounds.
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
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy

ROUNDS = 7
WARM_UP_TRANSACTIONS = 1_000
#: Transactions per second that the asyncio variant must reach without telemetry.
MIN_RATE_PER_SECOND = 25_000


@dataclass(frozen=True)
class Scenario:
    transactions: int
    #: Microseconds that the engine may add to a transaction; None is printed without a target.
    bars: dict[str, float | None]
    #: A streaming loop has a trace per batch; another loop has a single trace, so that a sampler makes no difference.
    streaming: bool = False


SCENARIOS = {
    "plain": Scenario(20_000, {"asyncio": 20.0, "threads": 30.0}),
    "recorded": Scenario(5_000, {"asyncio": 250.0, "threads": None}, streaming=True),
    "sampled": Scenario(20_000, {"asyncio": 40.0, "threads": None}, streaming=True),
}


# -- measured loops --------------------------------------------------------------------------------


class ThreadedNoopTask(ConsumerMixin):
    def process_transaction(self, transaction):
        return None


class AsyncNoopTask(AsyncConsumerMixin):
    async def process_transaction(self, transaction):
        return None


def run_engine_threads(connector, policy):
    task = ThreadedNoopTask()
    task.connector = connector
    return task.consume_transactions(policy).started


def run_engine_asyncio(connector, policy):
    task = AsyncNoopTask()
    task.connector = connector
    return asyncio.run(task.consume_transactions(policy)).started


def run_bare_threads(connector, _policy):
    return bare.consume(connector, ThreadedNoopTask().process_transaction)


def run_bare_asyncio(connector, _policy):
    return asyncio.run(bare.consume_async(connector, AsyncNoopTask().process_transaction))


VARIANTS = {"asyncio": (run_engine_asyncio, run_bare_asyncio), "threads": (run_engine_threads, run_bare_threads)}


def fill_connector(count):
    connector = MemoryConnector("bench")
    connector.dispatch([Transaction(id=f"t{number}") for number in range(count)])
    return connector


def build_policy(count, streaming):
    # The defaults, except that a streaming loop needs a limit to end.
    return ConsumerPolicy.load({"loop": {"streaming": True, "limit": count}} if streaming else {})


def measure_loop(loop, count, *, streaming=False):
    """Return seconds per transaction: elapsed time, and processor time."""
    connector = fill_connector(count)
    policy = build_policy(count, streaming)
    gc.collect()
    began, cpu_start = time.perf_counter(), time.process_time()
    done = loop(connector, policy)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_start
    depth = connector.depth()
    if (done, depth.ready, depth.in_flight, depth.dead) != (count, 0, 0, 0):
        raise RuntimeError(f"{loop.__name__} left {depth} behind after {done} of {count} transactions")
    return seconds / count, cpu / count


# -- one scenario ----------------------------------------------------------------------------------


def set_up_tracing(sampler):
    """Set up tracing as an application does, up to an exporter that drops every span."""
    from opentelemetry import trace  # noqa: PLC0415 - only the scenes with telemetry may load the SDK
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult  # noqa: PLC0415

    class DiscardingExporter(SpanExporter):
        exported = 0

        def export(self, spans):
            DiscardingExporter.exported += len(spans)
            return SpanExportResult.SUCCESS

    # A full span queue is expected here, so its warnings are hidden.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(BatchSpanProcessor(DiscardingExporter()))
    trace.set_tracer_provider(provider)
    return provider, DiscardingExporter


def prepare_telemetry(name):
    if name == "plain":
        return None
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased  # noqa: PLC0415

    return set_up_tracing(ALWAYS_ON if name == "recorded" else ParentBased(TraceIdRatioBased(0.01)))


def run_scenario(name, share):
    """Run all rounds of one scenario; the last line of output is its JSON."""
    scenario, telemetry = SCENARIOS[name], prepare_telemetry(name)
    count = max(WARM_UP_TRANSACTIONS, int(scenario.transactions * share))
    rounds = {variant: {"engine": [], "bare": []} for variant in VARIANTS}
    for loops in VARIANTS.values():
        for loop in loops:
            measure_loop(loop, WARM_UP_TRANSACTIONS, streaming=scenario.streaming)
    for number in range(ROUNDS):
        for variant, (engine, baseline) in VARIANTS.items():
            pair = [("engine", engine), ("bare", baseline)]
            # Alternate the order, because the first one always finds the machine in the same state.
            for side, loop in pair if number % 2 == 0 else pair[::-1]:
                rounds[variant][side].append(measure_loop(loop, count, streaming=scenario.streaming))
        print(f"{name}: round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    figures = {variant: summarize(sides, scenario.bars[variant]) for variant, sides in rounds.items()}
    spans = None
    if telemetry is not None:
        provider, exporter = telemetry
        provider.force_flush()
        spans = exporter.exported
    ok = spans != 0 and all(figure["ok"] for figure in figures.values())
    print(json.dumps({"transactions": count, "rounds": ROUNDS, "spans": spans, "variants": figures, "ok": ok}))


def summarize(sides, bar):
    engine, baseline = ([seconds for seconds, _ in sides[side]] for side in ("engine", "bare"))
    # Adjacent rounds are compared: other load on the machine slows both.
    differences = [mine - theirs for mine, theirs in zip(engine, baseline, strict=True)]
    cpu = [mine - theirs for (_, mine), (_, theirs) in zip(sides["engine"], sides["bare"], strict=True)]
    added = statistics.median(differences) * 1e6
    return {
        "engine_us": round(statistics.median(engine) * 1e6, 2),
        "bare_us": round(statistics.median(baseline) * 1e6, 2),
        "engine_per_second": round(1 / statistics.median(engine)),
        "bare_per_second": round(1 / statistics.median(baseline)),
        "ratio": round(statistics.median(engine) / statistics.median(baseline), 2),
        "added_us": round(added, 2),
        "added_us_range": [round(min(differences) * 1e6, 2), round(max(differences) * 1e6, 2)],
        "added_cpu_us": round(statistics.median(cpu) * 1e6, 2),
        "bar_us": bar,
        "ok": bar is None or added <= bar,
    }


# -- all scenarios ---------------------------------------------------------------------------------


def run_scenario_process(name, share):
    command = [sys.executable, str(Path(__file__)), "--scene", name, "--share", str(share)]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return json.loads(completed.stdout.splitlines()[-1])


def print_scenario(name, scenario):
    print(f"\n{name}: {scenario['transactions']} transactions, median of {scenario['rounds']} rounds")
    if scenario["spans"] is not None:
        empty = "" if scenario["spans"] else "  MISSED: without a span nothing was measured"
        print(f"  spans exported: {scenario['spans']:,}{empty}")
    for variant, figures in scenario["variants"].items():
        bar = "" if figures["bar_us"] is None else f"  bar {figures['bar_us']:g}  {'ok' if figures['ok'] else 'MISSED'}"
        low, high = figures["added_us_range"]
        print(
            f"  {variant:8} engine {figures['engine_us']:7.1f} µs ({figures['engine_per_second']:>7,}/s)"
            f"   bare {figures['bare_us']:6.1f} µs ({figures['bare_per_second']:>7,}/s)   x{figures['ratio']:<5}"
            f"  added {figures['added_us']:6.1f} µs ({low} to {high}; processor {figures['added_cpu_us']}){bar}"
        )


def compare(share):
    results = {}
    for name in SCENARIOS:
        results[name] = run_scenario_process(name, share)
        print_scenario(name, results[name])
    rate = results["plain"]["variants"]["asyncio"]["engine_per_second"]
    is_fast_enough = rate >= MIN_RATE_PER_SECOND
    print(
        f"\nasyncio in memory: {rate:,} transactions/s, bar {MIN_RATE_PER_SECOND:,}  "
        f"{'ok' if is_fast_enough else 'MISSED'}"
    )
    ok = is_fast_enough and all(result["ok"] for result in results.values())
    summary = {
        "python": platform.python_version(),
        "scenes": results,
        "rate": {"asyncio_per_second": rate, "bar": MIN_RATE_PER_SECOND, "ok": is_fast_enough},
        "ok": ok,
    }
    print(json.dumps(summary))
    return 0 if ok else 1


def profile(variant, name):
    """Print the functions of one scenario's engine by their own time; on threads, those of all threads."""
    import cProfile  # noqa: PLC0415 - a profiler belongs to no measurement
    import pstats  # noqa: PLC0415
    import threading  # noqa: PLC0415

    prepare_telemetry(name)
    profilers = []

    def start_profiling(*_):
        sys.setprofile(None)
        profiler = cProfile.Profile(time.thread_time)
        profilers.append(profiler)
        profiler.enable()

    connector = fill_connector(SCENARIOS[name].transactions)
    policy = build_policy(SCENARIOS[name].transactions, SCENARIOS[name].streaming)
    if variant == "threads":
        if sys.version_info >= (3, 12):
            sys.exit(
                "threads can be profiled up to Python 3.11 only: later profilers add the threads' clocks up wrongly"
            )
        threading.setprofile(start_profiling)
    start_profiling()
    VARIANTS[variant][0](connector, policy)
    for profiler in profilers:
        profiler.disable()
    threading.setprofile(None)
    stats = pstats.Stats(profilers[0])
    for other in profilers[1:]:
        other.create_stats()
        if other.stats:
            stats.add(other)
    stats.sort_stats("tottime").print_stats(30)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", choices=SCENARIOS, help="run one scene in this process")
    parser.add_argument("--share", type=float, default=1.0, help="share of the transactions to run")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--profile", choices=VARIANTS, help="show where one variant spends its time")
    options = parser.parse_args()
    if options.profile:
        profile(options.profile, options.scene or "plain")
        return 0
    if options.scene:
        run_scenario(options.scene, options.share)
        return 0
    return compare(0.1 if options.quick else options.share)


if __name__ == "__main__":
    sys.exit(main())
