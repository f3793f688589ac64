"""Connectors that break the contract on purpose, each in one way: the exam must find every one of them."""

from __future__ import annotations

import copy
from dataclasses import replace

from ergon_framework.connectors.base import Ack, Confirmation, DeadLetter, Delivery, Later, Release, SettleResult
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, ReplayResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConnectionLost

SETTLED, LOST = SettleResult.SETTLED, SettleResult.LOST


class _Settling(MemoryConnector):
    """Has every settlement changed before it is made."""

    def settle(self, settlings):
        return super().settle([(delivery, self.changed(delivery, settlement)) for delivery, settlement in settlings])

    def changed(self, delivery, settlement):
        return settlement


class ForgetsLater(_Settling):
    """What is to come again later never does."""

    def changed(self, delivery, settlement):
        return Ack() if isinstance(settlement, Later) and settlement.delay > 0 else settlement


class LosesAttempts(_Settling):
    """What comes again later has forgotten its attempts."""

    def changed(self, delivery, settlement):
        return Later(settlement.delay) if isinstance(settlement, Later) else settlement


class ComesTooEarly(_Settling):
    """Delays are halved."""

    def changed(self, delivery, settlement):
        if isinstance(settlement, Later):
            return replace(settlement, delay=settlement.delay / 2)
        return settlement


class CountsReleases(MemoryConnector):
    """A release costs a delivery."""

    def _settle(self, delivery, settlement):
        message = self._claims.get(delivery.receipt)
        result = super()._settle(delivery, settlement)
        if message is not None and isinstance(settlement, Release):
            message.deliveries += 1
        return result


class CountsNoCrash(MemoryConnector):
    """A delivery is counted when it is settled, so a crash costs nothing."""

    def _refresh(self, now):
        for message in self._claims.values():
            if message.lease_until <= now:
                message.deliveries -= 1
        return super()._refresh(now)


class IgnoresTokens(MemoryConnector):
    """Whoever has ever had a delivery may settle it: claims are found by id."""

    def settle(self, settlings):
        current = {self._id(message): token for token, message in self._claims.items()}
        renamed = []
        for delivery, settlement in settlings:
            token = current.get(delivery.transaction.id, delivery.receipt)
            renamed.append((Delivery(delivery.transaction, token, delivery.deliveries), settlement))
        return super().settle(renamed)


class HandsOutMore(MemoryConnector):
    """Brings one more than was asked for."""

    def _claim(self, batch_size):
        return super()._claim(batch_size + 1 if batch_size > 1 else batch_size)


class HandsOutTwice(MemoryConnector):
    """With much in the queue, what was claimed is also left there."""

    def _claim(self, batch_size):
        found = super()._claim(batch_size)
        if len(self._fresh) > 100:
            self._fresh.append(copy.copy(self._claims[found[0].receipt]))
        return found


class ChangesTheId(MemoryConnector):
    """A redelivered transaction has another id."""

    def _claim(self, batch_size):
        found = super()._claim(batch_size)
        return [
            delivery
            if delivery.deliveries == 1
            else Delivery(
                delivery.transaction.replace(id=f"{delivery.transaction.id}-{delivery.deliveries}"),
                delivery.receipt,
                delivery.deliveries,
                delivery.lease_until,
            )
            for delivery in found
        ]


class DropsTheCorrelation(MemoryConnector):
    """The correlation does not travel."""

    def dispatch(self, transactions):
        return super().dispatch([transaction.replace(correlation=None) for transaction in transactions])


class ConfirmsTooEarly(MemoryConnector):
    """Confirms what it has not got yet: the last of several comes with the next dispatch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._pocket = []

    def dispatch(self, transactions):
        confirmed = super().dispatch([*self._pocket, *transactions])[len(self._pocket) :]
        self._pocket = []
        if len(transactions) == 5 and transactions[0].source == "":
            message = self._fresh.pop()
            self._pocket = [message.content]
        return confirmed


class ExtendsWhatIsGone(MemoryConnector):
    """Every renewal succeeds."""

    def extend(self, deliveries):
        until = self._clock() + self._lease
        return [until if answer is None else answer for answer in super().extend(deliveries)]


class NeverRenews(MemoryConnector):
    """A renewal is answered, not made."""

    def extend(self, deliveries):
        until = self._clock() + self._lease
        return [until if delivery.receipt in self._claims else None for delivery in deliveries]


class BuriesWithoutBytes(MemoryConnector):
    """The dead letter of what cannot be read does not hold its bytes."""

    def list_dead(self, query, **options):
        return [record.model_copy(update={"raw": None}) for record in super().list_dead(query, **options)]


class SpoilsNeighbours(MemoryConnector):
    """One settlement that it does not know fails the whole group."""

    def settle(self, settlings):
        if any(not isinstance(settlement, Ack | Later | Release | DeadLetter) for _, settlement in settlings):
            return [SettleResult.FAILED for _ in settlings]
        return super().settle(settlings)


class ReplaysTheCounts(MemoryConnector):
    """A replayed transaction has its old attempts."""

    def _replay(self, place):
        if place not in self._dead:
            return ReplayResult(place, Became.GONE)
        record, message = self._dead.pop(place)
        if message.readable:
            message.content = self._codec.encode(record.transaction())
        message.deliveries = 0
        self._to_back(message, self._clock())
        return ReplayResult(place, Became.REPLAYED)


class ReplacesTwice(MemoryConnector):
    """A dead letter that another caller has replaced is replaced again."""

    def replace_dead(self, place, transaction):
        self.dispatch([transaction])
        self.discard_dead([place])
        return ReplayResult(place, Became.REPLAYED)


class WakesNobody(MemoryConnector):
    """Listeners are never told of an arrival."""

    def listen(self, listener):
        return lambda: None


class KeepsWaiting(MemoryConnector):
    """Closing leaves a waiting fetch where it is."""

    def close(self):
        pass


class SaysNothingIsThere(MemoryConnector):
    """An outage looks like an empty queue; ``hide`` is called once the connector is behind its server."""

    def hide(self):
        self.fetch_transactions = _hiding(self.fetch_transactions, lambda *_: [])


class SettlesWithoutTheServer(MemoryConnector):
    """An outage looks like a settlement that was made."""

    def hide(self):
        self.settle = _hiding(self.settle, lambda settlings: [SETTLED for _ in settlings])


class WithdrawsDeadLetters(MemoryConnector):
    """A dead letter that met an outage is taken away when it is asked for again, although its message is gone."""

    def hide(self):
        settle, doubted = self.settle, set()

        def withdrawing(settlings):
            try:
                results = settle(settlings)
            except ConnectionLost:
                doubted.update(each.transaction.id for each, how in settlings if isinstance(how, DeadLetter))
                raise
            self.discard_dead([each.place for each in self.list_dead(DeadLetterQuery()) if each.id in doubted])
            given = [delivery.transaction.id for delivery, _ in settlings]
            return [LOST if name in doubted else result for name, result in zip(given, results, strict=True)]

        self.settle = withdrawing


class ConfirmsWithoutTheServer(MemoryConnector):
    """An outage looks like a dispatch that was confirmed."""

    def hide(self):
        self.dispatch = _hiding(self.dispatch, lambda sent: [Confirmation(each.id) for each in sent])


def _hiding(call, answer):
    def hidden(given, **extra):
        try:
            return call(given, **extra)
        except ConnectionLost:
            return answer(given)

    return hidden
