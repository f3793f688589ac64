"""The fuzzer's inputs are kept, and its runs add up."""

from __future__ import annotations

from tests.fuzz import kept


def test_inputs_are_kept_once_and_the_shortest_first(tmp_path):
    assert kept.read_inputs("requests", tmp_path) == []
    long = b"x" * (kept.MAX_INPUT_BYTES + 1)
    assert kept.store_inputs("requests", [b"three", b"\x00\n", b"three", long], tmp_path) == 2
    assert kept.read_inputs("requests", tmp_path) == [b"\x00\n", b"three"]
    assert kept.read_inputs("outcomes", tmp_path) == []


def test_runs_add_up_for_each_direction(tmp_path):
    assert kept.read_total("requests", tmp_path) == {"seconds": 0, "runs": 0}
    kept.add_run("requests", seconds=60, runs=1000, folder=tmp_path)
    kept.add_run("outcomes", seconds=5, runs=10, folder=tmp_path)
    assert kept.add_run("requests", seconds=40, runs=500, folder=tmp_path) == {"seconds": 100, "runs": 1500}
    assert kept.read_total("outcomes", tmp_path) == {"seconds": 5, "runs": 10}
