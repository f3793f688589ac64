"""The parts of the queue in Redis that decide without a server."""

from __future__ import annotations

import doctest

import pytest
from redis import exceptions

from ergon_framework.connectors.base import Ack, ConnectorError, Delivery, Later, SettleResult
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.redis import durability, keys
from ergon_framework.connectors.redis.claiming import Claiming
from ergon_framework.connectors.redis.durability import judged
from ergon_framework.connectors.redis.failures import translated
from ergon_framework.connectors.redis.messages import Messages, counted
from ergon_framework.connectors.redis.receipt import Receipt
from ergon_framework.connectors.redis.settling import Settler
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.transaction import Transaction


@pytest.mark.parametrize("module", [durability, keys])
def test_the_examples_of_the_documentation_hold(module):
    assert doctest.testmod(module, raise_on_error=True).attempted > 0


@pytest.mark.spec("CNN-07", "SEC-15")
@pytest.mark.parametrize(
    "error, kind, words",
    [
        (exceptions.ConnectionError("Connection refused"), ConnectionLost, "out of reach"),
        (exceptions.TimeoutError("no answer"), ConnectionLost, "out of reach"),
        (exceptions.BusyLoadingError("Redis is loading"), ConnectionLost, "out of reach"),
        (exceptions.ClusterDownError("The cluster is down"), ConnectionLost, "out of reach"),
        (exceptions.MasterDownError("Link with MASTER is down"), ConnectionLost, "out of reach"),
        (exceptions.ResponseError("UNBLOCKED force unblock"), ConnectionLost, "out of reach"),
        (exceptions.ReadOnlyError("You can't write"), ConnectionLost, "the primary's address"),
        (exceptions.ResponseError("READONLY You can't write"), ConnectionLost, "the primary's address"),
        (exceptions.AskError("7 127.0.0.1:7000"), ConnectionLost, "ask again"),
        (exceptions.TryAgainError("Multiple keys"), ConnectionLost, "ask again"),
        (exceptions.AuthenticationError("WRONGPASS"), ConfigurationError, "check the user"),
        (exceptions.NoPermissionError("no permissions"), ConfigurationError, "check the user"),
        (exceptions.OutOfMemoryError("command not allowed"), ConnectionLost, "raise maxmemory"),
        (exceptions.ResponseError("OOM command not allowed"), ConnectionLost, "raise maxmemory"),
        (exceptions.ResponseError("MISCONF cannot persist"), ConnectionLost, "cannot write to its disk"),
        (exceptions.ResponseError("WRONGTYPE Operation"), ConfigurationError, "another name"),
        (exceptions.ResponseError("ERR unknown command"), ConnectorError, "unknown command"),
    ],
)
def test_each_error_says_what_to_do(error, kind, words):
    told = translated(error)
    assert type(told) is kind
    assert words in str(told)


def test_unknown_settings_are_not_durable():
    assert judged({"appendonly": "yes"}).durable is None
    assert judged({"appendonly": "yes", "appendfsync": "never heard of"}).durable is False


@pytest.mark.parametrize("text, count", [(None, 0), ("3", 3), ("", 0), ("-1", 0), ("9" * 10, 0), ("²", 0), ("many", 0)])
def test_a_producers_nonsense_counts_nothing(text, count):
    assert counted({} if text is None else {"ergon-deliveries": text}) == count


class Odd(JsonCodec):
    def encode(self, transaction):
        body, headers = super().encode(transaction)
        return body, {**headers, "body": "no"}


def test_a_header_cannot_be_called_as_the_body():
    messages = Messages(Odd(), name="odd", body="body")
    with pytest.raises(UnencodableError, match="as the body"):
        messages.fields(Transaction("tx", {}))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def settled(settler, settling, answer):
    """What *settler* says when the server answers with *answer*."""
    work = settler.settle([settling])
    next(work)
    try:
        work.send(answer)
    except StopIteration as stop:
        ((result,), _) = stop.value
        return result
    raise AssertionError("it asked twice")


@pytest.mark.spec("CNN-12")
def test_what_is_gone_was_settled_by_us_only_while_nobody_else_can_have_had_it():
    clock = Clock()
    where = keys.keys_of("orders")
    messages = Messages(JsonCodec(), name="orders", body="body")
    claiming = Claiming(where, messages, consumer="me", lease=10.0, limits=FetchLimits(MAX_FETCH_BYTES))
    settler = Settler(where, claiming, codec=JsonCodec(), clock=clock)
    delivery = Delivery(Transaction("tx", {}), Receipt(b"1-0", "me", 1, 1), lease_until=10.0)
    assert settled(settler, (delivery, Ack()), b"l") is SettleResult.LOST
    settler.doubt([(delivery, Ack())])
    assert settled(settler, (delivery, Later(1.0)), b"l") is SettleResult.LOST
    settler.doubt([(delivery, Ack())])
    clock.now = 9.0
    assert settled(settler, (delivery, Ack()), b"l") is SettleResult.SETTLED
    settler.doubt([(delivery, Ack())])
    clock.now = 10.0
    assert settled(settler, (delivery, Ack()), b"l") is SettleResult.LOST
