"""Retry-After, in both of its forms; the wall time is handed in."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

#: What is longer is taken for this. No window of a quota is longer than a month, so a larger number
#: is a slip, and a deferral that it led to would never be seen again.
LONGEST: Final = 31 * 86_400.0

_SECONDS: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def seconds(value: str | None, *, now: float) -> float | None:
    """The seconds from *now* (since the epoch) that *value* asks to wait; None where it asks for nothing.

    A number below 0, a date that has passed, and what is neither a number nor a date ask for nothing.

    >>> seconds("120", now=0.0), seconds("Thu, 01 Jan 1970 00:01:30 GMT", now=60.0), seconds("soon", now=0.0)
    (120.0, 30.0, None)
    """
    if value is None:
        return None
    text = value.strip()
    if _SECONDS.fullmatch(text):
        return min(float(text), LONGEST)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):  # what the parser meets in text that is no date
        return None
    wait = _since_epoch(moment) - now
    return min(wait, LONGEST) if wait >= 0 else None


def _since_epoch(moment: datetime) -> float:
    # Two of the three forms of a date name no zone; all three mean UTC.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
