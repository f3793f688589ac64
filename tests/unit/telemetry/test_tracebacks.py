"""Tracebacks as text: their contents, their limits, and that no error can break them."""

from __future__ import annotations

import json
import logging
import types

import pytest

from ergon_framework.errors import ErgonError
from ergon_framework.failure import MAX_TRACEBACK_BYTES
from ergon_framework.telemetry.options import DEFAULT_OPTIONS, TelemetryOptions
from ergon_framework.telemetry.redaction import HIDDEN
from ergon_framework.telemetry.tracebacks import MAX_ERRORS, MAX_FRAMES, find_raised, format_traceback, to_exc_info
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException

pytestmark = pytest.mark.spec("DX-04")


def catch(function, *args):
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def fail():
    raise ValueError("odd")


def format_error(error, **options):
    return format_traceback(error, TelemetryOptions(**options))


def test_an_error_that_was_never_raised_has_no_traceback():
    assert format_traceback(None, DEFAULT_OPTIONS) is None
    assert format_error(ValueError("odd")) is None
    assert format_error(TransactionException("too late")) is None


def test_the_traceback_of_a_wrapped_error_is_that_of_its_cause():
    wrapped = TransactionException("ValueError: odd")
    wrapped.__cause__ = raised = catch(fail)
    assert find_raised(wrapped) is raised
    assert format_error(wrapped) == format_error(raised)


def test_frames_outside_user_code_are_omitted_and_those_inside_are_kept():
    error = catch(Transaction.replace, Transaction(id="a"), 1)
    text = format_error(error)
    assert "in catch" in text.splitlines()[0]
    invalid = catch(json.loads, "{")
    assert "decoder.py" in format_error(invalid)


def test_an_internal_framework_error_has_no_traceback():
    code = compile("def refuse(kind):\n    raise kind('no')\n", "engine.py", "exec")
    module = types.ModuleType("ergon_framework.pretended")
    exec(code, module.__dict__)
    bug, refusal = catch(module.refuse, KeyError), catch(module.refuse, ErgonError)
    for error in (bug, refusal):
        error.__traceback__ = error.__traceback__.tb_next
    assert format_error(refusal) is None
    assert format_error(bug) == "engine.py:2 in refuse\nKeyError: 'no'"


def test_implicit_contexts_are_shown_unless_they_are_suppressed():
    def raise_implicit():
        try:
            fail()
        except ValueError:
            raise KeyError("k")  # noqa: B904 - that is the point

    def raise_suppressed():
        try:
            fail()
        except ValueError:
            raise KeyError("k") from None

    assert "raised while handling:" in format_error(catch(raise_implicit))
    assert "odd" not in format_error(catch(raise_suppressed))


def test_the_members_of_a_group_are_shown():
    def raise_group():
        raise ExceptionGroup("two", [catch(fail), KeyError("k")])

    first, second, third = format_error(catch(raise_group)).split("member of the group:\n")
    assert first.endswith("ExceptionGroup: two (2 sub-exceptions)\n")
    assert second.endswith('in fail\n    raise ValueError("odd")\nValueError: odd\n')
    assert third == "KeyError: 'k'"


def test_messages_of_third_party_errors_are_omitted():
    class Refused(ErgonError):
        hides_causes = True

    def refuse():
        try:
            raise ConnectionError("GET /hooks/sesame") from KeyError("sesame")
        except ConnectionError as error:
            raise Refused("the bank refused") from error

    error = catch(refuse)
    text = format_error(error)
    assert "sesame" not in text.replace('raise ConnectionError("GET /hooks/sesame") from KeyError("sesame")', "")
    assert "Refused: the bank refused\ncaused by:" in text
    assert text.endswith("ConnectionError\ncaused by:\nKeyError")
    assert to_exc_info(error, DEFAULT_OPTIONS)[0] is ErgonError


def test_circular_and_long_chains_are_limited():
    first, second = catch(fail), catch(fail)
    first.__cause__, second.__cause__ = second, first
    assert format_error(first).count("ValueError: odd") == 2
    last = catch(fail)
    for _ in range(20):
        outer = catch(fail)
        outer.__cause__ = last
        last = outer
    assert format_error(last).count("ValueError: odd") == MAX_ERRORS


def recurse(depth):
    if depth:
        return recurse(depth - 1)
    raise ValueError("odd")


def test_frames_are_shared_between_the_errors_of_a_chain():
    def raise_chained():
        try:
            recurse(100)
        except ValueError as error:
            raise KeyError("k") from error

    lines = format_error(catch(raise_chained)).splitlines()
    frames = [line for line in lines if ".py:" in line]
    assert len(frames) == MAX_FRAMES
    assert "in catch" in frames[0]
    assert "in raise_chained" in frames[2]
    assert any("frames omitted" in line for line in lines)


def test_a_traceback_has_at_most_the_maximum_length():
    kind = type("Ü" * 9000, (Exception,), {})

    def raise_chained():
        raise kind("ü" * 9000)

    assert len(format_error(catch(raise_chained)).encode()) <= MAX_TRACEBACK_BYTES


def test_errors_without_a_readable_message_are_formatted():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def raise_mute():
        raise Mute

    assert format_error(catch(raise_mute)).endswith("Mute with an unreadable message")
    assert "\udc80" not in format_error(catch(exec, "raise ValueError('\\udc80 \\0')"))
    assert "\0" not in format_error(catch(exec, "raise ValueError('\\udc80 \\0')"))


def test_the_redaction_hook_changes_or_hides_the_traceback():
    def fail_to_redact(key, value):
        raise OSError("down")

    seen = []
    assert format_error(catch(fail), redact=lambda key, value: seen.append(key) or value.upper()).endswith(
        "VALUEERROR: ODD"
    )
    assert seen == ["exception.stacktrace"]
    assert format_error(catch(fail), redact=fail_to_redact) == HIDDEN
    assert format_error(catch(fail), redact=lambda key, value: None) == HIDDEN
    assert format_error(catch(fail), record_tracebacks=False) is None


def test_a_chain_that_cannot_be_formatted_is_omitted(monkeypatch):
    monkeypatch.setattr("linecache.getline", lambda *_: 1 / 0)
    assert format_error(catch(fail)) is None


def test_a_traceback_of_another_process_is_kept_to_its_end():
    error = TransactionException("failed")
    error.details = {"traceback": "x" * 9000 + "\npassword=hunter2\nLookupError: 7"}
    text = format_error(error)
    assert text.endswith("password=[hidden]\nLookupError: 7")
    assert len(text) <= MAX_TRACEBACK_BYTES
    assert format_error(error, record_tracebacks=False) is None


def test_exc_info_is_the_error_itself_without_secrets():
    error = catch(fail)
    kind, value, trace = to_exc_info(error, DEFAULT_OPTIONS)
    assert (kind, value) == (ValueError, error)
    assert trace.tb_frame.f_code.co_name == "catch"


def test_exc_info_is_a_stand_in_for_a_redacted_message():
    def leak():
        raise ConnectionError("cannot reach db://me:hunter2@host")

    kind, value, trace = to_exc_info(catch(leak), DEFAULT_OPTIONS)
    printed = logging.Formatter().formatException((kind, value, trace))
    assert kind is ErgonError
    assert "ConnectionError: cannot reach db://[hidden]@host" in printed
    assert "in leak" in printed
