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
from ergon_framework.runner import producing
from ergon_framework.runner.producing import Chunk, InputError, parse_line, read_chunks

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
def place(tmp_path, monkeypatch):
    (tmp_path / "shipapp.py").write_text(APP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # It would end this process, the tests' own, when the time of the command is over.
    monkeypatch.setattr("ergon_framework.cli.run.guard", lambda _ended: None)
    yield tmp_path
    sys.modules.pop("shipapp", None)


@pytest.fixture
def ergon(place):
    return lambda *words: CliRunner().invoke(app, ["run", *words])


@pytest.fixture(params=["ship", "ship_async"])
def task(request):
    return f"shipapp:{request.param}"


def lines(*values):
    return "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values)


def sent(place):
    found = place / "sent.txt"
    return sorted(found.read_text().split("\n")[:-1]) if found.exists() else []


def envelope(name, payload):
    return {"id": name, "payload": payload}


# -- the command -----------------------------------------------------------------------------------


def test_it_produces_every_line_and_prints_the_report(ergon, place, task):
    (place / "orders.jsonl").write_text(lines(envelope("order-1", "pen"), "", envelope("order-2", "ink")))

    done = ergon(task, "--input", "orders.jsonl")

    assert (done.exit_code, sent(place)) == (0, ["order-1 pen", "order-2 ink"])
    assert "the input was read to its end" in done.stdout
    assert "succeeded  2" in done.stdout


def test_the_report_is_json_too(ergon, place):
    (place / "orders.jsonl").write_text(lines(envelope("order-1", "pen"), envelope("order-2", "bad")))

    done = ergon("shipapp:ship", "--input", "orders.jsonl", "--json")

    report = json.loads(done.stdout.splitlines()[-1])
    assert (done.exit_code, report["exit_code"], report["end"], report["started"]) == (1, 1, "done", 2)
    assert (report["counts"]["succeeded"], report["counts"]["failed"], report["released_started"]) == (1, 1, 0)
    assert [(one["transaction_id"], one["code"]) for one in report["failures"]] == [("order-2", "declined")]


def test_a_failed_transaction_is_in_the_exit_code_and_the_rest_is_sent(ergon, place, task):
    (place / "orders.jsonl").write_text(lines(envelope("order-1", "bad"), envelope("order-2", "pen")))

    done = ergon(task, "--input", "orders.jsonl")

    assert (done.exit_code, sent(place)) == (1, ["order-2 pen"])
    assert "1 of 2 transactions failed; the input was read to its end" in done.stderr
    assert "order-1" in done.stdout


def test_a_bad_line_ends_it_and_what_precedes_is_sent(ergon, place, task):
    (place / "orders.jsonl").write_text(lines(envelope("order-1", "pen"), "{oops", envelope("order-3", "ink")))

    done = ergon(task, "--input", "orders.jsonl")

    assert (done.exit_code, sent(place)) == (1, ["order-1 pen"])
    assert "line 2 of the input is no JSON" in done.stderr


def test_a_bad_first_line_sends_nothing(ergon, place):
    (place / "orders.jsonl").write_text(lines("{oops", envelope("order-2", "pen")))

    done = ergon("shipapp:ship", "--input", "orders.jsonl")

    assert (done.exit_code, sent(place)) == (2, [])
    assert "line 1 of the input is no JSON" in done.stderr


def test_two_transactions_with_one_id_are_refused(ergon, place):
    (place / "orders.jsonl").write_text(lines(envelope("order-1", "pen"), envelope("order-1", "ink")))

    done = ergon("shipapp:ship", "--input", "orders.jsonl")

    assert (done.exit_code, sent(place)) == (2, [])
    assert "'order-1'" in done.stderr


def test_a_second_run_of_the_same_input_sends_the_same_ids(ergon, place):
    (place / "orders.jsonl").write_text(lines('"pen"', '"pen"'))

    ergon("shipapp:ship", "--input", "orders.jsonl")
    first = sent(place)
    ergon("shipapp:ship", "--input", "orders.jsonl")

    assert len(set(first)) == 2
    assert sent(place) == sorted(first * 2)


def test_the_limit_counts_over_all_chunks(ergon, place, monkeypatch):
    monkeypatch.setattr(producing, "MAX_CHUNK", 2)
    (place / "orders.jsonl").write_text(lines(*(envelope(f"order-{n}", "pen") for n in range(6))))

    done = ergon("shipapp:ship", "--input", "orders.jsonl", "--limit", "3", "--json")

    report = json.loads(done.stdout)
    assert (done.exit_code, report["end"], report["started"], len(sent(place))) == (0, "limit", 3, 3)
    assert ergon("shipapp:ship", "--input", "orders.jsonl", "--limit", "0").exit_code == 0
    assert len(sent(place)) == 3


def test_the_policy_of_a_file_and_of_the_settings_holds(ergon, place):
    (place / "policy.toml").write_text("[loop]\nlimit = 1\n")
    (place / "orders.jsonl").write_text(lines('"pen"', '"ink"'))

    assert ergon("shipapp:ship", "--input", "orders.jsonl", "--policy", "policy.toml").exit_code == 0
    assert len(sent(place)) == 1
    (place / "ergon.toml").write_text("[tasks.ship.policy.steps.produce.retry]\nmax_attempts = 0\n")
    done = ergon("shipapp:ship", "--input", "orders.jsonl")
    assert (done.exit_code, "max_attempts" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "words, said",
    [
        (["shipapp:receive", "--input", "orders.jsonl"], "only consumes"),
        (["shipapp:ship", "--input", "nowhere.jsonl"], "'nowhere.jsonl' cannot be read"),
        (["shipapp:ship", "--input", "orders.jsonl", "--streaming"], "for consumers"),
    ],
)
def test_mistakes_of_the_command_line_are_told(ergon, place, words, said):
    (place / "orders.jsonl").write_text(lines('"pen"'))

    done = ergon(*words)

    assert (done.exit_code, said in done.stderr, sent(place)) == (2, True, [])


def test_a_task_that_does_both_produces_where_there_is_an_input(ergon, place):
    (place / "orders.jsonl").write_text(lines('"pen"'))

    done = ergon("shipapp:both", "--input", "orders.jsonl", "--json")

    assert (done.exit_code, json.loads(done.stdout)["end"]) == (0, "done")


# -- processes and standard input --------------------------------------------------------------------


def started(place, *words):
    command = [sys.executable, "-c", "from ergon_framework.cli.main import main; raise SystemExit(main())", "run"]
    return subprocess.Popen(
        [*command, *words], cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_without_input_it_reads_standard_input(place, task):
    out, err = (running := started(place, task, "--json", "--log-level", "warning")).communicate(
        lines(envelope("order-1", "pen")), timeout=60
    )

    assert (running.returncode, sent(place), err) == (0, ["order-1 pen"], "")
    assert json.loads(out)["counts"]["succeeded"] == 1


def test_a_signal_ends_it_while_it_waits_for_standard_input(place, task):
    running = started(place, task, "--json", "--probe-file", "probe.json")
    probe, end = place / "probe.json", time.monotonic() + 60
    while not (probe.exists() and '"ready": true' in probe.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    began = time.monotonic()
    running.send_signal(signal.SIGTERM)
    # Not communicate(): that would close standard input, and so end it.
    assert running.wait(timeout=60) == 1
    took, out, err = time.monotonic() - began, running.stdout.read(), running.stderr.read()
    for stream in (running.stdin, running.stdout, running.stderr):
        stream.close()

    assert took < 15, "the drain of 30 s is not for a read"
    assert json.loads(out)["end"] == "stop"
    assert "lines after 0 were not produced" in err


def test_the_loop_timeout_counts_while_it_waits_for_standard_input(place, task):
    (place / "policy.toml").write_text("[loop]\ntimeout = 0.3\n")
    running = started(place, task, "--json", "--policy", "policy.toml")
    assert running.wait(timeout=60) == 3
    out, err = running.stdout.read(), running.stderr.read()
    for stream in (running.stdin, running.stdout, running.stderr):
        stream.close()

    assert json.loads(out)["end"] == "timeout"
    assert "the run's 0.3 s are over; lines after 0 were not produced" in err


def test_after_the_loop_timeout_the_report_says_what_had_started(place):
    (place / "policy.toml").write_text("[loop]\ntimeout = 0.5\nconcurrency.value = 1\n")
    (place / "orders.jsonl").write_text(lines(envelope("order-1", "slow"), envelope("order-2", "pen")))
    running = started(place, "shipapp:ship", "--json", "--policy", "policy.toml", "--input", "orders.jsonl")
    out, err = running.communicate(timeout=60)

    assert (running.returncode, sent(place)) == (3, []), err
    report = json.loads(out)
    assert (report["counts"]["released"], report["released_started"]) == (2, 1)
    assert "2 were released, of which 1 had started; lines after 2 were not produced" in err


@pytest.mark.spec("DX-14")
def test_what_the_limit_left_out_is_told_beside_what_failed(ergon, place, task):
    (place / "orders.jsonl").write_text(lines(*(envelope(f"order-{number}", "bad") for number in range(5))))

    done = ergon(task, "--input", "orders.jsonl", "--limit", "2")

    said = "2 of 5 transactions failed; 3 transactions were released, of which 0 had started; lines after 5 were not"
    assert (done.exit_code, said in done.stderr) == (1, True), done.stderr


@pytest.mark.spec("DX-14")
def test_a_chunk_that_is_refused_is_named_by_its_lines(ergon, place, task, monkeypatch):
    monkeypatch.setattr(producing, "MAX_CHUNK", 2)
    orders = [envelope("order-1", "pen"), envelope("order-2", "ink"), envelope("x", "pen"), envelope("x", "ink")]
    (place / "orders.jsonl").write_text(lines(*orders))

    done = ergon(task, "--input", "orders.jsonl")

    assert (done.exit_code, sent(place)) == (1, ["order-1 pen", "order-2 ink"])
    assert "lines 3 to 4 of the input cannot be produced" in done.stderr


def test_several_processes_are_refused(place):
    running = started(place, "shipapp:ship", "--processes", "2")
    _, err = running.communicate("", timeout=60)

    assert (running.returncode, "a producer runs in one process" in err) == (2, True)


# -- reading -----------------------------------------------------------------------------------------


def test_an_object_with_id_and_payload_is_an_envelope():
    made = parse_line(b'{"id": "order-1", "payload": {"item": "pen"}, "tenant": "acme", "key": "ada"}', 1, task="ship")

    assert (made.id, made.payload, made.tenant, made.key) == ("order-1", {"item": "pen"}, "acme", "ada")


@pytest.mark.parametrize("value", [{"id": "order-1"}, {"payload": 1}, [1, 2], "text", 5, None])
def test_any_other_value_is_a_payload(value):
    made = parse_line(json.dumps(value).encode(), 7, task="ship")

    assert made.payload == value
    assert made.id == parse_line(json.dumps(value).encode() + b"\n", 7, task="ship").id
    assert made.id != parse_line(json.dumps(value).encode(), 8, task="ship").id


@pytest.mark.parametrize(
    "line, said",
    [
        (b'{"id": "a", "payload": 1, "colour": "red"}', r"line 3 .* unknown keys colour"),
        (b'{"id": 5, "payload": 1}', r"line 3 .* is no envelope: id and key are text"),
        (b'{"id": "", "payload": 1}', r"line 3 .* is no envelope"),
        (b"\xff\xfe", r"line 3 .* is no JSON"),
        (b"[" * 100_000, r"line 3 .* is no JSON"),
        (b'"' + b"x" * producing.MAX_LINE_BYTES + b'"', r"line 3 .* is longer than"),
    ],
)
def test_an_invalid_line_is_named_by_its_number(line, said):
    with pytest.raises(InputError, match=said):
        parse_line(line, 3, task="ship")


def test_chunks_are_bounded_by_lines_and_by_bytes(monkeypatch):
    monkeypatch.setattr(producing, "MAX_CHUNK", 2)
    found = list(read_chunks(io.BytesIO(b"1\n2\n\n3\n"), task="ship"))
    assert [([one.payload for one in chunk.transactions], chunk.last) for chunk in found] == [([1, 2], 2), ([3], 4)]

    monkeypatch.setattr(producing, "MAX_CHUNK_BYTES", 4)
    found = list(read_chunks(io.BytesIO(b"123\n4\n"), task="ship"))
    assert [len(chunk.transactions) for chunk in found] == [1, 1]
    assert isinstance(found[0], Chunk)


def test_a_large_input_does_not_fill_the_memory(place, ergon, monkeypatch):
    monkeypatch.setattr(producing, "MAX_CHUNK", 10)
    (place / "orders.jsonl").write_text(lines(*({"item": "x" * 10_000} for _ in range(2_000))))
    (place / "shipapp.py").write_text(
        "from ergon_framework import MemoryConnector, producer\n"
        "@producer(MemoryConnector('shipments'))\ndef ship(order):\n    return 'sent elsewhere'\n"
    )
    tracemalloc.start()
    try:
        done = ergon("shipapp:ship", "--input", "orders.jsonl", "--json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert json.loads(done.stdout)["counts"]["succeeded"] == 2_000
    assert peak < 10_000_000, "20 MB of input were held"
