"""The files of the deployment guide are not run here; the tests check that they fit the program."""

from __future__ import annotations

import json
import re
import shlex
from configparser import ConfigParser

import pytest
import yaml
from typer.main import get_command

from ergon_framework import ConsumerPolicy
from ergon_framework.cli.app import app
from tests.docs.test_snippets import ROOT

GUIDE_TEXT = (ROOT / "docs/guides/deploy.md").read_text(encoding="utf-8")
#: Seconds a stop takes at most beyond the drain, with several processes (docs/guides/run.md).
EXTRA_STOP_SECONDS = 2


def read_block(language: str) -> str:
    match = re.search(rf"^```{language}\n(.*?)^```$", GUIDE_TEXT, re.MULTILINE | re.DOTALL)
    assert match, f"the guide shows no {language}"
    return match.group(1)


def read_unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(read_block("ini"))
    return parser


def read_pod_spec() -> dict:
    return yaml.safe_load(read_block("yaml"))["spec"]["template"]["spec"]


def read_image_command() -> list[str]:
    return json.loads(re.search(r"^CMD (.*)$", read_block("dockerfile"), re.MULTILINE).group(1))


COMMANDS = {
    "systemd": lambda: shlex.split(read_unit()["Service"]["ExecStart"]),
    "container": read_image_command,
    "kubernetes": lambda: read_pod_spec()["containers"][0]["args"],
}


@pytest.mark.parametrize("target", COMMANDS)
def test_every_command_and_option_of_the_guide_exists(target):
    program, name, *arguments = COMMANDS[target]()
    assert program.rpartition("/")[2] == "ergon"
    ergon = get_command(app)
    run = ergon.get_command(None, name)
    options = {option for parameter in run.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options


def test_the_termination_grace_period_is_longer_than_a_stop_takes():
    stop_seconds = ConsumerPolicy().loop.drain_timeout + EXTRA_STOP_SECONDS
    assert int(read_unit()["Service"]["TimeoutStopSec"]) > stop_seconds
    assert read_pod_spec()["terminationGracePeriodSeconds"] > stop_seconds


def test_the_probes_use_the_port_that_answers():
    worker = read_pod_spec()["containers"][0]
    port = int(worker["args"][worker["args"].index("--probe-port") + 1])
    probes = {name: worker[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness")}
    assert probes == {"liveness": {"path": "/live", "port": port}, "readiness": {"path": "/ready", "port": port}}
    assert worker["ports"] == [{"containerPort": port}]
