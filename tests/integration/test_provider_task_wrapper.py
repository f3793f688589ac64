"""CeleryProviderTask with a real worker: a prefork pool, RabbitMQ, PostgreSQL, and an upstream on real sockets."""

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

from ergon_framework.providers.deadletter import FIELDS, QUEUE
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderCircuitOpenError,
    ProviderDependencyError,
    ProviderInternalError,
    ProviderQuotaExceededError,
    ProviderTimeoutError,
)
from ergon_framework.providers.synthetic import Behaviour, SyntheticUpstream
from ergon_framework.schema.migrate import upgrade

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
THIRTEEN = {
    *("tenant_id", "campaign_id", "task_name", "provider_name", "capability", "operation", "idempotency_key"),
    *("correlation_id", "reason_code", "error_type", "error_message", "attempts", "occurred_at"),
}
TEN = {
    *("tenant_id", "campaign_id", "provider_name", "capability", "operation", "correlation_id", "idempotency_key"),
    *("attempt", "reason_code", "outcome"),
}
DOWN = Behaviour(status=503)
APP = "tests.integration.celery_app"


class Shop:
    """The app, its worker, and what both leave behind."""

    def __init__(self, broker, dsn, folder):
        self.run = secrets.token_hex(4)
        self.dsn = dsn
        self.broker = broker
        self._envelopes = folder / "envelopes"
        self._log = folder / "worker.log"
        env = {"TEST_BROKER": broker, "TEST_DSN": dsn, "TEST_RUN": self.run}
        os.environ.update(env)
        self.tasks = importlib.import_module(APP)
        command = [sys.executable, "-m", "celery", "-A", APP, "worker", "-c", "1"]
        # A name of its own: a second worker of one name cannot have its queue for commands, and dies of it.
        command += ["-n", f"{self.run}@%h", "-l", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat"]
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
            self.worker.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.worker.pid, 9)
            self.worker.wait()
        self.tasks.app.close()
        # Another may be made in this process: forgotten with its pools, which kombu gives to each app of one address.
        pools.reset()
        del sys.modules[APP]
        for name in ("", "-deadletter"):
            with amqp.Connection(self._place()) as line, line.channel() as channel:
                channel.queue_delete(f"ergon-{self.run}{name}")

    def _place(self):
        return self.broker.removeprefix("amqp://guest:guest@").rstrip("/")

    @property
    def log(self):
        return self._log.read_text(encoding="utf-8", errors="replace")

    def result(self, sent):
        """What the task returned; its failure is raised."""
        try:
            return sent.get(timeout=PATIENCE, interval=0.02)
        except TimeoutError:
            raise AssertionError(f"no end of {sent.id}: {self.log[-3000:]}") from None

    def failure(self, sent, kind):
        with pytest.raises(kind) as caught:
            self.result(sent)
        return caught.value

    def rows(self, task_id):
        """The dead letters of a task, as the table has them."""
        names = ", ".join(FIELDS)
        with psycopg.connect(self.dsn) as line:
            found = line.execute(
                f"select {names}, published_at from ergon.provider_dead_letters where task_id = %s", (task_id,)
            ).fetchall()
        return [dict(zip((*FIELDS, "published_at"), row, strict=True)) for row in found]

    def row(self, task_id):
        (row,) = self.rows(task_id)
        return row

    def message(self, task_id):
        """The task's message on the queue of dead letters."""
        until = time.monotonic() + PATIENCE
        with amqp.Connection(self._place()) as line, line.channel() as channel:
            while time.monotonic() < until:
                try:
                    got = channel.basic_get(f"ergon-{self.run}-deadletter", no_ack=True)
                except amqp.NotFound:  # nothing was published yet
                    channel = line.channel()  # noqa: PLW2901
                    got = None
                if got is None:
                    time.sleep(0.02)
                elif got.properties["message_id"] == task_id:
                    return got
        raise AssertionError(f"no dead letter of {task_id} was published: {self.log[-3000:]}")

    def envelopes(self, correlation_id):
        lines = self._envelopes.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        return [one for one in found if one["fields"]["correlation_id"] == correlation_id]


@pytest.fixture(scope="module")
def shop(postgres, rabbitmq, tmp_path_factory):
    dsn = postgres.create_database("wrapper")
    upgrade(dsn)
    made = Shop(rabbitmq, dsn, tmp_path_factory.mktemp("shop"))
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.spec("PRV-12", "PRV-17", "PRV-16", "PRV-21", "DX-30")
def test_a_task_retries_transient_errors_and_succeeds_before_exhaustion(shop):
    with SyntheticUpstream(DOWN, Behaviour(reset=True), then=Behaviour(body={"rank": 3})) as upstream:
        sent = shop.tasks.snapshot.apply_async(
            ({"port": upstream.port},),
            correlation_id="audit-1",
            idempotency_key="k-1",
            tenant_id="acme",
            campaign_id="c-1",
        )
        assert shop.result(sent) == {"rank": 3}
        assert dict(upstream.keys) == {"k-1": 3}
        assert {request.tenant_id for request in upstream.requests} == {"acme"}
    assert shop.rows(sent.id) == []
    said = shop.envelopes("audit-1")
    assert [one["event"] for one in said] == ["provider attempt"] * 3 + ["provider task ended"]
    assert {frozenset(one["fields"]) for one in said} == {frozenset(TEN)}
    assert [(one["fields"]["attempt"], one["fields"]["reason_code"], one["fields"]["outcome"]) for one in said] == [
        (1, "dependency_unavailable", "retry"),
        (2, "connection_error", "retry"),
        (3, None, "success"),
        (3, None, "success"),
    ]
    whose = {"tenant_id": "acme", "campaign_id": "c-1", "idempotency_key": "k-1", "operation": "snapshot"}
    assert all(one["fields"].items() >= whose.items() for one in said)
    # Celery's own formatter prints the message only.
    printed = [line for line in shop.log.splitlines() if "correlation_id=audit-1" in line]
    assert [line.partition("provider ")[2].partition(" tenant_id=")[0] for line in printed] == ["attempt"] * 3 + [
        "task ended"
    ]
    for pair in ("tenant_id=acme", "provider_name=rank", "capability=rank_snapshot", "idempotency_key=k-1", "outcome="):
        assert all(f" {pair}" in line for line in printed), pair
    assert "attempt=2 reason_code=connection_error outcome=retry" in printed[1]


@pytest.mark.spec("PRV-13", "PRV-17", "PRV-21", "PRV-23")
def test_a_task_that_exhausts_its_retries_leaves_one_row_and_emits_the_dead_letter(shop):
    with SyntheticUpstream(then=DOWN) as upstream:
        sent = shop.tasks.snapshot.delay({"port": upstream.port}, tenant_id="acme", campaign_id="c-2")
        shop.failure(sent, ProviderDependencyError)
        # Written before the outcome is reported, so that whoever is told can look it up.
        row = shop.row(sent.id)
        assert upstream.calls == 3
        (key,) = upstream.keys
    assert set(FIELDS) == THIRTEEN
    message = shop.message(sent.id)
    told = json.loads(message.body)
    assert set(told) == THIRTEEN
    assert message.properties["delivery_mode"] == 2
    assert told | {"occurred_at": ""} == {
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
    moment = datetime.fromisoformat(told["occurred_at"])
    assert abs(moment - row["occurred_at"]) < timedelta(milliseconds=1)
    assert {name: row[name] for name in THIRTEEN - {"occurred_at"}} == {
        name: told[name] for name in THIRTEEN - {"occurred_at"}
    }
    until = time.monotonic() + PATIENCE
    while shop.row(sent.id)["published_at"] is None and time.monotonic() < until:
        time.sleep(0.02)
    assert shop.row(sent.id)["published_at"] is not None
    assert [one["fields"]["outcome"] for one in shop.envelopes(sent.id)] == ["retry", "retry", "failed", "dead_letter"]


@pytest.mark.spec("DX-28", "DX-30", "PRV-11", "PRV-29")
@pytest.mark.parametrize("given", [None, "host-7"])
def test_the_metrics_of_a_task_name_its_execution_and_have_one_dead_letter(shop, given):
    with SyntheticUpstream(then=DOWN) as upstream:
        sent = shop.tasks.metered.apply_async(({"port": upstream.port},), tenant_id="acme", task_execution_id=given)
        shop.failure(sent, ProviderDependencyError)
    query = (
        "select outcome, attempt_number from ergon.provider_execution_metrics "
        "where correlation_id = %s and task_execution_id = %s order by created_at, attempt_number"
    )
    wanted = [("retry", 1), ("retry", 2), ("failed", 3), ("dead_letter", 3)]
    until = time.monotonic() + PATIENCE
    with psycopg.connect(shop.dsn, autocommit=True) as line:
        while (found := line.execute(query, (sent.id, given or sent.id)).fetchall()) != wanted:
            assert time.monotonic() < until, found
            time.sleep(0.05)
        count = "select count(*) from ergon.provider_dead_letters where provider_name = 'metered'"
        counted = "select sum(dead_letter)::int from ergon.provider_minutes where provider_name = 'metered'"
        assert line.execute(count).fetchone() == line.execute(counted).fetchone()


@pytest.mark.spec("PRV-17", "PRV-23")
def test_the_breaker_fails_fast_while_open_and_recovers_by_a_probe(shop):
    touchy = shop.tasks.touchy
    with SyntheticUpstream(DOWN, DOWN, then=Behaviour(body={"rank": 1})) as upstream:
        for _ in range(2):
            shop.failure(touchy.delay({"port": upstream.port}, tenant_id="acme"), ProviderDependencyError)
        refused = touchy.delay({"port": upstream.port}, tenant_id="acme")
        shop.failure(refused, ProviderCircuitOpenError)
        assert upstream.calls == 2
        row = shop.row(refused.id)
        assert (row["reason_code"], row["attempts"]) == ("circuit_open", 0)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                assert shop.result(touchy.delay({"port": upstream.port}, tenant_id="acme")) == {"rank": 1}
                break
            except ProviderCircuitOpenError:
                time.sleep(0.1)
        assert upstream.calls == 3
        assert shop.result(touchy.delay({"port": upstream.port}, tenant_id="acme")) == {"rank": 1}


@pytest.mark.spec("DX-29", "PRV-21")
def test_a_task_that_meets_an_open_breaker_is_retried_when_it_may_let_calls_through(shop):
    with SyntheticUpstream(DOWN, DOWN, then=Behaviour(body={"rank": 4})) as upstream:
        # Two failures open the breaker. The first task meets it at its third attempt, the second one at its first.
        first = shop.tasks.patient.apply_async(({"port": upstream.port},), tenant_id="acme", idempotency_key="mine")
        second = shop.tasks.patient.delay({"port": upstream.port}, tenant_id="acme")
        assert shop.result(first) == shop.result(second) == {"rank": 4}
        assert upstream.keys["mine"] == 3
        assert upstream.calls == 4
    for sent in (first, second):
        assert shop.rows(sent.id) == []
        assert state(shop, sent.id) == ("succeeded", 1), "waiting for the breaker costs no delivery"
        (outcome, *_, end) = [one["fields"]["outcome"] for one in shop.envelopes(sent.id) if "ended" in one["event"]]
        assert (outcome, end) == ("retry", "success")


@pytest.mark.spec("DX-29", "PRV-23")
def test_a_task_whose_retries_are_spent_keeps_the_failure_that_opened_the_breaker(shop):
    with SyntheticUpstream(then=DOWN) as upstream:
        sent = shop.tasks.brief.delay({"port": upstream.port}, tenant_id="acme")
        shop.failure(sent, ProviderDependencyError)
        assert upstream.calls == 3, "two that open the breaker, and the probe of the one retry"
    row = shop.row(sent.id)
    assert (row["reason_code"], row["error_type"]) == ("dependency_unavailable", "ProviderDependencyError")
    assert row["error_message"].startswith("the provider answered 503; then the breaker")


@pytest.mark.spec("PRV-17", "PRV-18")
def test_a_spent_quota_fails_fast_with_its_reason(shop):
    with SyntheticUpstream() as upstream:
        for _ in range(2):
            shop.result(shop.tasks.scarce.delay({"port": upstream.port}, tenant_id="acme"))
        refused = shop.tasks.scarce.delay({"port": upstream.port}, tenant_id="acme")
        error = shop.failure(refused, ProviderQuotaExceededError)
        assert error.reason_code == shop.row(refused.id)["reason_code"] == "quota_exhausted"
        assert upstream.calls == 2
        shop.result(shop.tasks.scarce.delay({"port": upstream.port}, tenant_id="another"))


@pytest.mark.spec("PRV-12", "PRV-21")
def test_the_budget_ends_a_call_that_hangs(shop):
    with SyntheticUpstream(then=Behaviour(hang=True)) as upstream:
        began = time.monotonic()
        sent = shop.tasks.hurried.delay({"port": upstream.port})
        shop.failure(sent, ProviderTimeoutError)
        assert upstream.calls == 1
    assert time.monotonic() - began < PATIENCE / 4
    assert shop.row(sent.id)["tenant_id"] == "default"


@pytest.mark.spec("PRV-12")
def test_a_body_may_call_more_than_once_and_a_given_key_is_that_of_its_own_operation(shop):
    with SyntheticUpstream(then=Behaviour(body={"ok": True})) as upstream:
        sent = shop.tasks.refresh.apply_async(
            (upstream.port,), {"tenant_id": "acme", "campaign_id": "c-3"}, idempotency_key="mine"
        )
        assert shop.result(sent)["for"] == ["acme", "c-3"]
        assert upstream.keys["mine"] == 1
        assert len(upstream.keys) == upstream.calls == 2


@pytest.mark.spec("PRV-12", "PRV-23")
@pytest.mark.parametrize("limit", ["soft", "hard"])
def test_a_time_limit_of_the_worker_leaves_one_dead_letter(shop, limit):
    sent = shop.tasks.dawdle.apply_async((limit,), tenant_id="acme")
    shop.failure(sent, ProviderTimeoutError)
    row = shop.row(sent.id)
    assert THIRTEEN - {name for name, value in row.items() if value is not None} <= {"campaign_id"}
    assert (row["reason_code"], row["error_type"], row["operation"]) == ("timeout", "ProviderTimeoutError", "dawdle")
    kind = {"soft": "SoftTimeLimitExceeded", "hard": ".TimeLimitExceeded"}[limit]
    assert kind in row["error_message"]
    shop.message(sent.id)


@pytest.mark.spec("PRV-23")
def test_a_task_that_kills_its_worker_ends_as_a_dead_letter(shop):
    sent = shop.tasks.snapshot.delay({"die": True}, tenant_id="acme")
    shop.failure(sent, ProviderInternalError)
    row = shop.row(sent.id)
    assert "its worker was lost" in row["error_message"]
    assert row["attempts"] == 2  # the delivery that died, and the one that found it out


def known(shop, task_id, state):
    """As if an earlier delivery of the task had come so far, and its worker had died then."""
    with psycopg.connect(shop.dsn) as line:
        line.execute(
            "insert into ergon.provider_deliveries (task_id, task_name, deliveries, state, run, ended_at) "
            "values (%s, 'rank.snapshot', 0, %s, 'gone', now() - interval '1 hour')",
            (task_id, state),
        )


def state(shop, task_id):
    with psycopg.connect(shop.dsn) as line:
        return line.execute(
            "select state, deliveries from ergon.provider_deliveries where task_id = %s", (task_id,)
        ).fetchone()


@pytest.mark.spec("PRV-23")
def test_a_result_that_was_written_down_and_never_reported_is_reported_by_the_next_delivery(shop):
    known(shop, "half", "succeeding")
    with SyntheticUpstream(then=Behaviour(body={"rank": 9})) as upstream:
        sent = shop.tasks.snapshot.apply_async(({"port": upstream.port},), task_id="half")
        assert shop.result(sent) == {"rank": 9}
        # Sent once more under its id, it is the same task, which has ended.
        shop.tasks.snapshot.apply_async(({"port": upstream.port},), task_id="half")
        shop.result(shop.tasks.plain.delay(1))
        assert upstream.calls == 1
    assert state(shop, "half") == ("succeeded", 2)


@pytest.mark.spec("PRV-23")
def test_a_failure_that_was_written_down_and_never_reported_is_reported_without_a_second_letter(shop):
    with SyntheticUpstream(then=Behaviour(status=422)) as upstream:
        sent = shop.tasks.snapshot.apply_async(({"port": upstream.port},), task_id="dead-1")
        first = str(shop.failure(sent, ProviderBadRequestError))
        sent.forget()
        again = shop.tasks.snapshot.apply_async(({"port": upstream.port},), task_id="dead-1")
        assert str(shop.failure(again, ProviderBadRequestError)) == first
        assert upstream.calls == 1
    assert len(shop.rows("dead-1")) == 1


@pytest.mark.spec("PRV-30")
def test_a_message_that_is_no_json_is_never_decoded_and_is_dead(shop):
    app, name = shop.tasks.app, shop.tasks.snapshot.name
    sent = app.send_task(name, ({"port": 1},), serializer="pickle")
    shop.failure(sent, ProviderBadRequestError)
    assert "no JSON" in shop.row(sent.id)["error_message"]


@pytest.mark.spec("PRV-30")
def test_other_tasks_are_as_they_were(shop):
    sent = shop.tasks.plain.delay(1)
    assert shop.result(sent) == 2
    assert shop.rows(sent.id) == []
    assert (shop.tasks.plain.acks_late, shop.tasks.plain.Request) == (False, "celery.worker.request:Request")


@pytest.mark.spec("PRV-12")
def test_what_a_worker_is_sent_from_elsewhere_is_held_to_limits(shop):
    bad = {"tenant_id": "a\0b", "idempotency_key": "x" * 256, "timeout_budget_seconds": 10_000}
    sent = shop.tasks.app.send_task(shop.tasks.snapshot.name, ({"port": 1},), headers={"ergon": bad})
    shop.failure(sent, ProviderBadRequestError)
    row = shop.row(sent.id)
    assert row["tenant_id"] == "default"
    for name in bad:
        assert name in row["error_message"]
    assert "xxx" not in row["error_message"]


@pytest.mark.spec("PRV-12", "PRV-25")
def test_no_payload_and_no_foreign_word_is_in_the_workers_log(shop):
    with SyntheticUpstream(then=Behaviour(body={"secret": "hunter2"})) as upstream:
        shop.result(shop.tasks.snapshot.delay({"port": upstream.port, "card": "4000-1234"}))
        shop.failure(shop.tasks.snapshot.delay({"blurt": "hunter2"}), ProviderInternalError)
    assert "hunter2" not in shop.log
    assert "4000-1234" not in shop.log


def test_the_queue_of_dead_letters_is_the_documents():
    assert QUEUE == "queue.deadletter"
