"""Request: a job that is to be submitted, as the database gets it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.errors import ConfigurationError
from ergon_framework.executor.jobs.model import RETENTION, queue_name
from ergon_framework.executor.routing import MARK, NoRoute, route
from ergon_framework.telemetry.context import carried
from ergon_framework.transaction import Transaction

#: The executors of jobs whose names select none, unless the client is told otherwise.
DEFAULT: Final = "python"
#: The largest body; with what a request adds to it, it fits into a line of the protocol.
MAX_BYTES: Final = 15 * 1024 * 1024
#: How many levels of priority there are above 0, and below it; as in every queue of PostgreSQL.
LEVELS: Final = 100
_LONGEST_DELAY: Final = 10 * 365 * 86_400.0
_LONGEST_KEY: Final = 1024

CODEC: Final = JsonCodec(max_bytes=MAX_BYTES)
_CANONICAL: Final = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One job for an executor.

    *function* is ``handler`` or ``executor#handler``. It becomes due after *delay* seconds, or *at* a
    moment. *max_attempts* and *timeout*, the seconds of one attempt, are the orchestrator's policy
    unless they are given. Below a handler its id is derived from the transaction that is handled, so
    that a second run of that handler submits the same job: *name* tells several of one function apart.
    """

    function: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    name: str | None = None
    unique_key: str | None = None
    delay: float = 0.0
    at: datetime | None = None
    priority: int = 0
    max_attempts: int | None = None
    timeout: float | None = None
    tenant: str | None = None
    correlation: str | None = None
    retention: float = RETENTION

    def __post_init__(self) -> None:
        self._check_times()
        if not -LEVELS <= self.priority <= LEVELS:
            raise ConfigurationError(f"a priority is between -{LEVELS} and {LEVELS}, not {self.priority}")
        if self.max_attempts is not None and not 1 <= self.max_attempts < 2**31:
            raise ConfigurationError(f"a job has at least 1 attempt, not {self.max_attempts}")
        if self.unique_key is not None and not 0 < len(self.unique_key) <= _LONGEST_KEY:
            raise ConfigurationError(f"a unique key has 1 to {_LONGEST_KEY} characters, not {len(self.unique_key)}")

    def _check_times(self) -> None:
        if self.at is not None and (self.delay or self.at.tzinfo is None):
            raise ConfigurationError("a job is due after a delay or at a moment, which names its zone, not both")
        if not 0 <= self.delay <= _LONGEST_DELAY:
            raise ConfigurationError(f"a delay is between 0 and {_LONGEST_DELAY:g} seconds, not {self.delay!r}")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ConfigurationError(f"a timeout is a finite number of seconds > 0, not {self.timeout!r}")
        if not 0 <= self.retention <= _LONGEST_DELAY:
            raise ConfigurationError(f"a retention is 0 to {_LONGEST_DELAY:g} seconds, not {self.retention!r}")


def parameters(request: Request, *, default: str | None, executors: Collection[str] | None) -> dict[str, Any]:
    """What ``ergon.submit_job`` is given for *request*; errors if it cannot be written.

    An executor that is none of *executors*, if those are known, is not refused here: the orchestrator
    of the default one makes a dead letter of the job, so that it is not lost.
    """
    kind, handler = _routed(request.function, default=default, executors=executors)
    queue = queue_name(kind)
    fields: dict[str, Any] = {
        "tenant": request.tenant,
        "correlation": request.correlation,
        "id": request.id,
    }
    payload = {"function": request.function, "args": list(request.args), "kwargs": dict(request.kwargs)}
    transaction = carried(
        Transaction.new(
            payload,
            name=request.name or f"{queue}/{handler}",
            source=queue,
            **{name: value for name, value in fields.items() if value is not None},
        )
    )
    body, headers = CODEC.encode(transaction)
    return {
        "queue": queue,
        "id": transaction.id,
        "function": handler,
        "headers": json.dumps(headers),
        "body": body,
        "digest": _digest(kind, handler, payload),
        "delay": request.delay if request.at is None else max(0.0, (request.at - datetime.now(UTC)).total_seconds()),
        "priority": request.priority,
        "tenant": transaction.tenant,
        "correlation": transaction.correlation,
        "unique_key": request.unique_key,
        "max_attempts": request.max_attempts,
        "timeout": request.timeout,
        "retention": request.retention,
    }


def _routed(function: str, *, default: str | None, executors: Collection[str] | None) -> tuple[str, str]:
    """The kind whose queue the job goes to, and the name under which it is listed."""
    prefix, mark, _ = function.partition(MARK)
    known = {prefix if mark else str(default)} if executors is None else executors
    found = route(function, default=default, executors=known)
    if not isinstance(found, NoRoute):
        return found.executor, found.handler
    # What names an executor that does not exist is for an orchestrator to bury; all else is a slip of the caller.
    misnamed = isinstance(route(function, default=default, executors={prefix if mark else str(default)}), NoRoute)
    if misnamed or default is None:
        raise ConfigurationError(found.message)
    return default, function


def _digest(kind: str, handler: str, payload: Mapping[str, Any]) -> bytes:
    # Sorted: the order of keys is no difference between two jobs.
    told = [kind, handler, payload["args"], payload["kwargs"]]
    try:
        return hashlib.sha256(_CANONICAL.encode(told).encode()).digest()
    except TypeError:
        raise UnencodableError("the names of keyword arguments, and all keys below them, are texts") from None
