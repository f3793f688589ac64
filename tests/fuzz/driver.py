"""Runs the fuzzer over the directions of one protocol, and prints one line of JSON at its end.

It begins with what earlier runs have found. With --keep, what is found and the time that it took are kept beside this
file, so that runs add up wherever they were made. Its own files are in .fuzz/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from tests.fuzz import kept

ROOT = Path(__file__).parents[2]
DONE = re.compile(r"#(\d+)\s+(?:DONE|INITED|pulse|NEW|REDUCE|RELOAD)\s+cov: (\d+) ft: (\d+)")


class Fuzzed:
    """One protocol: the module that is under the fuzzer, and what each direction begins with."""

    def __init__(self, name, module, directions, seeds):
        self._home = ROOT / ".fuzz" / name
        self._module = module
        self._directions = directions
        self._seeds = seeds

    def fuzz(self, direction, seconds):
        """Run the fuzzer in one direction; what it did."""
        corpus, crashes = self._home / direction / "corpus", self._home / direction / "crashes"
        for folder in (corpus, crashes):
            folder.mkdir(parents=True, exist_ok=True)
        for seed in (*self._seeds(direction), *kept.inputs(direction)):
            (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
        words = [
            *(str(corpus), f"-max_total_time={seconds}", "-max_len=16384", "-timeout=20", "-rss_limit_mb=3000"),
            *(f"-artifact_prefix={crashes}/", "-print_final_stats=1", "-verbosity=1"),
        ]
        before = _worked()
        done = self._libfuzzer(direction, words, seconds + 600)
        worked = _worked() - before
        said = done.stderr.decode(errors="replace")
        (self._home / direction / "log").write_text(said, encoding="utf-8")
        found = DONE.findall(said)
        runs, edges, features = (int(number) for number in found[-1]) if found else (0, 0, 0)
        return {
            # Of the processor: on a machine that does other work besides, less than the time that went by.
            "seconds": min(seconds, round(worked)),
            "runs": runs,
            "edges": edges,
            "features": features,
            "corpus": sum(1 for _ in corpus.iterdir()),
            "crashes": sorted(path.name for path in crashes.iterdir()),
            "exit": done.returncode,
        }

    def _libfuzzer(self, direction, words, limit):
        command = [sys.executable, "-m", self._module, direction, *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=limit)

    def keep(self, direction, told):
        """*told* with what is kept now: the total, and the inputs that together reach all that was reached."""
        corpus, fewest = self._home / direction / "corpus", self._home / direction / "fewest"
        shutil.rmtree(fewest, ignore_errors=True)
        fewest.mkdir(parents=True)
        done = self._libfuzzer(direction, ["-merge=1", "-max_len=16384", str(fewest), str(corpus)], 3600)
        if done.returncode:
            raise SystemExit(f"the corpus could not be merged: {done.stderr.decode(errors='replace')[-2000:]}")
        inputs = kept.keep(direction, (path.read_bytes() for path in fewest.iterdir()))
        return told | {"kept": inputs, "total": kept.add(direction, seconds=told["seconds"], runs=told["runs"])}

    def main(self):
        """Do what the command line says."""
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--seconds", type=int, default=30, help="how long each direction is fuzzed")
        parser.add_argument("--direction", choices=self._directions, action="append", help="only this one")
        parser.add_argument("--keep", action="store_true", help="keep what is found, and add this run to the total")
        given = parser.parse_args()
        told = {}
        for direction in given.direction or self._directions:
            told[direction] = self.fuzz(direction, given.seconds) | {"total": kept.total(direction)}
            if given.keep and _sound(told[direction]):
                told[direction] = self.keep(direction, told[direction])
        print(json.dumps(told))
        sys.exit(0 if all(_sound(each) for each in told.values()) else 1)


def _worked():
    """Seconds of processor time that ended children have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _sound(told):
    return told["exit"] == 0 and not told["crashes"] and told["runs"] > 0
