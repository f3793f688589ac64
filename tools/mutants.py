"""Breaks the engine on purpose, one small change at a time, and sees which changes no test notices.

A change that cannot be noticed, because the program means the same with it, is listed with the
reason in tools/mutants_equivalent.toml. The last line that is printed is one object of JSON.
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

FOLDERS = ("src/ergon_framework/engine", "src/ergon_framework/task")
TESTS = ("tests/unit", "tests/twins", "tests/properties")
#: The first end their own process, the second start this again, and the others are of other rooms: all say nothing
#: about the two folders, and each would be run for every mutant that it happens to pass.
TESTS += ("--ignore=tests/unit/runner", "--ignore=tests/unit/tools", "--ignore-glob=tests/unit/test_d*")
TESTS += tuple(f"--ignore=tests/unit/{room}" for room in ("connectors", "executor", "facts", "new"))
#: Needs a server, which answers late where four run at once: what it notices then is not the mutant.
TESTS += ("--ignore=tests/twins/test_provider_execute_postgres.py",)
#: Counts the plans of a full run.
TESTS += ("--deselect=tests/properties/test_worlds.py::test_the_plans_are_full_of_trouble",)
LISTED = ROOT / "tools" / "mutants_equivalent.toml"
Key: TypeAlias = tuple[str, str, str]
#: Shares of the mutants that are not equivalent: noticed at all, and noticed by a time limit only.
NOTICED, BY_TIME = 0.95, 0.05
#: Plans that a property test runs for one mutant.
PLANS = "300"


def sources(only: list[str]) -> list[Path]:
    """The files of both folders, or those of them that *only* names."""
    chosen = [(ROOT / name).resolve() for name in only or FOLDERS]
    return sorted({path for one in chosen for path in ([one] if one.is_file() else one.rglob("*.py"))})


def key(mutant: Mutant) -> Key:
    return mutant.path.relative_to(ROOT).as_posix(), mutant.function, mutant.change


def reasons(path: Path, table: str) -> dict[Key, str]:
    """The mutants that one table of the list names, with the reason of each."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get(table, []) if path.exists() else []
    return {(one["file"], one["function"], one["change"]): one["reason"] for one in entries}


class Memory:
    """What tests have noticed before, for runs that only ask about the rest while tests are being written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._noticed = {tuple(one[:-1]): one[-1] for one in map(json.loads, lines)}

    def noticed(self, mutant: Mutant) -> str | None:
        return self._noticed.get(self._name(mutant))

    def keep(self, verdict: Verdict) -> None:
        if self._path is not None and verdict.word == "killed":
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([*self._name(verdict.mutant), verdict.by]) + "\n")

    def _name(self, mutant: Mutant) -> tuple[str | int, ...]:
        source = hashlib.sha256(mutant.path.read_bytes()).hexdigest()[:16]
        return source, *key(mutant), mutant.line


class Tally:
    """Counts while the mutants are asked about, and says how long it will still take."""

    def __init__(self, total: int, memory: Memory) -> None:
        self._memory = memory
        self.verdicts: list[Verdict] = []
        self._total = total
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self._memory.keep(verdict)
        done = len(self.verdicts)
        if done % 50 == 0 or done == self._total:
            words = Counter(one.word for one in self.verdicts)
            rate = done / (time.monotonic() - self._began)
            left = (self._total - done) / rate / 60
            told = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
            print(f"{done} of {self._total}: {told}; {rate * 60:.0f} a minute, {left:.1f} minutes left", flush=True)


def summary(verdicts: list[Verdict], known: dict[Key, str]) -> dict[str, float | int]:
    """The figures; a mutant that is listed as equivalent counts for nothing unless a test noticed it."""
    words = Counter(
        "equivalent" if one.word == "survived" and key(one.mutant) in known else one.word for one in verdicts
    )
    counted = max(1, len(verdicts) - words["equivalent"])
    return {
        "mutants": len(verdicts),
        "killed": words["killed"],
        "timeout": words["timeout"],
        "survived": words["survived"],
        "equivalent": words["equivalent"],
        "score": round((words["killed"] + words["timeout"]) / counted, 4),
        "by_time": round(words["timeout"] / counted, 4),
    }


def stale(verdicts: list[Verdict], known: dict[Key, str], files: set[str]) -> list[str]:
    """What the list of equivalents says and what is not so."""
    words = {key(one.mutant): one for one in verdicts}
    problems = [
        f"listed as equivalent, but there is no such mutant: {' | '.join(one)}"
        for one in known
        if one[0] in files and one not in words
    ]
    problems += [
        f"listed as equivalent, but {words[one].by} notices it: {' | '.join(one)}"
        for one in known
        if one in words and words[one].word != "survived"
    ]
    return problems


def show(verdicts: list[Verdict], word: str, why: dict[Key, str]) -> None:
    chosen = [one for one in verdicts if one.word == word]
    for one in sorted(chosen, key=lambda one: (one.mutant.path, one.mutant.line)):
        file, function, change = key(one.mutant)
        print(f"{word}: {file}:{one.mutant.line} {function} | {change}\n    {why.get(key(one.mutant), one.by)}")


def offer(verdicts: list[Verdict]) -> None:
    """The entries that the list would need, without what only a person can say: the reason."""
    for one in verdicts:
        if one.word == "survived":
            entry = zip(("file", "function", "change"), key(one.mutant), strict=True)
            lines = [f"{name} = {json.dumps(text)}" for name, text in entry]
            print("\n".join(["[[equivalent]]", *lines, 'reason = ""', ""]))


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="a file or folder; may be repeated")
    parser.add_argument("--list-survivors", action="store_true", help="print survivors as entries for the list as well")
    # The tests mostly wait, so that twice as many as there are processors keep those busy.
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument(
        "--remember", type=Path, metavar="FILE", help="keep what was noticed there; files that did not change keep it"
    )
    parser.add_argument("--patience", type=float, default=20.0, help="seconds of tests that a mutant has to survive")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments)
    os.chdir(ROOT)
    os.environ.setdefault("ERGON_PLANS", PLANS)
    known = reasons(LISTED, "equivalent")
    paths = sources(given.only)
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    for mutant in mutants:
        mutant.known = key(mutant) in known
    memory = Memory(given.remember)
    noticed = [Verdict(one, "killed", by) for one in mutants if (by := memory.noticed(one)) is not None]
    mutants = [one for one in mutants if memory.noticed(one) is None]
    tally = Tally(len(mutants), memory)

    def work(runner: Runner) -> None:
        failing = sorted(runner.baseline.failing)
        print(f"{len(mutants)} mutants, {len(runner.baseline.seconds)} tests", flush=True)
        print("".join(f"not asked, because it fails or is skipped by itself: {name}\n" for name in failing), end="")
        tally.begin()
        runner.ask(mutants, tally.add)

    asked = {"paths": paths, "tests": list(TESTS), "timeless": "tests/properties/"}
    code = Runner(**asked, workers=given.workers, patience=given.patience).run(work)
    if len(tally.verdicts) < len(mutants):
        print(f"the tests could not be run: pytest ended with {code}", file=sys.stderr)
        return 1
    if given.list_survivors:
        offer([one for one in tally.verdicts if not one.mutant.known])
    return judge(noticed + tally.verdicts, known, files={path.relative_to(ROOT).as_posix() for path in paths})


def judge(verdicts: list[Verdict], known: dict[Key, str], *, files: set[str]) -> int:
    """Print what is left, the figures last; 1 where a bar is missed or the list is wrong."""
    figures = summary(verdicts, known)
    problems = stale(verdicts, known, files)
    show(verdicts, "timeout", {})
    show([one for one in verdicts if key(one.mutant) not in known], "survived", reasons(LISTED, "survivor"))
    print("".join(f"{problem}\n" for problem in problems), end="")
    print(json.dumps(figures))
    missed = figures["score"] < NOTICED or figures["by_time"] > BY_TIME
    return 1 if missed or problems else 0


if __name__ == "__main__":
    sys.exit(main())
