"""Scan for careless code and for secrets: `python tools/scan.py FOLDER`, where FOLDER holds bandit and detect-secrets.

Every finding must be listed in tools/scan.toml with its number and a reason, and every entry must have its findings.
Comments in the code that silence a scanner are ignored, so that all exceptions are in one place; gitleaks, which runs
if it is installed, reads its own from .gitleaks.toml.
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
#: Code that ships or runs at users; tests and benchmarks consist of asserts and of processes.
SHIPPED: Final = ("src", "tools", "examples", "reference")

#: A rule and the file that breaks it.
Finding: TypeAlias = tuple[str, str]


def run_bandit(folder: Path, _left_out: list[str]) -> list[Finding]:
    command = [str(folder / "bandit"), "--quiet", "--recursive", "--ignore-nosec", "--format", "json", *SHIPPED]
    # It exits with 1 if it has findings.
    completed = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    report = json.loads(completed.stdout)
    if report["errors"]:
        raise SystemExit(f"bandit could not read: {report['errors']}")
    return [(finding["test_id"], finding["filename"]) for finding in report["results"]]


def run_detect_secrets(folder: Path, left_out: list[str]) -> list[Finding]:
    output = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [name for name in output.splitlines() if not any(fnmatch(name, pattern) for pattern in left_out)]
    # By default it asks a web service whether a possible key is valid.
    command = [str(folder / "detect-secrets"), "scan", "--no-verify", *files]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [(hit["type"], path) for path, hits in json.loads(output.stdout)["results"].items() for hit in hits]


def run_gitleaks() -> list[str]:
    """Return what gitleaks finds in the whole history, if it is on the PATH: no package registry in use has it."""
    program = shutil.which("gitleaks")
    if program is None:
        print("gitleaks: not run; it is not on the PATH (.gitleaks.toml has its exceptions)")
        return []
    command = [program, "git", "--no-banner", "--redact", "--exit-code", "3"]
    completed = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    print(f"gitleaks: exit code {completed.returncode}")
    return [completed.stdout + completed.stderr] if completed.returncode else []


def find_problems(findings: list[Finding], exceptions: list[dict[str, Any]]) -> list[str]:
    """Return findings that are not listed, entries without findings, and wrong numbers."""
    problems = []
    remaining = Counter(findings)
    for entry in exceptions:
        hits = [finding for finding in remaining if finding[0] == entry["rule"] and fnmatch(finding[1], entry["file"])]
        number = sum(remaining.pop(finding) for finding in hits)
        if not entry["reason"].strip():
            problems.append(f"{entry['file']}: {entry['rule']} is listed without a reason")
        if number != entry.get("number", number) or not number:
            problems.append(
                f"{entry['file']}: {entry['rule']} was found {number} times, {entry.get('number', 'some')} listed"
            )
    return problems + [
        f"{path}: {rule}, {number} times, is not in tools/scan.toml" for (rule, path), number in remaining.items()
    ]


SCANNERS: Final = {"bandit": run_bandit, "detect-secrets": run_detect_secrets}

if __name__ == "__main__":
    exceptions = tomllib.loads((ROOT / "tools" / "scan.toml").read_text(encoding="utf-8"))
    left_out = [line["file"] for line in exceptions.get("left-out", [])]
    faults = []
    for name, scanner in SCANNERS.items():
        findings = scanner(Path(sys.argv[1]), left_out)
        problems = find_problems(findings, exceptions.get(name, []))
        print(
            f"{name}: {len(findings)} found, {len(exceptions.get(name, []))} exceptions listed, {len(problems)} wrong"
        )
        faults += problems
    faults += run_gitleaks()
    print("\n".join(faults) or "clean")
    sys.exit(bool(faults))
