"""Reruns a test that failed while other processes used the processors.

Many tests check that something ends within a third of a second, or that no process or thread remains at the end. On a
machine whose processors were busy, by a neighbour or by other tests, such a failure proves nothing. A failure counts
immediately where processors were free; otherwise the test is rerun, at most TRIES times in all: a broken rule fails
every time. The end of the run lists the rerun tests. A test during which a third-party server exited on its own is
rerun as well. A test of an invariant is never rerun (tests/invariants.py).
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests.invariants import INVARIANT_FAILED, is_invariant
from tests.servers.pgbouncer import DEATHS

TRIES = 5
#: The share of a test's time waiting for a processor above which its failure does not count.
CROWDED = 0.05

_TICK = os.sysconf("SC_CLK_TCK")
_AGAIN = "rerun reason"


class Gauge:
    """Measures since its creation the share of time that ready work waited for a processor, and server exits."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._waited = _waited()
        self._deaths = len(DEATHS)

    def deaths(self) -> list[str]:
        return DEATHS[self._deaths :]

    def crowded(self) -> bool:
        return _waited() - self._waited > CROWDED * (time.monotonic() - self._since)


def _waited() -> float:
    """Return the seconds so far in which tasks here waited for each other, and those stolen by other machines."""
    try:
        pressure = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        stolen = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[8]
    except (OSError, IndexError):
        return 0.0  # a machine without these files counts as idle
    return int(pressure.rpartition("=")[2]) / 1e6 + int(stolen) / _TICK


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    invariant = is_invariant(item)
    for left in reversed(range(1 if invariant else TRIES)):
        gauge = Gauge()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not (left and any(report.failed for report in reports) and (gauge.deaths() or gauge.crowded())):
            break
        reasons = [_why(report) for report in reports if report.failed]
        item.user_properties.append((_AGAIN, "; ".join([*reasons, *gauge.deaths()])))
        _sweep()
    for report in reports:
        if invariant and report.failed:
            report.user_properties = [*report.user_properties, INVARIANT_FAILED]
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _sweep() -> None:
    """Collect the resources of an interrupted test, so that no other test gets their warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def _why(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{report.when}: {crash.message.splitlines()[0] if crash else report.longreprtext[-200:]}"


def pytest_terminal_summary(terminalreporter) -> None:
    asked = [
        (report.nodeid, why)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if getattr(report, "when", None) == "call"
        for name, why in report.user_properties
        if name == _AGAIN
    ]
    if asked:
        terminalreporter.section(f"rerun, because processors were busy or a server had exited: {len(asked)}")
        for node, why in asked:
            terminalreporter.line(f"{node}: {why}")
