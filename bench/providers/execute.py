"""What execute adds to a bare call of the same client, with books in memory: python bench/providers/execute.py

Bare calls and executed ones alternate in short rounds, and the best round of each counts: on a machine
that does other things besides, the mean says more about those. The plain call has a bar.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time

from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy

ROUNDS, CALLS = 60, 200
#: Microseconds that a plain call may add.
BAR = 100.0
PAYLOAD = {"amount": 12, "currency": "EUR", "order": "order-7"}
LIMITED = ProviderPolicy(quota=QuotaPolicy(minute=10**9, day=10**9))
numbers = itertools.count()


def answer(payload):
    return {"id": "ch_1", "status": "paid", "amount": payload["amount"]}


async def answer_async(payload):
    return answer(payload)


class Plain(ProviderBase):
    provider_name, capability = "bench", "charge"

    def _execute_impl(self, *, payload, **_):
        return answer(payload)


class PlainAsync(AsyncProviderBase):
    provider_name, capability = "bench", "charge"

    async def _execute_impl(self, *, payload, **_):
        return await answer_async(payload)


def key():
    return f"k{next(numbers)}"


def timed(call):
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS


async def timed_async(call):
    began = time.perf_counter()
    for _ in range(CALLS):
        await call()
    return (time.perf_counter() - began) / CALLS


def shown(name, bare, forms):
    base = min(bare)
    added = {form: round(1e6 * (min(seconds) - base), 1) for form, seconds in forms.items()}
    for form, cost in added.items():
        print(f"{name:8} {form:16} {cost:7.1f} us added ({1e6 * base:.2f} us bare)")
    return added


def measure():
    plain, limited = Plain(books=MemoryBooks()), Plain(books=MemoryBooks(), policy=LIMITED)
    bare, forms = [], {"call": [], "with a key": [], "with quota": []}
    for _ in range(ROUNDS):
        bare.append(timed(lambda: answer(PAYLOAD)))
        forms["call"].append(timed(lambda: plain.call("charge", PAYLOAD)))
        forms["with a key"].append(timed(lambda: plain.call("charge", PAYLOAD, key=key())))
        forms["with quota"].append(timed(lambda: limited.call("charge", PAYLOAD)))
    return shown("threads", bare, forms)


async def measure_async():
    plain, limited = PlainAsync(books=MemoryBooks()), PlainAsync(books=MemoryBooks(), policy=LIMITED)
    bare, forms = [], {"call": [], "with a key": [], "with quota": []}
    for _ in range(ROUNDS):
        bare.append(await timed_async(lambda: answer_async(PAYLOAD)))
        forms["call"].append(await timed_async(lambda: plain.call("charge", PAYLOAD)))
        forms["with a key"].append(await timed_async(lambda: plain.call("charge", PAYLOAD, key=key())))
        forms["with quota"].append(await timed_async(lambda: limited.call("charge", PAYLOAD)))
    return shown("asyncio", bare, forms)


if __name__ == "__main__":
    found = {"threads": measure(), "asyncio": asyncio.run(measure_async())}
    print(json.dumps({"bar": BAR, **found}))
    sys.exit(any(added["call"] > BAR for added in found.values()))
