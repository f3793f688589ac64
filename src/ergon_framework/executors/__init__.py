"""Executors: processes that run handlers which must be killable or are written in another language.

An orchestrator sends requests to executors over stdin, one JSON value per line, and reads outcomes from stdout.
"""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.executors.isolation import run_in_executor
    from ergon_framework.executors.pool import ExecutorPool, PoolPolicy
    from ergon_framework.executors.process import ExecutorCommand, ResourceLimits
    from ergon_framework.executors.registry import HandlerRegistry, Retry
    from ergon_framework.executors.runtime import current_job
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "isolation": ("run_in_executor",),
            "pool": ("ExecutorPool", "PoolPolicy"),
            "process": ("ExecutorCommand", "ResourceLimits"),
            "registry": ("HandlerRegistry", "Retry"),
            "runtime": ("current_job",),
        },
    )

__all__ = [
    "ExecutorCommand",
    "ExecutorPool",
    "HandlerRegistry",
    "PoolPolicy",
    "ResourceLimits",
    "Retry",
    "current_job",
    "run_in_executor",
]
