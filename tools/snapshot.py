"""Writes down what must not change by accident: `python tools/snapshot.py`, then look at the diff."""

from __future__ import annotations

from pathlib import Path

import ergon_framework

PUBLIC_API = Path(__file__).parents[1] / "tests" / "architecture" / "public_api.txt"


def public_api() -> str:
    """The names of the front door, one a line."""
    return "".join(f"{name}\n" for name in sorted(ergon_framework.__all__))


if __name__ == "__main__":
    PUBLIC_API.write_text(public_api(), encoding="utf-8")
    print(f"{PUBLIC_API.name}: {len(ergon_framework.__all__)} names")
