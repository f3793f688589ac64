"""Fixtures for tests of tasks. It stands outside of the package: a run that uses none of them imports nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def ergon_trial() -> Callable[..., Any]:
    """Makes trials: ``ergon_trial(task, faults=..., bank=FakeBank())``, as ``ergon_framework.testing.trial.Trial``."""
    from ergon_framework.testing.trial import Trial  # noqa: PLC0415 - for those who ask only

    return Trial


@pytest.fixture
def ergon_chaos() -> Callable[..., Any]:
    """Counts what must happen once, after random mishaps, as ``ergon_framework.testing.chaos.survives``."""
    from ergon_framework.testing.chaos import survives  # noqa: PLC0415 - as above

    return survives
