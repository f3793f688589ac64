"""Sources of ``ergon top``: the metrics of runs, and the tables of the database.

A run is one ``ergon run``, which serves its metrics next to its probes, the health checks of the process.
"""

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
from ergon_framework.database.extras import require_psycopg
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.redaction import redact_address
from ergon_framework.telemetry.metrics import Numbers
from ergon_framework.telemetry.prometheus import parse_prometheus
from ergon_framework.telemetry.redaction import mask_credentials

R = TypeVar("R")

#: Timeout of a source in seconds, and the maximum size of a response in bytes.
_SOURCE_TIMEOUT_SECONDS: Final = 5.0
_MAX_RESPONSE_BYTES: Final = 32 * 1024 * 1024


@dataclass(slots=True)
class Sample:
    """The answers of all sources at one time; ``unavailable`` has the error of each source that did not respond."""

    at: float
    #: Metrics by the address of the run.
    runs: dict[str, Numbers] = field(default_factory=dict)
    queues: Mapping[str, Depth] = field(default_factory=dict)
    #: Rows in the types of their modules.
    breakers: Sequence[Any] = ()
    readers: Sequence[Any] = ()
    pauses: Sequence[Any] = ()
    workers: Sequence[Any] = ()
    unavailable: dict[str, str] = field(default_factory=dict)
    #: Errors of a source that responded in part, by subject.
    incomplete: dict[str, str] = field(default_factory=dict)
    #: Number of sources queried.
    sources: int = 0


class Sources:
    """The runs at *urls*, and the database at *dsn* if it is set; must be closed."""

    def __init__(self, urls: Sequence[str], dsn: str | None) -> None:
        self._urls = [_parse_address(url) for url in urls]
        # No proxy: a proxy configured on this machine may not reach its neighbours.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._database = None if dsn is None else _DatabaseQueries(dsn)
        if not self._urls and self._database is None:
            raise ConfigurationError(
                "no source to query: pass --url with the address of a run's probes, set run.probes.port, or "
                "set ERGON_POSTGRES__DSN"
            )

    def sample(self) -> Sample:
        """Query all sources concurrently."""
        sample = Sample(time.monotonic(), sources=len(self._urls) + (self._database is not None))
        futures = {url: _run_in_thread(partial(self._scrape, url)) for url in self._urls}
        if self._database is not None:
            self._database.fill(sample)
        for url, future in futures.items():
            try:
                sample.runs[url] = future.result(_SOURCE_TIMEOUT_SECONDS + 1.0)
            except (OSError, ValueError, TimeoutError) as error:
                sample.unavailable[redact_address(url)] = _describe_error(error)
        return sample

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _scrape(self, url: str) -> Numbers:
        with self._opener.open(f"{url}/metrics", timeout=_SOURCE_TIMEOUT_SECONDS) as response:
            return parse_prometheus(response.read(_MAX_RESPONSE_BYTES).decode("utf-8", "replace"))


class _DatabaseQueries:
    """Queries to the database; they run separately, because a database at an earlier revision lacks some tables."""

    def __init__(self, dsn: str) -> None:
        # Imported on demand: the libraries are an optional extra.
        require_psycopg()
        pauses, queues, breakers, facts = (
            importlib.import_module(f"ergon_framework.{name}")
            for name in (
                "connectors.postgres.pauses",
                "connectors.postgres.inspect",
                "providers.postgres.admin",
                "facts.stores.postgres.lookup",
            )
        )
        self._queries: dict[str, Callable[[], Any]] = {
            "queues": queues.queue_depths,
            "breakers": breakers.open_breakers,
            "readers": facts.reader_lags,
            "pauses": pauses.list_pauses,
        }
        pool_module = importlib.import_module("ergon_framework.database.pool")
        self._pool = pool_module.ConnectionPool(dsn, max_size=1, error_type=ConnectorError)

    def fill(self, sample: Sample) -> None:
        """Fill *sample* with the results of the queries."""
        deadline, failures = time.monotonic() + _SOURCE_TIMEOUT_SECONDS, {}
        for name, script in self._queries.items():
            try:
                result = self._pool.run(script(), timeout_seconds=max(0.1, deadline - time.monotonic()))
            except ErgonError as error:
                failures[name] = mask_credentials(error_message(error))
                continue
            if name == "pauses":
                sample.pauses, sample.workers = result
            else:  # the query has the name of the field
                setattr(sample, name, result)
        if len(failures) == len(self._queries):
            sample.unavailable["PostgreSQL"] = next(iter(failures.values()))
        else:
            sample.incomplete = {f"PostgreSQL {name}": reason for name, reason in failures.items()}

    def close(self) -> None:
        self._pool.close()


def _parse_address(url: str) -> str:
    """Return *url* as the address of a run's probes; a host and a port are enough."""
    address = url if "://" in url else f"http://{url}"
    parts = urlsplit(address)
    try:
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid or parts.username is not None:
        raise ConfigurationError(f"invalid probe address {redact_address(url)!r}; write http://HOST:PORT")
    return address.rstrip("/").removesuffix("/metrics")


def _run_in_thread(work: Callable[[], R]) -> Future[R]:
    """Run *work* in a daemon thread, which does not delay the exit of the process."""
    future: Future[R] = Future()

    def perform() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)

    Thread(target=perform, name="ergon-top", daemon=True).start()
    return future


def _describe_error(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        message = f"HTTP status {error.code}"
        return f"{message}; install the extra prometheus there" if error.code >= 500 else message  # noqa: PLR2004
    if isinstance(error, TimeoutError):
        return f"no response within {_SOURCE_TIMEOUT_SECONDS:g} s"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return f"no response within {_SOURCE_TIMEOUT_SECONDS:g} s"
    reason_text = getattr(reason, "strerror", None) or str(reason)
    return mask_credentials(f"{reason_text}; check that it runs with --probe-port")
