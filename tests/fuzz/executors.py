"""Fuzzes both directions of the executor protocol, and prints one line of JSON at its end.

It begins with what earlier runs have found. With --keep, what is found and the time that it took are kept beside this
file, so that runs add up wherever they were made: executors.py --seconds 600 --keep. Its own files are in .fuzz/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.fuzz import kept
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
    for seed in (*seeds(direction), *kept.inputs(direction)):
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    words = [
        *(str(corpus), f"-max_total_time={seconds}", "-max_len=16384", "-timeout=20", "-rss_limit_mb=3000"),
        *(f"-artifact_prefix={crashes}/", "-print_final_stats=1", "-verbosity=1"),
    ]
    done = _libfuzzer(direction, words, seconds + 600)
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


def _libfuzzer(direction, words, limit):
    command = [sys.executable, "-m", "tests.fuzz.target", direction, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=limit)


def keep(direction, told):
    """*told* with what is kept now: the total, and the inputs that together reach all that was reached."""
    corpus, fewest = HOME / direction / "corpus", HOME / direction / "fewest"
    shutil.rmtree(fewest, ignore_errors=True)
    fewest.mkdir(parents=True)
    done = _libfuzzer(direction, ["-merge=1", "-max_len=16384", str(fewest), str(corpus)], 3600)
    if done.returncode:
        raise SystemExit(f"the corpus could not be merged: {done.stderr.decode(errors='replace')[-2000:]}")
    inputs = kept.keep(direction, (path.read_bytes() for path in fewest.iterdir()))
    return told | {"kept": inputs, "total": kept.add(direction, seconds=told["seconds"], runs=told["runs"])}


def _sound(told):
    return told["exit"] == 0 and not told["crashes"] and told["runs"] > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="how long each direction is fuzzed")
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="only this one")
    parser.add_argument("--keep", action="store_true", help="keep what is found, and add this run to the total")
    given = parser.parse_args()
    told = {}
    for direction in given.direction or DIRECTIONS:
        told[direction] = fuzz(direction, given.seconds) | {"total": kept.total(direction)}
        if given.keep and _sound(told[direction]):
            told[direction] = keep(direction, told[direction])
    print(json.dumps(told))
    sound = all(_sound(each) for each in told.values())
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
