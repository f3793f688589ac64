"""Fetching: its arguments, its failures, and how long an idle loop waits."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from ergon_framework.connectors.base import Delivery, Release
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, FetchException, FetchTimeoutException
from ergon_framework.worker.report import OutcomeKind, StopReason
from tests.both_drivers.harness import (
    Stubborn,
    WakeupDelayMeter,
    make_policy,
    raise_error,
    return_value,
    wait_then_return,
)


def list_pauses(world):
    """Seconds between the end of a fetch and the beginning of the next."""
    return [later.began - earlier.ended for earlier, later in pairwise(world.fetches)]


@pytest.mark.spec("CON-07")
def test_a_fetch_gets_the_batch_size_and_the_extra_arguments_of_the_policy(build):
    world = build().offer("a").run(make_policy(batch=4, extra={"queue": "orders", "depth": 3}))
    assert {fetch.batch_size for fetch in world.fetches} == {4}
    assert all(fetch.extra == {"queue": "orders", "depth": 3} for fetch in world.fetches)


@pytest.mark.spec("CON-07")
def test_extra_is_never_logged(build, caplog):
    caplog.set_level(logging.DEBUG)
    extra = {"password": "swordfish-4711"}
    world = build(fetches=raise_error(OSError("down"))).run(make_policy(extra=extra, fetch={"max_attempts": 2}))
    assert isinstance(world.error, FetchException)
    assert world.fetches[0].extra == extra
    logged = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "swordfish" not in logged + str(world.error) + repr(make_policy(extra=extra))


@pytest.mark.spec("CON-07")
def test_a_failed_fetch_is_retried_under_its_own_policy(build):
    world = build(fetches=[raise_error(OSError("down")), raise_error(OSError("down"))]).offer("a")
    world.run(make_policy(fetch={"max_attempts": 3}, process={"max_attempts": 1}))
    assert world.error is None
    assert world.kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-08", "CON-19")
def test_an_exhausted_fetch_budget_ends_the_loop_with_a_fetch_exception(build):
    raised = OSError("down")
    world = build(fetches=raise_error(raised)).run(make_policy(fetch={"max_attempts": 3}, streaming=True))
    assert len(world.fetches) == 3
    assert type(world.error) is FetchException
    assert world.error.__cause__ is raised
    assert world.error.report.stop_reason is StopReason.FETCH


@pytest.mark.spec("CON-08")
def test_the_fetch_budget_is_for_one_fetch_and_not_for_the_loop(build):
    down = raise_error(OSError("down"))
    world = build(fetches=[down, None, down, None, down, None]).offer("a", "b", "c")
    world.run(make_policy(concurrency=1, batch=1, fetch={"max_attempts": 2}))
    assert world.error is None
    assert world.kinds() == dict.fromkeys("abc", "succeeded")


@pytest.mark.spec("CON-08")
@pytest.mark.parametrize("error", [BusinessError("no such queue"), ConfigurationError("wrong kind of queue")])
def test_a_permanent_fetch_error_ends_the_loop_immediately(build, error):
    world = build(fetches=raise_error(error)).run(make_policy(fetch={"max_attempts": 5}, streaming=True))
    assert len(world.fetches) == 1
    assert isinstance(world.error, FetchException)
    assert error in (world.error.__cause__, world.error)


@pytest.mark.spec("CON-08", "CON-12")
def test_a_hanging_fetch_raises_a_fetch_timeout(build):
    world = build()
    world.queue._script = wait_then_return(world.signal())
    world.run(make_policy(fetch={"timeout": 0.05, "max_attempts": 2, "exit_grace": 0.05}))
    assert type(world.error) is FetchTimeoutException
    assert issubclass(FetchTimeoutException, FetchException)
    assert world.error.report.stop_reason is StopReason.FETCH
    assert world.duration_seconds < 1.0


@pytest.mark.spec("CON-08")
def test_a_timed_out_fetch_that_has_returned_is_retried(build):
    world = build(fetches=[wait_then_return(0.1, [])]).offer("a")
    world.run(make_policy(fetch={"timeout": 0.03, "max_attempts": 2}))
    assert world.error is None
    assert world.kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-08", "CON-30")
def test_deliveries_of_a_late_fetch_are_released_and_never_processed(build):
    def late(fetch):
        deliveries = fetch.queue.claim(1)
        yield Stubborn(0.1)
        return deliveries

    world = build(fetches=[late]).offer("a")
    world.start(make_policy(fetch={"timeout": 0.03, "max_attempts": 3}, streaming=True))
    world.until(lambda: world.queue.settled)
    assert world.settlements("a")[0] == Release()
    world.until(lambda: world.kinds().get("a") == "succeeded")
    assert len(world.of("process")) == 1


@pytest.mark.spec("CON-08", "CON-30")
def test_work_in_flight_is_finished_when_the_fetch_fails_permanently(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = wait_then_return(go)

    def fail(fetch):
        go.set()
        raise OSError("down")

    world.queue._script = [None, fail, fail]
    world.offer("a").run(make_policy(concurrency=2, batch=1, fetch={"max_attempts": 2}))
    assert isinstance(world.error, FetchException)
    assert world.kinds() == {"a": "succeeded"}
    assert world.error.report.counts[OutcomeKind.SUCCEEDED] == 1


@pytest.mark.spec("CON-08")
def test_a_lost_connection_uses_no_fetch_budget_of_a_streaming_loop_and_is_not_an_empty_fetch(build):
    lost = raise_error(ConnectionLostError("the line is down"))
    world = build(fetches=[lost] * 8).offer("a")
    world.start(make_policy(fetch={"max_attempts": 2}, streaming=True))
    world.until(lambda: world.kinds() == {"a": "succeeded"})
    world.stop().finish()
    assert world.error is None
    assert all(fetch.ended is None for fetch in world.fetches[:8])
    assert world.report.empty_fetches == sum(fetch.transaction_ids == () for fetch in world.fetches[8:])


@pytest.mark.spec("CON-08")
def test_a_lost_connection_does_not_count_as_an_empty_queue_without_streaming(build):
    world = build(fetches=raise_error(ConnectionLostError("the line is down"))).run(
        make_policy(fetch={"max_attempts": 3})
    )
    assert isinstance(world.error, FetchException)
    assert world.report.empty_fetches == 0
    assert len(world.fetches) == 3


@pytest.mark.spec("CON-09", "CON-19")
def test_an_empty_fetch_ends_a_loop_that_does_not_stream(build):
    world = build().run(make_policy())
    assert len(world.fetches) == 1
    assert world.report.stop_reason is StopReason.EMPTY
    assert world.report.empty_fetches == 1


@pytest.mark.spec("CON-09")
def test_the_queue_is_emptied_before_the_loop_ends(build):
    world = build().offer(*"abcdefg").run(make_policy(concurrency=2, batch=2))
    assert world.report.stop_reason is StopReason.EMPTY
    assert world.kinds() == dict.fromkeys("abcdefg", "succeeded")


@pytest.mark.spec("CON-10")
def test_consecutive_empty_fetches_back_off_up_to_the_cap(build):
    empty_queue = {"backoff": 0.03, "multiplier": 2.0, "cap": 0.1}
    with WakeupDelayMeter() as wakeup_delay:
        world = build().start(make_policy(streaming=True, empty_queue=empty_queue))
        world.until(lambda: len(world.fetches) >= 5)
    for wait, minimum in zip(list_pauses(world), [0.03, 0.06, 0.1, 0.1], strict=False):
        assert minimum <= wait < minimum + 0.05 + wakeup_delay.late


@pytest.mark.spec("CON-10")
def test_a_fetch_with_deliveries_resets_the_wait(build):
    empty_queue = {"backoff": 0.03, "multiplier": 4.0, "cap": 10.0}
    world = build(fetches=[return_value([]), return_value([]), lambda fetch: fetch.queue.claim(1), return_value([])])
    world.queue.listen = lambda listener: lambda: None  # no notification shortens the waits
    with WakeupDelayMeter() as wakeup_delay:
        world.offer("a").start(make_policy(streaming=True, empty_queue=empty_queue))
        world.until(lambda: len(world.fetches) >= 5)
    waits = list_pauses(world)
    assert waits[0] >= 0.03
    assert waits[1] >= 0.12
    assert waits[2] < 0.03 + wakeup_delay.late
    assert 0.03 <= waits[3] < 0.12 + wakeup_delay.late


@pytest.mark.spec("CON-10")
def test_an_arrival_ends_the_wait(build):
    empty_queue = {"backoff": 10.0, "multiplier": 1.0, "cap": 10.0}
    world = build().start(make_policy(streaming=True, empty_queue=empty_queue))
    world.until(lambda: world.fetches and world.fetches[0].ended)
    world.offer("a").until(lambda: world.of("process"), seconds=1.0)


@pytest.mark.spec("CON-10")
def test_an_arrival_during_an_empty_fetch_is_processed_immediately(build):
    def fetch_nothing_then_dispatch(fetch):
        fetch.queue.dispatch([Transaction(id="a", source="queue")])
        return []

    empty_queue = {"backoff": 10.0, "multiplier": 1.0, "cap": 10.0}
    world = build(fetches=[fetch_nothing_then_dispatch]).start(make_policy(streaming=True, empty_queue=empty_queue))
    world.until(lambda: world.of("process"), seconds=1.0)


INVALID_DELIVERIES = [Transaction(id="x", source="queue"), {"id": "x"}, Delivery({"id": "x"}, "x")]


@pytest.mark.spec("DX-08", "CON-08")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("invalid", INVALID_DELIVERIES, ids=lambda junk: type(junk).__name__)
def test_a_fetch_with_an_invalid_delivery_ends_the_loop_and_releases_the_rest(build, invalid, streaming):
    def fetch(fetch):
        if fetch.number == 0:
            return fetch.queue.claim(1)
        deliveries = fetch.queue.claim(fetch.batch_size)
        return [deliveries[0], invalid, *deliveries[1:]]

    world = build(fetches=fetch, process={"a": wait_then_return(0.05)})
    world.offer("a", "b", "c").run(make_policy(concurrency=4, streaming=streaming))
    assert isinstance(world.error, FetchException)
    assert f"item 2 of 3 is a {type(invalid).__name__}" in str(world.error)
    assert "expected Delivery(" in str(world.error)
    assert world.kinds() == {"a": "succeeded", "b": "released", "c": "released"}
    assert (world.queue.depth().in_flight, world.queue.depth().ready) == (0, 2)
