"""Content in S3 passes the conformance suite, against a real server that the tests start."""

from __future__ import annotations

import pytest

from ergon_framework.testing.conformance.content_store.suite import CheckOutcome, pytest_suite, run_suite
from tests.conformance.content_stores import S3ContentsUnderTest


@pytest.fixture
def system(seaweed):
    return S3ContentsUnderTest(seaweed)


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_s3_contents = pytest_suite("system", marks=get_spec_marks)


def test_every_check_but_the_size_limit_applies(system):
    results = run_suite(system)
    skipped = {
        check_result.check: check_result.reason
        for check_result in results
        if check_result.result is not CheckOutcome.PASSED
    }
    assert skipped == {
        "a_full_store_rejects_before_anything_is_lost": "the system under test has no bounded stores",
    }
