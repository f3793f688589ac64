"""The overhead of execute over a bare call of the same client, with state in memory: python bench/providers/execute.py

Bare calls and executed ones alternate in short rounds, and the best round of each counts: on a machine with other load
the mean mostly shows that load. The plain call has a target.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass

from ergon_framework.providers import (
    AsyncProviderBase,
    MemoryProviderState,
    Provider,
    ProviderBase,
    ProviderPolicy,
    operation,
)

ROUNDS, CALLS_PER_ROUND = 60, 200
#: Microseconds that a plain call may add.
MAX_ADDED_MICROSECONDS = 100.0
PAYLOAD = {"amount": 12, "currency": "EUR", "order": "order-7"}
LIMITED_POLICY = ProviderPolicy(calls_per_minute=10**9, calls_per_day=10**9)
key_numbers = itertools.count()


def respond(payload):
    return {"id": "ch_1", "status": "paid", "amount": payload["amount"]}


async def respond_async(payload):
    return respond(payload)


class EchoProvider(ProviderBase):
    provider_name, capability = "bench", "charge"

    def _execute_impl(self, *, payload, **_):
        return respond(payload)


class AsyncEchoProvider(AsyncProviderBase):
    provider_name, capability = "bench", "charge"

    async def _execute_impl(self, *, payload, **_):
        return await respond_async(payload)


@dataclass
class ChargeRequest:
    amount: int
    currency: str
    order: str


@dataclass
class ChargeResult:
    id: str
    status: str
    amount: int


REQUEST = ChargeRequest(**PAYLOAD)


class TypedProvider(Provider):
    provider_name, capability = "bench", "charge"

    @operation
    def charge(self, request: ChargeRequest) -> ChargeResult:
        return ChargeResult("ch_1", "paid", request.amount)


class AsyncTypedProvider(Provider):
    provider_name, capability = "bench", "charge"

    @operation
    async def charge(self, request: ChargeRequest) -> ChargeResult:
        return ChargeResult("ch_1", "paid", request.amount)


def new_key():
    return f"k{next(key_numbers)}"


def measure_call(call):
    began = time.perf_counter()
    for _ in range(CALLS_PER_ROUND):
        call()
    return (time.perf_counter() - began) / CALLS_PER_ROUND


async def measure_call_async(call):
    began = time.perf_counter()
    for _ in range(CALLS_PER_ROUND):
        await call()
    return (time.perf_counter() - began) / CALLS_PER_ROUND


def print_added(name, bare, forms):
    base = min(bare)
    added = {form: round(1e6 * (min(seconds) - base), 1) for form, seconds in forms.items()}
    for form, cost in added.items():
        print(f"{name:8} {form:16} {cost:7.1f} us added ({1e6 * base:.2f} us bare)")
    return added


def measure():
    plain, limited = (
        EchoProvider(state_store=MemoryProviderState()),
        EchoProvider(state_store=MemoryProviderState(), policy=LIMITED_POLICY),
    )
    typed = TypedProvider(state_store=MemoryProviderState())
    bare, forms = [], {"call": [], "with a key": [], "with quota": [], "typed": []}
    for _ in range(ROUNDS):
        bare.append(measure_call(lambda: respond(PAYLOAD)))
        forms["call"].append(measure_call(lambda: plain.call("charge", PAYLOAD)))
        forms["with a key"].append(measure_call(lambda: plain.call("charge", PAYLOAD, key=new_key())))
        forms["with quota"].append(measure_call(lambda: limited.call("charge", PAYLOAD)))
        forms["typed"].append(measure_call(lambda: typed.charge(REQUEST)))
    return print_added("threads", bare, forms)


async def measure_async():
    plain, limited = (
        AsyncEchoProvider(state_store=MemoryProviderState()),
        AsyncEchoProvider(state_store=MemoryProviderState(), policy=LIMITED_POLICY),
    )
    typed = AsyncTypedProvider(state_store=MemoryProviderState())
    bare, forms = [], {"call": [], "with a key": [], "with quota": [], "typed": []}
    for _ in range(ROUNDS):
        bare.append(await measure_call_async(lambda: respond_async(PAYLOAD)))
        forms["call"].append(await measure_call_async(lambda: plain.call("charge", PAYLOAD)))
        forms["with a key"].append(await measure_call_async(lambda: plain.call("charge", PAYLOAD, key=new_key())))
        forms["with quota"].append(await measure_call_async(lambda: limited.call("charge", PAYLOAD)))
        forms["typed"].append(await measure_call_async(lambda: typed.charge(REQUEST)))
    return print_added("asyncio", bare, forms)


if __name__ == "__main__":
    results = {"threads": measure(), "asyncio": asyncio.run(measure_async())}
    print(json.dumps({"bar": MAX_ADDED_MICROSECONDS, **results}))
    sys.exit(any(added["call"] > MAX_ADDED_MICROSECONDS for added in results.values()))
