"""Verdict for brokers: journals, effects, dead letters and the list of faults held against each other.

No broker keeps a ledger for us, so the question to each second run of a transaction is whether something had
been done that explains it: to the worker that had it first, to the broker, or to the one who sent it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet, Life
from tests.chaos.journal import read
from tests.chaos.mix import Order
from tests.chaos.verdict import KNOWN, Verdict, named

#: Settlements after which a transaction comes back by itself.
COMEBACKS = ("Later", "Release")
#: Seconds between the moment of something and its line in a journal, on a machine that is busy.
SLACK = 1.0
#: Seconds after a cut until what was under way arrives: packets are repeated at intervals that double.
REPEATED = 10.0


@dataclass
class Claim:
    """A delivery that a worker was handed, and what became of it as far as the worker knows."""

    name: str
    id: str
    who: str
    at: float
    deliveries: int
    kind: str | None = None
    result: str | None = None
    settled_at: float = float("inf")

    @property
    def comes_back(self) -> bool:
        return self.kind in COMEBACKS


@dataclass
class Run:
    """A handler that ran, from when to when."""

    id: str
    key: str | None
    who: str
    claim: Claim
    began: float
    ended: float


@dataclass
class Evidence:
    """All that is known at the end."""

    fleet: Fleet
    orders: list[Order]
    faults: list[Fault]
    confirmed: set[str]
    #: Sent again because nobody had confirmed them.
    repeated: set[str]
    effects: list[str]
    #: Transaction id, reason, deliveries, payload or its bytes.
    dead: list[tuple[str, str, int, Any]]
    max_deliveries: int
    #: Whether a settlement is one step of the broker, and answered.
    exact: bool
    claims: dict[str, Claim] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        for life in self.fleet.lives:
            path = self.fleet.journal(life)
            self._read(life, read(path) if path.exists() else [])
        self.faults = self.faults + [
            Fault(life.how, life.who, life.ended, life.ended)
            for life in self.fleet.lives
            if life.how not in KNOWN and life.ended
        ]

    def _read(self, life: Life, lines: list[list[Any]]) -> None:
        over = life.ended or float("inf")
        running: dict[int, Run] = {}
        for at, what, *words in lines:
            if what == "claim":
                name, transaction, deliveries = words
                self.claims[name] = Claim(name, transaction, life.who, at, deliveries)
            elif what == "start":
                number, transaction, claim, key = words
                running[number] = Run(transaction, key, life.who, self.claims[claim], at, over)
                self.runs.append(running[number])
            elif what == "end":
                running.pop(words[0]).ended = at
            elif what == "settle" and words[0] in self.claims:
                claim = self.claims[words[0]]
                # One that failed is tried again; the last word counts.
                claim.kind, claim.result, claim.settled_at = words[1], words[2], words[3]

    def cause(self, claim: Claim, until: float) -> str | None:
        """What happened to the holder of *claim*, or to all, while it had it; None if nothing did.

        From shortly before: a claim is noted when it arrives, and one that was under way when its worker
        was stopped or cut off arrives when that is over, with its time half gone or gone.
        """
        found = [
            fault
            for fault in self.faults
            if fault.who in (None, claim.who)
            and fault.ended >= claim.at - (REPEATED if fault.kind == "cut" else SLACK)
            and fault.began <= until + SLACK
        ]
        return str(max(found, key=lambda fault: (fault.who is not None, fault.ended - fault.began))) if found else None

    def doubled(self, name: str, until: float) -> str | None:
        """What may have put a second copy of *name* into the broker; None if nothing did.

        Where putting off is two steps, publishing anew and acking the old one, a fault between the two leaves both.
        """
        if self.exact:
            return None
        earlier = (claim for claim in self.claims.values() if claim.id == name and claim.comes_back)
        return next(
            (cause for claim in earlier if claim.at < until and (cause := self.cause(claim, claim.settled_at))), None
        )


def judge(evidence: Evidence) -> Verdict:
    verdict = Verdict()
    _ends(verdict, evidence)
    _again(verdict, evidence)
    _keys(verdict, evidence)
    _acks(verdict, evidence)
    _lives(verdict, evidence)
    verdict.counts |= {"runs": len(evidence.runs), "claims": len(evidence.claims)}
    return verdict


# -- every id ends, none is lost -------------------------------------------------------------------


def _ends(verdict: Verdict, evidence: Evidence) -> None:
    orders = {order.id: order for order in evidence.orders}
    effects, started = Counter(evidence.effects), {run.id for run in evidence.runs}
    dead = _buried(verdict, evidence, orders)
    for name in orders.keys() - evidence.confirmed:
        verdict.wrong("never confirmed", name)
    for name in evidence.confirmed - effects.keys() - dead.keys():
        verdict.wrong("confirmed and lost", name)
    for name in effects.keys() - orders.keys():
        verdict.wrong("sent by nobody", name)
    for name, count in effects.items():
        if count > 1:
            verdict.wrong("effect doubled", f"{name}: {count} times")
        if name not in started:
            verdict.wrong("effect without a start", name)
        if dead[name] and name in orders and orders[name].dies:
            verdict.wrong("done although it had to die", name)
    verdict.counts |= {
        "confirmed": len(evidence.confirmed),
        "sent again": len(evidence.repeated),
        "effects": len(evidence.effects),
        "doubled": sum(count > 1 for count in effects.values()),
        "kinds": dict(Counter(order.kind for order in evidence.orders)),
    }


def buried(name: str, body: Any, orders: Container[str]) -> str:
    """Which order a dead letter is of: one that could not be read has its id only in its body."""
    return name if name in orders else named(body if isinstance(body, bytes) else str(body).encode())


def _buried(verdict: Verdict, evidence: Evidence, orders: dict[str, Order]) -> Counter[str]:
    """The dead letters by id; each must be one that had to die, or one that every delivery was taken from."""
    dead: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    exhausted: list[str] = []
    claims: dict[str, list[Claim]] = defaultdict(list)
    for claim in evidence.claims.values():
        claims[claim.id].append(claim)
    for name, reason, deliveries, body in evidence.dead:
        found = buried(name, body, orders)
        dead[found] += 1
        reasons[reason] += 1
        order = orders.get(found)
        due = None if order is None else {"poison": "max_deliveries", "undecodable": "undecodable"}.get(order.kind)
        if due is None and reason == "max_deliveries" and _worn(evidence, claims[found]):
            exhausted.append(found)
        elif due != reason:
            verdict.wrong("dead without being due", f"{found}: {reason} after {deliveries} deliveries")
        elif dead[found] > 1 and found not in evidence.repeated:
            cause = any(evidence.cause(claim, claim.settled_at) for claim in claims[found])
            verdict.wrong("dead twice", found) if not cause else None
    for name, order in orders.items():
        if order.dies and not dead[name]:
            verdict.wrong("alive although it had to die", name)
    verdict.counts |= {"dead": dict(sorted(reasons.items())), "worn out": exhausted}
    return +dead


def _worn(evidence: Evidence, claims: list[Claim]) -> bool:
    """Whether something was done to every worker that had it, except those that only buried it.

    Their order is that of the deliveries: a claim that arrived late was noted late. Deliveries that no worker noted
    were taken from one that was struck before it could: a broker that pushes counts them too.
    """
    claims = sorted(claims, key=lambda claim: (claim.deliveries, claim.at))
    buriers = [claim for claim in claims if claim.kind == "DeadLetter"]
    claims = [claim for claim in claims if claim.kind != "DeadLetter"] + buriers[-1:]
    lasted = [later.at for later in claims[1:]]
    return all(
        # One that was done was worn out beside that only if there were two of it.
        evidence.doubled(claim.id, claims[-1].at)
        if claim.kind == "Ack" and claim.result == "settled"
        else claim.comes_back or evidence.cause(claim, until)
        for claim, until in zip(claims, lasted, strict=False)
    )


# -- every second run has a cause ------------------------------------------------------------------


def _again(verdict: Verdict, evidence: Evidence) -> None:
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in evidence.runs:
        groups[run.id].append(run)
    again: Counter[str] = Counter()
    for name, group in groups.items():
        group.sort(key=lambda run: run.began)
        for index, first in enumerate(group):
            for second in group[index + 1 :]:
                overlap = second.began < first.ended
                if first.claim is second.claim:
                    if overlap:
                        verdict.wrong("two attempts at once", f"{name}: {first.who}")
                elif overlap:
                    _overlap(verdict, evidence, name, first, second)
                elif second is group[index + 1]:
                    again[_reason(verdict, evidence, first, second)] += 1
    verdict.counts |= {"overlaps": len(verdict.overlaps), "runs again": dict(again)}


def _overlap(verdict: Verdict, evidence: Evidence, name: str, first: Run, second: Run) -> None:
    words = f"{name}: {first.who} and then {second.who}"
    if first.who == second.who:
        verdict.wrong("overlap within a process", words)
        return
    cause = _why(evidence, first, second)
    if cause is None:
        verdict.wrong("overlap without a cause", f"{words} ({first.claim}, {second.claim})")
    verdict.causes[(cause or "none").partition(" ")[0]] += 1
    verdict.overlaps.append(f"{words}: {cause}")


def _reason(verdict: Verdict, evidence: Evidence, first: Run, second: Run) -> str:
    """Why a transaction whose handler had ended was run once more."""
    if first.claim.comes_back:
        return "came back"
    cause = _why(evidence, first, second)
    if cause is None:
        words = f"{first.id}: {first.who} and then {second.who} ({first.claim}, {second.claim})"
        verdict.wrong("run again without a cause", words)
    return (cause or "none").partition(" ")[0]


def _why(evidence: Evidence, first: Run, second: Run) -> str | None:
    if first.id in evidence.repeated:
        return "sent again"
    # Whoever began first: what counts is who had it first, and a claim that arrived late is older than its note.
    old, new = sorted((first.claim, second.claim), key=lambda claim: claim.at)
    return evidence.cause(old, new.at) or evidence.cause(new, new.at) or evidence.doubled(first.id, new.at)


def _keys(verdict: Verdict, evidence: Evidence) -> None:
    """Of one key, one at a time within a process: more than that no broker here promises."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in evidence.runs:
        if run.key is not None:
            groups[run.who, run.key].append(run)
    for (who, key), group in groups.items():
        group.sort(key=lambda run: run.began)
        for first, second in itertools.pairwise(group):
            if second.began < first.ended:
                verdict.wrong("two of a key at once", f"{key} in {who}: {first.id} and {second.id}")


def _acks(verdict: Verdict, evidence: Evidence) -> None:
    """Of the workers that had one transaction, one settled it; the others are told that they lost it."""
    acked: dict[str, list[Claim]] = defaultdict(list)
    results: Counter[str] = Counter()
    for claim in evidence.claims.values():
        if claim.kind is None:
            continue
        results[f"{claim.kind} {claim.result}"] += 1
        if claim.kind == "Ack" and claim.result == "settled":
            acked[claim.id].append(claim)
    twice = 0
    for name, claims in acked.items():
        claims.sort(key=lambda claim: claim.settled_at)
        for first, second in itertools.pairwise(claims):
            twice += 1
            # Not answered: the first was written to a line that was dead already.
            causes = (
                () if evidence.exact else (evidence.cause(first, second.settled_at), evidence.doubled(name, second.at))
            )
            excused = name in evidence.repeated or (not evidence.exact and any(causes))
            if not excused:
                verdict.wrong("acked twice", f"{name}: {first} and {second}")
    verdict.counts |= {"settlements": dict(sorted(results.items())), "acked twice": twice}


def _lives(verdict: Verdict, evidence: Evidence) -> None:
    lives = evidence.fleet.lives
    for life in lives:
        if life.how not in (*KNOWN, "poisoned", "no server at its start"):
            verdict.wrong("a worker ended by itself", f"{life.who} {life.how}: {evidence.fleet.said(life)[-300:]}")
    verdict.counts["lives"] = dict(Counter(life.how for life in lives))
