"""Runs the fuzzer over the directions of one protocol, all at once, and prints one line of JSON at its end.

It begins with what earlier runs have found. With --keep, what is found and the time that it took are kept beside this
file, so that runs add up wherever they were made. Its own files are in .fuzz/. A live direction is a program of its own
that attacks real processes, and prints a line of JSON too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz import kept

ROOT = Path(__file__).parents[2]
DONE = re.compile(r"#(\d+)\s+(?:DONE|INITED|pulse|NEW|REDUCE|RELOAD)\s+cov: (\d+) ft: (\d+)")


class Fuzzed:
    """One protocol: the module that is under the fuzzer, what each direction begins with, and programs that attack."""

    def __init__(self, name, module, directions, seeds, *, live):
        self._home = ROOT / ".fuzz" / name
        self._module = module
        self._directions = directions
        self._seeds = seeds
        self._live = live

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
        log = self._home / direction / "log"
        code, worked = _run(self._command(direction, words), log, seconds + 600)
        said = log.read_text(encoding="utf-8", errors="replace")
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
            "exit": code,
        }

    def attack(self, direction, seconds):
        """Run the program of a live direction; what it has printed."""
        command = [sys.executable, "-m", self._live[direction], "--seconds", str(seconds)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=seconds + 600)
        try:
            told = json.loads(done.stdout)
        except ValueError:
            told = {"runs": 0, "problems": {done.stderr.decode(errors="replace")[-2000:]: 1}}
        return told | {"exit": done.returncode}

    def _command(self, direction, words):
        return [sys.executable, "-m", self._module, direction, *words]

    def keep(self, direction, told):
        """*told* with what is kept now: the total, and the inputs that together reach all that was reached."""
        corpus, fewest = self._home / direction / "corpus", self._home / direction / "fewest"
        shutil.rmtree(fewest, ignore_errors=True)
        fewest.mkdir(parents=True)
        command = self._command(direction, ["-merge=1", "-max_len=16384", str(fewest), str(corpus)])
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=3600)
        if done.returncode:
            raise SystemExit(f"the corpus could not be merged: {done.stderr.decode(errors='replace')[-2000:]}")
        inputs = kept.keep(direction, (path.read_bytes() for path in fewest.iterdir()))
        return told | {"kept": inputs, "total": kept.add(direction, seconds=told["seconds"], runs=told["runs"])}

    def main(self):
        """Do what the command line says."""
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--seconds", type=int, default=30, help="how long each direction is fuzzed")
        parser.add_argument(
            "--direction", choices=[*self._directions, *self._live], action="append", help="only this one"
        )
        parser.add_argument("--keep", action="store_true", help="keep what is found, and add this run to the total")
        given = parser.parse_args()
        chosen = given.direction or [*self._directions, *self._live]
        with ThreadPoolExecutor(len(chosen)) as threads:
            told = dict(zip(chosen, threads.map(lambda each: self._one(each, given), chosen), strict=True))
        print(json.dumps(told))
        sys.exit(0 if all(_sound(each) for each in told.values()) else 1)

    def _one(self, direction, given):
        if direction in self._live:
            return self.attack(direction, given.seconds)
        told = self.fuzz(direction, given.seconds) | {"total": kept.total(direction)}
        return self.keep(direction, told) if given.keep and _sound(told) else told


def _run(command, log, limit):
    """Run *command* for at most *limit* seconds with its stderr in *log*; its exit code and processor time."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
    timer = threading.Timer(limit, process.kill)
    timer.start()
    _, status, used = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime


def _sound(told):
    return told["exit"] == 0 and not told.get("crashes") and not told.get("problems") and told["runs"] > 0
