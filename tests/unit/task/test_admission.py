"""Who may run beside whom."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.connectors.base import Delivery
from ergon_framework.task.admission import Admission
from ergon_framework.transaction import Transaction


def delivery(identity: str, key: str | None = None, **fields: Any) -> Delivery:
    return Delivery(Transaction(identity, key=key, **fields), object())


def ids(deliveries: list[Delivery]) -> list[str]:
    return [each.transaction.id for each in deliveries]


def drained(admission: Admission) -> list[Delivery]:
    return [admission.next() for _ in range(admission.ready)]


@pytest.mark.spec("CON-34")
def test_an_id_in_flight_is_turned_away_until_it_has_left() -> None:
    admission = Admission(4)
    first = delivery("a")
    assert admission.admit(first) is None
    assert admission.admit(delivery("a")) == "identity"
    admission.next()
    assert admission.admit(delivery("a")) == "identity", "it runs"
    admission.left(first)
    assert admission.admit(delivery("a")) is None


def test_ids_of_different_sources_are_different() -> None:
    admission = Admission(4)
    assert admission.admit(delivery("a", source="x")) is None
    assert admission.admit(delivery("a", source="y")) is None


@pytest.mark.spec("CON-34")
def test_of_one_key_one_is_ready_and_the_others_follow_in_fetch_order() -> None:
    admission = Admission(4)
    items = [delivery(name, "k") for name in "abc"]
    other = delivery("x", "other")
    for item in (*items, other):
        assert admission.admit(item) is None
    assert (admission.ready, len(admission)) == (2, 4)
    assert ids(drained(admission)) == ["a", "x"]
    admission.left(items[0])
    assert ids(drained(admission)) == ["b"]
    admission.left(items[1])
    assert ids(drained(admission)) == ["c"]
    admission.left(items[2])
    assert len(admission) == 0
    assert admission.admit(delivery("d", "k")) is None
    assert admission.ready == 1, "the key is free again"


@pytest.mark.spec("CON-34")
def test_no_more_wait_for_keys_than_there_are_slots() -> None:
    admission = Admission(2)
    answers = [admission.admit(delivery(name, "hot")) for name in "abcd"]
    assert answers == [None, None, None, "key"]
    assert admission.admit(delivery("d")) is None, "the one turned away is not in flight"


def test_clearing_takes_out_all_who_wait_but_not_who_runs() -> None:
    admission = Admission(4)
    running, keyed, ready = delivery("a", "k"), delivery("b", "k"), delivery("c")
    for item in (running, keyed, ready):
        admission.admit(item)
    assert admission.next() is running
    assert ids(admission.clear()) == ["c", "b"]
    assert len(admission) == 0
    admission.left(running)
    assert admission.ready == 0
