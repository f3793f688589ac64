"""Publishing of stored dead letters to ``queue.deadletter``: at least once, in order, with publisher confirms.

A dead letter is the record of a provider task that failed. The ledger, the store of the tasks' deliveries and results,
keeps it until it is published.

A Celery worker publishes them at intervals, in a child of its pool. Without a worker, ``publish_dead_letters(app)``
publishes them once: from beat, a shell or a schedule of the host.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import Any, Final

from celery import Celery, bootsteps, current_app
from kombu import Producer, Queue

from ergon_framework.providers.base import Provider
from ergon_framework.providers.celery.delivery import log
from ergon_framework.providers.celery.ledger import TaskLedger
from ergon_framework.providers.celery.task import CeleryProviderTask
from ergon_framework.providers.dead_letter import DEAD_LETTER_QUEUE, ProviderDeadLetter, to_json
from ergon_framework.providers.process_state import process_state
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Event, Field

#: Maximum number of dead letters in one database transaction.
MAX_BATCH: Final = 100
#: Seconds to wait for a connection, and for each confirmation.
CALL_TIMEOUT_SECONDS: Final = 5.0
#: Seconds after which a child that publishes is considered hung.
_RUN_TIMEOUT_SECONDS: Final = 60.0
#: Seconds after which a run without a reported end counts as over: Celery drops waiters for a pool slot when it
#: loses its broker, and a child may be killed before it takes its work.
_RUN_ABANDONED_SECONDS: Final = 2 * _RUN_TIMEOUT_SECONDS
#: Seconds for which the ledger keeps a task, and seconds between two cleanups.
TASK_RETENTION_SECONDS: Final = 7 * 86_400.0
CLEANUP_INTERVAL_SECONDS: Final = 3_600.0
#: AMQP's reply code as text: RabbitMQ's client returns a number, kombu's virtual transports (Redis, SQS …) a text.
_NOT_FOUND_CODE: Final = "404"


class DeadLetterPublisher:
    """A publisher of the dead letters of *ledger* to *queue* on the broker of *app*."""

    def __init__(self, app: Celery, ledger: TaskLedger, *, queue: str = DEAD_LETTER_QUEUE) -> None:
        self._app = app
        self._ledger = ledger
        self._queue = queue

    def publish_pending(self, *, limit: int = MAX_BATCH) -> int:
        """Publish up to *limit* pending dead letters; return the number of published ones.

        Dead letters that the broker does not confirm are published by a later run.
        """
        with ExitStack() as stack:
            producer: Producer | None = None

            def send(letter: ProviderDeadLetter) -> None:
                nonlocal producer
                if producer is None:
                    producer = self._open_producer(stack)
                self._publish(producer, letter)

            return self._ledger.publish(send, limit=limit)

    def _open_producer(self, stack: ExitStack) -> Producer:
        connection = stack.enter_context(
            self._app.connection_for_write(
                transport_options={"confirm_publish": True}, connect_timeout=CALL_TIMEOUT_SECONDS
            )
        )
        connection.ensure_connection(max_retries=1, timeout=CALL_TIMEOUT_SECONDS)
        channel = connection.channel()
        try:
            # Declared passively first: an operator may have created the queue with different arguments.
            Queue(self._queue, channel=channel).queue_declare(passive=True)
        except connection.channel_errors as error:
            if str(getattr(error, "reply_code", None)) != _NOT_FOUND_CODE:
                raise
            channel = connection.channel()
            Queue(self._queue, channel=channel, durable=True).queue_declare()
        return Producer(channel)

    def _publish(self, producer: Producer, letter: ProviderDeadLetter) -> None:
        producer.publish(
            to_json(letter),
            exchange="",
            routing_key=self._queue,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=2,
            # Without the queue the broker would discard the message; then it does not count as published.
            mandatory=True,
            message_id=letter.task_id,
            timeout=CALL_TIMEOUT_SECONDS,
            confirm_timeout=CALL_TIMEOUT_SECONDS,
        )


def publish_dead_letters(app: Celery) -> int:
    """Publish all pending dead letters of the provider tasks of *app* and log failures; return the number published."""
    published = 0
    for ledger, queue in _list_queues(app):
        publisher = DeadLetterPublisher(app, ledger, queue=queue)
        try:
            while (count := publisher.publish_pending()) > 0:
                published += count
        except Exception as error:  # noqa: BLE001 - broker and database may fail in any way; the rows stay stored
            log_fields = {Field.ERROR_TYPE: type(error).__name__}
            logs.log_event(logging.WARNING, Event.DEAD_LETTERS_WAITING, log_fields, to=log)
    return published


class DeadLetterBootstep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery comes without types
    """A worker step that publishes dead letters in a pool child at intervals; the parent opens no connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None
        #: The time until which a run counts as active; set to 0 when Celery reports its end.
        self._busy_until = 0.0
        self._cleaned_up_at = 0.0

    def start(self, consumer: Any) -> None:
        self._busy_until = 0.0
        tasks = _list_provider_tasks(consumer.app)
        if any(isinstance(task.provider, Provider) and task.provider.uses_process_state for task in tasks):
            process_state()  # warns now instead of at the first call if no database is configured
        intervals = [task.dead_letter_interval for task in tasks]
        if intervals:
            self._timer = consumer.timer.call_repeatedly(min(intervals), self._poll, (consumer,))

    def stop(self, consumer: Any) -> None:  # noqa: ARG002 - Celery's signature
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self, consumer: Any) -> None:
        now = time.monotonic()
        if now < self._busy_until:
            return
        self._busy_until = now + _RUN_ABANDONED_SECONDS
        # The run takes a pool slot like a task; without it Celery would send one task too many to the pool.
        semaphore = getattr(consumer.controller, "semaphore", None)
        if semaphore is None:
            self._start_run(consumer)
        else:
            semaphore.acquire(self._start_run, consumer)

    def _start_run(self, consumer: Any) -> None:
        now = time.monotonic()
        clean_up = now >= self._cleaned_up_at + CLEANUP_INTERVAL_SECONDS
        if clean_up:
            self._cleaned_up_at = now
        consumer.pool.apply_async(
            run_child,
            (clean_up,),
            callback=self._handle_run_end,
            error_callback=self._handle_run_end,
            accept_callback=_handle_run_accepted,
            timeout=_RUN_TIMEOUT_SECONDS,
        )

    def _handle_run_end(self, *_: Any) -> None:
        self._busy_until = 0.0


def run_child(clean_up: bool) -> int:  # noqa: FBT001 - called by the pool
    """Publish dead letters in a pool child, and clean up the ledger if it is due; return the number published."""
    app = current_app._get_current_object()  # noqa: SLF001 - Celery has no public accessor
    published = publish_dead_letters(app)
    if clean_up:
        for ledger in {id(ledger): ledger for ledger, _ in _list_queues(app)}.values():
            try:
                while ledger.delete_expired(TASK_RETENTION_SECONDS):
                    pass
            except Exception as error:  # noqa: BLE001 - the cleanup is retried in an hour
                logs.log_telemetry_failure(error)
    return published


def _handle_run_accepted(*_: Any) -> None:
    """Accept the pool's notification that a child has taken the run."""


def _list_provider_tasks(app: Celery) -> list[CeleryProviderTask]:
    return [task for task in app.tasks.values() if isinstance(task, CeleryProviderTask)]


def _list_queues(app: Celery) -> list[tuple[TaskLedger, str]]:
    task_by_queue = {(id(task.ledger), task.dead_letter_queue): task for task in _list_provider_tasks(app)}
    return [(task.ledger, task.dead_letter_queue) for task in task_by_queue.values()]
