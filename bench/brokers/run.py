"""RabbitMQ, NATS and Redis: our connectors beside the bare client and beside peers, in one run, one after the other.

python bench/brokers/run.py                                  all brokers; about 25 minutes
python bench/brokers/run.py --broker redis --rounds 1        one of them, to see that it runs
python bench/brokers/run.py --no-peers                       without the environment of `make broker-peers`

Each contestant fills a queue of its own in a private server and empties it with one worker process: JSON of 200 bytes,
a handler that does nothing, acks after processing. The rate is taken from the first handler to the last, so that it is
the same for all and starting up counts for nobody. Rounds are interleaved, medians are compared. What each may prefetch
is said in contest/. The servers: RabbitMQ as it comes, with quorum queues for ours, the bare client and FastStream (the
others have classic ones, which are faster); NATS and Redis with the sync settings that they come with (Redis with an
append-only file, synced every second).

It ends with one line of JSON, and with exit code 1 where a bar is missed.
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
# Scripts here are called like the clients that they measure.
sys.path.remove(str(Path(__file__).parent))

from tests.servers.nats import PrivateNats
from tests.servers.rabbitmq import PrivateRabbitMQ
from tests.servers.redis import PrivateRedis

HERE = Path(__file__).parent / "contest"
ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("BROKER_PEERS", ROOT / ".venv-broker-peers")) / "bin" / "python"
CONCURRENCIES = (10, 100)
#: Messages of a run: ours and the bare client's, and of peers, whose rates are a fraction.
COUNTS = {"rabbitmq": 10_000, "nats": 20_000, "redis": 30_000}
PEER_COUNT = 3_000
WORKERS = 8
#: Of the bare client's rate at concurrency 100, and of the best peer's at each.
BARS = {"rabbitmq": (1.1, 1.3), "nats": (1.0, 1.5), "redis": (0.3, 3.0)}
NAMES = {
    "rabbitmq": ("dramatiq", "faststream", "taskiq", "celery"),
    "nats": ("faststream", "taskiq"),
    "redis": ("dramatiq", "faststream", "taskiq", "celery", "repid"),
}
PATIENCE = 180.0
_numbers = itertools.count(1)


def say(text):
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def server(broker):
    """The address of a private server."""
    makers = {
        "rabbitmq": PrivateRabbitMQ,
        "nats": PrivateNats,
        "redis": lambda folder: PrivateRedis(folder, settings={"appendfsync": "everysec"}),
    }
    with tempfile.TemporaryDirectory(prefix="ergon-bench-") as folder:
        made = makers[broker](Path(folder) / "server")
        made.start()
        try:
            # Without a path: some take "//" for a vhost without a name.
            yield made.url.rstrip("/")
        finally:
            made.kill()


def environment():
    """With a queue that nobody has used before."""
    return os.environ | {"BENCH_QUEUE": f"bench-{next(_numbers)}"}


def asked(python, script, *words):
    """What a contestant told last; None if it did not come to its end."""
    command = [str(python), str(HERE / script), *map(str, words)]
    try:
        ran = subprocess.run(command, env=environment(), capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        say(f"{script} {' '.join(map(str, words))}: not over within {PATIENCE:g} s")
        return None
    lines = ran.stdout.decode(errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        say(f"{script} {' '.join(map(str, words))}: {ran.stderr.decode(errors='replace')[-800:]}")
        return None


def contestants(broker, url, concurrency, *, peers):
    """By name: a function that measures once."""
    count = COUNTS[broker]
    found = {
        "ergon": lambda: asked(sys.executable, "ours.py", "rate", url, count, concurrency, "async"),
        "ergon threads": lambda: asked(sys.executable, "ours.py", "rate", url, count, concurrency, "threads"),
        "bare": lambda: asked(sys.executable, "bare.py", broker, url, count, concurrency),
    }
    for name in NAMES[broker] if peers else ():
        found[name] = lambda name=name: asked(PEERS, "peers.py", name, broker, url, PEER_COUNT, concurrency)
    return found


def rates(broker, url, *, rounds, peers):
    """Medians of messages per second, by concurrency and contestant."""
    found = {concurrency: {} for concurrency in CONCURRENCIES}
    for number in range(rounds):
        for concurrency in CONCURRENCIES:
            told = {}
            for name, measure in contestants(broker, url, concurrency, peers=peers).items():
                result = measure()
                if result is None and name not in NAMES[broker]:
                    raise SystemExit(f"{name} did not come to its end on {broker}; there is nothing to compare")
                if result is not None:
                    told[name] = result["rate"]
                    found[concurrency].setdefault(name, []).append(result["rate"])
            words = ", ".join(f"{name} {rate:.0f}" for name, rate in told.items())
            say(f"{broker}, round {number + 1}, concurrency {concurrency}: {words}")
    return {
        concurrency: {name: statistics.median(values) for name, values in by_name.items()}
        for concurrency, by_name in found.items()
    }


def shared(url, count, workers):
    """Messages per second of *workers* processes on one queue."""
    given = environment()
    python = [sys.executable, str(HERE / "ours.py")]
    subprocess.run([*python, "fill", url, str(count)], env=given, check=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": given}
    processes = [subprocess.Popen([*python, "share", url, "100"], **pipes) for _ in range(workers)]
    try:
        for process in processes:
            process.stdout.readline()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [json.loads(process.stdout.readline()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    told = [one for one in told if one["count"]]
    handled = sum(one["count"] for one in told)
    if handled < count:
        # A worker ends when it finds nothing: what another gives back after that stays in the queue, and is not lost.
        rest = subprocess.run([*python, "left", url], env=given, capture_output=True, text=True, check=False)
        say(
            f"{workers} workers handled {handled} of {count}; in the queue: {rest.stdout.strip() or rest.stderr[-200:]}"
        )
    return handled / (max(one["ended"] for one in told) - min(one["began"] for one in told))


def crowd(url, count, rounds):
    """Eight workers on one queue, as a share of one."""
    one, many = [], []
    for _ in range(rounds):
        one.append(shared(url, count, 1))
        many.append(shared(url, count, WORKERS))
    say(f"one worker {statistics.median(one):.0f}, {WORKERS} workers {statistics.median(many):.0f}")
    return statistics.median(many) / statistics.median(one)


def bar(value, wanted, *, most=False):
    ok = value is not None and (value <= wanted if most else value >= wanted)
    return {"value": None if value is None else round(value, 4), "bar": wanted, "ok": ok}


def measured(broker, options):
    """All figures and bars of one broker."""
    bare_bar, peer_bar = BARS[broker]
    with server(broker) as url:
        found = rates(broker, url, rounds=options.rounds, peers=options.peers)
        share = crowd(url, COUNTS[broker], options.rounds)
        full = found[100]
        quiet = asked(sys.executable, "quiet.py", url, full["ergon"] / 2) or {}
    bars = {"of the bare client, 100 at once": bar(full["ergon"] / full["bare"], bare_bar)}
    for concurrency, by_name in found.items():
        others = {name: rate for name, rate in by_name.items() if name in NAMES[broker]}
        if others:
            best = max(others, key=others.get)
            words = f"of the best peer, {best}, {concurrency} at once"
            bars[words] = bar(by_name["ergon"] / others[best], peer_bar)
    bars["threads, of asyncio, 100 at once"] = bar(full["ergon threads"] / full["ergon"], 0.6)
    bars[f"{WORKERS} workers, of one"] = bar(share, 0.8)
    bars["core of 20 empty queues"] = bar(quiet.get("idle"), 0.01, most=True)
    bars["median from send to start, ms"] = bar(quiet.get("start_p50_ms"), 20, most=True)
    table = {str(key): {name: round(rate) for name, rate in by_name.items()} for key, by_name in found.items()}
    return {"rates": table, "quiet": quiet, "bars": bars, "ok": all(one["ok"] for one in bars.values())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", action="append", choices=sorted(COUNTS), help="which; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave the peers out")
    options = parser.parse_args()
    if options.peers and not PEERS.exists():
        parser.error(f"there is no environment with the peers at {PEERS}; run make broker-peers, or give --no-peers")
    began, told = time.monotonic(), {}
    for broker in options.broker or COUNTS:
        told[broker] = measured(broker, options)
        say(f"{broker}: {json.dumps(told[broker], indent=2)}")
    ok = all(one["ok"] for one in told.values())
    print(json.dumps({"brokers": told, "seconds": round(time.monotonic() - began), "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
