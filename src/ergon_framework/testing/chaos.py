"""Chaos tests for a task: random faults by seed, in virtual time; every effect must happen exactly once per run.

A place is a kind of call that the harness can disturb, such as a fetch or a handler; a plan maps places and call
numbers to faults. An effect is a side effect of a handler, recorded by the fakes of the test. The baseline is the run
without planned faults: it shows which calls there are to disturb. A transaction that is still queued at the end of a
run, because its worker was killed or the run was over, is neither lost nor ended.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError
from ergon_framework.testing.faults import (
    Fault,
    Plan,
    format_plan,
    hangs,
    loses_response,
    raises,
    takes_longer,
    worker_dies_after,
    worker_dies_before,
)
from ergon_framework.testing.harness import HarnessResult, TaskHarness
from ergon_framework.transaction import Transaction

#: Faults that may be planned for any call.
_FAULT_FACTORIES: Final[tuple[Callable[[random.Random], Fault], ...]] = (
    lambda _: worker_dies_before(),
    lambda _: worker_dies_after(),
    lambda _: loses_response(),
    lambda _: raises(ConnectionLostError("planned")),
    lambda rng: takes_longer(rng.choice([1.0, 5.0, 20.0, 45.0, 120.0])),
    lambda _: hangs(),
)
#: Places without faults: the number of lease renewals depends on time and does not depend on the task.
_EXCLUDED_PLACES: Final = frozenset({"extend"})
#: Maximum number of runs to shrink a plan.
_MAX_SHRINK_RUNS: Final = 200

#: A fault with its place and the number of its call.
_PlannedFault: TypeAlias = tuple[str, int, Fault]


class NotExactlyOnceError(ErgonError, AssertionError):
    """A transaction was lost or ended twice, or an effect did not happen exactly once."""

    final = True
    code = "not_once"


class Effects:
    """Record of the effects in the fakes of a test: a charge, a mail, a row.

    An effect has a name, for example the charged order. With an idempotency *key* it happens once however often it is
    requested; under two keys, or without a key, it happens twice.
    """

    def __init__(self) -> None:
        self._keys: dict[str, list[str | None]] = {}
        #: Returns whether the calling worker is alive; effects of a killed worker's code are not recorded.
        self.is_alive: Callable[[], bool] = lambda: True

    def record(self, name: str, *, key: str | None = None) -> bool:
        """Record an effect; return False if it was recorded before under this key."""
        if not self.is_alive():
            return False
        keys = self._keys.setdefault(name, [])
        if key is not None and key in keys:
            return False
        keys.append(key)
        return True

    @property
    def counts(self) -> Counter[str]:
        """The number of occurrences of each effect."""
        return Counter({name: len(keys) for name, keys in self._keys.items()})


#: Creates a harness with its transactions sent, whose fakes record their effects; called once per run.
HarnessFactory: TypeAlias = Callable[[Effects], TaskHarness]
#: Returns the names of the effects that an acked transaction must have had.
RequiredEffects: TypeAlias = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """The number of runs, faults and killed workers of a chaos test that passed."""

    runs: int
    seed: int
    faults: int
    killed_workers: int


def assert_survives(
    make_harness: HarnessFactory,
    *,
    runs: int = 100,
    seed: int = 0,
    max_faults: int = 4,
    required_effects: RequiredEffects | None = None,
) -> ChaosResult:
    """Run the task of *make_harness* under *runs* random plans of up to *max_faults* each, and check every run.

    Every transaction must be acked, dead-lettered or still queued, exactly once. No effect may happen twice, and the
    effects that *required_effects* names for the id of an acked transaction must have happened. Raises
    NotExactlyOnceError otherwise, with the seed and the smallest plan that reproduces the violation.
    """
    if runs < 1 or max_faults < 1:
        raise ConfigurationError(f"runs and max_faults must be at least 1, got {runs} and {max_faults}")
    baseline, violations = _run_and_check(make_harness, {}, seed, required_effects)
    if violations:
        raise NotExactlyOnceError(f"without any fault: {'; '.join(violations)}")
    total = killed_workers = 0
    for number in range(runs):
        rng = random.Random(f"{seed}/{number}")  # noqa: S311 - not a secret
        planned = _draw_faults(rng, baseline, max_faults)
        result, violations = _run_and_check(make_harness, _to_plan(planned), seed + number, required_effects)
        if violations:
            _raise_violation(make_harness, planned, required_effects, run=number, seed=seed, violations=violations)
        total += len(planned)
        killed_workers += result.killed_workers
    return ChaosResult(runs, seed, total, killed_workers)


def _draw_faults(rng: random.Random, baseline: HarnessResult, max_faults: int) -> list[_PlannedFault]:
    """Draw calls of the run without faults (*baseline*) and give each a fault.

    A drawn number may be up to one beyond the calls of the baseline: a fault causes further calls, such as retries.
    """
    call_counts = Counter(call.place for call in baseline.calls if call.place not in _EXCLUDED_PLACES)
    places = sorted(call_counts)
    if not places:
        raise ConfigurationError("the harness run made no call; send transactions to the harness first")
    planned: dict[tuple[str, int], Fault] = {}
    for _ in range(rng.randint(1, max_faults)):
        place = rng.choice(places)
        planned[place, rng.randint(0, call_counts[place] + 1)] = rng.choice(_FAULT_FACTORIES)(rng)
    return [(place, number, fault) for (place, number), fault in planned.items()]


def _to_plan(planned: Sequence[_PlannedFault]) -> Plan:
    plan: dict[str, dict[int, Fault]] = {}
    for place, number, fault in sorted(planned, key=lambda item: item[:2]):
        plan.setdefault(place, {})[number] = fault
    return plan


def _run_and_check(
    make_harness: HarnessFactory, plan: Plan, seed: int, required_effects: RequiredEffects | None
) -> tuple[HarnessResult, list[str]]:
    """Run the harness once; return its result and the violations."""
    effects = Effects()
    harness = make_harness(effects)
    # Faults planned by the factory stay in effect.
    harness.faults = _merge_plans(harness.faults, plan)
    harness.seed = seed
    effects.is_alive = lambda: not harness.is_killed
    result = harness.run()
    return result, _find_violations(result, effects.counts, required_effects)


def _merge_plans(own_plan: Plan, extra_plan: Plan) -> Plan:
    """Merge both plans; a fault of *own_plan*, or its faults for every call of a place, take precedence."""
    merged: dict[str, Any] = dict(own_plan)
    for place, planned in extra_plan.items():
        own_faults = merged.get(place, {})
        if isinstance(own_faults, Mapping) and isinstance(planned, Mapping):
            merged[place] = {**planned, **own_faults}
    return merged


def _find_violations(
    result: HarnessResult, effects: Counter[str], required_effects: RequiredEffects | None
) -> list[str]:
    """Describe what is wrong with a run: lost or doubled transactions, missing or repeated effects."""
    violations = []
    acked, dead_lettered, remaining = result.acked, result.dead_lettered, Counter(result.remaining)
    for name, sent_count in Counter(result.sent).items():
        ended_count = acked[name] + dead_lettered[name] + remaining[name]
        if ended_count != sent_count:
            counts = f"acked {acked[name]}, dead-lettered {dead_lettered[name]}, still queued {remaining[name]} times"
            problem = "was lost" if ended_count < sent_count else "ended more than once"
            violations.append(f"the transaction {name!r} {problem}: sent {sent_count} times, {counts}")
        if required_effects is not None and acked[name]:
            violations += [
                f"the transaction {name!r} was acked, but the effect {effect!r} did not happen"
                for effect in required_effects(name)
                if not effects[effect]
            ]
    violations += [
        f"the effect {name!r} happened {count} times" for name, count in sorted(effects.items()) if count > 1
    ]
    return violations


def _raise_violation(
    make_harness: HarnessFactory,
    planned: list[_PlannedFault],
    required_effects: RequiredEffects | None,
    *,
    run: int,
    seed: int,
    violations: list[str],
) -> None:
    planned, violations = _shrink(make_harness, planned, required_effects, seed=seed + run, violations=violations)
    raise NotExactlyOnceError(
        f"{'; '.join(violations)}\n"
        f"seed {seed}, run {run}; smallest plan that reproduces it:\n"
        f"faults = {format_plan(_to_plan(planned))}\n"
        f"to reproduce it, pass faults=faults and seed={seed + run} to the harness"
    )


def _shrink(
    make_harness: HarnessFactory,
    planned: list[_PlannedFault],
    required_effects: RequiredEffects | None,
    *,
    seed: int,
    violations: list[str],
) -> tuple[list[_PlannedFault], list[str]]:
    """Remove faults and reduce call numbers while the violation remains."""
    tries = 0
    was_reduced = True
    while was_reduced:
        was_reduced = False
        for reduced in _list_reductions(planned):
            if tries >= _MAX_SHRINK_RUNS:
                return planned, violations
            tries += 1
            _, remaining_violations = _run_and_check(make_harness, _to_plan(reduced), seed, required_effects)
            if remaining_violations:
                planned, violations, was_reduced = reduced, remaining_violations, True
                break
    return planned, violations


def _list_reductions(planned: list[_PlannedFault]) -> list[list[_PlannedFault]]:
    fewer = [planned[:n] + planned[n + 1 :] for n in range(len(planned)) if len(planned) > 1]
    planned_calls = {(place, number) for place, number, _ in planned}
    earlier = [
        [*planned[:n], (place, earlier_number, fault), *planned[n + 1 :]]
        for n, (place, number, fault) in enumerate(planned)
        for earlier_number in range(number)
        if (place, earlier_number) not in planned_calls
    ]
    return fewer + earlier


def assert_one_effect_per_ack(
    transactions: Sequence[Transaction], name: Callable[[Transaction], str]
) -> RequiredEffects:
    """Return required effects: each acked transaction of *transactions* had the effect that *name* returns."""
    effect_names = {transaction.id: [name(transaction)] for transaction in transactions}
    return lambda transaction: effect_names.get(transaction, [])
