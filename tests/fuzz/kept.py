"""Inputs that earlier runs have found and their times, stored in the repository: runs on any machine add up.

One file of lines for each direction: every input with coverage of its own, in base64, the shortest first.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
#: Longer ones are not stored: short inputs reach most of the same code, and they would bloat the repository.
MAX_INPUT_BYTES = 4_096


def read_inputs(direction: str, folder: Path = FOLDER) -> list[bytes]:
    path = folder / f"{direction}.txt"
    return [b64decode(line) for line in path.read_text(encoding="ascii").split()] if path.exists() else []


def store_inputs(direction: str, new_inputs: Iterable[bytes], folder: Path = FOLDER) -> int:
    """Write *new_inputs* in place of the stored inputs; return how many are stored."""
    selected = sorted({each for each in new_inputs if len(each) <= MAX_INPUT_BYTES}, key=lambda each: (len(each), each))
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(b64encode(each).decode("ascii") + "\n" for each in selected if each)
    (folder / f"{direction}.txt").write_text(text, encoding="ascii")
    return len(selected)


def read_total(direction: str, folder: Path = FOLDER) -> dict[str, int]:
    return _read_totals(folder).get(direction, {"seconds": 0, "runs": 0})


def add_run(direction: str, *, seconds: int, runs: int, folder: Path = FOLDER) -> dict[str, int]:
    """Count a run; return the new total."""
    old_total = read_total(direction, folder)
    new_total = {"seconds": old_total["seconds"] + seconds, "runs": old_total["runs"] + runs}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_read_totals(folder) | {direction: new_total}, indent=1, sort_keys=True) + "\n"
    (folder / "total.json").write_text(text, encoding="ascii")
    return new_total


def _read_totals(folder: Path) -> dict[str, dict[str, int]]:
    path = folder / "total.json"
    totals: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="ascii")) if path.exists() else {}
    return totals
