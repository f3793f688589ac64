from __future__ import annotations

import json
import os
from queue import SimpleQueue
from threading import Thread

import pytest

from ergon_framework.runner import lifeline
from ergon_framework.runner.lifeline import Lifeline, lines, reports
from ergon_framework.runner.process import Order


def lined():
    """The child's line, and the parent's two ends of it."""
    down, orders = os.pipe()
    up, reported = os.pipe()
    return Lifeline(down, reported), orders, up


@pytest.mark.spec("RUN-01")
def test_orders_are_heard_and_a_parent_that_is_gone_has_ordered_to_stop():
    line, orders, up = lined()
    heard = SimpleQueue()
    line.listen(heard.put)
    os.write(orders, b"stop\nnonsense\n\xff\nhur")
    os.write(orders, b"ry\n")
    assert [heard.get(timeout=10), heard.get(timeout=10)] == [Order.STOP, Order.HURRY]
    os.close(orders)
    assert heard.get(timeout=10) is Order.STOP
    os.close(up)


def test_what_the_task_starts_does_not_inherit_the_line():
    line, orders, up = lined()
    assert not any(os.get_inheritable(end) for end in (line._orders, line._reports))
    for end in (orders, up, line._orders, line._reports):
        os.close(end)


def test_reports_arrive_whole_however_long_they_are():
    line, orders, up = lined()
    told = {"failures": ["x" * 1000] * 200}
    Thread(target=lambda: (line.report("ended", told), line.report("health", {}), os.close(line._reports))).start()
    assert list(reports(up)) == [{"kind": "ended", **told}, {"kind": "health"}]
    os.close(orders)
    os.close(line._orders)


def test_a_report_to_nobody_is_no_failure():
    line, orders, up = lined()
    os.close(up)
    line.report("health", {})
    for end in (orders, line._orders, line._reports):
        os.close(end)


def test_lines_that_are_too_long_or_no_reports_are_passed_over(monkeypatch):
    monkeypatch.setattr(lifeline, "LONGEST", 100_000)
    up, reported = os.pipe()
    good = json.dumps({"kind": "health"}).encode()

    def write():
        with os.fdopen(reported, "wb") as pipe:
            pipe.write(b"[]\nnonsense\n" + b"x" * 300_000 + b"\n" + good + b"\n" + b"[" * 99_999 + b"\n" + good)

    Thread(target=write).start()
    assert list(reports(up)) == [{"kind": "health"}]


def test_the_end_is_closed_when_nobody_writes_any_more():
    up, reported = os.pipe()
    os.close(reported)
    assert list(lines(up)) == []
    with pytest.raises(OSError):
        os.fstat(up)
