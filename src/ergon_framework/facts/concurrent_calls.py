"""ConcurrentCalls: calls next to one script, at most one of each kind, each with a timeout. It does no I/O itself.

A replicator copies facts from a source store to this zone's store, and makes these calls to both. Its script is a
generator that yields what is to be done; each call runs in a slot of its own, and the mailbox of the script receives
the result. An abandoned call has timed out or was interrupted; it keeps its slot until it exits.

Subclasses decide which calls to make and what follows from the results. ``ReplicaProblem`` has the status of a failure,
which says whether the call is retried or needs an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.engine.effects import Call, CallResult, Err, Expired, Interrupted, Script, await_exit, call, spawn
from ergon_framework.engine.scheduler import ScriptEnded
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica_state import CallTimeoutError, ReplicaProblem, ReplicaStatus

if TYPE_CHECKING:
    from ergon_framework.engine.scheduler import Scheduler, Slot

#: Abandoned calls that have not exited; at this number no call starts before one of them has exited.
MAX_ABANDONED_CALLS: Final = 16


class CallKind(StrEnum):
    """The kinds of calls to the two stores."""

    LAST_OFFSET = "last_offset"
    FETCH = "fetch_facts"
    GET_FACT = "get_fact"
    COPY = "copy"
    FORWARD = "forward_facts"
    CONFIRM = "confirm_receipt"
    LIST_LOGS = "list_logs"

    @property
    def is_at_source(self) -> bool:
        """Whether the call goes to the source, over the network."""
        return self in _SOURCE_KINDS


_SOURCE_KINDS: Final = frozenset((CallKind.FETCH, CallKind.COPY, CallKind.CONFIRM, CallKind.LIST_LOGS))


class CallState:
    """The state of one kind of call: consecutive failures, the time of the next attempt, and the current problem."""

    __slots__ = ("attempts", "problem", "retry_at")

    def __init__(self) -> None:
        self.attempts = 0
        #: The call does not start before this time.
        self.retry_at = 0.0
        #: None after a success, which a subclass reports with ``reset``.
        self.problem: ReplicaProblem | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether the call is not retried because an operator has to resolve its problem."""
        return self.problem is not None and self.problem.status.needs_operator

    def reset(self) -> None:
        # A blocked call stays blocked until the replicator is restarted.
        if not self.is_blocked:
            self.attempts, self.retry_at, self.problem = 0, 0.0, None


class ConcurrentCalls:
    """Makes calls next to one script and notifies its mailbox of the results."""

    def __init__(self, *, policy: ReplicationPolicy, scheduler: Scheduler) -> None:
        self._policy = policy
        self._scheduler = scheduler
        self._clock = scheduler.monotonic
        self._mailbox = scheduler.create_mailbox()
        self._states = {kind: CallState() for kind in CallKind}
        self._running: dict[CallKind, Slot] = {}
        #: Abandoned calls that have not exited.
        self._abandoned_count = 0
        #: Number of failures by status.
        self.failure_counts: dict[ReplicaStatus, int] = {}

    def _start_call(
        self, kind: CallKind, fn: Callable[..., Any], args: tuple[Any, ...], on_result: Callable[[Any], None]
    ) -> Script[None]:
        """Start a call next to this script, unless one of its kind is running or waits after a failure."""
        if self._can_start(kind):
            effect = Call(kind.value, fn, args, self._clock() + self._policy.timeout)
            yield from self._spawn(kind, self._await_call(kind, effect, on_result))

    def _can_start(self, kind: CallKind) -> bool:
        return kind not in self._running and self._clock() >= self._states[kind].retry_at

    def _spawn(
        self, kind: CallKind, script: Script[tuple[CallKind, Callable[[Any], None], CallResult]]
    ) -> Script[None]:
        self._running[kind] = yield from spawn(script, notify=self._mailbox, counted=False)

    def _await_call(
        self, kind: CallKind, effect: Call, on_result: Callable[[Any], None]
    ) -> Script[tuple[CallKind, Callable[[Any], None], CallResult]]:
        answer = yield from call(effect)
        if isinstance(answer, Interrupted | Expired) and answer.call is not None:
            # Ask the abandoned call to exit, where that is possible; the script does not wait for it.
            yield from await_exit(answer.call, self._clock())
        return kind, on_result, answer

    def _accept_result(self, item: Any) -> tuple[CallKind, Callable[[Any], None], CallResult] | None:
        """Return the result of a call; None if the call was abandoned before and has exited now."""
        # Otherwise a SlotFreed: the abandoned call of an ended script has exited.
        if not isinstance(item, ScriptEnded):
            self._abandoned_count -= 1
            return None
        # A slot that is not free yet still has an abandoned call in it.
        self._abandoned_count += not item.freed
        kind, on_result, answer = item.value
        if self._running.get(kind) is item.slot:
            del self._running[kind]
        return kind, on_result, answer

    def _is_any_running(self, *kinds: CallKind) -> bool:
        """Return whether a call of one of these kinds is running."""
        return not self._running.keys().isdisjoint(kinds)

    def _list_running_slots(self, kinds: Collection[CallKind]) -> list[Slot]:
        return [slot for kind, slot in self._running.items() if kind in kinds]

    def _to_error(self, kind: CallKind, answer: CallResult) -> BaseException:
        if isinstance(answer, Err):
            return answer.error
        return CallTimeoutError(
            f"{kind.value} timed out after {self._policy.timeout:g} s: it was abandoned and is retried"
        )

    def _record_failure(self, kind: CallKind, problem: ReplicaProblem) -> None:
        state = self._states[kind]
        delay = self._policy.delay(state.attempts, self._scheduler.time_source.random)
        state.retry_at = self._clock() + max(delay, problem.retry_after)
        state.attempts += 1
        state.problem = problem
        self.failure_counts[problem.status] = self.failure_counts.get(problem.status, 0) + 1

    def _current_problem(self) -> ReplicaProblem | None:
        problems = [state.problem for state in self._states.values() if state.problem is not None]
        # Problems that need an operator come before those that may pass.
        return min(problems, key=lambda problem: not problem.status.needs_operator, default=None)

    @property
    def _is_blocked(self) -> bool:
        return any(state.is_blocked for state in self._states.values())
