"""Shared parts of the Redis tests: private servers, and queues that are closed after the test."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import contextmanager

from ergon_framework.connectors.redis import RedisQueue
from tests.servers.redis import PrivateRedis

#: Seconds within which an expected condition must become true.
TIMEOUT_SECONDS = 10.0


@contextmanager
def run_server(**settings):
    """Run a private server with these settings; an underscore stands for a dash."""
    folder = tempfile.mkdtemp(prefix="ergon-redis-")
    server = PrivateRedis(folder, settings={name.replace("_", "-"): value for name, value in settings.items()})
    try:
        server.start()
        yield server
    finally:
        server.heal_network()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


class QueueFactory:
    """A factory for queue clients on one server, each as in its own process."""

    def __init__(self, server):
        self.server = server
        self.queues = []

    def __call__(self, name, *, url=None, **options):
        queue = RedisQueue(name, url=url or self.server.url, **options)
        self.queues.append(queue)
        return queue

    def close(self):
        for queue in self.queues:
            queue.close()


def make_stream_key(name):
    return f"ergon:{{{name}}}"


def make_part_key(name, part):
    return f"ergon:{{{name}}}:{name}:{part}"


def wait_until(holds, message, *, within=TIMEOUT_SECONDS):
    """Wait until *holds* returns a true value and return it."""
    deadline = time.monotonic() + within
    while not (value := holds()):
        assert time.monotonic() < deadline, f"{message}: not within {within} s"
        time.sleep(0.005)
    return value
