"""Settings of every test: the plugins and the profiles of hypothesis."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

# A server that is started as another user is forked. gRPC would start its threads in the child, without its files.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

pytest_plugins = ["tests.servers.fixtures", "tests.invariants", "tests.crowd"]

# Wall time on a shared machine says nothing about a rule, so no example has a deadline.
settings.register_profile("gate", deadline=None, max_examples=100, print_blob=True)
settings.register_profile("deep", deadline=None, max_examples=5_000, print_blob=True)
settings.load_profile("gate")


@pytest.fixture(autouse=True)
def fresh_label_limits():
    """Forget the label values of earlier tests: together they have more than the limit of a process."""
    metrics = sys.modules.get("ergon_framework.telemetry.metrics")
    for registry in list(metrics._registries.values()) if metrics is not None else ():
        registry._label_limiter._seen_values.clear()
