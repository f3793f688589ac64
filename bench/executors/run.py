"""Executors and jobs: what the pool adds, how fast jobs are from end to end beside others, and what a backlog costs.

python bench/executors/run.py                            all parts; about 6 minutes
python bench/executors/run.py --jobs 500 --rounds 1      to see that it runs, not to judge by
python bench/executors/run.py --part rate

End to end: trivial jobs are submitted in bulk by one client, run by 4 processes and their results read back; from the
first submit to the last result seen. Ours in PostgreSQL with fsync; the peers' queues and results are in RabbitMQ or in
a Redis that writes nothing to disk. Rounds are interleaved, medians are compared. It ends with one line of JSON, and
with exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import backlog
from ground import HERE, say, server
from ours import ours
from peers.peer import rates

PROCESSES = 4
#: By name: executors of each kind, and jobs in flight in each of them.
OURS = {
    "ergon 1": {"python": (PROCESSES, 1)},
    "ergon 10": {"python": (PROCESSES, 10)},
    "ergon 2+2": {"python": (PROCESSES // 2, 1), "node": (PROCESSES // 2, 1)},
}
PARTS = ("pool", "rate", "backlog")


def pool():
    """What the pool adds to a job, in a process of its own."""
    ran = subprocess.run([sys.executable, str(HERE / "pool.py")], stdout=subprocess.PIPE, text=True, check=False)
    told = json.loads(ran.stdout.splitlines()[-1])
    say(f"pool: {told['added_us']:g} us added")
    return {"pool_added_us": told["added_us"]}, {"pool_added_us": told["met"]}


def rate(postgres, jobs, rounds):
    """Medians of jobs per second; as peers are called: by the jobs in flight, or prefetched, in each process."""
    found = {}
    for number in range(rounds):
        this = {name: ours(postgres, jobs, kinds) for name, kinds in OURS.items()}
        for peer in ("rrq", "celery"):
            measured = rates(peer, jobs, PROCESSES)
            this |= {f"{peer} {setting.partition('/')[0]}": value for setting, value in measured.items()}
        for name, value in this.items():
            found.setdefault(name, []).append(value)
        say(f"round {number + 1}: " + ", ".join(f"{name} {value:.0f}/s" for name, value in this.items()))
    medians = {name: statistics.median(values) for name, values in found.items()}
    bars = {
        "ahead of rrq": medians["ergon 1"] > medians["rrq 1"],
        "ahead of celery": medians["ergon 1"] > max(medians["celery 1"], medians["celery 4"]),
        "ahead of rrq, 10 in flight": medians["ergon 10"] > medians["rrq 10"],
    }
    return {"jobs_per_second": {name: round(value) for name, value in medians.items()}}, bars


def burden(postgres):
    figures = backlog.claims(postgres) | backlog.slow_kind(postgres)
    bars = {name: figures[name] <= backlog.BAR for name in ("claim_ratio", "slow_ratio")}
    return {name: round(value, 2) for name, value in figures.items()}, bars


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    options = parser.parse_args()
    figures, bars = {}, {}
    with server() as postgres:
        parts = {"pool": pool, "rate": lambda: rate(postgres, options.jobs, options.rounds)}
        parts["backlog"] = lambda: burden(postgres)
        for name in [options.part] if options.part else PARTS:
            told, met = parts[name]()
            figures |= told
            bars |= met
    print(json.dumps(figures | {"bars": bars, "ok": all(bars.values())}))
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
