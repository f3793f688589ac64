"""Content in S3 passes the conformance suite, against a real server that the tests start."""

from __future__ import annotations

import pytest

from ergon_framework.testing.conformance.contents import Result, exam, take
from tests.conformance.places import S3ContentsUnderTest


@pytest.fixture
def system(seaweed):
    return S3ContentsUnderTest(seaweed)


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_s3_contents = exam("system", marks=get_spec_marks)


def test_every_check_but_the_size_limit_applies(system):
    results = take(system)
    skipped = {
        check_result.check: check_result.reason for check_result in results if check_result.result is not Result.PASSED
    }
    assert skipped == {
        "a_full_place_refuses_before_anything_is_lost": "the candidate has places without bounds only",
    }
