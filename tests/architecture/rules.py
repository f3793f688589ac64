"""The import rules as data: allowed imports, the libraries of each area, and the modules without side effects.

`find_violations` reads source text and imports nothing, so it also checks a broken package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "ergon_framework"

#: Bottom first: each may import the ones before it.
VOCABULARY = (
    "redaction",
    "errors",
    "_util",
    "clock",
    "gates",
    "policy",
    "scope",
    "failure",
    "diagnostics",
    "history",
    "audit",
    "transaction",
)

#: The packages that documents, examples, templates and programs of users import from; "" is the package root.
PUBLIC_PACKAGES = (
    "",
    "connectors",
    "connectors.postgres",
    "connectors.rabbitmq",
    "connectors.nats",
    "connectors.redis",
    "providers",
    "providers.postgres",
    "executors",
    "jobs",
    "facts",
    "facts.service",
    "telemetry",
    "testing",
    "testing.conformance",
)

#: The client libraries of each vendor folder below connectors/.
CLIENT_LIBRARIES = {
    "rabbitmq": {"aio_pika", "aiormq", "pamqp", "pika"},
    "nats": {"nats"},
    "redis": {"hiredis", "redis"},
    "postgres": {"psycopg", "psycopg_pool"},
    "kafka": {"confluent_kafka"},
    "sqs": {"aiobotocore", "boto3", "botocore"},
}

AREAS = {
    "engine",
    "telemetry",
    "database",
    "worker",
    "task",
    "executors",
    "jobs",
    "facts",
    "providers",
    "connectors",
    *(f"connectors.{vendor}" for vendor in CLIENT_LIBRARIES),
}
#: What executors, jobs and facts build on.
SHARED_AREAS = {"engine", "telemetry", "worker", "task", "connectors", "connectors.postgres", "database"}

#: area -> the areas it may import, in addition to itself and the vocabulary ("" is the package root).
ALLOWED_AREAS: dict[str, set[str]] = {
    "": AREAS | {"runner"},
    "vocabulary": set(),
    "engine": set(),
    "telemetry": set(),
    "database": {"connectors"},
    "connectors": {"telemetry"},
    **{f"connectors.{vendor}": {"connectors", "telemetry"} for vendor in CLIENT_LIBRARIES},
    "connectors.postgres": {"connectors", "telemetry", "database"},
    "worker": {"engine", "telemetry", "connectors"},
    "task": {"engine", "telemetry", "connectors", "worker"},
    "executors": SHARED_AREAS,
    "jobs": SHARED_AREAS | {"executors"},
    "facts": SHARED_AREAS,
    "providers": {"engine", "telemetry", "database"},
    "runner": AREAS | {""},
    "testing": AREAS | {"", "runner", "cli"},
    "cli": AREAS | {"", "runner", "testing"},
}

#: Modules that import each other, type-only imports included, and why they are separate modules all the same.
KNOWN_CYCLES: dict[frozenset[str], str] = {
    frozenset({"scope", "transaction"}): "a scope refers to its transaction, whose ids are derived within the scope",
    frozenset({"connectors.base", "connectors.dead_letters"}): (
        "the contract names the dead-letter records, which are built from its outcomes"
    ),
    frozenset({"engine.effects", "engine.scheduler"}): "effects are typed with the slots that yield them",
    frozenset({"testing.conformance.check", "testing.conformance.connector.adapter"}): (
        "a check receives the system under test, which says which checks it excludes"
    ),
    frozenset(f"providers.celery.{name}" for name in ("dead_letter_publisher", "delivery", "task")): (
        "a task creates deliveries, a delivery reports to its task, and the publisher is loaded on first use"
    ),
}

PYDANTIC_LIBRARIES = {"pydantic", "pydantic_core"}
SHELL_LIBRARIES = {"pytest", "typer", "rich"}

#: area -> the libraries it may import; a library covers its submodules.
ALLOWED_LIBRARIES: dict[str, set[str]] = {
    "": set(),
    # For a type variable with a default, seen by type checkers only.
    "vocabulary": PYDANTIC_LIBRARIES | {"typing_extensions"},
    "engine": set(),
    "telemetry": {"opentelemetry", "prometheus_client"},
    "database": {"sqlalchemy", "alembic"},
    "connectors": PYDANTIC_LIBRARIES,
    **{f"connectors.{vendor}": clients for vendor, clients in CLIENT_LIBRARIES.items()},
    "task": PYDANTIC_LIBRARIES,
    "worker": PYDANTIC_LIBRARIES,
    "executors": PYDANTIC_LIBRARIES,
    "jobs": PYDANTIC_LIBRARIES,
    "facts": PYDANTIC_LIBRARIES,
    "providers": PYDANTIC_LIBRARIES,
    "runner": {"uvloop"},
    "testing": SHELL_LIBRARIES,
    "cli": SHELL_LIBRARIES,
}

STORAGE_LIBRARIES = {"psycopg", "psycopg_pool", "grpc", "grpc_health", "google"}
#: Modules that may import more than their area; "*" is any library.
EXTRA_LIBRARIES: dict[str, set[str]] = {
    "runner.settings": PYDANTIC_LIBRARIES,
    "runner.settings_sources": PYDANTIC_LIBRARIES,
    "runner.otlp": {"opentelemetry"},
    **{f"database.{name}": {"psycopg"} for name in ("address", "connection", "errors", "operation", "pool")},
    "connectors.encryption": {"cryptography"},
    "jobs": STORAGE_LIBRARIES,
    "jobs.cron": {"cronsim"},
    "facts.stores": STORAGE_LIBRARIES | {"obstore"},
    "facts.service": STORAGE_LIBRARIES | {"cryptography"},
    "providers.postgres": {"*"},
    "providers.celery": {"*"},
    "providers.http": {"*"},
}

#: Distributions that share the namespace of opentelemetry-api but are not part of it.
NON_API_OPENTELEMETRY = tuple(
    f"opentelemetry.{name}" for name in ("sdk", "exporter", "instrumentation", "semconv", "proto")
)
#: The module that sets them up, if that was requested.
TELEMETRY_SETUP_MODULE = "runner.otlp"

#: Modules that decide and never act: clocks and random sources are parameters.
PURE_MODULES = (
    "diagnostics",
    "gates",
    "history",
    *(f"engine.{name}" for name in ("effects", "retry")),
    *(f"worker.{name}" for name in ("lifecycle", "consume", "produce", "fetch", "settle", "handle", "admission")),
    *(f"worker.{name}" for name in ("report", "worst_case")),
    *(f"executors.{name}" for name in ("json_lines", "protocol", "decision")),
    *(f"providers.{name}" for name in ("errors", "error_mapping", "retry", "circuit_breaker", "quota", "health")),
    *(f"providers.{name}" for name in ("models", "idempotency", "state", "execution", "policy", "dead_letter")),
    "providers.celery.invocation",
    *(f"facts.{name}" for name in ("errors", "model", "identity", "policy", "fact_window", "fact_log")),
    *(f"facts.{name}" for name in ("replica_state", "replication", "artifact_copy", "concurrent_calls", "consistency")),
)
SIDE_EFFECT_MODULES = {"asyncio", "threading", "time", "random", "logging"}

#: All names of the package that the independent oracle may use: never behaviour.
ORACLE_ALLOWED_MODULES = tuple(f"{PACKAGE}.{name}" for name in ("errors", "worker.exceptions", "worker.policies"))


@dataclass(frozen=True, slots=True)
class Import:
    """One import as written: its dotted target, whether only type checkers evaluate it, and its relative level."""

    target: str
    typing: bool = False
    level: int = 0


def is_within(name: str, area: str) -> bool:
    return name == area or name.startswith(area + ".")


def list_imports(path: Path) -> list[Import]:
    """Return every import in *path*, at any depth, literal dynamic ones included."""
    return list(_iter_imports(ast.parse(path.read_text(encoding="utf-8")), typing=False))


def _iter_imports(node: ast.AST, *, typing: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, typing) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        yield from (Import(f"{module}.{alias.name}".strip("."), typing, node.level) for alias in node.names)
    elif isinstance(node, ast.Call) and (target := _find_dynamic_import(node)):
        yield Import(target, typing)
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        for child in node.body:
            yield from _iter_imports(child, typing=True)
        for child in node.orelse:
            yield from _iter_imports(child, typing=typing)
        return
    for child in ast.iter_child_nodes(node):
        yield from _iter_imports(child, typing=typing)


def _find_dynamic_import(call: ast.Call) -> str | None:
    """Return the module that a call imports by a literal name: import_module, __import__ or extra()."""
    name = ast.unparse(call.func).rpartition(".")[2]
    position = {"import_module": 0, "__import__": 0, "extra": 1}.get(name)
    if position is None or len(call.args) <= position:
        return None
    argument = call.args[position]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def find_area(module: str) -> str | None:
    """Return the row of the table for *module* (or a name in it); None if there is none."""
    first, _, rest = module.partition(".")
    if first in VOCABULARY:
        return "vocabulary"
    if first == "connectors" and (vendor := rest.partition(".")[0]) in CLIENT_LIBRARIES:
        return f"connectors.{vendor}"
    return first if first in ALLOWED_AREAS else None


def iter_modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Yield each module below *package* by its dotted name without the package's; the package root is ''."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def find_violations(package: Path) -> list[str]:
    """Return every violation of the table below *package*, one line each; an absent folder violates nothing."""
    violations = []
    for module, path in iter_modules(package):
        own_area = find_area(module)
        if own_area is None:
            violations.append(f"{module}: has no row in the table")
            continue
        if path.name == "__init__.py" and _must_be_empty(module) and path.read_text(encoding="utf-8").strip():
            violations.append(f"{module}: an inner __init__.py is empty")
        is_facade = path.name == "__init__.py" and module != ""
        for item in list_imports(path):
            reason = _find_facade_reason(module, item) if is_facade else _find_reason(module, own_area, item)
            if reason:
                violations.append(f"{module} -> {item.target}: {reason}")
    return violations


def find_cycles(package: Path) -> set[frozenset[str]]:
    """Return the groups of modules below *package* that import each other at any depth, also for types only."""
    paths = dict(iter_modules(package))
    imports = {
        module: {_find_module(item.target, paths) for item in list_imports(path) if is_within(item.target, PACKAGE)}
        for module, path in paths.items()
    }
    reachable = {module: _find_reachable(module, imports) for module in paths}
    return {
        frozenset(other for other in reachable[module] if module in reachable[other])
        for module in paths
        if module in reachable[module]
    }


def _find_module(target: str, paths: dict[str, Path]) -> str:
    """Return the module of the package that an import of *target* loads; "" is the package root."""
    name = target.removeprefix(PACKAGE).removeprefix(".")
    while name not in paths:
        name = name.rpartition(".")[0]
    return name


def _find_reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    reachable: set[str] = set()
    pending = [start]
    while pending:
        new_modules = imports[pending.pop()] - reachable
        reachable |= new_modules
        pending += new_modules
    return reachable


def _must_be_empty(module: str) -> bool:
    return module not in PUBLIC_PACKAGES


def _find_facade_reason(module: str, item: Import) -> str | None:
    """Return why a public package may not import *item*: it loads its own modules on first use and nothing else."""
    if item.typing:
        return None if is_within(item.target, f"{PACKAGE}.{module}") else "a public package exports its own modules"
    allowed = ("typing.", f"{PACKAGE}._util.exports.")
    return None if item.target.startswith(allowed) else "a public package loads its names on first use"


def _find_reason(module: str, own_area: str, item: Import) -> str | None:
    """Return why *item* is not allowed in *module*; None if it is."""
    root = item.target.partition(".")[0]
    if item.level:
        return "absolute imports only"
    if root == PACKAGE:
        return _find_package_reason(module, own_area, item)
    if root in sys.stdlib_module_names:
        is_pure = any(is_within(module, name) for name in PURE_MODULES)
        return "this module only decides" if is_pure and root in SIDE_EFFECT_MODULES else None
    if item.target.startswith(NON_API_OPENTELEMETRY) and module != TELEMETRY_SETUP_MODULE:
        return "the API only, not what shares its namespace"
    allowed = ALLOWED_LIBRARIES[own_area].union(
        *(extra for name, extra in EXTRA_LIBRARIES.items() if is_within(module, name))
    )
    return None if "*" in allowed or root in allowed else "this library does not belong here"


def _find_package_reason(module: str, own_area: str, item: Import) -> str | None:
    target = item.target.removeprefix(PACKAGE).removeprefix(".")
    # A name of the package root (`from ergon_framework import consumer`) is not a folder of the package.
    target_area = find_area(target)
    target_area = "" if target_area is None else target_area
    if target_area == own_area == "vocabulary":
        # An annotation makes no import cycle at run time, so type-only imports may look upward here,
        # and only here: elsewhere the use of a type is a dependency on its owner.
        is_downward = VOCABULARY.index(target.partition(".")[0]) <= VOCABULARY.index(module.partition(".")[0])
        return None if is_downward or item.typing else "the vocabulary imports downward"
    if target_area not in {own_area, "vocabulary"} | ALLOWED_AREAS[own_area]:
        return "not its neighbour"
    must_be_public = target_area != own_area and own_area in {"cli", "testing"}
    return "not public" if must_be_public and any(part.startswith("_") for part in target.split(".")) else None


def find_oracle_violations(path: Path, root: Path) -> list[str]:
    """Return what the oracle in *path* uses of the package beyond the allowed names, also through other test files."""
    violations, seen, pending = [], {path}, [path]
    while pending:
        for item in list_imports(pending.pop()):
            if (item.level or is_within(item.target, PACKAGE)) and not _is_allowed_for_oracle(item):
                violations.append(f"{item.target}: the oracle must not know it")
            if is_within(item.target, "tests"):
                # `from tests.properties.plans import Plan` names the module or a name in it.
                base = root / item.target.replace(".", "/")
                files = {base.with_suffix(".py"), base.parent.with_suffix(".py")}
                new_files = {file for file in files if file.exists()} - seen
                seen |= new_files
                pending += new_files
    return violations


def _is_allowed_for_oracle(item: Import) -> bool:
    return not item.level and any(item.target.startswith(f"{name}.") for name in ORACLE_ALLOWED_MODULES)
