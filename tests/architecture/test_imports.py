"""Without any extra, every module imports, unless its own row of the table allows the library that is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.architecture.house import EXCEPTIONS, LIBRARIES, PACKAGE, area, modules, within

SOURCE = Path(__file__).parents[2] / "src" / PACKAGE
PROBE = Path(__file__).with_name("bare.py")


def failures(source: Path, names: list[str]) -> dict[str, str]:
    """The modules of *names* that do not import on the core alone, each with the library it misses."""
    done = subprocess.run(
        [sys.executable, str(PROBE), str(source.parent), *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout)
    return result


def unexcused(missing: dict[str, str]) -> dict[str, str]:
    """What is left of *missing* when each module's own row is taken into account."""
    left = {}
    for name, library in missing.items():
        module = name.removeprefix(PACKAGE).removeprefix(".")
        allowed = LIBRARIES[area(module) or ""].union(
            *(more for key, more in EXCEPTIONS.items() if within(module, key))
        )
        if "*" not in allowed and library.partition(".")[0] not in allowed - {"opentelemetry"}:
            left[name] = library
    return left


def test_every_module_imports_without_the_extras():
    names = [f"{PACKAGE}.{module}".rstrip(".") for module, _ in modules(SOURCE)]
    assert unexcused(failures(SOURCE, names)) == {}


def test_a_module_that_needs_a_foreign_extra_is_caught(tmp_path):
    package = tmp_path / PACKAGE
    for name, text in {
        "__init__.py": "",
        "cli/main.py": "import typer",
        "engine/slots.py": "import typer",
        "telemetry/logs.py": "import opentelemetry.sdk.trace",
        "telemetry/names.py": "import opentelemetry.trace, pydantic",
        "runner/signals.py": "from ergon_framework.cli import main",
        "task/base.py": "raise RuntimeError('at import')",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    names = [f"{PACKAGE}.{module}".rstrip(".") for module, _ in modules(package)]
    assert unexcused(failures(package, names)) == {
        "ergon_framework.engine.slots": "typer",
        "ergon_framework.telemetry.logs": "opentelemetry.sdk",
        "ergon_framework.runner.signals": "typer",
        "ergon_framework.task.base": "RuntimeError: at import",
    }
