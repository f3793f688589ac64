"""A bug in a handler as an engineer sees it: `ergon run`, then the log, `ergon dlq show` and `ergon why`."""

from __future__ import annotations

import json
import subprocess

import pytest

from ergon_framework import Transaction
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.runner.exit import RunExit
from tests.integration.running import ERGON

APP = """
from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.postgres import PostgresQueue

orders = PostgresQueue("orders")
policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}})


def price(order):
    return order["totl"]


@consumer(orders, policy=policy)
def charge(order):
    return price(order)


@charge.on_failure
def refund(order, error):
    raise RuntimeError("no refund was booked")
"""
BUG_LINE = APP.splitlines().index('    return order["totl"]') + 1
HANDLER_LINE = APP.splitlines().index('    raise RuntimeError("no refund was booked")') + 1


@pytest.fixture
def app_folder(database, monkeypatch, tmp_path):
    """A folder with the program, and one order in its queue."""
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    (tmp_path / "app.py").write_text(APP)
    queue = PostgresQueue("orders", dsn=database)
    queue.open()
    queue.dispatch([Transaction({"total": 20}, id="order-1")])
    queue.close()
    return tmp_path


def run_ergon(folder, *args):
    return subprocess.run([*ERGON, *args], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def list_locations(folder):
    return f"{folder}/app.py:{BUG_LINE} in price", f"{folder}/app.py:{HANDLER_LINE} in refund"


@pytest.mark.spec("DX-03", "DX-04", "CON-25")
def test_log_and_dead_letter_and_why_show_where_both_errors_were_raised(app_folder):
    result = run_ergon(app_folder, "run", "app:charge")
    assert result.returncode == RunExit.OK
    outputs = [
        result.stderr,
        run_ergon(app_folder, "dlq", "show", "app:orders", "order-1").stdout,
        run_ergon(app_folder, "dlq", "show", "app:orders", "order-1", "--json").stdout,
        run_ergon(app_folder, "why", "order-1").stdout,
        run_ergon(app_folder, "why", "order-1", "--json").stdout,
    ]
    missing = [
        (number, location)
        for number, text in enumerate(outputs)
        for location in list_locations(app_folder)
        if location not in text
    ]
    assert missing == []
    assert all("no refund was booked" in text and "KeyError: 'totl'" in text for text in (*outputs[:2], outputs[3]))
    assert "its exception handler failed: RuntimeError: no refund was booked" in result.stdout
    (history,) = json.loads(outputs[4])["histories"]
    tracebacks = {event["event"]: event["traceback"] for event in history["events"] if event["traceback"]}
    assert list_locations(app_folder)[0] in tracebacks["dead letter"]
    assert list_locations(app_folder)[1] in tracebacks["exception handler failed"]


@pytest.mark.spec("DX-04")
@pytest.mark.parametrize("form", ["text", "json"])
def test_both_log_formats_show_the_traceback(app_folder, monkeypatch, form):
    monkeypatch.setenv("ERGON_LOGGING__FORMAT", form)
    log = run_ergon(app_folder, "run", "app:charge").stderr
    if form == "json":
        (log,) = [line["traceback"] for line in map(json.loads, log.splitlines()) if "traceback" in line]
    assert all(location in log for location in list_locations(app_folder))


@pytest.mark.spec("DX-04")
def test_a_setting_turns_tracebacks_off(app_folder, monkeypatch):
    monkeypatch.setenv("ERGON_TELEMETRY__TRACEBACKS", "false")
    result = run_ergon(app_folder, "run", "app:charge")
    outputs = (
        result.stderr
        + run_ergon(app_folder, "dlq", "show", "app:orders", "order-1").stdout
        + run_ergon(app_folder, "why", "order-1").stdout
    )
    assert "app.py" not in outputs
    assert "no refund was booked" in result.stderr
