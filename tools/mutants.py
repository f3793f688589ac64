"""Mutate the engine, one small change at a time, and find the changes that no test notices.

A change that cannot be noticed, because the behaviour stays the same, is listed with the reason in
tools/mutants_equivalent.toml. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tools.mutation.operators import Mutant, mutants_of  # noqa: E402 - this file is also run as a script
from tools.mutation.runner import Runner, Verdict  # noqa: E402 - as above

FOLDERS = tuple(f"src/ergon_framework/{area}" for area in ("clock.py", "gates.py", "engine", "task", "worker"))
TESTS = ("tests/unit", "tests/both_drivers", "tests/properties")
#: The first end their own process, the second start this tool again, and the others test other packages: all are
#: unrelated to these folders, and each would be run for every mutant whose line it happens to run.
TESTS += ("--ignore=tests/unit/runner", "--ignore=tests/unit/tools", "--ignore=tests/unit/cli")
TESTS += tuple(f"--ignore=tests/unit/{area}" for area in ("connectors", "executors", "jobs", "facts", "new"))
#: Needs a server, which answers late when four tests run in parallel: a failure is not caused by the mutant.
TESTS += ("--ignore=tests/both_drivers/test_provider_execute_postgres.py",)
#: Counts the plans of a full run.
TESTS += ("--deselect=tests/properties/test_plans.py::test_the_plans_contain_every_fault",)
EQUIVALENTS_FILE = ROOT / "tools" / "mutants_equivalent.toml"
Key: TypeAlias = tuple[str, str, str]
#: Shares of the mutants that are not equivalent: noticed at all, and noticed by a time limit only.
MIN_SCORE, MAX_BY_TIME = 0.95, 0.05
#: Plans that a property test runs for one mutant.
PLAN_COUNT = "300"


def list_sources(only: list[str]) -> list[Path]:
    """Return the files of these folders, or those of them that *only* names."""
    chosen = [(ROOT / name).resolve() for name in only or FOLDERS]
    return sorted(
        {
            path
            for path_or_folder in chosen
            for path in ([path_or_folder] if path_or_folder.is_file() else path_or_folder.rglob("*.py"))
        }
    )


def to_key(mutant: Mutant) -> Key:
    return mutant.path.relative_to(ROOT).as_posix(), mutant.function, mutant.change


def read_reasons(path: Path, table: str) -> dict[Key, str]:
    """Return the mutants in one table of the list, with the reason of each."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get(table, []) if path.exists() else []
    return {(entry["file"], entry["function"], entry["change"]): entry["reason"] for entry in entries}


class KillCache:
    """Earlier kills, for runs that only check the remaining mutants while tests are being written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._kills = {tuple(entry[:-1]): entry[-1] for entry in map(json.loads, lines)}

    def find_kill(self, mutant: Mutant) -> str | None:
        return self._kills.get(self._to_cache_key(mutant))

    def keep(self, verdict: Verdict) -> None:
        if self._path is not None and verdict.word == "killed":
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([*self._to_cache_key(verdict.mutant), verdict.by]) + "\n")

    def _to_cache_key(self, mutant: Mutant) -> tuple[str | int, ...]:
        source = hashlib.sha256(mutant.path.read_bytes()).hexdigest()[:16]
        return source, *to_key(mutant), mutant.line


class MutationProgress:
    """Counts results while the mutants are tested, and prints the estimated remaining time."""

    def __init__(self, total: int, memory: KillCache) -> None:
        self._memory = memory
        self.verdicts: list[Verdict] = []
        self._total = total
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()

    def add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self._memory.keep(verdict)
        done = len(self.verdicts)
        if done % 50 == 0 or done == self._total:
            counts = Counter(one.word for one in self.verdicts)
            rate = done / (time.monotonic() - self._began)
            left = (self._total - done) / rate / 60
            text = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
            print(f"{done} of {self._total}: {text}; {rate * 60:.0f} a minute, {left:.1f} minutes left", flush=True)


def summarize(verdicts: list[Verdict], equivalents: dict[Key, str]) -> dict[str, float | int]:
    """Return the figures; a mutant that is listed as equivalent is not counted unless a test noticed it."""
    counts = Counter(
        "equivalent" if one.word == "survived" and to_key(one.mutant) in equivalents else one.word for one in verdicts
    )
    counted = max(1, len(verdicts) - counts["equivalent"])
    return {
        "mutants": len(verdicts),
        "killed": counts["killed"],
        "timeout": counts["timeout"],
        "survived": counts["survived"],
        "equivalent": counts["equivalent"],
        "score": round((counts["killed"] + counts["timeout"]) / counted, 4),
        "by_time": round(counts["timeout"] / counted, 4),
    }


def find_stale(verdicts: list[Verdict], equivalents: dict[Key, str], files: set[str]) -> list[str]:
    """Return the entries of the list of equivalents that are not true."""
    verdict_by_key = {to_key(one.mutant): one for one in verdicts}
    problems = [
        f"listed as equivalent, but there is no such mutant: {' | '.join(one)}"
        for one in equivalents
        if one[0] in files and one not in verdict_by_key
    ]
    problems += [
        f"listed as equivalent, but {verdict_by_key[one].by} notices it: {' | '.join(one)}"
        for one in equivalents
        if one in verdict_by_key and verdict_by_key[one].word != "survived"
    ]
    return problems


def print_verdicts(verdicts: list[Verdict], word: str, reasons: dict[Key, str]) -> None:
    chosen = [one for one in verdicts if one.word == word]
    for one in sorted(chosen, key=lambda one: (one.mutant.path, one.mutant.line)):
        file, function, change = to_key(one.mutant)
        print(f"{word}: {file}:{one.mutant.line} {function} | {change}\n    {reasons.get(to_key(one.mutant), one.by)}")


def print_entries(verdicts: list[Verdict]) -> None:
    """Print the entries that the list would need, without the reason, which a person must write."""
    for one in verdicts:
        if one.word == "survived":
            entry = zip(("file", "function", "change"), to_key(one.mutant), strict=True)
            lines = [f"{name} = {json.dumps(text)}" for name, text in entry]
            print("\n".join(["[[equivalent]]", *lines, 'reason = ""', ""]))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="a file or folder; may be repeated")
    parser.add_argument("--list-survivors", action="store_true", help="print survivors as entries for the list as well")
    # The tests mostly wait, so twice as many as there are processors keep those busy.
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument(
        "--remember", type=Path, metavar="FILE", help="keep what was noticed there; files that did not change keep it"
    )
    parser.add_argument("--patience", type=float, default=20.0, help="seconds of tests that a mutant has to survive")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    os.chdir(ROOT)
    os.environ.setdefault("ERGON_PLANS", PLAN_COUNT)
    equivalents = read_reasons(EQUIVALENTS_FILE, "equivalent")
    paths = list_sources(options.only)
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    for mutant in mutants:
        mutant.is_equivalent = to_key(mutant) in equivalents
    memory = KillCache(options.remember)
    earlier_kills = [Verdict(one, "killed", by) for one in mutants if (by := memory.find_kill(one)) is not None]
    mutants = [one for one in mutants if memory.find_kill(one) is None]
    tally = MutationProgress(len(mutants), memory)

    def work(runner: Runner) -> None:
        failing = sorted(runner.baseline.failing)
        print(f"{len(mutants)} mutants, {len(runner.baseline.seconds)} tests", flush=True)
        print("".join(f"not asked, because it fails or is skipped by itself: {name}\n" for name in failing), end="")
        tally.start()
        runner.ask(mutants, tally.add)

    runner_options = {"paths": paths, "tests": list(TESTS), "timeless": "tests/properties/"}
    code = Runner(**runner_options, workers=options.workers, patience=options.patience).run(work)
    if len(tally.verdicts) < len(mutants):
        print(f"the tests could not be run: pytest ended with {code}", file=sys.stderr)
        return 1
    if options.list_survivors:
        print_entries([one for one in tally.verdicts if not one.mutant.is_equivalent])
    return report(
        earlier_kills + tally.verdicts, equivalents, files={path.relative_to(ROOT).as_posix() for path in paths}
    )


def report(verdicts: list[Verdict], equivalents: dict[Key, str], *, files: set[str]) -> int:
    """Print the remaining mutants, then the figures; return 1 where a threshold is missed or the list is wrong."""
    figures = summarize(verdicts, equivalents)
    problems = find_stale(verdicts, equivalents, files)
    print_verdicts(verdicts, "timeout", {})
    print_verdicts(
        [one for one in verdicts if to_key(one.mutant) not in equivalents],
        "survived",
        read_reasons(EQUIVALENTS_FILE, "survivor"),
    )
    print("".join(f"{problem}\n" for problem in problems), end="")
    print(json.dumps(figures))
    is_missed = figures["score"] < MIN_SCORE or figures["by_time"] > MAX_BY_TIME
    return 1 if is_missed or problems else 0


if __name__ == "__main__":
    sys.exit(main())
