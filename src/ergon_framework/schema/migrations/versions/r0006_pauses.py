"""Pauses: what the whole fleet is told not to fetch for, and who of the fleet has heard it."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLES = """
-- One row while it lasts. A name means every task and every queue that is called so.
create table ergon.pause (
    name text collate "C" primary key check (length(name) between 1 and 200),
    by text not null,
    because text not null default '',
    at timestamptz not null default now()
);

-- One row for each loop of a worker that watches, written anew by its own watcher; what is old belongs to nobody.
create table ergon.pause_watcher (
    id text collate "C" primary key,
    task text not null,
    queue text not null,
    host text not null,
    pid integer not null,
    -- The pause that it obeys; null while it fetches.
    obeys text,
    -- Transactions that it has in hand.
    in_hand integer not null default 0,
    at timestamptz not null default now()
);
create index pause_watcher_at on ergon.pause_watcher (at);
"""

#: Told in the database transaction that changed it: whoever listens looks at what was committed.
TELL_PAUSE = """
create function ergon.tell_pause() returns trigger language plpgsql as $$
begin
    perform pg_notify('ergon_pause', '');
    return null;
end $$;
create trigger tell_pause after insert or update or delete on ergon.pause
    for each statement execute function ergon.tell_pause();
"""


def upgrade() -> None:
    """Make the tables; nothing that was there is touched."""
    op.execute(TABLES)
    op.execute(TELL_PAUSE)


def downgrade() -> None:
    """Take them away again, with what is in them."""
    op.execute("drop table ergon.pause_watcher")
    op.execute("drop table ergon.pause")
    op.execute("drop function ergon.tell_pause")
