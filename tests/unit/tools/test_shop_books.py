"""The judge of the example of a shop: what it lets pass, and what it finds."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ergon_framework.connectors.deadletters import DeadLetterRecord, Envelope
from ergon_framework.errors import Category
from ergon_framework.failure import Failure

SHOP = Path(__file__).parents[3] / "examples" / "shop"
#: Good, declined, undecodable and unbillable.
NUMBERS = (1, 7, 12, 17)
GOOD, DECLINED, UNDECODABLE, UNBILLABLE = (f"order-{number:05}" for number in NUMBERS)


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.syspath_prepend(str(SHOP))
    names = ("books", "customers", "faults")
    return SimpleNamespace(**{name: importlib.import_module(f"stage.{name}") for name in names})


def letter(order, queue, reason, words, *, at=10.0):
    failure = Failure(
        task_name="charge",
        reason_code=reason,
        error_type="Error",
        error_message=words,
        attempts=1,
        occurred_at=at,
        transaction_id=order,
        category=Category.SYSTEM,
    )
    return DeadLetterRecord(
        queue=queue, envelope=Envelope(id=order), reason=reason, failure=failure, deliveries=1, at=at
    )


@pytest.fixture
def told(stage):
    """Customers, books that balance, and no faults."""
    orders = [stage.customers.Order.numbered(number) for number in NUMBERS]
    cents = {order.id: order.cents for order in orders}
    books = stage.books.Books()
    for order in (GOOD, UNBILLABLE):
        books.charges[order] = [cents[order]]
        books.noted[order] = cents[order]
    for site in ("shop", "headquarters"):
        books.facts[site] = {GOOD: [{"order": GOOD, "cents": cents[GOOD]}]}
    books.ledger[GOOD] = [cents[GOOD]]
    books.dead[DECLINED] = [letter(DECLINED, "orders", "declined", "the bank declined it")]
    books.dead[UNDECODABLE] = [letter(UNDECODABLE, "orders", "undecodable", "no JSON")]
    books.dead[UNBILLABLE] = [letter(UNBILLABLE, "invoices", "executor_error", "there is no tax rate for XX")]
    customers = SimpleNamespace(placed=orders, sent=Counter(cents.keys()), began=dict.fromkeys(cents, 5.0))
    return SimpleNamespace(customers=customers, books=books, faults=[])


def judged(stage, told):
    return stage.books.judge(told.customers, told.books, told.faults).wrongs


def test_books_that_balance_are_let_pass(stage, told):
    assert judged(stage, told) == []


def charged_twice(books):
    books.charges[GOOD] *= 2


def never_charged(books):
    del books.charges[GOOD]


def charged_too_much(books):
    books.charges[GOOD][0] += 1


def charged_though_declined(books):
    books.charges[DECLINED] = [1]


def not_noted(books):
    del books.noted[GOOD]


def told_twice(books):
    books.facts["shop"][GOOD] *= 2


def not_replicated(books):
    del books.facts["headquarters"][GOOD]


def an_invoice_of_somebody_else(books):
    books.facts["headquarters"][GOOD] = [{**books.facts["shop"][GOOD][0], "order": UNBILLABLE}]


def booked_twice(books):
    books.ledger[GOOD] *= 2


def never_booked(books):
    del books.ledger[GOOD]


def booked_without_an_invoice(books):
    books.ledger[UNBILLABLE] = [1]


def no_dead_letter(books):
    del books.dead[DECLINED]


def put_aside_without_a_fault_of_its_own(books):
    books.dead[GOOD] = [letter(GOOD, "orders", "timeout", "the bank was away")]


def dead_for_another_reason(books):
    books.dead[DECLINED] = [letter(DECLINED, "orders", "timeout", "the bank was away")]


def dead_twice(books):
    books.dead[DECLINED] *= 2


def from_nobody(books):
    books.charges["order-99999"] = [1]


WRONGS = [
    charged_twice,
    never_charged,
    charged_too_much,
    charged_though_declined,
    not_noted,
    told_twice,
    not_replicated,
    an_invoice_of_somebody_else,
    booked_twice,
    never_booked,
    booked_without_an_invoice,
    no_dead_letter,
    put_aside_without_a_fault_of_its_own,
    dead_for_another_reason,
    dead_twice,
    from_nobody,
]


@pytest.mark.parametrize("wrong", WRONGS, ids=lambda wrong: wrong.__name__)
def test_one_entry_that_is_wrong_is_found_and_named(stage, told, wrong):
    wrong(told.books)
    assert len(judged(stage, told)) == 1


def test_a_second_dead_letter_at_rabbitmq_is_let_pass_with_a_cause(stage, told):
    dead_twice(told.books)
    told.faults = [stage.faults.Fault("kill", "charge", 6.0, 6.1)]
    assert judged(stage, told) == []
    told.faults = [stage.faults.Fault("kill", "book", 6.0, 6.1)]
    assert len(judged(stage, told)) == 1
    told.faults = [stage.faults.Fault("kill", "charge", 11.0, 11.1)]
    assert len(judged(stage, told)) == 1
    told.faults = []
    told.customers.sent[DECLINED] = 2
    assert judged(stage, told) == []


def test_a_second_dead_letter_in_postgresql_has_no_excuse(stage, told):
    told.books.dead[UNBILLABLE] *= 2
    told.customers.sent[UNBILLABLE] = 2
    told.faults = [stage.faults.Fault("crash", "rabbitmq", 6.0, 7.0)]
    assert len(judged(stage, told)) == 1
