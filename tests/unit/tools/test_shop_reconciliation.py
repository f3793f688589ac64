"""The reconciliation of the shop example: accepted and rejected records."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ergon_framework.connectors.dead_letters import DeadLetterRecord, TransactionEnvelope
from ergon_framework.errors import Category
from ergon_framework.failure import Failure

SHOP = Path(__file__).parents[3] / "examples" / "shop"
#: Good, declined, undecodable and unbillable.
NUMBERS = (1, 7, 12, 17)
GOOD, DECLINED, UNDECODABLE, UNBILLABLE = (f"order-{number:05}" for number in NUMBERS)


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.syspath_prepend(str(SHOP))
    names = ("reconciliation", "customers", "faults")
    return SimpleNamespace(**{name: importlib.import_module(f"stage.{name}") for name in names})


def make_letter(order, queue, reason, message, *, at=10.0):
    failure = Failure(
        task_name="charge",
        reason_code=reason,
        error_type="Error",
        error_message=message,
        attempts=1,
        occurred_at=at,
        transaction_id=order,
        category=Category.SYSTEM,
    )
    return DeadLetterRecord(
        queue=queue, envelope=TransactionEnvelope(id=order), reason=reason, failure=failure, deliveries=1, at=at
    )


@pytest.fixture
def scenario(stage):
    """Return customers, records that balance, and no faults."""
    orders = [stage.customers.Order.from_number(number) for number in NUMBERS]
    cents = {order.id: order.cents for order in orders}
    records = stage.reconciliation.Records()
    for order in (GOOD, UNBILLABLE):
        records.charges[order] = [cents[order]]
        records.noted[order] = cents[order]
    for site in ("shop", "headquarters"):
        records.facts[site] = {GOOD: [{"order": GOOD, "cents": cents[GOOD]}]}
    records.ledger[GOOD] = [cents[GOOD]]
    records.dead[DECLINED] = [make_letter(DECLINED, "orders", "declined", "the bank declined it")]
    records.dead[UNDECODABLE] = [make_letter(UNDECODABLE, "orders", "undecodable", "no JSON")]
    records.dead[UNBILLABLE] = [make_letter(UNBILLABLE, "invoices", "executor_error", "there is no tax rate for XX")]
    customers = SimpleNamespace(placed=orders, sent=Counter(cents.keys()), began=dict.fromkeys(cents, 5.0))
    return SimpleNamespace(customers=customers, records=records, faults=[])


def find_wrongs(stage, scenario):
    return stage.reconciliation.reconcile(scenario.customers, scenario.records, scenario.faults).problems


def test_records_that_balance_are_accepted(stage, scenario):
    assert find_wrongs(stage, scenario) == []


def charge_twice(records):
    records.charges[GOOD] *= 2


def drop_charge(records):
    del records.charges[GOOD]


def overcharge(records):
    records.charges[GOOD][0] += 1


def charge_declined_order(records):
    records.charges[DECLINED] = [1]


def drop_note(records):
    del records.noted[GOOD]


def duplicate_shop_fact(records):
    records.facts["shop"][GOOD] *= 2


def drop_replicated_fact(records):
    del records.facts["headquarters"][GOOD]


def swap_invoice_order(records):
    records.facts["headquarters"][GOOD] = [{**records.facts["shop"][GOOD][0], "order": UNBILLABLE}]


def book_twice(records):
    records.ledger[GOOD] *= 2


def drop_booking(records):
    del records.ledger[GOOD]


def book_without_invoice(records):
    records.ledger[UNBILLABLE] = [1]


def drop_dead_letter(records):
    del records.dead[DECLINED]


def dead_letter_good_order(records):
    records.dead[GOOD] = [make_letter(GOOD, "orders", "timeout", "the bank was away")]


def change_dead_letter_reason(records):
    records.dead[DECLINED] = [make_letter(DECLINED, "orders", "timeout", "the bank was away")]


def duplicate_dead_letter(records):
    records.dead[DECLINED] *= 2


def charge_unknown_order(records):
    records.charges["order-99999"] = [1]


CORRUPTIONS = [
    charge_twice,
    drop_charge,
    overcharge,
    charge_declined_order,
    drop_note,
    duplicate_shop_fact,
    drop_replicated_fact,
    swap_invoice_order,
    book_twice,
    drop_booking,
    book_without_invoice,
    drop_dead_letter,
    dead_letter_good_order,
    change_dead_letter_reason,
    duplicate_dead_letter,
    charge_unknown_order,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda wrong: wrong.__name__)
def test_one_wrong_record_is_found_and_named(stage, scenario, corrupt):
    corrupt(scenario.records)
    assert len(find_wrongs(stage, scenario)) == 1


def test_a_second_dead_letter_at_rabbitmq_is_accepted_with_a_cause(stage, scenario):
    duplicate_dead_letter(scenario.records)
    scenario.faults = [stage.faults.Fault("kill", "charge", 6.0, 6.1)]
    assert find_wrongs(stage, scenario) == []
    scenario.faults = [stage.faults.Fault("kill", "book", 6.0, 6.1)]
    assert len(find_wrongs(stage, scenario)) == 1
    scenario.faults = [stage.faults.Fault("kill", "charge", 11.0, 11.1)]
    assert len(find_wrongs(stage, scenario)) == 1
    scenario.faults = []
    scenario.customers.sent[DECLINED] = 2
    assert find_wrongs(stage, scenario) == []


def test_a_second_dead_letter_in_postgresql_has_no_excuse(stage, scenario):
    scenario.records.dead[UNBILLABLE] *= 2
    scenario.customers.sent[UNBILLABLE] = 2
    scenario.faults = [stage.faults.Fault("crash", "rabbitmq", 6.0, 7.0)]
    assert len(find_wrongs(stage, scenario)) == 1
