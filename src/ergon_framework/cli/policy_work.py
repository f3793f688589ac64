"""Work of ``ergon policy``: load a task, compute the worst case that its policy allows, and print it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isinf
from pathlib import Path
from typing import Any

import typer

from ergon_framework.cli import policy_view as view
from ergon_framework.cli.run import Options, load_consumer
from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.policy import Policy
from ergon_framework.providers.base import Provider
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.runner.exits import ExitCode
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.worst import WorstCase, check_fits_broker_deadline, compute_worst_case

SCHEMAS: Mapping[str, type[Policy]] = {
    "consumer": ConsumerPolicy,
    "producer": ProducerPolicy,
    "provider": ProviderPolicy,
}


class PolicyExit(ExitCode):
    """Exit codes of ``ergon policy`` and their meanings."""

    OK = 0, "shown"
    REJECTED = 1, "the broker would take a delivery back before the policy is through with it"
    USAGE = 2, "the command line, the policy, the configuration or the task is wrong"


@dataclass(frozen=True, slots=True)
class ProviderRetries:
    """A provider called by handlers of the task: its retries multiply those of the handler."""

    name: str
    attempts: int
    timeout: float
    #: Seconds for one attempt; None if it may use the remaining *timeout*.
    attempt_timeout: float | None
    #: Maximum calls for one transaction if each handler call makes one call, deferrals included.
    calls: float
    calls_with_crashes: float


@dataclass(frozen=True, slots=True)
class PolicyExplanation:
    """The explanation of one task's policy."""

    task: str
    queue: str
    worst: WorstCase
    #: Seconds until the claim ends: *lease* unless it is renewed, *deadline* in any case.
    lease: float | None
    deadline: float | None
    stacked: Sequence[ProviderRetries]
    advice: Sequence[str]
    refused: str | None


def print_explanation(name: str, *, policy: Path | None, config: Path | None, as_json: bool) -> PolicyExit:
    """Print the worst case that the policy of the task called *name* allows."""
    try:
        options = Options(task=name, policy=_to_str(policy), config=_to_str(config))
        task, consumer_policy = load_consumer(options, options.resolve_settings())
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return PolicyExit.USAGE
    module = sys.modules[name.partition(":")[0]]
    explanation = explain_policy(
        task, consumer_policy, [value for value in vars(module).values() if isinstance(value, Provider)]
    )
    if as_json:
        typer.echo(json.dumps(_to_json_data(explanation), allow_nan=False))
    else:
        view.show(explanation)
    return PolicyExit.OK if explanation.refused is None else PolicyExit.REJECTED


def explain_policy(task: Any, policy: ConsumerPolicy, providers: Sequence[Provider[Any, Any]]) -> PolicyExplanation:
    """Explain what *policy* means for *task* that calls *providers*."""
    worst, capabilities = compute_worst_case(policy), task.connector.capabilities
    stacked = [_compute_retries(provider, worst) for provider in _deduplicate(providers)]
    problem = None
    try:
        check_fits_broker_deadline(policy, capabilities, queue=task.connector.name)
    except ConfigurationError as error:
        problem = error_message(error)
    return PolicyExplanation(
        task=task.name,
        queue=task.connector.name,
        worst=worst,
        lease=capabilities.lease,
        deadline=capabilities.deadline,
        stacked=stacked,
        advice=list(_build_advice(policy, worst, stacked)),
        refused=problem,
    )


def print_schema(kind: str) -> None:
    """Print the JSON Schema of one kind of policy."""
    typer.echo(json.dumps(SCHEMAS[kind].model_json_schema(), indent=2))


def _compute_retries(provider: Provider[Any, Any], worst: WorstCase) -> ProviderRetries:
    attempts = provider.policy.retry.max_attempts
    return ProviderRetries(
        name=f"{provider.provider_name} {provider.capability}",
        attempts=attempts,
        timeout=provider.policy.timeout,
        attempt_timeout=provider.policy.attempt_timeout,
        calls=attempts * (worst.calls + worst.deferrals),
        calls_with_crashes=attempts * (worst.calls_with_crashes + worst.deferrals),
    )


def _deduplicate(providers: Sequence[Provider[Any, Any]]) -> Sequence[Provider[Any, Any]]:
    return list({id(provider): provider for provider in providers}.values())


def _build_advice(policy: ConsumerPolicy, worst: WorstCase, stacked: Sequence[ProviderRetries]) -> list[str]:
    """Return advice for an operator about these numbers."""
    advice = []
    transaction_timeout = policy.loop.transaction_timeout
    if isinf(worst.max_busy_seconds):
        advice.append(
            "nothing ends a body that hangs: set steps.process.retry.timeout (and success), or loop.transaction_timeout"
        )
    if transaction_timeout is not None and transaction_timeout < worst.process.timeout < inf:
        advice.append(
            f"loop.transaction_timeout ({view.format_duration(transaction_timeout)}) ends an attempt before its own "
            f"timeout ({view.format_duration(worst.process.timeout)}): steps.process.retry.timeout never counts"
        )
    if worst.max_busy_seconds > policy.loop.drain_timeout:
        advice.append(
            f"a stop waits {view.format_duration(policy.loop.drain_timeout)} (loop.drain_timeout), but one transaction "
            f"may take {view.format_duration(worst.max_busy_seconds)}: what is still running then "
            "comes again, and costs no delivery"
        )
    advice += [
        f"{one.name} may take {view.format_duration(one.timeout)}, but an attempt of process ends after "
        f"{view.format_duration(worst.process.timeout)}: its last attempts are cut off; lower the provider's timeout"
        for one in stacked
        if one.timeout > worst.process.timeout
    ]
    advice += [
        f"a {one.name} that hangs gets one attempt of {one.attempts}, because an attempt may use the whole timeout "
        f"({view.format_duration(one.timeout)}); set attempt_timeout in its policy"
        for one in stacked
        if one.attempts > 1 and (one.attempt_timeout is None or one.attempt_timeout >= one.timeout)
    ]
    return advice


def _to_json_data(explanation: PolicyExplanation) -> dict[str, Any]:
    """Convert to JSON data; infinity becomes null."""
    payload: dict[str, Any] = _replace_infinity(asdict(explanation))
    worst = explanation.worst
    payload["worst"] = {
        ("queued" if key == "lifecycles_ahead" else key): value for key, value in payload["worst"].items()
    }
    payload["worst"] |= _replace_infinity(
        {
            "busy": worst.max_busy_seconds,
            "held": worst.max_claim_seconds,
            "calls": worst.calls,
            "calls_with_crashes": worst.calls_with_crashes,
        }
    )
    return payload


def _replace_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinity(item) for item in value]
    return None if isinstance(value, float) and isinf(value) else value


def _to_str(path: Path | None) -> str | None:
    return None if path is None else str(path)
