"""Chaos: real workers on a real PostgreSQL that are killed, stopped past their lease and disconnected while they work.

Handlers take 0 to 200 ms and write their start and end, synced, outside the database. Triggers in the
server keep a ledger of every claim. At the end journals, ledger and the list of faults are compared: every id has
ended once, nothing is lost, two workers had one transaction at once only after the claim had been taken from the
first, no effect is doubled, and every stale settlement was rejected.

The last line is JSON. The exit code is 1 if a check failed or too few faults were injected.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.database.migrate import upgrade
from tests.chaos import ledger
from tests.chaos.faults import FaultInjector
from tests.chaos.fleet import Fleet
from tests.chaos.mix import Sender, draw_orders
from tests.chaos.verdict import MAX_SHOWN_FINDINGS, Verdict, evaluate
from tests.servers.postgres import PrivatePostgres

#: Transactions of a full run, with the faults below; shorter runs have proportionally fewer.
FULL_RUN_TRANSACTIONS = 50_000
FAULT_COUNTS = {"kill": 32, "stop": 205, "crash": 6, "cut": 12}
MIN_FAULTS = {"kill": 30, "stop": 200, "crash": 5, "cut": 10}
MAX_DELIVERIES = 5
#: The share of the run's minutes in which new messages are sent.
SENDING_SHARE = 0.9


def main() -> int:
    options = _parse_options()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-"))
    server = PrivatePostgres(folder / "server", settings={"max_connections": 300, "log_min_messages": "fatal"})
    # initdb runs as another user, which needs access.
    folder.chmod(0o755)
    summary: dict[str, Any] = {}
    try:
        server.start()
        summary = run(server, folder, options)
    finally:
        server.heal_network()
        server.kill()
        if summary.get("ok") and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            report(f"journals and database are kept in {folder}")
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def run(server: PrivatePostgres, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    started_at, rng = time.monotonic(), random.Random(options.seed)
    dsn = server.create_database("chaos")
    # The sender and the observer bypass the network, so that a cut does not affect them.
    sockets = f"host={server.folder / 'sockets'} port={server.port} user=postgres dbname=chaos"
    upgrade(dsn)
    ledger.create_ledger(dsn)
    journals = folder / "journals"
    journals.mkdir()
    settings = {"lease": options.lease, "concurrency": options.concurrency, "max-deliveries": MAX_DELIVERIES}
    flavours = ["async" if number % 2 == 0 else "threads" for number in range(options.workers)]
    fleet = Fleet(journals, flavours, dsn=dsn, options={name: str(value) for name, value in settings.items()})
    sender = Sender(sockets, draw_orders(options.transactions, rng))
    injector = FaultInjector(server, fleet, lease=options.lease, sockets=sockets, rng=rng)
    share = options.transactions / FULL_RUN_TRANSACTIONS
    fault_counts = {kind: max(1, round(count * share)) for kind, count in FAULT_COUNTS.items()}
    seconds = options.minutes * 60
    fleet.start()
    try:
        send_thread = threading.Thread(target=sender.run, args=(seconds * SENDING_SHARE,), daemon=True)
        fault_thread = threading.Thread(target=injector.run, args=(seconds, fault_counts), daemon=True)
        send_thread.start()
        fault_thread.start()
        while send_thread.is_alive() or fault_thread.is_alive():
            _print_progress(started_at, sockets, sender, injector, fleet)
            time.sleep(5.0)
        is_empty = _wait_until_empty(started_at, sockets, sender, injector, fleet, timeout=options.patience)
        fleet.end()
    finally:
        fleet.kill()
    report("judging")
    verdict = evaluate(
        ledger.read_ledger(sockets),
        fleet,
        sender.orders,
        confirmed=sender.confirmed,
        faults=injector.faults,
        lease=options.lease,
        max_deliveries=MAX_DELIVERIES,
    )
    for kind, minimum in MIN_FAULTS.items():
        if injector.counts[kind] < min(minimum, max(1, round(minimum * share))):
            verdict.add_finding("too little was done", f"{kind}: {injector.counts[kind]}, not {minimum}")
    for error in injector.errors:
        verdict.add_finding("a fault could not be made", error)
    if not is_empty:
        verdict.add_finding("did not come to rest", f"within {options.patience} s after the last fault")
    if sender.partial_batches:
        verdict.add_finding("a dispatch arrived in part", str(sender.partial_batches))
    if not verdict.counts["stale"]:
        verdict.add_finding("too little was done", "no stale settlement was ever tried")
    return _summarize(verdict, injector, sender, options, seconds=time.monotonic() - started_at)


def _wait_until_empty(started_at: float, dsn: str, *context: Any, timeout: float) -> bool:
    """Wait until the queue is empty; False on timeout."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if _print_progress(started_at, dsn, *context) == 0:
            return True
        time.sleep(1.0)
    return False


def _print_progress(started_at: float, dsn: str, sender: Sender, injector: FaultInjector, fleet: Fleet) -> int | None:
    """Print the progress; return how many messages are left, None if the server is unavailable."""
    try:
        with psycopg.connect(dsn, autocommit=True, connect_timeout=2) as connection:
            left, held, effects = ledger.count_messages(connection)
    except psycopg.Error as error:
        report(f"{time.monotonic() - started_at:5.0f} s: {type(error).__name__}")
        return None
    sent = len(sender.confirmed) + len(sender.unconfirmed)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(injector.counts.items()))
    process_count = len(fleet.records)
    report(
        f"{time.monotonic() - started_at:5.0f} s: {sent} sent, {effects} done, {left} left, {held} held, "
        f"{process_count} processes; {faults}"
    )
    return left


def _summarize(
    verdict: Verdict, injector: FaultInjector, sender: Sender, options: argparse.Namespace, *, seconds: float
) -> dict[str, Any]:
    for details in verdict.overlaps:
        report(f"overlap {details}")
    for kind, all_details in verdict.findings.items():
        for details in all_details[:MAX_SHOWN_FINDINGS]:
            report(f"WRONG {kind}: {details}")
    return {
        "ok": not verdict.findings,
        "findings": {kind: len(details) for kind, details in sorted(verdict.findings.items())},
        "transactions": len(sender.orders),
        **verdict.counts,
        "overlap causes": dict(verdict.causes),
        "faults": dict(sorted(injector.counts.items())),
        "outages of the sender": sender.outages,
        "arrived unconfirmed": len(sender.unconfirmed),
        "seed": options.seed,
        "seconds": round(seconds, 1),
    }


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=FULL_RUN_TRANSACTIONS)
    parser.add_argument("--minutes", type=float, default=6.0, help="in which faults are made and work comes in")
    parser.add_argument("--workers", type=int, default=6, help="processes, every other one on threads")
    parser.add_argument("--concurrency", type=int, default=100, help="of each worker")
    parser.add_argument("--lease", type=float, default=2.5, help="seconds")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds until all must have ended")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep journals and database")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
