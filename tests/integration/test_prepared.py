"""Statements that are prepared once for each connection, and a server that has forgotten some of them."""

from __future__ import annotations

import psycopg

from ergon_framework.schema.operation import Text, perform

ONE, TWO = "select $1::text || 'one'", "select $1::text || 'two'"


def asked(connection, sql):
    def operation():
        ((answer,),) = yield Text(sql, ("",))
        return answer

    return perform(connection, operation())


def test_whatever_was_forgotten_in_whatever_order_every_statement_is_answered(database):
    with psycopg.connect(database, autocommit=True) as connection:
        assert asked(connection, ONE) == "one"
        connection.execute("deallocate all")
        # The second is new and the first is forgotten; afterwards the server knows both.
        assert [asked(connection, sql) for sql in (TWO, ONE, TWO, ONE)] == ["two", "one", "two", "one"]
