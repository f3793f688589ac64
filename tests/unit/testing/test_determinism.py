"""An id that a second run would not make again is caught: FAC-19."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.identity import event_id
from ergon_framework.testing.determinism import NotDeterministic, assert_deterministic
from tests.unit.testing import ids


@pytest.mark.spec("FAC-19")
def test_a_sound_id_passes():
    assert_deterministic(ids.sound, "WO", number="7", note="a", ignores={"note": ["b", "", "c"]})
    assert_deterministic(ids.seeded, "WO", "7")


@pytest.mark.parametrize("moment", [datetime(2026, 3, 6, tzinfo=UTC), date(2026, 3, 6)])
def test_a_moment_that_was_given_stays_what_it_is(moment):
    assert_deterministic(ids.by_moment, "WO", "7", moment)


@pytest.mark.spec("FAC-08", "FAC-19")
def test_our_own_ids_pass():
    assert_deterministic(event_id, "WO", "7", "created", datetime(2026, 3, 6, tzinfo=UTC))


@pytest.mark.spec("FAC-19")
@pytest.mark.parametrize(
    "make, words",
    [
        (ids.drawn, "called a second time"),
        (ids.counted, "called a second time"),
        (ids.hashed, "in a fresh process"),
        (ids.by_process, "in a fresh process"),
        (ids.by_year, "with the clock moved"),
        (ids.by_day, "with the clock moved"),
        (ids.by_today, "with the clock moved"),
        (ids.by_hour, "with the clock moved"),
        (ids.by_format, "with the clock moved"),
        (ids.by_uptime, "with the clock moved"),
    ],
)
def test_an_id_that_would_not_be_made_again_is_caught(make, words):
    with pytest.raises(NotDeterministic, match=words):
        assert_deterministic(make, "WO", "7")


@pytest.mark.spec("FAC-19")
def test_an_id_of_more_than_the_key_is_caught():
    with pytest.raises(NotDeterministic, match="with another note"):
        assert_deterministic(ids.of_everything, "WO", "7", note="a", ignores={"note": ["b"]})


def test_what_cannot_be_asked_elsewhere_is_no_verdict():
    with pytest.raises(ConfigurationError, match="a function of a module"):
        assert_deterministic(lambda: "id")
    with pytest.raises(ConfigurationError, match="ignores names 'note'"):
        assert_deterministic(ids.sound, "WO", "7", ignores={"note": ["b"]})


def test_what_fails_elsewhere_says_why():
    with pytest.raises(ConfigurationError, match="RuntimeError: not here"):
        assert_deterministic(ids.failing, "WO", "7")
