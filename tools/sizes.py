"""Measure the cost of each extra: `python tools/sizes.py`, libraries pinned by constraints/dev.txt.

Each extra is installed with the built wheel into its own empty environment. Sizes are those of the installed files,
without compiled bytecode. The time is that of a fresh interpreter with the import, minus that of one without: medians
of alternating starts.
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
START_COUNT: Final = 7
#: The module that a program with the extra imports.
MODULES: Final = {
    "": "ergon_framework",
    "api": "ergon_framework.providers.http.api",
    "celery": "ergon_framework.providers.celery.task",
    "cli": "ergon_framework.cli.app",
    "encryption": "ergon_framework.connectors.encryption",
    "cron": "ergon_framework.jobs.cron",
    "grpc": "ergon_framework.facts.service.client",
    "nats": "ergon_framework.connectors.nats",
    "otel": "ergon_framework.runner.otlp",
    "postgres": "ergon_framework.connectors.postgres",
    "prometheus": "ergon_framework.telemetry.prometheus",
    "rabbitmq": "ergon_framework.connectors.rabbitmq",
    "redis": "ergon_framework.connectors.redis",
    "s3": "ergon_framework.facts.stores.s3",
    "testing": "ergon_framework.testing.no_network",
    "uvloop": "uvloop",
}
#: Extras that require another one, which is installed with them.
REQUIRED_EXTRAS: Final = {"api": "postgres", "celery": "postgres"}


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def install(wheel: Path, extra: str, home: Path) -> Path:
    """Return the interpreter of a fresh environment with the wheel, *extra*, and the extra it requires."""
    extra = ",".join(filter(None, (extra, REQUIRED_EXTRAS.get(extra))))
    uv = [str(Path(sys.executable).with_name("uv")), "--quiet"]
    python = home / "bin" / "python"
    subprocess.run([*uv, "venv", "--python", sys.executable, str(home)], check=True)
    requirement = f"ergon-framework[{extra}] @ {wheel.as_uri()}" if extra else f"ergon-framework @ {wheel.as_uri()}"
    constraints = ["--constraint", str(ROOT / "constraints" / "dev.txt")]
    subprocess.run(
        [*uv, "pip", "install", "--link-mode", "copy", "--python", str(python), *constraints, requirement], check=True
    )
    return python


def measure_size(python: Path) -> tuple[int, int]:
    """Return the number of bytes and of distributions in the environment."""
    library = next(python.parents[1].glob("lib/python*/site-packages"))
    files = [path for path in library.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sum(path.stat().st_size for path in files), len(list(library.glob("*.dist-info")))


def measure_import(python: Path, module: str) -> float:
    """Return the milliseconds that importing *module* adds to the start of a process."""
    # As for a user: the first import compiles, and is not counted.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def time_start(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([str(python), "-c", code], check=True, env=env)
        return time.perf_counter() - began

    time_start(f"import {module}")
    pairs = [(time_start(f"import {module}"), time_start("pass")) for _ in range(START_COUNT)]
    return 1000 * (
        statistics.median(with_import for with_import, _ in pairs)
        - statistics.median(without_import for _, without_import in pairs)
    )


def measure(wheel: Path, extra: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ergon-sizes-") as home:
        python = install(wheel, extra, Path(home))
        size_bytes, distributions = measure_size(python)
        return {
            "extra": "+".join(filter(None, (extra, REQUIRED_EXTRAS.get(extra)))) or "(none)",
            "packages": distributions,
            "megabytes": round(size_bytes / 1e6, 1),
            "imports": MODULES[extra],
            "milliseconds": round(measure_import(python, MODULES[extra])),
        }


if __name__ == "__main__":
    rows = []
    print(f"{'extra':<17}{'packages':>9}{'MB':>8}{'import ms':>11}  what is imported")
    with tempfile.TemporaryDirectory(prefix="ergon-wheel-") as folder:
        built_wheel = build_wheel(Path(folder))
        for name in MODULES:
            row = measure(built_wheel, name)
            rows.append(row)
            text = f"{row['extra']:<17}{row['packages']:>9}{row['megabytes']:>8}{row['milliseconds']:>11}"
            print(f"{text}  {row['imports']}", flush=True)
    print(json.dumps({"python": sys.version.split()[0], "sizes": rows}))
