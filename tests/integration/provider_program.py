"""A program with a provider and nothing but the environment: ``provider_program.py threads|asyncio PORT CALLS``.

It makes its calls when a line arrives, prints how many went through, and ends with standard input.
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
from ergon_framework.providers.synthetic import AsyncSyntheticProvider, SyntheticProvider

POLICY = ProviderPolicy(retry=RetryPolicy(max_attempts=1), quota=QuotaPolicy(month=10))


def call_from_threads(upstream: Any, calls: int) -> int:
    provider, made = SyntheticProvider(upstream, policy=POLICY), 0
    for number in range(calls):
        try:
            provider.call("charge", {"number": number}, tenant="acme")
        except ProviderError as error:
            print(f"{error.reason_code} {error}", file=sys.stderr)
        else:
            made += 1
    return made


async def call_from_asyncio(upstream: Any, calls: int) -> int:
    provider, made = AsyncSyntheticProvider(upstream, policy=POLICY), 0
    for number in range(calls):
        try:
            await provider.call("charge", {"number": number}, tenant="acme")
        except ProviderError as error:
            print(f"{error.reason_code} {error}", file=sys.stderr)
        else:
            made += 1
    return made


if __name__ == "__main__":
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    flavour, port, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    upstream: Any = SimpleNamespace(address=("127.0.0.1", port))
    for _ in sys.stdin:
        if flavour == "threads":
            made = call_from_threads(upstream, calls)
        else:
            made = asyncio.run(call_from_asyncio(upstream, calls))
        print(made, flush=True)
