"""The same connector and the same task: the same decisions, whichever variant makes them."""

from __future__ import annotations

import pytest

from ergon_framework.errors import Category
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.transaction import Transaction
from tests.twins.world import FLAVOURS, Stubborn, World, fails, gives, policy, takes

BUSY = TransactionException("busy", retry_after=60.0)
FINAL = TransactionException("final", final=True)
SLOW = takes(Stubborn(0.6), "late")

DESCRIPTIONS = {
    "success": {},
    "retries": {"process": [fails(OSError()), fails(TransactionException("t", Category.TIMEOUT)), gives(1)]},
    "business": {"process": fails(BusinessError("no"))},
    "exhausted": {"process": fails(OSError())},
    "final": {"process": fails(FINAL)},
    "deferred": {"process": fails(BUSY)},
    "timeouts": {"process": SLOW},
    "second wins": {"process": [SLOW, gives(2)]},
    "success fails": {"success": fails(BusinessError("no"))},
    "success slow": {"success": SLOW},
    "handler fails": {"process": fails(BusinessError("no")), "exception": fails(SystemExit(1))},
    "handler slow": {"process": fails(OSError()), "exception": [SLOW, gives(None)]},
    "mixed": {
        "process": {"a": fails(BUSY), "b": fails(OSError()), "c": SLOW, "d": fails(BusinessError("x"))},
        "success": {"e": fails(OSError())},
    },
}

TIMED = {"timeouts", "second wins", "success slow", "handler slow", "mixed"}

IDS = "abcdef"


def decided(world):
    """All that the engine decided, without the times at which it did."""
    outcomes = [
        (o.transaction.id, o.kind.value, o.attempts, o.processed, str(o.category), o.still_running)
        for o in world.outcomes
    ]
    return {
        "steps": {name: world.steps(name) for name in IDS},
        "attempts": {name: [c.scope.attempt for c in world.calls if c.id == name] for name in IDS},
        "outcomes": sorted(outcomes),
        "settlements": sorted((s.id, type(s.settlement).__name__) for s in world.queue.settled),
        "end": world.report.end,
        "counts": world.report.counts,
        "fenced": world.report.fenced,
        "error": type(world.error),
    }


def decisions(description, own):
    """What each variant decided, side by side."""
    worlds = [World(flavour, **description) for flavour in FLAVOURS]
    sent = [Transaction(name, source="queue", key=name.replace("f", "e")) for name in IDS]
    try:
        for world in worlds:
            world.offer(*sent, "a").start(own)
        return [decided(world.finish()) for world in worlds]
    finally:
        for world in worlds:
            world.close()


@pytest.mark.spec("CON-24")
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_both_variants_decide_alike(name):
    # Where nothing is slow, nothing may time out, however busy the machine is.
    quick = {"timeout": 0.3 if name in TIMED else 10.0}
    own = policy(concurrency=7, process=quick, success=quick, exception=quick, identity_delay=5.0)
    threads, aio = decisions(DESCRIPTIONS[name], own)
    assert threads == aio
    assert sum(threads["counts"].values()) == 7


@pytest.mark.spec("CON-24")
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_both_variants_end_alike_at_a_limit(limit):
    own = policy(concurrency=1, batch=2, limit=limit)
    threads, aio = decisions({}, own)
    assert threads == aio
