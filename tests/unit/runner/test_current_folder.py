"""Modules of the current folder, tested through the installed console script as operators and users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ERGON_COMMAND = Path(sys.executable).with_name("ergon")
#: Libraries of the package, and modules of the standard library that it imports late.
PLANTED_MODULES = ("psycopg", "psycopg_pool", "sqlalchemy", "pika", "redis", "nats", "grpc", "opentelemetry", "tomllib")
UNREACHABLE_DSN = "postgresql://unknown@127.0.0.1:1/none?connect_timeout=1"
APP = """
import psycopg
from ergon_framework import MemoryConnector, Transaction, consumer

queue = MemoryConnector("orders")
queue.dispatch([Transaction({}, id="order-1")])

@consumer(queue)
def charge(order):
    print("psycopg is", psycopg.__file__)
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder that holds an app and files with the names of libraries."""
    for name in PLANTED_MODULES:
        (tmp_path / f"{name}.py").write_text(
            f"import os\nopen('loaded', 'a').write('{name}\\n')\nraise ImportError('planted')\n", encoding="utf-8"
        )
    (tmp_path / "folderapp.py").write_text(APP, encoding="utf-8")
    return tmp_path


def run_ergon(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ERGON_COMMAND, *arguments],
        cwd=folder,
        env=os.environ
        | {"ERGON_POSTGRES__DSN": "postgresql://unknown@127.0.0.1:1/none?connect_timeout=1"}
        | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def list_loaded(folder: Path) -> list[str]:
    loaded = folder / "loaded"
    return loaded.read_text(encoding="utf-8").split() if loaded.exists() else []


@pytest.mark.spec("SEC-18")
@pytest.mark.parametrize(
    "arguments",
    [
        ("why", "order-17"),
        ("doctor",),
        ("pause", "charge", "--reason", "test"),
        ("dlq", "list", "orders"),
        ("db", "check"),
    ],
    ids=" ".join,
)
def test_a_command_without_a_module_imports_nothing_of_the_current_folder(folder, arguments):
    result = run_ergon(folder, *arguments, ERGON_QUEUES__ORDERS__URL=UNREACHABLE_DSN)
    assert list_loaded(folder) == []
    assert "planted" not in result.stdout + result.stderr


@pytest.mark.spec("SEC-18")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_module_of_the_current_folder_comes_after_installed_packages(folder, processes):
    result = run_ergon(folder, "run", "folderapp:charge", "--processes", processes)
    assert result.returncode == 0, result.stderr
    assert "psycopg is" in result.stdout
    assert list_loaded(folder) == []


@pytest.mark.spec("SEC-18")
@pytest.mark.parametrize(
    "arguments", [("dlq", "list", "folderapp:queue"), ("policy", "explain", "folderapp:charge")], ids=" ".join
)
def test_other_commands_that_name_a_module_find_it_in_the_current_folder(folder, arguments):
    result = run_ergon(folder, *arguments)
    assert result.returncode == 0, result.stderr


@pytest.mark.spec("SEC-18")
def test_an_installed_module_of_the_same_name_is_named_in_the_log_and_the_error(folder, tmp_path_factory):
    installed = tmp_path_factory.mktemp("installed") / "folderapp.py"
    installed.write_text("", encoding="utf-8")
    result = run_ergon(folder, "run", "folderapp:charge", PYTHONPATH=str(installed.parent))
    assert result.returncode == 2
    assert "module shadowed" in result.stderr
    assert f"loaded={installed}" in result.stderr
    assert f"ignored={folder / 'folderapp.py'}" in result.stderr
    assert f"'folderapp' has no 'charge' in {installed}" in result.stderr
    assert f"installed modules come before {folder / 'folderapp.py'}; rename it" in result.stderr


@pytest.mark.spec("SEC-18")
def test_a_missing_part_of_an_installed_package_names_the_file_that_is_not_loaded(folder, tmp_path_factory):
    installed = tmp_path_factory.mktemp("installed") / "folderapp.py"
    installed.write_text("", encoding="utf-8")
    result = run_ergon(folder, "run", "folderapp.jobs:charge", PYTHONPATH=str(installed.parent))
    assert result.returncode == 2
    assert f"{installed} was loaded, and installed modules come before {folder / 'folderapp.py'}" in result.stderr
