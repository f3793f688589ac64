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
from datetime import datetime as RealDatetime  # noqa: N812 - as above
from typing import Any

#: Seconds by which the clock is shifted.
moved = 0.0


def _ahead(real: Callable[[], Any], unit: float) -> Callable[[], Any]:
    return lambda: real() + type(real())(moved * unit)


def _now_by_default(real: Callable[..., Any]) -> Callable[..., Any]:
    now = time.time
    return lambda seconds=None: real(now() + moved if seconds is None else seconds)


def _formatted(real: Callable[..., str]) -> Callable[..., str]:
    return lambda form, when=None: real(form, time.localtime() if when is None else when)


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
    given: dict[str, Any] = {
        name: _ahead(getattr(time, name), unit)
        for name, unit in (
            ("monotonic", 1),
            ("perf_counter", 1),
            ("time_ns", 1_000_000_000),
            ("monotonic_ns", 1_000_000_000),
            ("perf_counter_ns", 1_000_000_000),
        )
    }
    for name in ("localtime", "gmtime", "ctime"):
        given[name] = _now_by_default(getattr(time, name))
    given["strftime"] = _formatted(time.strftime)
    given["time"] = _ahead(time.time, 1)
    for name, function in given.items():
        setattr(time, name, function)
    dt.date = _Date  # type: ignore[misc]
    dt.datetime = _Datetime  # type: ignore[misc]


def main() -> None:
    """Read the request from stdin, and write the result to stdout as JSON."""
    global moved  # noqa: PLW0603 - it is the clock of this process
    answer, sys.stdout = sys.stdout, sys.stderr  # output of the function must not mix with the result
    asked = pickle.load(sys.stdin.buffer)  # noqa: S301  # nosec - see above
    sys.path[:] = asked["path"]
    patch_clock()
    make, args, fields = pickle.loads(asked["work"])  # noqa: S301  # nosec - see above
    fresh = make(*args, **fields)
    moved = asked["moved"]
    later = make(*args, **fields)
    json.dump([repr(fresh), repr(later)], answer)


if __name__ == "__main__":
    main()
