"""Log records: complete under any formatter, and each field once under the framework's formatters."""

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
from ergon_framework.cli.output import JsonFormatter, KeyValueFormatter
from ergon_framework.scope import Scope
from ergon_framework.telemetry import logs
from ergon_framework.transaction import Transaction

#: A pair that go-logfmt and Loki accept: a bare word, or a quoted text with the escapes of JSON.
_PAIR = re.compile(r'([^\s="]+)=(?:("(?:[^"\\]|\\.)*")|([^\s="]*))(?: |$)')


def parse_line(line):
    """Parse one line of logfmt; a line that is not logfmt fails."""
    position, fields = 0, {}
    while position < len(line):
        pair = _PAIR.match(line, position)
        assert pair is not None, line[position:]
        fields[pair[1]] = json.loads(pair[2]) if pair[2] else pair[3]
        position = pair.end()
    return fields


@pytest.fixture
def format_event():
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
            logs.log_event(logging.WARNING, event, fields or {}, to=to, **options)
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
def test_the_message_has_the_event_and_every_field(format_event):
    line = format_event(logging.Formatter("%(levelname)s %(message)s"), fields=FIELDS)
    assert line == (
        "WARNING transaction failed task=charge transaction_id=17 attempts=3 still_running=true "
        r'error="card \"4\" declined\r\nby = bank\u001b[31m" correlation_id=17' + "\n"
    )


def test_log_lines_have_the_transaction_id_without_logging_configuration():
    script = "import logging; from ergon_framework.telemetry import logs\n"
    script += (
        "logs.log_event(logging.WARNING, 'transaction failed', {'transaction_id': 'order-3', 'error': 'no money'})"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stderr == 'transaction failed transaction_id=order-3 error="no money" correlation_id=order-3\n'


def test_records_keep_their_fields_and_share_the_template_of_their_event(caplog):
    for number in range(2):
        fields = {"transaction_id": f"order-{number}", "reason": None}
        logs.log_event(logging.WARNING, "transaction failed", fields, to=logging.getLogger("ergon_framework.task"))
    first, second = caplog.records
    assert first.msg == second.msg
    assert (first.event, first.transaction_id, second.transaction_id) == ("transaction failed", "order-0", "order-1")
    assert not hasattr(first, "reason")
    assert first.funcName == "test_records_keep_their_fields_and_share_the_template_of_their_event"


def test_fields_that_are_none_can_be_kept(caplog):
    log = logging.getLogger("ergon_framework.task")
    logs.log_event(
        logging.WARNING, "provider attempt", {"capability": "pay", "reason_code": None}, to=log, keep_none=True
    )
    (record,) = caplog.records
    assert (record.reason_code, record.message) == (None, "provider attempt capability=pay")


@pytest.mark.parametrize(
    "fields, current_transaction, correlation_id",
    [
        ({"transaction_id": "a", "correlation_id": "c"}, None, "c"),
        ({"transaction_id": "a", "correlation_id": None}, None, "a"),
        ({"transaction_id": "a"}, None, "a"),
        ({"transaction_id": "a"}, Transaction(id="a", correlation="d"), "d"),
        ({"transaction_id": "a"}, Transaction(id="b", correlation="d"), "a"),
        ({"task": "charge"}, Transaction(id="b", correlation="d"), None),
    ],
)
def test_a_record_about_a_transaction_has_a_correlation_id(caplog, fields, current_transaction, correlation_id):
    log = logging.getLogger("ergon_framework.task")
    scope.set_scope(None if current_transaction is None else Scope(current_transaction, "process", 0))
    try:
        logs.log_event(logging.WARNING, "transaction failed", fields, to=log)
    finally:
        scope.set_scope(None)
    (record,) = caplog.records
    assert getattr(record, "correlation_id", None) == correlation_id


def test_text_is_logfmt_with_each_field_once(format_event):
    line = format_event(KeyValueFormatter(), fields=FIELDS)
    assert line.count("\n") == 1
    parsed = parse_line(line[:-1])
    moment = datetime.fromisoformat(parsed.pop("time"))
    assert abs(moment.timestamp() - time.time()) < 60
    assert parsed == {
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


def test_json_has_the_event_and_each_field_once(format_event):
    parsed = json.loads(format_event(JsonFormatter(), fields=FIELDS))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", parsed.pop("time"))
    assert parsed == {
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


def raise_and_catch():
    try:
        raise OSError("no route\nlevel=error event=forged")
    except OSError as error:
        return error


def test_a_traceback_follows_a_line_of_text_in_indented_lines(format_event):
    line, *traceback = format_event(KeyValueFormatter(), exc_info=raise_and_catch()).splitlines()
    assert parse_line(line)["event"] == "transaction failed"
    assert traceback[0] == "  Traceback (most recent call last):"
    assert traceback[-2:] == ["  OSError: no route", "  level=error event=forged"]
    assert all(each.startswith("  ") for each in traceback)


def test_a_traceback_is_one_field_of_json(format_event):
    (line,) = format_event(JsonFormatter(), exc_info=raise_and_catch()).splitlines()
    assert json.loads(line)["traceback"].endswith("OSError: no route\nlevel=error event=forged")


@pytest.mark.parametrize("formatter", [KeyValueFormatter(), JsonFormatter()])
def test_the_message_of_a_third_party_record_is_its_event(formatter):
    record = logging.makeLogRecord(
        {"name": "shop", "msg": "order %s", "args": ("17",), "event": "sold", "time": "noon", "level": 3, "price": 4}
    )
    line = formatter.format(record)
    parsed = json.loads(line) if isinstance(formatter, JsonFormatter) else parse_line(line)
    assert (parsed["event"], parsed["logger"], str(parsed["price"])) == ("order 17", "shop", "4")
    assert parsed["time"] != "noon"


@given(
    st.dictionaries(
        st.text(min_size=1), st.one_of(st.text(), st.integers(), st.booleans(), st.floats(), st.lists(st.text()))
    )
)
def test_a_field_of_any_value_gives_one_line_of_logfmt(fields):
    record = logging.makeLogRecord({"name": "shop", "msg": "sold"})
    vars(record).update({name: value for name, value in fields.items() if name not in vars(record)})
    line = KeyValueFormatter().format(record)
    assert line.splitlines() == [line]
    line.encode()
    parse_line(line)


@given(st.text())
def test_a_quoted_value_is_equal_after_parsing(text):
    assert parse_line(f"value={logs.quote(text)}") == {"value": text}


def test_a_handler_that_fails_does_not_end_the_caller(format_event):
    class FailingFormatter(logging.Formatter):
        def format(self, record):
            raise OSError("disk full")

    class RaisingHandler(logging.StreamHandler):
        def handleError(self, record):  # noqa: N802 - the standard library's name
            raise  # noqa: PLE0704 - of the exception that is being handled

    log = logging.getLogger("ergon_framework.test_logs.broken")
    handler = RaisingHandler(io.StringIO())
    handler.setFormatter(FailingFormatter())
    log.addHandler(handler)
    logs.log_event(logging.ERROR, "transaction failed", {}, to=log)
    log.removeHandler(handler)
