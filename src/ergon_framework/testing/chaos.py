"""Chaos tests for a task: random faults by seed, in virtual time; every effect must happen exactly once per run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError
from ergon_framework.testing.mishaps import (
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
from ergon_framework.testing.trial import Result, TaskHarness
from ergon_framework.transaction import Transaction

#: Faults that may be planned for any call.
_ANYWHERE: Final[tuple[Callable[[random.Random], Fault], ...]] = (
    lambda _: worker_dies_before(),
    lambda _: worker_dies_after(),
    lambda _: loses_response(),
    lambda _: raises(ConnectionLostError("planned")),
    lambda dice: takes_longer(dice.choice([1.0, 5.0, 20.0, 45.0, 120.0])),
    lambda _: hangs(),
)
#: Places without faults: the number of lease renewals depends on time and does not depend on the task.
_QUIET: Final = frozenset({"extend"})
#: Maximum number of runs to shrink a plan.
_SHRINKING: Final = 200

#: A fault with its place and the number of its call.
_Planned: TypeAlias = tuple[str, int, Fault]


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
        self.alive: Callable[[], bool] = lambda: True

    def record(self, name: str, *, key: str | None = None) -> bool:
        """Record an effect; return False if it was recorded before under this key."""
        if not self.alive():
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
Make: TypeAlias = Callable[[Effects], TaskHarness]
#: Returns the names of the effects that an acked transaction must have had.
Owes: TypeAlias = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """The number of runs, faults and killed workers of a chaos test that passed."""

    runs: int
    seed: int
    mishaps: int
    deaths: int


def assert_survives(
    make: Make, *, runs: int = 100, seed: int = 0, mishaps: int = 4, owes: Owes | None = None
) -> ChaosResult:
    """Run the task of *make_harness* under *runs* random plans of up to *max_faults* each, and check every run.

    Every transaction must be acked, dead-lettered or still queued, exactly once. No effect may happen twice, and the
    effects that *required_effects* names for the id of an acked transaction must have happened. Raises
    NotExactlyOnceError otherwise, with the seed and the smallest plan that reproduces the violation.
    """
    if runs < 1 or mishaps < 1:
        raise ConfigurationError(f"chaos needs at least one run and one mishap, not {runs} and {mishaps}")
    calm, found = _judged(make, {}, seed, owes)
    if found:
        raise NotExactlyOnceError(f"without any mishap: {'; '.join(found)}")
    total = deaths = 0
    for number in range(runs):
        dice = random.Random(f"{seed}/{number}")  # noqa: S311 - not a secret
        planned = _drawn(dice, calm, mishaps)
        result, found = _judged(make, _plan(planned), seed + number, owes)
        if found:
            _tell(make, planned, owes, run=number, seed=seed, found=found)
        total += len(planned)
        deaths += result.deaths
    return ChaosResult(runs, seed, total, deaths)


def _drawn(dice: random.Random, calm: Result, most: int) -> list[_Planned]:
    """Draw some calls of a run without faults, and a few calls after them, each with a fault."""
    made = Counter(call.place for call in calm.calls if call.place not in _QUIET)
    places = sorted(made)
    if not places:
        raise ConfigurationError("the trial made no call at all; send it transactions")
    planned: dict[tuple[str, int], Fault] = {}
    for _ in range(dice.randint(1, most)):
        place = dice.choice(places)
        planned[place, dice.randint(0, made[place] + 1)] = dice.choice(_ANYWHERE)(dice)
    return [(place, number, mishap) for (place, number), mishap in planned.items()]


def _plan(planned: Sequence[_Planned]) -> Plan:
    plan: dict[str, dict[int, Fault]] = {}
    for place, number, mishap in sorted(planned, key=lambda one: one[:2]):
        plan.setdefault(place, {})[number] = mishap
    return plan


def _judged(make: Make, plan: Plan, seed: int, owes: Owes | None) -> tuple[Result, list[str]]:
    """Run the harness once; return its result and the violations."""
    effects = Effects()
    trial = make(effects)
    # Faults planned by the factory stay in effect.
    trial.faults = _both(trial.faults, plan)
    trial.seed = seed
    effects.alive = lambda: not trial.dead
    result = trial.run()
    return result, _faults(result, effects.counts, owes)


def _both(own: Plan, more: Plan) -> Plan:
    merged: dict[str, Any] = dict(own)
    for place, planned in more.items():
        before = merged.get(place, {})
        if isinstance(before, Mapping) and isinstance(planned, Mapping):
            merged[place] = {**planned, **before}
    return merged


def _faults(result: Result, effects: Counter[str], owes: Owes | None) -> list[str]:
    found = []
    acked, buried, left = result.acked, result.dead_lettered, Counter(result.left)
    for name, sent in Counter(result.sent).items():
        ended = acked[name] + buried[name] + left[name]
        if ended != sent:
            where = f"acked {acked[name]}, dead {buried[name]}, left {left[name]} times"
            word = "was lost" if ended < sent else "ended more than once"
            found.append(f"the transaction {name!r} {word}: sent {sent} times, {where}")
        if owes is not None and acked[name]:
            found += [
                f"the transaction {name!r} was acked, but the effect {effect!r} did not happen"
                for effect in owes(name)
                if not effects[effect]
            ]
    found += [f"the effect {name!r} happened {count} times" for name, count in sorted(effects.items()) if count > 1]
    return found


def _tell(make: Make, planned: list[_Planned], owes: Owes | None, *, run: int, seed: int, found: list[str]) -> None:
    planned, found = _shrunk(make, planned, owes, seed=seed + run, found=found)
    raise NotExactlyOnceError(
        f"{'; '.join(found)}\n"
        f"seed {seed}, run {run}; the smallest plan that shows it:\n"
        f"faults = {format_plan(_plan(planned))}\n"
        f"give it to the trial as faults=faults, with seed={seed + run}, to see it again"
    )


def _shrunk(
    make: Make, planned: list[_Planned], owes: Owes | None, *, seed: int, found: list[str]
) -> tuple[list[_Planned], list[str]]:
    """Remove faults and reduce call numbers while the violation remains."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(planned):
            if tries >= _SHRINKING:
                return planned, found
            tries += 1
            _, still = _judged(make, _plan(candidate), seed, owes)
            if still:
                planned, found, smaller = candidate, still, True
                break
    return planned, found


def _candidates(planned: list[_Planned]) -> list[list[_Planned]]:
    fewer = [planned[:n] + planned[n + 1 :] for n in range(len(planned)) if len(planned) > 1]
    taken = {(place, number) for place, number, _ in planned}
    earlier = [
        [*planned[:n], (place, before, mishap), *planned[n + 1 :]]
        for n, (place, number, mishap) in enumerate(planned)
        for before in range(number)
        if (place, before) not in taken
    ]
    return fewer + earlier


def assert_one_effect_per_ack(transactions: Sequence[Transaction], name: Callable[[Transaction], str]) -> Owes:
    """Return required effects: each acked transaction of *transactions* had the effect that *name* returns."""
    names = {transaction.id: [name(transaction)] for transaction in transactions}
    return lambda transaction: names.get(transaction, [])
