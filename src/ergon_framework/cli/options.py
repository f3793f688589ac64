"""Options that several commands share: who acts, and why."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

Actor = Annotated[
    str,
    typer.Option(envvar=["ERGON_ACTOR", "USER"], metavar="NAME", help="Name to record. Default: the system's user."),
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason to record.")]


def actor_name(actor: str) -> str:
    """Return *actor*, or the name of the system's user where none is given."""
    return actor or getpass.getuser()
