"""A real ``ergon facts replicate``: signals, probes, and its output at the end."""

from __future__ import annotations

import json
import re
import signal

import pytest

from ergon_framework.runner.exit import RunExit
from tests.integration.running import ErgonProcess
from tests.integration.test_run_probes import wait_for_status

pytestmark = pytest.mark.spec("FAC-17")

APP = """
from ergon_framework.facts.boundary import Boundary
from ergon_framework.facts.model import BoundarySide, Buffer, Envelope, Fact, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.capacity import CapacityMonitor, store_usage
from ergon_framework.facts.stores.memory import MemoryBoundary

PLANT = MemoryBoundary(side=BoundarySide.INNER)
SHOP = MemoryBoundary(side=BoundarySide.INNER)
HUB = MemoryBoundary(side=BoundarySide.OUTER)
for store, zone in ((PLANT, "plant"), (SHOP, "shop")):
    for number in range(20):
        store.append_fact(
            Envelope(message_id=f"m-{number}", from_zone=zone, to_zone="hub", produced_at_unix_ms=0),
            Fact.create("s", "p", number),
        )

def told(state):
    say(f"{state.pair.from_zone} {state.status}")

POLICY = ReplicationPolicy(drain=0.5, poll=0.01, backoff=0.01, timeout=0.5)
"""

BOTH = f"""
{APP}
def parts():
    return [
        Replicator(PLANT, HUB, ZonePair("plant", "hub"), policy=POLICY, on_change=told),
        AsyncReplicator(SHOP, HUB, ZonePair("shop", "hub"), policy=POLICY, on_change=told),
        CapacityMonitor(store_usage(HUB, max_facts=45), buffer=Buffer.EFB),
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
    PLANT, Stuck(side=BoundarySide.OUTER), ZonePair("plant", "hub"), policy=ReplicationPolicy(drain=0.2), on_change=told
)
"""

BROKEN = f"""
{APP}
class Broken(Replicator):
    def run(self):
        raise RuntimeError("a defect")

parts = [
    Broken(PLANT, HUB, ZonePair("plant", "hub"), policy=POLICY),
    AsyncReplicator(SHOP, HUB, ZonePair("shop", "hub"), policy=POLICY, on_change=told),
]
"""

COMMAND = ("facts", "replicate", "app:parts")


def start_replicator(folder, source, *options):
    return ErgonProcess(folder, source, *options, command=COMMAND)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_it_prints_the_state_of_each_pair(tmp_path, number):
    with start_replicator(tmp_path, BOTH, "--json", "--probe-port", "0") as process:
        process.wait_for("probes on")
        port = int(re.search(r":(\d+)$", process.output[-1]).group(1))
        ready = wait_for_status(port, "/ready", 200)
        # All replicas are current; a nearly full store is reported all the same.
        process.wait_for("storage near limit")
        process.send_signal(number)
        code, _ = process.wait_for_exit()
    assert code == RunExit.OK
    assert ready["live"]
    states = {state["from_zone"]: state for state in map(json.loads, filter(_is_state, process.output))}
    assert {zone: (state["status"], state["offset"]) for zone, state in states.items()} == {
        "plant": ("stopped", 20),
        "shop": ("stopped", 20),
    }
    assert all(state["confirmed"] == 20 for state in states.values())


def _is_state(line):
    return line.startswith('{"replica"')


def test_a_hanging_call_is_abandoned_after_the_drain(tmp_path):
    with start_replicator(tmp_path, STUCK) as process:
        process.wait_for("stuck")
        process.send_signal()
        code, seconds = process.wait_for_exit()
    # The replicator itself stops waiting for the call; no fact is lost, the call is repeated after the next start.
    assert code == RunExit.OK
    assert seconds < 10
    assert any("at offset 0" in line for line in process.output)


def test_a_failed_replicator_ends_the_process_with_its_error(tmp_path):
    with start_replicator(tmp_path, BROKEN) as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.FAILED
    assert any("a defect" in line for line in process.output)


@pytest.mark.parametrize(
    "source, message",
    [
        ("parts = 7", "is a int, not a Replicator"),
        ("parts = []", "has no replicator"),
        ("other = 7", "it has no Replicator"),
    ],
)
def test_a_target_without_a_replicator_is_rejected(tmp_path, source, message):
    with start_replicator(tmp_path, source) as process:
        code, _ = process.wait_for_exit()
    assert code == RunExit.USAGE
    assert any(message in line for line in process.output)
