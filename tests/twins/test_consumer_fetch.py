"""Fetching: how it is asked, how it fails, and how long an idle loop waits."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from ergon_framework.connectors.base import Delivery, Release
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.task.exceptions import BusinessError, FetchException, FetchTimeoutException
from ergon_framework.task.report import End, Kind
from ergon_framework.transaction import Transaction
from tests.twins.world import Pulse, Stubborn, fails, gives, policy, takes


def gaps(world):
    """Seconds between the end of a fetch and the beginning of the next."""
    return [later.began - earlier.ended for earlier, later in pairwise(world.fetches)]


@pytest.mark.spec("CON-07")
def test_a_fetch_is_asked_for_a_batch_with_the_extra_of_the_policy(build):
    world = build().offer("a").run(policy(batch=4, extra={"queue": "orders", "depth": 3}))
    assert {fetch.batch_size for fetch in world.fetches} == {4}
    assert all(fetch.extra == {"queue": "orders", "depth": 3} for fetch in world.fetches)


@pytest.mark.spec("CON-07")
def test_extra_is_never_logged(build, caplog):
    caplog.set_level(logging.DEBUG)
    extra = {"password": "swordfish-4711"}
    world = build(fetches=fails(OSError("down"))).run(policy(extra=extra, fetch={"max_attempts": 2}))
    assert isinstance(world.error, FetchException)
    assert world.fetches[0].extra == extra
    logged = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "swordfish" not in logged + str(world.error) + repr(policy(extra=extra))


@pytest.mark.spec("CON-07")
def test_a_failed_fetch_is_retried_under_its_own_policy(build):
    world = build(fetches=[fails(OSError("down")), fails(OSError("down"))]).offer("a")
    world.run(policy(fetch={"max_attempts": 3}, process={"max_attempts": 1}))
    assert world.error is None
    assert world.kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-08", "CON-19")
def test_a_spent_fetch_budget_ends_the_loop_with_a_fetch_exception(build):
    raised = OSError("down")
    world = build(fetches=fails(raised)).run(policy(fetch={"max_attempts": 3}, streaming=True))
    assert len(world.fetches) == 3
    assert type(world.error) is FetchException
    assert world.error.__cause__ is raised
    assert world.error.report.end is End.FETCH


@pytest.mark.spec("CON-08")
def test_the_fetch_budget_is_for_one_fetch_and_not_for_the_loop(build):
    down = fails(OSError("down"))
    world = build(fetches=[down, None, down, None, down, None]).offer("a", "b", "c")
    world.run(policy(concurrency=1, batch=1, fetch={"max_attempts": 2}))
    assert world.error is None
    assert world.kinds() == dict.fromkeys("abc", "succeeded")


@pytest.mark.spec("CON-08")
@pytest.mark.parametrize("error", [BusinessError("no such queue"), ConfigurationError("wrong kind of queue")])
def test_a_fetch_error_that_no_retry_can_mend_ends_the_loop_at_once(build, error):
    world = build(fetches=fails(error)).run(policy(fetch={"max_attempts": 5}, streaming=True))
    assert len(world.fetches) == 1
    assert isinstance(world.error, FetchException)
    assert error in (world.error.__cause__, world.error)


@pytest.mark.spec("CON-08", "CON-12")
def test_a_fetch_that_does_not_answer_becomes_a_fetch_timeout(build):
    world = build()
    world.queue._script = takes(world.signal())
    world.run(policy(fetch={"timeout": 0.05, "max_attempts": 2, "abandon_grace": 0.05}))
    assert type(world.error) is FetchTimeoutException
    assert issubclass(FetchTimeoutException, FetchException)
    assert world.error.report.end is End.FETCH
    assert world.took < 1.0


@pytest.mark.spec("CON-08")
def test_a_timed_out_fetch_that_has_left_is_tried_again(build):
    world = build(fetches=[takes(0.1, [])]).offer("a")
    world.run(policy(fetch={"timeout": 0.03, "max_attempts": 2}))
    assert world.error is None
    assert world.kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-08", "CON-30")
def test_what_a_late_fetch_brings_is_released_and_never_processed(build):
    def late(fetch):
        found = fetch.queue.claim(1)
        yield Stubborn(0.1)
        return found

    world = build(fetches=[late]).offer("a")
    world.start(policy(fetch={"timeout": 0.03, "max_attempts": 3}, streaming=True))
    world.until(lambda: world.queue.settled)
    assert world.settlements("a")[0] == Release()
    world.until(lambda: world.kinds().get("a") == "succeeded")
    assert len(world.of("process")) == 1


@pytest.mark.spec("CON-08", "CON-30")
def test_work_in_flight_is_finished_when_the_fetch_fails_for_good(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = takes(go)

    def down(fetch):
        go.set()
        raise OSError("down")

    world.queue._script = [None, down, down]
    world.offer("a").run(policy(concurrency=2, batch=1, fetch={"max_attempts": 2}))
    assert isinstance(world.error, FetchException)
    assert world.kinds() == {"a": "succeeded"}
    assert world.error.report.counts[Kind.SUCCEEDED] == 1


@pytest.mark.spec("CON-08")
def test_a_lost_connection_spends_no_budget_of_a_streaming_loop_and_is_no_empty_fetch(build):
    lost = fails(ConnectionLost("the line is down"))
    world = build(fetches=[lost] * 8).offer("a")
    world.start(policy(fetch={"max_attempts": 2}, streaming=True))
    world.until(lambda: world.kinds() == {"a": "succeeded"})
    world.stop().finish()
    assert world.error is None
    assert all(fetch.ended is None for fetch in world.fetches[:8])
    assert world.report.empty_fetches == sum(fetch.brought == () for fetch in world.fetches[8:])


@pytest.mark.spec("CON-08")
def test_a_lost_connection_is_no_empty_queue_to_a_loop_that_does_not_stream(build):
    world = build(fetches=fails(ConnectionLost("the line is down"))).run(policy(fetch={"max_attempts": 3}))
    assert isinstance(world.error, FetchException)
    assert world.report.empty_fetches == 0
    assert len(world.fetches) == 3


@pytest.mark.spec("CON-09", "CON-19")
def test_an_empty_fetch_ends_a_loop_that_does_not_stream(build):
    world = build().run(policy())
    assert len(world.fetches) == 1
    assert world.report.end is End.EMPTY
    assert world.report.empty_fetches == 1


@pytest.mark.spec("CON-09")
def test_the_queue_is_emptied_before_the_loop_ends(build):
    world = build().offer(*"abcdefg").run(policy(concurrency=2, batch=2))
    assert world.report.end is End.EMPTY
    assert world.kinds() == dict.fromkeys("abcdefg", "succeeded")


@pytest.mark.spec("CON-10")
def test_empty_fetches_in_a_row_wait_longer_and_longer_up_to_the_cap(build):
    empty = {"backoff": 0.03, "multiplier": 2.0, "cap": 0.1}
    with Pulse() as pulse:
        world = build().start(policy(streaming=True, empty_queue=empty))
        world.until(lambda: len(world.fetches) >= 5)
    for wait, least in zip(gaps(world), [0.03, 0.06, 0.1, 0.1], strict=False):
        assert least <= wait < least + 0.05 + pulse.late


@pytest.mark.spec("CON-10")
def test_a_fetch_that_brings_something_resets_the_wait(build):
    empty = {"backoff": 0.03, "multiplier": 4.0, "cap": 10.0}
    world = build(fetches=[gives([]), gives([]), lambda fetch: fetch.queue.claim(1), gives([])])
    world.queue.listen = lambda listener: lambda: None  # nobody wakes it: the waits are what they are
    with Pulse() as pulse:
        world.offer("a").start(policy(streaming=True, empty_queue=empty))
        world.until(lambda: len(world.fetches) >= 5)
    waits = gaps(world)
    assert waits[0] >= 0.03
    assert waits[1] >= 0.12
    assert waits[2] < 0.03 + pulse.late
    assert 0.03 <= waits[3] < 0.12 + pulse.late


@pytest.mark.spec("CON-10")
def test_an_arrival_ends_the_wait(build):
    empty = {"backoff": 10.0, "multiplier": 1.0, "cap": 10.0}
    world = build().start(policy(streaming=True, empty_queue=empty))
    world.until(lambda: world.fetches and world.fetches[0].ended)
    world.offer("a").until(lambda: world.of("process"), seconds=1.0)


@pytest.mark.spec("CON-10")
def test_an_arrival_during_the_fetch_itself_is_not_slept_through(build):
    def found_nothing_then_came_one(fetch):
        fetch.queue.dispatch([Transaction("a", source="queue")])
        return []

    empty = {"backoff": 10.0, "multiplier": 1.0, "cap": 10.0}
    world = build(fetches=[found_nothing_then_came_one]).start(policy(streaming=True, empty_queue=empty))
    world.until(lambda: world.of("process"), seconds=1.0)


JUNK = [Transaction("x", source="queue"), {"id": "x"}, Delivery({"id": "x"}, "x")]


@pytest.mark.spec("DX-08", "CON-08")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: type(junk).__name__)
def test_a_fetch_that_returns_junk_ends_the_loop_and_releases_the_rest(build, junk, streaming):
    def fetch(fetch):
        if fetch.number == 0:
            return fetch.queue.claim(1)
        found = fetch.queue.claim(fetch.batch_size)
        return [found[0], junk, *found[1:]]

    world = build(fetches=fetch, process={"a": takes(0.05)})
    world.offer("a", "b", "c").run(policy(concurrency=4, streaming=streaming))
    assert isinstance(world.error, FetchException)
    assert f"item 2 of 3 is a {type(junk).__name__}" in str(world.error)
    assert "expected Delivery(" in str(world.error)
    assert world.kinds() == {"a": "succeeded", "b": "released", "c": "released"}
    assert (world.queue.depth().in_flight, world.queue.depth().ready) == (0, 2)
