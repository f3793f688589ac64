"""Retention: periodic removal of old data that every reader has confirmed.

A reader is a named consumer of facts; an artifact is a file that a fact refers to. Retention removes no fact that a
registered reader has not confirmed and no artifact that a retained fact refers to: the store enforces that rule, and
retention only calls it. All services of one store may run retention; a run after another service's run is short.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self

from ergon_framework.errors import ErgonError, error_message
from ergon_framework.facts.boundary import Boundary, PruneResult
from ergon_framework.facts.content_store import ContentStore
from ergon_framework.facts.policy import RetentionPolicy
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts")

#: Seconds that a retention run in progress has at shutdown. The next run removes what this one has not.
SHUTDOWN_TIMEOUT_SECONDS: Final = 5.0


#: Maximum seconds between two checks for stale uploads.
MAX_CLEANUP_INTERVAL_SECONDS: Final = 60.0


@contextmanager
def clean_up_uploads(contents: ContentStore, *, keep: float, wall: Callable[[], float] = time.time) -> Iterator[None]:
    """Run a thread that deletes uploads without progress for *keep* seconds, until the context exits."""
    stopped = threading.Event()

    def run() -> None:
        while True:
            try:
                contents.delete_stale_uploads(int((wall() - keep) * 1000))
            except (ErgonError, OSError) as error:
                fields = {Field.ERROR: error_message(error), Field.ERROR_TYPE: type(error).__name__}
                logs.log_event(logging.WARNING, Event.PRUNING_FAILED, fields, to=log)
            if stopped.wait(min(keep / 2, MAX_CLEANUP_INTERVAL_SECONDS)):
                return

    thread = threading.Thread(target=run, name="ergon-uploads", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(SHUTDOWN_TIMEOUT_SECONDS)


class FactRetention:
    """Retention of one store under a policy."""

    def __init__(
        self,
        boundary: Boundary,
        policy: RetentionPolicy | None = None,
        *,
        wall: Callable[[], float] = time.time,
        random_source: Callable[[], float] = random.random,
    ) -> None:
        self._boundary = boundary
        self._policy = policy or RetentionPolicy()
        self._wall = wall
        self._random_source = random_source

    def run_once(self) -> PruneResult | None:
        """Remove what may be removed now; return None if the store failed, in which case the next run catches up."""
        started_at = time.monotonic()
        try:
            pruned = self._boundary.prune(self._policy.before_unix_ms(self._wall()))
        except (ErgonError, OSError) as error:
            fields = {Field.ERROR: error_message(error), Field.ERROR_TYPE: type(error).__name__}
            logs.log_event(logging.WARNING, Event.PRUNING_FAILED, fields, to=log)
            return None
        seconds = round(time.monotonic() - started_at, 3)
        totals = {Field.FACTS: pruned.facts, Field.ARTIFACTS: pruned.artifacts, Field.SECONDS: seconds}
        # A run that removed nothing is logged at debug level only.
        logs.log_event(logging.INFO if any(pruned) else logging.DEBUG, Event.PRUNED, totals, to=log)
        return pruned

    @contextmanager
    def run_in_background(self) -> Iterator[Self]:
        """Run retention periodically on a dedicated thread until the context exits; the first run starts at entry."""
        stopped = threading.Event()

        def run() -> None:
            while True:
                self.run_once()
                if stopped.wait(self._policy.next_delay(self._random_source)):
                    return

        thread = threading.Thread(target=run, name="ergon-retention", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stopped.set()
            thread.join(SHUTDOWN_TIMEOUT_SECONDS)
