"""The producer, the service or the store is killed at each step of each call; all facts are there once."""

from __future__ import annotations

import hashlib
import json
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest

from ergon_framework.database.migrate import upgrade
from ergon_framework.facts.model import ArtifactReference, Fact
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.servers import facts_caller as caller
from tests.servers.certificates import CertificateAuthority
from tests.servers.facts_caller import (
    ARTIFACT_NAME,
    BATCH_SIZE,
    CONTENT,
    EXISTING_FACT_COUNT,
    PAIR,
    READER,
    STORED_CONTENT,
    make_fact,
)
from tests.servers.facts_steps import STEPS
from tests.servers.postgres import PrivatePostgres, free_port

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-02", "FAC-03", "FAC-21")]

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 60.0
VICTIMS = ("producer", "service", "store")
#: The result of each call once it has completed, whichever process was killed.
EXPECTED_RESULTS = {
    "append": EXISTING_FACT_COUNT + 1,
    "batch": list(range(EXISTING_FACT_COUNT + 1, EXISTING_FACT_COUNT + BATCH_SIZE + 1)),
    "put": list(STORED_CONTENT),
    "get": hashlib.sha256(CONTENT).hexdigest(),
    "fetch": [[f"m-{number}", number] for number in range(1, EXISTING_FACT_COUNT + 1)],
    "confirm": 2,
}
#: The row that a call waits for while another session locks it.
LOCK_STATEMENTS = {
    "append": "select 1 from ergon.fact_log for update",
    "batch": "select 1 from ergon.fact_log for update",
    "confirm": "select 1 from ergon.fact_readers for update",
}


@pytest.fixture(scope="module")
def server():
    """A server with synchronous writes: only such a server may be killed."""
    folder = Path(tempfile.mkdtemp(prefix="ergon-postgres-"))
    server = PrivatePostgres(folder)
    try:
        server.start()
        upgrade(server.create_database("like"))
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


class Plant:
    """A zone with its store, its service and its caller."""

    def __init__(self, folder, server, call):
        self.server = server
        self.contents = folder / "contents"
        self.dsn = server.create_database("plant", like="like")
        self._authority = CertificateAuthority(folder)
        self._tls = self._files(self._authority.issue("server"))
        self._callers = self._files(self._authority.issue("plant", zones=[PAIR.from_zone, PAIR.to_zone]))
        self._address = f"127.0.0.1:{free_port()}"
        self._call = call
        self._service = self._caller = self._lock = None
        self._stack = ExitStack()
        with self.store() as store:
            store.append_facts([make_fact(number) for number in range(1, EXISTING_FACT_COUNT + 1)])
            if call == "get":
                store.put_object(*ARTIFACT_NAME, [CONTENT])
            if call in ("confirm", "fetch"):
                store.fetch_facts(READER, PAIR, 1)

    def _files(self, files):
        return [str(files.certificate), str(files.key), str(self._authority.path)]

    def store(self):
        return PostgresBoundary(self.dsn, contents=FileContentStore(self.contents))

    def serve(self, step=None):
        options = {"dsn": self.dsn, "contents": str(self.contents), "zones": list(PAIR), "tls": self._tls}
        options |= {"listen": self._address, "step": step}
        self._service = self._start("tests.servers.facts_steps", options)
        self._wait_for_line(self._service, "listening")

    def call(self):
        options = {"host": self._address, "tls": self._callers, "call": self._call}
        self._caller = self._start("tests.servers.facts_caller", options)

    def client(self):
        return caller.make_client(self._address, self._callers)

    def _start(self, module, options):
        command = [sys.executable, "-m", module, json.dumps(options)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # At its end its pipes are closed and the process is waited for.
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    @staticmethod
    def _wait_for_line(process, text):
        assert select.select([process.stdout], [], [], TIMEOUT_SECONDS)[0], f"no process printed {text!r}"
        assert process.stdout.readline().decode().strip() == text

    # -- one step -------------------------------------------------------------------------------------

    def lock_row(self):
        """Block the call inside the database."""
        self._lock = self._stack.enter_context(closing(psycopg.connect(self.dsn)))
        self._lock.execute(LOCK_STATEMENTS[self._call])

    def wait_for_step(self, step):
        if not step.endswith("-in"):
            self._wait_for_line(self._service, f"at {step}")
            return
        deadline = time.monotonic() + TIMEOUT_SECONDS
        query = "select 1 from pg_stat_activity where datname = 'plant' and wait_event_type = 'Lock'"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not connection.execute(query).fetchall():
                assert time.monotonic() < deadline, "no session waits for the lock"
                time.sleep(0.005)

    def kill(self, victim):
        if victim == "store":
            self.server.kill()
            self.server.start()
            return
        process = self._caller if victim == "producer" else self._service
        process.kill()
        process.wait()

    def resume(self, victim):
        if self._lock is not None:
            self._lock.close()
        if victim == "service":
            self.serve()
        elif self._service.poll() is None:
            self._service.stdin.write(b"go on\n")
            self._service.stdin.flush()

    def read_result(self):
        """Return the caller's result; None if the caller was killed or the outcome is unknown."""
        output, _ = self._caller.communicate(timeout=TIMEOUT_SECONDS)
        if not output:
            return None
        answer = json.loads(output)
        assert answer.get("error") in (None, "ConnectionLostError"), answer
        return answer.get("told")

    def close(self):
        self._stack.close()


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("call, step", [(call, step) for call, steps in STEPS.items() for step in steps])
def test_a_kill_at_any_step_loses_and_duplicates_nothing(tmp_path, server, call, step, victim):
    plant = Plant(tmp_path, server, call)
    try:
        if step.endswith("-in"):
            plant.lock_row()
        plant.serve(step)
        plant.call()
        plant.wait_for_step(step)
        plant.kill(victim)
        plant.resume(victim)
        result = plant.read_result()
        assert result in (None, EXPECTED_RESULTS[call])
        with plant.client() as client:
            assert caller.call_boundary(client, call) == EXPECTED_RESULTS[call]
            assert caller.call_boundary(client, call) == EXPECTED_RESULTS[call]
            check_facts(call, plant, client)
    finally:
        plant.close()


def check_facts(call, plant, client):
    count = EXISTING_FACT_COUNT + {"append": 1, "batch": BATCH_SIZE}.get(call, 0)
    facts = client.fetch_facts("look", PAIR, 100)
    assert [(each.envelope.message_id, each.offset) for each in facts] == [
        (f"m-{number}", number) for number in range(1, count + 1)
    ]
    if call in ("put", "get"):
        check_artifact(plant, client)
        count += 1
    assert client.append_fact(*make_fact(count + 100)).offset == count + 1


def check_artifact(plant, client):
    assert b"".join(client.get_object(*ARTIFACT_NAME)) == CONTENT
    # All of it again, by a client that does not check what exists.
    assert client.put_object(*ARTIFACT_NAME, caller.make_chunks(), expected=STORED_CONTENT) == STORED_CONTENT
    reference = ArtifactReference(
        bucket=ARTIFACT_NAME[0], key=ARTIFACT_NAME[1], digest=STORED_CONTENT.digest, size=STORED_CONTENT.size
    )
    envelope, _ = make_fact(99)
    assert (
        client.append_fact(envelope, Fact.create("paper:17", "filed", reference.to_object())).offset
        == EXISTING_FACT_COUNT + 1
    )
    files = [path for path in (plant.contents / "objects").rglob("*") if path.is_file()]
    assert [path.name for path in files] == [STORED_CONTENT.digest.removeprefix("sha256:")]
    with plant.store() as store:
        store.prune(0)
    FileContentStore(plant.contents).delete_stale_uploads(int(time.time() * 1000) + 1000)
    assert list((plant.contents / "uploads").iterdir()) == []
    with psycopg.connect(plant.dsn) as connection:
        assert connection.execute("select content_bytes from ergon.fact_usage").fetchall() == [(STORED_CONTENT.size,)]


@pytest.mark.parametrize("step", ["append-after", "batch-after"])
def test_a_fact_committed_before_a_kill_is_confirmed_as_a_duplicate(tmp_path, server, step):
    plant = Plant(tmp_path, server, step.partition("-")[0])
    try:
        plant.serve(step)
        plant.call()
        plant.wait_for_step(step)
        plant.kill("service")
        plant.resume("service")
        assert plant.read_result() is None
        with plant.client() as client:
            confirmation = client.append_fact(*make_fact(EXISTING_FACT_COUNT + 1))
        assert (confirmation.offset, confirmation.duplicate) == (EXISTING_FACT_COUNT + 1, True)
    finally:
        plant.close()


@pytest.mark.parametrize("step", ["append-before", "batch-before"])
def test_a_kill_before_the_store_call_leaves_no_fact(tmp_path, server, step):
    plant = Plant(tmp_path, server, step.partition("-")[0])
    try:
        plant.serve(step)
        plant.call()
        plant.wait_for_step(step)
        plant.kill("service")
        with plant.store() as store:
            assert store.get_fact(PAIR.from_zone, f"m-{EXISTING_FACT_COUNT + 1}") is None
    finally:
        plant.close()
