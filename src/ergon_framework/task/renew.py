"""Lease renewal: extends every claim from fetch to settlement, if the broker supports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import Call, Script, await_exit, call, sleep
from ergon_framework.engine.outcome import Expired, Interrupted, Ok

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Clock


def renew_leases(
    extend: Callable[[Sequence[Delivery]], Any],
    claims: dict[Any, Delivery],
    *,
    lease: float,
    clock: Clock,
    on_lost: Callable[[list[Any]], None],
) -> Script[None]:
    """Extend all claims three times per lease, until interrupted.

    A call that fails or hangs is repeated at the next interval: one such call does not end a claim.
    """
    interval = lease / 3
    due = clock.monotonic() + interval
    while True:
        if (yield from sleep(due)) is not None:
            return
        due = clock.monotonic() + interval
        leased = [delivery for delivery in list(claims.values()) if delivery.lease_until is not None]
        if not leased:
            continue
        answer = yield from call(Call("extend", extend, (leased,), due))
        if isinstance(answer, Expired | Interrupted) and answer.call is not None:
            yield from await_exit(answer.call, clock.monotonic())
        if isinstance(answer, Interrupted):
            return
        if isinstance(answer, Ok) and isinstance(answer.value, Sequence):
            lost_receipts = [
                delivery.receipt for delivery, until in zip(leased, answer.value, strict=False) if until is None
            ]
            for delivery, until in zip(leased, answer.value, strict=False):
                delivery.lease_until = until or delivery.lease_until
            if lost_receipts:
                on_lost(lost_receipts)
