"""Facts pass the connectors' conformance suite in log mode: one variant natively, the other one over the bridge."""

from __future__ import annotations

import pytest

from ergon_framework.testing.conformance.connector.suite import pytest_suite
from tests.conformance.candidates import make_async_facts, make_sync_facts


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_facts_with_threads = pytest_suite(make_sync_facts, variants=("sync",), marks=get_spec_marks)
test_facts_with_asyncio = pytest_suite(make_async_facts, variants=("async",), marks=get_spec_marks)
