"""Verdict: compares journals, ledger and the list of faults; every mismatch is a finding."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet, ProcessRecord
from tests.chaos.journal import read_journal
from tests.chaos.ledger import Claim, Ledger
from tests.chaos.mix import Order

#: How many findings of a kind are printed.
MAX_SHOWN_FINDINGS = 20
#: Ends of processes that are already recorded as faults, or are none.
KNOWN_EXITS = ("killed", "in good order")
_ID_PATTERN = re.compile(rb"[a-z]+-[0-9]+")


@dataclass
class HandlerRun:
    """One handler run: its worker, its claim, its start and end."""

    id: str
    key: str | None
    who: str
    claim: Claim
    started_at: float
    ended_at: float


@dataclass
class SettlementResult:
    """The result of a settlement as the worker received it."""

    who: str
    claim: Claim
    kind: str
    result: str


@dataclass
class Verdict:
    """Counters and findings."""

    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, Any] = field(default_factory=dict)
    overlaps: list[str] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)

    def add_finding(self, kind: str, details: str) -> None:
        self.findings[kind].append(details)


def iter_runs(record: ProcessRecord, lines: list[list[Any]]) -> Iterator[HandlerRun]:
    """Yield the runs of a process; an unfinished run ends with its process."""
    process_end = record.ended_at or float("inf")
    running: dict[int, HandlerRun] = {}
    for timestamp, event, *values in lines:
        if event == "start":
            number, name, claim, key = values
            message, worker, token = map(int, claim.split("-"))
            running[number] = HandlerRun(name, key, record.who, (message, worker, token), timestamp, process_end)
        elif event == "end":
            run = running.pop(values[0])
            run.ended_at = timestamp
            yield run
    yield from running.values()


def iter_settlements(record: ProcessRecord, lines: list[list[Any]]) -> Iterator[SettlementResult]:
    for _, event, *values in lines:
        if event == "settle":
            message, worker, token, kind, result, _ = values
            yield SettlementResult(record.who, (message, worker, token), kind, result)


def evaluate(
    ledger: Ledger,
    fleet: Fleet,
    orders: list[Order],
    *,
    confirmed: set[str],
    faults: list[Fault],
    lease: float,
    max_deliveries: int,
) -> Verdict:
    verdict = Verdict()
    journals = {
        record.who: read_journal(fleet.journal(record)) for record in fleet.records if fleet.journal(record).exists()
    }
    runs = [run for record in fleet.records for run in iter_runs(record, journals.get(record.who, []))]
    settlements = [
        settlement for record in fleet.records for settlement in iter_settlements(record, journals.get(record.who, []))
    ]
    causes = Causes(ledger, fleet.records, faults, lease)
    worn_out = {name for name, count in _count_faulted_claims(ledger, causes).items() if count >= max_deliveries}
    _check_ends(verdict, ledger, orders, confirmed, worn_out)
    _check_effects(verdict, ledger, runs)
    _check_overlaps(verdict, ledger, runs, causes)
    _check_claims(verdict, ledger, causes)
    _check_settlements(verdict, ledger, settlements)
    _check_exits(verdict, fleet)
    verdict.counts["runs"] = len(runs)
    return verdict


# -- every id ends, none is lost -------------------------------------------------------------------


def _count_faulted_claims(ledger: Ledger, causes: Causes) -> Counter[str]:
    """Count per id the claims that were taken from a worker after a fault."""
    return Counter(
        ledger.sent[claim[0]]
        for claim, step in ledger.claim_ends.items()
        if step.kind == "taken" and causes.find_cause(claim[1]) is not None
    )


def _check_ends(verdict: Verdict, ledger: Ledger, orders: list[Order], confirmed: set[str], worn_out: set[str]) -> None:
    by_id = {order.id: order for order in orders}
    sent = Counter(ledger.sent.values())
    effects = Counter(ledger.effects)
    dead = _count_dead_letters(verdict, ledger, by_id, worn_out)
    for name in confirmed - sent.keys():
        verdict.add_finding("confirmed and lost", name)
    for name, count in sent.items():
        if count > 1:
            verdict.add_finding("sent twice", name)
    for name in sent.keys() - by_id.keys():
        verdict.add_finding("sent without an order", name)
    remaining = {ledger.sent[message] for message in ledger.remaining}
    for name in remaining:
        verdict.add_finding("never ended", name)
    for name in by_id.keys() - sent.keys():
        verdict.add_finding("never sent", name)
    for name in sent.keys() - effects.keys() - dead.keys() - remaining:
        verdict.add_finding("lost", name)
    for name, count in (effects + dead).items():
        if effects[name] > 1:
            verdict.add_finding("effect doubled", f"{name}: {effects[name]} times")
        # A worn-out transaction may have been finished by its last holder; the inbox knows it.
        elif count > 1 and name not in worn_out:
            verdict.add_finding("ended twice", f"{name}: {effects[name]} times done, {dead[name]} times dead")
    verdict.counts |= {
        "sent": len(sent),
        "confirmed": len(confirmed),
        "effects": len(ledger.effects),
        "doubled": sum(count > 1 for count in effects.values()),
        "kinds": dict(Counter(order.kind for order in orders)),
    }


def _count_dead_letters(verdict: Verdict, ledger: Ledger, by_id: dict[str, Order], worn_out: set[str]) -> Counter[str]:
    """Count dead letters by id; each must be expected, with the expected reason."""
    dead: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    exhausted: list[str] = []
    for name, reason, deliveries, body in ledger.dead:
        order_id = name if name in by_id else find_id(body)
        dead[order_id] += 1
        reasons[reason] += 1
        order = by_id.get(order_id)
        expected_reason = (
            None if order is None else {"poison": "max_deliveries", "undecodable": "undecodable"}.get(order.kind)
        )
        if expected_reason is None and order_id in worn_out and reason == "max_deliveries":
            # Every permitted delivery ended with its worker, each for a known reason.
            exhausted.append(order_id)
        elif expected_reason != reason:
            verdict.add_finding("dead without being due", f"{order_id}: {reason} after {deliveries} deliveries")
    for name, order in by_id.items():
        if order.must_be_dead_lettered and not dead[name]:
            verdict.add_finding("alive although it had to die", name)
    verdict.counts |= {"dead": dict(sorted(reasons.items())), "worn out": exhausted}
    return +dead


def find_id(body: bytes) -> str:
    match = _ID_PATTERN.search(body)
    return match[0].decode() if match else "?"


def _check_effects(verdict: Verdict, ledger: Ledger, runs: list[HandlerRun]) -> None:
    """Check that no effect lacks a start on disk."""
    started = {run.id for run in runs}
    for name in set(ledger.effects) - started:
        verdict.add_finding("effect without a start", name)


# -- who had what when -----------------------------------------------------------------------------


class Causes:
    """Why a worker instance lost its claims."""

    def __init__(self, ledger: Ledger, lives: Iterable[ProcessRecord], faults: list[Fault], lease: float) -> None:
        self._ledger = ledger
        self._lease = lease
        self._holders = {claim[1]: step.application for claim, step in ledger.claims.items()}
        self._faults = faults + [
            Fault(record.ending, record.who, record.ended_at, record.ended_at)
            for record in lives
            if record.ending not in KNOWN_EXITS and record.ended_at
        ]

    def find_cause(self, worker: int) -> str | None:
        """Return the fault during which the instance could not renew; None if there was none."""
        if worker not in self._ledger.expirations:
            return None
        alive_until, expired_at, _ = self._ledger.expirations[worker]
        who = self._holders.get(worker)
        # Its last renewal was one lease before its end; a fault kept it from renewing until it was found expired.
        faults = [
            fault
            for fault in self._faults
            if fault.who in (None, who)
            and fault.started_at <= expired_at
            and fault.ended_at >= alive_until - self._lease
        ]
        if not faults:
            return None
        return str(max(faults, key=lambda fault: (fault.who is not None, fault.ended_at - fault.started_at)))

    def get_holder(self, worker: int) -> str | None:
        return self._holders.get(worker)


def _check_overlaps(verdict: Verdict, ledger: Ledger, runs: list[HandlerRun], causes: Causes) -> None:
    """Allow two runs at once only where the first claim had been taken before the second was made."""
    groups: dict[tuple[str, str], list[HandlerRun]] = defaultdict(list)
    for run in runs:
        groups["id", run.id].append(run)
        if run.key is not None:
            groups["key", run.key].append(run)
    for (group_kind, name), group in groups.items():
        group.sort(key=lambda run: run.started_at)
        for index, first in enumerate(group):
            for second in group[index + 1 :]:
                if second.started_at >= first.ended_at:
                    continue
                if group_kind == "key" and first.id == second.id:
                    continue
                _check_overlap(verdict, ledger, causes, name, first, second)
    verdict.counts["overlaps"] = len(verdict.overlaps)


def _check_overlap(verdict: Verdict, ledger: Ledger, causes: Causes, name: str, *runs: HandlerRun) -> None:
    """Check that the holder of the older claim lost it before the newer one was made, in any order of the starts."""
    first, second = runs
    if first.who == second.who:
        verdict.add_finding("overlap within a process", f"{name}: {first.who}")
        return
    # The server knows every claim; a run without one is a finding.
    if first.claim not in ledger.claims or second.claim not in ledger.claims:
        verdict.add_finding("run without a claim", f"{name}: {first} and {second}")
        return
    old, new = sorted(runs, key=lambda run: ledger.claims[run.claim].seq)
    description = f"{name}: {old.who} and then {new.who}"
    old_end, new_claim = ledger.claim_ends.get(old.claim), ledger.claims[new.claim]
    if old_end is None or old_end.kind != "taken" or old_end.seq > new_claim.seq:
        verdict.add_finding("overlap while the claim was held", f"{description} ({old_end}, {new_claim})")
        return
    cause = causes.find_cause(old.claim[1])
    if cause is None:
        verdict.add_finding("overlap without a cause", f"{description} ({_describe_expiration(ledger, old.claim[1])})")
    verdict.causes[(cause or "none").partition(" ")[0]] += 1
    verdict.overlaps.append(f"{description}: {cause}")


def _describe_expiration(ledger: Ledger, worker: int) -> str:
    expiration = ledger.expirations.get(worker)
    return (
        "not expired"
        if expiration is None
        else f"alive until {expiration[0]:.2f}, removed at {expiration[1]:.2f} by {expiration[2]}"
    )


def _check_claims(verdict: Verdict, ledger: Ledger, causes: Causes) -> None:
    """Check that workers change only their own claims, except by taking expired ones."""
    for details in ledger.violations:
        verdict.add_finding("held by two", details)
    for message in ledger.removed:
        verdict.add_finding("removed while unclaimed", str(message))
    taken: Counter[int] = Counter()
    for claim, step in ledger.claim_ends.items():
        claimed = ledger.claims[claim]
        if step.kind == "taken":
            taken[claim[1]] += 1
        elif step.application != claimed.application:
            verdict.add_finding(
                "settled by another instance",
                f"{claim}: claimed by {claimed.application}, {step.kind} by {step.application}",
            )
    for worker, count in taken.items():
        if causes.find_cause(worker) is None:
            details = f"{causes.get_holder(worker)} lost {count} ({_describe_expiration(ledger, worker)})"
            verdict.add_finding("taken without a fault", details)
    verdict.counts |= {"claims": len(ledger.claims), "taken": sum(taken.values()), "instances removed": len(taken)}


def _check_settlements(verdict: Verdict, ledger: Ledger, settlements: list[SettlementResult]) -> None:
    """Check that a worker that lost a claim got that result, and that settled claims were settled by their worker."""
    stale = rejected = unconfirmed = 0
    for settlement in settlements:
        end = ledger.claim_ends.get(settlement.claim)
        description = f"{settlement.who} {settlement.kind} {settlement.claim}: told {settlement.result}, was {end}"
        if end is not None and end.kind == "taken":
            stale += 1
            rejected += settlement.result == "lost"
            if settlement.result == "settled":
                verdict.add_finding("stale settlement accepted", description)
        elif settlement.result == "settled" and (end is None or end.application != settlement.who):
            verdict.add_finding("told settled, and was not", description)
        elif settlement.result == "lost":
            if end is None:
                verdict.add_finding("refused while it was held", description)
            unconfirmed += 1
    verdict.counts |= {"settlements": len(settlements), "stale": stale, "stale refused": rejected}
    verdict.counts["settled unheard and told lost"] = unconfirmed


def _check_exits(verdict: Verdict, fleet: Fleet) -> None:
    for record in fleet.records:
        if record.ending not in (*KNOWN_EXITS, "poisoned", "no server at its start"):
            verdict.add_finding(
                "a worker ended by itself", f"{record.who} {record.ending}: {fleet.read_stderr(record)[-300:]}"
            )
    verdict.counts["lives"] = dict(Counter(record.ending for record in fleet.records))
