"""Content stores pass the conformance suite, and each broken one fails exactly the checks it breaks."""

from __future__ import annotations

import pytest

from ergon_framework.facts.stores.memory_contents import MemoryContentStore
from ergon_framework.testing.conformance.contents import CHECKS, ContentStoreUnderTest, Result, exam, mark, take
from tests.conformance import broken_contents as broken
from tests.conformance.places import FileContentsUnderTest, MemoryContentsUnderTest

#: Broken content store -> the checks that it must fail, and no others.
EXPECTED_FAILURES = {
    broken.CommitsAnything: {"what_was_not_expected_is_not_kept"},
    broken.KeepsMismatches: {"what_was_not_expected_is_not_kept"},
    broken.ComparesOnlyTheDigest: {"what_was_not_expected_is_not_kept"},
    broken.ExposesUnfinishedUploads: {
        "nothing_can_be_read_before_the_seal",
        "what_was_not_expected_is_not_kept",
        "a_full_place_refuses_before_anything_is_lost",
        "one_without_a_name_leaves_nothing",
        "one_with_a_name_goes_on",
    },
    broken.KeepsUnnamedUploads: {"one_without_a_name_leaves_nothing"},
    broken.ForgetsNamedUploads: {
        "one_with_a_name_goes_on",
        "nobody_goes_on_where_nothing_is",
        "sweeping_takes_what_lies_too_long",
        "bytes_of_uploads_are_counted",
    },
    broken.ResumesAtTheEnd: {"one_with_a_name_goes_on"},
    broken.FillsUploadGaps: {"nobody_goes_on_where_nothing_is"},
    broken.NeverStartsFromScratch: {"one_with_a_name_can_begin_anew", "whoever_comes_later_has_it"},
    broken.SharesUploads: {"whoever_comes_later_has_it", "sweeping_takes_what_lies_too_long"},
    broken.KeepsDamagedContent: {"what_was_cut_short_is_replaced"},
    broken.CountsCopies: {"the_same_content_is_kept_once"},
    broken.RemovesNothing: {"the_same_content_is_kept_once", "what_is_removed_is_gone"},
    broken.ReadsContentInOnePiece: {"it_is_read_in_small_pieces"},
    broken.IgnoresTheReadPosition: {"reading_begins_anywhere"},
    broken.AcceptsMalformedDigests: {"only_a_digest_names_a_content"},
    broken.CleansUpYoungUploads: {"sweeping_takes_what_lies_too_long"},
    broken.CleansUpNothing: {"sweeping_takes_what_lies_too_long"},
    broken.CountsNoUploads: {"bytes_of_uploads_are_counted"},
    broken.TrustsUploadNames: {"no_name_of_an_upload_leads_anywhere"},
    broken.AcceptsStrings: {"only_bytes_are_taken"},
    broken.SharesOneBuffer: {"many_at_once_store_what_each_has"},
    broken.IgnoresTheSizeLimit: {"a_full_place_refuses_before_anything_is_lost"},
    broken.ReportsItselfDurable: {"it_knows_whether_it_is_durable"},
    broken.LosesTheFirstByte: {"what_is_sealed_has_its_digest"},
}


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_memory_contents = exam(MemoryContentsUnderTest, marks=get_spec_marks)
test_file_contents = exam(FileContentsUnderTest, marks=get_spec_marks)


def find_failures(store_class):
    results = [mark(check, MemoryContentsUnderTest(store_class)) for check in CHECKS]
    return {check_result.check: check_result.reason for check_result in results if check_result.result is Result.FAILED}


@pytest.mark.parametrize("system_class", [MemoryContentsUnderTest, FileContentsUnderTest])
def test_every_check_applies_to_the_bundled_content_stores(system_class):
    system = system_class()
    try:
        results = take(system)
    finally:
        system.close()
    assert {check_result.result for check_result in results} == {Result.PASSED}, [
        str(check_result) for check_result in results
    ]


@pytest.mark.parametrize("kind", EXPECTED_FAILURES, ids=lambda kind: kind.__name__)
def test_a_broken_content_store_fails_exactly_the_checks_it_breaks(kind):
    assert set(find_failures(kind)) == EXPECTED_FAILURES[kind]


def test_each_check_fails_for_a_broken_content_store():
    assert {check.name for check in CHECKS} == set().union(*EXPECTED_FAILURES.values())


def test_each_broken_content_store_has_expected_failures():
    store_classes = {
        kind for kind in vars(broken).values() if isinstance(kind, type) and issubclass(kind, MemoryContentStore)
    }
    assert store_classes - {MemoryContentStore} == EXPECTED_FAILURES.keys()


class MinimalContentsUnderTest(ContentStoreUnderTest):
    """A content store under test with only the required features."""

    def __init__(self):
        self._stores = {}

    def contents(self, place, *, room=None):
        return self._stores.setdefault(place, MemoryContentStore())


def test_checks_of_missing_features_are_skipped_with_a_reason():
    skipped = {
        check_result.check: check_result.reason
        for check_result in take(MinimalContentsUnderTest())
        if check_result.result is Result.NOT_APPLICABLE
    }
    assert skipped == {
        "what_was_cut_short_is_replaced": "the candidate cannot cut a content",
        "a_full_place_refuses_before_anything_is_lost": "the candidate has places without bounds only",
    }
