"""Lookups of facts: whether a batch brings an id that is known is asked id by id, whatever the statistics say."""

from __future__ import annotations

from alembic import op

from ergon_framework.schema.migrations.versions import r0005_fact_columns as before

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

#: Of a table that nobody has analyzed the planner expects a handful of rows in each zone: it looked at every id of the
#: zone and compared it with the batch, so that each batch took longer than the one before, for as long as that plan
#: was kept.
_SCAN_CLAUSE = """
        perform 1 from ergon.fact_ids f
        where f.from_zone = zones[n] and f.message_id = any (id_of[begins[n] : ends[n]]);
"""
#: A limit is a fence: what is behind it is done for each id, and all that it can go by is the key.
_LOOKUP_CLAUSE = """
        perform 1 from generate_series(begins[n], ends[n]) as i, lateral (
            select 1 from ergon.fact_ids f where f.from_zone = zones[n] and f.message_id = id_of[i] limit 1
        ) as known limit 1;
"""

APPEND = before.APPEND.replace(_SCAN_CLAUSE, _LOOKUP_CLAUSE)


def _replace(function: str) -> None:
    op.execute(function.replace("create function", "create or replace function", 1))


def upgrade() -> None:
    """Put the function in its own place; whoever is in it goes on with the one before."""
    _replace(APPEND)


def downgrade() -> None:
    """Put the one before back."""
    _replace(before.APPEND)
