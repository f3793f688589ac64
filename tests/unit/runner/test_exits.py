from __future__ import annotations

from pathlib import Path

import pytest

from ergon_framework.runner.exits import Exit, exit_of, worst
from ergon_framework.task.exceptions import FetchException, LoopStalled, LoopTimeout
from ergon_framework.task.report import Report

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "run.md"


@pytest.mark.parametrize(
    "report, error, forced, code",
    [
        (Report(), None, False, Exit.OK),
        (Report(abandoned=1), None, False, Exit.LEFT_BEHIND),
        (Report(settled={"settled": 3, "lost": 1}), None, False, Exit.OK),
        (Report(settled={"settled": 3, "failed": 1}), None, False, Exit.LEFT_BEHIND),
        (Report(abandoned=1), LoopTimeout("over"), False, Exit.TIMEOUT),
        (Report(), FetchException("gone"), False, Exit.FAILED),
        (Report(abandoned=1), LoopStalled("full"), False, Exit.FAILED),
        (None, OSError("lifespan"), False, Exit.FAILED),
        (None, None, False, Exit.FAILED),
        (Report(), None, True, Exit.FORCED),
    ],
)
def test_how_it_ended_decides_the_code(report, error, forced, code):
    assert exit_of(report, error, forced=forced) is code


@pytest.mark.parametrize(
    "codes, code",
    [
        ([], Exit.OK),
        ([0, 0], Exit.OK),
        ([0, 4], Exit.LEFT_BEHIND),
        ([4, 3], Exit.TIMEOUT),
        ([3, 1], Exit.FAILED),
        ([0, -11], Exit.FAILED),
        ([99, 0], Exit.FAILED),
        ([1, 70], Exit.FORCED),
        ([70, 5], Exit.FLAPPING),
        ([5, 2], Exit.USAGE),
    ],
)
def test_the_gravest_code_of_several_is_that_of_the_run(codes, code):
    assert worst(codes) is code


@pytest.mark.parametrize("code", Exit)
def test_the_guide_lists_every_code_with_its_meaning(code):
    assert f"| {code.value} | {code.meaning} |" in GUIDE.read_text(encoding="utf-8")
