"""Facts in PostgreSQL under many writers, and what is kept, dropped and refused."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.errors import BufferFull, FactConflict, FactError, InvalidFactError
from ergon_framework.facts.model import Cursor, Envelope, Fact, Pair, Side, Stored
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.memory_contents import MemoryContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.facts.stores.postgres_partitions import WEEK, name_of, week_of
from ergon_framework.schema.migrate import upgrade
from tests.integration.counters import looked_at
from tests.servers.pgbouncer import PrivatePgBouncer

PAIR = Pair("Plant A", "HQ")
ELSEWHERE = Pair("Plant A", "Elsewhere")
YEAR = 365 * 86_400.0
PATIENCE = 20.0


def stated(number, pair=PAIR, **more):
    envelope = Envelope(message_id=f"m-{number}", from_zone=pair.from_zone, to_zone=pair.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.of(f"order:{number}", "paid", {"number": number, **more})


def rows(dsn, statement, *values):
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(statement, values)
        return found.fetchall() if found.description else []


@pytest.fixture
def store(database):
    made = []

    def make(**options):
        made.append(PostgresBoundary(database, accept_loss=True, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


# -- one id, one fact ---------------------------------------------------------------------------------


def appended_by_all(clients, fact, times):
    """What each of many clients is told, all of them at once."""
    ready = threading.Barrier(len(clients))

    def append(client):
        ready.wait()
        return [client.append_facts([fact])[0] for _ in range(times)]

    with ThreadPoolExecutor(len(clients)) as pool:
        return [told for line in pool.map(append, clients) for told in line]


@pytest.mark.spec("FAC-03", "FAC-13")
def test_an_id_a_thousand_times_from_fifty_clients_is_one_fact_also_a_year_later(store, database):
    now = [time.time()]
    clients = [store(wall=lambda: now[0]) for _ in range(50)]
    told = appended_by_all(clients, stated(1), 20)
    assert len(told) == 1000
    assert {each.offset for each in told} == {1}
    assert sum(not each.duplicate for each in told) == 1

    (only,) = clients[0].fetch_facts("reader", PAIR, 10)
    clients[0].confirm_receipt("reader", PAIR, only.cursor)
    now[0] += YEAR
    assert clients[0].prune(int(now[0] * 1000)).facts == 1
    assert rows(database, "select count(*) from ergon.facts") == [(0,)]
    again = appended_by_all(clients, stated(1), 20)
    assert {(each.offset, each.duplicate) for each in again} == {(1, True)}

    neighbours = [stated(2), stated(1, changed=True), stated(3)]
    with ThreadPoolExecutor(3) as pool:
        one, other, three = pool.map(lambda fact: clients[0].append_facts([fact])[0], neighbours)
    assert isinstance(other, FactConflict)
    assert {one.offset, three.offset} == {2, 3}


@pytest.mark.spec("FAC-13")
def test_a_conflict_in_a_shared_commit_touches_no_neighbour(store, database):
    async def appended():
        async with store() as client:
            await client.append_facts_async([stated(7)])
            batch = [stated(number) if number != 7 else stated(7, changed=True) for number in range(100)]
            return await asyncio.gather(*(client.append_facts_async([fact]) for fact in batch))

    told = [answers[0] for answers in asyncio.run(appended())]
    assert isinstance(told.pop(7), FactConflict)
    assert sorted(each.offset for each in told) == list(range(2, 101))
    # All of them came while the first was under way, or went with it.
    assert rows(database, "select count(distinct xmin::text) from ergon.facts")[0][0] <= 4


# -- by columns, and one by one -------------------------------------------------------------------------

KEPT = """
select f.fact_offset, f.stored_at, f.total, f.produced_at, f.message_id, f.correlation_id, f.causation_id, f.labels,
    f.subject, f.predicate, f.object_json, i.fact_offset, i.kept_at, e.epoch, l.last, l.total, f.digest = i.digest
from ergon.facts f join ergon.fact_log l on l.id = f.log
join ergon.fact_ids i on i.log = l.id and i.message_id = f.message_id join ergon.fact_epochs e on e.id = i.epoch
where l.to_zone = %s order by f.fact_offset
"""


def leave_the_short_way_only(database):
    """From now on whoever goes one by one fails."""
    rows(database, "alter function ergon.append_facts rename to append_facts_away")


def kept_in(store, database, batch, zone, *, odd):
    """What is in the tables of *batch*, which goes one by one if it is *odd*: an id comes twice."""
    sent = [
        (replace(envelope, from_zone=f"{envelope.from_zone} {zone}", to_zone=zone), fact) for envelope, fact in batch
    ]
    told = store.append_facts(sent + sent[:1] * odd)
    assert [confirmed(each).offset for each in told] == [*range(2, len(batch) + 2), 2][: len(told)]
    return rows(database, KEPT, zone)


def several(count):
    for number in range(count):
        envelope, fact = stated(number, text="ü,'\"\\ {}" * number)
        beside = {"labels": {"a": "\\\x7e", "ü": ""}} if number % 3 else {"correlation_id": f"c {number}"}
        yield replace(envelope, causation_id="x" if number % 2 else None, **beside), fact


@pytest.mark.spec("FAC-22")
def test_a_batch_costs_the_same_however_many_facts_there_are_and_whatever_the_statistics_say(store, database):
    # Autovacuum comes once a minute. Until then nobody has counted, and the planner takes a zone for a few rows.
    rows(database, "alter table ergon.fact_ids set (autovacuum_enabled = off)")
    with store() as others:
        others.append_facts([stated(number, Pair("Plant B", "HQ")) for number in range(2000)])
    with store() as filled:
        for first in range(0, 3000, 100):
            filled.append_facts([stated(number) for number in range(first, first + 100)])
    asked, read = looked_at(database, "fact_ids_pkey")
    assert asked >= 5000, "the counter counts each id"
    assert read < 100, "ids of other facts were looked at"


@pytest.mark.spec("FAC-13", "FAC-15")
def test_what_goes_in_by_columns_is_what_goes_in_one_by_one(store, database):
    client = store(wall=lambda: 1000.0)
    for zone in ("Columns", "One by one"):
        client.append_facts([stated("first", Pair(f"Plant A {zone}", zone))])
    batch = list(several(40))
    one_by_one = kept_in(client, database, batch, "One by one", odd=True)
    rows(database, "alter function ergon.append_facts rename to append_facts_away")
    assert kept_in(client, database, batch, "Columns", odd=False) == one_by_one
    assert len(one_by_one) == 41


@pytest.mark.spec("FAC-15")
def test_a_batch_of_several_pairs_by_columns_has_dense_offsets_in_each(store, database):
    client = store()
    client.append_facts([stated("here", PAIR), stated("there", ELSEWHERE)])
    leave_the_short_way_only(database)
    told = client.append_facts([stated(number, (PAIR, ELSEWHERE)[number % 3 == 0]) for number in range(30)])
    assert [each.offset for each in told[::3]] == list(range(2, 12))
    assert [each.offset for number, each in enumerate(told) if number % 3] == list(range(2, 22))
    assert [fact.offset for fact in client.fetch_facts("r", PAIR, 100)] == list(range(1, 22))
    assert [fact.envelope.message_id for fact in client.fetch_facts("r", ELSEWHERE, 100)] == [
        "m-there",
        *(f"m-{number}" for number in range(0, 30, 3)),
    ]


def test_forwarded_facts_that_follow_each_other_go_in_by_columns(store, database):
    origin, client = MemoryBoundary(), store()
    origin.append_facts([stated(number) for number in range(30)])
    sent = origin.fetch_facts("r", PAIR, 100)
    client.forward_facts(sent[:1])
    leave_the_short_way_only(database)
    assert [confirmed(each).offset for each in client.forward_facts(sent[1:])] == list(range(2, 31))
    assert client.fetch_facts("r", PAIR, 100) == sent


def test_within_its_bounds_a_store_takes_a_batch_by_columns_and_beyond_them_one_by_one(store, database):
    client = store(max_facts=10)
    client.append_facts([stated("first")])
    told = client.append_facts([stated(number) for number in range(12)])
    assert [isinstance(each, BufferFull) for each in told] == [False] * 9 + [True] * 3
    bytes_of_one = rows(database, "select total from ergon.facts where fact_offset = 1")[0][0]
    wide = store(max_bytes=1_000_000 + bytes_of_one)
    leave_the_short_way_only(database)
    assert [confirmed(each).offset for each in wide.append_facts([stated("x"), stated("y")])] == [11, 12]


@pytest.mark.spec("FAC-15")
def test_a_batch_for_a_store_that_was_put_back_begins_a_new_epoch(store, database):
    client = store()
    client.append_facts([stated(number) for number in range(3)])
    before = client.epoch
    rows(database, "update ergon.fact_log set last = 1")
    rows(database, "delete from ergon.facts where fact_offset > 1")
    rows(database, "delete from ergon.fact_ids where fact_offset > 1")
    told = client.append_facts([stated("a"), stated("b")])
    assert [confirmed(each).offset for each in told] == [2, 3]
    assert client.epoch != before
    assert {each.epoch for each in told} == {client.epoch}


@pytest.mark.spec("FAC-15")
def test_the_same_id_to_two_zones_at_once_is_one_fact_and_one_conflict(store):
    one, other = store(), store()
    for number in range(30):
        with ThreadPoolExecutor(2) as pool:
            told = list(
                pool.map(
                    lambda each: each[0].append_facts([stated(number, each[1])])[0],  # noqa: B023 - over before the next
                    ((one, PAIR), (other, ELSEWHERE)),
                )
            )
        assert sum(isinstance(each, FactConflict) for each in told) == 1
    ends = [end.offset for pair in (PAIR, ELSEWHERE) if (end := one.end_of(pair)) is not None]
    assert sum(ends) == 30, "offsets are dense in both"


@pytest.mark.spec("FAC-15")
def test_two_who_append_to_two_pairs_in_opposite_order_never_wait_for_each_other(store):
    def append(client, first, second, name):
        for number in range(60):
            batch = [stated(f"{name}-{number}-1", first), stated(f"{name}-{number}-2", second)]
            assert not [told for told in client.append_facts(batch) if isinstance(told, FactError)]

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(append, (store(), store()), (PAIR, ELSEWHERE), (ELSEWHERE, PAIR), "xy"))
    # The server looks for a deadlock after a second, and would have ended one of them.
    assert time.monotonic() - began < PATIENCE
    assert [store().end_of(pair).offset for pair in (PAIR, ELSEWHERE)] == [120, 120]


@pytest.mark.spec("FAC-16")
def test_the_last_room_is_given_once_however_many_want_it(store):
    clients = [store(max_facts=50) for _ in range(4)]

    def append(client, number):
        pair = Pair("Plant A", f"zone {number}")
        return [client.append_facts([stated(f"{number}-{n}", pair)])[0] for n in range(25)]

    with ThreadPoolExecutor(4) as pool:
        told = [each for line in pool.map(append, clients, range(4)) for each in line]
    assert sum(isinstance(each, BufferFull) for each in told) == 50
    assert sum(state.last for state in store().survey()) == 50


@pytest.mark.spec("FAC-16")
def test_whoever_has_a_bound_waits_for_others_who_fill_the_store(store, database):
    client = store(max_facts=50)
    client.append_fact(*stated(1))
    with psycopg.connect(database) as other, ThreadPoolExecutor(1) as pool:
        other.execute("select 1 from ergon.fact_room for update")
        waiting = pool.submit(client.append_fact, *stated(2))
        while not rows(database, WAITING):
            assert not waiting.done()
        other.rollback()
        assert waiting.result(PATIENCE).offset == 2


@pytest.mark.spec("FAC-16")
def test_bytes_are_counted_with_artifacts_and_given_back(store):
    client = store(max_bytes=100, contents=MemoryContents())
    client.put_object("b", "k", [b"x" * 60])
    with pytest.raises(BufferFull, match="60 bytes are retained and 100 is the most"):
        client.put_object("b", "other", [b"y" * 60])
    told = client.append_facts([stated(1, text="z" * 40), stated(2)])
    assert isinstance(told[0], BufferFull)
    assert confirmed(told[1]).offset == 1
    assert client.prune(2**52).artifacts == 1
    client.put_object("b", "other", [b"y" * 60])


def test_many_in_one_call_are_as_many_commits_as_need_be(store, database):
    told = store().append_facts([stated(number) for number in range(2500)])
    assert [each.offset for each in told] == list(range(1, 2501))
    assert rows(database, "select count(distinct xmin::text) from ergon.facts") == [(3,)]


@pytest.mark.spec("FAC-15")
def test_whoever_reads_while_others_append_takes_nobody_for_restored(store, database):
    client, over = store(), threading.Event()
    epoch = client.epoch

    def read():
        while not over.is_set():
            client.end_of(PAIR)
            client.fetch_facts("r", PAIR, 1)

    with ThreadPoolExecutor(6) as pool:
        reading = [pool.submit(read) for _ in range(3)]
        for written in [
            pool.submit(lambda k: [client.append_fact(*stated(f"{k}-{n}")) for n in range(80)], k) for k in "ab"
        ]:
            written.result()
        over.set()
        for each in reading:
            each.result()
    assert client.epoch == epoch
    assert rows(database, "select count(*) from ergon.fact_epochs") == [(1,)]


# -- those who leave ----------------------------------------------------------------------------------


def test_whoever_is_cancelled_leaves_and_may_append_again(store, database):
    async def run():
        async with store() as client:
            confirmed((await client.append_facts_async([stated(0)]))[0])
            with psycopg.connect(database) as other:
                other.execute("select 1 from ergon.fact_log for update")
                waiting = asyncio.create_task(client.append_fact_async(*stated(1)))
                neighbour = asyncio.create_task(client.append_fact_async(*stated(2)))
                while not await asyncio.to_thread(rows, database, WAITING):
                    assert not waiting.done()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                other.rollback()
            told = await neighbour
            again = await client.append_fact_async(*stated(1))
            assert {told.offset, again.offset} == {1 + 1, 2 + 1}
            assert [each.offset for each in await client.fetch_facts_async("r", PAIR, 9)] == [1, 2, 3]

    asyncio.run(run())


WAITING = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"


# -- being woken --------------------------------------------------------------------------------------


def test_whoever_listens_is_woken_by_another_process(store):
    rung, listener = threading.Event(), store()
    unlisten = listener.listen(rung.set)
    assert listener._premises().bell.hears.wait(PATIENCE)
    rung.clear()
    store().append_fact(*stated(1))
    assert rung.wait(PATIENCE)
    unlisten()


# -- retention ----------------------------------------------------------------------------------------


@pytest.mark.spec("FAC-16")
def test_a_week_that_is_over_and_confirmed_is_dropped_as_a_whole(store, database):
    now = [time.time()]
    client = store(wall=lambda: now[0])
    client.open()
    client.append_facts([stated(number) for number in range(10)])
    week = name_of(week_of(int(now[0] * 1000)))
    assert rows(database, f"select count(*) from ergon.{week}") == [(10,)]
    facts = client.fetch_facts("slow", PAIR, 100)
    client.confirm_receipt("slow", PAIR, facts[4].cursor)
    now[0] += 3 * WEEK / 1000
    moment = int(now[0] * 1000)
    assert client.prune(moment).facts == 5
    assert rows(database, f"select count(*) from ergon.{week}") == [(5,)], "what is held up stays, the rest is gone"
    assert [each.offset for each in client.fetch_facts("slow", PAIR, 100)] == [6, 7, 8, 9, 10]
    client.confirm_receipt("slow", PAIR, facts[9].cursor)
    assert client.prune(moment).facts == 5
    assert rows(database, "select to_regclass(%s)", f"ergon.{week}") == [(None,)]
    told = client.append_fact(*stated("next"))
    assert told.offset == 11
    assert rows(database, "select count(*) from ergon.facts_rest") == [(0,)], "the present week has a partition"


@pytest.mark.spec("FAC-16")
def test_without_the_right_to_make_partitions_nothing_is_refused(postgres, database):
    rows(database, "create role clerk login")
    for grant in (
        "grant usage on schema ergon to clerk",
        "grant select, insert, update, delete on all tables in schema ergon to clerk",
    ):
        rows(database, grant)
    client = PostgresBoundary(database.replace("//postgres@", "//clerk@"), accept_loss=True)
    try:
        with client:
            client.append_facts([stated(number) for number in range(3)])
            facts = client.fetch_facts("r", PAIR, 10)
            client.confirm_receipt("r", PAIR, facts[1].cursor)
            assert client.prune(2**52).facts == 2
            assert rows(database, "select count(*) from ergon.facts_rest") == [(1,)]
    finally:
        rows(database, "drop owned by clerk")
        rows(database, "drop role clerk")


@pytest.mark.spec("FAC-16")
def test_who_retired_a_reader_is_kept(store, database):
    client = store()
    client.append_facts([stated(1), stated(2)])
    facts = client.fetch_facts("gone", PAIR, 1)
    client.confirm_receipt("gone", PAIR, facts[0].cursor)
    assert client.retire_reader("gone", PAIR, by="Ada")
    assert not client.retire_reader("gone", PAIR, by="Ada")
    found = rows(database, "select from_zone, to_zone, reader, fact_offset, last, by_whom from ergon.fact_reader_audit")
    assert found == [(*PAIR, "gone", 1, 2, "Ada")]


def test_ids_are_forgotten_when_their_time_and_their_facts_are_over(store):
    now = [time.time()]
    client = store(wall=lambda: now[0], identity_retention=100.0)
    client.append_facts([stated(1), stated(2)])
    facts = client.fetch_facts("r", PAIR, 10)
    client.confirm_receipt("r", PAIR, facts[0].cursor)
    now[0] += 200
    client.prune(int(now[0] * 1000))
    assert client.get_fact(PAIR.from_zone, "m-1") is None
    assert client.get_fact(PAIR.from_zone, "m-2") is not None, "its fact is retained"


# -- artifacts ----------------------------------------------------------------------------------------


class Held(MemoryContents):
    """Contents whose seal waits, as that of a large artifact on a slow store does."""

    def __init__(self):
        super().__init__()
        self.sealing, self.go_on = threading.Event(), threading.Event()

    def receive(self, upload=None, *, begin=0):
        entered = super().receive(upload, begin=begin)
        contents = self

        class Slow:
            def __enter__(self):
                self.inner = entered.__enter__()
                seal = self.inner.seal

                def sealed(expected=None):
                    made = seal(expected)
                    contents.sealing.set()
                    assert contents.go_on.wait(PATIENCE)
                    return made

                self.inner.seal = sealed
                return self.inner

            def __exit__(self, *error):
                return entered.__exit__(*error)

        return Slow()


@pytest.mark.spec("FAC-23")
def test_a_content_that_is_about_to_be_named_is_not_removed(store):
    contents = Held()
    client = store(contents=contents)
    contents.go_on.set()
    client.put_object("b", "old", [b"the same bytes"])
    contents.go_on.clear()
    contents.sealing.clear()
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(client.put_object, "b", "new", [b"the same bytes"])
        assert contents.sealing.wait(PATIENCE)
        assert client.prune(2**52).artifacts == 1, "the old name is gone"
        contents.go_on.set()
        putting.result(PATIENCE)
    assert b"".join(client.get_object("b", "new")) == b"the same bytes"
    assert client.prune(2**52).artifacts == 1
    assert contents.contents == {}


@pytest.mark.spec("FAC-21", "FAC-23")
def test_a_content_whose_name_never_came_is_collected(store, database):
    contents = Held()
    client = store(contents=contents)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(client.put_object, "b", "k", [b"orphan"])
        assert contents.sealing.wait(PATIENCE)
        killed = "select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction'"
        rows(database, killed + " and datname = current_database()")
        contents.go_on.set()
        with pytest.raises(Exception, match=r"out of reach|is being stopped"):
            putting.result(PATIENCE)
    assert len(contents.contents) == 1
    client.prune(2**52)
    assert contents.contents == {}


class SealedBetween(MemoryContents):
    """An upload that is complete is sealed right before call *number* of another upload, and stays without a name."""

    def __init__(self, number):
        super().__init__()
        self._calls = number
        self.complete, self._seal, self._sealed, self.go_on = (threading.Event() for _ in range(4))

    def _count(self):
        if self.complete.is_set():
            self._calls -= 1
            if self._calls == 0:
                self._seal.set()
                assert self._sealed.wait(PATIENCE)

    def received(self, upload):
        self._count()
        return super().received(upload)

    @contextmanager
    def receive(self, upload=None, *, begin=0):
        self._count()
        with super().receive(upload, begin=begin) as receiving:
            seal = receiving.seal

            def sealed(expected=None):
                self.complete.set()
                assert self._seal.wait(PATIENCE)
                made = seal(expected)
                self._sealed.set()
                assert self.go_on.wait(PATIENCE)
                return made

            receiving.seal = sealed
            yield receiving


@contextmanager
def sealed_between(store, database, number):
    """Two uploads of the same artifact: the first is sealed and not named, the second goes on behind its last byte."""
    content = b"the last byte is here"
    expected = Stored(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
    contents = SealedBetween(number)
    client, other = store(contents=contents), store(contents=contents)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.put_object, "b", "k", [content], expected=expected)
        assert contents.complete.wait(PATIENCE)
        second = pool.submit(other.put_object, "b", "k", [], expected=expected, begin=len(content))
        try:
            waiting = "select 1 from pg_locks where locktype = 'advisory' and not granted"
            until = time.monotonic() + PATIENCE
            while not second.done() and not rows(database, waiting):
                assert time.monotonic() < until, "the second upload neither waits nor ends"
            yield contents, expected, first, second
        finally:
            contents.go_on.set()


@pytest.mark.invariant
@pytest.mark.spec("FAC-21")
@pytest.mark.parametrize("number", [1, 2])
def test_an_upload_that_another_call_is_sealing_is_confirmed_once_it_has_its_name(store, database, number):
    with sealed_between(store, database, number) as (contents, expected, first, second):
        assert not second.done(), second
        contents.go_on.set()
        assert [first.result(PATIENCE), second.result(PATIENCE)] == [expected, expected]


@pytest.mark.invariant
@pytest.mark.spec("FAC-21")
@pytest.mark.parametrize("number", [1, 2])
def test_an_upload_that_was_sealed_and_not_named_is_not_confirmed(store, database, number):
    with sealed_between(store, database, number) as (_, _, _, second):
        killed = "select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction'"
        rows(database, killed + " and datname = current_database()")
        with pytest.raises(InvalidFactError, match=r"ask received\(\) first"):
            second.result(PATIENCE)


def test_without_contents_there_are_no_artifacts(store):
    client = store()
    assert not client.capabilities.artifacts
    with pytest.raises(ConfigurationError, match="give it contents="):
        client.put_object("b", "k", [b"x"])


def test_an_upload_in_pieces_that_are_awaited_goes_on_where_it_broke_off(store):
    contents = MemoryContents()
    content = b"first half, second half"

    async def breaking():
        yield content[:11]
        raise OSError("the line is gone")

    async def rest():
        yield content[11:]

    async def run():
        async with store(contents=contents) as client:
            expected = await client.put_object_async("b", "elsewhere", [content])
            with pytest.raises(OSError):
                await client.put_object_async("b", "k", breaking(), expected=expected)
            assert await client.received_async("b", "k", expected) == 11
            assert await client.put_object_async("b", "k", rest(), expected=expected, begin=11) == expected
            assert await client.received_async("b", "k", expected) == len(content)
            known = await client.known_object_async("b", "k")
            assert known == (expected, frozenset(), "")
            return b"".join([piece async for piece in client.get_object_async("b", "k")])

    assert asyncio.run(run()) == content


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.spec("FAC-26")
def test_a_database_that_may_lose_commits_is_refused_unless_that_is_accepted(new_postgres):
    server = new_postgres(settings={"synchronous_commit": "off"})
    upgrade(server.dsn())
    with pytest.raises(ConfigurationError, match="synchronous_commit is off; set it on, or say accept_loss=True"):
        PostgresBoundary(server.dsn()).open()
    with PostgresBoundary(server.dsn(), accept_loss=True) as store:
        assert (store.capabilities.durable, store.capabilities.strict) == (False, False)


@pytest.mark.spec("FAC-26")
def test_a_setting_that_changes_behind_our_back_costs_nothing(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    with PostgresBoundary(server.dsn()) as store:
        assert store.capabilities.strict
        token = store._premises().store.known.token
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("set synchronous_commit = off")
        values = [token, '[["A","B",0]]', "[]", False, 1, None, None]
        for strict, found in ((False, "off"), (True, "on")):
            connection.execute("select ergon.append_facts(%s, %s, %s, %s, %s, %s, %s, %s, false)", [*values, strict])
            assert connection.execute("show synchronous_commit").fetchone() == (found,)


def test_a_store_has_one_side(store):
    store(side=Side.OUTER).open()
    with pytest.raises(ConfigurationError, match="is on the outer side, and was opened as inner"):
        store().open()


def test_a_database_without_the_tables_is_told_to_upgrade(postgres):
    dsn = postgres.create_database("facts_unmade")
    with pytest.raises(ConfigurationError, match="ergon db upgrade"):
        PostgresBoundary(dsn, accept_loss=True).open()
    upgrade(dsn, "0003")
    with pytest.raises(ConfigurationError, match="at revision 0003, facts need 0013; run: ergon db upgrade"):
        PostgresBoundary(dsn, accept_loss=True).open()


def test_behind_a_pooler_everything_works(postgres, database, new_folder):
    pooler = PrivatePgBouncer(new_folder("pgbouncer"), postgres)
    pooler.start()
    name = database.rpartition("/")[2]
    try:

        def write(number):
            with PostgresBoundary(pooler.dsn(name), accept_loss=True) as client:
                for n in range(20):
                    client.append_fact(*stated(f"{number}-{n}"))
                found = client.fetch_facts(f"r{number}", PAIR, 1000)
                client.confirm_receipt(f"r{number}", PAIR, found[-1].cursor)
                return client.cursor_of(f"r{number}", PAIR)

        with ThreadPoolExecutor(8) as pool:
            cursors = list(pool.map(write, range(8)))
        assert max(cursor.offset for cursor in cursors) == 160

        async def look():
            async with PostgresBoundary(pooler.dsn(name), accept_loss=True) as client:
                return [each.offset for each in await client.fetch_facts_async("look", PAIR, 1000)]

        assert asyncio.run(look()) == list(range(1, 161))
    finally:
        pooler.stop()


def test_a_cursor_beyond_the_end_is_a_witness_that_an_operator_acts_on(store):
    client = store()
    client.append_fact(*stated(1))
    before = client.epoch
    assert client.new_epoch(by="Ada") != before
    assert client.end_of(PAIR) == Cursor(client.epoch, 1)
    assert client.get_fact(PAIR.from_zone, "m-1").epoch == before, "what was confirmed stays as it was told"
    other = store()
    assert other.epoch == client.epoch


def test_loops_of_several_threads_append_side_by_side(store):
    """Each loop has its own that share commits: an answer in another loop would never be heard."""
    boundary, together = store(), threading.Barrier(3)

    def append(part):
        async def run():
            together.wait(PATIENCE)
            return [(await boundary.append_fact_async(*stated(f"{part}-{number}"))).offset for number in range(40)]

        with asyncio.Runner() as runner:
            return runner.run(run())

    with ThreadPoolExecutor(3) as pool:
        offsets = [offset for part in pool.map(append, range(3)) for offset in part]
    assert sorted(offsets) == list(range(1, 121))
