"""Sides of facts: what consumers keep beside a log of facts, one side for each reader of a pair of zones."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TABLES = """
-- Who of a reader's name has the facts in hand, and which. Its dead letters are in ergon.dead_letter, under *queue*.
create table ergon.fact_side (
    id integer generated always as identity primary key,
    from_zone text collate "C" not null,
    to_zone text collate "C" not null,
    reader text collate "C" not null,
    queue integer not null,
    -- Raised by whoever takes over; what an earlier one writes is refused.
    generation bigint not null default 0,
    -- Of the facts that were read last.
    epoch text,
    -- Offsets that the owner has handed out, by its latest account. Whoever takes over counts a delivery for each.
    turn bigint not null default 0,
    held bigint[] not null default '{}',
    -- How many replays there were: an owner who knows fewer looks for more.
    replays bigint not null default 0,
    unique (from_zone, to_zone, reader)
) with (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

-- Facts about which there is more to know than the cursor says: delivered before, due later, or settled beyond it.
create table ergon.fact_aside (
    side integer not null,
    fact_offset bigint not null,
    -- Those that ended with their owner. The one that is going on is not among them.
    deliveries integer not null default 0,
    settled boolean not null default false,
    -- Null if it does not come from here.
    due_at timestamptz,
    -- The number of the replay that brought it, if one did.
    replay bigint,
    envelope text,
    body bytea,
    primary key (side, fact_offset)
) with (autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0.02);
create index fact_aside_settled on ergon.fact_aside (side, fact_offset) where settled;
create index fact_aside_replay on ergon.fact_aside (side, replay) where replay is not null;
"""


def upgrade() -> None:
    """Make the tables; nothing that was there is touched."""
    op.execute(TABLES)


def downgrade() -> None:
    """Take them away again, with what is in them; dead letters stay where they are."""
    op.execute("drop table ergon.fact_aside, ergon.fact_side")
