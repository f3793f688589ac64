"""The shop and its headquarters, for a minute or for half an hour of faults; at the end all records are compared.

python demo.py --orders 200
python demo.py --minutes 30 --kills 100

The first sends orders and waits until all of them are finished. The second sends two a second while processes are
killed and stopped, servers crash and connections are cut (it needs root, to cut connections). The last line of stdout
is JSON. The exit code is 1 if the records do not balance, or a fault could not be made.
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

from stage import reconciliation
from stage.customers import Customers
from stage.faults import Faults
from stage.screen import Screen
from stage.sites import Sites
from stage.watch import Watch

#: Seconds without any change, after all orders have ended, in which a second effect would still show.
QUIET_SECONDS = {False: 2.0, True: 15.0}


def main() -> int:
    options = _parse_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="ergon-shop-"))
    screen, result = Screen(), {"ok": False}
    sites = Sites(folder, failure_rate=options.trouble, forgetful=options.forgetful_bank)
    try:
        if options.minutes > 0:
            sites.check_links()
        screen.say(f"starting two sites in {folder}")
        sites.start()
        result = run(sites, screen, options)
    except KeyboardInterrupt:
        result["wrong"] = ["stopped by a signal"]
    finally:
        sites.stop()
        if result["ok"] and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            screen.say(f"databases, logs and the list of faults are kept in {folder}")
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


def run(sites: Sites, screen: Screen, options: argparse.Namespace) -> dict[str, Any]:
    began, chaos = time.monotonic(), options.minutes > 0
    customers = Customers(sites.rabbitmq.url, count=None if chaos else options.orders, rate=options.rate)
    watch, faults = Watch(sites, customers), Faults(sites, seed=options.seed, say=screen.say)
    customers.start()
    try:
        if chaos:
            seconds = options.minutes * 60
            fault_thread = threading.Thread(target=faults.run, args=(seconds, options.kills), daemon=True)
            fault_thread.start()
            while time.monotonic() - began < seconds or fault_thread.is_alive():
                screen.show(watch.poll(faults=len(faults.done)))
            customers.stop()
        is_settled = _wait_until_settled(watch, screen, customers, timeout=options.patience)
        quiet_until = time.monotonic() + QUIET_SECONDS[chaos]
        while time.monotonic() < quiet_until:
            screen.show(watch.poll(faults=len(faults.done)))
    finally:
        faults.stop()
        customers.stop()
        watch.close()
    screen.clear()
    records = reconciliation.read(sites)
    verdict = reconciliation.reconcile(customers, records, faults.done)
    if not is_settled:
        verdict.problems.append(f"did not come to rest within {options.patience:g} s: {watch.status_line}")
    verdict.problems += [f"a fault could not be made: {error}" for error in faults.errors]
    if chaos and (done := len(faults.done)) < options.kills:
        verdict.problems.append(f"{done} faults were made, not {options.kills}")
    print(reconciliation.format_report(customers.placed, records, verdict))
    return {
        "ok": verdict.ok,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "orders": len(customers.placed),
        "sent_again": sum(customers.sent.values()) - len(customers.sent),
        "kinds": dict(verdict.counts),
        "charges": sum(map(len, records.charges.values())),
        "facts": sum(map(len, records.facts["headquarters"].values())),
        "entries": sum(map(len, records.ledger.values())),
        "dead_letters": dict(Counter(letter.reason for letters in records.dead.values() for letter in letters)),
        "faults": dict(sorted(faults.counts.items())),
        "restarts": {part.name: part.start_count - 1 for part in sites.parts.all},
        "ended_by_themselves": dict(sites.parts.exit_counts),
        "wrong": verdict.problems[:50],
    }


def _wait_until_settled(watch: Watch, screen: Screen, customers: Customers, *, timeout: float) -> bool:
    """Return whether all orders have ended, successfully or not, in time."""
    deadline = time.monotonic() + timeout
    while not (customers.is_done and watch.is_settled):
        if customers.is_done and time.monotonic() > deadline:
            return False
        if not customers.is_done:
            deadline = time.monotonic() + timeout
        screen.show(watch.poll())
    return True


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=200, help="how many are sent, without --minutes")
    parser.add_argument("--rate", type=float, help="orders in a second; 10, with --minutes 2")
    parser.add_argument("--minutes", type=float, default=0.0, help="how long things go wrong")
    parser.add_argument("--kills", type=int, default=100, help="how many faults are made in that time")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--trouble", type=float, default=0.1, help="the share of requests that the bank does badly")
    parser.add_argument("--forgetful-bank", action="store_true", help="a bank without keys: the records cannot balance")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds to come to rest at the end")
    parser.add_argument("--keep", action="store_true", help="keep databases and logs also if all is well")
    options = parser.parse_args()
    options.rate = options.rate or (2.0 if options.minutes else 10.0)
    return options


if __name__ == "__main__":
    sys.exit(main())
