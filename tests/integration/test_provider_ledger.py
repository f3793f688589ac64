"""Check the task ledger: the first end of a task is applied, and each dead letter exists once."""

from __future__ import annotations

import os
import threading
from collections import Counter
from datetime import timedelta

import psycopg
import pytest

from ergon_framework.database.migrate import upgrade
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.providers.celery.ledger import TaskDelivery, TaskLedger, TaskState
from ergon_framework.providers.dead_letter import ProviderDeadLetter
from ergon_framework.providers.postgres import rollups


def make_dead_letter(task_id, **fields):
    defaults = {
        "tenant_id": "acme",
        "campaign_id": "c",
        "task_name": "rank.snapshot",
        "provider_name": "rank",
        "capability": "rank_snapshot",
        "operation": "snapshot",
        "idempotency_key": "k",
        "correlation_id": "cor",
        "reason_code": "timeout",
        "error_type": "ProviderTimeoutError",
        "error_message": "no answer in time",
        "attempts": 3,
        "occurred_at": 1_700_000_000.5,
        "task_id": task_id,
    }
    return ProviderDeadLetter(**defaults | fields)


@pytest.fixture(scope="module")
def dsn(postgres):
    address = postgres.create_database("ledger")
    upgrade(address)
    return address


@pytest.fixture
def ledger(dsn):
    ledger = TaskLedger(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("truncate ergon.provider_deliveries, ergon.provider_dead_letters")
    yield ledger
    ledger.close()


def count_dead_letters(dsn):
    with psycopg.connect(dsn) as connection:
        return connection.execute("select count(*) from ergon.provider_dead_letters").fetchone()[0]


@pytest.mark.spec("PRV-23")
def test_deliveries_are_counted_and_can_be_released(ledger):
    assert ledger.begin("t", "n") == TaskDelivery(1, TaskState.RUNNING)
    assert ledger.begin("t", "n").deliveries == 2
    ledger.release("t")
    assert ledger.begin("t", "n").deliveries == 2


@pytest.mark.spec("PRV-23")
def test_a_dead_task_stays_dead_and_has_one_dead_letter(ledger, dsn):
    ledger.begin("t", "n")
    assert ledger.fail(make_dead_letter("t")) is TaskState.DEAD
    assert ledger.fail(make_dead_letter("t", reason_code="bad_request")) is TaskState.DEAD
    assert ledger.complete("t", "n", run="r", is_reported=True) is TaskState.DEAD
    assert ledger.begin("t", "n").state is TaskState.DEAD
    assert ledger.get_dead_letter("t").reason_code == "timeout"
    assert count_dead_letters(dsn) == 1


@pytest.mark.spec("PRV-23")
def test_a_task_that_has_succeeded_is_never_dead_lettered(ledger, dsn):
    assert ledger.complete("t", "n", run="r", is_reported=True) is None
    assert ledger.fail(make_dead_letter("t")) is TaskState.SUCCEEDED
    assert ledger.complete("t", "n", run="other", is_reported=True) is TaskState.SUCCEEDED
    assert ledger.get_dead_letter("t") is None
    assert count_dead_letters(dsn) == 0


def test_a_result_that_was_not_reported_is_confirmed_or_reopened(ledger):
    ledger.begin("t", "n")
    assert ledger.complete("t", "n", run="r", is_reported=False) is None
    assert ledger.complete("t", "n", run="r", is_reported=False) is None  # the answer was lost, and the call is retried
    assert ledger.complete("t", "n", run="other", is_reported=False) is TaskState.SUCCEEDING
    assert ledger.fail(make_dead_letter("t")) is TaskState.SUCCEEDING
    delivery = ledger.begin("t", "n")
    assert delivery.state is TaskState.SUCCEEDING
    assert delivery.ended_ago >= 0
    ledger.reopen("t")
    assert ledger.begin("t", "n").state is TaskState.RUNNING
    ledger.complete("t", "n", run="r", is_reported=False)
    ledger.confirm("t")
    assert ledger.begin("t", "n").state is TaskState.SUCCEEDED


@pytest.mark.spec("PRV-23")
def test_one_of_many_concurrent_ends_of_a_task_is_applied(dsn):
    ends: Counter[str] = Counter()

    def end_task(number):
        own_ledger = TaskLedger(dsn)
        if number % 2:
            ends[f"succeeded {own_ledger.complete('race', 'n', run=str(number), is_reported=True)}"] += 1
        else:
            ends[f"failed {own_ledger.fail(make_dead_letter('race'))}"] += 1
        own_ledger.close()

    threads = [threading.Thread(target=end_task, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    final_state = TaskLedger(dsn, close_after_use=True).begin("race", "n").state
    if final_state is TaskState.DEAD:
        assert ends == {"failed dead": 6, "succeeded dead": 6}
    else:
        assert ends == {"failed succeeded": 6, "succeeded None": 1, "succeeded succeeded": 5}


@pytest.mark.spec("PRV-13", "PRV-23")
def test_dead_letters_are_published_in_order_until_one_fails(ledger):
    for number in range(3):
        ledger.fail(make_dead_letter(f"t-{number}"))
    sent = []

    def send(letter):
        if len(sent) == 2:
            raise OSError("the broker is away")
        sent.append(letter)

    with pytest.raises(OSError, match="away"):
        ledger.publish(send, limit=10)
    assert sent == [make_dead_letter("t-0"), make_dead_letter("t-1")]
    sent.clear()
    assert ledger.publish(send, limit=10) == 1
    assert [letter.task_id for letter in sent] == ["t-2"]
    assert ledger.publish(send, limit=10) == 0


@pytest.mark.spec("PRV-23")
def test_two_concurrent_publishers_publish_each_dead_letter_once(ledger, dsn):
    for number in range(4):
        ledger.fail(make_dead_letter(f"t-{number}"))
    other, sent = TaskLedger(dsn), []

    def send(dead_letter):
        sent.append(dead_letter.task_id)
        if len(sent) == 1:
            other.publish(lambda letter: sent.append(letter.task_id), limit=10)

    assert ledger.publish(send, limit=2) == 2
    other.close()
    assert sorted(sent) == [f"t-{number}" for number in range(4)]


def test_old_task_rows_are_deleted_and_dead_letters_stay(ledger, dsn):
    ledger.fail(make_dead_letter("t"))
    assert ledger.delete_expired(3600.0) == 0
    assert ledger.delete_expired(-1.0) == 1
    assert count_dead_letters(dsn) == 1


def test_a_lost_connection_is_replaced(ledger, dsn):
    ledger.begin("t", "n")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'ergon'")
    assert ledger.begin("t", "n").deliveries == 2


def test_a_fork_does_not_use_the_connection_of_its_parent(ledger):
    ledger.begin("t", "n")
    child = os.fork()
    if child == 0:
        ledger.begin("t", "n")
        os._exit(0)
    os.waitpid(child, 0)
    assert ledger.begin("t", "n").deliveries == 3


@pytest.mark.spec("PRV-25")
def test_an_unavailable_or_invalid_database_is_reported_without_its_address(dsn, monkeypatch):
    with pytest.raises(ConnectionLostError) as caught:
        TaskLedger("postgresql://me:hunter2@127.0.0.1:9/none").begin("t", "n")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(ConfigurationError, match="invalid database address"):
        TaskLedger("nonsense hunter2").begin("t", "n")
    with pytest.raises(ConfigurationError, match="ergon db upgrade"):
        TaskLedger(dsn.rpartition("/")[0] + "/postgres", close_after_use=True).begin("t", "n")
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    with pytest.raises(ConfigurationError, match="ERGON_POSTGRES__DSN"):
        TaskLedger().begin("t", "n")


@pytest.mark.spec("DX-28", "PRV-11")
def test_each_dead_letter_is_counted_once_in_the_metrics_and_in_its_minute(ledger, dsn):
    for tenant, task_id in (("acme", "counted-1"), ("acme", "counted-2"), ("zeta", "counted-3")):
        letter = make_dead_letter(
            task_id, tenant_id=tenant, task_execution_id=task_id, max_attempts=3, correlation_id="counts"
        )
        # The second caller has not ended the task.
        for _ in range(2):
            assert ledger.fail(letter) is TaskState.DEAD
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select tenant_id, task_execution_id, attempt_number, max_attempts, outcome, reason_code, created_at "
            "from ergon.provider_execution_metrics where correlation_id = 'counts' order by task_execution_id"
        ).fetchall()
        since = rows[0][-1].replace(second=0, microsecond=0)
        stored = rollups.load_rollups(connection, since, since + timedelta(minutes=1))
        recomputed = rollups.recompute_rollups(connection, since, since + timedelta(minutes=1))
    assert [row[:-1] for row in rows] == [
        ("acme", "counted-1", 3, 3, "dead_letter", "timeout"),
        ("acme", "counted-2", 3, 3, "dead_letter", "timeout"),
        ("zeta", "counted-3", 3, 3, "dead_letter", "timeout"),
    ]
    assert stored == recomputed, "the roll-up is that of the rows"
    assert {key.tenant_id: metrics.calls.dead_letter for key, metrics in stored.items()}["zeta"] == 1
    assert sum(metrics.calls.dead_letter for metrics in stored.values()) == count_dead_letter_rows(dsn)
    assert all(metrics.calls.total == 0 for metrics in stored.values()), "a dead letter does not count as an attempt"


def count_dead_letter_rows(dsn):
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "select count(*) from ergon.provider_execution_metrics where outcome = 'dead_letter'"
        ).fetchone()
    return row[0]
