"""Chaos between zones: two network namespaces, each with a PostgreSQL, a service, a replicator and a producer.

The line between them is cut silently, reset, delayed and lossy by turns; answers are lost after the effect and whole
calls made twice; services, replicators, producers and databases are killed. At the end both zones hold the same facts
once, offsets are dense, digests right, and no fact is missing that was ever confirmed.

Progress goes to stderr, the last line of stdout is JSON. The exit code is 1 if anything is wrong, or too little was
done. It needs root, for the namespaces.
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

from ergon_framework.facts.model import Side
from tests.chaos.facts.line import MOODS, Line
from tests.chaos.facts.mix import Mix
from tests.chaos.facts.verdict import Verdict, judge
from tests.chaos.facts.zone import PORT, Keeper, Part, Zone
from tests.servers.certificates import Authority

#: What a whole run has; shorter ones in proportion.
FACTS, ARTIFACTS, BYTES = 100_000, 1_000, 4 * 1024**3
#: How often each is killed.
KILLS = {"serve": 12, "database": 10, "follow": 8, "produce": 4}
#: Of services and databases together.
LEAST = 20
#: Seconds that a mood of the line lasts.
SHORT, LONG = 2.0, 12.0


class Torment:
    """Turns the line and kills, at moments that are drawn, until the time is over."""

    def __init__(self, line: Line, zones: list[Zone], dice: random.Random) -> None:
        self._line = line
        self._zones = zones
        self._dice = dice
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._turn, args=(until,), daemon=True)]
        for kind, times in KILLS.items():
            # Spread, and with luck at any step of whatever its victim does.
            moments = sorted(self._dice.uniform(seconds * 0.03, seconds) for _ in range(times))
            victims = [self._dice.choice(self._zones) for _ in moments]
            threads.append(
                threading.Thread(target=self._kill, args=(kind, moments, victims, time.monotonic()), daemon=True)
            )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._line.turn("good")

    def _turn(self, until: float) -> None:
        moods = list(MOODS)
        while time.monotonic() < until:
            self._dice.shuffle(moods)
            for mood in moods:
                self._line.turn(mood)
                self.counts[mood] += 1
                longest = SHORT * 2 if mood == "reset" else LONG
                time.sleep(min(self._dice.uniform(SHORT, longest), max(0.0, until - time.monotonic())))

    def _kill(self, kind: str, moments: list[float], victims: list[Zone], began: float) -> None:
        for moment, zone in zip(moments, victims, strict=True):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            try:
                if kind == "database":
                    zone.server.kill()
                    time.sleep(self._dice.uniform(0.0, 2.0))
                    zone.server.start()
                elif not self._ended(zone.parts[kind]):
                    continue
            except Exception as error:
                self.errors.append(f"{kind}: {type(error).__name__}: {error}")
            else:
                self.counts[f"killed {kind}"] += 1

    def _ended(self, part: Part) -> bool:
        with part.lock:
            if part.over or not part.running:
                return False
            part.kill()
            time.sleep(self._dice.uniform(0.0, 1.0))
            return True


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="ergon-chaos-facts-"))
    folder.chmod(0o755)
    line = Line("ergon")
    zones: list[Zone] = []
    told: dict[str, Any] = {"ok": False}
    try:
        line.start()
        zones.extend(_zones(line, folder, options))
        told = run(line, zones, options)
    finally:
        for zone in zones:
            zone.end()
        line.end()
        if told["ok"] and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"databases, artifacts and logs are kept in {folder}")
    print(json.dumps(told))
    return 0 if told["ok"] else 1


def _zones(line: Line, folder: Path, options: argparse.Namespace) -> list[Zone]:
    authority = Authority(folder)
    server = authority.issue("server")
    names = ("plant", "headquarters")
    zones = []
    for place, side in enumerate((Side.INNER, Side.OUTER)):
        name, peer = names[place], names[1 - place]
        tls = authority.issue(name, zones=[name])
        given = {
            "peer": peer,
            "listen": f"0.0.0.0:{PORT}",
            "own_address": f"127.0.0.1:{PORT}",
            "peer_address": f"{line.addresses[1 - place]}:{PORT}",
            "tls": [str(path) for path in (tls.certificate, tls.key, authority.path)],
            "server_tls": [str(path) for path in (server.certificate, server.key, authority.path)],
            "facts": max(200, int(FACTS * options.share)),
            # Of both directions together.
            "artifacts": max(2, int(ARTIFACTS * options.share / 2)),
            "bytes": int(BYTES * options.share / 2),
            "seed": options.seed,
            "seconds": options.minutes * 60 * 0.8,
        }
        zones.append(Zone(name, side, folder / name, space=line.spaces[place], given=given))
    return zones


def run(line: Line, zones: list[Zone], options: argparse.Namespace) -> dict[str, Any]:
    began, verdict = time.monotonic(), Verdict()
    for zone in zones:
        zone.prepare()
    watching = [zone.store() for zone in zones]
    mixes = [
        Mix(zone.pair_to(other), *(zone.given[name] for name in ("facts", "artifacts", "bytes", "seed")))
        for zone, other in (zones, reversed(zones))
    ]
    keeper, torment = Keeper(zones), Torment(line, zones, random.Random(options.seed))
    keeper.start()
    tormenting = threading.Thread(target=torment.run, args=(options.minutes * 60,), daemon=True)
    tormenting.start()
    last = [0, 0]
    while tormenting.is_alive():
        last = _progress(began, zones, watching, mixes=mixes, line=line, torment=torment)
        time.sleep(5.0)
    until = time.monotonic() + options.patience
    while last != [mix.facts for mix in mixes] and time.monotonic() < until:
        time.sleep(2.0)
        last = _progress(began, zones, watching, mixes=mixes, line=line, torment=torment)
    settled = time.monotonic() - began
    keeper.end()
    for zone in zones:
        for part in zone.parts.values():
            part.kill()
    if last != [mix.facts for mix in mixes]:
        verdict.wrong("did not come to rest", f"{last} of {[mix.facts for mix in mixes]}; {zones[0].said()}")
    say("judging")
    for mix, zone, (source, destination) in zip(mixes, zones, (watching, watching[::-1]), strict=True):
        judge(verdict, mix, source, destination, zone.confirmed())
    deaths = torment.counts["killed serve"] + torment.counts["killed database"]
    if deaths < LEAST:
        verdict.wrong("too little was done", f"{deaths} services and databases were killed, not {LEAST}")
    for error in torment.errors:
        verdict.wrong("a fault could not be made", error)
    for fallen in keeper.fallen:
        verdict.wrong("a process ended by itself", fallen)
    return {
        "ok": verdict.ok,
        "seed": options.seed,
        "share": options.share,
        "seconds": round(time.monotonic() - began),
        "settled_after": round(settled),
        "faults": dict(torment.counts),
        "counts": dict(verdict.counts),
        "wrong": verdict.wrongs,
    }


def _progress(
    began: float, zones: list[Zone], stores: list[Any], *, mixes: list[Mix], line: Line, torment: Torment
) -> list[int]:
    """Say how it stands; how many facts of each direction have arrived."""
    here = []
    for mix, store in zip(mixes, stores[::-1], strict=True):
        try:
            end = store.end_of(mix.pair)
            here.append(0 if end is None else end.offset)
        except Exception:
            here.append(-1)  # the database is down
    noted = [zone.noted for zone in zones]
    deaths = sum(count for kind, count in torment.counts.items() if kind.startswith("killed"))
    say(
        f"{time.monotonic() - began:5.0f} s: {noted[0]} confirmed, {here[0]} there; "
        f"{noted[1]} confirmed, {here[1]} here; the line is {line.mood}, {deaths} killed"
    )
    return here


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long things go wrong")
    parser.add_argument("--share", type=float, default=1.0, help="of the whole number of facts and bytes")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to come to rest afterwards")
    parser.add_argument("--keep", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
