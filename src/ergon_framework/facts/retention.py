"""Retention: what every reader has confirmed is let go of when it is old enough, again and again.

It removes nothing that a registered reader has not confirmed, and no artifact that a retained fact names: that is the
store's own rule, and this only asks for it. Services of one store may all do it; a round is short if another was there.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self

from ergon_framework.errors import ErgonError, text
from ergon_framework.facts.boundary import Boundary, Pruned
from ergon_framework.facts.contents import Contents
from ergon_framework.facts.policy import RetentionPolicy
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts")

#: Seconds that a round which is under way has at the end. What it has not removed by then is removed by the next one.
PARTING: Final = 5.0


#: Seconds between two looks for uploads that broke off, at most.
SWEEP_INTERVAL: Final = 60.0


@contextmanager
def sweep_uploads(contents: Contents, *, keep: float, wall: Callable[[], float] = time.time) -> Iterator[None]:
    """Remove uploads that were not gone on with for *keep* seconds, on a thread, for as long as this lasts."""
    over = threading.Event()

    def run() -> None:
        while True:
            try:
                contents.sweep(int((wall() - keep) * 1000))
            except (ErgonError, OSError) as error:
                why = {Field.ERROR: text(error), Field.ERROR_TYPE: type(error).__name__}
                logs.say(logging.WARNING, Event.PRUNING_FAILED, why, to=log)
            if over.wait(min(keep / 2, SWEEP_INTERVAL)):
                return

    thread = threading.Thread(target=run, name="ergon-uploads", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PARTING)


class Retention:
    """Rounds of one store under a policy."""

    def __init__(
        self,
        boundary: Boundary,
        policy: RetentionPolicy | None = None,
        *,
        wall: Callable[[], float] = time.time,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._boundary = boundary
        self._policy = policy or RetentionPolicy()
        self._wall = wall
        self._dice = dice

    def round(self) -> Pruned | None:
        """Let go of what may go now; None if the store could not be asked, which the next round will make up for."""
        began = time.monotonic()
        try:
            pruned = self._boundary.prune(self._policy.before_unix_ms(self._wall()))
        except (ErgonError, OSError) as error:
            why = {Field.ERROR: text(error), Field.ERROR_TYPE: type(error).__name__}
            logs.say(logging.WARNING, Event.PRUNING_FAILED, why, to=log)
            return None
        seconds = round(time.monotonic() - began, 3)
        found = {Field.FACTS: pruned.facts, Field.ARTIFACTS: pruned.artifacts, Field.SECONDS: seconds}
        # A round that has found nothing is no news.
        logs.say(logging.INFO if any(pruned) else logging.DEBUG, Event.PRUNED, found, to=log)
        return pruned

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Round after round for as long as this lasts, on a thread of its own; the first one at once."""
        over = threading.Event()

        def run() -> None:
            while True:
                self.round()
                if over.wait(self._policy.wait(self._dice)):
                    return

        thread = threading.Thread(target=run, name="ergon-retention", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join(PARTING)
