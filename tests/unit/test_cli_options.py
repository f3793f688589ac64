"""The options of all commands: one name for one meaning."""

from __future__ import annotations

from collections import defaultdict

import pytest
import typer

from ergon_framework.cli.app import app

REPLACED = {"--because": "--reason", "--why": "--reason", "--by": "--actor"}


def commands(group, path=()):
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.fixture(scope="module")
def options():
    """Option names with the commands that have them, and whether they are flags."""
    found = defaultdict(dict)
    for path, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            for name in parameter.opts:
                found[name][path] = getattr(parameter, "is_flag", False)
    assert len(found["--json"]) > 10
    return found


@pytest.mark.spec("DX-45")
@pytest.mark.parametrize("name", REPLACED)
def test_who_and_why_have_one_name(options, name):
    assert not options[name], f"use {REPLACED[name]}"


@pytest.mark.spec("DX-45")
def test_an_option_is_a_flag_everywhere_or_nowhere(options):
    assert {name: kinds for name, kinds in options.items() if len(set(kinds.values())) > 1} == {}
