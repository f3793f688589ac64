"""Run a command with its own database: lend.py COMMAND…

A private server is started, ERGON_POSTGRES__DSN names an empty database of a role without further rights,
as a new team would receive one, and everything is deleted when the command has ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.postgres import PrivatePostgres


@contextmanager
def database_environment() -> Iterator[dict[str, str]]:
    """Yield the environment that names the database."""
    folder = Path(tempfile.mkdtemp(prefix="ergon-lend-"))
    server = PrivatePostgres(folder)
    try:
        server.start()
        yield {**os.environ, "ERGON_POSTGRES__DSN": create_owned_database(server, "shop")}
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def create_owned_database(server: PrivatePostgres, name: str) -> str:
    """Return the address of a new database *name* that belongs to a new role of the same name."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"create role {name} login")
        connection.execute(f"create database {name} owner {name}")
    return server.dsn(name).replace("//postgres@", f"//{name}@")


if __name__ == "__main__":
    with database_environment() as env:
        exit_code = subprocess.run(sys.argv[1:], env=env, check=False).returncode
    sys.exit(exit_code)
