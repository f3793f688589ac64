"""Checks of outages: the server is stopped, killed or disconnected during all operations, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ergon_framework.connectors.base import Ack, DeadLetter, Delivery, Release, Settlement, SettleResult
from ergon_framework.errors import ConnectionLostError
from ergon_framework.testing.conformance.check import Check, CheckFailed, Need, Run, dead_letters, expect, faulty
from ergon_framework.testing.conformance.client import Client
from ergon_framework.testing.conformance.consuming import Loop, running_loop
from ergon_framework.testing.conformance.sitting import CheckContext

#: The method of a server -> the words for it in the names of checks.
FAULTS = {"stop": "stopped", "kill": "killed", "partition_network": "cut_off"}
COUNT = 20
#: Seconds that a fetch may wait while the server is reachable.
WAIT = 15.0


async def _says_so(call: Callable[[], Awaitable[object]], words: str) -> None:
    """Expect that *call* raises ConnectionLostError, and nothing else, while the connection is lost."""
    try:
        answer = await call()
    except ConnectionLostError:
        return
    except CheckFailed:
        raise
    except Exception as error:
        raise CheckFailed(
            f"with the line down {words} raised {type(error).__name__}, not ConnectionLostError: {error}"
        ) from error
    size = len(answer) if isinstance(answer, list | tuple) else 1
    raise CheckFailed(f"with the line down {words} answered ({size} items) instead of raising ConnectionLostError")


async def _every_call_says_so(fault: str, sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(2))
    (held,) = await client.claim(1)
    async with sitting.outage(fault):
        await _says_so(lambda: client.fetch(1), "fetch")
        await _says_so(lambda: client.fetch(1, wait=0.2), "a waiting fetch")
        await _says_so(lambda: client.dispatch(sitting.transaction("never")), "dispatch")
        await _settles_nothing(client, held)
    await sitting.drain(client, {"tx-0", "tx-1"}, may={"tx-never"}, held=[held])


async def _settles_nothing(client: Client, held: Delivery) -> None:
    for settlement in (Ack(), Release()):
        try:
            (result,) = await client.settle((held, settlement))
        except ConnectionLostError:
            continue
        expect(result is not SettleResult.SETTLED, "with the line down a settlement was answered as settled")


async def _a_waiting_fetch_says_so(fault: str, sitting: CheckContext) -> None:
    client = await sitting.client()
    waiting = asyncio.ensure_future(client.fetch(1, wait=WAIT))
    await asyncio.sleep(0.2)
    try:
        async with sitting.outage(fault):
            done, _ = await asyncio.wait([waiting], timeout=sitting.candidate.patience + WAIT)
            expect(done, "a waiting fetch does not notice that the line is down")
            await _says_so(lambda: waiting, "a fetch that was waiting")
    finally:
        waiting.cancel()
    await sitting.retry_until_connected(lambda: client.dispatch(sitting.transaction()))
    await sitting.drain(client, {"tx-0"})


async def _fetching_loses_nothing(fault: str, sitting: CheckContext) -> None:
    client = await sitting.client()
    sent = sitting.transactions(COUNT)
    await client.dispatch(*sent)
    held: list[Delivery] = []
    down: asyncio.Event = asyncio.Event()

    async def fetch() -> None:
        while not down.is_set():
            try:
                held.extend(await client.fetch(1))
            except ConnectionLostError:
                return
            await asyncio.sleep(0.002)

    fetching = asyncio.ensure_future(fetch())
    await sitting.until(lambda: len(held) >= 3 or fetching.done(), "a few are fetched")
    async with sitting.outage(fault):
        down.set()
        await fetching
    await sitting.drain(client, {each.id for each in sent}, held=held)


async def _settled_through(
    fault: str, sitting: CheckContext, client: Client, held: Sequence[Delivery], how: Settlement
) -> tuple[set[str], set[str]]:
    """Settle one after the other during an outage; return the settled ids and the ids without an answer."""
    answered: dict[str, SettleResult] = {}
    unknown: set[str] = set()

    async def settle() -> None:
        for delivery in held:
            name = delivery.transaction.id
            try:
                (answered[name],) = await client.settle((delivery, how))
            except ConnectionLostError:
                unknown.add(name)
            await asyncio.sleep(0.002)

    settling = asyncio.ensure_future(settle())
    await sitting.until(lambda: len(answered) >= 3 or settling.done(), "a few are settled")
    async with sitting.outage(fault):
        # Not all of them: with the network partitioned, each may take its full timeout.
        await sitting.until(lambda: bool(unknown) or settling.done(), "a settlement meets the outage", within=60.0)
    await settling
    settled = {name for name, result in answered.items() if result is SettleResult.SETTLED}
    open_ends = [delivery for delivery in held if delivery.transaction.id in unknown]
    for delivery in open_ends:
        # Settled already, still claimed, or lost after the lease ended: each of these answers is valid.
        (result,) = await sitting.retry_until_connected(partial(client.settle, (delivery, how)))
        if result is SettleResult.SETTLED:
            settled.add(delivery.transaction.id)
    return settled, unknown


async def _settling_loses_nothing(fault: str, sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(COUNT))
    held = await client.claim(COUNT)
    settled, unknown = await _settled_through(fault, sitting, client, held, Ack())
    await _all_but_settled(sitting, client, {each.transaction.id for each in held}, settled=settled, unknown=unknown)


async def _burying_loses_nothing(fault: str, sitting: CheckContext) -> None:
    client = await sitting.client()
    await client.dispatch(*sitting.transactions(COUNT))
    held = await client.claim(COUNT)
    settled, _ = await _settled_through(fault, sitting, client, held, DeadLetter("sold_out"))
    letters = {record.id for record in await sitting.retry_until_connected(client.list_dead)}
    expect(settled <= letters, f"{sorted(settled - letters)} were answered as settled, and are no dead letters")
    ids = {each.transaction.id for each in held}
    await sitting.drain(client, ids - letters, may=ids - settled)


async def _all_but_settled(
    sitting: CheckContext, client: Client, ids: set[str], *, settled: set[str], unknown: set[str]
) -> None:
    """Expect that settled transactions do not return and rejected ones do; unknown ones may return."""
    refused = ids - settled - unknown
    await sitting.drain(client, refused, may=unknown - settled)
    end = time.monotonic() + sitting.lease * 1.3
    while time.monotonic() < end:
        for delivery in await client.fetch(10, wait=0.1):
            name = delivery.transaction.id
            expect(name not in settled, f"{name} came again although it was answered as settled")
            await client.ack(delivery)


async def _dispatching_loses_nothing(fault: str, sitting: CheckContext) -> None:
    client = await sitting.client()
    confirmed: set[str] = set()
    unknown: set[str] = set()

    async def dispatch() -> None:
        for each in sitting.transactions(10 * COUNT):
            try:
                for confirmation in await client.dispatch(each):
                    confirmed.add(confirmation.transaction_id)
            except ConnectionLostError:
                unknown.add(each.id)
                return
            await asyncio.sleep(0.002)

    dispatching = asyncio.ensure_future(dispatch())
    await sitting.until(lambda: len(confirmed) >= 3 or dispatching.done(), "a few are dispatched")
    async with sitting.outage(fault):
        await dispatching
    expect(unknown, "no dispatch met the outage; is the server really gone?")
    await sitting.drain(client, confirmed, may=unknown)


async def _a_loop_goes_on(fault: str, sitting: CheckContext) -> None:
    client = await sitting.client()
    sent = sitting.transactions(COUNT)
    await client.dispatch(*sent)
    async with running_loop(sitting, client, lambda _: None, stay=lambda _: 0.05, concurrency={"value": 2}) as loop:
        await loop.until(lambda: len(loop.ended("succeeded")) >= 3, "a few end")
        async with sitting.outage(fault):
            await asyncio.sleep(0.3)
        await sitting.until(
            lambda: {each.id for each in sent} <= {*loop.ended("succeeded"), *_done_without_a_word(loop)},
            "all succeed after the line is back",
            within=sitting.candidate.arrival + 3 * sitting.candidate.patience,
        )


def _done_without_a_word(loop: Loop) -> set[str]:
    """Return the ids whose settlement met the outage: it may have succeeded, and then they do not return."""
    return {name for name in loop.ended("released") if loop.runs[name]}


def _made(
    rule: str, run: Callable[[str, CheckContext], Awaitable[None]], *ids: str, needs: tuple[Need, ...] = ()
) -> list[Check]:
    checks = []
    for fault, words in FAULTS.items():
        tried: Run = partial(run, fault)
        checks.append(Check(f"{rule}_when_the_server_is_{words}", ids, (faulty(fault), *needs), tried, None))
    return checks


CHECKS: tuple[Check, ...] = (
    *_made("every_call_says_so", _every_call_says_so, "CNN-07"),
    *_made("a_waiting_fetch_says_so", _a_waiting_fetch_says_so, "CNN-07"),
    *_made("fetching_loses_nothing", _fetching_loses_nothing, "CNN-07"),
    *_made("settling_loses_nothing", _settling_loses_nothing, "CNN-02", "CNN-07"),
    *_made("dead_lettering_loses_nothing", _burying_loses_nothing, "CNN-07", "CNN-08", needs=(dead_letters,)),
    *_made("dispatching_loses_nothing", _dispatching_loses_nothing, "CNN-02", "CNN-07"),
    *_made("a_loop_goes_on", _a_loop_goes_on, "CNN-07"),
)
