"""A small run of the chaos test with jobs; ``make chaos-executors`` is the complete one."""

from __future__ import annotations

import pytest

from tests.chaos.executors import _parse_options, run

pytestmark = pytest.mark.invariant


@pytest.mark.spec("EXE-19", "EXE-21", "EXE-22")
def test_jobs_end_once_while_executors_orchestrators_and_the_server_are_killed(new_postgres, tmp_path):
    arguments = (
        "--jobs 200 --kills 3 --stops 2 --deadly 2 --seconds 4 --lease 1 --patience 60 --pause 1 --languages node"
    )
    report = run(new_postgres(), tmp_path, _parse_options(arguments.split()))
    assert report["findings"] == {}, report
    assert report["killers dead after exactly their attempts"] == report["killers"] == 1
    assert report["orchestrators"]["killed by a job"] > 0
