"""Home: what all queues of one address share in this process: the lines to its server, or its cluster's nodes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from redis.exceptions import ResponseError

from ergon_framework.connectors.redis.durability import HIDDEN, SETTINGS, Durability, judged, refuse_eviction
from ergon_framework.connectors.redis.lines import Lines, Node
from ergon_framework.connectors.redis.operation import Operation
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)
_homes: dict[tuple[str, int], Home] = {}
_making = threading.Lock()


class Home:
    """One address, as this process knows it."""

    def __init__(self, url: str) -> None:
        self.owner = os.getpid()
        self._url = url
        self._lock = threading.Lock()
        #: By node; None is the one that the address names.
        self._lines: dict[Node | None, Lines] = {None: Lines(url)}
        self._judged: dict[Node | None, Durability] = {}
        self.users = 0

    def lines(self, node: Node | None) -> Lines:
        """The lines to *node*."""
        with self._lock:
            lines = self._lines.get(node)
            if lines is None:
                lines = self._lines[node] = Lines(self._url, node)
            return lines

    def next_after(self, node: Node | None) -> Node | None:
        """Whom to ask when *node* does not answer: another node may know where its queues went."""
        known = list(self._lines)
        return known[(known.index(node) + 1) % len(known)] if node in known else None

    def checked(self, node: Node | None) -> Operation[Durability]:
        """Once per server: what is its answer worth."""
        found = self._judged.get(node)
        if found is None:
            settings: dict[str, str] = {}
            # Hosted servers often forbid it.
            with suppress(ResponseError):
                for name in SETTINGS:
                    answer: Sequence[bytes] = yield ("CONFIG", "GET", name)
                    if answer:
                        settings[name] = answer[1].decode()
            refuse_eviction(settings)
            found = self._judged[node] = judged(settings) if settings else HIDDEN
            level = logging.INFO if found.durable else logging.WARNING
            logs.say(level, "redis durability", {"durable": found.durable, "words": found.words}, to=_log)
            if node is not None:
                yield from self._neighbours()
        return found

    def _neighbours(self) -> Operation[None]:
        """Learn of the cluster's other nodes, before the one that is known is the one that is gone."""
        with suppress(ResponseError):
            slots = yield ("CLUSTER", "SLOTS")
            for _, _, *nodes in slots:
                for host, port, *_ in nodes:
                    if host:
                        self.lines(Node(host.decode(), int(port)))

    def close(self) -> None:
        for lines in self._lines.values():
            lines.close()

    async def close_async(self) -> None:
        for lines in self._lines.values():
            await lines.close_async()


def home_of(url: str) -> Home:
    """The home of *url*, one per process however many queues live in it; give it back with ``leave``."""
    with _making:
        where = url, os.getpid()
        home = _homes.get(where)
        if home is None:
            home = _homes[where] = Home(url)
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
