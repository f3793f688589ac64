"""Defaults of an entry point: the task's own policy and gates where the caller passes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ergon_framework.errors import ConfigurationError
from ergon_framework.task.gates import Gate
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy

P = TypeVar("P", ConsumerPolicy, ProducerPolicy)


def choose_policy(task: object, policy: object, kind: type[P]) -> P:
    """Return *policy*, else the task's own, else the default of *kind*.

    A task that consumes and produces has one policy of its own; the other side runs under the default.
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
