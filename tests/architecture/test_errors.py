"""One root: every exception of this package can be caught as ErgonError."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from ergon_framework.errors import ErgonError
from tests.architecture.rules import PACKAGE, iter_modules

SOURCE = Path(__file__).parents[2] / "src" / PACKAGE

#: Signals inside the engine and inside a test harness run that never reach a caller.
INTERNAL_SIGNALS = {"ergon_framework.engine.effects.Expired", "ergon_framework.testing.recorder.WorkerKilled"}

CASES = [("Stray", ValueError), ("Good", ErgonError)]


def iter_subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for child in type.__subclasses__(kind):
        yield child
        yield from iter_subclasses(child)


def find_exceptions_without_root(package: str) -> set[str]:
    """Return the exception classes defined below *package* that have another root."""
    own_exceptions = {
        kind for kind in iter_subclasses(BaseException) if f"{kind.__module__}.".startswith(f"{package}.")
    }
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in own_exceptions if not issubclass(kind, ErgonError)}


def test_every_framework_exception_derives_from_ergon_error():
    for module, _ in iter_modules(SOURCE):
        if module.startswith("database.migrations."):
            continue  # only Alembic can load them, and they define none
        importlib.import_module(f"{PACKAGE}.{module}".rstrip("."))
    assert find_exceptions_without_root(PACKAGE) <= INTERNAL_SIGNALS


def test_an_exception_with_another_root_is_caught():
    classes = [type(name, (root,), {"__module__": "somewhere.deep"}) for name, root in CASES]
    assert find_exceptions_without_root("somewhere") == {"somewhere.deep.Stray"}
    assert len(classes) == len(CASES)  # classes without a reference are collected, and would prove nothing
