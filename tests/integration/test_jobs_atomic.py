"""A job submitted with a row of the application exists exactly if that row does, whichever process is killed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import run_sql, wait_until
from tests.servers.databases import create_migrated_database

pytestmark = pytest.mark.invariant

WRITER = Path(__file__).parent / "job_writer.py"
#: Raise it for a longer run: ERGON_KILLS=2000.
KILL_COUNT = int(os.environ.get("ERGON_KILLS", "30"))
#: Sessions whose writer has exited and whose transaction the server has not rolled back yet.
COUNT_OTHER_SESSIONS = (
    "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
)


def test_rows_and_jobs_agree_whenever_their_writer_is_killed(postgres):
    dsn, seed = create_migrated_database(postgres), random.randrange(1_000_000)
    subprocess.run([sys.executable, WRITER, dsn, str(KILL_COUNT), str(seed)], check=True, timeout=60 + KILL_COUNT)
    asyncio.run(wait_until(lambda: run_sql(dsn, COUNT_OTHER_SESSIONS) == [(0,)]))
    job_ids = sorted(run_sql(dsn, "select name from effect"))
    # At least the first transaction of every child was committed before it could be killed.
    assert len(job_ids) >= KILL_COUNT, seed
    assert sorted(run_sql(dsn, "select id from ergon.job")) == job_ids, seed
    assert sorted(run_sql(dsn, "select transaction_id from ergon.ready")) == job_ids, seed
    # Some were killed in the middle: rolled-back transactions leave gaps in the sequence numbers.
    assert run_sql(dsn, "select max(number) > count(*) from ergon.job") == [(True,)], seed
