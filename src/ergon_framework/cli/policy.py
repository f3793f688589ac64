"""``ergon policy``: compute and print the worst case that a task's policy allows, or print a policy's JSON Schema.

A policy sets the retries and timeouts of a task's steps (process, success, exception, settle). A claim is a worker's
right to process a message; the broker redelivers the message if the claim ends before the work does. The explanation of
a policy is a table of its steps, and sentences with the totals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import inf, isinf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ergon_framework.cli.options import Config, Json
from ergon_framework.cli.run import Options, load_consumer
from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.policy import Policy
from ergon_framework.providers.base import Provider
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.runner.exit import ExitCode
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.worst_case import (
    RetryDelay,
    StepWorstCase,
    WorstCase,
    check_fits_broker_deadline,
    compute_worst_case,
)

#: Maximum number of waits listed individually.
_MAX_LISTED_WAITS = 6
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def show(explanation: PolicyExplanation) -> None:
    """Print the whole explanation."""
    worst = explanation.worst
    table = Table(box=box.SIMPLE, title=f"{explanation.task} on {explanation.queue}", title_justify="left")
    for heading in ("step", "attempts", "max per attempt", "delays between attempts", "max per delivery"):
        table.add_column(heading)
    for step in worst.steps:
        attempt_text = f"{format_duration(step.timeout)} + {format_duration(step.grace)} to exit"
        table.add_row(
            step.name, str(step.attempts), attempt_text, _format_waits(step.waits), format_duration(step.held)
        )
    Console(highlight=False, soft_wrap=True).print(table)
    for line in _build_summary(explanation):
        typer.echo(line)
    for warning in explanation.warnings:
        typer.echo(f"warning: {warning}")
    if explanation.refused is not None:
        typer.echo(f"ergon: {explanation.refused}", err=True)


def format_duration(duration: float) -> str:
    """Format a duration in seconds.

    >>> [format_duration(duration) for duration in (0.002, 1.5, 90, 7200, 200_000, float("inf"))]
    ['2 ms', '1.5 s', '1 min 30 s', '2 h', '2 d 7 h', 'no limit']
    """
    if isinf(duration):
        return "no limit"
    if 0 < duration < 1:
        return f"{1000 * duration:.3g} ms"
    if duration < _MINUTE:
        return f"{duration:.3g} s"
    whole = round(duration)
    for unit, name, smaller_unit, smaller_name in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if whole >= unit:
            rest = whole % unit // smaller_unit
            return f"{whole // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    raise AssertionError("a minute or more has a unit")


def _build_summary(explanation: PolicyExplanation) -> Sequence[str]:
    worst = explanation.worst
    busy_text, claim_text = format_duration(worst.max_busy_seconds), format_duration(worst.max_claim_seconds)
    lines = [
        f"max delivery duration: {busy_text} from the first attempt to the settlement",
        f"max claim duration:    {claim_text}, including the wait before the first attempt",
        f"retry deferral:        {_describe_step_deferral(worst.process)}",
        f"outage deferral:       {_describe_deferrals(worst)}",
        f"max handler calls:     {worst.calls} ({worst.calls_with_crashes} if every delivery ends in a crash)",
        f"claim:                 {_describe_claim(explanation)}",
    ]
    lines += [
        f"provider {provider.name}: {provider.attempts} attempts within {format_duration(provider.timeout)}"
        f"{_describe_attempt_timeout(provider)}; max calls per transaction: {_format_count(provider.calls)} "
        f"({_format_count(provider.calls_with_crashes)} if every delivery ends in a crash), "
        "plus the probes of an open breaker, which otherwise defers without a call"
        for provider in explanation.stacked
    ]
    return lines


def _format_waits(waits: Sequence[RetryDelay]) -> str:
    """Format the delays between attempts: those that the worker sleeps, then those that the broker holds."""
    if not waits:
        return "none"
    local_waits, broker_waits = (
        [wait for wait in waits if (wait.slept is None) is is_deferred] for is_deferred in (False, True)
    )
    parts = [_format_durations(local_waits)] if local_waits else []
    if broker_waits:
        parts.append(f"then at the broker {_format_durations(broker_waits)}")
    first = waits[0]
    jitter = 0.0 if not first.planned else first.longest / first.planned - 1
    return "; ".join(parts) + (f"; ±{jitter:.0%}" if jitter else "")


def _format_durations(waits: Sequence[RetryDelay]) -> str:
    durations = [format_duration(wait.planned) for wait in waits]
    return ", ".join(
        durations if len(durations) <= _MAX_LISTED_WAITS else [*durations[: _MAX_LISTED_WAITS - 1], "…", durations[-1]]
    )


def _describe_step_deferral(step: StepWorstCase) -> str:
    return f"up to {format_duration(step.deferred)} in total, held by the broker" if step.deferred else "none"


def _describe_deferrals(worst: WorstCase) -> str:
    if not worst.max_deferral:
        return "none (loop.max_deferral is 0): dead-lettered when the provider's own attempts are exhausted"
    times_text = "any number of times" if isinf(worst.deferrals) else f"at most {worst.deferrals:.0f} times"
    return (
        f"up to {format_duration(worst.max_deferral)} after the first deferral (loop.max_deferral), {times_text}; "
        "not counted as an attempt or a delivery"
    )


def _describe_attempt_timeout(provider: ProviderRetries) -> str:
    return "" if provider.attempt_timeout is None else f", each at most {format_duration(provider.attempt_timeout)}"


def _format_count(number: float) -> str:
    return "unlimited" if isinf(number) else f"{number:.0f}"


def _describe_claim(explanation: PolicyExplanation) -> str:
    if explanation.deadline is not None:
        return f"ends after {format_duration(explanation.deadline)}, cannot be renewed"
    if explanation.lease is None:
        return "lasts as long as the connection"
    return f"lasts {format_duration(explanation.lease)}, renewed while the transaction is in flight"


# -- explanation ------------------------------------------------------------------------------------

SCHEMAS: Mapping[str, type[Policy]] = {
    "consumer": ConsumerPolicy,
    "producer": ProducerPolicy,
    "provider": ProviderPolicy,
}


class PolicyExit(ExitCode):
    """Exit codes of ``ergon policy`` and their meanings."""

    OK = 0, "shown"
    REJECTED = 1, "the broker's lease or deadline is shorter than the worst case that the policy allows"
    USAGE = 2, "the command line, the policy, the configuration or the task is invalid"


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
    #: Seconds until the claim ends: *lease* unless it is renewed, *deadline* in any case; None if there is no such end.
    lease: float | None
    deadline: float | None
    #: The providers whose retries multiply those of the task.
    stacked: Sequence[ProviderRetries]
    warnings: Sequence[str]
    #: Why the policy does not fit the broker's deadline; None if it does.
    refused: str | None


def print_explanation(name: str, *, policy: Path | None, config: Path | None, as_json: bool) -> PolicyExit:
    """Print the worst case that the policy of the task called *name* allows."""
    try:
        options = Options(tasks=[name], policy=_to_str(policy), config=_to_str(config))
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
        show(explanation)
    return PolicyExit.OK if explanation.refused is None else PolicyExit.REJECTED


def explain_policy(task: Any, policy: ConsumerPolicy, providers: Sequence[Provider]) -> PolicyExplanation:
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
        warnings=list(_build_warnings(policy, worst, stacked)),
        refused=problem,
    )


def print_schema(kind: str) -> None:
    """Print the JSON Schema of one kind of policy."""
    typer.echo(json.dumps(SCHEMAS[kind].model_json_schema(), indent=2))


def _compute_retries(provider: Provider, worst: WorstCase) -> ProviderRetries:
    attempts = provider.policy.retry.max_attempts
    return ProviderRetries(
        name=f"{provider.provider_name} {provider.capability}",
        attempts=attempts,
        timeout=provider.policy.timeout,
        attempt_timeout=provider.policy.attempt_timeout,
        calls=attempts * (worst.calls + worst.deferrals),
        calls_with_crashes=attempts * (worst.calls_with_crashes + worst.deferrals),
    )


def _deduplicate(providers: Sequence[Provider]) -> Sequence[Provider]:
    return list({id(provider): provider for provider in providers}.values())


def _build_warnings(policy: ConsumerPolicy, worst: WorstCase, stacked: Sequence[ProviderRetries]) -> list[str]:
    """Return warnings for an operator about these numbers."""
    warnings = []
    transaction_timeout = policy.loop.transaction_timeout
    if isinf(worst.max_busy_seconds):
        warnings.append(
            "no timeout ends a hung handler; set steps.process.retry.timeout (and success), or loop.transaction_timeout"
        )
    if transaction_timeout is not None and transaction_timeout < worst.process.timeout < inf:
        warnings.append(
            f"loop.transaction_timeout ({format_duration(transaction_timeout)}) ends an attempt before its own "
            f"timeout ({format_duration(worst.process.timeout)}): steps.process.retry.timeout has no effect"
        )
    if worst.max_busy_seconds > policy.loop.drain_timeout:
        warnings.append(
            f"loop.drain_timeout is {format_duration(policy.loop.drain_timeout)}, but one transaction may take "
            f"{format_duration(worst.max_busy_seconds)}: transactions still running after a drain are redelivered "
            "(without counting a delivery)"
        )
    warnings += [
        f"{one.name} may take {format_duration(one.timeout)}, but an attempt of process ends after "
        f"{format_duration(worst.process.timeout)}: the last attempts are cancelled; lower the provider's timeout"
        for one in stacked
        if one.timeout > worst.process.timeout
    ]
    warnings += [
        f"{one.name} gets one attempt of {one.attempts} if it hangs, because an attempt may use the whole timeout "
        f"({format_duration(one.timeout)}); set attempt_timeout in the provider's policy"
        for one in stacked
        if one.attempts > 1 and (one.attempt_timeout is None or one.attempt_timeout >= one.timeout)
    ]
    return warnings


def _to_json_data(explanation: PolicyExplanation) -> dict[str, Any]:
    """Convert to JSON data; infinity becomes null."""
    payload: dict[str, Any] = _replace_infinity(asdict(explanation))
    worst = explanation.worst
    # The keys of this output are stable, also where a field has another name now.
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


# -- commands ---------------------------------------------------------------------------------------

policy = typer.Typer(
    help="Explain policies and print their JSON Schema.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class PolicyKind(StrEnum):
    """Kinds of policies."""

    CONSUMER = "consumer"
    PRODUCER = "producer"
    PROVIDER = "provider"


@policy.command()
def explain(
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="Task to explain, for example app:charge.")],
    *,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Policy file in TOML or JSON; replaces the task's policy.")
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Show the worst case that a task's policy allows: retry waits, claim duration, handler calls.

    The result includes the retries of providers in the task's module, which multiply the task's own retries. Nothing
    is fetched and no server is queried.

    Exit codes: 0 shown, 1 the broker would redeliver a message that is still being processed, because its lease or
    deadline is shorter than the worst case, 2 invalid task, option, policy or configuration.

    Example: ergon policy explain app:charge
    """
    raise typer.Exit(print_explanation(task, policy=policy, config=config, as_json=json))


@policy.command()
def schema(
    kind: Annotated[PolicyKind, typer.Argument(metavar="KIND", help="Kind of policy.")] = PolicyKind.CONSUMER,
) -> None:
    """Print the JSON Schema of a policy, for an editor or a validation step.

    Exit codes: 0 printed, 2 unknown kind.

    Example: ergon policy schema consumer > consumer-policy.schema.json
    """
    print_schema(kind.value)
