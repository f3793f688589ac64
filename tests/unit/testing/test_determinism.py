"""An id that a second run would not create again is caught: FAC-19."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.identity import event_id
from ergon_framework.testing.determinism import NotDeterministicError, assert_deterministic
from tests.unit.testing import ids


@pytest.mark.spec("FAC-19")
def test_a_stable_id_passes():
    assert_deterministic(ids.make_stable_id, "WO", number="7", note="a", ignores={"note": ["b", "", "c"]})
    assert_deterministic(ids.make_seeded_id, "WO", "7")


@pytest.mark.parametrize("moment", [datetime(2026, 3, 6, tzinfo=UTC), date(2026, 3, 6)])
def test_a_given_moment_is_not_changed(moment):
    assert_deterministic(ids.make_id_of_moment, "WO", "7", moment)


@pytest.mark.spec("FAC-08", "FAC-19")
def test_ids_of_the_framework_pass():
    assert_deterministic(event_id, "WO", "7", "created", datetime(2026, 3, 6, tzinfo=UTC))


@pytest.mark.spec("FAC-19")
@pytest.mark.parametrize(
    "make, message",
    [
        (ids.make_random_id, "called a second time"),
        (ids.make_counter_id, "called a second time"),
        (ids.make_hash_id, "in a fresh process"),
        (ids.make_process_id, "in a fresh process"),
        (ids.make_year_id, "with the clock shifted"),
        (ids.make_utc_day_id, "with the clock shifted"),
        (ids.make_local_day_id, "with the clock shifted"),
        (ids.make_hour_id, "with the clock shifted"),
        (ids.make_formatted_year_id, "with the clock shifted"),
        (ids.make_uptime_id, "with the clock shifted"),
    ],
)
def test_an_id_that_a_second_run_would_not_reproduce_is_caught(make, message):
    with pytest.raises(NotDeterministicError, match=message):
        assert_deterministic(make, "WO", "7")


@pytest.mark.spec("FAC-19")
def test_an_id_that_depends_on_an_ignored_argument_is_caught():
    with pytest.raises(NotDeterministicError, match="with another note"):
        assert_deterministic(ids.make_id_of_all_arguments, "WO", "7", note="a", ignores={"note": ["b"]})


def test_a_function_that_a_fresh_process_cannot_call_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="a module-level function"):
        assert_deterministic(lambda: "id")
    with pytest.raises(ConfigurationError, match="ignores contains 'note'"):
        assert_deterministic(ids.make_stable_id, "WO", "7", ignores={"note": ["b"]})


def test_a_failure_in_the_fresh_process_is_reported():
    with pytest.raises(ConfigurationError, match="RuntimeError: not here"):
        assert_deterministic(ids.fail_in_fresh_process, "WO", "7")
