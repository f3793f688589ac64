"""Owners of artifacts: each name belongs to the zone that stored it, or to the zones of the store (the empty text).

Artifacts from before belong to the zones of the store, and facts that name them still do. A worker of the release
before gives no owner: it reads and writes names of the store's zones, as it did.
"""

from __future__ import annotations

from alembic import op

from ergon_framework.schema.migrations.versions import r0004_facts as before

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_BY_NAME = """
                select f.* into o from ergon.fact_objects f where f.bucket = g.bucket and f.key = g.key for key share;
"""
#: A fact that is appended here may name what the zones of the store have in common; one that arrives may not.
_BY_OWNER = """
                select f.* into o from ergon.fact_objects f
                where f.bucket = g.bucket and f.key = g.key
                    and (f.zone = coalesce(g.zone, '') or f.zone = '' and not forwarding)
                order by f.zone desc limit 1 for key share;
"""
_COLUMNS = "bucket text, key text, content text, length bigint,"

APPEND = before.APPEND.replace(_BY_NAME, _BY_OWNER).replace(_COLUMNS, f"{_COLUMNS} zone text,")


def _replace(function: str) -> None:
    op.execute(function.replace("create function", "create or replace function", 1))


def upgrade() -> None:
    """Give every name an owner, and let each owner have every name."""
    op.execute("alter table ergon.fact_objects add column zone text collate \"C\" not null default ''")
    op.execute("create unique index fact_objects_name on ergon.fact_objects (bucket, key, zone)")
    op.execute("alter table ergon.fact_objects drop constraint fact_objects_bucket_key_key")
    _replace(APPEND)


def downgrade() -> None:
    """Put one namespace back; it fails if two owners have one name."""
    op.execute("alter table ergon.fact_objects add constraint fact_objects_bucket_key_key unique (bucket, key)")
    op.execute("drop index ergon.fact_objects_name")
    op.execute("alter table ergon.fact_objects drop column zone")
    _replace(before.APPEND)
