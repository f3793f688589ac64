"""Options that several commands share, filters of dead letters, and parsers of times, durations, rates and sizes."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ergon_framework.audit import current_user
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.errors import Category, ConfigurationError

#: Ages such as 15m, seconds by unit, durations such as 0.5s, and rates such as 50/s.
_AGE_PATTERN = re.compile(r"(\d{1,9})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION_PATTERN = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")
_RATE_PATTERN = re.compile(r"(\d{1,7}(?:\.\d{1,6})?)(?:/([smh]))?")


def parse_time(text: str) -> float:
    """Parse an ISO time (UTC unless it has an offset) or an age such as 15m into seconds since the epoch."""
    if age := _AGE_PATTERN.fullmatch(text):
        return time.time() - int(age[1]) * _UNIT_SECONDS[age[2]]
    try:
        parsed = datetime.fromisoformat(text)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        raise typer.BadParameter(
            f"invalid time {text[:50]!r}; write 2026-01-31T08:00, optionally with Z or an offset, or an age such as 15m"
        ) from None


def parse_duration(text: str) -> float:
    """Parse a duration such as 0.5s, 90s, 15m, 2h or 7d into seconds; reject 0."""
    return _parse_duration(text, minimum=0.001, maximum=inf)


def _parse_duration(text: str, *, minimum: float, maximum: float) -> float:
    match = _DURATION_PATTERN.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"invalid duration {text[:50]!r}; write 0.5s, 90s, 15m, 2h or 7d")
    seconds = float(match[1]) * _UNIT_SECONDS[match[2]]
    if seconds < minimum:
        raise typer.BadParameter(f"invalid duration {text!r}: the minimum is {minimum:.15g}s")
    if seconds > maximum:
        raise typer.BadParameter(f"invalid duration {text!r}: the maximum is {maximum:.15g}s")
    return seconds


def duration_option(help_text: str, *names: str, minimum: float = 0.001, maximum: float = inf, **settings: Any) -> Any:
    """Return an option whose value is a duration, in seconds for the command; a default is text such as 10s."""

    def parse(text: str) -> float:
        return _parse_duration(text, minimum=minimum, maximum=maximum)

    return typer.Option(*names, parser=parse, metavar="DURATION", help=help_text, **settings)


def parse_rate(text: str) -> float:
    """Parse a rate such as 50, 50/s, 300/m or 1000/h into a number per second."""
    match = _RATE_PATTERN.fullmatch(text)
    rate = float(match[1]) / _UNIT_SECONDS[match[2] or "s"] if match else 0.0
    if rate <= 0:
        raise typer.BadParameter(f"invalid rate {text[:50]!r}; write 50/s, 300/m or 1000/h")
    return rate


def _make_option(help_text: str, **option_settings: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Filters", **option_settings)


#: The forms that ``parse_time`` reads.
TIME_FORMS: Final = "an ISO time (UTC unless it has an offset) or an age: 2h is 2 hours ago"
#: One option for each field of the query; `--reason` is the reason that an operator acts for, in every command.
FILTER_OPTIONS: dict[str, Any] = {
    "id": Annotated[str | None, _make_option("Only this transaction id.", metavar="ID")],
    "dead_letter_reason": Annotated[
        str | None, _make_option("Only this dead-letter reason, for example declined.", metavar="REASON")
    ],
    "type": Annotated[str | None, _make_option("Only this transaction type.", metavar="TYPE")],
    "key": Annotated[str | None, _make_option("Only this ordering key.", metavar="KEY")],
    "tenant": Annotated[str | None, _make_option("Only this tenant.", metavar="TENANT")],
    "correlation": Annotated[str | None, _make_option("Only this correlation id.", metavar="ID")],
    "task": Annotated[
        str | None, _make_option("Only dead letters of the task with this name, without its module.", metavar="NAME")
    ],
    "error_type": Annotated[
        str | None, _make_option("Only this error class, for example TimeoutError.", metavar="CLASS")
    ],
    "category": Annotated[Category | None, _make_option("Only this error category.", case_sensitive=False)],
    "since": Annotated[
        float | None,
        _make_option(f"Only dead letters written at or after TIME: {TIME_FORMS}.", parser=parse_time, metavar="TIME"),
    ],
    "until": Annotated[
        float | None,
        _make_option(f"Only dead letters written before TIME: {TIME_FORMS}.", parser=parse_time, metavar="TIME"),
    ],
}


#: The options whose name differs from the field of the query.
_QUERY_FIELDS: Final = {"dead_letter_reason": "reason"}


def add_filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return *command* with one option per filter in place of its ``query`` parameter."""

    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        filters = {_QUERY_FIELDS.get(name, name): arguments.pop(name) for name in FILTER_OPTIONS}
        command(query=_build_query(filters), **arguments)

    own_parameters = inspect.signature(command, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        *(parameter for parameter in own_parameters if parameter.name != "query"),
        *(inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in FILTER_OPTIONS.items()),
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {option.name: option.annotation for option in parameters}
    return wrapper


def _build_query(filters: dict[str, Any]) -> DeadLetterQuery:
    try:
        return DeadLetterQuery.load(**filters)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None


#: Bytes by the unit of a size: powers of 1000 (kB, MB) and of 1024 (kiB, MiB).
_UNITS: Final[dict[str, int]] = {"": 1, "B": 1} | {
    f"{letter}{kind}": int(base**power)
    for power, letter in enumerate(("k", "M", "G", "T"), 1)
    for kind, base in (("B", 1000), ("iB", 1024))
}
_match_size: Final = re.compile(r"(\d+)\s*([kKMGT]?i?B?)").fullmatch


def parse_size(text: str) -> int:
    """Parse a size into a number of bytes.

    >>> parse_size("500MB"), parse_size("2GiB"), parse_size("4096")
    (500000000, 2147483648, 4096)
    """
    match = _match_size(text)
    if match is None or (unit := match[2].replace("K", "k")) not in _UNITS:
        raise typer.BadParameter(f"invalid size {text!r}; write 4096, 500MB or 2GiB")
    return int(match[1]) * _UNITS[unit]


Actor = Annotated[
    str,
    typer.Option(
        envvar=["ERGON_ACTOR", "USER"], metavar="NAME", show_default="current OS user", help="Operator to record."
    ),
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason to record.")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", show_default="ergon.toml, if it exists", help="Configuration file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Skip confirmation.")]
ProbePort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, metavar="PORT", help="Serve /live, /ready and /metrics on this port; 0 selects a free port."
    ),
]
ProbeFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the health status to this file periodically.")
]


def resolve_actor_name(actor: str) -> str:
    """Return *actor*, or the name of the current OS user if it is empty."""
    return actor.strip() or current_user()
