"""Check the programs of this folder with pyright: an error at each marked line, and at no other one.

Usage: run_pyright.py NODE_SCRIPT, the path of pyright's ``index.js``. Exits with 1 where a line differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.typing.test_programs import FOLDER, PROGRAMS, ROOT, read_marks


def run_pyright(script: str) -> set[tuple[str, int]]:
    """Return the lines with errors, by program."""
    command = [
        "node",
        script,
        "--outputjson",
        "--pythonpath",
        sys.executable,
        *(str(FOLDER / name) for name in PROGRAMS),
    ]
    process = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
    report = json.loads(process.stdout)
    return {
        (Path(each["file"]).relative_to(FOLDER).as_posix(), each["range"]["start"]["line"] + 1)
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    }


def main() -> int:
    reported, marked = run_pyright(sys.argv[1]), set(read_marks())
    for name, line in sorted(reported - marked):
        print(f"{FOLDER / name}:{line}: pyright reports an error in a line without a mark", file=sys.stderr)
    for name, line in sorted(marked - reported):
        print(f"{FOLDER / name}:{line}: pyright reports no error in a marked line", file=sys.stderr)
    print(json.dumps({"programs": len(PROGRAMS), "marked": len(marked), "wrong": len(reported ^ marked)}))
    return 1 if reported ^ marked else 0


if __name__ == "__main__":
    sys.exit(main())
