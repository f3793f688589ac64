"""The corners of the consume loop: claims that are lost, fetches that come late, brokers that refuse."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from ergon_framework import AsyncConsumerMixin, ConsumerMixin, ConsumerPolicy, MemoryConnector, Transaction
from ergon_framework.connectors.base import Ack, Defer, Delivery, Release, SettlementRequest, SettleResult
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.worker.exceptions import (
    FetchException,
    FetchTimeoutException,
    LoopStalled,
    TransactionException,
)
from ergon_framework.worker.report import Outcome, OutcomeKind, Report, StopReason
from ergon_framework.worker.running import running_loops

TIMEOUT_SECONDS = 10.0


class ScriptedQueue(MemoryConnector):
    """A queue whose calls can be held up, refused and overheard; both flavours do the same."""

    def __init__(self, *ids: str, **options: Any) -> None:
        super().__init__("orders", **options)
        self.settle_calls: list[list[SettlementRequest]] = []
        self.listeners: list[Any] = []
        self.settle_answers: list[Callable[[Sequence[SettlementRequest]], Any]] = []
        self.fetch_answers: list[Callable[[int], Any]] = []
        self.extend_answers: list[Callable[[Sequence[Delivery]], Any]] = []
        self.dispatch([Transaction(id=each, key=each[1:] or None) for each in ids])

    def listen(self, listener: Any) -> Any:
        self.listeners.append(listener)
        return super().listen(listener)

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Any:
        if self.fetch_answers:
            return self.fetch_answers.pop(0)(batch_size)
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Any:
        result = self.fetch_transactions(batch_size, **extra)
        return await result if asyncio.iscoroutine(result) else result

    def settle(self, requests: Sequence[SettlementRequest]) -> Any:
        self.settle_calls.append(list(requests))
        if self.settle_answers:
            return self.settle_answers.pop(0)(requests)
        return super().settle(requests)

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Any:
        answer = self.settle(requests)
        return await answer if asyncio.iscoroutine(answer) else answer

    def extend(self, deliveries: Sequence[Delivery]) -> Any:
        if self.extend_answers:
            return self.extend_answers.pop(0)(deliveries)
        return super().extend(deliveries)

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Any:
        answer = self.extend(deliveries)
        return await answer if asyncio.iscoroutine(answer) else answer

    def claim(self, count: int) -> Sequence[Delivery]:
        return super().fetch_transactions(count)

    @property
    def settlements(self) -> list[tuple[str, Any]]:
        return [(delivery.transaction.id, settlement) for group in self.settle_calls for delivery, settlement in group]


class ThreadsTask(ConsumerMixin, ProducerMixin):
    def __init__(self, connector: Any, process: Callable[[Transaction], Any]) -> None:
        self.connector, self.process = connector, process

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.process(transaction)


class AsyncioTask(AsyncConsumerMixin, AsyncProducerMixin):
    def __init__(self, connector: Any, process: Callable[[Transaction], Any]) -> None:
        self.connector, self.process = connector, process

    async def process_transaction(self, transaction: Transaction) -> Any:
        # The body is sync code that waits for the test: on a thread, so that the event loop is free.
        return await asyncio.get_running_loop().run_in_executor(None, self.process, transaction)


@pytest.fixture(params=["threads", "asyncio"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_task(variant: str, connector: Any, process: Callable[[Transaction], Any] = lambda transaction: None) -> Any:
    return (ThreadsTask if variant == "threads" else AsyncioTask)(connector, process)


def make_policy(
    settle: dict[str, Any] | None = None, fetch: dict[str, Any] | None = None, **loop: Any
) -> ConsumerPolicy:
    return ConsumerPolicy.load(
        {
            "loop": {"drain_timeout": 0.2, **loop},
            "steps": {
                "process": {"retry": {"max_attempts": 1}},
                "settle": {"retry": {"max_attempts": 2, "backoff": 0.001, **(settle or {}).pop("retry", {})}}
                | (settle or {}),
                "fetch": {"retry": {"max_attempts": 2, "backoff": 0.001, **(fetch or {})}},
            },
        }
    )


def run(task: Any, loop_policy: ConsumerPolicy, **more: Any) -> Report:
    result = task.consume_transactions(loop_policy, **more)
    report: Report = asyncio.run(result) if asyncio.iscoroutine(result) else result
    return report


class BackgroundLoop:
    """A loop that runs while the test does something."""

    def __init__(self, task: Any, loop_policy: ConsumerPolicy) -> None:
        self.task = task
        self.outcomes: list[Outcome] = []
        self.report: Report | None = None
        self.error: Any = None
        self._rules = loop_policy
        self._finished = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            if isinstance(self.task, AsyncioTask):
                asyncio.run(self._run_async())
            else:
                self.report = self.task.consume_transactions(self._rules, on_outcome=self.outcomes.append)
        except Exception as error:
            self.error = error
        self._finished.set()

    async def _run_async(self) -> None:
        # Told from within: the end of the event loop waits for bodies that ignore their cancellation.
        try:
            self.report = await self.task.consume_transactions(self._rules, on_outcome=self.outcomes.append)
        except Exception as error:
            self.error = error
        self._finished.set()

    def finish(self, *, stop: bool = False) -> BackgroundLoop:
        if stop:
            self.task.stop()
        assert self._finished.wait(TIMEOUT_SECONDS), "the loop did not end"
        return self


def summarize_outcomes(outcomes: list[Outcome]) -> dict[str, tuple[str, str | None]]:
    return {outcome.transaction.id: (outcome.kind.value, outcome.reason) for outcome in outcomes}


# -- lost claims --------------------------------------------------------------------------------


@pytest.mark.spec("CNN-06", "CON-30")
def test_a_claim_lost_while_it_waits_for_its_key_is_dropped_without_a_handler_call(variant: str) -> None:
    broker = ScriptedQueue("1k", "2k", "3k")
    entered, release, seen = threading.Event(), threading.Event(), []

    def process(transaction: Transaction) -> None:
        seen.append(transaction.id)
        entered.set()
        assert release.wait(TIMEOUT_SECONDS)

    loop = BackgroundLoop(make_task(variant, broker, process), make_policy(streaming=True))
    assert entered.wait(TIMEOUT_SECONDS)
    (claimed,) = [receipt for receipt, each in _get_claims(broker).items() if each == "2k"]
    broker.listeners[0].on_lost([claimed, "foreign receipt"])
    release.set()
    _wait_until(lambda: len(loop.outcomes) == 3)
    loop.finish(stop=True)
    assert seen == ["1k", "3k"]
    assert summarize_outcomes(loop.outcomes)["2k"] == ("released", "lost")
    assert "2k" not in dict(broker.settlements)


@pytest.mark.spec("CNN-06")
def test_a_claim_lost_during_its_handler_call_ends_as_released_and_is_not_settled(variant: str) -> None:
    broker = ScriptedQueue("1")
    entered, release = threading.Event(), threading.Event()

    def process(_transaction: Transaction) -> None:
        entered.set()
        assert release.wait(TIMEOUT_SECONDS)

    loop = BackgroundLoop(make_task(variant, broker, process), make_policy(streaming=True))
    assert entered.wait(TIMEOUT_SECONDS)
    broker.listeners[0].on_lost(list(_get_claims(broker)))
    _wait_until(lambda: bool(loop.outcomes))
    release.set()
    loop.finish(stop=True)
    assert summarize_outcomes(loop.outcomes) == {"1": ("released", "lost")}
    assert broker.settlements == []


@pytest.mark.spec("CNN-06")
def test_a_claim_that_cannot_be_renewed_is_lost(variant: str) -> None:
    broker = ScriptedQueue("1", lease=0.03)
    entered, release = threading.Event(), threading.Event()

    def process(_transaction: Transaction) -> None:
        entered.set()
        assert release.wait(TIMEOUT_SECONDS)

    def refuse(deliveries: Sequence[Delivery]) -> list[None]:
        return [None] * len(deliveries)

    def fail(_deliveries: Sequence[Delivery]) -> list[None]:
        raise OSError("down")

    broker.extend_answers = [fail, refuse]
    loop = BackgroundLoop(make_task(variant, broker, process), make_policy(limit=1))
    _wait_until(lambda: bool(loop.outcomes))
    release.set()
    loop.finish()
    assert summarize_outcomes(loop.outcomes) == {"1": ("released", "lost")}


@pytest.mark.spec("CNN-06")
def test_a_hanging_renewal_is_abandoned_and_retried(variant: str) -> None:
    broker = ScriptedQueue("1", lease=0.6)
    hung, renewed, release = threading.Event(), threading.Event(), threading.Event()

    def hang(deliveries: Sequence[Delivery]) -> Any:
        hung.set()

        async def hang_forever() -> Any:
            await asyncio.sleep(TIMEOUT_SECONDS)

        if variant == "asyncio":
            return hang_forever()
        release.wait(TIMEOUT_SECONDS)
        return [None] * len(deliveries)

    def renew(deliveries: Sequence[Delivery]) -> list[float]:
        renewed.set()
        return [delivery.lease_until + 60 for delivery in deliveries]  # type: ignore[operator]

    broker.extend_answers = [hang, renew]
    loop = BackgroundLoop(make_task(variant, broker, lambda _: release.wait(TIMEOUT_SECONDS)), make_policy(limit=1))
    assert hung.wait(TIMEOUT_SECONDS)
    assert renewed.wait(TIMEOUT_SECONDS)
    release.set()
    loop.finish()
    assert summarize_outcomes(loop.outcomes)["1"][0] == "succeeded"


def test_a_loop_that_ends_does_not_wait_for_a_renewal_that_hangs(variant: str) -> None:
    broker = ScriptedQueue("1", lease=0.03)
    hung, release = threading.Event(), threading.Event()

    def hang(_deliveries: Sequence[Delivery]) -> Any:
        async def hang_forever() -> Any:
            await asyncio.sleep(TIMEOUT_SECONDS)

        hung.set()
        return hang_forever() if variant == "asyncio" else release.wait(TIMEOUT_SECONDS)

    broker.extend_answers = [hang] * 50
    loop = BackgroundLoop(make_task(variant, broker, lambda _: hung.wait(TIMEOUT_SECONDS)), make_policy(limit=1))
    loop.finish()
    release.set()
    assert loop.report is not None
    assert loop.report.stop_reason is StopReason.LIMIT


# -- fetches ------------------------------------------------------------------------------------


@pytest.mark.spec("CON-28", "CON-30")
def test_deliveries_of_a_late_fetch_are_released(variant: str) -> None:
    broker = ScriptedQueue("1", "2")
    release, exited = threading.Event(), threading.Event()

    def fetch_late(_size: int) -> Any:
        async def ignore_cancellation() -> Any:
            while not release.is_set():
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    release.set()
            exited.set()
            return broker.claim(1)

        if variant == "asyncio":
            return ignore_cancellation()
        assert release.wait(TIMEOUT_SECONDS)
        exited.set()
        return broker.claim(1)

    broker.fetch_answers = [fetch_late]
    loop_policy = make_policy(fetch={"timeout": 0.03, "exit_grace": 5}, streaming=True)
    loop = BackgroundLoop(make_task(variant, broker), loop_policy)
    threading.Timer(0.06, release.set).start()
    _wait_until(lambda: len(loop.outcomes) >= 3)
    loop.finish(stop=True)
    assert ("1", Release()) in broker.settlements
    assert [settlement for name, settlement in broker.settlements if name == "1"] == [Release(), Ack()]


@pytest.mark.spec("CON-28", "CON-30")
@pytest.mark.parametrize("end", ["stop", "timeout"])
def test_deliveries_of_a_fetch_after_the_end_are_released(variant: str, end: str) -> None:
    broker = ScriptedQueue("1")
    started, release = threading.Event(), threading.Event()

    def fetch_late(_size: int) -> Any:
        async def ignore_cancellation() -> Any:
            started.set()
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.to_thread(release.wait, TIMEOUT_SECONDS)
            return broker.claim(1)

        if variant == "asyncio":
            return ignore_cancellation()
        started.set()
        assert release.wait(TIMEOUT_SECONDS)
        return broker.claim(1)

    broker.fetch_answers = [fetch_late]
    # The default timeout_drain: a fetch under way has half a second all the same.
    options = {"drain_timeout": TIMEOUT_SECONDS, "timeout": 0.1 if end == "timeout" else None}
    loop = BackgroundLoop(make_task(variant, broker), make_policy(streaming=True, **options))
    assert started.wait(TIMEOUT_SECONDS)
    threading.Timer(0.2, release.set).start()
    loop.finish(stop=end == "stop")
    assert broker.settlements == [("1", Release())]


@pytest.mark.spec("CON-08")
def test_a_fetch_that_does_not_exit_ends_the_loop(variant: str) -> None:
    broker = ScriptedQueue("1")
    release = threading.Event()

    def hang(_size: int) -> Any:
        async def ignore_cancellation() -> Any:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.005)
            return []

        return ignore_cancellation() if variant == "asyncio" else release.wait(TIMEOUT_SECONDS) and []

    broker.fetch_answers = [hang]
    loop = BackgroundLoop(
        make_task(variant, broker), make_policy(fetch={"timeout": 0.02, "exit_grace": 0.02, "max_attempts": 9})
    )
    _wait_until(lambda: loop.error is not None)
    release.set()
    loop.finish()
    assert isinstance(loop.error, FetchTimeoutException)
    assert loop.error.report.fetches == 1


@pytest.mark.spec("CON-12")
def test_a_fetch_without_its_own_timeout_is_bounded_by_the_loop_timeout(variant: str) -> None:
    broker = ScriptedQueue("1")
    report = run(make_task(variant, broker), make_policy(fetch={"timeout": None}, timeout=5.0))
    assert report.counts[OutcomeKind.SUCCEEDED] == 1


@pytest.mark.spec("CON-36")
def test_a_stop_during_the_grace_period_of_a_fetch_ends_the_loop(variant: str) -> None:
    broker = ScriptedQueue()
    entered, release = threading.Event(), threading.Event()

    def hang(_size: int) -> Any:
        async def ignore_cancellation() -> Any:
            entered.set()
            while not release.is_set():
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    cancelled.set()
            return []

        if variant == "asyncio":
            return ignore_cancellation()
        entered.set()
        release.wait(TIMEOUT_SECONDS)
        return []

    cancelled = threading.Event()
    broker.fetch_answers = [hang]
    loop = BackgroundLoop(
        make_task(variant, broker), make_policy(fetch={"timeout": 0.01, "exit_grace": 60}, streaming=True)
    )
    assert entered.wait(TIMEOUT_SECONDS)
    if variant == "asyncio":
        assert cancelled.wait(TIMEOUT_SECONDS), "it is in its grace when it has been asked to leave"
    else:
        _wait_until(lambda: loop.task.live)
        threading.Event().wait(0.05)
    loop.finish(stop=True)
    release.set()
    assert loop.report is not None
    assert loop.report.stop_reason is StopReason.STOP


# -- settling -----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-13")
def test_a_rejected_settlement_is_retried_alone(variant: str) -> None:
    broker = ScriptedQueue("1", "2")

    def refuse_first(settlings: Sequence[SettlementRequest]) -> list[SettleResult]:
        answers = list(MemoryConnector.settle(broker, settlings[1:]))
        return [SettleResult.FAILED, *answers]

    broker.settle_answers = [refuse_first]
    outcomes: list[Outcome] = []
    run(make_task(variant, broker), make_policy({"linger": 0.05}), on_outcome=outcomes.append)
    assert [[d.transaction.id for d, _ in group] for group in broker.settle_calls] == [["1", "2"], ["1"]]
    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.SUCCEEDED}


@pytest.mark.spec("CON-30", "CNN-13")
def test_a_failed_settlement_ends_as_released_and_is_marked_as_processed(variant: str) -> None:
    broker = ScriptedQueue("1")

    def fail(_settlings: Sequence[SettlementRequest]) -> Any:
        raise OSError("down")

    def answer_too_few(_settlings: Sequence[SettlementRequest]) -> Any:
        return []

    broker.settle_answers = [fail, answer_too_few]
    outcomes: list[Outcome] = []
    report = run(make_task(variant, broker), make_policy(), on_outcome=outcomes.append)
    (outcome,) = outcomes
    assert (outcome.kind, outcome.reason, outcome.processed) == (OutcomeKind.RELEASED, "failed", True)
    assert report.settled == {"failed": 1}


@pytest.mark.spec("CON-30")
def test_a_settlement_whose_claim_is_lost_ends_as_released(variant: str) -> None:
    broker = ScriptedQueue("1")
    broker.settle_answers = [lambda settlings: [SettleResult.LOST] * len(settlings)]
    outcomes: list[Outcome] = []
    run(make_task(variant, broker), make_policy(), on_outcome=outcomes.append)
    assert summarize_outcomes(outcomes) == {"1": ("released", "lost")}


@pytest.mark.spec("CNN-13")
def test_a_hanging_settlement_is_abandoned_and_retried(variant: str) -> None:
    broker = ScriptedQueue("1")
    release = threading.Event()

    def hang(settlings: Sequence[SettlementRequest]) -> Any:
        async def hang_forever() -> Any:
            await asyncio.sleep(TIMEOUT_SECONDS)

        return (
            hang_forever()
            if variant == "asyncio"
            else release.wait(TIMEOUT_SECONDS) and [SettleResult.LOST] * len(settlings)
        )

    broker.settle_answers = [hang]
    outcomes: list[Outcome] = []
    run(
        make_task(variant, broker),
        make_policy({"retry": {"timeout": 0.02, "exit_grace": 0.02}}),
        on_outcome=outcomes.append,
    )
    release.set()
    assert summarize_outcomes(outcomes) == {"1": ("succeeded", None)}


@pytest.mark.spec("CNN-13")
def test_settling_works_without_a_timeout_and_without_a_linger(variant: str) -> None:
    broker = ScriptedQueue("1", "2", "3")
    report = run(make_task(variant, broker), make_policy({"retry": {"timeout": None}, "linger": 0.0, "batch_size": 2}))
    assert report.counts[OutcomeKind.SUCCEEDED] == 3
    assert all(len(group) <= 2 for group in broker.settle_calls)


@pytest.mark.spec("CNN-13", "CON-36")
def test_a_stop_does_not_wait_for_a_broker_that_does_not_settle(variant: str) -> None:
    broker = ScriptedQueue("1", "2", "3")
    hung, release = threading.Event(), threading.Event()

    def hang(settlings: Sequence[SettlementRequest]) -> Any:
        hung.set()

        async def hang_forever() -> Any:
            await asyncio.sleep(TIMEOUT_SECONDS)

        return (
            hang_forever()
            if variant == "asyncio"
            else release.wait(TIMEOUT_SECONDS) and [SettleResult.LOST] * len(settlings)
        )

    broker.settle_answers = [hang] * 9
    loop = BackgroundLoop(
        make_task(variant, broker), make_policy({"batch_size": 1, "linger": 0.0}, streaming=True, drain_timeout=0.05)
    )
    assert hung.wait(TIMEOUT_SECONDS)
    loop.finish(stop=True)
    release.set()
    assert {kind for kind, _ in summarize_outcomes(loop.outcomes).values()} <= {"released"}


@pytest.mark.spec("CNN-13", "CON-36")
def test_a_stop_while_settling_ends_the_retries(variant: str) -> None:
    broker = ScriptedQueue("1")
    calls, called = [], threading.Event()

    def refuse(settlings: Sequence[SettlementRequest]) -> list[SettleResult]:
        calls.append(1)
        called.set()
        return [SettleResult.FAILED] * len(settlings)

    broker.settle_answers = [refuse] * 9
    loop_policy = make_policy({"retry": {"max_attempts": 9, "backoff": 60, "cap": 60}}, limit=1, drain_timeout=60.0)
    loop = BackgroundLoop(make_task(variant, broker), loop_policy)
    assert called.wait(TIMEOUT_SECONDS)
    loop.finish(stop=True)
    assert summarize_outcomes(loop.outcomes) == {"1": ("released", "failed")}
    assert len(calls) == 1


@pytest.mark.spec("CNN-13")
def test_nothing_is_fetched_while_too_many_settlements_are_pending(variant: str) -> None:
    broker = ScriptedQueue(*(str(number) for number in range(8)))
    gate, seen = threading.Event(), []

    def settle_slowly(settlings: Sequence[SettlementRequest]) -> Any:
        async def settle_after_gate() -> Any:
            while not gate.is_set():  # noqa: ASYNC110 - the gate belongs to the test's thread
                await asyncio.sleep(0.005)
            return MemoryConnector.settle(broker, settlings)

        return (
            settle_after_gate()
            if variant == "asyncio"
            else gate.wait(TIMEOUT_SECONDS) and MemoryConnector.settle(broker, settlings)
        )

    broker.settle_answers = [settle_slowly]
    loop_policy = make_policy(
        {"batch_size": 1, "max_pending": 2, "linger": 0.0}, concurrency={"value": 1}, batch={"size": 1}
    )
    loop = BackgroundLoop(make_task(variant, broker, lambda transaction: seen.append(transaction.id)), loop_policy)
    _wait_until(lambda: len(seen) >= 2)
    threading.Event().wait(0.05)
    assert len(seen) <= 3
    gate.set()
    loop.finish()
    assert len(seen) == 8


# -- the rest -----------------------------------------------------------------------------------


@pytest.mark.spec("CON-36", "CNN-10")
def test_deliveries_that_wait_for_a_slot_or_key_are_released_at_a_stop(variant: str) -> None:
    broker = ScriptedQueue("1k", "2k", "3", "4")
    entered, release = threading.Event(), threading.Event()

    def process(_transaction: Transaction) -> None:
        entered.set()
        assert release.wait(TIMEOUT_SECONDS)

    loop_policy = make_policy(
        streaming=True, concurrency={"value": 1}, batch={"size": 4}, prefetch=3, drain_timeout=5.0
    )
    loop = BackgroundLoop(make_task(variant, broker, process), loop_policy)
    assert entered.wait(TIMEOUT_SECONDS)
    _wait_until(lambda: broker.depth().in_flight == 4)
    loop.task.stop()
    _wait_until(lambda: len(loop.outcomes) == 3)
    release.set()
    loop.finish()
    assert summarize_outcomes(loop.outcomes) == {
        "1k": ("succeeded", None),
        "2k": ("released", "stop"),
        "3": ("released", "stop"),
        "4": ("released", "stop"),
    }


@pytest.mark.spec("CNN-11", "CNN-06")
def test_a_last_permitted_delivery_lost_before_its_turn_blocks_no_other(variant: str) -> None:
    broker = ScriptedQueue("1", "2", "3")
    entered, release = threading.Event(), threading.Event()

    def fetch(_size: int) -> Any:
        claimed = list(broker.claim(2))
        claimed[1].deliveries = 10
        return claimed

    def process(transaction: Transaction) -> None:
        if transaction.id == "1":
            entered.set()
            assert release.wait(TIMEOUT_SECONDS)

    broker.fetch_answers = [fetch]
    loop = BackgroundLoop(
        make_task(variant, broker, process), make_policy(streaming=True, empty_queue={"backoff": 0.01})
    )
    assert entered.wait(TIMEOUT_SECONDS)
    (claimed,) = [receipt for receipt, each in _get_claims(broker).items() if each == "2"]
    broker.listeners[0].on_lost([claimed])
    release.set()
    _wait_until(lambda: len(loop.outcomes) >= 3)
    loop.finish(stop=True)
    assert summarize_outcomes(loop.outcomes)["3"] == ("succeeded", None)


@pytest.mark.spec("CON-45")
def test_a_later_is_sent_after_the_running_handler_call_has_exited(variant: str) -> None:
    broker = ScriptedQueue("1")
    release = threading.Event()
    task = make_task(variant, broker, lambda _: release.wait(TIMEOUT_SECONDS))
    still_running: list[bool] = []

    def defer(_transaction: Transaction, exc: Any) -> Defer:
        still_running.append(exc.still_running)
        threading.Timer(0.05, release.set).start()
        return Defer(60)

    async def defer_async(transaction: Transaction, exc: Any) -> Defer:
        return defer(transaction, exc)

    task.handle_transaction_exception = defer if variant == "threads" else defer_async
    loop_policy = ConsumerPolicy.load(
        {"steps": {"process": {"retry": {"max_attempts": 1, "timeout": 0.02, "exit_grace": 0.0}}}}
    )
    if variant == "asyncio":

        async def ignore_cancellation(_transaction: Transaction) -> None:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.005)

        task.process_transaction = ignore_cancellation
    report = run(task, loop_policy)
    assert still_running == [True]
    assert [settlement for _, settlement in broker.settlements] == [Defer(60)]
    assert release.is_set()
    assert (report.counts[OutcomeKind.FAILED], report.late_results) == (1, 1)


def test_a_task_is_live_when_it_runs_nothing(variant: str) -> None:
    task = make_task(variant, ScriptedQueue())
    assert task.live
    task.stop()


def _get_claims(broker: ScriptedQueue) -> dict[Any, str]:
    """Receipts of what is claimed, with the ids."""
    return {receipt: message.content[1]["ergon-id"] for receipt, message in broker._claims.items()}


def _wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(TIMEOUT_SECONDS / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    pytest.fail("it did not come about")


@pytest.mark.spec("CON-25")
def test_a_callback_that_fails_is_logged_and_the_loop_goes_on(variant: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_outcome: Outcome) -> None:
        raise ValueError("their fault")

    report = run(make_task(variant, ScriptedQueue("1", "2")), make_policy(), on_outcome=fail)
    assert report.counts[OutcomeKind.SUCCEEDED] == 2
    assert len([record for record in caplog.records if record.exc_info]) == 2


@pytest.mark.spec("PRO-07")
def test_a_producer_is_live_while_it_produces(variant: str) -> None:
    seen: list[bool] = []

    class SyncProducer(ProducerMixin):
        connector = ScriptedQueue()

    class AsyncProducer(AsyncProducerMixin):
        connector = ScriptedQueue()

    task: Any = SyncProducer() if variant == "threads" else AsyncProducer()

    def produce(_transaction: Transaction) -> None:
        seen.append(task.live)

    async def produce_async(transaction: Transaction) -> None:
        produce(transaction)

    task.produce_transaction = produce if variant == "threads" else produce_async
    result = task.produce_transactions([Transaction(id="1")])
    asyncio.run(result) if asyncio.iscoroutine(result) else None
    assert seen == [True]


# -- what users and strangers may do ----------------------------------------------------------------


class UndescribableError(Exception):
    """An error that cannot even be described."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class InvalidClassificationError(TransactionException):
    """A verdict that is none."""

    category = "BUSINESS"  # type: ignore[assignment]
    retry_after = float("inf")


@pytest.mark.spec("CON-35", "CON-44")
@pytest.mark.parametrize(
    "error", [UndescribableError(), InvalidClassificationError("x"), TransactionException("x", code=404)]
)  # type: ignore[arg-type]
def test_an_invalid_error_fails_only_its_own_transaction(variant: str, error: Exception) -> None:
    def process(transaction: Transaction) -> None:
        if transaction.id == "1":
            raise error

    outcomes: list[Outcome] = []
    broker = ScriptedQueue("1", "2")
    run(make_task(variant, broker, process), make_policy(), on_outcome=outcomes.append)
    assert {name: kind for name, (kind, _) in summarize_outcomes(outcomes).items()} == {"1": "failed", "2": "succeeded"}
    assert broker.dead_letters[0].failure is not None


@pytest.mark.spec("CON-08")
def test_a_fetch_that_returns_no_sequence_has_failed(variant: str) -> None:
    broker = ScriptedQueue("1")
    broker.fetch_answers = [lambda _size: None, lambda _size: 7]
    with pytest.raises(FetchException, match="must return a sequence of deliveries, not int"):
        run(make_task(variant, broker), make_policy())


@pytest.mark.spec("CNN-13")
def test_settle_and_extend_may_return_none(variant: str) -> None:
    broker = ScriptedQueue("1", lease=0.06)
    extended = threading.Event()

    def return_nothing(_deliveries: Any) -> None:
        extended.set()

    broker.extend_answers = [return_nothing]
    broker.settle_answers = [lambda _settlings: None]
    outcomes: list[Outcome] = []
    run(
        make_task(variant, broker, lambda _: extended.wait(TIMEOUT_SECONDS)),
        make_policy(limit=1),
        on_outcome=outcomes.append,
    )
    assert summarize_outcomes(outcomes)["1"][0] == "succeeded"


@pytest.mark.spec("CON-29")
def test_a_later_that_waits_for_a_hanging_handler_call_does_not_hide_a_stall(variant: str) -> None:
    release = threading.Event()
    task = make_task(variant, ScriptedQueue("1", "2"), lambda _: release.wait(TIMEOUT_SECONDS))

    async def ignore_cancellation(_transaction: Transaction) -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.005)

    async def defer_async(_transaction: Transaction, _exc: Any) -> Defer:
        return Defer(60)

    if variant == "asyncio":
        task.process_transaction, task.handle_transaction_exception = ignore_cancellation, defer_async
    else:
        task.handle_transaction_exception = lambda _transaction, _exc: Defer(60)
    loop_policy = ConsumerPolicy.load(
        {
            "loop": {"concurrency": {"value": 1}, "drain_timeout": 0.1},
            "steps": {"process": {"retry": {"max_attempts": 1, "timeout": 0.02, "exit_grace": 0.0}}},
        }
    )
    loop = BackgroundLoop(task, loop_policy)
    _wait_until(lambda: loop.error is not None)
    release.set()
    assert isinstance(loop.error, LoopStalled)


def test_equal_tasks_run_separate_loops(variant: str) -> None:
    @dataclass
    class Equal(ThreadsTask if variant == "threads" else AsyncioTask):  # type: ignore[misc]
        name: str = "same"

        def __post_init__(self) -> None:
            self.connector, self.process = ScriptedQueue("1"), lambda transaction: None

    assert running_loops(Equal()) is not running_loops(Equal())
    assert run(Equal(), make_policy()).counts[OutcomeKind.SUCCEEDED] == 1


def test_the_end_of_the_event_loop_is_a_stop_and_not_a_failure() -> None:
    broker = ScriptedQueue("1", "2")
    entered, errors = [], []

    class WaitingTask(AsyncConsumerMixin):
        connector = broker

        async def process_transaction(self, transaction: Transaction) -> None:
            entered.append(transaction.id)
            await asyncio.sleep(TIMEOUT_SECONDS)

        async def handle_transaction_exception(self, transaction: Transaction, exc: Any) -> None:
            errors.append(exc)

    async def main() -> None:
        loop = asyncio.create_task(WaitingTask().consume_transactions(make_policy(streaming=True)))
        while len(entered) < 2:  # noqa: ASYNC110 - the handlers have no event of this loop
            await asyncio.sleep(0.005)
        assert not loop.done()

    asyncio.run(main())
    assert (errors, broker.dead_letters) == ([], [])
    assert {settlement for _, settlement in broker.settlements} == {Release()}
