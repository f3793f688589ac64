"""The connectors in this process take the exam."""

from __future__ import annotations

import pytest

from ergon_framework.testing.conformance.connector import exam
from tests.conformance.candidates import LogCandidate, MemoryCandidate, with_codec


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_memory = exam(MemoryCandidate, marks=spec)
test_memory_with_a_codec = exam(with_codec, marks=spec)
test_memory_log = exam(LogCandidate, marks=spec)
