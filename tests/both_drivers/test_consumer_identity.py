"""One id and one key at a time; and the ids of transactions that a handler creates."""

from __future__ import annotations

import pytest

from ergon_framework import scope
from ergon_framework.connectors.base import Defer
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction
from tests.both_drivers.harness import Stubborn, make_policy, raise_error, return_value, wait_then_return


def make_keyed_transaction(name, key="k"):
    return Transaction(id=name, source="queue", key=key)


@pytest.mark.spec("CON-34", "CON-21")
def test_a_delivery_whose_id_is_in_flight_is_deferred_and_takes_no_slot(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"a": wait_then_return(go)}
    world.offer("a").start(make_policy(concurrency=2, batch=1, streaming=True, duplicate_delay=7.0))
    world.until(lambda: world.of("process", "a"))
    world.offer("a", "b", "c")
    world.until(lambda: {"b", "c"} <= set(world.kinds()))
    assert world.outcome("a").kind.value == "deferred"
    assert world.settlements("a") == [Defer(7.0)]
    assert world.outcome("a").attempts == 0
    go.set()
    world.until(lambda: len(world.outcomes) == 4)
    world.stop().finish()
    assert world.steps("a") == ["process", "success"]
    assert world.overlap == 1


@pytest.mark.spec("CON-34")
def test_the_same_id_is_processed_again_after_it_is_settled(build):
    world = build().offer("a").start(make_policy(streaming=True))
    world.until(lambda: world.queue.settled)
    world.offer("a").until(lambda: len(world.of("process", "a")) == 2)


@pytest.mark.spec("CON-34", "CON-21")
def test_an_abandoned_call_prevents_another_start_of_its_id(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = [wait_then_return(Stubborn(go)), return_value(None)]
    retry = {"timeout": 0.03, "max_attempts": 1, "exit_grace": 0.03}
    world.offer("a").start(
        make_policy(concurrency=2, streaming=True, process=retry, duplicate_delay=0.01, empty_queue={"backoff": 0.03})
    )
    world.until(lambda: world.queue.settled)
    world.offer("a").until(lambda: len(world.outcomes) > 1)
    assert [outcome.kind.value for outcome in world.outcomes[:2]] == ["failed", "deferred"]
    assert len(world.of("process", "a")) == 1
    go.set()
    world.until(lambda: world.outcomes[-1].kind.value == "succeeded")
    first, second = world.of("process", "a")
    assert first.ended <= second.began


@pytest.mark.spec("CON-34")
def test_transactions_with_the_same_key_run_one_at_a_time_and_in_order(build):
    world = (
        build(process=wait_then_return(0.02))
        .offer(*[make_keyed_transaction(name) for name in "abc"])
        .run(make_policy(concurrency=3))
    )
    calls = world.of("process")
    assert [call.id for call in calls] == ["a", "b", "c"]
    assert world.peak == 1
    assert world.kinds() == dict.fromkeys("abc", "succeeded")


@pytest.mark.spec("CON-34")
def test_a_key_in_flight_does_not_delay_other_keys(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"a": wait_then_return(go)}
    world.offer(
        make_keyed_transaction("a"), make_keyed_transaction("b"), make_keyed_transaction("x", "other"), "y", "z"
    ).start(make_policy(concurrency=2))
    world.until(lambda: {"x", "y", "z"} <= set(world.kinds()))
    assert world.steps("b") == []
    go.set()
    assert world.finish().kinds() == dict.fromkeys("abxyz", "succeeded")


@pytest.mark.spec("CON-34")
def test_the_next_transaction_of_a_key_waits_for_handlers_and_retries_of_the_first(build):
    world = build(process={"a": [raise_error(OSError()), return_value(None)]}, success={"a": wait_then_return(0.05)})
    world.offer(make_keyed_transaction("a"), make_keyed_transaction("b")).run(make_policy(concurrency=2))
    assert world.of("success", "a")[0].ended <= world.of("process", "b")[0].began


@pytest.mark.spec("CON-34")
def test_transactions_beyond_the_backlog_of_a_key_are_deferred_without_an_attempt(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"a": wait_then_return(go)}
    world.offer(make_keyed_transaction("a")).start(
        make_policy(concurrency=2, batch=1, streaming=True, duplicate_delay=7.0)
    )
    world.until(lambda: world.of("process", "a"))
    world.offer(*[make_keyed_transaction(name) for name in "bcd"])
    world.until(lambda: world.outcomes)
    assert world.kinds() == {"d": "deferred"}
    assert world.settlements("d") == [Defer(7.0)]
    go.set()
    world.until(lambda: len(world.outcomes) == 4)
    world.stop().finish()
    assert [call.id for call in world.of("process")] == ["a", "b", "c"]


@pytest.mark.spec("CON-48")
def test_a_transaction_created_in_a_handler_has_the_same_id_in_every_attempt(build):
    ids = []

    def body(call):
        ids.append(Transaction.new({"n": 1}, source="mails", type="invoice").id)
        if call.number == 0:
            raise OSError("after the effect")

    world = build(process=body).offer("a").run(make_policy())
    assert ids == [world.only("success").transaction.derive("mails/invoice")] * 2


@pytest.mark.spec("CON-48")
def test_creating_a_second_transaction_with_the_same_name_in_one_attempt_is_an_error(build):
    def body(call):
        Transaction.new(source="mails", type="invoice")
        with pytest.raises(ConfigurationError):
            Transaction.new(source="mails", type="invoice")
        return Transaction.new(source="mails", type="invoice", name="second").id

    world = build(process=body).offer("a").run(make_policy())
    assert world.only("success").argument == world.only("success").transaction.derive("second")


@pytest.mark.spec("CON-48")
def test_derive_depends_on_source_id_and_name_alone(build):
    world = build(process=lambda call: scope.current().derive("payments.charge")).offer("a").run(make_policy())
    redelivery = Transaction({"other": 1}, id="a", source="queue", attempts=4)
    assert world.outcome().result == redelivery.derive("payments.charge")
    assert world.outcome().result != Transaction(id="a", source="elsewhere").derive("payments.charge")
