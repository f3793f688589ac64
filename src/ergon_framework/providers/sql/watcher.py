"""The watcher: one thread of this process that keeps the view of the breakers, and tidies now and then.

It is told of transitions, and looks once a second besides: behind a pooler nobody is told, and a
line that is down is not known to be.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from ergon_framework.providers.books import Account
from ergon_framework.providers.sql import statements
from ergon_framework.providers.sql.names import ALL, account_of
from ergon_framework.providers.sql.sweeping import Sweeper
from ergon_framework.providers.sql.view import View, moved, snapshot
from ergon_framework.schema.hearing import Hearing
from ergon_framework.schema.line import Line
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation, perform
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Seconds between two looks; and after which what was seen is too old to go by.
LOOK: Final = 0.9
FRESH: Final = 2.5
#: Seconds between two sweeps, on average, and before it connects again.
_SWEEP: Final = 20.0
_FIRST, _LONGEST = 0.1, 2.0


class Watcher:
    """Keeps *view*; *tidy* is what its books have to do from time to time."""

    def __init__(self, lines: Lines, view: View, tidy: Callable[[], Operation[None]]) -> None:
        self._lines = lines
        self._view = view
        self._tidy = tidy
        self._over = threading.Event()
        self._hearing = Hearing()
        # Somebody asks for an account that nobody has read.
        view.wanting = self._hearing.wake
        self._looked = float("-inf")
        self._sweeper = Sweeper()
        # Of its own, so that processes take turns: forked children have the common ones in common.
        self._dice = random.Random()  # noqa: S311 - no secret
        self._sweep = time.monotonic() + self._dice.uniform(0, _SWEEP)
        self._thread = threading.Thread(target=self._watch, name="ergon-breakers", daemon=True)
        self._thread.start()

    def is_fresh(self, clock: float) -> bool:
        """Whether the view holds what the database held a moment ago."""
        return clock - self._looked <= FRESH

    def stop(self, timeout: float = 1.0) -> None:
        """End it; a thread that is stuck in a connection is left behind."""
        self._over.set()
        self._hearing.wake()
        self._thread.join(timeout)

    # -- its thread -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        with self._hearing:
            self._keep_watching()

    def _keep_watching(self) -> None:
        delay, lost = _FIRST, False
        while not self._over.is_set():
            try:
                with self._lines.connect() as connection:
                    if self._lines.direct:
                        connection.execute(f"listen {statements.CHANNEL}")
                    self._read(connection, self._view.accounts())
                    delay = _FIRST
                    if lost:
                        logs.say(logging.INFO, "breaker watch regained", {}, to=_log)
                        lost = False
                    while not self._over.is_set():
                        self._look(connection)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next look may be well
                if not lost:
                    logs.say(logging.WARNING, "breaker watch lost", {"error": type(error).__name__}, to=_log)
                    lost = True
                self._over.wait(delay)
                delay = min(2 * delay, _LONGEST)

    def _look(self, connection: Line) -> None:
        """One look, and then to wait for the next one or for news."""
        began = time.monotonic()
        self._saw(connection.execute(statements.CHANGED, binary=True).fetchall())
        self._read(connection, self._view.unread())
        self._looked = began
        perform(connection, self._tidy())
        if began >= self._sweep:
            self._sweep = began + _SWEEP * self._dice.uniform(0.5, 1.5)
            perform(connection, self._sweeper.swept())
        while (left := began + LOOK - time.monotonic()) > 0 and not self._over.is_set():
            self._listen(connection, left)
            if self._view.unread():
                return

    def _listen(self, connection: Line, seconds: float) -> None:
        if not self._lines.direct:
            self._hearing.wait(seconds)
            return
        told = {_account(payload) for payload in self._hearing.notices(connection, seconds)}
        self._read(connection, [account for account in told if account is not None and self._view.known(account)])

    def _read(self, connection: Line, accounts: Iterable[Account]) -> None:
        wanted = list(accounts)
        if not wanted:
            return
        parameters = {
            "tenants": [ALL if account.tenant_id is None else account.tenant_id for account in wanted],
            "providers": [account.provider_name for account in wanted],
            "capabilities": [account.capability for account in wanted],
        }
        self._saw(connection.execute(statements.WATCHED, parameters, binary=True).fetchall(), asked=True)

    def _saw(self, rows: list[Any], *, asked: bool = False) -> None:
        wall = time.time()
        for shown, at, tenant, provider, capability in rows:
            account = account_of(tenant, provider, capability)
            if asked or self._view.known(account):
                self._view.saw(account, moved(snapshot(shown), wall - at))


def _account(payload: str) -> Account | None:
    """The account that a notice is about; None for what is no notice of ours."""
    with suppress(ValueError):
        match json.loads(payload):
            case [str(tenant), str(provider), str(capability)]:
                return account_of(tenant, provider, capability)
    return None
