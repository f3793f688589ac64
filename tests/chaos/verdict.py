"""Verdict: journals, ledger and list of faults held against each other; what does not agree is a finding."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet, Life
from tests.chaos.journal import read
from tests.chaos.ledger import Claim, Ledger
from tests.chaos.mix import Order

#: How many of a kind are told in full.
SHOWN = 20
#: Ends of processes that are faults of their own, or no faults at all.
KNOWN = ("killed", "in good order")
_NAME = re.compile(rb"[a-z]+-[0-9]+")


@dataclass
class Run:
    """A handler that ran: by whom, under which claim, from when to when."""

    id: str
    key: str | None
    who: str
    claim: Claim
    began: float
    ended: float


@dataclass
class Settled:
    """What a worker was told about a settlement."""

    who: str
    claim: Claim
    kind: str
    result: str


@dataclass
class Verdict:
    """What was counted, and what is wrong."""

    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, Any] = field(default_factory=dict)
    overlaps: list[str] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)

    def wrong(self, what: str, words: str) -> None:
        self.findings[what].append(words)


def runs_of(life: Life, lines: list[list[Any]]) -> Iterator[Run]:
    """What a process ran; what it did not live to end ended with it."""
    over = life.ended or float("inf")
    running: dict[int, Run] = {}
    for at, what, *words in lines:
        if what == "start":
            number, name, claim, key = words
            place, worker, token = map(int, claim.split("-"))
            running[number] = Run(name, key, life.who, (place, worker, token), at, over)
        elif what == "end":
            run = running.pop(words[0])
            run.ended = at
            yield run
    yield from running.values()


def settled_of(life: Life, lines: list[list[Any]]) -> Iterator[Settled]:
    for _, what, *words in lines:
        if what == "settle":
            place, worker, token, kind, result, _ = words
            yield Settled(life.who, (place, worker, token), kind, result)


def judge(
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
    journals = {life.who: read(fleet.journal(life)) for life in fleet.lives if fleet.journal(life).exists()}
    runs = [run for life in fleet.lives for run in runs_of(life, journals.get(life.who, []))]
    settled = [one for life in fleet.lives for one in settled_of(life, journals.get(life.who, []))]
    why = Causes(ledger, fleet.lives, faults, lease)
    worn = {name for name, count in _suffered(ledger, why).items() if count >= max_deliveries}
    _ends(verdict, ledger, orders, confirmed, worn)
    _effects(verdict, ledger, runs)
    _overlaps(verdict, ledger, runs, why)
    _claims(verdict, ledger, why)
    _settlements(verdict, ledger, settled)
    _lives(verdict, fleet)
    verdict.counts["runs"] = len(runs)
    return verdict


# -- every id ends, none is lost -------------------------------------------------------------------


def _suffered(ledger: Ledger, why: Causes) -> Counter[str]:
    """How often each id was taken from a worker that something had been done to."""
    return Counter(
        ledger.sent[claim[0]]
        for claim, step in ledger.ended.items()
        if step.what == "taken" and why.of(claim[1]) is not None
    )


def _ends(verdict: Verdict, ledger: Ledger, orders: list[Order], confirmed: set[str], worn: set[str]) -> None:
    by_id = {order.id: order for order in orders}
    sent = Counter(ledger.sent.values())
    effects = Counter(ledger.effects)
    dead = _buried(verdict, ledger, by_id, worn)
    for name in confirmed - sent.keys():
        verdict.wrong("confirmed and lost", name)
    for name, count in sent.items():
        if count > 1:
            verdict.wrong("sent twice", name)
    for name in sent.keys() - by_id.keys():
        verdict.wrong("sent by nobody", name)
    waiting = {ledger.sent[place] for place in ledger.left}
    for name in waiting:
        verdict.wrong("never ended", name)
    for name in by_id.keys() - sent.keys():
        verdict.wrong("never sent", name)
    for name in sent.keys() - effects.keys() - dead.keys() - waiting:
        verdict.wrong("lost", name)
    for name, count in (effects + dead).items():
        if effects[name] > 1:
            verdict.wrong("effect doubled", f"{name}: {effects[name]} times")
        # What was worn out may have been finished by the last one it was taken from; the inbox knows it.
        elif count > 1 and name not in worn:
            verdict.wrong("ended twice", f"{name}: {effects[name]} times done, {dead[name]} times dead")
    verdict.counts |= {
        "sent": len(sent),
        "confirmed": len(confirmed),
        "effects": len(ledger.effects),
        "doubled": sum(count > 1 for count in effects.values()),
        "kinds": dict(Counter(order.kind for order in orders)),
    }


def _buried(verdict: Verdict, ledger: Ledger, by_id: dict[str, Order], worn: set[str]) -> Counter[str]:
    """The dead letters by id; each must be one that had to die, for the reason that it had to die of."""
    dead: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    exhausted: list[str] = []
    for name, reason, deliveries, body in ledger.dead:
        found = name if name in by_id else named(body)
        dead[found] += 1
        reasons[reason] += 1
        order = by_id.get(found)
        due = None if order is None else {"poison": "max_deliveries", "undecodable": "undecodable"}.get(order.kind)
        if due is None and found in worn and reason == "max_deliveries":
            # Every delivery that it was permitted ended with its worker, each for a reason that we know.
            exhausted.append(found)
        elif due != reason:
            verdict.wrong("dead without being due", f"{found}: {reason} after {deliveries} deliveries")
    for name, order in by_id.items():
        if order.dies and not dead[name]:
            verdict.wrong("alive although it had to die", name)
    verdict.counts |= {"dead": dict(sorted(reasons.items())), "worn out": exhausted}
    return +dead


def named(body: bytes) -> str:
    found = _NAME.search(body)
    return found[0].decode() if found else "?"


def _effects(verdict: Verdict, ledger: Ledger, runs: list[Run]) -> None:
    """No effect without a start on the disk."""
    started = {run.id for run in runs}
    for name in set(ledger.effects) - started:
        verdict.wrong("effect without a start", name)


# -- who had what when -----------------------------------------------------------------------------


class Causes:
    """Why a worker instance lost what it held."""

    def __init__(self, ledger: Ledger, lives: Iterable[Life], faults: list[Fault], lease: float) -> None:
        self._ledger = ledger
        self._lease = lease
        self._holders = {claim[1]: step.by for claim, step in ledger.made.items()}
        self._faults = faults + [
            Fault(life.how, life.who, life.ended, life.ended) for life in lives if life.how not in KNOWN and life.ended
        ]

    def of(self, worker: int) -> str | None:
        """The fault during which the instance could not renew; None if there was none."""
        if worker not in self._ledger.burials:
            return None
        until, at, _ = self._ledger.burials[worker]
        who = self._holders.get(worker)
        # It was last renewed a lease before its end; from then until it was buried something kept it from that.
        found = [
            fault
            for fault in self._faults
            if fault.who in (None, who) and fault.began <= at and fault.ended >= until - self._lease
        ]
        if not found:
            return None
        return str(max(found, key=lambda fault: (fault.who is not None, fault.ended - fault.began)))

    def holder(self, worker: int) -> str | None:
        return self._holders.get(worker)


def _overlaps(verdict: Verdict, ledger: Ledger, runs: list[Run], why: Causes) -> None:
    """Two at once only where the claim of the first had been taken before the second one got its own."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups["id", run.id].append(run)
        if run.key is not None:
            groups["key", run.key].append(run)
    for (sort, name), group in groups.items():
        group.sort(key=lambda run: run.began)
        for index, first in enumerate(group):
            for second in group[index + 1 :]:
                if second.began >= first.ended:
                    continue
                if sort == "key" and first.id == second.id:
                    continue
                _overlap(verdict, ledger, why, name, first, second)
    verdict.counts["overlaps"] = len(verdict.overlaps)


def _overlap(verdict: Verdict, ledger: Ledger, why: Causes, name: str, *runs: Run) -> None:
    """Whoever has the older claim lost it before the other one got its own, whoever of them began first."""
    one, other = runs
    if one.who == other.who:
        verdict.wrong("overlap within a process", f"{name}: {one.who}")
        return
    # The server knows every claim; a run without one is a finding of its own.
    if one.claim not in ledger.made or other.claim not in ledger.made:
        verdict.wrong("run without a claim", f"{name}: {one} and {other}")
        return
    old, new = sorted(runs, key=lambda run: ledger.made[run.claim].seq)
    words = f"{name}: {old.who} and then {new.who}"
    taken, made = ledger.ended.get(old.claim), ledger.made[new.claim]
    if taken is None or taken.what != "taken" or taken.seq > made.seq:
        verdict.wrong("overlap while the claim was held", f"{words} ({taken}, {made})")
        return
    cause = why.of(old.claim[1])
    if cause is None:
        verdict.wrong("overlap without a cause", f"{words} ({_burial(ledger, old.claim[1])})")
    verdict.causes[(cause or "none").partition(" ")[0]] += 1
    verdict.overlaps.append(f"{words}: {cause}")


def _burial(ledger: Ledger, worker: int) -> str:
    found = ledger.burials.get(worker)
    return "not buried" if found is None else f"alive until {found[0]:.2f}, buried at {found[1]:.2f} by {found[2]}"


def _claims(verdict: Verdict, ledger: Ledger, why: Causes) -> None:
    """Nobody changes what another holds, except by taking what the other's time was over for."""
    for words in ledger.odd:
        verdict.wrong("held by two", words)
    for place in ledger.removed:
        verdict.wrong("removed while nobody held it", str(place))
    taken: Counter[int] = Counter()
    for claim, step in ledger.ended.items():
        made = ledger.made[claim]
        if step.what == "taken":
            taken[claim[1]] += 1
        elif step.by != made.by:
            verdict.wrong("settled by somebody else", f"{claim}: claimed by {made.by}, {step.what} by {step.by}")
    for worker, count in taken.items():
        if why.of(worker) is None:
            words = f"{why.holder(worker)} lost {count} ({_burial(ledger, worker)})"
            verdict.wrong("taken without a fault", words)
    verdict.counts |= {"claims": len(ledger.made), "taken": sum(taken.values()), "instances buried": len(taken)}


def _settlements(verdict: Verdict, ledger: Ledger, settled: list[Settled]) -> None:
    """Whoever lost a claim is told so, and whoever is told that it is settled has settled it."""
    stale = refused = unheard = 0
    for one in settled:
        end = ledger.ended.get(one.claim)
        words = f"{one.who} {one.kind} {one.claim}: told {one.result}, was {end}"
        if end is not None and end.what == "taken":
            stale += 1
            refused += one.result == "lost"
            if one.result == "settled":
                verdict.wrong("stale settlement accepted", words)
        elif one.result == "settled" and (end is None or end.by != one.who):
            verdict.wrong("told settled, and was not", words)
        elif one.result == "lost":
            if end is None:
                verdict.wrong("refused while it was held", words)
            unheard += 1
    verdict.counts |= {"settlements": len(settled), "stale": stale, "stale refused": refused}
    verdict.counts["settled unheard and told lost"] = unheard


def _lives(verdict: Verdict, fleet: Fleet) -> None:
    for life in fleet.lives:
        if life.how not in (*KNOWN, "poisoned", "no server at its start"):
            verdict.wrong("a worker ended by itself", f"{life.who} {life.how}: {fleet.said(life)[-300:]}")
    verdict.counts["lives"] = dict(Counter(life.how for life in fleet.lives))
