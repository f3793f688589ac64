"""The app that Celery's worker and client share."""

import os

from celery import Celery
from kombu import Queue

QUEUE = os.environ["PEER_QUEUE"]
app = Celery("peer", broker=os.environ["PEER_BROKER"], backend=os.environ["PEER_REDIS"])
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=int(os.environ["PEER_SETTING"]),
    task_default_queue=QUEUE,
    task_queues=[Queue(QUEUE, durable=True)],
    broker_connection_retry_on_startup=True,
    worker_enable_remote_control=False,
    worker_hijack_root_logger=False,
)


@app.task(name="echo")
def echo(value):
    return value
