"""The consumer state store of facts in PostgreSQL: it outlives its consumer and belongs to one owner at a time."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.database import migrate
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts.append import Facts
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.errors import EpochChanged, InvalidFactError
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.postgres.consumer_state import PostgresFactConsumerStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.spec("FAC-27")

PAIR = ZonePair("Plant A", "HQ")
ALL_DEAD_LETTERS = DeadLetterQuery()
SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED
_numbers = itertools.count(1)


@pytest.fixture
def make_connector(database):
    """A factory for connectors as other processes have them: each with its own boundary and connections."""
    boundaries = []

    def make(**options):
        boundary = PostgresBoundary(database, accept_loss=True)
        boundary.open()
        boundaries.append(boundary)
        return FactConnector(boundary, **PAIR._asdict(), **options)

    yield make
    for boundary in boundaries:
        boundary.close()


def make_transactions(count):
    return [Transaction({"number": number}, id=f"t-{number}") for number in range(1, count + 1)]


def get_ids(deliveries):
    return [each.transaction.id for each in deliveries]


def get_cursor(connector, reader="default"):
    return connector.boundary.get_cursor(reader, PAIR).offset


def fetch_rows(dsn, sql):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(sql).fetchall()


def lose_answer(connector, name):
    """Let the next call of that name reach the consumer state store, and lose its answer."""
    log, calls = connector._log, connector._log._store

    def call_and_lose_answer(*args):
        log._store = calls
        getattr(calls, name)(*args)
        raise ConnectionLostError("the line went down")

    log._store = replace(calls, **{name: call_and_lose_answer})


# -- what outlives a process --------------------------------------------------------------------------


def test_a_dead_letter_is_in_its_table_before_the_cursor_goes_beyond_it(make_connector, database):
    client = make_connector()
    client.dispatch(make_transactions(1))
    (one,) = client.fetch_transactions(1)
    seen = []
    calls = client._log._store

    def confirm(*_):
        seen.extend(fetch_rows(database, "select transaction_id from ergon.dead_letter"))
        raise ConnectionLostError("killed here")

    client._log._store = replace(calls, confirm=confirm)
    assert client.settle([(one, DeadLetter("odd"))]) == [SETTLED]
    assert (seen, get_cursor(client)) == ([("t-1",)], 0)
    successor = make_connector()
    assert successor.fetch_transactions(1) == []
    (record,) = successor.list_dead(ALL_DEAD_LETTERS)
    assert (record.id, record.reason, record.payload, record.deliveries) == ("t-1", "odd", {"number": 1}, 1)
    assert get_cursor(successor) == 0
    successor.dispatch([Transaction(id="t-2")])
    successor.settle([(each, Ack()) for each in successor.fetch_transactions(5)])
    assert get_cursor(successor) == 2


def test_deliveries_are_counted_across_owners_that_were_killed(make_connector):
    make_connector().dispatch(make_transactions(3))
    for expected in (1, 2, 3):
        deliveries = make_connector().fetch_transactions(2)
        assert [each.deliveries for each in deliveries] == [expected, expected]
    # The third fact was never delivered.
    assert [each.deliveries for each in make_connector().fetch_transactions(3)] == [4, 4, 1]


def test_releases_and_deferrals_do_not_count_as_deliveries(make_connector):
    client = make_connector()
    client.dispatch(make_transactions(3))
    one, two, _ = client.fetch_transactions(3)
    assert client.settle([(one, Release()), (two, Defer(0.0))]) == [SETTLED] * 2
    successor = make_connector()
    deliveries = [*successor.fetch_transactions(3), *successor.fetch_transactions(3)]
    assert {each.transaction.id: each.deliveries for each in deliveries} == {"t-1": 1, "t-2": 1, "t-3": 2}


def test_a_clean_close_does_not_count_as_a_delivery_and_settled_facts_are_not_redelivered(make_connector):
    client = make_connector()
    client.dispatch(make_transactions(3))
    _, two, _ = client.fetch_transactions(3)
    client.settle([(two, Ack())])
    client.close()
    deliveries = make_connector().fetch_transactions(5)
    assert [(each.transaction.id, each.deliveries) for each in deliveries] == [("t-1", 1), ("t-3", 1)]


def test_a_deferred_fact_is_redelivered_when_due_also_to_another_process(make_connector):
    now = time.time()
    client = make_connector(wall=lambda: now)
    client.dispatch(make_transactions(2))
    one, two = client.fetch_transactions(2)
    client.settle([(one, Defer(60.0, attempts=2)), (two, Ack())])
    assert get_cursor(client) == 2
    successor = make_connector(wall=lambda: now + 59)
    assert successor.fetch_transactions(1) == []
    assert successor.depth().delayed == 1
    successor = make_connector(wall=lambda: now + 61)
    (again,) = successor.fetch_transactions(5)
    assert (again.transaction.id, again.transaction.attempts, again.deliveries) == ("t-1", 2, 1)
    # Killed with the delivery in flight: the delivery counts, and the fact is redelivered.
    successor = make_connector(wall=lambda: now + 61)
    (again,) = successor.fetch_transactions(5)
    assert again.deliveries == 2
    assert successor.settle([(again, Ack())]) == [SETTLED]
    assert make_connector().fetch_transactions(5) == []


def test_a_settlement_whose_answer_was_lost_is_one_dead_letter_when_it_is_repeated(make_connector):
    client = make_connector()
    client.dispatch(make_transactions(2))
    one, two = client.fetch_transactions(2)
    client.settle([(two, Defer(0.0))])
    (two,) = client.fetch_transactions(1)
    for delivery in (one, two):
        lose_answer(client, "settle")
        assert client.settle([(delivery, DeadLetter("odd"))]) == [FAILED]
        assert client.settle([(delivery, DeadLetter("odd"))]) == [SETTLED]
    assert [record.id for record in client.list_dead(ALL_DEAD_LETTERS)] == ["t-1", "t-2"]
    assert make_connector().fetch_transactions(5) == []
    assert get_cursor(client) == 2


def test_values_that_a_header_cannot_hold_are_stored_unchanged(make_connector):
    client = make_connector()
    subject, strange = "s" * 400, {"half": "\ud800", "zero": "a\0b", "deep": [[1.5]]}
    Facts(client.boundary, zone="Plant A").append("HQ", subject=subject, predicate="p", message_id="m-1")
    client.dispatch([Transaction({"text": "é\u2028"}, id="t-2")])
    one, two = client.fetch_transactions(2)
    changed = replace(one, transaction=one.transaction.replace(payload=strange, correlation="c\0"))
    assert client.settle([(changed, DeadLetter("odd\0reason")), (two, DeadLetter("odd"))]) == [SETTLED] * 2
    first, second = make_connector().list_dead(ALL_DEAD_LETTERS)
    assert (first.payload, first.envelope.key, first.envelope.correlation) == (strange, subject, "c\0")
    assert (second.payload, second.envelope) == ({"text": "é\u2028"}, second.envelope)
    assert client.replay_dead([first.handle])[0].outcome is DeadLetterResult.REPLAYED
    (again,) = client.fetch_transactions(5)
    assert (again.transaction.payload, again.transaction.key) == (strange, subject)


# -- one owner ----------------------------------------------------------------------------------------


def test_writes_of_a_previous_owner_are_rejected(make_connector, database):
    client = make_connector()
    client.dispatch(make_transactions(5))
    one, two, three, four, five = client.fetch_transactions(5)
    successor = make_connector()
    assert len(successor.fetch_transactions(1)) == 1
    before = fetch_rows(database, "select generation, in_flight, claim_sequence from ergon.fact_consumer")
    # Separate calls, so that none of them learns from the error of another.
    for delivery, settlement in ((two, Defer(0.0)), (three, DeadLetter("odd")), (four, Release()), (one, Ack())):
        client._log._ownership.is_lost = False
        assert client.settle([(delivery, settlement)]) == [LOST]
    client._log._ownership.is_lost = False
    assert client.extend([five]) == [None]
    client._log._ownership.is_lost = False
    client.close()
    assert fetch_rows(database, "select generation, in_flight, claim_sequence from ergon.fact_consumer") == before
    assert fetch_rows(database, "select 1 from ergon.dead_letter") == []
    assert fetch_rows(database, "select 1 from ergon.fact_consumer_state where settled or due_at is not null") == []
    assert get_cursor(successor) == 0


def test_a_replaced_owner_gets_an_error_at_its_next_fetch(make_connector):
    client = make_connector()
    client.dispatch(make_transactions(1))
    client.open()
    make_connector().open()
    with pytest.raises(ConnectionLostError, match="taken over"):
        client.fetch_transactions(1)
    client.open()
    assert get_ids(client.fetch_transactions(1)) == ["t-1"]


def test_a_late_claim_report_does_not_replace_a_newer_one(make_connector):
    client = make_connector()
    client.dispatch(make_transactions(2))
    (one,) = client.fetch_transactions(1)
    calls, late = client._log._store, []
    client._log._store = replace(calls, claim=lambda claiming: late.append(claiming) or calls.claim(claiming))
    client.fetch_transactions(1)
    calls.claim(late[0]._replace(sequence=0, claims=[one.receipt.offset]))
    assert [each.deliveries for each in make_connector().fetch_transactions(2)] == [2, 2]


def test_readers_of_the_same_facts_do_not_share_state(make_connector):
    client, other = make_connector(), make_connector(reader="audit")
    client.dispatch(make_transactions(1))
    for each in (client, other):
        assert each.settle([(each.fetch_transactions(1)[0], DeadLetter(each._log._reader))]) == [SETTLED]
    assert [record.reason for record in client.list_dead(ALL_DEAD_LETTERS)] == ["default"]
    assert [record.reason for record in other.list_dead(ALL_DEAD_LETTERS)] == ["audit"]
    assert (client.depth().dead, other.depth().dead) == (1, 1)


# -- cost in calls ------------------------------------------------------------------------------------


def test_successful_facts_need_one_state_call_per_fetch_and_none_per_settlement(make_connector):
    client = make_connector()
    client.dispatch(make_transactions(6))
    client.open()
    calls, recorded = client._log._store, []

    def record_call(name):
        return lambda *args: recorded.append(name) or getattr(calls, name)(*args)

    client._log._store = replace(
        calls, **{name: record_call(name) for name in ("claim", "settle", "is_owner", "confirm")}
    )
    for _ in range(2):
        client.settle([(each, Ack()) for each in client.fetch_transactions(3)])
    assert recorded == ["claim", "confirm"] * 2
    assert get_cursor(client) == 6


def test_a_blocked_state_store_does_not_block_the_event_loop(database):
    async def main():
        boundary = PostgresBoundary(database, accept_loss=True)
        await boundary.open_async()
        client = AsyncFactConnector(boundary, **PAIR._asdict())
        await client.dispatch_async(make_transactions(1))
        await client.open_async()
        with psycopg.connect(database) as other:
            other.execute("select 1 from ergon.fact_consumer for update")
            fetching = asyncio.ensure_future(client.fetch_transactions_async(1))
            for _ in range(20):
                await asyncio.sleep(0.005)
            waited = not fetching.done()
            other.rollback()
        (one,) = await fetching
        settled = await client.settle_async([(one, DeadLetter("odd"))])
        dead = await client.list_dead_async(ALL_DEAD_LETTERS)
        await client.close_async()
        await boundary.close_async()
        return waited, settled, [record.id for record in dead]

    assert asyncio.run(main()) == (True, [SETTLED], ["t-1"])


# -- dead letters changed by other processes ----------------------------------------------------------


def test_a_dead_letter_that_another_process_replays_reaches_the_reader(make_connector):
    client = make_connector()
    client.dispatch(make_transactions(2))
    client.settle([(each, DeadLetter("odd")) for each in client.fetch_transactions(2)])
    operator = make_connector()
    handles = [record.handle for record in operator.list_dead(ALL_DEAD_LETTERS)]
    outcomes = [each.outcome for each in operator.replay_dead([*handles, handles[0], "none"])]
    assert outcomes == [
        DeadLetterResult.REPLAYED,
        DeadLetterResult.REPLAYED,
        DeadLetterResult.GONE,
        DeadLetterResult.GONE,
    ]
    lose_answer(client, "claim")
    with pytest.raises(ConnectionLostError):
        client.fetch_transactions(5)
    deliveries = client.fetch_transactions(5)
    assert sorted(get_ids(deliveries)) == ["t-1", "t-2"]
    assert [each.deliveries for each in deliveries] == [1, 1]
    client.settle([(each, Ack()) for each in deliveries])
    assert client.fetch_transactions(5) == []
    assert make_connector().fetch_transactions(5) == []


def test_the_dead_letter_commands_work_for_facts(make_connector, database, tmp_path, monkeypatch):
    client = make_connector()
    client.dispatch(make_transactions(3))
    client.settle([(each, DeadLetter("odd")) for each in client.fetch_transactions(3)])
    name = f"ledger_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(
        "from ergon_framework.facts.connector import FactConnector\n"
        "from ergon_framework.facts.stores.postgres.store import PostgresBoundary\n"
        "boundary = PostgresBoundary(accept_loss=True)\n"
        "facts = FactConnector(boundary, from_zone='Plant A', to_zone='HQ')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)

    def run_dlq(*args):
        result = CliRunner().invoke(app, ["dlq", args[0], f"{name}:facts", *args[1:]])
        assert result.exit_code == 0, result.output
        return result.output

    try:
        assert run_dlq("list", "--json").count('"odd"') == 3
        run_dlq("replay", "--dead-letter-reason", "odd", "--limit", "1")
        run_dlq("discard", "--all", "--limit", "1", "--yes")
        assert run_dlq("list", "--json").count('"odd"') == 1
    finally:
        __import__(name).boundary.close()
    # None of it has taken the state store over from the reader.
    assert get_ids(client.fetch_transactions(5)) == ["t-1"]
    assert [record.id for record in client.list_dead(ALL_DEAD_LETTERS)] == ["t-3"]


# -- another epoch, another database ------------------------------------------------------------------


def test_an_owner_whose_state_was_lost_in_a_restore_creates_it_on_the_next_open(make_connector, database):
    client = make_connector()
    client.dispatch(make_transactions(2))
    client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("delete from ergon.fact_consumer")
    make_connector(reader="audit").open()
    with pytest.raises(ConnectionLostError, match="taken over"):
        client.fetch_transactions(1)
    client.open()
    assert get_ids(client.fetch_transactions(5)) == ["t-2"]


@pytest.mark.spec("FAC-15")
def test_a_new_process_detects_that_the_store_was_restored(make_connector):
    client = make_connector()
    client.dispatch(make_transactions(3))
    one, two, _ = client.fetch_transactions(3)
    client.settle([(one, Ack()), (two, Defer(60.0))])
    client.boundary.new_epoch(by="a test")
    successor = make_connector()
    with pytest.raises(EpochChanged, match="restored from a backup"):
        successor.fetch_transactions(1)
    assert successor.side.forget_epoch(PAIR) == 1
    assert get_ids(successor.fetch_transactions(5)) == ["t-3"]
    (record,) = successor.list_dead(ALL_DEAD_LETTERS)
    assert (record.id, record.reason) == ("t-2", "epoch_changed")
    assert successor.replay_dead([record.handle])[0].outcome is DeadLetterResult.REPLAYED
    assert get_ids(successor.fetch_transactions(5)) == ["t-2"]


def test_accepting_the_epoch_of_an_unknown_reader_is_rejected(database):
    with PostgresFactConsumerStore(database, accept_loss=True) as side:
        with pytest.raises(InvalidFactError, match=r"no reader 'ledger' .* registered readers: none"):
            side.forget_epoch(PAIR, "ledger")
        client = FactConnector(MemoryBoundary(), **PAIR._asdict(), reader="ledger", side=side)
        client.dispatch(make_transactions(1))
        assert get_ids(client.fetch_transactions(1)) == ["t-1"]
        with pytest.raises(InvalidFactError, match=r"no reader 'leger' .* registered readers: ledger"):
            side.forget_epoch(PAIR, "leger")
        assert side.forget_epoch(PAIR, "ledger") == 0


def test_a_state_store_can_be_in_another_database_than_the_facts(database):
    store = MemoryBoundary()
    with PostgresFactConsumerStore(database, accept_loss=True) as side:
        client = FactConnector(store, **PAIR._asdict(), side=side)
        client.dispatch(make_transactions(2))
        one, two = client.fetch_transactions(2)
        assert client.settle([(one, Ack()), (two, DeadLetter("odd"))]) == [SETTLED] * 2
    with PostgresFactConsumerStore(database, accept_loss=True) as side:
        successor = FactConnector(store, **PAIR._asdict(), side=side)
        assert [record.id for record in successor.list_dead(ALL_DEAD_LETTERS)] == ["t-2"]
        assert successor.fetch_transactions(5) == []


def test_a_database_that_may_lose_commits_is_rejected_for_dead_letters(database):
    with PostgresFactConsumerStore(database) as side:
        client = FactConnector(MemoryBoundary(), **PAIR._asdict(), side=side)
        with pytest.raises(ConfigurationError, match="may lose dead letters"):
            client.open()


def test_a_state_store_without_an_address_names_the_setting(monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    client = FactConnector(MemoryBoundary(), **PAIR._asdict(), side=PostgresFactConsumerStore())
    with pytest.raises(ConfigurationError, match="ERGON_POSTGRES__DSN"):
        client.open()


def test_a_database_without_the_tables_of_facts_is_rejected_with_the_upgrade_command(postgres):
    dsn = postgres.create_database(f"sides_{next(_numbers)}")
    migrate.upgrade(dsn, "0003")
    with pytest.raises(ConfigurationError, match="ergon db upgrade"), PostgresBoundary(dsn, accept_loss=True):
        pytest.fail("a database without the tables of facts was opened")
