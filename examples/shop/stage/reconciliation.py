"""Reconciliation: read the records of each side about the orders, and check that they agree."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from ergon_framework import Connector
from ergon_framework.connectors import DeadLetterQuery, DeadLetterRecord
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.facts import BoundarySide, FileContentStore, PostgresBoundary
from stage.customers import Customers, Order, OrderKind
from stage.faults import Fault
from stage.sites import PAIR, Sites

#: The reason for which an order of each kind is dead-lettered, and a part of the error message.
REASONS = {
    OrderKind.DECLINED: ("orders", "declined", "declined"),
    OrderKind.UNDECODABLE: ("orders", "undecodable", "JSON"),
    OrderKind.UNBILLABLE: ("invoices", "executor_error", "no tax rate for XX"),
}


@dataclass
class Records:
    """Every record, by order."""

    #: Cents of each charge at the bank.
    charges: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    #: Cents of each charge that the shop has recorded.
    noted: dict[str, int] = field(default_factory=dict)
    #: Invoices that facts name, by the store that has them.
    facts: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    ledger: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    dead: dict[str, list[DeadLetterRecord]] = field(default_factory=lambda: defaultdict(list))


def read(sites: Sites) -> Records:
    """Read all records, when no order is in progress."""
    records = Records()
    for line in sites.charges.read_text(encoding="utf-8").splitlines():
        charge = json.loads(line)
        records.charges[charge["order"]].append(charge["cents"])
    with psycopg.connect(sites.dsn("shop")) as connection:
        records.noted = dict(connection.execute("select order_id, cents from charge").fetchall())
    with psycopg.connect(sites.dsn("headquarters")) as connection:
        for order, cents in connection.execute("select order_id, cents from ledger"):
            records.ledger[order].append(cents)
    for site, side in (("shop", BoundarySide.INNER), ("headquarters", BoundarySide.OUTER)):
        with PostgresBoundary(sites.dsn(site), side=side, contents=FileContentStore(sites.contents[site])) as boundary:
            records.facts[site] = _read_invoices(boundary)
    for queue in (RabbitMQQueue("orders", url=sites.rabbitmq.url), PostgresQueue("invoices", dsn=sites.dsn("shop"))):
        for letter in _list_dead_letters(queue):
            records.dead[_find_order(letter)].append(letter)
        queue.close()
    return records


def _read_invoices(boundary: PostgresBoundary) -> dict[str, list[dict[str, Any]]]:
    """Return the invoice of every fact, from its artifact."""
    invoices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    after = None
    while facts := boundary.fetch_facts("reconciliation", PAIR, 500, after=after):
        for stored in facts:
            artifact = stored.fact.artifact
            assert artifact is not None, f"{stored.fact.subject} names no invoice"  # noqa: S101 - a check of the demo
            invoice = json.loads(b"".join(boundary.get_object(artifact.bucket, artifact.key, zone=PAIR.from_zone)))
            invoices[stored.fact.subject.removeprefix("order:")].append(invoice)
        after = facts[-1].cursor
    return invoices


def _list_dead_letters(queue: Connector) -> Iterable[DeadLetterRecord]:
    after = None
    while letters := queue.list_dead(DeadLetterQuery(), after=after, limit=500):
        yield from letters
        after = letters[-1].handle


def _find_order(letter: DeadLetterRecord) -> str:
    """Return the order of a dead letter; for an undecodable one it is taken from the raw text."""
    text = letter.envelope.id if letter.raw is None else letter.raw.decode(errors="replace")
    match = re.search(r"order-\d+", text)
    return match[0] if match else text


@dataclass
class Verdict:
    """Whether the records balance, and where not."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def check(self, order: str, subject: str, actual: object, expected: object) -> None:
        if actual != expected:
            self.problems.append(f"{order}: {subject}: {actual!r}, not {expected!r}")


def reconcile(customers: Customers, records: Records, faults: Sequence[Fault]) -> Verdict:
    """Check that every order has one charge, invoice, fact and entry, or one dead letter with its reason."""
    orders = customers.placed
    verdict = Verdict(Counter(order.kind.value for order in orders))
    for order in orders:
        expected_charges = [order.cents] if order.kind in {OrderKind.GOOD, OrderKind.UNBILLABLE} else []
        expected_entries = [order.cents] if order.kind is OrderKind.GOOD else []
        verdict.check(order.id, "charges at the bank", records.charges.get(order.id, []), expected_charges)
        recorded = records.noted.get(order.id)
        verdict.check(order.id, "charges in the shop", [] if recorded is None else [recorded], expected_charges)
        for site in ("shop", "headquarters"):
            invoices = [(invoice["order"], invoice["cents"]) for invoice in records.facts[site].get(order.id, [])]
            verdict.check(order.id, f"facts at {site}", invoices, [(order.id, cents) for cents in expected_entries])
        verdict.check(order.id, "entries in the ledger", records.ledger.get(order.id, []), expected_entries)
        letters = sorted(records.dead.get(order.id, []), key=lambda letter: letter.at)
        if order.kind is not OrderKind.GOOD:
            _check_dead_letters(verdict, order, letters, crashes=bool(faults))
            excused = customers.sent[order.id] > 1 or _has_cause(customers.began[order.id], letters, faults)
            _check_copies(verdict, order, letters, excused=excused)
        elif letters:
            # A valid order is not lost, but not done either.
            verdict.counts["dead-lettered"] += 1
            verdict.problems.append(f"{order.id}: dead-lettered: {_describe(letters)}")
    order_ids = {order.id for order in orders}
    for name, order_records in _list_records(records).items():
        for unknown_order in set(order_records) - order_ids:
            verdict.problems.append(f"{unknown_order}: in {name}, but there is no such order")
    return verdict


def _list_records(records: Records) -> dict[str, Iterable[str]]:
    stores = {f"facts at {site}": facts for site, facts in records.facts.items()}
    return {
        "charges": records.charges,
        "the shop": records.noted,
        "ledger": records.ledger,
        "dead": records.dead,
        **stores,
    }


def _check_dead_letters(verdict: Verdict, order: Order, letters: list[DeadLetterRecord], *, crashes: bool) -> None:
    queue, reason, expected_text = REASONS[order.kind]
    if not letters:
        verdict.problems.append(f"{order.id}: no dead letter")
    for letter in letters:
        message = letter.failure.error_message if letter.failure else ""
        # The last of several attempts may have failed with a killed executor instead of the order's own fault.
        executor_killed = crashes and queue == "invoices" and bool(message)
        if letter.queue != queue or not (executor_killed or (letter.reason == reason and expected_text in message)):
            verdict.problems.append(
                f"{order.id}: a dead letter is not of {queue}, {reason}, {expected_text!r}: {_describe([letter])}"
            )


def _has_cause(began: float, letters: list[DeadLetterRecord], faults: Sequence[Fault]) -> bool:
    """Return whether a fault hit the worker or the broker while the order was in progress."""
    last = letters[-1].at if letters else 0.0
    return any(
        fault.target in {"charge", "rabbitmq"} and fault.began <= last and fault.ended >= began for fault in faults
    )


def _check_copies(verdict: Verdict, order: Order, letters: list[DeadLetterRecord], *, excused: bool) -> None:
    """Check the copies: RabbitMQ stores a dead letter before the ack, so a crash may leave two; PostgreSQL does not."""
    copies = max(0, len(letters) - 1)
    verdict.counts["copies of dead letters"] += copies
    if copies and not (excused and all(letter.queue == "orders" for letter in letters)):
        verdict.problems.append(f"{order.id}: {len(letters)} dead letters: {_describe(letters)}")


def _describe(letters: list[DeadLetterRecord]) -> str:
    return "; ".join(
        f"{letter.queue}, {letter.reason}, {letter.deliveries} deliveries, "
        f"{letter.failure.error_message if letter.failure else 'no failure'}"
        for letter in letters
    )


def format_report(orders: list[Order], records: Records, verdict: Verdict) -> str:
    """Return the records as a table."""

    def format_row(label: str, groups: Iterable[Iterable[int]]) -> str:
        cents = [amount for amounts in groups for amount in amounts]
        return f"  {label:42}{len(cents):7}{sum(cents) / 100:15,.2f} EUR"

    facts = {
        site: [[invoice["cents"] for invoice in invoices] for invoices in entries.values()]
        for site, entries in records.facts.items()
    }
    letters = Counter((letter.queue, letter.reason) for entries in records.dead.values() for letter in entries)
    good = [order for order in orders if order.kind is OrderKind.GOOD]
    return "\n".join(
        [
            "The records",
            format_row("orders", ([order.cents] for order in orders)),
            format_row("orders that can be done", ([order.cents] for order in good)),
            format_row("charges at the bank", records.charges.values()),
            format_row("charges in the shop", ([cents] for cents in records.noted.values())),
            format_row("invoices and facts at the shop", facts["shop"]),
            format_row("facts at headquarters", facts["headquarters"]),
            format_row("entries in the ledger", records.ledger.values()),
            *(f"  {f'dead letters of {queue}, {reason}':42}{count:7}" for (queue, reason), count in letters.items()),
            "",
            *(f"  WRONG  {wrong}" for wrong in verdict.problems),
            "The records balance." if verdict.ok else f"The records do NOT balance: {len(verdict.problems)} wrong.",
        ]
    )
