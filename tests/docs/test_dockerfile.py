"""The Dockerfile that ``ergon new`` writes: its steps are executed here, with the wheel of this checkout."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ergon_framework.cli.new import Broker, render_files, write
from tests.docs.conftest import PIP_SCRIPT
from tests.servers.postgres import free_port

KNOWN_INSTRUCTIONS = ("FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD")


def parse_instructions(text):
    """Return the instructions of a Dockerfile, each with its arguments."""
    instructions = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            instruction, _, rest = line.partition(" ")
            assert instruction in KNOWN_INSTRUCTIONS, f"a step that is not carried out here: {line}"
            instructions.append((instruction, rest))
    return instructions


def copy_build_context(folder, context):
    """Copy to *context* what the builder receives: everything that .dockerignore does not exclude."""
    lines = (folder / ".dockerignore").read_text(encoding="utf-8").split("\n")
    patterns = [line[1:] for line in lines if line.startswith("!")]
    for path in folder.iterdir():
        if any(fnmatch(path.name, pattern) for pattern in patterns):
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, context / path.name)


class Image:
    """The result of the steps: a folder, an environment with programs, and the command to run."""

    def __init__(self, folder, wheels):
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_", "PYTEST"))}
        self.root, self.bin = folder / "root", folder / "env" / "bin"
        self.context = folder / "context"
        self.context.mkdir()
        self.user, self.entry, self.command, self.place = "root", [], [], self.root
        venv.create(folder / "env", symlinks=True, with_pip=False)
        # As in the fixture `installed`: libraries come from here, and pip uses the wheel of this checkout only.
        library = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
        (library / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
        pip = self.bin / "pip"
        pip.write_text(
            PIP_SCRIPT.format(python=sys.executable, inside=self.bin / "python", wheels=wheels), encoding="utf-8"
        )
        pip.chmod(0o755)
        subprocess.run([pip, "install", "--force-reinstall", "ergon-framework"], check=True)
        self.env["PATH"] = f"{self.bin}{os.pathsep}{self.env['PATH']}"

    def build(self, text):
        for instruction, rest in parse_instructions(text):
            getattr(self, f"_{instruction.lower()}")(rest)

    def _from(self, rest):
        assert rest.startswith("python:3.")

    def _env(self, rest):
        self.env |= dict(part.split("=", 1) for part in shlex.split(rest))

    def _workdir(self, rest):
        self.place = self.root / rest.lstrip("/")
        self.place.mkdir(parents=True, exist_ok=True)

    def _copy(self, rest):
        *sources, target = rest.split()
        for source in sources:
            path = self.context / source
            assert path.exists(), f"{source} is not among what the builder is sent"
            destination = self.place / target / ("" if path.is_dir() else path.name)
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, destination)

    def _run(self, rest):
        assert self.user == "root"
        subprocess.run(["sh", "-ec", rest], cwd=self.place, env=self.env, check=True)

    def _user(self, rest):
        self.user = rest

    def _entrypoint(self, rest):
        self.entry = json.loads(rest)

    def _cmd(self, rest):
        self.command = json.loads(rest)


@pytest.fixture
def image(wheel_bin, tmp_path):
    folder = tmp_path / "shop"
    write(folder, render_files("shop", Broker.POSTGRES))
    new_image = Image(tmp_path, wheel_bin.parents[1] / "wheels")
    copy_build_context(folder, new_image.context)
    new_image.build((folder / "Dockerfile").read_text(encoding="utf-8"))
    return new_image


def get_response(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as response:
            return response.status, response.read().decode()
    except OSError as error:
        return getattr(error, "code", None), ""


@pytest.mark.spec("RUN-01", "RUN-02")
def test_the_image_holds_a_worker_that_answers_its_probes_and_stops_on_sigterm(image):
    assert image.user.isdigit()
    assert image.user != "0"
    port = free_port()
    command = [*image.entry, *image.command[:-1], str(port)]
    # The package is where pip installed it, and the folder has no tests, no compose file and no manifests in it.
    assert sorted(path.name for path in image.place.iterdir()) == [
        "ergon.toml",
        "policy.toml",
        "pyproject.toml",
        "shop",
    ]
    env = image.env | {"ERGON_QUEUES__SHOP_ORDERS__URL": "memory://", "ERGON_RUN__PAUSABLE": "false"}
    process = subprocess.Popen(command, cwd=image.place, env=env, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while get_response(port, "/ready")[0] != 200 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert get_response(port, "/live")[0] == 200
        assert get_response(port, "/ready")[0] == 200
        assert 'ergon_processes{ergon_task="charge"}' in get_response(port, "/metrics")[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_an_unknown_instruction_is_an_error():
    with pytest.raises(AssertionError, match="ADD"):
        parse_instructions("FROM python:3.13\nADD . .\n")
