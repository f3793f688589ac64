"""The in-memory connectors pass the conformance suite."""

from __future__ import annotations

import pytest

from ergon_framework.testing.conformance.connector.suite import pytest_suite
from tests.conformance.candidates import MemoryLogUnderTest, MemoryUnderTest, make_memory_with_codec


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_memory = pytest_suite(MemoryUnderTest, marks=get_spec_marks)
test_memory_with_a_codec = pytest_suite(make_memory_with_codec, marks=get_spec_marks)
test_memory_log = pytest_suite(MemoryLogUnderTest, marks=get_spec_marks)
