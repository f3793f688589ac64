"""Executors: which kinds of executors orchestrators serve, so that a job for any other does not wait for ever."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

TABLE = """
-- One row for each kind of executors. Every orchestrator that serves the kind renews the row while it runs.
create table ergon.executor (
    kind text collate "C" primary key,
    -- Since when orchestrators have served it without a gap.
    since timestamptz not null,
    served_at timestamptz not null
) with (fillfactor = 50);
"""


def upgrade() -> None:
    """Create the table; nothing that exists is changed."""
    op.execute(TABLE)


def downgrade() -> None:
    """Drop the table with its rows."""
    op.execute("drop table ergon.executor")
