"""Chaos: workers on a primary and a synchronous standby, while the primary is killed and the standby promoted.

After each failover the killed server is rebuilt as the new standby. The workers, the sender and the handlers use one
address with both servers. The journals, the ledger and the verdict are those of ``postgres.py``: no confirmed message
is lost, and no effect is doubled. The time without service of a failover is the time from the kill to the first effect
after it; the promotion begins at the kill, because there is no cluster manager here that must detect it.

The last line is JSON. The exit code is 1 if a check failed or a target is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.database.migrate import upgrade
from tests.chaos import ledger
from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet
from tests.chaos.mix import Order, Sender, draw_orders
from tests.chaos.verdict import MAX_SHOWN_FINDINGS, Verdict, evaluate
from tests.servers.failover import PostgresCluster

MAX_DELIVERIES = 8
#: Seconds within which the first effect after a kill must be committed.
MAX_SERVICE_GAP_SECONDS = 30.0
#: Effects that the workers make before the first failover, and between a new standby and the next failover.
_EFFECTS_BETWEEN = 200
#: Seconds of work without a standby.
_SINGLE_SECONDS = 2.0
_SETTINGS = {"max_connections": 300, "log_min_messages": "fatal"}


@dataclass
class Failover:
    """One failover: when the primary was killed and when the standby was the primary, in seconds since the epoch."""

    killed_at: float
    promoted_at: float


def main() -> int:
    options = _parse_options()
    folder = Path(tempfile.mkdtemp(prefix="ergon-failover-"))
    # initdb runs as another user, which needs access.
    folder.chmod(0o755)
    cluster = PostgresCluster(folder, settings=_SETTINGS)
    summary: dict[str, Any] = {}
    try:
        cluster.start()
        summary = run(cluster, folder, options)
    finally:
        cluster.kill()
        if summary.get("ok") and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            report(f"journals and databases are kept in {folder}")
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def run(cluster: PostgresCluster, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    started_at = time.monotonic()
    cluster.primary.create_database("chaos")
    dsn = cluster.dsn("chaos")
    upgrade(dsn)
    ledger.create_ledger(dsn)
    journals = folder / "journals"
    journals.mkdir()
    settings = {"lease": options.lease, "concurrency": options.concurrency, "max-deliveries": MAX_DELIVERIES}
    flavours = ["async" if number % 2 == 0 else "threads" for number in range(options.workers)]
    fleet = Fleet(journals, flavours, dsn=dsn, options={name: str(value) for name, value in settings.items()})
    sender = Sender(dsn, _draw_harmless_orders(options.transactions, random.Random(options.seed)))
    failovers: list[Failover] = []
    fleet.start()
    try:
        send_thread = threading.Thread(target=sender.run, args=(options.minutes * 60,), daemon=True)
        send_thread.start()
        for _ in range(options.failovers):
            _wait_until_working(dsn, timeout=options.patience)
            failovers.append(_fail_over(cluster))
            report(
                f"{time.monotonic() - started_at:5.0f} s: failover {len(failovers)}, {len(sender.confirmed)} confirmed"
            )
        send_thread.join()
        is_empty = _wait_until_empty(dsn, started_at, timeout=options.patience)
        fleet.end()
    finally:
        fleet.kill()
    report("judging")
    verdict = evaluate(
        ledger.read_ledger(dsn),
        fleet,
        sender.orders,
        confirmed=sender.confirmed,
        faults=[Fault("failover", None, each.killed_at, each.promoted_at) for each in failovers],
        lease=options.lease,
        max_deliveries=MAX_DELIVERIES,
    )
    if not is_empty:
        verdict.add_finding("did not come to rest", f"within {options.patience} s after the last failover")
    if sender.partial_batches:
        verdict.add_finding("a dispatch arrived in part", str(sender.partial_batches))
    gaps = _measure_gaps(dsn, failovers)
    verdict.counts["server"] = _read_version(dsn)
    for gap in gaps:
        if gap is None or gap > MAX_SERVICE_GAP_SECONDS:
            verdict.add_finding("too long without service", f"{gap} s")
    return _summarize(verdict, sender, options, failovers=failovers, gaps=gaps, seconds=time.monotonic() - started_at)


def _draw_harmless_orders(count: int, rng: random.Random) -> list[Order]:
    """Draw orders without poisoned ones: the restarts of their workers would be measured as time without service."""
    orders = draw_orders(count, rng)
    for order in orders:
        order.kind = "plain" if order.kind == "poison" else order.kind
    return orders


def _wait_until_working(dsn: str, *, timeout: float) -> None:
    """Wait until the workers have made some effects more than now: starting the processes takes a while."""
    deadline, first = time.monotonic() + timeout, None
    while time.monotonic() < deadline:
        with psycopg.connect(dsn, autocommit=True) as connection:
            _, _, effects = ledger.count_messages(connection)
        first = effects if first is None else first
        if effects >= first + _EFFECTS_BETWEEN:
            return
        time.sleep(0.2)
    raise TimeoutError("the workers make no effects; their errors are in the folder of the journals")


def _fail_over(cluster: PostgresCluster) -> Failover:
    """Kill the primary, promote the standby, and rebuild the killed server as a standby."""
    killed_at = cluster.fail_over()
    failover = Failover(killed_at, time.time())
    time.sleep(_SINGLE_SECONDS)
    cluster.rebuild_standby()
    return failover


def _read_version(dsn: str) -> str:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.info.parameter_status("server_version") or ""


def _measure_gaps(dsn: str, failovers: list[Failover]) -> list[float | None]:
    """Return the seconds from each kill to the first effect that the promoted server has; None if there was none."""
    statement = "select min(extract(epoch from at))::float8 from chaos.effect where at > to_timestamp(%s)"
    gaps: list[float | None] = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for failover in failovers:
            row = connection.execute(statement, [failover.killed_at]).fetchone()
            gaps.append(None if row is None or row[0] is None else round(row[0] - failover.killed_at, 3))
    return gaps


def _wait_until_empty(dsn: str, started_at: float, *, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with psycopg.connect(dsn, autocommit=True) as connection:
            left, held, effects = ledger.count_messages(connection)
        report(f"{time.monotonic() - started_at:5.0f} s: {effects} done, {left} left, {held} held")
        if left == 0:
            return True
        time.sleep(2.0)
    return False


def _summarize(
    verdict: Verdict,
    sender: Sender,
    options: argparse.Namespace,
    *,
    failovers: list[Failover],
    gaps: list[float | None],
    seconds: float,
) -> dict[str, Any]:
    for kind, all_details in verdict.findings.items():
        for details in all_details[:MAX_SHOWN_FINDINGS]:
            report(f"WRONG {kind}: {details}")
    measured = [gap for gap in gaps if gap is not None]
    return {
        "ok": not verdict.findings,
        "findings": {kind: len(details) for kind, details in sorted(verdict.findings.items())},
        "transactions": len(sender.orders),
        "failovers": len(gaps),
        "confirmed lost": len(verdict.findings.get("confirmed and lost", ())),
        "without service p50": round(statistics.median(measured), 3) if measured else None,
        "without service worst": max(measured, default=None),
        "without service": gaps,
        "until promoted": [round(each.promoted_at - each.killed_at, 3) for each in failovers],
        **verdict.counts,
        "overlap causes": dict(verdict.causes),
        "outages of the sender": sender.outages,
        "arrived unconfirmed": len(sender.unconfirmed),
        "seed": options.seed,
        "seconds": round(seconds, 1),
    }


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=20_000)
    parser.add_argument("--failovers", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=3.0, help="over which the transactions are sent")
    parser.add_argument("--workers", type=int, default=4, help="processes, every other one on threads")
    parser.add_argument("--concurrency", type=int, default=50, help="of each worker")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds until all must have ended")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep journals and databases")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
