"""A job that is submitted with a row of the application's own is there exactly if that row is, whoever is killed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import rows, until
from tests.servers.databases import migrated

pytestmark = pytest.mark.invariant

WRITER = Path(__file__).parent / "job_writer.py"
#: To be raised for a longer look: ERGON_KILLS=2000.
KILLS = int(os.environ.get("ERGON_KILLS", "30"))
#: Whose writer is gone, and whose work the server has not taken back yet.
OTHERS = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"


def test_rows_and_jobs_agree_whenever_their_writer_is_killed(postgres):
    dsn, seed = migrated(postgres), random.randrange(1_000_000)
    subprocess.run([sys.executable, WRITER, dsn, str(KILLS), str(seed)], check=True, timeout=60 + KILLS)
    asyncio.run(until(lambda: rows(dsn, OTHERS) == [(0,)]))
    written = sorted(rows(dsn, "select name from effect"))
    # At least the first of every child was committed before it could be killed.
    assert len(written) >= KILLS, seed
    assert sorted(rows(dsn, "select id from ergon.job")) == written, seed
    assert sorted(rows(dsn, "select transaction_id from ergon.ready")) == written, seed
    # And some were killed in the middle: what was begun and taken back has left a hole in the numbers.
    assert rows(dsn, "select max(number) > count(*) from ergon.job") == [(True,)], seed
