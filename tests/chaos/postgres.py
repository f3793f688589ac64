"""Chaos: real workers on a real PostgreSQL, killed, stopped past their lease, crashed and cut while they work.

Handlers take 0 to 200 ms and write their start and end, synced, outside the database. Triggers in the
server keep a ledger of every claim. At the end journals, ledger and the list of faults are held against
each other: every id has ended once, nothing is lost, two workers were at one transaction only after the
claim had been taken from the first, no effect is doubled, and every stale settlement was refused.

The last line is JSON. The exit code is 1 if anything is wrong or too little was done to the system.
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

from ergon_framework.schema.migrate import upgrade
from tests.chaos import ledger
from tests.chaos.faults import Torment
from tests.chaos.fleet import Fleet
from tests.chaos.mix import Sender, drawn
from tests.chaos.verdict import SHOWN, Verdict, judge
from tests.servers.postgres import PrivatePostgres

#: What a run of so many transactions has to suffer; shorter runs in proportion.
WHOLE = 50_000
FAULTS = {"kill": 32, "stop": 205, "crash": 6, "cut": 12}
BAR = {"kill": 30, "stop": 200, "crash": 5, "cut": 10}
MAX_DELIVERIES = 5
#: Of the minutes, the part in which new work comes in.
SENDING = 0.9


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-"))
    server = PrivatePostgres(folder / "server", settings={"max_connections": 300, "log_min_messages": "fatal"})
    # initdb runs as another user, who has to get there.
    folder.chmod(0o755)
    told: dict[str, Any] = {}
    try:
        server.start()
        told = run(server, folder, options)
    finally:
        server.mend()
        server.kill()
        if told.get("ok") and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"journals and database are kept in {folder}")
    print(json.dumps(told))
    return 0 if told["ok"] else 1


def run(server: PrivatePostgres, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    began, dice = time.monotonic(), random.Random(options.seed)
    dsn = server.create_database("chaos")
    # Those who send and look do so past the network, so that a cut tells nothing wrong about them.
    sockets = f"host={server.folder / 'sockets'} port={server.port} user=postgres dbname=chaos"
    upgrade(dsn)
    ledger.prepare(dsn)
    journals = folder / "journals"
    journals.mkdir()
    settings = {"lease": options.lease, "concurrency": options.concurrency, "max-deliveries": MAX_DELIVERIES}
    flavours = ["async" if number % 2 == 0 else "threads" for number in range(options.workers)]
    fleet = Fleet(journals, flavours, dsn=dsn, options={name: str(value) for name, value in settings.items()})
    sender = Sender(sockets, drawn(options.transactions, dice))
    torment = Torment(server, fleet, lease=options.lease, sockets=sockets, dice=dice)
    share = options.transactions / WHOLE
    wanted = {kind: max(1, round(count * share)) for kind, count in FAULTS.items()}
    seconds = options.minutes * 60
    fleet.start()
    try:
        sending = threading.Thread(target=sender.run, args=(seconds * SENDING,), daemon=True)
        tormenting = threading.Thread(target=torment.run, args=(seconds, wanted), daemon=True)
        sending.start()
        tormenting.start()
        while sending.is_alive() or tormenting.is_alive():
            _progress(began, sockets, sender, torment, fleet)
            time.sleep(5.0)
        ended = _emptied(began, sockets, sender, torment, fleet, patience=options.patience)
        fleet.end()
    finally:
        fleet.kill()
    say("judging")
    verdict = judge(
        ledger.read(sockets),
        fleet,
        sender.orders,
        confirmed=sender.confirmed,
        faults=torment.faults,
        lease=options.lease,
        max_deliveries=MAX_DELIVERIES,
    )
    for kind, bar in BAR.items():
        if torment.counts[kind] < min(bar, max(1, round(bar * share))):
            verdict.wrong("too little was done", f"{kind}: {torment.counts[kind]}, not {bar}")
    for error in torment.errors:
        verdict.wrong("a fault could not be made", error)
    if not ended:
        verdict.wrong("did not come to rest", f"within {options.patience} s after the last fault")
    if sender.torn:
        verdict.wrong("a dispatch arrived in part", str(sender.torn))
    if not verdict.counts["stale"]:
        verdict.wrong("too little was done", "no stale settlement was ever tried")
    return _told(verdict, torment, sender, options, seconds=time.monotonic() - began)


def _emptied(began: float, dsn: str, *about: Any, patience: float) -> bool:
    """Wait until the queue is empty; False if it never is."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if _progress(began, dsn, *about) == 0:
            return True
        time.sleep(1.0)
    return False


def _progress(began: float, dsn: str, sender: Sender, torment: Torment, fleet: Fleet) -> int | None:
    """Say how it stands; how many messages are left, None if the server cannot say."""
    try:
        with psycopg.connect(dsn, autocommit=True, connect_timeout=2) as connection:
            left, held, effects = ledger.count(connection)
    except psycopg.Error as error:
        say(f"{time.monotonic() - began:5.0f} s: {type(error).__name__}")
        return None
    sent = len(sender.confirmed) + len(sender.unconfirmed)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(torment.counts.items()))
    lives = len(fleet.lives)
    say(
        f"{time.monotonic() - began:5.0f} s: {sent} sent, {effects} done, {left} left, {held} held, "
        f"{lives} processes; {faults}"
    )
    return left


def _told(
    verdict: Verdict, torment: Torment, sender: Sender, options: argparse.Namespace, *, seconds: float
) -> dict[str, Any]:
    for words in verdict.overlaps:
        say(f"overlap {words}")
    for what, all_words in verdict.findings.items():
        for words in all_words[:SHOWN]:
            say(f"WRONG {what}: {words}")
    return {
        "ok": not verdict.findings,
        "findings": {what: len(words) for what, words in sorted(verdict.findings.items())},
        "transactions": len(sender.orders),
        **verdict.counts,
        "overlap causes": dict(verdict.causes),
        "faults": dict(sorted(torment.counts.items())),
        "outages of the sender": sender.outages,
        "arrived unconfirmed": len(sender.unconfirmed),
        "seed": options.seed,
        "seconds": round(seconds, 1),
    }


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=WHOLE)
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
