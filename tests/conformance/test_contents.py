"""Places for contents take their exam, and each place that is broken in one way fails the checks of that way."""

from __future__ import annotations

import pytest

from ergon_framework.facts.stores.memory_contents import MemoryContents
from ergon_framework.testing.conformance.contents import CHECKS, ContentsCandidate, Result, exam, mark, take
from tests.conformance import broken_contents as broken
from tests.conformance.places import FilePlace, MemoryPlace

#: What is broken -> the checks that it must fail, all of them and no others.
FAILS = {
    broken.SealsAnything: {"what_was_not_expected_is_not_kept"},
    broken.KeepsMismatches: {"what_was_not_expected_is_not_kept"},
    broken.ComparesNoSize: {"what_was_not_expected_is_not_kept"},
    broken.ShowsHalves: {
        "nothing_can_be_read_before_the_seal",
        "what_was_not_expected_is_not_kept",
        "a_full_place_refuses_before_anything_is_lost",
        "one_without_a_name_leaves_nothing",
        "one_with_a_name_goes_on",
    },
    broken.KeepsTheNameless: {"one_without_a_name_leaves_nothing"},
    broken.ForgetsTheNamed: {
        "one_with_a_name_goes_on",
        "nobody_goes_on_where_nothing_is",
        "sweeping_takes_what_lies_too_long",
        "bytes_of_uploads_are_counted",
    },
    broken.GoesOnAtTheEnd: {"one_with_a_name_goes_on"},
    broken.FillsUp: {"nobody_goes_on_where_nothing_is"},
    broken.NeverBeginsAnew: {"one_with_a_name_can_begin_anew", "whoever_comes_later_has_it"},
    broken.SharesUploads: {"whoever_comes_later_has_it", "sweeping_takes_what_lies_too_long"},
    broken.KeepsTheDamaged: {"what_was_cut_short_is_replaced"},
    broken.CountsCopies: {"the_same_content_is_kept_once"},
    broken.RemovesNothing: {"the_same_content_is_kept_once", "what_is_removed_is_gone"},
    broken.ReadsAtOnce: {"it_is_read_in_small_pieces"},
    broken.ReadsFromTheStart: {"reading_begins_anywhere"},
    broken.IsLenient: {"only_a_digest_names_a_content"},
    broken.SweepsTheYoung: {"sweeping_takes_what_lies_too_long"},
    broken.SweepsNothing: {"sweeping_takes_what_lies_too_long"},
    broken.CountsNoUploads: {"bytes_of_uploads_are_counted"},
    broken.TrustsNames: {"no_name_of_an_upload_leads_anywhere"},
    broken.TakesTexts: {"only_bytes_are_taken"},
    broken.HasOneBuffer: {"many_at_once_store_what_each_has"},
    broken.IsNeverFull: {"a_full_place_refuses_before_anything_is_lost"},
    broken.CallsItselfDurable: {"it_knows_whether_it_is_durable"},
    broken.SaysWhatWasExpected: {"what_is_sealed_has_its_digest"},
}


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_memory_contents = exam(MemoryPlace, marks=spec)
test_file_contents = exam(FilePlace, marks=spec)


def failed(kind):
    marks = [mark(check, MemoryPlace(kind)) for check in CHECKS]
    return {got.check: got.reason for got in marks if got.result is Result.FAILED}


@pytest.mark.parametrize("make", [MemoryPlace, FilePlace])
def test_everything_applies_to_what_is_ours(make):
    place = make()
    try:
        marks = take(place)
    finally:
        place.close()
    assert {got.result for got in marks} == {Result.PASSED}, [str(got) for got in marks]


@pytest.mark.parametrize("kind", FAILS, ids=lambda kind: kind.__name__)
def test_a_broken_place_fails_what_it_breaks(kind):
    assert set(failed(kind)) == FAILS[kind]


def test_each_check_is_failed_by_somebody():
    assert {check.name for check in CHECKS} == set().union(*FAILS.values())


def test_each_broken_place_is_examined():
    places = {kind for kind in vars(broken).values() if isinstance(kind, type) and issubclass(kind, MemoryContents)}
    assert places - {MemoryContents} == FAILS.keys()


class Bare(ContentsCandidate):
    """A candidate that offers what it must."""

    def __init__(self):
        self._places = {}

    def contents(self, place, *, room=None):
        return self._places.setdefault(place, MemoryContents())


def test_what_is_not_offered_is_not_examined_and_the_marks_say_so():
    skipped = {got.check: got.reason for got in take(Bare()) if got.result is Result.NOT_APPLICABLE}
    assert skipped == {
        "what_was_cut_short_is_replaced": "the candidate cannot cut a content",
        "a_full_place_refuses_before_anything_is_lost": "the candidate has places without bounds only",
    }
