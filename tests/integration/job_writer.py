"""A program that is killed again and again while it writes a row of its own and submits a job with it.

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

from ergon_framework.executor.jobs.client import JobClient

#: Seconds after the first commit within which a child is killed: some commits more, or none.
LIFE = 0.03


def write(dsn, told, *, name, pauses, dice):
    """Write until killed. *pauses* is the statement after which to stand still in the second database transaction."""
    client, number = JobClient(dsn), 0
    with psycopg.connect(dsn) as connection:
        while True:
            one = f"{name}-{number}"
            statements = [
                lambda one=one: connection.execute("insert into effect values (%s)", [one]),
                lambda one=one: client.submit_on(connection, "echo", one, id=one),
            ]
            if dice.random() < 0.5:
                statements.reverse()
            for place, statement in enumerate(statements):
                statement()
                if number == 1 and place == pauses:
                    os.write(told, b".")
                    signal.pause()
            connection.commit()
            if number == 0 and pauses is None:
                os.write(told, b".")
            number += 1


def main(dsn, kills, seed):
    dice = random.Random(seed)
    for kill in range(kills):
        pauses = {0: 0, 1: 1}.get(kill % 10)
        seen, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(dsn, told, name=f"{seed}-{kill}", pauses=pauses, dice=random.Random(f"{seed} {kill}"))
            finally:
                # It has failed; the parent sees the end of the pipe, or another death than it meant.
                os._exit(1)
        os.close(told)
        begun = os.read(seen, 1)
        os.close(seen)
        if pauses is None:
            time.sleep(dice.random() * LIFE)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not begun or not os.WIFSIGNALED(status):
            raise SystemExit(f"child {kill} ended by itself: {status}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
