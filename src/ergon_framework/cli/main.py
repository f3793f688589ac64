"""The command ``ergon``; it reports the missing extra if its libraries are not installed."""

from __future__ import annotations

import importlib
import sys

from ergon_framework.errors import MissingExtraError, require_extra
from ergon_framework.runner.exit import RunExit


def main() -> None:
    """Run the command line; the app is imported here, so that missing libraries are reported."""
    try:
        for library in ("typer", "rich"):
            require_extra("cli", library)
    except MissingExtraError as error:
        sys.stderr.write(f"ergon: {error}\n")
        sys.exit(RunExit.USAGE)
    importlib.import_module("ergon_framework.cli.app").app()
