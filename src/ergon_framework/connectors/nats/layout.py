"""Layout: the streams and the consumer of a queue, made where they are missing and checked where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.line import Line
from ergon_framework.connectors.nats.naming import CONSUMER, Names
from ergon_framework.errors import ConfigurationError

_DAY: Final = 86_400.0
#: Pull requests of the whole fleet that may wait at once.
_WAITING: Final = 10_000


class Layout(NamedTuple):
    """What a queue is to look like."""

    names: Names
    lease: float
    subjects: Sequence[str]
    replicas: int
    dead_days: float | None

    def _stream(self, name: str, subjects: Sequence[str], **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "subjects": list(subjects),
            "storage": "file",
            "discard": "new",
            "num_replicas": self.replicas,
            "allow_rollup_hdrs": False,
            **more,
        }

    def work(self) -> dict[str, Any]:
        """Acked is gone: the stream holds what is ready, delayed or in flight."""
        names = self.names
        return self._stream(names.work, [names.subject, f"{names.subject}.>", *self.subjects], retention="workqueue")

    def notes(self) -> dict[str, Any]:
        """The latest of each key."""
        names = self.names
        return self._stream(
            names.notes, [f"{names.note_subject}.>"], retention="limits", max_msgs_per_subject=1, discard="old"
        )

    def dead(self) -> dict[str, Any]:
        names = self.names
        age = 0 if self.dead_days is None else api.nanos(self.dead_days * _DAY)
        return self._stream(names.dead, [f"{names.dead_subject}.>"], retention="limits", max_age=age)

    def consumer(self) -> dict[str, Any]:
        return {
            "durable_name": CONSUMER,
            "ack_policy": "explicit",
            "ack_wait": api.nanos(self.lease),
            "deliver_policy": "all",
            "replay_policy": "instant",
            # Workers count and bury: what the server stops delivering nobody would ever see again.
            "max_deliver": -1,
            # It would be a limit of the whole fleet, reached by what is put off.
            "max_ack_pending": -1,
            "max_waiting": _WAITING,
        }


class Found(NamedTuple):
    """What was found or made."""

    storage: str
    #: Notes there are.
    notes: int


async def built(line: Line, layout: Layout) -> Found:
    """Make what is missing; refuse what is there and would lose work."""
    work = await _stream(line, layout.work())
    _check_work(work["config"], layout)
    notes = await _stream(line, layout.notes())
    dead = await _stream(line, layout.dead())
    if dead["config"].get("max_age", 0) != layout.dead()["max_age"]:
        changed = {**dead["config"], "max_age": layout.dead()["max_age"]}
        await api.call(line, f"STREAM.UPDATE.{layout.names.dead}", **changed)
    await _consumer(line, layout)
    return Found(str(work["config"].get("storage")), int(notes["state"]["messages"]))


async def _stream(line: Line, config: dict[str, Any]) -> dict[str, Any]:
    name = config["name"]
    try:
        return await api.call(line, f"STREAM.INFO.{name}")
    except api.ApiError as error:
        if error.number != api.NO_STREAM:
            raise
    try:
        return await api.call(line, f"STREAM.CREATE.{name}", **config)
    except api.ApiError as error:
        if error.number != api.NAME_TAKEN:
            raise
        return await api.call(line, f"STREAM.INFO.{name}")  # somebody else was faster


def _check_work(config: dict[str, Any], layout: Layout) -> None:
    name = layout.names.work
    if config.get("retention") != "workqueue":
        raise ConfigurationError(
            f"the stream {name!r} has retention {config.get('retention')!r}; a queue needs 'workqueue', or acked work "
            "would stay: remove the stream or give the queue another name"
        )
    if config.get("discard") == "old" and any(
        config.get(limit, -1) > 0 for limit in ("max_msgs", "max_bytes", "max_msgs_per_subject")
    ):
        raise ConfigurationError(
            f"the stream {name!r} throws away the oldest when it is full; set its discard to 'new'"
        )
    missing = set(layout.work()["subjects"]) - set(config.get("subjects") or ())
    if missing:
        raise ConfigurationError(
            f"the stream {name!r} does not listen to {', '.join(sorted(missing))}; add them to it "
            f"(nats stream edit {name} --subjects=…)"
        )


async def _consumer(line: Line, layout: Layout) -> None:
    stream = layout.names.work
    try:
        found = await api.call(line, f"CONSUMER.INFO.{stream}.{CONSUMER}")
    except api.ApiError as error:
        if error.number != api.NO_CONSUMER:
            raise
        found = await api.call(
            line, f"CONSUMER.DURABLE.CREATE.{stream}.{CONSUMER}", stream_name=stream, config=layout.consumer()
        )
    _check_consumer(found["config"], layout)


async def looked_at(line: Line, layout: Layout) -> str | None:
    """The storage of the work stream, if it is there; refuse what would lose work, and make nothing."""
    try:
        work = await api.call(line, f"STREAM.INFO.{layout.names.work}")
    except api.ApiError as error:
        if error.number != api.NO_STREAM:
            raise
        return None
    _check_work(work["config"], layout)
    try:
        found = await api.call(line, f"CONSUMER.INFO.{layout.names.work}.{CONSUMER}")
    except api.ApiError as error:
        if error.number != api.NO_CONSUMER:
            raise
    else:
        _check_consumer(found["config"], layout)
    return str(work["config"].get("storage"))


def _check_consumer(config: dict[str, Any], layout: Layout) -> None:
    stream = layout.names.work
    if config.get("ack_wait") != api.nanos(layout.lease):
        raise ConfigurationError(
            f"the consumer of {stream!r} has an ack_wait of {config.get('ack_wait', 0) / 1e9:g} s, this queue a lease "
            f"of {layout.lease:g} s; all workers of a queue need the same "
            f"(nats consumer edit {stream} {CONSUMER} --wait=…)"
        )
    if config.get("max_deliver", -1) > 0:
        raise ConfigurationError(
            f"the consumer of {stream!r} stops after max_deliver={config['max_deliver']} deliveries, and what it stops "
            "at nobody would see again; set it to -1, workers keep the cap themselves"
        )
