"""The command ``ergon``: it says what is missing where its libraries are not installed."""

from __future__ import annotations

import importlib
import sys

from ergon_framework.errors import MissingExtraError, extra
from ergon_framework.runner.exits import Exit


def main() -> None:
    """Run the command line; what the command needs is imported here, so that its absence can be told."""
    try:
        for library in ("typer", "rich"):
            extra("cli", library)
    except MissingExtraError as error:
        sys.stderr.write(f"ergon: {error}\n")
        sys.exit(Exit.USAGE)
    importlib.import_module("ergon_framework.cli.app").app()
