"""A bug in a handler, as an engineer meets it: `ergon run`, then the log, `ergon dlq show` and `ergon why`."""

from __future__ import annotations

import json
import subprocess

import pytest

from ergon_framework import Transaction
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.runner.exits import Exit
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
BUG = APP.splitlines().index('    return order["totl"]') + 1
HANDLER = APP.splitlines().index('    raise RuntimeError("no refund was booked")') + 1


@pytest.fixture
def shop(database, monkeypatch, tmp_path):
    """A folder with the program, and one order in its queue."""
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    (tmp_path / "app.py").write_text(APP)
    queue = PostgresQueue("orders", dsn=database)
    queue.open()
    queue.dispatch([Transaction("order-1", {"total": 20})])
    queue.close()
    return tmp_path


def ergon(folder, *words):
    return subprocess.run([*ERGON, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def places(folder):
    return f"{folder}/app.py:{BUG} in price", f"{folder}/app.py:{HANDLER} in refund"


@pytest.mark.spec("DX-03", "DX-04", "CON-25")
def test_log_and_dead_letter_and_why_show_where_both_errors_were_raised(shop):
    ran = ergon(shop, "run", "app:charge")
    assert ran.returncode == Exit.OK
    shown = [
        ran.stderr,
        ergon(shop, "dlq", "show", "app:orders", "order-1").stdout,
        ergon(shop, "dlq", "show", "app:orders", "order-1", "--json").stdout,
        ergon(shop, "why", "order-1").stdout,
        ergon(shop, "why", "order-1", "--json").stdout,
    ]
    missing = [(number, place) for number, text in enumerate(shown) for place in places(shop) if place not in text]
    assert missing == []
    assert all("no refund was booked" in text and "KeyError: 'totl'" in text for text in (*shown[:2], shown[3]))
    assert "its exception handler failed: RuntimeError: no refund was booked" in ran.stdout
    (history,) = json.loads(shown[4])["histories"]
    tracebacks = {event["what"]: event["traceback"] for event in history["events"] if event["traceback"]}
    assert places(shop)[0] in tracebacks["dead letter"]
    assert places(shop)[1] in tracebacks["exception handler failed"]


@pytest.mark.spec("DX-04")
@pytest.mark.parametrize("form", ["text", "json"])
def test_both_log_formats_show_the_traceback(shop, monkeypatch, form):
    monkeypatch.setenv("ERGON_LOGGING__FORMAT", form)
    log = ergon(shop, "run", "app:charge").stderr
    if form == "json":
        (log,) = [line["traceback"] for line in map(json.loads, log.splitlines()) if "traceback" in line]
    assert all(place in log for place in places(shop))


@pytest.mark.spec("DX-04")
def test_a_setting_turns_tracebacks_off(shop, monkeypatch):
    monkeypatch.setenv("ERGON_TELEMETRY__TRACEBACKS", "false")
    ran = ergon(shop, "run", "app:charge")
    shown = (
        ran.stderr + ergon(shop, "dlq", "show", "app:orders", "order-1").stdout + ergon(shop, "why", "order-1").stdout
    )
    assert "app.py" not in shown
    assert "no refund was booked" in ran.stderr
