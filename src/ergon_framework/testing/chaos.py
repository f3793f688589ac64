"""Chaos for a task of yours: random mishaps, by seed and in virtual time; whatever counts must count once in each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError
from ergon_framework.testing.mishaps import Mishap, Plan, dies, dies_after, hangs, loses, raises, takes, written
from ergon_framework.testing.trial import Result, Trial
from ergon_framework.transaction import Transaction

#: What may happen to any call.
_ANYWHERE: Final[tuple[Callable[[random.Random], Mishap], ...]] = (
    lambda _: dies(),
    lambda _: dies_after(),
    lambda _: loses(),
    lambda _: raises(ConnectionLost("planned")),
    lambda dice: takes(dice.choice([1.0, 5.0, 20.0, 45.0, 120.0])),
    lambda _: hangs(),
)
#: Renewals of claims: how many there are goes by time, and they say nothing about the task.
_QUIET: Final = frozenset({"extend"})
#: How many plans are tried to make one smaller.
_SHRINKING: Final = 200

#: A mishap with its place and the number of its call.
_Planned: TypeAlias = tuple[str, int, Mishap]


class NotOnce(ErgonError, AssertionError):
    """A transaction was lost or ended twice, or an effect happened more or less than once."""

    final = True
    code = "not_once"


class Effects:
    """Where the fakes of a test write down what happened for good: a charge, a mail, a row.

    An effect has a name, for example the order that was charged. With a *key* that the other side honours it happens
    once however often it is asked for; under two keys, or without one, it happens twice.
    """

    def __init__(self) -> None:
        self._keys: dict[str, list[str | None]] = {}
        #: Says whether whoever writes is alive; what a dead worker's code still does is done by nobody.
        self.alive: Callable[[], bool] = lambda: True

    def happen(self, name: str, *, key: str | None = None) -> bool:
        """Write an effect down; False if it had happened before under this key."""
        if not self.alive():
            return False
        keys = self._keys.setdefault(name, [])
        if key is not None and key in keys:
            return False
        keys.append(key)
        return True

    @property
    def counts(self) -> Counter[str]:
        """How often each effect has happened."""
        return Counter({name: len(keys) for name, keys in self._keys.items()})


#: Makes a trial with its transactions sent, whose fakes write effects down; called once for each run.
Make: TypeAlias = Callable[[Effects], Trial]
#: The names of the effects that a transaction must have had if it was acked.
Owes: TypeAlias = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Survived:
    """What was tried and found in order."""

    runs: int
    seed: int
    mishaps: int
    deaths: int


def survives(make: Make, *, runs: int = 100, seed: int = 0, mishaps: int = 4, owes: Owes | None = None) -> Survived:
    """Run the task of *make* under *runs* random plans of up to *mishaps* each, and count after each.

    Every transaction must be acked, or a dead letter, or still in the queue: one of them, and once. No effect may have
    happened twice, and those that *owes* names for the id of an acked transaction must have happened. Where that does
    not hold NotOnce is raised, with the seed, and with the smallest plan that still shows it.
    """
    if runs < 1 or mishaps < 1:
        raise ConfigurationError(f"chaos needs at least one run and one mishap, not {runs} and {mishaps}")
    calm, found = _judged(make, {}, seed, owes)
    if found:
        raise NotOnce(f"without any mishap: {'; '.join(found)}")
    total = deaths = 0
    for number in range(runs):
        dice = random.Random(f"{seed}/{number}")  # noqa: S311 - not a secret
        planned = _drawn(dice, calm, mishaps)
        result, found = _judged(make, _plan(planned), seed + number, owes)
        if found:
            _tell(make, planned, owes, run=number, seed=seed, found=found)
        total += len(planned)
        deaths += result.deaths
    return Survived(runs, seed, total, deaths)


def _drawn(dice: random.Random, calm: Result, most: int) -> list[_Planned]:
    """Some calls among those that a run without mishaps makes, and a few after them, each with its mishap."""
    made = Counter(call.place for call in calm.calls if call.place not in _QUIET)
    places = sorted(made)
    if not places:
        raise ConfigurationError("the trial made no call at all; send it transactions")
    planned: dict[tuple[str, int], Mishap] = {}
    for _ in range(dice.randint(1, most)):
        place = dice.choice(places)
        planned[place, dice.randint(0, made[place] + 1)] = dice.choice(_ANYWHERE)(dice)
    return [(place, number, mishap) for (place, number), mishap in planned.items()]


def _plan(planned: Sequence[_Planned]) -> Plan:
    plan: dict[str, dict[int, Mishap]] = {}
    for place, number, mishap in sorted(planned, key=lambda one: one[:2]):
        plan.setdefault(place, {})[number] = mishap
    return plan


def _judged(make: Make, plan: Plan, seed: int, owes: Owes | None) -> tuple[Result, list[str]]:
    """One run, and what did not happen once in it."""
    effects = Effects()
    trial = make(effects)
    # What the maker planned itself goes on to happen.
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
    acked, buried, left = result.acked, result.buried, Counter(result.left)
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
    raise NotOnce(
        f"{'; '.join(found)}\n"
        f"seed {seed}, run {run}; the smallest plan that shows it:\n"
        f"faults = {written(_plan(planned))}\n"
        f"give it to the trial as faults=faults, with seed={seed + run}, to see it again"
    )


def _shrunk(
    make: Make, planned: list[_Planned], owes: Owes | None, *, seed: int, found: list[str]
) -> tuple[list[_Planned], list[str]]:
    """The plan with every mishap taken out, and every number made smaller, that is not needed."""
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


def owed_by(transactions: Sequence[Transaction], name: Callable[[Transaction], str]) -> Owes:
    """That each of *transactions*, if it was acked, had one effect, which *name* names."""
    names = {transaction.id: [name(transaction)] for transaction in transactions}
    return lambda transaction: names.get(transaction, [])
