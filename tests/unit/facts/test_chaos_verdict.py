"""The verdict of `make chaos-facts` is worth something: it finds what is missing, doubled, damaged or another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.model import Pair, Side
from ergon_framework.facts.stores.memory import MemoryBoundary
from tests.chaos.facts.mix import Mix
from tests.chaos.facts.verdict import Verdict, judge

PAIR = Pair("plant", "headquarters")
MIX = Mix(PAIR, facts=30, artifacts=4, bytes=3_000_000, seed=1)


@pytest.fixture
def zones():
    source, destination = MemoryBoundary(side=Side.INNER), MemoryBoundary(side=Side.OUTER)
    told = []
    for number in range(MIX.facts):
        stored = MIX.expected(number)
        if stored is not None:
            for store, zone in ((source, ""), (destination, PAIR.from_zone)):
                store.put_object(MIX.bucket, MIX.key(number), MIX.pieces(number), expected=stored, zone=zone)
        told.append((number, source.append_fact(MIX.envelope(number), MIX.fact(number, stored)).offset))
    for answer in destination.forward_facts(source.fetch_facts("x", PAIR, 100)):
        confirmed(answer)
    return source, destination, told


def wrongs(source, destination, told):
    verdict = Verdict()
    judge(verdict, MIX, source, destination, told)
    return set(verdict.wrongs)


def test_two_zones_that_have_the_same_are_well(zones):
    assert wrongs(*zones) == set()


def test_a_fact_that_did_not_arrive_is_found(zones):
    zones[1]._logs[PAIR].facts.pop()
    assert "a zone has more" in wrongs(*zones)


def test_a_confirmed_fact_that_is_nowhere_is_found(zones):
    assert wrongs(zones[0], zones[1], [*zones[2], (99, 31)]) == {"a confirmed fact is missing"}


def test_a_gap_and_a_double_are_found(zones):
    for store in zones[:2]:
        facts = store._logs[PAIR].facts
        facts[20] = replace(facts[19], offset=25)
    assert {"offsets have a gap", "a fact is doubled", "a confirmed fact is missing"} <= wrongs(*zones)


def test_another_fact_and_a_damaged_one_are_found(zones):
    facts = zones[1]._logs[PAIR].facts
    facts[3] = replace(facts[3], fact=facts[4].fact)
    assert {"zones differ", "a digest is wrong"} <= wrongs(*zones)


def test_an_artifact_that_is_gone_or_another_is_found(zones):
    contents = zones[1]._artifacts._contents
    first, second, *_ = contents
    del contents[first]
    contents[second] = b"another"
    assert wrongs(*zones) == {"an artifact is missing"}


def test_an_artifact_goes_on_at_any_byte_with_the_same_bytes():
    number = max(MIX.sizes, key=MIX.sizes.get)
    whole = b"".join(MIX.pieces(number))
    for begin in (0, 1, 262_144, 262_145, len(whole)):
        assert b"".join(MIX.pieces(number, begin)) == whole[begin:]
