"""Pace, stops, progress, exit codes, and the words people write for times and rates."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer
from rich.console import Console

from ergon_framework.cli import dlq_filters, dlq_progress
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.cli.dlq_filters import moment, per_second
from ergon_framework.cli.dlq_moving import NAMED, Letter, Pace, Stop, Stopped, Tally, move
from ergon_framework.cli.dlq_view import clean, told
from ergon_framework.connectors.deadletters import Became, ReplayResult
from tests.unit.connectors.worlds import Clock

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "dead-letters.md"


def letters(count):
    return [Letter(str(number), f"t-{number}", 1.0, "bad") for number in range(count)]


def replayed(places):
    return [ReplayResult(place, Became.REPLAYED) for place in places]


class Slow:
    """A clock, and a sleep that moves it."""

    def __init__(self):
        self.clock = Clock()
        self.stop = Stop(sleep=self.clock.advance, clock=self.clock)
        self.moments = []

    def moving(self, places, *, first):
        self.clock.advance(0.0 if self.moments else first)
        self.moments.append((self.clock.now - 1000.0, len(places)))
        return replayed(places)

    def run(self, count, *, rate, batch=100, first=0.0):
        tally = Tally(count)
        pace = Pace(rate, clock=self.clock)
        move(
            letters(count),
            lambda places: self.moving(places, first=first),
            tally=tally,
            batch=batch,
            pace=pace,
            stop=self.stop,
            moved=lambda tally: None,
        )
        return tally


def test_without_a_rate_nothing_waits():
    slow = Slow()
    slow.run(250, rate=None)
    assert slow.moments == [(0.0, 100), (0.0, 100), (0.0, 50)]


def test_a_rate_is_kept_in_parts_of_a_second():
    slow = Slow()
    slow.run(100, rate=50.0)
    assert [count for _, count in slow.moments] == [10] * 10
    assert [at for at, _ in slow.moments] == pytest.approx([part * 0.2 for part in range(10)])


def test_a_rate_below_one_moves_one_at_a_time():
    slow = Slow()
    slow.run(3, rate=0.5)
    assert [at for at, _ in slow.moments] == pytest.approx([0.0, 2.0, 4.0])


def test_time_that_the_broker_took_is_not_made_up_for():
    slow = Slow()
    slow.run(40, rate=50.0, first=1.0)
    assert [at for at, _ in slow.moments] == pytest.approx([1.0, 1.0, 1.2, 1.4])


def test_a_small_batch_is_kept_under_a_large_rate():
    slow = Slow()
    slow.run(6, rate=1000.0, batch=3)
    assert [count for _, count in slow.moments] == [3, 3]


def test_a_signal_ends_a_wait_early():
    slow = Slow()
    sleep = slow.stop._sleep

    def signalled(seconds):
        sleep(seconds)
        slow.stop.asked = slow.clock.now >= 1001.0

    slow.stop._sleep = signalled
    tally = slow.run(2, rate=0.001)
    assert (tally.stopped, tally.left, len(slow.moments)) == (Stopped.SIGNAL, 1, 1)
    assert slow.clock.now < 1002.0


def test_a_tally_names_the_first_failures_and_counts_all():
    tally = Tally(30)
    some = letters(30)
    tally.add(some, [ReplayResult(letter.place, Became.FAILED, "words") for letter in some])
    assert (len(tally.failures), tally.counts[Became.FAILED], tally.left, tally.moved) == (NAMED, 30, 0, [])


@pytest.mark.parametrize("text, age", [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604800)])
def test_an_age_is_counted_back_from_now(monkeypatch, text, age):
    monkeypatch.setattr(dlq_filters.time, "time", lambda: 1e9)
    assert moment(text) == 1e9 - age


@pytest.mark.parametrize(
    "text, at",
    [
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T08:00", datetime(2026, 1, 31, 8, tzinfo=UTC)),
        ("2026-01-31T08:00+02:00", datetime(2026, 1, 31, 6, tzinfo=UTC)),
        ("2026-01-31T08:00:00.000001Z", datetime(2026, 1, 31, 8, 0, 0, 1, tzinfo=UTC)),
    ],
)
def test_a_time_is_utc_unless_it_says_otherwise(text, at):
    assert moment(text) == at.timestamp()


@pytest.mark.parametrize("text", ["", "now", "15", "m", "1w", "9999999999d"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(typer.BadParameter, match="is no time"):
        moment(text)


def test_a_time_that_is_told_can_be_written_again():
    assert moment(told(1.5e9, "microseconds")) == 1.5e9


@pytest.mark.parametrize("text, rate", [("50", 50.0), ("50/s", 50.0), ("300/m", 5.0), ("1800/h", 0.5), ("0.5/s", 0.5)])
def test_a_rate_has_a_unit(text, rate):
    assert per_second(text) == rate


def test_a_long_text_is_cut_and_a_short_one_is_not():
    assert (clean("x" * 60, 60), clean("x" * 61, 60)) == ("x" * 60, "x" * 59 + "…")
    assert clean("é ü\tz", 60) == "é ü\\tz"


def test_elsewhere_than_on_a_terminal_a_line_comes_now_and_then(capsys):
    clock = Clock()
    with dlq_progress.shown("replaying", 30, clock=clock) as moved:
        tally = Tally(30)
        for some in (letters(10), letters(20)):
            tally.add(some, replayed([letter.place for letter in some]))
            moved(tally)
            clock.advance(dlq_progress.EVERY)
            moved(tally)
            moved(tally)
    assert capsys.readouterr().err == "ergon: replaying 10 of 30\nergon: replaying 30 of 30\n"


def test_on_a_terminal_there_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(dlq_progress, "Console", lambda stderr: Console(force_terminal=True, width=80, stderr=stderr))
    tally = Tally(3)
    with dlq_progress.shown("replaying", 3) as moved:
        tally.add(letters(3), replayed(["0", "1", "2"]))
        moved(tally)
    shown = capsys.readouterr().err
    assert "replaying" in shown
    assert "3/3" in shown


@pytest.mark.parametrize("code", DlqExit)
def test_the_guide_lists_every_code_with_its_meaning(code):
    assert f"| {code.value} | {code.meaning} |" in GUIDE.read_text(encoding="utf-8")
