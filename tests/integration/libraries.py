"""Every database library that a caller may bring: a connection inside a database transaction, and its savepoints."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager

import asyncpg
import psycopg
import psycopg_pool
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session


def url(dsn, driver):
    return dsn.replace("postgresql:", f"postgresql+{driver}:")


@contextmanager
def by_psycopg(dsn):
    with psycopg.connect(dsn) as connection:
        yield connection, connection.transaction


@contextmanager
def by_psycopg_autocommit(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection, connection.transaction():
        yield connection, connection.transaction


@contextmanager
def by_psycopg_rows(dsn):
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row, cursor_factory=psycopg.ClientCursor) as connection:
        yield connection, connection.transaction


@contextmanager
def by_pool(dsn):
    with psycopg_pool.ConnectionPool(dsn, min_size=1, open=True) as pool, pool.connection() as connection:
        yield connection, connection.transaction


@contextmanager
def by_sqlalchemy(dsn):
    engine = sa.create_engine(url(dsn, "psycopg"))
    try:
        with engine.begin() as connection:
            yield connection, connection.begin_nested
    finally:
        engine.dispose()


@contextmanager
def by_session(dsn):
    engine = sa.create_engine(url(dsn, "psycopg"))
    try:
        with Session(engine) as session, session.begin():
            yield session, session.begin_nested
    finally:
        engine.dispose()


@asynccontextmanager
async def by_psycopg_async(dsn):
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        yield connection, connection.transaction


@asynccontextmanager
async def by_asyncpg(dsn):
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            yield connection, connection.transaction
    finally:
        await connection.close()


@asynccontextmanager
async def by_asyncpg_pool(dsn):
    async with asyncpg.create_pool(dsn, min_size=1) as pool, pool.acquire() as connection, connection.transaction():
        yield connection, connection.transaction


def by_async_connection(driver):
    @asynccontextmanager
    async def made(dsn):
        engine = create_async_engine(url(dsn, driver))
        try:
            async with engine.begin() as connection:
                yield connection, connection.begin_nested
        finally:
            await engine.dispose()

    return made


def by_async_session(driver):
    @asynccontextmanager
    async def made(dsn):
        engine = create_async_engine(url(dsn, driver))
        try:
            async with AsyncSession(engine) as session, session.begin():
                yield session, session.begin_nested
        finally:
            await engine.dispose()

    return made


SYNC = {
    "psycopg": by_psycopg,
    "psycopg in autocommit": by_psycopg_autocommit,
    "psycopg with other rows": by_psycopg_rows,
    "psycopg_pool": by_pool,
    "SQLAlchemy Connection": by_sqlalchemy,
    "SQLAlchemy Session": by_session,
}
ASYNC = {
    "psycopg": by_psycopg_async,
    "asyncpg": by_asyncpg,
    "asyncpg pool": by_asyncpg_pool,
    "SQLAlchemy AsyncConnection, psycopg": by_async_connection("psycopg"),
    "SQLAlchemy AsyncConnection, asyncpg": by_async_connection("asyncpg"),
    "SQLAlchemy AsyncSession, psycopg": by_async_session("psycopg"),
    "SQLAlchemy AsyncSession, asyncpg": by_async_session("asyncpg"),
}
