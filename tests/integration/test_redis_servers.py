"""Check servers with various settings: their reported durability, and their errors when they cannot serve."""

from __future__ import annotations

import time

import pytest

from ergon_framework.connectors.base import Ack, ConnectorError, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.integration.redises import QueueFactory, make_part_key, make_stream_key, run_server, wait_until
from tests.log_events import get_event

SETTLED, FAILED = SettleResult.SETTLED, SettleResult.FAILED


@pytest.fixture(scope="module")
def server():
    with run_server() as server:
        yield server


@pytest.fixture
def queues(server):
    queues = QueueFactory(server)
    yield queues
    queues.close()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client
        client.config_set("maxmemory", "0")
        client.config_set("appendfsync", "always")


def make_transactions(count, size=10):
    return [Transaction({"text": "x" * size}, id=f"tx-{number}") for number in range(count)]


@pytest.mark.spec("CNN-17")
@pytest.mark.parametrize(
    "setting, value, text",
    [
        ("appendfsync", "always", "confirmed data survives a power loss"),
        ("appendfsync", "everysec", "the last two seconds"),
        ("appendfsync", "no", "data still in the kernel may be lost"),
        ("appendonly", "no", "all data since the last snapshot may be lost"),
    ],
)
def test_durability_states_what_a_power_loss_can_lose(request, caplog, setting, value, text):
    queues, client = request.getfixturevalue("queues"), request.getfixturevalue("client")
    client.config_set(setting, value)
    durable = value == "always"
    try:
        queue = queues(f"durable-{setting}-{value}")
        assert (queue.capabilities.durable, queue.durability) == (None, None)
        caplog.set_level("INFO")
        queue.open()
        assert queue.capabilities.durable is durable
        assert text in queue.durability
        (record,) = [record for record in caplog.records if get_event(record) == "redis durability"]
        assert (record.levelname, record.summary) == ("INFO" if durable else "WARNING", queue.durability)
    finally:
        client.config_set("appendonly", "yes")


@pytest.mark.spec("CNN-17")
def test_durability_is_unknown_when_the_settings_cannot_be_read(queues, client, server):
    client.acl_setuser("worker", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config"])
    queue = queues("hidden", url=f"redis://worker:any@127.0.0.1:{server.port}/0")
    queue.open()
    assert queue.capabilities.durable is None
    assert "unknown" in queue.durability


@pytest.mark.spec("CNN-02")
def test_a_server_that_would_evict_the_queue_is_rejected(queues, client):
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", "100mb")
    try:
        with pytest.raises(ConfigurationError, match="maxmemory-policy to noeviction"):
            queues("evicted").open()
        client.config_set("maxmemory-policy", "volatile-lru")  # no key of the framework has a time to live
        queues("kept").open()
    finally:
        client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.spec("CNN-02", "CNN-13")
def test_a_server_with_full_memory_rejects_new_messages_and_accepts_acks(queues, client):
    queue = queues("full")
    queue.dispatch(make_transactions(7))
    deliveries = queue.fetch_transactions(7)
    client.config_set("maxmemory", "1mb")
    for count in (1, 3):
        with pytest.raises(ConnectionLostError, match="memory is full") as caught:
            queue.dispatch(make_transactions(count))
        assert not caught.value.final
    settlements = [
        (deliveries[0], Ack()),
        (deliveries[1], Defer(0)),
        (deliveries[2], Defer(9)),
        (deliveries[3], DeadLetter("why")),
    ]
    # Acks free memory and must work; messages that would have to be written elsewhere stay where they are.
    assert queue.settle(settlements) == [SETTLED, FAILED, FAILED, FAILED]
    assert queue.depth().in_flight == 6
    client.config_set("maxmemory", "0")
    assert queue.settle(settlements[1:]) == [SETTLED] * 3
    assert queue.settle([(delivery, Ack()) for delivery in deliveries[4:]]) == [SETTLED] * 3
    (record,) = queue.list_dead(DeadLetterQuery())
    client.config_set("maxmemory", "1mb")
    (result,) = queue.replay_dead([record.handle])
    assert (result.outcome, "memory" in result.message) == (DeadLetterResult.FAILED, True)
    client.config_set("maxmemory", "0")
    assert queue.replay_dead([record.handle])[0].outcome is DeadLetterResult.REPLAYED


@pytest.mark.spec("CNN-02")
def test_a_server_with_full_memory_accepts_none_of_a_batch(queues, client):
    queue = queues("full-many")
    queue.open()
    used_bytes = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory", used_bytes + 200_000)
    rejections = 0
    while not rejections:
        try:
            queue.dispatch(make_transactions(50, 1_000))
        except ConnectionLostError:
            rejections += 1
    assert client.xlen(make_stream_key("full-many")) % 50 == 0


@pytest.mark.spec("CNN-07")
def test_a_replica_is_reported_as_a_replica(queues, server):
    with run_server(replicaof=f"127.0.0.1 {server.port}", appendonly="no") as replica:
        with replica.client() as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
        queue = queues("replicated", url=replica.url)
        for call in (
            queue.open,
            lambda: queue.dispatch(make_transactions(1)),
            lambda: queue.dispatch(make_transactions(2)),
        ):
            with pytest.raises(ConnectionLostError, match="the primary's address"):
                call()
        with replica.client() as client:
            client.slaveof()  # it is the primary from now on
        queue.dispatch(make_transactions(1))
        assert len(queue.fetch_transactions(5)) == 1


@pytest.mark.spec("CNN-07")
def test_a_loading_server_is_waited_for():
    with run_server() as server:
        with server.client() as client:
            pipe = client.pipeline(transaction=False)
            for number in range(2_000):
                pipe.set(f"some-{number}", "x" * 100)
            pipe.execute()
            client.bgrewriteaof()
            wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "it is rewritten")
        queues = QueueFactory(server)
        queue = queues("loading")
        queue.dispatch(make_transactions(1))
        server.settings |= {"key-load-delay": "1000", "loading-process-events-interval-bytes": "1024"}
        server.stop()
        server.spawn()
        messages, deadline = [], time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                deliveries = queue.fetch_transactions(1)
                break
            except ConnectionLostError as error:
                messages.append(str(error))
        assert any("loading" in message for message in messages), messages
        assert [delivery.transaction.id for delivery in deliveries] == ["tx-0"]
        queues.close()


@pytest.mark.spec("CNN-07")
def test_lost_scripts_and_groups_are_created_again(queues, client):
    queue = queues("flushed")
    queue.dispatch(make_transactions(2))
    first, second = queue.fetch_transactions(2)
    client.script_flush()
    assert queue.settle([(first, Ack())]) == [SETTLED]
    client.flushall()
    assert queue.settle([(second, Ack())]) == [SettleResult.LOST]
    client.flushall()
    assert queue.extend([second]) == [None]
    client.flushall()
    assert queue.depth().ready == 0
    client.flushall()
    assert queue.fetch_transactions(1) == []
    client.flushall()
    queue.dispatch(make_transactions(1))
    assert len(queue.fetch_transactions(1)) == 1


@pytest.mark.spec("CNN-02")
def test_a_wrong_password_is_reported_without_the_password(queues):
    with run_server(requirepass="right", appendonly="no") as server:
        wrong_url = f"redis://:wrong@127.0.0.1:{server.port}"
        for url, reason in ((wrong_url, "check the user, password and rights"), (server.url, "")):
            queue = queues("secret", url=url)
            if reason:
                with pytest.raises(ConfigurationError, match=reason) as caught:
                    queue.open()
                assert "wrong@" not in str(caught.value)
            else:
                queue.open()
        for url in ("http://:secret@x", "redis://:secret@x:port"):
            with pytest.raises(ConfigurationError, match="the address of the server is invalid") as caught:
                queues("secret", url=url).open()
            assert "secret" not in str(caught.value)


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
def test_a_key_of_another_type_and_invalid_queue_names_are_rejected(queues, client):
    client.set(make_stream_key("taken"), "a text")
    with pytest.raises(ConfigurationError, match="choose another name"):
        queues("taken").open()
    for name, reason in (
        ("", "1 to 200 characters, not 0"),
        ("x" * 201, "not 201"),
        ("a{b", "braces"),
        ("a}b", "braces"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            queues(name)


@pytest.mark.spec("CNN-02")
def test_thousands_are_dispatched_in_one_call(queues, client):
    queue = queues("thousands")
    assert len(queue.dispatch(make_transactions(2_500))) == 2_500
    assert client.xlen(make_stream_key("thousands")) == 2_500
    assert queue.find_queued(["tx-0", "tx-2499", "tx-2500"]) == {"tx-0", "tx-2499"}


@pytest.mark.spec("CNN-08")
def test_dead_letters_are_kept_for_the_configured_days(queues, client):
    queue = queues("days", dead_days=1.0)
    queue.dispatch(make_transactions(1))
    queue.settle([(letter, DeadLetter("why")) for letter in queue.fetch_transactions(1)])
    old = round((time.time() - 2 * 86_400) * 1000)
    client.delete(make_part_key("days", "dead"))
    for entry_id in (f"{old}-0", "*"):
        client.xadd(
            make_part_key("days", "dead"), {"body": "{}", "ergon-id": entry_id, "ergon-dead-reason": "why"}, id=entry_id
        )
    assert len(queue.list_dead(DeadLetterQuery())) == 2
    assert [letter.id for letter in queue.list_dead(DeadLetterQuery(since=time.time() - 3600))] == ["*"]
    assert [letter.id for letter in queue.list_dead(DeadLetterQuery(until=time.time() - 3600))] == [f"{old}-0"]
    queue._last_cleanup = float("-inf")
    queue.fetch_transactions(1)
    assert [letter.id for letter in queue.list_dead(DeadLetterQuery())] == ["*"]


@pytest.mark.spec("CNN-08")
def test_a_thousand_dead_letters_are_listed_and_replayed(queues):
    queue = queues("dead")
    queue.dispatch(make_transactions(1_100))
    while deliveries := queue.fetch_transactions(1_000):
        assert set(queue.settle([(item, DeadLetter("why")) for item in deliveries])) == {SETTLED}
    letters = queue.list_dead(DeadLetterQuery(), limit=2_000)
    assert [item.id for item in letters] == [f"tx-{number}" for number in range(1_100)]
    assert [item.id for item in queue.list_dead(DeadLetterQuery(id="tx-900"), limit=1)] == ["tx-900"]
    handles = [item.handle for item in letters]
    results = queue.replay_dead([*handles, handles[0], "no place", "9-9-9"])
    assert [item.outcome for item in results] == [DeadLetterResult.REPLAYED] * 1_100 + [DeadLetterResult.GONE] * 3
    assert queue.depth().ready == 1_100
    assert [item.outcome for item in queue.discard_dead(["no place", handles[0]])] == [DeadLetterResult.GONE] * 2
    with pytest.raises(ConnectorError, match="is not the handle of a dead letter"):
        queue.list_dead(DeadLetterQuery(), after="nonsense")


@pytest.mark.spec("CNN-01")
def test_a_release_or_a_due_message_wakes_waiting_workers_elsewhere(queues):
    queue, other = queues("woken"), queues("woken")
    wake_times = []

    class RecordingListener:
        def wake(self):
            wake_times.append(time.monotonic())

        def on_lost(self, receipts): ...

    queue.dispatch(make_transactions(1))
    (delivery,) = queue.fetch_transactions(1)
    other.listen(RecordingListener())
    assert other.fetch_transactions(1) == []
    queue.settle([(delivery, Release())])
    wait_until(lambda: wake_times, "a release is heard", within=3.0)
    (delivery,) = other.fetch_transactions(1)
    assert other.fetch_transactions(1) == []
    wake_times.clear()
    other.settle([(delivery, Defer(60.0))])
    wait_until(lambda: wake_times, "the deferral is notified, so that the due time is known", within=3.0)
    assert other.fetch_transactions(1) == []


@pytest.mark.spec("CNN-09")
def test_a_due_message_is_delivered_on_time(queues):
    queue = queues("due")
    queue.dispatch(make_transactions(1))
    (delivery,) = queue.fetch_transactions(1)
    queue.settle([(delivery, Defer(0.5))])
    started_at = time.monotonic()
    (again,) = queue.fetch_transactions(1, wait=5.0)
    assert 0.4 < time.monotonic() - started_at < 2.0
    assert again.deliveries == 1
