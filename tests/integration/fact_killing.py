"""Kill a process that appends facts at random points and run it again; print the result as JSON.

fact_killing.py DSN KILLS SEED. A separate script with one thread: each run is a fork of it, so that a hundred runs
take seconds, not minutes.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time

from ergon_framework.facts.model import Envelope, Fact, ZonePair
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

PAIR = ZonePair("Plant A", "HQ")
BATCH_SIZE = 5


def make_fact(number):
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.create(f"order:{number}", "paid", {"number": number})


def append_until_killed(dsn, first, pipe):
    """Append facts from *first* on, a few at a time, and print the confirmations."""
    boundary = PostgresBoundary(dsn, accept_loss=True)
    while True:
        batch = [make_fact(number) for number in range(first, first + BATCH_SIZE)]
        confirmations = [[each.message_id, each.offset, each.duplicate] for each in boundary.append_facts(batch)]
        os.write(pipe, (json.dumps(confirmations) + "\n").encode())
        first += BATCH_SIZE


def read_until(pipe, deadline):
    """Return the output of the child until the deadline."""
    data = b""
    while (remaining := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], remaining)[0]:
            break
        data += os.read(pipe, 65536)
    return data


def read_rest(pipe):
    data = b""
    while chunk := os.read(pipe, 65536):
        data += chunk
    return data


def run_and_kill(dsn, first, seconds):
    """Return the confirmations that one run printed before it was killed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            append_until_killed(dsn, first, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    output = read_until(read_end, time.monotonic() + seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    output += read_rest(read_end)
    os.close(read_end)
    # The last line may be incomplete.
    return [confirmation for line in output.split(b"\n")[:-1] for confirmation in json.loads(line)]


def main():
    dsn, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng, confirmed, first, repeated = random.Random(seed), {}, 0, 0
    delay_factor = 1.0
    for _ in range(kills):
        confirmations = run_and_kill(dsn, first, delay_factor * rng.uniform(0.005, 0.06))
        if not confirmations:  # on a busy machine nothing is confirmed so soon
            delay_factor = min(1.1 * delay_factor, 20.0)
        for message_id, offset, duplicate in confirmations:
            assert confirmed.setdefault(message_id, offset) == offset, f"{message_id} has two offsets"
            repeated += duplicate
        # Back to the last batch that was confirmed completely, like a producer that has lost its position.
        first = max(0, len(confirmed) - 2 * BATCH_SIZE)
    boundary = PostgresBoundary(dsn, accept_loss=True)
    stored = []
    while page := boundary.fetch_facts("look", PAIR, 1000, after=stored[-1].cursor if stored else None):
        stored += page
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
