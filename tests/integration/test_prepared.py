"""Check statements that are prepared once per connection while the server has forgotten some of them."""

from __future__ import annotations

import psycopg

from ergon_framework.database.operation import PreparedTextQuery, run_operation

SELECT_ONE, SELECT_TWO = "select $1::text || 'one'", "select $1::text || 'two'"


def run_query(connection, sql):
    def operation():
        ((answer,),) = yield PreparedTextQuery(sql, ("",))
        return answer

    return run_operation(connection, operation())


def test_every_statement_is_answered_whatever_the_server_has_forgotten(database):
    with psycopg.connect(database, autocommit=True) as connection:
        assert run_query(connection, SELECT_ONE) == "one"
        connection.execute("deallocate all")
        # The second is new and the first is forgotten; afterwards the server knows both.
        assert [run_query(connection, sql) for sql in (SELECT_TWO, SELECT_ONE, SELECT_TWO, SELECT_ONE)] == [
            "two",
            "one",
            "two",
            "one",
        ]
