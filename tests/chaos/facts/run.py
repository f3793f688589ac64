"""Chaos between zones: two network namespaces, each with a PostgreSQL, a service, a replicator and a producer.

The link between them is cut silently, reset, delayed and lossy by turns; answers are lost after the effect and whole
calls made twice; services, replicators, producers and databases are killed. At the end both zones hold the same facts
once, offsets are dense, digests match, and no confirmed fact is missing.

Progress goes to stderr, the last line of stdout is JSON. The exit code is 1 if a check failed or too few faults were
injected. It needs root, for the namespaces.
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
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from ergon_framework.facts.model import BoundarySide
from tests.chaos.facts.line import MODES, ZoneLink
from tests.chaos.facts.mix import Mix
from tests.chaos.facts.verdict import Verdict, evaluate
from tests.chaos.facts.zone import PORT, Zone, ZoneProcessSlot, ZoneSupervisor
from tests.servers.certificates import CertificateAuthority

#: Sizes of a full run; shorter ones have proportionally less.
FACT_COUNT, ARTIFACT_COUNT, TOTAL_BYTES = 100_000, 1_000, 4 * 1024**3
#: Number of kills of each kind of process.
KILL_COUNTS = {"serve": 12, "database": 10, "follow": 8, "produce": 4}
#: Minimum number of kills of services and databases together.
MIN_KILLS = 20
#: Minimum and maximum seconds that a mode of the link lasts.
MIN_MODE_SECONDS, MAX_MODE_SECONDS = 2.0, 12.0


class ZoneFaultInjector:
    """Changes the link and kills processes at random moments until the time is over."""

    def __init__(self, link: ZoneLink, zones: list[Zone], rng: random.Random) -> None:
        self._link = link
        self._zones = zones
        self._rng = rng
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        threads = [threading.Thread(target=self._change_link, args=(deadline,), daemon=True)]
        for kind, count in KILL_COUNTS.items():
            # Spread, so that kills hit any step of their victim's work.
            moments = sorted(self._rng.uniform(seconds * 0.03, seconds) for _ in range(count))
            victims = [self._rng.choice(self._zones) for _ in moments]
            threads.append(
                threading.Thread(target=self._kill, args=(kind, moments, victims, time.monotonic()), daemon=True)
            )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._link.set_mode("good")

    def _change_link(self, deadline: float) -> None:
        modes = list(MODES)
        while time.monotonic() < deadline:
            self._rng.shuffle(modes)
            for mode in modes:
                self._link.set_mode(mode)
                self.counts[mode] += 1
                max_seconds = MIN_MODE_SECONDS * 2 if mode == "reset" else MAX_MODE_SECONDS
                time.sleep(min(self._rng.uniform(MIN_MODE_SECONDS, max_seconds), max(0.0, deadline - time.monotonic())))

    def _kill(self, kind: str, moments: list[float], victims: list[Zone], started_at: float) -> None:
        for moment, zone in zip(moments, victims, strict=True):
            time.sleep(max(0.0, started_at + moment - time.monotonic()))
            try:
                if kind == "database":
                    zone.server.kill()
                    time.sleep(self._rng.uniform(0.0, 2.0))
                    zone.server.start()
                elif not self._kill_process(zone.slots[kind]):
                    continue
            except Exception as error:
                self.errors.append(f"{kind}: {type(error).__name__}: {error}")
            else:
                self.counts[f"killed {kind}"] += 1

    def _kill_process(self, slot: ZoneProcessSlot) -> bool:
        with slot.lock:
            if slot.is_finished or not slot.is_running:
                return False
            slot.kill()
            time.sleep(self._rng.uniform(0.0, 1.0))
            return True


def main() -> int:
    options = _parse_options()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-facts-"))
    folder.chmod(0o755)
    link = ZoneLink("ergon")
    zones: list[Zone] = []
    summary: dict[str, Any] = {"ok": False}
    try:
        link.start()
        zones.extend(_create_zones(link, folder, options))
        summary = run(link, zones, options)
    finally:
        for zone in zones:
            zone.end()
        link.end()
        if summary["ok"] and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            report(f"databases, artifacts and logs are kept in {folder}")
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def _create_zones(link: ZoneLink, folder: Path, options: argparse.Namespace) -> list[Zone]:
    authority = CertificateAuthority(folder)
    server = authority.issue("server")
    names = ("plant", "headquarters")
    zones = []
    for index, side in enumerate((BoundarySide.INNER, BoundarySide.OUTER)):
        name, peer = names[index], names[1 - index]
        tls = authority.issue(name, zones=[name])
        settings = {
            "peer": peer,
            "listen": f"0.0.0.0:{PORT}",
            "own_address": f"127.0.0.1:{PORT}",
            "peer_address": f"{link.addresses[1 - index]}:{PORT}",
            "tls": [str(path) for path in (tls.certificate, tls.key, authority.path)],
            "server_tls": [str(path) for path in (server.certificate, server.key, authority.path)],
            "facts": max(200, int(FACT_COUNT * options.share)),
            # Of both directions together.
            "artifacts": max(2, int(ARTIFACT_COUNT * options.share / 2)),
            "bytes": int(TOTAL_BYTES * options.share / 2),
            "seed": options.seed,
            "seconds": options.minutes * 60 * 0.8,
        }
        zones.append(Zone(name, side, folder / name, namespace=link.namespaces[index], settings=settings))
    return zones


def run(link: ZoneLink, zones: list[Zone], options: argparse.Namespace) -> dict[str, Any]:
    started_at, verdict = time.monotonic(), Verdict()
    for zone in zones:
        zone.prepare()
    stores = [zone.open_store() for zone in zones]
    mixes = [
        Mix(zone.pair_to(other), *(zone.settings[name] for name in ("facts", "artifacts", "bytes", "seed")))
        for zone, other in (zones, reversed(zones))
    ]
    supervisor, injector = ZoneSupervisor(zones), ZoneFaultInjector(link, zones, random.Random(options.seed))
    supervisor.start()
    fault_thread = threading.Thread(target=injector.run, args=(options.minutes * 60,), daemon=True)
    fault_thread.start()
    arrived = [0, 0]
    while fault_thread.is_alive():
        arrived = _print_progress(started_at, zones, stores, mixes=mixes, link=link, injector=injector)
        time.sleep(5.0)
    deadline = time.monotonic() + options.patience
    while arrived != [mix.facts for mix in mixes] and time.monotonic() < deadline:
        time.sleep(2.0)
        arrived = _print_progress(started_at, zones, stores, mixes=mixes, link=link, injector=injector)
    settled_after = time.monotonic() - started_at
    supervisor.end()
    for zone in zones:
        for slot in zone.slots.values():
            slot.kill()
    if arrived != [mix.facts for mix in mixes]:
        verdict.add_finding(
            "did not come to rest", f"{arrived} of {[mix.facts for mix in mixes]}; {zones[0].read_logs()}"
        )
    report("judging")
    for mix, zone, (source, destination) in zip(mixes, zones, (stores, stores[::-1]), strict=True):
        evaluate(verdict, mix, source, destination, zone.read_confirmed())
    kills = injector.counts["killed serve"] + injector.counts["killed database"]
    if kills < MIN_KILLS:
        verdict.add_finding("too little was done", f"{kills} services and databases were killed, not {MIN_KILLS}")
    for error in injector.errors:
        verdict.add_finding("a fault could not be made", error)
    for exit_description in supervisor.unexpected_exits:
        verdict.add_finding("a process ended by itself", exit_description)
    return {
        "ok": verdict.is_ok,
        "seed": options.seed,
        "share": options.share,
        "seconds": round(time.monotonic() - started_at),
        "settled_after": round(settled_after),
        "faults": dict(injector.counts),
        "counts": dict(verdict.counts),
        "wrong": verdict.findings,
    }


def _print_progress(
    started_at: float,
    zones: list[Zone],
    stores: list[Any],
    *,
    mixes: list[Mix],
    link: ZoneLink,
    injector: ZoneFaultInjector,
) -> list[int]:
    """Print the progress; return how many facts of each direction have arrived."""
    arrived = []
    for mix, store in zip(mixes, stores[::-1], strict=True):
        try:
            end = store.last_offset(mix.pair)
            arrived.append(0 if end is None else end.offset)
        except Exception:
            arrived.append(-1)  # the database is down
    confirmed = [zone.confirmed_count for zone in zones]
    kills = sum(count for kind, count in injector.counts.items() if kind.startswith("killed"))
    report(
        f"{time.monotonic() - started_at:5.0f} s: {confirmed[0]} confirmed, {arrived[0]} there; "
        f"{confirmed[1]} confirmed, {arrived[1]} here; the line is {link.mode}, {kills} killed"
    )
    return arrived


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long things go wrong")
    parser.add_argument("--share", type=float, default=1.0, help="of the whole number of facts and bytes")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to come to rest afterwards")
    parser.add_argument("--keep", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
