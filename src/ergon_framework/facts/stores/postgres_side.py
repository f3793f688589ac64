"""PostgresFactSide: what consumers of facts keep beside them, in PostgreSQL, so that it outlives their processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Self

from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.postgres.queue import VARIABLE
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Pair
from ergon_framework.facts.side import Reading, SideCalls
from ergon_framework.facts.stores.postgres_fitness import examined
from ergon_framework.facts.stores.postgres_side_keeping import Keeping
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation

#: The revision that brought its tables.
_NEEDED: Final = "0008"
#: Seconds that a call may take.
_WITHIN: Final = 30.0


class PostgresFactSide:
    """The sides of all readers, in a database that ``ergon db upgrade`` has prepared.

    The address is *dsn*, or the environment's ``ERGON_POSTGRES__DSN``. A ``PostgresBoundary`` has one in its own
    database, which its consumers use by themselves; this is for facts that are elsewhere, behind a service for
    instance. A database that may lose what it has committed is refused, unless *accept_loss*.
    """

    def __init__(self, dsn: str | None = None, *, accept_loss: bool = False) -> None:
        self._dsn = dsn
        self._accept_loss = accept_loss
        self._lock = threading.Lock()
        self._lines: Lines | None = None
        self._checked = False
        #: How a boundary in the same database performs work, in both flavours; None if there is none.
        self._beside: tuple[Callable[..., Any], Callable[..., Awaitable[Any]]] | None = None

    @classmethod
    def beside(cls, run: Callable[..., Any], run_async: Callable[..., Awaitable[Any]]) -> Self:
        """The one of a boundary, which performs its work over its own connections."""
        side = cls()
        side._beside = run, run_async
        return side

    # -- coming and going -----------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect; another call connects again. Connections of a boundary are the boundary's."""
        lines = self._left()
        if lines is not None:
            lines.close()

    async def close_async(self) -> None:
        lines = self._left()
        if lines is not None:
            await lines.close_async()

    def _left(self) -> Lines | None:
        with self._lock:
            lines, self._lines = self._lines, None
        return lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    def _here(self) -> Lines:
        with self._lock:
            if self._lines is None:
                dsn = self._dsn or os.environ.get(VARIABLE)
                if not dsn:
                    raise ConfigurationError(
                        f"the side of facts needs a database: set {VARIABLE} in the environment or give dsn=…"
                    )
                self._lines = Lines(dsn, other=FactError)
            return self._lines

    def _run(self, work: Callable[..., Operation[Any]], *args: Any) -> Any:
        if self._beside is not None:
            return self._beside[0](partial(_without_store, work), *args)
        return self._here().run(self._worked(work, *args), within=_WITHIN)

    async def _run_async(self, work: Callable[..., Operation[Any]], *args: Any) -> Any:
        if self._beside is not None:
            return await self._beside[1](partial(_without_store, work), *args)
        return await self._here().run_async(self._worked(work, *args), within=_WITHIN)

    def _worked(self, work: Callable[..., Operation[Any]], *args: Any) -> Operation[Any]:
        if not self._checked:
            yield from examined("dead letters", needed=_NEEDED, accept_loss=self._accept_loss)
            self._checked = True
        return (yield from work(*args))

    # -- what is asked --------------------------------------------------------------------------------

    def calls(self, reading: Reading) -> SideCalls:
        return _calls(Keeping(reading), self._run, None if self._beside is None else self._beside[0])

    def calls_async(self, reading: Reading) -> SideCalls:
        return _calls(Keeping(reading), self._run_async, None if self._beside is None else self._beside[1])

    def forget_epoch(self, pair: Pair, reader: str = "default") -> int:
        """Let *reader* read in another epoch, as somebody must who has compared the stores.

        What was due later are dead letters from then on, because their offsets may mean other facts; how many these
        were. Nothing else that is known of single facts is kept: some may come again.
        """
        return int(self._run(_kept_for(pair, reader).forget_epoch, time.time()))

    async def forget_epoch_async(self, pair: Pair, reader: str = "default") -> int:
        return int(await self._run_async(_kept_for(pair, reader).forget_epoch, time.time()))


def _kept_for(pair: Pair, reader: str) -> Keeping:
    return Keeping(Reading(pair, reader, f"{pair.from_zone}/{pair.to_zone}", JsonCodec(), lambda: True))


def _without_store(work: Callable[..., Operation[Any]], _store: object, *args: Any) -> Operation[Any]:
    return work(*args)


def _calls(keeping: Keeping, run: Callable[..., Any], together: Callable[..., Any] | None) -> SideCalls:
    return SideCalls(
        partial(run, keeping.take_over),
        partial(run, keeping.claim),
        partial(run, keeping.settle),
        partial(run, keeping.leave),
        partial(run, keeping.holds),
        partial(run, keeping.dead),
        partial(run, keeping.replay),
        partial(run, keeping.discard),
        partial(run, keeping.list_dead),
        partial(run, keeping.dead_count),
        None if together is None else partial(together, keeping.confirm),
    )
