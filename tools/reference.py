"""Write docs/reference/cli.md and policies.md from the program itself; review the diff afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer
from pydantic import BaseModel
from typer.main import get_command

from ergon_framework import ConsumerPolicy, ProducerPolicy
from ergon_framework.cli.app import app, split_help
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.policy import Policy
from ergon_framework.providers.policy import ProviderPolicy

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"
NOTICE: Final = "<!-- Written by tools/reference.py from the program; a test fails when the two differ. -->"

COMMANDS_HEADER: Final = f"""# Commands

{NOTICE}

Every command of `ergon`, which is the extra `cli`, with the text of its `--help`. The guides have examples:
[Run a task](../guides/run.md), [Trace a transaction](../guides/trace-a-transaction.md),
[Diagnose and repair](../guides/diagnose-and-repair.md), [Dead letters](../guides/dead-letters.md),
[PostgreSQL](../guides/postgres.md), [Provider health](../guides/provider-health.md), [Executors](../executors.md),
[Serve facts](../guides/facts-service.md).
"""
POLICIES_HEADER: Final = f"""# Policies

{NOTICE}

Every key with its default. A policy is given to a task as `policy=`, changed by
[the settings](../guides/configure.md), or replaced by [a file](../guides/run.md#a-policy-file). Unknown keys are errors
that name the nearest known one.
`ergon policy explain MODULE:TASK` shows the worst case of a policy. The exact effect of the keys is described in
[Lifecycle](../lifecycle.md), [Providers](../providers.md) and [Executors](../executors.md).
"""
POLICY_CLASSES: Final[dict[str, type[Policy]]] = {
    "Consumers": ConsumerPolicy,
    "Producers": ProducerPolicy,
    "Providers": ProviderPolicy,
    "Pools of executors": PoolPolicy,
}


def render_policies() -> str:
    """Return the page of policies."""
    parts = [POLICIES_HEADER]
    for title, policy in POLICY_CLASSES.items():
        rows = "\n".join(f"| `{key}` | {default} | {meaning} |" for key, default, meaning in iter_keys(policy()))
        parts.append(f"## {title}\n\n`{policy.__name__}`\n\n| key | default | meaning |\n| --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def iter_keys(policy: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each key of *policy* that holds a value, with its default in this position and its meaning."""
    defaults = policy.model_dump(mode="json")
    for name, field in type(policy).model_fields.items():
        value = getattr(policy, name)
        if isinstance(value, BaseModel):
            yield from iter_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(defaults[name]), (field.description or "").replace("|", "\\|")


def render_commands() -> str:
    """Return the page of commands."""
    ergon = get_command(app)
    return "\n".join([COMMANDS_HEADER, *_render_command(ergon, typer.Context(ergon, info_name="ergon"))])


def _render_command(command: Any, context: Any) -> Iterator[str]:
    if hasattr(command, "list_commands"):
        if context.parent:
            yield f"## {context.command_path}\n\n{command.help}\n"
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            yield from _render_command(inner, type(context)(inner, info_name=name, parent=context))
        return
    text = split_help(command.help)
    level = "##" if context.parent.parent is None else "###"
    yield f"{level} {context.command_path}\n\n{text.description}\n"
    yield "Exit codes:\n\n" + "\n".join(f"- `{code}`: {meaning}" for code, meaning in text.exit_codes) + "\n"
    if text.example:
        yield f"Example: `{text.example}`\n"
    rows = [_format_row(*record) for parameter in command.params if (record := parameter.get_help_record(context))]
    yield "| | |\n| --- | --- |\n" + "\n".join(rows) + "\n"


def _format_row(name: str, meaning: str) -> str:
    escaped = meaning.replace("|", "\\|").replace("<", "&lt;").replace("  ", " ")
    return f"| `{name.replace('|', ' or ')}` | {escaped} |"


PAGES: Final = {"cli.md": render_commands, "policies.md": render_policies}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(name)
