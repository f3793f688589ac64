"""Chaos for brokers: real workers on a real broker, killed, stopped, crashed and cut while they work.

The broker is killed and cut off; the database that holds effects and the inbox's marks is left alone. Handlers
take 0 to 200 ms and write their start and end, synced. At the end journals, effects, dead letters and the list
of faults are held against each other: nothing confirmed is lost, no effect is doubled, and whenever a
transaction was run more than once, or by two at once, something had been done that explains it.

One line of JSON per broker. The exit code is 1 if anything is wrong or too little was done to the system.
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
from ergon_framework.connectors import schemes
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.schema.migrate import upgrade
from tests.chaos.broker_faults import BrokerTorment
from tests.chaos.broker_mix import BrokerSender
from tests.chaos.broker_servers import BROKERS, Victim
from tests.chaos.broker_verdict import Evidence, buried, judge
from tests.chaos.fleet import Fleet
from tests.chaos.mix import drawn
from tests.chaos.verdict import SHOWN, Verdict
from tests.chaos.worker import QUEUE
from tests.servers.postgres import PrivatePostgres

SCRIPT = Path(__file__).with_name("broker_worker.py")
#: What a run of so many transactions has to suffer; shorter runs in proportion.
WHOLE = 20_000
FAULTS = {"kill": 12, "stop": 205, "crash": 4, "cut": 7}
BAR = {"kill": 10, "stop": 200, "crash": 3, "cut": 5}
MAX_DELIVERIES = 5
#: Of the minutes, the part in which new work comes in.
SENDING = 0.9
EFFECTS = """
create schema chaos;
create table chaos.effect (id text not null, worker text not null, at timestamptz not null default clock_timestamp());
"""


def main() -> int:
    options = _options()
    results = [_one(name, options) for name in options.broker or [name for name in BROKERS if name != "postgres"]]
    for told in results:
        print(json.dumps(told))
    return 0 if all(told["ok"] for told in results) else 1


def _one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix=f"ergon-chaos-{name}-"))
    # initdb runs as another user, who has to get there.
    folder.chmod(0o755)
    books = PrivatePostgres(folder / "books", settings={"max_connections": 300, "log_min_messages": "fatal"})
    victim = BROKERS[name].victim(folder / "broker")
    told: dict[str, Any] = {}
    say(f"== {name}")
    try:
        books.start()
        victim.start()
        told = Trial(name, victim, books, folder=folder, options=options).run()
    finally:
        victim.mend()
        victim.kill()
        books.kill()
        if told.get("ok") and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"journals and servers are kept in {folder}")
    return told


class Trial:
    """One broker through all of it."""

    def __init__(
        self, name: str, victim: Victim, books: PrivatePostgres, *, folder: Path, options: argparse.Namespace
    ) -> None:
        broker = BROKERS[name]
        self.name, self.broker, self.options = name, broker, options
        self.began, dice = time.monotonic(), random.Random(options.seed)
        self.dsn = books.create_database("books")
        upgrade(self.dsn)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(EFFECTS)
        self.url = victim.url
        broker.prepare(self.url)
        self.given = dict(broker.options(options.lease))
        journals = folder / "journals"
        journals.mkdir()
        words = {"url": self.url, "options": json.dumps(self.given)}
        words |= {"concurrency": str(options.concurrency), "max-deliveries": str(MAX_DELIVERIES)}
        flavours = ["async" if number % 2 == 0 else "threads" for number in range(options.workers)]
        self.fleet = Fleet(journals, flavours, dsn=self.dsn, options=words, script=SCRIPT)
        self.sender = BrokerSender(self.url, self.given, drawn(options.transactions, dice))
        self.torment = BrokerTorment(victim, self.fleet, lease=options.lease, dice=dice)

    def run(self) -> dict[str, Any]:
        share = self.options.transactions / WHOLE
        wanted = {kind: max(1, round(count * share)) for kind, count in FAULTS.items()}
        seconds = self.options.minutes * 60
        watch = as_sync(schemes.connect(QUEUE, self.url, self.given))
        watch.open()
        self.fleet.start()
        try:
            sending = threading.Thread(target=self.sender.run, args=(seconds * SENDING,), daemon=True)
            tormenting = threading.Thread(target=self.torment.run, args=(seconds, wanted), daemon=True)
            sending.start()
            tormenting.start()
            while sending.is_alive() or tormenting.is_alive():
                self._progress()
                time.sleep(5.0)
            ended = self._emptied(watch)
            self.fleet.end()
        finally:
            self.fleet.kill()
        say("judging")
        verdict = judge(self._evidence(watch))
        self._bars(verdict, share, ended=ended, left=self._left(watch))
        watch.close()
        return self._told(verdict)

    def _bars(self, verdict: Verdict, share: float, *, ended: bool, left: str | None) -> None:
        for kind, bar in BAR.items():
            done = self.torment.counts[kind]
            if done < min(bar, max(1, round(bar * share))):
                verdict.wrong("too little was done", f"{kind}: {done}, not {bar}")
        for error in self.torment.errors:
            verdict.wrong("a fault could not be made", error)
        for error in self.sender.errors:
            verdict.wrong("the sender gave up", error)
        if not ended:
            verdict.wrong("did not come to rest", f"within {self.options.patience} s after the last fault")
        if left is not None:
            verdict.wrong("left in the broker", left)

    def _emptied(self, watch: Connector) -> bool:
        """Wait until every order has ended; False if they never do."""
        until = time.monotonic() + self.options.patience
        while time.monotonic() < until:
            # The numbers are cheap; which they are is asked when they are right.
            if self._progress() + self._dead(watch) >= len(self.sender.orders) and self._left(watch) is None:
                missing = self._missing(watch)
                if not missing:
                    return True
                say(f"{len(missing)} have not ended, {min(missing)!r} among them")
            time.sleep(1.0)
        return False

    def _missing(self, watch: Connector) -> set[str]:
        """Orders with neither an effect nor a dead letter; some brokers cannot tell us what others have put off."""
        orders = {order.id for order in self.sender.orders}
        try:
            dead = {buried(name, body, orders) for name, _, _, body in _letters(watch)}
        except ErgonError as error:
            say(f"no answer: {error}")
            return orders
        return orders - dead - set(self._effects())

    def _dead(self, watch: Connector) -> int:
        """How many dead letters there are of those that had to die; the others are found when it is judged."""
        try:
            depth = watch.depth()
            return depth.dead if depth is not None else len(_letters(watch))
        except ErgonError as error:
            say(f"no answer: {error}")
            return 0

    def _left(self, watch: Connector) -> str | None:
        """What is still in the broker; None if nothing is, or if it cannot say."""
        try:
            depth = watch.depth()
        except ErgonError as error:
            return f"no answer: {error}"
        if depth is None or not depth.ready + depth.delayed + depth.in_flight:
            return None
        return str(depth)

    def _progress(self) -> int:
        """Say how it stands; how many different effects there are."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            row = connection.execute("select count(distinct id) from chaos.effect").fetchone()
        done = row[0] if row else 0
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.torment.counts.items()))
        say(
            f"{time.monotonic() - self.began:5.0f} s: {len(self.sender.confirmed)} confirmed, {done} done, "
            f"{len(self.fleet.lives)} processes; {faults}"
        )
        return done

    def _effects(self) -> list[str]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return [row[0] for row in connection.execute("select id from chaos.effect")]

    def _evidence(self, watch: Connector) -> Evidence:
        return Evidence(
            self.fleet,
            self.sender.orders,
            self.torment.faults,
            confirmed=self.sender.confirmed,
            repeated=self.sender.repeated,
            effects=self._effects(),
            dead=_letters(watch),
            max_deliveries=MAX_DELIVERIES,
            exact=self.broker.exact,
        )

    def _told(self, verdict: Verdict) -> dict[str, Any]:
        for words in verdict.overlaps:
            say(f"overlap {words}")
        for what, all_words in verdict.findings.items():
            for words in all_words[:SHOWN]:
                say(f"WRONG {what}: {words}")
        return {
            "broker": self.name,
            "ok": not verdict.findings,
            "findings": {what: len(words) for what, words in sorted(verdict.findings.items())},
            "transactions": len(self.sender.orders),
            **verdict.counts,
            "overlap causes": dict(verdict.causes),
            "faults": dict(sorted(self.torment.counts.items())),
            "outages of the sender": self.sender.outages,
            "seed": self.options.seed,
            "seconds": round(time.monotonic() - self.began, 1),
        }


def _letters(watch: Connector) -> list[tuple[str, str, int, Any]]:
    found: list[tuple[str, str, int, Any]] = []
    after: str | None = None
    while page := watch.list_dead(DeadLetterQuery(), after=after, limit=500):
        found += [(letter.id, letter.reason, letter.deliveries, letter.payload) for letter in page]
        after = page[-1].place
    return found


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", action="append", choices=sorted(BROKERS), help="which; all but postgres by default")
    parser.add_argument("--transactions", type=int, default=WHOLE)
    parser.add_argument("--minutes", type=float, default=5.0, help="in which faults are made and work comes in")
    parser.add_argument("--workers", type=int, default=6, help="processes, every other one on threads")
    parser.add_argument("--concurrency", type=int, default=100, help="of each worker")
    parser.add_argument("--lease", type=float, default=2.5, help="seconds, where the broker has leases")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds until all must have ended")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep journals and servers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
