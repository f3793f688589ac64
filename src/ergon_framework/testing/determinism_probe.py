"""Program for a fresh process that makes an id twice, the second time with the clock shifted; run by its path.

It imports nothing of the framework, and loads the requested function only after the clock is patched: a name that was
imported from ``time`` before could not be shifted.
"""

from __future__ import annotations

import datetime as dt
import json
import pickle  # nosec - written by the process that started this one
import sys
import time
from collections.abc import Callable
from datetime import date as RealDate  # noqa: N812 - what is replaced below
from datetime import datetime as RealDatetime  # noqa: N812 - what is replaced below
from typing import Any

#: Seconds by which the clock is shifted.
clock_offset_seconds = 0.0


def _shift_clock(real: Callable[[], Any], unit: float) -> Callable[[], Any]:
    """Return *real* shifted by the current offset; *unit* is the number of its units in a second."""
    return lambda: real() + type(real())(clock_offset_seconds * unit)


def _default_to_shifted_now(real: Callable[..., Any]) -> Callable[..., Any]:
    now = time.time
    return lambda seconds=None: real(now() + clock_offset_seconds if seconds is None else seconds)


def _default_to_local_time(real: Callable[..., str]) -> Callable[..., str]:
    return lambda format_string, when=None: real(format_string, time.localtime() if when is None else when)


class _AnyDate(type):
    """Metaclass that accepts every real date as an instance, also one created in C."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, RealDate)


class _AnyDatetime(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, RealDatetime)


class _Date(RealDate, metaclass=_AnyDate):
    @classmethod
    def today(cls) -> Any:
        return cls.fromtimestamp(time.time())


class _Datetime(RealDatetime, metaclass=_AnyDatetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Any:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def today(cls) -> Any:
        return cls.now()

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(dt.UTC).replace(tzinfo=None)


def patch_clock() -> None:
    """Shift all clocks of this process by ``clock_offset_seconds``."""
    replacements: dict[str, Any] = {
        name: _shift_clock(getattr(time, name), unit)
        for name, unit in (
            ("monotonic", 1),
            ("perf_counter", 1),
            ("time_ns", 1_000_000_000),
            ("monotonic_ns", 1_000_000_000),
            ("perf_counter_ns", 1_000_000_000),
        )
    }
    for name in ("localtime", "gmtime", "ctime"):
        replacements[name] = _default_to_shifted_now(getattr(time, name))
    replacements["strftime"] = _default_to_local_time(time.strftime)
    replacements["time"] = _shift_clock(time.time, 1)
    for name, function in replacements.items():
        setattr(time, name, function)
    dt.date = _Date  # type: ignore[misc]
    dt.datetime = _Datetime  # type: ignore[misc]


def main() -> None:
    """Read the request from stdin, and write the result to stdout as JSON."""
    global clock_offset_seconds  # noqa: PLW0603 - it is the clock of this process
    output, sys.stdout = sys.stdout, sys.stderr  # output of the function must not mix with the result
    # The process that started this one has written the request.
    request = pickle.load(sys.stdin.buffer)  # noqa: S301  # nosec
    sys.path[:] = request["path"]
    patch_clock()
    make, args, fields = pickle.loads(request["work"])  # noqa: S301  # nosec
    fresh = make(*args, **fields)
    clock_offset_seconds = request["moved"]
    later = make(*args, **fields)
    json.dump([repr(fresh), repr(later)], output)


if __name__ == "__main__":
    main()
