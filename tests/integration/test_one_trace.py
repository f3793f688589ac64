"""Check that one order has one trace, from its dispatch over five processes to the consumer in the other zone."""

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
from tests.servers.certificates import CertificateAuthority
from tests.servers.otlp import decode_spans, run_receiver
from tests.servers.postgres import free_port

PROGRAM_FOLDER = Path(__file__).with_name("traced")
TIMEOUT_SECONDS = 90.0

#: From the ledger back to the dispatch: the service and the name of each span.
EXPECTED_SPANS = [
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


class TwoZoneDeployment:
    """Two zones with a database each: the plant's service and workers, and the hub's replicator and ledger."""

    def __init__(self, folder, *, plant, hub, rabbitmq, otlp):
        shutil.copytree(PROGRAM_FOLDER, folder, dirs_exist_ok=True)
        authority = CertificateAuthority(folder)
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
            self._stack.callback(_stop_process, process)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def place_orders(self):
        subprocess.run([sys.executable, "order.py"], cwd=self._folder, env=self._environment, check=True, timeout=60)

    def count_booked_orders(self):
        return (self._folder / "log-4").read_text(encoding="utf-8").count("booked order:")

    def read_logs(self):
        return "\n".join(path.read_text(encoding="utf-8")[-2000:] for path in sorted(self._folder.glob("log-*")))


def _stop_process(process):
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def trace_to_root(span, spans_by_id):
    """Return the spans from *span* to the root of its trace, including *span*."""
    path = [span]
    while path[-1].parent:
        path.append(spans_by_id[path[-1].trace, path[-1].parent])
    return path


@pytest.mark.spec("RUN-04")
def test_one_trace_leads_from_the_consumer_in_the_other_zone_back_to_the_dispatch(tmp_path, databases, rabbitmq):
    plant, hub = databases.borrow(), databases.borrow()
    with run_receiver() as (received, url):
        # All processes have exported their spans when they have exited.
        with TwoZoneDeployment(tmp_path, plant=plant, hub=hub, rabbitmq=rabbitmq, otlp=url) as deployment:
            deployment.place_orders()
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while deployment.count_booked_orders() < 2:
                assert time.monotonic() < deadline, deployment.read_logs()
                time.sleep(0.1)
        exported_spans = decode_spans(received["/v1/traces"])
    databases.release(plant)
    databases.release(hub)
    spans_by_id = {(span.trace, span.id): span for span in exported_spans}
    book_spans = [span for span in exported_spans if (span.service, span.name) == EXPECTED_SPANS[0]]
    assert [[(each.service, each.name) for each in trace_to_root(span, spans_by_id)] for span in book_spans] == [
        EXPECTED_SPANS,
        EXPECTED_SPANS,
    ]
    # Each order has its own trace, and its spans are in no other trace.
    order_traces = {span.trace for span in exported_spans if span.name == "place order"}
    assert {span.trace for span in book_spans} == order_traces
    assert len(order_traces) == 2
    for name in ("start_processing", "rrq.executor", "provider_call", "provider_call.attempt"):
        assert {span.trace for span in exported_spans if span.name == name} == order_traces
    # The trace passed through exactly the expected processes.
    assert len({span.instance for span in exported_spans if span.trace in order_traces}) == 5
