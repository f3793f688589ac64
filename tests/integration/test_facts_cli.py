"""``ergon facts``: served by a process of its own, and used as somebody at a terminal or a script would."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.cli.facts_serve import ServeExit
from ergon_framework.cli.facts_work import FactsExit
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from tests.integration.running import ERGON
from tests.servers.certificates import Authority
from tests.servers.postgres import free_port


class Served:
    """``ergon facts serve``, with a store in memory unless it is given the address of a database."""

    def __init__(self, folder: Path, *words, dsn=None):
        self.folder, self.words, self.dsn = folder, words, dsn
        self.authority = Authority(folder)
        self.files = self.authority.issue("server")
        self.start()

    def start(self):
        environment = {**os.environ} if self.dsn is None else {**os.environ, "ERGON_POSTGRES__DSN": self.dsn}
        self.process = subprocess.Popen(
            [
                *(*ERGON, "facts", "serve", "--accept-loss"),
                *("--store", "memory" if self.dsn is None else "postgres"),
                *("--zone", "Plant A", "--listen", "127.0.0.1:0", *self.words),
                *("--tls-cert", self.files.certificate, "--tls-key", self.files.key, "--tls-ca", self.authority.path),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=environment,
        )
        self.where = re.fullmatch(r"listening at (127\.0\.0\.1:\d+) for Plant A\n", self.process.stdout.readline())[1]

    def run(self, who, *words, code=FactsExit.OK, stdin=None):
        done = CliRunner().invoke(app, ["facts", *map(str, words)], env=self.environment(who), input=stdin)
        assert done.exit_code == code, (done.output, done.stderr, done.exception)
        return done

    def told(self, who, *words, **given):
        return json.loads(self.run(who, *words, "--json", **given).stdout)

    def environment(self, who):
        return {
            "ERGON_FACTS_SERVER": self.where,
            "ERGON_FACTS_TLS_CERT": str(who.certificate),
            "ERGON_FACTS_TLS_KEY": str(who.key),
            "ERGON_FACTS_TLS_CA": str(who.authorities),
        }

    def said(self):
        """End it in order; what it has said."""
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=30)[1]
        assert self.process.returncode == ServeExit.OK
        return said

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("served"))
    made.plant = made.authority.issue("plant", zones=["Plant A"])
    made.peer = made.authority.issue("peer", zones=["HQ"])
    made.operator = made.authority.issue("operator", operator="ops")
    yield made
    assert made.end() == ServeExit.OK


@pytest.fixture
def pair(request):
    """A pair of zones for each test; the plant's peer is called differently in each."""
    return ("--from", "Plant A", "--to", f"HQ {request.node.name[:50]}")


@pytest.fixture
def peer(served, pair, tmp_path):
    return served.authority.issue(f"peer-{tmp_path.name}", zones=[pair[3]])


def append(served, pair, number):
    name = f"{pair[3]}-{number}".replace(" ", "_")
    words = ("append", f"order:{number}", "paid", f'{{"total": {number}}}', *pair, "--id", name)
    return served.told(served.plant, *words)


@pytest.mark.spec("FAC-01", "FAC-09")
def test_a_fact_is_appended_once_and_can_be_asked_for(served, pair):
    first = append(served, pair, 1)
    assert (first["offset"], first["buffer"], first["duplicate"]) == (1, "ESB", False)
    assert append(served, pair, 1)["duplicate"]
    name = first["message_id"]
    assert served.told(served.plant, "get", name, "--from", "Plant A")["digest"] == first["digest"]
    shown = served.run(served.plant, "get", name, "--from", "Plant A").stdout
    assert shown.startswith("confirmed in the ESB at offset 1, sha256:")
    missing = served.run(served.plant, "get", "nothing", "--from", "Plant A", code=FactsExit.NOT)
    assert "there is no fact 'nothing'" in missing.stderr


@pytest.mark.spec("SEC-08")
def test_failed_handshakes_write_nothing_to_the_log(tmp_path, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    made = Served(tmp_path)
    host, _, port = made.where.partition(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=20) as line:
            line.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionError):
                while line.recv(1000):
                    pass
    assert made.said().splitlines() == ["stopping; calls that run have 10 s to finish"]


@pytest.mark.spec("RUN-04")
def test_the_service_answers_probes_and_tells_what_it_has_counted(tmp_path):
    port = free_port()
    made = Served(tmp_path, "--probe-port", str(port))
    made.plant = made.authority.issue("plant", zones=["Plant A"])
    try:
        append(made, ("--from", "Plant A", "--to", "HQ"), 1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            assert json.load(answer) == {"live": True, "ready": True, "reasons": []}
        wanted = (
            'ergon_facts_total{ergon_fact_buffer="ESB",ergon_outcome="stored"} 1.0',
            'ergon_facts_calls_total{ergon_fact_method="AppendFact",ergon_outcome="answered"} 1.0',
        )
        end, text = time.monotonic() + 20, ""
        # A call is counted when it is over, which its caller may know before.
        while not all(line in text for line in wanted):
            assert time.monotonic() < end, text
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
    finally:
        made.said()


@pytest.mark.spec("FAC-02", "FAC-03", "FAC-04")
def test_what_a_store_in_postgresql_confirmed_is_there_after_its_service_was_killed(database, tmp_path):
    made = Served(tmp_path, "--contents", tmp_path / "contents", dsn=database)
    made.plant = made.authority.issue("plant", zones=["Plant A"])
    pair = ("--from", "Plant A", "--to", "HQ")
    (tmp_path / "drawing.pdf").write_bytes(b"lines" * 1000)
    first = append(made, pair, 1)
    put = made.told(made.plant, "put", "files", "drawing.pdf", tmp_path / "drawing.pdf")
    made.process.kill()
    made.process.communicate()
    made.start()
    try:
        again = append(made, pair, 1)
        assert (again["offset"], again["epoch"], again["duplicate"]) == (first["offset"], first["epoch"], True)
        assert append(made, pair, 2)["offset"] == 2
        assert made.told(made.plant, "put", "files", "drawing.pdf", tmp_path / "drawing.pdf") == put
    finally:
        assert made.end() == ServeExit.OK


@pytest.mark.spec("FAC-11")
def test_a_store_with_bounds_refuses_what_is_beyond_and_lets_go_of_what_is_confirmed(database, tmp_path, monkeypatch):
    monkeypatch.setenv("ERGON_LOGGING__LEVEL", "info")
    words = ("--contents", tmp_path / "contents", "--max-facts", "4", "--max-bytes", "2kB")
    made = Served(tmp_path, *words, "--keep", "1s", "--prune-every", "1s", dsn=database)
    made.plant = made.authority.issue("plant", zones=["Plant A"])
    peer = made.authority.issue("peer", zones=["HQ"])
    pair = ("--from", "Plant A", "--to", "HQ")
    (tmp_path / "large").write_bytes(b"x" * 3000)
    try:
        put = made.run(made.plant, "put", "files", "large", tmp_path / "large", "--json", code=FactsExit.NOT)
        assert json.loads(put.stdout)["code"] == "buffer_full"
        for number in range(1, 5):
            append(made, pair, number)
        more = ("append", "order:5", "paid", "{}", *pair, "--id", "order-5")
        full = made.run(made.plant, *more, "--json", code=FactsExit.NOT)
        assert json.loads(full.stdout)["code"] == "buffer_full"
    finally:
        made.said()
    # One that begins looks at once how much room there is.
    made.start()
    try:
        made.run(peer, "fetch", *pair, "--reader", "ledger", "--confirm")
        until = time.monotonic() + 60
        while made.told(made.plant, "lag")["first"] != 5:
            assert time.monotonic() < until
        assert made.told(made.plant, *more)["offset"] == 5
    finally:
        said = made.said()
    assert 'event="room ends" room=facts used=4 limit=4' in said
    assert 'event="facts pruned" facts=4 artifacts=0' in said


def test_the_object_may_come_from_a_pipe(served, pair):
    words = ("append", "order:1", "paid", "-", *pair, "--id", "piped")
    assert "at offset 1" in served.run(served.plant, *words, stdin='{"total": 7}').stdout
    assert "as before" in served.run(served.plant, *words, stdin='{ "total": 7.0 }').stdout
    conflict = served.run(served.plant, *words, stdin='{"total": 8}', code=FactsExit.NOT)
    assert "make ids of all that tells two facts apart" in conflict.stderr


def test_what_is_refused_is_told_with_its_code(served, pair, peer):
    words = ("append", "order:1", "paid", "{}", *pair, "--id", "x")
    told = json.loads(served.run(peer, *words, "--json", code=FactsExit.NOT).stdout)
    assert told["code"] == "access_denied"
    assert told["exit_code"] == 1
    bad = served.run(served.plant, "append", "order:1", "paid", "{", *pair, "--id", "x", code=FactsExit.NOT)
    assert "JSON" in bad.stderr


@pytest.mark.spec("FAC-16")
def test_a_reader_goes_on_where_he_confirmed_and_can_read_again(served, pair, peer):
    for number in range(1, 6):
        append(served, pair, number)

    def offsets(*words):
        lines = served.run(peer, "fetch", *pair, "--reader", "ledger", "--json", *words).stdout.splitlines()
        return [json.loads(line)["offset"] for line in lines]

    assert offsets("--limit", 2) == [1, 2]
    assert offsets("--limit", 2, "--confirm") == [1, 2]
    assert offsets("--confirm") == [3, 4, 5]
    assert offsets() == []
    assert offsets("--from-offset", 4) == [4, 5]
    assert offsets("--since", "2020-01-01T00:00") == [1, 2, 3, 4, 5]
    assert offsets("--since", "2099-01-01T00:00") == []
    assert "there is nothing new" in served.run(peer, "fetch", *pair, "--reader", "ledger").stderr
    words = served.run(peer, "fetch", *pair, "--reader", "ledger", "--from-offset", 5).stdout
    assert 'order:5 paid {"total": 5}' in words


@pytest.mark.parametrize("more", [("--since", "2020-01-01"), ("--confirm",)])
def test_words_that_contradict_each_other_are_told(served, pair, peer, more):
    served.run(peer, "fetch", *pair, "--reader", "r", "--from-offset", 1, *more, code=FactsExit.FAILED)


@pytest.mark.spec("FAC-04", "FAC-21")
def test_a_file_is_stored_once_and_read_back(served, tmp_path):
    content = bytes(range(256)) * 4096
    (tmp_path / "in").write_bytes(content)
    key = f"{tmp_path.name}/a.bin"
    first = served.told(served.plant, "put", "files", key, tmp_path / "in")
    assert first["size"] == len(content)
    assert served.told(served.plant, "put", "files", key, tmp_path / "in") == first
    assert served.run(served.plant, "cat", "files", key).stdout_bytes == content
    served.run(served.plant, "cat", "files", key, "-o", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content
    (tmp_path / "in").write_bytes(b"other")
    served.run(served.plant, "put", "files", key, tmp_path / "in", code=FactsExit.NOT)
    missing = served.run(served.plant, "cat", "files", "nothing", "-o", tmp_path / "none", code=FactsExit.NOT)
    assert "files/nothing" in missing.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_file_that_is_not_there_is_told(served, tmp_path):
    done = served.run(served.plant, "put", "files", "k", tmp_path / "none", code=FactsExit.FAILED)
    assert "cannot be read" in done.stderr


@pytest.mark.spec("FAC-16")
def test_lag_shows_who_is_behind_and_an_operator_retires_him(served, pair, peer):
    for number in range(1, 4):
        append(served, pair, number)
    assert served.told(peer, "lag")["readers"] == {}
    assert "nobody yet" in served.run(peer, "lag").stdout
    served.run(peer, "fetch", *pair, "--reader", "old", "--limit", 1, "--confirm")
    log = served.told(peer, "lag")
    assert log["pair"] == {"from_zone": "Plant A", "to_zone": pair[3]}
    assert log["readers"]["old"]["facts"] == 2
    assert "old" in served.run(peer, "lag").stdout
    served.run(peer, "retire", "old", *pair, "--yes", code=FactsExit.NOT)
    asked = served.run(served.operator, "retire", "old", *pair, stdin="n\n", code=FactsExit.NOT)
    assert "lacks 2 facts" in asked.stderr
    assert "nothing was changed" in asked.stderr
    assert served.run(served.operator, "retire", "old", *pair, stdin="y\n").stdout.endswith("old is retired\n")
    served.run(served.operator, "retire", "old", *pair, "--yes", code=FactsExit.NOT)


def test_tail_prints_what_comes_until_it_is_stopped(served, pair, peer):
    append(served, pair, 1)
    words = [*ERGON, "facts", "tail", *pair, "--reader", "watch", "--json"]
    tail = subprocess.Popen(words, env=served.environment(peer), stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(tail.stdout.readline())["offset"] == 1
        append(served, pair, 2)
        assert json.loads(tail.stdout.readline())["offset"] == 2
    finally:
        tail.send_signal(signal.SIGINT)
        assert tail.wait(30) == FactsExit.OK
        tail.stdout.close()


def test_a_service_out_of_reach_is_told(served, pair):
    done = CliRunner().invoke(
        app,
        ["facts", "get", "m", "--from", "Plant A", "--server", f"127.0.0.1:{free_port()}"],
        env={**served.environment(served.plant), "ERGON_FACTS_SERVER": ""},
    )
    assert done.exit_code == FactsExit.UNREACHED
    assert "nobody knows whether it was done" in done.stderr


def test_a_certificate_that_is_not_there_is_told(served, pair, tmp_path):
    words = ("get", "m", "--from", "Plant A", "--tls-cert", tmp_path / "none")
    assert "cannot be read" in served.run(served.plant, *words, code=FactsExit.FAILED).stderr


# -- serve ----------------------------------------------------------------------------------------------


def serve(*words, env=None):
    return CliRunner().invoke(app, ["facts", "serve", *map(str, words)], env=env)


def test_a_store_that_may_lose_something_is_not_served_unless_told(served):
    words = ("--zone", "A", "--listen", "127.0.0.1:0", "--store", "memory")
    done = serve(*words, env=served.environment(served.files))
    assert done.exit_code == ServeExit.FAILED
    assert "say --accept-loss" in done.stderr


def test_an_address_that_is_taken_is_told(served):
    words = ("--zone", "A", "--listen", served.where, "--store", "memory", "--accept-loss")
    done = serve(*words, env=served.environment(served.files))
    assert done.exit_code == ServeExit.FAILED
    assert "is the port taken?" in done.stderr


def test_files_that_do_not_fit_are_told(served):
    environ = served.environment(served.files) | {"ERGON_FACTS_TLS_KEY": str(served.plant.key)}
    done = serve("--zone", "A", "--listen", "127.0.0.1:0", "--store", "memory", "--accept-loss", env=environ)
    assert done.exit_code == ServeExit.FAILED
    assert "no certificate with its key" in done.stderr


def test_without_a_database_it_says_where_to_name_one(served, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    done = serve("--zone", "A", "--listen", "127.0.0.1:0", env=served.environment(served.files))
    assert done.exit_code == ServeExit.FAILED
    assert "set ERGON_POSTGRES__DSN" in done.stderr


@pytest.mark.parametrize("words", [("get", "m", "--from", "A"), ("serve", "--zone", "A", "--listen", "127.0.0.1:0")])
def test_without_its_libraries_it_says_what_to_install(served, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "grpc", None)
    done = CliRunner().invoke(app, ["facts", *words], env=served.environment(served.plant))
    assert done.exit_code == FactsExit.FAILED
    assert "pip install 'ergon-framework[grpc]'" in done.stderr


def test_sigterm_lets_an_upload_finish(tmp_path):
    served = Served(tmp_path)
    files = served.authority.issue("plant", zones=["Plant A"])
    said = threading.Event()
    threading.Thread(target=lambda: (served.process.stderr.readline(), said.set()), daemon=True).start()

    def blob():
        # More than may be under way unread: when the last of it is asked for, the service has begun to take it.
        for _ in range(16):
            yield bytes(256 * 1024)
        served.process.send_signal(signal.SIGTERM)
        assert said.wait(30)
        yield b"second"

    try:
        with BoundaryClient(Address(host=served.where, files=files)) as client:
            assert client.put_object("b", "k", blob()).size == 16 * 256 * 1024 + 6
        # It has been asked once; asked again while the interpreter ends, it may end of the signal.
        assert served.process.wait(30) == ServeExit.OK
    finally:
        served.end()
