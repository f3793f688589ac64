"""Renewing: every claim is extended from fetch to settle, where the broker can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import Call, Script, call, gone, sleep
from ergon_framework.engine.outcome import Expired, Ok, Stopped

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Senses


def renew(
    extend: Callable[[Sequence[Delivery]], Any],
    claims: dict[Any, Delivery],
    *,
    lease: float,
    senses: Senses,
    lost: Callable[[list[Any]], None],
) -> Script[None]:
    """Extend all claims three times per lease, until interrupted.

    A call that fails or hangs is simply made again at the next turn: one may, before a claim ends.
    """
    turn = lease / 3
    due = senses.clock() + turn
    while True:
        if (yield from sleep(due)) is not None:
            return
        due = senses.clock() + turn
        held = [delivery for delivery in list(claims.values()) if delivery.lease_until is not None]
        if not held:
            continue
        answer = yield from call(Call("extend", extend, (held,), due))
        if isinstance(answer, Expired | Stopped) and answer.body is not None:
            yield from gone(answer.body, senses.clock())
        if isinstance(answer, Stopped):
            return
        if isinstance(answer, Ok) and isinstance(answer.value, Sequence):
            ended = [delivery.receipt for delivery, until in zip(held, answer.value, strict=False) if until is None]
            for delivery, until in zip(held, answer.value, strict=False):
                delivery.lease_until = until or delivery.lease_until
            if ended:
                lost(ended)
