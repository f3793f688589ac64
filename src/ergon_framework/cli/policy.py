"""Commands of ``ergon policy`` and their options."""

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


class PolicyKind(StrEnum):
    """Kinds of policies."""

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
    """Show the worst case that a task's policy allows: waits, claim seconds, handler calls.

    Retries of providers in the task's module multiply the task's own retries.
    Exits with 1 if the broker would redeliver a delivery before the policy's lifecycle has ended.
    Nothing is fetched and no server is queried.

    Example: ergon policy explain app:charge
    """
    raise typer.Exit(work.print_explanation(task, policy=policy, config=config, as_json=json))


@policy.command()
def schema(
    kind: Annotated[PolicyKind, typer.Argument(help="Whose policy.")] = PolicyKind.CONSUMER,
) -> None:
    """Print the JSON Schema of a policy, for an editor or a validation step.

    Example: ergon policy schema consumer > consumer-policy.schema.json
    """
    work.print_schema(kind.value)
