"""Verdict for brokers: compares journals, effects, dead letters and the list of faults.

No broker keeps a ledger, so each second run of a transaction needs a fault that explains it: of the worker that had
the transaction first, of the broker, or of the sender.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet, ProcessRecord
from tests.chaos.journal import read_journal
from tests.chaos.mix import Order
from tests.chaos.verdict import KNOWN_EXITS, Verdict, find_id

#: Settlements after which the broker redelivers a transaction.
REDELIVERED_SETTLEMENTS = ("Defer", "Release")
#: Seconds between an event and its line in a journal, on a busy machine.
CLOCK_SLACK_SECONDS = 1.0
#: Seconds after a cut until packets in flight arrive: TCP retransmits at intervals that double.
RETRANSMIT_SECONDS = 10.0


@dataclass
class BrokerClaim:
    """A delivery that a worker received, and its settlement as far as the worker knows."""

    name: str
    id: str
    who: str
    claimed_at: float
    deliveries: int
    kind: str | None = None
    result: str | None = None
    settled_at: float = float("inf")

    @property
    def is_redelivered(self) -> bool:
        return self.kind in REDELIVERED_SETTLEMENTS


@dataclass
class BrokerHandlerRun:
    """One handler run, with start and end."""

    id: str
    key: str | None
    who: str
    claim: BrokerClaim
    started_at: float
    ended_at: float


@dataclass
class Evidence:
    """All evidence at the end of a run."""

    fleet: Fleet
    orders: list[Order]
    faults: list[Fault]
    confirmed: set[str]
    #: Sent again because the first send was not confirmed.
    resent: set[str]
    effects: list[str]
    #: Transaction id, reason, deliveries, payload or its bytes.
    dead: list[tuple[str, str, int, Any]]
    max_deliveries: int
    #: Whether a settlement is one confirmed operation of the broker.
    confirms_settlements: bool
    claims: dict[str, BrokerClaim] = field(default_factory=dict)
    runs: list[BrokerHandlerRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        for record in self.fleet.records:
            path = self.fleet.journal(record)
            self._read_journal(record, read_journal(path) if path.exists() else [])
        self.faults = self.faults + [
            Fault(record.ending, record.who, record.ended_at, record.ended_at)
            for record in self.fleet.records
            if record.ending not in KNOWN_EXITS and record.ended_at
        ]

    def _read_journal(self, record: ProcessRecord, lines: list[list[Any]]) -> None:
        process_end = record.ended_at or float("inf")
        running: dict[int, BrokerHandlerRun] = {}
        for timestamp, event, *values in lines:
            if event == "claim":
                name, transaction, deliveries = values
                self.claims[name] = BrokerClaim(name, transaction, record.who, timestamp, deliveries)
            elif event == "start":
                number, transaction, claim, key = values
                running[number] = BrokerHandlerRun(
                    transaction, key, record.who, self.claims[claim], timestamp, process_end
                )
                self.runs.append(running[number])
            elif event == "end":
                running.pop(values[0]).ended_at = timestamp
            elif event == "settle" and values[0] in self.claims:
                claim = self.claims[values[0]]
                # A failed settlement is retried; the last entry counts.
                claim.kind, claim.result, claim.settled_at = values[1], values[2], values[3]

    def find_cause(self, claim: BrokerClaim, end: float) -> str | None:
        """Return the fault of the holder of *claim*, or of all, while it had the claim; None if there was none.

        The interval begins shortly before: a claim is recorded when it arrives, and one that was in flight while its
        worker was stopped or disconnected arrives after that, with its time partly or fully used.
        """
        faults = [
            fault
            for fault in self.faults
            if fault.who in (None, claim.who)
            and fault.ended_at
            >= claim.claimed_at - (RETRANSMIT_SECONDS if fault.kind == "cut" else CLOCK_SLACK_SECONDS)
            and fault.started_at <= end + CLOCK_SLACK_SECONDS
        ]
        return (
            str(max(faults, key=lambda fault: (fault.who is not None, fault.ended_at - fault.started_at)))
            if faults
            else None
        )

    def find_duplicate_cause(self, name: str, end: float) -> str | None:
        """Return the fault that may have put a second copy of *name* into the broker; None if there was none.

        Where a deferral has two steps, publishing again and acking the old message, a fault between them leaves both. A
        worker that was killed there has recorded no settlement; it had the claim until the next one at the latest.
        """
        if self.confirms_settlements:
            return None
        claims = sorted((claim for claim in self.claims.values() if claim.id == name), key=lambda each: each.claimed_at)
        for claim, later in itertools.pairwise(claims):
            if claim.claimed_at >= end or not (claim.is_redelivered or claim.kind is None):
                continue
            if cause := self.find_cause(claim, claim.settled_at if claim.is_redelivered else later.claimed_at):
                return cause
        return None


def evaluate(evidence: Evidence) -> Verdict:
    verdict = Verdict()
    _check_ends(verdict, evidence)
    _check_repeated_runs(verdict, evidence)
    _check_keys(verdict, evidence)
    _check_acks(verdict, evidence)
    _check_exits(verdict, evidence)
    verdict.counts |= {"runs": len(evidence.runs), "claims": len(evidence.claims)}
    return verdict


# -- every id ends, none is lost -------------------------------------------------------------------


def _check_ends(verdict: Verdict, evidence: Evidence) -> None:
    orders = {order.id: order for order in evidence.orders}
    effects, started_ids = Counter(evidence.effects), {run.id for run in evidence.runs}
    dead = _count_dead_letters(verdict, evidence, orders)
    for name in orders.keys() - evidence.confirmed:
        verdict.add_finding("never confirmed", name)
    for name in evidence.confirmed - effects.keys() - dead.keys():
        verdict.add_finding("confirmed and lost", name)
    for name in effects.keys() - orders.keys():
        verdict.add_finding("sent without an order", name)
    for name, count in effects.items():
        if count > 1:
            verdict.add_finding("effect doubled", f"{name}: {count} times")
        if name not in started_ids:
            verdict.add_finding("effect without a start", name)
        if dead[name] and name in orders and orders[name].must_be_dead_lettered:
            verdict.add_finding("done although it had to die", name)
    verdict.counts |= {
        "confirmed": len(evidence.confirmed),
        "sent again": len(evidence.resent),
        "effects": len(evidence.effects),
        "doubled": sum(count > 1 for count in effects.values()),
        "kinds": dict(Counter(order.kind for order in evidence.orders)),
    }


def find_order_id(name: str, body: Any, orders: Container[str]) -> str:
    """Return the order of a dead letter: an unreadable message has its id only in its body."""
    return name if name in orders else find_id(body if isinstance(body, bytes) else str(body).encode())


def _count_dead_letters(verdict: Verdict, evidence: Evidence, orders: dict[str, Order]) -> Counter[str]:
    """Count dead letters by id; each one must be expected, or every one of its deliveries met a fault."""
    dead: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    exhausted: list[str] = []
    claims: dict[str, list[BrokerClaim]] = defaultdict(list)
    for claim in evidence.claims.values():
        claims[claim.id].append(claim)
    for name, reason, deliveries, body in evidence.dead:
        order_id = find_order_id(name, body, orders)
        dead[order_id] += 1
        reasons[reason] += 1
        order = orders.get(order_id)
        expected_reason = (
            None if order is None else {"poison": "max_deliveries", "undecodable": "undecodable"}.get(order.kind)
        )
        # Faults can also exhaust the deliveries of a message that no worker can decode.
        if expected_reason != reason == "max_deliveries" and _is_worn_out(evidence, claims[name]):
            exhausted.append(order_id)
        elif expected_reason != reason:
            verdict.add_finding("dead without being due", f"{order_id}: {reason} after {deliveries} deliveries")
        elif dead[order_id] > 1 and order_id not in evidence.resent:
            has_cause = any(evidence.find_cause(claim, claim.settled_at) for claim in claims[order_id])
            verdict.add_finding("dead twice", order_id) if not has_cause else None
    for name, order in orders.items():
        if order.must_be_dead_lettered and not dead[name]:
            verdict.add_finding("alive although it had to die", name)
    verdict.counts |= {"dead": dict(sorted(reasons.items())), "worn out": exhausted}
    return +dead


def _is_worn_out(evidence: Evidence, claims: list[BrokerClaim]) -> bool:
    """Tell whether a fault hit every worker that had it, except those that only dead-lettered it; False without claims.

    Claims are ordered by delivery number, because a claim that arrived late was recorded late. Deliveries without a
    claim were taken from a worker that failed before it recorded them: a broker that pushes counts them too.
    """
    claims = sorted(claims, key=lambda claim: (claim.deliveries, claim.claimed_at))
    dead_lettering_claims = [claim for claim in claims if claim.kind == "DeadLetter"]
    claims = [claim for claim in claims if claim.kind != "DeadLetter"] + dead_lettering_claims[-1:]
    claim_ends = [later.claimed_at for later in claims[1:]]
    return bool(claims) and all(
        # A handled transaction can also be worn out only if there were two copies of it.
        evidence.find_duplicate_cause(claim.id, claims[-1].claimed_at)
        if claim.kind == "Ack" and claim.result == "settled"
        else claim.is_redelivered or evidence.find_cause(claim, end)
        for claim, end in zip(claims, claim_ends, strict=False)
    )


# -- every second run has a cause ------------------------------------------------------------------


def _check_repeated_runs(verdict: Verdict, evidence: Evidence) -> None:
    groups: dict[str, list[BrokerHandlerRun]] = defaultdict(list)
    for run in evidence.runs:
        groups[run.id].append(run)
    reasons: Counter[str] = Counter()
    for name, group in groups.items():
        group.sort(key=lambda run: run.started_at)
        for index, first in enumerate(group):
            for second in group[index + 1 :]:
                overlap = second.started_at < first.ended_at
                if first.claim is second.claim:
                    if overlap:
                        verdict.add_finding("two attempts at once", f"{name}: {first.who}")
                elif overlap:
                    _record_overlap(verdict, evidence, name, first, second)
                elif second is group[index + 1]:
                    reasons[_find_reason(verdict, evidence, first, second)] += 1
    verdict.counts |= {"overlaps": len(verdict.overlaps), "runs again": dict(reasons)}


def _record_overlap(
    verdict: Verdict, evidence: Evidence, name: str, first: BrokerHandlerRun, second: BrokerHandlerRun
) -> None:
    description = f"{name}: {first.who} and then {second.who}"
    if first.who == second.who:
        verdict.add_finding("overlap within a process", description)
        return
    cause = _find_cause(evidence, first, second)
    if cause is None:
        verdict.add_finding("overlap without a cause", f"{description} ({first.claim}, {second.claim})")
    verdict.causes[(cause or "none").partition(" ")[0]] += 1
    verdict.overlaps.append(f"{description}: {cause}")


def _find_reason(verdict: Verdict, evidence: Evidence, first: BrokerHandlerRun, second: BrokerHandlerRun) -> str:
    """Return why a transaction was run again after its handler had ended."""
    if first.claim.is_redelivered:
        return "came back"
    cause = _find_cause(evidence, first, second)
    if cause is None:
        description = f"{first.id}: {first.who} and then {second.who} ({first.claim}, {second.claim})"
        verdict.add_finding("run again without a cause", description)
    return (cause or "none").partition(" ")[0]


def _find_cause(evidence: Evidence, first: BrokerHandlerRun, second: BrokerHandlerRun) -> str | None:
    if first.id in evidence.resent:
        return "sent again"
    # The order of the claims counts, not of the runs: a claim that arrived late is older than its record.
    old, new = sorted((first.claim, second.claim), key=lambda claim: claim.claimed_at)
    return (
        evidence.find_cause(old, new.claimed_at)
        or evidence.find_cause(new, new.claimed_at)
        or evidence.find_duplicate_cause(first.id, new.claimed_at)
    )


def _check_keys(verdict: Verdict, evidence: Evidence) -> None:
    """Check that runs of one key do not overlap within a process: no broker here promises more."""
    groups: dict[tuple[str, str], list[BrokerHandlerRun]] = defaultdict(list)
    for run in evidence.runs:
        if run.key is not None:
            groups[run.who, run.key].append(run)
    for (who, key), group in groups.items():
        group.sort(key=lambda run: run.started_at)
        for first, second in itertools.pairwise(group):
            if second.started_at < first.ended_at:
                verdict.add_finding("two of a key at once", f"{key} in {who}: {first.id} and {second.id}")


def _check_acks(verdict: Verdict, evidence: Evidence) -> None:
    """Check that one worker settled each transaction; the others must have lost their claim."""
    acked: dict[str, list[BrokerClaim]] = defaultdict(list)
    results: Counter[str] = Counter()
    for claim in evidence.claims.values():
        if claim.kind is None:
            continue
        results[f"{claim.kind} {claim.result}"] += 1
        if claim.kind == "Ack" and claim.result == "settled":
            acked[claim.id].append(claim)
    repeated_acks = 0
    for name, claims in acked.items():
        claims.sort(key=lambda claim: claim.settled_at)
        for first, second in itertools.pairwise(claims):
            repeated_acks += 1
            # Unconfirmed: the first ack was written to a connection that was already lost.
            causes = (
                ()
                if evidence.confirms_settlements
                else (
                    evidence.find_cause(first, second.settled_at),
                    evidence.find_duplicate_cause(name, second.claimed_at),
                )
            )
            is_excused = name in evidence.resent or (not evidence.confirms_settlements and any(causes))
            if not is_excused:
                verdict.add_finding("acked twice", f"{name}: {first} and {second}")
    verdict.counts |= {"settlements": dict(sorted(results.items())), "acked twice": repeated_acks}


def _check_exits(verdict: Verdict, evidence: Evidence) -> None:
    records = evidence.fleet.records
    for record in records:
        if record.ending not in (*KNOWN_EXITS, "poisoned", "no server at its start"):
            verdict.add_finding(
                "a worker ended by itself", f"{record.who} {record.ending}: {evidence.fleet.read_stderr(record)[-300:]}"
            )
    verdict.counts["lives"] = dict(Counter(record.ending for record in records))
