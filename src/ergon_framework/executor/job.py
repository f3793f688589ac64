"""The job context that a handler can read, in addition to its arguments and its scope."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from ergon_framework.executor.protocol import ExecutionContext

_current_context: Final[ContextVar[ExecutionContext | None]] = ContextVar("ergon_job", default=None)


def current_job() -> ExecutionContext | None:
    """Return the context of the request that is handled here, if any."""
    return _current_context.get()


#: Sets a context as the current one for the rest of the running context variables.
set_current_job: Final = _current_context.set
