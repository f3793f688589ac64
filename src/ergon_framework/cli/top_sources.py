"""Whom ``ergon top`` asks: the metrics of runs, and the tables of the database."""

from __future__ import annotations

import importlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from ergon_framework.connectors.base import ConnectorError, Depth
from ergon_framework.errors import ConfigurationError, ErgonError, text
from ergon_framework.redaction import redact_address
from ergon_framework.telemetry.metrics import Numbers
from ergon_framework.telemetry.redaction import masked
from ergon_framework.telemetry.scraped import scraped

R = TypeVar("R")

#: Seconds that a source may take, and the longest answer that is read.
_WITHIN: Final = 5.0
_LONGEST: Final = 32 * 1024 * 1024


@dataclass(slots=True)
class Look:
    """What all sources said at one moment; what one did not say is in ``unreached``, by the name of the source."""

    at: float
    #: By the address of the run.
    runs: dict[str, Numbers] = field(default_factory=dict)
    queues: Mapping[str, Depth] = field(default_factory=dict)
    #: As their modules have them.
    breakers: Sequence[Any] = ()
    readers: Sequence[Any] = ()
    pauses: Sequence[Any] = ()
    workers: Sequence[Any] = ()
    unreached: dict[str, str] = field(default_factory=dict)
    #: What a source that has answered could not say, by what it is about.
    unsaid: dict[str, str] = field(default_factory=dict)
    #: How many were asked.
    asked: int = 0


class Sources:
    """Runs at *urls*, and the database at *dsn*, if there is one; to be closed."""

    def __init__(self, urls: Sequence[str], dsn: str | None) -> None:
        self._urls = [_address(url) for url in urls]
        # Nothing on the way: a proxy of the machine knows nothing of its neighbours.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._tables = None if dsn is None else _Tables(dsn)
        if not self._urls and self._tables is None:
            raise ConfigurationError(
                "nobody says what to look at; give --url with the address of a run's probes, set run.probes.port, or "
                "name a database with ERGON_POSTGRES__DSN"
            )

    def look(self) -> Look:
        """Ask all of them at once."""
        found = Look(time.monotonic(), asked=len(self._urls) + (self._tables is not None))
        asked = {url: _begun(partial(self._scrape, url)) for url in self._urls}
        if self._tables is not None:
            self._tables.tell(found)
        for url, answer in asked.items():
            try:
                found.runs[url] = answer.result(_WITHIN + 1.0)
            except (OSError, ValueError, TimeoutError) as error:
                found.unreached[redact_address(url)] = _words(error)
        return found

    def close(self) -> None:
        if self._tables is not None:
            self._tables.close()

    def _scrape(self, url: str) -> Numbers:
        with self._opener.open(f"{url}/metrics", timeout=_WITHIN) as answer:
            return scraped(answer.read(_LONGEST).decode("utf-8", "replace"))


class _Tables:
    """What the database has; each question is asked by itself, because an old schema lacks a table or two."""

    def __init__(self, dsn: str) -> None:
        # Loaded when it is needed: not everybody has its libraries, and the first of them says which extra brings them.
        pauses, queues, breakers, facts = (
            importlib.import_module(f"ergon_framework.{name}")
            for name in (
                "connectors.postgres.pauses",
                "connectors.postgres.overview",
                "providers.sql.overview",
                "facts.stores.postgres_overview",
            )
        )
        self._questions: dict[str, Callable[[], Any]] = {
            "queues": queues.depths,
            "breakers": breakers.held_back,
            "readers": facts.readings,
            "pauses": pauses.survey,
        }
        self._lines = importlib.import_module("ergon_framework.schema.lines").Lines(dsn, most=1, other=ConnectorError)

    def tell(self, look: Look) -> None:
        """Put into *look* what the database says."""
        until, failed = time.monotonic() + _WITHIN, {}
        for name, script in self._questions.items():
            try:
                found = self._lines.run(script(), within=max(0.1, until - time.monotonic()))
            except ErgonError as error:
                failed[name] = masked(text(error))
                continue
            if name == "pauses":
                look.pauses, look.workers = found
            else:
                setattr(look, name, found)
        if len(failed) == len(self._questions):
            look.unreached["the database"] = next(iter(failed.values()))
        else:
            look.unsaid = {f"{name} of the database": why for name, why in failed.items()}

    def close(self) -> None:
        self._lines.close()


def _address(url: str) -> str:
    """*url* as that of a run's probes; a host and a port are enough."""
    given = url if "://" in url else f"http://{url}"
    parts = urlsplit(given)
    try:
        fits = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fits = False
    if not fits or parts.username is not None:
        raise ConfigurationError(f"{redact_address(url)!r} is no address of a run's probes; write http://HOST:PORT")
    return given.rstrip("/").removesuffix("/metrics")


def _begun(work: Callable[[], R]) -> Future[R]:
    """*work* in a thread that nobody waits for at the end."""
    done: Future[R] = Future()

    def perform() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result raises it
            done.set_exception(error)

    Thread(target=perform, name="ergon-top", daemon=True).start()
    return done


def _words(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        said = f"it answers {error.code}"
        return f"{said}; is the extra prometheus installed there?" if error.code >= 500 else said  # noqa: PLR2004
    if isinstance(error, TimeoutError):
        return f"no answer within {_WITHIN:g} s"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return f"no answer within {_WITHIN:g} s"
    words = getattr(reason, "strerror", None) or str(reason)
    return masked(f"{words}; see that it runs, with --probe-port")
