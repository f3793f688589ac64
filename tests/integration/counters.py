"""Counters of what PostgreSQL has read from an index."""

from __future__ import annotations

import time

import psycopg

TIMEOUT_SECONDS = 20.0
#: The counters of a session are visible to all once it has ended.
OTHER_SESSIONS = "select 1 from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"


def read_index_counters(dsn, index):
    """Return how often the index was scanned and how many entries were read, by ended or ending sessions."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(OTHER_SESSIONS).fetchone():
            assert time.monotonic() < deadline, "another session is still connected"
            time.sleep(0.01)
        query = "select idx_scan, idx_tup_read from pg_stat_user_indexes where indexrelname = %s"
        return connection.execute(query, [index]).fetchone()
