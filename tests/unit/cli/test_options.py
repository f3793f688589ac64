"""The options of all commands: one name for one meaning."""

from __future__ import annotations

from collections import defaultdict

import pytest
import typer

from ergon_framework.cli.app import app

REPLACED_OPTIONS = {
    "--because": "--reason",
    "--why": "--reason",
    "--audit-reason": "--reason",
    "--by": "--actor",
    "--place": "--entry",
    "--patience": "--timeout",
    "--default": "--kind",
    "--prune-every": "--retention-interval",
}


def iter_commands(group, path=()):
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from iter_commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.fixture(scope="module")
def options():
    """Return option names with their commands and whether they are flags."""
    commands_by_option = defaultdict(dict)
    for path, command in iter_commands(typer.main.get_command(app)):
        for parameter in command.params:
            for name in parameter.opts:
                commands_by_option[name][path] = getattr(parameter, "is_flag", False)
    assert len(commands_by_option["--json"]) > 10
    return commands_by_option


@pytest.mark.spec("DX-45")
@pytest.mark.parametrize("name", REPLACED_OPTIONS)
def test_a_meaning_has_one_option_name(options, name):
    assert not options[name], f"use {REPLACED_OPTIONS[name]}"


@pytest.mark.spec("DX-45")
def test_actor_and_reason_mean_the_same_in_every_command():
    helps = defaultdict(set)
    for path, command in iter_commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.name in {"actor", "reason"} and path != ("audit", "list"):
                helps[parameter.name].add(parameter.help.partition(";")[0].removesuffix("."))
    assert helps == {"actor": {"Operator to record. Default: the system's user"}, "reason": {"Reason to record"}}


@pytest.mark.spec("DX-45")
def test_an_option_is_a_flag_everywhere_or_nowhere(options):
    assert {name: kinds for name, kinds in options.items() if len(set(kinds.values())) > 1} == {}
