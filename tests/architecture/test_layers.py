"""Import rules: the package follows the table, and the check detects each kind of violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.rules import (
    KNOWN_CYCLES,
    PACKAGE,
    PURE_MODULES,
    find_area,
    find_cycles,
    find_oracle_violations,
    find_violations,
    iter_modules,
)

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / PACKAGE
ORACLE = ROOT / "tests" / "properties" / "oracle.py"


def test_the_package_follows_the_import_rules():
    assert find_violations(SOURCE) == []


def test_the_import_rules_name_existing_modules():
    names = {module for module, _ in iter_modules(SOURCE)}
    assert {"errors", "scope", "failure", "transaction"} <= names
    assert any(name in names for name in PURE_MODULES)


def test_the_oracle_imports_only_allowed_modules():
    if not ORACLE.exists():
        pytest.skip("there is no oracle yet")
    assert find_oracle_violations(ORACLE, ROOT) == []


ALLOWED_SOURCES = {
    "__init__": "from ergon_framework.task.base import Task\n",
    "errors": "import pydantic\n",
    "scope": (
        "from typing import TYPE_CHECKING\n"
        "from ergon_framework.errors import ErgonError\n"
        "if TYPE_CHECKING:\n    from ergon_framework.transaction import Transaction\n"
    ),
    "transaction": "from ergon_framework.failure import Failure\nimport pydantic_core\n",
    "engine.retry": "from ergon_framework.engine.effects import Call\nfrom ergon_framework import errors\n",
    "engine.threads": "import threading, time\n",
    "telemetry.metrics": "import prometheus_client\nfrom opentelemetry import trace\n",
    "database.tables": "import sqlalchemy\nimport alembic\n",
    "connectors.base": "from ergon_framework.telemetry.names import X\nimport pydantic\n",
    "connectors.redis.__init__": (
        "from typing import TYPE_CHECKING\nfrom ergon_framework._util.exports import lazy_exports\n"
        "if TYPE_CHECKING:\n    from ergon_framework.connectors.redis.aio import X\n"
    ),
    "connectors.redis.aio": "import redis.asyncio\nfrom ergon_framework.connectors import base\n",
    "connectors.postgres.aio": "import psycopg\nfrom ergon_framework.database.tables import X\n",
    "task.base": (
        "from ergon_framework.connectors.base import Delivery\nfrom ergon_framework.engine.scheduler import X\n"
    ),
    "worker.lifecycle": "import dataclasses\n",
    "facts.stores.postgres.store": "import psycopg\nfrom ergon_framework.connectors.postgres.aio import X\n",
    "jobs.store": "import grpc\n",
    "providers.http.api": "import fastapi\n",
    "providers.postgres.rows": "import sqlalchemy\n",
    "runner.signals": "import uvloop\nfrom ergon_framework import consumer\nimport ergon_framework.facts.model\n",
    "cli.main": "import typer\nfrom ergon_framework import consumer\nfrom ergon_framework.testing.faults import X\n",
    "testing.plugin": "import pytest\nfrom ergon_framework.engine.scheduler import Slot\n",
}


def write_module(root: Path, module: str, text: str) -> Path:
    path = root / PACKAGE / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return root / PACKAGE


def test_an_allowed_import_is_no_violation(tmp_path):
    for module, text in ALLOWED_SOURCES.items():
        package = write_module(tmp_path, module, text)
    assert find_violations(package) == []


@pytest.mark.parametrize(
    "module, text, reason",
    [
        ("errors", "from ergon_framework.transaction import X", "downward"),
        ("scope", "from ergon_framework import failure", "downward"),
        ("scope", "import ergon_framework.engine.scheduler", "neighbour"),
        ("scope", "if TYPE_CHECKING:\n    from ergon_framework.task.base import X", "neighbour"),
        ("scope", "if TYPE_CHECKING:\n    pass\nelse:\n    from ergon_framework.transaction import X", "downward"),
        ("engine.scheduler", "from ergon_framework.telemetry.names import X", "neighbour"),
        ("engine.scheduler", "if typing.TYPE_CHECKING:\n    from ergon_framework.task.base import X", "neighbour"),
        ("engine.scheduler", "def f():\n    from ergon_framework.task.base import X", "neighbour"),
        (
            "engine.scheduler",
            "class A:\n    try:\n        import ergon_framework.cli.main\n    finally: ...",
            "neighbour",
        ),
        ("engine.scheduler", "importlib.import_module('ergon_framework.task.base')", "neighbour"),
        ("engine.scheduler", "import_module('psycopg')", "library"),
        ("engine.scheduler", "__import__('psycopg')", "library"),
        ("engine.scheduler", "extra('redis', 'redis.asyncio')", "library"),
        ("engine.scheduler", "import pydantic", "library"),
        ("engine.scheduler", "from .effects import Call", "absolute"),
        ("engine.scheduler", "from ergon_framework import consumer", "neighbour"),
        ("telemetry.logs", "from ergon_framework.engine.scheduler import X", "neighbour"),
        ("telemetry.metrics", "from opentelemetry.sdk.metrics import X", "the API only"),
        ("connectors.base", "from ergon_framework.connectors.redis.aio import X", "neighbour"),
        ("connectors.base", "from ergon_framework.task.base import X", "neighbour"),
        ("connectors.redis.aio", "import nats", "library"),
        ("connectors.redis.aio", "from ergon_framework.connectors.nats.aio import X", "neighbour"),
        ("connectors.redis.aio", "from ergon_framework.database.tables import X", "neighbour"),
        ("task.base", "from ergon_framework.connectors.redis.aio import X", "neighbour"),
        ("task.base", "from ergon_framework.runner.signals import X", "neighbour"),
        ("task.base", "from opentelemetry import trace", "library"),
        ("facts.model", "from ergon_framework.jobs import X", "neighbour"),
        ("facts.connector", "import psycopg", "library"),
        ("providers.base", "import celery", "library"),
        ("providers.base", "from ergon_framework.task.base import X", "neighbour"),
        ("runner.signals", "from ergon_framework.cli.main import X", "neighbour"),
        ("runner.signals", "from ergon_framework.testing.faults import X", "neighbour"),
        ("cli.main", "from ergon_framework.engine.scheduler import _free", "public"),
        ("testing.faults", "import hypothesis", "library"),
        ("task.__init__", "x = 1", "empty"),
        ("facts.__init__", "from ergon_framework.facts.model import Fact", "first use"),
        ("facts.__init__", "import grpc", "first use"),
        ("facts.__init__", "if TYPE_CHECKING:\n    from ergon_framework.jobs.model import Job", "its own modules"),
        ("connectors.redis.inner.__init__", "x = 1", "empty"),
        ("helpers.strings", "", "no row"),
        ("stray", "", "no row"),
        *((name, "def f():\n    import time", "decides") for name in PURE_MODULES),
        *(("worker.consume", f"import {name}", "decides") for name in ("asyncio", "threading", "random", "logging")),
        ("worker.settle", "from asyncio.events import X", "decides"),
    ],
)
def test_each_kind_of_violation_is_caught(tmp_path, module, text, reason):
    violations = find_violations(write_module(tmp_path, module, text + "\n"))
    assert [reason in line for line in violations] == [True], violations


def test_modules_that_import_each_other_are_known_with_their_reason():
    assert find_cycles(SOURCE) == set(KNOWN_CYCLES)


def test_a_cycle_of_modules_is_found_also_when_it_is_lazy_or_for_types_only(tmp_path):
    for module, text in {
        "__init__": "",
        "a": "from ergon_framework.b import X\n",
        "b": "def f():\n    from ergon_framework import c\n",
        "c": "if TYPE_CHECKING:\n    import ergon_framework.a\n",
        "d": "from ergon_framework import a\n",
    }.items():
        package = write_module(tmp_path, module, text)
    assert find_cycles(package) == {frozenset({"a", "b", "c"})}


def test_every_module_has_a_row_by_its_folder():
    assert find_area("connectors.memory") == "connectors"
    assert find_area("connectors.nats.aio") == "connectors.nats"
    assert find_area("transaction.Transaction") == "vocabulary"
    assert find_area("elsewhere") is None


@pytest.mark.parametrize(
    "text, expected_count",
    [
        ("import math\nfrom ergon_framework.errors import Category\n", 0),
        ("from ergon_framework.worker.exceptions import TransactionException\n", 0),
        ("from ergon_framework.worker.policies import RetryPolicy\n", 0),
        ("from ergon_framework.engine.retry import backoff_delay\n", 1),
        ("from ergon_framework.task.consumer import ConsumerMixin\n", 1),
        ("import ergon_framework\n", 1),
        ("import ergon_framework.errors\n", 1),
        ("from tests.plan import Plan\n", 0),
        ("from tests.world import run\n", 1),
        ("import tests.world\n", 1),
        ("from tests import world\n", 1),
        ("from . import world\n", 1),
        ("def f():\n    import_module('ergon_framework.engine.retry')\n", 1),
    ],
)
def test_an_oracle_that_imports_framework_behaviour_is_caught(tmp_path, text, expected_count):
    path = tmp_path / "oracle.py"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "plan.py").write_text("from ergon_framework.errors import Category\n", encoding="utf-8")
    (tmp_path / "tests" / "world.py").write_text(
        "import tests.world\nfrom ergon_framework.engine import slots\n", encoding="utf-8"
    )
    path.write_text(text, encoding="utf-8")
    assert len(find_oracle_violations(path, tmp_path)) == expected_count
