"""Calling: the one script behind ``execute``, for threads and for asyncio. It decides and never acts.

Per attempt: admission by the books (key, quota, breaker), the call within what is left of the
budget, its canonical error, the conclusion in the books, and then the retry policy's decision. The
clock is asked before each wait and before each call. Nobody above is to try again what was given up
on here, so the error that comes out of it carries its verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ergon_framework.engine.effects import NEVER, Call, Script, Visit, sleep
from ergon_framework.engine.outcome import Answer, Err, Expired, NotBegunError, Ok, Stopped
from ergon_framework.errors import ErgonError
from ergon_framework.providers.books import Account, Admission, Admitted, Asked, Busy, Concluded, Replayed
from ergon_framework.providers.circuit_breaker import BreakerState
from ergon_framework.providers.errors import (
    ProviderCircuitOpenError,
    ProviderError,
    ProviderInternalError,
    ProviderQuotaExceededError,
    ProviderResponseFormatError,
    ProviderTimeoutError,
)
from ergon_framework.providers.execution import (
    AttemptRow,
    ProviderExecutionContext,
    ProviderExecutionResult,
    Reply,
    Request,
)
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.idempotency import CONFLICT, Kept, conflict, doubtful, effect
from ergon_framework.providers.mapping import canonical
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import Again, Decision, GiveUp, Tried, Why
from ergon_framework.scope import Scope

if TYPE_CHECKING:
    from ergon_framework.engine.senses import Senses

#: The share of the budget, and the most seconds, that are left to the books after the last call: wall
#: time stays within the budget, and an engine above sees our error before it sees its own timeout.
_SHARE: Final = 0.05
_MOST: Final = 0.05
#: Seconds beyond the budget after which a silent owner of a key is taken for dead.
_GRACE: Final = 5.0
#: How soon, and then how seldom, a key that somebody else holds is asked for again.
_SOON: Final = 0.01
_SELDOM: Final = 0.25
#: The codes of a call that was not made: another one has its key, or the books could not be read.
IN_FLIGHT: Final = "in_flight"
BOOKS_UNAVAILABLE: Final = "books_unavailable"


class Watch(Protocol):
    """Somebody who wants to see a call; none of it may raise."""

    def attempt(self, number: int) -> Context | None:
        """An attempt begins; the context its body is to run in, if it matters."""

    def attempted(self, row: AttemptRow, error: ProviderError | None) -> None:
        """It is over, or was refused."""

    def breaker(self, state: BreakerState) -> None:
        """The breaker has entered *state*."""

    def books_failed(self, error: BaseException) -> None:
        """What became of an attempt could not be written down."""

    def succeeded(self, result: ProviderExecutionResult) -> None:
        """The call is over."""

    def failed(self, error: BaseException) -> None:
        """The call is over."""


@dataclass(slots=True, kw_only=True)
class Means:
    """All that a call is made with; the callables are awaitable or not, as whoever performs the script needs them."""

    policy: ProviderPolicy
    admit: Callable[[Asked], Any]
    conclude: Callable[[Admitted, Concluded], Any]
    record: Callable[[AttemptRow], None]
    body: Callable[[ProviderExecutionContext], Any]
    senses: Senses
    watch: Watch
    #: Whether a visit to the books may have to wait, and whether it then ends by itself in time.
    waits: bool = False
    punctual: bool = False
    outer: Scope | None = None


def execution(request: Request, means: Means) -> Script[Ok | Err]:
    """Make the call of *request*: Ok with a ProviderExecutionResult, or Err with what is to be raised."""
    return _Execution(request, means).run()


class _Execution:
    """One call on its way."""

    __slots__ = ("_account", "_began", "_budget", "_doubt", "_last_call", "_means", "_request", "_tried", "_until")

    def __init__(self, request: Request, means: Means) -> None:
        self._request = request
        self._means = means
        policy = means.policy
        tenant = request.tenant_id if policy.scope == "tenant" else None
        self._account = Account(tenant, request.provider_name, request.capability)
        self._budget = _budget(request.context.timeout, policy.timeout, means.outer)
        self._began = means.senses.clock()
        self._until = self._began + self._budget
        self._last_call = self._until - min(_MOST, self._budget * _SHARE)
        self._tried: list[Tried] = []
        self._doubt = False

    # -- the script -------------------------------------------------------------------------------

    def run(self) -> Script[Ok | Err]:
        last: Admitted | None = None
        while True:
            admission = yield from self._admission()
            if isinstance(admission, Replayed):
                return Ok(self._result(kept=admission.kept, replayed=True))
            if not isinstance(admission, Admitted):
                yield from self._left_off(last)
                return self._ended(admission)
            last = admission
            ended = yield from self._attempt(last)
            if ended is not None:
                return ended
            waited = yield from sleep(self._means.senses.clock() + (self._tried[-1].delay or 0.0))
            if isinstance(waited, Stopped):
                yield from self._left_off(last)
                return self._ended(ProviderTimeoutError("the wait was interrupted", sent=False, fault=False))

    def _left_off(self, last: Admitted | None) -> Script[None]:
        """No attempt follows where one was promised: the key of the call is not to wait for the end of its lease."""
        if last is not None:
            yield from self._concluded(last, Concluded(now=self._means.senses.wall(), last=True, doubt=self._doubt))

    def _admission(self) -> Script[Admitted | Replayed | ProviderError | BaseException]:
        """Leave to make an attempt, a result that is there already, or why there is neither."""
        number, wait = len(self._tried) + 1, _SOON
        while True:
            if self._left() <= 0:
                return ProviderTimeoutError("no time was left for an attempt", sent=False, fault=False)
            answer: Answer = yield self._visit(self._means.admit, self._asked(number))
            if isinstance(answer, Ok):
                admission: Admission = answer.value
                if not isinstance(admission, Busy):
                    return admission
                if self._left() <= wait:
                    return _in_flight(admission, self._means.senses.wall())
                if isinstance((yield from sleep(self._means.senses.clock() + wait)), Stopped):
                    return _in_flight(admission, self._means.senses.wall())
                wait = min(2 * wait, _SELDOM)
                continue
            return self._not_admitted(answer, number)

    def _not_admitted(self, answer: Err | Expired | Stopped, number: int) -> ProviderError | BaseException:
        if not isinstance(answer, Err):
            return _books_unavailable()
        error = answer.error
        if isinstance(error, ProviderQuotaExceededError | ProviderCircuitOpenError):
            self._note(number, 0.0, error=error, outcome=Outcome.FAILED)
        if isinstance(error, ProviderError) and error.code == CONFLICT:
            # The books know keys; what stands behind one is known here.
            return conflict(effect(self._request.provider_name, self._request.operation, self._request.context.name))
        if isinstance(error, ProviderError) or not isinstance(error, Exception):
            return error
        unavailable = _books_unavailable(error)
        unavailable.__cause__ = error
        return unavailable

    def _attempt(self, admitted: Admitted) -> Script[Ok | Err | None]:
        """One call, concluded; None if another one is to follow after the wait that was noted."""
        means, number, clock = self._means, len(self._tried) + 1, self._means.senses.clock
        began = clock()
        until = self._attempt_end(began)
        answer: Answer = yield self._body(number, until)
        if isinstance(answer, Stopped) or (isinstance(answer, Err) and not isinstance(answer.error, Exception)):
            # Nobody knows what became of it, and whoever waited for it has been called away.
            yield from self._concluded(admitted, Concluded(now=means.senses.wall(), last=True, doubt=True))
            interrupted = ProviderInternalError("whoever waited for the answer was called away")
            self._note(number, clock() - began, error=interrupted, outcome=Outcome.FAILED)
            return Err(answer.error if isinstance(answer, Err) else interrupted)
        over = clock()
        ended = _read(answer, now=means.senses.wall(), allowed=until - began)
        if isinstance(ended, Kept):
            self._tried.append(Tried(number, began, over - began))
            yield from self._concluded(admitted, Concluded(now=means.senses.wall(), last=True, doubt=True, kept=ended))
            self._note(number, over - began, kept=ended, outcome=Outcome.SUCCESS)
            return Ok(self._result(kept=ended))
        self._doubt = self._doubt or doubtful(ended)
        decision = self._decide(number, ended)
        last = isinstance(decision, GiveUp)
        delay = decision.delay if isinstance(decision, Again) else None
        self._tried.append(Tried(number, began, over - began, ended, delay))
        conclusion = Concluded(now=means.senses.wall(), last=last, doubt=self._doubt, error=ended)
        yield from self._concluded(admitted, conclusion)
        self._note(number, over - began, error=ended, outcome=Outcome.FAILED if last else Outcome.RETRY)
        if not isinstance(decision, GiveUp):
            return None
        return self._ended(ended, why=decision.why, probe=admitted.leave.probe is not None)

    def _concluded(self, admitted: Admitted, concluded: Concluded) -> Script[None]:
        """Tell the books. What the call came to stands, whatever they answer."""
        concluded.within = self._within()
        answer: Answer = yield self._visit(self._means.conclude, admitted, concluded)
        watch = self._means.watch
        if not isinstance(answer, Ok):
            watch.books_failed(answer.error if isinstance(answer, Err) else TimeoutError("the books did not answer"))
        elif answer.value is not None:
            watch.breaker(answer.value)

    # -- its effects ------------------------------------------------------------------------------

    def _visit(self, visit: Callable[..., Any], *args: Any) -> Call:
        if self._means.punctual:
            return Visit("books", visit, args)
        return Call("books", visit, args, self._until if self._means.waits else NEVER)

    def _within(self) -> float | None:
        """Seconds that a visit may take."""
        return max(0.0, self._until - self._means.senses.clock()) if self._means.waits else None

    def _asked(self, number: int) -> Asked:
        request, senses = self._request, self._means.senses
        return Asked(
            account=self._account,
            policy=self._means.policy,
            tenant_id=request.tenant_id,
            idempotency_key=request.idempotency_key,
            fingerprint=request.fingerprint,
            owner=request.owner,
            attempt_number=number,
            lease=max(0.0, self._until - senses.clock()) + _GRACE,
            now=senses.wall(),
            doubt=self._doubt,
            within=self._within(),
        )

    def _attempt_end(self, began: float) -> float:
        """Return when an attempt that begins at *began* is abandoned."""
        limit = self._means.policy.attempt_timeout
        return self._last_call if limit is None else min(self._last_call, began + limit)

    def _body(self, number: int, until: float) -> Call:
        means, outer = self._means, self._means.outer
        left = max(0.0, min(self._left(), until - means.senses.clock()))
        request = self._request
        context = ProviderExecutionContext(
            correlation_id=request.correlation_id,
            idempotency_key=request.idempotency_key,
            timeout=left,
            task_execution_id=request.context.task_execution_id,
            name=request.context.name,
            attempt_number=number,
        )
        inner = None
        if outer is not None:
            inner = Scope(outer.transaction, outer.step, outer.attempt, outer.clock() + left, outer.clock, outer)
        return Call("provider", means.body, (context,), until, inner, means.watch.attempt(number))

    # -- its decisions ----------------------------------------------------------------------------

    def _left(self) -> float:
        """Seconds in which a call may still be made."""
        outer = self._means.outer
        return 0.0 if outer is not None and outer.cancelled else self._last_call - self._means.senses.clock()

    def _decide(self, number: int, error: ProviderError) -> Decision:
        means = self._means
        return means.policy.retry.next(number, error, remaining=self._left(), dice=means.senses.dice)

    def _ended(self, error: BaseException, *, why: Why | None = None, probe: bool = False) -> Err:
        """The end without a result: *error* with its verdict, and with all that is known of the call.

        *probe* says that the half-open breaker had admitted the last attempt.
        """
        if not isinstance(error, ProviderError):
            return Err(error)
        # The attempts keep the one that was raised: an error that held itself would keep the client's
        # sockets open until the garbage collector comes.
        mine = _own(error)
        mine.attempts = tuple(self._tried)
        if mine.__cause__ is None and self._tried and self._tried[-1].error is not error:
            # An open breaker or a spent quota between two attempts keeps the error of the first attempt as its cause.
            mine.__cause__ = self._tried[-1].error
        _judge(mine, why, tried=self._tried, left=self._left(), probe=probe)
        request = self._request
        mine.particulars = {
            "provider_name": request.provider_name,
            "capability": request.capability,
            "operation": request.operation,
            "campaign_id": request.campaign_id,
            "idempotency_key": request.idempotency_key,
        }
        mine.result = self._result(error=mine)
        return Err(mine)

    # -- what is written down ---------------------------------------------------------------------

    def _result(
        self, *, kept: Kept | None = None, error: ProviderError | None = None, replayed: bool = False
    ) -> ProviderExecutionResult:
        request = self._request
        return ProviderExecutionResult(
            provider_name=request.provider_name,
            capability=request.capability,
            operation=request.operation,
            tenant_id=request.tenant_id,
            campaign_id=request.campaign_id,
            correlation_id=request.correlation_id,
            idempotency_key=request.idempotency_key,
            value=None if kept is None else kept.value,
            outcome=Outcome.SUCCESS if error is None else Outcome.FAILED,
            reason_code=None if error is None else error.reason_code,
            attempts=len(self._tried),
            duration_ms=(self._means.senses.clock() - self._began) * 1000,
            http_status=_status(kept, error),
            replayed=replayed,
            tried=tuple(self._tried),
        )

    def _note(
        self,
        number: int,
        duration: float,
        *,
        outcome: Outcome,
        kept: Kept | None = None,
        error: ProviderError | None = None,
    ) -> None:
        request, means = self._request, self._means
        row = AttemptRow(
            tenant_id=request.tenant_id,
            task_execution_id=request.context.task_execution_id,
            provider_name=request.provider_name,
            capability=request.capability,
            operation=request.operation,
            idempotency_key=request.idempotency_key,
            correlation_id=request.correlation_id,
            attempt_number=number,
            max_attempts=means.policy.retry.max_attempts,
            duration_ms=duration * 1000,
            timeout_budget_ms=self._budget * 1000,
            outcome=outcome,
            reason_code=None if error is None else error.reason_code,
            retryable=error is not None and error.retryable,
            http_status=_status(kept, error),
            created_at=means.senses.wall(),
        )
        means.record(row)
        means.watch.attempted(row, error)


def _budget(given: float | None, policy: float, outer: Scope | None) -> float:
    """The shortest of what was given, what the policy says, and what is left to the handler."""
    left = None if outer is None else outer.remaining()
    return max(0.0, min(seconds for seconds in (given, policy, left) if seconds is not None))


def _status(kept: Kept | None, error: ProviderError | None) -> int | None:
    if kept is not None:
        return kept.http_status
    return None if error is None else error.http_status


def _read(answer: Answer, *, now: float, allowed: float) -> Kept | ProviderError:
    """What one call came to."""
    if isinstance(answer, Expired):
        return ProviderTimeoutError(f"the provider did not answer within {allowed:.3f} s")
    if isinstance(answer, Err):
        if isinstance(answer.error, NotBegunError):
            return ProviderTimeoutError("no thread was free in time", sent=False, fault=False)
        return canonical(answer.error, now=now)
    value: Any = answer.value if isinstance(answer, Ok) else None
    status: int | None = None
    if isinstance(value, Reply):
        status = value.http_status
        value = value.value
    if isinstance(value, dict):
        return Kept(value, status)
    return ProviderResponseFormatError(
        f"a provider returns a dict, not {type(value).__name__}", http_status=status, fault=False
    )


def _own(error: ProviderError) -> ProviderError:
    """A twin of *error*: whoever raised it may raise it again, and must not find our verdict on it."""
    mine = type(error).__new__(type(error))
    mine.args = error.args
    mine.__dict__.update(error.__dict__)
    mine.__cause__ = error.__cause__
    mine.__suppress_context__ = True
    return mine.with_traceback(error.__traceback__)


def _judge(error: ProviderError, why: Why | None, *, tried: list[Tried], left: float, probe: bool) -> None:
    """Give *error* its verdict: no layer above retries at once, and a consumer defers temporary errors."""
    if error.later:
        return
    error.temporary = _is_temporary(error, why, tried=tried)
    if probe and error.temporary:
        # The failed probe has opened the breaker again, so this is the breaker's deferral: it has no limit.
        error.later = True
        return
    if isinstance(error, ProviderQuotaExceededError):
        # Held back by ourselves: if nothing at all was sent, nothing was tried.
        error.later = not any(_was_sent(one) for one in tried)
        error.temporary = not error.later
    elif why is Why.NO_TIME_LEFT and error.retry_after is not None and error.retry_after >= left:
        # The provider has asked for a pause that is longer than our budget; others may have the time.
        return
    elif tried and error.code != BOOKS_UNAVAILABLE:
        # Books that are away say nothing of the provider: an outage of ours must not end what it could still do.
        error.final = True


def _is_temporary(error: ProviderError, why: Why | None, *, tried: list[Tried]) -> bool:
    """Return whether the provider, or the store of its state, is unavailable at present.

    If no attempt was made because the caller had no time left, the provider is not known to be unavailable.
    """
    if error.code == BOOKS_UNAVAILABLE:
        return True
    return error.retryable and why is not Why.NOT_RETRYABLE and bool(tried)


def _was_sent(tried: Tried) -> bool:
    return tried.error is None or tried.error.sent


def _in_flight(busy: Busy, now: float) -> ProviderError:
    return ProviderTimeoutError(
        "another call with this idempotency key is under way",
        sent=False,
        fault=False,
        later=True,
        retry_after=max(0.0, busy.until - now),
        code=IN_FLIGHT,
    )


def _books_unavailable(cause: Exception | None = None) -> ProviderError:
    message = "the state of quota and breakers could not be read, so no call was made"
    # The text of another library's exception may quote a statement with its values.
    if isinstance(cause, ErgonError):
        message = f"{message}: {cause}"
    return ProviderInternalError(message, sent=False, code=BOOKS_UNAVAILABLE)
