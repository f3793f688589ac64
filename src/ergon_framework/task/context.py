"""Context helpers for user code, and the choice of an entry point's policy and gates (functions that pause a loop).

The context is that of ``contextvars``; in a handler it includes the scope (deadline, attempt) and the current trace.
The engine's own calls propagate it already; the helpers are for user code that starts its own threads or tasks, or
needs a separate time limit inside a handler. An entry point is the method that starts a consume loop or produce call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent import futures
from contextvars import Context, copy_context
from typing import Any, ParamSpec, TypeVar

from ergon_framework.engine.daemon_executor import DaemonExecutor
from ergon_framework.errors import ConfigurationError
from ergon_framework.gates import Gate
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy

PolicyT = TypeVar("PolicyT", ConsumerPolicy, ProducerPolicy)


def choose_policy(task: object, policy: object, kind: type[PolicyT]) -> PolicyT:
    """Return *policy*, else the task's own, else the default of *kind*.

    A task that consumes and produces has one policy of its own, for one of the two; the other runs under the default.
    Raises ConfigurationError if the policy is of another type.
    """
    chosen = getattr(task, "policy", None) if policy is None else policy
    if isinstance(chosen, kind):
        return chosen
    other_types = tuple(list_policy_types(task) - {kind})
    if policy is None and (chosen is None or isinstance(chosen, other_types)):
        return kind()
    raise wrong_policy_error(task, chosen, kind)


def choose_gates(task: object, gates: Sequence[Gate] | None) -> tuple[Gate, ...]:
    """Return *gates*, else those of the task."""
    return tuple(getattr(task, "gates", ()) if gates is None else gates)


def list_policy_types(task: object) -> set[type[ConsumerPolicy | ProducerPolicy]]:
    """Return the types of policy that *task* can run under."""
    policy_types: set[type[ConsumerPolicy | ProducerPolicy]] = set()
    if hasattr(task, "consume_transactions"):
        policy_types.add(ConsumerPolicy)
    if hasattr(task, "produce_transactions"):
        policy_types.add(ProducerPolicy)
    return policy_types


def wrong_policy_error(
    task: object, policy: object, *kinds: type[ConsumerPolicy | ProducerPolicy]
) -> ConfigurationError:
    """Build the error for a policy of the wrong type."""
    expected = sorted(kind.__name__ for kind in kinds)
    name = getattr(task, "name", type(task).__name__)
    return ConfigurationError(
        f"policy of {name} is invalid: it is a {type(policy).__name__}; pass a {' or '.join(expected)}, "
        f"built from a mapping with {expected[0]}.load(...)"
    )


P = ParamSpec("P")
T = TypeVar("T")

_threads = DaemonExecutor(name="ergon-timeout")


def with_context(fn: Callable[P, T], context: Context | None = None) -> Callable[P, T]:
    """Wrap *fn* so that each call runs with the current context, or *context*, on any thread.

    Each call gets its own copy, because a context cannot be entered twice at a time.
    """
    captured = copy_context() if context is None else context

    def run_in_context(*args: P.args, **kwargs: P.kwargs) -> T:
        return captured.copy().run(fn, *args, **kwargs)

    return run_in_context


def with_context_async(
    fn: Callable[P, Coroutine[Any, Any, T]], context: Context | None = None
) -> Callable[P, Awaitable[T]]:
    """Wrap a coroutine function so that each call runs as a task with the current context, or *context*."""
    captured = copy_context() if context is None else context

    def run_in_context(*args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        own_context = captured.copy()
        return asyncio.get_running_loop().create_task(own_context.run(fn, *args, **kwargs), context=own_context)

    return run_in_context


def run_with_timeout(fn: Callable[P, T], timeout: float | None, /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call *fn* and wait at most *timeout* seconds, then raise TimeoutError. The thread is abandoned, not killed."""
    if timeout is None:
        return fn(*args, **kwargs)
    future = _threads.submit(fn, *args, **kwargs)
    if not futures.wait([future], timeout).done:
        raise TimeoutError(f"call timed out after {timeout} s")
    return future.result()


async def run_with_timeout_async(
    fn: Callable[P, Awaitable[T]], timeout: float | None, /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Await *fn* for at most *timeout* seconds, then cancel it and raise TimeoutError."""
    async with asyncio.timeout(timeout):
        return await fn(*args, **kwargs)
