"""Operation: work with a server that is written once for the sync and the async variant.

An operation is a generator that yields commands and receives their answers. The caller runs it on a thread or on an
event loop; the operation's decisions are the same for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from redis.exceptions import NoScriptError

R = TypeVar("R")

Command: TypeAlias = tuple[Any, ...]


class Pipeline(NamedTuple):
    """Commands that are sent together; the answers are a list, with the error of a failed command in its place."""

    commands: Sequence[Command]


Operation: TypeAlias = Generator[Command | Pipeline, Any, R]


class Script:
    """A Lua script that the server runs in one step."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def run(self, keys: Sequence[str], *arguments: Any) -> Operation[Any]:
        """Run the script and return its answer; send its text to a server that does not know it, as after a restart."""
        try:
            return (yield ("EVALSHA", self.sha, len(keys), *keys, *arguments))
        except NoScriptError:
            return (yield ("EVAL", self.text, len(keys), *keys, *arguments))
