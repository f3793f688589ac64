"""Settle a group of claims in as few round trips as possible.

A claim is a worker's right to settle one delivery (``nats.claims``). To settle is to ack, release, defer or dead-letter
the message. An ack is a message to the subject that JetStream gave with the delivery.

Acks of one consumer go to one subject over one connection, and the server handles them in order: the response to the
last ack of a group confirms all of them.

A message state (``nats.claims``) holds what a redelivery must bring and the message itself cannot: attempts, history
and uncounted deliveries. ``connection.loses_deletes`` is set for servers before 2.10: killed, these restore messages
that were acked or deleted without being erased.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Defer,
    Delivery,
    Release,
    SettlementRequest,
    SettleResult,
)
from ergon_framework.connectors.codec import Codec, read_not_before
from ergon_framework.connectors.nats import api, dead_letters
from ergon_framework.connectors.nats.claims import DUE, EARLY, MessageState, NatsClaim
from ergon_framework.connectors.nats.connection import Connection, Request
from ergon_framework.connectors.nats.streams import StreamNames
from ergon_framework.errors import ConnectionLostError

_SETTLED, _LOST, _FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED
#: Ack payloads of JetStream: the message is done, is to be redelivered, or is in progress, which renews the lease.
_ACK: Final = b"+ACK"
_NAK: Final = b"-NAK"
_RENEW: Final = b"+WPI"


class _SettlePlan:
    """The settlement planned for one claim, and its result."""

    __slots__ = ("ack_payload", "claim", "earlier_seq", "index", "seq", "state", "store_request")

    def __init__(self, index: int, claim: NatsClaim, ack_payload: bytes) -> None:
        self.index = index
        self.claim = claim
        #: What is sent to the ack subject of the claim.
        self.ack_payload = ack_payload
        #: Publishes what has to be stored before that: a message state or a dead letter; None for an ack.
        self.store_request: Request | None = None
        #: The message state that is stored; None for an ack or a dead letter.
        self.state: MessageState | None = None
        #: The sequence number of the stored state or dead letter; 0 until it is stored.
        self.seq = 0
        #: The sequence number of a dead letter of this message that another worker stored earlier; 0 if there is none.
        self.earlier_seq = 0

    @property
    def is_dead_letter(self) -> bool:
        """Whether the settlement is a dead letter."""
        return self.store_request is not None and self.ack_payload is _ACK


class NatsSettler:
    """Settles the claims of one queue.

    *held* are the claims that were fetched and not settled, by the queue *owner*; settling removes them from the
    queue's set. With *erase*, acked messages are also erased; None does so for servers that may restore them after a
    crash.
    """

    def __init__(
        self,
        queue: str,
        names: StreamNames,
        *,
        codec: Codec,
        held: set[NatsClaim],
        owner: object,
        get_connection: Callable[[], Awaitable[Connection]],
        erase: bool | None,
    ) -> None:
        self._queue = queue
        self._names = names
        self._codec = codec
        self._held = held
        self._owner = owner
        self._get_connection = get_connection
        self._erase = erase

    # -- settle -------------------------------------------------------------------------------------

    async def settle(
        self, requests: Sequence[SettlementRequest], connection: Connection | None = None
    ) -> list[SettleResult]:
        """Settle claims and return one result each."""
        claims = self._match_all_acks(requests)
        if claims:
            connection = connection or await self._get_connection()
            # Connecting may have taken a while; expired claims are handled individually below.
            if min([claim.until for claim in claims]) > time.monotonic():
                await self._send_acks(connection, [(claim, _ACK) for claim in claims])
                self._drop_claims(claims)
                return [_SETTLED] * len(claims)
        results = [_FAILED] * len(requests)
        plans = self._plan_all(requests, results)
        if not plans:
            return results
        connection = connection or await self._get_connection()
        await self._store(connection, [plan for plan in plans if plan.store_request is not None], results)
        now = time.monotonic()
        sendable = []
        for plan in plans:
            if plan.store_request is not None and not plan.seq:
                continue  # its record could not be stored, so the message must not be acked
            if plan.claim.until <= now:
                self._drop_claims([plan.claim])
                results[plan.index] = _LOST
            else:
                sendable.append(plan)
        if sendable:
            dead_lettered = {plan.claim for plan in sendable if plan.is_dead_letter}
            already_deleted = await self._send_acks(
                connection, [(plan.claim, plan.ack_payload) for plan in sendable], dead_lettered
            )
            self._drop_claims([plan.claim for plan in sendable])
            now = time.monotonic()
            for plan in sendable:
                results[plan.index] = _to_result(plan, already_deleted, late=plan.claim.until <= now)
        await self._clean_up(connection, plans, results)
        return results

    def _match_all_acks(self, requests: Sequence[SettlementRequest]) -> list[NatsClaim] | None:
        """Return the claims in the common case, otherwise None.

        That is: all settlements are acks, all claims are valid and distinct, and none has a stored state to delete.
        """
        now, owner, claims = time.monotonic(), self._owner, list[NatsClaim]()
        for delivery, settlement in requests:
            claim = delivery.receipt
            if type(settlement) is not Ack or type(claim) is not NatsClaim:
                return None
            if claim.owner is not owner or claim.until <= now or claim.state_seq:
                return None
            claims.append(claim)
        return claims if len(set(claims)) == len(claims) else None

    def _plan_all(self, requests: Sequence[SettlementRequest], results: list[SettleResult]) -> list[_SettlePlan]:
        """Return the plans. A request without one keeps its result FAILED, or gets LOST if its claim is not valid."""
        plans: list[_SettlePlan] = []
        now, seen = time.monotonic(), set[NatsClaim]()
        for index, (delivery, settlement) in enumerate(requests):
            claim = delivery.receipt
            if (
                not isinstance(claim, NatsClaim)
                or claim.owner is not self._owner
                or claim in seen
                or claim.until <= now
            ):
                results[index] = _LOST
                continue
            settlement_type = type(settlement)
            if settlement_type is Ack:
                plans.append(_SettlePlan(index, claim, _ACK))
            else:
                plan = self._plan(index, delivery, claim, settlement)
                if plan is None:
                    continue
                plans.append(plan)
            seen.add(claim)
        return plans

    def _plan(self, index: int, delivery: Delivery, claim: NatsClaim, settlement: object) -> _SettlePlan | None:
        """Return the plan of one settlement; None if it cannot be executed."""
        try:
            match settlement:
                case Ack():
                    return _SettlePlan(index, claim, _ACK)
                case Release():
                    return self._plan_redelivery(index, delivery, claim, None)
                case Defer():
                    return self._plan_redelivery(index, delivery, claim, settlement)
                case DeadLetter():
                    plan = _SettlePlan(index, claim, _ACK)
                    plan.store_request = dead_letters.dead_letter_request(
                        self._names, self._queue, delivery, claim, settlement, codec=self._codec
                    )
                    return plan
                case _:
                    return None
        except Exception:  # noqa: BLE001 - the boundary of one item: its failure must not affect the others
            return None

    def _plan_redelivery(self, index: int, delivery: Delivery, claim: NatsClaim, defer: Defer | None) -> _SettlePlan:
        """Plan a deferral, or a release if *defer* is None: the state to store, and the nak with its delay."""
        previous, delay = claim.state, 0.0 if defer is None else defer.delay
        due = time.time() + delay if delay > 0 else 0.0
        state = MessageState(claim.counted_deliveries - 1, claim.server_delivery_count, due)
        if defer is not None and claim.readable and not claim.keep_state:
            state = state.with_progress(defer, delivery, self._codec)
        elif previous is not None:
            state = replace(
                state,
                attempts=previous.attempts,
                history=previous.history,
                deferral=previous.deferral,
                errors=previous.errors,
            )
        plan = _SettlePlan(index, claim, _format_nak(delay))
        plan.state = state
        headers = {DUE: f"{due:.3f}"} if due else None
        if headers is not None and (read_not_before(claim.headers) or 0.0) > time.time():
            headers[EARLY] = "1"
        plan.store_request = Request(f"{self._names.state_subject}.{claim.key}", state.to_bytes(), headers)
        return plan

    async def _store(self, connection: Connection, plans: list[_SettlePlan], results: list[SettleResult]) -> None:
        """Store what must exist before the message is acked; a claim whose request cannot be stored is kept."""
        plans = [plan for plan in plans if self._can_store(plan, connection.max_payload)]
        if not plans:
            return
        answers = await connection.request_many(
            [plan.store_request for plan in plans if plan.store_request is not None]
        )
        if any(answer is None for answer in answers):
            raise ConnectionLostError("JetStream did not confirm the record of a settlement")
        retries: list[_SettlePlan] = []
        for plan, answer in zip(plans, answers, strict=True):
            try:
                plan.seq = int(api.parse_response(answer)["seq"])
            except api.ApiError as error:
                earlier_seq = dead_letters.existing_dead_letter(error)
                if plan.state is None and earlier_seq and not plan.earlier_seq:
                    # The worker that stored it deletes it again if it has lost its claim: store a separate copy.
                    plan.earlier_seq, plan.store_request = earlier_seq, dead_letters.without_dedup(plan.store_request)
                    retries.append(plan)
                else:
                    dead_letters.log_rejected(self._queue, str(error))
                    results[plan.index] = _FAILED
                continue
            if plan.state is not None:
                plan.claim.state, plan.claim.state_seq = plan.state, plan.seq
        if retries:
            await self._store(connection, retries, results)

    def _can_store(self, plan: _SettlePlan, max_bytes: int) -> bool:
        """Return whether the server accepts the request: it closes the connection for one that is too large."""
        if plan.store_request is None:
            return False
        shortened = dead_letters.truncate_to_limit(plan.store_request, max_bytes)
        if shortened is None:
            dead_letters.log_rejected(
                self._queue, f"{plan.store_request.size} bytes are over max_payload, {max_bytes}; raise it"
            )
            return False
        plan.store_request = shortened
        return True

    async def _send_acks(
        self,
        connection: Connection,
        acks: Sequence[tuple[NatsClaim, bytes]],
        dead_lettered: AbstractSet[NatsClaim] = frozenset(),
    ) -> set[NatsClaim]:
        """Send ack payloads and wait for the server's response; return the claims whose deletion found no message.

        The messages of *dead_lettered* are deleted individually, because a dead letter counts only if this worker
        ended the message.
        """
        already_deleted: set[NatsClaim] = set()
        acked = [claim for claim, payload in acks if payload is _ACK]
        if acked and (connection.loses_deletes if self._erase is None else self._erase):
            already_deleted = await self._delete_messages(connection, acked)
        elif acked:
            last = {acked[-1], *dead_lettered}
            answered = await self._publish_acks(connection, [each for each in acks if each[0] not in last])
            # A stopping server closes its stores first, and for some milliseconds answers acks that it does not
            # persist. A deletion that succeeds after the other acks were answered shows that they were persisted.
            # A killed server has lost its latest deliveries and does not answer their acks: deleting their messages
            # settles them, and they would be redelivered otherwise.
            already_deleted = await self._delete_messages(
                connection, [claim for claim in acked if claim in last or not answered], no_erase=True
            )
            acks = [(claim, _ACK) for claim in acked if claim in last]
        if not await self._publish_acks(connection, acks) and not acked:
            raise ConnectionLostError("JetStream did not answer a settlement")
        return already_deleted

    async def _publish_acks(self, connection: Connection, acks: Sequence[tuple[NatsClaim, bytes]]) -> bool:
        """Send ack payloads; return whether the server answered the last one (it is reachable if this returns)."""
        if not acks:
            return True
        batch = connection.new_batch(1)
        messages = [(claim.ack_subject, "", payload) for claim, payload in acks]
        messages[-1] = messages[-1][0], connection.new_reply_subject(batch), messages[-1][2]
        await connection.send_all(messages)
        return await connection.wait_for_batch(batch)

    async def _delete_messages(
        self, connection: Connection, claims: Sequence[NatsClaim], *, no_erase: bool = False
    ) -> set[NatsClaim]:
        """Delete the messages, and return the claims whose message was already deleted.

        This comes before the ack: an acked message is only marked, and can no longer be erased.
        """
        endpoint = f"STREAM.MSG.DELETE.{self._names.work}"
        requests = [api.request(endpoint, seq=claim.seq, no_erase=no_erase) for claim in claims]
        already_deleted: set[NatsClaim] = set()
        for claim, answer in zip(claims, await connection.request_many(requests), strict=True):
            try:
                api.parse_response(answer)
            except api.ApiError as error:
                if not error.is_not_found:
                    raise ConnectionLostError(f"JetStream could not delete a settled message: {error}") from error
                already_deleted.add(claim)
        return already_deleted

    def _drop_claims(self, claims: Sequence[NatsClaim]) -> None:
        for claim in claims:
            claim.owner = None
        self._held.difference_update(claims)

    async def _clean_up(
        self, connection: Connection, plans: Sequence[_SettlePlan], results: Sequence[SettleResult]
    ) -> None:
        """Delete what is obsolete: states and earlier dead letters of settled messages, dead letters of lost claims."""
        names, requests = self._names, []
        for plan in plans:
            result = results[plan.index]
            if plan.ack_payload is _ACK and result is _SETTLED and plan.claim.state_seq:
                requests.append(
                    api.request(
                        f"STREAM.MSG.DELETE.{names.states}",
                        seq=plan.claim.state_seq,
                        no_erase=not connection.loses_deletes,
                    )
                )
            if plan.ack_payload is _ACK and result is _SETTLED and plan.earlier_seq:
                requests.append(
                    api.request(
                        f"STREAM.MSG.DELETE.{names.dead}", seq=plan.earlier_seq, no_erase=not connection.loses_deletes
                    )
                )
            elif plan.ack_payload is _ACK and result is _LOST and plan.seq:
                requests.append(
                    api.request(f"STREAM.MSG.DELETE.{names.dead}", seq=plan.seq, no_erase=not connection.loses_deletes)
                )
        if requests:
            try:
                await connection.request_many(requests)
            except ConnectionLostError:
                dead_letters.log_leftover(self._queue, len(requests))

    # -- renew --------------------------------------------------------------------------------------

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> list[float | None]:
        """Renew claims; return the new end of each, None for a claim that is lost."""
        now = time.monotonic()
        claims: dict[NatsClaim, float] = {}
        for delivery in deliveries:
            claim = delivery.receipt
            if isinstance(claim, NatsClaim) and claim.owner is self._owner and claim.until > now:
                claims[claim] = claim.until
        if claims:
            connection = await self._get_connection()
            # Read again: connecting may have taken a while.
            now = time.monotonic()
            await self._publish_acks(connection, [(claim, _RENEW) for claim in claims])
            answered_at = time.monotonic()
            for claim, lease_end in claims.items():
                if lease_end > answered_at and claim.owner is not None:
                    claim.until = max(claim.until, now + lease)
                    claims[claim] = claim.until
                else:
                    # The server may have received the renewal too late, and renewed the claim of another worker.
                    self._drop_claims([claim])
                    claims[claim] = 0.0
        return [claims.get(delivery.receipt) or None if _has_claim(delivery) else None for delivery in deliveries]


def _to_result(plan: _SettlePlan, already_deleted: AbstractSet[NatsClaim], *, late: bool) -> SettleResult:
    """Return the result for a claim whose ack the server has received.

    If the server received it before the lease ended, no other worker can have claimed the message in between. An ack
    that was late has still ended the message. A dead letter counts as lost, and is then deleted, only if another worker
    ended the message first; otherwise the message would be lost with it.
    """
    if not late:
        return _SETTLED
    if plan.ack_payload is not _ACK or (plan.is_dead_letter and plan.claim in already_deleted):
        return _LOST
    return _SETTLED


def _has_claim(delivery: Delivery) -> bool:
    return isinstance(delivery.receipt, NatsClaim)


def _format_nak(delay: float) -> bytes:
    return _NAK + b" " + json.dumps({"delay": api.to_nanoseconds(delay)}).encode() if delay > 0 else _NAK
