"""What ``ergon policy`` does: load a task, reckon what its policy allows, and say it."""

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
from ergon_framework.errors import ConfigurationError, text
from ergon_framework.policy import Policy
from ergon_framework.providers.base import Provider
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.runner.exits import ExitCode
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.task.worst import WorstCase, refuse_too_long, worst_case

SCHEMAS: Mapping[str, type[Policy]] = {
    "consumer": ConsumerPolicy,
    "producer": ProducerPolicy,
    "provider": ProviderPolicy,
}


class PolicyExit(ExitCode):
    """Every exit code of ``ergon policy`` with what it means."""

    OK = 0, "shown"
    REFUSED = 1, "the broker would take a delivery back before the policy is through with it"
    USAGE = 2, "the command line, the policy, the configuration or the task is wrong"


@dataclass(frozen=True, slots=True)
class Stacked:
    """A provider that bodies of the task call: its attempts come on top of theirs."""

    name: str
    attempts: int
    timeout: float
    #: Seconds for one attempt; None where it may use what is left of *timeout*.
    attempt_timeout: float | None
    #: Calls that it may see for one transaction if each run of the body calls it once, deferrals included.
    calls: float
    calls_with_crashes: float


@dataclass(frozen=True, slots=True)
class Explained:
    """All that is said about one task."""

    task: str
    queue: str
    worst: WorstCase
    #: How the claim ends: unless it is renewed, and whatever anybody does.
    lease: float | None
    deadline: float | None
    stacked: Sequence[Stacked]
    advice: Sequence[str]
    refused: str | None


def explain(name: str, *, policy: Path | None, config: Path | None, as_json: bool) -> PolicyExit:
    """Show what the policy of the task called *name* allows at worst."""
    try:
        options = Options(task=name, policy=_text(policy), config=_text(config))
        task, rules = load_consumer(options, options.settings())
    except ConfigurationError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        return PolicyExit.USAGE
    module = sys.modules[name.partition(":")[0]]
    found = explained(task, rules, [value for value in vars(module).values() if isinstance(value, Provider)])
    if as_json:
        typer.echo(json.dumps(_plain(found), allow_nan=False))
    else:
        view.show(found)
    return PolicyExit.OK if found.refused is None else PolicyExit.REFUSED


def explained(task: Any, policy: ConsumerPolicy, providers: Sequence[Provider[Any, Any]]) -> Explained:
    """What *policy* means for *task*, with *providers* stacked on it."""
    worst, can = worst_case(policy), task.connector.capabilities
    stacked = [_stacked(provider, worst) for provider in _once(providers)]
    refused = None
    try:
        refuse_too_long(policy, can, queue=task.connector.name)
    except ConfigurationError as error:
        refused = text(error)
    return Explained(
        task=task.name,
        queue=task.connector.name,
        worst=worst,
        lease=can.lease,
        deadline=can.deadline,
        stacked=stacked,
        advice=list(_advice(policy, worst, stacked)),
        refused=refused,
    )


def schema(kind: str) -> None:
    """Print the JSON Schema of one kind of policy."""
    typer.echo(json.dumps(SCHEMAS[kind].model_json_schema(), indent=2))


def _stacked(provider: Provider[Any, Any], worst: WorstCase) -> Stacked:
    attempts = provider.policy.retry.max_attempts
    return Stacked(
        name=f"{provider.provider_name} {provider.capability}",
        attempts=attempts,
        timeout=provider.policy.timeout,
        attempt_timeout=provider.policy.attempt_timeout,
        calls=attempts * (worst.calls + worst.deferrals),
        calls_with_crashes=attempts * (worst.calls_with_crashes + worst.deferrals),
    )


def _once(providers: Sequence[Provider[Any, Any]]) -> Sequence[Provider[Any, Any]]:
    return list({id(provider): provider for provider in providers}.values())


def _advice(policy: ConsumerPolicy, worst: WorstCase, stacked: Sequence[Stacked]) -> list[str]:
    """What a person would want to be told about these numbers."""
    said = []
    whole = policy.loop.transaction_timeout
    if isinf(worst.busy):
        said.append(
            "nothing ends a body that hangs: set steps.process.retry.timeout (and success), or loop.transaction_timeout"
        )
    if whole is not None and whole < worst.process.timeout < inf:
        said.append(
            f"loop.transaction_timeout ({view.seconds(whole)}) ends an attempt before its own timeout "
            f"({view.seconds(worst.process.timeout)}): steps.process.retry.timeout never counts"
        )
    if worst.busy > policy.loop.drain_timeout:
        said.append(
            f"a stop waits {view.seconds(policy.loop.drain_timeout)} (loop.drain_timeout), but one transaction may "
            f"take {view.seconds(worst.busy)}: what is still running then comes again, and costs no delivery"
        )
    said += [
        f"{one.name} may take {view.seconds(one.timeout)}, but an attempt of process ends after "
        f"{view.seconds(worst.process.timeout)}: its last attempts are cut off; lower the provider's timeout"
        for one in stacked
        if one.timeout > worst.process.timeout
    ]
    said += [
        f"a {one.name} that hangs gets one attempt of {one.attempts}, because an attempt may use the whole timeout "
        f"({view.seconds(one.timeout)}); set attempt_timeout in its policy"
        for one in stacked
        if one.attempts > 1 and (one.attempt_timeout is None or one.attempt_timeout >= one.timeout)
    ]
    return said


def _plain(found: Explained) -> dict[str, Any]:
    """As JSON knows it, where infinity is null."""
    plain: dict[str, Any] = _finite(asdict(found))
    worst = found.worst
    plain["worst"] |= _finite(
        {
            "busy": worst.busy,
            "held": worst.held,
            "calls": worst.calls,
            "calls_with_crashes": worst.calls_with_crashes,
        }
    )
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and isinf(value) else value


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
