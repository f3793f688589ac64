"""Filters of ``ergon dlq``: one option each, and what people write for a time, an age or a rate."""

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

_AGE = re.compile(r"(\d{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_RATE = re.compile(r"(\d{1,7}(?:\.\d{1,6})?)(?:/([smh]))?")


def moment(text: str) -> float:
    """Seconds since the epoch, from an ISO time (UTC unless it says otherwise) or from an age such as 15m."""
    if age := _AGE.fullmatch(text):
        return time.time() - int(age[1]) * _SECONDS[age[2]]
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        raise typer.BadParameter(
            f"{text[:50]!r} is no time; write 2026-01-31T08:00, with Z or an offset if you like, or an age such as 15m"
        ) from None


def per_second(text: str) -> float:
    """How many in a second, from 50, 50/s, 300/m or 1000/h."""
    found = _RATE.fullmatch(text)
    wanted = float(found[1]) / _SECONDS[found[2] or "s"] if found else 0.0
    if wanted <= 0:
        raise typer.BadParameter(f"{text[:50]!r} is no rate; write 50/s, 300/m or 1000/h")
    return wanted


def _option(words: str, **more: Any) -> Any:
    return typer.Option(help=words, rich_help_panel="Filters", **more)


_TIME = "; an ISO time, UTC unless it says otherwise, or an age such as 90s, 15m, 2h, 7d."
#: One option for each field of the query.
FILTERS: dict[str, Any] = {
    "id": Annotated[str | None, _option("The transaction's id.")],
    "reason": Annotated[str | None, _option("Why it is here, for example declined.")],
    "type": Annotated[str | None, _option("The transaction's type.")],
    "key": Annotated[str | None, _option("The transaction's key.")],
    "tenant": Annotated[str | None, _option("The transaction's tenant.")],
    "correlation": Annotated[str | None, _option("The transaction's correlation.")],
    "task": Annotated[str | None, _option("The task that gave up on it.")],
    "error_type": Annotated[str | None, _option("The class of the error, for example TimeoutError.")],
    "category": Annotated[Category | None, _option("What kind of failure it was.", case_sensitive=False)],
    "since": Annotated[float | None, _option(f"Dead since then{_TIME}", parser=moment, metavar="TIME")],
    "until": Annotated[float | None, _option(f"Dead before then{_TIME}", parser=moment, metavar="TIME")],
}


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """*command*, which takes a ``query``, with an option for each filter in its place."""

    @wraps(command)
    def filtering(**given: Any) -> None:
        command(query=_query({name: given.pop(name) for name in FILTERS}), **given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        *(parameter for parameter in own if parameter.name != "query"),
        *(inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in FILTERS.items()),
    ]
    filtering.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    filtering.__annotations__ = {option.name: option.annotation for option in options}
    return filtering


def _query(given: dict[str, Any]) -> DeadLetterQuery:
    try:
        return DeadLetterQuery.load(**given)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None
