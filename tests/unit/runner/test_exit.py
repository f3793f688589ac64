from __future__ import annotations

from pathlib import Path

import pytest

from ergon_framework.runner.exit import RunExit, exit_code_for, most_severe
from ergon_framework.worker.exceptions import FetchException, LoopStalled, LoopTimeout
from ergon_framework.worker.report import Report

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "run.md"


@pytest.mark.parametrize(
    "report, error, forced, code",
    [
        (Report(), None, False, RunExit.OK),
        (Report(still_running=1), None, False, RunExit.LEFT_BEHIND),
        (Report(settled={"settled": 3, "lost": 1}), None, False, RunExit.OK),
        (Report(settled={"settled": 3, "failed": 1}), None, False, RunExit.LEFT_BEHIND),
        (Report(still_running=1), LoopTimeout("over"), False, RunExit.TIMEOUT),
        (Report(), FetchException("gone"), False, RunExit.FAILED),
        (Report(still_running=1), LoopStalled("full"), False, RunExit.FAILED),
        (None, OSError("lifespan"), False, RunExit.FAILED),
        (None, None, False, RunExit.FAILED),
        (Report(), None, True, RunExit.FORCED),
    ],
)
def test_the_result_decides_the_exit_code(report, error, forced, code):
    assert exit_code_for(report, error, forced=forced) is code


@pytest.mark.parametrize(
    "codes, code",
    [
        ([], RunExit.OK),
        ([0, 0], RunExit.OK),
        ([0, 4], RunExit.LEFT_BEHIND),
        ([4, 3], RunExit.TIMEOUT),
        ([3, 1], RunExit.FAILED),
        ([0, -11], RunExit.FAILED),
        ([99, 0], RunExit.FAILED),
        ([1, 70], RunExit.FORCED),
        ([70, 5], RunExit.FLAPPING),
        ([5, 2], RunExit.USAGE),
    ],
)
def test_the_most_severe_exit_code_is_that_of_the_run(codes, code):
    assert most_severe(codes) is code


@pytest.mark.parametrize("code", RunExit)
def test_the_guide_lists_every_code_with_its_meaning(code):
    assert f"| {code.value} | {code.meaning} |" in GUIDE.read_text(encoding="utf-8")
