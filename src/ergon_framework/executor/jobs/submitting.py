"""Submitting: the statements that make jobs with their messages, for our connections and for the caller's."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ergon_framework.connectors.postgres.callers import Style, Template, rendered
from ergon_framework.executor.jobs.model import JobConflict, JobState, Submitted
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query, Text

# Casts are written out, because some libraries read a colon as the beginning of a name.
SUBMIT: Final = Template("""
select cast(json_build_array(id, created, same, state, job_function) as text) as job from ergon.submit_job(
    cast({queue} as text), cast({id} as text), cast({function} as text), cast(cast({headers} as text) as jsonb),
    cast({body} as bytea), cast({digest} as bytea), cast({delay} as double precision), cast({priority} as smallint),
    cast({tenant} as text), cast({correlation} as text), cast({unique_key} as text), cast({max_attempts} as integer),
    cast({timeout} as double precision), cast({retention} as double precision)
)
""")

#: The same for many. JSON, because the driver's own conversions would take longer than all the rest.
_SUBMIT_MANY: Final = """
select json_agg(
    json_build_array(made.id, made.created, made.same, made.state, made.job_function) order by g.place
)::text
from json_to_recordset($1::json) as g(
    place integer, queue text, id text, function text, headers text, body text, digest text, delay float8,
    priority smallint, tenant text, correlation text, unique_key text, max_attempts integer, timeout float8,
    retention float8
)
cross join lateral ergon.submit_job(
    g.queue, g.id, g.function, g.headers::jsonb, decode(g.body, 'base64'), decode(g.digest, 'base64'), g.delay,
    g.priority, g.tenant, g.correlation, g.unique_key, g.max_attempts, g.timeout, g.retention
) as made
"""
#: The most jobs in one statement, and about the most bytes of their bodies.
_MOST: Final = 1000
_MOST_BYTES: Final = 16 * 1024 * 1024


def submit(given: Mapping[str, Any]) -> Operation[Submitted]:
    """Submit the job with these ``parameters``; it may be one statement of a larger database transaction."""
    rows = yield Query(rendered(SUBMIT, given, Style.PSYCOPG).sql, given)
    return submitted(given, rows)


def submit_many(given: Sequence[Mapping[str, Any]]) -> Operation[list[Submitted]]:
    """Submit all of them, in their order, or none: JobConflict for the first that is taken."""
    made: list[Submitted] = []
    yield BEGIN
    for portion in _portions(given):
        ((answer,),) = yield Text(_SUBMIT_MANY, (_written(portion),))
        try:
            made += [_told(one, row) for one, row in zip(portion, json.loads(answer), strict=True)]
        except JobConflict:
            yield ROLLBACK
            raise
    yield COMMIT
    return made


def _portions(given: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Parts of *given* that fit into one statement."""
    start = size = 0
    for end, one in enumerate(given):
        length = len(one["body"])
        if end > start and (end - start >= _MOST or size + length > _MOST_BYTES):
            yield given[start:end]
            start, size = end, 0
        size += length
    if given:
        yield given[start:]


def _written(portion: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(
        [
            {**one, "place": place, "body": _base64(one["body"]), "digest": _base64(one["digest"])}
            for place, one in enumerate(portion)
        ]
    )


def _base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def submitted(given: Mapping[str, Any], rows: Sequence[Any]) -> Submitted:
    """What the database answered to *given*; JobConflict if the job that there is is another one."""
    (row,) = rows
    # One text, because a caller's connection may make anything of a row: a tuple, a mapping, or its only value.
    answer = row if isinstance(row, str) else next(iter(row.values())) if isinstance(row, Mapping) else row[0]
    return _told(given, json.loads(answer))


def _told(given: Mapping[str, Any], answer: Sequence[Any]) -> Submitted:
    found, created, same, state, function = answer
    if not same:
        key = given["unique_key"]
        taken = f"the unique key {key!r}" if key is not None and found != given["id"] else "this id"
        raise JobConflict(
            f"{taken} is taken: the job {found!r} ({function}, {state}) has another function or other arguments than "
            f"the job {given['id']!r} ({given['function']}); give this one another key, or look at the first"
        )
    return Submitted(found, created, JobState(state))
