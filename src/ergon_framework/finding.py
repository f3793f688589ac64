"""Finding: what somebody saw who looked at a server, a queue or a setting, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, TypeAlias, runtime_checkable

#: Seconds since the epoch, by the clock of whoever looks.
Wall: TypeAlias = Callable[[], float]

#: Seconds by which two clocks may differ before that is told, and before it breaks something.
NEAR: Final = 1.0
FAR: Final = 60.0


class Weight(StrEnum):
    """How much it matters."""

    FINE = "fine"
    #: It works, and may cost something one day.
    WARNING = "warning"
    #: Work stands still, or is lost.
    BROKEN = "broken"


class Page(StrEnum):
    """A page that a message sends somebody to, by its title in the menu of the site: a wheel brings no documents."""

    CONFIGURE = "Configure"
    EXECUTORS = "Executors in your language"
    SERVE_FACTS = "Serve facts"
    FACTS_RUNBOOK = "When facts do not arrive"

    @property
    def named(self) -> str:
        """How a message names it.

        >>> Page.CONFIGURE.named
        'the page "Configure" of the documentation'
        """
        return f'the page "{self.value}" of the documentation'


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: *what*, what was *seen* there with its values, and what to *do*.

    *shared* says that it is the server's and not one queue's: who looks at several queues of a server tells it once.
    """

    what: str
    weight: Weight
    seen: str
    do: str = ""
    shared: bool = True


@runtime_checkable
class Examinable(Protocol):
    """A connector that can be looked at as it is: nothing is made, moved or changed by that."""

    def examine(self, wall: Wall) -> Sequence[Finding]:
        """How server and queue are; an ErgonError where it cannot be said. Not to be called on an event loop."""


def of_clocks(theirs: float, before: float, after: float, *, server: str) -> Finding:
    """How far the clock of *server*, which said *theirs* between two looks at ours, is from ours.

    What the way to it took is nobody's fault: the middle of the two looks is compared, and half of what lies between
    them is given away.

    >>> of_clocks(100.0, 99.9, 100.1, server="Redis").weight.value
    'fine'
    >>> of_clocks(190.0, 99.9, 100.1, server="Redis").seen
    'the clock of Redis is 90.0 s ahead of ours'
    """
    apart, doubt = theirs - (before + after) / 2, (after - before) / 2
    sure = max(0.0, abs(apart) - doubt)
    if sure <= NEAR:
        return Finding("clock", Weight.FINE, f"the clock of {server} and ours are within {NEAR:g} s")
    side = "ahead of" if apart > 0 else "behind"
    return Finding(
        "clock",
        Weight.BROKEN if sure > FAR else Weight.WARNING,
        f"the clock of {server} is {abs(apart):.1f} s {side} ours",
        "have both machines keep their time by NTP (chronyc tracking, timedatectl): expiry and due times go by them",
    )


def of_durability(words: str, *, durable: bool | None, do: str) -> Finding:
    """What a confirmation is worth, as the connector judges it; unknown is not durable."""
    return Finding("durability", Weight.FINE if durable else Weight.WARNING, words, "" if durable else do)


def of_version(found: str, *, server: str, number: Sequence[int], needed: tuple[int, ...]) -> Finding:
    """Whether the version of *server*, *number*, is one that we work with."""
    least = ".".join(map(str, needed))
    if tuple(number) >= needed:
        return Finding("version", Weight.FINE, f"{server} {found}; {least} or newer is needed")
    return Finding(
        "version",
        Weight.BROKEN,
        f"{server} {found} is too old",
        f"upgrade the server to {least} or newer",
    )
