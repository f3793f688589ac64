"""Write the snapshot of names that must not change by accident: `python tools/snapshot.py`, then review the diff."""

from __future__ import annotations

from pathlib import Path

import ergon_framework

PUBLIC_API = Path(__file__).parents[1] / "tests" / "architecture" / "public_api.txt"


def render_public_api() -> str:
    """Return the public names of the package, one a line."""
    return "".join(f"{name}\n" for name in sorted(ergon_framework.__all__))


if __name__ == "__main__":
    PUBLIC_API.write_text(render_public_api(), encoding="utf-8")
    print(f"{PUBLIC_API.name}: {len(ergon_framework.__all__)} names")
