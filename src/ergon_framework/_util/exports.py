"""Lazy exports: the public names of a package, each loaded from its module on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from ergon_framework.errors import require_extra


def lazy_exports(
    package: str,
    names_by_module: Mapping[str, Sequence[str]],
    *,
    extras: Mapping[str, tuple[str, str]] | None = None,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of *package*, which loads a public name when it is first used.

    *names_by_module* has the names by the module, relative to the package, that defines them; ``"attribute as name"``
    exports an attribute under another name, and ``""`` exports a submodule. *extras* names, by module, the extra and
    the library that the module needs: without it, the use of a name raises MissingExtraError with the remedy.
    """
    sources = {}
    for module, names in names_by_module.items():
        for text in names:
            attribute, _, name = text.partition(" as ")
            sources[name or attribute] = (f"{package}.{module}" if module else f"{package}.{attribute}", attribute)
    requirements = {f"{package}.{module}": requirement for module, requirement in (extras or {}).items()}

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module_name, attribute = sources[name]
        if module_name in requirements:
            require_extra(*requirements[module_name])
        module = import_module(module_name)
        value = module if module_name == f"{package}.{attribute}" else getattr(module, attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load
