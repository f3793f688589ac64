"""The Retry-After header in both of its forms; the wall time is passed in."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

#: Longer pauses are reduced to this. No quota window is longer than a month, so a larger number is
#: a mistake, and its deferral would never end.
MAX_RETRY_AFTER_SECONDS: Final = 31 * 86_400.0

_SECONDS_PATTERN: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def parse_retry_after(value: str | None, *, now: float) -> float | None:
    """Return the seconds from *now* (since the epoch) that *value* asks to wait; None if it asks for nothing.

    A negative number, a date in the past, and text that is neither a number nor a date ask for nothing.

    >>> [parse_retry_after(value, now=60.0) for value in ("120", "Thu, 01 Jan 1970 00:01:30 GMT", "soon")]
    [120.0, 30.0, None]
    """
    if value is None:
        return None
    text = value.strip()
    if _SECONDS_PATTERN.fullmatch(text):
        return min(float(text), MAX_RETRY_AFTER_SECONDS)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):  # the parser's errors for text that is not a date
        return None
    wait = _to_epoch_seconds(moment) - now
    return min(wait, MAX_RETRY_AFTER_SECONDS) if wait >= 0 else None


def _to_epoch_seconds(moment: datetime) -> float:
    # Two of the three date formats name no zone; all three mean UTC.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
