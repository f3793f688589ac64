"""Frames of ``ergon top``: rates from two polls, and lines that fit into any terminal."""

from __future__ import annotations

import pytest

from ergon_framework.cli.top_sources import Sample, Sources
from ergon_framework.cli.top_view import build_frame, render_lines
from ergon_framework.connectors.base import Depth
from ergon_framework.connectors.postgres.pauses import PauseRecord, WorkerLoopState
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.stores.postgres.lookup import ReaderLagRow
from ergon_framework.providers.postgres.admin import OpenBreakerSummary
from ergon_framework.telemetry import names

SUCCEEDED_LABELS, FAILED_LABELS = ("charge", "succeeded", ""), ("charge", "failed", "SYSTEM")


def make_numbers(**counts):
    """Return the numbers of a run of ``charge`` with the given succeeded and failed counts."""
    return {
        (names.PROCESSES.name, ("charge",)): 1.0,
        (names.TRANSACTIONS.name, SUCCEEDED_LABELS): counts["well"],
        (names.TRANSACTIONS.name, FAILED_LABELS): counts.get("ill", 0.0),
        (names.SLOTS.name, ("charge", "running")): 3.0,
        (names.QUEUE_DEPTH.name, ("charge", "ready")): 7.0,
        (names.QUEUE_LAG.name, ("charge",)): 12.5,
    }


def make_sample(at, runs, **more):
    return Sample(at, runs=runs, sources=len(runs), **more)


def test_rates_are_the_increase_between_two_samples_over_all_runs():
    before = make_sample(10.0, {"a": make_numbers(well=100.0), "b": make_numbers(well=5.0, ill=1.0)})
    now = make_sample(12.0, {"a": make_numbers(well=120.0), "b": make_numbers(well=6.0, ill=5.0)})
    (task,) = build_frame(before, now).tasks
    assert task.rates == {"succeeded": 10.5, "failed": 2.0}
    assert (task.processes, task.slots) == (2, {"running": 6})


def test_a_restarted_run_counts_from_zero_and_a_new_run_has_no_rate():
    before = make_sample(10.0, {"a": make_numbers(well=100.0)})
    now = make_sample(12.0, {"a": make_numbers(well=4.0), "b": make_numbers(well=1_000_000.0)})
    (task,) = build_frame(before, now).tasks
    assert task.rates == {"succeeded": 2.0, "failed": 0.0}


def test_a_loop_without_a_process_of_its_name_is_shown_too():
    jobs = {
        (names.PROCESSES.name, ("jobs",)): 1.0,
        (names.SLOTS.name, ("jobs.python", "running")): 4.0,
        (names.TRANSACTIONS.name, ("jobs.python", "succeeded", "")): 10.0,
    }
    tasks = build_frame(make_sample(1.0, {"a": {}}), make_sample(2.0, {"a": jobs})).tasks
    assert [(row.task, row.processes, row.rates) for row in tasks] == [
        ("jobs", 1, {}),
        ("jobs.python", 0, {"succeeded": 10.0}),
    ]


def test_the_depth_of_a_queue_is_shown_once_if_the_database_knows_its_task():
    runs = {"a": make_numbers(well=1.0), "b": make_numbers(well=1.0)}
    worker = WorkerLoopState("charge", "orders", "host", 1, None, 0)
    depth = {"orders": Depth(9, 1, 2, 3, 60.0)}
    separate = build_frame(make_sample(1.0, runs), make_sample(2.0, runs, queues=depth)).queues
    # Both runs measure the same queue, so the depths are not added.
    assert [(row.queue, row.of_task, row.ready, row.oldest) for row in separate] == [
        ("orders", False, 9, 60.0),
        ("charge", True, 7, 12.5),
    ]
    merged = build_frame(make_sample(1.0, runs), make_sample(2.0, runs, queues=depth, workers=[worker])).queues
    assert [row.queue for row in merged] == ["orders"]


def make_full_frame():
    """Return a frame with something of everything."""
    runs = {"http://a:1": make_numbers(well=1.0)}
    runs["http://a:1"] |= {
        (names.PAUSED.name, ("charge", "a long reason that does not fit \x1b[2J anywhere")): 1.0,
        (names.EXECUTORS.name, ("python",)): 2.0,
        (names.PROVIDER_CALLS.name, ("bank", "charging", "failed", "TIMEOUT")): 4.0,
        (names.PROVIDER_EXHAUSTED.name, ("bank", "charging")): 1.0,
        (names.REPLICATION_STATUS.name, ("hub", "plant", "hub", "following")): 1.0,
        (names.REPLICATION_LAG_SECONDS.name, ("hub", "plant", "hub")): 4000.0,
    }
    sample = make_sample(
        2.0,
        runs,
        queues={f"queue-{number}": Depth(number) for number in range(30)},
        breakers=[
            OpenBreakerSummary("bank", "charging", "half_open", 1, 3.0),
            OpenBreakerSummary("post", "sending", "open", 2, 3.0),
        ],
        readers=[ReaderLagRow("plant", "hub", "ledger", 5, 100, 0.5)],
        pauses=[PauseRecord("charge", "ann", "it doubles\norders", 0.0)],
        workers=[
            WorkerLoopState("charge", "orders", "h", 1, "charge", 2),
            WorkerLoopState("charge", "orders", "h", 2, None, 0),
        ],
        unavailable={"http://b:2": "connection refused"},
    )
    sample.sources = 3
    return build_frame(make_sample(1.0, runs), sample)


@pytest.mark.parametrize("width", [1, 20, 40, 79, 200])
@pytest.mark.parametrize("height", [2, 24, None])
def test_no_frame_exceeds_the_width_or_height_of_its_terminal(width, height):
    rendered = render_lines(make_full_frame(), width=width, height=height)
    assert max(map(len, rendered)) <= width
    assert height is None or len(rendered) <= height
    assert all(line.isprintable() for line in rendered)


def test_narrow_frames_keep_the_most_important_columns():
    wide, narrow = ("\n".join(render_lines(make_full_frame(), width=width)) for width in (200, 40))
    for text in ("DEFERRED/S", "MEAN", "exhausted", "http://b:2 is unavailable", "1/2", "half_open", "1.1 h"):
        assert text in wide
    assert "paused: a long reason" in wide
    for text in ("DONE/S", "FAIL/S", "OLDEST", "BREAKER", "LAG", "PAUSED", "APPLIED"):
        assert text in narrow
    assert "DEFERRED/S" not in narrow


def test_an_empty_frame_says_so():
    assert "nothing to show" in render_lines(build_frame(Sample(1.0), Sample(2.0)))[-1]


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:x", "http://ann:secret@a:1"])
def test_an_invalid_run_address_is_rejected_without_showing_its_password(url):
    with pytest.raises(ConfigurationError, match="write http://HOST:PORT") as caught:
        Sources([url], None)
    assert "secret" not in str(caught.value)
