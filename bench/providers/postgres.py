"""The cost of provider state in PostgreSQL: python bench/providers/postgres.py

A whole call with a key and a quota, of either variant, and its two round trips alone are measured next to a bare commit
of one row, in turns on the same server, so that all have the same disk and the same load. The time of the client itself
is subtracted, and the medians are compared. A bare commit is made without an event loop, which is fastest; the ratio of
an asyncio call to a commit made with an event loop is printed without a target. Statements are counted on their way to
the server, which is started for the benchmark, with fsync as it is by default.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.database import pool as lines
from ergon_framework.database.migrate import upgrade
from ergon_framework.database.operation import run_operation
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.idempotency import StoredResult
from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
from ergon_framework.providers.postgres.quota_blocks import BlockPolicy
from ergon_framework.providers.postgres.state import PostgresProviderState
from ergon_framework.providers.state import AdmissionRequest, AttemptResult, ProviderScope
from tests.servers.postgres import PrivatePostgres

ROUNDS, CALLS_PER_ROUND = 40, 50
#: Bare commits that a call with a key may cost, and microseconds that one without a key may add with quota blocks.
MAX_COMMITS = 3.0
MAX_BLOCKS_MICROSECONDS = 200.0
#: Seconds for which reservations are counted.
MEASURE_SECONDS = 3.0
INSERT_BARE = "insert into bare (value) values (%s)"
ROW = ["x" * 100]
PAYLOAD = {"amount": 12, "currency": "EUR", "order": "order-7"}
#: A month: at most one run in a thousand has a window that ends during a measurement.
LIMITED_POLICY = ProviderPolicy(quota=QuotaPolicy(month=10**9))


def respond(payload):
    return {"id": "ch_1", "status": "paid", "amount": payload["amount"]}


class ChargeProvider(ProviderBase):
    provider_name, capability = "bench", "charge"

    def _execute_impl(self, *, payload, **_):
        return respond(payload)


class AsyncChargeProvider(AsyncProviderBase):
    provider_name, capability = "bench", "charge"

    async def _execute_impl(self, *, payload, **_):
        return respond(payload)


class StatementCounter:
    """The number of statements sent by round trips."""

    def __init__(self):
        self.sent = 0
        lines.run_operation = self.perform

    def perform(self, connection, operation):
        def count_statements():
            rows = None
            while True:
                try:
                    query = operation.send(rows)
                except StopIteration as stop:
                    return stop.value
                self.sent += 1
                rows = yield query

        return run_operation(connection, count_statements())


def measure_us(call):
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


def build_admission(scope, key):
    return AdmissionRequest(
        scope=scope,
        policy=LIMITED_POLICY,
        tenant_id=scope.tenant_id,
        idempotency_key=key,
        fingerprint="f" * 64,
        owner=key[-32:],
        attempt_number=1,
        lease=35.0,
        now=time.time(),
    )


def build_conclusion():
    return AttemptResult(
        now=time.time(), is_last=True, outcome_unknown=True, stored_result=StoredResult(respond(PAYLOAD), 200)
    )


def make_round_trips(state, scope, key):
    """Make the two round trips of a call with a key and a quota."""
    state.complete(state.admit(build_admission(scope, key)), build_conclusion())


async def make_round_trips_async(state, scope, key):
    await state.complete_async(await state.admit_async(build_admission(scope, key)), build_conclusion())


async def measure_us_async(call):
    began = time.perf_counter()
    await call
    return 1e6 * (time.perf_counter() - began)


async def measure_side_by_side(dsn):
    """Return medians, in microseconds, of a bare commit, of two round trips and of whole calls, in turns."""
    scope = ProviderScope("bench", "bench", "charge")
    times = {"bare": [], "client": [], "visits": [], "call": [], "async_bare": [], "async_visits": [], "async_call": []}
    async with PostgresProviderState(dsn) as state:
        provider, async_provider = (
            ChargeProvider(state_store=state, policy=LIMITED_POLICY),
            AsyncChargeProvider(state_store=state, policy=LIMITED_POLICY),
        )
        with psycopg.connect(dsn, autocommit=True) as connection:
            async_connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
            connection.execute("create table bare (id bigint generated always as identity primary key, value text)")
            for _ in range(ROUNDS * CALLS_PER_ROUND):
                key = f"key-{time.perf_counter_ns()}"
                times["bare"].append(measure_us(lambda: connection.execute(INSERT_BARE, ROW)))
                times["client"].append(measure_us(lambda: respond(PAYLOAD)))
                times["visits"].append(measure_us(lambda key=key: make_round_trips(state, scope, key)))
                times["call"].append(measure_us(lambda key=key: provider.call("charge", PAYLOAD, key=f"{key}-call")))
                times["async_bare"].append(await measure_us_async(async_connection.execute(INSERT_BARE, ROW)))
                round_trips = make_round_trips_async(state, scope, f"{key}-visits")
                times["async_visits"].append(await measure_us_async(round_trips))
                call = async_provider.call("charge", PAYLOAD, key=f"{key}-async")
                times["async_call"].append(await measure_us_async(call))
            await async_connection.close()
    return {name: statistics.median(values) for name, values in times.items()}


def measure_best(call):
    """Return the best round's mean, in microseconds: the others mostly show other load on the machine."""
    return min(measure_us(lambda: [call() for _ in range(CALLS_PER_ROUND)]) / CALLS_PER_ROUND for _ in range(ROUNDS))


def measure_rate(call, threads):
    """Return calls per second, made by *threads* threads."""
    deadline = time.monotonic() + MEASURE_SECONDS

    def loop(_):
        count = 0
        while time.monotonic() < deadline:
            call()
            count += 1
        return count

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(loop, range(threads))) / MEASURE_SECONDS


def measure(dsn):
    counter, figures = StatementCounter(), {}
    with ExitStack() as stack:
        state = stack.enter_context(PostgresProviderState(dsn))
        provider = ChargeProvider(state_store=state, policy=LIMITED_POLICY)
        provider.call("charge", PAYLOAD, key="first")
        before = counter.sent
        provider.call("charge", PAYLOAD, key="second")
        figures["statements_with_key"] = counter.sent - before
        medians = asyncio.run(measure_side_by_side(dsn))
        bare, async_bare, client = (medians.pop(name) for name in ("bare", "async_bare", "client"))
        figures |= {"bare_commit_us": round(bare, 1), "async_bare_commit_us": round(async_bare, 1)}
        for name, median in medians.items():
            figures[f"{name}_adds_us"] = round(median - client, 1)
            figures[f"{name}_commits_p50"] = round((median - client) / bare, 2)
        figures["async_call_in_commits_of_asyncio"] = round((medians["async_call"] - client) / async_bare, 2)
        figures["reservations_per_second_hot_row"] = round(measure_rate(lambda: provider.call("charge", PAYLOAD), 8))
        block_state = stack.enter_context(PostgresProviderState(dsn, blocks=BlockPolicy(size=10_000, lease=30.0)))
        block_provider = ChargeProvider(state_store=block_state, policy=LIMITED_POLICY)
        deadline = time.monotonic() + 10
        while (
            not (block_state._listener and block_state._listener.is_fresh(time.monotonic()))
            and time.monotonic() < deadline
        ):
            block_provider.call("charge", PAYLOAD)
        before = counter.sent
        figures["blocks_add_us"] = round(
            measure_best(lambda: block_provider.call("charge", PAYLOAD)) - measure_best(lambda: respond(PAYLOAD)), 1
        )
        figures["statements_with_blocks"] = counter.sent - before
        figures["calls_with_blocks"] = ROUNDS * CALLS_PER_ROUND
        figures["reservations_per_second_blocks"] = round(
            measure_rate(lambda: block_provider.call("charge", PAYLOAD), 8)
        )
    figures["ok"] = (
        all(figures[f"{name}_commits_p50"] <= MAX_COMMITS for name in medians)
        and figures["statements_with_key"] == 2
        and figures["blocks_add_us"] < MAX_BLOCKS_MICROSECONDS
        and figures["statements_with_blocks"] <= 1
    )
    return figures


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="ergon-bench-"))
    folder.chmod(0o755)
    server = PrivatePostgres(folder / "server")
    try:
        server.start()
        dsn = server.create_database("bench")
        upgrade(dsn)
        figures = measure(dsn)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    for name, value in figures.items():
        print(f"{name:34} {value}")
    print(json.dumps({"commits_bar": MAX_COMMITS, "blocks_bar_us": MAX_BLOCKS_MICROSECONDS, **figures}))
    sys.exit(0 if figures["ok"] else 1)
