"""The package as a user installs it: built into a wheel and installed into a new environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What README tells a user to install is installed from the wheel just built, wherever else it may exist.
PIP_SCRIPT = """#!/bin/sh
command=$1; shift
exec {python} -m pip --disable-pip-version-check --python {inside} "$command" \\
    --quiet --no-index --find-links {wheels} --no-deps --no-build-isolation "$@"
"""


@pytest.fixture(scope="session")
def wheel_bin(tmp_path_factory):
    """The bin folder of an environment that holds the built wheel and the libraries of this one."""
    folder = tmp_path_factory.mktemp("installed")
    wheels, env = folder / "wheels", folder / "env"
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    venv.create(env, symlinks=True, with_pip=False)
    # The libraries come from here for speed. A folder named in a .pth is not searched for further .pth files,
    # so the checkout that is installed here as editable stays out of sight.
    library = Path(sysconfig.get_path("purelib", vars={"base": str(env)}))
    (library / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    pip = env / "bin" / "pip"
    pip.write_text(
        PIP_SCRIPT.format(python=sys.executable, inside=env / "bin" / "python", wheels=wheels), encoding="utf-8"
    )
    pip.chmod(0o755)
    subprocess.run([pip, "install", "--force-reinstall", "ergon-framework"], check=True)
    return env / "bin"
