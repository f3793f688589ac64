"""The queues of a work queue, their arguments, and the errors of a server whose queues differ."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.errors import ConfigurationError

#: The steps of delays within a power of ten. A delay is rounded up to the next step: every step is a separate queue,
#: because a queue expires only the message at its head, and so must hold delays of one length.
DELAY_STEPS: Final = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
_MIN_DELAY_MS: Final = 10
#: Largest delay that the server accepts: 32 bits of milliseconds.
_MAX_DELAY_MS: Final = 4_294_967_295
#: Deliveries after which the server itself dead-letters a message. The effective limit is the task's; this one is for
#: consumers without such a limit, and far above the deliveries that outages may add.
DELIVERY_LIMIT: Final = 1000
#: An unreachable limit. Without one, servers from version 4 on drop a message after 20 deliveries.
_NO_DELIVERY_LIMIT: Final = 2_147_483_647
_DAY_MS: Final = 86_400_000
_PROBE_EXPIRES_MS: Final = 60_000
_MISMATCH_PATTERN: Final = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for queue '(?P<queue>.+)' in vhost '.*': "
    r"received (?P<wanted>.+?) but current is (?P<found>.+)$"
)

QueueArguments = dict[str, Any]


def dead_letter_queue(queue: str) -> str:
    """Return the name of the dead-letter queue."""
    return f"{queue}.dead"


def delay_queue(queue: str, milliseconds: int) -> str:
    """Return the name of the queue that holds messages deferred for *milliseconds*."""
    return f"{queue}.later.{milliseconds}"


def lock_queue(queue: str) -> str:
    """Return the name of the exclusive queue that locks moves of dead letters."""
    return f"{queue}.dead.lock"


def publish_exchange(queue: str) -> str:
    """Return the name of the exchange for all publishes: a queue bound to it survives a crash."""
    return f"{queue}.ready"


def sync_probe_queue(queue: str, number: str) -> str:
    """Return the name of a queue that is declared only so that the names of earlier ones are persisted."""
    return f"{queue}.proof.{number}"


def delay_bucket_ms(delay: float) -> int:
    """Return the actual delay of a delay of *delay* seconds, in milliseconds: never shorter, at most a quarter longer.

    >>> delay_bucket_ms(0.4), delay_bucket_ms(1.0), delay_bucket_ms(1.01), delay_bucket_ms(3600)
    (470, 1000, 1200, 3900000)
    """
    delay_ms = max(_MIN_DELAY_MS, math.ceil(delay * 1000))
    if delay_ms >= _MAX_DELAY_MS:
        return _MAX_DELAY_MS
    magnitude = int(10 ** (len(str(delay_ms)) - 1))
    return min(
        _MAX_DELAY_MS,
        next((round(part * magnitude) for part in DELAY_STEPS if round(part * magnitude) >= delay_ms), 10 * magnitude),
    )


def work_queue_arguments(queue: str) -> QueueArguments:
    """Return the arguments of the queue itself."""
    return {**_build_at_least_once_arguments(dead_letter_queue(queue)), "x-delivery-limit": DELIVERY_LIMIT}


def delay_queue_arguments(queue: str, milliseconds: int) -> QueueArguments:
    """Return the arguments of a queue whose messages return to *queue* after *milliseconds*."""
    return {
        **_build_at_least_once_arguments(queue),
        "x-message-ttl": milliseconds,
        "x-delivery-limit": _NO_DELIVERY_LIMIT,
    }


def dead_letter_arguments(days: float | None) -> QueueArguments:
    """Return the arguments of the dead-letter queue, which keeps its messages for *days*."""
    retention: QueueArguments = {} if days is None else {"x-message-ttl": min(_MAX_DELAY_MS, round(days * _DAY_MS))}
    return {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-delivery-limit": _NO_DELIVERY_LIMIT,
        **retention,
    }


def sync_probe_arguments() -> QueueArguments:
    """Return the arguments of a probe queue; it expires if the client that declared it could not delete it."""
    return {"x-queue-type": "quorum", "x-expires": _PROBE_EXPIRES_MS}


def _build_at_least_once_arguments(target: str) -> QueueArguments:
    """Return arguments by which an expired or rejected message stays until *target* has stored it.

    That takes both an at-least-once strategy and an overflow mode that rejects.
    """
    return {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": target,
        "x-dead-letter-strategy": "at-least-once",
    }


def declare_error(queue: str, message: str) -> ConnectorError | ConfigurationError:
    """Translate the server's error for declaring *queue*, whose text is *message*."""
    if mismatch := _MISMATCH_PATTERN.search(message):
        return ConfigurationError(
            f"the queue {mismatch['queue']!r} is there with another argument {mismatch['name']!r}: wanted was "
            f"{mismatch['wanted']}, there is {mismatch['found']}; empty and delete the queue so that it can be made "
            "anew, or give this one another name"
        )
    if "PRECONDITION_FAILED" in message:
        return ConfigurationError(f"the server does not make the queue {queue!r} as it must be: {message}")
    if "ACCESS_REFUSED" in message:
        return ConfigurationError(
            f"the user may not declare the queue {queue!r}; give him the rights to configure, write and read it and "
            f"those whose names begin with {queue + '.'!r}: {message}"
        )
    return ConnectorError(f"the server does not make the queue {queue!r}: {message}")
