"""A real ``ergon facts replicate``: signals, probes, and what it says at the end."""

from __future__ import annotations

import json
import re
import signal

import pytest

from ergon_framework.runner.exits import Exit
from tests.integration.running import Running
from tests.integration.test_run_probes import until

pytestmark = pytest.mark.spec("FAC-17")

APP = """
from ergon_framework.facts.boundary import Boundary
from ergon_framework.facts.model import Envelope, Fact, Pair, Side
from ergon_framework.facts.model import Buffer
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.room import Room, of_store
from ergon_framework.facts.stores.memory import MemoryBoundary

PLANT = MemoryBoundary(side=Side.INNER)
SHOP = MemoryBoundary(side=Side.INNER)
HUB = MemoryBoundary(side=Side.OUTER)
for store, zone in ((PLANT, "plant"), (SHOP, "shop")):
    for number in range(20):
        store.append_fact(
            Envelope(message_id=f"m-{number}", from_zone=zone, to_zone="hub", produced_at_unix_ms=0),
            Fact.of("s", "p", number),
        )

def told(state):
    say(f"{state.pair.from_zone} {state.status}")

POLICY = ReplicationPolicy(drain=0.5, poll=0.01, backoff=0.01, timeout=0.5)
"""

BOTH = f"""
{APP}
def parts():
    return [
        Replicator(PLANT, HUB, Pair("plant", "hub"), policy=POLICY, on_change=told),
        AsyncReplicator(SHOP, HUB, Pair("shop", "hub"), policy=POLICY, on_change=told),
        Room(of_store(HUB, max_facts=45), buffer=Buffer.EFB),
    ]
"""

STUCK = f"""
{APP}
import threading
class Stuck(MemoryBoundary):
    def forward_facts(self, facts):
        say("stuck")
        threading.Event().wait()

parts = Replicator(
    PLANT, Stuck(side=Side.OUTER), Pair("plant", "hub"), policy=ReplicationPolicy(drain=0.2), on_change=told
)
"""

BROKEN = f"""
{APP}
class Broken(Replicator):
    def run(self):
        raise RuntimeError("a defect")

parts = [
    Broken(PLANT, HUB, Pair("plant", "hub"), policy=POLICY),
    AsyncReplicator(SHOP, HUB, Pair("shop", "hub"), policy=POLICY, on_change=told),
]
"""

COMMAND = ("facts", "replicate", "app:parts")


def running(folder, source, *options):
    return Running(folder, source, *options, command=COMMAND)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_it_says_how_each_pair_was(tmp_path, number):
    with running(tmp_path, BOTH, "--json", "--probe-port", "0") as process:
        process.wait_for("probes on")
        port = int(re.search(r":(\d+)$", process.said[-1]).group(1))
        ready = until(port, "/ready", 200)
        # All follow; that room ends is said all the same.
        process.wait_for("room ends")
        process.send(number)
        code, _ = process.ended()
    assert code == Exit.OK
    assert ready["live"]
    states = {state["from_zone"]: state for state in map(json.loads, filter(_object, process.said))}
    assert {zone: (state["status"], state["offset"]) for zone, state in states.items()} == {
        "plant": ("stopped", 20),
        "shop": ("stopped", 20),
    }
    assert all(state["confirmed"] == 20 for state in states.values())


def _object(line):
    return line.startswith('{"replica"')


def test_a_call_that_hangs_is_left_behind_after_the_drain(tmp_path):
    with running(tmp_path, STUCK) as process:
        process.wait_for("stuck")
        process.send()
        code, seconds = process.ended()
    # The replicator itself gives up waiting for it; nothing is lost, it is asked again after the next start.
    assert code == Exit.OK
    assert seconds < 10
    assert any("at offset 0" in line for line in process.said)


def test_a_replicator_that_breaks_ends_the_process_and_says_why(tmp_path):
    with running(tmp_path, BROKEN) as process:
        code, _ = process.ended()
    assert code == Exit.FAILED
    assert any("a defect" in line for line in process.said)


@pytest.mark.parametrize(
    "source, said",
    [
        ("parts = 7", "no replicator but a int"),
        ("parts = []", "holds no replicator"),
        ("other = 7", "it holds no Replicator"),
    ],
)
def test_what_is_no_replicator_is_refused_with_what_is_one(tmp_path, source, said):
    with running(tmp_path, source) as process:
        code, _ = process.ended()
    assert code == Exit.USAGE
    assert any(said in line for line in process.said)
