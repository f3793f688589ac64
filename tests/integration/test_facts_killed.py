"""The producer, the service or the store is SIGKILLed at each step of each call; all goes on, and all is there once."""

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

from ergon_framework.facts.model import ArtifactReference, Fact
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.schema.migrate import upgrade
from tests.servers import facts_caller as caller
from tests.servers.certificates import Authority
from tests.servers.facts_caller import BEFORE, CONTENT, PAIR, PLACE, READER, STORED, TOGETHER, stated
from tests.servers.facts_steps import STEPS
from tests.servers.postgres import PrivatePostgres, free_port

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-02", "FAC-03", "FAC-21")]

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
VICTIMS = ("producer", "service", "store")
#: What each call has to say when it is through, whoever was killed.
TOLD = {
    "append": BEFORE + 1,
    "batch": list(range(BEFORE + 1, BEFORE + TOGETHER + 1)),
    "put": list(STORED),
    "get": hashlib.sha256(CONTENT).hexdigest(),
    "fetch": [[f"m-{number}", number] for number in range(1, BEFORE + 1)],
    "confirm": 2,
}
#: The row that a call waits for while somebody else holds it.
HELD = {
    "append": "select 1 from ergon.fact_log for update",
    "batch": "select 1 from ergon.fact_log for update",
    "confirm": "select 1 from ergon.fact_readers for update",
}


@pytest.fixture(scope="module")
def server():
    """A server that syncs, as only such a one can be killed."""
    folder = Path(tempfile.mkdtemp(prefix="ergon-postgres-"))
    made = PrivatePostgres(folder)
    try:
        made.start()
        upgrade(made.create_database("like"))
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder, ignore_errors=True)


class Plant:
    """A zone with its store, its service and whoever calls it."""

    def __init__(self, folder, server, call):
        self.server = server
        self.contents = folder / "contents"
        self.dsn = server.create_database("plant", like="like")
        self._authority = Authority(folder)
        self._tls = self._files(self._authority.issue("server"))
        self._callers = self._files(self._authority.issue("plant", zones=[PAIR.from_zone, PAIR.to_zone]))
        self._where = f"127.0.0.1:{free_port()}"
        self._call = call
        self._service = self._caller = self._lock = None
        self._stack = ExitStack()
        with self.store() as store:
            store.append_facts([stated(number) for number in range(1, BEFORE + 1)])
            if call == "get":
                store.put_object(*PLACE, [CONTENT])
            if call in ("confirm", "fetch"):
                store.fetch_facts(READER, PAIR, 1)

    def _files(self, files):
        return [str(files.certificate), str(files.key), str(self._authority.path)]

    def store(self):
        return PostgresBoundary(self.dsn, contents=FileContents(self.contents))

    def serve(self, step=None):
        given = {"dsn": self.dsn, "contents": str(self.contents), "zones": list(PAIR), "tls": self._tls}
        given |= {"listen": self._where, "step": step}
        self._service = self._start("tests.servers.facts_steps", given)
        self._hear(self._service, "listening")

    def call(self):
        given = {"host": self._where, "tls": self._callers, "call": self._call}
        self._caller = self._start("tests.servers.facts_caller", given)

    def client(self):
        return caller.client_of(self._where, self._callers)

    def _start(self, module, given):
        command = [sys.executable, "-m", module, json.dumps(given)]
        made = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # At its end its pipes are closed, and it is waited for.
        self._stack.enter_context(made)
        self._stack.callback(made.kill)
        return made

    @staticmethod
    def _hear(process, words):
        assert select.select([process.stdout], [], [], PATIENCE)[0], f"nobody said {words!r}"
        assert process.stdout.readline().decode().strip() == words

    # -- one step -------------------------------------------------------------------------------------

    def hold(self):
        """Keep the call from going on inside of the database."""
        self._lock = self._stack.enter_context(closing(psycopg.connect(self.dsn)))
        self._lock.execute(HELD[self._call])

    def await_step(self, step):
        if not step.endswith("-in"):
            self._hear(self._service, f"at {step}")
            return
        until = time.monotonic() + PATIENCE
        waiting = "select 1 from pg_stat_activity where datname = 'plant' and wait_event_type = 'Lock'"
        with psycopg.connect(self.dsn, autocommit=True) as looking:
            while not looking.execute(waiting).fetchall():
                assert time.monotonic() < until, "nobody waits for the lock"
                time.sleep(0.005)

    def kill(self, victim):
        if victim == "store":
            self.server.kill()
            self.server.start()
            return
        process = self._caller if victim == "producer" else self._service
        process.kill()
        process.wait()

    def go_on(self, victim):
        if self._lock is not None:
            self._lock.close()
        if victim == "service":
            self.serve()
        elif self._service.poll() is None:
            self._service.stdin.write(b"go on\n")
            self._service.stdin.flush()

    def told(self):
        """What the caller has heard; None if he was killed, or heard that nobody knows."""
        said, _ = self._caller.communicate(timeout=PATIENCE)
        if not said:
            return None
        answer = json.loads(said)
        assert answer.get("error") in (None, "ConnectionLost"), answer
        return answer.get("told")

    def end(self):
        self._stack.close()


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("call, step", [(call, step) for call, steps in STEPS.items() for step in steps])
def test_a_kill_at_any_step_costs_nothing_and_doubles_nothing(tmp_path, server, call, step, victim):
    plant = Plant(tmp_path, server, call)
    try:
        if step.endswith("-in"):
            plant.hold()
        plant.serve(step)
        plant.call()
        plant.await_step(step)
        plant.kill(victim)
        plant.go_on(victim)
        told = plant.told()
        assert told in (None, TOLD[call])
        with plant.client() as client:
            assert caller.called(client, call) == TOLD[call]
            assert caller.called(client, call) == TOLD[call]
            check(call, plant, client)
    finally:
        plant.end()


def check(call, plant, client):
    count = BEFORE + {"append": 1, "batch": TOGETHER}.get(call, 0)
    found = client.fetch_facts("look", PAIR, 100)
    assert [(each.envelope.message_id, each.offset) for each in found] == [
        (f"m-{number}", number) for number in range(1, count + 1)
    ]
    if call in ("put", "get"):
        check_artifact(plant, client)
        count += 1
    assert client.append_fact(*stated(count + 100)).offset == count + 1


def check_artifact(plant, client):
    assert b"".join(client.get_object(*PLACE)) == CONTENT
    # All of it once more, by somebody who does not ask what is there.
    assert client.put_object(*PLACE, caller.pieces(), expected=STORED) == STORED
    reference = ArtifactReference(bucket=PLACE[0], key=PLACE[1], digest=STORED.digest, size=STORED.size)
    envelope, _ = stated(99)
    assert client.append_fact(envelope, Fact.of("paper:17", "filed", reference.as_object())).offset == BEFORE + 1
    files = [path for path in (plant.contents / "objects").rglob("*") if path.is_file()]
    assert [path.name for path in files] == [STORED.digest.removeprefix("sha256:")]
    with plant.store() as store:
        store.prune(0)
    FileContents(plant.contents).sweep(int(time.time() * 1000) + 1000)
    assert list((plant.contents / "uploads").iterdir()) == []
    with psycopg.connect(plant.dsn) as connection:
        assert connection.execute("select content_bytes from ergon.fact_room").fetchall() == [(STORED.size,)]


@pytest.mark.parametrize("step", ["append-after", "batch-after"])
def test_what_was_committed_before_a_kill_is_told_again_as_known(tmp_path, server, step):
    plant = Plant(tmp_path, server, step.partition("-")[0])
    try:
        plant.serve(step)
        plant.call()
        plant.await_step(step)
        plant.kill("service")
        plant.go_on("service")
        assert plant.told() is None
        with plant.client() as client:
            again = client.append_fact(*stated(BEFORE + 1))
        assert (again.offset, again.duplicate) == (BEFORE + 1, True)
    finally:
        plant.end()


@pytest.mark.parametrize("step", ["append-before", "batch-before"])
def test_what_was_killed_before_the_store_was_asked_is_not_there(tmp_path, server, step):
    plant = Plant(tmp_path, server, step.partition("-")[0])
    try:
        plant.serve(step)
        plant.call()
        plant.await_step(step)
        plant.kill("service")
        with plant.store() as store:
            assert store.get_fact(PAIR.from_zone, f"m-{BEFORE + 1}") is None
    finally:
        plant.end()
