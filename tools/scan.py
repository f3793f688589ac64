"""Looks for careless code and for secrets: `python tools/scan.py FOLDER`, where FOLDER holds bandit and detect-secrets.

Every finding must be listed in tools/scan.toml with its number and a reason, and every line there must be found.
Comments in the code that silence a scanner are not obeyed, so that all exceptions are in one place; gitleaks, which is
run where it is there, reads its own from .gitleaks.toml.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, TypeAlias

ROOT: Final = Path(__file__).parents[1]
#: What ships or runs at our users'; tests and benches are made of asserts and of processes.
SHIPPED: Final = ("src", "tools", "examples", "reference")

#: A rule and the file in which it was broken.
Finding: TypeAlias = tuple[str, str]


def bandit(folder: Path, _left_out: list[str]) -> list[Finding]:
    words = [str(folder / "bandit"), "--quiet", "--recursive", "--ignore-nosec", "--format", "json", *SHIPPED]
    # It exits with 1 where it has found something.
    told = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    report = json.loads(told.stdout)
    if report["errors"]:
        raise SystemExit(f"bandit could not read: {report['errors']}")
    return [(found["test_id"], found["filename"]) for found in report["results"]]


def secrets(folder: Path, left_out: list[str]) -> list[Finding]:
    told = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [name for name in told.splitlines() if not any(fnmatch(name, pattern) for pattern in left_out)]
    # Unless told otherwise it asks the web whether what it has found is a key that opens something.
    words = [str(folder / "detect-secrets"), "scan", "--no-verify", *files]
    told = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    return [(hit["type"], path) for path, hits in json.loads(told.stdout)["results"].items() for hit in hits]


def leaks() -> list[str]:
    """What gitleaks finds in the whole history, where it is on the PATH: no registry that we install from has it."""
    program = shutil.which("gitleaks")
    if program is None:
        print("gitleaks: not run; it is not on the PATH (.gitleaks.toml has its exceptions)")
        return []
    words = [program, "git", "--no-banner", "--redact", "--exit-code", "3"]
    told = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    print(f"gitleaks: exit code {told.returncode}")
    return [told.stdout + told.stderr] if told.returncode else []


def judged(found: list[Finding], listed: list[dict[str, Any]]) -> list[str]:
    """What is not listed, what is listed and was not found, and where the numbers differ."""
    problems = []
    left = Counter(found)
    for line in listed:
        hits = [finding for finding in left if finding[0] == line["rule"] and fnmatch(finding[1], line["file"])]
        number = sum(left.pop(finding) for finding in hits)
        if not line["reason"].strip():
            problems.append(f"{line['file']}: {line['rule']} is listed without a reason")
        if number != line.get("number", number) or not number:
            problems.append(
                f"{line['file']}: {line['rule']} was found {number} times, {line.get('number', 'some')} listed"
            )
    return problems + [
        f"{path}: {rule}, {number} times, is not in tools/scan.toml" for (rule, path), number in left.items()
    ]


SCANNERS: Final = {"bandit": bandit, "detect-secrets": secrets}

if __name__ == "__main__":
    known = tomllib.loads((ROOT / "tools" / "scan.toml").read_text(encoding="utf-8"))
    unread = [line["file"] for line in known.get("left-out", [])]
    faults = []
    for name, scanner in SCANNERS.items():
        hits = scanner(Path(sys.argv[1]), unread)
        wrong = judged(hits, known.get(name, []))
        print(f"{name}: {len(hits)} found, {len(known.get(name, []))} exceptions listed, {len(wrong)} wrong")
        faults += wrong
    faults += leaks()
    print("\n".join(faults) or "clean")
    sys.exit(bool(faults))
