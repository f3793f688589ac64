"""Imports modules as if only the core were installed: bare.py SOURCE MODULE…; prints the failures as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.abc import MetaPathFinder

#: The core and its dependencies.
CORE = {
    "ergon_framework",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
    "opentelemetry",
    "importlib_metadata",
    "zipp",
}
NON_API_PACKAGES = {"sdk", "exporter", "instrumentation", "semconv", "proto"}


class Blocker(MetaPathFinder):
    """Rejects every library outside the core, as if it were not installed."""

    def find_spec(self, fullname, path=None, target=None):
        root, _, submodule = fullname.partition(".")
        # A leading underscore is Python's own build data, which no list of the standard library names.
        is_outside_core = root not in CORE and root not in sys.stdlib_module_names and not root.startswith("_")
        if is_outside_core or (root == "opentelemetry" and submodule.partition(".")[0] in NON_API_PACKAGES):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def find_import_failure(name: str) -> str | None:
    """Return what prevents *name* from importing: a library, or the error itself; None if nothing does."""
    try:
        importlib.import_module(name)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ModuleNotFoundError) and cause.name:
                return cause.name
            cause = cause.__cause__ or cause.__context__
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocker())
    sys.path.insert(0, sys.argv[1])
    print(json.dumps({name: failure for name in sys.argv[2:] if (failure := find_import_failure(name))}))
