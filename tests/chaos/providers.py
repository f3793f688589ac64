"""The fleet of providers: real processes on one PostgreSQL against a real upstream that misbehaves.

Quota: a limit, many more calls than that with retries on, some processes killed in the middle. Breaker: a dead
upstream, fast and slow, one thread and many. Keys: equal ones everywhere, and a consumer that is killed at
random points around its calls. The last line is JSON; the exit code is 1 if one bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.providers.errors import ProviderBadRequestError
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.sql import operator
from ergon_framework.providers.sql.books import PostgresBooks
from ergon_framework.providers.synthetic import Behaviour, SyntheticProvider, SyntheticUpstream
from ergon_framework.schema.migrate import upgrade
from ergon_framework.transaction import Transaction
from tests.servers.postgres import PrivatePostgres

ROOT = Path(__file__).parents[2]
_numbers = itertools.count(1)
#: Seconds within which everything ends, or something is wrong.
PATIENCE = 120.0
#: Seconds in which a worker may not yet know that the breaker is open.
UNKNOWING = 0.2
#: Seconds beyond the cooldown in which the first call succeeds again.
RECOVERY = 1.0


class Upstream(SyntheticUpstream):
    """One that is down or well as a whole, and remembers when its requests came."""

    def __init__(self, down=None):
        super().__init__()
        self.down = down
        self.came = []

    def arrived(self, received):
        super().arrived(received)
        if received.operation == "well":
            return Behaviour()
        with self._lock:
            self.came.append(time.time())
        return self.down or Behaviour()


class Worker:
    """A process of the fleet."""

    def __init__(self, **told):
        words = [sys.executable, "-m", "tests.chaos.provider_worker", json.dumps(told)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, cwd=ROOT, **pipes)

    def ready(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self

    def ended(self):
        """What it answered; None from one that was killed."""
        out, _ = self.process.communicate(timeout=PATIENCE)
        return json.loads(out) if out.strip() else None

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@contextmanager
def fleet(count, **told):
    workers = []
    try:
        workers += [Worker(**told) for _ in range(count)]
        for worker in workers:
            worker.ready()
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def tenant():
    return f"tenant-{next(_numbers)}"


def rows(dsn, statement, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement, parameters).fetchall()


# -- quota --------------------------------------------------------------------------------------------


def quota(dsn, *, limit, processes, threads, calls, kill=False, blocks=None):
    """Far more calls than the limit, retries on, every third answer a fault; half of the processes may be killed."""
    who = tenant()
    policy = {
        "timeout": 3.0,
        "quota": {"month": limit},
        "retry": {"max_attempts": 3, "base_delay_seconds": 0.01, "max_delay_seconds": 0.05},
        "breaker": {"failure_threshold": 1_000_000},
    }
    script = [Behaviour(status=503) if number % 3 == 0 else Behaviour() for number in range(limit // 2)]
    with SyntheticUpstream(*script) as upstream:
        told = {"work": "calls", "dsn": dsn, "address": upstream.address, "policy": policy, "tenant": who}
        told |= {"threads": threads, "calls": calls // processes, "blocks": blocks}
        with fleet(processes, **told) as workers:
            for worker in workers:
                worker.go()
            if kill:
                wait(lambda: upstream.calls >= limit // 3, "a third is spent")
                for worker in workers[::2]:
                    worker.kill()
            survivors = workers[1::2] if kill else workers
            ends = sum((Counter(worker.ended()) for worker in survivors), Counter())
        requests = upstream.calls
    lost = reconciled(dsn, who, expected=kill)
    ((used, remaining),) = rows(
        dsn, "select used_count, remaining_count from ergon.provider_quota_states where tenant_id = %s", who
    )
    stranded = sum(row.calls for row in lost)
    exact = requests == limit == used and not stranded
    never_more = requests <= used <= limit and used - requests <= stranded
    if blocks is not None and not kill:
        # What is left of a block is somebody's until he gives it back, so that others may be refused before the limit.
        exact = never_more and not stranded
    return {
        "ok": used + remaining == limit and (never_more if kill else exact),
        "requests": requests,
        "used": used,
        "lost": len(lost),
        "lost_calls": stranded,
        "ends": dict(ends),
    }


def reconciled(dsn, who, *, expected):
    """What is lost once every lease is over."""
    open_ones = "select count(*) from ergon.provider_reservations where tenant_id = %s and lost_at is null"
    with PostgresBooks(dsn) as books:
        if expected:
            wait(
                lambda: (books.reconcile(), rows(dsn, open_ones, who) == [(0,)])[1], "every reservation ended or lapsed"
            )
    return operator.lost(dsn, who, limit=10_000)


# -- the breaker --------------------------------------------------------------------------------------


def breaker(dsn, folder, *, processes, threads, latency, cooldown=2.0, threshold=5):
    """A dead upstream, then one that is well again; another tenant calls all the time."""
    sick, other = tenant(), tenant()
    policy = {
        "timeout": 10.0,
        "retry": {"max_attempts": 1},
        "breaker": {"failure_threshold": threshold, "open_cooldown_seconds": cooldown},
    }
    stop = folder / f"stop-{sick}"
    with Upstream(Behaviour(status=503, latency=latency)) as upstream, ExitStack() as later:
        told = {"work": "hammer", "dsn": dsn, "address": upstream.address, "policy": policy, "tenant": sick}
        told |= {"other": other, "threads": threads, "well": 1, "until": time.time() + PATIENCE, "stop": str(stop)}
        workers = later.enter_context(fleet(processes, **told))
        late = later.enter_context(fleet(1, **told))
        for worker in workers:
            worker.go()
        find = "select extract(epoch from open_until)::float8 from ergon.provider_breakers where tenant_id = %s"
        opened = wait(lambda: [at for (at,) in rows(dsn, find, sick) if at is not None], "it opens")[0] - cooldown
        known = time.time()  # from here on whoever asks the database is told
        late[0].go()  # a worker that starts while it is open
        wait(lambda: time.time() > opened + 2.5 * cooldown, "two cooldowns are over")
        upstream.down = None
        well_at = time.time()
        wait(
            lambda: rows(dsn, "select 1 from ergon.provider_breakers where tenant_id = %s and state = 'closed'", sick),
            "it closes again",
        )
        time.sleep(0.3)
        stop.touch()
        told_by = [worker.ended() for worker in [*workers, *late]]
    recovered = min(at for answer in told_by for at in answer["answered"]) - well_at
    # By the clock of whoever called, when he was let through: on its way to a busy upstream a request may take longer
    # than a cooldown. What began before the end of the cooldown and was let through after it is the probe.
    sent = sorted((passed, began) for answer in told_by for began, passed in answer["sent"])
    before = [passed for passed, _ in sent if passed < opened + cooldown]
    probes = [passed for passed, _ in sent if opened + cooldown <= passed < well_at]
    unknowing = [began for passed, began in sent if began > known + UNKNOWING and passed < opened + cooldown]
    gaps = [later - sooner for sooner, later in itertools.pairwise(probes)]
    wells = sum((Counter(answer["well"]) for answer in told_by), Counter())
    return {
        "ok": len(before) <= threshold + processes * threads
        and not unknowing
        and all(gap >= latency + cooldown * 0.9 for gap in gaps)
        and len(probes) >= 1
        and len(upstream.came) <= len(sent)
        and recovered <= cooldown + RECOVERY
        and told_by[-1]["first"] == ["circuit_open"]
        and set(wells) == {"success"},
        "requests_before_open": len(before),
        "bar": threshold + processes * threads,
        "begun_after_200_ms": len(unknowing),
        "known_after": round(known - opened, 3),
        "probes": len(probes),
        "shortest_gap_of_probes": round(min(gaps), 3) if gaps else None,
        "recovered_after": round(recovered, 3),
        "late_worker": told_by[-1]["first"],
        "other_tenant": dict(wells),
    }


# -- keys ---------------------------------------------------------------------------------------------


def keys(dsn, *, processes, calls):
    """Equal keys everywhere; then another payload; then a failure."""
    who, policy = tenant(), {"timeout": 20.0, "retry": {"max_attempts": 1}}
    with SyntheticUpstream(Behaviour(latency=0.3), Behaviour(status=422)) as upstream:
        told = {"work": "calls", "dsn": dsn, "address": upstream.address, "policy": policy, "tenant": who}
        told |= {"threads": 16, "calls": calls // processes, "key": "one", "payload": {"amount": 12}}
        with fleet(processes, **told) as workers:
            for worker in workers:
                worker.go()
            ends = sum((Counter(worker.ended()) for worker in workers), Counter())
        once = upstream.keys["one"]
        with PostgresBooks(dsn) as books:
            payments = SyntheticProvider(upstream, books=books, policy=ProviderPolicy.model_validate(policy))
            conflict = failed = None
            try:
                payments.call("charge", {"amount": 13}, key="one", tenant=who)
            except ProviderBadRequestError as error:
                conflict = error.code
            try:
                payments.call("charge", {"amount": 1}, key="two", tenant=who)
            except ProviderBadRequestError as error:
                failed = error.http_status
            again = payments.call("charge", {"amount": 1}, key="two", tenant=who)
    return {
        "ok": once == 1
        and ends == {"success": calls // processes * processes}
        and (conflict, failed) == ("idempotency_conflict", 422)
        and again["received"] == {"amount": 1},
        "upstream_calls": once,
        "ends": dict(ends),
        "conflict": conflict,
        "failure_then_result": failed == 422 and "received" in again,
    }


def kills(dsn, *, count, transactions, seed):
    """A consumer that is killed at random points around its calls."""
    # The budget is long, so that a busy machine gives nothing up; a killed owner's key is free 5 s after it.
    name, policy = f"orders-{tenant()}", {"timeout": 5.0, "retry": {"max_attempts": 1}}
    with SyntheticUpstream(then=Behaviour(latency=0.01)) as upstream:
        with_queue = PostgresQueue(name, dsn=dsn)
        with_queue.dispatch([Transaction(f"order-{number}", {"n": number}) for number in range(transactions)])
        with_queue.close()
        told = {"work": "consume", "dsn": dsn, "address": upstream.address, "policy": policy, "queue": name}
        told |= {"lease": 1.0, "kills": count, "seed": seed, "longest": 0.25, "patience": PATIENCE / 2}
        with fleet(1, **told) as (worker,):
            answer = worker.go().ended()
        received, seen = upstream.requests, Counter(upstream.keys)
    by_order = {}
    for request in received:
        by_order.setdefault(request.payload["n"], set()).add(request.idempotency_key)
    second = [order for order, used in by_order.items() if len(used) != 1]
    dead = rows(
        dsn, "select count(*) from ergon.dead_letter d join ergon.queue q on q.id = d.queue where q.name = %s", name
    )
    return {
        "ok": answer == {"kills": count, "last": 0}
        and len(by_order) == len(seen) == transactions
        and not second
        and dead == [(0,)],
        "kills": answer and answer["kills"],
        "transactions": transactions,
        "requests": len(received),
        "keys": len(seen),
        "seen_again": sum(times - 1 for times in seen.values()),
        "second_keys": len(second),
        "dead": dead[0][0],
    }


def wait(holds, what):
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", choices=["quota", "breaker", "keys", "kills"])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ergon-fleet-"))
    folder.chmod(0o755)
    server = PrivatePostgres(folder / "server", fsync=False, settings={"max_connections": 300})
    shown, began = {"seed": options.seed}, time.monotonic()
    try:
        server.start()
        dsn = server.create_database("fleet")
        upgrade(dsn)
        whole = {"limit": 1000, "processes": 8, "threads": 16, "calls": 20_000}
        runs = {
            "quota": lambda: quota(dsn, **whole),
            "quota killed": lambda: quota(dsn, **whole, kill=True),
            "quota in blocks": lambda: quota(dsn, **whole, blocks={"size": 20, "lease": 5.0}),
            "quota in blocks killed": lambda: quota(dsn, **whole, kill=True, blocks={"size": 20, "lease": 5.0}),
            **{
                f"breaker {threads} {name}": lambda threads=threads, latency=latency: breaker(
                    dsn, folder, processes=8, threads=threads, latency=latency
                )
                for threads in (1, 16)
                for name, latency in (("fast", 0.0), ("slow", 0.4))
            },
            "keys": lambda: keys(dsn, processes=8, calls=200),
            "kills": lambda: kills(dsn, count=100, transactions=150, seed=options.seed),
        }
        for name, run in runs.items():
            if options.only is None or name.startswith(options.only):
                shown[name] = run()
                print(f"{time.monotonic() - began:6.1f} s  {name}: {shown[name]}", file=sys.stderr, flush=True)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    ok = all(found["ok"] for found in shown.values() if isinstance(found, dict))
    print(json.dumps({"ok": ok, "seconds": round(time.monotonic() - began, 1), **shown}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
