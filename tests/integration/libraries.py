"""Every database library that a caller may bring: a connection inside a database transaction, and its savepoints."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager

import asyncpg
import psycopg
import psycopg_pool
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session


def to_driver_url(dsn, driver):
    return dsn.replace("postgresql:", f"postgresql+{driver}:")


@contextmanager
def psycopg_connection(dsn):
    with psycopg.connect(dsn) as connection:
        yield connection, connection.transaction


@contextmanager
def psycopg_autocommit_connection(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection, connection.transaction():
        yield connection, connection.transaction


@contextmanager
def psycopg_dict_row_connection(dsn):
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row, cursor_factory=psycopg.ClientCursor) as connection:
        yield connection, connection.transaction


@contextmanager
def pooled_connection(dsn):
    with psycopg_pool.ConnectionPool(dsn, min_size=1, open=True) as pool, pool.connection() as connection:
        yield connection, connection.transaction


@contextmanager
def sqlalchemy_connection(dsn):
    engine = sa.create_engine(to_driver_url(dsn, "psycopg"))
    try:
        with engine.begin() as connection:
            yield connection, connection.begin_nested
    finally:
        engine.dispose()


@contextmanager
def sqlalchemy_session(dsn):
    engine = sa.create_engine(to_driver_url(dsn, "psycopg"))
    try:
        with Session(engine) as session, session.begin():
            yield session, session.begin_nested
    finally:
        engine.dispose()


@asynccontextmanager
async def async_psycopg_connection(dsn):
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        yield connection, connection.transaction


@asynccontextmanager
async def asyncpg_connection(dsn):
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            yield connection, connection.transaction
    finally:
        await connection.close()


@asynccontextmanager
async def asyncpg_pool_connection(dsn):
    async with asyncpg.create_pool(dsn, min_size=1) as pool, pool.acquire() as connection, connection.transaction():
        yield connection, connection.transaction


def make_async_connection(driver):
    @asynccontextmanager
    async def connect(dsn):
        engine = create_async_engine(to_driver_url(dsn, driver))
        try:
            async with engine.begin() as connection:
                yield connection, connection.begin_nested
        finally:
            await engine.dispose()

    return connect


def make_async_session(driver):
    @asynccontextmanager
    async def connect(dsn):
        engine = create_async_engine(to_driver_url(dsn, driver))
        try:
            async with AsyncSession(engine) as session, session.begin():
                yield session, session.begin_nested
        finally:
            await engine.dispose()

    return connect


SYNC_LIBRARIES = {
    "psycopg": psycopg_connection,
    "psycopg in autocommit": psycopg_autocommit_connection,
    "psycopg with other rows": psycopg_dict_row_connection,
    "psycopg_pool": pooled_connection,
    "SQLAlchemy Connection": sqlalchemy_connection,
    "SQLAlchemy Session": sqlalchemy_session,
}
ASYNC_LIBRARIES = {
    "psycopg": async_psycopg_connection,
    "asyncpg": asyncpg_connection,
    "asyncpg pool": asyncpg_pool_connection,
    "SQLAlchemy AsyncConnection, psycopg": make_async_connection("psycopg"),
    "SQLAlchemy AsyncConnection, asyncpg": make_async_connection("asyncpg"),
    "SQLAlchemy AsyncSession, psycopg": make_async_session("psycopg"),
    "SQLAlchemy AsyncSession, asyncpg": make_async_session("asyncpg"),
}
