"""Two zones with PostgreSQL and files, a service with mutual TLS between them, and a replicator of either flavour."""

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

from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.errors import AccessDenied, OffsetAhead
from ergon_framework.facts.model import ArtifactReference, Cursor, Envelope, Fact, Pair, Side
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica import Status
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.client_aio import AsyncBoundaryClient
from ergon_framework.schema.migrate import upgrade
from tests.chaos.facts.parts import store_of
from tests.servers.certificates import Authority
from tests.servers.postgres import free_port

pytestmark = pytest.mark.spec("FAC-17")

ROOT = Path(__file__).parents[2]
PAIR = Pair("plant", "hub")
PATIENCE = 60.0
POLICY = ReplicationPolicy(batch=100, timeout=5.0, poll=0.2, survey=0.2, backoff=0.05, cap=0.5, drain=2.0)


class Zones:
    """The plant with a service in a process of its own, and the hub's store."""

    def __init__(self, folder, server):
        self._folder = folder
        self._authority = Authority(folder)
        self._port = free_port()
        self.given = {}
        for zone, side in (("plant", Side.INNER), ("hub", Side.OUTER)):
            dsn = server.create_database(zone)
            upgrade(dsn)
            (folder / zone).mkdir()
            self.given[zone] = {
                "zone": zone,
                "dsn": dsn,
                "side": side.value,
                "contents": str(folder / zone),
                "accept_loss": True,
            }
        tls = self._authority.issue("server")
        self.given["plant"]["server_tls"] = [str(path) for path in (tls.certificate, tls.key, self._authority.path)]
        self.given["plant"]["listen"] = f"127.0.0.1:{self._port}"
        self.plant, self.hub = (store_of(self.given[zone]) for zone in ("plant", "hub"))
        self.changed = threading.Condition()
        self._unlisten = self.hub.listen(self._wake)
        self.states = []
        self._service = None

    def serve(self):
        self._service = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.facts.parts", "serve", json.dumps(self.given["plant"])], cwd=ROOT
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
        """So many facts; one with an artifact of *size* bytes after each fifty."""
        end = self.plant.end_of(PAIR)
        facts = []
        for number in range(0 if end is None else end.offset, (0 if end is None else end.offset) + count):
            about = {"n": number}
            if size and number % 50 == 7:
                stored = self.plant.put_object("of-plant", f"{number}", [os.urandom(size)])
                about = ArtifactReference(
                    bucket="of-plant", key=f"{number}", digest=stored.digest, size=stored.size
                ).as_object()
            envelope = Envelope(message_id=f"m-{number}", from_zone="plant", to_zone="hub", produced_at_unix_ms=0)
            facts.append((envelope, Fact.of("s", "p", about)))
        for answer in self.plant.append_facts(facts):
            confirmed(answer)

    def issue(self, zone, into=None):
        return self._authority.issue(zone, zones=[zone], into=into)

    def address(self, zone="hub"):
        files = self.issue(zone)
        return Address(host=f"127.0.0.1:{self._port}", files=files, name="localhost", deadline=4.0)

    def _wake(self, state=None):
        with self.changed:
            if state is not None:
                self.states.append(state)
            self.changed.notify_all()

    def await_until(self, condition):
        """Until it is so; asked whenever a fact has come or a state has changed."""
        until = time.monotonic() + PATIENCE
        with self.changed:
            while not condition():
                # A notice may come while somebody asks; nobody waits longer than this for the next look.
                self.changed.wait(0.2)
                assert time.monotonic() < until, self.states[-3:]

    @property
    def arrived(self):
        end = self.hub.end_of(PAIR)
        return 0 if end is None else end.offset

    def start(self, flavour, address):
        """A replicator that runs; called once more it ends."""
        made = threading.Event()
        held = []

        async def main():
            source = AsyncBoundaryClient(address)
            held.append(AsyncReplicator(source, self.hub, PAIR, policy=POLICY, on_change=self._wake))
            made.set()
            await held[0].run()

        def run():
            if flavour == "asyncio":
                asyncio.run(main())
                return
            held.append(Replicator(BoundaryClient(address), self.hub, PAIR, policy=POLICY, on_change=self._wake))
            made.set()
            held[0].run()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert made.wait(PATIENCE)

        def end():
            held[0].stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            return held[0].state()

        return end


@pytest.fixture
def zones(new_postgres, new_folder):
    server = new_postgres(fsync=False)
    server.start()
    made = Zones(new_folder("zones"), server)
    yield made
    made.close()


@pytest.mark.spec("FAC-10", "FAC-15")
@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_facts_and_artifacts_arrive_once_whenever_the_service_is_killed(zones, flavour):
    zones.serve()
    zones.append(1000, size=700_000)
    end = zones.start(flavour, zones.address())
    for offset in (1, 300, 700):
        zones.await_until(lambda offset=offset: zones.arrived >= offset)
        zones.kill()
        zones.serve()
    zones.await_until(lambda: zones.arrived == 1000)
    zones.append(10)
    zones.await_until(lambda: zones.arrived == 1010)
    state = end()
    assert (state.status, state.offset, state.confirmed) == (Status.STOPPED, 1010, 1010)
    there, here = (store.fetch_facts("test", PAIR, 2000) for store in (zones.plant, zones.hub))
    assert [(stored.offset, stored.epoch, stored.digest) for stored in there] == [
        (stored.offset, stored.epoch, stored.digest) for stored in here
    ]
    named = [stored.fact.artifact for stored in here if stored.fact.artifact is not None]
    assert len(named) == 20
    for reference in named:
        pieces = zones.hub.get_object(reference.bucket, reference.key, zone=PAIR.from_zone)
        assert sum(map(len, pieces)) == reference.size
    assert zones.plant.cursor_of("hub", PAIR).offset == 1010


@pytest.mark.spec("FAC-18", "DX-39")
@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_a_zone_that_may_not_read_says_so_and_goes_on_when_its_certificate_is_replaced(zones, flavour):
    zones.serve()
    zones.append(3)
    address = zones.address("stranger")
    end = zones.start(flavour, address)
    zones.await_until(lambda: any(state.status is Status.DENIED for state in zones.states))
    denied = next(state for state in zones.states if state.status is Status.DENIED)
    assert isinstance(denied.trouble.error, AccessDenied)
    assert zones.arrived == 0
    zones.issue("hub", into=address.files)
    zones.await_until(lambda: zones.arrived == 3)
    assert end().status is Status.STOPPED


@pytest.mark.spec("FAC-15")
def test_a_source_in_another_epoch_is_followed_when_an_operator_has_said_so(zones):
    zones.serve()
    zones.append(5)
    end = zones.start("threads", zones.address())
    zones.await_until(lambda: zones.arrived == 5)
    epoch = zones.plant.new_epoch(by="ada", why="a standby took over")
    zones.append(5)
    zones.await_until(lambda: any(state.status is Status.EPOCH_CHANGED for state in zones.states))
    assert end().halted is False
    assert zones.arrived == 5
    with pytest.raises(OffsetAhead, match="the last one here is 5"):
        zones.hub.adopt_epoch(PAIR, Cursor(epoch, 4), by="ada")
    zones.hub.adopt_epoch(PAIR, Cursor(epoch, 5), by="ada")
    end = zones.start("asyncio", zones.address())
    zones.await_until(lambda: zones.arrived == 10)
    end()
    assert zones.hub.end_of(PAIR) == zones.plant.end_of(PAIR) == Cursor(epoch, 10)
    # Readers of this zone go on by their names, and see the new epoch.
    assert {stored.epoch for stored in zones.hub.fetch_facts("test", PAIR, 100)} == {epoch}
