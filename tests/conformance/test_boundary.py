"""The store of this process takes the exam, and each store that is broken in one way fails the checks of that way."""

from __future__ import annotations

import pytest

from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.conformance.boundary import CHECKS, BoundaryCandidate, Result, exam, mark, take
from tests.conformance import broken_boundary as broken
from tests.conformance.boundaries import MemoryBoundaryCandidate

#: What is broken -> the checks that it must fail, all of them and no others.
FAILS = {
    broken.ForgetsIds: {
        "an_id_is_known_after_its_fact_is_gone",
    },
    broken.SwallowsConflicts: {
        "an_id_is_known_after_its_fact_is_gone",
        "another_payload_is_a_conflict_of_its_own",
        "offsets_have_no_gaps",
        "a_forward_buffer_takes_no_second_payload",
    },
    broken.SpoilsNeighbours: {
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
    broken.KeepsHalves: {
        "an_upload_that_breaks_off_leaves_nothing",
        "an_upload_goes_on_after_a_break",
        "nobody_goes_on_where_nothing_came",
    },
    broken.RemovesArtifacts: {
        "retention_spares_what_a_retained_fact_names",
        "retention_tells_owners_apart",
    },
    broken.ReadsWithoutLooking: {
        "damage_is_found_when_it_is_read",
    },
    broken.BlamesNobody: {
        "a_lost_artifact_is_an_error_that_names_its_fact",
        "damage_is_found_when_it_is_read",
    },
    broken.DropsUnconfirmed: {
        "a_survey_says_how_far_everybody_is",
        "nothing_is_dropped_that_a_reader_has_not_confirmed",
    },
    broken.DropsTheUnread: {
        "nothing_is_dropped_that_a_reader_has_not_confirmed",
        "retention_tells_owners_apart",
    },
    broken.ConfirmsByFetching: {
        "a_moment_is_a_place_in_the_line",
        "a_survey_says_how_far_everybody_is",
        "a_reader_goes_on_where_he_confirmed",
        "a_receipt_is_for_what_was_there",
        "readers_have_cursors_of_their_own",
        "nothing_is_dropped_that_a_reader_has_not_confirmed",
        "retention_spares_what_a_retained_fact_names",
    },
    broken.MovesCursorsBack: {
        "a_receipt_never_goes_back",
    },
    broken.ConfirmsWhatIsNotThere: {
        "a_receipt_is_for_what_was_there",
    },
    broken.GivesOffsetsAnew: {
        "a_forward_buffer_takes_no_gap_and_no_other_epoch",
    },
    broken.ForwardsWithGaps: {
        "a_forward_buffer_takes_no_gap_and_no_other_epoch",
    },
    broken.KeepsItsEpoch: {
        "a_restored_backup_is_noticed",
    },
    broken.SpeaksOfForwarding: {
        "a_confirmation_is_about_the_store_buffer",
    },
    broken.LosesWhenFull: {
        "a_full_buffer_refuses_before_anything_is_lost",
    },
    broken.CallsItselfStrict: {
        "only_what_survives_a_power_loss_is_strict",
    },
    broken.ChangesTheText: {
        "a_survey_says_how_far_everybody_is",
        "what_is_fetched_is_what_was_appended",
    },
    broken.CannotBeAsked: {
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
        "an_append_waits_for_nobody",
        "many_at_once_make_one_line",
    },
    broken.CleansUpAfterCorrections: {
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
    broken.ReadsAtOnce: {
        "what_is_stored_is_confirmed_by_its_digest",
    },
    broken.StoresOnce: {
        "the_same_bytes_again_are_answered_as_the_first_time",
    },
    broken.TrustsNames: {
        "no_name_leads_out_of_its_bucket",
    },
    broken.TakesNoBytes: {
        "bytes_are_stored_as_they_are",
    },
    broken.ExpectsNothing: {
        "what_was_not_expected_is_not_kept",
    },
    broken.ForgetsUploads: {
        "an_upload_goes_on_after_a_break",
        "nobody_goes_on_where_nothing_came",
    },
    broken.MixesUploads: {
        "an_upload_goes_on_after_a_break",
    },
    broken.PromisesTooMuch: {
        "an_upload_goes_on_after_a_break",
    },
    broken.GoesOnAnywhere: {
        "nobody_goes_on_where_nothing_came",
    },
    broken.ReadsFromTheStart: {
        "an_artifact_is_read_from_any_byte",
    },
    broken.ForgetsWhen: {
        "a_moment_is_a_place_in_the_line",
    },
    broken.LeavesTheWaitingOut: {
        "a_survey_says_how_far_everybody_is",
    },
    broken.CountsFromTheStart: {
        "a_survey_says_how_far_everybody_is",
    },
    broken.RemembersTheRetired: {
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
    broken.CountsReadersOfAPair: {
        "a_zone_has_so_many_readers_and_no_more",
    },
    broken.TrustsDigests: {
        "bytes_of_one_zone_are_not_here_for_another",
    },
    broken.NamesAnything: {
        "a_fact_that_arrives_names_artifacts_of_its_zone_only",
        "a_fact_of_this_zone_names_no_artifact_of_another",
    },
    broken.ReadsAnybodys: {
        "bytes_of_one_zone_are_not_here_for_another",
        "retention_tells_owners_apart",
    },
}


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_memory_boundary = exam(MemoryBoundaryCandidate, marks=spec)


def failed(kind, variant):
    marks = [mark(check, MemoryBoundaryCandidate(kind), variant) for check in CHECKS]
    return {got.check: got.reason for got in marks if got.result is Result.FAILED}


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_everything_applies_to_the_store_in_memory(variant):
    marks = take(MemoryBoundaryCandidate(), variant=variant)
    assert {got.result for got in marks} == {Result.PASSED}, [str(got) for got in marks]


@pytest.mark.parametrize("kind", FAILS, ids=lambda kind: kind.__name__)
def test_a_broken_store_fails_what_it_breaks(kind):
    assert set(failed(kind, "async")) == FAILS[kind]


def test_each_check_is_failed_by_somebody():
    assert {check.name for check in CHECKS} == set().union(*FAILS.values())


def test_each_broken_store_is_examined():
    stores = {kind for kind in vars(broken).values() if isinstance(kind, type) and issubclass(kind, MemoryBoundary)}
    assert stores - {MemoryBoundary} == FAILS.keys()


def test_an_unknown_check_is_refused():
    with pytest.raises(ValueError, match="no check called 'nothing'"):
        take(MemoryBoundaryCandidate(), only=["nothing"])


def test_the_two_flavours_have_the_same_calls():
    plain = {name for name in vars(Boundary) if not name.startswith("_")}
    assert {name.removesuffix("_async") for name in vars(AsyncBoundary) if not name.startswith("_")} == plain


class Bare(BoundaryCandidate):
    """A candidate that offers what it must, and of one flavour."""

    def __init__(self):
        self._stores = {}

    def client(self, store, *, side="inner", room=None):
        return self._stores.setdefault(store, MemoryBoundary(side=side))


def test_what_is_not_offered_is_not_examined_and_the_marks_say_so():
    marks = {got.check: got for got in take(Bare())}
    skipped = {name: got.reason for name, got in marks.items() if got.result is Result.NOT_APPLICABLE}
    assert skipped == {
        "a_restored_backup_is_noticed": "the candidate offers no backup",
        "a_full_buffer_refuses_before_anything_is_lost": "the candidate has stores without bounds only",
        "a_lost_artifact_is_an_error_that_names_its_fact": "the candidate cannot lose an artifact",
        "damage_is_found_when_it_is_read": "the candidate cannot damage an artifact",
        "a_fact_about_a_lost_artifact_is_refused": "the candidate cannot lose an artifact",
    }
    assert {got.result for got in marks.values()} == {Result.PASSED, Result.NOT_APPLICABLE}


def test_a_candidate_that_knows_better_is_believed():
    class Lasting(MemoryBoundaryCandidate):
        durable = True

    (got,) = take(Lasting(), only=["only_what_survives_a_power_loss_is_strict"])
    assert got.result is Result.FAILED
    assert got.reason == "durable is False, and the candidate knows it to be True"


def test_a_flavour_that_a_store_has_not_is_no_mark():
    class Threads(BoundaryCandidate):
        def client(self, store, *, side="inner", room=None):
            return OnlyThreads()

    (got,) = take(Threads(), variant="async", only=["what_is_young_is_kept"])
    assert got.result is Result.FAILED
    assert "OnlyThreads has no async flavour" in got.reason


def unwritten(self, *args, **given):
    raise NotImplementedError


OnlyThreads = type("OnlyThreads", (Boundary,), dict.fromkeys(Boundary.__abstractmethods__, unwritten))
