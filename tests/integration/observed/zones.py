"""A zone that is copied to another while facts come in, and the room that is left there."""

import itertools
import threading
import time

from ergon_framework.facts.capacity import CapacityMonitor, CapacityPolicy, store_usage
from ergon_framework.facts.model import BoundarySide, Buffer, Envelope, Fact, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import Replicator
from ergon_framework.facts.stores.memory import MemoryBoundary

PLANT = MemoryBoundary(side=BoundarySide.INNER)
HUB = MemoryBoundary(side=BoundarySide.OUTER)


def append_facts():
    for number in itertools.count():
        envelope = Envelope(message_id=f"m-{number}", from_zone="plant", to_zone="hub", produced_at_unix_ms=0)
        PLANT.append_fact(envelope, Fact.create("order", "is", number))
        time.sleep(0.1)


def parts():
    threading.Thread(target=append_facts, daemon=True).start()
    return [
        Replicator(PLANT, HUB, ZonePair("plant", "hub"), policy=ReplicationPolicy(drain=0.5, poll=0.05)),
        CapacityMonitor(store_usage(HUB, max_facts=1_000_000), buffer=Buffer.EFB, policy=CapacityPolicy(interval=0.2)),
    ]
