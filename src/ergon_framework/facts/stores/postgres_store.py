"""Store: one database as this process knows it: its lines, what a commit is worth there, and which epoch it is in.

A restored backup is noticed by whoever comes next. The row of the store says for which cluster, database, timeline and
database transaction it was written, and a difference begins a new epoch. A folder that was copied back as it was
differs in none of these; a process that has seen a higher offset than the store has now knows it all the same.
"""

from __future__ import annotations

import logging
import os
from typing import Final, NamedTuple

from ergon_framework.connectors.postgres.durability import Durability
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.facts import observe
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Pair, Side
from ergon_framework.facts.stores import postgres_statements as statements
from ergon_framework.facts.stores.postgres_fitness import examined
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation, Query

_log = logging.getLogger(__name__)

#: The revision that brought the last of what is called here.
_NEEDED: Final = "0013"
#: How often a store may turn out to be another one in the middle of a call.
TRIES: Final = 5


class Known(NamedTuple):
    """The store as it was recognised last."""

    #: Changes with everything by which it could have become another one.
    token: str
    epoch: str


class Store:
    """A database that ``ergon db upgrade`` has prepared; called from all threads and event loops of this process."""

    def __init__(self, dsn: str, *, side: Side, accept_loss: bool) -> None:
        #: A forked child has connections of its own.
        self.owner = os.getpid()
        self.lines = Lines(dsn, other=FactError)
        self.side = side
        self.accept_loss = accept_loss
        #: None before anybody has looked.
        self.durability: Durability | None = None
        self.known: Known | None = None
        #: The highest offset of each pair that was seen in this epoch.
        self._seen: dict[Pair, int] = {}

    def opened(self) -> Operation[Known]:
        """The store as it is known."""
        return self.known or (yield from self.recognised())

    def recognised(self) -> Operation[Known]:
        """Look at its tables and settings, and which store it is: another than its row says begins a new epoch."""
        self.durability = yield from examined(
            "facts", needed=_NEEDED, accept_loss=self.accept_loss, known=self.durability
        )
        if (yield Query(statements.IN_RECOVERY)) == [(True,)]:
            raise ConnectionLost("the database is a standby, which takes no facts; name the primary")
        for _ in range(TRIES):
            found = yield Query(statements.RECOGNISE)
            if not found:
                yield from self._begin(None, "the first", "")
                continue
            token, epoch, side, same = found[0]
            if side != self.side:
                raise ConfigurationError(
                    f"the store in this database is on the {side} side, and was opened as {self.side.value}; "
                    f"give side=Side.{side.upper()}"
                )
            if same:
                return self._take(Known(token, epoch))
            yield from self._begin(epoch, "a backup was put back, or another server took over", "")
        raise ConnectionLost("the store changes its epoch again and again; look at ergon.fact_epochs")

    def _take(self, known: Known) -> Known:
        before, self.known = self.known, known
        if before is not None and before.epoch != known.epoch:
            self._seen = {}
            observe.epoch_changed(known.epoch)
        return known

    def _begin(self, was: str | None, why: str, by: str) -> Operation[None]:
        yield Query(statements.BEGIN_EPOCH, {"was": was, "side": self.side.value, "why": why, "by": by})

    def renewed(self, known: Known, *, why: str, by: str = "") -> Operation[Known]:
        """A new epoch, unless somebody else has begun one since *known*."""
        yield from self._begin(known.epoch, why, by)
        return (yield from self.recognised())

    # -- witnesses ------------------------------------------------------------------------------------

    def seen(self, pair: Pair) -> int:
        """The highest offset of *pair* that anybody here has seen."""
        return self._seen.get(pair, 0)

    def see(self, pair: Pair, offset: int) -> None:
        """An offset was given, or read."""
        if offset > self._seen.get(pair, 0):
            self._seen[pair] = offset

    def went_back(self, known: Known) -> Operation[Known]:
        """The store is older than what was seen of it."""
        return (yield from self.renewed(known, why="an older state was put back: it had given higher offsets"))
