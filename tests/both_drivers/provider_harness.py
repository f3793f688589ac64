"""Provider stories: one story about a provider, run in virtual time by either variant.

A story is a generator: it yields an Ask and receives its result or error, or it yields a number of seconds
to pass. The n-th request to the upstream gets the n-th act of a list; a world records
which requests arrived and when.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ergon_framework import scope
from ergon_framework.engine.inline import AsyncInlineRunner, InlineRunner
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.models import ProviderExecutionContext
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.testing.virtual_time import VirtualTime, run_virtual

#: No jitter, so that times are exact.
NO_JITTER_RETRY = RetryPolicy(max_attempts=3, base_delay_seconds=1.0, max_delay_seconds=8.0, jitter_ratio=0.0)


def make_policy(**fields):
    return ProviderPolicy(**({"timeout": 20.0, "retry": NO_JITTER_RETRY} | fields))


@dataclass(frozen=True)
class Act:
    """The upstream's response: after *takes* seconds it raises the error that *error* makes, or answers *value*."""

    takes: float = 0.0
    error: Any = None
    value: Any = field(default_factory=lambda: {"status": "paid"})


def fail_with(make_error, takes=0.0):
    return Act(takes, make_error)


def answer_after(seconds):
    return Act(seconds)


HANG = Act(1e6)


@dataclass(frozen=True)
class Ask:
    """One call of execute."""

    operation: str = "charge"
    payload: dict = field(default_factory=lambda: {"amount": 12})
    tenant: str = "acme"
    campaign: str | None = None
    handler_scope: scope.Scope | None = None
    context: dict = field(default_factory=dict)
    provider: int = 0


@dataclass
class UpstreamRequest:
    """One request that reached the upstream."""

    at: float
    context: ProviderExecutionContext
    payload: dict
    scope: Any


class ProviderWorld:
    """The environment of the provider, and the recorded requests and results."""

    def __init__(self, acts, clock, wall, sleep):
        self.acts = list(acts)
        self.sleep = sleep
        self.clock = clock
        self.wall = wall
        self.requests: list[UpstreamRequest] = []
        self.call_times: list[tuple[float, float]] = []
        self.results: list[Any] = []
        self.state_store: Any = None

    def record_request(self, context, payload):
        self.requests.append(UpstreamRequest(self.clock(), context, payload, scope.current()))
        number = len(self.requests) - 1
        return self.acts[number] if number < len(self.acts) else Act()

    @property
    def times(self):
        return [round(request.at, 6) for request in self.requests]


def apply_act(act):
    if act.error is not None:
        raise act.error()
    return act.value


class ThreadsProvider(ProviderBase):
    provider_name = "payments"
    capability = "charging"

    def __init__(self, world, sleep, **options):
        super().__init__(**options)
        self.world, self.sleep = world, sleep

    def _execute_impl(self, *, tenant_id, campaign_id, operation, payload, context):
        act = self.world.record_request(context, payload)
        if act.takes:
            self.sleep(act.takes)
        return apply_act(act)


class AsyncioProvider(AsyncProviderBase):
    provider_name = "payments"
    capability = "charging"

    def __init__(self, world, **options):
        super().__init__(**options)
        self.world = world

    async def _execute_impl(self, *, tenant_id, campaign_id, operation, payload, context):
        act = self.world.record_request(context, payload)
        if act.takes:
            await asyncio.sleep(act.takes)
        return apply_act(act)


def run_story(variant, story, *acts, state_store=None, seed=0, **fields):
    """Run *story* and return its world."""
    provider_policy = fields.pop("policy", None) or make_policy(**fields)
    return (_run_on_threads if variant == "threads" else _run_on_asyncio)(
        story, acts, provider_policy, state_store or MemoryProviderState(), seed
    )


def _run_on_threads(story, acts, provider_policy, state_store, seed):
    time = VirtualTime(seed)
    world = ProviderWorld(acts, time.clock, time.time_source.wall, time.sleep)
    world.state_store = state_store
    # Two objects of one provider, as in a program that builds one for each request.
    options = {"state_store": state_store, "policy": provider_policy, "runner": InlineRunner(time)}
    providers = [ThreadsProvider(world, time.sleep, **options) for _ in range(2)]
    script, result = story(world), None
    while True:
        try:
            step = script.send(result)
        except StopIteration:
            break
        if not isinstance(step, Ask):
            time.sleep(step)
            result = None
            continue
        started_at = world.clock()
        scope.set_scope(step.handler_scope)
        try:
            result = providers[step.provider].execute(**_to_arguments(step))
        except BaseException as error:
            result = error
        scope.set_scope(None)
        world.results.append(result)
        world.call_times.append((started_at, world.clock()))
    return world


def _run_on_asyncio(story, acts, provider_policy, state_store, seed):
    async def main():
        loop = asyncio.get_running_loop()
        world = ProviderWorld(acts, loop.time, loop.time_source.wall, asyncio.sleep)
        world.state_store = state_store
        options = {"state_store": state_store, "policy": provider_policy, "runner": AsyncInlineRunner(loop.time_source)}
        providers = [AsyncioProvider(world, **options) for _ in range(2)]
        script, result = story(world), None
        while True:
            try:
                step = script.send(result)
            except StopIteration:
                return world
            if not isinstance(step, Ask):
                await asyncio.sleep(step)
                result = None
                continue
            started_at = world.clock()
            scope.set_scope(step.handler_scope)
            try:
                result = await providers[step.provider].execute(**_to_arguments(step))
            except BaseException as error:
                result = error
            scope.set_scope(None)
            world.results.append(result)
            world.call_times.append((started_at, world.clock()))

    return run_virtual(main(), seed=seed)


def _to_arguments(ask):
    return {
        "tenant_id": ask.tenant,
        "campaign_id": ask.campaign,
        "operation": ask.operation,
        "payload": ask.payload,
        "context": ProviderExecutionContext(**ask.context),
    }


def call_once(variant, *acts, ask=None, **fields):
    """Make one call; return its result and the world."""
    results = []

    def story(world):
        results.append((yield ask or Ask()))

    world = run_story(variant, story, *acts, **fields)
    return results[0], world
