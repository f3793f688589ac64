"""The parts of the queue in Redis that decide without a server."""

from __future__ import annotations

import doctest

import pytest
from redis import exceptions

from ergon_framework.connectors.base import Ack, ConnectorError, Defer, Delivery, SettleResult
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.redis import address, durability
from ergon_framework.connectors.redis import messages as keys
from ergon_framework.connectors.redis.claims import ClaimManager, RedisReceipt
from ergon_framework.connectors.redis.connection import translate_error
from ergon_framework.connectors.redis.durability import assess_durability
from ergon_framework.connectors.redis.messages import Messages, previous_deliveries
from ergon_framework.connectors.redis.settle import RedisSettler
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.transaction import Transaction


@pytest.mark.parametrize("module", [address, durability, keys])
def test_the_examples_of_the_documentation_hold(module):
    assert doctest.testmod(module, raise_on_error=True).attempted > 0


@pytest.mark.spec("CNN-07", "SEC-15")
@pytest.mark.parametrize(
    "error, kind, message",
    [
        (exceptions.ConnectionError("Connection refused"), ConnectionLostError, "unavailable"),
        (exceptions.TimeoutError("no answer"), ConnectionLostError, "unavailable"),
        (exceptions.BusyLoadingError("Redis is loading"), ConnectionLostError, "unavailable"),
        (exceptions.ClusterDownError("The cluster is down"), ConnectionLostError, "unavailable"),
        (exceptions.MasterDownError("Link with MASTER is down"), ConnectionLostError, "unavailable"),
        (exceptions.ResponseError("UNBLOCKED force unblock"), ConnectionLostError, "unavailable"),
        (exceptions.ReadOnlyError("You can't write"), ConnectionLostError, "the primary's address"),
        (exceptions.ResponseError("READONLY You can't write"), ConnectionLostError, "the primary's address"),
        (exceptions.AskError("7 127.0.0.1:7000"), ConnectionLostError, "retry"),
        (exceptions.TryAgainError("Multiple keys"), ConnectionLostError, "retry"),
        (exceptions.AuthenticationError("WRONGPASS"), ConfigurationError, "check the user"),
        (exceptions.NoPermissionError("no permissions"), ConfigurationError, "check the user"),
        (exceptions.OutOfMemoryError("command not allowed"), ConnectionLostError, "raise maxmemory"),
        (exceptions.ResponseError("OOM command not allowed"), ConnectionLostError, "raise maxmemory"),
        (exceptions.ResponseError("MISCONF cannot persist"), ConnectionLostError, "cannot write to its disk"),
        (exceptions.ResponseError("WRONGTYPE Operation"), ConfigurationError, "another name"),
        (exceptions.ResponseError("ERR unknown command"), ConnectorError, "unknown command"),
    ],
)
def test_each_error_is_translated_with_a_remedy(error, kind, message):
    result = translate_error(error)
    assert type(result) is kind
    assert message in str(result)


def test_unknown_settings_are_not_durable():
    assert assess_durability({"appendonly": "yes"}).durable is None
    assert assess_durability({"appendonly": "yes", "appendfsync": "never heard of"}).durable is False


@pytest.mark.parametrize("text, count", [(None, 0), ("3", 3), ("", 0), ("-1", 0), ("9" * 10, 0), ("²", 0), ("many", 0)])
def test_an_invalid_delivery_count_is_zero(text, count):
    assert previous_deliveries({} if text is None else {"ergon-deliveries": text}) == count


class BodyHeaderCodec(JsonCodec):
    def encode(self, transaction):
        body, headers = super().encode(transaction)
        return body, {**headers, "body": "no"}


def test_a_header_cannot_have_the_name_of_the_body_field():
    messages = Messages(BodyHeaderCodec(), name="odd", body_field="body")
    with pytest.raises(UnencodableError, match="like the body"):
        messages.encode_fields(Transaction({}, id="tx"))


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def settle_with_reply(settler, settling, reply):
    """What *settler* says when the server answers with *answer*."""
    script = settler.settle([settling])
    next(script)
    try:
        script.send(reply)
    except StopIteration as stop:
        ((result,), _) = stop.value
        return result
    raise AssertionError("it asked twice")


@pytest.mark.spec("CNN-12")
def test_a_missing_message_was_settled_here_only_while_its_lease_lasts():
    clock = FakeClock()
    queue_keys = keys.queue_keys("orders")
    messages = Messages(JsonCodec(), name="orders", body_field="body")
    claims = ClaimManager(queue_keys, messages, consumer="me", lease=10.0, limits=FetchLimits(MAX_FETCH_BYTES))
    settler = RedisSettler(queue_keys, claims, codec=JsonCodec(), clock=clock)
    delivery = Delivery(Transaction({}, id="tx"), RedisReceipt(b"1-0", "me", 1, 1), lease_until=10.0)
    assert settle_with_reply(settler, (delivery, Ack()), b"l") is SettleResult.LOST
    settler.mark_unknown([(delivery, Ack())])
    assert settle_with_reply(settler, (delivery, Defer(1.0)), b"l") is SettleResult.LOST
    settler.mark_unknown([(delivery, Ack())])
    clock.now = 9.0
    assert settle_with_reply(settler, (delivery, Ack()), b"l") is SettleResult.SETTLED
    settler.mark_unknown([(delivery, Ack())])
    clock.now = 10.0
    assert settle_with_reply(settler, (delivery, Ack()), b"l") is SettleResult.LOST
