"""RabbitMQ, NATS and Redis: Ergon's connectors, the bare client and peers, in one run, one after the other.

python bench/brokers/run.py                                  all brokers; about 25 minutes
python bench/brokers/run.py --broker redis --rounds 1        one of them, to see that it runs
python bench/brokers/run.py --no-peers                       without the environment of `make broker-peers`

Each contestant fills its own queue in a private server and empties it with one worker process: JSON of 200 bytes, a
handler that does nothing, acks after processing. The rate is measured from the first handler to the last, the same for
all, so that the start of the process does not count. Rounds are interleaved, medians are compared. The prefetch limits
are in contest/. The servers: RabbitMQ with its defaults, with quorum queues for Ergon, the bare client and FastStream
(the others have classic queues, which are faster); NATS and Redis with their default sync settings (Redis with an
append-only file, synced every second).

It ends with one line of JSON, and with exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
# Scripts here have the names of the clients that they measure.
sys.path.remove(str(Path(__file__).parent))

from tests.servers.nats import PrivateNats
from tests.servers.rabbitmq import PrivateRabbitMQ
from tests.servers.redis import PrivateRedis

CONTEST_FOLDER = Path(__file__).parent / "contest"
ROOT = Path(__file__).parents[2]
PEER_PYTHON = Path(os.environ.get("BROKER_PEERS", ROOT / ".venv-broker-peers")) / "bin" / "python"
CONCURRENCIES = (10, 100)
#: Messages of a run: for Ergon and the bare client, and for peers, whose rates are a fraction.
MESSAGE_COUNTS = {"rabbitmq": 10_000, "nats": 20_000, "redis": 30_000}
PEER_MESSAGE_COUNT = 3_000
WORKER_COUNT = 8
#: Minimum ratios: to the bare client at concurrency 100, and to the best peer at each concurrency.
BARS = {"rabbitmq": (1.0, 1.5), "nats": (1.0, 1.5), "redis": (0.3, 3.0)}
PEER_NAMES = {
    "rabbitmq": ("dramatiq", "faststream", "taskiq", "celery"),
    "nats": ("faststream", "taskiq"),
    "redis": ("dramatiq", "faststream", "taskiq", "celery", "repid"),
}
RUN_TIMEOUT_SECONDS = 180.0
_numbers = itertools.count(1)


def say(text):
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def server(broker):
    """Start a private server, and yield its address."""
    makers = {
        "rabbitmq": PrivateRabbitMQ,
        "nats": PrivateNats,
        "redis": lambda folder: PrivateRedis(folder, settings={"appendfsync": "everysec"}),
    }
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        private_server = makers[broker](Path(folder) / "server")
        private_server.start()
        try:
            # Without a path: some clients take "//" for a vhost without a name.
            yield private_server.url.rstrip("/")
        finally:
            private_server.kill()


def build_environment():
    """Return an environment with a fresh queue."""
    return os.environ | {"BENCH_QUEUE": f"bench-{next(_numbers)}"}


def run_contestant(python, script, *arguments):
    """Return the last line of a contestant's output; None if it did not finish."""
    command = [str(python), str(CONTEST_FOLDER / script), *map(str, arguments)]
    try:
        completed = subprocess.run(
            command, env=build_environment(), capture_output=True, timeout=RUN_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"{script} {' '.join(map(str, arguments))}: not over within {RUN_TIMEOUT_SECONDS:g} s")
        return None
    lines = completed.stdout.decode(errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        say(f"{script} {' '.join(map(str, arguments))}: {completed.stderr.decode(errors='replace')[-800:]}")
        return None


def list_contestants(broker, url, concurrency, *, peers):
    """Return, by name, a function that measures once."""
    count = MESSAGE_COUNTS[broker]
    measures = {
        "ergon": lambda: run_contestant(sys.executable, "ours.py", "rate", url, count, concurrency, "async"),
        "ergon threads": lambda: run_contestant(sys.executable, "ours.py", "rate", url, count, concurrency, "threads"),
        "bare": lambda: run_contestant(sys.executable, "bare.py", broker, url, count, concurrency),
    }
    for name in PEER_NAMES[broker] if peers else ():
        measures[name] = lambda name=name: run_contestant(
            PEER_PYTHON, "peers.py", name, broker, url, PEER_MESSAGE_COUNT, concurrency
        )
    return measures


def measure_rates(broker, url, *, rounds, peers):
    """Return medians of messages per second, by concurrency and contestant."""
    samples = {concurrency: {} for concurrency in CONCURRENCIES}
    for number in range(rounds):
        for concurrency in CONCURRENCIES:
            round_rates = {}
            for name, measure in list_contestants(broker, url, concurrency, peers=peers).items():
                result = measure()
                if result is None and name not in PEER_NAMES[broker]:
                    raise SystemExit(f"{name} did not come to its end on {broker}; there is nothing to compare")
                if result is not None:
                    round_rates[name] = result["rate"]
                    samples[concurrency].setdefault(name, []).append(result["rate"])
            summary = ", ".join(f"{name} {rate:.0f}" for name, rate in round_rates.items())
            say(f"{broker}, round {number + 1}, concurrency {concurrency}: {summary}")
    return {
        concurrency: {name: statistics.median(values) for name, values in by_name.items()}
        for concurrency, by_name in samples.items()
    }


def measure_shared(url, count, workers):
    """Return messages per second of *workers* processes on one queue."""
    environment = build_environment()
    python = [sys.executable, str(CONTEST_FOLDER / "ours.py")]
    subprocess.run([*python, "fill", url, str(count)], env=environment, check=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen([*python, "share", url, "100"], **pipes) for _ in range(workers)]
    try:
        for process in processes:
            process.stdout.readline()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        reports = [json.loads(process.stdout.readline()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    reports = [report for report in reports if report["count"]]
    handled = sum(report["count"] for report in reports)
    if handled < count:
        # A worker ends when it fetches nothing: messages that another releases after that stay in the queue.
        completed = subprocess.run([*python, "left", url], env=environment, capture_output=True, text=True, check=False)
        say(
            f"{workers} workers handled {handled} of {count}; in the queue: "
            f"{completed.stdout.strip() or completed.stderr[-200:]}"
        )
    return handled / (max(report["ended"] for report in reports) - min(report["began"] for report in reports))


def compare_workers(url, count, rounds):
    """Return the rate of eight workers on one queue as a share of the rate of one."""
    single_rates, parallel_rates = [], []
    for _ in range(rounds):
        single_rates.append(measure_shared(url, count, 1))
        parallel_rates.append(measure_shared(url, count, WORKER_COUNT))
    say(
        f"one worker {statistics.median(single_rates):.0f}, {WORKER_COUNT} workers "
        f"{statistics.median(parallel_rates):.0f}"
    )
    return statistics.median(parallel_rates) / statistics.median(single_rates)


def check_bar(value, target, *, is_maximum=False):
    ok = value is not None and (value <= target if is_maximum else value >= target)
    return {"value": None if value is None else round(value, 4), "bar": target, "ok": ok}


def measure_broker(broker, options):
    """Return all figures and targets of one broker."""
    bare_bar, peer_bar = BARS[broker]
    with server(broker) as url:
        rates_by_concurrency = measure_rates(broker, url, rounds=options.rounds, peers=options.peers)
        worker_share = compare_workers(url, MESSAGE_COUNTS[broker], options.rounds)
        full_load = rates_by_concurrency[100]
        idle_figures = run_contestant(sys.executable, "quiet.py", url, full_load["ergon"] / 2) or {}
    bars = {"of the bare client, 100 at once": check_bar(full_load["ergon"] / full_load["bare"], bare_bar)}
    for concurrency, by_name in rates_by_concurrency.items():
        peer_rates = {name: rate for name, rate in by_name.items() if name in PEER_NAMES[broker]}
        if peer_rates:
            best = max(peer_rates, key=peer_rates.get)
            label = f"of the best peer, {best}, {concurrency} at once"
            bars[label] = check_bar(by_name["ergon"] / peer_rates[best], peer_bar)
    bars["threads, of asyncio, 100 at once"] = check_bar(full_load["ergon threads"] / full_load["ergon"], 0.6)
    bars[f"{WORKER_COUNT} workers, of one"] = check_bar(worker_share, 0.8)
    bars["core of 20 empty queues"] = check_bar(idle_figures.get("idle"), 0.01, is_maximum=True)
    bars["median from send to start, ms"] = check_bar(idle_figures.get("start_p50_ms"), 20, is_maximum=True)
    table = {
        str(key): {name: round(rate) for name, rate in by_name.items()} for key, by_name in rates_by_concurrency.items()
    }
    return {"rates": table, "quiet": idle_figures, "bars": bars, "ok": all(result["ok"] for result in bars.values())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", action="append", choices=sorted(MESSAGE_COUNTS), help="which; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave the peers out")
    options = parser.parse_args()
    if options.peers and not PEER_PYTHON.exists():
        parser.error(
            f"there is no environment with the peers at {PEER_PYTHON}; run make broker-peers, or give --no-peers"
        )
    began, results = time.monotonic(), {}
    for broker in options.broker or MESSAGE_COUNTS:
        results[broker] = measure_broker(broker, options)
        say(f"{broker}: {json.dumps(results[broker], indent=2)}")
    ok = all(result["ok"] for result in results.values())
    print(json.dumps({"brokers": results, "seconds": round(time.monotonic() - began), "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
