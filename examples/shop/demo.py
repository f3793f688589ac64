"""The shop and its headquarters, for a minute or for half an hour of trouble; at the end the books are read.

python demo.py --orders 200
python demo.py --minutes 30 --kills 100

The first sends orders and waits until all of them have come through. The second sends two a second while processes are
killed and stopped, servers crash and lines are cut (it needs root, for the lines). The last line of stdout is JSON. The
exit code is 1 if a book does not balance, or a fault could not be made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from stage import books
from stage.customers import Customers
from stage.faults import Faults
from stage.screen import Screen
from stage.sites import Sites
from stage.watch import Watch

#: Seconds without any change, after all orders have ended, in which a second effect would still show.
QUIET = {False: 2.0, True: 15.0}


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="ergon-shop-"))
    screen, told = Screen(), {"ok": False}
    sites = Sites(folder, trouble=options.trouble, forgetful=options.forgetful_bank)
    try:
        if options.minutes > 0:
            sites.check_lines()
        screen.say(f"starting two sites in {folder}")
        sites.start()
        told = run(sites, screen, options)
    except KeyboardInterrupt:
        told["wrong"] = ["stopped by a signal"]
    finally:
        sites.end()
        if told["ok"] and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            screen.say(f"databases, logs and the list of faults are kept in {folder}")
    print(json.dumps(told), flush=True)
    return 0 if told["ok"] else 1


def run(sites: Sites, screen: Screen, options: argparse.Namespace) -> dict[str, Any]:
    began, chaos = time.monotonic(), options.minutes > 0
    customers = Customers(sites.rabbitmq.url, count=None if chaos else options.orders, rate=options.rate)
    watch, faults = Watch(sites, customers), Faults(sites, seed=options.seed, say=screen.say)
    customers.start()
    try:
        if chaos:
            seconds = options.minutes * 60
            doing = threading.Thread(target=faults.run, args=(seconds, options.kills), daemon=True)
            doing.start()
            while time.monotonic() - began < seconds or doing.is_alive():
                screen.show(watch.look(faults=len(faults.done)))
            customers.stop()
        settled = _settle(watch, screen, customers, patience=options.patience)
        quiet = time.monotonic() + QUIET[chaos]
        while time.monotonic() < quiet:
            screen.show(watch.look(faults=len(faults.done)))
    finally:
        faults.stop()
        customers.stop()
        watch.close()
    screen.clear()
    found = books.read(sites)
    verdict = books.judge(customers, found, faults.done)
    if not settled:
        verdict.wrongs.append(f"did not come to rest within {options.patience:g} s: {watch.words}")
    verdict.wrongs += [f"a fault could not be made: {error}" for error in faults.errors]
    if chaos and (done := len(faults.done)) < options.kills:
        verdict.wrongs.append(f"{done} faults were made, not {options.kills}")
    print(books.printed(customers.placed, found, verdict))
    return {
        "ok": verdict.ok,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "orders": len(customers.placed),
        "sent_again": sum(customers.sent.values()) - len(customers.sent),
        "kinds": dict(verdict.counts),
        "charges": sum(map(len, found.charges.values())),
        "facts": sum(map(len, found.facts["headquarters"].values())),
        "entries": sum(map(len, found.ledger.values())),
        "dead_letters": dict(Counter(letter.reason for letters in found.dead.values() for letter in letters)),
        "faults": dict(sorted(faults.counts.items())),
        "restarts": {part.name: part.lives - 1 for part in sites.parts.all},
        "ended_by_themselves": dict(sites.parts.ends),
        "wrong": verdict.wrongs[:50],
    }


def _settle(watch: Watch, screen: Screen, customers: Customers, *, patience: float) -> bool:
    """Whether all orders have ended, one way or the other, in time."""
    until = time.monotonic() + patience
    while not (customers.done and watch.settled):
        if customers.done and time.monotonic() > until:
            return False
        if not customers.done:
            until = time.monotonic() + patience
        screen.show(watch.look())
    return True


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=200, help="how many are sent, without --minutes")
    parser.add_argument("--rate", type=float, help="orders in a second; 10, with --minutes 2")
    parser.add_argument("--minutes", type=float, default=0.0, help="how long things go wrong")
    parser.add_argument("--kills", type=int, default=100, help="how many faults are made in that time")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--trouble", type=float, default=0.1, help="the share of requests that the bank does badly")
    parser.add_argument("--forgetful-bank", action="store_true", help="a bank without keys: the books cannot balance")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds to come to rest at the end")
    parser.add_argument("--keep", action="store_true", help="keep databases and logs also if all is well")
    options = parser.parse_args()
    options.rate = options.rate or (2.0 if options.minutes else 10.0)
    return options


if __name__ == "__main__":
    sys.exit(main())
