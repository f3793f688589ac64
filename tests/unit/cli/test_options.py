"""The options of all commands: one name for one meaning."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import typer
from typer.testing import CliRunner

from ergon_framework.cli.app import app, split_help
from ergon_framework.cli.options import parse_duration

REPLACED_OPTIONS = {
    "--because": "--reason",
    "--why": "--reason",
    "--audit-reason": "--reason",
    "--by": "--actor",
    "--place": "--entry",
    "--patience": "--timeout",
    "--default": "--kind",
    "--prune-every": "--retention-interval",
    "--ahead": "--ahead-days",
    "--rows": "--attempt-days",
    "--minutes": "--minute-days",
    "--quotas": "--quota-days",
    "--new-keys": "--allow-new-keys",
    "--values": "--show-values",
    "--contents": "--artifact-dir",
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
    assert helps == {"actor": {"Operator to record"}, "reason": {"Reason to record"}}


@pytest.mark.spec("DX-45")
def test_an_actor_is_optional_in_every_command():
    parameters = [
        (path, each) for path, command in iter_commands(typer.main.get_command(app)) for each in command.params
    ]
    required = [path for path, each in parameters if each.name == "actor" and each.required]
    assert (required, any(each.name == "actor" for _, each in parameters)) == ([], True)


@pytest.mark.spec("DX-45")
def test_an_option_is_a_flag_everywhere_or_nowhere(options):
    assert {name: kinds for name, kinds in options.items() if len(set(kinds.values())) > 1} == {}


@pytest.mark.spec("DX-45")
def test_each_kind_of_value_has_one_placeholder():
    placeholders = defaultdict(set)
    for _, command in iter_commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.is_flag:
                placeholders[parameter.metavar].add(parameter.name)
    assert not placeholders.keys() & {"SECONDS", "NUMBER", "N/s"}
    # Only a choice shows its values instead of a placeholder.
    assert placeholders[None] == {"log_level", "broker", "category", "store", "side"}
    assert placeholders["TIME"] == {"at", "since", "until"}
    assert placeholders["DURATION"] >= {"timeout", "grace", "wait", "delay", "keep", "interval"}


@pytest.mark.spec("DX-45")
def test_a_help_text_is_an_imperative_line_with_its_default_in_brackets():
    texts = {
        (*path, parameter.name): parameter.help
        for path, command in iter_commands(typer.main.get_command(app))
        for parameter in command.params
        if parameter.name != "help"
    }
    assert len(texts) > 200
    assert {name: text for name, text in texts.items() if not re.fullmatch(r"[A-Z][^\n]{2,119}\.", text)} == {}
    assert {name: text for name, text in texts.items() if "Default:" in text} == {}


@pytest.mark.spec("DX-45")
def test_the_help_of_every_command_lists_its_exit_codes_one_per_line():
    for path, command in iter_commands(typer.main.get_command(app)):
        codes = [code for code, _ in split_help(command.help).exit_codes]
        assert codes[0] == "0", path
        assert codes == sorted(set(codes), key=int), path
        help_text = CliRunner().invoke(app, [*path, "--help"]).stdout
        listed = help_text.partition("Exit codes:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\d+) ", listed, re.MULTILINE) == codes, path


@pytest.mark.spec("DX-45")
def test_the_help_of_every_command_has_its_example_on_one_line():
    for path, command in iter_commands(typer.main.get_command(app)):
        help_text = CliRunner().invoke(app, [*path, "--help"]).stdout
        assert f"Example:\n  {split_help(command.help).example}\n" in help_text, path


@pytest.mark.spec("DX-45")
@pytest.mark.parametrize("path", ["", "dlq", "db", "provider", "provider breaker", "job cron", "facts", "facts epoch"])
def test_a_group_shows_the_whole_first_sentence_of_each_command(path):
    output = CliRunner().invoke(app, [*path.split(), "--help"]).stdout
    assert "..." not in output.partition("Commands:")[2]


@pytest.mark.parametrize(
    "text, seconds", [("0.5s", 0.5), ("90s", 90.0), ("15m", 900.0), ("2h", 7200.0), ("7d", 604_800.0)]
)
def test_a_duration_has_a_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "0.5", "s", "-1s", "1w", "1h30m", "0s", "0.0001s", "9" * 20 + "s"])
def test_an_invalid_duration_is_rejected(text):
    with pytest.raises(typer.BadParameter, match="invalid duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    "value, message", [("0.05s", "the minimum is 0.1s"), ("11m", "the maximum is 600s"), ("5", "write 0.5s, 90s, 15m")]
)
def test_a_duration_outside_its_range_is_rejected(value, message):
    result = CliRunner().invoke(app, ["doctor", "--timeout", value])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
