"""``ergon policy``: its commands with their options."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli import policy_work as work

policy = typer.Typer(
    help="Shows what policies mean.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Kind(StrEnum):
    """Whose policy."""

    CONSUMER = "consumer"
    PRODUCER = "producer"
    PROVIDER = "provider"


@policy.command()
def explain(
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="Where the task is, for example app:charge.")],
    *,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A policy in TOML or JSON, in place of the task's own.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show what a task's policy allows at worst: waits, seconds that a claim is held, calls of the body.

    Providers that the task's module holds are stacked on top: their attempts multiply the task's own.
    Exits with 1 where the broker would take a delivery back before the policy is through with it.
    Nothing is fetched and no server is asked.

    Example: ergon policy explain app:charge
    """
    raise typer.Exit(work.explain(task, policy=policy, config=config, as_json=json))


@policy.command()
def schema(
    kind: Annotated[Kind, typer.Argument(help="Whose policy.")] = Kind.CONSUMER,
) -> None:
    """Print the JSON Schema of a policy, for an editor or a check of your own.

    Example: ergon policy schema consumer > consumer-policy.schema.json
    """
    work.schema(kind.value)
