"""Filter options of ``ergon dlq``, and parsers for times, ages and rates."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Annotated, Any

import typer

from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.errors import Category, ConfigurationError

_AGE_PATTERN = re.compile(r"(\d{1,9})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
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
            f"{text[:50]!r} is no time; write 2026-01-31T08:00, with Z or an offset if you like, or an age such as 15m"
        ) from None


def parse_rate(text: str) -> float:
    """Parse a rate such as 50, 50/s, 300/m or 1000/h into a number per second."""
    match = _RATE_PATTERN.fullmatch(text)
    rate = float(match[1]) / _UNIT_SECONDS[match[2] or "s"] if match else 0.0
    if rate <= 0:
        raise typer.BadParameter(f"{text[:50]!r} is no rate; write 50/s, 300/m or 1000/h")
    return rate


def _make_option(help_text: str, **option_settings: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Filters", **option_settings)


_TIME_HELP = "; an ISO time, UTC unless it says otherwise, or an age such as 90s, 15m, 2h, 7d."
#: One option for each field of the query.
FILTER_OPTIONS: dict[str, Any] = {
    "id": Annotated[str | None, _make_option("The transaction's id.")],
    "reason": Annotated[str | None, _make_option("Why it is here, for example declined.")],
    "type": Annotated[str | None, _make_option("The transaction's type.")],
    "key": Annotated[str | None, _make_option("The transaction's key.")],
    "tenant": Annotated[str | None, _make_option("The transaction's tenant.")],
    "correlation": Annotated[str | None, _make_option("The transaction's correlation.")],
    "task": Annotated[str | None, _make_option("The task that gave up on it.")],
    "error_type": Annotated[str | None, _make_option("The class of the error, for example TimeoutError.")],
    "category": Annotated[Category | None, _make_option("What kind of failure it was.", case_sensitive=False)],
    "since": Annotated[float | None, _make_option(f"Dead since then{_TIME_HELP}", parser=parse_time, metavar="TIME")],
    "until": Annotated[float | None, _make_option(f"Dead before then{_TIME_HELP}", parser=parse_time, metavar="TIME")],
}


def add_filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return *command* with one option per filter in place of its ``query`` parameter."""

    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        command(query=_build_query({name: arguments.pop(name) for name in FILTER_OPTIONS}), **arguments)

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
