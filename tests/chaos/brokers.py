"""Chaos for brokers: real workers on a real broker that are killed, stopped and disconnected while they work.

The broker is killed and disconnected; the database with the effects and the inbox's marks is not. Handlers
take 0 to 200 ms and write their start and end, synced. At the end journals, effects, dead letters and the list
of faults are compared: no confirmed message is lost, no effect is doubled, and every transaction that was run
more than once, or by two workers at once, has a fault that explains it.

One line of JSON per broker. The exit code is 1 if a check failed or too few faults were injected.
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

from ergon_framework import ErgonError
from ergon_framework.connectors import registry
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.database.migrate import upgrade
from tests.chaos.broker_faults import BrokerFaultInjector
from tests.chaos.broker_mix import BrokerSender
from tests.chaos.broker_servers import BROKER_KINDS, FaultableBroker
from tests.chaos.broker_verdict import Evidence, evaluate, find_order_id
from tests.chaos.fleet import Fleet
from tests.chaos.mix import draw_orders
from tests.chaos.verdict import MAX_SHOWN_FINDINGS, Verdict
from tests.chaos.worker import QUEUE
from tests.servers.postgres import PrivatePostgres

WORKER_SCRIPT = Path(__file__).with_name("broker_worker.py")
#: Transactions of a full run, with the faults below; shorter runs have proportionally fewer.
FULL_RUN_TRANSACTIONS = 20_000
FAULT_COUNTS = {"kill": 12, "stop": 205, "crash": 4, "cut": 7}
MIN_FAULTS = {"kill": 10, "stop": 200, "crash": 3, "cut": 5}
MAX_DELIVERIES = 5
#: The share of the run's minutes in which new messages are sent.
SENDING_SHARE = 0.9
EFFECTS_SCHEMA = """
create schema chaos;
create table chaos.effect (id text not null, worker text not null, at timestamptz not null default clock_timestamp());
"""


def main() -> int:
    options = _parse_options()
    summaries = [
        _run_broker(name, options) for name in options.broker or [name for name in BROKER_KINDS if name != "postgres"]
    ]
    for summary in summaries:
        print(json.dumps(summary))
    return 0 if all(summary["ok"] for summary in summaries) else 1


def _run_broker(name: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"ergon-chaos-{name}-"))
    # initdb runs as another user, which needs access.
    folder.chmod(0o755)
    database_server = PrivatePostgres(
        folder / "effects", settings={"max_connections": 300, "log_min_messages": "fatal"}
    )
    victim = BROKER_KINDS[name].create(folder / "broker")
    summary: dict[str, Any] = {}
    report(f"== {name}")
    try:
        database_server.start()
        victim.start()
        summary = BrokerRun(name, victim, database_server, folder=folder, options=options).run()
    finally:
        victim.heal_network()
        victim.kill()
        database_server.kill()
        if summary.get("ok") and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            report(f"journals and servers are kept in {folder}")
    return summary


class BrokerRun:
    """One run with one broker."""

    def __init__(
        self,
        name: str,
        victim: FaultableBroker,
        database_server: PrivatePostgres,
        *,
        folder: Path,
        options: argparse.Namespace,
    ) -> None:
        broker = BROKER_KINDS[name]
        self.name, self.broker, self.options = name, broker, options
        self.started_at, rng = time.monotonic(), random.Random(options.seed)
        self.dsn = database_server.create_database("effects")
        upgrade(self.dsn)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(EFFECTS_SCHEMA)
        self.url = victim.url
        broker.prepare(self.url)
        self.queue_options = dict(broker.make_options(options.lease))
        journals = folder / "journals"
        journals.mkdir()
        worker_options = {"url": self.url, "options": json.dumps(self.queue_options)}
        worker_options |= {"concurrency": str(options.concurrency), "max-deliveries": str(MAX_DELIVERIES)}
        flavours = ["async" if number % 2 == 0 else "threads" for number in range(options.workers)]
        self.fleet = Fleet(journals, flavours, dsn=self.dsn, options=worker_options, script=WORKER_SCRIPT)
        self.sender = BrokerSender(self.url, self.queue_options, draw_orders(options.transactions, rng))
        self.injector = BrokerFaultInjector(victim, self.fleet, lease=options.lease, rng=rng)

    def run(self) -> dict[str, Any]:
        share = self.options.transactions / FULL_RUN_TRANSACTIONS
        fault_counts = {kind: max(1, round(count * share)) for kind, count in FAULT_COUNTS.items()}
        if self.options.server_kills is not None:
            fault_counts["crash"] = self.options.server_kills
        seconds = self.options.minutes * 60
        observer = as_sync(registry.create_connector(QUEUE, self.url, self.queue_options))
        observer.open()
        self.fleet.start()
        try:
            send_thread = threading.Thread(target=self.sender.run, args=(seconds * SENDING_SHARE,), daemon=True)
            fault_thread = threading.Thread(target=self.injector.run, args=(seconds, fault_counts), daemon=True)
            send_thread.start()
            fault_thread.start()
            while send_thread.is_alive() or fault_thread.is_alive():
                self._print_progress()
                time.sleep(5.0)
            is_empty = self._wait_until_empty(observer)
            self.fleet.end()
        finally:
            self.fleet.kill()
        report("judging")
        verdict = evaluate(self._collect_evidence(observer))
        self._check_minimums(verdict, share, is_empty=is_empty, remaining=self._describe_remaining(observer))
        observer.close()
        return self._summarize(verdict)

    def _check_minimums(self, verdict: Verdict, share: float, *, is_empty: bool, remaining: str | None) -> None:
        for kind, minimum in MIN_FAULTS.items():
            count = self.injector.counts[kind]
            if count < min(minimum, max(1, round(minimum * share))):
                verdict.add_finding("too little was done", f"{kind}: {count}, not {minimum}")
        for error in self.injector.errors:
            verdict.add_finding("a fault could not be made", error)
        for error in self.sender.errors:
            verdict.add_finding("the sender gave up", error)
        if not is_empty:
            verdict.add_finding("did not come to rest", f"within {self.options.patience} s after the last fault")
        if remaining is not None:
            verdict.add_finding("left in the broker", remaining)

    def _wait_until_empty(self, observer: Connector) -> bool:
        """Wait until every order has ended; False if they never do."""
        deadline = time.monotonic() + self.options.patience
        while time.monotonic() < deadline:
            # Counting is cheap; the ids are compared only once the counts match.
            if (
                self._print_progress() + self._count_expected_dead_letters(observer) >= len(self.sender.orders)
                and self._describe_remaining(observer) is None
            ):
                missing = self._find_missing(observer)
                if not missing:
                    return True
                report(f"{len(missing)} have not ended, {min(missing)!r} among them")
            time.sleep(1.0)
        return False

    def _find_missing(self, observer: Connector) -> set[str]:
        """Return orders with neither an effect nor a dead letter; some brokers cannot list deferred messages."""
        orders = {order.id for order in self.sender.orders}
        try:
            dead = {find_order_id(name, body, orders) for name, _, _, body in _list_dead_letters(observer)}
        except ErgonError as error:
            report(f"no answer: {error}")
            return orders
        return orders - dead - set(self._read_effects())

    def _count_expected_dead_letters(self, observer: Connector) -> int:
        """Count the expected dead letters; the verdict checks the others."""
        try:
            depth = observer.depth()
            return depth.dead if depth is not None else len(_list_dead_letters(observer))
        except ErgonError as error:
            report(f"no answer: {error}")
            return 0

    def _describe_remaining(self, observer: Connector) -> str | None:
        """Describe what is still in the broker; None if it is empty or cannot be queried."""
        try:
            depth = observer.depth()
        except ErgonError as error:
            return f"no answer: {error}"
        if depth is None or not depth.ready + depth.delayed + depth.in_flight:
            return None
        return str(depth)

    def _print_progress(self) -> int:
        """Print the progress; return the number of distinct effects."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            row = connection.execute("select count(distinct id) from chaos.effect").fetchone()
        effect_count = row[0] if row else 0
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.injector.counts.items()))
        report(
            f"{time.monotonic() - self.started_at:5.0f} s: {len(self.sender.confirmed)} confirmed, {effect_count} "
            f"done, {len(self.fleet.records)} processes; {faults}"
        )
        return effect_count

    def _read_effects(self) -> list[str]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return [row[0] for row in connection.execute("select id from chaos.effect")]

    def _collect_evidence(self, observer: Connector) -> Evidence:
        return Evidence(
            self.fleet,
            self.sender.orders,
            self.injector.faults,
            confirmed=self.sender.confirmed,
            resent=self.sender.resent,
            effects=self._read_effects(),
            dead=_list_dead_letters(observer),
            max_deliveries=MAX_DELIVERIES,
            confirms_settlements=self.broker.confirms_settlements,
        )

    def _summarize(self, verdict: Verdict) -> dict[str, Any]:
        for details in verdict.overlaps:
            report(f"overlap {details}")
        for kind, all_details in verdict.findings.items():
            for details in all_details[:MAX_SHOWN_FINDINGS]:
                report(f"WRONG {kind}: {details}")
        return {
            "broker": self.name,
            "ok": not verdict.findings,
            "findings": {kind: len(details) for kind, details in sorted(verdict.findings.items())},
            "transactions": len(self.sender.orders),
            **verdict.counts,
            "overlap causes": dict(verdict.causes),
            "faults": dict(sorted(self.injector.counts.items())),
            "outages of the sender": self.sender.outages,
            "seed": self.options.seed,
            "seconds": round(time.monotonic() - self.started_at, 1),
        }


def _list_dead_letters(observer: Connector) -> list[tuple[str, str, int, Any]]:
    letters: list[tuple[str, str, int, Any]] = []
    after: str | None = None
    while page := observer.list_dead(DeadLetterQuery(), after=after, limit=500):
        letters += [(letter.id, letter.reason, letter.deliveries, letter.payload) for letter in page]
        after = page[-1].handle
    return letters


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--broker", action="append", choices=sorted(BROKER_KINDS), help="which; all but postgres by default"
    )
    parser.add_argument("--transactions", type=int, default=FULL_RUN_TRANSACTIONS)
    parser.add_argument("--minutes", type=float, default=5.0, help="in which faults are made and work comes in")
    parser.add_argument("--workers", type=int, default=6, help="processes, every other one on threads")
    parser.add_argument("--concurrency", type=int, default=100, help="of each worker")
    parser.add_argument("--lease", type=float, default=2.5, help="seconds, where the broker has leases")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds until all must have ended")
    parser.add_argument("--server-kills", type=int, help="kills of the broker; by default 4 in a full run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep journals and servers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
