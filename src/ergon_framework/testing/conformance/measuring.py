"""Checks of the reported depth and durability."""

from __future__ import annotations

import asyncio

from ergon_framework.connectors.base import DeadLetter, Defer
from ergon_framework.testing.conformance.candidate import UNSAID
from ergon_framework.testing.conformance.check import NotApplicable, check, expect
from ergon_framework.testing.conformance.sitting import CheckContext

AGE = 0.2


@check("CNN-01")
async def the_depth_is_what_is_there(sitting: CheckContext) -> None:
    client = await sitting.client()
    empty = await client.depth()
    if empty is None:
        raise NotApplicable("depth() answers None: the broker cannot say")
    expect((empty.ready, empty.oldest_age) == (0, None), f"the depth of an empty queue is {empty}")
    await client.dispatch(*sitting.transactions(6))
    later, dead, held, done = await client.claim(4)
    await client.settles(Defer(60.0), later)
    await client.ack(done)
    buried = client.capabilities.dead_letters
    if buried:
        await client.settles(DeadLetter("why"), dead)
    await asyncio.sleep(AGE)
    depth = await client.depth()
    wanted = (2, 1, 1, 1) if buried else (2, 1, 2, 0)
    found = None if depth is None else (depth.ready, depth.delayed, depth.in_flight, depth.dead)
    expect(found == wanted, f"ready, delayed, in flight and dead are {found}, not {wanted}")
    age = None if depth is None else depth.oldest_age
    expect(age is not None and AGE * 0.9 <= age < 60, f"the oldest has waited for {AGE} s, its age is {age}")
    await client.ack(held)


@check("CNN-17")
async def it_says_what_a_power_loss_could_cost(sitting: CheckContext) -> None:
    client = await sitting.client()
    said, wanted = client.capabilities.durable, sitting.candidate.durable
    expect(said in (True, False, None), f"durable is {said!r}, not True, False or None")
    if wanted is UNSAID:
        raise NotApplicable(f"durable is {said}, and the candidate does not say what its server's settings are worth")
    expect(said is wanted, f"durable is {said}, but with this server's settings it is {wanted}")
