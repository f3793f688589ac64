"""Check replication between two zones with PostgreSQL and files, over a service with mutual TLS, in both variants."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ergon_framework.database.migrate import upgrade
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.errors import AccessDenied, OffsetAhead
from ergon_framework.facts.model import ArtifactReference, BoundarySide, Cursor, Envelope, Fact, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica_state import ReplicaStatus
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.client_async import AsyncBoundaryClient
from tests.chaos.facts.parts import open_store
from tests.servers.certificates import CertificateAuthority
from tests.servers.postgres import free_port

pytestmark = pytest.mark.spec("FAC-17")

ROOT = Path(__file__).parents[2]
PAIR = ZonePair("plant", "hub")
TIMEOUT_SECONDS = 60.0
POLICY = ReplicationPolicy(batch=100, timeout=5.0, poll=0.2, survey=0.2, backoff=0.05, cap=0.5, drain=2.0)


class ReplicatedZones:
    """The plant with a service in its own process, and the hub's store."""

    def __init__(self, folder, server):
        self._folder = folder
        self._authority = CertificateAuthority(folder)
        self._port = free_port()
        self.options = {}
        for zone, side in (("plant", BoundarySide.INNER), ("hub", BoundarySide.OUTER)):
            dsn = server.create_database(zone)
            upgrade(dsn)
            (folder / zone).mkdir()
            self.options[zone] = {
                "zone": zone,
                "dsn": dsn,
                "side": side.value,
                "contents": str(folder / zone),
                "accept_loss": True,
            }
        tls = self._authority.issue("server")
        self.options["plant"]["server_tls"] = [str(path) for path in (tls.certificate, tls.key, self._authority.path)]
        self.options["plant"]["listen"] = f"127.0.0.1:{self._port}"
        self.plant, self.hub = (open_store(self.options[zone]) for zone in ("plant", "hub"))
        self.changed = threading.Condition()
        self._unlisten = self.hub.listen(self._wake)
        self.states = []
        self._service = None

    def serve(self):
        self._service = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.facts.parts", "serve", json.dumps(self.options["plant"])], cwd=ROOT
        )

    def kill(self):
        if self._service is not None:
            self._service.kill()
            self._service.wait()

    def close(self):
        self.kill()
        self._unlisten()
        self.plant.close()
        self.hub.close()

    def append(self, count, *, size=0):
        """Append *count* facts; one of each fifty has an artifact of *size* bytes."""
        last = self.plant.last_offset(PAIR)
        facts = []
        for number in range(0 if last is None else last.offset, (0 if last is None else last.offset) + count):
            content = {"n": number}
            if size and number % 50 == 7:
                stored = self.plant.put_object("of-plant", f"{number}", [os.urandom(size)])
                content = ArtifactReference(
                    bucket="of-plant", key=f"{number}", digest=stored.digest, size=stored.size
                ).to_object()
            envelope = Envelope(message_id=f"m-{number}", from_zone="plant", to_zone="hub", produced_at_unix_ms=0)
            facts.append((envelope, Fact.create("s", "p", content)))
        for result in self.plant.append_facts(facts):
            raise_if_error(result)

    def issue(self, zone, into=None):
        return self._authority.issue(zone, zones=[zone], into=into)

    def address(self, zone="hub"):
        files = self.issue(zone)
        return ServiceAddress(host=f"127.0.0.1:{self._port}", files=files, name="localhost", deadline=4.0)

    def _wake(self, state=None):
        with self.changed:
            if state is not None:
                self.states.append(state)
            self.changed.notify_all()

    def wait_until(self, condition):
        """Wait until *condition* is true; check it after each new fact and state change."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        with self.changed:
            while not condition():
                # A notification may arrive during the check, so the next check comes after at most this time.
                self.changed.wait(0.2)
                assert time.monotonic() < deadline, self.states[-3:]

    @property
    def arrived_offset(self):
        last = self.hub.last_offset(PAIR)
        return 0 if last is None else last.offset

    def start_replicator(self, variant, address):
        """Start a replicator; return a function that stops it and returns its state."""
        is_created = threading.Event()
        replicators = []

        async def main():
            source = AsyncBoundaryClient(address)
            replicators.append(AsyncReplicator(source, self.hub, PAIR, policy=POLICY, on_change=self._wake))
            is_created.set()
            await replicators[0].run()

        def run():
            if variant == "asyncio":
                asyncio.run(main())
                return
            replicators.append(Replicator(BoundaryClient(address), self.hub, PAIR, policy=POLICY, on_change=self._wake))
            is_created.set()
            replicators[0].run()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert is_created.wait(TIMEOUT_SECONDS)

        def stop():
            replicators[0].stop()
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()
            return replicators[0].state()

        return stop


@pytest.fixture
def zones(new_postgres, new_folder):
    server = new_postgres(fsync=False)
    server.start()
    zones = ReplicatedZones(new_folder("zones"), server)
    yield zones
    zones.close()


@pytest.mark.spec("FAC-10", "FAC-15")
@pytest.mark.parametrize("variant", ["threads", "asyncio"])
def test_facts_and_artifacts_arrive_once_whenever_the_service_is_killed(zones, variant):
    zones.serve()
    zones.append(1000, size=700_000)
    stop = zones.start_replicator(variant, zones.address())
    for offset in (1, 300, 700):
        zones.wait_until(lambda offset=offset: zones.arrived_offset >= offset)
        zones.kill()
        zones.serve()
    zones.wait_until(lambda: zones.arrived_offset == 1000)
    zones.append(10)
    zones.wait_until(lambda: zones.arrived_offset == 1010)
    state = stop()
    assert (state.status, state.offset, state.confirmed) == (ReplicaStatus.STOPPED, 1010, 1010)
    source_facts, replicated_facts = (store.fetch_facts("test", PAIR, 2000) for store in (zones.plant, zones.hub))
    assert [(stored.offset, stored.epoch, stored.digest) for stored in source_facts] == [
        (stored.offset, stored.epoch, stored.digest) for stored in replicated_facts
    ]
    references = [stored.fact.artifact for stored in replicated_facts if stored.fact.artifact is not None]
    assert len(references) == 20
    for reference in references:
        chunks = zones.hub.get_object(reference.bucket, reference.key, zone=PAIR.from_zone)
        assert sum(map(len, chunks)) == reference.size
    assert zones.plant.get_cursor("hub", PAIR).offset == 1010


@pytest.mark.spec("FAC-18", "DX-39")
@pytest.mark.parametrize("variant", ["threads", "asyncio"])
def test_a_denied_zone_reports_it_and_continues_when_its_certificate_is_replaced(zones, variant):
    zones.serve()
    zones.append(3)
    address = zones.address("stranger")
    stop = zones.start_replicator(variant, address)
    zones.wait_until(lambda: any(state.status is ReplicaStatus.DENIED for state in zones.states))
    denied = next(state for state in zones.states if state.status is ReplicaStatus.DENIED)
    assert isinstance(denied.problem.error, AccessDenied)
    assert zones.arrived_offset == 0
    zones.issue("hub", into=address.files)
    zones.wait_until(lambda: zones.arrived_offset == 3)
    assert stop().status is ReplicaStatus.STOPPED


@pytest.mark.spec("FAC-15")
def test_a_source_in_another_epoch_is_followed_after_an_operator_adopts_it(zones):
    zones.serve()
    zones.append(5)
    stop = zones.start_replicator("threads", zones.address())
    zones.wait_until(lambda: zones.arrived_offset == 5)
    epoch = zones.plant.new_epoch(by="ada", why="a standby took over")
    zones.append(5)
    zones.wait_until(lambda: any(state.status is ReplicaStatus.EPOCH_CHANGED for state in zones.states))
    assert stop().needs_operator is False
    assert zones.arrived_offset == 5
    with pytest.raises(OffsetAhead, match="the last one here is 5"):
        zones.hub.adopt_epoch(PAIR, Cursor(epoch, 4), by="ada")
    zones.hub.adopt_epoch(PAIR, Cursor(epoch, 5), by="ada")
    stop = zones.start_replicator("asyncio", zones.address())
    zones.wait_until(lambda: zones.arrived_offset == 10)
    stop()
    assert zones.hub.last_offset(PAIR) == zones.plant.last_offset(PAIR) == Cursor(epoch, 10)
    # Readers of this zone continue under their names and see the new epoch.
    assert {stored.epoch for stored in zones.hub.fetch_facts("test", PAIR, 100)} == {epoch}
