"""Audit: what operators have done, by whom and why; rows are added and never changed."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

TABLE = """
create table ergon.audit (
    id bigint generated always as identity primary key,
    at timestamptz not null default now(),
    actor text not null,
    action text not null,
    -- The queue, task or entry.
    name text not null,
    -- Ids of transactions or jobs, or places of dead letters whose ids were not known.
    targets text[] not null default '{}',
    -- The filters that they were chosen by.
    selection jsonb not null default '{}',
    reason text not null default '',
    count bigint,
    -- Null before the end: what happens outside of this database is announced first.
    outcome text check (outcome in ('done', 'failed')),
    error text,
    -- Host and process.
    origin text not null default '',
    -- The row that announced it.
    intent bigint references ergon.audit (id)
);
create index audit_at on ergon.audit (at);
create index audit_intent on ergon.audit (intent) where intent is not null;
"""


def upgrade() -> None:
    """Make the table; nothing that was there is touched."""
    op.execute(TABLE)


def downgrade() -> None:
    """Take it away again, with what is in it."""
    op.execute("drop table ergon.audit")
