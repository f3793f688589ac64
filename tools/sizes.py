"""Measures what each extra costs: `python tools/sizes.py`, libraries pinned by constraints/dev.txt.

Each extra is installed with the built wheel into an empty environment of its own. Sizes are of what is installed,
without compiled bytecode. The time is that of a fresh interpreter with the import, less that of one without: medians of
starts in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
STARTS: Final = 7
#: What a program imports that wants the extra.
MODULES: Final = {
    "": "ergon_framework",
    "api": "ergon_framework.providers.api",
    "celery": "ergon_framework.providers.celery_task",
    "cli": "ergon_framework.cli.app",
    "encryption": "ergon_framework.connectors.encryption",
    "cron": "ergon_framework.executor.jobs.timetable",
    "grpc": "ergon_framework.facts.service.client",
    "nats": "ergon_framework.connectors.nats",
    "otel": "ergon_framework.runner.exporting",
    "postgres": "ergon_framework.connectors.postgres",
    "prometheus": "ergon_framework.telemetry.exposition",
    "rabbitmq": "ergon_framework.connectors.rabbitmq",
    "redis": "ergon_framework.connectors.redis",
    "s3": "ergon_framework.facts.stores.s3",
    "testing": "ergon_framework.testing.isolation",
    "uvloop": "uvloop",
}
#: Extras that are of no use without another one, which is installed with them.
BESIDE: Final = {"api": "postgres", "celery": "postgres"}


def wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def install(built: Path, extra: str, home: Path) -> Path:
    """The interpreter of a fresh environment that holds the wheel with *extra*, and with what it needs beside."""
    extra = ",".join(filter(None, (extra, BESIDE.get(extra))))
    uv = [str(Path(sys.executable).with_name("uv")), "--quiet"]
    python = home / "bin" / "python"
    subprocess.run([*uv, "venv", "--python", sys.executable, str(home)], check=True)
    wanted = f"ergon-framework[{extra}] @ {built.as_uri()}" if extra else f"ergon-framework @ {built.as_uri()}"
    pinned = ["--constraint", str(ROOT / "constraints" / "dev.txt")]
    subprocess.run([*uv, "pip", "install", "--link-mode", "copy", "--python", str(python), *pinned, wanted], check=True)
    return python


def size(python: Path) -> tuple[int, int]:
    """How many bytes, and how many distributions, the environment holds."""
    library = next(python.parents[1].glob("lib/python*/site-packages"))
    files = [path for path in library.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sum(path.stat().st_size for path in files), len(list(library.glob("*.dist-info")))


def took(python: Path, module: str) -> float:
    """The milliseconds that importing *module* adds to the start of a process."""
    # As for whoever installs it: the first import compiles, and is not counted.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def start(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([str(python), "-c", code], check=True, env=env)
        return time.perf_counter() - began

    start(f"import {module}")
    pairs = [(start(f"import {module}"), start("pass")) for _ in range(STARTS)]
    return 1000 * (statistics.median(with_it for with_it, _ in pairs) - statistics.median(bare for _, bare in pairs))


def measure(built: Path, extra: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ergon-sizes-") as home:
        python = install(built, extra, Path(home))
        held, distributions = size(python)
        return {
            "extra": "+".join(filter(None, (extra, BESIDE.get(extra)))) or "(none)",
            "packages": distributions,
            "megabytes": round(held / 1e6, 1),
            "imports": MODULES[extra],
            "milliseconds": round(took(python, MODULES[extra])),
        }


if __name__ == "__main__":
    rows = []
    print(f"{'extra':<17}{'packages':>9}{'MB':>8}{'import ms':>11}  what is imported")
    with tempfile.TemporaryDirectory(prefix="ergon-wheel-") as folder:
        made = wheel(Path(folder))
        for name in MODULES:
            row = measure(made, name)
            rows.append(row)
            told = f"{row['extra']:<17}{row['packages']:>9}{row['megabytes']:>8}{row['milliseconds']:>11}"
            print(f"{told}  {row['imports']}", flush=True)
    print(json.dumps({"python": sys.version.split()[0], "sizes": rows}))
