"""Diagnostics: the result of a check of a server, a queue or a setting, with its remedy, for ``ergon doctor``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, TypeAlias, runtime_checkable

#: Returns seconds since the epoch, by the clock of the process that checks.
WallClock: TypeAlias = Callable[[], float]

#: Clock skew in seconds that is reported as a warning, and as an error.
WARNING_SKEW_SECONDS: Final = 1.0
ERROR_SKEW_SECONDS: Final = 60.0


class Severity(StrEnum):
    """The severity of a diagnostic."""

    OK = "ok"
    #: It works, but may cause a problem later.
    WARNING = "warning"
    #: Work is blocked or lost.
    ERROR = "error"


class DocPage(StrEnum):
    """A documentation page by its title in the site's menu; messages name it, because a wheel has no documents."""

    CONFIGURE = "Configure"
    EXECUTORS = "Executors in your language"
    SERVE_FACTS = "Serve facts"
    FACTS_RUNBOOK = "When facts do not arrive"

    @property
    def label(self) -> str:
        """The name of the page in a message.

        >>> DocPage.CONFIGURE.label
        'the page "Configure" of the documentation'
        """
        return f'the page "{self.value}" of the documentation'


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """The result of one *check*: its severity, what was *observed* with its values, and the *remedy*.

    *shared* means that it holds for the server and not for one queue: a report on several queues of a server shows
    it once.
    """

    check: str
    severity: Severity
    observed: str
    remedy: str = ""
    shared: bool = True


@runtime_checkable
class Diagnosable(Protocol):
    """A connector with read-only diagnostics: they create, move and change nothing."""

    def diagnose(self, wall: WallClock) -> Sequence[Diagnostic]:
        """Return the state of server and queue; ErgonError if it is unavailable. Not for use on an event loop."""


def check_clock_skew(server_time: float, before: float, after: float, *, server: str) -> Diagnostic:
    """Compare the clock of *server*, which showed *server_time*, with the local clock before and after the request.

    The duration of the request is unknown error: the middle of the two local times is compared, and half of the
    interval between them is tolerated.

    >>> check_clock_skew(100.0, 99.9, 100.1, server="Redis").severity.value
    'ok'
    >>> check_clock_skew(190.0, 99.9, 100.1, server="Redis").observed
    'the clock of Redis is 90.0 s ahead of that of this process'
    """
    skew, tolerance = server_time - (before + after) / 2, (after - before) / 2
    certain_skew = max(0.0, abs(skew) - tolerance)
    if certain_skew <= WARNING_SKEW_SECONDS:
        return Diagnostic(
            "clock", Severity.OK, f"the clocks of {server} and this process are within {WARNING_SKEW_SECONDS:g} s"
        )
    direction = "ahead of" if skew > 0 else "behind"
    return Diagnostic(
        "clock",
        Severity.ERROR if certain_skew > ERROR_SKEW_SECONDS else Severity.WARNING,
        f"the clock of {server} is {abs(skew):.1f} s {direction} that of this process",
        "synchronise both machines by NTP (chronyc tracking, timedatectl): expiry and due times depend on it",
    )


def check_durability(message: str, *, durable: bool | None, remedy: str) -> Diagnostic:
    """Return the durability of a confirmation, as the connector assesses it; unknown counts as not durable."""
    return Diagnostic("durability", Severity.OK if durable else Severity.WARNING, message, "" if durable else remedy)


def check_version(version: str, *, server: str, number: Sequence[int], minimum: tuple[int, ...]) -> Diagnostic:
    """Check that *number*, the version of *server*, is at least *minimum*."""
    minimum_text = ".".join(map(str, minimum))
    if tuple(number) >= minimum:
        return Diagnostic("version", Severity.OK, f"{server} {version}; {minimum_text} or newer is needed")
    return Diagnostic(
        "version",
        Severity.ERROR,
        f"{server} {version} is too old",
        f"upgrade the server to {minimum_text} or newer",
    )
