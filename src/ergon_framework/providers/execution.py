"""The script of ``execute``, for threads and for asyncio. It decides and performs no I/O.

A script is a generator that yields what is to be done: calls and waits. The shared state is the quotas, circuit
breakers and idempotency keys of all processes; an idempotency key is claimed by the call that owns it.

Each attempt has these steps: admission by the shared state (key, quota, breaker), the call within the remaining
budget, mapping to a canonical error (one of ``providers.errors``), completion in the shared state, and the decision of
the retry policy. The script reads the clock before each wait and each call. The error that it raises carries its
verdict, so that callers do not retry a call that was given up here: ``final`` says so, and ``not_attempted`` and
``temporary`` make a consumer defer its transaction, without and with a limit.

An attempt has the permit of the breaker; a probe is an attempt that a half-open breaker admits as a test. The last
attempt of a call completes the idempotency key. If the outcome of any attempt is unknown, the key stays bound to its
payload.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ergon_framework.engine.effects import (
    NEVER,
    Call,
    CallResult,
    Err,
    Expired,
    Interrupted,
    NotStartedError,
    Ok,
    Script,
    SelfTimedCall,
    sleep,
)
from ergon_framework.errors import ErgonError
from ergon_framework.providers.circuit_breaker import BreakerState
from ergon_framework.providers.error_mapping import to_provider_error
from ergon_framework.providers.errors import (
    AttemptInfo,
    ProviderCircuitOpenError,
    ProviderError,
    ProviderInternalError,
    ProviderQuotaExceededError,
    ProviderResponseFormatError,
    ProviderTimeoutError,
)
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.idempotency import (
    CONFLICT_CODE,
    StoredResult,
    effect_name,
    is_outcome_unknown,
    key_conflict_error,
)
from ergon_framework.providers.models import (
    AttemptRecord,
    ProviderExecutionContext,
    ProviderExecutionResult,
    ProviderReply,
    ProviderRequest,
)
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.retry import DoNotRetry, GiveUpReason, RetryAfter, RetryDecision
from ergon_framework.providers.state import (
    AdmissionRequest,
    AdmissionResult,
    AdmittedAttempt,
    AttemptResult,
    KeyInFlight,
    ProviderScope,
    ReplayedResult,
)
from ergon_framework.scope import Scope

if TYPE_CHECKING:
    from ergon_framework.clock import Clock

#: The share of the budget, and the maximum in seconds, reserved for the shared state after the last call: wall
#: time stays within the budget, and the caller's engine sees this error before its own timeout.
_RESERVED_SHARE: Final = 0.05
_MAX_RESERVED_SECONDS: Final = 0.05
#: Seconds beyond the budget after which an owner of a key that does not respond is considered dead.
_OWNER_GRACE_SECONDS: Final = 5.0
#: The first and the longest interval in seconds between two claims of a key that another caller holds.
_MIN_CLAIM_INTERVAL_SECONDS: Final = 0.01
_MAX_CLAIM_INTERVAL_SECONDS: Final = 0.25
#: The codes of a call that was not made: another call has its key, or the shared state was unavailable.
IN_FLIGHT: Final = "in_flight"
STATE_UNAVAILABLE: Final = "provider_state_unavailable"


class CallObserver(Protocol):
    """An observer of one call; its methods must not raise."""

    def on_attempt_start(self, number: int) -> Context | None:
        """Handle the start of an attempt; return the context in which the attempt is to run, or None for any."""

    def on_attempt_end(self, row: AttemptRecord, error: ProviderError | None) -> None:
        """Handle the end of an attempt, or its rejection."""

    def on_breaker_change(self, state: BreakerState) -> None:
        """Handle a breaker that has entered *state*."""

    def on_state_error(self, error: BaseException) -> None:
        """Handle an attempt whose result could not be written to the shared state."""

    def on_success(self, result: ProviderExecutionResult) -> None:
        """Handle a successful end of the call."""

    def on_failure(self, error: BaseException) -> None:
        """Handle a failed end of the call."""


@dataclass(slots=True, kw_only=True)
class CallDependencies:
    """The dependencies of a call; the callables are awaitable or not, as the runner of the script requires."""

    policy: ProviderPolicy
    admit: Callable[[AdmissionRequest], Any]
    complete: Callable[[AdmittedAttempt, AttemptResult], Any]
    record: Callable[[AttemptRecord], None]
    execute_attempt: Callable[[ProviderExecutionContext], Any]
    clock: Clock
    observer: CallObserver
    #: Whether a round trip to the shared state may block, and whether it then ends on its own in time.
    may_block: bool = False
    is_self_timed: bool = False
    handler_scope: Scope | None = None


def execute_call(request: ProviderRequest, dependencies: CallDependencies) -> Script[Ok | Err]:
    """Make the call of *request*: return Ok with a ProviderExecutionResult, or Err with the error to raise."""
    return _CallExecution(request, dependencies).run()


class _CallExecution:
    """The execution of one call."""

    __slots__ = (
        "_attempts",
        "_budget",
        "_call_deadline",
        "_deadline",
        "_dependencies",
        "_outcome_unknown",
        "_provider_scope",
        "_request",
        "_started_at",
    )

    def __init__(self, request: ProviderRequest, dependencies: CallDependencies) -> None:
        self._request = request
        self._dependencies = dependencies
        policy = dependencies.policy
        tenant = request.tenant_id if policy.scope == "tenant" else None
        self._provider_scope = ProviderScope(tenant, request.provider_name, request.capability)
        self._budget = _compute_budget(request.context.timeout, policy.timeout, dependencies.handler_scope)
        self._started_at = dependencies.clock.monotonic()
        self._deadline = self._started_at + self._budget
        self._call_deadline = self._deadline - min(_MAX_RESERVED_SECONDS, self._budget * _RESERVED_SHARE)
        self._attempts: list[AttemptInfo] = []
        #: Whether the provider may have carried out one of the failed attempts.
        self._outcome_unknown = False

    # -- the script -------------------------------------------------------------------------------

    def run(self) -> Script[Ok | Err]:
        """Make attempts until one succeeds, or no further one may be made."""
        admitted: AdmittedAttempt | None = None
        while True:
            admission = yield from self._admit()
            if isinstance(admission, ReplayedResult):
                return Ok(self._build_result(stored_result=admission.stored_result, replayed=True))
            if not isinstance(admission, AdmittedAttempt):
                yield from self._complete_unfinished(admitted)
                return self._to_failure(admission)
            admitted = admission
            outcome = yield from self._make_attempt(admitted)
            if outcome is not None:
                return outcome
            sleep_result = yield from sleep(self._dependencies.clock.monotonic() + (self._attempts[-1].delay or 0.0))
            if isinstance(sleep_result, Interrupted):
                yield from self._complete_unfinished(admitted)
                return self._to_failure(ProviderTimeoutError("the wait was interrupted", sent=False, fault=False))

    def _complete_unfinished(self, admitted: AdmittedAttempt | None) -> Script[None]:
        """Complete the call when a promised attempt does not follow, so that its key need not wait for lease expiry."""
        if admitted is not None:
            yield from self._complete(
                admitted,
                AttemptResult(now=self._dependencies.clock.wall(), is_last=True, outcome_unknown=self._outcome_unknown),
            )

    def _admit(self) -> Script[AdmittedAttempt | ReplayedResult | ProviderError | BaseException]:
        """Return the admission of an attempt, a result that is already stored, or the error if there is neither."""
        number, interval = len(self._attempts) + 1, _MIN_CLAIM_INTERVAL_SECONDS
        while True:
            if self._get_seconds_left() <= 0:
                return ProviderTimeoutError("no time left for an attempt", sent=False, fault=False)
            answer: CallResult = yield self._create_state_call(self._dependencies.admit, self._build_request(number))
            if isinstance(answer, Ok):
                admission: AdmissionResult = answer.value
                if not isinstance(admission, KeyInFlight):
                    return admission
                if self._get_seconds_left() <= interval:
                    return _in_flight_error(admission, self._dependencies.clock.wall())
                if isinstance((yield from sleep(self._dependencies.clock.monotonic() + interval)), Interrupted):
                    return _in_flight_error(admission, self._dependencies.clock.wall())
                interval = min(2 * interval, _MAX_CLAIM_INTERVAL_SECONDS)
                continue
            return self._to_admission_error(answer, number)

    def _to_admission_error(self, answer: Err | Expired | Interrupted, number: int) -> ProviderError | BaseException:
        if not isinstance(answer, Err):
            return _state_unavailable_error()
        error = answer.error
        if isinstance(error, ProviderQuotaExceededError | ProviderCircuitOpenError):
            self._record_attempt(number, 0.0, error=error, outcome=AttemptOutcome.FAILED)
        if isinstance(error, ProviderError) and error.code == CONFLICT_CODE:
            # The shared state knows only keys; the name of the effect is known here.
            return key_conflict_error(
                effect_name(self._request.provider_name, self._request.operation, self._request.context.name)
            )
        if isinstance(error, ProviderError) or not isinstance(error, Exception):
            return error
        unavailable = _state_unavailable_error(error)
        unavailable.__cause__ = error
        return unavailable

    def _make_attempt(self, admitted: AdmittedAttempt) -> Script[Ok | Err | None]:
        """Make one attempt and complete it; return None if another attempt follows after the recorded delay."""
        dependencies, number, clock = self._dependencies, len(self._attempts) + 1, self._dependencies.clock.monotonic
        started_at = clock()
        until = self._compute_attempt_end(started_at)
        answer: CallResult = yield self._create_provider_call(number, until)
        if isinstance(answer, Interrupted) or (isinstance(answer, Err) and not isinstance(answer.error, Exception)):
            # The outcome is unknown, and the wait for it was interrupted.
            yield from self._complete(
                admitted, AttemptResult(now=dependencies.clock.wall(), is_last=True, outcome_unknown=True)
            )
            interrupted = ProviderInternalError("the wait for the provider was interrupted, outcome unknown")
            self._record_attempt(number, clock() - started_at, error=interrupted, outcome=AttemptOutcome.FAILED)
            return Err(answer.error if isinstance(answer, Err) else interrupted)
        ended_at = clock()
        parsed = _parse_answer(answer, now=dependencies.clock.wall(), allowed=until - started_at)
        if isinstance(parsed, StoredResult):
            self._attempts.append(AttemptInfo(number, started_at, ended_at - started_at))
            yield from self._complete(
                admitted,
                AttemptResult(now=dependencies.clock.wall(), is_last=True, outcome_unknown=True, stored_result=parsed),
            )
            self._record_attempt(number, ended_at - started_at, stored_result=parsed, outcome=AttemptOutcome.SUCCESS)
            return Ok(self._build_result(stored_result=parsed))
        self._outcome_unknown = self._outcome_unknown or is_outcome_unknown(parsed)
        decision = self._decide(number, parsed)
        is_last = isinstance(decision, DoNotRetry)
        delay = decision.delay if isinstance(decision, RetryAfter) else None
        self._attempts.append(AttemptInfo(number, started_at, ended_at - started_at, parsed, delay))
        attempt_result = AttemptResult(
            now=dependencies.clock.wall(), is_last=is_last, outcome_unknown=self._outcome_unknown, error=parsed
        )
        yield from self._complete(admitted, attempt_result)
        self._record_attempt(
            number,
            ended_at - started_at,
            error=parsed,
            outcome=AttemptOutcome.FAILED if is_last else AttemptOutcome.RETRY,
        )
        if not isinstance(decision, DoNotRetry):
            return None
        return self._to_failure(parsed, reason=decision.reason, probe=admitted.permit.probe is not None)

    def _complete(self, admitted: AdmittedAttempt, result: AttemptResult) -> Script[None]:
        """Write the result to the shared state; the result of the call stands even if that fails."""
        result.timeout = self._compute_state_timeout()
        answer: CallResult = yield self._create_state_call(self._dependencies.complete, admitted, result)
        observer = self._dependencies.observer
        if not isinstance(answer, Ok):
            observer.on_state_error(answer.error if isinstance(answer, Err) else TimeoutError("no response in time"))
        elif answer.value is not None:
            observer.on_breaker_change(answer.value)

    # -- effects ----------------------------------------------------------------------------------

    def _create_state_call(self, operation: Callable[..., Any], *args: Any) -> Call:
        # A store that limits its own round trips is called directly, which saves a thread or a timer.
        if self._dependencies.is_self_timed:
            return SelfTimedCall("state", operation, args)
        return Call("state", operation, args, self._deadline if self._dependencies.may_block else NEVER)

    def _compute_state_timeout(self) -> float | None:
        """Return the seconds that a round trip may take; None without a limit."""
        return max(0.0, self._deadline - self._dependencies.clock.monotonic()) if self._dependencies.may_block else None

    def _build_request(self, number: int) -> AdmissionRequest:
        request, clock = self._request, self._dependencies.clock
        return AdmissionRequest(
            scope=self._provider_scope,
            policy=self._dependencies.policy,
            tenant_id=request.tenant_id,
            idempotency_key=request.idempotency_key,
            fingerprint=request.fingerprint,
            owner=request.owner,
            attempt_number=number,
            lease=max(0.0, self._deadline - clock.monotonic()) + _OWNER_GRACE_SECONDS,
            now=clock.wall(),
            outcome_unknown=self._outcome_unknown,
            timeout=self._compute_state_timeout(),
        )

    def _compute_attempt_end(self, started_at: float) -> float:
        """Return when an attempt that starts at *started_at* is abandoned."""
        limit = self._dependencies.policy.attempt_timeout
        return self._call_deadline if limit is None else min(self._call_deadline, started_at + limit)

    def _create_provider_call(self, number: int, until: float) -> Call:
        """Return the call of one attempt, whose context has the remaining time."""
        dependencies, handler_scope = self._dependencies, self._dependencies.handler_scope
        seconds_left = max(0.0, min(self._get_seconds_left(), until - dependencies.clock.monotonic()))
        request = self._request
        context = ProviderExecutionContext(
            correlation_id=request.correlation_id,
            idempotency_key=request.idempotency_key,
            timeout=seconds_left,
            task_execution_id=request.context.task_execution_id,
            name=request.context.name,
            attempt_number=number,
            arguments=request.context.arguments,
        )
        call_scope = None
        if handler_scope is not None:
            call_scope = Scope(
                handler_scope.transaction,
                handler_scope.step,
                handler_scope.attempt,
                handler_scope.clock() + seconds_left,
                handler_scope.clock,
                handler_scope,
            )
        return Call(
            "provider",
            dependencies.execute_attempt,
            (context,),
            until,
            call_scope,
            dependencies.observer.on_attempt_start(number),
        )

    # -- decisions --------------------------------------------------------------------------------

    def _get_seconds_left(self) -> float:
        """Return the seconds in which a call may still be made."""
        handler_scope = self._dependencies.handler_scope
        return (
            0.0
            if handler_scope is not None and handler_scope.cancelled
            else self._call_deadline - self._dependencies.clock.monotonic()
        )

    def _decide(self, number: int, error: ProviderError) -> RetryDecision:
        dependencies = self._dependencies
        return dependencies.policy.retry.decide(
            number, error, remaining=self._get_seconds_left(), random=dependencies.clock.random
        )

    def _to_failure(self, error: BaseException, *, reason: GiveUpReason | None = None, probe: bool = False) -> Err:
        """Return the failed end of the call: *error* with its verdict and the details of the call.

        *probe* means that the half-open breaker had admitted the last attempt as a probe.
        """
        if not isinstance(error, ProviderError):
            return Err(error)
        # The attempts refer to the raised error: an error that referred to itself would keep the client's
        # sockets open until garbage collection.
        own_error = _copy_error(error)
        own_error.attempts = tuple(self._attempts)
        if own_error.__cause__ is None and self._attempts and self._attempts[-1].error is not error:
            # An open breaker or an exhausted quota between two attempts keeps the first attempt's error as its cause.
            own_error.__cause__ = self._attempts[-1].error
        _set_verdict(own_error, reason, attempts=self._attempts, seconds_left=self._get_seconds_left(), probe=probe)
        request = self._request
        own_error.details = {
            "provider_name": request.provider_name,
            "capability": request.capability,
            "operation": request.operation,
            "campaign_id": request.campaign_id,
            "idempotency_key": request.idempotency_key,
        }
        own_error.result = self._build_result(error=own_error)
        return Err(own_error)

    # -- results and records ----------------------------------------------------------------------

    def _build_result(
        self, *, stored_result: StoredResult | None = None, error: ProviderError | None = None, replayed: bool = False
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
            value=None if stored_result is None else stored_result.value,
            outcome=AttemptOutcome.SUCCESS if error is None else AttemptOutcome.FAILED,
            reason_code=None if error is None else error.reason_code,
            attempts=len(self._attempts),
            duration_ms=(self._dependencies.clock.monotonic() - self._started_at) * 1000,
            http_status=_get_http_status(stored_result, error),
            replayed=replayed,
            attempt_history=tuple(self._attempts),
        )

    def _record_attempt(
        self,
        number: int,
        duration: float,
        *,
        outcome: AttemptOutcome,
        stored_result: StoredResult | None = None,
        error: ProviderError | None = None,
    ) -> None:
        request, dependencies = self._request, self._dependencies
        row = AttemptRecord(
            tenant_id=request.tenant_id,
            task_execution_id=request.context.task_execution_id,
            provider_name=request.provider_name,
            capability=request.capability,
            operation=request.operation,
            idempotency_key=request.idempotency_key,
            correlation_id=request.correlation_id,
            attempt_number=number,
            max_attempts=dependencies.policy.retry.max_attempts,
            duration_ms=duration * 1000,
            timeout_budget_ms=self._budget * 1000,
            outcome=outcome,
            reason_code=None if error is None else error.reason_code,
            retryable=error is not None and error.retryable,
            http_status=_get_http_status(stored_result, error),
            created_at=dependencies.clock.wall(),
        )
        dependencies.record(row)
        dependencies.observer.on_attempt_end(row, error)


def _compute_budget(timeout: float | None, policy_timeout: float, handler_scope: Scope | None) -> float:
    """Return the shortest of the requested timeout, the policy's timeout and the handler's remaining time."""
    seconds_left = None if handler_scope is None else handler_scope.remaining()
    return max(0.0, min(seconds for seconds in (timeout, policy_timeout, seconds_left) if seconds is not None))


def _get_http_status(stored_result: StoredResult | None, error: ProviderError | None) -> int | None:
    if stored_result is not None:
        return stored_result.http_status
    return None if error is None else error.http_status


def _parse_answer(answer: CallResult, *, now: float, allowed: float) -> StoredResult | ProviderError:
    """Return the stored result or the canonical error of one call."""
    if isinstance(answer, Expired):
        return ProviderTimeoutError(f"the provider did not answer within {allowed:.3f} s")
    if isinstance(answer, Err):
        if isinstance(answer.error, NotStartedError):
            return ProviderTimeoutError("no free thread within the timeout", sent=False, fault=False)
        return to_provider_error(answer.error, now=now)
    value: Any = answer.value if isinstance(answer, Ok) else None
    status: int | None = None
    if isinstance(value, ProviderReply):
        status = value.http_status
        value = value.value
    if isinstance(value, dict):
        return StoredResult(value, status)
    return ProviderResponseFormatError(
        f"invalid return value: expected a dict, got {type(value).__name__}", http_status=status, fault=False
    )


def _copy_error(error: ProviderError) -> ProviderError:
    """Copy *error*: the original may be raised again elsewhere and must not carry this call's verdict."""
    copied = type(error).__new__(type(error))
    copied.args = error.args
    copied.__dict__.update(error.__dict__)
    copied.__cause__ = error.__cause__
    copied.__suppress_context__ = True
    return copied.with_traceback(error.__traceback__)


def _set_verdict(
    error: ProviderError, reason: GiveUpReason | None, *, attempts: list[AttemptInfo], seconds_left: float, probe: bool
) -> None:
    """Set the verdict of *error*: no caller retries immediately, and a consumer defers temporary errors."""
    # Set by the error's class or by the rejection: no attempt was made, so the consumer defers without a limit.
    if error.not_attempted:
        return
    error.temporary = _is_temporary(error, reason, attempts=attempts)
    if probe and error.temporary:
        # The failed probe reopened the breaker, so this counts as the breaker's deferral, which has no limit.
        error.not_attempted = True
        return
    if isinstance(error, ProviderQuotaExceededError):
        # The framework's own quota rejected the call: if nothing was sent, no attempt is counted.
        error.not_attempted = not any(_was_sent(attempt) for attempt in attempts)
        error.temporary = not error.not_attempted
    elif reason is GiveUpReason.NO_TIME_LEFT and error.retry_after is not None and error.retry_after >= seconds_left:
        # The provider requested a pause longer than the remaining budget; other callers may have the time.
        return
    elif attempts and error.code != STATE_UNAVAILABLE:
        # Unavailable shared state says nothing about the provider: a local outage must not make the error final.
        error.final = True


def _is_temporary(error: ProviderError, reason: GiveUpReason | None, *, attempts: list[AttemptInfo]) -> bool:
    """Return whether the provider, or the store of its state, is unavailable at present.

    If no attempt was made because the caller had no time left, the provider is not known to be unavailable.
    """
    if error.code == STATE_UNAVAILABLE:
        return True
    return error.retryable and reason is not GiveUpReason.NOT_RETRYABLE and bool(attempts)


def _was_sent(attempt: AttemptInfo) -> bool:
    return attempt.error is None or attempt.error.sent


def _in_flight_error(in_flight: KeyInFlight, now: float) -> ProviderError:
    return ProviderTimeoutError(
        "another call with this idempotency key is in flight",
        sent=False,
        fault=False,
        not_attempted=True,
        retry_after=max(0.0, in_flight.until - now),
        code=IN_FLIGHT,
    )


def _state_unavailable_error(cause: Exception | None = None) -> ProviderError:
    message = "provider state is unavailable, no call was made"
    # The text of another library's exception may quote a statement with its values.
    if isinstance(cause, ErgonError):
        message = f"{message}: {cause}"
    return ProviderInternalError(message, sent=False, code=STATE_UNAVAILABLE)
