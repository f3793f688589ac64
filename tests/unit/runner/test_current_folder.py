"""Modules of the current folder, through the installed console script, as operators and users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ERGON = Path(sys.executable).with_name("ergon")
#: Libraries of the package, and modules of the standard library that it imports late.
PLANTED = ("psycopg", "psycopg_pool", "sqlalchemy", "pika", "redis", "nats", "grpc", "opentelemetry", "tomllib")
UNREACHABLE = "postgresql://nobody@127.0.0.1:1/none?connect_timeout=1"
APP = """
import psycopg
from ergon_framework import MemoryConnector, Transaction, consumer

queue = MemoryConnector("orders")
queue.dispatch([Transaction("order-1", {})])

@consumer(queue)
def charge(order):
    print("psycopg is", psycopg.__file__)
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder that holds an app and files with the names of libraries."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(
            f"import os\nopen('loaded', 'a').write('{name}\\n')\nraise ImportError('planted')\n", encoding="utf-8"
        )
    (tmp_path / "folderapp.py").write_text(APP, encoding="utf-8")
    return tmp_path


def ergon(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ERGON, *words],
        cwd=folder,
        env=os.environ
        | {"ERGON_POSTGRES__DSN": "postgresql://nobody@127.0.0.1:1/none?connect_timeout=1"}
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
    "words",
    [
        ("why", "order-17"),
        ("doctor",),
        ("pause", "charge", "--reason", "test"),
        ("dlq", "list", "orders"),
        ("db", "check"),
    ],
    ids=" ".join,
)
def test_a_command_without_a_module_imports_nothing_of_the_current_folder(folder, words):
    done = ergon(folder, *words, ERGON_QUEUES__ORDERS__URL=UNREACHABLE)
    assert list_loaded(folder) == []
    assert "planted" not in done.stdout + done.stderr


@pytest.mark.spec("SEC-18")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_module_of_the_current_folder_comes_after_installed_packages(folder, processes):
    done = ergon(folder, "run", "folderapp:charge", "--processes", processes)
    assert done.returncode == 0, done.stderr
    assert "psycopg is" in done.stdout
    assert list_loaded(folder) == []


@pytest.mark.spec("SEC-18")
@pytest.mark.parametrize(
    "words", [("dlq", "list", "folderapp:queue"), ("policy", "explain", "folderapp:charge")], ids=" ".join
)
def test_other_commands_that_name_a_module_find_it_in_the_current_folder(folder, words):
    done = ergon(folder, *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.spec("SEC-18")
def test_an_installed_module_of_the_same_name_is_named_in_the_log_and_the_error(folder, tmp_path_factory):
    installed = tmp_path_factory.mktemp("installed") / "folderapp.py"
    installed.write_text("", encoding="utf-8")
    done = ergon(folder, "run", "folderapp:charge", PYTHONPATH=str(installed.parent))
    assert done.returncode == 2
    assert "module shadowed" in done.stderr
    assert f"loaded={installed}" in done.stderr
    assert f"ignored={folder / 'folderapp.py'}" in done.stderr
    assert f"'folderapp' has no 'charge' in {installed}" in done.stderr
    assert f"installed modules come before {folder / 'folderapp.py'}; rename it" in done.stderr


@pytest.mark.spec("SEC-18")
def test_a_missing_part_of_an_installed_package_names_the_file_that_is_not_loaded(folder, tmp_path_factory):
    installed = tmp_path_factory.mktemp("installed") / "folderapp.py"
    installed.write_text("", encoding="utf-8")
    done = ergon(folder, "run", "folderapp.jobs:charge", PYTHONPATH=str(installed.parent))
    assert done.returncode == 2
    assert f"{installed} was loaded, and installed modules come before {folder / 'folderapp.py'}" in done.stderr
