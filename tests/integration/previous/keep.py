"""Packs the release of this checkout and its smoke test, so that a new schema can be tried with it: keep.py [FOLDER].

Run it when a release is made, and commit what it writes in place of the archive before it.
"""

from __future__ import annotations

import sys
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGE = "ergon_framework"


def pack_release(folder: Path) -> Path:
    """The archive, written into *folder*: the same checkout gives the same bytes."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    archive = folder / f"{PACKAGE}-{version}.zip"
    sources = {path.relative_to(ROOT / "src").as_posix(): path for path in (ROOT / "src" / PACKAGE).rglob("*.py")}
    sources["smoke.py"] = HERE / "smoke.py"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as archive_file:
        for name, path in sorted(sources.items()):
            archive_file.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive


if __name__ == "__main__":
    print(pack_release(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE).name)
