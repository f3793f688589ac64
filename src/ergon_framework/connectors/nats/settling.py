"""Settling: what a group of claims becomes, in as few round trips as it takes.

Acks go to one subject of one consumer over one connection, and the server works them off in that
order: its answer to the last of a group is the answer to all of them.
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
    Delivery,
    Later,
    Release,
    SettleResult,
    Settling,
)
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.nats import api, burials
from ergon_framework.connectors.nats.claim import Claim
from ergon_framework.connectors.nats.line import Line, Request
from ergon_framework.connectors.nats.naming import Names
from ergon_framework.connectors.nats.note import DUE, Note
from ergon_framework.errors import ConnectionLost

_SETTLED, _LOST, _FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED
_ACK: Final = b"+ACK"
_NAK: Final = b"-NAK"
_RENEW: Final = b"+WPI"


class _Plan:
    """What is to be done with one claim, and what became of it."""

    __slots__ = ("before", "claim", "former", "index", "note", "seq", "word")

    def __init__(self, index: int, claim: Claim, word: bytes) -> None:
        self.index = index
        self.claim = claim
        #: What is said to the consumer.
        self.word = word
        #: What has to be stored before.
        self.before: Request | None = None
        self.note: Note | None = None
        #: Where it was stored.
        self.seq = 0
        #: Where somebody before had stored the same.
        self.former = 0

    @property
    def buries(self) -> bool:
        """Whether it ends as a dead letter."""
        return self.before is not None and self.word is _ACK


class Settler:
    """Settles for one queue."""

    def __init__(
        self,
        queue: str,
        names: Names,
        *,
        codec: Codec,
        held: set[Claim],
        owner: object,
        line: Callable[[], Awaitable[Line]],
        erase: bool | None,
    ) -> None:
        self._queue = queue
        self._names = names
        self._codec = codec
        self._held = held
        self._owner = owner
        self._line = line
        self._erase = erase

    # -- settle -------------------------------------------------------------------------------------

    async def settle(self, settlings: Sequence[Settling], line: Line | None = None) -> list[SettleResult]:
        """One result each."""
        acked = self._all_acked(settlings)
        if acked:
            line = line or await self._line()
            # Connecting may have taken a while, and then what has run out is sorted out below.
            if min([claim.until for claim in acked]) > time.monotonic():
                await self._say(line, [(claim, _ACK) for claim in acked])
                self._let_go(acked)
                return [_SETTLED] * len(acked)
        results = [_FAILED] * len(settlings)
        plans = self._planned(settlings, results)
        if not plans:
            return results
        line = line or await self._line()
        await self._store(line, [plan for plan in plans if plan.before is not None], results)
        now = time.monotonic()
        said = []
        for plan in plans:
            if plan.before is not None and not plan.seq:
                continue
            if plan.claim.until <= now:
                self._let_go([plan.claim])
                results[plan.index] = _LOST
            else:
                said.append(plan)
        if said:
            buried = {plan.claim for plan in said if plan.buries}
            gone = await self._say(line, [(plan.claim, plan.word) for plan in said], buried)
            self._let_go([plan.claim for plan in said])
            now = time.monotonic()
            for plan in said:
                results[plan.index] = _result(plan, gone, late=plan.claim.until <= now)
        await self._tidy(line, plans, results)
        return results

    def _all_acked(self, settlings: Sequence[Settling]) -> list[Claim] | None:
        """The claims, where each is in hand and there once, and nothing but an ack is asked for, as nearly always."""
        now, owner, claims = time.monotonic(), self._owner, list[Claim]()
        for delivery, how in settlings:
            claim = delivery.receipt
            if type(how) is not Ack or type(claim) is not Claim:
                return None
            if claim.owner is not owner or claim.until <= now or claim.note_seq:
                return None
            claims.append(claim)
        return claims if len(set(claims)) == len(claims) else None

    def _planned(self, settlings: Sequence[Settling], results: list[SettleResult]) -> list[_Plan]:
        plans: list[_Plan] = []
        now, seen = time.monotonic(), set[Claim]()
        for index, (delivery, how) in enumerate(settlings):
            claim = delivery.receipt
            if not isinstance(claim, Claim) or claim.owner is not self._owner or claim in seen or claim.until <= now:
                results[index] = _LOST
                continue
            kind = type(how)
            if kind is Ack:
                plans.append(_Plan(index, claim, _ACK))
            else:
                plan = self._plan(index, delivery, claim, how)
                if plan is None:
                    continue
                plans.append(plan)
            seen.add(claim)
        return plans

    def _plan(self, index: int, delivery: Delivery, claim: Claim, how: object) -> _Plan | None:
        """None for what cannot be done."""
        try:
            match how:
                case Ack():
                    return _Plan(index, claim, _ACK)
                case Release():
                    return self._put_back(index, delivery, claim, None)
                case Later():
                    return self._put_back(index, delivery, claim, how)
                case DeadLetter():
                    plan = _Plan(index, claim, _ACK)
                    plan.before = burials.burial(self._names, self._queue, delivery, claim, how, codec=self._codec)
                    return plan
                case _:
                    return None
        except Exception:  # noqa: BLE001 - the boundary of one item, which must not spoil its neighbours
            return None

    def _put_back(self, index: int, delivery: Delivery, claim: Claim, later: Later | None) -> _Plan:
        known, delay = claim.note, 0.0 if later is None else later.delay
        due = time.time() + delay if delay > 0 else 0.0
        note = Note(claim.deliveries - 1, claim.delivered, due)
        if later is not None and claim.readable:
            note = note.after(later, delivery, self._codec)
        elif known is not None:
            note = replace(
                note, attempts=known.attempts, history=known.history, deferral=known.deferral, errors=known.errors
            )
        plan = _Plan(index, claim, _nak(delay))
        plan.note = note
        headers = {DUE: f"{due:.3f}"} if due else None
        plan.before = Request(f"{self._names.note_subject}.{claim.key}", note.written(), headers)
        return plan

    async def _store(self, line: Line, plans: list[_Plan], results: list[SettleResult]) -> None:
        """Store what must be there before the message may go; what cannot be stored keeps its claim."""
        plans = [plan for plan in plans if self._fits(plan, line.max_payload)]
        if not plans:
            return
        answers = await line.ask_all([plan.before for plan in plans if plan.before is not None])
        if any(answer is None for answer in answers):
            raise ConnectionLost("JetStream did not confirm what a settlement has to keep")
        again: list[_Plan] = []
        for plan, answer in zip(plans, answers, strict=True):
            try:
                plan.seq = int(api.read(answer)["seq"])
            except api.ApiError as error:
                former = burials.there_already(error)
                if plan.note is None and former and not plan.former:
                    # Its writer may take it away again, if it lives and finds its claim lost: we need one of our own.
                    plan.former, plan.before = former, burials.beside(plan.before)
                    again.append(plan)
                else:
                    burials.refused(self._queue, str(error))
                    results[plan.index] = _FAILED
                continue
            if plan.note is not None:
                plan.claim.note, plan.claim.note_seq = plan.note, plan.seq
        if again:
            await self._store(line, again, results)

    def _fits(self, plan: _Plan, most: int) -> bool:
        """Whether the server takes it: one that is too large would cost everybody the line."""
        if plan.before is None:
            return False
        fitted = burials.fitted(plan.before, most)
        if fitted is None:
            burials.refused(self._queue, f"{plan.before.size} bytes are more than max_payload, {most}; raise it")
            return False
        plan.before = fitted
        return True

    async def _say(
        self, line: Line, said: Sequence[tuple[Claim, bytes]], buried: AbstractSet[Claim] = frozenset()
    ) -> set[Claim]:
        """Say it, and wait until the server has heard it; of those that are deleted, which were gone already.

        *buried* are deleted each: who buries has to know whether it was himself that ended the message.
        """
        gone: set[Claim] = set()
        acked = [claim for claim, word in said if word is _ACK]
        if acked and (line.forgets if self._erase is None else self._erase):
            gone = await self._erased(line, acked)
        elif acked:
            last = {acked[-1], *buried}
            heard = await self._said(line, [each for each in said if each[0] not in last])
            # A server that stops closes its stores first, and for some milliseconds answers acks that it no longer
            # keeps. A deletion tells: one that is made after the others were answered says that they were kept.
            # One that was killed has forgotten what it had just delivered, and does not answer acks of that: deleted,
            # they are settled all the same, and would come again otherwise.
            gone = await self._erased(line, [claim for claim in acked if claim in last or not heard], no_erase=True)
            said = [(claim, _ACK) for claim in acked if claim in last]
        if not await self._said(line, said) and not acked:
            raise ConnectionLost("JetStream did not answer a settlement")
        return gone

    async def _said(self, line: Line, said: Sequence[tuple[Claim, bytes]]) -> bool:
        """Whether the server, which is there, has answered the last of them."""
        if not said:
            return True
        waiting = line.round(1)
        words = [(claim.ack, "", word) for claim, word in said]
        words[-1] = words[-1][0], line.reply(waiting), words[-1][2]
        await line.send_all(words)
        return await line.answered(waiting)

    async def _erased(self, line: Line, claims: Sequence[Claim], *, no_erase: bool = False) -> set[Claim]:
        """Delete the messages, and say which were gone already.

        Before they are acked: what is acked is only marked, and can no longer be erased.
        """
        what = f"STREAM.MSG.DELETE.{self._names.work}"
        calls = [api.request(what, seq=claim.seq, no_erase=no_erase) for claim in claims]
        gone: set[Claim] = set()
        for claim, answer in zip(claims, await line.ask_all(calls), strict=True):
            try:
                api.read(answer)
            except api.ApiError as error:
                if not error.gone:
                    raise ConnectionLost(f"JetStream could not delete what was settled: {error}") from error
                gone.add(claim)
        return gone

    def _let_go(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            claim.owner = None
        self._held.difference_update(claims)

    async def _tidy(self, line: Line, plans: Sequence[_Plan], results: Sequence[SettleResult]) -> None:
        """Take away notes of what is settled for good and what others buried of it; our own burial where we lost it."""
        names, calls = self._names, []
        for plan in plans:
            done = results[plan.index]
            if plan.word is _ACK and done is _SETTLED and plan.claim.note_seq:
                calls.append(
                    api.request(f"STREAM.MSG.DELETE.{names.notes}", seq=plan.claim.note_seq, no_erase=not line.forgets)
                )
            if plan.word is _ACK and done is _SETTLED and plan.former:
                calls.append(api.request(f"STREAM.MSG.DELETE.{names.dead}", seq=plan.former, no_erase=not line.forgets))
            elif plan.word is _ACK and done is _LOST and plan.seq:
                calls.append(api.request(f"STREAM.MSG.DELETE.{names.dead}", seq=plan.seq, no_erase=not line.forgets))
        if calls:
            try:
                await line.ask_all(calls)
            except ConnectionLost:
                burials.untidy(self._queue, len(calls))

    # -- renew --------------------------------------------------------------------------------------

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> list[float | None]:
        """Renew: the new end of each claim, None for one that is gone."""
        now = time.monotonic()
        claims: dict[Claim, float] = {}
        for delivery in deliveries:
            claim = delivery.receipt
            if isinstance(claim, Claim) and claim.owner is self._owner and claim.until > now:
                claims[claim] = claim.until
        if claims:
            line = await self._line()
            # Taken again: connecting may have taken a while.
            now = time.monotonic()
            await self._said(line, [(claim, _RENEW) for claim in claims])
            heard = time.monotonic()
            for claim, ended in claims.items():
                if ended > heard and claim.owner is not None:
                    claim.until = max(claim.until, now + lease)
                    claims[claim] = claim.until
                else:
                    # The server may have heard it too late, and renewed what another has by now.
                    self._let_go([claim])
                    claims[claim] = 0.0
        return [claims.get(delivery.receipt) or None if _hashable(delivery) else None for delivery in deliveries]


def _result(plan: _Plan, gone: AbstractSet[Claim], *, late: bool) -> SettleResult:
    """What became of a claim of which the server has heard.

    Heard before the lease was over, nobody else can have had it in between. After that an ack has ended the message all
    the same. Of a dead letter that would be the end too if it were withdrawn: so it is only where another was first.
    """
    if not late:
        return _SETTLED
    if plan.word is not _ACK or (plan.buries and plan.claim in gone):
        return _LOST
    return _SETTLED


def _hashable(delivery: Delivery) -> bool:
    return isinstance(delivery.receipt, Claim)


def _nak(delay: float) -> bytes:
    return _NAK + b" " + json.dumps({"delay": api.nanos(delay)}).encode() if delay > 0 else _NAK
