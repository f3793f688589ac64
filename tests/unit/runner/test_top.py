"""Frames of ``ergon top``: rates from two looks, and lines that fit into any place."""

from __future__ import annotations

import pytest

from ergon_framework.cli.top_frame import frame
from ergon_framework.cli.top_sources import Look, Sources
from ergon_framework.cli.top_view import lines
from ergon_framework.connectors.base import Depth
from ergon_framework.connectors.postgres.pauses import Fetching, Paused
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.stores.postgres_overview import Reading
from ergon_framework.providers.sql.overview import HeldBack
from ergon_framework.telemetry import names

WELL, ILL = ("charge", "succeeded", ""), ("charge", "failed", "SYSTEM")


def numbers(**told):
    """The numbers of a run of ``charge`` with so many succeeded and failed."""
    return {
        (names.PROCESSES.name, ("charge",)): 1.0,
        (names.TRANSACTIONS.name, WELL): told["well"],
        (names.TRANSACTIONS.name, ILL): told.get("ill", 0.0),
        (names.SLOTS.name, ("charge", "running")): 3.0,
        (names.QUEUE_DEPTH.name, ("charge", "ready")): 7.0,
        (names.QUEUE_LAG.name, ("charge",)): 12.5,
    }


def look(at, runs, **more):
    return Look(at, runs=runs, asked=len(runs), **more)


def test_rates_are_what_was_added_between_two_looks_over_all_runs():
    before = look(10.0, {"a": numbers(well=100.0), "b": numbers(well=5.0, ill=1.0)})
    now = look(12.0, {"a": numbers(well=120.0), "b": numbers(well=6.0, ill=5.0)})
    (task,) = frame(before, now).tasks
    assert task.rates == {"succeeded": 10.5, "failed": 2.0}
    assert (task.processes, task.slots) == (2, {"running": 6})


def test_a_run_that_began_anew_has_done_what_it_counts_and_one_that_was_not_there_before_tells_no_rate():
    before = look(10.0, {"a": numbers(well=100.0)})
    now = look(12.0, {"a": numbers(well=4.0), "b": numbers(well=1_000_000.0)})
    (task,) = frame(before, now).tasks
    assert task.rates == {"succeeded": 2.0, "failed": 0.0}


def test_a_loop_without_a_process_of_its_name_is_shown_too():
    jobs = {
        (names.PROCESSES.name, ("jobs",)): 1.0,
        (names.SLOTS.name, ("jobs.python", "running")): 4.0,
        (names.TRANSACTIONS.name, ("jobs.python", "succeeded", "")): 10.0,
    }
    found = frame(look(1.0, {"a": {}}), look(2.0, {"a": jobs})).tasks
    assert [(row.task, row.processes, row.rates) for row in found] == [
        ("jobs", 1, {}),
        ("jobs.python", 0, {"succeeded": 10.0}),
    ]


def test_the_depth_of_a_queue_is_shown_once_where_the_database_knows_whose_it_is():
    runs = {"a": numbers(well=1.0), "b": numbers(well=1.0)}
    worker = Fetching("charge", "orders", "host", 1, None, 0)
    depth = {"orders": Depth(9, 1, 2, 3, 60.0)}
    apart = frame(look(1.0, runs), look(2.0, runs, queues=depth)).queues
    # Both runs look at the same queue: what they see is not added up.
    assert [(row.queue, row.of_task, row.ready, row.oldest) for row in apart] == [
        ("orders", False, 9, 60.0),
        ("charge", True, 7, 12.5),
    ]
    together = frame(look(1.0, runs), look(2.0, runs, queues=depth, workers=[worker])).queues
    assert [row.queue for row in together] == ["orders"]


def full():
    """A frame with something of everything."""
    runs = {"http://a:1": numbers(well=1.0)}
    runs["http://a:1"] |= {
        (names.PAUSED.name, ("charge", "a long reason that does not fit \x1b[2J anywhere")): 1.0,
        (names.EXECUTORS.name, ("python",)): 2.0,
        (names.PROVIDER_CALLS.name, ("bank", "charging", "failed", "TIMEOUT")): 4.0,
        (names.PROVIDER_EXHAUSTED.name, ("bank", "charging")): 1.0,
        (names.REPLICA_STATUS.name, ("hub", "plant", "hub", "following")): 1.0,
        (names.REPLICA_LAG_SECONDS.name, ("hub", "plant", "hub")): 4000.0,
    }
    told = look(
        2.0,
        runs,
        queues={f"queue-{number}": Depth(number) for number in range(30)},
        breakers=[HeldBack("bank", "charging", "half_open", 1, 3.0), HeldBack("post", "sending", "open", 2, 3.0)],
        readers=[Reading("plant", "hub", "ledger", 5, 100, 0.5)],
        pauses=[Paused("charge", "ann", "it doubles\norders", 0.0)],
        workers=[Fetching("charge", "orders", "h", 1, "charge", 2), Fetching("charge", "orders", "h", 2, None, 0)],
        unreached={"http://b:2": "connection refused"},
    )
    told.asked = 3
    return frame(look(1.0, runs), told)


@pytest.mark.parametrize("width", [1, 20, 40, 79, 200])
@pytest.mark.parametrize("height", [2, 24, None])
def test_no_line_is_wider_and_no_frame_higher_than_its_place(width, height):
    found = lines(full(), width=width, height=height)
    assert max(map(len, found)) <= width
    assert height is None or len(found) <= height
    assert all(line.isprintable() for line in found)


def test_columns_go_where_there_is_no_room_and_what_matters_most_stays():
    wide, narrow = ("\n".join(lines(full(), width=width)) for width in (200, 40))
    for words in ("LATER/S", "MEAN", "used up", "http://b:2 cannot be reached", "1 of 2", "half_open", "1.1 h"):
        assert words in wide
    assert "held: a long reason" in wide
    for words in ("DONE/S", "FAIL/S", "OLDEST", "BREAKER", "BEHIND", "PAUSED"):
        assert words in narrow
    assert "LATER/S" not in narrow


def test_a_frame_without_anything_says_so():
    assert "nothing to show" in lines(frame(Look(1.0), Look(2.0)))[-1]


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:x", "http://ann:secret@a:1"])
def test_what_is_no_address_of_a_run_is_refused_without_its_password(url):
    with pytest.raises(ConfigurationError, match="write http://HOST:PORT") as refused:
        Sources([url], None)
    assert "secret" not in str(refused.value)
