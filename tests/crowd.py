"""A test is asked again when it failed while others held the processors.

Many tests say that something ends within a third of a second, or that nobody is left once something is over. On a
machine whose processors were taken, by a neighbour or by the other half of the tests, such a failure says nothing. So a
failure counts at once where everyone had a processor, and where not, the test is asked again, a few times and no more:
what fails every time is red, and a broken rule fails every time. Who was asked again stands at the end of the run.
A test in which a server that is not ours ended by itself is asked again as well: its failure is not about us.
A test of an invariant is never run again (tests/invariants.py).
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
#: The share of a test's time in which somebody waited for a processor, beyond which its failure is no verdict.
CROWDED = 0.05

_TICK = os.sysconf("SC_CLK_TCK")
_AGAIN = "asked again"


class Gauge:
    """Since it was made: the share of time for which work that was ready had no processor, and who has died."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._waited = _waited()
        self._deaths = len(DEATHS)

    def deaths(self) -> list[str]:
        return DEATHS[self._deaths :]

    def crowded(self) -> bool:
        return _waited() - self._waited > CROWDED * (time.monotonic() - self._since)


def _waited() -> float:
    """Seconds so far in which tasks here waited for each other, and those that other machines took from this one."""
    try:
        pressure = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        stolen = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[8]
    except (OSError, IndexError):
        return 0.0  # a machine that does not say is taken for a calm one
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
    """What a test that broke off has left open is not to be found, and complained of, in the middle of another."""
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
        terminalreporter.section(f"asked again, because processors were taken or a server had died: {len(asked)}")
        for node, why in asked:
            terminalreporter.line(f"{node}: {why}")
