"""Migrate: bring a database to the schema of this release, say how far it is, or print the statements."""

from __future__ import annotations

import io
import time
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

from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError
from ergon_framework.schema.migrations.versions import r0012_cleanup
from ergon_framework.schema.revisions import CHAIN, SCHEMA, suffices

#: Two who upgrade at once take turns.
_TURN: Final = 0x6572676F6E
#: Concurrent upgrades build indexes one after the other. Another key than above, which a transaction may wait for.
_INDEX_LOCK: Final = 0x6572676F71
_INDEX_POLL_SECONDS: Final = 0.2
_IS_INVALID: Final = "select not indisvalid from pg_index where indexrelid = to_regclass(:name)"
#: Seconds to wait for a server, unless the address says otherwise.
_PATIENCE: Final = 10
#: Longest part of the driver's own words that is passed on.
_LONGEST: Final = 200
_NO_RIGHT: Final = "42501"
_READ_ONLY: Final = "25006"


@dataclass(frozen=True, slots=True)
class State:
    """How far a database is."""

    #: The revision that it is at; None before the first.
    found: str | None
    #: What an upgrade would do, the next one first.
    missing: tuple[str, ...]

    @property
    def suffices(self) -> bool:
        """Whether this release can work on it."""
        return suffices(self.found)

    @property
    def newer(self) -> bool:
        """Whether a later release than this one has upgraded it."""
        return self.found is not None and self.found not in CHAIN


def upgrade(dsn: str, to: str = "head") -> State:
    """Bring the database at *dsn* to revision *to*, all of it or nothing; how far it was before.

    One that a later release has upgraded is left as it is. Indexes of large tables are built before, while workers
    write; an upgrade that fails later leaves them, and they change nothing for the release before.
    """
    if to in ("head", *CHAIN[CHAIN.index(r0012_cleanup.revision) :]):
        _prepare_indexes(dsn)
    with _connected(dsn) as connection:
        connection.execute(text("select pg_advisory_xact_lock(:turn)"), {"turn": _TURN})
        before = _state(connection)
        if before.newer:
            return before
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, to)
        connection.commit()
    return before


def _prepare_indexes(dsn: str) -> None:
    """Replace the indexes that revision 0012 replaces, concurrently, where the tables are there and may be large."""
    with _connected(dsn) as connection:
        if not _lacks_indexes(connection):
            return
        # The lock is polled for: a transaction that waits for it would be one that the concurrent build waits for.
        while not connection.execute(text("select pg_try_advisory_xact_lock(:turn)"), {"turn": _INDEX_LOCK}).scalar():
            connection.rollback()
            time.sleep(_INDEX_POLL_SECONDS)
        if _lacks_indexes(connection):
            with _connected(dsn) as builder:
                _replace_indexes(builder.execution_options(isolation_level="AUTOCOMMIT"))
        connection.rollback()


def _lacks_indexes(connection: Connection) -> bool:
    """Whether there are tables, and revision 0012 is missing."""
    state = _state(connection)
    return state.found is not None and r0012_cleanup.revision in state.missing


def _replace_indexes(connection: Connection) -> None:
    for name, columns in r0012_cleanup.INDEXES.items():
        if connection.execute(text("select to_regclass(:table)"), {"table": columns.split()[0]}).scalar() is None:
            continue
        # A build that was cut off leaves an index that is invalid, and that no query may use.
        if connection.execute(text(_IS_INVALID), {"name": f"{SCHEMA}.{name}"}).scalar():
            connection.execute(text(f"drop index concurrently {SCHEMA}.{name}"))
        connection.execute(text(f"create index concurrently if not exists {name} on {columns}"))
    for name in r0012_cleanup.UNUSED:
        connection.execute(text(f"drop index concurrently if exists {SCHEMA}.{name}"))


def check(dsn: str) -> State:
    """How far the database at *dsn* is."""
    with _connected(dsn) as connection:
        return _state(connection)


def sql(since: str | None = None, to: str = "head") -> str:
    """The statements of an upgrade from *since* to *to*, for those who run them by hand."""
    if since is not None and since not in CHAIN:
        raise ConfigurationError(f"there is no revision {since!r}; the revisions are {', '.join(CHAIN)}")
    output = io.StringIO()
    command.upgrade(_config(output), f"{since or 'base'}:{to}", sql=True)
    return output.getvalue()


def revisions() -> list[str]:
    """The chain as the files make it, the oldest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()][::-1]


def _config(output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    return config


def _state(connection: Connection) -> State:
    there = connection.execute(text("select to_regclass(:name)"), {"name": f"{SCHEMA}.revision"}).scalar()
    found: Any = None
    if there is not None:
        found = connection.execute(text("select version_num from ergon.revision")).scalar()
    known = CHAIN.index(found) + 1 if found in CHAIN else (0 if found is None else len(CHAIN))
    return State(found, CHAIN[known:])


@contextmanager
def _connected(dsn: str) -> Iterator[Connection]:
    dialect: Any = PGDialect_psycopg
    driver = dialect.import_dbapi()
    try:
        # Read by the driver itself, so that an address means here what it means to a queue.
        given = driver.conninfo.conninfo_to_dict(dsn)
    except driver.ProgrammingError:
        # Without its cause, which quotes the address.
        raise ConfigurationError(
            "the address of the database cannot be read; it looks like postgresql://user@host:5432/name, and is named "
            "by ERGON_POSTGRES__DSN, by ergon.toml or by the program"
        ) from None
    options = {"connect_timeout": _PATIENCE, **given, "prepare_threshold": None}
    engine = create_engine("postgresql+psycopg://", creator=lambda: driver.connect(**options), poolclass=NullPool)
    reached = False
    try:
        with engine.connect() as connection:
            reached = True
            yield connection
    except DBAPIError as error:
        # Without its cause, which quotes the statement.
        raise _told(error, reached=reached) from None
    finally:
        engine.dispose()


def _told(error: DBAPIError, *, reached: bool) -> ErgonError:
    """*error* in our words, with what to do about it."""
    cause: Any = error.orig
    words = (cause.diag.message_primary or str(cause).partition("\n")[0] or type(cause).__name__)[:_LONGEST]
    if not reached:
        return ConnectionLost(f"the database cannot be reached: {words}")
    if cause.sqlstate == _NO_RIGHT:
        return ConfigurationError(
            f"the database refuses: {words}; connect as a role with that right, as the database's owner has, "
            "or have one with it run what ergon db sql prints"
        )
    if cause.sqlstate == _READ_ONLY:
        return ConfigurationError(f"the database cannot be written to: {words}; is it a standby? Name the primary")
    if isinstance(error, OperationalError):
        return ConnectionLost(f"the database broke off, and nothing was changed: {words}")
    return ConfigurationError(f"the database answered with {type(cause).__name__}, and nothing was changed: {words}")
