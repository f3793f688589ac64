"""What earlier runs have found and how long they took, kept in the repository: runs on any machine add up.

One file of lines for each direction: every input that reaches something of its own, in base64, the shortest first.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
#: Longer ones are not kept: what they reach a short one mostly reaches too, and the repository is no store.
LONGEST = 4_096


def inputs(direction: str, folder: Path = FOLDER) -> list[bytes]:
    path = folder / f"{direction}.txt"
    return [b64decode(line) for line in path.read_text(encoding="ascii").split()] if path.exists() else []


def keep(direction: str, found: Iterable[bytes], folder: Path = FOLDER) -> int:
    """Write *found* in the place of what was there; how many are kept."""
    chosen = sorted({each for each in found if len(each) <= LONGEST}, key=lambda each: (len(each), each))
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(b64encode(each).decode("ascii") + "\n" for each in chosen if each)
    (folder / f"{direction}.txt").write_text(text, encoding="ascii")
    return len(chosen)


def total(direction: str, folder: Path = FOLDER) -> dict[str, int]:
    return _totals(folder).get(direction, {"seconds": 0, "runs": 0})


def add(direction: str, *, seconds: int, runs: int, folder: Path = FOLDER) -> dict[str, int]:
    """Count a run; the new total."""
    before = total(direction, folder)
    after = {"seconds": before["seconds"] + seconds, "runs": before["runs"] + runs}
    folder.mkdir(parents=True, exist_ok=True)
    told = json.dumps(_totals(folder) | {direction: after}, indent=1, sort_keys=True) + "\n"
    (folder / "total.json").write_text(told, encoding="ascii")
    return after


def _totals(folder: Path) -> dict[str, dict[str, int]]:
    path = folder / "total.json"
    found: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="ascii")) if path.exists() else {}
    return found
