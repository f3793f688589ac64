"""Runs the fuzzer over the directions of one protocol in parallel, and prints one line of JSON at the end.

It begins with the inputs of earlier runs. With --keep, the inputs found and the time used are stored next to this
file, so that runs add up on any machine. Its working files are in .fuzz/. A live direction is a separate program
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
PROGRESS_LINE = re.compile(r"#(\d+)\s+(?:DONE|INITED|pulse|NEW|REDUCE|RELOAD)\s+cov: (\d+) ft: (\d+)")


class FuzzDriver:
    """One protocol: the fuzzed module, the seeds of each direction, and the programs that attack real processes."""

    def __init__(self, name, module, directions, seeds, *, live):
        self._folder = ROOT / ".fuzz" / name
        self._module = module
        self._directions = directions
        self._seeds = seeds
        self._live = live

    def fuzz(self, direction, seconds):
        """Run the fuzzer in one direction; return its figures."""
        corpus, crashes = self._folder / direction / "corpus", self._folder / direction / "crashes"
        for folder in (corpus, crashes):
            folder.mkdir(parents=True, exist_ok=True)
        for seed in (*self._seeds(direction), *kept.read_inputs(direction)):
            (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
        arguments = [
            *(str(corpus), f"-max_total_time={seconds}", "-max_len=16384", "-timeout=20", "-rss_limit_mb=3000"),
            *(f"-artifact_prefix={crashes}/", "-print_final_stats=1", "-verbosity=1"),
        ]
        log = self._folder / direction / "log"
        exit_code, processor_seconds = _run_fuzzer(self._command(direction, arguments), log, seconds + 600)
        log_text = log.read_text(encoding="utf-8", errors="replace")
        matches = PROGRESS_LINE.findall(log_text)
        runs, edges, features = (int(number) for number in matches[-1]) if matches else (0, 0, 0)
        return {
            # Processor time: less than the elapsed time on a machine that does other work too.
            "seconds": min(seconds, round(processor_seconds)),
            "runs": runs,
            "edges": edges,
            "features": features,
            "corpus": sum(1 for _ in corpus.iterdir()),
            "crashes": sorted(path.name for path in crashes.iterdir()),
            "exit": exit_code,
        }

    def attack(self, direction, seconds):
        """Run the program of a live direction; return its output."""
        command = [sys.executable, "-m", self._live[direction], "--seconds", str(seconds)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=seconds + 600)
        try:
            result = json.loads(process.stdout)
        except ValueError:
            result = {"runs": 0, "problems": {process.stderr.decode(errors="replace")[-2000:]: 1}}
        return result | {"exit": process.returncode}

    def _command(self, direction, arguments):
        return [sys.executable, "-m", self._module, direction, *arguments]

    def keep(self, direction, result):
        """Store the inputs that together reach all that was reached; return *told* with the total."""
        corpus, merged = self._folder / direction / "corpus", self._folder / direction / "fewest"
        shutil.rmtree(merged, ignore_errors=True)
        merged.mkdir(parents=True)
        command = self._command(direction, ["-merge=1", "-max_len=16384", str(merged), str(corpus)])
        process = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=3600)
        if process.returncode:
            raise SystemExit(f"the corpus could not be merged: {process.stderr.decode(errors='replace')[-2000:]}")
        inputs = kept.store_inputs(direction, (path.read_bytes() for path in merged.iterdir()))
        return result | {
            "kept": inputs,
            "total": kept.add_run(direction, seconds=result["seconds"], runs=result["runs"]),
        }

    def main(self):
        """Run the command line."""
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--seconds", type=int, default=30, help="how long each direction is fuzzed")
        parser.add_argument(
            "--direction", choices=[*self._directions, *self._live], action="append", help="only this one"
        )
        parser.add_argument("--keep", action="store_true", help="keep what is found, and add this run to the total")
        options = parser.parse_args()
        directions = options.direction or [*self._directions, *self._live]
        with ThreadPoolExecutor(len(directions)) as threads:
            results = dict(
                zip(directions, threads.map(lambda each: self._run_direction(each, options), directions), strict=True)
            )
        print(json.dumps(results))
        sys.exit(0 if all(_has_passed(each) for each in results.values()) else 1)

    def _run_direction(self, direction, options):
        if direction in self._live:
            return self.attack(direction, options.seconds)
        result = self.fuzz(direction, options.seconds) | {"total": kept.read_total(direction)}
        return self.keep(direction, result) if options.keep and _has_passed(result) else result


def _run_fuzzer(command, log, limit):
    """Run *command* for at most *limit* seconds with its stderr in *log*; return its exit code and processor time."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
    timer = threading.Timer(limit, process.kill)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def _has_passed(result):
    return result["exit"] == 0 and not result.get("crashes") and not result.get("problems") and result["runs"] > 0
