"""Check CeleryProviderTask with a real worker: a prefork pool, RabbitMQ, PostgreSQL and an upstream on real sockets."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import amqp
import psycopg
import pytest
from kombu import pools

from ergon_framework.database.migrate import upgrade
from ergon_framework.providers.dead_letter import DEAD_LETTER_QUEUE, MESSAGE_FIELDS
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderCircuitOpenError,
    ProviderDependencyError,
    ProviderInternalError,
    ProviderQuotaExceededError,
    ProviderTimeoutError,
)
from ergon_framework.testing.fake_provider import Behaviour, FakeProviderServer

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 60.0
DEAD_LETTER_FIELDS = {
    *("tenant_id", "campaign_id", "task_name", "provider_name", "capability", "operation", "idempotency_key"),
    *("correlation_id", "reason_code", "error_type", "error_message", "attempts", "occurred_at"),
}
LOG_FIELDS = {
    *("tenant_id", "campaign_id", "provider_name", "capability", "operation", "correlation_id", "idempotency_key"),
    *("attempt", "reason_code", "outcome"),
}
UNAVAILABLE = Behaviour(status=503)
APP_MODULE = "tests.integration.celery_app"


class CeleryHarness:
    """The Celery app, its worker, and access to their rows, messages and log."""

    def __init__(self, broker, dsn, folder):
        self.run_id = secrets.token_hex(4)
        self.dsn = dsn
        self.broker = broker
        self._envelopes = folder / "envelopes"
        self._log = folder / "worker.log"
        env = {"TEST_BROKER": broker, "TEST_DSN": dsn, "TEST_RUN": self.run_id}
        os.environ.update(env)
        self.tasks = importlib.import_module(APP_MODULE)
        command = [sys.executable, "-m", "celery", "-A", APP_MODULE, "worker", "-c", "1"]
        # A unique name: a second worker of the same name cannot have its command queue and dies of it.
        command += [
            "-n",
            f"{self.run_id}@%h",
            "-l",
            "INFO",
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
        ]
        with self._log.open("wb") as log:
            self.worker = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, **env, "TEST_ENVELOPES": str(self._envelopes), "ERGON_POSTGRES__DSN": dsn},
                start_new_session=True,
            )

    def stop(self):
        self.worker.terminate()
        try:
            self.worker.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.worker.pid, 9)
            self.worker.wait()
        self.tasks.app.close()
        # This process may make another app: clear the pools, which kombu shares between apps of one address.
        pools.reset()
        del sys.modules[APP_MODULE]
        for name in ("", "-deadletter"):
            with amqp.Connection(self._address()) as connection, connection.channel() as channel:
                channel.queue_delete(f"ergon-{self.run_id}{name}")

    def _address(self):
        return self.broker.removeprefix("amqp://guest:guest@").rstrip("/")

    @property
    def log(self):
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for_result(self, sent):
        """Return the result of the task, or raise its failure."""
        try:
            return sent.get(timeout=TIMEOUT_SECONDS, interval=0.02)
        except TimeoutError:
            raise AssertionError(f"no end of {sent.id}: {self.log[-3000:]}") from None

    def wait_for_failure(self, sent, kind):
        with pytest.raises(kind) as caught:
            self.wait_for_result(sent)
        return caught.value

    def read_dead_letters(self, task_id):
        """Return the dead letters of a task as rows of the table."""
        names = ", ".join(MESSAGE_FIELDS)
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute(
                f"select {names}, published_at from ergon.provider_dead_letters where task_id = %s", (task_id,)
            ).fetchall()
        return [dict(zip((*MESSAGE_FIELDS, "published_at"), row, strict=True)) for row in rows]

    def read_dead_letter(self, task_id):
        (row,) = self.read_dead_letters(task_id)
        return row

    def wait_for_message(self, task_id):
        """Return the task's message on the dead-letter queue."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        with amqp.Connection(self._address()) as connection, connection.channel() as channel:
            while time.monotonic() < deadline:
                try:
                    message = channel.basic_get(f"ergon-{self.run_id}-deadletter", no_ack=True)
                except amqp.NotFound:  # nothing is published yet
                    channel = connection.channel()  # noqa: PLW2901
                    message = None
                if message is None:
                    time.sleep(0.02)
                elif message.properties["message_id"] == task_id:
                    return message
        raise AssertionError(f"no dead letter of {task_id} was published: {self.log[-3000:]}")

    def read_envelopes(self, correlation_id):
        lines = self._envelopes.read_text(encoding="utf-8").splitlines()
        envelopes = [json.loads(line) for line in lines]
        return [one for one in envelopes if one["fields"]["correlation_id"] == correlation_id]


@pytest.fixture(scope="module")
def shop(postgres, rabbitmq, tmp_path_factory):
    dsn = postgres.create_database("wrapper")
    upgrade(dsn)
    harness = CeleryHarness(rabbitmq, dsn, tmp_path_factory.mktemp("shop"))
    try:
        yield harness
    finally:
        harness.stop()


@pytest.mark.spec("PRV-12", "PRV-17", "PRV-16", "PRV-21", "DX-30")
def test_a_task_retries_transient_errors_and_succeeds_before_exhaustion(shop):
    with FakeProviderServer(UNAVAILABLE, Behaviour(reset=True), then=Behaviour(body={"rank": 3})) as upstream:
        sent = shop.tasks.snapshot.apply_async(
            ({"port": upstream.port},),
            correlation_id="audit-1",
            idempotency_key="k-1",
            tenant_id="acme",
            campaign_id="c-1",
        )
        assert shop.wait_for_result(sent) == {"rank": 3}
        assert dict(upstream.keys) == {"k-1": 3}
        assert {request.tenant_id for request in upstream.requests} == {"acme"}
    assert shop.read_dead_letters(sent.id) == []
    entries = shop.read_envelopes("audit-1")
    assert [one["event"] for one in entries] == ["provider attempt"] * 3 + ["provider task ended"]
    assert {frozenset(one["fields"]) for one in entries} == {frozenset(LOG_FIELDS)}
    assert [(one["fields"]["attempt"], one["fields"]["reason_code"], one["fields"]["outcome"]) for one in entries] == [
        (1, "dependency_unavailable", "retry"),
        (2, "connection_error", "retry"),
        (3, None, "success"),
        (3, None, "success"),
    ]
    expected_fields = {"tenant_id": "acme", "campaign_id": "c-1", "idempotency_key": "k-1", "operation": "snapshot"}
    assert all(one["fields"].items() >= expected_fields.items() for one in entries)
    # Celery's own formatter prints the message only.
    printed = [line for line in shop.log.splitlines() if "correlation_id=audit-1" in line]
    assert [line.partition("provider ")[2].partition(" tenant_id=")[0] for line in printed] == ["attempt"] * 3 + [
        "task ended"
    ]
    for pair in ("tenant_id=acme", "provider_name=rank", "capability=rank_snapshot", "idempotency_key=k-1", "outcome="):
        assert all(f" {pair}" in line for line in printed), pair
    assert "attempt=2 reason_code=connection_error outcome=retry" in printed[1]


@pytest.mark.spec("PRV-13", "PRV-17", "PRV-21", "PRV-23")
def test_a_task_that_exhausts_its_retries_leaves_one_row_and_publishes_the_dead_letter(shop):
    with FakeProviderServer(then=UNAVAILABLE) as upstream:
        sent = shop.tasks.snapshot.delay({"port": upstream.port}, tenant_id="acme", campaign_id="c-2")
        shop.wait_for_failure(sent, ProviderDependencyError)
        # Written before the outcome is reported, so that a caller can look it up on notification.
        row = shop.read_dead_letter(sent.id)
        assert upstream.calls == 3
        (key,) = upstream.keys
    assert set(MESSAGE_FIELDS) == DEAD_LETTER_FIELDS
    message = shop.wait_for_message(sent.id)
    body = json.loads(message.body)
    assert set(body) == DEAD_LETTER_FIELDS
    assert message.properties["delivery_mode"] == 2
    assert body | {"occurred_at": ""} == {
        "tenant_id": "acme",
        "campaign_id": "c-2",
        "task_name": "rank.snapshot",
        "provider_name": "rank",
        "capability": "rank_snapshot",
        "operation": "snapshot",
        "idempotency_key": key,
        "correlation_id": sent.id,
        "reason_code": "dependency_unavailable",
        "error_type": "ProviderDependencyError",
        "error_message": "the provider answered 503",
        "attempts": 3,
        "occurred_at": "",
    }
    occurred_at = datetime.fromisoformat(body["occurred_at"])
    assert abs(occurred_at - row["occurred_at"]) < timedelta(milliseconds=1)
    assert {name: row[name] for name in DEAD_LETTER_FIELDS - {"occurred_at"}} == {
        name: body[name] for name in DEAD_LETTER_FIELDS - {"occurred_at"}
    }
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while shop.read_dead_letter(sent.id)["published_at"] is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert shop.read_dead_letter(sent.id)["published_at"] is not None
    assert [one["fields"]["outcome"] for one in shop.read_envelopes(sent.id)] == [
        "retry",
        "retry",
        "failed",
        "dead_letter",
    ]


@pytest.mark.spec("DX-28", "DX-30", "PRV-11", "PRV-29")
@pytest.mark.parametrize("execution_id", [None, "host-7"])
def test_the_metrics_of_a_task_name_its_execution_and_have_one_dead_letter(shop, execution_id):
    with FakeProviderServer(then=UNAVAILABLE) as upstream:
        sent = shop.tasks.metered.apply_async(
            ({"port": upstream.port},), tenant_id="acme", task_execution_id=execution_id
        )
        shop.wait_for_failure(sent, ProviderDependencyError)
    query = (
        "select outcome, attempt_number from ergon.provider_execution_metrics "
        "where correlation_id = %s and task_execution_id = %s order by created_at, attempt_number"
    )
    expected = [("retry", 1), ("retry", 2), ("failed", 3), ("dead_letter", 3)]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with psycopg.connect(shop.dsn, autocommit=True) as connection:
        while (rows := connection.execute(query, (sent.id, execution_id or sent.id)).fetchall()) != expected:
            assert time.monotonic() < deadline, rows
            time.sleep(0.05)
        count = "select count(*) from ergon.provider_dead_letters where provider_name = 'metered'"
        rollup_count = "select sum(dead_letter)::int from ergon.provider_minute_rollups where provider_name = 'metered'"
        assert connection.execute(count).fetchone() == connection.execute(rollup_count).fetchone()


@pytest.mark.spec("PRV-17", "PRV-23")
def test_the_breaker_fails_fast_while_open_and_recovers_by_a_probe(shop):
    touchy = shop.tasks.touchy
    with FakeProviderServer(UNAVAILABLE, UNAVAILABLE, then=Behaviour(body={"rank": 1})) as upstream:
        for _ in range(2):
            shop.wait_for_failure(touchy.delay({"port": upstream.port}, tenant_id="acme"), ProviderDependencyError)
        rejected = touchy.delay({"port": upstream.port}, tenant_id="acme")
        shop.wait_for_failure(rejected, ProviderCircuitOpenError)
        assert upstream.calls == 2
        row = shop.read_dead_letter(rejected.id)
        assert (row["reason_code"], row["attempts"]) == ("circuit_open", 0)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            try:
                assert shop.wait_for_result(touchy.delay({"port": upstream.port}, tenant_id="acme")) == {"rank": 1}
                break
            except ProviderCircuitOpenError:
                time.sleep(0.1)
        assert upstream.calls == 3
        assert shop.wait_for_result(touchy.delay({"port": upstream.port}, tenant_id="acme")) == {"rank": 1}


@pytest.mark.spec("DX-29", "PRV-21")
def test_a_task_that_meets_an_open_breaker_is_retried_when_it_may_permit_calls(shop):
    with FakeProviderServer(UNAVAILABLE, UNAVAILABLE, then=Behaviour(body={"rank": 4})) as upstream:
        # Two failures open the breaker. The first task meets it at its third attempt, the second one at its first.
        first = shop.tasks.patient.apply_async(({"port": upstream.port},), tenant_id="acme", idempotency_key="mine")
        second = shop.tasks.patient.delay({"port": upstream.port}, tenant_id="acme")
        assert shop.wait_for_result(first) == shop.wait_for_result(second) == {"rank": 4}
        assert upstream.keys["mine"] == 3
        assert upstream.calls == 4
    for sent in (first, second):
        assert shop.read_dead_letters(sent.id) == []
        assert read_delivery_state(shop, sent.id) == ("succeeded", 1), "waiting for the breaker costs no delivery"
        (outcome, *_, end) = [
            one["fields"]["outcome"] for one in shop.read_envelopes(sent.id) if "ended" in one["event"]
        ]
        assert (outcome, end) == ("retry", "success")


@pytest.mark.spec("DX-29", "PRV-23")
def test_a_task_with_exhausted_retries_keeps_the_failure_that_opened_the_breaker(shop):
    with FakeProviderServer(then=UNAVAILABLE) as upstream:
        sent = shop.tasks.brief.delay({"port": upstream.port}, tenant_id="acme")
        shop.wait_for_failure(sent, ProviderDependencyError)
        assert upstream.calls == 3, "two that open the breaker, and the probe of the one retry"
    row = shop.read_dead_letter(sent.id)
    assert (row["reason_code"], row["error_type"]) == ("dependency_unavailable", "ProviderDependencyError")
    assert row["error_message"].startswith("the provider answered 503; then the breaker")


@pytest.mark.spec("PRV-17", "PRV-18")
def test_an_exhausted_quota_fails_fast_with_its_reason(shop):
    with FakeProviderServer() as upstream:
        for _ in range(2):
            shop.wait_for_result(shop.tasks.scarce.delay({"port": upstream.port}, tenant_id="acme"))
        rejected = shop.tasks.scarce.delay({"port": upstream.port}, tenant_id="acme")
        error = shop.wait_for_failure(rejected, ProviderQuotaExceededError)
        assert error.reason_code == shop.read_dead_letter(rejected.id)["reason_code"] == "quota_exhausted"
        assert upstream.calls == 2
        shop.wait_for_result(shop.tasks.scarce.delay({"port": upstream.port}, tenant_id="another"))


@pytest.mark.spec("PRV-12", "PRV-21")
def test_the_budget_ends_a_call_that_hangs(shop):
    with FakeProviderServer(then=Behaviour(hang=True)) as upstream:
        started_at = time.monotonic()
        sent = shop.tasks.hurried.delay({"port": upstream.port})
        shop.wait_for_failure(sent, ProviderTimeoutError)
        assert upstream.calls == 1
    assert time.monotonic() - started_at < TIMEOUT_SECONDS / 4
    assert shop.read_dead_letter(sent.id)["tenant_id"] == "default"


@pytest.mark.spec("PRV-12")
def test_a_task_may_call_more_than_once_and_an_explicit_key_belongs_to_its_own_operation(shop):
    with FakeProviderServer(then=Behaviour(body={"ok": True})) as upstream:
        sent = shop.tasks.refresh.apply_async(
            (upstream.port,), {"tenant_id": "acme", "campaign_id": "c-3"}, idempotency_key="mine"
        )
        assert shop.wait_for_result(sent)["for"] == ["acme", "c-3"]
        assert upstream.keys["mine"] == 1
        assert len(upstream.keys) == upstream.calls == 2


@pytest.mark.spec("PRV-12", "PRV-23")
@pytest.mark.parametrize("limit", ["soft", "hard"])
def test_a_time_limit_of_the_worker_leaves_one_dead_letter(shop, limit):
    sent = shop.tasks.dawdle.apply_async((limit,), tenant_id="acme")
    shop.wait_for_failure(sent, ProviderTimeoutError)
    row = shop.read_dead_letter(sent.id)
    assert DEAD_LETTER_FIELDS - {name for name, value in row.items() if value is not None} <= {"campaign_id"}
    assert (row["reason_code"], row["error_type"], row["operation"]) == ("timeout", "ProviderTimeoutError", "dawdle")
    kind = {"soft": "SoftTimeLimitExceeded", "hard": ".TimeLimitExceeded"}[limit]
    assert kind in row["error_message"]
    shop.wait_for_message(sent.id)


@pytest.mark.spec("PRV-23")
def test_a_task_that_kills_its_worker_ends_as_a_dead_letter(shop):
    sent = shop.tasks.snapshot.delay({"die": True}, tenant_id="acme")
    shop.wait_for_failure(sent, ProviderInternalError)
    row = shop.read_dead_letter(sent.id)
    assert "its worker was lost" in row["error_message"]
    assert row["attempts"] == 2  # the delivery that died, and the one that detected it


def insert_delivery(shop, task_id, state):
    """Insert the state of an earlier delivery of the task whose worker died at that point."""
    with psycopg.connect(shop.dsn) as connection:
        connection.execute(
            "insert into ergon.provider_deliveries (task_id, task_name, deliveries, state, run, ended_at) "
            "values (%s, 'rank.snapshot', 0, %s, 'gone', now() - interval '1 hour')",
            (task_id, state),
        )


def read_delivery_state(shop, task_id):
    with psycopg.connect(shop.dsn) as connection:
        return connection.execute(
            "select state, deliveries from ergon.provider_deliveries where task_id = %s", (task_id,)
        ).fetchone()


@pytest.mark.spec("PRV-23")
def test_a_result_that_was_written_but_not_reported_is_reported_by_the_next_delivery(shop):
    insert_delivery(shop, "half", "succeeding")
    with FakeProviderServer(then=Behaviour(body={"rank": 9})) as upstream:
        sent = shop.tasks.snapshot.apply_async(({"port": upstream.port},), task_id="half")
        assert shop.wait_for_result(sent) == {"rank": 9}
        # Sent again under its id, it is the same task, which has ended.
        shop.tasks.snapshot.apply_async(({"port": upstream.port},), task_id="half")
        shop.wait_for_result(shop.tasks.plain.delay(1))
        assert upstream.calls == 1
    assert read_delivery_state(shop, "half") == ("succeeded", 2)


@pytest.mark.spec("PRV-23")
def test_a_failure_that_was_written_but_not_reported_is_reported_without_a_second_dead_letter(shop):
    with FakeProviderServer(then=Behaviour(status=422)) as upstream:
        sent = shop.tasks.snapshot.apply_async(({"port": upstream.port},), task_id="dead-1")
        first = str(shop.wait_for_failure(sent, ProviderBadRequestError))
        sent.forget()
        again = shop.tasks.snapshot.apply_async(({"port": upstream.port},), task_id="dead-1")
        assert str(shop.wait_for_failure(again, ProviderBadRequestError)) == first
        assert upstream.calls == 1
    assert len(shop.read_dead_letters("dead-1")) == 1


@pytest.mark.spec("PRV-30")
def test_a_message_that_is_not_json_is_never_decoded_and_is_dead_lettered(shop):
    app, name = shop.tasks.app, shop.tasks.snapshot.name
    sent = app.send_task(name, ({"port": 1},), serializer="pickle")
    shop.wait_for_failure(sent, ProviderBadRequestError)
    assert "is not JSON" in shop.read_dead_letter(sent.id)["error_message"]


@pytest.mark.spec("PRV-30")
def test_other_tasks_are_unchanged(shop):
    sent = shop.tasks.plain.delay(1)
    assert shop.wait_for_result(sent) == 2
    assert shop.read_dead_letters(sent.id) == []
    assert (shop.tasks.plain.acks_late, shop.tasks.plain.Request) == (False, "celery.worker.request:Request")


@pytest.mark.spec("PRV-12")
def test_headers_from_other_senders_are_checked_against_limits(shop):
    bad = {"tenant_id": "a\0b", "idempotency_key": "x" * 256, "timeout_budget_seconds": 10_000}
    sent = shop.tasks.app.send_task(shop.tasks.snapshot.name, ({"port": 1},), headers={"ergon": bad})
    shop.wait_for_failure(sent, ProviderBadRequestError)
    row = shop.read_dead_letter(sent.id)
    assert row["tenant_id"] == "default"
    for name in bad:
        assert name in row["error_message"]
    assert "xxx" not in row["error_message"]


@pytest.mark.spec("PRV-12", "PRV-25")
def test_no_payload_and_no_external_message_is_in_the_workers_log(shop):
    with FakeProviderServer(then=Behaviour(body={"secret": "hunter2"})) as upstream:
        shop.wait_for_result(shop.tasks.snapshot.delay({"port": upstream.port, "card": "4000-1234"}))
        shop.wait_for_failure(shop.tasks.snapshot.delay({"blurt": "hunter2"}), ProviderInternalError)
    assert "hunter2" not in shop.log
    assert "4000-1234" not in shop.log


def test_the_dead_letter_queue_is_the_documented_one():
    assert DEAD_LETTER_QUEUE == "queue.deadletter"
