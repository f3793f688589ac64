"""Fuzzes both directions of the executor protocol, and prints one line of JSON at its end.

The corpus and the totals stay in .fuzz/, so that runs add up: executors.py --seconds 60.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.grammar import seeds

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".fuzz" / "executors"
DIRECTIONS = ("requests", "outcomes")
DONE = re.compile(r"#(\d+)\s+(?:DONE|INITED|pulse|NEW|REDUCE|RELOAD)\s+cov: (\d+) ft: (\d+)")


def fuzz(direction, seconds):
    """Run the fuzzer in one direction; what it did."""
    corpus, crashes = HOME / direction / "corpus", HOME / direction / "crashes"
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds(direction):
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    words = [
        *(str(corpus), f"-max_total_time={seconds}", "-max_len=16384", "-timeout=20", "-rss_limit_mb=3000"),
        *(f"-artifact_prefix={crashes}/", "-print_final_stats=1", "-verbosity=1"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.target", direction, *words],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=seconds + 300,
    )
    said = done.stderr.decode(errors="replace")
    (HOME / direction / "log").write_text(said, encoding="utf-8")
    found = DONE.findall(said)
    runs, edges, features = (int(number) for number in found[-1]) if found else (0, 0, 0)
    return {
        "seconds": seconds,
        "runs": runs,
        "edges": edges,
        "features": features,
        "corpus": sum(1 for _ in corpus.iterdir()),
        "crashes": sorted(path.name for path in crashes.iterdir()),
        "exit": done.returncode,
    }


def added_up(direction, told):
    """*told* with what earlier runs have done."""
    path = HOME / direction / "total.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"seconds": 0, "runs": 0}
    total = {name: before[name] + told[name] for name in before}
    path.write_text(json.dumps(total), encoding="utf-8")
    return told | {"total": total}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="how long each direction is fuzzed")
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="only this one")
    given = parser.parse_args()
    told = {each: added_up(each, fuzz(each, given.seconds)) for each in given.direction or DIRECTIONS}
    print(json.dumps(told))
    sound = all(each["exit"] == 0 and not each["crashes"] and each["runs"] for each in told.values())
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
