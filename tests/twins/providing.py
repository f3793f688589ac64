"""Providing: one story about a provider, told in virtual time by either variant.

A story is a generator: it yields an Ask, and is sent what came of it, an error included; or a number of
seconds to pass. What the upstream does with its n-th request is the n-th act of a list; a world
remembers what arrived there and when.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ergon_framework import scope
from ergon_framework.engine.drivers.caller import AsyncCaller, Caller
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.execution import ProviderExecutionContext
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.testing.virtual import VirtualTime, run_virtual

#: No jitter, so that moments can be told.
STEADY = RetryPolicy(max_attempts=3, base_delay_seconds=1.0, max_delay_seconds=8.0, jitter_ratio=0.0)


def policy(**fields):
    return ProviderPolicy(**({"timeout": 20.0, "retry": STEADY} | fields))


@dataclass(frozen=True)
class Act:
    """What the upstream does: after *takes* seconds it raises what *error* makes, or answers with *value*."""

    takes: float = 0.0
    error: Any = None
    value: Any = field(default_factory=lambda: {"status": "paid"})


def fails(make, takes=0.0):
    return Act(takes, make)


def slow(takes):
    return Act(takes)


HANG = Act(1e6)


@dataclass(frozen=True)
class Ask:
    """One call of execute."""

    operation: str = "charge"
    payload: dict = field(default_factory=lambda: {"amount": 12})
    tenant: str = "acme"
    campaign: str | None = None
    below: scope.Scope | None = None
    context: dict = field(default_factory=dict)
    provider: int = 0


@dataclass
class Made:
    """One request that reached the upstream."""

    at: float
    context: ProviderExecutionContext
    payload: dict
    scope: Any


class World:
    """What is there besides the provider, and what was seen."""

    def __init__(self, acts, clock, wall, sleep):
        self.acts = list(acts)
        self.sleep = sleep
        self.clock = clock
        self.wall = wall
        self.made: list[Made] = []
        self.asked: list[tuple[float, float]] = []
        self.came: list[Any] = []
        self.books: Any = None

    def arrived(self, context, payload):
        self.made.append(Made(self.clock(), context, payload, scope.current()))
        number = len(self.made) - 1
        return self.acts[number] if number < len(self.acts) else Act()

    @property
    def times(self):
        return [round(made.at, 6) for made in self.made]


def ended(act):
    if act.error is not None:
        raise act.error()
    return act.value


class Threaded(ProviderBase):
    provider_name = "payments"
    capability = "charging"

    def __init__(self, world, sleep, **given):
        super().__init__(**given)
        self.world, self.sleep = world, sleep

    def _execute_impl(self, *, tenant_id, campaign_id, operation, payload, context):
        act = self.world.arrived(context, payload)
        if act.takes:
            self.sleep(act.takes)
        return ended(act)


class Async(AsyncProviderBase):
    provider_name = "payments"
    capability = "charging"

    def __init__(self, world, **given):
        super().__init__(**given)
        self.world = world

    async def _execute_impl(self, *, tenant_id, campaign_id, operation, payload, context):
        act = self.world.arrived(context, payload)
        if act.takes:
            await asyncio.sleep(act.takes)
        return ended(act)


def tell(flavour, story, *acts, books=None, seed=0, **fields):
    """Have *story* happen; the world it happened in."""
    rules = fields.pop("policy", None) or policy(**fields)
    return (_threads if flavour == "threads" else _asyncio)(story, acts, rules, books or MemoryBooks(), seed)


def _threads(story, acts, rules, books, seed):
    time = VirtualTime(seed)
    world = World(acts, time.clock, time.senses.wall, time.sleep)
    world.books = books
    # Two objects of one provider, as a program would make them that builds one for each request.
    given = {"books": books, "policy": rules, "caller": Caller(time)}
    providers = [Threaded(world, time.sleep, **given) for _ in range(2)]
    script, answer = story(world), None
    while True:
        try:
            step = script.send(answer)
        except StopIteration:
            break
        if not isinstance(step, Ask):
            time.sleep(step)
            answer = None
            continue
        began = world.clock()
        scope.enter(step.below)
        try:
            answer = providers[step.provider].execute(**_arguments(step))
        except BaseException as error:
            answer = error
        scope.enter(None)
        world.came.append(answer)
        world.asked.append((began, world.clock()))
    return world


def _asyncio(story, acts, rules, books, seed):
    async def main():
        loop = asyncio.get_running_loop()
        world = World(acts, loop.time, loop.senses.wall, asyncio.sleep)
        world.books = books
        given = {"books": books, "policy": rules, "caller": AsyncCaller(loop.senses)}
        providers = [Async(world, **given) for _ in range(2)]
        script, answer = story(world), None
        while True:
            try:
                step = script.send(answer)
            except StopIteration:
                return world
            if not isinstance(step, Ask):
                await asyncio.sleep(step)
                answer = None
                continue
            began = world.clock()
            scope.enter(step.below)
            try:
                answer = await providers[step.provider].execute(**_arguments(step))
            except BaseException as error:
                answer = error
            scope.enter(None)
            world.came.append(answer)
            world.asked.append((began, world.clock()))

    return run_virtual(main(), seed=seed)


def _arguments(ask):
    return {
        "tenant_id": ask.tenant,
        "campaign_id": ask.campaign,
        "operation": ask.operation,
        "payload": ask.payload,
        "context": ProviderExecutionContext(**ask.context),
    }


def once(flavour, *acts, ask=None, **fields):
    """One call: what came of it, and the world."""
    came = []

    def story(world):
        came.append((yield ask or Ask()))

    world = tell(flavour, story, *acts, **fields)
    return came[0], world
