"""How a list of transactions is run: PRO-05, 06, 12, 13, 15, 16, 18."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ergon_framework.task.exceptions import BusinessError
from ergon_framework.task.report import End, Kind
from ergon_framework.transaction import Transaction
from tests.twins.producing import FLAVOURS, PATIENCE, Hang, Latch, Run, in_turn, many, only, place, quick, run

pytestmark = pytest.mark.parametrize("flavour", FLAVOURS)


# -- batches and concurrency -----------------------------------------------------------------------


@pytest.mark.spec("PRO-05")
def test_a_batch_begins_only_when_the_one_before_has_ended(flavour):
    made = run(flavour, many(23), quick(batch=5, concurrency=5))

    batches = [place(Transaction(identity)) // 5 for _, _, identity in made.events]
    assert batches == sorted(batches)
    assert made.kinds == ["succeeded"] * 23


@pytest.mark.spec("PRO-05")
def test_a_worker_that_finishes_makes_room_for_the_next_of_its_batch_only(flavour):
    door = Latch()

    def produce(transaction, _):
        if transaction.id == "t3":
            door.open()  # reached only if t2 and t3 did not have to wait for t0
        return Hang(door) if transaction.id == "t0" else None

    made = run(flavour, many(6), quick(batch=4, concurrency=2), produce=produce)

    assert made.kinds == ["succeeded"] * 6
    left = made.events.index(("leave", "success", "t0"))
    assert made.events.index(("enter", "produce", "t3")) < made.events.index(("leave", "produce", "t0"))
    assert left < made.events.index(("enter", "produce", "t4"))


@pytest.mark.spec("PRO-05")
def test_transactions_start_in_the_order_of_the_input(flavour):
    made = run(flavour, many(12), quick(concurrency=1, batch=5))

    assert made.steps == [(step, f"t{number}") for number in range(12) for step in ("produce", "success")]


@pytest.mark.spec("PRO-06", "PRO-15")
def test_the_permit_is_kept_until_the_handlers_have_ended(flavour):
    def produce(transaction, _):
        if place(transaction) % 2:
            raise ValueError("odd")

    policy = quick(concurrency=1, produce={"max_attempts": 2})
    made = run(flavour, many(4), policy, produce=produce, exception=in_turn(ValueError("once"), None))

    owners = [identity for _, identity in made.steps]
    assert owners == sorted(owners)
    assert made.peak == 1


@pytest.mark.spec("PRO-06")
def test_workers_are_daemon_threads_no_more_than_the_concurrency_or_tasks_of_the_running_loop(flavour):
    made = run(flavour, many(60), quick(concurrency=4, batch=20))

    if flavour == "threads":
        assert len(made.workers) <= 4
        assert threading.main_thread() not in made.workers
        assert all(worker.daemon for worker in made.workers)
    else:
        assert len(made.workers) == 1


@pytest.mark.spec("PRO-15")
def test_concurrency_is_reached_and_never_exceeded(flavour):
    arrived, door = [], Latch()

    def produce(transaction, _):
        arrived.append(transaction.id)
        if len(arrived) == 4:
            door.open()
        return Hang(door)

    made = run(flavour, many(80), quick(concurrency=4, batch=80), produce=produce)

    assert made.peak == 4
    assert made.kinds == ["succeeded"] * 80


@pytest.mark.spec("PRO-15")
def test_a_body_that_stays_after_its_timeout_keeps_its_slot(flavour):
    policy = quick(concurrency=2, batch=30, produce={"timeout": 0.03, "abandon_grace": 0.03})
    made = run(flavour, many(30), policy, produce=only("t0", lambda *_: Hang(stubborn=True)))

    assert made.peak == 2
    assert made.kinds == ["failed"] + ["succeeded"] * 29
    assert made.report.abandoned == 1


# -- the same id -----------------------------------------------------------------------------------


@pytest.mark.spec("PRO-13")
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_same_id_twice_runs_once_and_both_positions_hold_its_outcome(flavour, batch):
    first, second = Transaction("a", 1), Transaction("b", 2)
    made = run(flavour, [first, second, Transaction("a", 1), first], quick(batch=batch))

    assert sorted(made.steps) == [("produce", "a"), ("produce", "b"), ("success", "a"), ("success", "b")]
    outcomes = made.report.outcomes
    assert [outcome.transaction.id for outcome in outcomes] == ["a", "b", "a", "a"]
    assert outcomes[0] is outcomes[2] is outcomes[3]
    assert outcomes[0].transaction.payload == 1
    assert made.kinds == ["succeeded"] * 4


@pytest.mark.spec("PRO-13", "PRO-14")
def test_a_repeated_id_that_fails_meets_the_exception_handler_once(flavour):
    made = run(flavour, [Transaction("a"), Transaction("a")], produce=in_turn(BusinessError("no")))

    assert made.of("a") == ["produce", "exception"]
    assert made.kinds == ["failed", "failed"]


@pytest.mark.spec("PRO-13")
def test_a_second_call_runs_the_same_id_again(flavour):
    first = run(flavour, many(2))
    again = run(flavour, many(2))

    assert first.kinds == again.kinds == ["succeeded"] * 2
    assert len(again.steps) == 4


# -- the report ------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-18")
def test_outcomes_are_in_input_order_whatever_finished_first(flavour):
    doors = [Latch() for _ in range(5)]
    doors[4].open()

    def success(transaction, _):
        if (number := place(transaction)) > 0:
            doors[number - 1].open()

    made = run(
        flavour,
        many(5),
        produce=lambda transaction, _: Hang(doors[place(transaction)], then=transaction.id),
        success=success,
    )

    assert [identity for identity, _ in made.results] == ["t4", "t3", "t2", "t1", "t0"]
    assert [outcome.transaction.id for outcome in made.report.outcomes] == ["t0", "t1", "t2", "t3", "t4"]
    assert [outcome.result for outcome in made.report.outcomes] == ["t0", "t1", "t2", "t3", "t4"]


@pytest.mark.spec("PRO-18", "PRO-12")
def test_an_empty_list_is_done_at_once(flavour):
    made = run(flavour, [])

    assert made.report.outcomes == []
    assert made.report.end is End.DONE
    assert made.steps == []


@pytest.mark.spec("PRO-12")
def test_without_a_policy_the_defaults_hold(flavour):
    made = Run(flavour, many(25)).go()

    assert made.kinds == ["succeeded"] * 25
    assert (made.report.end, made.report.abandoned, made.report.fenced) == (End.DONE, 0, 0)


@pytest.mark.spec("PRO-12", "PRO-18")
@pytest.mark.parametrize("limit", [1, 4, 5, 7])
def test_a_limit_starts_exactly_that_many_and_releases_the_rest(flavour, limit):
    made = run(flavour, many(9), quick(limit=limit, batch=5, concurrency=3))

    assert made.kinds == ["succeeded"] * limit + ["released"] * (9 - limit)
    assert {identity for _, identity in made.steps} == {f"t{number}" for number in range(limit)}
    assert made.report.end is End.LIMIT
    for outcome in made.report.outcomes[limit:]:
        assert (outcome.attempts, outcome.reason, outcome.error) == (0, "limit", None)


@pytest.mark.spec("PRO-12", "PRO-18")
def test_a_limit_of_0_runs_nothing(flavour):
    made = run(flavour, many(3), quick(limit=0))

    assert made.steps == []
    assert made.report.end is End.LIMIT
    assert [(outcome.kind, outcome.attempts, outcome.reason) for outcome in made.report.outcomes] == [
        (Kind.RELEASED, 0, "limit")
    ] * 3


@pytest.mark.spec("PRO-12")
def test_a_limit_that_is_not_reached_means_nothing(flavour):
    made = run(flavour, many(3), quick(limit=10))

    assert made.kinds == ["succeeded"] * 3
    assert made.report.end is End.DONE


@pytest.mark.spec("PRO-16")
def test_lists_transactions_and_policies_are_not_changed(flavour):
    given = [*many(12), many(4)[3]]
    policy = quick(batch=5, limit=9)
    before, dumped, copies = list(given), policy.model_dump(), [(t.id, t.payload, t.attempts) for t in given]

    made = run(flavour, given, policy, produce=only("t1", in_turn(ValueError("x"))))

    assert made.report.end is End.LIMIT
    assert len(given) == len(before)
    assert all(mine is theirs for mine, theirs in zip(given, before, strict=True))
    assert [(t.id, t.payload, t.attempts) for t in given] == copies
    assert policy.model_dump() == dumped


# -- stop ------------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-12", "PRO-18")
def test_a_stop_starts_nothing_more_and_lets_what_runs_end(flavour):
    door = Latch()

    def produce(transaction, _):
        if transaction.id == "t1":
            made.task.stop()
            door.open()
        return Hang(door)

    made = Run(flavour, many(8), quick(concurrency=2, batch=8), produce=produce)
    made.go()

    assert made.raised is None
    assert made.report.end is End.STOP
    assert made.kinds == ["succeeded"] * 2 + ["released"] * 6
    assert {identity for _, identity in made.steps} == {"t0", "t1"}
    assert {(outcome.attempts, outcome.reason) for outcome in made.report.outcomes[2:]} == {(0, "stop")}


@pytest.mark.spec("PRO-12")
def test_retries_go_on_while_a_stopped_call_drains(flavour):
    def produce(transaction, _):
        made.task.stop()
        return in_turn(ValueError("once"), "twice")(transaction, _)

    policy = quick(concurrency=1, produce={"backoff": 0.01})
    made = Run(flavour, many(2), policy, produce=only("t0", produce))
    # Not twice: the second stop would end the drain.
    stops, stop = [], made.task.stop
    made.task.stop = lambda: stops or (stops.append(1), stop())
    made.go()

    assert made.of("t0") == ["produce", "produce", "success"]
    assert made.kinds == ["succeeded", "released"]


@pytest.mark.spec("PRO-18")
def test_at_the_end_of_the_drain_what_waits_for_a_retry_is_released(flavour):
    def produce(*_):
        made.task.stop()
        raise ValueError("down")

    made = Run(flavour, many(1), quick(produce={"backoff": 30.0}, drain_timeout=0.05), produce=produce)
    made.go()

    assert made.seconds < 5
    assert made.of("t0") == ["produce"]
    assert made.report.end is End.STOP
    assert (made.kinds, made.report.outcomes[0].attempts) == (["released"], 0)


@pytest.mark.spec("PRO-18")
def test_a_second_stop_ends_the_drain_at_once(flavour):
    def produce(transaction, _):
        if transaction.id == "t1":
            made.task.stop()
            made.task.stop()
        return Hang(stubborn=True, then="late", late="late")

    made = Run(flavour, many(3), quick(concurrency=2, drain_timeout=30), produce=produce)
    made.go()

    assert made.seconds < 5
    assert made.report.end is End.STOP
    assert made.kinds == ["released"] * 3
    assert made.report.abandoned == 2
    # They left in the meantime, with a value; nothing came of it.
    assert [outcome.kind for outcome in made.report.outcomes] == [Kind.RELEASED] * 3
    assert made.results == []


@pytest.mark.spec("PRO-18")
def test_stop_may_be_asked_from_any_thread(flavour):
    inside, door = Latch(), Latch()

    def produce(*_):
        inside.open()
        return Hang(door)

    made = Run(flavour, many(4), quick(concurrency=1), produce=produce)

    def stopper():
        inside.wait()
        if flavour == "asyncio":
            door.awaited.wait(PATIENCE)  # a body that never suspends leaves the event loop no time to hear of a stop
        made.task.stop()
        door.open()

    thread = threading.Thread(target=stopper)
    thread.start()
    made.go()
    thread.join()

    assert made.report.end is End.STOP
    assert made.kinds == ["succeeded"] + ["released"] * 3


@pytest.mark.spec("PRO-12")
def test_a_stop_does_not_outlive_its_call(flavour):
    def produce(transaction, _):
        if transaction.payload == "stop":
            made.task.stop()

    made = Run(flavour, [Transaction("a", "stop"), Transaction("b")], quick(concurrency=1), produce=produce)
    made.go()
    assert made.kinds == ["succeeded", "released"]

    again = made.task.produce_transactions(many(3), quick())
    report = again if flavour == "threads" else asyncio.run(again)
    assert report.end is End.DONE


@pytest.mark.spec("DX-19")
def test_each_worker_runs_start_producing(flavour):
    made = Run(flavour, many(3), quick())
    started, start = [], made.task._start_producing

    def counted(course, transaction, watch):
        started.append(transaction.id)
        return start(course, transaction, watch)

    made.task._start_producing = counted
    made.go()

    assert started == ["t0", "t1", "t2"]
    assert made.kinds == ["succeeded"] * 3
