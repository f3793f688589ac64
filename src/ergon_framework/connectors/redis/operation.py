"""Operation: a piece of work with a server, written once for both flavours.

An operation is a generator that yields commands and is sent their answers. Who sends them, on a
thread or on an event loop, is not its business; what it decides is the same for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from redis.exceptions import NoScriptError

R = TypeVar("R")

Command: TypeAlias = tuple[Any, ...]


class Together(NamedTuple):
    """Many commands in one go; an answer each, an error that one of them had among them."""

    commands: Sequence[Command]


Operation: TypeAlias = Generator[Command | Together, Any, R]


class Script:
    """Lua that the server runs in one step."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def run(self, keys: Sequence[str], *arguments: Any) -> Operation[Any]:
        """What it answers; sent as a whole to a server that does not know it, as after a restart."""
        try:
            return (yield ("EVALSHA", self.sha, len(keys), *keys, *arguments))
        except NoScriptError:
            return (yield ("EVAL", self.text, len(keys), *keys, *arguments))
