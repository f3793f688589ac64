"""Pytest fixtures for tests of tasks; a module outside the package, so that unused fixtures import nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def ergon_trial() -> Callable[..., Any]:
    """Return the harness: ``ergon_trial(task, faults=..., bank=FakeBank())`` creates a ``TaskHarness``."""
    from ergon_framework.testing.harness import TaskHarness  # noqa: PLC0415 - imported on first use

    return TaskHarness


@pytest.fixture
def ergon_chaos() -> Callable[..., Any]:
    """Return ``assert_survives``, which checks after random faults that every effect happened exactly once."""
    from ergon_framework.testing.chaos import assert_survives  # noqa: PLC0415 - as above

    return assert_survives
