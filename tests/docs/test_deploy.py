"""The files of the guide to deploying: not run here, but read, and what they say fits the program."""

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

TEXT = (ROOT / "docs/guides/deploy.md").read_text(encoding="utf-8")
#: What a stop takes at most beyond the drain, with several processes (docs/guides/run.md).
BEYOND = 2


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"the guide shows no {language}"
    return found.group(1)


def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(block("ini"))
    return parser


def container() -> dict:
    return yaml.safe_load(block("yaml"))["spec"]["template"]["spec"]


def image() -> list[str]:
    return json.loads(re.search(r"^CMD (.*)$", block("dockerfile"), re.MULTILINE).group(1))


COMMANDS = {
    "systemd": lambda: shlex.split(unit()["Service"]["ExecStart"]),
    "container": image,
    "kubernetes": lambda: container()["containers"][0]["args"],
}


@pytest.mark.parametrize("where", COMMANDS)
def test_the_command_is_one_that_the_program_knows(where):
    program, name, *words = COMMANDS[where]()
    assert program.rpartition("/")[2] == "ergon"
    ergon = get_command(app)
    run = ergon.get_command(None, name)
    known = {option for parameter in run.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_whoever_kills_waits_longer_than_a_stop_takes():
    stop = ConsumerPolicy().loop.drain_timeout + BEYOND
    assert int(unit()["Service"]["TimeoutStopSec"]) > stop
    assert container()["terminationGracePeriodSeconds"] > stop


def test_the_probes_ask_the_port_that_answers():
    worker = container()["containers"][0]
    port = int(worker["args"][worker["args"].index("--probe-port") + 1])
    asked = {name: worker[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness")}
    assert asked == {"liveness": {"path": "/live", "port": port}, "readiness": {"path": "/ready", "port": port}}
    assert worker["ports"] == [{"containerPort": port}]
