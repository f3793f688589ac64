"""The loop: how much it fetches, how it processes it, and why it ends."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from ergon_framework.connectors.base import DeadLetter, Delivery, MissingKeyError, Release, UndecodableError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, LoopTimeout
from ergon_framework.worker.report import OutcomeKind, StopReason
from tests.both_drivers.harness import WakeupDelayMeter, make_policy, raise_error, wait_then_return


def count_unsettled(world):
    """Return the number of the queue's transactions that are still claimed."""
    return world.queue.depth().in_flight


@pytest.mark.spec("CON-31", "CON-19")
@pytest.mark.parametrize("limit, batch", [(1, 10), (3, 2), (4, 2), (5, 1)])
def test_a_limit_starts_exactly_that_many_transactions(build, limit, batch):
    world = build().offer(*"abcdefg").run(make_policy(limit=limit, batch=batch))
    assert len(world.of("process")) == limit
    assert world.report.started == limit
    assert world.report.stop_reason is StopReason.LIMIT
    assert count_unsettled(world) == 0
    assert world.queue.depth().ready == 7 - limit


@pytest.mark.spec("CON-31")
def test_a_limit_of_0_fetches_nothing(build):
    world = build().offer("a").run(make_policy(limit=0))
    assert world.fetches == []
    assert world.report.stop_reason is StopReason.LIMIT


@pytest.mark.spec("CON-31")
def test_a_streaming_loop_ends_at_its_limit_too(build):
    world = build().offer("a", "b", "c").run(make_policy(limit=2, streaming=True))
    assert world.report.stop_reason is StopReason.LIMIT
    assert len(world.outcomes) == 2


@pytest.mark.spec("CON-20", "CON-31")
def test_deliveries_beyond_the_limit_are_released(build):
    world = build(fetches=[lambda fetch: fetch.queue.claim(5)]).offer(*"abcde").run(make_policy(limit=2))
    assert len(world.of("process")) == 2
    assert Counter(world.kinds().values()) == {"succeeded": 2, "released": 3}
    assert world.settlements().count(Release()) == 3
    assert count_unsettled(world) == 0
    assert world.queue.depth().ready == 3


@pytest.mark.spec("CON-20")
def test_a_batch_that_is_too_large_is_processed_whole_within_the_concurrency(build):
    world = build(fetches=[lambda fetch: fetch.queue.claim(7)], process=wait_then_return(0.01)).offer(*"abcdefg")
    world.run(make_policy(concurrency=2, batch=2))
    assert world.kinds() == dict.fromkeys("abcdefg", "succeeded")
    assert world.peak <= 2


@pytest.mark.spec("CON-20")
def test_a_batch_that_is_too_large_is_logged_once_as_a_warning(build, caplog):
    world = build(fetches=[lambda fetch: fetch.queue.claim(3)]).offer("a", "b", "c", "d")
    world.run(make_policy(concurrency=2, batch=2))
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.spec("CON-20")
def test_handlers_get_the_transactions_as_they_were_fetched(build):
    sent = [Transaction({"n": name}, id=name, source="queue", tenant="t") for name in "abc"]
    world = build().offer(*sent).run(make_policy())
    assert sorted((call.transaction for call in world.of("process")), key=lambda t: t.id) == sent


@pytest.mark.spec("CNN-10", "CON-31")
def test_a_fetch_never_exceeds_batch_size_free_slots_and_limit(build):
    world = build(process=wait_then_return(0.02)).offer(*"abcdefghij").run(make_policy(concurrency=3, batch=2, limit=7))
    assert all(1 <= fetch.batch_size <= 2 for fetch in world.fetches)
    assert all(fetch.batch_size <= 3 - fetch.running for fetch in world.fetches)
    fetched = 0
    for fetch in world.fetches:
        assert fetch.batch_size <= 7 - fetched
        fetched += len(fetch.transaction_ids)
    assert fetched == 7


@pytest.mark.spec("CON-19", "CON-12")
def test_the_loop_timeout_ends_a_loop_that_always_has_work(build):
    def dispatch_more(fetch):
        fetch.queue.dispatch([Transaction(id=f"t{fetch.number}", source="queue")])

    with WakeupDelayMeter() as wakeup_delay:
        world = build(process=wait_then_return(0.02), fetches=dispatch_more).run(
            make_policy(timeout=0.2, timeout_drain=5.0, batch=1, concurrency=1)
        )
    assert isinstance(world.error, LoopTimeout)
    assert world.report.stop_reason is StopReason.TIMEOUT
    assert 0.2 <= world.duration_seconds < 0.5 + wakeup_delay.late
    assert count_unsettled(world) == 0


@pytest.mark.spec("CON-30")
def test_every_fetched_transaction_has_exactly_one_outcome(build):
    world = build(
        process={
            "business": raise_error(BusinessError("no")),
            "system": raise_error(OSError()),
            "twice": raise_error(OSError()),
        },
        exception={"twice": raise_error(OSError())},
    )
    world.offer("fine", "business", "system", "twice").run(make_policy())
    kinds = {"fine": "succeeded", "business": "failed", "system": "failed", "twice": "handler_failed"}
    assert world.kinds() == kinds
    assert len(world.outcomes) == 4
    counts = {kind: number for kind, number in world.report.counts.items() if number}
    assert counts == {OutcomeKind.SUCCEEDED: 1, OutcomeKind.FAILED: 2, OutcomeKind.EXCEPTION_HANDLER_FAILED: 1}
    assert world.report.finished == 4


def check_rejection(world, reason):
    """Check that the only transaction was dead-lettered for *reason* before any lifecycle."""
    assert world.steps() == []
    assert world.outcomes == []
    assert world.report.finished == 0
    (settlement,) = world.settlements()
    assert isinstance(settlement, DeadLetter)
    assert world.report.rejected == {reason: 1}
    return settlement


@pytest.mark.spec("CON-30")
def test_an_expired_transaction_is_dead_lettered_without_a_lifecycle(build):
    world = build().offer(Transaction(id="a", source="queue", expires_at=time.time() - 1)).run(make_policy())
    assert check_rejection(world, "expired").reason == "expired"


@pytest.mark.spec("CON-30")
def test_a_transaction_that_expires_later_is_processed(build):
    world = build().offer(Transaction(id="a", source="queue", expires_at=time.time() + 60)).run(make_policy())
    assert world.kinds() == {"a": "succeeded"}


def make_changed_fetch(**fields):
    """Return a fetch whose only delivery differs from the queue's in *fields*."""

    def fetch(fetch):
        (claimed,) = fetch.queue.claim(1)
        return [Delivery(claimed.transaction, claimed.receipt, **({"deliveries": 1} | fields))]

    return [fetch]


@pytest.mark.spec("CON-30", "CNN-04")
def test_a_delivery_beyond_max_deliveries_is_dead_lettered_without_a_lifecycle(build):
    world = build(fetches=make_changed_fetch(deliveries=4))
    check_rejection(world.offer("a").run(make_policy(max_deliveries=3)), "max_deliveries")


@pytest.mark.spec("CON-30", "CNN-04")
def test_the_last_permitted_delivery_is_processed(build):
    world = build(fetches=make_changed_fetch(deliveries=3))
    assert world.offer("a").run(make_policy(max_deliveries=3)).kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-30", "CNN-05")
def test_an_undecodable_delivery_is_dead_lettered_without_a_lifecycle(build):
    world = build(fetches=make_changed_fetch(error=UndecodableError("not JSON")))
    check_rejection(world.offer("a").run(make_policy()), "undecodable")


@pytest.mark.spec("SEC-26")
@pytest.mark.invariant
def test_a_delivery_with_a_missing_key_is_deferred_and_logged_once_as_an_error(build, caplog):
    world = build(fetches=make_changed_fetch(error=MissingKeyError.for_key("2026-05")) * 2)
    with caplog.at_level("INFO"):
        finished_world = world.offer("a", "b").run(make_policy())
    assert finished_world.kinds() == {"a": "deferred", "b": "deferred"}
    assert finished_world.report.rejected == {}
    records = [record for record in caplog.records if record.getMessage().startswith("transaction deferred")]
    assert [record.levelname for record in records] == ["ERROR", "INFO"]
    assert "'2026-05'" in records[0].getMessage()
    assert "ERGON_ENCRYPTION__KEYS" in records[0].getMessage()


@pytest.mark.spec("CON-25")
def test_a_run_does_not_change_its_policy(build):
    loop_policy = make_policy(limit=3, process={"max_attempts": 2}, extra={"a": 1})
    before = loop_policy.model_dump()
    build(process=raise_error(OSError())).offer(*"abcd").run(loop_policy)
    assert loop_policy.model_dump() == before
    assert loop_policy.steps.fetch.extra == {"a": 1}


@pytest.mark.spec("CON-25")
def test_one_policy_gives_the_same_result_in_two_runs(build):
    loop_policy = make_policy(limit=2)
    for world in (build(), build()):
        assert len(world.offer(*"abc").run(loop_policy).outcomes) == 2


@pytest.mark.spec("CON-25")
def test_the_dead_letter_has_the_failure_of_every_attempt(build):
    raised = [OSError("first"), OSError("second")]
    world = build(process=[raise_error(error) for error in raised]).offer("a")
    world.run(make_policy(process={"max_attempts": 2}))
    assert world.outcome().error.__cause__ is raised[1]
    history = world.queue.dead_letters[0].failure.history
    assert ["first" in history[0].error, "second" in history[1].error] == [True, True]
