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
from ergon_framework.connectors.base import Ack, Delivery, Later, Release, SettleResult, Settling
from ergon_framework.task.exceptions import (
    FetchException,
    FetchTimeoutException,
    LoopStalled,
    TransactionException,
)
from ergon_framework.task.loops import loops_of
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.task.report import End, Kind, Outcome, Report

WAIT = 10.0


class Broker(MemoryConnector):
    """A queue whose calls can be held up, refused and overheard; both flavours do the same."""

    def __init__(self, *ids: str, **options: Any) -> None:
        super().__init__("orders", **options)
        self.settlings: list[list[Settling]] = []
        self.listeners: list[Any] = []
        self.answers: list[Callable[[Sequence[Settling]], Any]] = []
        self.fetches: list[Callable[[int], Any]] = []
        self.extensions: list[Callable[[Sequence[Delivery]], Any]] = []
        self.dispatch([Transaction(each, key=each[1:] or None) for each in ids])

    def listen(self, listener: Any) -> Any:
        self.listeners.append(listener)
        return super().listen(listener)

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Any:
        if self.fetches:
            return self.fetches.pop(0)(batch_size)
        return super().fetch_transactions(batch_size, **extra)

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Any:
        found = self.fetch_transactions(batch_size, **extra)
        return await found if asyncio.iscoroutine(found) else found

    def settle(self, settlings: Sequence[Settling]) -> Any:
        self.settlings.append(list(settlings))
        if self.answers:
            return self.answers.pop(0)(settlings)
        return super().settle(settlings)

    async def settle_async(self, settlings: Sequence[Settling]) -> Any:
        answer = self.settle(settlings)
        return await answer if asyncio.iscoroutine(answer) else answer

    def extend(self, deliveries: Sequence[Delivery]) -> Any:
        if self.extensions:
            return self.extensions.pop(0)(deliveries)
        return super().extend(deliveries)

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Any:
        answer = self.extend(deliveries)
        return await answer if asyncio.iscoroutine(answer) else answer

    def claim(self, count: int) -> Sequence[Delivery]:
        return super().fetch_transactions(count)

    @property
    def settled(self) -> list[tuple[str, Any]]:
        return [(delivery.transaction.id, word) for group in self.settlings for delivery, word in group]


class Sync(ConsumerMixin, ProducerMixin):
    def __init__(self, connector: Any, process: Callable[[Transaction], Any]) -> None:
        self.connector, self.process = connector, process

    def process_transaction(self, transaction: Transaction) -> Any:
        return self.process(transaction)


class Async(AsyncConsumerMixin, AsyncProducerMixin):
    def __init__(self, connector: Any, process: Callable[[Transaction], Any]) -> None:
        self.connector, self.process = connector, process

    async def process_transaction(self, transaction: Transaction) -> Any:
        # The body is sync code that waits for the test: on a thread, so that the event loop is free.
        return await asyncio.get_running_loop().run_in_executor(None, self.process, transaction)


@pytest.fixture(params=["threads", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(flavour: str, connector: Any, process: Callable[[Transaction], Any] = lambda transaction: None) -> Any:
    return (Sync if flavour == "threads" else Async)(connector, process)


def policy(settle: dict[str, Any] | None = None, fetch: dict[str, Any] | None = None, **loop: Any) -> ConsumerPolicy:
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


def run(task: Any, rules: ConsumerPolicy, **more: Any) -> Report:
    result = task.consume_transactions(rules, **more)
    report: Report = asyncio.run(result) if asyncio.iscoroutine(result) else result
    return report


class Background:
    """A loop that runs while the test does something."""

    def __init__(self, task: Any, rules: ConsumerPolicy) -> None:
        self.task = task
        self.outcomes: list[Outcome] = []
        self.report: Report | None = None
        self.raised: Any = None
        self._rules = rules
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            if isinstance(self.task, Async):
                asyncio.run(self._run_async())
            else:
                self.report = self.task.consume_transactions(self._rules, on_outcome=self.outcomes.append)
        except Exception as error:
            self.raised = error
        self._ended.set()

    async def _run_async(self) -> None:
        # Told from within: the end of the event loop waits for bodies that ignore their cancellation.
        try:
            self.report = await self.task.consume_transactions(self._rules, on_outcome=self.outcomes.append)
        except Exception as error:
            self.raised = error
        self._ended.set()

    def finish(self, *, stop: bool = False) -> Background:
        if stop:
            self.task.stop()
        assert self._ended.wait(WAIT), "the loop did not end"
        return self


def kinds(outcomes: list[Outcome]) -> dict[str, tuple[str, str | None]]:
    return {outcome.transaction.id: (outcome.kind.value, outcome.reason) for outcome in outcomes}


# -- lost claims --------------------------------------------------------------------------------


@pytest.mark.spec("CNN-06", "CON-30")
def test_a_claim_lost_while_it_waits_for_its_key_is_dropped_without_a_handler(flavour: str) -> None:
    broker = Broker("1k", "2k", "3k")
    entered, go, seen = threading.Event(), threading.Event(), []

    def process(transaction: Transaction) -> None:
        seen.append(transaction.id)
        entered.set()
        assert go.wait(WAIT)

    loop = Background(make(flavour, broker, process), policy(streaming=True))
    assert entered.wait(WAIT)
    (claimed,) = [receipt for receipt, each in _claims(broker).items() if each == "2k"]
    broker.listeners[0].lost([claimed, "somebody else's"])
    go.set()
    _until(lambda: len(loop.outcomes) == 3)
    loop.finish(stop=True)
    assert seen == ["1k", "3k"]
    assert kinds(loop.outcomes)["2k"] == ("released", "lost")
    assert "2k" not in dict(broker.settled)


@pytest.mark.spec("CNN-06")
def test_a_claim_lost_while_its_body_runs_ends_as_released_and_is_not_settled(flavour: str) -> None:
    broker = Broker("1")
    entered, go = threading.Event(), threading.Event()

    def process(_transaction: Transaction) -> None:
        entered.set()
        assert go.wait(WAIT)

    loop = Background(make(flavour, broker, process), policy(streaming=True))
    assert entered.wait(WAIT)
    broker.listeners[0].lost(list(_claims(broker)))
    _until(lambda: bool(loop.outcomes))
    go.set()
    loop.finish(stop=True)
    assert kinds(loop.outcomes) == {"1": ("released", "lost")}
    assert broker.settled == []


@pytest.mark.spec("CNN-06")
def test_a_claim_that_cannot_be_renewed_is_lost(flavour: str) -> None:
    broker = Broker("1", lease=0.03)
    entered, go = threading.Event(), threading.Event()

    def process(_transaction: Transaction) -> None:
        entered.set()
        assert go.wait(WAIT)

    def refuse(deliveries: Sequence[Delivery]) -> list[None]:
        return [None] * len(deliveries)

    def fail(_deliveries: Sequence[Delivery]) -> list[None]:
        raise OSError("down")

    broker.extensions = [fail, refuse]
    loop = Background(make(flavour, broker, process), policy(limit=1))
    _until(lambda: bool(loop.outcomes))
    go.set()
    loop.finish()
    assert kinds(loop.outcomes) == {"1": ("released", "lost")}


@pytest.mark.spec("CNN-06")
def test_a_renewal_that_hangs_is_given_up_and_made_again(flavour: str) -> None:
    broker = Broker("1", lease=0.6)
    hung, renewed, go = threading.Event(), threading.Event(), threading.Event()

    def hang(deliveries: Sequence[Delivery]) -> Any:
        hung.set()

        async def for_ever() -> Any:
            await asyncio.sleep(WAIT)

        if flavour == "asyncio":
            return for_ever()
        go.wait(WAIT)
        return [None] * len(deliveries)

    def renew(deliveries: Sequence[Delivery]) -> list[float]:
        renewed.set()
        return [delivery.lease_until + 60 for delivery in deliveries]  # type: ignore[operator]

    broker.extensions = [hang, renew]
    loop = Background(make(flavour, broker, lambda _: go.wait(WAIT)), policy(limit=1))
    assert hung.wait(WAIT)
    assert renewed.wait(WAIT)
    go.set()
    loop.finish()
    assert kinds(loop.outcomes)["1"][0] == "succeeded"


def test_a_loop_that_ends_does_not_wait_for_a_renewal_that_hangs(flavour: str) -> None:
    broker = Broker("1", lease=0.03)
    hung, release = threading.Event(), threading.Event()

    def hang(_deliveries: Sequence[Delivery]) -> Any:
        async def for_ever() -> Any:
            await asyncio.sleep(WAIT)

        hung.set()
        return for_ever() if flavour == "asyncio" else release.wait(WAIT)

    broker.extensions = [hang] * 50
    loop = Background(make(flavour, broker, lambda _: hung.wait(WAIT)), policy(limit=1))
    loop.finish()
    release.set()
    assert loop.report is not None
    assert loop.report.end is End.LIMIT


# -- fetches ------------------------------------------------------------------------------------


@pytest.mark.spec("CON-28", "CON-30")
def test_what_a_late_fetch_brings_is_released(flavour: str) -> None:
    broker = Broker("1", "2")
    go, left = threading.Event(), threading.Event()

    def late(_size: int) -> Any:
        async def stubborn() -> Any:
            while not go.is_set():
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    go.set()
            left.set()
            return broker.claim(1)

        if flavour == "asyncio":
            return stubborn()
        assert go.wait(WAIT)
        left.set()
        return broker.claim(1)

    broker.fetches = [late]
    rules = policy(fetch={"timeout": 0.03, "abandon_grace": 5}, streaming=True)
    loop = Background(make(flavour, broker), rules)
    threading.Timer(0.06, go.set).start()
    _until(lambda: len(loop.outcomes) >= 3)
    loop.finish(stop=True)
    assert ("1", Release()) in broker.settled
    assert [word for name, word in broker.settled if name == "1"] == [Release(), Ack()]


@pytest.mark.spec("CON-28", "CON-30")
@pytest.mark.parametrize("end", ["stop", "timeout"])
def test_what_a_fetch_brings_after_the_end_is_released(flavour: str, end: str) -> None:
    broker = Broker("1")
    began, go = threading.Event(), threading.Event()

    def late(_size: int) -> Any:
        async def stubborn() -> Any:
            began.set()
            while not go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.to_thread(go.wait, WAIT)
            return broker.claim(1)

        if flavour == "asyncio":
            return stubborn()
        began.set()
        assert go.wait(WAIT)
        return broker.claim(1)

    broker.fetches = [late]
    # The default timeout_drain: a fetch under way has half a second all the same.
    rules = {"drain_timeout": WAIT, "timeout": 0.1 if end == "timeout" else None}
    loop = Background(make(flavour, broker), policy(streaming=True, **rules))
    assert began.wait(WAIT)
    threading.Timer(0.2, go.set).start()
    loop.finish(stop=end == "stop")
    assert broker.settled == [("1", Release())]


@pytest.mark.spec("CON-08")
def test_a_fetch_that_will_not_leave_ends_the_loop(flavour: str) -> None:
    broker = Broker("1")
    go = threading.Event()

    def stuck(_size: int) -> Any:
        async def ignoring() -> Any:
            while not go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.005)
            return []

        return ignoring() if flavour == "asyncio" else go.wait(WAIT) and []

    broker.fetches = [stuck]
    loop = Background(make(flavour, broker), policy(fetch={"timeout": 0.02, "abandon_grace": 0.02, "max_attempts": 9}))
    _until(lambda: loop.raised is not None)
    go.set()
    loop.finish()
    assert isinstance(loop.raised, FetchTimeoutException)
    assert loop.raised.report.fetches == 1


@pytest.mark.spec("CON-12")
def test_a_fetch_without_a_timeout_of_its_own_is_bound_by_the_loop(flavour: str) -> None:
    broker = Broker("1")
    report = run(make(flavour, broker), policy(fetch={"timeout": None}, timeout=5.0))
    assert report.counts[Kind.SUCCEEDED] == 1


@pytest.mark.spec("CON-36")
def test_a_stop_while_a_fetch_is_given_its_grace_ends_the_loop(flavour: str) -> None:
    broker = Broker()
    entered, go = threading.Event(), threading.Event()

    def stuck(_size: int) -> Any:
        async def ignoring() -> Any:
            entered.set()
            while not go.is_set():
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    asked.set()
            return []

        if flavour == "asyncio":
            return ignoring()
        entered.set()
        go.wait(WAIT)
        return []

    asked = threading.Event()
    broker.fetches = [stuck]
    loop = Background(make(flavour, broker), policy(fetch={"timeout": 0.01, "abandon_grace": 60}, streaming=True))
    assert entered.wait(WAIT)
    if flavour == "asyncio":
        assert asked.wait(WAIT), "it is in its grace when it has been asked to leave"
    else:
        _until(lambda: loop.task.live)
        threading.Event().wait(0.05)
    loop.finish(stop=True)
    go.set()
    assert loop.report is not None
    assert loop.report.end is End.STOP


# -- settling -----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-13")
def test_one_that_the_broker_refuses_is_tried_again_alone(flavour: str) -> None:
    broker = Broker("1", "2")

    def refuse_first(settlings: Sequence[Settling]) -> list[SettleResult]:
        answers = list(MemoryConnector.settle(broker, settlings[1:]))
        return [SettleResult.FAILED, *answers]

    broker.answers = [refuse_first]
    outcomes: list[Outcome] = []
    run(make(flavour, broker), policy({"linger": 0.05}), on_outcome=outcomes.append)
    assert [[d.transaction.id for d, _ in group] for group in broker.settlings] == [["1", "2"], ["1"]]
    assert {outcome.kind for outcome in outcomes} == {Kind.SUCCEEDED}


@pytest.mark.spec("CON-30", "CNN-13")
def test_what_cannot_be_settled_ends_as_released_and_the_record_knows_that_it_was_processed(flavour: str) -> None:
    broker = Broker("1")

    def down(_settlings: Sequence[Settling]) -> Any:
        raise OSError("down")

    def short(_settlings: Sequence[Settling]) -> Any:
        return []

    broker.answers = [down, short]
    outcomes: list[Outcome] = []
    report = run(make(flavour, broker), policy(), on_outcome=outcomes.append)
    (outcome,) = outcomes
    assert (outcome.kind, outcome.reason, outcome.processed) == (Kind.RELEASED, "failed", True)
    assert report.settled == {"failed": 1}


@pytest.mark.spec("CON-30")
def test_a_settlement_whose_claim_is_gone_ends_as_released(flavour: str) -> None:
    broker = Broker("1")
    broker.answers = [lambda settlings: [SettleResult.LOST] * len(settlings)]
    outcomes: list[Outcome] = []
    run(make(flavour, broker), policy(), on_outcome=outcomes.append)
    assert kinds(outcomes) == {"1": ("released", "lost")}


@pytest.mark.spec("CNN-13")
def test_a_settlement_that_hangs_is_given_up_and_made_again(flavour: str) -> None:
    broker = Broker("1")
    release = threading.Event()

    def hang(settlings: Sequence[Settling]) -> Any:
        async def for_ever() -> Any:
            await asyncio.sleep(WAIT)

        return for_ever() if flavour == "asyncio" else release.wait(WAIT) and [SettleResult.LOST] * len(settlings)

    broker.answers = [hang]
    outcomes: list[Outcome] = []
    run(make(flavour, broker), policy({"retry": {"timeout": 0.02, "abandon_grace": 0.02}}), on_outcome=outcomes.append)
    release.set()
    assert kinds(outcomes) == {"1": ("succeeded", None)}


@pytest.mark.spec("CNN-13")
def test_settling_may_be_without_timeout_and_without_linger(flavour: str) -> None:
    broker = Broker("1", "2", "3")
    report = run(make(flavour, broker), policy({"retry": {"timeout": None}, "linger": 0.0, "group": 2}))
    assert report.counts[Kind.SUCCEEDED] == 3
    assert all(len(group) <= 2 for group in broker.settlings)


@pytest.mark.spec("CNN-13", "CON-36")
def test_a_stop_does_not_wait_for_a_broker_that_will_not_settle(flavour: str) -> None:
    broker = Broker("1", "2", "3")
    hung, release = threading.Event(), threading.Event()

    def hang(settlings: Sequence[Settling]) -> Any:
        hung.set()

        async def for_ever() -> Any:
            await asyncio.sleep(WAIT)

        return for_ever() if flavour == "asyncio" else release.wait(WAIT) and [SettleResult.LOST] * len(settlings)

    broker.answers = [hang] * 9
    loop = Background(make(flavour, broker), policy({"group": 1, "linger": 0.0}, streaming=True, drain_timeout=0.05))
    assert hung.wait(WAIT)
    loop.finish(stop=True)
    release.set()
    assert {word for word, _ in kinds(loop.outcomes).values()} <= {"released"}


@pytest.mark.spec("CNN-13", "CON-36")
def test_a_second_stop_while_settling_ends_that_too(flavour: str) -> None:
    broker = Broker("1")
    tries, tried = [], threading.Event()

    def refuse(settlings: Sequence[Settling]) -> list[SettleResult]:
        tries.append(1)
        tried.set()
        return [SettleResult.FAILED] * len(settlings)

    broker.answers = [refuse] * 9
    rules = policy({"retry": {"max_attempts": 9, "backoff": 60, "cap": 60}}, limit=1, drain_timeout=60.0)
    loop = Background(make(flavour, broker), rules)
    assert tried.wait(WAIT)
    loop.finish(stop=True)
    assert kinds(loop.outcomes) == {"1": ("released", "failed")}
    assert len(tries) == 1


@pytest.mark.spec("CNN-13")
def test_no_more_is_fetched_while_too_many_wait_to_be_settled(flavour: str) -> None:
    broker = Broker(*(str(number) for number in range(8)))
    gate, seen = threading.Event(), []

    def slowly(settlings: Sequence[Settling]) -> Any:
        async def after() -> Any:
            while not gate.is_set():  # noqa: ASYNC110 - the gate belongs to the test's thread
                await asyncio.sleep(0.005)
            return MemoryConnector.settle(broker, settlings)

        return after() if flavour == "asyncio" else gate.wait(WAIT) and MemoryConnector.settle(broker, settlings)

    broker.answers = [slowly]
    rules = policy({"group": 1, "pending": 2, "linger": 0.0}, concurrency={"value": 1}, batch={"size": 1})
    loop = Background(make(flavour, broker, lambda transaction: seen.append(transaction.id)), rules)
    _until(lambda: len(seen) >= 2)
    threading.Event().wait(0.05)
    assert len(seen) <= 3
    gate.set()
    loop.finish()
    assert len(seen) == 8


# -- the rest -----------------------------------------------------------------------------------


@pytest.mark.spec("CON-36", "CNN-10")
def test_what_waits_for_a_slot_or_its_key_is_released_at_a_stop(flavour: str) -> None:
    broker = Broker("1k", "2k", "3", "4")
    entered, go = threading.Event(), threading.Event()

    def process(_transaction: Transaction) -> None:
        entered.set()
        assert go.wait(WAIT)

    rules = policy(streaming=True, concurrency={"value": 1}, batch={"size": 4}, prefetch=3, drain_timeout=5.0)
    loop = Background(make(flavour, broker, process), rules)
    assert entered.wait(WAIT)
    _until(lambda: broker.depth().in_flight == 4)
    loop.task.stop()
    _until(lambda: len(loop.outcomes) == 3)
    go.set()
    loop.finish()
    assert kinds(loop.outcomes) == {
        "1k": ("succeeded", None),
        "2k": ("released", "stop"),
        "3": ("released", "stop"),
        "4": ("released", "stop"),
    }


@pytest.mark.spec("CNN-11", "CNN-06")
def test_a_last_permitted_delivery_that_is_lost_before_its_turn_blocks_nobody(flavour: str) -> None:
    broker = Broker("1", "2", "3")
    entered, go = threading.Event(), threading.Event()

    def fetch(_size: int) -> Any:
        claimed = list(broker.claim(2))
        claimed[1].deliveries = 10
        return claimed

    def process(transaction: Transaction) -> None:
        if transaction.id == "1":
            entered.set()
            assert go.wait(WAIT)

    broker.fetches = [fetch]
    loop = Background(make(flavour, broker, process), policy(streaming=True, empty_queue={"backoff": 0.01}))
    assert entered.wait(WAIT)
    (claimed,) = [receipt for receipt, each in _claims(broker).items() if each == "2"]
    broker.listeners[0].lost([claimed])
    go.set()
    _until(lambda: len(loop.outcomes) >= 3)
    loop.finish(stop=True)
    assert kinds(loop.outcomes)["3"] == ("succeeded", None)


@pytest.mark.spec("CON-45")
def test_a_later_with_a_body_still_running_is_sent_when_it_has_left(flavour: str) -> None:
    broker = Broker("1")
    go = threading.Event()
    task = make(flavour, broker, lambda _: go.wait(WAIT))
    told: list[bool] = []

    def later(_transaction: Transaction, exc: Any) -> Later:
        told.append(exc.still_running)
        threading.Timer(0.05, go.set).start()
        return Later(60)

    async def later_async(transaction: Transaction, exc: Any) -> Later:
        return later(transaction, exc)

    task.handle_transaction_exception = later if flavour == "threads" else later_async
    rules = ConsumerPolicy.load(
        {"steps": {"process": {"retry": {"max_attempts": 1, "timeout": 0.02, "abandon_grace": 0.0}}}}
    )
    if flavour == "asyncio":

        async def ignoring(_transaction: Transaction) -> None:
            while not go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.005)

        task.process_transaction = ignoring
    report = run(task, rules)
    assert told == [True]
    assert [word for _, word in broker.settled] == [Later(60)]
    assert go.is_set()
    assert (report.counts[Kind.FAILED], report.fenced) == (1, 1)


def test_a_task_is_live_when_it_runs_nothing(flavour: str) -> None:
    task = make(flavour, Broker())
    assert task.live
    task.stop()


def _claims(broker: Broker) -> dict[Any, str]:
    """Receipts of what is claimed, with the ids."""
    return {receipt: message.content.id for receipt, message in broker._claims.items()}


def _until(true: Callable[[], bool]) -> None:
    deadline = threading.Event()
    for _ in range(int(WAIT / 0.005)):
        if true():
            return
        deadline.wait(0.005)
    pytest.fail("it did not come about")


@pytest.mark.spec("CON-25")
def test_a_callback_that_fails_is_logged_and_the_loop_goes_on(flavour: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_outcome: Outcome) -> None:
        raise ValueError("their fault")

    report = run(make(flavour, Broker("1", "2")), policy(), on_outcome=broken)
    assert report.counts[Kind.SUCCEEDED] == 2
    assert len([record for record in caplog.records if record.exc_info]) == 2


@pytest.mark.spec("PRO-07")
def test_a_producer_is_live_while_it_produces(flavour: str) -> None:
    seen: list[bool] = []

    class OnlySync(ProducerMixin):
        connector = Broker()

    class OnlyAsync(AsyncProducerMixin):
        connector = Broker()

    task: Any = OnlySync() if flavour == "threads" else OnlyAsync()

    def produce(_transaction: Transaction) -> None:
        seen.append(task.live)

    async def produce_async(transaction: Transaction) -> None:
        produce(transaction)

    task.produce_transaction = produce if flavour == "threads" else produce_async
    result = task.produce_transactions([Transaction("1")])
    asyncio.run(result) if asyncio.iscoroutine(result) else None
    assert seen == [True]


# -- what users and strangers may do ----------------------------------------------------------------


class Unspeakable(Exception):
    """An error that cannot even be described."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Odd(TransactionException):
    """A verdict that is none."""

    category = "BUSINESS"  # type: ignore[assignment]
    retry_after = float("inf")


@pytest.mark.spec("CON-35", "CON-44")
@pytest.mark.parametrize("error", [Unspeakable(), Odd("x"), TransactionException("x", code=404)])  # type: ignore[arg-type]
def test_an_odd_error_fails_its_own_transaction_only(flavour: str, error: Exception) -> None:
    def process(transaction: Transaction) -> None:
        if transaction.id == "1":
            raise error

    outcomes: list[Outcome] = []
    broker = Broker("1", "2")
    run(make(flavour, broker, process), policy(), on_outcome=outcomes.append)
    assert {name: kind for name, (kind, _) in kinds(outcomes).items()} == {"1": "failed", "2": "succeeded"}
    assert broker.dead_letters[0].failure is not None


@pytest.mark.spec("CON-08")
def test_a_fetch_that_returns_no_sequence_is_a_failed_fetch(flavour: str) -> None:
    broker = Broker("1")
    broker.fetches = [lambda _size: None, lambda _size: 7]
    with pytest.raises(FetchException, match="must return a sequence of deliveries, not int"):
        run(make(flavour, broker), policy())


@pytest.mark.spec("CNN-13")
def test_a_settle_or_an_extend_that_returns_nothing_says_nothing(flavour: str) -> None:
    broker = Broker("1", lease=0.06)
    extended = threading.Event()

    def nothing(_deliveries: Any) -> None:
        extended.set()

    broker.extensions = [nothing]
    broker.answers = [lambda _settlings: None]
    outcomes: list[Outcome] = []
    run(make(flavour, broker, lambda _: extended.wait(WAIT)), policy(limit=1), on_outcome=outcomes.append)
    assert kinds(outcomes)["1"][0] == "succeeded"


@pytest.mark.spec("CON-29")
def test_a_later_that_waits_for_a_hung_body_does_not_hide_a_stall(flavour: str) -> None:
    go = threading.Event()
    task = make(flavour, Broker("1", "2"), lambda _: go.wait(WAIT))

    async def ignoring(_transaction: Transaction) -> None:
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.005)

    async def later_async(_transaction: Transaction, _exc: Any) -> Later:
        return Later(60)

    if flavour == "asyncio":
        task.process_transaction, task.handle_transaction_exception = ignoring, later_async
    else:
        task.handle_transaction_exception = lambda _transaction, _exc: Later(60)
    rules = ConsumerPolicy.load(
        {
            "loop": {"concurrency": {"value": 1}, "drain_timeout": 0.1},
            "steps": {"process": {"retry": {"max_attempts": 1, "timeout": 0.02, "abandon_grace": 0.0}}},
        }
    )
    loop = Background(task, rules)
    _until(lambda: loop.raised is not None)
    go.set()
    assert isinstance(loop.raised, LoopStalled)


def test_tasks_that_are_equal_are_still_two(flavour: str) -> None:
    @dataclass
    class Equal(Sync if flavour == "threads" else Async):  # type: ignore[misc]
        name: str = "same"

        def __post_init__(self) -> None:
            self.connector, self.process = Broker("1"), lambda transaction: None

    assert loops_of(Equal()) is not loops_of(Equal())
    assert run(Equal(), policy()).counts[Kind.SUCCEEDED] == 1


def test_the_end_of_the_event_loop_is_a_stop_and_no_failure() -> None:
    broker = Broker("1", "2")
    entered, told = threading.Semaphore(0), []

    class Waiting(AsyncConsumerMixin):
        connector = broker

        async def process_transaction(self, transaction: Transaction) -> None:
            entered.release()
            await asyncio.sleep(WAIT)

        async def handle_transaction_exception(self, transaction: Transaction, exc: Any) -> None:
            told.append(exc)

    async def main() -> None:
        loop = asyncio.create_task(Waiting().consume_transactions(policy(streaming=True)))
        while not (entered.acquire(blocking=False) and entered.acquire(timeout=WAIT)):  # noqa: ASYNC110 - theirs
            await asyncio.sleep(0.005)
        assert not loop.done()

    asyncio.run(main())
    assert (told, broker.dead_letters) == ([], [])
    assert {word for _, word in broker.settled} == {Release()}
