"""Executors and jobs: the overhead of the pool, end-to-end rates compared with peers, and the cost of a backlog.

python bench/executors/run.py                            all parts; about 6 minutes
python bench/executors/run.py --jobs 500 --rounds 1      to see that it runs, not for figures
python bench/executors/run.py --part rate

End to end: trivial jobs are submitted in bulk by one client, run by 4 processes and their results read back; from the
first submit to the last result. Ergon uses PostgreSQL with fsync; the peers' queues and results are in RabbitMQ or in a
Redis that writes nothing to disk. Rounds are interleaved, medians are compared. It ends with one line of JSON, and with
exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import backlog
from ground import HERE, say, server
from ours import measure_ours
from peers.peer import measure_rates

PROCESSES = 4
#: By name: executors of each kind, and jobs in flight in each of them.
ERGON_SETTINGS = {
    "ergon 1": {"python": (PROCESSES, 1)},
    "ergon 10": {"python": (PROCESSES, 10)},
    "ergon 2+2": {"python": (PROCESSES // 2, 1), "node": (PROCESSES // 2, 1)},
}
PARTS = ("pool", "rate", "backlog")


def measure_pool():
    """Measure the overhead of the pool per job, in its own process."""
    completed = subprocess.run([sys.executable, str(HERE / "pool.py")], stdout=subprocess.PIPE, text=True, check=False)
    result = json.loads(completed.stdout.splitlines()[-1])
    say(f"pool: {result['added_us']:g} us added")
    return {"pool_added_us": result["added_us"]}, {"pool_added_us": result["met"]}


def compare_rates(postgres, jobs, rounds):
    """Return medians of jobs per second; named by the jobs in flight, or prefetched, in each process."""
    samples = {}
    for number in range(rounds):
        round_rates = {name: measure_ours(postgres, jobs, kinds) for name, kinds in ERGON_SETTINGS.items()}
        for peer in ("rrq", "celery"):
            peer_rates = measure_rates(peer, jobs, PROCESSES)
            round_rates |= {f"{peer} {setting.partition('/')[0]}": value for setting, value in peer_rates.items()}
        for name, value in round_rates.items():
            samples.setdefault(name, []).append(value)
        say(f"round {number + 1}: " + ", ".join(f"{name} {value:.0f}/s" for name, value in round_rates.items()))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    bars = {
        "ahead of rrq": medians["ergon 1"] > medians["rrq 1"],
        "ahead of celery": medians["ergon 1"] > max(medians["celery 1"], medians["celery 4"]),
        "ahead of rrq, 10 in flight": medians["ergon 10"] > medians["rrq 10"],
    }
    return {"jobs_per_second": {name: round(value) for name, value in medians.items()}}, bars


def measure_backlog(postgres):
    results = backlog.claims(postgres) | backlog.slow_kind(postgres)
    bars = {name: results[name] <= backlog.BAR for name in ("claim_ratio", "slow_ratio")}
    return {name: round(value, 2) for name, value in results.items()}, bars


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    options = parser.parse_args()
    figures, bars = {}, {}
    with server() as postgres:
        parts = {"pool": measure_pool, "rate": lambda: compare_rates(postgres, options.jobs, options.rounds)}
        parts["backlog"] = lambda: measure_backlog(postgres)
        for name in [options.part] if options.part else PARTS:
            part_figures, part_bars = parts[name]()
            figures |= part_figures
            bars |= part_bars
    print(json.dumps(figures | {"bars": bars, "ok": all(bars.values())}))
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
