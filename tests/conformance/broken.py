"""Connectors that each break the contract in one way: the conformance suite must detect every one of them."""

from __future__ import annotations

import copy
from dataclasses import replace

from ergon_framework.connectors.base import Ack, Confirmation, DeadLetter, Defer, Delivery, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult, ReplayResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConnectionLostError

SETTLED, LOST = SettleResult.SETTLED, SettleResult.LOST


class _SettlementChanger(MemoryConnector):
    """Changes every settlement before it is applied."""

    def settle(self, requests):
        return super().settle([(delivery, self.change(delivery, settlement)) for delivery, settlement in requests])

    def change(self, delivery, settlement):
        return settlement


class ForgetsLater(_SettlementChanger):
    """A deferred transaction is never redelivered."""

    def change(self, delivery, settlement):
        return Ack() if isinstance(settlement, Defer) and settlement.delay > 0 else settlement


class LosesAttempts(_SettlementChanger):
    """A redelivered transaction has lost its attempts."""

    def change(self, delivery, settlement):
        return Defer(settlement.delay) if isinstance(settlement, Defer) else settlement


class ComesTooEarly(_SettlementChanger):
    """Delays are halved."""

    def change(self, delivery, settlement):
        if isinstance(settlement, Defer):
            return replace(settlement, delay=settlement.delay / 2)
        return settlement


class HalvesDispatchDelays(MemoryConnector):
    """The delays of dispatched transactions are halved."""

    def _add(self, contents, delays):
        super()._add(contents, [delay / 2 for delay in delays])


class AcceptsEveryPriority(MemoryConnector):
    """A priority is accepted although there are none."""

    def prepare(self, transaction):
        return super().prepare(transaction.replace(priority=0))


class CountsReleases(MemoryConnector):
    """A release counts as a delivery."""

    def _settle(self, delivery, settlement):
        message = self._claims.get(delivery.receipt)
        result = super()._settle(delivery, settlement)
        if message is not None and isinstance(settlement, Release):
            message.deliveries += 1
        return result


class CountsAtSettlement(MemoryConnector):
    """A delivery is counted at settlement, so a crash counts nothing."""

    def _refresh(self, now):
        for message in self._claims.values():
            if message.lease_until <= now:
                message.deliveries -= 1
        return super()._refresh(now)


class IgnoresTokens(MemoryConnector):
    """Every former holder of a delivery may settle it: claims are looked up by id."""

    def settle(self, requests):
        tokens_by_id = {self._read_id(message): token for token, message in self._claims.items()}
        forged = []
        for delivery, settlement in requests:
            token = tokens_by_id.get(delivery.transaction.id, delivery.receipt)
            forged.append((Delivery(delivery.transaction, token, delivery.deliveries), settlement))
        return super().settle(forged)


class ReturnsTooMany(MemoryConnector):
    """Returns one more delivery than requested."""

    def _claim(self, batch_size):
        return super()._claim(batch_size + 1 if batch_size > 1 else batch_size)


class ClaimsTwice(MemoryConnector):
    """With many transactions in the queue, claimed ones also stay in it."""

    def _claim(self, batch_size):
        deliveries = super()._claim(batch_size)
        if len(self._unclaimed) > 100:
            self._unclaimed.append(copy.copy(self._claims[deliveries[0].receipt]))
        return deliveries


class ChangesTheId(MemoryConnector):
    """A redelivered transaction has another id."""

    def _claim(self, batch_size):
        deliveries = super()._claim(batch_size)
        return [
            delivery
            if delivery.deliveries == 1
            else Delivery(
                delivery.transaction.replace(id=f"{delivery.transaction.id}-{delivery.deliveries}"),
                delivery.receipt,
                delivery.deliveries,
                delivery.lease_until,
            )
            for delivery in deliveries
        ]


class DropsTheCorrelation(MemoryConnector):
    """The correlation id is lost."""

    def dispatch(self, transactions):
        return super().dispatch([transaction.replace(correlation=None) for transaction in transactions])


class ConfirmsTooEarly(MemoryConnector):
    """Confirms early: the last of several transactions arrives with the next dispatch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._withheld = []

    def dispatch(self, transactions):
        confirmations = super().dispatch([*self._withheld, *transactions])[len(self._withheld) :]
        self._withheld = []
        if len(transactions) == 5 and transactions[0].source == "":
            message = self._unclaimed.pop()
            self._withheld = [message.content]
        return confirmations


class RenewsLostClaims(MemoryConnector):
    """Every renewal succeeds."""

    def extend(self, deliveries):
        lease_until = self._clock() + self._lease
        return [lease_until if answer is None else answer for answer in super().extend(deliveries)]


class NeverRenews(MemoryConnector):
    """A renewal is confirmed, but not made."""

    def extend(self, deliveries):
        lease_until = self._clock() + self._lease
        return [lease_until if delivery.receipt in self._claims else None for delivery in deliveries]


class DropsDeadLetterBytes(MemoryConnector):
    """The dead letter of an undecodable message does not have its bytes."""

    def list_dead(self, query, **options):
        return [record.model_copy(update={"raw": None}) for record in super().list_dead(query, **options)]


class FailsTheWholeGroup(MemoryConnector):
    """One unknown settlement fails the whole group."""

    def settle(self, requests):
        if any(not isinstance(settlement, Ack | Defer | Release | DeadLetter) for _, settlement in requests):
            return [SettleResult.FAILED for _ in requests]
        return super().settle(requests)


class ReplaysTheCounts(MemoryConnector):
    """A replayed transaction has its old attempts."""

    def _replay(self, handle):
        if handle not in self._dead:
            return ReplayResult(handle, DeadLetterResult.GONE)
        record, message = self._dead.pop(handle)
        if message.readable:
            message.content = self._codec.encode(record.transaction())
        message.deliveries = 0
        self._move_to_back(message, self._clock())
        return ReplayResult(handle, DeadLetterResult.REPLAYED)


class ReplacesTwice(MemoryConnector):
    """A dead letter that another caller has replaced is replaced again."""

    def replace_dead(self, handle, transaction):
        self.dispatch([transaction])
        self.discard_dead([handle])
        return ReplayResult(handle, DeadLetterResult.REPLAYED)


class NeverNotifiesListeners(MemoryConnector):
    """Listeners are never notified of an arrival."""

    def listen(self, listener):
        return lambda: None


class ClosesWithoutWaking(MemoryConnector):
    """Closing does not wake a waiting fetch."""

    def close(self):
        pass


class LooksEmptyInAnOutage(MemoryConnector):
    """An outage looks like an empty queue; ``hide`` is called once the connector is behind its server."""

    def hide(self):
        self.fetch_transactions = _hide_outage(self.fetch_transactions, lambda *_: [])


class SettlesInAnOutage(MemoryConnector):
    """An outage looks like a successful settlement."""

    def hide(self):
        self.settle = _hide_outage(self.settle, lambda settlings: [SETTLED for _ in settlings])


class WithdrawsDeadLetters(MemoryConnector):
    """A dead letter that met an outage is removed when its settlement is retried, although its message is gone."""

    def hide(self):
        settle, unconfirmed_ids = self.settle, set()

        def settle_and_withdraw(settlings):
            try:
                results = settle(settlings)
            except ConnectionLostError:
                unconfirmed_ids.update(each.transaction.id for each, how in settlings if isinstance(how, DeadLetter))
                raise
            self.discard_dead([each.handle for each in self.list_dead(DeadLetterQuery()) if each.id in unconfirmed_ids])
            ids = [delivery.transaction.id for delivery, _ in settlings]
            return [LOST if name in unconfirmed_ids else result for name, result in zip(ids, results, strict=True)]

        self.settle = settle_and_withdraw


class ConfirmsInAnOutage(MemoryConnector):
    """An outage looks like a confirmed dispatch."""

    def hide(self):
        self.dispatch = _hide_outage(
            self.dispatch, lambda transactions: [Confirmation(each.id) for each in transactions]
        )


def _hide_outage(call, fallback):
    def call_or_fall_back(items, **options):
        try:
            return call(items, **options)
        except ConnectionLostError:
            return fallback(items)

    return call_or_fall_back
