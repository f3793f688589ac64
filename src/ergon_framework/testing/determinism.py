"""Check that a function makes the same id for the same event in another call, in another process, and at another time.

A fact or transaction that is sent again after a failure must have the same id, or it counts as a second one.
"""

from __future__ import annotations

import json
import os
import pickle  # nosec - read by a process that is started here
import subprocess  # nosec - the framework's own file, with the interpreter that runs this
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, ErgonError

#: Seconds by which the clock is shifted: more than a year, and not a whole number of days.
CLOCK_OFFSET_SECONDS: Final = 400 * 86_400 + 12_345.678
#: Timeout of a fresh process in seconds.
PROCESS_TIMEOUT_SECONDS: Final = 60.0


class NotDeterministicError(ErgonError, AssertionError):
    """One event has two ids: a retry would append it twice."""

    final = True
    code = "not_deterministic"


def assert_deterministic(
    make: Callable[..., Any], *args: Any, ignores: Mapping[str, Sequence[Any]] | None = None, **fields: Any
) -> None:
    """Fail unless ``make(*args, **fields)`` makes the same id again, in a fresh process, and with the clock shifted.

    *ignores* maps fields that are not part of the key to other values, which must not change the id. *make* is a
    function of a module, so that another process can import it.
    """
    first = make(*args, **fields)
    _compare_results(first, make(*args, **fields), "called a second time", "does it use a random source or a counter?")
    for name, others in (ignores or {}).items():
        if name not in fields:
            raise ConfigurationError(f"ignores contains {name!r}, which is not among the fields; pass it as a keyword")
        for other in others:
            result = make(*args, **{**fields, name: other})
            _compare_results(
                first, result, f"with another {name}", "leave fields that do not identify the event out of the id"
            )
    fresh, later = _run_in_fresh_process(make, args, fields)
    _compare(repr(first), fresh, "in a fresh process", "does it use hash(), a process id, or an object's own id?")
    _compare(repr(first), later, "with the clock shifted", "use the business time instead of the clock")


def _compare_results(first: Any, again: Any, when: str, hint: str) -> None:
    _compare(repr(first), repr(again), when, hint)


def _compare(first: str, again: str, when: str, hint: str) -> None:
    if first != again:
        raise NotDeterministicError(f"the id was {first:.80} and {when} it is {again:.80}; {hint}")


def _run_in_fresh_process(make: Callable[..., Any], args: tuple[Any, ...], fields: dict[str, Any]) -> tuple[str, str]:
    """Return two ids from a process that shares only the files with this one: immediately, and with a shifted clock."""
    try:
        call = pickle.dumps((make, args, fields))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{make!r:.80} cannot be called in another process ({error}); pass a module-level function and plain values"
        ) from error
    request = pickle.dumps({"path": sys.path, "work": call, "moved": CLOCK_OFFSET_SECONDS})
    # The hash seed of the fresh process differs from the seed of this process.
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    process = subprocess.run(  # noqa: S603  # nosec - the framework's own file
        [sys.executable, str(Path(__file__).with_name("determinism_probe.py"))],
        input=request,
        capture_output=True,
        timeout=PROCESS_TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    if process.returncode != 0:
        last_line = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigurationError(f"{make!r:.80} cannot be called in a fresh process: {''.join(last_line)}")
    fresh, later = json.loads(process.stdout)
    return fresh, later
