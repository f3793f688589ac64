"""Checks of outages: the server is stopped, killed or disconnected during all operations, and nothing is lost.

A claim is a client's right to a fetched message; to settle it is to ack, defer, release or dead-letter the message. A
call that meets the outage has an unknown outcome: it may have taken effect. Ids such as CNN-07 name the requirements in
docs/spec. ``drain`` acks what the queue delivers until each expected transaction was settled once; *optional* ones are
those with an unknown outcome, which may be there or not.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ergon_framework.connectors.base import Ack, DeadLetter, Delivery, Release, Settlement, SettleResult
from ergon_framework.errors import ConnectionLostError
from ergon_framework.testing.conformance.check import (
    Check,
    CheckFailed,
    CheckFunction,
    Precondition,
    expect,
    require_dead_letters,
    require_server_fault,
)
from ergon_framework.testing.conformance.connector.client import CheckContext, Client
from ergon_framework.testing.conformance.connector.loop_fixture import LoopRun, running_loop

#: The method of a server -> the words for it in the names of checks.
FAULT_NAMES = {"stop": "stopped", "kill": "killed", "partition_network": "cut_off"}
TRANSACTION_COUNT = 20
#: Dispatches that follow one another quickly, before the check slows down.
MAX_QUICK_DISPATCHES = 200
#: Seconds that a fetch may wait while the server is reachable.
FETCH_WAIT_SECONDS = 15.0


async def _expect_connection_lost(call: Callable[[], Awaitable[object]], description: str) -> None:
    """Expect that *call* raises ConnectionLostError, and nothing else, while the connection is lost."""
    try:
        result = await call()
    except ConnectionLostError:
        return
    except CheckFailed:
        raise
    except Exception as error:
        raise CheckFailed(
            f"with the connection lost, {description} raised {type(error).__name__}, not ConnectionLostError: {error}"
        ) from error
    size = len(result) if isinstance(result, list | tuple) else 1
    raise CheckFailed(
        f"with the connection lost, {description} returned {size} items instead of raising ConnectionLostError"
    )


async def _check_every_call(fault: str, context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(2))
    (claimed,) = await client.claim(1)
    async with context.outage(fault):
        await _expect_connection_lost(lambda: client.fetch(1), "fetch")
        await _expect_connection_lost(lambda: client.fetch(1, wait=0.2), "a waiting fetch")
        await _expect_connection_lost(lambda: client.dispatch(context.transaction("never")), "dispatch")
        await _expect_nothing_settled(client, claimed)
    await context.drain(client, {"tx-0", "tx-1"}, optional={"tx-never"}, claimed=[claimed])


async def _expect_nothing_settled(client: Client, claimed: Delivery) -> None:
    for settlement in (Ack(), Release()):
        try:
            (result,) = await client.settle((claimed, settlement))
        except ConnectionLostError:
            continue
        expect(result is not SettleResult.SETTLED, "with the connection lost, a settlement returned SETTLED")


async def _check_waiting_fetch(fault: str, context: CheckContext) -> None:
    client = await context.client()
    waiting = asyncio.ensure_future(client.fetch(1, wait=FETCH_WAIT_SECONDS))
    await asyncio.sleep(0.2)
    try:
        async with context.outage(fault):
            done, _ = await asyncio.wait([waiting], timeout=context.system.call_timeout + FETCH_WAIT_SECONDS)
            expect(done, "a waiting fetch does not notice that the connection is lost")
            await _expect_connection_lost(lambda: waiting, "a fetch that was waiting")
    finally:
        waiting.cancel()
    await context.retry_until_connected(lambda: client.dispatch(context.transaction()))
    await context.drain(client, {"tx-0"})


async def _check_fetching(fault: str, context: CheckContext) -> None:
    client = await context.client()
    sent = context.transactions(TRANSACTION_COUNT)
    await client.dispatch(*sent)
    claimed: list[Delivery] = []
    down: asyncio.Event = asyncio.Event()

    async def fetch() -> None:
        while not down.is_set():
            try:
                claimed.extend(await client.fetch(1))
            except ConnectionLostError:
                return
            await asyncio.sleep(0.002)

    fetching = asyncio.ensure_future(fetch())
    await context.wait_until(lambda: len(claimed) >= 3 or fetching.done(), "a few are fetched")
    async with context.outage(fault):
        down.set()
        await fetching
    await context.drain(client, {each.id for each in sent}, claimed=claimed)


async def _settle_during_outage(
    fault: str, context: CheckContext, client: Client, claimed: Sequence[Delivery], settlement: Settlement
) -> tuple[set[str], set[str]]:
    """Settle one after the other during an outage; return the settled ids and the ids without an answer."""
    results: dict[str, SettleResult] = {}
    unknown: set[str] = set()

    async def settle() -> None:
        for delivery in claimed:
            name = delivery.transaction.id
            try:
                (results[name],) = await client.settle((delivery, settlement))
            except ConnectionLostError:
                unknown.add(name)
            await asyncio.sleep(0.002)

    settling = asyncio.ensure_future(settle())
    await context.wait_until(lambda: len(results) >= 3 or settling.done(), "a few are settled")
    async with context.outage(fault):
        # Not all of them: with the network partitioned, each may take its full timeout.
        await context.wait_until(lambda: bool(unknown) or settling.done(), "a settlement meets the outage", within=60.0)
    await settling
    settled = {name for name, result in results.items() if result is SettleResult.SETTLED}
    unanswered = [delivery for delivery in claimed if delivery.transaction.id in unknown]
    for delivery in unanswered:
        # Settled already, still claimed, or lost after the lease ended: each of these answers is valid.
        (result,) = await context.retry_until_connected(partial(client.settle, (delivery, settlement)))
        if result is SettleResult.SETTLED:
            settled.add(delivery.transaction.id)
    return settled, unknown


async def _check_settling(fault: str, context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(TRANSACTION_COUNT))
    claimed = await client.claim(TRANSACTION_COUNT)
    settled, unknown = await _settle_during_outage(fault, context, client, claimed, Ack())
    if _may_redeliver_settled(fault, client):
        settled, unknown = set(), unknown | settled
    await _expect_unsettled_return(
        context, client, {each.transaction.id for each in claimed}, settled=settled, unknown=unknown
    )


def _may_redeliver_settled(fault: str, client: Client) -> bool:
    """Return whether the capability table allows a killed server to redeliver what it had settled just before."""
    return fault == "kill" and not client.capabilities.confirms_settlements


async def _check_dead_lettering(fault: str, context: CheckContext) -> None:
    client = await context.client()
    await client.dispatch(*context.transactions(TRANSACTION_COUNT))
    claimed = await client.claim(TRANSACTION_COUNT)
    settled, _ = await _settle_during_outage(fault, context, client, claimed, DeadLetter("sold_out"))
    dead_ids = {record.id for record in await context.retry_until_connected(client.list_dead)}
    expect(settled <= dead_ids, f"{sorted(settled - dead_ids)} were reported as settled, but are not dead letters")
    ids = {each.transaction.id for each in claimed}
    may_return = ids if _may_redeliver_settled(fault, client) else ids - settled
    await context.drain(client, ids - dead_ids, optional=may_return)


async def _expect_unsettled_return(
    context: CheckContext, client: Client, ids: set[str], *, settled: set[str], unknown: set[str]
) -> None:
    """Expect that settled transactions do not return and rejected ones do; unknown ones may return."""
    rejected = ids - settled - unknown
    await context.drain(client, rejected, optional=unknown - settled)
    deadline = time.monotonic() + context.lease * 1.3
    while time.monotonic() < deadline:
        for delivery in await client.fetch(10, wait=0.1):
            name = delivery.transaction.id
            expect(name not in settled, f"{name} was redelivered although it was reported as settled")
            await client.ack(delivery)


async def _check_dispatching(fault: str, context: CheckContext) -> None:
    client = await context.client()
    confirmed: set[str] = set()
    unknown: set[str] = set()
    unreachable = asyncio.Event()

    async def dispatch() -> None:
        # Without a limit on their number: a server may take long to stop.
        for number in itertools.count():
            each, began_unreachable = context.transaction(number), unreachable.is_set()
            try:
                for confirmation in await client.dispatch(each):
                    confirmed.add(confirmation.transaction_id)
            except ConnectionLostError:
                unknown.add(each.id)
                return
            expect(not began_unreachable, f"the dispatch of {each.id} was confirmed while the server was unreachable")
            # Slower after a while: all of them are fetched at the end.
            await asyncio.sleep(0.002 if number < MAX_QUICK_DISPATCHES else 0.05)

    dispatching = asyncio.ensure_future(dispatch())
    await context.wait_until(lambda: len(confirmed) >= 3 or dispatching.done(), "a few are dispatched")
    expect(not dispatching.done(), "a dispatch failed before the outage")
    async with context.outage(fault):
        unreachable.set()
        # It ends with the first call that fails: one that the outage met, or else the next one.
        await dispatching
    await context.drain(client, confirmed, optional=unknown)


async def _check_loop_continues(fault: str, context: CheckContext) -> None:
    client = await context.client()
    sent = context.transactions(TRANSACTION_COUNT)
    await client.dispatch(*sent)
    async with running_loop(context, client, lambda _: None, delay=lambda _: 0.05, concurrency={"value": 2}) as loop:
        await loop.wait_until(lambda: len(loop.list_ids("succeeded")) >= 3, "a few end")
        async with context.outage(fault):
            await asyncio.sleep(0.3)
        await context.wait_until(
            lambda: {each.id for each in sent} <= {*loop.list_ids("succeeded"), *_list_unconfirmed(loop)},
            "all succeed after the connection is restored",
            within=context.system.arrival + 3 * context.system.call_timeout,
        )


def _list_unconfirmed(loop: LoopRun) -> set[str]:
    """Return the ids whose settlement met the outage: it may have succeeded, and then they do not return."""
    return {name for name in loop.list_ids("released") if loop.runs[name]}


def _make_checks(
    rule_name: str, run: Callable[[str, CheckContext], Awaitable[None]], *ids: str, needs: tuple[Precondition, ...] = ()
) -> list[Check]:
    """Make a check for each fault of a server; None as its lease selects ``outage_lease`` of the system under test."""
    checks = []
    for fault, state in FAULT_NAMES.items():
        function: CheckFunction = partial(run, fault)
        checks.append(
            Check(f"{rule_name}_when_the_server_is_{state}", ids, (require_server_fault(fault), *needs), function, None)
        )
    return checks


CHECKS: tuple[Check, ...] = (
    *_make_checks("every_call_reports_the_outage", _check_every_call, "CNN-07"),
    *_make_checks("a_waiting_fetch_reports_the_outage", _check_waiting_fetch, "CNN-07"),
    *_make_checks("fetching_loses_nothing", _check_fetching, "CNN-07"),
    *_make_checks("settling_loses_nothing", _check_settling, "CNN-02", "CNN-07"),
    *_make_checks(
        "dead_lettering_loses_nothing", _check_dead_lettering, "CNN-07", "CNN-08", needs=(require_dead_letters,)
    ),
    *_make_checks("dispatching_loses_nothing", _check_dispatching, "CNN-02", "CNN-07"),
    *_make_checks("a_loop_continues", _check_loop_continues, "CNN-07"),
)
