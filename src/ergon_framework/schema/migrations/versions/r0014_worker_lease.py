"""Worker leases: the length of a worker's lease beside its end.

If the clock of the server is set back, the end of a dead worker's lease is further away than the lease is long. Other
workers recognise that by the length, and move the end. A trigger writes it, so that workers of the release before are
covered too.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, and the trigger that fills it whenever a lease is renewed."""
    op.execute("alter table ergon.worker add column lease interval")
    op.execute(
        "create function ergon.note_lease() returns trigger language plpgsql as "
        "$$ begin new.lease := new.alive_until - now(); return new; end $$"
    )
    op.execute(
        "create trigger note_lease before insert or update of alive_until on ergon.worker "
        "for each row execute function ergon.note_lease()"
    )


def downgrade() -> None:
    """Remove both."""
    op.execute("drop trigger note_lease on ergon.worker")
    op.execute("drop function ergon.note_lease()")
    op.execute("alter table ergon.worker drop column lease")
