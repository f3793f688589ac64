"""Run a producer from JSON lines, as a task of ``ergon run``.

To produce a transaction is to send it through a connector. A daemon thread reads the input, because a read may block
without limit. The task produces one chunk after the other, so that an input of any length needs the memory of a few
chunks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias, TypeVar

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.gates import Gate, first_pause
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import LoopStalled, LoopTimeout
from ergon_framework.worker.policies import ProducerPolicy
from ergon_framework.worker.report import OutcomeKind, ProduceReport, Report, StopReason
from ergon_framework.worker.running import running_loops, share_running_loops

#: Standard input, as a file name.
STDIN: Final = "-"
#: Transactions of one produce call, and bytes after which a call takes no further line.
MAX_CHUNK: Final = 1_000
MAX_CHUNK_BYTES: Final = 8 * 1024 * 1024
#: Maximum length of one line of the input.
MAX_LINE_BYTES: Final = 4 * 1024 * 1024
#: Number of chunks that are read ahead of the one that is produced.
READ_AHEAD: Final = 2
_ENVELOPE: Final = frozenset(
    ("id", "payload", "source", "type", "schema_version", "key", "tenant", "correlation", "causation", "expires_at")
)

T = TypeVar("T")
#: A generator that yields calls and gets their results; the sync and the async variant make the calls.
_CallGenerator: TypeAlias = Generator[Callable[[], Any], Any, T]


class InputError(ConfigurationError):
    """A line of the input is not a transaction."""


class ProduceIncomplete(ErgonError):
    """Transactions failed, or part of the input was not sent; ``report`` has the counts."""

    code = "produce_incomplete"

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


class InputChunk(NamedTuple):
    """Transactions of consecutive lines, and the number of the last line."""

    transactions: list[Transaction]
    last: int


# -- reading --------------------------------------------------------------------------------------


def parse_line(line: bytes, number: int, *, task: str) -> Transaction:
    """Build the transaction of one line.

    An object with the keys ``id`` and ``payload`` is an envelope; any other JSON value is a payload. The
    id of a payload is derived from the task, the number of the line and its bytes, so that a second run of
    the same input sends the same ids.
    """
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"line {number} of the input is longer than {MAX_LINE_BYTES} bytes; send a reference")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"line {number} of the input is not JSON: {error}; write one JSON value per line") from None
    if not (isinstance(value, Mapping) and {"id", "payload"} <= value.keys()):
        digest = hashlib.sha256(f"{task}\n{number}\n".encode() + line.strip())
        return Transaction(value, id=digest.hexdigest()[:32], created_at=time.time())
    unknown = sorted(value.keys() - _ENVELOPE)
    if unknown:
        raise InputError(
            f"line {number} of the input is an envelope with the unknown keys {', '.join(unknown)}; known are "
            f"{', '.join(sorted(_ENVELOPE))}. Wrap a payload that itself has the keys id and payload in an envelope"
        )
    try:
        return Transaction(created_at=time.time(), **value)
    except (TypeError, ValueError) as error:
        raise InputError(f"line {number} of the input is not an envelope: {error}") from None


def read_chunks(stream: BinaryIO, *, task: str) -> Iterator[InputChunk]:
    """Read *stream* in chunks. The lines before an invalid one are yielded, then InputError is raised."""
    transactions: list[Transaction] = []
    number = size = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not line.strip():
            continue
        try:
            transactions.append(parse_line(line, number, task=task))
        except InputError:
            if transactions:
                yield InputChunk(transactions, number - 1)
            raise
        size += len(line)
        if len(transactions) >= MAX_CHUNK or size >= MAX_CHUNK_BYTES:
            yield InputChunk(transactions, number)
            transactions, size = [], 0
    if transactions:
        yield InputChunk(transactions, number)


class _InputReader:
    """Reads on a separate thread."""

    def __init__(self, stream: BinaryIO, *, task: str) -> None:
        self._stream = stream
        self._task = task
        self._capacity = Semaphore(READ_AHEAD)
        #: Chunks, then None at the end of the input, or the error that ended it.
        self._items: SimpleQueue[InputChunk | Exception | None] = SimpleQueue()

    def start(self) -> None:
        Thread(target=self._read, name="ergon-input", daemon=True).start()

    def take(self, timeout: float | None) -> InputChunk | None:
        """Wait for the next chunk, or None at the end; raise queue.Empty after *timeout* seconds."""
        item = self._items.get(timeout=timeout)
        self._capacity.release()
        if isinstance(item, Exception):
            raise item
        return item

    def wake(self) -> None:
        """Let ``take`` return immediately, even while a read of the input blocks."""
        self._items.put(None)

    def _read(self) -> None:
        try:
            with self._stream:
                for chunk in read_chunks(self._stream, task=self._task):
                    self._capacity.acquire()
                    self._items.put(chunk)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread; take() raises it
            self._items.put(error)
        else:
            self._items.put(None)


# -- the task -------------------------------------------------------------------------------------


class _InputProducer:
    """The shared part of both variants: the next chunk, its policy, and the report."""

    #: Read by the probes: the input producer itself is never stuck, and has no fetched messages.
    live = True
    not_fetching_reason: str | None = None
    in_flight = 0

    _sleep: Callable[[float], Any]
    _take: Callable[[float | None], Any]

    def _bind(self, producer: Any, source: str) -> None:
        self.producer = producer
        self._reader = _InputReader(_open(source), task=producer.name)
        self._stopped = False
        #: Whether the whole input was read; set when the reader returns the end instead of a chunk.
        self._is_read = False
        #: The last line whose transaction has an outcome.
        self._last_line = 0
        self.report = Report()
        # The process stops and probes this object; the loops that run are those of the producer.
        share_running_loops(self, producer)
        if hasattr(producer, "telemetry"):
            self.telemetry = producer.telemetry

    @property
    def name(self) -> str:
        return str(self.producer.name)

    def stop(self) -> None:
        """Drain the present call and read no more; a second call ends the drain. Thread-safe."""
        self._stopped = True
        self._reader.wake()
        self.producer.stop()

    def _generate_calls(self, policy: ProducerPolicy, gates: tuple[Gate, ...]) -> _CallGenerator[Report]:
        """Yield one call after the other; the variant makes the call and sends its result, or throws its error."""
        deadline = None if policy.loop.timeout is None else time.monotonic() + policy.loop.timeout
        self._reader.start()
        while True:
            while (pause := first_pause(gates)) is not None and not self._stopped:
                yield partial(self._sleep, pause.seconds)
            chunk_policy = self._next_policy(policy, deadline)
            if isinstance(chunk_policy, StopReason):
                return self._finish(chunk_policy, policy)
            chunk = yield from self._next_chunk(deadline)
            if isinstance(chunk, StopReason):
                return self._finish(chunk, policy)
            end = yield from self._produce(chunk, chunk_policy)
            if end is not StopReason.DONE:
                return self._finish(end, policy)

    def _next_policy(self, policy: ProducerPolicy, deadline: float | None) -> ProducerPolicy | StopReason:
        """Return the policy of the next call, with the rest of limit and timeout; or the reason to end."""
        changes: dict[str, Any] = {}
        if policy.loop.limit is not None:
            changes["limit"] = policy.loop.limit - self.report.started
            if changes["limit"] <= 0:
                return StopReason.LIMIT
        if deadline is not None:
            changes["timeout"] = deadline - time.monotonic()
            if changes["timeout"] <= 0:
                return StopReason.TIMEOUT
        return policy.model_copy(update={"loop": policy.loop.model_copy(update=changes)}) if changes else policy

    def _next_chunk(self, deadline: float | None) -> _CallGenerator[InputChunk | StopReason]:
        """Return the next chunk, or the reason to end."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            chunk: InputChunk | None = yield partial(self._take, timeout)
        except Empty:
            return StopReason.TIMEOUT
        except InputError as error:
            self._attach_report(error)
            raise
        if self._stopped:
            return StopReason.STOP
        self._is_read = chunk is None
        return StopReason.DONE if chunk is None else chunk

    def _produce(self, chunk: InputChunk, chunk_policy: ProducerPolicy) -> _CallGenerator[StopReason]:
        """Produce one chunk and add its outcomes to the report; return DONE, or why the run ends."""
        try:
            produced: ProduceReport = yield partial(
                self.producer.produce_transactions, chunk.transactions, chunk_policy
            )
        except (LoopTimeout, LoopStalled) as error:
            self._add(chunk, error.report)
            self.report.stop_reason = error.report.stop_reason
            raise type(error)(f"{error}; {self._describe_rest()}", self.report) from error
        except ConfigurationError as error:
            lines = f"lines {self._last_line + 1} to {chunk.last}"
            wrapped = ConfigurationError(f"{lines} of the input cannot be produced: {error}")
            self._attach_report(wrapped)
            raise wrapped from error
        self._add(chunk, produced)
        return produced.stop_reason

    def _add(self, chunk: InputChunk, produced: ProduceReport) -> None:
        report = self.report
        self._last_line = chunk.last
        for outcome in produced.outcomes:
            report.add(outcome)
            report.started += outcome.started
        report.still_running += produced.still_running
        report.late_results += produced.late_results

    def _attach_report(self, error: Any) -> None:
        """Attach the report to *error* if there is at least one outcome."""
        if self.report.finished:
            error.report = self.report

    def _finish(self, end: StopReason, policy: ProducerPolicy) -> Report:
        """Return the report, or raise the error that names the rest of the input."""
        report = self.report
        report.stop_reason = end
        rest = self._describe_rest()
        if end is StopReason.TIMEOUT:
            raise LoopTimeout(f"the run reached its timeout of {policy.loop.timeout} s; {rest}", report)
        failed, released = (
            report.counts[OutcomeKind.FAILED] + report.counts[OutcomeKind.EXCEPTION_HANDLER_FAILED],
            report.counts[OutcomeKind.RELEASED],
        )
        if released or end is StopReason.STOP:
            rest = f"{released} transactions were released, of which {report.released_started} had started; {rest}"
        if failed:
            raise ProduceIncomplete(f"{failed} of {report.finished} transactions failed; {rest}", report)
        if end is StopReason.STOP:
            raise ProduceIncomplete(f"the run was stopped: {rest}", report)
        return report

    def _describe_rest(self) -> str:
        return "the input was read to its end" if self._is_read else f"lines after {self._last_line} were not produced"


class InputProducer(_InputProducer, Task):
    """Feeds a producer on threads."""

    def __init__(self, producer: Any, source: str) -> None:
        self._bind(producer, source)
        super().__init__(producer.connector, gates=producer.gates)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the lifespan and the connector of the producer."""
        with self.producer.open():
            yield

    def consume_transactions(self, policy: ProducerPolicy, *, gates: Sequence[Gate] = (), **_: Any) -> Report:
        """Produce chunk after chunk until the input ends, or until there is another reason to end."""
        calls = self._generate_calls(policy, tuple(gates))
        advance = partial(calls.send, None)
        with running_loops(self).track(self, _ignore_stop):
            while True:
                try:
                    call = advance()
                except StopIteration as stop:
                    report: Report = stop.value
                    return report
                try:
                    advance = partial(calls.send, call())
                except Exception as error:  # noqa: BLE001 - the generator raises what it does not handle
                    advance = partial(calls.throw, error)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _take(self, timeout: float | None) -> InputChunk | None:
        return self._reader.take(timeout)


class AsyncInputProducer(_InputProducer, AsyncTask):
    """Feeds a producer on asyncio, otherwise as InputProducer does."""

    def __init__(self, producer: Any, source: str) -> None:
        self._bind(producer, source)
        super().__init__(producer.connector, gates=producer.gates)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open the lifespan and the connector of the producer."""
        async with self.producer.open():
            yield

    async def consume_transactions(self, policy: ProducerPolicy, *, gates: Sequence[Gate] = (), **_: Any) -> Report:
        """Produce as InputProducer does."""
        calls = self._generate_calls(policy, tuple(gates))
        advance = partial(calls.send, None)
        with running_loops(self).track(self, _ignore_stop):
            while True:
                try:
                    call = advance()
                except StopIteration as stop:
                    report: Report = stop.value
                    return report
                try:
                    advance = partial(calls.send, await call())
                except Exception as error:  # noqa: BLE001 - the generator raises what it does not handle
                    advance = partial(calls.throw, error)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _take(self, timeout: float | None) -> InputChunk | None:
        return await asyncio.to_thread(self._reader.take, timeout)


def create_input_producer(producer: Task | AsyncTask, source: str) -> InputProducer | AsyncInputProducer:
    """Return a task that produces the lines of *source*, a file or ``-`` for standard input."""
    return AsyncInputProducer(producer, source) if isinstance(producer, AsyncTask) else InputProducer(producer, source)


def _open(source: str) -> BinaryIO:
    if source == STDIN:
        # Not sys.stdin itself: the interpreter cannot end while a thread reads it.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        return Path(source).open("rb")
    except OSError as error:
        message = f"input {source!r} cannot be read: {error.strerror}; pass a file, or - for standard input"
        raise ConfigurationError(message) from error


def _ignore_stop() -> None:
    """Do nothing: ``stop`` of the input producer ends the run."""
