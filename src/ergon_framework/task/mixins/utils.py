"""Context and timeouts for code of a task; ``task.context`` defines them."""

from ergon_framework.task.context import run_with_timeout, run_with_timeout_async, with_context, with_context_async

__all__ = ["run_with_timeout", "run_with_timeout_async", "with_context", "with_context_async"]
