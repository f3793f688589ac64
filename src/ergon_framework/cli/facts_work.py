"""What ``ergon facts`` does with a service: ask it, and say what it answered."""

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
from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError, text
from ergon_framework.facts.blob import Blob
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Cursor, Envelope, Fact, ObjectName, Pair, Stored, StoredFact
from ergon_framework.facts.service import libraries
from ergon_framework.runner.exits import ExitCode

#: Facts that are asked for at once.
_BATCH = 1_000
#: Seconds after which a tail looks again though nobody has rung; and after which it tries a line that is down.
_LOOK = 30.0
_AGAIN = 1.0


class FactsExit(ExitCode):
    """Every exit code of ``ergon facts`` with what it means; ``serve`` has its own."""

    OK = 0, "done"
    NOT = 1, "refused, or it is not there; the message says why"
    FAILED = 2, "the command line, a file or a certificate is wrong"
    UNREACHED = 3, "the service is out of reach; nobody knows whether it was done, and running it again is safe"


@dataclass(frozen=True, slots=True)
class Where:
    """The service and who we are, as the command line has them."""

    server: str
    certificate: Path
    key: Path
    authorities: Path
    name: str | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Stated:
    """A fact as the command line has it."""

    message_id: str
    pair: Pair
    subject: str
    predicate: str
    object_json: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which facts are read, from where on, and whether that is remembered."""

    pair: Pair
    reader: str
    from_offset: int | None
    since: datetime | None
    confirm: bool

    def __post_init__(self) -> None:
        if self.from_offset is not None and self.since is not None:
            raise typer.BadParameter("--from-offset and --since both say where to begin; give one of the two")
        if self.confirm and (self.from_offset is not None or self.since is not None):
            raise typer.BadParameter("--confirm moves the cursor, and reading again leaves it; leave one of them out")


def appended(where: Where, stated: Stated, *, as_json: bool) -> FactsExit:
    """Append, and print the offset."""

    def work(client: Any) -> FactsExit:
        written = sys.stdin.read() if stated.object_json == "-" else stated.object_json
        envelope = Envelope(
            message_id=stated.message_id,
            from_zone=stated.pair.from_zone,
            to_zone=stated.pair.to_zone,
            produced_at_unix_ms=int(time.time() * 1000),
        )
        fact = Fact(subject=stated.subject, predicate=stated.predicate, object_json=written)
        told = client.append_fact(envelope, fact)
        if as_json:
            typer.echo(jsons.dumps(view.confirmation(told)))
        else:
            again = ", as before" if told.duplicate else ""
            typer.echo(f"confirmed in the {told.buffer} at offset {told.offset}{again}")
        return FactsExit.OK

    return done(work, where, as_json=as_json)


def got(where: Where, from_zone: str, message_id: str, *, as_json: bool) -> FactsExit:
    """Print what was confirmed."""

    def work(client: Any) -> FactsExit:
        found = client.get_fact(from_zone, message_id)
        if as_json:
            typer.echo(jsons.dumps(None if found is None else view.confirmation(found)))
        elif found is not None:
            typer.echo(f"confirmed in the {found.buffer} at offset {found.offset}, {found.digest}")
        else:
            _say(f"there is no fact {message_id!r} of {from_zone!r}")
        return FactsExit.NOT if found is None else FactsExit.OK

    return done(work, where, as_json=as_json)


# -- reading --------------------------------------------------------------------------------------------


class _Reading:
    """Facts one batch after the other, printed as they come."""

    def __init__(self, client: Any, wanted: Wanted, *, as_json: bool) -> None:
        self._client = client
        self._wanted = wanted
        self._line = view.fact_line if as_json else view.fact_words
        self._after: Cursor | None = None
        self.begin()

    def begin(self) -> None:
        """Find out where to begin."""
        pair = self._wanted.pair
        if self._wanted.since is not None:
            self._after = self._client.cursor_at(pair, int(self._wanted.since.timestamp() * 1000))
        elif self._wanted.from_offset is not None:
            end = self._client.end_of(pair)
            self._after = Cursor("" if end is None else end.epoch, self._wanted.from_offset - 1)

    def next(self, limit: int) -> Sequence[StoredFact]:
        """Print the next ones, at most so many; none if there are none."""
        wanted = self._wanted
        found: Sequence[StoredFact] = self._client.fetch_facts(
            wanted.reader, wanted.pair, min(limit, _BATCH), after=self._after
        )
        for each in found:
            typer.echo(self._line(each))
        if found:
            sys.stdout.flush()
            self._after = found[-1].cursor
            if wanted.confirm:
                self._client.confirm_receipt(wanted.reader, wanted.pair, found[-1].cursor)
        return found

    def behind(self) -> int:
        """How many there are yet to come."""
        pair, end = self._wanted.pair, self._client.end_of(self._wanted.pair)
        known = self._after or self._client.cursor_of(self._wanted.reader, pair)
        return 0 if end is None else max(0, end.offset - (0 if known is None else known.offset))


def fetched(where: Where, wanted: Wanted, *, limit: int, as_json: bool) -> FactsExit:
    """Print facts, at most *limit*."""

    def work(client: Any) -> FactsExit:
        reading = _Reading(client, wanted, as_json=as_json)
        read = 0
        with progress.shown("read", min(limit, reading.behind()), unit="facts") as moved:
            while read < limit and (found := reading.next(limit - read)):
                read += len(found)
                moved(read)
        if not read and not as_json:
            _say("there is nothing new")
        return FactsExit.OK

    return done(work, where, as_json=as_json)


def tailed(where: Where, wanted: Wanted, *, as_json: bool) -> FactsExit:
    """Print facts as they come, until a signal does."""
    stopped = threading.Event()
    rung = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        rung.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def work(client: Any) -> FactsExit:
        reading = _patiently(lambda: _Reading(client, wanted, as_json=as_json), stopped)
        unlisten = client.listen(rung.set)
        try:
            while reading is not None and not stopped.is_set():
                rung.clear()
                _patiently(lambda: _catch_up(reading, stopped), stopped)
                rung.wait(_LOOK)
        finally:
            unlisten()
        return FactsExit.OK

    try:
        return done(work, where, as_json=as_json)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _catch_up(reading: _Reading, stopped: threading.Event) -> None:
    behind = reading.behind()
    read = 0
    with progress.shown("caught up with", behind, unit="facts") as moved:
        while not stopped.is_set() and (found := reading.next(_BATCH)):
            read += len(found)
            moved(read)


def _patiently(work: Callable[[], Any], stopped: threading.Event) -> Any:
    """What *work* returns, once the line is there."""
    told = False
    while not stopped.is_set():
        try:
            return work()
        except ConnectionLost as error:
            if not told:
                _say(f"{text(error)}; waiting for the line")
                told = True
            stopped.wait(_AGAIN)
    return None


# -- artifacts ------------------------------------------------------------------------------------------


def put(where: Where, name: ObjectName, file: Path, *, as_json: bool) -> FactsExit:
    """Store a file, going on where an earlier upload of the same bytes broke off."""

    def work(client: Any) -> FactsExit:
        expected, (zone, bucket, key) = _digested(file), name
        begin = client.received(bucket, key, expected, zone=zone)
        with progress.shown("sent", expected.size) as moved:
            blob = Blob(lambda: _counted(file, begin, moved))
            stored = client.put_object(bucket, key, blob, expected=expected, begin=begin, zone=zone)
        if as_json:
            typer.echo(jsons.dumps({"bucket": bucket, "key": key, "digest": stored.digest, "size": stored.size}))
        else:
            typer.echo(f"stored {stored.digest}, {stored.size:,} bytes")
        return FactsExit.OK

    return done(work, where, as_json=as_json)


def _digested(file: Path) -> Stored:
    made, size = hashlib.sha256(), 0
    try:
        with progress.shown("read", file.stat().st_size) as moved:
            for piece in Blob.file(file):
                made.update(piece)
                size += len(piece)
                moved(size)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
    return Stored(f"sha256:{made.hexdigest()}", size)


def _counted(file: Path, begin: int, moved: Callable[[int], None]) -> Iterator[bytes]:
    skip = begin
    sent = begin
    for piece in Blob.file(file):
        part = piece[min(skip, len(piece)) :]
        skip -= len(piece) - len(part)
        if part:
            sent += len(part)
            moved(sent)
            yield part


def written(where: Where, name: ObjectName, output: Path | None) -> FactsExit:
    """Print an artifact, or write it beside *output* and put it there once it is whole."""

    def work(client: Any) -> FactsExit:
        pieces = client.get_object(name.bucket, name.key, zone=name.zone)
        with progress.shown("received", None) as moved:
            if output is None:
                _copied(pieces, sys.stdout.buffer, moved)
                sys.stdout.buffer.flush()
                return FactsExit.OK
            partial = output.with_name(f".{output.name}.part")
            try:
                with partial.open("wb") as file:
                    _copied(pieces, file, moved)
                partial.replace(output)
            except OSError as error:
                raise ConfigurationError(f"{output} cannot be written: {error.strerror}") from error
            finally:
                partial.unlink(missing_ok=True)
        return FactsExit.OK

    return done(work, where, as_json=False)


def _copied(pieces: Iterator[bytes], file: Any, moved: Callable[[int], None]) -> None:
    size = 0
    for piece in pieces:
        file.write(piece)
        size += len(piece)
        moved(size)


# -- looking after it -----------------------------------------------------------------------------------


def lagging(where: Where, *, as_json: bool) -> FactsExit:
    """Print what is retained, and who is behind."""

    def work(client: Any) -> FactsExit:
        logs = sorted(client.survey(), key=lambda log: log.pair)
        if as_json:
            for line in view.log_lines(logs):
                typer.echo(line)
        elif logs:
            view.show_lag(logs)
        else:
            _say("there are no facts that you may see")
        return FactsExit.OK

    return done(work, where, as_json=as_json)


def retired(where: Where, reader: str, pair: Pair, *, by: str, sure: bool, as_json: bool) -> FactsExit:
    """Forget a reader, if whoever asks is sure."""

    def work(client: Any) -> FactsExit:
        cursor = client.cursor_of(reader, pair)
        if cursor is not None and not sure:
            end = client.end_of(pair)
            behind = max(0, (0 if end is None else end.offset) - cursor.offset)
            words = (
                f"{reader!r} has read up to {cursor.offset} from {pair.from_zone!r} to {pair.to_zone!r} and lacks "
                f"{behind:,} facts, which nobody may keep for him then. Retire him?"
            )
            if not typer.confirm(words, err=True):
                _say("nothing was changed")
                return FactsExit.NOT
        gone = client.retire_reader(reader, pair, by=by)
        if as_json:
            typer.echo(jsons.dumps({"reader": reader, "retired": gone}))
        elif gone:
            typer.echo(f"{reader} is retired")
        else:
            _say(f"nobody called {reader!r} reads from {pair.from_zone!r} to {pair.to_zone!r}")
        return FactsExit.OK if gone else FactsExit.NOT

    return done(work, where, as_json=as_json)


# -- around it ------------------------------------------------------------------------------------------


def done(work: Callable[[Any], FactsExit], where: Where, *, as_json: bool) -> FactsExit:
    """Do *work* with a client, and say what went wrong."""
    try:
        with _client(where) as client:
            return work(client)
    except FactError as error:
        return _failed(error, FactsExit.NOT, as_json=as_json)
    except ConnectionLost as error:
        return _failed(error, FactsExit.UNREACHED, as_json=as_json)
    except ErgonError as error:
        return _failed(error, FactsExit.FAILED, as_json=as_json)


def _failed(error: ErgonError, code: FactsExit, *, as_json: bool) -> FactsExit:
    if as_json:
        typer.echo(jsons.dumps({"error": text(error), "code": error.code, "exit_code": int(code)}))
    else:
        _say(text(error))
    return code


def _client(where: Where) -> Any:
    # Loaded when it is needed: not everybody has its libraries, and it says which are missing.
    libraries.needed()
    files = importlib.import_module("ergon_framework.facts.service.files")
    address = importlib.import_module("ergon_framework.facts.service.address")
    client = importlib.import_module("ergon_framework.facts.service.client")
    return client.BoundaryClient(
        address.Address(
            host=where.server,
            files=files.TlsFiles(where.certificate, where.key, where.authorities),
            name=where.name,
            deadline=where.timeout,
        )
    )


def _say(words: str) -> None:
    typer.echo(f"ergon: {words}", err=True)
