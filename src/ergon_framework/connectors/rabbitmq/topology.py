"""Topology: which queues there are, with which arguments, and what is wrong where the server has others."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.errors import ConfigurationError

#: Where the steps of delays lie within a power of ten. A delay is rounded up to the next step: every step is a queue
#: of its own, because a queue gives up only what is at its head, and so must hold delays of one length.
STEPS: Final = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
_SHORTEST: Final = 10
#: As long as the server can be told: 32 bits of milliseconds.
_LONGEST: Final = 4_294_967_295
#: Deliveries after which the server itself puts a message aside. The cap that counts is the task's own; this one is
#: for whom no task ever counts, and far from what outages may cost.
DELIVERY_LIMIT: Final = 1000
#: No limit that anybody reaches. Without one, servers from version 4 on drop what was looked at 20 times.
_NEVER: Final = 2_147_483_647
_DAY_MS: Final = 86_400_000
_PROOF_MS: Final = 60_000
_MISMATCH: Final = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for queue '(?P<queue>.+)' in vhost '.*': "
    r"received (?P<wanted>.+?) but current is (?P<found>.+)$"
)

Arguments = dict[str, Any]


def dead(queue: str) -> str:
    """The name of the queue of dead letters."""
    return f"{queue}.dead"


def later(queue: str, milliseconds: int) -> str:
    """The name of the queue in which what was put off waits for so long."""
    return f"{queue}.later.{milliseconds}"


def lock(queue: str) -> str:
    """The name of the queue that whoever moves dead letters has to himself."""
    return f"{queue}.dead.lock"


def ready(queue: str) -> str:
    """The name of the exchange over which everything is published: what is bound there outlives a crash."""
    return f"{queue}.ready"


def proof(queue: str, number: str) -> str:
    """The name of a queue that is made only so that the names of those before it are written."""
    return f"{queue}.proof.{number}"


def step(delay: float) -> int:
    """The delay that is kept for one of *delay* seconds, in milliseconds: never shorter, at most a quarter longer.

    >>> step(0.4), step(1.0), step(1.01), step(3600)
    (470, 1000, 1200, 3900000)
    """
    wanted = max(_SHORTEST, math.ceil(delay * 1000))
    if wanted >= _LONGEST:
        return _LONGEST
    tens = int(10 ** (len(str(wanted)) - 1))
    return min(_LONGEST, next((round(part * tens) for part in STEPS if round(part * tens) >= wanted), 10 * tens))


def work_arguments(queue: str) -> Arguments:
    """Of the queue itself."""
    return {**_guarded(dead(queue)), "x-delivery-limit": DELIVERY_LIMIT}


def later_arguments(queue: str, milliseconds: int) -> Arguments:
    """Of a queue whose messages go back to *queue* after so long."""
    return {**_guarded(queue), "x-message-ttl": milliseconds, "x-delivery-limit": _NEVER}


def dead_arguments(days: float | None) -> Arguments:
    """Of the queue of dead letters, which keeps them for *days*."""
    kept: Arguments = {} if days is None else {"x-message-ttl": min(_LONGEST, round(days * _DAY_MS))}
    return {"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-delivery-limit": _NEVER, **kept}


def proof_arguments() -> Arguments:
    """Of a queue that nobody uses; it goes by itself where whoever made it could not delete it."""
    return {"x-queue-type": "quorum", "x-expires": _PROOF_MS}


def _guarded(target: str) -> Arguments:
    """What leaves by itself stays until *target* has it; that takes both a strategy and a way to refuse."""
    return {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": target,
        "x-dead-letter-strategy": "at-least-once",
    }


def refusal(queue: str, words: str) -> ConnectorError | ConfigurationError:
    """What a server means that does not declare *queue*, as *words* have it."""
    if found := _MISMATCH.search(words):
        return ConfigurationError(
            f"the queue {found['queue']!r} is there with another argument {found['name']!r}: wanted was "
            f"{found['wanted']}, there is {found['found']}; empty and delete the queue so that it can be made anew, or "
            "give this one another name"
        )
    if "PRECONDITION_FAILED" in words:
        return ConfigurationError(f"the server does not make the queue {queue!r} as it must be: {words}")
    if "ACCESS_REFUSED" in words:
        return ConfigurationError(
            f"the user may not declare the queue {queue!r}; give him the rights to configure, write and read it and "
            f"those whose names begin with {queue + '.'!r}: {words}"
        )
    return ConnectorError(f"the server does not make the queue {queue!r}: {words}")
