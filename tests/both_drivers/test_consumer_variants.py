"""The same connector and the same task lead to the same decisions in both variants."""

from __future__ import annotations

import pytest

from ergon_framework.errors import Category
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from tests.both_drivers.harness import (
    VARIANTS,
    Stubborn,
    World,
    make_policy,
    raise_error,
    return_value,
    wait_then_return,
)

BUSY = TransactionException("busy", retry_after=60.0)
FINAL = TransactionException("final", final=True)
SLOW = wait_then_return(Stubborn(0.6), "late")

DESCRIPTIONS = {
    "success": {},
    "retries": {
        "process": [raise_error(OSError()), raise_error(TransactionException("t", Category.TIMEOUT)), return_value(1)]
    },
    "business": {"process": raise_error(BusinessError("no"))},
    "exhausted": {"process": raise_error(OSError())},
    "final": {"process": raise_error(FINAL)},
    "deferred": {"process": raise_error(BUSY)},
    "timeouts": {"process": SLOW},
    "second wins": {"process": [SLOW, return_value(2)]},
    "success fails": {"success": raise_error(BusinessError("no"))},
    "success slow": {"success": SLOW},
    "handler fails": {"process": raise_error(BusinessError("no")), "exception": raise_error(SystemExit(1))},
    "handler slow": {"process": raise_error(OSError()), "exception": [SLOW, return_value(None)]},
    "mixed": {
        "process": {
            "a": raise_error(BUSY),
            "b": raise_error(OSError()),
            "c": SLOW,
            "d": raise_error(BusinessError("x")),
        },
        "success": {"e": raise_error(OSError())},
    },
}

SLOW_DESCRIPTIONS = {"timeouts", "second wins", "success slow", "handler slow", "mixed"}

TRANSACTION_IDS = "abcdef"


def collect_decisions(world):
    """Return all decisions of the engine, without their times."""
    outcomes = [
        (o.transaction.id, o.kind.value, o.attempts, o.processed, str(o.category), o.still_running)
        for o in world.outcomes
    ]
    return {
        "steps": {name: world.steps(name) for name in TRANSACTION_IDS},
        "attempts": {name: [c.scope.attempt for c in world.calls if c.id == name] for name in TRANSACTION_IDS},
        "outcomes": sorted(outcomes),
        "settlements": sorted((s.id, type(s.settlement).__name__) for s in world.queue.settled),
        "end": world.report.stop_reason,
        "counts": world.report.counts,
        "late_results": world.report.late_results,
        "error": type(world.error),
    }


def run_both_variants(description, loop_policy):
    """Return the decisions of each variant."""
    worlds = [World(variant, **description) for variant in VARIANTS]
    sent = [Transaction(id=name, source="queue", key=name.replace("f", "e")) for name in TRANSACTION_IDS]
    try:
        for world in worlds:
            world.offer(*sent, "a").start(loop_policy)
        return [collect_decisions(world.finish()) for world in worlds]
    finally:
        for world in worlds:
            world.close()


@pytest.mark.spec("CON-24")
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_both_variants_make_the_same_decisions(name):
    # Where nothing is slow, nothing may time out, however busy the machine is.
    retry = {"timeout": 0.3 if name in SLOW_DESCRIPTIONS else 10.0}
    loop_policy = make_policy(concurrency=7, process=retry, success=retry, exception=retry, duplicate_delay=5.0)
    threads, aio = run_both_variants(DESCRIPTIONS[name], loop_policy)
    assert threads == aio
    assert sum(threads["counts"].values()) == 7


@pytest.mark.spec("CON-24")
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_both_variants_end_the_same_at_a_limit(limit):
    loop_policy = make_policy(concurrency=1, batch=2, limit=limit)
    threads, aio = run_both_variants({}, loop_policy)
    assert threads == aio
