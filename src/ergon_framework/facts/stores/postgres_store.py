"""DatabaseSession: one database as this process knows it: its connections, durability, identity and epoch.

The first call after a restore detects the restored backup. The row of the store records the cluster, database, timeline
and database transaction that it was written for, and a difference begins a new epoch. A data folder that was copied
back unchanged differs in none of these; a process that has seen a higher offset than the store has now detects it.
"""

from __future__ import annotations

import logging
import os
from typing import Final, NamedTuple

from ergon_framework.connectors.postgres.durability import PostgresDurability
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts import observe
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import BoundarySide, ZonePair
from ergon_framework.facts.stores import postgres_statements as statements
from ergon_framework.facts.stores.postgres_fitness import check_database
from ergon_framework.schema.lines import ConnectionPool
from ergon_framework.schema.operation import Operation, Query

_log = logging.getLogger(__name__)

#: The latest revision that the statements of this package need.
_REQUIRED_REVISION: Final = "0013"
#: How often a call is retried when the store changes its identity meanwhile.
MAX_ATTEMPTS: Final = 5


class StoreIdentity(NamedTuple):
    """The identity of the store at its last verification."""

    #: Changes whenever the store may have become a different one.
    token: str
    epoch: str


class DatabaseSession:
    """A database that ``ergon db upgrade`` has prepared; safe from all threads and event loops of this process."""

    def __init__(self, dsn: str, *, side: BoundarySide, accept_loss: bool) -> None:
        #: The process that created it; a forked child has its own connections.
        self.owner_pid = os.getpid()
        self.pool = ConnectionPool(dsn, error_type=FactError)
        self.side = side
        self.accept_loss = accept_loss
        #: None before the first check.
        self.durability: PostgresDurability | None = None
        self.identity: StoreIdentity | None = None
        #: The highest known offset of each pair in this epoch.
        self._highest_offsets: dict[ZonePair, int] = {}

    def ensure_open(self) -> Operation[StoreIdentity]:
        """Return the known identity, or verify the store first."""
        return self.identity or (yield from self.verify())

    def verify(self) -> Operation[StoreIdentity]:
        """Check schema, settings and identity of the store; begin a new epoch if the identity differs from its row."""
        self.durability = yield from check_database(
            "facts", required=_REQUIRED_REVISION, accept_loss=self.accept_loss, known=self.durability
        )
        if (yield Query(statements.IN_RECOVERY)) == [(True,)]:
            raise ConnectionLostError("the database is a standby, which takes no facts; name the primary")
        for _ in range(MAX_ATTEMPTS):
            rows = yield Query(statements.VERIFY_STORE)
            if not rows:
                yield from self._insert_epoch(None, "the first", "")
                continue
            token, epoch, side, is_same = rows[0]
            if side != self.side:
                raise ConfigurationError(
                    f"the store in this database is on the {side} side, and was opened as {self.side.value}; "
                    f"give side=BoundarySide.{side.upper()}"
                )
            if is_same:
                return self._set_identity(StoreIdentity(token, epoch))
            yield from self._insert_epoch(epoch, "a backup was put back, or another server took over", "")
        raise ConnectionLostError("the store changes its epoch again and again; look at ergon.fact_epochs")

    def _set_identity(self, identity: StoreIdentity) -> StoreIdentity:
        previous, self.identity = self.identity, identity
        if previous is not None and previous.epoch != identity.epoch:
            self._highest_offsets = {}
            observe.log_epoch_changed(identity.epoch)
        return identity

    def _insert_epoch(self, previous_epoch: str | None, why: str, by: str) -> Operation[None]:
        yield Query(statements.BEGIN_EPOCH, {"was": previous_epoch, "side": self.side.value, "why": why, "by": by})

    def begin_epoch(self, identity: StoreIdentity, *, why: str, by: str = "") -> Operation[StoreIdentity]:
        """Begin a new epoch, unless another process has begun one since *identity* was read."""
        yield from self._insert_epoch(identity.epoch, why, by)
        return (yield from self.verify())

    # -- highest offsets ------------------------------------------------------------------------------

    def highest_offset(self, pair: ZonePair) -> int:
        """Return the highest offset of *pair* that this process has seen."""
        return self._highest_offsets.get(pair, 0)

    def record_offset(self, pair: ZonePair, offset: int) -> None:
        """Record an offset that was assigned or read."""
        if offset > self._highest_offsets.get(pair, 0):
            self._highest_offsets[pair] = offset

    def has_rolled_back(self, identity: StoreIdentity) -> Operation[StoreIdentity]:
        """Begin a new epoch, because the store is older than what this process has seen of it."""
        return (yield from self.begin_epoch(identity, why="an older state was put back: it had given higher offsets"))
