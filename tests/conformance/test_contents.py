"""Content stores pass the conformance suite, and each broken one fails exactly the checks it breaks."""

from __future__ import annotations

import pytest

from ergon_framework.facts.stores.memory_contents import MemoryContentStore
from ergon_framework.testing.conformance.content_store.suite import (
    CHECKS,
    CheckOutcome,
    ContentStoreUnderTest,
    pytest_suite,
    run_check,
    run_suite,
)
from tests.conformance import broken_contents as broken
from tests.conformance.content_stores import FileContentsUnderTest, MemoryContentsUnderTest

#: Broken content store -> the checks that it must fail, and no others.
EXPECTED_FAILURES = {
    broken.CommitsAnything: {"what_was_not_expected_is_not_kept"},
    broken.KeepsMismatches: {"what_was_not_expected_is_not_kept"},
    broken.ComparesOnlyTheDigest: {"what_was_not_expected_is_not_kept"},
    broken.ExposesUnfinishedUploads: {
        "nothing_can_be_read_before_the_commit",
        "what_was_not_expected_is_not_kept",
        "a_full_store_rejects_before_anything_is_lost",
        "an_unnamed_upload_leaves_nothing",
        "a_named_upload_resumes",
    },
    broken.KeepsUnnamedUploads: {"an_unnamed_upload_leaves_nothing"},
    broken.ForgetsNamedUploads: {
        "a_named_upload_resumes",
        "a_named_upload_cannot_resume_beyond_its_received_bytes",
        "clean_up_deletes_stale_uploads",
        "bytes_of_uploads_are_counted",
    },
    broken.ResumesAtTheEnd: {"a_named_upload_resumes"},
    broken.FillsUploadGaps: {"a_named_upload_cannot_resume_beyond_its_received_bytes"},
    broken.NeverStartsFromScratch: {"a_named_upload_can_start_from_scratch", "a_later_upload_takes_over"},
    broken.SharesUploads: {"a_later_upload_takes_over", "clean_up_deletes_stale_uploads"},
    broken.KeepsDamagedContent: {"a_truncated_content_is_replaced"},
    broken.CountsCopies: {"the_same_content_is_kept_once"},
    broken.RemovesNothing: {"the_same_content_is_kept_once", "a_removed_content_is_gone"},
    broken.ReadsContentInOnePiece: {"a_content_is_read_in_small_chunks"},
    broken.IgnoresTheReadPosition: {"reading_starts_at_any_byte"},
    broken.AcceptsMalformedDigests: {"only_a_digest_names_a_content"},
    broken.CleansUpYoungUploads: {"clean_up_deletes_stale_uploads"},
    broken.CleansUpNothing: {"clean_up_deletes_stale_uploads"},
    broken.CountsNoUploads: {"bytes_of_uploads_are_counted"},
    broken.TrustsUploadNames: {"no_upload_name_leads_out_of_the_store"},
    broken.AcceptsStrings: {"only_bytes_are_accepted"},
    broken.SharesOneBuffer: {"concurrent_uploads_store_their_own_bytes"},
    broken.IgnoresTheSizeLimit: {"a_full_store_rejects_before_anything_is_lost"},
    broken.ReportsItselfDurable: {"a_content_store_reports_its_durability"},
    broken.LosesTheFirstByte: {"a_committed_content_has_its_digest"},
}


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_memory_contents = pytest_suite(MemoryContentsUnderTest, marks=get_spec_marks)
test_file_contents = pytest_suite(FileContentsUnderTest, marks=get_spec_marks)


def find_failures(store_class):
    results = [run_check(check, MemoryContentsUnderTest(store_class)) for check in CHECKS]
    return {
        check_result.check: check_result.reason
        for check_result in results
        if check_result.result is CheckOutcome.FAILED
    }


@pytest.mark.parametrize("system_class", [MemoryContentsUnderTest, FileContentsUnderTest])
def test_every_check_applies_to_the_bundled_content_stores(system_class):
    system = system_class()
    try:
        results = run_suite(system)
    finally:
        system.close()
    assert {check_result.result for check_result in results} == {CheckOutcome.PASSED}, [
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

    def open(self, store, *, max_bytes=None):
        return self._stores.setdefault(store, MemoryContentStore())


def test_checks_of_missing_features_are_skipped_with_a_reason():
    skipped = {
        check_result.check: check_result.reason
        for check_result in run_suite(MinimalContentsUnderTest())
        if check_result.result is CheckOutcome.NOT_APPLICABLE
    }
    assert skipped == {
        "a_truncated_content_is_replaced": "the system under test cannot truncate a content",
        "a_full_store_rejects_before_anything_is_lost": "the system under test has no bounded stores",
    }
