"""Contents in S3 take their exam, against a real server that the tests start."""

from __future__ import annotations

import pytest

from ergon_framework.testing.conformance.contents import Result, exam, take
from tests.conformance.places import S3Place


@pytest.fixture
def place(seaweed):
    return S3Place(seaweed)


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_s3_contents = exam("place", marks=spec)


def test_all_but_bounds_apply(place):
    marks = take(place)
    skipped = {got.check: got.reason for got in marks if got.result is not Result.PASSED}
    assert skipped == {
        "a_full_place_refuses_before_anything_is_lost": "the candidate has places without bounds only",
    }
