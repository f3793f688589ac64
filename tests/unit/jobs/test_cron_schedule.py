"""Timetables: the times of an expression in a zone, forwards, and of a past of any length."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergon_framework.errors import ConfigurationError
from ergon_framework.jobs import cron_store
from ergon_framework.jobs.cron import Cron, CronSchedule
from ergon_framework.jobs.cron_store import MAX_CATCH_UP_JOBS, MAX_TRANSACTION_JOBS, plan_ticks

BERLIN = "Europe/Berlin"


def parse_utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def list_ticks(expression, zone, since, until):
    timetable, times, moment = CronSchedule(expression, zone), [], parse_utc(since)
    while (moment := timetable.after(moment)) <= parse_utc(until):
        times.append(f"{moment:%d %H:%M}")
    return times


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize(
    "expression, zone, since, until, expected",
    [
        # The clocks go forward on the 29th: 02:30 does not exist, and the first minute that does is 01:00 UTC.
        ("30 2 * * *", BERLIN, "2026-03-28T00:00", "2026-03-31T00:00", ["28 01:30", "29 01:00", "30 00:30"]),
        # They go back on the 25th: 02:30 comes twice, and counts once.
        ("30 2 * * *", BERLIN, "2026-10-24T00:00", "2026-10-27T00:00", ["24 00:30", "25 00:30", "26 01:30"]),
        ("0 9 * * *", BERLIN, "2026-03-28T00:00", "2026-03-30T00:00", ["28 08:00", "29 07:00"]),
        # What is meant all the time is not moved by clocks.
        ("*/30 * * * *", BERLIN, "2026-10-25T00:15", "2026-10-25T01:45", ["25 00:30", "25 01:00", "25 01:30"]),
        ("0 0 29 2 *", "UTC", "2026-01-01T00:00", "2028-12-01T00:00", ["29 00:00"]),
        ("0 8 * * MON-FRI", "America/New_York", "2026-11-13T00:00", "2026-11-17T00:00", ["13 13:00", "16 13:00"]),
    ],
)
def test_times_are_those_of_the_zone_once_each(expression, zone, since, until, expected):
    assert list_ticks(expression, zone, since, until) == expected


@pytest.mark.spec("EXE-27")
def test_a_repeated_hour_fires_once_even_if_computed_in_its_second_half():
    # 02:10 for the second time: 02:30 was an hour before.
    assert CronSchedule("30 2 * * *", BERLIN).after(parse_utc("2026-10-25T01:10")) == parse_utc("2026-10-26T01:30")


def test_six_fields_begin_with_seconds():
    assert CronSchedule("*/20 * * * * *").after(parse_utc("2026-01-01T00:00:05")) == parse_utc("2026-01-01T00:00:20")
    assert CronSchedule("* * * * * *").after(parse_utc("2026-01-01T00:00:05.25")) == parse_utc("2026-01-01T00:00:06")


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize(
    "expression, zone, message",
    [
        ("every day", "UTC", "invalid cron expression 'every day': Wrong number of fields"),
        ("", "UTC", "Wrong number of fields"),
        ("@daily", "UTC", "Wrong number of fields"),
        ("61 * * * *", "UTC", "Bad minute"),
        ("* * * * 5L/2", "UTC", "Bad day-of-week"),
        ("0 0 30 2 *", "UTC", "Bad day-of-month"),
        ("0 0 */31 2 MON#5", "UTC", "matches no time"),
        ("0 0 * 2 MON#6", "UTC", "Bad day-of-week"),
        ("*" * 201, "UTC", "at most 200 characters"),
        ("* * * * *", "Europe/Berlni", "no time zone 'Europe/Berlni'"),
        ("* * * * *", "../etc/passwd", "no time zone"),
        ("* * * * *", "", "no time zone"),
    ],
)
def test_an_invalid_schedule_is_rejected_with_the_reason(expression, zone, message):
    with pytest.raises(ConfigurationError, match=message):
        Cron("wrong", expression, "echo", zone=zone)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"name": ""}, "1 to 200 printable characters"),
        ({"name": "a\0b"}, "1 to 200 printable characters"),
        ({"misfire": "never"}, "skip, once, all, not 'never'"),
        ({"grace": -1}, "a grace is 0 to"),
        ({"grace": float("nan")}, "a grace is 0 to"),
        ({"timeout": 0}, "a timeout is"),
        ({"priority": 1000}, "a priority is"),
    ],
)
def test_an_invalid_option_is_rejected_with_its_value(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Cron(**{"name": "wrong", "expression": "* * * * *", "function": "echo", **options})


EXPRESSIONS = ["* * * * * *", "*/7 * * * *", "*/20 */3 * * * *", "30 2 * * *", "0,30 1-3 * * *", "15 * * * SUN"]


@pytest.mark.spec("EXE-27")
@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(EXPRESSIONS),
    st.sampled_from(["UTC", BERLIN, "America/Sao_Paulo", "Asia/Beirut", "Australia/Lord_Howe"]),
    st.sampled_from(["2026-03-28", "2026-10-24", "2026-04-04", "2018-11-03", "2026-06-01"]),
    st.integers(0, 2 * 86_400),
    st.tuples(st.integers(0, 3000), st.integers(1, 40)),
)
def test_the_last_past_ticks_equal_those_computed_forwards(expression, zone, day, begin, sizes):
    length, limit = sizes
    timetable = CronSchedule(expression, zone)
    since = timetable.after(parse_utc(day) + timedelta(seconds=begin))
    until = since + timedelta(seconds=length, milliseconds=length % 1000)
    if expression[-1] != "*" or expression[0] != "*":
        until += timedelta(days=length % 3)
    expected, moment = [since], since
    while (moment := timetable.after(moment)) <= until:
        expected.append(moment)
    assert timetable.between(since, until, limit=limit) == expected[-limit:]


def test_ten_past_years_are_not_iterated(monkeypatch):
    timetable, steps = CronSchedule("* * * * * *"), []
    original = CronSchedule._ticks
    monkeypatch.setattr(
        CronSchedule, "_ticks", lambda *a, **k: (steps.append(tick) or tick for tick in original(*a, **k))
    )
    times = timetable.between(parse_utc("2016-01-01T00:00"), parse_utc("2026-01-01T00:00"), limit=1000)
    assert (times[0], times[-1], len(times)) == (parse_utc("2025-12-31T23:43:21"), parse_utc("2026-01-01T00:00"), 1000)
    assert len(steps) < 2100


# -- what is due, by policy ---------------------------------------------------------------------------

NEXT = parse_utc("2026-01-01T12:00")


def plan_late(late, *, expression="* * * * *", **options):
    cron = Cron("report", expression, "echo", **options)
    return plan_ticks(cron.timing, next_at=NEXT, now=NEXT + timedelta(seconds=late))


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize("misfire", ["skip", "once", "all"])
def test_within_the_grace_each_time_that_has_passed_is_fired(misfire):
    result = plan_late(45.5, expression="*/10 * * * * *", misfire=misfire)
    assert [tick.second for tick in result.ticks] == [0, 10, 20, 30, 40]
    assert (result.next_at.second, result.missed) == (50, False)


@pytest.mark.spec("EXE-27")
def test_a_tick_is_in_time_within_the_grace_and_missed_after_it():
    assert not plan_late(60.0).missed
    assert plan_late(60.001).missed
    assert not plan_late(3600, grace=3600.0).missed
    assert plan_late(0.5, grace=0.0).missed


@pytest.mark.spec("EXE-27")
def test_skip_goes_on_with_the_next_time_to_come():
    result = plan_late(330, misfire="skip")
    assert (result.ticks, result.next_at) == ([], NEXT + timedelta(minutes=6))


@pytest.mark.spec("EXE-27")
def test_once_is_the_last_time_however_many_were_missed():
    result = plan_late(330, misfire="once")
    assert (result.ticks, result.next_at) == ([NEXT + timedelta(minutes=5)], NEXT + timedelta(minutes=6))
    # The one that was missed is the last one.
    result = plan_late(330, expression="0 * * * *", misfire="once")
    assert (result.ticks, result.next_at) == ([NEXT], NEXT + timedelta(hours=1))


@pytest.mark.spec("EXE-27")
def test_all_is_every_time_in_batches_and_at_most_the_last_thousand():
    result = plan_late(330, misfire="all")
    assert [tick.minute for tick in result.ticks] == [0, 1, 2, 3, 4, 5]
    now, next_at, fired = NEXT + timedelta(days=30), NEXT, []
    cron = Cron("report", "* * * * *", "echo", misfire="all")
    while next_at <= now:
        result = plan_ticks(cron.timing, next_at=next_at, now=now)
        assert len(result.ticks) <= MAX_TRANSACTION_JOBS
        fired += result.ticks
        next_at = result.next_at
    assert fired == [now - timedelta(minutes=n) for n in range(MAX_CATCH_UP_JOBS)][::-1]


def test_the_module_of_operations_has_no_clock():
    assert not {"time", "asyncio"} & set(vars(cron_store))
