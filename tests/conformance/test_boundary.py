"""The in-memory store passes the conformance suite, and each broken store fails exactly the checks it breaks."""

from __future__ import annotations

import pytest

from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.conformance.boundary.suite import (
    CHECKS,
    BoundaryUnderTest,
    CheckOutcome,
    pytest_suite,
    run_check,
    run_suite,
)
from tests.conformance import broken_boundary as broken
from tests.conformance.boundaries import MemoryBoundaryUnderTest

#: Broken store -> the checks that it must fail, and no others.
EXPECTED_FAILURES = {
    broken.ForgetsIds: {
        "an_id_is_known_after_its_fact_is_gone",
    },
    broken.SwallowsConflicts: {
        "an_id_is_known_after_its_fact_is_gone",
        "another_payload_is_a_conflict_of_its_own",
        "offsets_have_no_gaps",
        "a_forward_buffer_takes_no_second_payload",
    },
    broken.FailsTheWholeCall: {
        "an_id_is_known_after_its_fact_is_gone",
        "another_payload_is_a_conflict_of_its_own",
        "offsets_have_no_gaps",
        "a_pair_has_one_buffer_in_a_store",
        "a_full_buffer_refuses_before_anything_is_lost",
        "a_fact_about_a_lost_artifact_is_refused",
        "a_fact_of_this_zone_names_no_artifact_of_another",
    },
    broken.LeavesGaps: {
        "another_payload_is_a_conflict_of_its_own",
        "offsets_have_no_gaps",
        "a_full_buffer_refuses_before_anything_is_lost",
    },
    broken.KeepsTheLastEnvelope: {
        "an_id_that_comes_again_is_the_same_fact",
    },
    broken.MixesZones: {
        "the_ids_of_two_zones_are_apart",
    },
    broken.DigestsTheLabels: {
        "an_id_that_comes_again_is_the_same_fact",
    },
    broken.TrustsReferences: {
        "offsets_have_no_gaps",
        "an_artifact_is_there_before_its_fact",
        "a_reference_has_four_fields",
        "a_fact_about_a_lost_artifact_is_refused",
        "a_fact_that_arrives_names_artifacts_of_its_zone_only",
        "a_fact_of_this_zone_names_no_artifact_of_another",
    },
    broken.ComparesNoSize: {
        "an_artifact_is_there_before_its_fact",
    },
    broken.ReplacesArtifacts: {
        "other_bytes_under_the_same_name_are_a_conflict",
        "two_zones_have_the_same_name_apart",
    },
    broken.KeepsInterruptedUploads: {
        "an_upload_that_breaks_off_leaves_nothing",
        "an_upload_goes_on_after_a_break",
        "an_upload_cannot_resume_beyond_its_received_bytes",
    },
    broken.RemovesArtifacts: {
        "retention_spares_what_a_retained_fact_names",
        "retention_tells_owners_apart",
    },
    broken.ReadsWithoutChecking: {
        "damage_is_found_when_it_is_read",
    },
    broken.OmitsTheFact: {
        "a_lost_artifact_is_an_error_that_names_its_fact",
        "damage_is_found_when_it_is_read",
    },
    broken.DropsUnconfirmed: {
        "a_survey_reports_how_far_every_reader_is",
        "nothing_is_dropped_that_a_reader_has_not_confirmed",
    },
    broken.DropsUnreadFacts: {
        "nothing_is_dropped_that_a_reader_has_not_confirmed",
        "retention_tells_owners_apart",
    },
    broken.ConfirmsByFetching: {
        "a_moment_is_a_place_in_the_line",
        "a_survey_reports_how_far_every_reader_is",
        "a_reader_resumes_after_its_receipt",
        "a_receipt_is_for_what_was_there",
        "readers_have_cursors_of_their_own",
        "nothing_is_dropped_that_a_reader_has_not_confirmed",
        "retention_spares_what_a_retained_fact_names",
    },
    broken.MovesCursorsBack: {
        "a_receipt_never_goes_back",
    },
    broken.ConfirmsBeyondTheEnd: {
        "a_receipt_is_for_what_was_there",
    },
    broken.AssignsNewOffsets: {
        "a_forward_buffer_takes_no_gap_and_no_other_epoch",
    },
    broken.ForwardsWithGaps: {
        "a_forward_buffer_takes_no_gap_and_no_other_epoch",
    },
    broken.KeepsItsEpoch: {
        "a_restored_backup_is_noticed",
    },
    broken.ConfirmsForTheForwardBuffer: {
        "a_confirmation_is_about_the_store_buffer",
    },
    broken.LosesWhenFull: {
        "a_full_buffer_refuses_before_anything_is_lost",
    },
    broken.ReportsItselfStrict: {
        "only_what_survives_a_power_loss_is_strict",
    },
    broken.CanonicalizesTheText: {
        "a_survey_reports_how_far_every_reader_is",
        "what_is_fetched_is_what_was_appended",
    },
    broken.CannotLookUpIds: {
        "what_is_confirmed_is_there_for_others",
        "a_producer_can_ask_what_became_of_an_id",
    },
    broken.HidesRepeats: {
        "an_id_that_comes_again_is_the_same_fact",
        "an_id_is_known_after_its_fact_is_gone",
        "a_handler_that_runs_again_appends_the_same_fact",
        "a_forward_buffer_keeps_the_offset_of_the_origin",
        "a_full_buffer_refuses_before_anything_is_lost",
    },
    broken.RacesForIds: {
        "many_at_once_make_one_line",
    },
    broken.WaitsForReaders: {
        "an_append_waits_for_no_reader",
        "many_at_once_make_one_line",
    },
    broken.DeletesCorrectedArtifacts: {
        "a_correction_links_two_artifacts",
    },
    broken.ReadsForwardOnly: {
        "what_is_retained_can_be_read_again",
        "nothing_is_dropped_that_a_reader_has_not_confirmed",
    },
    broken.IgnoresAge: {
        "what_is_young_is_kept",
    },
    broken.StampsItsOwnEpoch: {
        "a_forward_buffer_keeps_the_offset_of_the_origin",
        "a_forward_buffer_takes_no_gap_and_no_other_epoch",
    },
    broken.ReadsArtifactsInOnePiece: {
        "what_is_stored_is_confirmed_by_its_digest",
    },
    broken.RejectsStoredNames: {
        "the_same_bytes_again_are_answered_as_the_first_time",
    },
    broken.TrustsObjectNames: {
        "no_name_leads_out_of_its_bucket",
    },
    broken.RejectsWholeBytes: {
        "bytes_are_stored_as_they_are",
    },
    broken.IgnoresExpectations: {
        "what_was_not_expected_is_not_kept",
    },
    broken.ForgetsUploads: {
        "an_upload_goes_on_after_a_break",
        "an_upload_cannot_resume_beyond_its_received_bytes",
    },
    broken.MixesUploads: {
        "an_upload_goes_on_after_a_break",
    },
    broken.PromisesTooMuch: {
        "an_upload_goes_on_after_a_break",
    },
    broken.FillsArtifactGaps: {
        "an_upload_cannot_resume_beyond_its_received_bytes",
    },
    broken.ReadsFromTheStart: {
        "an_artifact_is_read_from_any_byte",
    },
    broken.ForgetsTimes: {
        "a_moment_is_a_place_in_the_line",
    },
    broken.OmitsEmptyPairs: {
        "a_survey_reports_how_far_every_reader_is",
    },
    broken.CountsFromTheStart: {
        "a_survey_reports_how_far_every_reader_is",
    },
    broken.KeepsRetiredReaders: {
        "nothing_is_dropped_that_a_reader_has_not_confirmed",
        "a_retired_reader_is_forgotten",
        "a_zone_has_so_many_readers_and_no_more",
    },
    broken.SharesNames: {
        "two_zones_have_the_same_name_apart",
        "bytes_of_one_zone_are_not_here_for_another",
        "a_fact_that_arrives_names_artifacts_of_its_zone_only",
        "a_fact_of_this_zone_names_no_artifact_of_another",
        "retention_tells_owners_apart",
    },
    broken.CountsNoReaders: {
        "a_zone_has_so_many_readers_and_no_more",
        "readers_that_come_at_once_are_counted",
    },
    broken.CountsReadersPerPair: {
        "a_zone_has_so_many_readers_and_no_more",
    },
    broken.TrustsDigests: {
        "bytes_of_one_zone_are_not_here_for_another",
    },
    broken.NamesArtifactsOfAnyZone: {
        "a_fact_that_arrives_names_artifacts_of_its_zone_only",
        "a_fact_of_this_zone_names_no_artifact_of_another",
    },
    broken.ReadsArtifactsOfAnyZone: {
        "bytes_of_one_zone_are_not_here_for_another",
        "retention_tells_owners_apart",
    },
}


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_memory_boundary = pytest_suite(MemoryBoundaryUnderTest, marks=get_spec_marks)


def find_failures(store_class, variant):
    results = [run_check(check, MemoryBoundaryUnderTest(store_class), variant) for check in CHECKS]
    return {
        check_result.check: check_result.reason
        for check_result in results
        if check_result.result is CheckOutcome.FAILED
    }


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_every_check_applies_to_the_memory_store(variant):
    results = run_suite(MemoryBoundaryUnderTest(), variant=variant)
    assert {check_result.result for check_result in results} == {CheckOutcome.PASSED}, [
        str(check_result) for check_result in results
    ]


@pytest.mark.parametrize("kind", EXPECTED_FAILURES, ids=lambda kind: kind.__name__)
def test_a_broken_store_fails_exactly_the_checks_it_breaks(kind):
    assert set(find_failures(kind, "async")) == EXPECTED_FAILURES[kind]


def test_each_check_fails_for_a_broken_store():
    assert {check.name for check in CHECKS} == set().union(*EXPECTED_FAILURES.values())


def test_each_broken_store_has_expected_failures():
    store_classes = {
        kind for kind in vars(broken).values() if isinstance(kind, type) and issubclass(kind, MemoryBoundary)
    }
    assert store_classes - {MemoryBoundary} == EXPECTED_FAILURES.keys()


def test_an_unknown_check_is_rejected():
    with pytest.raises(ValueError, match="no check called 'nothing'"):
        run_suite(MemoryBoundaryUnderTest(), only=["nothing"])


def test_the_sync_and_async_variants_have_the_same_calls():
    sync_names = {name for name in vars(Boundary) if not name.startswith("_")}
    assert {name.removesuffix("_async") for name in vars(AsyncBoundary) if not name.startswith("_")} == sync_names


class MinimalBoundaryUnderTest(BoundaryUnderTest):
    """A store under test with only the required features, and one variant."""

    def __init__(self):
        self._stores = {}

    def client(self, store, *, side="inner", max_facts=None):
        return self._stores.setdefault(store, MemoryBoundary(side=side))


def test_checks_of_missing_features_are_skipped_with_a_reason():
    results = {check_result.check: check_result for check_result in run_suite(MinimalBoundaryUnderTest())}
    skipped = {
        name: check_result.reason
        for name, check_result in results.items()
        if check_result.result is CheckOutcome.NOT_APPLICABLE
    }
    assert skipped == {
        "a_restored_backup_is_noticed": "the system under test supports no backup",
        "a_full_buffer_refuses_before_anything_is_lost": "the system under test has no bounded stores",
        "a_lost_artifact_is_an_error_that_names_its_fact": "the system under test offers no way to lose an artifact",
        "damage_is_found_when_it_is_read": "the system under test offers no way to damage an artifact",
        "a_fact_about_a_lost_artifact_is_refused": "the system under test offers no way to lose an artifact",
    }
    assert {check_result.result for check_result in results.values()} == {
        CheckOutcome.PASSED,
        CheckOutcome.NOT_APPLICABLE,
    }


def test_the_declared_durability_overrides_that_of_the_store():
    class DurableBoundaryUnderTest(MemoryBoundaryUnderTest):
        durable = True

    (check_result,) = run_suite(DurableBoundaryUnderTest(), only=["only_what_survives_a_power_loss_is_strict"])
    assert check_result.result is CheckOutcome.FAILED
    assert check_result.reason == "durable is False, but the system under test expects True"


def test_a_check_of_a_missing_variant_fails_with_a_reason():
    class SyncOnlyBoundaryUnderTest(BoundaryUnderTest):
        def client(self, store, *, side="inner", max_facts=None):
            return OnlyThreads()

    (check_result,) = run_suite(SyncOnlyBoundaryUnderTest(), variant="async", only=["what_is_young_is_kept"])
    assert check_result.result is CheckOutcome.FAILED
    assert "OnlyThreads has no async variant" in check_result.reason


def raise_not_implemented(self, *args, **options):
    raise NotImplementedError


OnlyThreads = type("OnlyThreads", (Boundary,), dict.fromkeys(Boundary.__abstractmethods__, raise_not_implemented))
