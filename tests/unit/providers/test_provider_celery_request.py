"""A task in the parent of a pool, after its child was killed, was lost, or could not report."""

from __future__ import annotations

from types import SimpleNamespace

import psycopg
import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from ergon_framework.database.migrate import upgrade
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.celery.ledger import TaskLedger, TaskState
from ergon_framework.providers.celery.request import CeleryProviderRequest, json_only_strategy
from ergon_framework.providers.celery.task import provider_task
from ergon_framework.providers.errors import ProviderDependencyError


class Rank(ProviderBase):
    provider_name = "rank"
    capability = "rank_snapshot"

    def _execute_impl(self, **_):
        return {}


@pytest.fixture(scope="module")
def dsn(postgres):
    address = postgres.create_database("parents")
    upgrade(address)
    return address


class ParentProcess:
    """One request, and the settlement of its message."""

    def __init__(self, app, ledger, task_id):
        self.done = []
        self.told = []
        self.task = provider_task(app, Rank(), "snapshot", ledger=ledger)
        self.task.on_failure = lambda error, *_: self.told.append(type(error).__name__)
        headers = {"id": task_id, "task": self.task.name, "ergon": {"tenant_id": "acme", "campaign_id": "c"}}
        message = SimpleNamespace(
            headers=headers,
            body=b"[[{}], {}, {}]",
            payload=([{}], {}, {}),
            content_type="application/json",
            content_encoding="utf-8",
            properties={},
            delivery_info={},
        )
        self.request = CeleryProviderRequest(
            message,
            app=app,
            task=self.task,
            on_ack=lambda *_: self.done.append("acked"),
            on_reject=lambda _, __, requeue: self.done.append("requeued" if requeue else "rejected"),
        )

    def hear(self, error, **options):
        try:
            raise error
        except BaseException:
            self.request.on_failure(ExceptionInfo(), **options)
        return self.done

    def state(self):
        return self.task.AsyncResult(self.request.id).state


@pytest.fixture
def parent(dsn, request):
    app = Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)
    ledger = TaskLedger(dsn)

    def make(task_id=None, *, dsn=None):
        return ParentProcess(app, ledger if dsn is None else TaskLedger(dsn), task_id or request.node.name)

    yield make
    ledger.close()
    app.close()


def list_dead_letters(dsn, task_id):
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "select reason_code, tenant_id, campaign_id, operation from ergon.provider_dead_letters where task_id = %s",
            (task_id,),
        ).fetchall()


@pytest.mark.spec("PRV-23")
def test_the_hard_limit_is_a_dead_letter_then_an_outcome_and_the_hook_is_called_once(parent, dsn):
    mine = parent()
    assert mine.hear(TimeLimitExceeded(3)) == ["acked"]
    mine.request.on_timeout(soft=False, timeout=3)
    assert list_dead_letters(dsn, mine.request.id) == [("timeout", "acme", "c", "snapshot")]
    assert (mine.state(), mine.told, mine.done) == ("FAILURE", ["ProviderTimeoutError"], ["acked"])


@pytest.mark.spec("PRV-23")
@pytest.mark.parametrize("reported, done", [(True, "acked"), (False, "requeued")])
def test_a_result_before_the_hard_limit_ends_the_task(parent, dsn, reported, done):
    mine = parent(f"quick-{reported}")
    mine.task.ledger.complete(mine.request.id, "n", run="r", is_reported=reported)
    assert mine.hear(TimeLimitExceeded(3)) == [done]
    mine.request.on_timeout(soft=False, timeout=3)
    assert (list_dead_letters(dsn, mine.request.id), mine.state(), mine.told) == ([], "PENDING", [])


@pytest.mark.spec("PRV-23")
def test_an_unavailable_ledger_at_the_hard_limit_requeues_the_message(parent):
    mine = parent(dsn="postgresql://postgres@127.0.0.1:9/none")
    assert mine.hear(TimeLimitExceeded(3)) == ["requeued"]
    mine.request.on_timeout(soft=False, timeout=3)
    assert (mine.state(), mine.done) == ("PENDING", ["requeued"])


@pytest.mark.spec("PRV-23")
@pytest.mark.parametrize("error", [WorkerLostError("signal 9"), RuntimeError("the store of results is away")])
def test_an_unfinished_task_is_requeued_without_a_report(parent, dsn, error):
    mine = parent(type(error).__name__)
    assert mine.hear(error) == ["requeued"]
    assert (mine.state(), list_dead_letters(dsn, mine.request.id)) == ("PENDING", [])


def test_a_task_that_its_child_has_ended_is_acked(parent):
    assert parent().hear(ProviderDependencyError("down"), return_ok=True) == ["acked"]


@pytest.mark.spec("PRV-30")
@pytest.mark.parametrize("task_id, done", [("pickled", "acked"), (None, "rejected")])
def test_a_message_that_is_not_json_is_not_decoded(parent, dsn, task_id, done):
    mine = parent(task_id)

    class Sealed(SimpleNamespace):
        @property
        def payload(self):
            raise AssertionError("it was decoded")

    message = Sealed(content_type="application/x-python-serialize", headers={"id": task_id}, properties={})
    consumer = SimpleNamespace(connection_errors=(), hostname="h", event_dispatcher=None, pool=mine, timer=mine)
    for name in ("apply_eta_task", "on_task_request", "_limit_task", "_limit_post_eta", "apply_async", "call_at"):
        setattr(consumer, name, None)
        setattr(mine, name, None)
    consumer.disable_rate_limits, consumer.task_buckets = True, {}
    consumer.controller = SimpleNamespace(state=SimpleNamespace(revoked=set()))
    received = json_only_strategy(mine.task, mine.task.app, consumer)
    answers = []
    received(message, None, lambda *_: answers.append("acked"), lambda *_: answers.append("rejected"), [])
    assert answers == [done]
    assert [row[0] for row in list_dead_letters(dsn, task_id)] == (["bad_request"] if task_id else [])
    assert task_id is None or mine.task.ledger.begin(task_id, "n").state is TaskState.DEAD
