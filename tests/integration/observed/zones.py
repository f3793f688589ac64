"""A zone that is copied to another while facts come in, and the room that is left there."""

import itertools
import threading
import time

from ergon_framework.facts.model import Buffer, Envelope, Fact, Pair, Side
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import Replicator
from ergon_framework.facts.room import Room, RoomPolicy, of_store
from ergon_framework.facts.stores.memory import MemoryBoundary

PLANT = MemoryBoundary(side=Side.INNER)
HUB = MemoryBoundary(side=Side.OUTER)


def come_in():
    for number in itertools.count():
        envelope = Envelope(message_id=f"m-{number}", from_zone="plant", to_zone="hub", produced_at_unix_ms=0)
        PLANT.append_fact(envelope, Fact.of("order", "is", number))
        time.sleep(0.1)


def parts():
    threading.Thread(target=come_in, daemon=True).start()
    return [
        Replicator(PLANT, HUB, Pair("plant", "hub"), policy=ReplicationPolicy(drain=0.5, poll=0.05)),
        Room(of_store(HUB, max_facts=1_000_000), buffer=Buffer.EFB, policy=RoomPolicy(interval=0.2)),
    ]
