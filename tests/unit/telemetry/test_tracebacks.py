"""Tracebacks as text: what is in them, what is not, and that no error can break them."""

from __future__ import annotations

import json
import logging
import types

import pytest

from ergon_framework.errors import ErgonError
from ergon_framework.failure import TRACEBACK
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.telemetry.options import DEFAULTS, TelemetryOptions
from ergon_framework.telemetry.redaction import HIDDEN
from ergon_framework.telemetry.tracebacks import MAX_ERRORS, MAX_FRAMES, find_raised, format_traceback, to_exc_info
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.spec("DX-04")


def caught(function, *args):
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def fail():
    raise ValueError("odd")


def shown(error, **options):
    return format_traceback(error, TelemetryOptions(**options))


def test_an_error_that_was_never_raised_has_none():
    assert format_traceback(None, DEFAULTS) is None
    assert shown(ValueError("odd")) is None
    assert shown(TransactionException("too late")) is None


def test_what_the_engine_wraps_is_looked_through():
    wrapped = TransactionException("ValueError: odd")
    wrapped.__cause__ = raised = caught(fail)
    assert find_raised(wrapped) is raised
    assert shown(wrapped) == shown(raised)


def test_frames_above_user_code_are_left_out_and_those_below_are_kept():
    error = caught(Transaction.replace, Transaction("a"), 1)
    text = shown(error)
    assert "in caught" in text.splitlines()[0]
    invalid = caught(json.loads, "{")
    assert "decoder.py" in shown(invalid)


def test_an_error_of_the_framework_that_no_user_code_raised_has_none():
    code = compile("def refuse(kind):\n    raise kind('no')\n", "engine.py", "exec")
    module = types.ModuleType("ergon_framework.pretended")
    exec(code, module.__dict__)
    bug, refusal = caught(module.refuse, KeyError), caught(module.refuse, ErgonError)
    for error in (bug, refusal):
        error.__traceback__ = error.__traceback__.tb_next
    assert shown(refusal) is None
    assert shown(bug) == "engine.py:2 in refuse\nKeyError: 'no'"


def test_implicit_contexts_are_shown_unless_they_are_suppressed():
    def implicit():
        try:
            fail()
        except ValueError:
            raise KeyError("k")  # noqa: B904 - that is the point

    def suppressed():
        try:
            fail()
        except ValueError:
            raise KeyError("k") from None

    assert "raised while handling:" in shown(caught(implicit))
    assert "odd" not in shown(caught(suppressed))


def test_the_members_of_a_group_are_shown():
    def group():
        raise ExceptionGroup("two", [caught(fail), KeyError("k")])

    first, second, third = shown(caught(group)).split("member of the group:\n")
    assert first.endswith("ExceptionGroup: two (2 sub-exceptions)\n")
    assert second.endswith('in fail\n    raise ValueError("odd")\nValueError: odd\n')
    assert third == "KeyError: 'k'"


def test_what_a_third_party_says_is_left_out():
    class Refused(ErgonError):
        hides_causes = True

    def refuse():
        try:
            raise ConnectionError("GET /hooks/sesame") from KeyError("sesame")
        except ConnectionError as error:
            raise Refused("the bank refused") from error

    error = caught(refuse)
    text = shown(error)
    assert "sesame" not in text.replace('raise ConnectionError("GET /hooks/sesame") from KeyError("sesame")', "")
    assert "Refused: the bank refused\ncaused by:" in text
    assert text.endswith("ConnectionError\ncaused by:\nKeyError")
    assert to_exc_info(error, DEFAULTS)[0] is ErgonError


def test_a_circle_and_a_long_chain_end():
    first, second = caught(fail), caught(fail)
    first.__cause__, second.__cause__ = second, first
    assert shown(first).count("ValueError: odd") == 2
    last = caught(fail)
    for _ in range(20):
        above = caught(fail)
        above.__cause__ = last
        last = above
    assert shown(last).count("ValueError: odd") == MAX_ERRORS


def deep(depth):
    if depth:
        return deep(depth - 1)
    raise ValueError("odd")


def test_frames_are_shared_between_the_errors_of_a_chain():
    def chained():
        try:
            deep(100)
        except ValueError as error:
            raise KeyError("k") from error

    lines = shown(caught(chained)).splitlines()
    places = [line for line in lines if ".py:" in line]
    assert len(places) == MAX_FRAMES
    assert "in caught" in places[0]
    assert "in chained" in places[2]
    assert any("frames left out" in line for line in lines)


def test_a_traceback_is_never_longer_than_it_may_be():
    kind = type("Ü" * 9000, (Exception,), {})

    def chained():
        raise kind("ü" * 9000)

    assert len(shown(caught(chained)).encode()) <= TRACEBACK


def test_odd_errors_break_nothing():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def mute():
        raise Mute

    assert shown(caught(mute)).endswith("Mute without a readable message")
    assert "\udc80" not in shown(caught(exec, "raise ValueError('\\udc80 \\0')"))
    assert "\0" not in shown(caught(exec, "raise ValueError('\\udc80 \\0')"))


def test_the_hook_decides_what_is_kept():
    def broken(key, value):
        raise OSError("down")

    seen = []
    assert shown(caught(fail), redact=lambda key, value: seen.append(key) or value.upper()).endswith("VALUEERROR: ODD")
    assert seen == ["exception.stacktrace"]
    assert shown(caught(fail), redact=broken) == HIDDEN
    assert shown(caught(fail), redact=lambda key, value: None) == HIDDEN
    assert shown(caught(fail), record_tracebacks=False) is None


def test_a_chain_that_cannot_be_walked_is_left_out(monkeypatch):
    monkeypatch.setattr("linecache.getline", lambda *_: 1 / 0)
    assert shown(caught(fail)) is None


def test_a_traceback_of_another_process_is_kept_to_its_end():
    error = TransactionException("failed")
    error.particulars = {"traceback": "x" * 9000 + "\npassword=hunter2\nLookupError: 7"}
    text = shown(error)
    assert text.endswith("password=[hidden]\nLookupError: 7")
    assert len(text) <= TRACEBACK
    assert shown(error, record_tracebacks=False) is None


def test_exc_info_is_the_error_itself_where_nothing_has_to_be_hidden():
    error = caught(fail)
    kind, value, trace = to_exc_info(error, DEFAULTS)
    assert (kind, value) == (ValueError, error)
    assert trace.tb_frame.f_code.co_name == "caught"


def test_exc_info_is_a_stand_in_where_a_message_is_redacted():
    def leak():
        raise ConnectionError("cannot reach db://me:hunter2@host")

    kind, value, trace = to_exc_info(caught(leak), DEFAULTS)
    printed = logging.Formatter().formatException((kind, value, trace))
    assert kind is ErgonError
    assert "ConnectionError: cannot reach db://[hidden]@host" in printed
    assert "in leak" in printed
