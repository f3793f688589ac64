"""What the tests on Redis share: private servers, and queues that are closed behind everybody."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import contextmanager

from ergon_framework.connectors.redis import RedisQueue
from tests.servers.redis import PrivateRedis

#: Seconds within which what must come has come.
SOON = 10.0


@contextmanager
def running(**settings):
    """A server of the test's own with these settings; a dash is an underscore."""
    folder = tempfile.mkdtemp(prefix="ergon-redis-")
    server = PrivateRedis(folder, settings={name.replace("_", "-"): value for name, value in settings.items()})
    try:
        server.start()
        yield server
    finally:
        server.mend()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


class Queues:
    """Makes clients of queues on one server, each as another process would have it."""

    def __init__(self, server):
        self.server = server
        self.made = []

    def __call__(self, name, *, url=None, **options):
        queue = RedisQueue(name, url=url or self.server.url, **options)
        self.made.append(queue)
        return queue

    def close(self):
        for queue in self.made:
            queue.close()


def stream(name):
    return f"ergon:{{{name}}}"


def beside(name, part):
    return f"ergon:{{{name}}}:{name}:{part}"


def until(holds, words, *, within=SOON):
    """Wait until *holds* does; its answer."""
    end = time.monotonic() + within
    while not (answer := holds()):
        assert time.monotonic() < end, f"{words}: not within {within} s"
        time.sleep(0.005)
    return answer
