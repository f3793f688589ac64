"""From foreign exceptions to canonical ones: the way through the wrappers, by the tables of ``rules``.

An exception is recognised by the top package of its class and the name of its class, or of any
class above it, so that a subclass is what its parent is.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from ergon_framework.errors import ErgonError, is_sound, text
from ergon_framework.providers import retry_after
from ergon_framework.providers.errors import ProviderError, ProviderInternalError, type_name
from ergon_framework.providers.rules import ERRNOS, HUNDREDS, RULES, STATUSES, WORDS, Rule

#: How many exceptions of one chain are looked at.
DEPTH: Final = 32


def for_status(status: int, *, retry_after: float | None = None) -> ProviderError:
    """The error that an answer with *status* is; a status below 300 is none and is refused."""
    if 100 <= status < 300:  # noqa: PLR2004 - the bounds of what is no failure
        raise ValueError(f"status {status} is no failure; judge the body instead")
    kind = STATUSES.get(status) or HUNDREDS.get(status // 100, ProviderInternalError)
    return kind(f"the provider answered {status}", http_status=status, retry_after=retry_after)


def canonical(error: BaseException, *, now: float) -> ProviderError:
    """The canonical form of *error*, which becomes its cause; *now* is the wall time, for dates in headers.

    A ProviderError is returned as it is. Another error of ours keeps its verdict as an
    internal_error. What is no Exception (a cancellation, an exit) is raised again as it is: nobody
    may take it for a failed call.
    """
    if isinstance(error, ProviderError):
        return error
    if not isinstance(error, Exception):
        raise error
    # What stands inside is the one error that had been judged before; a new one would only hide it.
    before = next((inner for inner in _chain(error) if isinstance(inner, ErgonError)), None)
    if isinstance(before, ProviderError):
        return before
    found = _found(error, now=now) if before is None else _ours(before)
    found.__cause__ = error
    return found


def _found(error: Exception, *, now: float) -> ProviderError:
    found: ProviderError | None = None
    for inner in _chain(error):
        rule = _rule(inner)
        status = None if rule is not None and rule.over_status else _status(inner)
        if status is not None:
            return for_status(status, retry_after=_retry_after(inner, now=now))
        if rule is None:
            continue
        found = _made(rule, inner)
        if not rule.vague:
            break
    return found or ProviderInternalError(f"the call failed with {type_name(error)}")


def _made(rule: Rule, error: BaseException) -> ProviderError:
    # The exception's own words stay out: they hold addresses, statements and bodies.
    return rule.kind(f"{rule.says} ({type_name(error)})", sent=rule.sent, fault=rule.fault)


def _ours(error: ErgonError) -> ProviderError:
    said = f"the call failed with {type_name(error)}"
    if not is_sound(error):
        return ProviderInternalError(said)
    return ProviderInternalError(
        said,
        category=error.category,
        retry_after=error.retry_after,
        final=error.final,
        later=error.later,
        temporary=error.temporary,
        code=error.code,
    )


def _rule(error: BaseException) -> Rule | None:
    for kind in type(error).__mro__:
        name = (kind.__module__.partition(".")[0], kind.__name__)
        for words, rule in WORDS.get(name, {}).items():
            if text(error, raw=True).startswith(words):
                return rule
        if name in RULES:
            return RULES[name]
    return ERRNOS.get(error.errno) if isinstance(error, OSError) and error.errno is not None else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """*error* and what is inside it, the outermost first."""
    seen, waiting = {id(error)}, deque([error])
    for _ in range(DEPTH):
        if not waiting:
            return
        current = waiting.popleft()
        yield current
        for inner in _inside(current):
            if isinstance(inner, Exception) and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def _inside(error: BaseException) -> Iterator[Any]:
    yield error.__cause__
    yield _attribute(error, "reason")
    yield from error.args
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions
    # A TypeError in an except block is a slip of ours, and a TimeoutError there may be that of a second
    # call: what nobody linked on purpose explains only exceptions that were made to tell of a call.
    if not error.__suppress_context__ and type(error).__module__ != "builtins":
        yield error.__context__


# -- what an exception tells of the answer --------------------------------------------------------

_TOO_MANY: Final = re.compile(r"too many ([345][0-9]{2}) error responses")


def _status(error: BaseException) -> int | None:
    if _unparsed(error):
        return None
    response = _attribute(error, "response")
    places = ((response, "status_code"), (response, "status"), (error, "status_code"), (error, "status"))
    for place, name in places:
        status = _attribute(place, name)
        if isinstance(status, int) and not isinstance(status, bool) and 300 <= status < 600:  # noqa: PLR2004 - failures
            return int(status)
    # A library that retries by itself keeps of the last answer only this sentence.
    told = _TOO_MANY.search(text(error, raw=True)) if type_name(error) == "urllib3.exceptions.ResponseError" else None
    return int(told[1]) if told else None


def _unparsed(error: BaseException) -> bool:
    """Whether the status is an invention: aiohttp gives 400 to an answer that it could not parse."""
    cause = error.__cause__
    return cause is not None and any(
        kind.__name__ == "HttpProcessingError" and kind.__module__.startswith("aiohttp.")
        for kind in type(cause).__mro__
    )


def _retry_after(error: BaseException, *, now: float) -> float | None:
    for place in (_attribute(error, "response"), error):
        headers = _attribute(place, "headers")
        # Each library has a mapping of its own; what they share is that they can be listed.
        pairs = headers.items() if hasattr(headers, "items") else ()
        for name, value in pairs:
            if str(name).lower() == "retry-after":
                return retry_after.seconds(str(value), now=now)
    return None


def _attribute(place: Any, name: str) -> Any:
    """An attribute of foreign things, of which a property may raise anything."""
    try:
        return getattr(place, name, None)
    except Exception:  # noqa: BLE001 - whatever it is, there is nothing to be learned here
        return None
