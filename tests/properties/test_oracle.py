"""Tests of the oracle: cases computed by hand, invalid records, and the shares of the plans."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

import pytest

from ergon_framework.worker.exceptions import Category, TransactionException
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from tests.properties.oracle import check_invariants, check_run, differences, drain_end_of, predict
from tests.properties.plans import (
    BASE_EXCEPTION_KINDS,
    Behaviour,
    Call,
    DeliveryRecord,
    FetchRecord,
    HandlerCallRecord,
    OutcomeRecord,
    Plan,
    RunRecord,
    SettlementRecord,
    TransactionPlan,
    count_features,
    plan_from_seed,
)

RETRY = {
    "max_attempts": 3,
    "timeout": 2.0,
    "backoff": 1.0,
    "multiplier": 2.0,
    "cap": 0.0,
    "max_inline_delay": 30.0,
    "exit_grace": 0.5,
}
HANDLER_RETRY = RETRY | {"max_attempts": 2, "timeout": 3.0, "backoff": 0.25, "multiplier": 1.0}


def make_policy(kind="consume", *, process=(), success=(), exception=(), settle=(), **loop):
    main = "process" if kind == "consume" else "produce"
    steps = {
        main: {"retry": RETRY | dict(process)},
        "success": {"retry": HANDLER_RETRY | dict(success)},
        "exception": {"retry": HANDLER_RETRY | dict(exception)},
    }
    if kind == "consume":
        steps["settle"] = dict(settle)
    return {"loop": {"concurrency": {"value": 1}, "batch": {"size": 1}, "drain_timeout": 5.0} | loop, "steps": steps}


def predict_delivery(process=(), *, success=(), exception=(), policy=None, attempts=0, **options):
    kind = options.get("kind", "consume")
    transaction = TransactionPlan("a", None, attempts, tuple(process), tuple(success), tuple(exception))
    defaults = {"flavour": "threads", "kind": kind, "started": 0.0, "stop_at": None, "drain_end": None}
    return predict(transaction, policy or make_policy(kind), **(defaults | options))


def list_calls(prediction):
    return [(call.step, call.attempt, call.at) for call in prediction.calls]


def summarize(prediction):
    return prediction.outcome, prediction.category, prediction.settlement, prediction.attempts, prediction.ended


def make_behaviour(what, takes=0.0, **options):
    return Behaviour(takes, what, **options)


# Results and categories ----------------------------------------------------------------------------


def test_a_result_leads_to_the_success_handler_and_an_ack():
    prediction = predict_delivery([make_behaviour("ok", 0.5)], success=[make_behaviour("ok", 0.25)], started=10.0)
    assert list_calls(prediction) == [("process", 0, 10.0), ("success", 0, 10.5)]
    assert summarize(prediction) == ("succeeded", None, "ack", 1, 10.75)
    assert (prediction.processed, prediction.free, prediction.ambiguous) == (True, 10.75, False)


def test_business_is_tried_once_and_then_handled():
    prediction = predict_delivery([make_behaviour("business", 0.5)])
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 0.5)]
    assert summarize(prediction) == ("failed", "BUSINESS", "dead_letter", 1, 0.5)
    assert (prediction.calls[1].error_category, prediction.calls[1].still_running) == ("BUSINESS", False)
    assert not prediction.processed


@pytest.mark.parametrize("what", ["system", "system_exc", "user_timeout", *sorted(BASE_EXCEPTION_KINDS)])
def test_everything_else_that_process_raises_is_system_and_retried(what):
    prediction = predict_delivery([make_behaviour(what, 0.5)] * 3)
    assert list_calls(prediction) == [
        ("process", 0, 0.0),
        ("process", 1, 1.5),
        ("process", 2, 4.0),
        ("exception", 0, 4.5),
    ]
    assert summarize(prediction) == ("failed", "SYSTEM", "dead_letter", 3, 4.5)


def test_an_explicit_timeout_from_process_is_timeout_and_retried():
    prediction = predict_delivery([make_behaviour("timeout_exc")] * 3)
    assert list_calls(prediction)[-1] == ("exception", 0, 3.0)
    assert prediction.category == "TIMEOUT"
    assert prediction.calls[-1].still_running is False


@pytest.mark.parametrize("what", ["business", "timeout_exc", "system_exit"])
def test_every_error_of_the_success_handler_is_system_with_its_own_budget(what):
    prediction = predict_delivery(success=[make_behaviour(what), make_behaviour(what)])
    assert list_calls(prediction) == [
        ("process", 0, 0.0),
        ("success", 0, 0.0),
        ("success", 1, 0.25),
        ("exception", 0, 0.25),
    ]
    assert (prediction.outcome, prediction.category, prediction.processed, prediction.attempts) == (
        "failed",
        "SYSTEM",
        True,
        1,
    )


def test_a_success_handler_may_recover():
    prediction = predict_delivery(success=[make_behaviour("business"), make_behaviour("ok", 1.0)])
    assert list_calls(prediction) == [("process", 0, 0.0), ("success", 0, 0.0), ("success", 1, 0.25)]
    assert summarize(prediction) == ("succeeded", None, "ack", 1, 1.25)


def test_an_exhausted_exception_handler_keeps_the_category_that_it_received():
    prediction = predict_delivery(
        [make_behaviour("business")], exception=[make_behaviour("timeout_exc"), make_behaviour("system")]
    )
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 0.0), ("exception", 1, 0.25)]
    assert summarize(prediction) == ("handler_failed", "BUSINESS", "dead_letter", 1, 0.25)
    assert [call.error_category for call in prediction.calls] == [None, "BUSINESS", "BUSINESS"]


def test_a_final_error_ends_its_step_in_process_and_in_handlers():
    prediction = predict_delivery(
        [make_behaviour("system_exc", final=True)], exception=[make_behaviour("business", final=True)]
    )
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 0.0)]
    assert prediction.outcome == "handler_failed"


def test_an_attempt_that_could_not_start_is_deferred_and_costs_no_attempt():
    prediction = predict_delivery([make_behaviour("system"), make_behaviour("system_exc", later=True, retry_after=0.5)])
    assert list_calls(prediction) == [("process", 0, 0.0), ("process", 1, 1.0)]
    assert summarize(prediction) == ("deferred", "SYSTEM", ("later", 2.0), 1, 1.0)
    assert predict_delivery([make_behaviour("system_exc", later=True, retry_after=9.0)], attempts=3).attempts == 3
    assert predict_delivery([make_behaviour("system_exc", later=True)], kind="produce").outcome == "succeeded"


@pytest.mark.parametrize("what", [{"what": "system_exc", "final": True}, {"what": "business"}])
def test_final_wins_over_later(what):
    assert predict_delivery([make_behaviour(**what, later=True)]).outcome == "failed"


# Waiting -------------------------------------------------------------------------------------------


def test_waits_grow_by_the_attempt_and_stop_at_the_cap():
    policy = make_policy(process={"max_attempts": 4, "cap": 2.5})
    prediction = predict_delivery([make_behaviour("system")] * 4, policy=policy)
    assert [at for step, _, at in list_calls(prediction) if step == "process"] == [0.0, 1.0, 3.0, 5.5]


def test_retry_after_is_a_least_wait_beyond_the_cap():
    policy = make_policy(process={"cap": 0.5})
    prediction = predict_delivery(
        [make_behaviour("system_exc", retry_after=4.0), make_behaviour("system_exc", retry_after=0.1)], policy=policy
    )
    assert [at for _, _, at in list_calls(prediction)] == [0.0, 4.0, 4.5, 4.5]


def test_without_backoff_the_next_attempt_is_immediate():
    policy = make_policy(process={"backoff": 0.0})
    assert [at for _, _, at in list_calls(predict_delivery([make_behaviour("system")] * 3, policy=policy))] == [0.0] * 4


def test_a_wait_beyond_max_inline_delay_defers_without_any_handler():
    policy = make_policy(process={"max_inline_delay": 0.9})
    prediction = predict_delivery([make_behaviour("system", 0.5)], policy=policy)
    assert list_calls(prediction) == [("process", 0, 0.0)]
    assert summarize(prediction) == ("deferred", "SYSTEM", ("later", 1.0), 1, 0.5)


def test_a_retry_after_beyond_max_inline_delay_defers_but_not_on_the_last_attempt():
    late = make_behaviour("system_exc", retry_after=31.0)
    assert summarize(predict_delivery([late])) == ("deferred", "SYSTEM", ("later", 31.0), 1, 0.0)
    prediction = predict_delivery([late], policy=make_policy(process={"max_attempts": 1}))
    assert summarize(prediction) == ("failed", "SYSTEM", "dead_letter", 1, 0.0)


def test_a_wait_of_exactly_max_inline_delay_is_slept():
    prediction = predict_delivery([make_behaviour("system")], policy=make_policy(process={"max_inline_delay": 1.0}))
    assert summarize(prediction) == ("succeeded", None, "ack", 2, 1.0)
    assert not prediction.ambiguous


def test_handlers_and_producers_sleep_what_a_process_step_would_defer():
    late = make_behaviour("system_exc", retry_after=31.0)
    assert summarize(predict_delivery(success=[late])) == ("succeeded", None, "ack", 1, 31.0)
    assert summarize(predict_delivery([make_behaviour("business")], exception=[late])) == (
        "failed",
        "BUSINESS",
        "dead_letter",
        1,
        31.0,
    )
    assert summarize(predict_delivery([late], kind="produce")) == ("succeeded", None, None, 2, 31.0)


def test_carried_attempts_continue_to_count():
    prediction = predict_delivery([make_behaviour("system")] * 3, attempts=1)
    assert list_calls(prediction) == [("process", 1, 0.0), ("process", 2, 2.0), ("exception", 0, 2.0)]
    assert prediction.attempts == 3


def test_more_carried_attempts_than_allowed_still_leave_one():
    prediction = predict_delivery([make_behaviour("system")] * 3, attempts=7)
    assert list_calls(prediction) == [("process", 2, 0.0), ("exception", 0, 0.0)]
    assert prediction.attempts == 8


def test_a_producer_carries_no_attempts():
    prediction = predict_delivery([make_behaviour("system")] * 3, attempts=1, kind="produce")
    assert [call.attempt for call in prediction.calls] == [0, 1, 2, 0]
    assert (prediction.attempts, prediction.calls[0].step, prediction.settlement) == (3, "produce", None)


# Timeouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_a_retry_waits_until_the_call_has_returned(flavour):
    prediction = predict_delivery([make_behaviour("ok", 2.25)], flavour=flavour)
    returned_at = 2.25 if flavour == "threads" else 2.0
    assert list_calls(prediction)[:2] == [("process", 0, 0.0), ("process", 1, returned_at + 1.0)]
    assert summarize(prediction) == ("succeeded", None, "ack", 2, returned_at + 1.0)


def test_a_task_that_ignores_its_cancellation_is_like_a_thread():
    body = make_behaviour("ok", 2.25, on_cancel="ignores")
    assert predict_delivery([body], flavour="asyncio") == predict_delivery([body], flavour="threads")


def test_a_call_that_outlives_the_grace_is_never_retried_and_the_handler_is_notified():
    prediction = predict_delivery([make_behaviour("ok", 9.0)], exception=[make_behaviour("ok", 0.125)])
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 2.5)]
    assert (prediction.calls[1].error_category, prediction.calls[1].still_running) == ("TIMEOUT", True)
    assert summarize(prediction) == ("failed", "TIMEOUT", "dead_letter", 1, 2.625)
    assert (prediction.free, prediction.processed) == (9.0, False)


def test_the_handler_also_waits_for_the_last_attempt_to_return():
    prediction = predict_delivery([make_behaviour("ok", 2.25)], policy=make_policy(process={"max_attempts": 1}))
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 2.25)]
    assert prediction.calls[1].still_running is False


def test_a_success_handler_that_outlives_the_grace_leaves_process_done():
    prediction = predict_delivery(success=[make_behaviour("ok", 50.0)])
    assert list_calls(prediction) == [("process", 0, 0.0), ("success", 0, 0.0), ("exception", 0, 3.5)]
    assert (prediction.category, prediction.processed, prediction.calls[2].still_running) == ("TIMEOUT", True, True)


def test_an_exception_handler_that_outlives_the_grace_is_exhausted():
    prediction = predict_delivery([make_behaviour("business")], exception=[make_behaviour("ok", 40.0)])
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 0.0)]
    assert summarize(prediction) == ("handler_failed", "BUSINESS", "dead_letter", 1, 3.5)
    assert prediction.free == 40.0


def test_an_exception_handler_that_times_out_but_returns_is_retried():
    prediction = predict_delivery([make_behaviour("business")], exception=[make_behaviour("ok", 3.25)])
    assert list_calls(prediction)[1:] == [("exception", 0, 0.0), ("exception", 1, 3.5)]
    assert prediction.outcome == "failed"


def test_a_step_without_a_timeout_ends_when_it_ends():
    assert predict_delivery([make_behaviour("ok", 900.0)], policy=make_policy(process={"timeout": None})).ended == 900.0


# The lifecycle's own time --------------------------------------------------------------------------


def test_the_lifecycle_starts_with_the_worker_and_cuts_process_short():
    prediction = predict_delivery(
        [make_behaviour("ok", 1.5)], policy=make_policy(transaction_timeout=1.25), started=100.0
    )
    assert list_calls(prediction) == [("process", 0, 100.0), ("exception", 0, 101.5)]
    assert (prediction.category, prediction.calls[1].still_running) == ("TIMEOUT", False)


def test_a_wait_that_does_not_fit_the_lifecycle_ends_the_step_with_the_last_error():
    prediction = predict_delivery([make_behaviour("system", 0.5)], policy=make_policy(transaction_timeout=1.25))
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 0.5)]
    assert summarize(prediction) == ("failed", "SYSTEM", "dead_letter", 1, 0.5)


def test_the_lifecycle_binds_the_success_handler():
    prediction = predict_delivery(
        [make_behaviour("ok", 1.0)], success=[make_behaviour("ok", 1.0)], policy=make_policy(transaction_timeout=1.75)
    )
    assert list_calls(prediction) == [("process", 0, 0.0), ("success", 0, 1.0), ("exception", 0, 2.0)]
    assert (prediction.category, prediction.processed) == ("TIMEOUT", True)


def test_the_lifecycle_never_binds_the_exception_handler():
    policy = make_policy(transaction_timeout=0.5)
    prediction = predict_delivery(
        [make_behaviour("business", 0.25)],
        exception=[make_behaviour("system", 2.0), make_behaviour("ok", 2.0)],
        policy=policy,
    )
    assert list_calls(prediction)[1:] == [("exception", 0, 0.25), ("exception", 1, 2.5)]
    assert summarize(prediction) == ("failed", "BUSINESS", "dead_letter", 1, 4.5)


def test_a_call_that_returns_after_the_lifecycle_is_not_retried_even_without_a_wait():
    policy = make_policy(transaction_timeout=2.125, process={"backoff": 0.0})
    prediction = predict_delivery([make_behaviour("ok", 2.25)], policy=policy)
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 2.25)]
    assert prediction.category == "TIMEOUT"


def test_a_task_that_returns_when_the_lifecycle_ends_is_not_a_race():
    policy = make_policy(transaction_timeout=1.25, process={"backoff": 0.0})
    prediction = predict_delivery([make_behaviour("ok", 1.5)], policy=policy, flavour="asyncio")
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 1.25)]
    assert not prediction.ambiguous


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_an_expired_lifecycle_is_over_even_if_the_wait_is_beyond_max_inline_delay(flavour):
    policy = make_policy(transaction_timeout=1.25, process={"max_inline_delay": 0.5})
    prediction = predict_delivery([make_behaviour("ok", 1.5)], policy=policy, flavour=flavour)
    assert summarize(prediction) == ("failed", "TIMEOUT", "dead_letter", 1, 1.5 if flavour == "threads" else 1.25)


def test_a_call_that_returns_after_the_lifecycle_is_not_deferred():
    policy = make_policy(transaction_timeout=2.25, process={"timeout": 2.0, "max_inline_delay": 0.5})
    assert predict_delivery([make_behaviour("ok", 2.5)], policy=policy).outcome == "failed"
    assert predict_delivery([make_behaviour("ok", 2.125)], policy=policy).outcome == "deferred"


# Settlements ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what, category", [("business", "business"), ("system", "system"), ("ok", "timeout")])
def test_the_policy_settles_failures_by_category(what, category):
    policy = make_policy(process={"max_attempts": 1}, settle={f"on_{category}": "ack"})
    body = make_behaviour(what, 2.25 if what == "ok" else 0.0)
    assert predict_delivery([body], policy=policy).settlement == "ack"
    assert predict_delivery([body], policy=policy, exception=[make_behaviour("system")] * 2).settlement == "ack"
    assert predict_delivery([body], policy=make_policy(process={"max_attempts": 1})).settlement == "dead_letter"


@pytest.mark.parametrize("settles", ["ack", "dead_letter", ("later", 7.5)])
def test_a_settlement_returned_by_a_handler_wins_over_the_policy(settles):
    handler = make_behaviour("ok", settles=settles)
    assert predict_delivery(success=[handler]).settlement == settles
    assert predict_delivery([make_behaviour("business")], exception=[handler]).settlement == settles
    assert predict_delivery(success=[handler], kind="produce").settlement is None


def test_a_settlement_returned_by_a_timed_out_handler_is_ignored():
    late = make_behaviour("ok", 3.25, settles="ack")
    assert (
        predict_delivery([make_behaviour("business")], exception=[late, make_behaviour("system")]).settlement
        == "dead_letter"
    )


def test_later_waits_for_the_call_and_is_kept_if_the_loop_ends_first():
    exception = [make_behaviour("ok", settles=("later", 1.0))]
    assert predict_delivery([make_behaviour("ok", 9.0)], exception=exception).settlement == ("later", 1.0)
    assert predict_delivery([make_behaviour("ok", 9.0)], exception=exception, drain_end=9.5).settlement == (
        "later",
        1.0,
    )
    prediction = predict_delivery([make_behaviour("ok", 9.0)], exception=exception, stop_at=3.0, drain_end=8.0)
    assert summarize(prediction) == ("failed", "TIMEOUT", "kept", 1, 2.5)


# Shutdown ------------------------------------------------------------------------------------------


def test_a_running_call_continues_after_a_stop():
    assert predict_delivery([make_behaviour("system", 0.5)], stop_at=0.25, drain_end=5.25) == predict_delivery(
        [make_behaviour("system", 0.5)]
    )


def test_a_wait_is_released_when_the_drain_ends():
    prediction = predict_delivery([make_behaviour("system", 0.5)], attempts=1, stop_at=0.25, drain_end=1.25)
    assert list_calls(prediction) == [("process", 1, 0.0)]
    assert summarize(prediction) == ("released", None, "release", 1, 1.25)


def test_a_running_call_keeps_its_claim_when_the_drain_ends():
    prediction = predict_delivery([make_behaviour("ok", 1.5)], stop_at=0.25, drain_end=1.25)
    assert summarize(prediction) == ("released", None, "kept", 0, 1.25)
    assert prediction.free == 1.5


def test_a_call_in_its_grace_keeps_its_claim_when_the_drain_ends():
    assert predict_delivery([make_behaviour("ok", 9.0)], stop_at=1.0, drain_end=2.25).settlement == "kept"


def test_a_waiting_exception_handler_keeps_the_claim_of_an_abandoned_call():
    exception = [make_behaviour("system"), make_behaviour("ok")]
    prediction = predict_delivery([make_behaviour("ok", 9.0)], exception=exception, stop_at=1.0, drain_end=2.625)
    assert list_calls(prediction) == [("process", 0, 0.0), ("exception", 0, 2.5)]
    assert summarize(prediction) == ("released", None, "kept", 0, 2.625)


def test_a_released_transaction_remembers_that_process_had_succeeded():
    prediction = predict_delivery(success=[make_behaviour("system")], stop_at=0.05, drain_end=0.125)
    assert (prediction.outcome, prediction.settlement, prediction.processed) == ("released", "release", True)


def test_nothing_starts_after_the_stop():
    prediction = predict_delivery([make_behaviour("ok", 1.0)], attempts=1, started=3.0, stop_at=2.0, drain_end=7.0)
    assert (prediction.calls, summarize(prediction)) == ((), ("released", None, "release", 1, 3.0))


def test_the_drain_of_a_plan_begins_at_the_first_of_stop_and_timeout():
    plan = Plan(0, "consume", make_policy(timeout=4.0), (), stop_at=6.0)
    assert drain_end_of(plan, began=10.0) == 14.0
    assert drain_end_of(replace(plan, policy=make_policy(timeout=4.0, timeout_drain=5.0)), began=10.0) == 19.0
    assert drain_end_of(replace(plan, stop_at=3.0, policy=make_policy(timeout=4.0)), began=10.0) == 14.0
    assert drain_end_of(replace(plan, policy=make_policy())) == 11.0
    assert drain_end_of(Plan(0, "consume", make_policy(), ())) is None


# Races ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "process, options",
    [
        ([make_behaviour("ok", 2.0)], {}),  # deadline and end
        ([make_behaviour("ok", 2.5)], {}),  # grace and return
        ([make_behaviour("system", 0.5)], {"drain_end": 1.5}),  # wait and drain
        ([make_behaviour("system", 0.25)], {"policy": make_policy(transaction_timeout=1.25)}),  # wait and lifecycle
        ([make_behaviour("ok", 1.0)], {"stop_at": 0.0}),  # start and stop
    ],
)
def test_nearly_equal_times_are_ambiguous(process, options):
    assert predict_delivery(process, **options).ambiguous


# Comparing and checking ----------------------------------------------------------------------------


def test_a_delivery_is_compared_with_its_prediction():
    prediction = predict_delivery([make_behaviour("business", 0.5)])
    delivery = DeliveryRecord(
        0, TransactionPlan("a"), 0, 0.0, tuple(HandlerCallRecord(call, 0.5) for call in prediction.calls)
    )
    outcome = OutcomeRecord(0, "failed", 0.5, "BUSINESS", 1)
    assert differences(prediction, delivery, outcome) == []
    for wrong in ({"outcome": "released"}, {"category": None}, {"attempts": 2}, {"at": 0.6}, {"processed": True}):
        assert len(differences(prediction, delivery, replace(outcome, **wrong))) == 1
    assert len(differences(prediction, replace(delivery, bodies=delivery.bodies[:1]), outcome)) == 1


def make_succeeded_delivery(position, name, *, at, key=None, fetch=None, duration=1.0):
    bodies = (
        HandlerCallRecord(Call("process" if fetch is not None else "produce", 0, at), at + duration),
        HandlerCallRecord(Call("success", 0, at + duration), at + duration),
    )
    return DeliveryRecord(position, TransactionPlan(name, key), fetch, at, bodies)


def make_consumer_run(*, stop_at=None, **loop):
    """Return a valid run of three transactions, two of them with one key, on two slots."""
    deliveries = (
        make_succeeded_delivery(0, "a", at=0.0, key="red", fetch=0),
        make_succeeded_delivery(1, "b", at=0.0, fetch=0, duration=2.0),
        make_succeeded_delivery(2, "c", at=1.0, key="red", fetch=1),
    )
    end_times = (1.0, 2.0, 2.0)
    transactions = tuple(delivery.transaction for delivery in deliveries)
    policy = make_policy(concurrency={"value": 2}, batch={"size": 2}, **loop)
    record = RunRecord(
        flavour="threads",
        deliveries=deliveries,
        outcomes=tuple(OutcomeRecord(n, "succeeded", end, None, 1, True) for n, end in enumerate(end_times)),
        ended=2.0,
        starts=(0, 1, 2),
        fetches=(FetchRecord(0.0, 2, 2), FetchRecord(1.0, 1, 1), FetchRecord(2.0, 1, 0)),
        settlements=tuple(SettlementRecord(n, end, "ack") for n, end in enumerate(end_times)),
    )
    return Plan(0, "consume", policy, transactions, stop_at), record


def replace_item(items, index, /, **fields):
    return (*items[:index], replace(items[index], **fields), *items[index + 1 :])


def test_a_valid_consumer_run_breaks_no_rule():
    assert check_run(*make_consumer_run()) == []


def test_too_many_running_calls_are_found():
    plan, record = make_consumer_run()
    plan.policy["loop"]["concurrency"]["value"] = 1
    assert any("allowed are 1" in fault for fault in check_run(plan, record))


def test_a_call_that_overlaps_its_predecessor_is_found():
    plan, record = make_consumer_run()
    bodies = (replace(record.deliveries[1].bodies[0], left=2.5), record.deliveries[1].bodies[1])
    record = replace(record, deliveries=replace_item(record.deliveries, 1, bodies=bodies))
    assert any("success entered at 2.0 while process" in fault for fault in check_run(plan, record))


@pytest.mark.parametrize(
    "step, entered, is_valid",
    [("process", 2.5, True), ("process", 2.25, False), ("exception", 8.0, False)],
)
def test_only_an_exception_handler_after_the_grace_may_overlap(step, entered, is_valid):
    plan, _ = make_consumer_run()
    first = (HandlerCallRecord(Call("process", 0, 0.0), 0.0, "raised"),) if step == "exception" else ()
    bodies = (
        *first,
        HandlerCallRecord(Call(step, 0, 0.0), 9.0),
        HandlerCallRecord(Call("exception", 1, entered, "TIMEOUT", still_running=True), entered),
    )
    record = RunRecord(
        flavour="threads",
        deliveries=(DeliveryRecord(0, TransactionPlan("a"), 0, 0.0, bodies),),
        outcomes=(OutcomeRecord(0, "failed", entered, "TIMEOUT", 1),),
        ended=9.0,
        starts=(0,),
        fetches=(FetchRecord(0.0, 1, 1),),
        settlements=(SettlementRecord(0, entered, "dead_letter"),),
    )
    assert (check_run(replace(plan, transactions=(TransactionPlan("a"),)), record) == []) is is_valid


@pytest.mark.parametrize("keep", [slice(1, None), slice(None, None)])
def test_a_missing_or_doubled_outcome_is_found(keep):
    plan, record = make_consumer_run()
    outcomes = (*record.outcomes[keep], *(record.outcomes[:1] if keep.start is None else ()))
    assert any("outcomes" in fault for fault in check_run(plan, replace(record, outcomes=outcomes)))


def test_the_limit_is_exact():
    assert check_run(*make_consumer_run(limit=3)) != []  # the last fetch requested more than the remaining limit
    plan, record = make_consumer_run(limit=3)
    record = replace(record, fetches=record.fetches[:2], reason="limit")
    assert check_run(plan, record) == []
    plan.policy["loop"]["limit"] = 2
    assert any("3 transactions started, the limit is 2" in fault for fault in check_run(plan, record))
    plan.policy["loop"]["limit"] = 4
    assert any("ended at its limit 4" in fault for fault in check_run(plan, record))
    plan.policy["loop"]["limit"] = 0
    assert any("limit is 0" in fault for fault in check_run(plan, record))


def test_too_few_starts_are_found_unless_the_loop_was_stopped():
    plan, record = make_consumer_run()
    plan = replace(plan, transactions=(*plan.transactions, TransactionPlan("d")))
    assert check_run(plan, record) == ["3 transactions started, due were 4"]
    assert check_run(replace(plan, stop_at=2.0), record) == []


def test_an_early_end_excuses_fewer_starts_and_a_released_transaction_is_valid():
    plan, record = make_consumer_run(timeout=1.5, timeout_drain=0.25)
    running_calls = (HandlerCallRecord(Call("process", 0, 0.0), 1.875),)
    record = replace(
        record,
        deliveries=replace_item(record.deliveries[:2], 1, bodies=running_calls),
        outcomes=replace_item(record.outcomes[:2], 1, outcome="released", at=1.75, attempts=0),
        settlements=record.settlements[:1],
        fetches=record.fetches[:2],
        starts=(0, 1),
        ended=1.75,
        raised="LoopTimeout",
    )
    assert check_run(plan, record) == []


def test_fewer_starts_are_also_excused_by_an_error_of_the_loop():
    plan, record = make_consumer_run()
    plan = replace(plan, transactions=(*plan.transactions, TransactionPlan("d")))
    failed_fetches = tuple(FetchRecord(2.0, 1, 0, fault="error") for _ in range(3))
    assert check_run(plan, replace(record, fetches=failed_fetches, raised="FetchException")) == [
        fault for fault in check_run(plan, replace(record, fetches=failed_fetches)) if "due were" not in fault
    ]


def test_an_unstarted_transaction_can_only_be_released_or_deferred():
    plan, record = make_consumer_run()
    deliveries = replace_item(record.deliveries, 2, started=None, bodies=())
    record = replace(record, deliveries=deliveries, starts=(0, 1))
    assert any("never started but is succeeded" in fault for fault in check_run(plan, record))


@pytest.mark.parametrize("asked", [0, 3])
def test_a_fetch_for_nothing_or_for_more_than_the_batch_is_found(asked):
    plan, record = make_consumer_run()
    fetches = replace_item(record.fetches, 2, asked=asked)
    assert any("asked for" in fault for fault in check_run(plan, replace(record, fetches=fetches)))


def test_a_fetch_for_more_than_the_free_slots_is_found():
    plan, record = make_consumer_run()
    fetches = replace_item(record.fetches, 1, asked=2)
    assert any("free slots" in fault for fault in check_run(plan, replace(record, fetches=fetches)))


def test_a_delivery_that_waits_for_its_key_holds_no_slot_yet():
    plan, record = make_consumer_run()
    waiting = make_succeeded_delivery(2, "c", at=1.0, key="red", fetch=0)
    fetches = (FetchRecord(0.0, 1, 1), FetchRecord(0.0, 1, 1), FetchRecord(0.5, 1, 0))
    record = replace(
        record,
        deliveries=(record.deliveries[0], waiting, make_succeeded_delivery(1, "b", at=0.0, fetch=1, duration=0.25)),
        outcomes=replace_item(record.outcomes, 2, at=0.25),
        settlements=replace_item(record.settlements, 2, at=0.25),
        fetches=fetches,
    )
    assert check_run(plan, record) == []


def test_after_a_stop_there_is_no_fetch_and_no_start_and_an_end_in_time():
    faults = check_run(*make_consumer_run(stop_at=0.5, drain_timeout=0.25))
    assert [fault.split(" at ")[0] for fault in faults] == [
        "the loop ended",
        "delivery 2 (position 2, id 'c') started",
        "fetch 1",
        "fetch 2",
    ]


@pytest.mark.parametrize("key, name", [("red", "c"), (None, "b")])
def test_one_id_and_one_key_are_never_in_flight_twice(key, name):
    plan, record = make_consumer_run()
    duplicate = TransactionPlan(name, key)
    record = replace(record, deliveries=replace_item(record.deliveries, 2, transaction=duplicate, started=0.5))
    assert any("of the same" in fault for fault in check_run(plan, record))


def test_keys_start_in_fetch_order():
    plan, record = make_consumer_run()
    swapped = (record.deliveries[2], record.deliveries[1], record.deliveries[0])
    deliveries = tuple(replace(delivery, fetch=0) for delivery in swapped)
    record = replace(record, deliveries=deliveries, starts=(2, 1, 0))
    assert any("which came first" in fault for fault in check_run(plan, record))


def test_a_success_handler_after_a_failure_is_found():
    plan, record = make_consumer_run()
    bodies = replace_item(record.deliveries[0].bodies, 0, result="raised")
    record = replace(record, deliveries=replace_item(record.deliveries, 0, bodies=bodies))
    assert any("success handler ran after a failure" in fault for fault in check_run(plan, record))


def test_an_exception_handler_that_ran_twice_is_found():
    plan, record = make_consumer_run()
    calls = (Call("process", 0, 0.0), Call("exception", 0, 0.5, "SYSTEM"), Call("exception", 1, 0.75, "SYSTEM"))
    bodies = tuple(HandlerCallRecord(call, call.at) for call in calls)
    record = replace(
        record,
        deliveries=replace_item(record.deliveries, 0, bodies=bodies),
        outcomes=replace_item(record.outcomes, 0, outcome="failed"),
    )
    assert any("ran to its end 2 times" in fault for fault in check_run(plan, record))


@pytest.mark.parametrize(
    "outcome, what, fault",
    [
        ("released", "ack", "is released but was settled as ack"),
        ("deferred", "release", "is deferred but was settled as release"),
        ("succeeded", "release", "is succeeded but was settled as release"),
    ],
)
def test_a_settlement_that_does_not_fit_its_outcome_is_found(outcome, what, fault):
    plan, record = make_consumer_run()
    record = replace(
        record,
        outcomes=replace_item(record.outcomes, 1, outcome=outcome),
        settlements=replace_item(record.settlements, 1, what=what),
    )
    assert any(fault in problem for problem in check_run(plan, record))


def test_an_unsettled_a_twice_settled_and_an_early_settled_delivery_are_found():
    plan, record = make_consumer_run()
    missing = check_run(plan, replace(record, settlements=record.settlements[1:]))
    assert missing == ["delivery 0 (position 0, id 'a') was left unsettled"]
    doubled = check_run(plan, replace(record, settlements=record.settlements + record.settlements[:1]))
    assert doubled == ["delivery 0 (position 0, id 'a') was settled 2 times: ['ack', 'ack']"]
    early_settlements = replace_item(record.settlements, 1, at=1.0, what=("later", 1.0))
    assert any(
        "later was sent at 1.0" in fault for fault in check_run(plan, replace(record, settlements=early_settlements))
    )


@pytest.mark.parametrize("raised", ["LoopTimeout", "LoopStalled", "FetchException", "RuntimeError"])
def test_an_error_without_a_reason_is_found(raised):
    plan, record = make_consumer_run()
    late_record = replace(record, raised=raised, ended=record.ended + 1.0)
    assert any(raised in fault for fault in check_run(plan, late_record))


def test_a_fetch_may_give_up_once_its_budget_is_exhausted():
    plan, record = make_consumer_run()
    failed_fetches = tuple(FetchRecord(2.0, 1, 0, fault="error") for _ in range(3))
    record = replace(record, fetches=record.fetches[:2] + failed_fetches, raised="FetchException")
    assert check_run(plan, record) == []
    assert check_run(plan, replace(record, fetches=record.fetches[:-1])) != []
    between = (*record.fetches[:-1], FetchRecord(2.0, 1, 0), record.fetches[-1])
    assert check_run(plan, replace(record, fetches=between)) != []


def test_a_lost_connection_of_a_streaming_loop_neither_uses_nor_resets_the_budget():
    plan, record = make_consumer_run()
    plan = replace(plan, policy={**plan.policy, "loop": {**plan.policy["loop"], "streaming": True}})
    faults = ("error", "error", "lost_connection", "error")
    failed_fetches = tuple(FetchRecord(2.0, 1, 0, fault=fault) for fault in faults)
    record = replace(record, fetches=record.fetches[:2] + failed_fetches, raised="FetchException")
    record_without_last_fetch = replace(record, fetches=record.fetches[:-1])
    assert not [fault for fault in check_run(plan, record) if "budget" in fault]
    assert [fault for fault in check_run(plan, record_without_last_fetch) if "budget" in fault]


def make_producer_run(*, limit=None, stop_at=None):
    """Return a valid call: a, b, a again and c, sequentially, two to a batch; c starts if the limit allows it."""
    deliveries = (
        make_succeeded_delivery(0, "a", at=0.0),
        make_succeeded_delivery(1, "b", at=1.0),
        make_succeeded_delivery(3, "c", at=2.0),
    )
    outcomes = [OutcomeRecord(n, "succeeded", n + 1.0, None, 1, True) for n in range(3)]
    policy = make_policy("produce", batch={"size": 2}, limit=limit)
    names = ("a", "b", "a", "c")
    record = RunRecord(
        "asyncio", deliveries, (outcomes[0], outcomes[1], outcomes[0], outcomes[2]), 3.0, starts=(0, 1, 2)
    )
    return Plan(0, "produce", policy, tuple(TransactionPlan(name) for name in names), stop_at), record


def test_a_valid_producer_run_breaks_no_rule():
    assert check_run(*make_producer_run()) == []


def test_a_report_of_the_wrong_length_or_order_is_found():
    plan, record = make_producer_run()
    assert check_run(plan, replace(record, outcomes=record.outcomes[:3])) == ["3 outcomes for 4 inputs"]
    reversed_record = replace(record, outcomes=record.outcomes[::-1])
    assert any("holds the outcome of" in fault for fault in check_run(plan, reversed_record))


def test_a_duplicate_that_ran_twice_is_found():
    plan, record = make_producer_run()
    again = replace(make_succeeded_delivery(2, "a", at=3.0))
    outcomes = replace_item(record.outcomes, 2, delivery=3)
    record = replace(record, deliveries=(*record.deliveries, again), outcomes=outcomes, starts=(0, 1, 2, 3), ended=4.0)
    faults = check_run(plan, record)
    assert "id 'a' was produced 2 times" in faults
    assert "the positions of id 'a' hold different outcomes" in faults


@pytest.mark.parametrize(
    "fields, is_valid",
    [
        ({}, True),
        ({"attempts": 1}, False),
        ({"outcome": "deferred"}, False),
        ({"reason": "timeout"}, False),
        ({"reason": None}, False),
    ],
)
def test_an_unstarted_transaction_is_released_without_attempts_and_with_a_reason(fields, is_valid):
    plan, record = make_producer_run(limit=2)
    unstarted = replace(OutcomeRecord(None, "released", 2.0, reason="limit"), **fields)
    record = replace(
        record, deliveries=record.deliveries[:2], outcomes=(*record.outcomes[:3], unstarted), starts=(0, 1), ended=2.0
    )
    assert (check_run(plan, record) == []) is is_valid


def test_a_stop_is_a_reason_not_to_start():
    plan, record = make_producer_run(stop_at=2.0)
    unstarted = OutcomeRecord(None, "released", 2.0, reason="stop")
    record = replace(
        record, deliveries=record.deliveries[:2], outcomes=(*record.outcomes[:3], unstarted), starts=(0, 1), ended=2.0
    )
    assert check_run(plan, record) == []
    assert check_run(replace(plan, stop_at=None), record) != []


def test_a_batch_that_starts_too_early_is_found():
    plan, record = make_producer_run()
    plan = replace(plan, transactions=tuple(TransactionPlan(name) for name in "abc"))
    plan.policy["loop"] |= {"concurrency": {"value": 3}}
    outcomes = (record.outcomes[0], record.outcomes[1], record.outcomes[3])
    moved = replace_item(record.deliveries, 2, position=2)
    assert check_run(plan, replace(record, deliveries=moved, outcomes=outcomes)) == []
    early = (*moved[:2], make_succeeded_delivery(2, "c", at=1.5, duration=1.5))
    faults = check_run(plan, replace(record, deliveries=early, outcomes=outcomes))
    assert any("of an earlier batch" in fault for fault in faults)


# Plans ---------------------------------------------------------------------------------------------

PLANS = tuple(plan_from_seed(seed) for seed in range(2000))


def predict_all(plans, *, flavour):
    for plan in plans:
        for number, transaction in enumerate(plan.transactions):
            started = 0.37 * number
            yield predict(
                transaction,
                plan.policy,
                flavour=flavour,
                kind=plan.kind,
                started=started,
                stop_at=plan.stop_at,
                drain_end=drain_end_of(plan),
            )


def test_equal_seeds_give_equal_plans():
    assert [plan_from_seed(seed) for seed in range(50)] == list(PLANS[:50])


def test_every_policy_of_a_plan_loads():
    for plan in PLANS[:300]:
        (ConsumerPolicy if plan.kind == "consume" else ProducerPolicy).load(plan.policy)


@pytest.mark.parametrize("what", ["hang", "shutdown", "duplicate", "odd"])
def test_at_least_a_fifth_of_the_plans_has_each_feature(what):
    counts = count_features(PLANS)
    print(counts)
    assert counts["plans"] == 2000
    assert counts[what] >= 0.2 * counts["plans"]


def test_every_planned_feature_is_common():
    counts = count_features(PLANS)
    assert {name: count for name, count in counts.items() if count < 0.03 * counts["plans"]} == {}


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_every_outcome_and_settlement_is_predicted_often(flavour):
    all_predictions = list(predict_all(PLANS, flavour=flavour))
    outcomes = Counter(prediction.outcome for prediction in all_predictions)
    settlements = Counter(p.settlement[0] if isinstance(p.settlement, tuple) else p.settlement for p in all_predictions)
    running_count = sum(any(call.still_running for call in prediction.calls) for prediction in all_predictions)
    print(len(all_predictions), outcomes, settlements, running_count)
    assert min(outcomes[name] for name in ("succeeded", "failed", "handler_failed", "deferred", "released")) > 100
    assert min(settlements[name] for name in ("ack", "dead_letter", "later", "release", "kept")) > 50
    assert running_count > 100


def test_less_than_one_prediction_in_a_hundred_is_ambiguous():
    all_predictions = [p for flavour in ("threads", "asyncio") for p in predict_all(PLANS, flavour=flavour)]
    assert sum(prediction.ambiguous for prediction in all_predictions) < 0.01 * len(all_predictions)


def test_predictions_are_consistent():
    for prediction in predict_all(PLANS, flavour="threads"):
        assert math.isfinite(prediction.ended)
        assert [call.at for call in prediction.calls] == sorted(call.at for call in prediction.calls)
        assert ("exception" in {call.step for call in prediction.calls}) or prediction.outcome not in (
            "failed",
            "handler_failed",
        )


# Behaviours ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, kind",
    [
        ("system", RuntimeError),
        ("user_timeout", TimeoutError),
        ("system_exit", SystemExit),
        ("keyboard_interrupt", KeyboardInterrupt),
        ("cancelled", asyncio.CancelledError),
    ],
)
def test_a_behaviour_raises_its_error(what, kind):
    assert type(make_behaviour(what).make_error()) is kind
    assert make_behaviour("ok").make_error() is None


def test_a_behaviour_sets_the_fields_of_its_error():
    error = make_behaviour("timeout_exc", retry_after=2.5, final=True, later=True).make_error()
    assert isinstance(error, TransactionException)
    assert (error.category, error.retry_after, error.final, error.not_attempted) == (Category.TIMEOUT, 2.5, True, True)


def test_a_redelivery_continues_after_the_last_delivery():
    first = TransactionPlan(
        "a", process=(make_behaviour("system"), make_behaviour("ok", 1.0)), success=(make_behaviour("system"),)
    )
    again = first.for_redelivery({"process": 1}, attempts=1)
    assert (again.process, again.success, again.attempts) == (
        (make_behaviour("ok", 1.0),),
        (make_behaviour("system"),),
        1,
    )


@pytest.mark.spec("DX-46")
def test_a_late_machine_excuses_no_overlap_no_second_outcome_and_no_second_settlement():
    plan, record = make_consumer_run()
    assert check_invariants(plan, record) == []
    bodies = (replace(record.deliveries[1].bodies[0], left=2.5), record.deliveries[1].bodies[1])
    overlapping = replace(record, deliveries=replace_item(record.deliveries, 1, bodies=bodies))
    assert any("another body left at 2.5" in fault for fault in check_invariants(plan, overlapping))
    doubled = replace(record, outcomes=record.outcomes + record.outcomes[:1])
    assert any("2 outcomes" in fault for fault in check_invariants(plan, doubled))
    settled_twice = replace(record, settlements=record.settlements + record.settlements[:1])
    assert any("settled 2 times" in fault for fault in check_invariants(plan, settled_twice))
    early = replace(record, settlements=replace_item(record.settlements, 1, at=1.0, what=("later", 1.0)))
    assert any("later was sent at 1.0" in fault for fault in check_invariants(plan, early))


@pytest.mark.spec("DX-46")
def test_a_late_machine_excuses_no_transaction_that_was_produced_twice():
    plan, record = make_producer_run()
    assert check_invariants(plan, record) == []
    again = replace(record, deliveries=(*record.deliveries, record.deliveries[0]))
    assert any("produced 2 times" in fault for fault in check_invariants(plan, again))
