"""The ledger of tasks: whoever ends a task first has ended it, and a dead letter is one."""

from __future__ import annotations

import os
import threading
from collections import Counter
from datetime import timedelta

import psycopg
import pytest

from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.providers.deadletter import DeadLetter
from ergon_framework.providers.sql import minutes
from ergon_framework.providers.sql.ledger import Begun, Ledger, State
from ergon_framework.schema.migrate import upgrade


def letter(task_id, **fields):
    usual = {
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
    return DeadLetter(**usual | fields)


@pytest.fixture(scope="module")
def dsn(postgres):
    found = postgres.create_database("ledger")
    upgrade(found)
    return found


@pytest.fixture
def ledger(dsn):
    made = Ledger(dsn)
    with psycopg.connect(dsn) as line:
        line.execute("truncate ergon.provider_deliveries, ergon.provider_dead_letters")
    yield made
    made.close()


def count(dsn):
    with psycopg.connect(dsn) as line:
        return line.execute("select count(*) from ergon.provider_dead_letters").fetchone()[0]


@pytest.mark.spec("PRV-23")
def test_deliveries_are_counted_and_can_be_given_back(ledger):
    assert ledger.begin("t", "n") == Begun(1, State.RUNNING)
    assert ledger.begin("t", "n").deliveries == 2
    ledger.give_back("t")
    assert ledger.begin("t", "n").deliveries == 2


@pytest.mark.spec("PRV-23")
def test_a_task_that_is_dead_stays_dead_and_has_one_letter(ledger, dsn):
    ledger.begin("t", "n")
    assert ledger.bury(letter("t")) is State.DEAD
    assert ledger.bury(letter("t", reason_code="bad_request")) is State.DEAD
    assert ledger.succeed("t", "n", run="r", reported=True) is State.DEAD
    assert ledger.begin("t", "n").state is State.DEAD
    assert ledger.buried("t").reason_code == "timeout"
    assert count(dsn) == 1


@pytest.mark.spec("PRV-23")
def test_a_task_that_has_succeeded_is_never_buried(ledger, dsn):
    assert ledger.succeed("t", "n", run="r", reported=True) is None
    assert ledger.bury(letter("t")) is State.SUCCEEDED
    assert ledger.succeed("t", "n", run="other", reported=True) is State.SUCCEEDED
    assert ledger.buried("t") is None
    assert count(dsn) == 0


def test_a_result_that_was_not_reported_is_confirmed_or_reopened(ledger):
    ledger.begin("t", "n")
    assert ledger.succeed("t", "n", run="r", reported=False) is None
    assert ledger.succeed("t", "n", run="r", reported=False) is None  # the answer was lost, and it is asked again
    assert ledger.succeed("t", "n", run="other", reported=False) is State.SUCCEEDING
    assert ledger.bury(letter("t")) is State.SUCCEEDING
    begun = ledger.begin("t", "n")
    assert begun.state is State.SUCCEEDING
    assert begun.ended_ago >= 0
    ledger.reopen("t")
    assert ledger.begin("t", "n").state is State.RUNNING
    ledger.succeed("t", "n", run="r", reported=False)
    ledger.confirm("t")
    assert ledger.begin("t", "n").state is State.SUCCEEDED


@pytest.mark.spec("PRV-23")
def test_of_many_that_end_a_task_at_once_one_has_ended_it(dsn):
    ends: Counter[str] = Counter()

    def end(number):
        mine = Ledger(dsn)
        if number % 2:
            ends[f"succeeded {mine.succeed('race', 'n', run=str(number), reported=True)}"] += 1
        else:
            ends[f"buried {mine.bury(letter('race'))}"] += 1
        mine.close()

    threads = [threading.Thread(target=end, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = Ledger(dsn, brief=True).begin("race", "n").state
    if won is State.DEAD:
        assert ends == {"buried dead": 6, "succeeded dead": 6}
    else:
        assert ends == {"buried succeeded": 6, "succeeded None": 1, "succeeded succeeded": 5}


@pytest.mark.spec("PRV-13", "PRV-23")
def test_letters_are_published_in_order_until_one_cannot_be(ledger):
    for number in range(3):
        ledger.bury(letter(f"t-{number}"))
    sent = []

    def send(found):
        if len(sent) == 2:
            raise OSError("the broker is away")
        sent.append(found)

    with pytest.raises(OSError, match="away"):
        ledger.publish(send, limit=10)
    assert sent == [letter("t-0"), letter("t-1")]
    sent.clear()
    assert ledger.publish(send, limit=10) == 1
    assert [found.task_id for found in sent] == ["t-2"]
    assert ledger.publish(send, limit=10) == 0


@pytest.mark.spec("PRV-23")
def test_two_feeders_at_once_publish_each_letter_once(ledger, dsn):
    for number in range(4):
        ledger.bury(letter(f"t-{number}"))
    other, sent = Ledger(dsn), []

    def send(found):
        sent.append(found.task_id)
        if len(sent) == 1:
            other.publish(lambda letter: sent.append(letter.task_id), limit=10)

    assert ledger.publish(send, limit=2) == 2
    other.close()
    assert sorted(sent) == [f"t-{number}" for number in range(4)]


def test_what_is_old_is_forgotten_and_dead_letters_stay(ledger, dsn):
    ledger.bury(letter("t"))
    assert ledger.forget(3600.0) == 0
    assert ledger.forget(-1.0) == 1
    assert count(dsn) == 1


def test_a_connection_that_was_cut_is_made_anew(ledger, dsn):
    ledger.begin("t", "n")
    with psycopg.connect(dsn, autocommit=True) as line:
        line.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'ergon'")
    assert ledger.begin("t", "n").deliveries == 2


def test_a_fork_leaves_the_parents_connection_alone(ledger):
    ledger.begin("t", "n")
    child = os.fork()
    if child == 0:
        ledger.begin("t", "n")
        os._exit(0)
    os.waitpid(child, 0)
    assert ledger.begin("t", "n").deliveries == 3


@pytest.mark.spec("PRV-25")
def test_a_database_that_is_away_or_strange_is_told_without_its_address(dsn, monkeypatch):
    with pytest.raises(ConnectionLost) as caught:
        Ledger("postgresql://me:hunter2@127.0.0.1:9/none").begin("t", "n")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Ledger("nonsense hunter2").begin("t", "n")
    with pytest.raises(ConfigurationError, match="ergon db upgrade"):
        Ledger(dsn.rpartition("/")[0] + "/postgres", brief=True).begin("t", "n")
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    with pytest.raises(ConfigurationError, match="ERGON_POSTGRES__DSN"):
        Ledger().begin("t", "n")


@pytest.mark.spec("DX-28", "PRV-11")
def test_each_dead_letter_is_counted_once_in_the_metrics_and_in_its_minute(ledger, dsn):
    for tenant, task_id in (("acme", "counted-1"), ("acme", "counted-2"), ("zeta", "counted-3")):
        written = letter(task_id, tenant_id=tenant, task_execution_id=task_id, max_attempts=3, correlation_id="counts")
        # Whoever comes second has not ended it.
        for _ in range(2):
            assert ledger.bury(written) is State.DEAD
    with psycopg.connect(dsn) as line:
        rows = line.execute(
            "select tenant_id, task_execution_id, attempt_number, max_attempts, outcome, reason_code, created_at "
            "from ergon.provider_execution_metrics where correlation_id = 'counts' order by task_execution_id"
        ).fetchall()
        since = rows[0][-1].replace(second=0, microsecond=0)
        stored = minutes.stored(line, since, since + timedelta(minutes=1))
        recomputed = minutes.recomputed(line, since, since + timedelta(minutes=1))
    assert [row[:-1] for row in rows] == [
        ("acme", "counted-1", 3, 3, "dead_letter", "timeout"),
        ("acme", "counted-2", 3, 3, "dead_letter", "timeout"),
        ("zeta", "counted-3", 3, 3, "dead_letter", "timeout"),
    ]
    assert stored == recomputed, "the roll-up is that of the rows"
    assert {place.tenant_id: tally.calls.dead_letter for place, tally in stored.items()}["zeta"] == 1
    assert sum(tally.calls.dead_letter for tally in stored.values()) == count_dead_letter_rows(dsn)
    assert all(tally.calls.total == 0 for tally in stored.values()), "a dead letter is no attempt"


def count_dead_letter_rows(dsn):
    with psycopg.connect(dsn) as line:
        found = line.execute(
            "select count(*) from ergon.provider_execution_metrics where outcome = 'dead_letter'"
        ).fetchone()
    return found[0]
