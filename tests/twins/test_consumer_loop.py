"""The loop: how much it takes, what it does with what it took, and why it ends."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from ergon_framework.connectors.base import DeadLetter, Delivery, MissingKeyError, Release, UndecodableError
from ergon_framework.task.exceptions import BusinessError, LoopTimeout
from ergon_framework.task.report import End, Kind
from ergon_framework.transaction import Transaction
from tests.twins.world import Pulse, fails, policy, takes


def unsettled(world):
    """How many of the queue's transactions are still claimed by somebody."""
    return world.queue.depth().in_flight


@pytest.mark.spec("CON-31", "CON-19")
@pytest.mark.parametrize("limit, batch", [(1, 10), (3, 2), (4, 2), (5, 1)])
def test_a_limit_starts_exactly_that_many(build, limit, batch):
    world = build().offer(*"abcdefg").run(policy(limit=limit, batch=batch))
    assert len(world.of("process")) == limit
    assert world.report.started == limit
    assert world.report.end is End.LIMIT
    assert unsettled(world) == 0
    assert world.queue.depth().ready == 7 - limit


@pytest.mark.spec("CON-31")
def test_a_limit_of_0_fetches_nothing(build):
    world = build().offer("a").run(policy(limit=0))
    assert world.fetches == []
    assert world.report.end is End.LIMIT


@pytest.mark.spec("CON-31")
def test_a_streaming_loop_ends_at_its_limit_too(build):
    world = build().offer("a", "b", "c").run(policy(limit=2, streaming=True))
    assert world.report.end is End.LIMIT
    assert len(world.outcomes) == 2


@pytest.mark.spec("CON-20", "CON-31")
def test_what_was_fetched_beyond_the_limit_is_released(build):
    world = build(fetches=[lambda fetch: fetch.queue.claim(5)]).offer(*"abcde").run(policy(limit=2))
    assert len(world.of("process")) == 2
    assert Counter(world.kinds().values()) == {"succeeded": 2, "released": 3}
    assert world.settlements().count(Release()) == 3
    assert unsettled(world) == 0
    assert world.queue.depth().ready == 3


@pytest.mark.spec("CON-20")
def test_a_batch_that_is_too_large_is_processed_whole_within_the_concurrency(build):
    world = build(fetches=[lambda fetch: fetch.queue.claim(7)], process=takes(0.01)).offer(*"abcdefg")
    world.run(policy(concurrency=2, batch=2))
    assert world.kinds() == dict.fromkeys("abcdefg", "succeeded")
    assert world.peak <= 2


@pytest.mark.spec("CON-20")
def test_a_batch_that_is_too_large_is_warned_of_once(build, caplog):
    world = build(fetches=[lambda fetch: fetch.queue.claim(3)]).offer("a", "b", "c", "d")
    world.run(policy(concurrency=2, batch=2))
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.spec("CON-20")
def test_the_transactions_of_a_batch_arrive_as_they_were_fetched(build):
    sent = [Transaction(name, {"n": name}, source="queue", tenant="t") for name in "abc"]
    world = build().offer(*sent).run(policy())
    assert sorted((call.transaction for call in world.of("process")), key=lambda t: t.id) == sent


@pytest.mark.spec("CNN-10", "CON-31")
def test_no_fetch_asks_for_more_than_batch_free_slots_and_limit_allow(build):
    world = build(process=takes(0.02)).offer(*"abcdefghij").run(policy(concurrency=3, batch=2, limit=7))
    assert all(1 <= fetch.batch_size <= 2 for fetch in world.fetches)
    assert all(fetch.batch_size <= 3 - fetch.running for fetch in world.fetches)
    brought = 0
    for fetch in world.fetches:
        assert fetch.batch_size <= 7 - brought
        brought += len(fetch.brought)
    assert brought == 7


@pytest.mark.spec("CON-19", "CON-12")
def test_the_loop_timeout_ends_a_loop_that_always_has_work(build):
    def endless(fetch):
        fetch.queue.dispatch([Transaction(f"t{fetch.number}", source="queue")])

    with Pulse() as pulse:
        world = build(process=takes(0.02), fetches=endless).run(
            policy(timeout=0.2, timeout_drain=5.0, batch=1, concurrency=1)
        )
    assert isinstance(world.error, LoopTimeout)
    assert world.report.end is End.TIMEOUT
    assert 0.2 <= world.took < 0.5 + pulse.late
    assert unsettled(world) == 0


@pytest.mark.spec("CON-30")
def test_every_fetched_transaction_has_exactly_one_outcome(build):
    world = build(
        process={"business": fails(BusinessError("no")), "system": fails(OSError()), "twice": fails(OSError())},
        exception={"twice": fails(OSError())},
    )
    world.offer("fine", "business", "system", "twice").run(policy())
    kinds = {"fine": "succeeded", "business": "failed", "system": "failed", "twice": "handler_failed"}
    assert world.kinds() == kinds
    assert len(world.outcomes) == 4
    counts = {kind: number for kind, number in world.report.counts.items() if number}
    assert counts == {Kind.SUCCEEDED: 1, Kind.FAILED: 2, Kind.HANDLER_FAILED: 1}
    assert world.report.finished == 4


def refused(world, reason):
    """That the only transaction was put aside for *reason* before any lifecycle."""
    assert world.steps() == []
    assert world.outcomes == []
    assert world.report.finished == 0
    (sent,) = world.settlements()
    assert isinstance(sent, DeadLetter)
    assert world.report.refused == {reason: 1}
    return sent


@pytest.mark.spec("CON-30")
def test_an_expired_transaction_is_put_aside_without_a_lifecycle(build):
    world = build().offer(Transaction("a", source="queue", expires_at=time.time() - 1)).run(policy())
    assert refused(world, "expired").reason == "expired"


@pytest.mark.spec("CON-30")
def test_a_transaction_that_expires_later_is_processed(build):
    world = build().offer(Transaction("a", source="queue", expires_at=time.time() + 60)).run(policy())
    assert world.kinds() == {"a": "succeeded"}


def changed(**fields):
    """A fetch whose only delivery is not quite what the queue holds."""

    def fetch(fetch):
        (claimed,) = fetch.queue.claim(1)
        return [Delivery(claimed.transaction, claimed.receipt, **({"deliveries": 1} | fields))]

    return [fetch]


@pytest.mark.spec("CON-30", "CNN-04")
def test_a_delivery_past_the_cap_is_put_aside_without_a_lifecycle(build):
    world = build(fetches=changed(deliveries=4))
    refused(world.offer("a").run(policy(max_deliveries=3)), "max_deliveries")


@pytest.mark.spec("CON-30", "CNN-04")
def test_the_last_permitted_delivery_is_processed(build):
    world = build(fetches=changed(deliveries=3))
    assert world.offer("a").run(policy(max_deliveries=3)).kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-30", "CNN-05")
def test_what_cannot_be_decoded_is_put_aside_without_a_lifecycle(build):
    world = build(fetches=changed(error=UndecodableError("not JSON")))
    refused(world.offer("a").run(policy()), "undecodable")


@pytest.mark.spec("SEC-26")
@pytest.mark.invariant
def test_what_needs_a_missing_key_is_put_off_and_said_once_as_an_error(build, caplog):
    world = build(fetches=changed(error=MissingKeyError.of("2026-05")) * 2)
    with caplog.at_level("INFO"):
        seen = world.offer("a", "b").run(policy())
    assert seen.kinds() == {"a": "deferred", "b": "deferred"}
    assert seen.report.refused == {}
    said = [record for record in caplog.records if record.getMessage().startswith("transaction deferred")]
    assert [record.levelname for record in said] == ["ERROR", "INFO"]
    assert "'2026-05'" in said[0].getMessage()
    assert "ERGON_ENCRYPTION__KEYS" in said[0].getMessage()


@pytest.mark.spec("CON-25")
def test_a_policy_is_the_same_before_and_after_a_run(build):
    own = policy(limit=3, process={"max_attempts": 2}, extra={"a": 1})
    before = own.model_dump()
    build(process=fails(OSError())).offer(*"abcd").run(own)
    assert own.model_dump() == before
    assert own.steps.fetch.extra == {"a": 1}


@pytest.mark.spec("CON-25")
def test_one_policy_serves_two_runs_alike(build):
    own = policy(limit=2)
    for world in (build(), build()):
        assert len(world.offer(*"abc").run(own).outcomes) == 2


@pytest.mark.spec("CON-25")
def test_no_failure_disappears(build):
    raised = [OSError("first"), OSError("second")]
    world = build(process=[fails(error) for error in raised]).offer("a")
    world.run(policy(process={"max_attempts": 2}))
    assert world.outcome().error.__cause__ is raised[1]
    history = world.queue.dead_letters[0].failure.history
    assert ["first" in history[0].error, "second" in history[1].error] == [True, True]
