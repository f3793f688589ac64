"""The streams, subjects and consumer of a queue: their names and their configuration.

A queue has three streams: the messages, the states of deferred or released messages, and the dead letters. A consumer
is the server's record of which messages of a stream were delivered and acked; all workers share one.

Streams and the consumer are created if they are missing, and checked if they exist.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.connection import Connection
from ergon_framework.errors import ConfigurationError

#: The consumer that all workers of a queue share.
CONSUMER: Final = "ergon"
#: Maximum characters of the readable part of a name: the server also uses stream names as directory names.
_MAX_NAME_CHARS: Final = 150
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")


class StreamNames(NamedTuple):
    """The names of one queue's streams, and the subjects of their messages."""

    work: str
    states: str
    dead: str
    #: The subject for other producers; the connector publishes one level below, by id.
    subject: str
    state_subject: str
    dead_subject: str

    def subject_for(self, transaction_id: str) -> str:
        """Return the subject of a transaction, by which it can be found again."""
        return f"{self.subject}.{hashlib.blake2b(transaction_id.encode(), digest_size=16).hexdigest()}"

    def delayed_subject_for(self, transaction_id: str, due: float) -> str:
        """Return the subject of a transaction that is due at *due*, in seconds since the epoch.

        It ends with the time in milliseconds, so that delayed messages can be counted without their contents.
        """
        return f"{self.subject_for(transaction_id)}.{math.ceil(due * 1000)}"


def stream_names(queue: str) -> StreamNames:
    """Return the names that belong to *queue*; no two queues share one.

    >>> stream_names("orders").work
    'ERGON-WORK-orders'
    >>> stream_names("orders.eu").subject
    'ergon.work.orders=2E=eu'
    """
    safe = _UNSAFE.sub(lambda match: f"={match[0].encode().hex().upper()}=", queue)
    if len(safe) > _MAX_NAME_CHARS:
        safe = f"{safe[:_MAX_NAME_CHARS]}=-{hashlib.sha256(queue.encode()).hexdigest()[:32]}"
    # The names are those of existing streams, and stay as they are: "notes" are the message states.
    return StreamNames(
        work=f"ERGON-WORK-{safe}",
        states=f"ERGON-NOTES-{safe}",
        dead=f"ERGON-DEAD-{safe}",
        subject=f"ergon.work.{safe}",
        state_subject=f"ergon.notes.{safe}",
        dead_subject=f"ergon.dead.{safe}",
    )


# -- configuration ----------------------------------------------------------------------------------

_DAY_SECONDS: Final = 86_400.0
#: Pull requests of all workers that may wait at the same time.
_MAX_WAITING_PULLS: Final = 10_000


class StreamConfig(NamedTuple):
    """The required configuration of a queue's streams and consumer."""

    names: StreamNames
    #: Seconds after which the server redelivers a message that was neither acked nor renewed.
    lease: float
    subjects: Sequence[str]
    replicas: int
    #: Days for which dead letters are kept; None for no limit.
    dead_days: float | None

    def _stream_config(self, name: str, subjects: Sequence[str], **extra: Any) -> dict[str, Any]:
        return {
            "name": name,
            "subjects": list(subjects),
            "storage": "file",
            "discard": "new",
            "num_replicas": self.replicas,
            "allow_rollup_hdrs": False,
            **extra,
        }

    def work_stream(self) -> dict[str, Any]:
        """Return the work stream's configuration: an ack deletes, so it holds ready, delayed and in-flight messages."""
        names = self.names
        return self._stream_config(
            names.work, [names.subject, f"{names.subject}.>", *self.subjects], retention="workqueue"
        )

    def state_stream(self) -> dict[str, Any]:
        """Return the configuration of the state stream, which keeps the latest message of each key."""
        names = self.names
        return self._stream_config(
            names.states, [f"{names.state_subject}.>"], retention="limits", max_msgs_per_subject=1, discard="old"
        )

    def dead_letter_stream(self) -> dict[str, Any]:
        names = self.names
        max_age = 0 if self.dead_days is None else api.to_nanoseconds(self.dead_days * _DAY_SECONDS)
        return self._stream_config(names.dead, [f"{names.dead_subject}.>"], retention="limits", max_age=max_age)

    def consumer_config(self) -> dict[str, Any]:
        return {
            "durable_name": CONSUMER,
            "ack_policy": "explicit",
            "ack_wait": api.to_nanoseconds(self.lease),
            "deliver_policy": "all",
            "replay_policy": "instant",
            # Workers count and dead-letter: a message that the server stopped delivering would be lost from sight.
            "max_deliver": -1,
            # A limit would be shared by all workers, and deferred messages would use it up.
            "max_ack_pending": -1,
            "max_waiting": _MAX_WAITING_PULLS,
        }


class StreamStorage(NamedTuple):
    """How the server stores the work stream."""

    #: ``file`` or ``memory``.
    kind: str = "file"
    #: Whether the server confirms messages before it has written them; possible since 2.12.
    confirms_early: bool = False


class StreamState(NamedTuple):
    """The state of streams that were found or created."""

    storage: StreamStorage
    #: Number of message states.
    state_count: int


async def ensure_streams(connection: Connection, layout: StreamConfig) -> StreamState:
    """Create missing streams; reject existing ones whose configuration would lose work."""
    work = await _ensure_stream(connection, layout.work_stream())
    _check_work(work["config"], layout)
    states = await _ensure_stream(connection, layout.state_stream())
    dead = await _ensure_stream(connection, layout.dead_letter_stream())
    if dead["config"].get("max_age", 0) != layout.dead_letter_stream()["max_age"]:
        config = {**dead["config"], "max_age": layout.dead_letter_stream()["max_age"]}
        await api.call(connection, f"STREAM.UPDATE.{layout.names.dead}", **config)
    await _ensure_consumer(connection, layout)
    return StreamState(_read_storage(work["config"]), int(states["state"]["messages"]))


def _read_storage(config: dict[str, Any]) -> StreamStorage:
    return StreamStorage(str(config.get("storage")), confirms_early=config.get("persist_mode") == "async")


async def _ensure_stream(connection: Connection, config: dict[str, Any]) -> dict[str, Any]:
    """Return the server's description of the stream that *config* names, after creating it if it is missing."""
    name = config["name"]
    try:
        return await api.call(connection, f"STREAM.INFO.{name}")
    except api.ApiError as error:
        if error.number != api.NO_STREAM:
            raise
    try:
        return await api.call(connection, f"STREAM.CREATE.{name}", **config)
    except api.ApiError as error:
        if error.number != api.NAME_TAKEN:
            raise
        return await api.call(connection, f"STREAM.INFO.{name}")  # another worker created it first


def _check_work(config: dict[str, Any], layout: StreamConfig) -> None:
    """Reject a work stream that would keep acked messages, discard waiting ones, or miss subjects."""
    name = layout.names.work
    if config.get("retention") != "workqueue":
        raise ConfigurationError(
            f"the stream {name!r} has retention {config.get('retention')!r}; a queue needs 'workqueue', because other "
            "streams keep acknowledged messages: delete the stream with its messages, or give the queue another name"
        )
    if config.get("discard") == "old" and any(
        config.get(limit, -1) > 0 for limit in ("max_msgs", "max_bytes", "max_msgs_per_subject")
    ):
        raise ConfigurationError(
            f"the stream {name!r} discards its oldest messages when it is full; set its discard to 'new'"
        )
    missing = set(layout.work_stream()["subjects"]) - set(config.get("subjects") or ())
    if missing:
        raise ConfigurationError(
            f"the stream {name!r} does not listen to {', '.join(sorted(missing))}; add them to it "
            f"(nats stream edit {name} --subjects=…)"
        )


async def _ensure_consumer(connection: Connection, layout: StreamConfig) -> None:
    """Create the consumer if it is missing, and reject one whose configuration does not fit."""
    stream = layout.names.work
    try:
        info = await api.call(connection, f"CONSUMER.INFO.{stream}.{CONSUMER}")
    except api.ApiError as error:
        if error.number != api.NO_CONSUMER:
            raise
        info = await api.call(
            connection,
            f"CONSUMER.DURABLE.CREATE.{stream}.{CONSUMER}",
            stream_name=stream,
            config=layout.consumer_config(),
        )
    _check_consumer(info["config"], layout)


async def inspect_streams(connection: Connection, layout: StreamConfig) -> StreamStorage | None:
    """Return the storage of the work stream, None if it is missing; reject configurations that would lose work.

    It creates nothing.
    """
    try:
        work = await api.call(connection, f"STREAM.INFO.{layout.names.work}")
    except api.ApiError as error:
        if error.number != api.NO_STREAM:
            raise
        return None
    _check_work(work["config"], layout)
    try:
        info = await api.call(connection, f"CONSUMER.INFO.{layout.names.work}.{CONSUMER}")
    except api.ApiError as error:
        if error.number != api.NO_CONSUMER:
            raise
    else:
        _check_consumer(info["config"], layout)
    return _read_storage(work["config"])


def _check_consumer(config: dict[str, Any], layout: StreamConfig) -> None:
    """Reject a consumer with another lease, or one that stops delivering a message after some deliveries."""
    stream = layout.names.work
    if config.get("ack_wait") != api.to_nanoseconds(layout.lease):
        raise ConfigurationError(
            f"the consumer of {stream!r} has an ack_wait of {config.get('ack_wait', 0) / 1e9:g} s, this queue a lease "
            f"of {layout.lease:g} s; all workers of a queue need the same "
            f"(nats consumer edit {stream} {CONSUMER} --wait=…)"
        )
    if config.get("max_deliver", -1) > 0:
        raise ConfigurationError(
            f"the consumer of {stream!r} stops after max_deliver={config['max_deliver']} deliveries, and a stopped "
            "message is never delivered again; set it to -1, because the workers enforce the limit"
        )
