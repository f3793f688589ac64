"""Work of the ``ergon facts`` commands: call the service and print the result."""

from __future__ import annotations

import hashlib
import importlib
import json as jsons
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from ergon_framework.cli import facts_progress as progress
from ergon_framework.cli import facts_view as view
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError, error_message
from ergon_framework.facts.blob import Blob
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Cursor, Envelope, Fact, ObjectName, StoredArtifact, StoredFact, ZonePair
from ergon_framework.facts.service import libraries
from ergon_framework.runner.exits import ExitCode

#: Facts per fetch call.
_FETCH_BATCH = 1_000
#: Seconds between polls of a tail without a notification, and between connection attempts after a lost connection.
_POLL_INTERVAL_SECONDS = 30.0
_RECONNECT_DELAY_SECONDS = 1.0


class FactsExit(ExitCode):
    """Exit codes of ``ergon facts`` and their meanings; ``serve`` has its own."""

    OK = 0, "done"
    REJECTED = 1, "refused, or it is not there; the message says why"
    FAILED = 2, "the command line, a file or a certificate is wrong"
    UNAVAILABLE = 3, "the service is out of reach; nobody knows whether it was done, and running it again is safe"


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Address of the service and credentials of the caller, from the command line."""

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
            raise typer.BadParameter("--from-offset and --since both say where to begin; give one of the two")
        if self.confirm and (self.from_offset is not None or self.since is not None):
            raise typer.BadParameter("--confirm moves the cursor, and reading again leaves it; leave one of them out")


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
            typer.echo(jsons.dumps(view.confirmation_data(confirmation)))
        else:
            duplicate_text = ", as before" if confirmation.duplicate else ""
            typer.echo(f"confirmed in the {confirmation.buffer} at offset {confirmation.offset}{duplicate_text}")
        return FactsExit.OK

    return run_with_client(work, service, as_json=as_json)


def get(service: ServiceOptions, from_zone: str, message_id: str, *, as_json: bool) -> FactsExit:
    """Print the confirmation stored for a message id."""

    def work(client: Any) -> FactsExit:
        confirmation = client.get_fact(from_zone, message_id)
        if as_json:
            typer.echo(jsons.dumps(None if confirmation is None else view.confirmation_data(confirmation)))
        elif confirmation is not None:
            typer.echo(f"confirmed in the {confirmation.buffer} at offset {confirmation.offset}, {confirmation.digest}")
        else:
            _print_stderr(f"there is no fact {message_id!r} of {from_zone!r}")
        return FactsExit.REJECTED if confirmation is None else FactsExit.OK

    return run_with_client(work, service, as_json=as_json)


# -- reading --------------------------------------------------------------------------------------------


class _FactReader:
    """Reads facts in batches and prints them as they arrive."""

    def __init__(self, client: Any, options: FetchOptions, *, as_json: bool) -> None:
        self._client = client
        self._options = options
        self._format = view.fact_to_json if as_json else view.format_fact
        self._position: Cursor | None = None
        self.seek_start()

    def seek_start(self) -> None:
        """Find the start position."""
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
        with progress.byte_progress("read", min(limit, reader.count_remaining()), unit="facts") as update_progress:
            while read_count < limit and (facts := reader.print_next(limit - read_count)):
                read_count += len(facts)
                update_progress(read_count)
        if not read_count and not as_json:
            _print_stderr("there is nothing new")
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
    with progress.byte_progress("caught up with", remaining, unit="facts") as update_progress:
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
                _print_stderr(f"{error_message(error)}; waiting for the line")
                reported = True
            stopped.wait(_RECONNECT_DELAY_SECONDS)
    return None


# -- artifacts ------------------------------------------------------------------------------------------


def put(service: ServiceOptions, name: ObjectName, file: Path, *, as_json: bool) -> FactsExit:
    """Store a file; resume an interrupted upload of the same bytes."""

    def work(client: Any) -> FactsExit:
        expected, (zone, bucket, key) = _digest_file(file), name
        start = client.uploaded_bytes(bucket, key, expected, zone=zone)
        with progress.byte_progress("sent", expected.size) as update_progress:
            blob = Blob(lambda: _iter_unsent_chunks(file, start, update_progress))
            stored = client.put_object(bucket, key, blob, expected=expected, begin=start, zone=zone)
        if as_json:
            typer.echo(jsons.dumps({"bucket": bucket, "key": key, "digest": stored.digest, "size": stored.size}))
        else:
            typer.echo(f"stored {stored.digest}, {stored.size:,} bytes")
        return FactsExit.OK

    return run_with_client(work, service, as_json=as_json)


def _digest_file(file: Path) -> StoredArtifact:
    digest, size = hashlib.sha256(), 0
    try:
        with progress.byte_progress("read", file.stat().st_size) as update_progress:
            for chunk in Blob.from_file(file):
                digest.update(chunk)
                size += len(chunk)
                update_progress(size)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
    return StoredArtifact(f"sha256:{digest.hexdigest()}", size)


def _iter_unsent_chunks(file: Path, start: int, update_progress: Callable[[int], None]) -> Iterator[bytes]:
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
        with progress.byte_progress("received", None) as update_progress:
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


# -- maintenance ----------------------------------------------------------------------------------------


def show_lag(service: ServiceOptions, *, as_json: bool) -> FactsExit:
    """Print the retained facts and the lag of each reader."""

    def work(client: Any) -> FactsExit:
        logs = sorted(client.list_logs(), key=lambda log: log.pair)
        if as_json:
            for line in view.logs_to_json_lines(logs):
                typer.echo(line)
        elif logs:
            view.print_lag(logs)
        else:
            _print_stderr("there are no facts that you may see")
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
                f"{reader!r} has read up to {cursor.offset} from {pair.from_zone!r} to {pair.to_zone!r} and lacks "
                f"{unread_count:,} facts, which nobody may keep for him then. Retire him?"
            )
            if not typer.confirm(prompt, err=True):
                _print_stderr("nothing was changed")
                return FactsExit.REJECTED
        is_retired = client.retire_reader(reader, pair, by=actor)
        if as_json:
            typer.echo(jsons.dumps({"reader": reader, "retired": is_retired}))
        elif is_retired:
            typer.echo(f"{reader} is retired")
        else:
            _print_stderr(f"nobody called {reader!r} reads from {pair.from_zone!r} to {pair.to_zone!r}")
        return FactsExit.OK if is_retired else FactsExit.REJECTED

    return run_with_client(work, service, as_json=as_json)


# -- helpers --------------------------------------------------------------------------------------------


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
        typer.echo(jsons.dumps({"error": error_message(error), "code": error.code, "exit_code": int(code)}))
    else:
        _print_stderr(error_message(error))
    return code


def _open_client(service: ServiceOptions) -> Any:
    # Imported on demand: the libraries are an optional extra, and the error names the missing ones.
    libraries.require_grpc()
    files = importlib.import_module("ergon_framework.facts.service.files")
    address = importlib.import_module("ergon_framework.facts.service.address")
    client = importlib.import_module("ergon_framework.facts.service.client")
    return client.BoundaryClient(
        address.ServiceAddress(
            host=service.server,
            files=files.TlsFiles(service.certificate, service.key, service.authorities),
            name=service.server_name,
            deadline=service.timeout,
        )
    )


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)
