"""Facts take the exam of connectors, in log mode: each flavour by itself, and the other one over the bridge."""

from __future__ import annotations

import pytest

from ergon_framework.testing.conformance.connector import exam
from tests.conformance.candidates import facts_with_asyncio, facts_with_threads


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_facts_with_threads = exam(facts_with_threads, variants=("sync",), marks=spec)
test_facts_with_asyncio = exam(facts_with_asyncio, variants=("async",), marks=spec)
