"""The app: all commands with their options; the work is in other modules."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from ergon_framework.cli.options import Config, ProbeFile, ProbePort
from ergon_framework.cli.run import LogLevelOption, Options, run_task
from ergon_framework.runner.settings import MAX_PROCESSES

#: Command groups; each is in the module of its name.
COMMAND_GROUPS: Final = ("policy", "dlq", "audit", "db", "provider", "executor", "job", "facts")
#: Single commands; each is in the module of its name.
SINGLE_COMMANDS: Final = ("new", "why", "top", "doctor", "pause", "resume", "paused")
#: The modules of commands that share one; every other command has a module of its name.
MODULES: Final = {"resume": "pause", "paused": "pause"}
LAZY_COMMANDS: Final = (*SINGLE_COMMANDS, *COMMAND_GROUPS)
#: Longer than any first sentence of a help text.
_MAX_SUMMARY_CHARS: Final = 1_000
#: Separates the exit codes in a help text.
_CODE_SEPARATOR: Final = re.compile(r", (?=\d+ )")


class HelpText(NamedTuple):
    """The parts of a command's help text."""

    description: str
    #: Each exit code with its meaning.
    exit_codes: list[tuple[str, str]]
    example: str


def split_help(text: str) -> HelpText:
    r"""Split the help text of a command, which ends with the paragraphs ``Exit codes: …`` and ``Example: …``.

    >>> split_help("List jobs.\n\nExit codes: 0 listed, 2 invalid option.\n\nExample: ergon job list")
    HelpText(description='List jobs.', exit_codes=[('0', 'listed'), ('2', 'invalid option')], example='ergon job list')
    """
    rest, _, example = text.partition("\n\nExample: ")
    description, _, codes = rest.partition("\n\nExit codes: ")
    codes = " ".join(codes.split()).removesuffix(".")
    exit_codes = [
        (code, meaning) for code, _, meaning in (each.partition(" ") for each in _CODE_SEPARATOR.split(codes))
    ]
    return HelpText(description, exit_codes if codes else [], " ".join(example.split()))


class Command(TyperCommand):
    """A command whose help lists its exit codes one per line, and its example on one line, to be copied."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        parts = split_help(self.help or "")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(parts.description)
        if parts.exit_codes:
            with formatter.section("Exit codes"):
                formatter.write_dl(parts.exit_codes)
        if parts.example:
            with formatter.section("Example"):
                formatter.write(f"  {parts.example}\n")


class CommandGroup(TyperGroup):
    """A group whose help lists each command with its whole first sentence instead of a truncated one."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        summaries = [(name, each.get_short_help_str(_MAX_SUMMARY_CHARS)) for name, each in commands if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(summaries)


class LazyCommandGroup(CommandGroup):
    """All commands; most are imported on first use, because a worker starts without any of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*(name for name in super().list_commands(ctx) if name not in LAZY_COMMANDS), *LAZY_COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in LAZY_COMMANDS and cmd_name not in self.commands:
            typer_app = getattr(import_module(f"ergon_framework.cli.{MODULES.get(cmd_name, cmd_name)}"), cmd_name)
            _set_classes(typer_app)
            self.add_command(get_group(typer_app) if cmd_name in COMMAND_GROUPS else get_command(typer_app), cmd_name)
        return super().get_command(ctx, cmd_name)


def _set_classes(typer_app: typer.Typer) -> None:
    """Set the classes above, which format the help texts, for all groups and commands of *typer_app*."""
    typer_app.info.cls = CommandGroup
    for command in typer_app.registered_commands:
        command.cls = Command
    for group in typer_app.registered_groups:
        if group.typer_instance is not None:
            _set_classes(group.typer_instance)


app = typer.Typer(
    name="ergon",
    cls=LazyCommandGroup,
    help="Run and operate message consumers and producers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer calls it with the flag
    if value:
        typer.echo(f"ergon {version('ergon-framework')}")
        raise typer.Exit


@app.callback()
def ergon(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run and operate message consumers and producers."""


@app.command(cls=Command)
def run(
    tasks: Annotated[
        list[str],
        typer.Argument(metavar="TASK...", help="MODULE:TASK of each task to run, or MODULE for all its consumers."),
    ],
    *,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_PROCESSES, metavar="N", show_default="1", help="Number of processes."),
    ] = None,
    streaming: Annotated[
        bool,
        typer.Option("--streaming", show_default="policy", help="Continue when the queue is empty; not with --once."),
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", show_default="policy", help="Stop when the queue is empty; not with --streaming.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Maximum number of transactions to start per task and process; 0 starts none."
        ),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Policy file in TOML or JSON; replaces the task's policy.")
    ] = None,
    config: Config = None,
    probe_port: ProbePort = None,
    probe_file: ProbeFile = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE", show_default="stdin", help="Input of a producer, one JSON value per line."
        ),
    ] = None,
    log_level: LogLevelOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one line of JSON at the end.")] = False,
) -> None:
    """Run tasks until their queues or input are empty, their limit is reached, or a signal arrives.

    Several tasks share one process, one probe port and one stop. After SIGTERM or Ctrl-C, running work may finish
    within the policy's loop.drain_timeout; a second signal stops it immediately.

    Exit codes: 0 ended cleanly, even if transactions of a consumer failed, 1 the run or transactions of a producer
    failed, 2 invalid task, option or configuration; nothing was fetched, 3 loop.timeout reached, 4 ended with handlers
    still running or outcomes not settled; the queue redelivers those, 5 worker processes kept exiting soon after their
    start, 70 the run did not end in time; the process exited anyway.

    Example: ergon run app:charge --streaming
    """
    if streaming and once:
        raise typer.BadParameter("--streaming and --once exclude each other; pass one of the two")
    options = Options(
        tasks=tasks,
        streaming=True if streaming else False if once else None,
        limit=limit,
        policy=_to_str(policy),
        log_level=log_level,
        config=_to_str(config),
        processes=processes,
        probe_port=probe_port,
        probe_file=_to_str(probe_file),
        input=source,
    )
    raise typer.Exit(run_task(options, as_json=json))


def _to_str(path: Path | None) -> str | None:
    return None if path is None else str(path)
