"""The side of facts in PostgreSQL: what a consumer keeps there outlives it, and belongs to one owner at a time."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

import psycopg
import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.connectors.base import Ack, DeadLetter, Later, Release, SettleResult
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.errors import EpochChanged, InvalidFactError
from ergon_framework.facts.facts import Facts
from ergon_framework.facts.model import Pair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.facts.stores.postgres_side import PostgresFactSide
from ergon_framework.schema import migrate
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.spec("FAC-27")

PAIR = Pair("Plant A", "HQ")
EVERYTHING = DeadLetterQuery()
SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED
_numbers = itertools.count(1)


@pytest.fixture
def process(database):
    """Makes a connector as another process would have it: with a boundary and lines of its own."""
    opened = []

    def make(**given):
        boundary = PostgresBoundary(database, accept_loss=True)
        boundary.open()
        opened.append(boundary)
        return FactConnector(boundary, **PAIR._asdict(), **given)

    yield make
    for boundary in opened:
        boundary.close()


def sent(count):
    return [Transaction(f"t-{number}", {"number": number}) for number in range(1, count + 1)]


def ids(deliveries):
    return [each.transaction.id for each in deliveries]


def cursor(connector, reader="default"):
    return connector.boundary.cursor_of(reader, PAIR).offset


def rows(dsn, sql):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(sql).fetchall()


def answer_lost(connector, name):
    """The next call of that name to the side is done, and its answer does not arrive."""
    log, calls = connector._log, connector._log._side

    def lost(*args):
        log._side = calls
        getattr(calls, name)(*args)
        raise ConnectionLost("the line went down")

    log._side = replace(calls, **{name: lost})


# -- what outlives a process --------------------------------------------------------------------------


def test_a_dead_letter_is_in_its_table_before_the_cursor_goes_beyond_it(process, database):
    client = process()
    client.dispatch(sent(1))
    (one,) = client.fetch_transactions(1)
    seen = []
    calls = client._log._side

    def confirm(*_):
        seen.extend(rows(database, "select transaction_id from ergon.dead_letter"))
        raise ConnectionLost("killed here")

    client._log._side = replace(calls, confirm=confirm)
    assert client.settle([(one, DeadLetter("odd"))]) == [SETTLED]
    assert (seen, cursor(client)) == ([("t-1",)], 0)
    heir = process()
    assert heir.fetch_transactions(1) == []
    (record,) = heir.list_dead(EVERYTHING)
    assert (record.id, record.reason, record.payload, record.deliveries) == ("t-1", "odd", {"number": 1}, 1)
    assert cursor(heir) == 0
    heir.dispatch([Transaction("t-2")])
    heir.settle([(each, Ack()) for each in heir.fetch_transactions(5)])
    assert cursor(heir) == 2


def test_deliveries_are_counted_across_owners_that_went_without_a_word(process):
    process().dispatch(sent(3))
    for expected in (1, 2, 3):
        found = process().fetch_transactions(2)
        assert [each.deliveries for each in found] == [expected, expected]
    # The third was in nobody's hands.
    assert [each.deliveries for each in process().fetch_transactions(3)] == [4, 4, 1]


def test_what_was_given_back_or_put_off_counts_for_nothing(process):
    client = process()
    client.dispatch(sent(3))
    one, two, _ = client.fetch_transactions(3)
    assert client.settle([(one, Release()), (two, Later(0.0))]) == [SETTLED] * 2
    heir = process()
    found = [*heir.fetch_transactions(3), *heir.fetch_transactions(3)]
    assert {each.transaction.id: each.deliveries for each in found} == {"t-1": 1, "t-2": 1, "t-3": 2}


def test_an_orderly_end_counts_for_nothing_and_what_it_has_settled_does_not_come_again(process):
    client = process()
    client.dispatch(sent(3))
    _, two, _ = client.fetch_transactions(3)
    client.settle([(two, Ack())])
    client.close()
    found = process().fetch_transactions(5)
    assert [(each.transaction.id, each.deliveries) for each in found] == [("t-1", 1), ("t-3", 1)]


def test_what_was_put_off_comes_when_it_is_due_also_to_another_process(process):
    now = time.time()
    client = process(wall=lambda: now)
    client.dispatch(sent(2))
    one, two = client.fetch_transactions(2)
    client.settle([(one, Later(60.0, attempts=2)), (two, Ack())])
    assert cursor(client) == 2
    heir = process(wall=lambda: now + 59)
    assert heir.fetch_transactions(1) == []
    assert heir.depth().delayed == 1
    heir = process(wall=lambda: now + 61)
    (again,) = heir.fetch_transactions(5)
    assert (again.transaction.id, again.transaction.attempts, again.deliveries) == ("t-1", 2, 1)
    # Killed with it in hand: it was delivered, and comes again.
    heir = process(wall=lambda: now + 61)
    (again,) = heir.fetch_transactions(5)
    assert again.deliveries == 2
    assert heir.settle([(again, Ack())]) == [SETTLED]
    assert process().fetch_transactions(5) == []


def test_a_settlement_whose_answer_was_lost_is_one_dead_letter_when_it_is_said_again(process):
    client = process()
    client.dispatch(sent(2))
    one, two = client.fetch_transactions(2)
    client.settle([(two, Later(0.0))])
    (two,) = client.fetch_transactions(1)
    for delivery in (one, two):
        answer_lost(client, "settle")
        assert client.settle([(delivery, DeadLetter("odd"))]) == [FAILED]
        assert client.settle([(delivery, DeadLetter("odd"))]) == [SETTLED]
    assert [record.id for record in client.list_dead(EVERYTHING)] == ["t-1", "t-2"]
    assert process().fetch_transactions(5) == []
    assert cursor(client) == 2


def test_what_a_header_cannot_hold_is_kept_as_it_is(process):
    client = process()
    subject, strange = "s" * 400, {"half": "\ud800", "zero": "a\0b", "deep": [[1.5]]}
    Facts(client.boundary, zone="Plant A").append("HQ", subject=subject, predicate="p", message_id="m-1")
    client.dispatch([Transaction("t-2", {"text": "é\u2028"})])
    one, two = client.fetch_transactions(2)
    odd = replace(one, transaction=one.transaction.replace(payload=strange, correlation="c\0"))
    assert client.settle([(odd, DeadLetter("odd\0reason")), (two, DeadLetter("odd"))]) == [SETTLED] * 2
    first, second = process().list_dead(EVERYTHING)
    assert (first.payload, first.envelope.key, first.envelope.correlation) == (strange, subject, "c\0")
    assert (second.payload, second.envelope) == ({"text": "é\u2028"}, second.envelope)
    assert client.replay_dead([first.place])[0].became is Became.REPLAYED
    (again,) = client.fetch_transactions(5)
    assert (again.transaction.payload, again.transaction.key) == (strange, subject)


# -- one owner ----------------------------------------------------------------------------------------


def test_what_an_owner_of_before_writes_is_refused(process, database):
    client = process()
    client.dispatch(sent(5))
    one, two, three, four, five = client.fetch_transactions(5)
    heir = process()
    assert len(heir.fetch_transactions(1)) == 1
    before = rows(database, "select generation, held, turn from ergon.fact_side")
    # By calls of its own each, so that none of them is told what another has learnt.
    for delivery, settlement in ((two, Later(0.0)), (three, DeadLetter("odd")), (four, Release()), (one, Ack())):
        client._log._hold.lost = False
        assert client.settle([(delivery, settlement)]) == [LOST]
    client._log._hold.lost = False
    assert client.extend([five]) == [None]
    client._log._hold.lost = False
    client.close()
    assert rows(database, "select generation, held, turn from ergon.fact_side") == before
    assert rows(database, "select 1 from ergon.dead_letter") == []
    assert rows(database, "select 1 from ergon.fact_aside where settled or due_at is not null") == []
    assert cursor(heir) == 0


def test_whoever_was_overtaken_is_told_at_its_next_fetch(process):
    client = process()
    client.dispatch(sent(1))
    client.open()
    process().open()
    with pytest.raises(ConnectionLost, match="taken over"):
        client.fetch_transactions(1)
    client.open()
    assert ids(client.fetch_transactions(1)) == ["t-1"]


def test_an_account_of_what_is_held_that_arrives_late_is_not_taken_for_the_latest(process):
    client = process()
    client.dispatch(sent(2))
    (one,) = client.fetch_transactions(1)
    calls, late = client._log._side, []
    client._log._side = replace(calls, claim=lambda claiming: late.append(claiming) or calls.claim(claiming))
    client.fetch_transactions(1)
    calls.claim(late[0]._replace(turn=0, held=[one.receipt.offset]))
    assert [each.deliveries for each in process().fetch_transactions(2)] == [2, 2]


def test_readers_of_the_same_facts_do_not_share_a_side(process):
    client, other = process(), process(reader="audit")
    client.dispatch(sent(1))
    for each in (client, other):
        assert each.settle([(each.fetch_transactions(1)[0], DeadLetter(each._log._reader))]) == [SETTLED]
    assert [record.reason for record in client.list_dead(EVERYTHING)] == ["default"]
    assert [record.reason for record in other.list_dead(EVERYTHING)] == ["audit"]
    assert (client.depth().dead, other.depth().dead) == (1, 1)


# -- what it costs ------------------------------------------------------------------------------------


def test_facts_that_succeed_cost_one_word_to_the_side_when_they_are_handed_out_and_none_when_they_are_settled(process):
    client = process()
    client.dispatch(sent(6))
    client.open()
    calls, asked = client._log._side, []

    def noted(name):
        return lambda *args: asked.append(name) or getattr(calls, name)(*args)

    client._log._side = replace(calls, **{name: noted(name) for name in ("claim", "settle", "holds", "confirm")})
    for _ in range(2):
        client.settle([(each, Ack()) for each in client.fetch_transactions(3)])
    assert asked == ["claim", "confirm"] * 2
    assert cursor(client) == 6


def test_a_side_that_waits_does_not_hold_up_the_event_loop(database):
    async def main():
        boundary = PostgresBoundary(database, accept_loss=True)
        await boundary.open_async()
        client = AsyncFactConnector(boundary, **PAIR._asdict())
        await client.dispatch_async(sent(1))
        await client.open_async()
        with psycopg.connect(database) as other:
            other.execute("select 1 from ergon.fact_side for update")
            fetching = asyncio.ensure_future(client.fetch_transactions_async(1))
            for _ in range(20):
                await asyncio.sleep(0.005)
            waited = not fetching.done()
            other.rollback()
        (one,) = await fetching
        settled = await client.settle_async([(one, DeadLetter("odd"))])
        dead = await client.list_dead_async(EVERYTHING)
        await client.close_async()
        await boundary.close_async()
        return waited, settled, [record.id for record in dead]

    assert asyncio.run(main()) == (True, [SETTLED], ["t-1"])


# -- dead letters from elsewhere ----------------------------------------------------------------------


def test_a_dead_letter_that_another_process_replays_reaches_the_one_who_reads(process):
    client = process()
    client.dispatch(sent(2))
    client.settle([(each, DeadLetter("odd")) for each in client.fetch_transactions(2)])
    operator = process()
    places = [record.place for record in operator.list_dead(EVERYTHING)]
    became = [each.became for each in operator.replay_dead([*places, places[0], "none"])]
    assert became == [Became.REPLAYED, Became.REPLAYED, Became.GONE, Became.GONE]
    answer_lost(client, "claim")
    with pytest.raises(ConnectionLost):
        client.fetch_transactions(5)
    found = client.fetch_transactions(5)
    assert sorted(ids(found)) == ["t-1", "t-2"]
    assert [each.deliveries for each in found] == [1, 1]
    client.settle([(each, Ack()) for each in found])
    assert client.fetch_transactions(5) == []
    assert process().fetch_transactions(5) == []


def test_the_commands_for_dead_letters_reach_those_of_facts(process, database, tmp_path, monkeypatch):
    client = process()
    client.dispatch(sent(3))
    client.settle([(each, DeadLetter("odd")) for each in client.fetch_transactions(3)])
    name = f"ledger_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(
        "from ergon_framework.facts.connector import FactConnector\n"
        "from ergon_framework.facts.stores.postgres import PostgresBoundary\n"
        "boundary = PostgresBoundary(accept_loss=True)\n"
        "facts = FactConnector(boundary, from_zone='Plant A', to_zone='HQ')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)

    def dlq(*words):
        done = CliRunner().invoke(app, ["dlq", words[0], f"{name}:facts", *words[1:]])
        assert done.exit_code == 0, done.output
        return done.output

    try:
        assert dlq("list", "--json").count('"odd"') == 3
        dlq("replay", "--reason", "odd", "--limit", "1")
        dlq("discard", "--all", "--limit", "1", "--yes")
        assert dlq("list", "--json").count('"odd"') == 1
    finally:
        __import__(name).boundary.close()
    # The one who reads was not taken over by any of it.
    assert ids(client.fetch_transactions(5)) == ["t-1"]
    assert [record.id for record in client.list_dead(EVERYTHING)] == ["t-3"]


# -- another epoch, another place ---------------------------------------------------------------------


def test_an_owner_whose_side_is_gone_with_a_restore_makes_another_when_it_opens_again(process, database):
    client = process()
    client.dispatch(sent(2))
    client.settle([(client.fetch_transactions(1)[0], DeadLetter("odd"))])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("delete from ergon.fact_side")
    process(reader="audit").open()
    with pytest.raises(ConnectionLost, match="taken over"):
        client.fetch_transactions(1)
    client.open()
    assert ids(client.fetch_transactions(5)) == ["t-2"]


@pytest.mark.spec("FAC-15")
def test_a_process_that_was_not_there_notices_that_the_store_was_put_back(process):
    client = process()
    client.dispatch(sent(3))
    one, two, _ = client.fetch_transactions(3)
    client.settle([(one, Ack()), (two, Later(60.0))])
    client.boundary.new_epoch(by="a test")
    heir = process()
    with pytest.raises(EpochChanged, match="put back from a backup"):
        heir.fetch_transactions(1)
    assert heir.side.forget_epoch(PAIR) == 1
    assert ids(heir.fetch_transactions(5)) == ["t-3"]
    (record,) = heir.list_dead(EVERYTHING)
    assert (record.id, record.reason) == ("t-2", "epoch_changed")
    assert heir.replay_dead([record.place])[0].became is Became.REPLAYED
    assert ids(heir.fetch_transactions(5)) == ["t-2"]


def test_an_epoch_of_a_reader_that_nobody_knows_is_not_forgotten(database):
    with PostgresFactSide(database, accept_loss=True) as side:
        with pytest.raises(InvalidFactError, match=r"no reader 'ledger' .* known are: none"):
            side.forget_epoch(PAIR, "ledger")
        client = FactConnector(MemoryBoundary(), **PAIR._asdict(), reader="ledger", side=side)
        client.dispatch(sent(1))
        assert ids(client.fetch_transactions(1)) == ["t-1"]
        with pytest.raises(InvalidFactError, match=r"no reader 'leger' .* known are: ledger"):
            side.forget_epoch(PAIR, "leger")
        assert side.forget_epoch(PAIR, "ledger") == 0


def test_a_side_can_be_in_another_database_than_the_facts(database):
    store = MemoryBoundary()
    with PostgresFactSide(database, accept_loss=True) as side:
        client = FactConnector(store, **PAIR._asdict(), side=side)
        client.dispatch(sent(2))
        one, two = client.fetch_transactions(2)
        assert client.settle([(one, Ack()), (two, DeadLetter("odd"))]) == [SETTLED] * 2
    with PostgresFactSide(database, accept_loss=True) as side:
        heir = FactConnector(store, **PAIR._asdict(), side=side)
        assert [record.id for record in heir.list_dead(EVERYTHING)] == ["t-2"]
        assert heir.fetch_transactions(5) == []


def test_a_database_that_may_lose_what_it_has_committed_is_no_place_for_dead_letters(database):
    with PostgresFactSide(database) as side:
        client = FactConnector(MemoryBoundary(), **PAIR._asdict(), side=side)
        with pytest.raises(ConfigurationError, match="no place for dead letters"):
            client.open()


def test_a_side_without_an_address_says_what_to_set(monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    client = FactConnector(MemoryBoundary(), **PAIR._asdict(), side=PostgresFactSide())
    with pytest.raises(ConfigurationError, match="ERGON_POSTGRES__DSN"):
        client.open()


def test_a_database_of_the_release_before_is_named_as_such(postgres):
    dsn = postgres.create_database(f"sides_{next(_numbers)}")
    migrate.upgrade(dsn, "0012")
    with pytest.raises(ConfigurationError, match="ergon db upgrade"), PostgresBoundary(dsn, accept_loss=True):
        pytest.fail("a database without the owners of artifacts was opened")
