"""Log records: complete under any formatter, and each field once under ours."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import time
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework import scope
from ergon_framework.cli.logs import Fielded, Structured
from ergon_framework.scope import Scope
from ergon_framework.telemetry import logs
from ergon_framework.transaction import Transaction

#: What go-logfmt and Loki accept as one pair: a bare word, or a quoted text with the escapes of JSON.
_PAIR = re.compile(r'([^\s="]+)=(?:("(?:[^"\\]|\\.)*")|([^\s="]*))(?: |$)')


def parse(line):
    """Parse one line of logfmt; a line that is not logfmt fails."""
    place, found = 0, {}
    while place < len(line):
        pair = _PAIR.match(line, place)
        assert pair is not None, line[place:]
        found[pair[1]] = json.loads(pair[2]) if pair[2] else pair[3]
        place = pair.end()
    return found


@pytest.fixture
def written():
    """Return a function that logs one event and returns what a formatter writes."""
    log = logging.getLogger("ergon_framework.test_logs")
    log.setLevel(logging.DEBUG)
    log.propagate = False

    def write(formatter, event="transaction failed", fields=None, *, to=log, **options):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        to.addHandler(handler)
        try:
            logs.say(logging.WARNING, event, fields or {}, to=to, **options)
        finally:
            to.removeHandler(handler)
        return stream.getvalue()

    return write


FIELDS = {
    "task": "charge",
    "transaction_id": "17",
    "attempts": 3,
    "reason": None,
    "still_running": True,
    "error": 'card "4" declined\r\nby = bank\x1b[31m',
}


@pytest.mark.spec("DX-30")
def test_the_message_has_the_event_and_every_field(written):
    line = written(logging.Formatter("%(levelname)s %(message)s"), fields=FIELDS)
    assert line == (
        "WARNING transaction failed task=charge transaction_id=17 attempts=3 still_running=true "
        r'error="card \"4\" declined\r\nby = bank\u001b[31m" correlation_id=17' + "\n"
    )


def test_a_script_without_any_configuration_prints_the_ids():
    script = "import logging; from ergon_framework.telemetry import logs\n"
    script += "logs.say(logging.WARNING, 'transaction failed', {'transaction_id': 'order-3', 'error': 'no money'})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == 'transaction failed transaction_id=order-3 error="no money" correlation_id=order-3\n'


def test_records_keep_their_fields_and_share_the_template_of_their_event(caplog):
    for number in range(2):
        fields = {"transaction_id": f"order-{number}", "reason": None}
        logs.say(logging.WARNING, "transaction failed", fields, to=logging.getLogger("ergon_framework.task"))
    first, second = caplog.records
    assert first.msg == second.msg
    assert (first.event, first.transaction_id, second.transaction_id) == ("transaction failed", "order-0", "order-1")
    assert not hasattr(first, "reason")
    assert first.funcName == "test_records_keep_their_fields_and_share_the_template_of_their_event"


def test_fields_that_are_none_can_be_kept(caplog):
    log = logging.getLogger("ergon_framework.task")
    logs.say(logging.WARNING, "provider attempt", {"capability": "pay", "reason_code": None}, to=log, keep_none=True)
    (record,) = caplog.records
    assert (record.reason_code, record.message) == (None, "provider attempt capability=pay")


@pytest.mark.parametrize(
    "fields, below, correlation",
    [
        ({"transaction_id": "a", "correlation_id": "c"}, None, "c"),
        ({"transaction_id": "a", "correlation_id": None}, None, "a"),
        ({"transaction_id": "a"}, None, "a"),
        ({"transaction_id": "a"}, Transaction("a", correlation="d"), "d"),
        ({"transaction_id": "a"}, Transaction("b", correlation="d"), "a"),
        ({"task": "charge"}, Transaction("b", correlation="d"), None),
    ],
)
def test_a_record_about_a_transaction_has_a_correlation_id(caplog, fields, below, correlation):
    log = logging.getLogger("ergon_framework.task")
    scope.enter(None if below is None else Scope(below, "process", 0))
    try:
        logs.say(logging.WARNING, "transaction failed", fields, to=log)
    finally:
        scope.enter(None)
    (record,) = caplog.records
    assert getattr(record, "correlation_id", None) == correlation


def test_text_is_logfmt_with_each_field_once(written):
    line = written(Fielded(), fields=FIELDS)
    assert line.count("\n") == 1
    found = parse(line[:-1])
    moment = datetime.fromisoformat(found.pop("time"))
    assert abs(moment.timestamp() - time.time()) < 60
    assert found == {
        "level": "warning",
        "logger": "ergon_framework.test_logs",
        "event": "transaction failed",
        "task": "charge",
        "transaction_id": "17",
        "attempts": "3",
        "still_running": "true",
        "error": FIELDS["error"],
        "correlation_id": "17",
    }


def test_json_has_the_event_and_each_field_once(written):
    found = json.loads(written(Structured(), fields=FIELDS))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", found.pop("time"))
    assert found == {
        "level": "warning",
        "logger": "ergon_framework.test_logs",
        "event": "transaction failed",
        "task": "charge",
        "transaction_id": "17",
        "attempts": 3,
        "still_running": True,
        "error": FIELDS["error"],
        "correlation_id": "17",
    }


def failure():
    try:
        raise OSError("no route\nlevel=error event=forged")
    except OSError as error:
        return error


def test_a_traceback_follows_a_line_of_text_in_indented_lines(written):
    line, *traceback = written(Fielded(), exc_info=failure()).splitlines()
    assert parse(line)["event"] == "transaction failed"
    assert traceback[0] == "  Traceback (most recent call last):"
    assert traceback[-2:] == ["  OSError: no route", "  level=error event=forged"]
    assert all(each.startswith("  ") for each in traceback)


def test_a_traceback_is_one_field_of_json(written):
    (line,) = written(Structured(), exc_info=failure()).splitlines()
    assert json.loads(line)["traceback"].endswith("OSError: no route\nlevel=error event=forged")


@pytest.mark.parametrize("formatter", [Fielded(), Structured()])
def test_the_message_of_another_program_s_record_is_its_event(formatter):
    record = logging.makeLogRecord(
        {"name": "shop", "msg": "order %s", "args": ("17",), "event": "sold", "time": "noon", "level": 3, "price": 4}
    )
    line = formatter.format(record)
    found = json.loads(line) if isinstance(formatter, Structured) else parse(line)
    assert (found["event"], found["logger"], str(found["price"])) == ("order 17", "shop", "4")
    assert found["time"] != "noon"


@given(
    st.dictionaries(
        st.text(min_size=1), st.one_of(st.text(), st.integers(), st.booleans(), st.floats(), st.lists(st.text()))
    )
)
def test_whatever_a_field_holds_the_line_is_one_line_of_logfmt(fields):
    record = logging.makeLogRecord({"name": "shop", "msg": "sold"})
    vars(record).update({name: value for name, value in fields.items() if name not in vars(record)})
    line = Fielded().format(record)
    assert line.splitlines() == [line]
    line.encode()
    parse(line)


@given(st.text())
def test_a_value_can_be_read_back(text):
    assert parse(f"value={logs.quote(text)}") == {"value": text}


def test_a_handler_that_fails_does_not_end_the_caller(written):
    class Broken(logging.Formatter):
        def format(self, record):
            raise OSError("disk full")

    class Raising(logging.StreamHandler):
        def handleError(self, record):  # noqa: N802 - the standard library's name
            raise  # noqa: PLE0704 - of the exception that is being handled

    log = logging.getLogger("ergon_framework.test_logs.broken")
    handler = Raising(io.StringIO())
    handler.setFormatter(Broken())
    log.addHandler(handler)
    logs.say(logging.ERROR, "transaction failed", {}, to=log)
    log.removeHandler(handler)
