"""Books: what each side has written down about the orders, and whether that fits together."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.facts.model import Side
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from stage.customers import Customers, Kind, Order
from stage.faults import Fault
from stage.sites import PAIR, Sites

#: Why an order of each kind is a dead letter, and what its message says.
REASONS = {
    Kind.DECLINED: ("orders", "declined", "declined"),
    Kind.UNDECODABLE: ("orders", "undecodable", "JSON"),
    Kind.UNBILLABLE: ("invoices", "executor_error", "no tax rate for XX"),
}


@dataclass
class Books:
    """Everything that was written down, by order."""

    #: Cents of each charge at the bank.
    charges: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    #: Cents of each charge that the shop knows of.
    noted: dict[str, int] = field(default_factory=dict)
    #: Invoices that facts name, by the store that has them.
    facts: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    ledger: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    dead: dict[str, list[DeadLetterRecord]] = field(default_factory=lambda: defaultdict(list))


def read(sites: Sites) -> Books:
    """All books, when everything is at rest."""
    books = Books()
    for line in sites.charges.read_text(encoding="utf-8").splitlines():
        charge = json.loads(line)
        books.charges[charge["order"]].append(charge["cents"])
    with psycopg.connect(sites.dsn("shop")) as connection:
        books.noted = dict(connection.execute("select order_id, cents from charge").fetchall())
    with psycopg.connect(sites.dsn("headquarters")) as connection:
        for order, cents in connection.execute("select order_id, cents from ledger"):
            books.ledger[order].append(cents)
    for site, side in (("shop", Side.INNER), ("headquarters", Side.OUTER)):
        with PostgresBoundary(sites.dsn(site), side=side, contents=FileContents(sites.contents[site])) as boundary:
            books.facts[site] = _invoices(boundary)
    for queue in (RabbitMQQueue("orders", url=sites.rabbitmq.url), PostgresQueue("invoices", dsn=sites.dsn("shop"))):
        for letter in _dead(queue):
            books.dead[_order_of(letter)].append(letter)
        queue.close()
    return books


def _invoices(boundary: PostgresBoundary) -> dict[str, list[dict[str, Any]]]:
    """The invoice of every fact, as its artifact has it."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    after = None
    while facts := boundary.fetch_facts("books", PAIR, 500, after=after):
        for stored in facts:
            named = stored.fact.artifact
            assert named is not None, f"{stored.fact.subject} names no invoice"  # noqa: S101 - the judge's own
            invoice = json.loads(b"".join(boundary.get_object(named.bucket, named.key, zone=PAIR.from_zone)))
            found[stored.fact.subject.removeprefix("order:")].append(invoice)
        after = facts[-1].cursor
    return found


def _dead(queue: Connector) -> Iterable[DeadLetterRecord]:
    after = None
    while letters := queue.list_dead(DeadLetterQuery(), after=after, limit=500):
        yield from letters
        after = letters[-1].place


def _order_of(letter: DeadLetterRecord) -> str:
    """Whose it is; of one that could not be read, what is left of its text says so."""
    told = letter.envelope.id if letter.raw is None else letter.raw.decode(errors="replace")
    found = re.search(r"order-\d+", told)
    return found[0] if found else told


@dataclass
class Verdict:
    """Whether the books balance, and where not."""

    counts: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.wrongs

    def check(self, order: str, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            self.wrongs.append(f"{order}: {what}: {found!r}, not {wanted!r}")


def judge(customers: Customers, books: Books, faults: Sequence[Fault]) -> Verdict:
    """Every order has one charge, one invoice, one fact and one entry, or one dead letter that says why."""
    orders = customers.placed
    verdict = Verdict(Counter(order.kind.value for order in orders))
    for order in orders:
        charged = [order.cents] if order.kind in {Kind.GOOD, Kind.UNBILLABLE} else []
        done = [order.cents] if order.kind is Kind.GOOD else []
        verdict.check(order.id, "charges at the bank", books.charges.get(order.id, []), charged)
        noted = books.noted.get(order.id)
        verdict.check(order.id, "charges in the shop", [] if noted is None else [noted], charged)
        for site in ("shop", "headquarters"):
            invoices = [(made["order"], made["cents"]) for made in books.facts[site].get(order.id, [])]
            verdict.check(order.id, f"facts at {site}", invoices, [(order.id, cents) for cents in done])
        verdict.check(order.id, "entries in the ledger", books.ledger.get(order.id, []), done)
        letters = sorted(books.dead.get(order.id, []), key=lambda letter: letter.at)
        if order.kind is not Kind.GOOD:
            _judge_dead(verdict, order, letters, crashes=bool(faults))
            excused = customers.sent[order.id] > 1 or _has_cause(customers.began[order.id], letters, faults)
            _judge_copies(verdict, order, letters, excused=excused)
        elif letters:
            # Not lost, but not done either, and nothing was wrong with it.
            verdict.counts["put aside"] += 1
            verdict.wrongs.append(f"{order.id}: put aside: {_told(letters)}")
    known = {order.id for order in orders}
    for name, book in _named(books).items():
        for stranger in set(book) - known:
            verdict.wrongs.append(f"{stranger}: in {name}, and nobody ordered it")
    return verdict


def _named(books: Books) -> dict[str, Iterable[str]]:
    stores = {f"facts at {site}": facts for site, facts in books.facts.items()}
    return {"charges": books.charges, "the shop": books.noted, "ledger": books.ledger, "dead": books.dead, **stores}


def _judge_dead(verdict: Verdict, order: Order, letters: list[DeadLetterRecord], *, crashes: bool) -> None:
    queue, reason, words = REASONS[order.kind]
    if not letters:
        verdict.wrongs.append(f"{order.id}: no dead letter")
    for letter in letters:
        said = letter.failure.error_message if letter.failure else ""
        # The last of several tries may have met a killed executor in place of the order's own fault.
        died = crashes and queue == "invoices" and bool(said)
        if letter.queue != queue or not (died or (letter.reason == reason and words in said)):
            verdict.wrongs.append(
                f"{order.id}: a dead letter is not of {queue}, {reason}, {words!r}: {_told([letter])}"
            )


def _has_cause(began: float, letters: list[DeadLetterRecord], faults: Sequence[Fault]) -> bool:
    """Whether, while the order was under way, something befell those who put orders aside, or the broker."""
    last = letters[-1].at if letters else 0.0
    return any(fault.who in {"charge", "rabbitmq"} and fault.began <= last and fault.ended >= began for fault in faults)


def _judge_copies(verdict: Verdict, order: Order, letters: list[DeadLetterRecord], *, excused: bool) -> None:
    """RabbitMQ keeps a dead letter before the order is acked, so that a crash may leave both; PostgreSQL does not."""
    copies = max(0, len(letters) - 1)
    verdict.counts["copies of dead letters"] += copies
    if copies and not (excused and all(letter.queue == "orders" for letter in letters)):
        verdict.wrongs.append(f"{order.id}: {len(letters)} dead letters: {_told(letters)}")


def _told(letters: list[DeadLetterRecord]) -> str:
    return "; ".join(
        f"{letter.queue}, {letter.reason}, {letter.deliveries} deliveries, "
        f"{letter.failure.error_message if letter.failure else 'no failure'}"
        for letter in letters
    )


def printed(orders: list[Order], books: Books, verdict: Verdict) -> str:
    """The books as people read them."""

    def row(what: str, found: Iterable[Iterable[int]]) -> str:
        cents = [amount for amounts in found for amount in amounts]
        return f"  {what:42}{len(cents):7}{sum(cents) / 100:15,.2f} EUR"

    facts = {
        site: [[made["cents"] for made in invoices] for invoices in found.values()]
        for site, found in books.facts.items()
    }
    letters = Counter((letter.queue, letter.reason) for found in books.dead.values() for letter in found)
    good = [order for order in orders if order.kind is Kind.GOOD]
    return "\n".join(
        [
            "The books",
            row("orders", ([order.cents] for order in orders)),
            row("orders that can be done", ([order.cents] for order in good)),
            row("charges at the bank", books.charges.values()),
            row("charges in the shop", ([cents] for cents in books.noted.values())),
            row("invoices and facts at the shop", facts["shop"]),
            row("facts at headquarters", facts["headquarters"]),
            row("entries in the ledger", books.ledger.values()),
            *(f"  {f'dead letters of {queue}, {reason}':42}{count:7}" for (queue, reason), count in letters.items()),
            "",
            *(f"  WRONG  {wrong}" for wrong in verdict.wrongs),
            "The books balance." if verdict.ok else f"The books do NOT balance: {len(verdict.wrongs)} wrong.",
        ]
    )
