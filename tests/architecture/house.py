"""The house rules as data: who may import whom, which libraries belong where, which modules only decide.

`trespasses` reads source text and imports nothing, so a broken package is judged like a healthy one.
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
    "strict_json",
    "policy",
    "scope",
    "failure",
    "finding",
    "history",
    "audit",
    "transaction",
)

#: The client libraries of each vendor folder below connectors/.
CLIENTS = {
    "rabbitmq": {"aio_pika", "aiormq", "pamqp", "pika"},
    "nats": {"nats"},
    "redis": {"hiredis", "redis"},
    "postgres": {"psycopg", "psycopg_pool"},
    "kafka": {"confluent_kafka"},
    "sqs": {"aiobotocore", "boto3", "botocore"},
}

SLICES = {"engine", "telemetry", "schema", "task", "executor", "facts", "providers", "connectors"} | {
    f"connectors.{vendor}" for vendor in CLIENTS
}
BUILDERS = {"engine", "telemetry", "task", "connectors", "connectors.postgres", "schema"}

#: area -> the areas it may import, besides itself and the vocabulary ("" is the front door).
MAY_IMPORT: dict[str, set[str]] = {
    "": SLICES | {"runner"},
    "vocabulary": set(),
    "engine": set(),
    "telemetry": set(),
    "schema": set(),
    "connectors": {"telemetry"},
    **{f"connectors.{vendor}": {"connectors", "telemetry"} for vendor in CLIENTS},
    "connectors.postgres": {"connectors", "telemetry", "schema"},
    "task": {"engine", "telemetry", "connectors"},
    "executor": BUILDERS,
    "facts": BUILDERS,
    "providers": {"engine", "telemetry", "schema"},
    "runner": SLICES | {""},
    "testing": SLICES | {"", "runner", "cli"},
    "cli": SLICES | {"", "runner", "testing"},
}

PYDANTIC = {"pydantic", "pydantic_core"}
SHELL = {"pytest", "typer", "rich"}

#: area -> the libraries it may import; a library covers its submodules.
LIBRARIES: dict[str, set[str]] = {
    "": set(),
    "vocabulary": PYDANTIC,
    "engine": set(),
    "telemetry": {"opentelemetry", "prometheus_client"},
    "schema": {"sqlalchemy", "alembic"},
    "connectors": PYDANTIC,
    **{f"connectors.{vendor}": clients for vendor, clients in CLIENTS.items()},
    "task": PYDANTIC,
    "executor": PYDANTIC,
    "facts": PYDANTIC,
    "providers": PYDANTIC,
    "runner": {"uvloop"},
    "testing": SHELL,
    "cli": SHELL,
}

STORAGE = {"psycopg", "psycopg_pool", "grpc", "grpc_health", "google"}
#: Modules that may import more than their area; "*" is any library.
EXCEPTIONS: dict[str, set[str]] = {
    "runner.settings": PYDANTIC,
    "runner.sources": PYDANTIC,
    "runner.exporting": {"opentelemetry"},
    **{
        f"schema.{name}": {"psycopg"}
        for name in ("ear", "failures", "libraries", "line", "lines", "operation", "snapshot")
    },
    "connectors.encryption": {"cryptography"},
    "executor.jobs": STORAGE,
    "executor.jobs.timetable": {"cronsim"},
    "executor.stores": STORAGE,
    "executor.service": STORAGE,
    "facts.stores": STORAGE | {"obstore"},
    "facts.service": STORAGE | {"cryptography"},
    "providers.sql": {"*"},
    **{f"providers.celery_{name}": {"*"} for name in ("task", "delivery", "request", "feed")},
    "providers.api": {"*"},
    "providers.tokens": {"jwt", "cryptography"},
}

#: Distributions that share the namespace of opentelemetry-api but are not it.
NOT_THE_API = tuple(f"opentelemetry.{name}" for name in ("sdk", "exporter", "instrumentation", "semconv", "proto"))
#: Whoever sets them up, if that was asked for.
SETS_UP = "runner.exporting"

#: Modules that decide and never act: clocks and dice are handed in.
PURE = (
    "finding",
    "history",
    *(f"engine.{name}" for name in ("effects", "outcome", "backoff", "attempts")),
    *(f"task.{name}" for name in ("lifecycle", "consume", "produce", "fetch", "settle", "renew", "handling", "intake")),
    *(f"task.{name}" for name in ("admission", "crew", "gates", "report", "worst")),
    *(f"executor.{name}" for name in ("lines", "protocol", "routing", "verdict")),
    *(
        f"providers.{name}"
        for name in (
            *("errors", "rules", "mapping", "retry_after", "retry", "circuit_breaker", "quota", "health"),
            *("execution", "idempotency", "books", "calling", "policy", "invocation", "deadletter"),
        )
    ),
    *(f"facts.{name}" for name in ("errors", "model", "identity", "policy", "publish", "labels", "window", "log")),
    *(f"facts.{name}" for name in ("replica", "replicate", "carry", "asking", "recognise")),
)
MEANS_TO_ACT = {"asyncio", "threading", "time", "random", "logging"}

#: All that the independent oracle may know of us: names, never behaviour.
ORACLE_MAY_IMPORT = tuple(f"{PACKAGE}.{name}" for name in ("errors", "task.exceptions", "task.mixins.policies"))


@dataclass(frozen=True, slots=True)
class Import:
    """One import as written: its dotted target, whether only type checkers see it, and its relative level."""

    target: str
    typing: bool = False
    level: int = 0


def within(name: str, area: str) -> bool:
    return name == area or name.startswith(area + ".")


def imports(path: Path) -> list[Import]:
    """Every import in *path*, at any depth, literal dynamic ones included."""
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), typing=False))


def _imports(node: ast.AST, *, typing: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, typing) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        stem = node.module or ""
        yield from (Import(f"{stem}.{alias.name}".strip("."), typing, node.level) for alias in node.names)
    elif isinstance(node, ast.Call) and (target := _dynamic(node)):
        yield Import(target, typing)
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        for child in node.body:
            yield from _imports(child, typing=True)
        for child in node.orelse:
            yield from _imports(child, typing=typing)
        return
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, typing=typing)


def _dynamic(call: ast.Call) -> str | None:
    """The module that a call imports by name, if the name is written out: import_module, __import__, our extra()."""
    name = ast.unparse(call.func).rpartition(".")[2]
    position = {"import_module": 0, "__import__": 0, "extra": 1}.get(name)
    if position is None or len(call.args) <= position:
        return None
    argument = call.args[position]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def area(module: str) -> str | None:
    """The row of the table that *module* (or a name in it) belongs to; None if there is none."""
    first, _, rest = module.partition(".")
    if first in VOCABULARY:
        return "vocabulary"
    if first == "connectors" and (vendor := rest.partition(".")[0]) in CLIENTS:
        return f"connectors.{vendor}"
    return first if first in MAY_IMPORT else None


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Each module below *package* by its dotted name without the package's; the front door is ''."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def trespasses(package: Path) -> list[str]:
    """Every breach of the table below *package*, one line each; an absent folder breaks nothing."""
    found = []
    for module, path in modules(package):
        home = area(module)
        if home is None:
            found.append(f"{module}: has no row in the table")
            continue
        if path.name == "__init__.py" and _must_be_empty(module) and path.read_text(encoding="utf-8").strip():
            found.append(f"{module}: an inner __init__.py is empty")
        for item in imports(path):
            reason = _reason(module, home, item)
            if reason:
                found.append(f"{module} -> {item.target}: {reason}")
    return found


def _must_be_empty(module: str) -> bool:
    return module != "" and not (module.count(".") == 1 and area(module) in {f"connectors.{name}" for name in CLIENTS})


def _reason(module: str, home: str, item: Import) -> str | None:
    """Why *item* may not stand in *module*; None if it may."""
    root = item.target.partition(".")[0]
    if item.level:
        return "absolute imports only"
    if root == PACKAGE:
        return _reason_ours(module, home, item)
    if root in sys.stdlib_module_names:
        pure = any(within(module, name) for name in PURE)
        return "this module only decides" if pure and root in MEANS_TO_ACT else None
    if item.target.startswith(NOT_THE_API) and module != SETS_UP:
        return "the API only, not what shares its namespace"
    allowed = LIBRARIES[home].union(*(extra for name, extra in EXCEPTIONS.items() if within(module, name)))
    return None if "*" in allowed or root in allowed else "this library does not belong here"


def _reason_ours(module: str, home: str, item: Import) -> str | None:
    target = item.target.removeprefix(PACKAGE).removeprefix(".")
    # A name of the front door (`from ergon_framework import consumer`) is no folder of ours.
    there = area(target)
    there = "" if there is None else there
    if there == home == "vocabulary":
        # An annotation makes no cycle when the program runs, so type-only imports may look upward here,
        # and only here: everywhere else knowing a type is knowing its owner.
        downward = VOCABULARY.index(target.partition(".")[0]) <= VOCABULARY.index(module)
        return None if downward or item.typing else "the vocabulary imports downward"
    if there not in {home, "vocabulary"} | MAY_IMPORT[home]:
        return "not its neighbour"
    foreign = there != home and home in {"cli", "testing"}
    return "not public" if foreign and any(part.startswith("_") for part in target.split(".")) else None


def oracle_trespasses(path: Path, root: Path) -> list[str]:
    """What the oracle in *path* knows of us beyond the names it needs, also through other files of the tests."""
    found, seen, todo = [], {path}, [path]
    while todo:
        for item in imports(todo.pop()):
            if (item.level or within(item.target, PACKAGE)) and not _known_to_oracle(item):
                found.append(f"{item.target}: the oracle must not know it")
            if within(item.target, "tests"):
                # `from tests.properties.plan import Plan` names the module or a name in it.
                stem = root / item.target.replace(".", "/")
                files = {stem.with_suffix(".py"), stem.parent.with_suffix(".py")}
                fresh = {file for file in files if file.exists()} - seen
                seen |= fresh
                todo += fresh
    return found


def _known_to_oracle(item: Import) -> bool:
    return not item.level and any(item.target.startswith(f"{name}.") for name in ORACLE_MAY_IMPORT)
