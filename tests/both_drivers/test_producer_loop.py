"""How a list of transactions is run: PRO-05, 06, 12, 13, 15, 16, 18."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError
from ergon_framework.worker.report import OutcomeKind, StopReason
from tests.both_drivers.producer_harness import (
    VARIANTS,
    WAIT_TIMEOUT_SECONDS,
    Hang,
    Latch,
    ProduceRun,
    make_producer_policy,
    make_transactions,
    parse_number,
    run,
    run_for_one,
    run_in_turn,
)

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


# -- batches and concurrency -----------------------------------------------------------------------


@pytest.mark.spec("PRO-05")
def test_a_batch_starts_only_after_the_previous_one_has_ended(variant):
    result = run(variant, make_transactions(23), make_producer_policy(batch=5, concurrency=5))

    batches = [parse_number(Transaction(id=transaction_id)) // 5 for _, _, transaction_id in result.events]
    assert batches == sorted(batches)
    assert result.kinds == ["succeeded"] * 23


@pytest.mark.spec("PRO-05")
def test_a_finished_worker_takes_the_next_transaction_of_its_batch_only(variant):
    latch = Latch()

    def produce(transaction, _):
        if transaction.id == "t3":
            latch.open()  # reached only if t2 and t3 did not have to wait for t0
        return Hang(latch) if transaction.id == "t0" else None

    result = run(variant, make_transactions(6), make_producer_policy(batch=4, concurrency=2), produce=produce)

    assert result.kinds == ["succeeded"] * 6
    leave_index = result.events.index(("leave", "success", "t0"))
    assert result.events.index(("enter", "produce", "t3")) < result.events.index(("leave", "produce", "t0"))
    assert leave_index < result.events.index(("enter", "produce", "t4"))


@pytest.mark.spec("PRO-05")
def test_transactions_start_in_the_order_of_the_input(variant):
    result = run(variant, make_transactions(12), make_producer_policy(concurrency=1, batch=5))

    assert result.steps == [(step, f"t{number}") for number in range(12) for step in ("produce", "success")]


@pytest.mark.spec("PRO-06", "PRO-15")
def test_the_slot_is_occupied_until_the_handlers_have_ended(variant):
    def produce(transaction, _):
        if parse_number(transaction) % 2:
            raise ValueError("odd")

    policy = make_producer_policy(concurrency=1, produce={"max_attempts": 2})
    result = run(
        variant, make_transactions(4), policy, produce=produce, exception=run_in_turn(ValueError("once"), None)
    )

    transaction_ids = [transaction_id for _, transaction_id in result.steps]
    assert transaction_ids == sorted(transaction_ids)
    assert result.peak == 1


@pytest.mark.spec("PRO-06")
def test_workers_are_limited_daemon_threads_or_tasks_of_the_running_loop(variant):
    result = run(variant, make_transactions(60), make_producer_policy(concurrency=4, batch=20))

    if variant == "threads":
        assert len(result.workers) <= 4
        assert threading.main_thread() not in result.workers
        assert all(worker.daemon for worker in result.workers)
    else:
        assert len(result.workers) == 1


@pytest.mark.spec("PRO-15")
def test_concurrency_is_reached_and_never_exceeded(variant):
    started, latch = [], Latch()

    def produce(transaction, _):
        started.append(transaction.id)
        if len(started) == 4:
            latch.open()
        return Hang(latch)

    result = run(variant, make_transactions(80), make_producer_policy(concurrency=4, batch=80), produce=produce)

    assert result.peak == 4
    assert result.kinds == ["succeeded"] * 80


@pytest.mark.spec("PRO-15")
def test_a_call_that_ignores_its_timeout_occupies_its_slot(variant):
    policy = make_producer_policy(concurrency=2, batch=30, produce={"timeout": 0.03, "exit_grace": 0.03})
    result = run(variant, make_transactions(30), policy, produce=run_for_one("t0", lambda *_: Hang(stubborn=True)))

    assert result.peak == 2
    assert result.kinds == ["failed"] + ["succeeded"] * 29
    assert result.report.still_running == 1


# -- the same id -----------------------------------------------------------------------------------


@pytest.mark.spec("PRO-13")
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_a_repeated_id_runs_once_and_every_position_has_its_outcome(variant, batch):
    first, second = Transaction(1, id="a"), Transaction(2, id="b")
    result = run(variant, [first, second, Transaction(1, id="a"), first], make_producer_policy(batch=batch))

    assert sorted(result.steps) == [("produce", "a"), ("produce", "b"), ("success", "a"), ("success", "b")]
    outcomes = result.report.outcomes
    assert [outcome.transaction.id for outcome in outcomes] == ["a", "b", "a", "a"]
    assert outcomes[0] is outcomes[2] is outcomes[3]
    assert outcomes[0].transaction.payload == 1
    assert result.kinds == ["succeeded"] * 4


@pytest.mark.spec("PRO-13", "PRO-14")
def test_a_repeated_id_that_fails_runs_the_exception_handler_once(variant):
    result = run(variant, [Transaction(id="a"), Transaction(id="a")], produce=run_in_turn(BusinessError("no")))

    assert result.of("a") == ["produce", "exception"]
    assert result.kinds == ["failed", "failed"]


@pytest.mark.spec("PRO-13")
def test_a_second_call_runs_the_same_id_again(variant):
    first = run(variant, make_transactions(2))
    second = run(variant, make_transactions(2))

    assert first.kinds == second.kinds == ["succeeded"] * 2
    assert len(second.steps) == 4


# -- the report ------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-18")
def test_outcomes_are_in_input_order_regardless_of_completion_order(variant):
    latches = [Latch() for _ in range(5)]
    latches[4].open()

    def success(transaction, _):
        if (number := parse_number(transaction)) > 0:
            latches[number - 1].open()

    result = run(
        variant,
        make_transactions(5),
        produce=lambda transaction, _: Hang(latches[parse_number(transaction)], then=transaction.id),
        success=success,
    )

    assert [transaction_id for transaction_id, _ in result.results] == ["t4", "t3", "t2", "t1", "t0"]
    assert [outcome.transaction.id for outcome in result.report.outcomes] == ["t0", "t1", "t2", "t3", "t4"]
    assert [outcome.result for outcome in result.report.outcomes] == ["t0", "t1", "t2", "t3", "t4"]


@pytest.mark.spec("PRO-18", "PRO-12")
def test_an_empty_list_ends_immediately(variant):
    result = run(variant, [])

    assert result.report.outcomes == []
    assert result.report.stop_reason is StopReason.DONE
    assert result.steps == []


@pytest.mark.spec("PRO-12")
def test_without_a_policy_the_defaults_apply(variant):
    result = ProduceRun(variant, make_transactions(25)).execute()

    assert result.kinds == ["succeeded"] * 25
    assert (result.report.stop_reason, result.report.still_running, result.report.late_results) == (
        StopReason.DONE,
        0,
        0,
    )


@pytest.mark.spec("PRO-12", "PRO-18")
@pytest.mark.parametrize("limit", [1, 4, 5, 7])
def test_a_limit_starts_exactly_that_many_transactions_and_releases_the_rest(variant, limit):
    result = run(variant, make_transactions(9), make_producer_policy(limit=limit, batch=5, concurrency=3))

    assert result.kinds == ["succeeded"] * limit + ["released"] * (9 - limit)
    assert {transaction_id for _, transaction_id in result.steps} == {f"t{number}" for number in range(limit)}
    assert result.report.stop_reason is StopReason.LIMIT
    for outcome in result.report.outcomes[limit:]:
        assert (outcome.attempts, outcome.reason, outcome.error) == (0, "limit", None)


@pytest.mark.spec("PRO-12", "PRO-18")
def test_a_limit_of_0_runs_nothing(variant):
    result = run(variant, make_transactions(3), make_producer_policy(limit=0))

    assert result.steps == []
    assert result.report.stop_reason is StopReason.LIMIT
    assert [(outcome.kind, outcome.attempts, outcome.reason) for outcome in result.report.outcomes] == [
        (OutcomeKind.RELEASED, 0, "limit")
    ] * 3


@pytest.mark.spec("PRO-12")
def test_a_limit_that_is_not_reached_has_no_effect(variant):
    result = run(variant, make_transactions(3), make_producer_policy(limit=10))

    assert result.kinds == ["succeeded"] * 3
    assert result.report.stop_reason is StopReason.DONE


@pytest.mark.spec("PRO-16")
def test_lists_transactions_and_policies_are_not_changed(variant):
    transactions = [*make_transactions(12), make_transactions(4)[3]]
    policy = make_producer_policy(batch=5, limit=9)
    before, dumped, copies = (
        list(transactions),
        policy.model_dump(),
        [(t.id, t.payload, t.attempts) for t in transactions],
    )

    result = run(variant, transactions, policy, produce=run_for_one("t1", run_in_turn(ValueError("x"))))

    assert result.report.stop_reason is StopReason.LIMIT
    assert len(transactions) == len(before)
    assert all(item is item_before for item, item_before in zip(transactions, before, strict=True))
    assert [(t.id, t.payload, t.attempts) for t in transactions] == copies
    assert policy.model_dump() == dumped


# -- stop ------------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-12", "PRO-18")
def test_a_stop_starts_nothing_and_lets_running_calls_finish(variant):
    latch = Latch()

    def produce(transaction, _):
        if transaction.id == "t1":
            result.task.stop()
            latch.open()
        return Hang(latch)

    result = ProduceRun(variant, make_transactions(8), make_producer_policy(concurrency=2, batch=8), produce=produce)
    result.execute()

    assert result.raised is None
    assert result.report.stop_reason is StopReason.STOP
    assert result.kinds == ["succeeded"] * 2 + ["released"] * 6
    assert {transaction_id for _, transaction_id in result.steps} == {"t0", "t1"}
    assert {(outcome.attempts, outcome.reason) for outcome in result.report.outcomes[2:]} == {(0, "stop")}


@pytest.mark.spec("PRO-12")
def test_retries_continue_while_a_stopped_call_drains(variant):
    def produce(transaction, _):
        result.task.stop()
        return run_in_turn(ValueError("once"), "twice")(transaction, _)

    policy = make_producer_policy(concurrency=1, produce={"backoff": 0.01})
    result = ProduceRun(variant, make_transactions(2), policy, produce=run_for_one("t0", produce))
    # Not twice: the second stop would end the drain.
    stops, stop = [], result.task.stop
    result.task.stop = lambda: stops or (stops.append(1), stop())
    result.execute()

    assert result.of("t0") == ["produce", "produce", "success"]
    assert result.kinds == ["succeeded", "released"]


@pytest.mark.spec("PRO-18")
def test_a_transaction_waiting_for_a_retry_at_the_end_of_the_drain_is_released(variant):
    def produce(*_):
        result.task.stop()
        raise ValueError("down")

    result = ProduceRun(
        variant,
        make_transactions(1),
        make_producer_policy(produce={"backoff": 30.0}, drain_timeout=0.05),
        produce=produce,
    )
    result.execute()

    assert result.seconds < 5
    assert result.of("t0") == ["produce"]
    assert result.report.stop_reason is StopReason.STOP
    assert (result.kinds, result.report.outcomes[0].attempts) == (["released"], 0)


@pytest.mark.spec("PRO-18")
def test_a_second_stop_ends_the_drain_immediately(variant):
    def produce(transaction, _):
        if transaction.id == "t1":
            result.task.stop()
            result.task.stop()
        return Hang(stubborn=True, then="late", late="late")

    result = ProduceRun(
        variant, make_transactions(3), make_producer_policy(concurrency=2, drain_timeout=30), produce=produce
    )
    result.execute()

    assert result.seconds < 5
    assert result.report.stop_reason is StopReason.STOP
    assert result.kinds == ["released"] * 3
    assert result.report.still_running == 2
    # The calls returned a value in the meantime; it was ignored.
    assert [outcome.kind for outcome in result.report.outcomes] == [OutcomeKind.RELEASED] * 3
    assert result.results == []


@pytest.mark.spec("PRO-18")
def test_stop_may_be_called_from_any_thread(variant):
    entered, latch = Latch(), Latch()

    def produce(*_):
        entered.open()
        return Hang(latch)

    result = ProduceRun(variant, make_transactions(4), make_producer_policy(concurrency=1), produce=produce)

    def stop_after_start():
        entered.wait()
        if variant == "asyncio":
            latch.waiter_arrived.wait(WAIT_TIMEOUT_SECONDS)  # a handler that never suspends blocks the event loop
        result.task.stop()
        latch.open()

    thread = threading.Thread(target=stop_after_start)
    thread.start()
    result.execute()
    thread.join()

    assert result.report.stop_reason is StopReason.STOP
    assert result.kinds == ["succeeded"] + ["released"] * 3


@pytest.mark.spec("PRO-12")
def test_a_stop_does_not_affect_the_next_call(variant):
    def produce(transaction, _):
        if transaction.payload == "stop":
            result.task.stop()

    result = ProduceRun(
        variant,
        [Transaction("stop", id="a"), Transaction(id="b")],
        make_producer_policy(concurrency=1),
        produce=produce,
    )
    result.execute()
    assert result.kinds == ["succeeded", "released"]

    second = result.task.produce_transactions(make_transactions(3), make_producer_policy())
    report = second if variant == "threads" else asyncio.run(second)
    assert report.stop_reason is StopReason.DONE


@pytest.mark.spec("DX-19")
def test_each_worker_runs_start_producing(variant):
    result = ProduceRun(variant, make_transactions(3), make_producer_policy())
    started, start = [], result.task._start_producing

    def record_start(course, transaction, watch):
        started.append(transaction.id)
        return start(course, transaction, watch)

    result.task._start_producing = record_start
    result.execute()

    assert started == ["t0", "t1", "t2"]
    assert result.kinds == ["succeeded"] * 3
