"""The verdict of `make chaos-facts` is worth something: it finds what is missing, doubled, damaged or another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.model import BoundarySide, ZonePair
from ergon_framework.facts.stores.memory import MemoryBoundary
from tests.chaos.facts.mix import Mix
from tests.chaos.facts.verdict import Verdict, evaluate

PAIR = ZonePair("plant", "headquarters")
MIX = Mix(PAIR, facts=30, artifacts=4, bytes=3_000_000, seed=1)


@pytest.fixture
def zones():
    source, destination = MemoryBoundary(side=BoundarySide.INNER), MemoryBoundary(side=BoundarySide.OUTER)
    appended = []
    for number in range(MIX.facts):
        stored = MIX.describe_artifact(number)
        if stored is not None:
            for store, zone in ((source, ""), (destination, PAIR.from_zone)):
                store.put_object(MIX.bucket, MIX.key(number), MIX.iter_pieces(number), expected=stored, zone=zone)
        appended.append((number, source.append_fact(MIX.make_envelope(number), MIX.make_fact(number, stored)).offset))
    for answer in destination.forward_facts(source.fetch_facts("x", PAIR, 100)):
        raise_if_error(answer)
    return source, destination, appended


def find_problems(source, destination, appended):
    verdict = Verdict()
    evaluate(verdict, MIX, source, destination, appended)
    return set(verdict.findings)


def test_two_equal_zones_pass(zones):
    assert find_problems(*zones) == set()


def test_a_fact_that_did_not_arrive_is_found(zones):
    zones[1]._logs[PAIR].facts.pop()
    assert "a zone has more" in find_problems(*zones)


def test_a_missing_confirmed_fact_is_found(zones):
    assert find_problems(zones[0], zones[1], [*zones[2], (99, 31)]) == {"a confirmed fact is missing"}


def test_a_gap_and_a_duplicate_are_found(zones):
    for store in zones[:2]:
        facts = store._logs[PAIR].facts
        facts[20] = replace(facts[19], offset=25)
    assert {"offsets have a gap", "a fact is doubled", "a confirmed fact is missing"} <= find_problems(*zones)


def test_a_different_fact_and_a_damaged_fact_are_found(zones):
    facts = zones[1]._logs[PAIR].facts
    facts[3] = replace(facts[3], fact=facts[4].fact)
    assert {"zones differ", "a digest is wrong"} <= find_problems(*zones)


def test_a_missing_or_different_artifact_is_found(zones):
    contents = zones[1]._artifacts._contents
    first, second, *_ = contents
    del contents[first]
    contents[second] = b"another"
    assert find_problems(*zones) == {"an artifact is missing"}


def test_an_artifact_can_be_read_from_any_byte():
    number = max(MIX.sizes, key=MIX.sizes.get)
    whole = b"".join(MIX.iter_pieces(number))
    for begin in (0, 1, 262_144, 262_145, len(whole)):
        assert b"".join(MIX.iter_pieces(number, begin)) == whole[begin:]
