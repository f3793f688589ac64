"""CeleryProviderTask without a worker: rejected setups, how a task is sent, and the input of its function."""

from __future__ import annotations

import logging
from datetime import UTC, date, datetime

import psycopg
import pytest
from celery import Celery
from celery.exceptions import Ignore

from ergon_framework import scope
from ergon_framework.database.migrate import upgrade
from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
from ergon_framework.providers.celery.dead_letter_publisher import DeadLetterPublisher, publish_dead_letters
from ergon_framework.providers.celery.invocation import CAUSE_FIELD, HEADER
from ergon_framework.providers.celery.ledger import TaskLedger
from ergon_framework.providers.celery.task import CeleryProviderTask, provider_task
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.errors import (
    ProviderBadRequestError,
    ProviderConnectionError,
    ProviderError,
    ProviderInternalError,
)
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.operations import operation
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.provider import Provider
from ergon_framework.providers.retry import RetryPolicy
from ergon_framework.scope import Scope
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.transaction import Transaction

SECRET = "hunter2"


class Rank(ProviderBase):
    provider_name = "rank"
    capability = "rank_snapshot"
    policy = ProviderPolicy(retry=RetryPolicy(max_attempts=2, base_delay_seconds=0.0))

    def __init__(self):
        super().__init__(state_store=MemoryProviderState())
        self.seen = []

    def _execute_impl(self, *, tenant_id, campaign_id, operation, payload, context):
        self.seen.append((tenant_id, campaign_id, operation, context.idempotency_key, context.correlation_id))
        if payload.get("fail"):
            raise ConnectionResetError(SECRET)
        return {"got": operation}


@pytest.fixture(scope="module")
def ledger(postgres):
    dsn = postgres.create_database("eager")
    upgrade(dsn)
    instance = TaskLedger(dsn)
    instance.dsn = dsn
    yield instance
    instance.close()


@pytest.fixture
def app():
    instance = Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)
    instance.conf.task_always_eager = True
    yield instance
    instance.close()


def list_dead_letters(ledger, task_id):
    with psycopg.connect(ledger.dsn) as connection:
        return connection.execute(
            "select reason_code, error_message, tenant_id, attempts "
            "from ergon.provider_dead_letters where task_id = %s",
            (task_id,),
        ).fetchall()


# -- set up -----------------------------------------------------------------------------------------


def do_nothing():
    """Do nothing."""


@pytest.mark.spec("PRV-30", "PRV-21")
@pytest.mark.parametrize(
    "options, message",
    [
        ({"provider": None}, "has no provider"),
        ({"provider": AsyncProviderBase}, "has no provider"),
        ({"serializer": "pickle"}, "needs JSON, and serializer is 'pickle'; remove serializer="),
        ({"serializer": "yaml"}, "needs JSON"),
        ({"acks_late": False}, "acks_late=True: a message that is acked early"),
        ({"reject_on_worker_lost": False}, "reject_on_worker_lost=True"),
        ({"retry_on_worker_lost": True}, "retry_on_worker_lost=False"),
        ({"acks_on_timeout": False}, "acks_on_timeout=True"),
        ({"autoretry_for": (OSError,)}, "must not have autoretry_for"),
        ({"max_deliveries": 0}, "max_deliveries must be >= 1"),
        ({"max_retries": -1}, "max_retries must be >= 0 or None"),
        ({"timeout_budget_seconds": 0}, "must be > 0"),
        ({"timeout_budget_seconds": float("nan")}, "must be > 0"),
        ({"timeout_budget_seconds": 9, "soft_time_limit": 9}, "must increase in this order"),
        ({"timeout_budget_seconds": 9, "time_limit": 10}, "must increase in this order"),
    ],
)
def test_options_that_break_a_guarantee_are_rejected_with_a_remedy(app, options, message):
    app.task(do_nothing, **{"base": CeleryProviderTask, "provider": Rank(), "name": "odd", "shared": False, **options})
    with pytest.raises(ConfigurationError) as caught:
        app.finalize()
    assert message in str(caught.value)


@pytest.mark.spec("PRV-30")
def test_an_app_whose_results_are_pickled_is_refused(app):
    app.conf.result_serializer = "pickle"
    with pytest.raises(ConfigurationError, match="result_serializer to 'json'"):
        provider_task(app, Rank(), "snapshot").bind(app)


@pytest.mark.spec("PRV-12")
def test_the_limits_follow_from_the_budget(app):
    task = provider_task(app, Rank(), "snapshot", timeout_budget_seconds=7)
    assert (task.soft_time_limit, task.time_limit) == (12, 22)
    assert (task.acks_late, task.reject_on_worker_lost, task.max_retries) == (True, True, 120)


@pytest.mark.spec("PRV-21")
def test_a_retry_by_celery_is_rejected(app, ledger):
    task = provider_task(app, Rank(), "snapshot", ledger=ledger)
    with pytest.raises(ConfigurationError, match="its failures are final"):
        task.retry()


class TrippingProvider(Rank):
    """A provider whose first failure opens the breaker that its second attempt meets."""

    provider_name = "tripping"
    policy = ProviderPolicy(
        retry=RetryPolicy(max_attempts=2, base_delay_seconds=0.0), breaker=BreakerPolicy(failure_threshold=1)
    )


@pytest.mark.spec("DX-29", "PRV-23")
def test_the_dead_letter_names_the_failure_that_opened_the_breaker(app, ledger):
    task = provider_task(app, TrippingProvider(), "snapshot", ledger=ledger)
    # An eager task is not sent again: it would run immediately.
    first = task.apply_async(({"fail": True},))
    assert list_dead_letters(ledger, first.id) == [
        (
            "connection_error",
            "the connection was lost (ConnectionResetError); then the breaker is open; the provider is not called",
            "default",
            1,
        )
    ]
    assert isinstance(first.result, ProviderConnectionError)
    # A task that was sent again carries the failure of its first delivery; one without names only the breaker.
    again = task.apply_async(({},), headers={HEADER: {CAUSE_FIELD: ["timeout", "call timed out after 3 s"]}})
    refused = task.apply_async(({},))
    reasons = [(*letter[:2], letter[3]) for one in (again, refused) for letter in list_dead_letters(ledger, one.id)]
    assert reasons == [
        ("timeout", "call timed out after 3 s; then the breaker is open; the provider is not called", 0),
        ("circuit_open", "the breaker is open; the provider is not called", 0),
    ]


# -- sent -------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-30")
def test_another_serializer_is_refused_when_it_is_sent(app):
    with pytest.raises(ConfigurationError, match="sent as JSON"):
        provider_task(app, Rank(), "snapshot").apply_async(({},), serializer="pickle")


@pytest.mark.spec("PRV-12")
def test_a_key_that_no_header_can_carry_is_refused_when_it_is_sent(app):
    with pytest.raises(ValueError, match="idempotency_key"):
        provider_task(app, Rank(), "snapshot").apply_async(({},), idempotency_key="a b")


def test_tenant_and_correlation_are_inherited_inside_a_handler(app, ledger):
    rank = Rank()
    task = provider_task(app, rank, "snapshot", ledger=ledger)
    scope.set_scope(Scope(Transaction(id="order-7", tenant="acme", correlation="cor"), "process", 0))
    try:
        task.delay({})
        task.delay({}, tenant_id="given")
    finally:
        scope.set_scope(None)
    assert [(seen[0], seen[4]) for seen in rank.seen] == [("acme", "cor"), ("given", "cor")]


# -- run --------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-12")
def test_a_task_without_a_function_is_one_call_with_its_own_key(app, ledger):
    rank = Rank()
    task = provider_task(app, rank, "snapshot", ledger=ledger)
    assert task.delay({"a": 1}, tenant_id="acme", campaign_id="c").get() == {"got": "snapshot"}
    assert task.apply_async(({"a": 1},), idempotency_key="mine").get() == {"got": "snapshot"}
    (tenant, campaign, operation, key, correlation), second = rank.seen
    assert (tenant, campaign, operation, len(key), len(correlation)) == ("acme", "c", "snapshot", 32, 36)
    assert second[3] == "mine"


@pytest.mark.spec("PRV-22", "PRV-23")
def test_a_task_that_has_ended_is_not_run_again(app, ledger):
    rank = Rank()
    task = provider_task(app, rank, "snapshot", ledger=ledger)
    task.apply_async(({},), task_id="once")
    assert task.apply_async(({},), task_id="once").state == "IGNORED"
    assert len(rank.seen) == 1


@pytest.mark.spec("PRV-12", "PRV-23", "PRV-25")
def test_a_third_party_exception_becomes_canonical_without_its_message(app, ledger):
    task = provider_task(app, Rank(), "snapshot", ledger=ledger)
    result = task.apply_async(({"fail": True},), task_id="foreign", tenant_id="acme")
    assert list_dead_letters(ledger, "foreign") == [
        ("connection_error", "the connection was lost (ConnectionResetError)", "acme", 2)
    ]
    assert SECRET not in f"{result.result!r} {result.traceback}"
    assert result.result.__cause__ is None
    # Delivered once more: the same failure, and no second dead letter.
    again = task.apply_async(({"fail": False},), task_id="foreign", tenant_id="acme")
    assert (type(again.result), str(again.result)) == (type(result.result), str(result.result))
    assert len(list_dead_letters(ledger, "foreign")) == 1


@pytest.mark.spec("PRV-12")
@pytest.mark.parametrize("error", [ValueError(SECRET), MemoryError(SECRET), ProviderBadRequestError("no such page")])
def test_any_exception_of_a_task_is_a_canonical_error(app, ledger, error):
    name = type(error).__name__

    @app.task(shared=False, base=CeleryProviderTask, provider=Rank(), name="raises", ledger=ledger)
    def body():
        raise error

    result = body.apply_async(task_id=name)
    assert isinstance(result.result, ProviderError)
    ((reason, message, tenant, attempts),) = list_dead_letters(ledger, name)
    assert reason == ("bad_request" if name.startswith("Provider") else "internal_error")
    assert (SECRET in message, tenant, attempts) == (False, "default", 1)


def test_a_task_may_ignore_its_result(app, ledger):
    @app.task(shared=False, base=CeleryProviderTask, provider=Rank(), name="ignores", ledger=ledger)
    def body():
        raise Ignore

    assert body.apply_async(task_id="nothing").state == "IGNORED"
    assert list_dead_letters(ledger, "nothing") == []


@pytest.mark.spec("PRV-22")
def test_a_second_call_of_one_operation_needs_a_name(app, ledger):
    @app.task(
        shared=False,
        base=CeleryProviderTask,
        bind=True,
        provider=Rank(),
        operation="snapshot",
        name="twice",
        ledger=ledger,
    )
    def body(self):
        self.call("snapshot", {})
        self.call("snapshot", {"other": 1})

    for options in ({}, {"idempotency_key": "k"}):
        result = body.apply_async(**options)
        assert isinstance(result.result, ProviderInternalError)


@pytest.mark.spec("PRV-12")
def test_the_budget_of_an_invocation_reaches_every_call(app, ledger):
    remaining = []

    @app.task(shared=False, base=CeleryProviderTask, provider=Rank(), name="budget", ledger=ledger)
    def body():
        remaining.append(scope.current().remaining())

    body.apply_async()
    body.apply_async(timeout_budget_seconds=2)
    assert 29 < remaining[0] <= 30
    assert 1 < remaining[1] <= 2


@pytest.mark.spec("PRV-23")
def test_more_deliveries_than_are_permitted_are_a_dead_letter(app, ledger):
    rank = Rank()
    task = provider_task(app, rank, "snapshot", ledger=ledger, max_deliveries=2)
    for _ in range(2):
        ledger.begin("worn", "rank.snapshot")
    result = task.apply_async(({},), task_id="worn")
    assert isinstance(result.result, ProviderInternalError)
    assert rank.seen == []
    assert list_dead_letters(ledger, "worn")[0][3] == 3


def test_eager_results_are_not_changed(app, ledger):
    """Eager results are not stored; values that Celery encodes as JSON, dates among them, are not changed."""

    @app.task(shared=False, base=CeleryProviderTask, provider=Rank(), name="dated", ledger=ledger)
    def body():
        return datetime(2026, 1, 1, tzinfo=UTC)

    assert body.delay().get().year == 2026


def test_a_provider_class_is_created_once_per_process(app, ledger):
    task = provider_task(app, Rank, "snapshot", ledger=ledger)
    task.delay({})
    task.delay({})
    assert len(task._get_provider().seen) == 2


class TypedRank(Provider):
    provider_name = "rank"
    capability = "rank_snapshot"

    def __init__(self):
        super().__init__(state_store=MemoryProviderState())
        self.seen = []

    @operation
    def snapshot(self, page: str, day: date) -> dict[str, str]:
        attempt = self.attempt
        self.seen.append((page, day, attempt.tenant_id, attempt.campaign_id, attempt.idempotency_key))
        return {"page": page}


class AsyncTypedRank(Provider):
    provider_name = "rank"
    capability = "rank_snapshot"

    @operation
    async def snapshot(self, page: str) -> None: ...


def test_a_task_may_call_a_typed_operation_by_name_or_directly(app, ledger):
    rank = TypedRank()
    by_name = provider_task(app, rank, "snapshot", ledger=ledger)
    assert by_name.delay({"page": "/shoes", "day": "2026-01-02"}, tenant_id="acme", campaign_id="spring").get() == {
        "page": "/shoes"
    }

    def run(self, *, tenant_id, campaign_id):
        return rank.with_options(campaign_id=campaign_id).snapshot("/shoes", date(2026, 1, 2))

    options = {"base": CeleryProviderTask, "provider": rank, "operation": "snapshot", "ledger": ledger}
    directly = app.task(run, bind=True, name="tests.direct", shared=False, **options)
    assert directly.delay(tenant_id="acme", campaign_id="spring").get() == {"page": "/shoes"}
    assert [seen[:4] for seen in rank.seen] == [("/shoes", date(2026, 1, 2), "acme", "spring")] * 2
    assert None not in {seen[4] for seen in rank.seen}


@pytest.mark.parametrize("provider", [AsyncTypedRank, AsyncTypedRank()])
def test_a_task_rejects_a_provider_of_async_operations(app, provider):
    with pytest.raises(ConfigurationError, match=r"has no provider: .*called from threads, not with async def"):
        provider_task(app, provider, "snapshot").bind(app)


def test_a_direct_call_runs_the_provider_without_a_key(app, ledger):
    rank = Rank()
    task = provider_task(app, rank, "snapshot", ledger=ledger)
    assert task({"a": 1}) == {"got": "snapshot"}
    assert rank.seen[0][3] is None


@pytest.mark.spec("PRV-23")
def test_an_unavailable_ledger_requeues_the_message_without_a_report(app, monkeypatch):
    monkeypatch.setattr("ergon_framework.providers.celery.delivery.REQUEUE_DELAY_SECONDS", 0.0)
    rank = Rank()
    task = provider_task(app, rank, "snapshot", ledger=TaskLedger("postgresql://postgres@127.0.0.1:9/none"))
    result = task.apply_async(({},))
    assert (result.state, result.result.requeue) == ("REJECTED", True)
    assert rank.seen == []


# -- published dead letters -------------------------------------------------------------------------


@pytest.mark.spec("PRV-13", "PRV-23")
def test_dead_letters_wait_while_the_broker_is_unavailable(ledger, caplog):
    offline_app = Celery("away", broker="amqp://guest:guest@127.0.0.1:9//", set_as_current=False)
    task = provider_task(offline_app, Rank(), "snapshot", ledger=ledger)
    task.apply(({"fail": True},), task_id="waits")
    with psycopg.connect(ledger.dsn) as connection:
        connection.execute("update ergon.provider_dead_letters set published_at = now() where task_id <> 'waits'")
    assert publish_dead_letters(offline_app) == 0
    assert caplog.records[-1].event == "dead letters waiting"
    sent = []
    assert ledger.publish(sent.append, limit=10) == 1
    assert sent[0].task_id == "waits"
    assert DeadLetterPublisher(offline_app, ledger).publish_pending() == 0  # nothing waits, so the broker is not called
    offline_app.close()


@pytest.mark.spec("DX-04")
@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_log_names_the_failing_line_and_no_third_party_message(app, ledger, caplog, is_recorded):
    def body():
        raise KeyError(SECRET)

    options = {"provider": Rank(), "ledger": ledger, "telemetry": TelemetryOptions(record_tracebacks=is_recorded)}
    task = app.task(body, base=CeleryProviderTask, name=f"broken-{is_recorded}", shared=False, **options)
    task.apply(task_id=f"broken-{is_recorded}")
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "provider task ended"]
    assert (record.exc_text is not None) is is_recorded
    if is_recorded:
        assert f"{__file__}:" in record.exc_text
        assert "in body" in record.exc_text
    assert SECRET not in logging.Formatter().format(record)
