"""The test kit: tasks in virtual time with planned faults, chaos, and fake providers."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.testing.chaos import Effects, NotExactlyOnceError, assert_one_effect_per_ack, assert_survives
    from ergon_framework.testing.determinism import NotDeterministicError, assert_deterministic
    from ergon_framework.testing.fake_provider import AsyncFakeProvider, Behaviour, FakeProvider, FakeProviderServer
    from ergon_framework.testing.faults import (
        Fault,
        hangs,
        loses_response,
        raises,
        returns,
        takes_longer,
        worker_dies_after,
        worker_dies_before,
    )
    from ergon_framework.testing.harness import TaskHarness
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "chaos": ("Effects", "NotExactlyOnceError", "assert_one_effect_per_ack", "assert_survives"),
            "determinism": ("NotDeterministicError", "assert_deterministic"),
            "fake_provider": ("AsyncFakeProvider", "Behaviour", "FakeProvider", "FakeProviderServer"),
            "faults": (
                "Fault",
                "hangs",
                "loses_response",
                "raises",
                "returns",
                "takes_longer",
                "worker_dies_after",
                "worker_dies_before",
            ),
            "harness": ("TaskHarness",),
        },
    )

__all__ = [
    "AsyncFakeProvider",
    "Behaviour",
    "Effects",
    "FakeProvider",
    "FakeProviderServer",
    "Fault",
    "NotDeterministicError",
    "NotExactlyOnceError",
    "TaskHarness",
    "assert_deterministic",
    "assert_one_effect_per_ack",
    "assert_survives",
    "hangs",
    "loses_response",
    "raises",
    "returns",
    "takes_longer",
    "worker_dies_after",
    "worker_dies_before",
]
