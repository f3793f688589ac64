"""Work of the ``ergon facts`` commands that call the service, and their output for people and programs.

The service stores the facts that one zone, a site, sends to another (a pair of zones), and files, called artifacts.
Facts of a pair have offsets, within an epoch of the store. A reader is a named consumer of a pair; its cursor is the
last offset that it has confirmed, and facts after the cursor are its lag.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import json as json_lib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli import output as progress
from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError, error_message
from ergon_framework.facts.append import Blob
from ergon_framework.facts.boundary import LogState
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import (
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    ObjectName,
    StoredArtifact,
    StoredFact,
    ZonePair,
)
from ergon_framework.facts.service import extras
from ergon_framework.runner.exit import ExitCode

#: Maximum length of an object in the output; JSON has the whole object.
_MAX_OBJECT_CHARS = 200
_HEADINGS = ("from", "to", "buffer", "retained", "last", "reader", "confirmed", "behind", "bytes", "oldest")


def confirmation_data(confirmation: FactConfirmation) -> dict[str, Any]:
    """Return a confirmation as plain data."""
    return {**asdict(confirmation), "buffer": confirmation.buffer.value}


def fact_to_json(stored: StoredFact) -> str:
    """Return all fields of a fact as one line of JSON."""
    envelope, fact = stored.envelope, stored.fact
    payload = {
        "offset": stored.offset,
        "epoch": stored.epoch,
        "digest": stored.digest,
        "stored_at": format_time(stored.stored_at_unix_ms),
        "message_id": envelope.message_id,
        "from_zone": envelope.from_zone,
        "to_zone": envelope.to_zone,
        "produced_at": format_time(envelope.produced_at_unix_ms),
        "correlation_id": envelope.correlation_id,
        "causation_id": envelope.causation_id,
        "labels": dict(envelope.labels),
        "subject": fact.subject,
        "predicate": fact.predicate,
        "object_json": fact.object_json,
    }
    return json.dumps(payload, ensure_ascii=False)


def format_fact(stored: StoredFact) -> str:
    """Format a fact as one readable line."""
    fact = stored.fact
    content = sanitize(f"{fact.subject} {fact.predicate} {fact.object_json}", _MAX_OBJECT_CHARS)
    message_id = sanitize(stored.envelope.message_id, _MAX_OBJECT_CHARS)
    return f"{stored.offset}  {format_time(stored.stored_at_unix_ms)}  {message_id}  {content}"


def logs_to_json_lines(logs: Sequence[LogState]) -> Iterator[str]:
    """Yield a line of JSON for each pair of zones."""
    for log in logs:
        payload = asdict(log) | {"buffer": log.buffer.value, "pair": log.pair._asdict()}
        payload["readers"] = {reader: reader_lag._asdict() for reader, reader_lag in log.readers.items()}
        yield json.dumps(payload, ensure_ascii=False)


def print_lag(logs: Sequence[LogState], *, now: float | None = None) -> None:
    """Print a line for each reader of each pair."""
    current_time = time.time() if now is None else now
    rows = [row for log in logs for row in _build_rows(log, current_time)]
    if sys.stdout.isatty():
        table = Table(*_HEADINGS)
        for row in rows:
            # Text, because names may contain characters that rich reads as markup.
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for row in (_HEADINGS, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _build_rows(log: LogState, now: float) -> Iterator[tuple[str, ...]]:
    retained = max(0, log.last - log.first + 1)
    prefix = (
        sanitize(log.pair.from_zone, 64),
        sanitize(log.pair.to_zone, 64),
        log.buffer.value,
        f"{retained:,}",
        f"{log.last:,}",
    )
    if not log.readers:
        yield (*prefix, "none", "", "", "", "")
    for reader, reader_lag in sorted(log.readers.items()):
        oldest = "" if reader_lag.since_unix_ms is None else f"{max(0.0, now - reader_lag.since_unix_ms / 1000):,.0f} s"
        yield (
            *prefix,
            sanitize(reader, 64),
            f"{reader_lag.offset:,}",
            f"{reader_lag.facts:,}",
            f"{reader_lag.bytes:,}",
            oldest,
        )


def format_time(unix_ms: int) -> str:
    """Format a timestamp in milliseconds as an ISO time in UTC."""
    try:
        timestamp = datetime.fromtimestamp(unix_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{unix_ms} ms"
    return timestamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- commands ---------------------------------------------------------------------------------------

#: Facts per fetch call.
_FETCH_BATCH = 1_000
#: Seconds between polls of a tail without a notification, and between connection attempts after a lost connection.
_POLL_INTERVAL_SECONDS = 30.0
_RECONNECT_DELAY_SECONDS = 1.0


class FactsExit(ExitCode):
    """Exit codes of ``ergon facts`` and their meanings; ``serve`` has its own."""

    OK = 0, "done"
    REJECTED = 1, "rejected or not found; the message gives the reason"
    FAILED = 2, "an option, a file or a certificate is invalid"
    UNAVAILABLE = 3, "the service is unavailable; the outcome is unknown, and running the command again is safe"


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Address of the service, credentials of the caller, and the *timeout* of a call in seconds."""

    server: str
    certificate: Path
    key: Path
    authorities: Path
    server_name: str | None
    timeout: float


@dataclass(frozen=True, slots=True)
class FactOptions:
    """A fact from the command line."""

    message_id: str
    pair: ZonePair
    subject: str
    predicate: str
    object_json: str


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Which facts to read, where to start, and whether to confirm them."""

    pair: ZonePair
    reader: str
    from_offset: int | None
    since: datetime | None
    confirm: bool

    def __post_init__(self) -> None:
        if self.from_offset is not None and self.since is not None:
            raise typer.BadParameter("--from-offset and --since exclude each other; pass one of the two")
        if self.confirm and (self.from_offset is not None or self.since is not None):
            raise typer.BadParameter("--confirm excludes --from-offset and --since; pass one of them")


def append(service: ServiceOptions, fact_options: FactOptions, *, as_json: bool) -> FactsExit:
    """Append a fact and print its offset."""

    def work(client: Any) -> FactsExit:
        object_json = sys.stdin.read() if fact_options.object_json == "-" else fact_options.object_json
        envelope = Envelope(
            message_id=fact_options.message_id,
            from_zone=fact_options.pair.from_zone,
            to_zone=fact_options.pair.to_zone,
            produced_at_unix_ms=int(time.time() * 1000),
        )
        fact = Fact(subject=fact_options.subject, predicate=fact_options.predicate, object_json=object_json)
        confirmation = client.append_fact(envelope, fact)
        if as_json:
            typer.echo(json_lib.dumps(confirmation_data(confirmation)))
        else:
            duplicate_text = ", already confirmed earlier" if confirmation.duplicate else ""
            typer.echo(f"confirmed in the {confirmation.buffer} at offset {confirmation.offset}{duplicate_text}")
        return FactsExit.OK

    return run_with_client(work, service, as_json=as_json)


def get(service: ServiceOptions, from_zone: str, message_id: str, *, as_json: bool) -> FactsExit:
    """Print the confirmation stored for a message id."""

    def work(client: Any) -> FactsExit:
        confirmation = client.get_fact(from_zone, message_id)
        if as_json:
            typer.echo(json_lib.dumps(None if confirmation is None else confirmation_data(confirmation)))
        elif confirmation is not None:
            typer.echo(f"confirmed in the {confirmation.buffer} at offset {confirmation.offset}, {confirmation.digest}")
        else:
            _print_stderr(f"there is no fact {message_id!r} of {from_zone!r}")
        return FactsExit.REJECTED if confirmation is None else FactsExit.OK

    return run_with_client(work, service, as_json=as_json)


# -- reading ----------------------------------------------------------------------------------------


class _FactReader:
    """Reads facts in batches and prints them as they arrive."""

    def __init__(self, client: Any, options: FetchOptions, *, as_json: bool) -> None:
        self._client = client
        self._options = options
        self._format = fact_to_json if as_json else format_fact
        #: The position after which the next facts are read; None for the reader's own cursor.
        self._position: Cursor | None = None
        self.seek_start()

    def seek_start(self) -> None:
        """Find the position to read after, from the options; without one the reader's cursor is used."""
        pair = self._options.pair
        if self._options.since is not None:
            self._position = self._client.cursor_at_time(pair, int(self._options.since.timestamp() * 1000))
        elif self._options.from_offset is not None:
            end = self._client.last_offset(pair)
            self._position = Cursor("" if end is None else end.epoch, self._options.from_offset - 1)

    def print_next(self, limit: int) -> Sequence[StoredFact]:
        """Print the next facts, at most *limit*; return them, empty at the end."""
        options = self._options
        facts: Sequence[StoredFact] = self._client.fetch_facts(
            options.reader, options.pair, min(limit, _FETCH_BATCH), after=self._position
        )
        for fact in facts:
            typer.echo(self._format(fact))
        if facts:
            sys.stdout.flush()
            self._position = facts[-1].cursor
            if options.confirm:
                self._client.confirm_receipt(options.reader, options.pair, facts[-1].cursor)
        return facts

    def count_remaining(self) -> int:
        """Return the number of facts not read yet."""
        pair, end = self._options.pair, self._client.last_offset(self._options.pair)
        cursor = self._position or self._client.get_cursor(self._options.reader, pair)
        return 0 if end is None else max(0, end.offset - (0 if cursor is None else cursor.offset))


def fetch(service: ServiceOptions, options: FetchOptions, *, limit: int, as_json: bool) -> FactsExit:
    """Print at most *limit* facts."""

    def work(client: Any) -> FactsExit:
        reader = _FactReader(client, options, as_json=as_json)
        read_count = 0
        with progress.transfer_progress("read", min(limit, reader.count_remaining()), unit="facts") as update_progress:
            while read_count < limit and (facts := reader.print_next(limit - read_count)):
                read_count += len(facts)
                update_progress(read_count)
        if not read_count and not as_json:
            _print_stderr("there are no new facts")
        return FactsExit.OK

    return run_with_client(work, service, as_json=as_json)


def tail(service: ServiceOptions, options: FetchOptions, *, as_json: bool) -> FactsExit:
    """Print facts as they arrive, until a signal stops the process."""
    stopped = threading.Event()
    notified = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        notified.set()

    previous_handlers = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}

    def work(client: Any) -> FactsExit:
        reader = _retry_while_disconnected(lambda: _FactReader(client, options, as_json=as_json), stopped)
        unlisten = client.listen(notified.set)
        try:
            while reader is not None and not stopped.is_set():
                notified.clear()
                _retry_while_disconnected(lambda: _catch_up(reader, stopped), stopped)
                notified.wait(_POLL_INTERVAL_SECONDS)
        finally:
            unlisten()
        return FactsExit.OK

    try:
        return run_with_client(work, service, as_json=as_json)
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def _catch_up(reader: _FactReader, stopped: threading.Event) -> None:
    remaining = reader.count_remaining()
    read_count = 0
    with progress.transfer_progress("caught up with", remaining, unit="facts") as update_progress:
        while not stopped.is_set() and (facts := reader.print_next(_FETCH_BATCH)):
            read_count += len(facts)
            update_progress(read_count)


def _retry_while_disconnected(work: Callable[[], Any], stopped: threading.Event) -> Any:
    """Return the result of *work*; retry while the connection is lost, return None when stopped."""
    reported = False
    while not stopped.is_set():
        try:
            return work()
        except ConnectionLostError as error:
            if not reported:
                _print_stderr(f"{error_message(error)}; waiting for the connection")
                reported = True
            stopped.wait(_RECONNECT_DELAY_SECONDS)
    return None


# -- artifacts --------------------------------------------------------------------------------------


def put(service: ServiceOptions, name: ObjectName, file: Path, *, as_json: bool) -> FactsExit:
    """Store a file; resume an interrupted upload of the same bytes."""

    def work(client: Any) -> FactsExit:
        expected, (zone, bucket, key) = _digest_file(file), name
        start = client.uploaded_bytes(bucket, key, expected, zone=zone)
        with progress.transfer_progress("sent", expected.size) as update_progress:
            blob = Blob(lambda: _iter_unsent_chunks(file, start, update_progress))
            stored = client.put_object(bucket, key, blob, expected=expected, begin=start, zone=zone)
        if as_json:
            typer.echo(json_lib.dumps({"bucket": bucket, "key": key, "digest": stored.digest, "size": stored.size}))
        else:
            typer.echo(f"stored {stored.digest}, {stored.size:,} bytes")
        return FactsExit.OK

    return run_with_client(work, service, as_json=as_json)


def _digest_file(file: Path) -> StoredArtifact:
    digest, size = hashlib.sha256(), 0
    try:
        with progress.transfer_progress("read", file.stat().st_size) as update_progress:
            for chunk in Blob.from_file(file):
                digest.update(chunk)
                size += len(chunk)
                update_progress(size)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
    return StoredArtifact(f"sha256:{digest.hexdigest()}", size)


def _iter_unsent_chunks(file: Path, start: int, update_progress: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the bytes of *file* from byte *start* on: an interrupted upload has stored the bytes before."""
    skip = start
    sent = start
    for chunk in Blob.from_file(file):
        unsent = chunk[min(skip, len(chunk)) :]
        skip -= len(chunk) - len(unsent)
        if unsent:
            sent += len(unsent)
            update_progress(sent)
            yield unsent


def cat(service: ServiceOptions, name: ObjectName, output: Path | None) -> FactsExit:
    """Print an artifact, or write it to a temporary file and rename it to *output* when it is complete."""

    def work(client: Any) -> FactsExit:
        chunks = client.get_object(name.bucket, name.key, zone=name.zone)
        with progress.transfer_progress("received", None) as update_progress:
            if output is None:
                _copy_chunks(chunks, sys.stdout.buffer, update_progress)
                sys.stdout.buffer.flush()
                return FactsExit.OK
            partial_path = output.with_name(f".{output.name}.part")
            try:
                with partial_path.open("wb") as file:
                    _copy_chunks(chunks, file, update_progress)
                partial_path.replace(output)
            except OSError as error:
                raise ConfigurationError(f"{output} cannot be written: {error.strerror}") from error
            finally:
                partial_path.unlink(missing_ok=True)
        return FactsExit.OK

    return run_with_client(work, service, as_json=False)


def _copy_chunks(chunks: Iterator[bytes], file: Any, update_progress: Callable[[int], None]) -> None:
    size = 0
    for chunk in chunks:
        file.write(chunk)
        size += len(chunk)
        update_progress(size)


# -- maintenance ------------------------------------------------------------------------------------


def show_lag(service: ServiceOptions, *, as_json: bool) -> FactsExit:
    """Print the retained facts and the lag of each reader."""

    def work(client: Any) -> FactsExit:
        logs = sorted(client.list_logs(), key=lambda log: log.pair)
        if as_json:
            for line in logs_to_json_lines(logs):
                typer.echo(line)
        elif logs:
            print_lag(logs)
        else:
            _print_stderr("there are no facts that this identity may see")
        return FactsExit.OK

    return run_with_client(work, service, as_json=as_json)


def retire(
    service: ServiceOptions, reader: str, pair: ZonePair, *, actor: str, confirmed: bool, as_json: bool
) -> FactsExit:
    """Remove a reader after confirmation by the operator."""

    def work(client: Any) -> FactsExit:
        cursor = client.get_cursor(reader, pair)
        if cursor is not None and not confirmed:
            end = client.last_offset(pair)
            unread_count = max(0, (0 if end is None else end.offset) - cursor.offset)
            prompt = (
                f"{reader!r} has read up to {cursor.offset} from {pair.from_zone!r} to {pair.to_zone!r}; "
                f"{unread_count:,} unread facts may be deleted after this. Retire the reader?"
            )
            if not typer.confirm(prompt, err=True):
                _print_stderr("nothing was changed")
                return FactsExit.REJECTED
        is_retired = client.retire_reader(reader, pair, by=actor)
        if as_json:
            typer.echo(json_lib.dumps({"reader": reader, "retired": is_retired}))
        elif is_retired:
            typer.echo(f"{reader} is retired")
        else:
            _print_stderr(f"there is no reader {reader!r} from {pair.from_zone!r} to {pair.to_zone!r}")
        return FactsExit.OK if is_retired else FactsExit.REJECTED

    return run_with_client(work, service, as_json=as_json)


# -- helpers ----------------------------------------------------------------------------------------


def run_with_client(work: Callable[[Any], FactsExit], service: ServiceOptions, *, as_json: bool) -> FactsExit:
    """Call *work* with a client; print errors and return the exit code."""
    try:
        with _open_client(service) as client:
            return work(client)
    except FactError as error:
        return _report_error(error, FactsExit.REJECTED, as_json=as_json)
    except ConnectionLostError as error:
        return _report_error(error, FactsExit.UNAVAILABLE, as_json=as_json)
    except ErgonError as error:
        return _report_error(error, FactsExit.FAILED, as_json=as_json)


def _report_error(error: ErgonError, code: FactsExit, *, as_json: bool) -> FactsExit:
    if as_json:
        typer.echo(json_lib.dumps({"error": error_message(error), "code": error.code, "exit_code": int(code)}))
    else:
        _print_stderr(error_message(error))
    return code


def _open_client(service: ServiceOptions) -> Any:
    # Imported on demand: the libraries are an optional extra, and the error names the missing ones.
    extras.require_grpc()
    tls = importlib.import_module("ergon_framework.facts.service.tls")
    channel = importlib.import_module("ergon_framework.facts.service.channel")
    client = importlib.import_module("ergon_framework.facts.service.client")
    return client.BoundaryClient(
        channel.ServiceAddress(
            host=service.server,
            files=tls.TlsFiles(service.certificate, service.key, service.authorities),
            name=service.server_name,
            deadline=service.timeout,
        )
    )


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)
