"""A process that appends is killed at random points and run again: fact_killing.py DSN KILLS SEED, the verdict as JSON.

A script of its own with one thread: each run is a fork of it, so that a hundred cost seconds and not minutes.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time

from ergon_framework.facts.model import Envelope, Fact, Pair
from ergon_framework.facts.stores.postgres import PostgresBoundary

PAIR = Pair("Plant A", "HQ")
EACH = 5


def stated(number):
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.of(f"order:{number}", "paid", {"number": number})


def run(dsn, first, pipe):
    """Append from *first* on, a few at a time, and say what was confirmed."""
    boundary = PostgresBoundary(dsn, accept_loss=True)
    while True:
        batch = [stated(number) for number in range(first, first + EACH)]
        told = [[each.message_id, each.offset, each.duplicate] for each in boundary.append_facts(batch)]
        os.write(pipe, (json.dumps(told) + "\n").encode())
        first += EACH


def lines(pipe, until):
    """What the child has said until then."""
    data = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        data += os.read(pipe, 65536)
    return data


def rest(pipe):
    data = b""
    while piece := os.read(pipe, 65536):
        data += piece
    return data


def killed(dsn, first, seconds):
    """What one run has confirmed before it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            run(dsn, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    said = lines(reading, time.monotonic() + seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said += rest(reading)
    os.close(reading)
    # The last line may have been cut.
    return [answer for line in said.split(b"\n")[:-1] for answer in json.loads(line)]


def main():
    dsn, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dice, confirmed, first, repeated = random.Random(seed), {}, 0, 0
    slow = 1.0
    for _ in range(kills):
        told = killed(dsn, first, slow * dice.uniform(0.005, 0.06))
        if not told:  # on a busy machine nothing is confirmed so soon
            slow = min(1.1 * slow, 20.0)
        for message_id, offset, duplicate in told:
            assert confirmed.setdefault(message_id, offset) == offset, f"{message_id} has two offsets"
            repeated += duplicate
        # Back to the last that was confirmed as a whole, as one who has lost his place would go.
        first = max(0, len(confirmed) - 2 * EACH)
    boundary = PostgresBoundary(dsn, accept_loss=True)
    stored = []
    while some := boundary.fetch_facts("look", PAIR, 1000, after=stored[-1].cursor if stored else None):
        stored += some
    print(
        json.dumps(
            {
                "confirmed": len(confirmed),
                "repeated": repeated,
                "stored": len(stored),
                "dense": [each.offset for each in stored] == list(range(1, len(stored) + 1)),
                "once": len({each.envelope.message_id for each in stored}) == len(stored),
                "kept": {each.envelope.message_id: each.offset for each in stored}.items() >= confirmed.items(),
            }
        )
    )
    boundary.close()


if __name__ == "__main__":
    main()
