"""Check that clean-up in PostgreSQL reads little more than it deletes, is bounded and runs outside every fetch."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid

import psycopg
import pytest

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import PostgresQueue, cleanup
from ergon_framework.connectors.postgres.cleanup import Cleanup, delete_batch
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.facts.stores.postgres import sql as postgres_statements
from ergon_framework.task.decorators import consumer
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy
from tests.log_events import list_events
from tests.servers.databases import create_migrated_database

ROW_COUNT = 100_000
OLD_ROWS = 3_000
BATCH_ROWS = 1_000
QUEUE_ID = 7

#: A month of rows, evenly spread; ages in seconds from *oldest* down to 0.
FILL_STATEMENTS = {
    "inbox": f"""
        insert into ergon.inbox (queue, transaction_id, at)
        select {QUEUE_ID}, md5(i::text), now() - interval '30 days' * (1 - i::float8 / %(rows)s)
        from generate_series(1, %(rows)s) i""",
    "dead_letter": f"""
        insert into ergon.dead_letter (queue, transaction_id, reason, deliveries, readable, headers, body, at)
        select {QUEUE_ID}, md5(i::text), 'broken', 1, true, '{{}}', '',
            now() - interval '30 days' * (1 - i::float8 / %(rows)s)
        from generate_series(1, %(rows)s) i""",
    "journal": """
        insert into ergon.journal (at, transaction_id, task, queue, outcome, attempts, seconds, worker)
        select now() - interval '30 days' * (1 - i::float8 / %(rows)s), md5(i::text), 't', 'q', 'succeeded', 1, 0.1, 'w'
        from generate_series(1, %(rows)s) i""",
    "fact_ids": """
        with epoch as (insert into ergon.fact_epochs (epoch) values ('one') returning id),
        log as (
            insert into ergon.fact_log (from_zone, to_zone, forwarded, epoch, last, dropped)
            select 'a', 'b', false, id, %(rows)s, %(rows)s from epoch returning id, epoch
        )
        insert into ergon.fact_ids (from_zone, message_id, digest, log, fact_offset, epoch, kept_at)
        select 'a', md5(i::text), '', log.id, i, log.epoch, i from log, generate_series(1, %(rows)s) i""",
}


@pytest.fixture
def dsn(postgres):
    return create_migrated_database(postgres)


def clean_up_statements(dsn):
    """Return every clean-up statement with parameters for OLD_ROWS old rows and a batch of BATCH_ROWS rows."""
    seconds = 30 * 86_400 * (1 - OLD_ROWS / ROW_COUNT)
    queue_parameters = {"queue": QUEUE_ID, "seconds": seconds, "most": BATCH_ROWS}
    with psycopg.connect(dsn) as connection:
        log = connection.execute("select id from ergon.fact_log").fetchone()
    return {
        "inbox": (cleanup.DELETE_MARKS, queue_parameters),
        "dead_letter": (cleanup.DELETE_DEAD_LETTERS, queue_parameters),
        "journal": (cleanup.DELETE_JOURNAL, {"seconds": seconds, "most": BATCH_ROWS}),
        "fact_ids": (
            postgres_statements.DELETE_IDS,
            {"log": log[0] if log else 0, "since": 0, "latest": OLD_ROWS, "part": BATCH_ROWS},
        ),
    }


def count_examined(plan):
    """Count the rows that the table scans in *plan* have read, including those removed by a filter."""
    own = 0
    if "Relation Name" in plan and plan["Node Type"] != "ModifyTable":
        removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        own = round((plan["Actual Rows"] + removed) * plan["Actual Loops"])
    return own + sum(count_examined(child) for child in plan.get("Plans", ()))


@pytest.mark.spec("DX-20")
@pytest.mark.parametrize("is_analyzed", [True, False], ids=["analyzed", "never-analyzed"])
@pytest.mark.parametrize("table", FILL_STATEMENTS)
def test_a_clean_up_statement_reads_at_most_twice_what_it_deletes(dsn, table, is_analyzed):
    with psycopg.connect(dsn, autocommit=True) as connection:
        if not is_analyzed:
            connection.execute(f"alter table ergon.{table} set (autovacuum_enabled = off)")
        connection.execute(FILL_STATEMENTS[table], {"rows": ROW_COUNT})
        if is_analyzed:
            connection.execute(f"analyze ergon.{table}")
    sql, parameters = clean_up_statements(dsn)[table]
    with ConnectionPool(dsn).connect() as session:
        for _ in range(OLD_ROWS // BATCH_ROWS):
            row = session.execute(f"explain (analyze, format json) {sql}", parameters).fetchone()
            assert count_examined(row[0][0]["Plan"]) <= 2 * BATCH_ROWS + 1_000, row[0]
        row = session.execute(f"explain (analyze, format json) {sql}", parameters).fetchone()
        assert count_examined(row[0][0]["Plan"]) <= 1_000, row[0]
        (left,) = session.execute(f"select count(*) from ergon.{table}").fetchone()
    assert left == pytest.approx(ROW_COUNT - OLD_ROWS, abs=10)


@pytest.mark.spec("DX-20", "FAC-11")
def test_ids_of_retained_facts_are_not_read_repeatedly(dsn):
    """A reader that lags keeps facts: their ids stay, whatever their age, and clean-up stops at them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(FILL_STATEMENTS["fact_ids"], {"rows": ROW_COUNT})
        connection.execute("update ergon.fact_log set dropped = 10")
    sql, parameters = clean_up_statements(dsn)["fact_ids"]
    parameters["latest"] = ROW_COUNT
    with ConnectionPool(dsn).connect() as session:
        assert session.execute(sql, parameters).fetchone() == (10, BATCH_ROWS, BATCH_ROWS)
        row = session.execute(f"explain (analyze, format json) {sql}", parameters).fetchone()
        assert count_examined(row[0][0]["Plan"]) <= BATCH_ROWS + 2


# -- outside every fetch ----------------------------------------------------------------------------------------


def list_marks(dsn):
    with psycopg.connect(dsn) as connection:
        return {row[0] for row in connection.execute("select transaction_id from ergon.inbox")}


def add_mark(dsn, queue, names, days):
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "insert into ergon.inbox (queue, transaction_id, at) "
            "select ergon.create_queue(%s), name, now() - %s * interval '1 day' from unnest(%s::text[]) as name",
            [queue.name, days, names],
        )


def streaming_policy():
    return ConsumerPolicy.load({"loop": {"streaming": True, "empty_queue": {"backoff": 0.02, "cap": 0.02}}})


def run_threads(queue, wait):
    @consumer(queue, policy=streaming_policy())
    def handle(payload):
        pass

    thread = threading.Thread(target=handle.run, daemon=True)
    thread.start()
    wait()
    handle.stop()
    thread.join(30)
    queue.close()


def run_asyncio(queue, wait):
    @consumer(queue, policy=streaming_policy())
    async def handle(payload):
        pass

    async def main():
        loop = asyncio.create_task(handle.run())
        await asyncio.to_thread(wait)
        handle.stop()
        await loop
        await queue.close_async()

    asyncio.run(main())


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def find_cleanup_threads():
    return {thread for thread in threading.enumerate() if thread.name == "ergon-cleanup"}


VARIANTS = pytest.mark.parametrize("run", [run_threads, run_asyncio], ids=["threads", "asyncio"])


@VARIANTS
@pytest.mark.spec("DX-20", "CNN-14")
def test_a_worker_deletes_old_marks_in_a_thread_that_ends_with_its_queue(dsn, monkeypatch, run):
    monkeypatch.setattr(cleanup, "INTERVAL_SECONDS", 0.05)
    queue = PostgresQueue(f"orders-{uuid.uuid4().hex[:8]}", dsn=dsn, inbox=True, inbox_days=2)
    add_mark(dsn, queue, ["old"], 2.1)
    add_mark(dsn, queue, ["young"], 1.9)
    other_threads = find_cleanup_threads()
    run(queue, lambda: wait_until(lambda: list_marks(dsn) == {"young"}))
    wait_until(lambda: find_cleanup_threads() <= other_threads)


@VARIANTS
@pytest.mark.spec("DX-20")
def test_a_clean_up_that_is_blocked_delays_no_fetch_and_ends_no_worker(dsn, monkeypatch, caplog, run):
    monkeypatch.setattr(cleanup, "INTERVAL_SECONDS", 0.05)
    queue = PostgresQueue(f"orders-{uuid.uuid4().hex[:8]}", dsn=dsn, inbox=True)
    add_mark(dsn, queue, ["old"], 31)
    sender = PostgresQueue(queue.name, dsn=dsn)

    def wait_for_orders():
        wait_until(lambda: "cleanup failed" in list_events(caplog.records))
        for number in range(20):
            started_at = time.monotonic()
            sender.dispatch([Transaction(number, id=f"order-{number}")])
            wait_until(lambda number=number: f"order-{number}" in list_marks(dsn))
            assert time.monotonic() - started_at < 5.0

    with psycopg.connect(dsn) as holder:
        holder.execute("select from ergon.inbox for update")  # the old mark cannot be deleted while this is open
        run(queue, wait_for_orders)
        assert "old" in list_marks(dsn)
    sender.close()


@pytest.mark.spec("DX-20")
def test_one_process_at_a_time_cleans_a_table(dsn):
    queue = PostgresQueue("orders", dsn=dsn, inbox=True)
    add_mark(dsn, queue, ["old"], 31)
    with psycopg.connect(dsn) as session:
        (number,) = session.execute("select ergon.create_queue('orders')").fetchone()
        retention = cleanup.retain_marks(number, 30 * 86_400.0)
        pool = ConnectionPool(dsn, error_type=ConnectorError)
        session.execute("select pg_advisory_xact_lock(%s, hashtext(%s))", [cleanup._LOCK_CLASS, retention.name])
        assert pool.run(delete_batch(retention)) == 0
        session.rollback()
        assert pool.run(delete_batch(retention)) == 1
        pool.close()


@pytest.mark.spec("DX-20")
def test_a_clean_up_deletes_all_expired_rows_batch_by_batch_until_it_is_stopped(dsn, monkeypatch):
    monkeypatch.setattr(cleanup, "BATCH_ROWS", 10)
    queue = PostgresQueue("orders", dsn=dsn, inbox=True)
    add_mark(dsn, queue, [f"old-{number}" for number in range(45)], 31)
    with psycopg.connect(dsn) as connection:
        (number,) = connection.execute("select ergon.create_queue('orders')").fetchone()
    cleaner = Cleanup(dsn)
    remove = cleaner.add(cleanup.retain_marks(number, 30 * 86_400.0))
    stopped = threading.Event()
    stopped.set()
    cleaner.delete_expired(stopped)
    assert len(list_marks(dsn)) == 45
    cleaner.delete_expired(threading.Event())
    assert list_marks(dsn) == set()
    remove()
