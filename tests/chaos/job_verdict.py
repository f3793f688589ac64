"""The verdict on jobs: rows, what triggers saw of them and what handlers wrote down, held against each other."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos.job_mix import Order
from tests.chaos.journal import read

TERMINAL = ("succeeded", "failed", "cancelled", "killed")
#: Who writes an end is seen by the server itself: each one, whatever is changed after it, and by which claim an attempt
#: that has ended had begun.
LEDGER = """
create schema chaos;
create table chaos.ended (id text, state text, attempts integer, result text);
create table chaos.changed (id text, was text, becomes text);
create table chaos.uncounted (id text);
create table chaos.attempt (id text, worker bigint, token bigint);
create function chaos.note() returns trigger language plpgsql as $$
begin
    if old.state in ('succeeded', 'failed', 'cancelled', 'killed') then
        if (old.state, old.attempts, old.result, old.error_code)
            is distinct from (new.state, new.attempts, new.result, new.error_code) then
            insert into chaos.changed values (old.id, old.state, new.state);
        end if;
    elsif new.state in ('succeeded', 'failed', 'cancelled', 'killed') then
        insert into chaos.ended values (new.id, new.state, new.attempts, new.result);
    end if;
    if old.state = 'running' and (old.worker, old.token) = (new.worker, new.token) then
        insert into chaos.attempt values (old.id, old.worker, old.token);
    end if;
    if new.attempts < old.attempts then
        insert into chaos.uncounted values (new.id);
    end if;
    return new;
end $$;
create trigger note before update on ergon.job for each row execute function chaos.note();
"""
#: What is still to be done: jobs without an end, and messages.
LEFT = """
select (select count(*) from ergon.job where state in ('pending', 'running')),
    (select count(*) from ergon.ready) + (select count(*) from ergon.content)
"""


@dataclass
class Verdict:
    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, Any] = field(default_factory=dict)

    def wrong(self, what: str, words: str) -> None:
        self.findings[what].append(words)


def prepare(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(LEDGER)


def left(dsn: str) -> tuple[int, int]:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=2) as connection:
        row = connection.execute(LEFT).fetchone()
    assert row is not None
    return row[0], row[1]


def judge(dsn: str, orders: list[Order], journals: Path) -> Verdict:
    verdict = Verdict()
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = {
            row[0]: row[1:]
            for row in connection.execute("select id, state, attempts, result, error_code from ergon.job")
        }
        ended = connection.execute("select id, state, attempts, result from chaos.ended").fetchall()
        changed = connection.execute("select id, was, becomes from chaos.changed").fetchall()
        letters = Counter(row[0] for row in connection.execute("select transaction_id from ergon.dead_letter"))
        begun = set(connection.execute("select id, worker, token from chaos.attempt"))
        ((uncounted,),) = connection.execute("select count(*) from chaos.uncounted").fetchall()
    starts, ends = _journals(journals)
    for order in orders:
        _judge_one(verdict, order, rows.get(order.id), starts=starts[order.id], letters=letters[order.id])
    _judge_ends(verdict, rows, ended, changed)
    for name in set(rows) - {order.id for order in orders} | set(starts) - set(rows):
        verdict.wrong("of nobody", name)
    stale, taken = _stale(journals, begun)
    for words in taken:
        verdict.wrong("a stale outcome was taken", words)
    killers = [order for order in orders if order.mode == "kill"]
    verdict.counts |= {
        "states": dict(Counter(state for state, *_ in rows.values())),
        "lost": len(verdict.findings.get("lost", ())),
        "without an end": len(verdict.findings.get("without an end", ())),
        "ended more than once": len(verdict.findings.get("ended more than once", ())),
        "changed after the end": len(changed),
        "results of another attempt": len(verdict.findings.get("the result of another attempt", ())),
        "attempts": sum(attempts for _, attempts, *_ in rows.values()),
        "attempts that handlers saw": sum(len(seen) for seen in starts.values()),
        "attempts given back": uncounted,
        "outcomes after the next attempt had begun": _overtaken(starts, ends),
        "stale outcomes": stale + len(taken),
        "stale outcomes refused": stale,
        "killers": len(killers),
        "killers dead after exactly their attempts": sum(
            rows.get(order.id, (None, None))[:2] == ("failed", order.max_attempts) and letters[order.id] == 1
            for order in killers
        ),
        "ways to die": dict(Counter(code for state, _, _, code in rows.values() if state == "failed")),
    }
    return verdict


def _judge_one(verdict: Verdict, order: Order, row: Any, *, starts: dict[int, list[float]], letters: int) -> None:
    wrong, name = verdict.wrong, f"{order.id} ({order.kind}, {order.mode} until {order.until})"
    if row is None:
        wrong("lost", name)
        return
    state, attempts, result, code = row
    if state not in TERMINAL:
        wrong("without an end", f"{name}: {state}")
        return
    if state != ("succeeded" if order.succeeds else "failed"):
        wrong("ended otherwise than it had to", f"{name}: {state}, {code}, {attempts} attempts")
    if not order.succeeds and attempts != order.max_attempts:
        wrong("given up too early or too late", f"{name}: {attempts} of {order.max_attempts} attempts")
    if attempts > order.max_attempts:
        wrong("too many attempts", f"{name}: {attempts}")
    if max(starts, default=0) > attempts or len(starts) > attempts:
        wrong("handlers saw more attempts than were counted", f"{name}: {sorted(starts)}, counted {attempts}")
    for attempt, times in starts.items():
        if len(times) > 1:
            wrong("one attempt was made twice", f"{name}: {attempt}")
    if state == "succeeded":
        told = json.loads(result)
        if told != {"job": order.id, "attempt": attempts, "language": order.kind}:
            wrong("the result of another attempt", f"{name}: {told}, attempt {attempts}")
    if letters != (state == "failed"):
        wrong("dead letters", f"{name}: {state} with {letters}")


def _judge_ends(verdict: Verdict, rows: dict[str, Any], ended: list[Any], changed: list[Any]) -> None:
    times = Counter(name for name, *_ in ended)
    for name, count in times.items():
        if count > 1:
            verdict.wrong("ended more than once", f"{name}: {count}")
    for name, was, becomes in changed:
        verdict.wrong("changed after the end", f"{name}: {was} -> {becomes}")
    for name, state, attempts, result in ended:
        if name in rows and (state, attempts, result) != rows[name][:3]:
            verdict.wrong("another end than the one that was written", name)


def _journals(folder: Path) -> tuple[dict[str, dict[int, list[float]]], dict[str, dict[int, float]]]:
    """When which attempt of each job was started, and ended, as handlers wrote it down."""
    starts: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    ends: dict[str, dict[int, float]] = defaultdict(dict)
    for path in folder.glob("*.journal"):
        for at, what, job, attempt in read(path):
            if what == "start":
                starts[job][attempt].append(at)
            else:
                ends[job][attempt] = at
    return starts, ends


def _overtaken(starts: dict[str, dict[int, list[float]]], ends: dict[str, dict[int, float]]) -> int:
    """How many outcomes came when a later attempt had begun: told, each of these is stale."""
    found = 0
    for job, ended in ends.items():
        for attempt, at in ended.items():
            later = [time for other, times in starts[job].items() if other > attempt for time in times]
            found += bool(later) and min(later) < at
    return found


def _stale(folder: Path, ended: set[tuple[str, int, int]]) -> tuple[int, list[str]]:
    """How many outcomes were refused, and those that were taken though the attempt that ended was another claim's."""
    refused, taken = 0, []
    for path in folder.glob("*.ends"):
        for job, worker, token, verdict, state in read(path):
            if state is None:
                refused += verdict != "GiveBack"
            elif (job, worker, token) not in ended:
                taken.append(f"{job}: {verdict} of claim {worker}/{token}")
    return refused, taken
