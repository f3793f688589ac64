"""``ergon facts``: served by its own process, and used as a person at a terminal or a script would."""

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
from ergon_framework.cli.facts_commands import FactsExit
from ergon_framework.cli.facts_run import ServeExit
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from tests.integration.running import ERGON
from tests.servers.certificates import CertificateAuthority
from tests.servers.postgres import free_port


class FactsServer:
    """``ergon facts serve``, with a store in memory unless it gets the address of a database."""

    def __init__(self, folder: Path, *args, dsn=None):
        self.folder, self.args, self.dsn = folder, args, dsn
        self.authority = CertificateAuthority(folder)
        self.files = self.authority.issue("server")
        self.start()

    def start(self):
        environment = {**os.environ} if self.dsn is None else {**os.environ, "ERGON_POSTGRES__DSN": self.dsn}
        self.process = subprocess.Popen(
            [
                *(*ERGON, "facts", "serve", "--accept-loss"),
                *("--store", "memory" if self.dsn is None else "postgres"),
                *("--zone", "Plant A", "--listen", "127.0.0.1:0", *self.args),
                *("--tls-cert", self.files.certificate, "--tls-key", self.files.key, "--tls-ca", self.authority.path),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=environment,
        )
        self.address = re.fullmatch(r"listening at (127\.0\.0\.1:\d+) for Plant A\n", self.process.stdout.readline())[1]

    def run(self, caller, *args, code=FactsExit.OK, stdin=None):
        result = CliRunner().invoke(app, ["facts", *map(str, args)], env=self.environment(caller), input=stdin)
        assert result.exit_code == code, (result.output, result.stderr, result.exception)
        return result

    def run_json(self, caller, *args, **options):
        return json.loads(self.run(caller, *args, "--json", **options).stdout)

    def environment(self, caller):
        return {
            "ERGON_FACTS_SERVER": self.address,
            "ERGON_FACTS_TLS_CERT": str(caller.certificate),
            "ERGON_FACTS_TLS_KEY": str(caller.key),
            "ERGON_FACTS_TLS_CA": str(caller.authorities),
        }

    def stop_and_read_log(self):
        """Stop it gracefully and return its output."""
        self.process.send_signal(signal.SIGTERM)
        log = self.process.communicate(timeout=30)[1]
        assert self.process.returncode == ServeExit.OK
        return log

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = FactsServer(tmp_path_factory.mktemp("served"))
    server.plant = server.authority.issue("plant", zones=["Plant A"])
    server.peer = server.authority.issue("peer", zones=["HQ"])
    server.operator = server.authority.issue("operator", operator="ops")
    yield server
    assert server.stop() == ServeExit.OK


@pytest.fixture
def pair_options(request):
    """A pair of zones for each test; the plant's peer has another name in each."""
    return ("--from", "Plant A", "--to", f"HQ {request.node.name[:50]}")


@pytest.fixture
def peer_files(server, pair_options, tmp_path):
    return server.authority.issue(f"peer-{tmp_path.name}", zones=[pair_options[3]])


def append_fact(server, pair_options, number):
    message_id = f"{pair_options[3]}-{number}".replace(" ", "_")
    args = ("append", f"order:{number}", "paid", f'{{"total": {number}}}', *pair_options, "--id", message_id)
    return server.run_json(server.plant, *args)


@pytest.mark.spec("FAC-01", "FAC-09")
def test_a_fact_is_appended_once_and_can_be_looked_up(server, pair_options):
    first = append_fact(server, pair_options, 1)
    assert (first["offset"], first["buffer"], first["duplicate"]) == (1, "ESB", False)
    assert append_fact(server, pair_options, 1)["duplicate"]
    name = first["message_id"]
    assert server.run_json(server.plant, "get", name, "--from", "Plant A")["digest"] == first["digest"]
    shown = server.run(server.plant, "get", name, "--from", "Plant A").stdout
    assert shown.startswith("confirmed in the ESB at offset 1, sha256:")
    missing = server.run(server.plant, "get", "nothing", "--from", "Plant A", code=FactsExit.REJECTED)
    assert "there is no fact 'nothing'" in missing.stderr


@pytest.mark.spec("SEC-08")
def test_failed_handshakes_write_nothing_to_the_log(tmp_path, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    server = FactsServer(tmp_path)
    host, _, port = server.address.partition(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionError):
                while connection.recv(1000):
                    pass
    assert server.stop_and_read_log().splitlines() == ["stopping; running calls have 10 s to finish"]


@pytest.mark.spec("RUN-04")
def test_the_service_answers_probes_and_exports_metrics(tmp_path):
    port = free_port()
    server = FactsServer(tmp_path, "--probe-port", str(port))
    server.plant = server.authority.issue("plant", zones=["Plant A"])
    try:
        append_fact(server, ("--from", "Plant A", "--to", "HQ"), 1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            assert json.load(answer) == {"live": True, "ready": True, "reasons": []}
        expected = (
            'ergon_facts_total{ergon_fact_buffer="ESB",ergon_outcome="stored"} 1.0',
            'ergon_facts_calls_total{ergon_fact_method="AppendFact",ergon_outcome="answered"} 1.0',
        )
        deadline, text = time.monotonic() + 20, ""
        # A call is counted after it has ended, which its caller may notice earlier.
        while not all(line in text for line in expected):
            assert time.monotonic() < deadline, text
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
    finally:
        server.stop_and_read_log()


@pytest.mark.spec("FAC-02", "FAC-03", "FAC-04")
def test_facts_confirmed_in_postgresql_remain_after_the_service_is_killed(database, tmp_path):
    server = FactsServer(tmp_path, "--artifact-dir", tmp_path / "contents", dsn=database)
    server.plant = server.authority.issue("plant", zones=["Plant A"])
    pair_options = ("--from", "Plant A", "--to", "HQ")
    (tmp_path / "drawing.pdf").write_bytes(b"lines" * 1000)
    first = append_fact(server, pair_options, 1)
    put = server.run_json(server.plant, "put", "files", "drawing.pdf", tmp_path / "drawing.pdf")
    server.process.kill()
    server.process.communicate()
    server.start()
    try:
        again = append_fact(server, pair_options, 1)
        assert (again["offset"], again["epoch"], again["duplicate"]) == (first["offset"], first["epoch"], True)
        assert append_fact(server, pair_options, 2)["offset"] == 2
        assert server.run_json(server.plant, "put", "files", "drawing.pdf", tmp_path / "drawing.pdf") == put
    finally:
        assert server.stop() == ServeExit.OK


@pytest.mark.spec("FAC-11")
def test_a_bounded_store_rejects_facts_over_its_limits_and_prunes_confirmed_ones(database, tmp_path, monkeypatch):
    monkeypatch.setenv("ERGON_LOGGING__LEVEL", "info")
    args = ("--artifact-dir", tmp_path / "contents", "--max-facts", "4", "--max-bytes", "2kB")
    server = FactsServer(tmp_path, *args, "--keep", "1s", "--retention-interval", "1s", dsn=database)
    server.plant = server.authority.issue("plant", zones=["Plant A"])
    peer = server.authority.issue("peer", zones=["HQ"])
    pair_options = ("--from", "Plant A", "--to", "HQ")
    (tmp_path / "large").write_bytes(b"x" * 3000)
    try:
        put = server.run(server.plant, "put", "files", "large", tmp_path / "large", "--json", code=FactsExit.REJECTED)
        assert json.loads(put.stdout)["code"] == "buffer_full"
        for number in range(1, 5):
            append_fact(server, pair_options, number)
        more = ("append", "order:5", "paid", "{}", *pair_options, "--id", "order-5")
        full = server.run(server.plant, *more, "--json", code=FactsExit.REJECTED)
        assert json.loads(full.stdout)["code"] == "buffer_full"
    finally:
        server.stop_and_read_log()
    # A service that starts checks the free space immediately.
    server.start()
    try:
        server.run(peer, "fetch", *pair_options, "--reader", "ledger", "--confirm")
        deadline = time.monotonic() + 60
        while server.run_json(server.plant, "lag")["first"] != 5:
            assert time.monotonic() < deadline
        assert server.run_json(server.plant, *more)["offset"] == 5
    finally:
        log = server.stop_and_read_log()
    assert 'event="storage near limit" capacity=facts used=4 limit=4' in log
    assert 'event="facts pruned" facts=4 artifacts=0' in log


def test_the_object_may_come_from_a_pipe(server, pair_options):
    args = ("append", "order:1", "paid", "-", *pair_options, "--id", "piped")
    assert "at offset 1" in server.run(server.plant, *args, stdin='{"total": 7}').stdout
    assert "already confirmed earlier" in server.run(server.plant, *args, stdin='{ "total": 7.0 }').stdout
    conflict = server.run(server.plant, *args, stdin='{"total": 8}', code=FactsExit.REJECTED)
    assert "build ids from everything that distinguishes two facts" in conflict.stderr


def test_a_rejection_is_reported_with_its_code(server, pair_options, peer_files):
    args = ("append", "order:1", "paid", "{}", *pair_options, "--id", "x")
    rejection = json.loads(server.run(peer_files, *args, "--json", code=FactsExit.REJECTED).stdout)
    assert rejection["code"] == "access_denied"
    assert rejection["exit_code"] == 1
    bad = server.run(
        server.plant, "append", "order:1", "paid", "{", *pair_options, "--id", "x", code=FactsExit.REJECTED
    )
    assert "JSON" in bad.stderr


@pytest.mark.spec("FAC-16")
def test_a_reader_continues_after_its_confirmation_and_can_read_again(server, pair_options, peer_files):
    for number in range(1, 6):
        append_fact(server, pair_options, number)

    def fetch_offsets(*args):
        lines = server.run(
            peer_files, "fetch", *pair_options, "--reader", "ledger", "--json", *args
        ).stdout.splitlines()
        return [json.loads(line)["offset"] for line in lines]

    assert fetch_offsets("--limit", 2) == [1, 2]
    assert fetch_offsets("--limit", 2, "--confirm") == [1, 2]
    assert fetch_offsets("--confirm") == [3, 4, 5]
    assert fetch_offsets() == []
    assert fetch_offsets("--from-offset", 4) == [4, 5]
    assert fetch_offsets("--since", "2020-01-01T00:00") == [1, 2, 3, 4, 5]
    assert fetch_offsets("--since", "2099-01-01T00:00") == []
    assert "there are no new facts" in server.run(peer_files, "fetch", *pair_options, "--reader", "ledger").stderr
    output = server.run(peer_files, "fetch", *pair_options, "--reader", "ledger", "--from-offset", 5).stdout
    assert 'order:5 paid {"total": 5}' in output


@pytest.mark.parametrize("more", [("--since", "2020-01-01"), ("--confirm",)])
def test_contradicting_options_are_rejected(server, pair_options, peer_files, more):
    server.run(peer_files, "fetch", *pair_options, "--reader", "r", "--from-offset", 1, *more, code=FactsExit.FAILED)


@pytest.mark.spec("FAC-04", "FAC-21")
def test_a_file_is_stored_once_and_read_back(server, tmp_path):
    content = bytes(range(256)) * 4096
    (tmp_path / "in").write_bytes(content)
    key = f"{tmp_path.name}/a.bin"
    first = server.run_json(server.plant, "put", "files", key, tmp_path / "in")
    assert first["size"] == len(content)
    assert server.run_json(server.plant, "put", "files", key, tmp_path / "in") == first
    assert server.run(server.plant, "cat", "files", key).stdout_bytes == content
    server.run(server.plant, "cat", "files", key, "-o", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content
    (tmp_path / "in").write_bytes(b"other")
    server.run(server.plant, "put", "files", key, tmp_path / "in", code=FactsExit.REJECTED)
    missing = server.run(server.plant, "cat", "files", "nothing", "-o", tmp_path / "none", code=FactsExit.REJECTED)
    assert "files/nothing" in missing.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_missing_file_is_reported(server, tmp_path):
    result = server.run(server.plant, "put", "files", "k", tmp_path / "none", code=FactsExit.FAILED)
    assert "cannot be read" in result.stderr


@pytest.mark.spec("FAC-16")
def test_lag_shows_readers_that_are_behind_and_an_operator_retires_one(server, pair_options, peer_files):
    for number in range(1, 4):
        append_fact(server, pair_options, number)
    assert server.run_json(peer_files, "lag")["readers"] == {}
    assert "none" in server.run(peer_files, "lag").stdout.split()
    server.run(peer_files, "fetch", *pair_options, "--reader", "old", "--limit", 1, "--confirm")
    log = server.run_json(peer_files, "lag")
    assert log["pair"] == {"from_zone": "Plant A", "to_zone": pair_options[3]}
    assert log["readers"]["old"]["facts"] == 2
    assert "old" in server.run(peer_files, "lag").stdout
    server.run(peer_files, "retire", "old", *pair_options, "--yes", code=FactsExit.REJECTED)
    prompt = server.run(server.operator, "retire", "old", *pair_options, stdin="n\n", code=FactsExit.REJECTED)
    assert "2 unread facts may be deleted" in prompt.stderr
    assert "nothing was changed" in prompt.stderr
    assert server.run(server.operator, "retire", "old", *pair_options, stdin="y\n").stdout.endswith("old is retired\n")
    server.run(server.operator, "retire", "old", *pair_options, "--yes", code=FactsExit.REJECTED)


def test_tail_prints_new_facts_until_it_is_stopped(server, pair_options, peer_files):
    append_fact(server, pair_options, 1)
    args = [*ERGON, "facts", "tail", *pair_options, "--reader", "watch", "--json"]
    tail = subprocess.Popen(args, env=server.environment(peer_files), stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(tail.stdout.readline())["offset"] == 1
        append_fact(server, pair_options, 2)
        assert json.loads(tail.stdout.readline())["offset"] == 2
    finally:
        tail.send_signal(signal.SIGINT)
        assert tail.wait(30) == FactsExit.OK
        tail.stdout.close()


def test_an_unreachable_service_is_reported(server, pair_options):
    result = CliRunner().invoke(
        app,
        ["facts", "get", "m", "--from", "Plant A", "--server", f"127.0.0.1:{free_port()}"],
        env={**server.environment(server.plant), "ERGON_FACTS_SERVER": ""},
    )
    assert result.exit_code == FactsExit.UNAVAILABLE
    assert "its outcome is unknown" in result.stderr


def test_a_missing_certificate_is_reported(server, pair_options, tmp_path):
    args = ("get", "m", "--from", "Plant A", "--tls-cert", tmp_path / "none")
    assert "reading the certificate file" in server.run(server.plant, *args, code=FactsExit.FAILED).stderr


# -- serve ----------------------------------------------------------------------------------------------


def run_serve(*args, env=None):
    return CliRunner().invoke(app, ["facts", "serve", *map(str, args)], env=env)


def test_a_store_that_may_lose_facts_is_served_only_with_accept_loss(server):
    args = ("--zone", "A", "--listen", "127.0.0.1:0", "--store", "memory")
    result = run_serve(*args, env=server.environment(server.files))
    assert result.exit_code == ServeExit.FAILED
    assert "or pass --accept-loss" in result.stderr


def test_an_address_in_use_is_reported(server):
    args = ("--zone", "A", "--listen", server.address, "--store", "memory", "--accept-loss")
    result = run_serve(*args, env=server.environment(server.files))
    assert result.exit_code == ServeExit.FAILED
    assert "check that the port is free" in result.stderr


def test_a_key_of_another_certificate_is_reported(server):
    environ = server.environment(server.files) | {"ERGON_FACTS_TLS_KEY": str(server.plant.key)}
    result = run_serve("--zone", "A", "--listen", "127.0.0.1:0", "--store", "memory", "--accept-loss", env=environ)
    assert result.exit_code == ServeExit.FAILED
    assert "are not a matching certificate, key and authorities file" in result.stderr


def test_a_missing_database_address_is_reported_with_its_setting(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    result = run_serve("--zone", "A", "--listen", "127.0.0.1:0", env=server.environment(server.files))
    assert result.exit_code == ServeExit.FAILED
    assert "set ERGON_POSTGRES__DSN" in result.stderr


@pytest.mark.parametrize("args", [("get", "m", "--from", "A"), ("serve", "--zone", "A", "--listen", "127.0.0.1:0")])
def test_missing_libraries_are_reported_with_the_install_command(server, monkeypatch, args):
    monkeypatch.setitem(sys.modules, "grpc", None)
    result = CliRunner().invoke(app, ["facts", *args], env=server.environment(server.plant))
    assert result.exit_code == FactsExit.FAILED
    assert "pip install 'ergon-framework[grpc]'" in result.stderr


def test_sigterm_lets_an_upload_finish(tmp_path):
    server = FactsServer(tmp_path)
    files = server.authority.issue("plant", zones=["Plant A"])
    stopping = threading.Event()
    threading.Thread(target=lambda: (server.process.stderr.readline(), stopping.set()), daemon=True).start()

    def blob():
        # More than may be in flight unread: when the last chunk is requested, the service has begun to receive it.
        for _ in range(16):
            yield bytes(256 * 1024)
        server.process.send_signal(signal.SIGTERM)
        assert stopping.wait(30)
        yield b"second"

    try:
        with BoundaryClient(ServiceAddress(host=server.address, files=files)) as client:
            assert client.put_object("b", "k", blob()).size == 16 * 256 * 1024 + 6
        # It received one signal; a second one while the interpreter exits could end it by the signal.
        assert server.process.wait(30) == ServeExit.OK
    finally:
        server.stop()
