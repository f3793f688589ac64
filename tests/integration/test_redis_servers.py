"""Servers as they are found: what their settings are worth, and what they say when they cannot serve."""

from __future__ import annotations

import time

import pytest

from ergon_framework.connectors.base import Ack, ConnectorError, DeadLetter, Later, Release, SettleResult
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.transaction import Transaction
from tests.integration.redises import Queues, beside, running, stream, until
from tests.log_events import event_of

SETTLED, FAILED = SettleResult.SETTLED, SettleResult.FAILED


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture
def queues(server):
    made = Queues(server)
    yield made
    made.close()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client
        client.config_set("maxmemory", "0")
        client.config_set("appendfsync", "always")


def some(count, size=10):
    return [Transaction(f"tx-{number}", {"text": "x" * size}) for number in range(count)]


@pytest.mark.spec("CNN-17")
@pytest.mark.parametrize(
    "setting, value, words",
    [
        ("appendfsync", "always", "costs nothing"),
        ("appendfsync", "everysec", "the last two seconds"),
        ("appendfsync", "no", "whatever the kernel had not written"),
        ("appendonly", "no", "all since its last snapshot"),
    ],
)
def test_it_says_what_a_power_loss_could_cost(request, caplog, setting, value, words):
    queues, client = request.getfixturevalue("queues"), request.getfixturevalue("client")
    client.config_set(setting, value)
    durable = value == "always"
    try:
        queue = queues(f"durable-{setting}-{value}")
        assert (queue.capabilities.durable, queue.durability) == (None, None)
        caplog.set_level("INFO")
        queue.open()
        assert queue.capabilities.durable is durable
        assert words in queue.durability
        (record,) = [record for record in caplog.records if event_of(record) == "redis durability"]
        assert (record.levelname, record.words) == ("INFO" if durable else "WARNING", queue.durability)
    finally:
        client.config_set("appendonly", "yes")


@pytest.mark.spec("CNN-17")
def test_what_may_not_be_seen_is_unknown_and_not_durable(queues, client, server):
    client.acl_setuser("worker", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config"])
    queue = queues("hidden", url=f"redis://worker:any@127.0.0.1:{server.port}/0")
    queue.open()
    assert queue.capabilities.durable is None
    assert "unknown" in queue.durability


@pytest.mark.spec("CNN-02")
def test_a_server_that_would_throw_the_queue_away_is_refused(queues, client):
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", "100mb")
    try:
        with pytest.raises(ConfigurationError, match="maxmemory-policy to noeviction"):
            queues("evicted").open()
        client.config_set("maxmemory-policy", "volatile-lru")  # no key of ours has a time to live
        queues("kept").open()
    finally:
        client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.spec("CNN-02", "CNN-13")
def test_a_full_memory_refuses_what_is_new_and_lets_go_what_is_done(queues, client):
    queue = queues("full")
    queue.dispatch(some(7))
    held = queue.fetch_transactions(7)
    client.config_set("maxmemory", "1mb")
    for count in (1, 3):
        with pytest.raises(ConnectionLost, match="memory is full") as told:
            queue.dispatch(some(count))
        assert not told.value.final
    settlings = [(held[0], Ack()), (held[1], Later(0)), (held[2], Later(9)), (held[3], DeadLetter("why"))]
    # What is acked makes room, or nothing ever would; what has to be written somewhere else stays where it is.
    assert queue.settle(settlings) == [SETTLED, FAILED, FAILED, FAILED]
    assert queue.depth().in_flight == 6
    client.config_set("maxmemory", "0")
    assert queue.settle(settlings[1:]) == [SETTLED] * 3
    assert queue.settle([(each, Ack()) for each in held[4:]]) == [SETTLED] * 3
    (record,) = queue.list_dead(DeadLetterQuery())
    client.config_set("maxmemory", "1mb")
    (result,) = queue.replay_dead([record.place])
    assert (result.became, "memory" in result.words) == (Became.FAILED, True)
    client.config_set("maxmemory", "0")
    assert queue.replay_dead([record.place])[0].became is Became.REPLAYED


@pytest.mark.spec("CNN-02")
def test_a_full_memory_takes_none_of_many(queues, client):
    queue = queues("full-many")
    queue.open()
    used = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory", used + 200_000)
    refused = 0
    while not refused:
        try:
            queue.dispatch(some(50, 1_000))
        except ConnectionLost:
            refused += 1
    assert client.xlen(stream("full-many")) % 50 == 0


@pytest.mark.spec("CNN-07")
def test_a_replica_says_who_it_is(queues, server):
    with running(replicaof=f"127.0.0.1 {server.port}", appendonly="no") as replica:
        with replica.client() as client:
            until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
        queue = queues("replicated", url=replica.url)
        for call in (queue.open, lambda: queue.dispatch(some(1)), lambda: queue.dispatch(some(2))):
            with pytest.raises(ConnectionLost, match="the primary's address"):
                call()
        with replica.client() as client:
            client.slaveof()  # it is the primary from now on
        queue.dispatch(some(1))
        assert len(queue.fetch_transactions(5)) == 1


@pytest.mark.spec("CNN-07")
def test_a_server_that_loads_is_waited_for():
    with running() as server:
        with server.client() as client:
            pipe = client.pipeline(transaction=False)
            for number in range(2_000):
                pipe.set(f"some-{number}", "x" * 100)
            pipe.execute()
            client.bgrewriteaof()
            until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "it is rewritten")
        queues = Queues(server)
        queue = queues("loading")
        queue.dispatch(some(1))
        server.settings |= {"key-load-delay": "1000", "loading-process-events-interval-bytes": "1024"}
        server.stop()
        server.spawn()
        said, end = [], time.monotonic() + 30
        while time.monotonic() < end:
            try:
                found = queue.fetch_transactions(1)
                break
            except ConnectionLost as error:
                said.append(str(error))
        assert any("loading" in words for words in said), said
        assert [each.transaction.id for each in found] == ["tx-0"]
        queues.close()


@pytest.mark.spec("CNN-07")
def test_scripts_and_groups_that_the_server_has_lost_are_made_again(queues, client):
    queue = queues("flushed")
    queue.dispatch(some(2))
    one, other = queue.fetch_transactions(2)
    client.script_flush()
    assert queue.settle([(one, Ack())]) == [SETTLED]
    client.flushall()
    assert queue.settle([(other, Ack())]) == [SettleResult.LOST]
    client.flushall()
    assert queue.extend([other]) == [None]
    client.flushall()
    assert queue.depth().ready == 0
    client.flushall()
    assert queue.fetch_transactions(1) == []
    client.flushall()
    queue.dispatch(some(1))
    assert len(queue.fetch_transactions(1)) == 1


@pytest.mark.spec("CNN-02")
def test_a_wrong_password_is_told_without_it(queues):
    with running(requirepass="right", appendonly="no") as server:
        for url, words in ((f"redis://:wrong@127.0.0.1:{server.port}", "refuses"), (server.url, "")):
            queue = queues("secret", url=url)
            if words:
                with pytest.raises(ConfigurationError, match=words) as told:
                    queue.open()
                assert "wrong@" not in str(told.value)
            else:
                queue.open()
        for url in ("http://:secret@x", "redis://:secret@x:port"):
            with pytest.raises(ConfigurationError, match="cannot be read") as told:
                queues("secret", url=url).open()
            assert "secret" not in str(told.value)


@pytest.mark.spec("CNN-02")
def test_without_an_address_the_variable_is_named(monkeypatch, server):
    from ergon_framework.connectors.redis import RedisQueue  # noqa: PLC0415 - as a program that has only the environment

    monkeypatch.delenv("ERGON_REDIS__URL", raising=False)
    with pytest.raises(ConfigurationError, match="ERGON_REDIS__URL"):
        RedisQueue("nowhere").open()
    monkeypatch.setenv("ERGON_REDIS__URL", server.url)
    queue = RedisQueue("somewhere")
    queue.open()
    queue.close()


@pytest.mark.spec("CNN-02")
def test_a_name_that_is_something_else_already_is_refused(queues, client):
    client.set(stream("taken"), "a text")
    with pytest.raises(ConfigurationError, match="choose another name"):
        queues("taken").open()
    for name in ("", "x" * 201, "a{b", "a}b"):
        with pytest.raises(ConfigurationError, match="name of a queue"):
            queues(name)


@pytest.mark.spec("CNN-02")
def test_thousands_are_dispatched_in_one_call(queues, client):
    queue = queues("thousands")
    assert len(queue.dispatch(some(2_500))) == 2_500
    assert client.xlen(stream("thousands")) == 2_500
    assert queue.queued(["tx-0", "tx-2499", "tx-2500"]) == {"tx-0", "tx-2499"}


@pytest.mark.spec("CNN-08")
def test_dead_letters_are_kept_for_their_days(queues, client):
    queue = queues("days", dead_days=1.0)
    queue.dispatch(some(1))
    queue.settle([(each, DeadLetter("why")) for each in queue.fetch_transactions(1)])
    old = round((time.time() - 2 * 86_400) * 1000)
    client.delete(beside("days", "dead"))
    for place in (f"{old}-0", "*"):
        client.xadd(beside("days", "dead"), {"body": "{}", "ergon-id": place, "ergon-dead-reason": "why"}, id=place)
    assert len(queue.list_dead(DeadLetterQuery())) == 2
    assert [each.id for each in queue.list_dead(DeadLetterQuery(since=time.time() - 3600))] == ["*"]
    assert [each.id for each in queue.list_dead(DeadLetterQuery(until=time.time() - 3600))] == [f"{old}-0"]
    queue._tidied = float("-inf")
    queue.fetch_transactions(1)
    assert [each.id for each in queue.list_dead(DeadLetterQuery())] == ["*"]


@pytest.mark.spec("CNN-08")
def test_a_thousand_dead_letters_are_listed_and_replayed(queues):
    queue = queues("buried")
    queue.dispatch(some(1_100))
    while held := queue.fetch_transactions(1_000):
        assert set(queue.settle([(each, DeadLetter("why")) for each in held])) == {SETTLED}
    everything = queue.list_dead(DeadLetterQuery(), limit=2_000)
    assert [each.id for each in everything] == [f"tx-{number}" for number in range(1_100)]
    assert [each.id for each in queue.list_dead(DeadLetterQuery(id="tx-900"), limit=1)] == ["tx-900"]
    places = [each.place for each in everything]
    results = queue.replay_dead([*places, places[0], "no place", "9-9-9"])
    assert [each.became for each in results] == [Became.REPLAYED] * 1_100 + [Became.GONE] * 3
    assert queue.depth().ready == 1_100
    assert [each.became for each in queue.discard_dead(["no place", places[0]])] == [Became.GONE] * 2
    with pytest.raises(ConnectorError, match="no place"):
        queue.list_dead(DeadLetterQuery(), after="nonsense")


@pytest.mark.spec("CNN-01")
def test_a_release_or_a_due_one_wakes_those_who_sleep_elsewhere(queues):
    queue, other = queues("woken"), queues("woken")
    rung = []

    class Ear:
        def wake(self):
            rung.append(time.monotonic())

        def lost(self, receipts): ...

    queue.dispatch(some(1))
    (held,) = queue.fetch_transactions(1)
    other.listen(Ear())
    assert other.fetch_transactions(1) == []
    queue.settle([(held, Release())])
    until(lambda: rung, "a release is heard", within=3.0)
    (held,) = other.fetch_transactions(1)
    assert other.fetch_transactions(1) == []
    rung.clear()
    other.settle([(held, Later(60.0))])
    until(lambda: rung, "one that is put off is heard, so that its moment is known", within=3.0)
    assert other.fetch_transactions(1) == []


@pytest.mark.spec("CNN-09")
def test_what_is_due_is_heard_at_its_moment(queues):
    queue = queues("due")
    queue.dispatch(some(1))
    (held,) = queue.fetch_transactions(1)
    queue.settle([(held, Later(0.5))])
    began = time.monotonic()
    (again,) = queue.fetch_transactions(1, wait=5.0)
    assert 0.4 < time.monotonic() - began < 2.0
    assert again.deliveries == 1
