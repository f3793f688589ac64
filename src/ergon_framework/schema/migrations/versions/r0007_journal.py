"""The journal: how each stay of a transaction with a worker ended, for those who switch it on."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLES = """
-- Written in groups, read by id, and thrown away by age. No payload and no result; errors as logs have them.
create table ergon.journal (
    at timestamptz not null,
    transaction_id text collate "C" not null,
    task text not null,
    queue text not null,
    correlation text,
    tenant text,
    outcome text not null,
    category text,
    code text,
    reason text,
    error text,
    -- Those of earlier deliveries included.
    attempts integer not null,
    -- How long its steps took here, waits included.
    seconds double precision not null,
    -- The last attempts of this stay that failed: step, number, category, code, error, moment and delay of each.
    tries jsonb,
    -- Who wrote it: host and process.
    worker text not null
);
create index journal_transaction on ergon.journal (transaction_id);
-- Rows come nearly in the order of their time, so that a range of blocks has all of an hour; it costs little to keep.
create index journal_at on ergon.journal using brin (at);
"""


def upgrade() -> None:
    """Make the table; nothing that was there is touched."""
    op.execute(TABLES)


def downgrade() -> None:
    """Take it away again, with what is in it."""
    op.execute("drop table ergon.journal")
