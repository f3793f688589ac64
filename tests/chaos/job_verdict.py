"""The verdict on jobs: compares rows, what triggers saw of them, and what handlers recorded."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos.job_mix import JobOrder
from tests.chaos.journal import read_journal

TERMINAL_STATES = ("succeeded", "failed", "cancelled", "killed")
#: The server itself sees who writes an outcome: each one, whatever changes after it, and which claim began the
#: attempt that has ended.
LEDGER_SCHEMA = """
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
#: Unfinished work: jobs without an outcome, and messages.
UNFINISHED_QUERY = """
select (select count(*) from ergon.job where state in ('pending', 'running')),
    (select count(*) from ergon.ready) + (select count(*) from ergon.content)
"""


@dataclass
class JobVerdict:
    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, Any] = field(default_factory=dict)

    def add_finding(self, kind: str, details: str) -> None:
        self.findings[kind].append(details)


def create_ledger(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(LEDGER_SCHEMA)


def count_unfinished(dsn: str) -> tuple[int, int]:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=2) as connection:
        row = connection.execute(UNFINISHED_QUERY).fetchone()
    assert row is not None
    return row[0], row[1]


def evaluate(dsn: str, orders: list[JobOrder], journals: Path) -> JobVerdict:
    verdict = JobVerdict()
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = {
            row[0]: row[1:]
            for row in connection.execute("select id, state, attempts, result, error_code from ergon.job")
        }
        end_rows = connection.execute("select id, state, attempts, result from chaos.ended").fetchall()
        change_rows = connection.execute("select id, was, becomes from chaos.changed").fetchall()
        dead_letters = Counter(row[0] for row in connection.execute("select transaction_id from ergon.dead_letter"))
        ended_claims = set(connection.execute("select id, worker, token from chaos.attempt"))
        ((uncounted,),) = connection.execute("select count(*) from chaos.uncounted").fetchall()
    starts, ends = _read_journals(journals)
    for order in orders:
        _check_job(verdict, order, rows.get(order.id), starts=starts[order.id], dead_letters=dead_letters[order.id])
    _check_ends(verdict, rows, end_rows, change_rows)
    for name in set(rows) - {order.id for order in orders} | set(starts) - set(rows):
        verdict.add_finding("without an order", name)
    rejected_count, accepted = _find_stale(journals, ended_claims)
    for details in accepted:
        verdict.add_finding("a stale outcome was taken", details)
    killers = [order for order in orders if order.mode == "kill"]
    verdict.counts |= {
        "states": dict(Counter(state for state, *_ in rows.values())),
        "lost": len(verdict.findings.get("lost", ())),
        "without an end": len(verdict.findings.get("without an end", ())),
        "ended more than once": len(verdict.findings.get("ended more than once", ())),
        "changed after the end": len(change_rows),
        "results of another attempt": len(verdict.findings.get("the result of another attempt", ())),
        "attempts": sum(attempts for _, attempts, *_ in rows.values()),
        "attempts that handlers saw": sum(len(seen) for seen in starts.values()),
        "attempts released uncounted": uncounted,
        "outcomes after the next attempt had begun": _count_overtaken(starts, ends),
        "stale outcomes": rejected_count + len(accepted),
        "stale outcomes refused": rejected_count,
        "killers": len(killers),
        "killers dead after exactly their attempts": sum(
            rows.get(order.id, (None, None))[:2] == ("failed", order.max_attempts) and dead_letters[order.id] == 1
            for order in killers
        ),
        "ways to die": dict(Counter(code for state, _, _, code in rows.values() if state == "failed")),
    }
    return verdict


def _check_job(
    verdict: JobVerdict, order: JobOrder, row: Any, *, starts: dict[int, list[float]], dead_letters: int
) -> None:
    add_finding, name = verdict.add_finding, f"{order.id} ({order.kind}, {order.mode} until {order.last_bad_attempt})"
    if row is None:
        add_finding("lost", name)
        return
    state, attempts, result, error_code = row
    if state not in TERMINAL_STATES:
        add_finding("without an end", f"{name}: {state}")
        return
    if state != ("succeeded" if order.must_succeed else "failed"):
        add_finding("ended otherwise than it had to", f"{name}: {state}, {error_code}, {attempts} attempts")
    if not order.must_succeed and attempts != order.max_attempts:
        add_finding("given up too early or too late", f"{name}: {attempts} of {order.max_attempts} attempts")
    if attempts > order.max_attempts:
        add_finding("too many attempts", f"{name}: {attempts}")
    if max(starts, default=0) > attempts or len(starts) > attempts:
        add_finding("handlers saw more attempts than were counted", f"{name}: {sorted(starts)}, counted {attempts}")
    for attempt, times in starts.items():
        if len(times) > 1:
            add_finding("one attempt was made twice", f"{name}: {attempt}")
    if state == "succeeded":
        payload = json.loads(result)
        if payload != {"job": order.id, "attempt": attempts, "language": order.kind}:
            add_finding("the result of another attempt", f"{name}: {payload}, attempt {attempts}")
    if dead_letters != (state == "failed"):
        add_finding("dead letters", f"{name}: {state} with {dead_letters}")


def _check_ends(verdict: JobVerdict, rows: dict[str, Any], end_rows: list[Any], change_rows: list[Any]) -> None:
    times = Counter(name for name, *_ in end_rows)
    for name, count in times.items():
        if count > 1:
            verdict.add_finding("ended more than once", f"{name}: {count}")
    for name, old_state, new_state in change_rows:
        verdict.add_finding("changed after the end", f"{name}: {old_state} -> {new_state}")
    for name, state, attempts, result in end_rows:
        if name in rows and (state, attempts, result) != rows[name][:3]:
            verdict.add_finding("another end than the one that was written", name)


def _read_journals(folder: Path) -> tuple[dict[str, dict[int, list[float]]], dict[str, dict[int, float]]]:
    """Return when each attempt of a job started and ended, as handlers recorded it."""
    starts: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    ends: dict[str, dict[int, float]] = defaultdict(dict)
    for path in folder.glob("*.journal"):
        for timestamp, event, job, attempt in read_journal(path):
            if event == "start":
                starts[job][attempt].append(timestamp)
            else:
                ends[job][attempt] = timestamp
    return starts, ends


def _count_overtaken(starts: dict[str, dict[int, list[float]]], ends: dict[str, dict[int, float]]) -> int:
    """Count the outcomes that came after a later attempt had begun: each of these is stale if reported."""
    overtaken = 0
    for job, job_ends in ends.items():
        for attempt, end in job_ends.items():
            later = [start for other, times in starts[job].items() if other > attempt for start in times]
            overtaken += bool(later) and min(later) < end
    return overtaken


def _find_stale(folder: Path, ended_claims: set[tuple[str, int, int]]) -> tuple[int, list[str]]:
    """Count the rejected outcomes; list those accepted although the attempt that ended belonged to another claim."""
    rejected_count, accepted = 0, []
    for path in folder.glob("*.ends"):
        for job, worker, token, outcome, state in read_journal(path):
            if state is None:
                rejected_count += outcome != "ReleaseAttempt"
            elif (job, worker, token) not in ended_claims:
                accepted.append(f"{job}: {outcome} of claim {worker}/{token}")
    return rejected_count, accepted
