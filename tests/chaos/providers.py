"""The fleet of providers: real processes on one PostgreSQL against a real upstream that misbehaves.

Quota: a limit, many more calls than that with retries on, some processes killed in the middle. Breaker: a dead
upstream, fast and slow, one thread and many. Keys: equal ones everywhere, and a consumer that is killed at
random points around its calls. The last line is JSON; the exit code is 1 if one target is missed.
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
from ergon_framework.database.migrate import upgrade
from ergon_framework.providers.errors import ProviderBadRequestError
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.postgres import admin
from ergon_framework.providers.postgres.state import PostgresProviderState
from ergon_framework.testing.fake_provider import Behaviour, FakeProvider, FakeProviderServer
from ergon_framework.transaction import Transaction
from tests.servers.postgres import PrivatePostgres

ROOT = Path(__file__).parents[2]
_numbers = itertools.count(1)
#: Seconds within which everything must end.
TIMEOUT_SECONDS = 120.0
#: Seconds for which a worker may not yet know that the breaker is open.
BREAKER_LAG_SECONDS = 0.2
#: Seconds after the cooldown within which the first call succeeds again.
RECOVERY_SECONDS = 1.0


class ControlledUpstream(FakeProviderServer):
    """An upstream that is down or healthy as a whole, and records the times of its requests."""

    def __init__(self, down=None):
        super().__init__()
        self.down = down
        self.arrival_times = []

    def record_request(self, received):
        super().record_request(received)
        if received.operation == "well":
            return Behaviour()
        with self._lock:
            self.arrival_times.append(time.time())
        return self.down or Behaviour()


class WorkerProcess:
    """A process of the fleet."""

    def __init__(self, **settings):
        command = [sys.executable, "-m", "tests.chaos.provider_worker", json.dumps(settings)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, **pipes)

    def wait_until_ready(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def start(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self

    def read_answer(self):
        """Return its answer; None if it was killed."""
        out, _ = self.process.communicate(timeout=TIMEOUT_SECONDS)
        return json.loads(out) if out.strip() else None

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@contextmanager
def run_workers(count, **settings):
    workers = []
    try:
        workers += [WorkerProcess(**settings) for _ in range(count)]
        for worker in workers:
            worker.wait_until_ready()
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def make_tenant():
    return f"tenant-{next(_numbers)}"


def run_query(dsn, statement, *parameters):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement, parameters).fetchall()


# -- quota --------------------------------------------------------------------------------------------


def run_quota(dsn, *, limit, processes, threads, calls, kill=False, blocks=None):
    """Make far more calls than the limit, with retries, every third answer a fault; *kill* half of the processes."""
    tenant_id = make_tenant()
    policy = {
        "timeout": 3.0,
        "quota": {"month": limit},
        "retry": {"max_attempts": 3, "base_delay_seconds": 0.01, "max_delay_seconds": 0.05},
        "breaker": {"failure_threshold": 1_000_000},
    }
    script = [Behaviour(status=503) if number % 3 == 0 else Behaviour() for number in range(limit // 2)]
    with FakeProviderServer(*script) as upstream:
        settings = {"work": "calls", "dsn": dsn, "address": upstream.address, "policy": policy, "tenant": tenant_id}
        settings |= {"threads": threads, "calls": calls // processes, "blocks": blocks}
        with run_workers(processes, **settings) as workers:
            for worker in workers:
                worker.start()
            if kill:
                wait_until(lambda: upstream.calls >= limit // 3, "a third is spent")
                for worker in workers[::2]:
                    worker.kill()
            survivors = workers[1::2] if kill else workers
            outcomes = sum((Counter(worker.read_answer()) for worker in survivors), Counter())
        requests = upstream.calls
    lost_reservations = reconcile(dsn, tenant_id, expected=kill)
    ((used, remaining),) = run_query(
        dsn, "select used_count, remaining_count from ergon.provider_quota_states where tenant_id = %s", tenant_id
    )
    lost_calls = sum(row.calls for row in lost_reservations)
    is_exact = requests == limit == used and not lost_calls
    is_bounded = requests <= used <= limit and used - requests <= lost_calls
    if blocks is not None and not kill:
        # The unused quota of a block belongs to its holder until released, so others may be rejected before the limit.
        is_exact = is_bounded and not lost_calls
    return {
        "ok": used + remaining == limit and (is_bounded if kill else is_exact),
        "requests": requests,
        "used": used,
        "lost": len(lost_reservations),
        "lost_calls": lost_calls,
        "ends": dict(outcomes),
    }


def reconcile(dsn, tenant_id, *, expected):
    """Return what is lost once every lease is over."""
    open_query = "select count(*) from ergon.provider_reservations where tenant_id = %s and lost_at is null"
    with PostgresProviderState(dsn) as state_store:
        if expected:
            wait_until(
                lambda: (state_store.reconcile(), run_query(dsn, open_query, tenant_id) == [(0,)])[1],
                "every reservation ended or lapsed",
            )
    return admin.list_lost_reservations(dsn, tenant_id, limit=10_000)


# -- the breaker --------------------------------------------------------------------------------------


def run_breaker(dsn, folder, *, processes, threads, latency, cooldown=2.0, threshold=5):
    """Run a dead upstream that recovers later; another tenant calls all the time."""
    sick_tenant, other_tenant = make_tenant(), make_tenant()
    policy = {
        "timeout": 10.0,
        "retry": {"max_attempts": 1},
        "breaker": {"failure_threshold": threshold, "open_cooldown_seconds": cooldown},
    }
    stop_file = folder / f"stop-{sick_tenant}"
    with ControlledUpstream(Behaviour(status=503, latency=latency)) as upstream, ExitStack() as later:
        settings = {"work": "hammer", "dsn": dsn, "address": upstream.address, "policy": policy, "tenant": sick_tenant}
        settings |= {
            "other": other_tenant,
            "threads": threads,
            "well": 1,
            "until": time.time() + TIMEOUT_SECONDS,
            "stop": str(stop_file),
        }
        workers = later.enter_context(run_workers(processes, **settings))
        late_workers = later.enter_context(run_workers(1, **settings))
        for worker in workers:
            worker.start()
        open_until_query = (
            "select extract(epoch from open_until)::float8 from ergon.provider_breakers where tenant_id = %s"
        )
        opened_at = (
            wait_until(
                lambda: [at for (at,) in run_query(dsn, open_until_query, sick_tenant) if at is not None], "it opens"
            )[0]
            - cooldown
        )
        known_at = time.time()  # from here on the database returns the open breaker
        late_workers[0].start()  # a worker that starts while it is open
        wait_until(lambda: time.time() > opened_at + 2.5 * cooldown, "two cooldowns are over")
        upstream.down = None
        recovered_at = time.time()
        wait_until(
            lambda: run_query(
                dsn, "select 1 from ergon.provider_breakers where tenant_id = %s and state = 'closed'", sick_tenant
            ),
            "it closes again",
        )
        time.sleep(0.3)
        stop_file.touch()
        answers = [worker.read_answer() for worker in [*workers, *late_workers]]
    recovery_seconds = min(at for answer in answers for at in answer["answered"]) - recovered_at
    # By the caller's clock, when the call was let through: on its way to a busy upstream a request may take longer than
    # a cooldown. A call that began before the end of the cooldown and was let through after it is the probe.
    sent = sorted((sent_at, started_at) for answer in answers for started_at, sent_at in answer["sent"])
    before = [sent_at for sent_at, _ in sent if sent_at < opened_at + cooldown]
    probes = [sent_at for sent_at, _ in sent if opened_at + cooldown <= sent_at < recovered_at]
    uninformed_calls = [
        started_at
        for sent_at, started_at in sent
        if started_at > known_at + BREAKER_LAG_SECONDS and sent_at < opened_at + cooldown
    ]
    gaps = [later - sooner for sooner, later in itertools.pairwise(probes)]
    healthy_outcomes = sum((Counter(answer["well"]) for answer in answers), Counter())
    return {
        "ok": len(before) <= threshold + processes * threads
        and not uninformed_calls
        and all(gap >= latency + cooldown * 0.9 for gap in gaps)
        and len(probes) >= 1
        and len(upstream.arrival_times) <= len(sent)
        and recovery_seconds <= cooldown + RECOVERY_SECONDS
        and answers[-1]["first"] == ["circuit_open"]
        and set(healthy_outcomes) == {"success"},
        "requests_before_open": len(before),
        "bar": threshold + processes * threads,
        "begun_after_200_ms": len(uninformed_calls),
        "known_after": round(known_at - opened_at, 3),
        "probes": len(probes),
        "shortest_gap_of_probes": round(min(gaps), 3) if gaps else None,
        "recovered_after": round(recovery_seconds, 3),
        "late_worker": answers[-1]["first"],
        "other_tenant": dict(healthy_outcomes),
    }


# -- keys ---------------------------------------------------------------------------------------------


def run_keys(dsn, *, processes, calls):
    """Use equal keys everywhere; then another payload; then a failure."""
    tenant_id, policy = make_tenant(), {"timeout": 20.0, "retry": {"max_attempts": 1}}
    with FakeProviderServer(Behaviour(latency=0.3), Behaviour(status=422)) as upstream:
        settings = {"work": "calls", "dsn": dsn, "address": upstream.address, "policy": policy, "tenant": tenant_id}
        settings |= {"threads": 16, "calls": calls // processes, "key": "one", "payload": {"amount": 12}}
        with run_workers(processes, **settings) as workers:
            for worker in workers:
                worker.start()
            outcomes = sum((Counter(worker.read_answer()) for worker in workers), Counter())
        call_count = upstream.keys["one"]
        with PostgresProviderState(dsn) as state_store:
            payments = FakeProvider(upstream, state_store=state_store, policy=ProviderPolicy.model_validate(policy))
            conflict_code = failed_status = None
            try:
                payments.call("charge", {"amount": 13}, key="one", tenant=tenant_id)
            except ProviderBadRequestError as error:
                conflict_code = error.code
            try:
                payments.call("charge", {"amount": 1}, key="two", tenant=tenant_id)
            except ProviderBadRequestError as error:
                failed_status = error.http_status
            second_result = payments.call("charge", {"amount": 1}, key="two", tenant=tenant_id)
    return {
        "ok": call_count == 1
        and outcomes == {"success": calls // processes * processes}
        and (conflict_code, failed_status) == ("idempotency_conflict", 422)
        and second_result["received"] == {"amount": 1},
        "upstream_calls": call_count,
        "ends": dict(outcomes),
        "conflict": conflict_code,
        "failure_then_result": failed_status == 422 and "received" in second_result,
    }


def run_kills(dsn, *, count, transactions, seed):
    """Kill a consumer at random points around its calls."""
    # The budget is long, so that no call is given up on a busy machine; a killed owner's key is free 5 s after it.
    name, policy = f"orders-{make_tenant()}", {"timeout": 5.0, "retry": {"max_attempts": 1}}
    with FakeProviderServer(then=Behaviour(latency=0.01)) as upstream:
        producer_queue = PostgresQueue(name, dsn=dsn)
        producer_queue.dispatch([Transaction({"n": number}, id=f"order-{number}") for number in range(transactions)])
        producer_queue.close()
        settings = {"work": "consume", "dsn": dsn, "address": upstream.address, "policy": policy, "queue": name}
        settings |= {"lease": 1.0, "kills": count, "seed": seed, "longest": 0.25, "patience": TIMEOUT_SECONDS / 2}
        with run_workers(1, **settings) as (worker,):
            answer = worker.start().read_answer()
        requests, key_counts = upstream.requests, Counter(upstream.keys)
    by_order = {}
    for request in requests:
        by_order.setdefault(request.payload["n"], set()).add(request.idempotency_key)
    changed_orders = [order for order, order_keys in by_order.items() if len(order_keys) != 1]
    dead_rows = run_query(
        dsn, "select count(*) from ergon.dead_letter d join ergon.queue q on q.id = d.queue where q.name = %s", name
    )
    return {
        "ok": answer == {"kills": count, "last": 0}
        and len(by_order) == len(key_counts) == transactions
        and not changed_orders
        and dead_rows == [(0,)],
        "kills": answer and answer["kills"],
        "transactions": transactions,
        "requests": len(requests),
        "keys": len(key_counts),
        "seen_again": sum(times - 1 for times in key_counts.values()),
        "second_keys": len(changed_orders),
        "dead": dead_rows[0][0],
    }


def wait_until(condition, description):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, description
        time.sleep(0.01)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", choices=["quota", "breaker", "keys", "kills"])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ergon-fleet-"))
    folder.chmod(0o755)
    server = PrivatePostgres(folder / "server", fsync=False, settings={"max_connections": 300})
    results, started_at = {"seed": options.seed}, time.monotonic()
    try:
        server.start()
        dsn = server.create_database("fleet")
        upgrade(dsn)
        quota_options = {"limit": 1000, "processes": 8, "threads": 16, "calls": 20_000}
        runs = {
            "quota": lambda: run_quota(dsn, **quota_options),
            "quota killed": lambda: run_quota(dsn, **quota_options, kill=True),
            "quota in blocks": lambda: run_quota(dsn, **quota_options, blocks={"size": 20, "lease": 5.0}),
            "quota in blocks killed": lambda: run_quota(
                dsn, **quota_options, kill=True, blocks={"size": 20, "lease": 5.0}
            ),
            **{
                f"breaker {threads} {name}": lambda threads=threads, latency=latency: run_breaker(
                    dsn, folder, processes=8, threads=threads, latency=latency
                )
                for threads in (1, 16)
                for name, latency in (("fast", 0.0), ("slow", 0.4))
            },
            "keys": lambda: run_keys(dsn, processes=8, calls=200),
            "kills": lambda: run_kills(dsn, count=100, transactions=150, seed=options.seed),
        }
        for name, run in runs.items():
            if options.only is None or name.startswith(options.only):
                results[name] = run()
                print(f"{time.monotonic() - started_at:6.1f} s  {name}: {results[name]}", file=sys.stderr, flush=True)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    has_passed = all(result["ok"] for result in results.values() if isinstance(result, dict))
    print(json.dumps({"ok": has_passed, "seconds": round(time.monotonic() - started_at, 1), **results}))
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
