"""Facts in PostgreSQL under many writers: what is stored, dropped and rejected."""

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

from ergon_framework.database.migrate import upgrade
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.errors import BufferFull, FactConflict, FactError, InvalidFactError
from ergon_framework.facts.model import BoundarySide, Cursor, Envelope, Fact, StoredArtifact, ZonePair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.memory_contents import MemoryContentStore
from ergon_framework.facts.stores.postgres.retention import WEEK_MS, partition_name, week_number
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.integration.counters import read_index_counters
from tests.servers.pgbouncer import PrivatePgBouncer

PAIR = ZonePair("Plant A", "HQ")
OTHER_PAIR = ZonePair("Plant A", "Elsewhere")
YEAR_SECONDS = 365 * 86_400.0
TIMEOUT_SECONDS = 20.0


def make_fact(number, pair=PAIR, **more):
    envelope = Envelope(message_id=f"m-{number}", from_zone=pair.from_zone, to_zone=pair.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.create(f"order:{number}", "paid", {"number": number, **more})


def run_sql(dsn, statement, *values):
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def make_store(database):
    stores = []

    def open_store(**options):
        stores.append(PostgresBoundary(database, accept_loss=True, **options))
        return stores[-1]

    yield open_store
    for each in stores:
        each.close()


# -- one id, one fact ---------------------------------------------------------------------------------


def append_from_all(clients, fact, times):
    """Append one fact from many clients concurrently and return every result."""
    ready = threading.Barrier(len(clients))

    def append(client):
        ready.wait()
        return [client.append_facts([fact])[0] for _ in range(times)]

    with ThreadPoolExecutor(len(clients)) as pool:
        return [confirmation for confirmations in pool.map(append, clients) for confirmation in confirmations]


@pytest.mark.spec("FAC-03", "FAC-13")
def test_an_id_sent_a_thousand_times_by_fifty_clients_is_one_fact_even_a_year_later(make_store, database):
    now = [time.time()]
    clients = [make_store(wall=lambda: now[0]) for _ in range(50)]
    results = append_from_all(clients, make_fact(1), 20)
    assert len(results) == 1000
    assert {each.offset for each in results} == {1}
    assert sum(not each.duplicate for each in results) == 1

    (only,) = clients[0].fetch_facts("reader", PAIR, 10)
    clients[0].confirm_receipt("reader", PAIR, only.cursor)
    now[0] += YEAR_SECONDS
    assert clients[0].prune(int(now[0] * 1000)).facts == 1
    assert run_sql(database, "select count(*) from ergon.facts") == [(0,)]
    again = append_from_all(clients, make_fact(1), 20)
    assert {(each.offset, each.duplicate) for each in again} == {(1, True)}

    neighbours = [make_fact(2), make_fact(1, changed=True), make_fact(3)]
    with ThreadPoolExecutor(3) as pool:
        one, other, three = pool.map(lambda fact: clients[0].append_facts([fact])[0], neighbours)
    assert isinstance(other, FactConflict)
    assert {one.offset, three.offset} == {2, 3}


@pytest.mark.spec("FAC-13")
def test_a_conflict_in_a_group_commit_does_not_affect_other_facts(make_store, database):
    async def append_all():
        async with make_store() as client:
            await client.append_facts_async([make_fact(7)])
            batch = [make_fact(number) if number != 7 else make_fact(7, changed=True) for number in range(100)]
            return await asyncio.gather(*(client.append_facts_async([fact]) for fact in batch))

    results = [answers[0] for answers in asyncio.run(append_all())]
    assert isinstance(results.pop(7), FactConflict)
    assert sorted(each.offset for each in results) == list(range(2, 101))
    # All of them arrived during the first commit, or joined it.
    assert run_sql(database, "select count(distinct xmin::text) from ergon.facts")[0][0] <= 4


# -- by columns, and one by one -------------------------------------------------------------------------

STORED_ROWS = """
select f.fact_offset, f.stored_at, f.total, f.produced_at, f.message_id, f.correlation_id, f.causation_id, f.labels,
    f.subject, f.predicate, f.object_json, i.fact_offset, i.kept_at, e.epoch, l.last, l.total, f.digest = i.digest
from ergon.facts f join ergon.fact_log l on l.id = f.log
join ergon.fact_ids i on i.log = l.id and i.message_id = f.message_id join ergon.fact_epochs e on e.id = i.epoch
where l.to_zone = %s order by f.fact_offset
"""


def disable_one_by_one(database):
    """Make every append one by one fail from now on."""
    run_sql(database, "alter function ergon.append_facts rename to append_facts_away")


def append_and_read_rows(store, database, batch, zone, *, odd):
    """Append *batch* and return its rows; an *odd* batch contains an id twice, so it is stored one by one."""
    sent = [
        (replace(envelope, from_zone=f"{envelope.from_zone} {zone}", to_zone=zone), fact) for envelope, fact in batch
    ]
    results = store.append_facts(sent + sent[:1] * odd)
    assert [raise_if_error(each).offset for each in results] == [*range(2, len(batch) + 2), 2][: len(results)]
    return run_sql(database, STORED_ROWS, zone)


def make_varied_facts(count):
    for number in range(count):
        envelope, fact = make_fact(number, text="ü,'\"\\ {}" * number)
        extra = {"labels": {"a": "\\\x7e", "ü": ""}} if number % 3 else {"correlation_id": f"c {number}"}
        yield replace(envelope, causation_id="x" if number % 2 else None, **extra), fact


@pytest.mark.spec("FAC-22")
def test_the_cost_of_a_batch_does_not_depend_on_stored_facts_or_planner_statistics(make_store, database):
    # Autovacuum runs once a minute. Until then there are no statistics, and the planner expects a few rows per zone.
    run_sql(database, "alter table ergon.fact_ids set (autovacuum_enabled = off)")
    with make_store() as others:
        others.append_facts([make_fact(number, ZonePair("Plant B", "HQ")) for number in range(2000)])
    with make_store() as filled:
        for first in range(0, 3000, 100):
            filled.append_facts([make_fact(number) for number in range(first, first + 100)])
    scans, entries_read = read_index_counters(database, "fact_ids_pkey")
    assert scans >= 5000, "the counter counts each id"
    assert entries_read < 100, "ids of other facts were looked at"


@pytest.mark.spec("FAC-13", "FAC-15")
def test_a_batch_stored_by_columns_equals_one_stored_one_by_one(make_store, database):
    client = make_store(wall=lambda: 1000.0)
    for zone in ("Columns", "One by one"):
        client.append_facts([make_fact("first", ZonePair(f"Plant A {zone}", zone))])
    batch = list(make_varied_facts(40))
    one_by_one = append_and_read_rows(client, database, batch, "One by one", odd=True)
    run_sql(database, "alter function ergon.append_facts rename to append_facts_away")
    assert append_and_read_rows(client, database, batch, "Columns", odd=False) == one_by_one
    assert len(one_by_one) == 41


@pytest.mark.spec("FAC-15")
def test_a_batch_of_several_pairs_by_columns_has_dense_offsets_in_each(make_store, database):
    client = make_store()
    client.append_facts([make_fact("here", PAIR), make_fact("there", OTHER_PAIR)])
    disable_one_by_one(database)
    results = client.append_facts([make_fact(number, (PAIR, OTHER_PAIR)[number % 3 == 0]) for number in range(30)])
    assert [each.offset for each in results[::3]] == list(range(2, 12))
    assert [each.offset for number, each in enumerate(results) if number % 3] == list(range(2, 22))
    assert [fact.offset for fact in client.fetch_facts("r", PAIR, 100)] == list(range(1, 22))
    assert [fact.envelope.message_id for fact in client.fetch_facts("r", OTHER_PAIR, 100)] == [
        "m-there",
        *(f"m-{number}" for number in range(0, 30, 3)),
    ]


def test_consecutive_forwarded_facts_are_stored_by_columns(make_store, database):
    origin, client = MemoryBoundary(), make_store()
    origin.append_facts([make_fact(number) for number in range(30)])
    sent = origin.fetch_facts("r", PAIR, 100)
    client.forward_facts(sent[:1])
    disable_one_by_one(database)
    assert [raise_if_error(each).offset for each in client.forward_facts(sent[1:])] == list(range(2, 31))
    assert client.fetch_facts("r", PAIR, 100) == sent


def test_a_batch_is_stored_by_columns_within_the_limits_and_one_by_one_beyond_them(make_store, database):
    client = make_store(max_facts=10)
    client.append_facts([make_fact("first")])
    results = client.append_facts([make_fact(number) for number in range(12)])
    assert [isinstance(each, BufferFull) for each in results] == [False] * 9 + [True] * 3
    bytes_of_one = run_sql(database, "select total from ergon.facts where fact_offset = 1")[0][0]
    wide = make_store(max_bytes=1_000_000 + bytes_of_one)
    disable_one_by_one(database)
    assert [raise_if_error(each).offset for each in wide.append_facts([make_fact("x"), make_fact("y")])] == [11, 12]


@pytest.mark.spec("FAC-15")
def test_a_batch_for_a_restored_store_starts_a_new_epoch(make_store, database):
    client = make_store()
    client.append_facts([make_fact(number) for number in range(3)])
    before = client.epoch
    run_sql(database, "update ergon.fact_log set last = 1")
    run_sql(database, "delete from ergon.facts where fact_offset > 1")
    run_sql(database, "delete from ergon.fact_ids where fact_offset > 1")
    results = client.append_facts([make_fact("a"), make_fact("b")])
    assert [raise_if_error(each).offset for each in results] == [2, 3]
    assert client.epoch != before
    assert {each.epoch for each in results} == {client.epoch}


@pytest.mark.spec("FAC-15")
def test_the_same_id_to_two_zones_at_once_is_one_fact_and_one_conflict(make_store):
    one, other = make_store(), make_store()
    for number in range(30):
        with ThreadPoolExecutor(2) as pool:
            results = list(
                pool.map(
                    lambda each: each[0].append_facts([make_fact(number, each[1])])[0],  # noqa: B023 - over before the next
                    ((one, PAIR), (other, OTHER_PAIR)),
                )
            )
        assert sum(isinstance(each, FactConflict) for each in results) == 1
    ends = [end.offset for pair in (PAIR, OTHER_PAIR) if (end := one.last_offset(pair)) is not None]
    assert sum(ends) == 30, "offsets are dense in both"


@pytest.mark.spec("FAC-15")
def test_appends_to_two_pairs_in_opposite_order_do_not_deadlock(make_store):
    def append(client, first, second, name):
        for number in range(60):
            batch = [make_fact(f"{name}-{number}-1", first), make_fact(f"{name}-{number}-2", second)]
            assert not [result for result in client.append_facts(batch) if isinstance(result, FactError)]

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(append, (make_store(), make_store()), (PAIR, OTHER_PAIR), (OTHER_PAIR, PAIR), "xy"))
    # The server checks for deadlocks after a second, and would have ended one of the two.
    assert time.monotonic() - began < TIMEOUT_SECONDS
    assert [make_store().last_offset(pair).offset for pair in (PAIR, OTHER_PAIR)] == [120, 120]


@pytest.mark.spec("FAC-16")
def test_the_last_capacity_is_granted_once_to_concurrent_clients(make_store):
    clients = [make_store(max_facts=50) for _ in range(4)]

    def append(client, number):
        pair = ZonePair("Plant A", f"zone {number}")
        return [client.append_facts([make_fact(f"{number}-{n}", pair)])[0] for n in range(25)]

    with ThreadPoolExecutor(4) as pool:
        results = [each for client_results in pool.map(append, clients, range(4)) for each in client_results]
    assert sum(isinstance(each, BufferFull) for each in results) == 50
    assert sum(state.last for state in make_store().list_logs()) == 50


@pytest.mark.spec("FAC-16")
def test_a_bounded_store_waits_for_concurrent_writers(make_store, database):
    client = make_store(max_facts=50)
    client.append_fact(*make_fact(1))
    with psycopg.connect(database) as other, ThreadPoolExecutor(1) as pool:
        other.execute("select 1 from ergon.fact_usage for update")
        waiting = pool.submit(client.append_fact, *make_fact(2))
        while not run_sql(database, WAITING):
            assert not waiting.done()
        other.rollback()
        assert waiting.result(TIMEOUT_SECONDS).offset == 2


@pytest.mark.spec("FAC-16")
def test_bytes_are_counted_with_artifacts_and_released(make_store):
    client = make_store(max_bytes=100, contents=MemoryContentStore())
    client.put_object("b", "k", [b"x" * 60])
    with pytest.raises(BufferFull, match="60 bytes are retained, the limit is 100"):
        client.put_object("b", "other", [b"y" * 60])
    results = client.append_facts([make_fact(1, text="z" * 40), make_fact(2)])
    assert isinstance(results[0], BufferFull)
    assert raise_if_error(results[1]).offset == 1
    assert client.prune(2**52).artifacts == 1
    client.put_object("b", "other", [b"y" * 60])


def test_a_large_call_is_split_into_as_many_commits_as_necessary(make_store, database):
    results = make_store().append_facts([make_fact(number) for number in range(2500)])
    assert [each.offset for each in results] == list(range(1, 2501))
    assert run_sql(database, "select count(distinct xmin::text) from ergon.facts") == [(3,)]


@pytest.mark.spec("FAC-15")
def test_reading_during_appends_detects_no_restore(make_store, database):
    client, finished = make_store(), threading.Event()
    epoch = client.epoch

    def read():
        while not finished.is_set():
            client.last_offset(PAIR)
            client.fetch_facts("r", PAIR, 1)

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        for writer in [
            pool.submit(lambda k: [client.append_fact(*make_fact(f"{k}-{n}")) for n in range(80)], k) for k in "ab"
        ]:
            writer.result()
        finished.set()
        for each in readers:
            each.result()
    assert client.epoch == epoch
    assert run_sql(database, "select count(*) from ergon.fact_epochs") == [(1,)]


# -- callers that are cancelled -------------------------------------------------------------------------


def test_a_cancelled_append_can_be_repeated(make_store, database):
    async def run():
        async with make_store() as client:
            raise_if_error((await client.append_facts_async([make_fact(0)]))[0])
            with psycopg.connect(database) as other:
                other.execute("select 1 from ergon.fact_log for update")
                waiting = asyncio.create_task(client.append_fact_async(*make_fact(1)))
                neighbour = asyncio.create_task(client.append_fact_async(*make_fact(2)))
                while not await asyncio.to_thread(run_sql, database, WAITING):
                    assert not waiting.done()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                other.rollback()
            confirmation = await neighbour
            again = await client.append_fact_async(*make_fact(1))
            assert {confirmation.offset, again.offset} == {1 + 1, 2 + 1}
            assert [each.offset for each in await client.fetch_facts_async("r", PAIR, 9)] == [1, 2, 3]

    asyncio.run(run())


WAITING = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"


# -- notifications --------------------------------------------------------------------------------------


def test_a_listener_is_notified_by_another_process(make_store):
    notified, listener = threading.Event(), make_store()
    unlisten = listener.listen(notified.set)
    assert listener._get_process_state().listener.receiving.wait(TIMEOUT_SECONDS)
    notified.clear()
    make_store().append_fact(*make_fact(1))
    assert notified.wait(TIMEOUT_SECONDS)
    unlisten()


# -- retention ----------------------------------------------------------------------------------------


@pytest.mark.spec("FAC-16")
def test_the_partition_of_a_past_week_is_dropped_once_confirmed(make_store, database):
    now = [time.time()]
    client = make_store(wall=lambda: now[0])
    client.open()
    client.append_facts([make_fact(number) for number in range(10)])
    week = partition_name(week_number(int(now[0] * 1000)))
    assert run_sql(database, f"select count(*) from ergon.{week}") == [(10,)]
    facts = client.fetch_facts("slow", PAIR, 100)
    client.confirm_receipt("slow", PAIR, facts[4].cursor)
    now[0] += 3 * WEEK_MS / 1000
    moment = int(now[0] * 1000)
    assert client.prune(moment).facts == 5
    assert run_sql(database, f"select count(*) from ergon.{week}") == [(5,)], "what is held up stays, the rest is gone"
    assert [each.offset for each in client.fetch_facts("slow", PAIR, 100)] == [6, 7, 8, 9, 10]
    client.confirm_receipt("slow", PAIR, facts[9].cursor)
    assert client.prune(moment).facts == 5
    assert run_sql(database, "select to_regclass(%s)", f"ergon.{week}") == [(None,)]
    confirmation = client.append_fact(*make_fact("next"))
    assert confirmation.offset == 11
    assert run_sql(database, "select count(*) from ergon.facts_default") == [(0,)], "the present week has a partition"


@pytest.mark.spec("FAC-16")
def test_facts_are_accepted_without_the_right_to_create_partitions(postgres, database):
    run_sql(database, "create role clerk login")
    for grant in (
        "grant usage on schema ergon to clerk",
        "grant select, insert, update, delete on all tables in schema ergon to clerk",
    ):
        run_sql(database, grant)
    client = PostgresBoundary(database.replace("//postgres@", "//clerk@"), accept_loss=True)
    try:
        with client:
            client.append_facts([make_fact(number) for number in range(3)])
            facts = client.fetch_facts("r", PAIR, 10)
            client.confirm_receipt("r", PAIR, facts[1].cursor)
            assert client.prune(2**52).facts == 2
            assert run_sql(database, "select count(*) from ergon.facts_default") == [(1,)]
    finally:
        run_sql(database, "drop owned by clerk")
        run_sql(database, "drop role clerk")


@pytest.mark.spec("FAC-16")
def test_the_operator_that_retires_a_reader_is_recorded(make_store, database):
    client = make_store()
    client.append_facts([make_fact(1), make_fact(2)])
    facts = client.fetch_facts("gone", PAIR, 1)
    client.confirm_receipt("gone", PAIR, facts[0].cursor)
    assert client.retire_reader("gone", PAIR, by="Ada")
    assert not client.retire_reader("gone", PAIR, by="Ada")
    audit_rows = run_sql(
        database, "select from_zone, to_zone, reader, fact_offset, last, actor from ergon.fact_reader_audit"
    )
    assert audit_rows == [(*PAIR, "gone", 1, 2, "Ada")]


def test_ids_are_deleted_after_their_retention_when_their_facts_are_gone(make_store):
    now = [time.time()]
    client = make_store(wall=lambda: now[0], identity_retention=100.0)
    client.append_facts([make_fact(1), make_fact(2)])
    facts = client.fetch_facts("r", PAIR, 10)
    client.confirm_receipt("r", PAIR, facts[0].cursor)
    now[0] += 200
    client.prune(int(now[0] * 1000))
    assert client.get_fact(PAIR.from_zone, "m-1") is None
    assert client.get_fact(PAIR.from_zone, "m-2") is not None, "its fact is retained"


# -- artifacts ----------------------------------------------------------------------------------------


class PausedContents(MemoryContentStore):
    """A content store whose commit waits, as for a large artifact on a slow disk."""

    def __init__(self):
        super().__init__()
        self.commit_started, self.resume = threading.Event(), threading.Event()

    def begin_upload(self, upload=None, *, begin=0):
        receiver = super().begin_upload(upload, begin=begin)
        contents = self

        class PausedUpload:
            def __enter__(self):
                self.inner = receiver.__enter__()
                seal = self.inner.commit

                def seal_and_pause(expected=None):
                    stored = seal(expected)
                    contents.commit_started.set()
                    assert contents.resume.wait(TIMEOUT_SECONDS)
                    return stored

                self.inner.commit = seal_and_pause
                return self.inner

            def __exit__(self, *error):
                return receiver.__exit__(*error)

        return PausedUpload()


@pytest.mark.spec("FAC-23")
def test_a_content_whose_name_is_being_committed_is_not_removed(make_store):
    contents = PausedContents()
    client = make_store(contents=contents)
    contents.resume.set()
    client.put_object("b", "old", [b"the same bytes"])
    contents.resume.clear()
    contents.commit_started.clear()
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(client.put_object, "b", "new", [b"the same bytes"])
        assert contents.commit_started.wait(TIMEOUT_SECONDS)
        assert client.prune(2**52).artifacts == 1, "the old name is gone"
        contents.resume.set()
        putting.result(TIMEOUT_SECONDS)
    assert b"".join(client.get_object("b", "new")) == b"the same bytes"
    assert client.prune(2**52).artifacts == 1
    assert contents.contents == {}


@pytest.mark.spec("FAC-21", "FAC-23")
def test_a_content_that_never_got_a_name_is_removed(make_store, database):
    contents = PausedContents()
    client = make_store(contents=contents)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(client.put_object, "b", "k", [b"orphan"])
        assert contents.commit_started.wait(TIMEOUT_SECONDS)
        kill_sql = "select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction'"
        run_sql(database, kill_sql + " and datname = current_database()")
        contents.resume.set()
        with pytest.raises(Exception, match=r"is unavailable|is being stopped"):
            putting.result(TIMEOUT_SECONDS)
    assert len(contents.contents) == 1
    client.prune(2**52)
    assert contents.contents == {}


class CommitBeforeCallContents(MemoryContentStore):
    """A content store that commits an upload right before call *number* of another upload and leaves it unnamed."""

    def __init__(self, number):
        super().__init__()
        self._calls_left = number
        self.complete, self._commit, self._committed, self.resume = (threading.Event() for _ in range(4))

    def _count_call(self):
        if self.complete.is_set():
            self._calls_left -= 1
            if self._calls_left == 0:
                self._commit.set()
                assert self._committed.wait(TIMEOUT_SECONDS)

    def uploaded_bytes(self, upload):
        self._count_call()
        return super().uploaded_bytes(upload)

    @contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        self._count_call()
        with super().begin_upload(upload, begin=begin) as receiving:
            seal = receiving.commit

            def seal_before_call(expected=None):
                self.complete.set()
                assert self._commit.wait(TIMEOUT_SECONDS)
                stored = seal(expected)
                self._committed.set()
                assert self.resume.wait(TIMEOUT_SECONDS)
                return stored

            receiving.commit = seal_before_call
            yield receiving


@contextmanager
def interleave_uploads(store, database, number):
    """Start two uploads of one artifact: the first is committed and unnamed, the second continues at its end."""
    content = b"the last byte is here"
    expected = StoredArtifact(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
    contents = CommitBeforeCallContents(number)
    client, other = store(contents=contents), store(contents=contents)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.put_object, "b", "k", [content], expected=expected)
        assert contents.complete.wait(TIMEOUT_SECONDS)
        second = pool.submit(other.put_object, "b", "k", [], expected=expected, begin=len(content))
        try:
            query = "select 1 from pg_locks where locktype = 'advisory' and not granted"
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not second.done() and not run_sql(database, query):
                assert time.monotonic() < deadline, "the second upload neither waits nor ends"
            yield contents, expected, first, second
        finally:
            contents.resume.set()


@pytest.mark.invariant
@pytest.mark.spec("FAC-21")
@pytest.mark.parametrize("number", [1, 2])
def test_an_upload_that_another_call_is_committing_is_confirmed_once_it_has_its_name(make_store, database, number):
    with interleave_uploads(make_store, database, number) as (contents, expected, first, second):
        assert not second.done(), second
        contents.resume.set()
        assert [first.result(TIMEOUT_SECONDS), second.result(TIMEOUT_SECONDS)] == [expected, expected]


@pytest.mark.invariant
@pytest.mark.spec("FAC-21")
@pytest.mark.parametrize("number", [1, 2])
def test_an_upload_that_was_committed_without_a_name_is_not_confirmed(make_store, database, number):
    with interleave_uploads(make_store, database, number) as (_, _, _, second):
        kill_sql = "select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction'"
        run_sql(database, kill_sql + " and datname = current_database()")
        with pytest.raises(InvalidFactError, match=r"call uploaded_bytes\(\) first"):
            second.result(TIMEOUT_SECONDS)


def test_without_contents_there_are_no_artifacts(make_store):
    client = make_store()
    assert not client.capabilities.artifacts
    with pytest.raises(ConfigurationError, match="has no content store: pass contents="):
        client.put_object("b", "k", [b"x"])


def test_an_upload_from_an_async_iterator_resumes_where_it_stopped(make_store):
    contents = MemoryContentStore()
    content = b"first half, second half"

    async def send_first_half():
        yield content[:11]
        raise OSError("the line is gone")

    async def send_second_half():
        yield content[11:]

    async def run():
        async with make_store(contents=contents) as client:
            expected = await client.put_object_async("b", "elsewhere", [content])
            with pytest.raises(OSError):
                await client.put_object_async("b", "k", send_first_half(), expected=expected)
            assert await client.uploaded_bytes_async("b", "k", expected) == 11
            assert await client.put_object_async("b", "k", send_second_half(), expected=expected, begin=11) == expected
            assert await client.uploaded_bytes_async("b", "k", expected) == len(content)
            known_object = await client.stat_object_async("b", "k")
            assert known_object == (expected, frozenset(), "")
            return b"".join([chunk async for chunk in client.get_object_async("b", "k")])

    assert asyncio.run(run()) == content


# -- what is rejected -----------------------------------------------------------------------------------


@pytest.mark.spec("FAC-26")
def test_a_database_that_may_lose_commits_is_refused_unless_that_is_accepted(new_postgres):
    server = new_postgres(settings={"synchronous_commit": "off"})
    upgrade(server.dsn())
    with pytest.raises(ConfigurationError, match="synchronous_commit is off; set it on, or pass accept_loss=True"):
        PostgresBoundary(server.dsn()).open()
    with PostgresBoundary(server.dsn(), accept_loss=True) as store:
        assert (store.capabilities.durable, store.capabilities.is_strict) == (False, False)


@pytest.mark.spec("FAC-26")
def test_a_changed_session_setting_does_not_weaken_strict_appends(new_postgres):
    server = new_postgres()
    upgrade(server.dsn())
    with PostgresBoundary(server.dsn()) as store:
        assert store.capabilities.is_strict
        token = store._get_process_state().session.identity.token
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("set synchronous_commit = off")
        values = [token, '[["A","B",0]]', "[]", False, 1, None, None]
        for strict, expected in ((False, "off"), (True, "on")):
            connection.execute("select ergon.append_facts(%s, %s, %s, %s, %s, %s, %s, %s, false)", [*values, strict])
            assert connection.execute("show synchronous_commit").fetchone() == (expected,)


def test_a_store_has_one_side(make_store):
    make_store(side=BoundarySide.OUTER).open()
    with pytest.raises(ConfigurationError, match="is on the outer side, but was opened as inner"):
        make_store().open()


def test_an_error_for_a_database_without_tables_names_the_upgrade(postgres):
    dsn = postgres.create_database("facts_unmade")
    with pytest.raises(ConfigurationError, match="ergon db upgrade"):
        PostgresBoundary(dsn, accept_loss=True).open()
    upgrade(dsn, "0003")
    with pytest.raises(ConfigurationError, match="revision 0003 is outdated: facts need 0004; run: ergon db upgrade"):
        PostgresBoundary(dsn, accept_loss=True).open()


def test_behind_a_pooler_everything_works(postgres, database, new_folder):
    pooler = PrivatePgBouncer(new_folder("pgbouncer"), postgres)
    pooler.start()
    name = database.rpartition("/")[2]
    try:

        def write(number):
            with PostgresBoundary(pooler.dsn(name), accept_loss=True) as client:
                for n in range(20):
                    client.append_fact(*make_fact(f"{number}-{n}"))
                facts = client.fetch_facts(f"r{number}", PAIR, 1000)
                client.confirm_receipt(f"r{number}", PAIR, facts[-1].cursor)
                return client.get_cursor(f"r{number}", PAIR)

        with ThreadPoolExecutor(8) as pool:
            cursors = list(pool.map(write, range(8)))
        assert max(cursor.offset for cursor in cursors) == 160

        async def fetch_offsets():
            async with PostgresBoundary(pooler.dsn(name), accept_loss=True) as client:
                return [each.offset for each in await client.fetch_facts_async("look", PAIR, 1000)]

        assert asyncio.run(fetch_offsets()) == list(range(1, 161))
    finally:
        pooler.stop()


def test_an_operator_starts_a_new_epoch_that_later_clients_see(make_store):
    client = make_store()
    client.append_fact(*make_fact(1))
    before = client.epoch
    assert client.new_epoch(by="Ada") != before
    assert client.last_offset(PAIR) == Cursor(client.epoch, 1)
    assert client.get_fact(PAIR.from_zone, "m-1").epoch == before, "what was confirmed stays as it was told"
    other = make_store()
    assert other.epoch == client.epoch


def test_event_loops_in_several_threads_append_concurrently(make_store):
    """Each loop shares commits only within itself: a result in another loop would never arrive."""
    boundary, barrier = make_store(), threading.Barrier(3)

    def append(part):
        async def run():
            barrier.wait(TIMEOUT_SECONDS)
            return [(await boundary.append_fact_async(*make_fact(f"{part}-{number}"))).offset for number in range(40)]

        with asyncio.Runner() as runner:
            return runner.run(run())

    with ThreadPoolExecutor(3) as pool:
        offsets = [offset for part in pool.map(append, range(3)) for offset in part]
    assert sorted(offsets) == list(range(1, 121))
