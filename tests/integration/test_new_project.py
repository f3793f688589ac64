"""Check that a project written by ``ergon new`` passes its own tests and runs its task against the real broker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid

import pytest

from ergon_framework.cli.new import Broker, render_files, write
from tests.integration.brokers import ADDRESSES, BROKERS
from tests.integration.running import ERGON


@pytest.fixture(params=BROKERS)
def project(request, tmp_path):
    """Yield a project and a function that runs a command in it with the address of a real server."""
    name = f"shop_{uuid.uuid4().hex[:8]}"
    folder = tmp_path / name
    write(folder, render_files(name, Broker(request.param)))
    address = ADDRESSES[request.param](request)
    # Variables of the running tests must not reach the commands.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_", "ERGON_"))}
    env[f"ERGON_QUEUES__{name.upper()}_ORDERS__URL"] = address
    if request.param == "postgres":
        env["ERGON_POSTGRES__DSN"] = address

    def run(*command):
        result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    run.name = name
    return run


@pytest.mark.spec("RUN-01", "CNN-01")
def test_a_new_project_passes_its_tests_and_runs_on_its_broker(project):
    output = project(sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider")
    assert re.search(r"\b6 passed\b", output), output
    for number, cents in (("1", "2000"), ("2", "0")):
        assert project(sys.executable, "-m", f"{project.name}.send", number, cents) == f"sent order-{number}\n"
    task = f"{project.name}.tasks:charge"
    report = json.loads(project(*ERGON, "run", task, "--policy", "policy.toml", "--once", "--json").splitlines()[-1])
    assert (report["stop_reason"], report["counts"]["succeeded"], report["counts"]["failed"]) == ("empty", 1, 1)
    assert [failure["code"] for failure in report["failures"]] == ["no_price"]
    assert "no_price" in project(*ERGON, "dlq", "list", f"{project.name}_orders")
    project(*ERGON, "policy", "explain", task, "--policy", "policy.toml")
