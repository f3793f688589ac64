"""``ergon run`` of a producer: JSON lines from a file or from standard input."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
import tracemalloc

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.runner import produce
from ergon_framework.runner.produce import InputChunk, InputError, parse_line, read_chunks

pytestmark = pytest.mark.spec("DX-14")

APP = """
import time
from pathlib import Path

from ergon_framework import (
    BusinessError, ConsumerMixin, MemoryConnector, ProducerMixin, ProducerPolicy, Task, Transaction, consumer, producer,
)

queue = MemoryConnector("shipments")
sent = Path("sent.txt")

def write(order, transaction):
    if order == "bad":
        raise BusinessError("declined", code="declined")
    if order == "slow":
        time.sleep(30)
    with sent.open("a") as lines:
        lines.write(f"{transaction.id} {order}\\n")
    return transaction

@producer(queue)
def ship(order, transaction: Transaction):
    return write(order, transaction)

@producer(queue)
async def ship_async(order, transaction: Transaction):
    return write(order, transaction)

@consumer(queue)
def receive(order):
    pass

class Both(ConsumerMixin, ProducerMixin, Task):
    def process_transaction(self, transaction):
        raise AssertionError("not consumed")

both = Both(queue)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "shipapp.py").write_text(APP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # It would end this process, that of the tests, when the time of the command is over.
    monkeypatch.setattr("ergon_framework.cli.run.force_exit_at_deadline", lambda _ended: None)
    yield tmp_path
    sys.modules.pop("shipapp", None)


@pytest.fixture
def run_cli(folder):
    return lambda *words: CliRunner().invoke(app, ["run", *words])


@pytest.fixture(params=["ship", "ship_async"])
def task(request):
    return f"shipapp:{request.param}"


def to_lines(*values):
    return "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values)


def read_sent(folder):
    path = folder / "sent.txt"
    return sorted(path.read_text().split("\n")[:-1]) if path.exists() else []


def make_envelope(name, payload):
    return {"id": name, "payload": payload}


# -- the command -----------------------------------------------------------------------------------


def test_every_line_is_produced_and_the_report_is_printed(run_cli, folder, task):
    (folder / "orders.jsonl").write_text(to_lines(make_envelope("order-1", "pen"), "", make_envelope("order-2", "ink")))

    result = run_cli(task, "--input", "orders.jsonl")

    assert (result.exit_code, read_sent(folder)) == (0, ["order-1 pen", "order-2 ink"])
    assert "the input was read to its end" in result.stdout
    assert "succeeded  2" in result.stdout


def test_the_report_can_be_json(run_cli, folder):
    (folder / "orders.jsonl").write_text(to_lines(make_envelope("order-1", "pen"), make_envelope("order-2", "bad")))

    result = run_cli("shipapp:ship", "--input", "orders.jsonl", "--json")

    report = json.loads(result.stdout.splitlines()[-1])
    assert (result.exit_code, report["exit_code"], report["stop_reason"], report["started"]) == (1, 1, "done", 2)
    assert (report["counts"]["succeeded"], report["counts"]["failed"], report["released_started"]) == (1, 1, 0)
    assert [(one["transaction_id"], one["code"]) for one in report["failures"]] == [("order-2", "declined")]


def test_a_failed_transaction_is_in_the_exit_code_and_the_rest_is_sent(run_cli, folder, task):
    (folder / "orders.jsonl").write_text(to_lines(make_envelope("order-1", "bad"), make_envelope("order-2", "pen")))

    result = run_cli(task, "--input", "orders.jsonl")

    assert (result.exit_code, read_sent(folder)) == (1, ["order-2 pen"])
    assert "1 of 2 transactions failed; the input was read to its end" in result.stderr
    assert "order-1" in result.stdout


def test_an_invalid_line_ends_the_run_after_the_lines_before_it_are_sent(run_cli, folder, task):
    (folder / "orders.jsonl").write_text(
        to_lines(make_envelope("order-1", "pen"), "{oops", make_envelope("order-3", "ink"))
    )

    result = run_cli(task, "--input", "orders.jsonl")

    assert (result.exit_code, read_sent(folder)) == (1, ["order-1 pen"])
    assert "line 2 of the input is not JSON" in result.stderr


def test_an_invalid_first_line_sends_nothing(run_cli, folder):
    (folder / "orders.jsonl").write_text(to_lines("{oops", make_envelope("order-2", "pen")))

    result = run_cli("shipapp:ship", "--input", "orders.jsonl")

    assert (result.exit_code, read_sent(folder)) == (2, [])
    assert "line 1 of the input is not JSON" in result.stderr


def test_two_transactions_with_the_same_id_are_rejected(run_cli, folder):
    (folder / "orders.jsonl").write_text(to_lines(make_envelope("order-1", "pen"), make_envelope("order-1", "ink")))

    result = run_cli("shipapp:ship", "--input", "orders.jsonl")

    assert (result.exit_code, read_sent(folder)) == (2, [])
    assert "'order-1'" in result.stderr


def test_a_second_run_of_the_same_input_sends_the_same_ids(run_cli, folder):
    (folder / "orders.jsonl").write_text(to_lines('"pen"', '"pen"'))

    run_cli("shipapp:ship", "--input", "orders.jsonl")
    first = read_sent(folder)
    run_cli("shipapp:ship", "--input", "orders.jsonl")

    assert len(set(first)) == 2
    assert read_sent(folder) == sorted(first * 2)


def test_the_limit_counts_over_all_chunks(run_cli, folder, monkeypatch):
    monkeypatch.setattr(produce, "MAX_CHUNK", 2)
    (folder / "orders.jsonl").write_text(to_lines(*(make_envelope(f"order-{n}", "pen") for n in range(6))))

    result = run_cli("shipapp:ship", "--input", "orders.jsonl", "--limit", "3", "--json")

    report = json.loads(result.stdout)
    assert (result.exit_code, report["stop_reason"], report["started"], len(read_sent(folder))) == (0, "limit", 3, 3)
    assert run_cli("shipapp:ship", "--input", "orders.jsonl", "--limit", "0").exit_code == 0
    assert len(read_sent(folder)) == 3


def test_the_policy_of_a_file_and_of_the_settings_applies(run_cli, folder):
    (folder / "policy.toml").write_text("[loop]\nlimit = 1\n")
    (folder / "orders.jsonl").write_text(to_lines('"pen"', '"ink"'))

    assert run_cli("shipapp:ship", "--input", "orders.jsonl", "--policy", "policy.toml").exit_code == 0
    assert len(read_sent(folder)) == 1
    (folder / "ergon.toml").write_text("[tasks.ship.policy.steps.produce.retry]\nmax_attempts = 0\n")
    result = run_cli("shipapp:ship", "--input", "orders.jsonl")
    assert (result.exit_code, "max_attempts" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["shipapp:receive", "--input", "orders.jsonl"], "only consumes"),
        (["shipapp:ship", "--input", "nowhere.jsonl"], "'nowhere.jsonl' cannot be read"),
        (["shipapp:ship", "--input", "orders.jsonl", "--streaming"], "for consumers"),
    ],
)
def test_command_line_mistakes_are_usage_errors(run_cli, folder, arguments, message):
    (folder / "orders.jsonl").write_text(to_lines('"pen"'))

    result = run_cli(*arguments)

    assert (result.exit_code, message in result.stderr, read_sent(folder)) == (2, True, [])


def test_a_task_that_consumes_and_produces_produces_when_it_has_input(run_cli, folder):
    (folder / "orders.jsonl").write_text(to_lines('"pen"'))

    result = run_cli("shipapp:both", "--input", "orders.jsonl", "--json")

    assert (result.exit_code, json.loads(result.stdout)["stop_reason"]) == (0, "done")


# -- processes and standard input --------------------------------------------------------------------


def start_process(folder, *arguments):
    command = [sys.executable, "-c", "from ergon_framework.cli.main import main; raise SystemExit(main())", "run"]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_an_input_option_standard_input_is_read(folder, task):
    out, err = (process := start_process(folder, task, "--json", "--log-level", "warning")).communicate(
        to_lines(make_envelope("order-1", "pen")), timeout=60
    )

    assert (process.returncode, read_sent(folder), err) == (0, ["order-1 pen"], "")
    assert json.loads(out)["counts"]["succeeded"] == 1


def test_a_signal_ends_a_run_that_waits_for_standard_input(folder, task):
    process = start_process(folder, task, "--json", "--probe-file", "probe.json")
    probe, deadline = folder / "probe.json", time.monotonic() + 60
    while not (probe.exists() and '"ready": true' in probe.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    started_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    # Not communicate(): it would close standard input and so end the run.
    assert process.wait(timeout=60) == 1
    duration, out, err = time.monotonic() - started_at, process.stdout.read(), process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()

    assert duration < 15, "the drain of 30 s is not for a read"
    assert json.loads(out)["stop_reason"] == "stop"
    assert "lines after 0 were not produced" in err


def test_the_loop_timeout_applies_while_waiting_for_standard_input(folder, task):
    (folder / "policy.toml").write_text("[loop]\ntimeout = 0.3\n")
    process = start_process(folder, task, "--json", "--policy", "policy.toml")
    assert process.wait(timeout=60) == 3
    out, err = process.stdout.read(), process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()

    assert json.loads(out)["stop_reason"] == "timeout"
    assert "the run reached its timeout of 0.3 s; lines after 0 were not produced" in err


def test_after_the_loop_timeout_the_report_counts_started_transactions(folder):
    (folder / "policy.toml").write_text("[loop]\ntimeout = 0.5\nconcurrency.value = 1\n")
    (folder / "orders.jsonl").write_text(to_lines(make_envelope("order-1", "slow"), make_envelope("order-2", "pen")))
    process = start_process(folder, "shipapp:ship", "--json", "--policy", "policy.toml", "--input", "orders.jsonl")
    out, err = process.communicate(timeout=60)

    assert (process.returncode, read_sent(folder)) == (3, []), err
    report = json.loads(out)
    assert (report["counts"]["released"], report["released_started"]) == (2, 1)
    assert "2 were released, of which 1 had started; lines after 2 were not produced" in err


@pytest.mark.spec("DX-14")
def test_the_error_counts_failures_and_transactions_beyond_the_limit(run_cli, folder, task):
    (folder / "orders.jsonl").write_text(to_lines(*(make_envelope(f"order-{number}", "bad") for number in range(5))))

    result = run_cli(task, "--input", "orders.jsonl", "--limit", "2")

    message = "2 of 5 transactions failed; 3 transactions were released, of which 0 had started; lines after 5 were not"
    assert (result.exit_code, message in result.stderr) == (1, True), result.stderr


@pytest.mark.spec("DX-14")
def test_a_rejected_chunk_is_named_by_its_lines(run_cli, folder, task, monkeypatch):
    monkeypatch.setattr(produce, "MAX_CHUNK", 2)
    orders = [
        make_envelope("order-1", "pen"),
        make_envelope("order-2", "ink"),
        make_envelope("x", "pen"),
        make_envelope("x", "ink"),
    ]
    (folder / "orders.jsonl").write_text(to_lines(*orders))

    result = run_cli(task, "--input", "orders.jsonl")

    assert (result.exit_code, read_sent(folder)) == (1, ["order-1 pen", "order-2 ink"])
    assert "lines 3 to 4 of the input cannot be produced" in result.stderr


def test_several_processes_are_rejected(folder):
    process = start_process(folder, "shipapp:ship", "--processes", "2")
    _, err = process.communicate("", timeout=60)

    assert (process.returncode, "a producer runs in one process" in err) == (2, True)


# -- reading -----------------------------------------------------------------------------------------


def test_an_object_with_id_and_payload_is_an_envelope():
    transaction = parse_line(
        b'{"id": "order-1", "payload": {"item": "pen"}, "tenant": "acme", "key": "ada"}', 1, task="ship"
    )

    assert (transaction.id, transaction.payload, transaction.tenant, transaction.key) == (
        "order-1",
        {"item": "pen"},
        "acme",
        "ada",
    )


@pytest.mark.parametrize("value", [{"id": "order-1"}, {"payload": 1}, [1, 2], "text", 5, None])
def test_any_other_value_is_a_payload(value):
    transaction = parse_line(json.dumps(value).encode(), 7, task="ship")

    assert transaction.payload == value
    assert transaction.id == parse_line(json.dumps(value).encode() + b"\n", 7, task="ship").id
    assert transaction.id != parse_line(json.dumps(value).encode(), 8, task="ship").id


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"id": "a", "payload": 1, "colour": "red"}', r"line 3 .* unknown keys colour"),
        (b'{"id": 5, "payload": 1}', r"line 3 .* is not an envelope: id and key must be str"),
        (b'{"id": "", "payload": 1}', r"line 3 .* is not an envelope"),
        (b"\xff\xfe", r"line 3 .* is not JSON"),
        (b"[" * 100_000, r"line 3 .* is not JSON"),
        (b'"' + b"x" * produce.MAX_LINE_BYTES + b'"', r"line 3 .* is longer than"),
    ],
)
def test_an_invalid_line_is_named_by_its_number(line, message):
    with pytest.raises(InputError, match=message):
        parse_line(line, 3, task="ship")


def test_chunks_are_bounded_by_lines_and_by_bytes(monkeypatch):
    monkeypatch.setattr(produce, "MAX_CHUNK", 2)
    chunks = list(read_chunks(io.BytesIO(b"1\n2\n\n3\n"), task="ship"))
    assert [([one.payload for one in chunk.transactions], chunk.last) for chunk in chunks] == [([1, 2], 2), ([3], 4)]

    monkeypatch.setattr(produce, "MAX_CHUNK_BYTES", 4)
    chunks = list(read_chunks(io.BytesIO(b"123\n4\n"), task="ship"))
    assert [len(chunk.transactions) for chunk in chunks] == [1, 1]
    assert isinstance(chunks[0], InputChunk)


def test_a_large_input_does_not_fill_the_memory(folder, run_cli, monkeypatch):
    monkeypatch.setattr(produce, "MAX_CHUNK", 10)
    (folder / "orders.jsonl").write_text(to_lines(*({"item": "x" * 10_000} for _ in range(2_000))))
    (folder / "shipapp.py").write_text(
        "from ergon_framework import MemoryConnector, producer\n"
        "@producer(MemoryConnector('shipments'))\ndef ship(order):\n    return 'sent elsewhere'\n"
    )
    tracemalloc.start()
    try:
        result = run_cli("shipapp:ship", "--input", "orders.jsonl", "--json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert json.loads(result.stdout)["counts"]["succeeded"] == 2_000
    assert peak < 10_000_000, "20 MB of input were held"
