"""Check secrets in the errors and payloads of a real run: none leaves the process, on any broker."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import nats
import pika
import psycopg
import pytest
import redis
from typer.testing import CliRunner

from ergon_framework import Transaction
from ergon_framework.cli.app import app as cli
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.runner.exit import RunExit
from tests.integration.brokers import BROKERS, create_named_queue
from tests.integration.running import ERGON
from tests.secret_forms import FORMS

FORMS_FILE = Path(__file__).parents[1] / "secret_forms.py"

#: Each form is the text of one error that ends in a dead letter, and of one that waits for its next attempt.
APP_TEMPLATE = """
from pydantic import BaseModel
from ergon_framework import ConsumerPolicy, consumer, queue
from ergon_framework.errors import ErgonError
from forms import FORMS

orders = queue("NAME")
policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 2, "backoff": 0.01}}}})


class Card(BaseModel):
    number: int


@consumer(orders, policy=policy)
def charge(payload):
    message = FORMS[payload["form"]][0]
    if payload["way"] == "wait":
        raise ErgonError(message, retry_after=3600.0)
    if payload["way"] == "dead":
        raise RuntimeError(message)
    if payload["way"] == "key":
        return {}[payload["note"]]
    Card(number=payload["note"])


@charge.on_failure
def refund(payload, error):
    if payload["way"] == "dead":
        raise ValueError(f"no refund: {FORMS[payload['form']][0]}")
"""


def read_postgres(url, _name):
    with psycopg.connect(os.environ["ERGON_POSTGRES__DSN"]) as connection:
        tables = connection.execute("select tablename from pg_tables where schemaname = 'ergon'").fetchall()
        return "\n".join(
            str(row) for (table,) in tables for row in connection.execute(f'select * from ergon."{table}"').fetchall()
        )


def read_rabbitmq(url, name):
    parts = []
    with pika.BlockingConnection(pika.URLParameters(f"{url.rstrip('/')}/%2F")) as connection:
        waiting = [topology.delay_queue(name, round(part * 1_000_000)) for part in topology.DELAY_STEPS]
        for queue in (name, topology.dead_letter_queue(name), *waiting):
            channel = connection.channel()
            try:
                while (message := channel.basic_get(queue))[0] is not None:
                    parts.append(f"{message[1]} {message[2]}")
            except pika.exceptions.ChannelClosedByBroker:
                continue
    return "\n".join(parts)


def read_redis(url, _name):
    client = redis.Redis.from_url(url)
    readers = {
        b"stream": client.xrange,
        b"hash": client.hgetall,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"set": client.smembers,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"string": client.get,
    }
    return "\n".join(f"{key} {readers[client.type(key)](key)}" for key in client.scan_iter())


def read_nats(url, name):
    async def read():
        client = await nats.connect(url)
        parts = []
        manager = client.jsm()
        streams = [stream for stream in await manager.streams_info() if stream.config.name.endswith(f"-{name}")]
        for stream in streams:
            # An empty stream begins at 0, which is not a message.
            for number in range(max(1, stream.state.first_seq), stream.state.last_seq + 1):
                try:
                    message = await manager.get_msg(stream.config.name, seq=number)
                except nats.js.errors.NotFoundError:
                    continue
                parts.append(f"{message.subject} {message.headers} {message.data}")
        await client.close()
        return "\n".join(parts)

    return asyncio.run(read())


READERS = {"postgres": read_postgres, "rabbitmq": read_rabbitmq, "redis": read_redis, "nats": read_nats}


def run_ergon(*arguments):
    """Run ``ergon run`` in a separate process."""
    result = subprocess.run([*ERGON, "run", *arguments], capture_output=True, text=True, timeout=120, check=False)
    return result.returncode, result.stdout + result.stderr


def invoke_cli(*arguments):
    """Run another command in this process."""
    result = CliRunner().invoke(cli, arguments)
    return result.exit_code, result.output


def list_leaked(text):
    """List the forms whose secret *text* shows."""
    return [form for form, (_, value) in FORMS.items() if value in text]


@pytest.mark.spec("SEC-01", "SEC-02")
@pytest.mark.parametrize("broker", BROKERS)
def test_no_secret_of_an_error_leaves_the_process(broker, request, tmp_path, monkeypatch):
    orders = create_named_queue(broker, request, tmp_path, monkeypatch)
    url = os.environ[f"ERGON_QUEUES__{orders.name.upper()}__URL"]
    if broker == "postgres":
        monkeypatch.setenv("ERGON_POSTGRES__DSN", url)
        monkeypatch.setenv("ERGON_RUN__JOURNAL__ENABLED", "true")
    program = f"app_{orders.name}"
    shutil.copy(FORMS_FILE, tmp_path / f"forms_of_{program}.py")
    (tmp_path / f"{program}.py").write_text(
        APP_TEMPLATE.replace("NAME", orders.name).replace("forms import", f"forms_of_{program} import")
    )
    monkeypatch.syspath_prepend(tmp_path)
    orders.open()
    transactions = [
        Transaction({"form": form, "way": way}, id=f"{way}-{number}")
        for number, form in enumerate(FORMS)
        for way in ("dead", "wait")
    ]
    orders.dispatch(transactions)
    orders.close()

    outputs = {"run": run_ergon(f"{program}:charge", "--once")}
    # RabbitMQ delivers dead letters to the reader, so the server is read last.
    outputs["dlq list"] = invoke_cli("dlq", "list", f"{program}:orders", "--limit", "1000")
    outputs["dlq list --json"] = invoke_cli("dlq", "list", f"{program}:orders", "--limit", "1000", "--json")
    outputs["dlq show"] = invoke_cli("dlq", "show", f"{program}:orders", "dead-0")
    outputs["why"] = invoke_cli("why", "dead-1", "--queue", f"{program}:orders")
    outputs["why of one that waits"] = invoke_cli("why", "wait-2", "--queue", f"{program}:orders")
    outputs["doctor"] = invoke_cli("doctor")
    stored = READERS[broker](url, orders.name)

    assert outputs["run"][0] == RunExit.OK
    assert len([line for line in outputs["dlq list --json"][1].splitlines() if '"dead-' in line]) == len(FORMS)
    # The data to check is there: both kinds, with their errors.
    assert all(word in stored for word in ("dead-0", "wait-0", "could not connect", "no refund"))
    assert "transaction failed" in outputs["run"][1]
    assert "dead-0" in outputs["dlq show"][1]
    assert "dead-1" in outputs["why"][1]
    assert {source: list_leaked(text) for source, (_, text) in outputs.items() if list_leaked(text)} == {}
    assert list_leaked(stored) == []


@pytest.mark.spec("SEC-01", "SEC-02")
def test_no_secret_of_a_payload_is_shown(request, tmp_path, monkeypatch):
    orders = create_named_queue("postgres", request, tmp_path, monkeypatch)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", os.environ[f"ERGON_QUEUES__{orders.name.upper()}__URL"])
    monkeypatch.setenv("ERGON_RUN__JOURNAL__ENABLED", "true")
    program = f"app_{orders.name}"
    shutil.copy(FORMS_FILE, tmp_path / f"forms_of_{program}.py")
    (tmp_path / f"{program}.py").write_text(
        APP_TEMPLATE.replace("NAME", orders.name).replace("forms import", f"forms_of_{program} import")
    )
    monkeypatch.syspath_prepend(tmp_path)
    orders.open()
    for number, (form, (note, _)) in enumerate(FORMS.items()):
        transactions = [
            Transaction(
                {"form": form, "way": way, "note": note},
                id=f"{way}-{number}",
            )
            for way in ("key", "validation")
        ]
        orders.dispatch(transactions)
    orders.close()
    outputs = {
        "run": run_ergon(f"{program}:charge", "--once", "--log-level", "debug"),
        "dlq list": invoke_cli("dlq", "list", f"{program}:orders", "--limit", "1000"),
        "dlq list --json": invoke_cli("dlq", "list", f"{program}:orders", "--limit", "1000", "--json"),
        "dlq show": invoke_cli("dlq", "show", f"{program}:orders", "key-0"),
        "why": invoke_cli("why", "validation-1"),
    }
    assert outputs["run"][0] == RunExit.OK
    assert "int_parsing" in outputs["why"][1]
    assert "KeyError" in outputs["dlq list"][1]
    assert {source: list_leaked(text) for source, (_, text) in outputs.items() if list_leaked(text)} == {}
    with psycopg.connect(os.environ["ERGON_POSTGRES__DSN"]) as connection:
        failures = connection.execute("select failure from ergon.dead_letter").fetchall()
    assert len(failures) == 2 * len(FORMS)
    assert list_leaked(str(failures)) == []


REDACTION_APP = """
from ergon_framework import ConsumerPolicy, MemoryConnector, Transaction, consumer

orders = MemoryConnector("orders")
orders.dispatch([Transaction({}, id="one")])


@consumer(orders, policy=ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}}))
def charge(payload):
    raise RuntimeError("customerPin=1234 of EMP-0042")
"""


@pytest.mark.spec("SEC-02")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_redaction_rules_of_the_settings_apply_in_every_process(processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(REDACTION_APP)
    (tmp_path / "ergon.toml").write_text('[telemetry]\nredact_names = ["customer_pin"]\n')
    monkeypatch.setenv("ERGON_TELEMETRY__REDACT_PATTERNS", r'["EMP-\\d{4}"]')
    _, text = run_ergon("app:charge", "--once", "--processes", processes)
    assert "customerPin=[hidden] of [hidden]" in text
    assert "1234" not in text
    assert "EMP-0042" not in text


@pytest.mark.spec("SEC-02")
def test_an_invalid_pattern_is_a_configuration_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(REDACTION_APP)
    (tmp_path / "ergon.toml").write_text('[telemetry]\nredact_patterns = ["EMP-("]\n')
    code, text = run_ergon("app:charge", "--once")
    assert code == RunExit.USAGE
    assert "ergon.toml: telemetry.redact_patterns: pattern 'EMP-(' is not a regular expression" in text


FORGED_TEXT = (
    "x\x1b]0;pwned\x07\x1b[2J\n2026-11-18 05:44:16,513 WARNING login ok user=admin\r\u2028time=2026 level=error"
)

FORGING_APP = f"""
from ergon_framework import ConsumerPolicy, MemoryConnector, Transaction, consumer

orders = MemoryConnector("orders")
orders.dispatch([Transaction({{"text": {FORGED_TEXT!r}}}, id={"one" + FORGED_TEXT!r})])


@consumer(orders, policy=ConsumerPolicy.load({{"steps": {{"process": {{"retry": {{"max_attempts": 1}}}}}}}}))
def charge(payload):
    raise RuntimeError(payload["text"])
"""


@pytest.mark.spec("SEC-04")
@pytest.mark.parametrize("arguments", [(), ("--json",), ("--processes", "2")])
def test_error_text_starts_no_line(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(FORGING_APP)
    _, text = run_ergon("app:charge", "--once", *arguments)
    assert "login ok" in text
    lines = text.splitlines()
    assert [line for line in lines if not all(letter.isprintable() for letter in line)] == []
    # In a log, in a traceback and in the summary the text follows what Ergon writes.
    assert [line for line in lines if line.strip().startswith(("2026-11-18", "time=2026 level"))] == []


ADDRESS_TEMPLATES = {
    "redis": "redis://:{}@127.0.0.1:1/0",
    "amqp": "amqp://app:{}@127.0.0.1:1/",
    "nats": "nats://app:{}@127.0.0.1:1",
    "postgresql": "postgresql://app:{}@127.0.0.1:1/q",
}


@pytest.mark.spec("SEC-03")
@pytest.mark.parametrize("password", ["Sec@ret99", "Sec/ret99", "Sec:ret99#?x"])
def test_doctor_shows_no_part_of_a_password(password, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, address in ADDRESS_TEMPLATES.items():
        monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__URL", address.format(password))
    monkeypatch.setenv("ERGON_POSTGRES__DSN", ADDRESS_TEMPLATES["postgresql"].format(password))
    for arguments in ((), ("--json",)):
        code, text = invoke_cli("doctor", "--timeout", "10s", *arguments)
        assert code == 1
        assert all(f"{name}://[hidden]@127.0.0.1:1" in text for name in ADDRESS_TEMPLATES)
        assert "ret99" not in text
        assert "Sec" not in text
