"""Job: what a handler may know about the job that it runs, beyond its arguments and its scope."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from ergon_framework.executor.protocol import ExecutionContext

_current: Final[ContextVar[ExecutionContext | None]] = ContextVar("ergon_job", default=None)


def current_job() -> ExecutionContext | None:
    """The context of the request that is handled here, if any."""
    return _current.get()


#: Makes a context the current one for the rest of these variables.
enter: Final = _current.set
