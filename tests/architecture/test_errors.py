"""One root: whatever this package raises can be caught as ErgonError."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from ergon_framework.errors import ErgonError
from tests.architecture.house import PACKAGE, modules

SOURCE = Path(__file__).parents[2] / "src" / PACKAGE

#: Signals inside the engine and inside a trial that never reach a caller, and so carry no verdict.
SIGNALS = {"ergon_framework.engine.outcome.Expired", "ergon_framework.testing.scene.Death"}

CASES = [("Stray", ValueError), ("Good", ErgonError)]


def descendants(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for child in type.__subclasses__(kind):
        yield child
        yield from descendants(child)


def strangers(package: str) -> set[str]:
    """The exception classes defined below *package* that have another root."""
    ours = {kind for kind in descendants(BaseException) if f"{kind.__module__}.".startswith(f"{package}.")}
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in ours if not issubclass(kind, ErgonError)}


def test_every_exception_of_ours_has_the_one_root():
    for module, _ in modules(SOURCE):
        if module.startswith("schema.migrations."):
            continue  # only Alembic can load them, and they define none
        importlib.import_module(f"{PACKAGE}.{module}".rstrip("."))
    assert strangers(PACKAGE) <= SIGNALS


def test_an_exception_with_another_root_is_caught():
    kept = [type(name, (root,), {"__module__": "somewhere.deep"}) for name, root in CASES]
    assert strangers("somewhere") == {"somewhere.deep.Stray"}
    assert len(kept) == len(CASES)  # classes nobody holds are collected, and would prove nothing
