"""One order, one trace: from its dispatch over five further processes to the consumer in the other zone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.running import ERGON
from tests.servers.certificates import Authority
from tests.servers.otlp import receiver, spans
from tests.servers.postgres import free_port

PROGRAMS = Path(__file__).with_name("traced")
PATIENCE = 90.0

#: From the ledger back to the dispatch: whose span each is, and what it is called.
WAY = [
    ("book", "start_processing"),
    ("plant:registry", "rrq.executor"),
    ("jobs", "process.attempt"),
    ("jobs", "process"),
    ("jobs", "start_processing"),
    ("take", "provider_call.attempt"),
    ("take", "provider_call"),
    ("take", "process.attempt"),
    ("take", "process"),
    ("take", "start_processing"),
    ("web", "place order"),
]


class World:
    """Two zones with a database each: the plant's service and workers, and the hub's replicator and ledger."""

    def __init__(self, folder, *, plant, hub, rabbitmq, otlp):
        shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
        authority = Authority(folder)
        server = authority.issue("server")
        for zone in ("plant", "hub"):
            authority.issue(zone, zones=[zone])
        listen = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._environment = {
            **os.environ,
            "ERGON_POSTGRES__DSN": plant,
            "ERGON_RABBITMQ__URL": rabbitmq,
            "HUB_DSN": hub,
            "PLANT": listen,
            "QUEUE": f"traced-{uuid.uuid4().hex[:8]}",
            "CERTIFICATES": str(folder),
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp,
            "OTEL_METRICS_EXPORTER": "none",
        }
        self._commands = (
            (
                *("facts", "serve", "--zone", "plant", "--listen", listen, "--store", "postgres", "--accept-loss"),
                *("--tls-cert", str(server.certificate), "--tls-key", str(server.key), "--tls-ca", str(authority.path)),
            ),
            ("facts", "replicate", "zones:parts"),
            ("run", "plant:take"),
            ("run", "plant:orchestrator"),
            ("run", "ledger:book"),
        )
        self._stack = ExitStack()

    def __enter__(self):
        for number, command in enumerate(self._commands):
            log = self._stack.enter_context((self._folder / f"log-{number}").open("wb"))
            process = subprocess.Popen(
                [*ERGON, *command],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self._stack.callback(_ended, process)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def place(self):
        subprocess.run([sys.executable, "order.py"], cwd=self._folder, env=self._environment, check=True, timeout=60)

    def booked(self):
        return (self._folder / "log-4").read_text(encoding="utf-8").count("booked order:")

    def said(self):
        return "\n".join(path.read_text(encoding="utf-8")[-2000:] for path in sorted(self._folder.glob("log-*")))


def _ended(process):
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def way_back(span, known):
    """The spans from *span* to the root of its trace, itself included."""
    found = [span]
    while found[-1].parent:
        found.append(known[found[-1].trace, found[-1].parent])
    return found


@pytest.mark.spec("RUN-04")
def test_one_trace_leads_from_the_consumer_in_the_other_zone_back_to_the_dispatch(tmp_path, databases, rabbitmq):
    plant, hub = databases.borrow(), databases.borrow()
    with receiver() as (received, url):
        # All processes have sent what they hold when they are gone.
        with World(tmp_path, plant=plant, hub=hub, rabbitmq=rabbitmq, otlp=url) as world:
            world.place()
            end = time.monotonic() + PATIENCE
            while world.booked() < 2:
                assert time.monotonic() < end, world.said()
                time.sleep(0.1)
        found = spans(received["/v1/traces"])
    databases.give_back(plant)
    databases.give_back(hub)
    known = {(span.trace, span.id): span for span in found}
    books = [span for span in found if (span.service, span.name) == WAY[0]]
    assert [[(one.service, one.name) for one in way_back(span, known)] for span in books] == [WAY, WAY]
    # Each order has a trace of its own, and what belongs to an order is in no other.
    placed = {span.trace for span in found if span.name == "place order"}
    assert {span.trace for span in books} == placed
    assert len(placed) == 2
    for name in ("start_processing", "rrq.executor", "provider_call", "provider_call.attempt"):
        assert {span.trace for span in found if span.name == name} == placed
    # The way led through as many processes as there are on it, and no further one.
    assert len({span.instance for span in found if span.trace in placed}) == 5
