"""The app: all commands with their options; the work is in other modules."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from ergon_framework.cli.run import LogLevel, Options, run_task
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


class LazyCommandGroup(TyperGroup):
    """All commands; most are imported on first use, because a worker starts without any of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*(name for name in super().list_commands(ctx) if name not in LAZY_COMMANDS), *LAZY_COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in LAZY_COMMANDS and cmd_name not in self.commands:
            typer_app = getattr(import_module(f"ergon_framework.cli.{MODULES.get(cmd_name, cmd_name)}"), cmd_name)
            self.add_command(get_group(typer_app) if cmd_name in COMMAND_GROUPS else get_command(typer_app), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List each command with its whole first sentence instead of a truncated one."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(_MAX_SUMMARY_CHARS)) for name, command in commands])


app = typer.Typer(
    name="ergon",
    cls=LazyCommandGroup,
    help="Run business transactions between systems.",
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
    """Run business transactions between systems."""


@app.command()
def run(
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="Task to run, for example app:charge.")],
    *,
    processes: Annotated[
        int | None, typer.Option(min=1, max=MAX_PROCESSES, help="Number of processes. Default: 1.")
    ] = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="Continue when the queue is empty.")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Stop when the queue is empty. Default of both: the policy.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of transactions to start in each process.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Policy file in TOML or JSON; replaces the task's policy.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Configuration file. Default: ergon.toml if it exists.")
    ] = None,
    probe_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve /live, /ready and /metrics on this port; 0 selects a free port."),
    ] = None,
    probe_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the health to this file periodically.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--input", metavar="FILE", help="JSON lines for a producer. Default: standard input."),
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Minimum log level. Default: info.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one line of JSON at the end.")] = False,
) -> None:
    """Run a task until its queue or input is empty, its limit is reached, or a signal arrives.

    After SIGTERM or Ctrl-C running work may finish within the policy's loop.drain_timeout; a second signal stops it
    immediately.

    Example: ergon run app:charge --streaming
    """
    if streaming and once:
        raise typer.BadParameter("--streaming and --once exclude each other; pass one of the two")
    options = Options(
        task=task,
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
