"""Rate, stops, progress, exit codes, and the parsing of times and rates."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer
from rich.console import Console

from ergon_framework.cli import dlq_commands, options
from ergon_framework.cli.dlq_commands import (
    MAX_NAMED_FAILURES,
    MoveProgress,
    RateLimit,
    SelectedLetter,
    StopFlag,
    StopReason,
    move_letters,
)
from ergon_framework.cli.dlq_view import DlqExit, format_time, sanitize
from ergon_framework.cli.options import parse_rate, parse_time
from ergon_framework.connectors.dead_letters import DeadLetterResult, ReplayResult
from tests.unit.connectors.harness import ManualClock

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "dead-letters.md"


def make_letters(count):
    return [SelectedLetter(str(number), f"t-{number}", 1.0, "bad") for number in range(count)]


def make_replayed_results(handles):
    return [ReplayResult(handle, DeadLetterResult.REPLAYED) for handle in handles]


class SimulatedMove:
    """A clock, and a sleep that moves it."""

    def __init__(self):
        self.clock = ManualClock()
        self.stop = StopFlag(sleep=self.clock.advance, clock=self.clock)
        self.batches = []

    def move_batch(self, handles, *, first):
        self.clock.advance(0.0 if self.batches else first)
        self.batches.append((self.clock.now - 1000.0, len(handles)))
        return make_replayed_results(handles)

    def run(self, count, *, rate, batch=100, first=0.0):
        progress = MoveProgress(count)
        pace = RateLimit(rate, clock=self.clock)
        move_letters(
            make_letters(count),
            lambda handles: self.move_batch(handles, first=first),
            move_progress=progress,
            batch_size=batch,
            rate_limit=pace,
            stop=self.stop,
            on_batch_end=lambda progress: None,
        )
        return progress


def test_without_a_rate_no_batch_waits():
    simulated = SimulatedMove()
    simulated.run(250, rate=None)
    assert simulated.batches == [(0.0, 100), (0.0, 100), (0.0, 50)]


def test_a_rate_is_kept_in_parts_of_a_second():
    simulated = SimulatedMove()
    simulated.run(100, rate=50.0)
    assert [count for _, count in simulated.batches] == [10] * 10
    assert [at for at, _ in simulated.batches] == pytest.approx([part * 0.2 for part in range(10)])


def test_a_rate_below_one_moves_one_at_a_time():
    simulated = SimulatedMove()
    simulated.run(3, rate=0.5)
    assert [at for at, _ in simulated.batches] == pytest.approx([0.0, 2.0, 4.0])


def test_the_rate_is_not_exceeded_after_a_slow_batch():
    simulated = SimulatedMove()
    simulated.run(40, rate=50.0, first=1.0)
    assert [at for at, _ in simulated.batches] == pytest.approx([1.0, 1.0, 1.2, 1.4])


def test_a_small_batch_is_kept_under_a_large_rate():
    simulated = SimulatedMove()
    simulated.run(6, rate=1000.0, batch=3)
    assert [count for _, count in simulated.batches] == [3, 3]


def test_a_signal_ends_a_wait_early():
    simulated = SimulatedMove()
    sleep = simulated.stop._sleep

    def sleep_until_signal(seconds):
        sleep(seconds)
        simulated.stop.is_set = simulated.clock.now >= 1001.0

    simulated.stop._sleep = sleep_until_signal
    progress = simulated.run(2, rate=0.001)
    assert (progress.stop_reason, progress.remaining, len(simulated.batches)) == (StopReason.SIGNAL, 1, 1)
    assert simulated.clock.now < 1002.0


def test_the_progress_names_the_first_failures_and_counts_all():
    progress = MoveProgress(30)
    batch = make_letters(30)
    progress.add(batch, [ReplayResult(letter.handle, DeadLetterResult.FAILED, "words") for letter in batch])
    assert (len(progress.failures), progress.counts[DeadLetterResult.FAILED], progress.remaining, progress.moved) == (
        MAX_NAMED_FAILURES,
        30,
        0,
        [],
    )


@pytest.mark.parametrize("text, age", [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604800)])
def test_an_age_is_counted_back_from_now(monkeypatch, text, age):
    monkeypatch.setattr(options.time, "time", lambda: 1e9)
    assert parse_time(text) == 1e9 - age


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
    assert parse_time(text) == at.timestamp()


@pytest.mark.parametrize("text", ["", "now", "15", "m", "1w", "9999999999d"])
def test_an_invalid_time_is_rejected(text):
    with pytest.raises(typer.BadParameter, match="invalid time"):
        parse_time(text)


def test_a_printed_time_can_be_parsed_again():
    assert parse_time(format_time(1.5e9, "microseconds")) == 1.5e9


@pytest.mark.parametrize("text, rate", [("50", 50.0), ("50/s", 50.0), ("300/m", 5.0), ("1800/h", 0.5), ("0.5/s", 0.5)])
def test_a_rate_has_a_unit(text, rate):
    assert parse_rate(text) == rate


def test_a_long_text_is_cut_and_a_short_one_is_not():
    assert (sanitize("x" * 60, 60), sanitize("x" * 61, 60)) == ("x" * 60, "x" * 59 + "…")
    assert sanitize("é ü\tz", 60) == "é ü\\tz"


def test_without_a_terminal_a_progress_line_is_printed_at_intervals(capsys):
    clock = ManualClock()
    with dlq_commands.progress("replaying", 30, clock=clock) as report:
        progress = MoveProgress(30)
        for batch in (make_letters(10), make_letters(20)):
            progress.add(batch, make_replayed_results([letter.handle for letter in batch]))
            report(progress)
            clock.advance(dlq_commands.LINE_INTERVAL_SECONDS)
            report(progress)
            report(progress)
    assert capsys.readouterr().err == "ergon: replaying 10 of 30\nergon: replaying 30 of 30\n"


def test_on_a_terminal_there_is_a_progress_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(dlq_commands, "Console", lambda stderr: Console(force_terminal=True, width=80, stderr=stderr))
    progress = MoveProgress(3)
    with dlq_commands.progress("replaying", 3) as report:
        progress.add(make_letters(3), make_replayed_results(["0", "1", "2"]))
        report(progress)
    output = capsys.readouterr().err
    assert "replaying" in output
    assert "3/3" in output


@pytest.mark.parametrize("code", DlqExit)
def test_the_guide_lists_every_code_with_its_meaning(code):
    assert f"| {code.value} | {code.meaning} |" in GUIDE.read_text(encoding="utf-8")
