"""Who may run beside whom."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.connectors.base import Delivery
from ergon_framework.transaction import Transaction
from ergon_framework.worker.admission import DeliveryAdmission


def make_delivery(transaction_id: str, key: str | None = None, **fields: Any) -> Delivery:
    return Delivery(Transaction(id=transaction_id, key=key, **fields), object())


def get_ids(deliveries: list[Delivery]) -> list[str]:
    return [each.transaction.id for each in deliveries]


def take_ready(admission: DeliveryAdmission) -> list[Delivery]:
    return [admission.pop_next() for _ in range(admission.ready_count)]


@pytest.mark.spec("CON-34")
def test_an_id_in_flight_is_rejected_until_it_has_ended() -> None:
    admission = DeliveryAdmission(4)
    first = make_delivery("a")
    assert admission.admit(first) is None
    assert admission.admit(make_delivery("a")) == "identity"
    admission.pop_next()
    assert admission.admit(make_delivery("a")) == "identity", "it runs"
    admission.forget(first)
    assert admission.admit(make_delivery("a")) is None


def test_ids_of_different_sources_are_different() -> None:
    admission = DeliveryAdmission(4)
    assert admission.admit(make_delivery("a", source="x")) is None
    assert admission.admit(make_delivery("a", source="y")) is None


@pytest.mark.spec("CON-34")
def test_one_delivery_per_key_is_ready_and_the_others_follow_in_fetch_order() -> None:
    admission = DeliveryAdmission(4)
    deliveries = [make_delivery(name, "k") for name in "abc"]
    other = make_delivery("x", "other")
    for item in (*deliveries, other):
        assert admission.admit(item) is None
    assert (admission.ready_count, len(admission)) == (2, 4)
    assert get_ids(take_ready(admission)) == ["a", "x"]
    admission.forget(deliveries[0])
    assert get_ids(take_ready(admission)) == ["b"]
    admission.forget(deliveries[1])
    assert get_ids(take_ready(admission)) == ["c"]
    admission.forget(deliveries[2])
    assert len(admission) == 0
    assert admission.admit(make_delivery("d", "k")) is None
    assert admission.ready_count == 1, "the key is free again"


@pytest.mark.spec("CON-34")
def test_at_most_as_many_deliveries_wait_for_keys_as_there_are_slots() -> None:
    admission = DeliveryAdmission(2)
    answers = [admission.admit(make_delivery(name, "hot")) for name in "abcd"]
    assert answers == [None, None, None, "key"]
    assert admission.admit(make_delivery("d")) is None, "the one turned away is not in flight"


def test_clearing_removes_waiting_but_not_running_deliveries() -> None:
    admission = DeliveryAdmission(4)
    running, keyed, ready = make_delivery("a", "k"), make_delivery("b", "k"), make_delivery("c")
    for item in (running, keyed, ready):
        admission.admit(item)
    assert admission.pop_next() is running
    assert get_ids(admission.take_all()) == ["c", "b"]
    assert len(admission) == 0
    admission.forget(running)
    assert admission.ready_count == 0
