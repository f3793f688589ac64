"""Tests of invariants: lost, duplicated, overlapping or wrongly dead-lettered work. None of them is ever rerun.

A test belongs here if it proves one of ``REQUIREMENTS`` or carries ``@pytest.mark.invariant``. Its failure counts
immediately, and the run ends with ``EXIT_CODE`` instead of 1, so that no later step of CI runs it again either.
"""

from __future__ import annotations

import pytest

#: Unlike 1, it starts no second run of the tests that failed.
EXIT_CODE = 10
#: A property of the report of a failed test; it reaches the controller of a parallel run.
INVARIANT_FAILED = ("invariant", "failed")

#: The requirements whose violation loses, duplicates, overlaps or wrongly dead-letters work.
REQUIREMENTS = frozenset({
    *(f"CON-{number}" for number in (21, 23, 28, 29, 30, 31, 34)),
    *(f"PRO-{number}" for number in (13, 14, 18)),
    *(f"CNN-{number:02}" for number in (2, 4, 7, 9, 11, 12, 14, 15)),
    *(f"EXE-{number}" for number in (10, 12, 19, 22, 23, 27)),
    *(f"FAC-{number:02}" for number in (3, 10, 13, 15, 16, 17, 23, 25, 27)),
    *(f"PRV-{number}" for number in (22, 23, 31)),
    *(f"DX-{number:02}" for number in (2, 5, 7, 22, 23, 24, 27, 29, 33, 37, 41)),
})  # fmt: skip


def is_invariant(item: pytest.Item) -> bool:
    """Tell whether *item* tests an invariant."""
    if item.get_closest_marker("invariant") is not None:
        return True
    return any(name in REQUIREMENTS for mark in item.iter_markers("spec") for name in mark.args)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    failed = [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
    if any(INVARIANT_FAILED in report.user_properties for report in failed if hasattr(report, "user_properties")):
        session.exitstatus = EXIT_CODE
