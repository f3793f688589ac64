"""Upgrade a database to the schema of this release, read its revision, or print the SQL of an upgrade."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from ergon_framework.database.address import connect_options, find_login
from ergon_framework.database.connection import open_connection
from ergon_framework.database.errors import translate_error
from ergon_framework.database.revisions import REVISIONS, SCHEMA, is_compatible
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError

#: Serializes concurrent upgrades.
_UPGRADE_LOCK_KEY: Final = 0x6572676F6E
#: Timeout for the connection, unless the address gives another one.
_CONNECT_TIMEOUT_SECONDS: Final = 10
#: Longest part of the driver's message that is passed on.
_MAX_MESSAGE_CHARS: Final = 200
_INSUFFICIENT_PRIVILEGE: Final = "42501"
_READ_ONLY: Final = "25006"


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The revision of a database, and the revisions that it lacks."""

    #: The current revision; None before the first one.
    revision: str | None
    #: The revisions that an upgrade would apply, in order.
    missing: tuple[str, ...]

    @property
    def is_compatible(self) -> bool:
        """Whether this release can work on the schema."""
        return is_compatible(self.revision)

    @property
    def is_newer(self) -> bool:
        """Whether a later release has upgraded the schema."""
        return self.revision is not None and self.revision not in REVISIONS


def upgrade(dsn: str, to: str = "head") -> SchemaState:
    """Upgrade the database at *dsn* to revision *to*, entirely or not at all; return its state before.

    A database that a later release has upgraded is left unchanged.
    """
    with _connect(dsn) as connection:
        connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK_KEY})
        before = _read_state(connection)
        if before.is_newer:
            return before
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, to)
        connection.commit()
    return before


def check(dsn: str) -> SchemaState:
    """Return the schema state of the database at *dsn*."""
    with _connect(dsn) as connection:
        return _read_state(connection)


def sql(since: str | None = None, to: str = "head") -> str:
    """Return the SQL of an upgrade from *since* to *to*, to be executed by other means."""
    if since is not None and since not in REVISIONS:
        raise ConfigurationError(f"there is no revision {since!r}; the revisions are {', '.join(REVISIONS)}")
    output = io.StringIO()
    command.upgrade(_config(output), f"{since or 'base'}:{to}", sql=True)
    return output.getvalue()


def revisions() -> list[str]:
    """Return the revisions as the migration files chain them, the oldest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()][::-1]


def _config(output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    return config


def _read_state(connection: Connection) -> SchemaState:
    table = connection.execute(text("select to_regclass(:name)"), {"name": f"{SCHEMA}.revision"}).scalar()
    revision: Any = None
    if table is not None:
        revision = connection.execute(text("select version_num from ergon.revision")).scalar()
    applied_count = (
        REVISIONS.index(revision) + 1 if revision in REVISIONS else (0 if revision is None else len(REVISIONS))
    )
    return SchemaState(revision, REVISIONS[applied_count:])


@contextmanager
def _connect(dsn: str) -> Iterator[Connection]:
    dialect: Any = PGDialect_psycopg
    driver = dialect.import_dbapi()
    # The same options as those of a queue, so that an address means the same here.
    options = connect_options(dsn, {"connect_timeout": _CONNECT_TIMEOUT_SECONDS})
    settings, login = {**options, "prepare_threshold": None}, find_login(options)
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: open_connection(driver.connect, settings, login),
        poolclass=NullPool,
    )
    is_connected = False
    try:
        with engine.connect() as connection:
            is_connected = True
            yield connection
    except DBAPIError as error:
        # Without the cause, which quotes the statement.
        raise _translate_error(error, is_connected=is_connected) from None
    finally:
        engine.dispose()


def _translate_error(error: DBAPIError, *, is_connected: bool) -> ErgonError:
    """Translate *error* into an error of the framework, with the remedy."""
    cause: Any = error.orig
    message = (cause.diag.message_primary or str(cause).partition("\n")[0] or type(cause).__name__)[:_MAX_MESSAGE_CHARS]
    if not is_connected:
        return translate_error(cause, is_broken=True)
    if cause.sqlstate == _INSUFFICIENT_PRIVILEGE:
        return ConfigurationError(
            f"the database rejected access: {message}; connect as a role with that right, like the owner, "
            "or let such a role run the output of ergon db sql"
        )
    if cause.sqlstate == _READ_ONLY:
        return ConfigurationError(f"the database is read-only: {message}; on a standby, use the primary instead")
    if isinstance(error, OperationalError):
        return ConnectionLostError(f"the connection was lost, and nothing was changed: {message}")
    return ConfigurationError(f"the database answered with {type(cause).__name__}, and nothing was changed: {message}")
