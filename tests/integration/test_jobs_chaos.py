"""A small run of the chaos with jobs; ``make chaos-executors`` is the whole one."""

from __future__ import annotations

import pytest

from tests.chaos.executors import _options, run

pytestmark = pytest.mark.invariant


@pytest.mark.spec("EXE-19", "EXE-21", "EXE-22")
def test_jobs_end_once_while_executors_orchestrators_and_the_server_are_killed(new_postgres, tmp_path):
    words = "--jobs 200 --kills 3 --stops 2 --deadly 2 --seconds 4 --lease 1 --patience 60 --pause 1 --languages node"
    told = run(new_postgres(), tmp_path, _options(words.split()))
    assert told["findings"] == {}, told
    assert told["killers dead after exactly their attempts"] == told["killers"] == 1
    assert told["orchestrators"]["killed by a job"] > 0
