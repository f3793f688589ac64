"""The exceptions of tasks; ``worker.exceptions`` defines them."""

from ergon_framework.worker.exceptions import (
    BusinessError,
    FetchException,
    FetchTimeoutException,
    LoopStalled,
    LoopTimeout,
    TransactionException,
)

__all__ = [
    "BusinessError",
    "FetchException",
    "FetchTimeoutException",
    "LoopStalled",
    "LoopTimeout",
    "TransactionException",
]
