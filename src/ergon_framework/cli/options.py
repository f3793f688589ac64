"""Options shared by several commands: actor and reason."""

from __future__ import annotations

from typing import Annotated

import typer

from ergon_framework.audit import current_user

Actor = Annotated[
    str,
    typer.Option(envvar=["ERGON_ACTOR", "USER"], metavar="NAME", help="Name to record. Default: the system's user."),
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason to record.")]

#: For commands where --reason is a filter.
AuditReason = Annotated[str, typer.Option("--audit-reason", metavar="TEXT", help="Reason to record.")]


def resolve_actor_name(actor: str) -> str:
    """Return *actor*, or the name of the system's user if it is empty."""
    return actor or current_user()
