"""From the rows of dead letters to ``queue.deadletter``: at least once, in their order, with publisher confirms.

A worker of Celery looks for them now and then, in a child of its pool. Without a worker,
``feed_dead_letters(app)`` does it once: from beat, a shell or a schedule of the host's.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import Any, Final

from celery import Celery, bootsteps, current_app
from kombu import Producer, Queue

from ergon_framework.providers.base import Provider
from ergon_framework.providers.celery_delivery import log
from ergon_framework.providers.celery_task import CeleryProviderTask
from ergon_framework.providers.deadletter import QUEUE, DeadLetter, message
from ergon_framework.providers.process_state import process_books
from ergon_framework.providers.sql.ledger import Ledger
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Event, Field

#: The most dead letters of one database transaction.
BATCH: Final = 100
#: Seconds for a connection, and for each confirmation.
PATIENCE: Final = 5.0
#: Seconds after which a child that publishes is taken for hung.
_HUNG: Final = 60.0
#: Seconds after which a look that nobody has told the end of is over: Celery forgets whoever waits for a place of the
#: pool when it loses its broker, and a child may die before it has taken what was sent to it.
_FORGOTTEN: Final = 2 * _HUNG
#: Seconds for which the ledger remembers a task, and between two times that it forgets.
REMEMBERED: Final = 7 * 86_400.0
FORGETTING: Final = 3_600.0
#: AMQP's reply code as text: RabbitMQ's client gives a number, kombu's virtual transports (Redis, SQS …) give a text.
_NOT_FOUND: Final = "404"


class DeadLetterFeeder:
    """Publishes the dead letters of *ledger* to *queue* on the broker of *app*."""

    def __init__(self, app: Celery, ledger: Ledger, *, queue: str = QUEUE) -> None:
        self._app = app
        self._ledger = ledger
        self._queue = queue

    def feed(self, *, limit: int = BATCH) -> int:
        """Publish up to *limit* of them; how many there were.

        Whatever the broker did not confirm waits for the next time.
        """
        with ExitStack() as stack:
            producer: Producer | None = None

            def send(letter: DeadLetter) -> None:
                nonlocal producer
                if producer is None:
                    producer = self._producer(stack)
                self._publish(producer, letter)

            return self._ledger.publish(send, limit=limit)

    def _producer(self, stack: ExitStack) -> Producer:
        connection = stack.enter_context(
            self._app.connection_for_write(transport_options={"confirm_publish": True}, connect_timeout=PATIENCE)
        )
        connection.ensure_connection(max_retries=1, timeout=PATIENCE)
        channel = connection.channel()
        try:
            # Looked for first: an operator may have made it with arguments of his own.
            Queue(self._queue, channel=channel).queue_declare(passive=True)
        except connection.channel_errors as error:
            if str(getattr(error, "reply_code", None)) != _NOT_FOUND:
                raise
            channel = connection.channel()
            Queue(self._queue, channel=channel, durable=True).queue_declare()
        return Producer(channel)

    def _publish(self, producer: Producer, letter: DeadLetter) -> None:
        producer.publish(
            message(letter),
            exchange="",
            routing_key=self._queue,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=2,
            # Without a queue there is nobody who keeps it; then it is not published.
            mandatory=True,
            message_id=letter.task_id,
            timeout=PATIENCE,
            confirm_timeout=PATIENCE,
        )


def feed_dead_letters(app: Celery) -> int:
    """Publish what waits, for all provider tasks of *app*; how many were published. It says so if it cannot."""
    published = 0
    for ledger, queue in _places(app):
        feeder = DeadLetterFeeder(app, ledger, queue=queue)
        try:
            while (count := feeder.feed()) > 0:
                published += count
        except Exception as error:  # noqa: BLE001 - broker and database may fail in any way; the rows are safe
            told = {Field.ERROR_TYPE: type(error).__name__}
            logs.say(logging.WARNING, Event.DEAD_LETTERS_WAIT, told, to=log)
    return published


class DeadLetterStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery comes without types
    """Has a child of the pool publish dead letters now and then; the parent itself opens nothing."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None
        #: A moment until which a look is under way.
        self._busy = 0.0
        self._forgot = 0.0

    def start(self, consumer: Any) -> None:
        self._busy = 0.0
        tasks = _tasks(consumer.app)
        if any(isinstance(task.provider, Provider) and task.provider.uses_process_books for task in tasks):
            process_books()  # warns now, and not at the first call, if no database is configured
        intervals = [task.dead_letter_interval for task in tasks]
        if intervals:
            self._timer = consumer.timer.call_repeatedly(min(intervals), self._look, (consumer,))

    def stop(self, consumer: Any) -> None:  # noqa: ARG002 - Celery's signature
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, consumer: Any) -> None:
        now = time.monotonic()
        if now < self._busy:
            return
        self._busy = now + _FORGOTTEN
        # A place of the pool, like that of a task; without it a task too many would be sent there.
        semaphore = getattr(consumer.controller, "semaphore", None)
        if semaphore is None:
            self._send(consumer)
        else:
            semaphore.acquire(self._send, consumer)

    def _send(self, consumer: Any) -> None:
        now = time.monotonic()
        forget = now >= self._forgot + FORGETTING
        if forget:
            self._forgot = now
        consumer.pool.apply_async(
            work, (forget,), callback=self._over, error_callback=self._over, accept_callback=_begun, timeout=_HUNG
        )

    def _over(self, *_: Any) -> None:
        self._busy = 0.0


def work(forget: bool) -> int:  # noqa: FBT001 - called by the pool
    """What a child does."""
    app = current_app._get_current_object()  # noqa: SLF001 - Celery's own way to it
    published = feed_dead_letters(app)
    if forget:
        for ledger in {id(ledger): ledger for ledger, _ in _places(app)}.values():
            try:
                while ledger.forget(REMEMBERED):
                    pass
            except Exception as error:  # noqa: BLE001 - it is tried again in an hour
                logs.telemetry_failed(error)
    return published


def _begun(*_: Any) -> None:
    """The pool wants to tell somebody."""


def _tasks(app: Celery) -> list[CeleryProviderTask]:
    return [task for task in app.tasks.values() if isinstance(task, CeleryProviderTask)]


def _places(app: Celery) -> list[tuple[Ledger, str]]:
    found = {(id(task.ledger), task.dead_letter_queue): task for task in _tasks(app)}
    return [(task.ledger, task.dead_letter_queue) for task in found.values()]
