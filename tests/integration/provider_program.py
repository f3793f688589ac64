"""A program with a provider, configured by the environment only: ``provider_program.py threads|asyncio PORT CALLS``.

It makes its calls when a line arrives, prints how many succeeded, and exits when standard input ends.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from types import SimpleNamespace
from typing import Any

from ergon_framework.providers.errors import ProviderError
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.testing.fake_provider import AsyncFakeProvider, FakeProvider

POLICY = ProviderPolicy(retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(month=10))


def call_from_threads(upstream: Any, calls: int) -> int:
    provider, completed = FakeProvider(upstream, policy=POLICY), 0
    for number in range(calls):
        try:
            provider.call("charge", {"number": number}, tenant="acme")
        except ProviderError as error:
            print(f"{error.reason_code} {error}", file=sys.stderr)
        else:
            completed += 1
    return completed


async def call_from_asyncio(upstream: Any, calls: int) -> int:
    provider, completed = AsyncFakeProvider(upstream, policy=POLICY), 0
    for number in range(calls):
        try:
            await provider.call("charge", {"number": number}, tenant="acme")
        except ProviderError as error:
            print(f"{error.reason_code} {error}", file=sys.stderr)
        else:
            completed += 1
    return completed


if __name__ == "__main__":
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    variant, port, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    upstream: Any = SimpleNamespace(address=("127.0.0.1", port))
    for _ in sys.stdin:
        if variant == "threads":
            completed = call_from_threads(upstream, calls)
        else:
            completed = asyncio.run(call_from_asyncio(upstream, calls))
        print(completed, flush=True)
