"""Kill a program repeatedly while it writes its own row and submits a job with it.

python tests/integration/job_writer.py DSN KILLS SEED

Its children insert into ``effect`` and submit a job of the same name in one database transaction, in either order, one
after the other, until they are killed: most of them at any moment, some between two statements.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import psycopg

from ergon_framework.jobs.client import JobClient

#: Seconds after the first commit within which a child is killed: it commits a few more rows, or none.
MAX_LIFE_SECONDS = 0.03


def write(dsn, pipe, *, name, pauses, rng):
    """Write until killed. *pauses* is the statement after which the second database transaction pauses."""
    client, number = JobClient(dsn), 0
    with psycopg.connect(dsn) as connection:
        while True:
            one = f"{name}-{number}"
            statements = [
                lambda one=one: connection.execute("insert into effect values (%s)", [one]),
                lambda one=one: client.submit_on(connection, "echo", one, id=one),
            ]
            if rng.random() < 0.5:
                statements.reverse()
            for index, statement in enumerate(statements):
                statement()
                if number == 1 and index == pauses:
                    os.write(pipe, b".")
                    signal.pause()
            connection.commit()
            if number == 0 and pauses is None:
                os.write(pipe, b".")
            number += 1


def main(dsn, kills, seed):
    rng = random.Random(seed)
    for kill in range(kills):
        pauses = {0: 0, 1: 1}.get(kill % 10)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(dsn, write_end, name=f"{seed}-{kill}", pauses=pauses, rng=random.Random(f"{seed} {kill}"))
            finally:
                # It has failed; the parent sees the end of the pipe, or another exit status than expected.
                os._exit(1)
        os.close(write_end)
        started = os.read(read_end, 1)
        os.close(read_end)
        if pauses is None:
            time.sleep(rng.random() * MAX_LIFE_SECONDS)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not started or not os.WIFSIGNALED(status):
            raise SystemExit(f"child {kill} ended by itself: {status}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
