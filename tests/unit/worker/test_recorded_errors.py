"""What the loops record of errors and outcomes: tracebacks, events, log levels and counts."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from ergon_framework.errors import ConnectionLostError, ErgonError
from ergon_framework.transaction import Transaction
from ergon_framework.worker import fetch, produce, spans, telemetry
from ergon_framework.worker.report import Outcome, OutcomeKind, Report, StopReason
from ergon_framework.worker.running import drain_end


def raise_and_catch(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as raised:
        return raised


@pytest.fixture
def options() -> telemetry.TelemetryOptions:
    return telemetry.TelemetryOptions()


def test_tracebacks_of_an_outcome_are_formatted_once(options, monkeypatch) -> None:
    outcome, formatted = Outcome(Transaction(1, id="a")), []
    outcome.error = raise_and_catch(ErgonError("broken"))

    def format_traceback(error, _options):
        formatted.append(error)
        return None if error is None else "the traceback"

    monkeypatch.setattr(spans, "format_traceback", format_traceback)
    assert spans.get_tracebacks(outcome, options) == ("the traceback", None)
    assert spans.get_tracebacks(outcome, options) == ("the traceback", None)
    assert formatted == [outcome.error, None]


@pytest.mark.parametrize(
    "trace, expected",
    [(None, {}), ("the traceback", {"exception.stacktrace": "the traceback"})],
)
def test_an_error_is_recorded_as_it_was_raised_with_its_traceback_if_there_is_one(options, trace, expected) -> None:
    events = []
    wrapper = ErgonError("wrapped")
    wrapper.__cause__ = KeyError("order")
    node = SimpleNamespace(add_exception_event=events.append)
    spans.add_exception_event(node, wrapper, trace, options)
    assert events == [{"exception.type": "KeyError", "exception.message": "'order'", **expected}]


def test_only_a_lost_connection_has_its_message_in_probes() -> None:
    assert fetch._summarize(ValueError("card 4711")) == "ValueError"
    assert fetch._summarize(ConnectionLostError("no route")) == "ConnectionLostError: no route"


def test_the_same_object_is_the_same_work_although_its_payload_equals_nothing() -> None:
    transaction = Transaction(float("nan"), id="a")
    assert produce._is_same_work(transaction, transaction)
    assert produce._is_same_work(transaction, transaction.replace(payload=float("nan"))) is False


@pytest.mark.parametrize(
    "kind, started, expected",
    [(OutcomeKind.RELEASED, True, 1), (OutcomeKind.RELEASED, False, 0), (OutcomeKind.SUCCEEDED, True, 0)],
)
def test_a_report_counts_released_transactions_that_were_started(kind, started, expected) -> None:
    outcome, report = Outcome(Transaction(1, id="a"), kind), Report()
    outcome.started = started
    report.add(outcome)
    assert report.released_started == expected


@pytest.mark.parametrize(
    "end, expected",
    [(StopReason.STOP, 105.0), (StopReason.TIMEOUT, 130.0)],
)
def test_the_drain_of_a_timeout_has_a_limit_of_its_own(end, expected) -> None:
    rules = SimpleNamespace(drain_timeout=5.0, timeout_drain=10.0)
    assert drain_end(rules, end, now=100.0, deadline=120.0) == expected


def test_a_missing_key_is_an_error_once_a_minute_and_for_a_limited_number_of_keys(monkeypatch) -> None:
    observer = telemetry.TelemetryObserver.__new__(telemetry.TelemetryObserver)
    observer._missing_key_times = {}
    now = 1000.0
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: now))
    assert observer._choose_missing_key_level("one") == logging.ERROR
    assert observer._choose_missing_key_level("one") == logging.INFO
    now += telemetry.MISSING_KEY_INTERVAL_SECONDS
    assert observer._choose_missing_key_level("one") == logging.ERROR
    for number in range(telemetry.MAX_MISSING_KEYS - 1):
        assert observer._choose_missing_key_level(f"key-{number}") == logging.ERROR
    assert observer._choose_missing_key_level("one too many") == logging.INFO
    now += 2 * telemetry.MISSING_KEY_INTERVAL_SECONDS
    assert observer._choose_missing_key_level("one too many") == logging.ERROR
    assert len(observer._missing_key_times) == 1
