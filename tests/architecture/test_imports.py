"""Without any extra, every module imports, unless its own row of the table allows the missing library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.architecture.rules import (
    ALLOWED_LIBRARIES,
    EXTRA_LIBRARIES,
    PACKAGE,
    find_area,
    is_within,
    iter_modules,
)

SOURCE = Path(__file__).parents[2] / "src" / PACKAGE
PROBE = Path(__file__).with_name("bare.py")


def find_failures(source: Path, names: list[str]) -> dict[str, str]:
    """Return the modules of *names* that do not import on the core alone, each with its missing library."""
    process = subprocess.run(
        [sys.executable, str(PROBE), str(source.parent), *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    result: dict[str, str] = json.loads(process.stdout)
    return result


def find_unexcused(missing: dict[str, str]) -> dict[str, str]:
    """Return the part of *missing* that the modules' own rows do not allow."""
    remaining = {}
    for name, library in missing.items():
        module = name.removeprefix(PACKAGE).removeprefix(".")
        allowed = ALLOWED_LIBRARIES[find_area(module) or ""].union(
            *(extra for key, extra in EXTRA_LIBRARIES.items() if is_within(module, key))
        )
        if "*" not in allowed and library.partition(".")[0] not in allowed - {"opentelemetry"}:
            remaining[name] = library
    return remaining


def test_every_module_imports_without_the_extras():
    names = [f"{PACKAGE}.{module}".rstrip(".") for module, _ in iter_modules(SOURCE)]
    assert find_unexcused(find_failures(SOURCE, names)) == {}


def test_a_module_that_needs_an_extra_of_another_area_is_caught(tmp_path):
    package = tmp_path / PACKAGE
    for name, text in {
        "__init__.py": "",
        "cli/main.py": "import typer",
        "engine/scheduler.py": "import typer",
        "telemetry/logs.py": "import opentelemetry.sdk.trace",
        "telemetry/names.py": "import opentelemetry.trace, pydantic",
        "runner/signals.py": "from ergon_framework.cli import main",
        "task/base.py": "raise RuntimeError('at import')",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    names = [f"{PACKAGE}.{module}".rstrip(".") for module, _ in iter_modules(package)]
    assert find_unexcused(find_failures(package, names)) == {
        "ergon_framework.engine.scheduler": "typer",
        "ergon_framework.telemetry.logs": "opentelemetry.sdk",
        "ergon_framework.runner.signals": "typer",
        "ergon_framework.task.base": "RuntimeError: at import",
    }
