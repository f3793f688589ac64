"""Counters: what PostgreSQL has looked at in an index."""

from __future__ import annotations

import time

import psycopg

PATIENCE = 20.0
#: A session has counted for all to see when it is gone.
OTHERS = "select 1 from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"


def looked_at(dsn, index):
    """How often it was asked, and how many entries were read, by sessions that have ended or are about to."""
    until = time.monotonic() + PATIENCE
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(OTHERS).fetchone():
            assert time.monotonic() < until, "somebody is still connected"
            time.sleep(0.01)
        found = "select idx_scan, idx_tup_read from pg_stat_user_indexes where indexrelname = %s"
        return connection.execute(found, [index]).fetchone()
