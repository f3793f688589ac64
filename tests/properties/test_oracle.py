"""The oracle says what the table says: cases computed by hand, broken records, and the shares of the plans."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

import pytest

from ergon_framework.task.exceptions import Category, TransactionException
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from tests.properties.oracle import check_invariants, check_run, differences, drain_end_of, predict
from tests.properties.plan import (
    ODD,
    Behaviour,
    BodyRecord,
    Call,
    DeliveryRecord,
    FetchRecord,
    OutcomeRecord,
    Plan,
    RunRecord,
    SettlementRecord,
    TransactionPlan,
    plan_from_seed,
    shares,
)

RETRY = {
    "max_attempts": 3,
    "timeout": 2.0,
    "backoff": 1.0,
    "multiplier": 2.0,
    "cap": 0.0,
    "hold": 30.0,
    "abandon_grace": 0.5,
}
HANDLER = RETRY | {"max_attempts": 2, "timeout": 3.0, "backoff": 0.25, "multiplier": 1.0}


def policy_of(kind="consume", *, process=(), success=(), exception=(), settle=(), **loop):
    main = "process" if kind == "consume" else "produce"
    steps = {
        main: {"retry": RETRY | dict(process)},
        "success": {"retry": HANDLER | dict(success)},
        "exception": {"retry": HANDLER | dict(exception)},
    }
    if kind == "consume":
        steps["settle"] = dict(settle)
    return {"loop": {"concurrency": {"value": 1}, "batch": {"size": 1}, "drain_timeout": 5.0} | loop, "steps": steps}


def foretold(process=(), *, success=(), exception=(), policy=None, attempts=0, **told):
    kind = told.get("kind", "consume")
    transaction = TransactionPlan("a", None, attempts, tuple(process), tuple(success), tuple(exception))
    known = {"flavour": "threads", "kind": kind, "started": 0.0, "stop_at": None, "drain_end": None}
    return predict(transaction, policy or policy_of(kind), **(known | told))


def calls_of(prediction):
    return [(call.step, call.attempt, call.at) for call in prediction.calls]


def verdict(prediction):
    return prediction.outcome, prediction.category, prediction.settlement, prediction.attempts, prediction.ended


def does(what, takes=0.0, **more):
    return Behaviour(takes, what, **more)


# Results and categories ----------------------------------------------------------------------------


def test_a_result_leads_to_the_success_handler_and_an_ack():
    seen = foretold([does("ok", 0.5)], success=[does("ok", 0.25)], started=10.0)
    assert calls_of(seen) == [("process", 0, 10.0), ("success", 0, 10.5)]
    assert verdict(seen) == ("succeeded", None, "ack", 1, 10.75)
    assert (seen.processed, seen.free, seen.ambiguous) == (True, 10.75, False)


def test_business_is_tried_once_and_then_handled():
    seen = foretold([does("business", 0.5)])
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 0.5)]
    assert verdict(seen) == ("failed", "BUSINESS", "dead_letter", 1, 0.5)
    assert (seen.calls[1].told_category, seen.calls[1].still_running) == ("BUSINESS", False)
    assert not seen.processed


@pytest.mark.parametrize("what", ["system", "system_exc", "user_timeout", *sorted(ODD)])
def test_everything_else_that_process_raises_is_system_and_retried(what):
    seen = foretold([does(what, 0.5)] * 3)
    assert calls_of(seen) == [("process", 0, 0.0), ("process", 1, 1.5), ("process", 2, 4.0), ("exception", 0, 4.5)]
    assert verdict(seen) == ("failed", "SYSTEM", "dead_letter", 3, 4.5)


def test_an_explicit_timeout_from_process_is_timeout_and_retried():
    seen = foretold([does("timeout_exc")] * 3)
    assert calls_of(seen)[-1] == ("exception", 0, 3.0)
    assert seen.category == "TIMEOUT"
    assert seen.calls[-1].still_running is False


@pytest.mark.parametrize("what", ["business", "timeout_exc", "system_exit"])
def test_whatever_the_success_handler_raises_is_system_under_its_own_budget(what):
    seen = foretold(success=[does(what), does(what)])
    assert calls_of(seen) == [("process", 0, 0.0), ("success", 0, 0.0), ("success", 1, 0.25), ("exception", 0, 0.25)]
    assert (seen.outcome, seen.category, seen.processed, seen.attempts) == ("failed", "SYSTEM", True, 1)


def test_a_success_handler_may_recover():
    seen = foretold(success=[does("business"), does("ok", 1.0)])
    assert calls_of(seen) == [("process", 0, 0.0), ("success", 0, 0.0), ("success", 1, 0.25)]
    assert verdict(seen) == ("succeeded", None, "ack", 1, 1.25)


def test_an_exhausted_exception_handler_keeps_the_category_that_it_was_told():
    seen = foretold([does("business")], exception=[does("timeout_exc"), does("system")])
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 0.0), ("exception", 1, 0.25)]
    assert verdict(seen) == ("handler_failed", "BUSINESS", "dead_letter", 1, 0.25)
    assert [call.told_category for call in seen.calls] == [None, "BUSINESS", "BUSINESS"]


def test_a_final_error_ends_its_step_in_process_and_in_handlers():
    seen = foretold([does("system_exc", final=True)], exception=[does("business", final=True)])
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 0.0)]
    assert seen.outcome == "handler_failed"


def test_what_was_not_even_tried_is_put_off_and_costs_no_attempt():
    seen = foretold([does("system"), does("system_exc", later=True, retry_after=0.5)])
    assert calls_of(seen) == [("process", 0, 0.0), ("process", 1, 1.0)]
    assert verdict(seen) == ("deferred", "SYSTEM", ("later", 2.0), 1, 1.0)
    assert foretold([does("system_exc", later=True, retry_after=9.0)], attempts=3).attempts == 3
    assert foretold([does("system_exc", later=True)], kind="produce").outcome == "succeeded"


@pytest.mark.parametrize("what", [{"what": "system_exc", "final": True}, {"what": "business"}])
def test_never_is_stronger_than_later(what):
    assert foretold([does(**what, later=True)]).outcome == "failed"


# Waiting -------------------------------------------------------------------------------------------


def test_waits_grow_by_the_attempt_and_stop_at_the_cap():
    policy = policy_of(process={"max_attempts": 4, "cap": 2.5})
    seen = foretold([does("system")] * 4, policy=policy)
    assert [at for step, _, at in calls_of(seen) if step == "process"] == [0.0, 1.0, 3.0, 5.5]


def test_retry_after_is_a_least_wait_beyond_the_cap():
    policy = policy_of(process={"cap": 0.5})
    seen = foretold([does("system_exc", retry_after=4.0), does("system_exc", retry_after=0.1)], policy=policy)
    assert [at for _, _, at in calls_of(seen)] == [0.0, 4.0, 4.5, 4.5]


def test_without_backoff_the_next_attempt_is_at_once():
    policy = policy_of(process={"backoff": 0.0})
    assert [at for _, _, at in calls_of(foretold([does("system")] * 3, policy=policy))] == [0.0] * 4


def test_a_wait_beyond_hold_defers_without_any_handler():
    seen = foretold([does("system", 0.5)], policy=policy_of(process={"hold": 0.9}))
    assert calls_of(seen) == [("process", 0, 0.0)]
    assert verdict(seen) == ("deferred", "SYSTEM", ("later", 1.0), 1, 0.5)


def test_a_retry_after_beyond_hold_defers_but_not_on_the_last_attempt():
    late = does("system_exc", retry_after=31.0)
    assert verdict(foretold([late])) == ("deferred", "SYSTEM", ("later", 31.0), 1, 0.0)
    seen = foretold([late], policy=policy_of(process={"max_attempts": 1}))
    assert verdict(seen) == ("failed", "SYSTEM", "dead_letter", 1, 0.0)


def test_a_wait_of_exactly_hold_is_slept():
    seen = foretold([does("system")], policy=policy_of(process={"hold": 1.0}))
    assert verdict(seen) == ("succeeded", None, "ack", 2, 1.0)
    assert not seen.ambiguous


def test_handlers_and_producers_sleep_what_a_process_step_would_defer():
    late = does("system_exc", retry_after=31.0)
    assert verdict(foretold(success=[late])) == ("succeeded", None, "ack", 1, 31.0)
    assert verdict(foretold([does("business")], exception=[late])) == ("failed", "BUSINESS", "dead_letter", 1, 31.0)
    assert verdict(foretold([late], kind="produce")) == ("succeeded", None, None, 2, 31.0)


def test_carried_attempts_go_on_counting():
    seen = foretold([does("system")] * 3, attempts=1)
    assert calls_of(seen) == [("process", 1, 0.0), ("process", 2, 2.0), ("exception", 0, 2.0)]
    assert seen.attempts == 3


def test_more_carried_attempts_than_allowed_still_leave_one():
    seen = foretold([does("system")] * 3, attempts=7)
    assert calls_of(seen) == [("process", 2, 0.0), ("exception", 0, 0.0)]
    assert seen.attempts == 8


def test_a_producer_carries_no_attempts():
    seen = foretold([does("system")] * 3, attempts=1, kind="produce")
    assert [call.attempt for call in seen.calls] == [0, 1, 2, 0]
    assert (seen.attempts, seen.calls[0].step, seen.settlement) == (3, "produce", None)


# Timeouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_a_retry_waits_until_the_body_has_left(flavour):
    seen = foretold([does("ok", 2.25)], flavour=flavour)
    left = 2.25 if flavour == "threads" else 2.0
    assert calls_of(seen)[:2] == [("process", 0, 0.0), ("process", 1, left + 1.0)]
    assert verdict(seen) == ("succeeded", None, "ack", 2, left + 1.0)


def test_a_task_that_ignores_its_cancellation_is_like_a_thread():
    body = does("ok", 2.25, on_cancel="ignores")
    assert foretold([body], flavour="asyncio") == foretold([body], flavour="threads")


def test_a_body_that_outlives_the_grace_is_never_retried_and_the_handler_knows():
    seen = foretold([does("ok", 9.0)], exception=[does("ok", 0.125)])
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 2.5)]
    assert (seen.calls[1].told_category, seen.calls[1].still_running) == ("TIMEOUT", True)
    assert verdict(seen) == ("failed", "TIMEOUT", "dead_letter", 1, 2.625)
    assert (seen.free, seen.processed) == (9.0, False)


def test_the_handler_waits_for_the_last_attempt_to_leave_too():
    seen = foretold([does("ok", 2.25)], policy=policy_of(process={"max_attempts": 1}))
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 2.25)]
    assert seen.calls[1].still_running is False


def test_a_success_handler_that_outlives_the_grace_leaves_process_done():
    seen = foretold(success=[does("ok", 50.0)])
    assert calls_of(seen) == [("process", 0, 0.0), ("success", 0, 0.0), ("exception", 0, 3.5)]
    assert (seen.category, seen.processed, seen.calls[2].still_running) == ("TIMEOUT", True, True)


def test_an_exception_handler_that_outlives_the_grace_is_exhausted():
    seen = foretold([does("business")], exception=[does("ok", 40.0)])
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 0.0)]
    assert verdict(seen) == ("handler_failed", "BUSINESS", "dead_letter", 1, 3.5)
    assert seen.free == 40.0


def test_an_exception_handler_that_times_out_but_leaves_is_retried():
    seen = foretold([does("business")], exception=[does("ok", 3.25)])
    assert calls_of(seen)[1:] == [("exception", 0, 0.0), ("exception", 1, 3.5)]
    assert seen.outcome == "failed"


def test_a_step_without_a_timeout_ends_when_it_ends():
    assert foretold([does("ok", 900.0)], policy=policy_of(process={"timeout": None})).ended == 900.0


# The lifecycle's own time --------------------------------------------------------------------------


def test_the_lifecycle_starts_with_the_worker_and_cuts_process_short():
    seen = foretold([does("ok", 1.5)], policy=policy_of(transaction_timeout=1.25), started=100.0)
    assert calls_of(seen) == [("process", 0, 100.0), ("exception", 0, 101.5)]
    assert (seen.category, seen.calls[1].still_running) == ("TIMEOUT", False)


def test_a_wait_that_does_not_fit_the_lifecycle_ends_the_step_with_the_last_error():
    seen = foretold([does("system", 0.5)], policy=policy_of(transaction_timeout=1.25))
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 0.5)]
    assert verdict(seen) == ("failed", "SYSTEM", "dead_letter", 1, 0.5)


def test_the_lifecycle_binds_the_success_handler():
    seen = foretold([does("ok", 1.0)], success=[does("ok", 1.0)], policy=policy_of(transaction_timeout=1.75))
    assert calls_of(seen) == [("process", 0, 0.0), ("success", 0, 1.0), ("exception", 0, 2.0)]
    assert (seen.category, seen.processed) == ("TIMEOUT", True)


def test_the_lifecycle_never_binds_the_exception_handler():
    policy = policy_of(transaction_timeout=0.5)
    seen = foretold([does("business", 0.25)], exception=[does("system", 2.0), does("ok", 2.0)], policy=policy)
    assert calls_of(seen)[1:] == [("exception", 0, 0.25), ("exception", 1, 2.5)]
    assert verdict(seen) == ("failed", "BUSINESS", "dead_letter", 1, 4.5)


def test_a_body_that_leaves_after_the_lifecycle_is_not_retried_even_without_a_wait():
    policy = policy_of(transaction_timeout=2.125, process={"backoff": 0.0})
    seen = foretold([does("ok", 2.25)], policy=policy)
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 2.25)]
    assert seen.category == "TIMEOUT"


def test_a_task_that_leaves_when_the_lifecycle_ends_is_no_race():
    policy = policy_of(transaction_timeout=1.25, process={"backoff": 0.0})
    seen = foretold([does("ok", 1.5)], policy=policy, flavour="asyncio")
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 1.25)]
    assert not seen.ambiguous


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_an_expired_lifecycle_is_over_even_if_the_wait_is_beyond_hold(flavour):
    policy = policy_of(transaction_timeout=1.25, process={"hold": 0.5})
    seen = foretold([does("ok", 1.5)], policy=policy, flavour=flavour)
    assert verdict(seen) == ("failed", "TIMEOUT", "dead_letter", 1, 1.5 if flavour == "threads" else 1.25)


def test_a_body_that_leaves_after_the_lifecycle_is_not_deferred():
    policy = policy_of(transaction_timeout=2.25, process={"timeout": 2.0, "hold": 0.5})
    assert foretold([does("ok", 2.5)], policy=policy).outcome == "failed"
    assert foretold([does("ok", 2.125)], policy=policy).outcome == "deferred"


# Settlements ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what, category", [("business", "business"), ("system", "system"), ("ok", "timeout")])
def test_the_policy_settles_failures_by_category(what, category):
    policy = policy_of(process={"max_attempts": 1}, settle={f"on_{category}": "ack"})
    body = does(what, 2.25 if what == "ok" else 0.0)
    assert foretold([body], policy=policy).settlement == "ack"
    assert foretold([body], policy=policy, exception=[does("system")] * 2).settlement == "ack"
    assert foretold([body], policy=policy_of(process={"max_attempts": 1})).settlement == "dead_letter"


@pytest.mark.parametrize("settles", ["ack", "dead_letter", ("later", 7.5)])
def test_what_a_handler_returns_wins_over_the_policy(settles):
    handler = does("ok", settles=settles)
    assert foretold(success=[handler]).settlement == settles
    assert foretold([does("business")], exception=[handler]).settlement == settles
    assert foretold(success=[handler], kind="produce").settlement is None


def test_what_a_timed_out_handler_returns_is_nobodys_settlement():
    late = does("ok", 3.25, settles="ack")
    assert foretold([does("business")], exception=[late, does("system")]).settlement == "dead_letter"


def test_later_waits_for_the_body_and_is_kept_if_the_loop_ends_first():
    exception = [does("ok", settles=("later", 1.0))]
    assert foretold([does("ok", 9.0)], exception=exception).settlement == ("later", 1.0)
    assert foretold([does("ok", 9.0)], exception=exception, drain_end=9.5).settlement == ("later", 1.0)
    seen = foretold([does("ok", 9.0)], exception=exception, stop_at=3.0, drain_end=8.0)
    assert verdict(seen) == ("failed", "TIMEOUT", "kept", 1, 2.5)


# Shutdown ------------------------------------------------------------------------------------------


def test_what_runs_at_a_stop_goes_on():
    assert foretold([does("system", 0.5)], stop_at=0.25, drain_end=5.25) == foretold([does("system", 0.5)])


def test_a_wait_is_released_when_the_drain_ends():
    seen = foretold([does("system", 0.5)], attempts=1, stop_at=0.25, drain_end=1.25)
    assert calls_of(seen) == [("process", 1, 0.0)]
    assert verdict(seen) == ("released", None, "release", 1, 1.25)


def test_a_running_body_keeps_its_claim_when_the_drain_ends():
    seen = foretold([does("ok", 1.5)], stop_at=0.25, drain_end=1.25)
    assert verdict(seen) == ("released", None, "kept", 0, 1.25)
    assert seen.free == 1.5


def test_a_body_in_its_grace_keeps_its_claim_when_the_drain_ends():
    assert foretold([does("ok", 9.0)], stop_at=1.0, drain_end=2.25).settlement == "kept"


def test_a_waiting_exception_handler_keeps_the_claim_of_a_body_left_behind():
    exception = [does("system"), does("ok")]
    seen = foretold([does("ok", 9.0)], exception=exception, stop_at=1.0, drain_end=2.625)
    assert calls_of(seen) == [("process", 0, 0.0), ("exception", 0, 2.5)]
    assert verdict(seen) == ("released", None, "kept", 0, 2.625)


def test_a_released_transaction_remembers_that_process_had_succeeded():
    seen = foretold(success=[does("system")], stop_at=0.05, drain_end=0.125)
    assert (seen.outcome, seen.settlement, seen.processed) == ("released", "release", True)


def test_nothing_starts_after_the_stop():
    seen = foretold([does("ok", 1.0)], attempts=1, started=3.0, stop_at=2.0, drain_end=7.0)
    assert (seen.calls, verdict(seen)) == ((), ("released", None, "release", 1, 3.0))


def test_the_drain_of_a_plan_begins_at_the_first_of_stop_and_timeout():
    plan = Plan(0, "consume", policy_of(timeout=4.0), (), stop_at=6.0)
    assert drain_end_of(plan, began=10.0) == 14.0
    assert drain_end_of(replace(plan, policy=policy_of(timeout=4.0, timeout_drain=5.0)), began=10.0) == 19.0
    assert drain_end_of(replace(plan, stop_at=3.0, policy=policy_of(timeout=4.0)), began=10.0) == 14.0
    assert drain_end_of(replace(plan, policy=policy_of())) == 11.0
    assert drain_end_of(Plan(0, "consume", policy_of(), ())) is None


# Races ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "process, told",
    [
        ([does("ok", 2.0)], {}),  # deadline and end
        ([does("ok", 2.5)], {}),  # grace and leaving
        ([does("system", 0.5)], {"drain_end": 1.5}),  # wait and drain
        ([does("system", 0.25)], {"policy": policy_of(transaction_timeout=1.25)}),  # wait and lifecycle
        ([does("ok", 1.0)], {"stop_at": 0.0}),  # start and stop
    ],
)
def test_a_photo_finish_is_ambiguous(process, told):
    assert foretold(process, **told).ambiguous


# Comparing and checking ----------------------------------------------------------------------------


def test_a_delivery_is_compared_with_its_prediction():
    seen = foretold([does("business", 0.5)])
    delivery = DeliveryRecord(0, TransactionPlan("a"), 0, 0.0, tuple(BodyRecord(call, 0.5) for call in seen.calls))
    outcome = OutcomeRecord(0, "failed", 0.5, "BUSINESS", 1)
    assert differences(seen, delivery, outcome) == []
    for wrong in ({"outcome": "released"}, {"category": None}, {"attempts": 2}, {"at": 0.6}, {"processed": True}):
        assert len(differences(seen, delivery, replace(outcome, **wrong))) == 1
    assert len(differences(seen, replace(delivery, bodies=delivery.bodies[:1]), outcome)) == 1


def succeeded(position, name, *, at, key=None, fetch=None, took=1.0):
    bodies = (
        BodyRecord(Call("process" if fetch is not None else "produce", 0, at), at + took),
        BodyRecord(Call("success", 0, at + took), at + took),
    )
    return DeliveryRecord(position, TransactionPlan(name, key), fetch, at, bodies)


def consumed(*, stop_at=None, **loop):
    """A sound run of three transactions, two of them with one key, on two slots."""
    deliveries = (
        succeeded(0, "a", at=0.0, key="red", fetch=0),
        succeeded(1, "b", at=0.0, fetch=0, took=2.0),
        succeeded(2, "c", at=1.0, key="red", fetch=1),
    )
    ends = (1.0, 2.0, 2.0)
    transactions = tuple(delivery.transaction for delivery in deliveries)
    policy = policy_of(concurrency={"value": 2}, batch={"size": 2}, **loop)
    record = RunRecord(
        flavour="threads",
        deliveries=deliveries,
        outcomes=tuple(OutcomeRecord(n, "succeeded", end, None, 1, True) for n, end in enumerate(ends)),
        ended=2.0,
        starts=(0, 1, 2),
        fetches=(FetchRecord(0.0, 2, 2), FetchRecord(1.0, 1, 1), FetchRecord(2.0, 1, 0)),
        settlements=tuple(SettlementRecord(n, end, "ack") for n, end in enumerate(ends)),
    )
    return Plan(0, "consume", policy, transactions, stop_at), record


def changed(items, index, /, **fields):
    return (*items[:index], replace(items[index], **fields), *items[index + 1 :])


def test_a_sound_consumer_run_breaks_nothing():
    assert check_run(*consumed()) == []


def test_too_many_running_bodies_are_found():
    plan, record = consumed()
    plan.policy["loop"]["concurrency"]["value"] = 1
    assert any("allowed are 1" in fault for fault in check_run(plan, record))


def test_a_body_that_overlaps_its_predecessor_is_found():
    plan, record = consumed()
    bodies = (replace(record.deliveries[1].bodies[0], left=2.5), record.deliveries[1].bodies[1])
    record = replace(record, deliveries=changed(record.deliveries, 1, bodies=bodies))
    assert any("success entered at 2.0 while process" in fault for fault in check_run(plan, record))


@pytest.mark.parametrize(
    "step, entered, sound",
    [("process", 2.5, True), ("process", 2.25, False), ("exception", 8.0, False)],
)
def test_only_an_exception_handler_after_the_grace_may_overlap(step, entered, sound):
    plan, _ = consumed()
    first = (BodyRecord(Call("process", 0, 0.0), 0.0, "raised"),) if step == "exception" else ()
    bodies = (
        *first,
        BodyRecord(Call(step, 0, 0.0), 9.0),
        BodyRecord(Call("exception", 1, entered, "TIMEOUT", still_running=True), entered),
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
    assert (check_run(replace(plan, transactions=(TransactionPlan("a"),)), record) == []) is sound


@pytest.mark.parametrize("keep", [slice(1, None), slice(None, None)])
def test_a_missing_or_doubled_outcome_is_found(keep):
    plan, record = consumed()
    outcomes = (*record.outcomes[keep], *(record.outcomes[:1] if keep.start is None else ()))
    assert any("outcomes" in fault for fault in check_run(plan, replace(record, outcomes=outcomes)))


def test_the_limit_is_exact():
    assert check_run(*consumed(limit=3)) != []  # the last fetch asked for more than the limit left
    plan, record = consumed(limit=3)
    record = replace(record, fetches=record.fetches[:2], reason="limit")
    assert check_run(plan, record) == []
    plan.policy["loop"]["limit"] = 2
    assert any("3 transactions started, the limit is 2" in fault for fault in check_run(plan, record))
    plan.policy["loop"]["limit"] = 4
    assert any("ended at its limit 4" in fault for fault in check_run(plan, record))
    plan.policy["loop"]["limit"] = 0
    assert any("limit is 0" in fault for fault in check_run(plan, record))


def test_too_few_starts_are_found_unless_the_loop_was_stopped():
    plan, record = consumed()
    plan = replace(plan, transactions=(*plan.transactions, TransactionPlan("d")))
    assert check_run(plan, record) == ["3 transactions started, due were 4"]
    assert check_run(replace(plan, stop_at=2.0), record) == []


def test_an_early_end_excuses_fewer_starts_and_a_released_transaction_is_sound():
    plan, record = consumed(timeout=1.5, timeout_drain=0.25)
    kept = (BodyRecord(Call("process", 0, 0.0), 1.875),)
    record = replace(
        record,
        deliveries=changed(record.deliveries[:2], 1, bodies=kept),
        outcomes=changed(record.outcomes[:2], 1, outcome="released", at=1.75, attempts=0),
        settlements=record.settlements[:1],
        fetches=record.fetches[:2],
        starts=(0, 1),
        ended=1.75,
        raised="LoopTimeout",
    )
    assert check_run(plan, record) == []


def test_a_loop_that_raised_is_excused_too():
    plan, record = consumed()
    plan = replace(plan, transactions=(*plan.transactions, TransactionPlan("d")))
    failed = tuple(FetchRecord(2.0, 1, 0, fault="error") for _ in range(3))
    assert check_run(plan, replace(record, fetches=failed, raised="FetchException")) == [
        fault for fault in check_run(plan, replace(record, fetches=failed)) if "due were" not in fault
    ]


def test_what_never_started_can_only_be_released_or_deferred():
    plan, record = consumed()
    idle = changed(record.deliveries, 2, started=None, bodies=())
    record = replace(record, deliveries=idle, starts=(0, 1))
    assert any("never started but is succeeded" in fault for fault in check_run(plan, record))


@pytest.mark.parametrize("asked", [0, 3])
def test_a_fetch_for_nothing_or_for_more_than_the_batch_is_found(asked):
    plan, record = consumed()
    fetches = changed(record.fetches, 2, asked=asked)
    assert any("asked for" in fault for fault in check_run(plan, replace(record, fetches=fetches)))


def test_a_fetch_for_more_than_the_free_slots_is_found():
    plan, record = consumed()
    fetches = changed(record.fetches, 1, asked=2)
    assert any("free slots" in fault for fault in check_run(plan, replace(record, fetches=fetches)))


def test_a_delivery_that_waits_for_its_key_holds_no_slot_yet():
    plan, record = consumed()
    waiting = succeeded(2, "c", at=1.0, key="red", fetch=0)
    fetches = (FetchRecord(0.0, 1, 1), FetchRecord(0.0, 1, 1), FetchRecord(0.5, 1, 0))
    record = replace(
        record,
        deliveries=(record.deliveries[0], waiting, succeeded(1, "b", at=0.0, fetch=1, took=0.25)),
        outcomes=changed(record.outcomes, 2, at=0.25),
        settlements=changed(record.settlements, 2, at=0.25),
        fetches=fetches,
    )
    assert check_run(plan, record) == []


def test_after_a_stop_there_is_no_fetch_and_no_start_and_an_end_in_time():
    faults = check_run(*consumed(stop_at=0.5, drain_timeout=0.25))
    assert [fault.split(" at ")[0] for fault in faults] == [
        "the loop ended",
        "delivery 2 (position 2, id 'c') started",
        "fetch 1",
        "fetch 2",
    ]


@pytest.mark.parametrize("key, name", [("red", "c"), (None, "b")])
def test_one_id_and_one_key_are_never_in_flight_twice(key, name):
    plan, record = consumed()
    twin = TransactionPlan(name, key)
    record = replace(record, deliveries=changed(record.deliveries, 2, transaction=twin, started=0.5))
    assert any("of the same" in fault for fault in check_run(plan, record))


def test_keys_start_in_fetch_order():
    plan, record = consumed()
    swapped = (record.deliveries[2], record.deliveries[1], record.deliveries[0])
    deliveries = tuple(replace(delivery, fetch=0) for delivery in swapped)
    record = replace(record, deliveries=deliveries, starts=(2, 1, 0))
    assert any("which came first" in fault for fault in check_run(plan, record))


def test_a_success_handler_after_a_failure_is_found():
    plan, record = consumed()
    bodies = changed(record.deliveries[0].bodies, 0, result="raised")
    record = replace(record, deliveries=changed(record.deliveries, 0, bodies=bodies))
    assert any("success handler ran after a failure" in fault for fault in check_run(plan, record))


def test_an_exception_handler_that_ran_twice_is_found():
    plan, record = consumed()
    calls = (Call("process", 0, 0.0), Call("exception", 0, 0.5, "SYSTEM"), Call("exception", 1, 0.75, "SYSTEM"))
    bodies = tuple(BodyRecord(call, call.at) for call in calls)
    record = replace(
        record,
        deliveries=changed(record.deliveries, 0, bodies=bodies),
        outcomes=changed(record.outcomes, 0, outcome="failed"),
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
    plan, record = consumed()
    record = replace(
        record,
        outcomes=changed(record.outcomes, 1, outcome=outcome),
        settlements=changed(record.settlements, 1, what=what),
    )
    assert any(fault in found for found in check_run(plan, record))


def test_an_unsettled_a_twice_settled_and_a_hasty_delivery_are_found():
    plan, record = consumed()
    missing = check_run(plan, replace(record, settlements=record.settlements[1:]))
    assert missing == ["delivery 0 (position 0, id 'a') was left unsettled"]
    doubled = check_run(plan, replace(record, settlements=record.settlements + record.settlements[:1]))
    assert doubled == ["delivery 0 (position 0, id 'a') was settled 2 times: ['ack', 'ack']"]
    hasty = changed(record.settlements, 1, at=1.0, what=("later", 1.0))
    assert any("later was sent at 1.0" in fault for fault in check_run(plan, replace(record, settlements=hasty)))


@pytest.mark.parametrize("raised", ["LoopTimeout", "LoopStalled", "FetchException", "RuntimeError"])
def test_an_error_without_a_reason_is_found(raised):
    plan, record = consumed()
    late = replace(record, raised=raised, ended=record.ended + 1.0)
    assert any(raised in fault for fault in check_run(plan, late))


def test_a_fetch_may_give_up_once_its_budget_is_spent():
    plan, record = consumed()
    failed = tuple(FetchRecord(2.0, 1, 0, fault="error") for _ in range(3))
    record = replace(record, fetches=record.fetches[:2] + failed, raised="FetchException")
    assert check_run(plan, record) == []
    assert check_run(plan, replace(record, fetches=record.fetches[:-1])) != []
    between = (*record.fetches[:-1], FetchRecord(2.0, 1, 0), record.fetches[-1])
    assert check_run(plan, replace(record, fetches=between)) != []


def test_a_lost_connection_of_a_streaming_loop_neither_spends_budget_nor_gives_it_back():
    plan, record = consumed()
    plan = replace(plan, policy={**plan.policy, "loop": {**plan.policy["loop"], "streaming": True}})
    faults = ("error", "error", "lost_connection", "error")
    failed = tuple(FetchRecord(2.0, 1, 0, fault=fault) for fault in faults)
    record = replace(record, fetches=record.fetches[:2] + failed, raised="FetchException")
    without = replace(record, fetches=record.fetches[:-1])
    assert not [fault for fault in check_run(plan, record) if "budget" in fault]
    assert [fault for fault in check_run(plan, without) if "budget" in fault]


def produced(*, limit=None, stop_at=None):
    """A sound call: a, b, a again and c, one after the other, two to a batch; c stays below no limit."""
    deliveries = (succeeded(0, "a", at=0.0), succeeded(1, "b", at=1.0), succeeded(3, "c", at=2.0))
    done = [OutcomeRecord(n, "succeeded", n + 1.0, None, 1, True) for n in range(3)]
    policy = policy_of("produce", batch={"size": 2}, limit=limit)
    names = ("a", "b", "a", "c")
    record = RunRecord("asyncio", deliveries, (done[0], done[1], done[0], done[2]), 3.0, starts=(0, 1, 2))
    return Plan(0, "produce", policy, tuple(TransactionPlan(name) for name in names), stop_at), record


def test_a_sound_producer_run_breaks_nothing():
    assert check_run(*produced()) == []


def test_a_report_of_the_wrong_length_or_order_is_found():
    plan, record = produced()
    assert check_run(plan, replace(record, outcomes=record.outcomes[:3])) == ["3 outcomes for 4 inputs"]
    turned = replace(record, outcomes=record.outcomes[::-1])
    assert any("holds the outcome of" in fault for fault in check_run(plan, turned))


def test_a_duplicate_that_ran_twice_is_found():
    plan, record = produced()
    again = replace(succeeded(2, "a", at=3.0))
    outcomes = changed(record.outcomes, 2, delivery=3)
    record = replace(record, deliveries=(*record.deliveries, again), outcomes=outcomes, starts=(0, 1, 2, 3), ended=4.0)
    faults = check_run(plan, record)
    assert "id 'a' was produced 2 times" in faults
    assert "the positions of id 'a' hold different outcomes" in faults


@pytest.mark.parametrize(
    "fields, sound",
    [
        ({}, True),
        ({"attempts": 1}, False),
        ({"outcome": "deferred"}, False),
        ({"reason": "timeout"}, False),
        ({"reason": None}, False),
    ],
)
def test_what_never_started_is_released_without_attempts_and_says_why(fields, sound):
    plan, record = produced(limit=2)
    never = replace(OutcomeRecord(None, "released", 2.0, reason="limit"), **fields)
    record = replace(
        record, deliveries=record.deliveries[:2], outcomes=(*record.outcomes[:3], never), starts=(0, 1), ended=2.0
    )
    assert (check_run(plan, record) == []) is sound


def test_a_stop_is_a_reason_not_to_start():
    plan, record = produced(stop_at=2.0)
    never = OutcomeRecord(None, "released", 2.0, reason="stop")
    record = replace(
        record, deliveries=record.deliveries[:2], outcomes=(*record.outcomes[:3], never), starts=(0, 1), ended=2.0
    )
    assert check_run(plan, record) == []
    assert check_run(replace(plan, stop_at=None), record) != []


def test_a_batch_that_began_too_early_is_found():
    plan, record = produced()
    plan = replace(plan, transactions=tuple(TransactionPlan(name) for name in "abc"))
    plan.policy["loop"] |= {"concurrency": {"value": 3}}
    outcomes = (record.outcomes[0], record.outcomes[1], record.outcomes[3])
    moved = changed(record.deliveries, 2, position=2)
    assert check_run(plan, replace(record, deliveries=moved, outcomes=outcomes)) == []
    early = (*moved[:2], succeeded(2, "c", at=1.5, took=1.5))
    faults = check_run(plan, replace(record, deliveries=early, outcomes=outcomes))
    assert any("of an earlier batch" in fault for fault in faults)


# Plans ---------------------------------------------------------------------------------------------

PLANS = tuple(plan_from_seed(seed) for seed in range(2000))


def predictions(plans, *, flavour):
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
def test_at_least_a_fifth_of_the_plans_is_special(what):
    counts = shares(PLANS)
    print(counts)
    assert counts["plans"] == 2000
    assert counts[what] >= 0.2 * counts["plans"]


def test_nothing_that_can_be_planned_is_rare():
    counts = shares(PLANS)
    assert {name: count for name, count in counts.items() if count < 0.03 * counts["plans"]} == {}


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_every_outcome_and_settlement_is_foretold_often(flavour):
    seen = list(predictions(PLANS, flavour=flavour))
    outcomes = Counter(prediction.outcome for prediction in seen)
    settled = Counter(p.settlement[0] if isinstance(p.settlement, tuple) else p.settlement for p in seen)
    running = sum(any(call.still_running for call in prediction.calls) for prediction in seen)
    print(len(seen), outcomes, settled, running)
    assert min(outcomes[name] for name in ("succeeded", "failed", "handler_failed", "deferred", "released")) > 100
    assert min(settled[name] for name in ("ack", "dead_letter", "later", "release", "kept")) > 50
    assert running > 100


def test_less_than_one_prediction_in_a_hundred_is_ambiguous():
    seen = [p for flavour in ("threads", "asyncio") for p in predictions(PLANS, flavour=flavour)]
    assert sum(prediction.ambiguous for prediction in seen) < 0.01 * len(seen)


def test_predictions_keep_their_own_promises():
    for seen in predictions(PLANS, flavour="threads"):
        assert math.isfinite(seen.ended)
        assert [call.at for call in seen.calls] == sorted(call.at for call in seen.calls)
        assert ("exception" in {call.step for call in seen.calls}) or seen.outcome not in ("failed", "handler_failed")


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
def test_a_behaviour_raises_what_it_says(what, kind):
    assert type(does(what).error()) is kind
    assert does("ok").error() is None


def test_a_behaviour_carries_its_verdict():
    error = does("timeout_exc", retry_after=2.5, final=True, later=True).error()
    assert isinstance(error, TransactionException)
    assert (error.category, error.retry_after, error.final, error.later) == (Category.TIMEOUT, 2.5, True, True)


def test_a_redelivery_goes_on_where_the_last_delivery_was():
    first = TransactionPlan("a", process=(does("system"), does("ok", 1.0)), success=(does("system"),))
    again = first.redelivered({"process": 1}, attempts=1)
    assert (again.process, again.success, again.attempts) == ((does("ok", 1.0),), (does("system"),), 1)


@pytest.mark.spec("DX-46")
def test_a_late_machine_excuses_no_overlap_no_second_outcome_and_no_second_settlement():
    plan, record = consumed()
    assert check_invariants(plan, record) == []
    bodies = (replace(record.deliveries[1].bodies[0], left=2.5), record.deliveries[1].bodies[1])
    overlapping = replace(record, deliveries=changed(record.deliveries, 1, bodies=bodies))
    assert any("another body left at 2.5" in fault for fault in check_invariants(plan, overlapping))
    doubled = replace(record, outcomes=record.outcomes + record.outcomes[:1])
    assert any("2 outcomes" in fault for fault in check_invariants(plan, doubled))
    settled_twice = replace(record, settlements=record.settlements + record.settlements[:1])
    assert any("settled 2 times" in fault for fault in check_invariants(plan, settled_twice))
    hasty = replace(record, settlements=changed(record.settlements, 1, at=1.0, what=("later", 1.0)))
    assert any("later was sent at 1.0" in fault for fault in check_invariants(plan, hasty))


@pytest.mark.spec("DX-46")
def test_a_late_machine_excuses_no_transaction_that_was_produced_twice():
    plan, record = produced()
    assert check_invariants(plan, record) == []
    again = replace(record, deliveries=(*record.deliveries, record.deliveries[0]))
    assert any("produced 2 times" in fault for fault in check_invariants(plan, again))
