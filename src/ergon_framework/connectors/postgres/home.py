"""Home: what all queues of one database share in this process: its lines, its instance, its doorbell."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import statements
from ergon_framework.connectors.postgres.cleanup import Cleanup
from ergon_framework.connectors.postgres.doorbell import Doorbell
from ergon_framework.connectors.postgres.durability import Durability, read_durability
from ergon_framework.connectors.postgres.tenure import Tenure
from ergon_framework.errors import ConfigurationError
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.schema.revisions import NEEDED, suffices
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)
_homes: dict[tuple[str, float, int], Home] = {}
_making = threading.Lock()

#: Seconds between two looks for what is held by nobody at all.
_STRAYS: Final = 600.0


class Home:
    """One database, as this process knows it."""

    def __init__(self, dsn: str, lease: float) -> None:
        #: A forked child is another worker instance: with its parent's number it would share its parent's claims.
        self.owner = os.getpid()
        self.lines = Lines(dsn, other=ConnectorError)
        self.tenure = Tenure(lease)
        self.doorbell = Doorbell(self.lines)
        self.cleanup = Cleanup(dsn)
        #: None before anybody has looked.
        self.durability: Durability | None = None
        #: Whether the schema has the length of each lease.
        self.has_leases = False
        #: Whether claims are bounded: the schema has the function for it.
        self.has_bounded_claims = False
        self.users = 0
        self._reaped = float("-inf")
        self._strays = time.monotonic()

    def checked(self) -> Operation[None]:
        """Once per process: is the schema there, and what is a commit worth here."""
        if self.durability is not None:
            return
        found = yield Query(statements.REVISION)
        revision = found[0][0] if found else None
        if not suffices(revision):
            raise ConfigurationError(
                f"the database is at revision {revision or 'none'}, this release needs {NEEDED}; run: ergon db upgrade"
            )
        self.has_leases = suffices(revision, statements.LEASES)
        self.has_bounded_claims = suffices(revision, statements.BOUNDED)
        self.durability = durability = yield from read_durability(self.lines.hosts)
        level = logging.INFO if durability.durable and not durability.promotion else logging.WARNING
        fields = {"durable": durability.durable, "words": durability.summary}
        logs.say(level, "postgres durability", fields, to=_log)

    def reaped(self) -> Operation[bool]:
        """Take back what dead instances hold, now and then; whether anything became ready."""
        now = time.monotonic()
        if now < self._reaped + min(self.tenure.lease / 4, 5.0):
            return False
        self._reaped = now
        found = False
        if (yield Query(statements.EXPIRED_OR_AHEAD if self.has_leases else statements.EXPIRED)):
            if self.has_leases:
                yield Query(statements.BOUND_LEASES)
            yield BEGIN
            buried = yield Query(statements.BURY_WORKERS)
            if buried:
                yield Query(statements.REAP, {"workers": [row[0] for row in buried]})
                found = True
            yield COMMIT
        if now >= self._strays + _STRAYS:
            self._strays = now
            yield Query(statements.REAP_STRAYS)
            yield Query(statements.FORGET_SLEEPERS)
        return found


def home_of(dsn: str, lease: float) -> Home:
    """The home of *dsn*, one per process however many queues live in it; give it back with ``leave``."""
    with _making:
        where = dsn, lease, os.getpid()
        home = _homes.get(where)
        if home is None:
            home = _homes[where] = Home(dsn, lease)
        home.users += 1
        return home


def leave(home: Home) -> bool:
    """One user less; True for the last one, who turns off the light."""
    with _making:
        home.users -= 1
        if home.users > 0:
            return False
        for where, known in list(_homes.items()):
            if known is home:
                del _homes[where]
        return True
