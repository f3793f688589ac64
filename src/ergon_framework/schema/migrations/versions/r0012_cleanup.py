"""Clean-up: indexes by which rows are deleted in the order of their age; they replace BRIN indexes that no plan used.

Of a database with tables, ``schema.migrate`` has made these changes before, one by one and without blocking writers;
what is done by then is left alone here.
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

#: Name, and table with columns.
INDEXES = {
    "inbox_age": "ergon.inbox (queue, at)",
    "dead_letter_age": "ergon.dead_letter (queue, at)",
    "journal_age": "ergon.journal (at)",
    "fact_ids_age": "ergon.fact_ids (log, kept_at)",
}
#: Sessions of the framework turn bitmap scans off, and nothing else can use a BRIN index.
UNUSED_INDEXES = {
    "inbox_at": "ergon.inbox using brin (at)",
    "journal_at": "ergon.journal using brin (at)",
    "fact_ids_kept": "ergon.fact_ids using brin (kept_at)",
}


def upgrade() -> None:
    """Create the indexes that are missing, and drop those that they replace."""
    for name, columns in INDEXES.items():
        # Not "if not exists", which waits for every writer of the table before it looks.
        op.execute(
            f"do $$ begin if to_regclass('ergon.{name}') is null then create index {name} on {columns}; end if; end $$"
        )
    for name in UNUSED_INDEXES:
        op.execute(f"drop index if exists ergon.{name}")


def downgrade() -> None:
    """Put the replaced indexes back."""
    for name, columns in UNUSED_INDEXES.items():
        op.execute(f"create index {name} on {columns}")
    for name in INDEXES:
        op.execute(f"drop index ergon.{name}")
