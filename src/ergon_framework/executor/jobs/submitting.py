"""Submit jobs together with their messages, on the framework's connections and on the caller's."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ergon_framework.connectors.postgres.callers import ParamStyle, SqlTemplate, render
from ergon_framework.executor.jobs.model import JobConflict, JobState, Submitted
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, PreparedTextQuery, Query

# Casts are written out, because some libraries parse a colon as the beginning of a name.
SUBMIT: Final = SqlTemplate("""
select cast(json_build_array(id, created, same, state, job_function) as text) as job from ergon.submit_job(
    cast({queue} as text), cast({id} as text), cast({function} as text), cast(cast({headers} as text) as jsonb),
    cast({body} as bytea), cast({digest} as bytea), cast({delay} as double precision), cast({priority} as smallint),
    cast({tenant} as text), cast({correlation} as text), cast({unique_key} as text), cast({max_attempts} as integer),
    cast({timeout} as double precision), cast({retention} as double precision)
)
""")

#: The same for many jobs. JSON, because the driver's own conversions would take longer than all the rest.
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
#: Maximum number of jobs in one statement, and approximate maximum of the bytes of their bodies.
_MAX_BATCH_JOBS: Final = 1000
_MAX_BATCH_BYTES: Final = 16 * 1024 * 1024


def submit(parameters: Mapping[str, Any]) -> Operation[Submitted]:
    """Submit the job with these ``job_parameters``; it may be one statement of a larger database transaction."""
    rows = yield Query(render(SUBMIT, parameters, ParamStyle.PSYCOPG).sql, parameters)
    return read_submission(parameters, rows)


def submit_many(jobs: Sequence[Mapping[str, Any]]) -> Operation[list[Submitted]]:
    """Submit all of them, in order, or none: JobConflict for the first whose id or key is taken."""
    submissions: list[Submitted] = []
    yield BEGIN
    for batch in _split_batches(jobs):
        ((answer,),) = yield PreparedTextQuery(_SUBMIT_MANY, (_format_batch(batch),))
        try:
            submissions += [_to_submission(job, row) for job, row in zip(batch, json.loads(answer), strict=True)]
        except JobConflict:
            yield ROLLBACK
            raise
    yield COMMIT
    return submissions


def _split_batches(jobs: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield batches of *jobs* that fit into one statement."""
    start = size = 0
    for end, job in enumerate(jobs):
        length = len(job["body"])
        if end > start and (end - start >= _MAX_BATCH_JOBS or size + length > _MAX_BATCH_BYTES):
            yield jobs[start:end]
            start, size = end, 0
        size += length
    if jobs:
        yield jobs[start:]


def _format_batch(batch: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(
        [
            {**job, "place": index, "body": _to_base64(job["body"]), "digest": _to_base64(job["digest"])}
            for index, job in enumerate(batch)
        ]
    )


def _to_base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def read_submission(values: Mapping[str, Any], rows: Sequence[Any]) -> Submitted:
    """Return the database's answer for *values*; raise JobConflict if the existing job is a different one."""
    (row,) = rows
    # One text, because a caller's connection may return a row as a tuple, a mapping, or its only value.
    answer = row if isinstance(row, str) else next(iter(row.values())) if isinstance(row, Mapping) else row[0]
    return _to_submission(values, json.loads(answer))


def _to_submission(values: Mapping[str, Any], answer: Sequence[Any]) -> Submitted:
    existing_id, created, same, state, function = answer
    if not same:
        key = values["unique_key"]
        conflict = f"the unique key {key!r}" if key is not None and existing_id != values["id"] else "this id"
        raise JobConflict(
            f"{conflict} is taken: the job {existing_id!r} ({function}, {state}) has another function or other "
            f"arguments than the job {values['id']!r} ({values['function']}); give this one "
            "another key, or look at the first"
        )
    return Submitted(existing_id, created, JobState(state))
