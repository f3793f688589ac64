"""Mapping of third-party exceptions to canonical errors: it unwraps exceptions and applies the tables of ``rules``.

An exception is recognised by the top-level package and the name of its class, or of any base class, so that a
subclass is mapped like its base.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from ergon_framework.errors import ErgonError, error_message, has_valid_verdict
from ergon_framework.providers import retry_after
from ergon_framework.providers.errors import ProviderError, ProviderInternalError, get_type_name
from ergon_framework.providers.rules import ERRNO_RULES, MESSAGE_RULES, RULES, STATUS_CLASSES, STATUSES, ErrorRule

#: Maximum number of exceptions of one chain that are examined.
MAX_CHAIN_DEPTH: Final = 32


def error_for_status(status: int, *, retry_after: float | None = None) -> ProviderError:
    """Return the error of a response with *status*; raise ValueError for a status from 100 to 299."""
    if 100 <= status < 300:  # noqa: PLR2004 - statuses that are not failures
        raise ValueError(f"status {status} is no failure; judge the body instead")
    kind = STATUSES.get(status) or STATUS_CLASSES.get(status // 100, ProviderInternalError)
    return kind(f"the provider answered {status}", http_status=status, retry_after=retry_after)


def to_provider_error(error: BaseException, *, now: float) -> ProviderError:
    """Return the canonical form of *error*, which becomes its cause; *now* is the wall time, for dates in headers.

    A ProviderError is returned unchanged. Any other ErgonError keeps its verdict as an
    internal_error. An exception that is not an Exception (a cancellation, an exit) is raised again unchanged, so
    that it cannot count as a failed call.
    """
    if isinstance(error, ProviderError):
        return error
    if not isinstance(error, Exception):
        raise error
    # A wrapped ErgonError already has a verdict; a new error would only hide it.
    ergon_error = next((inner for inner in _iterate_chain(error) if isinstance(inner, ErgonError)), None)
    if isinstance(ergon_error, ProviderError):
        return ergon_error
    mapped_error = _map_exception(error, now=now) if ergon_error is None else _from_ergon_error(ergon_error)
    mapped_error.__cause__ = error
    return mapped_error


def _map_exception(error: Exception, *, now: float) -> ProviderError:
    mapped_error: ProviderError | None = None
    for inner in _iterate_chain(error):
        rule = _find_rule(inner)
        status = None if rule is not None and rule.ignores_status else _get_status(inner)
        if status is not None:
            return error_for_status(status, retry_after=_get_retry_after(inner, now=now))
        if rule is None:
            continue
        mapped_error = _from_rule(rule, inner)
        if not rule.is_fallback:
            break
    return mapped_error or ProviderInternalError(f"the call failed with {get_type_name(error)}")


def _from_rule(rule: ErrorRule, error: BaseException) -> ProviderError:
    # The exception's own message is omitted: it may hold addresses, statements and bodies.
    return rule.kind(f"{rule.message} ({get_type_name(error)})", sent=rule.sent, fault=rule.fault)


def _from_ergon_error(error: ErgonError) -> ProviderError:
    message = f"the call failed with {get_type_name(error)}"
    if not has_valid_verdict(error):
        return ProviderInternalError(message)
    return ProviderInternalError(
        message,
        category=error.category,
        retry_after=error.retry_after,
        final=error.final,
        not_attempted=error.not_attempted,
        temporary=error.temporary,
        code=error.code,
    )


def _find_rule(error: BaseException) -> ErrorRule | None:
    for kind in type(error).__mro__:
        name = (kind.__module__.partition(".")[0], kind.__name__)
        for prefix, rule in MESSAGE_RULES.get(name, {}).items():
            if error_message(error, raw=True).startswith(prefix):
                return rule
        if name in RULES:
            return RULES[name]
    return ERRNO_RULES.get(error.errno) if isinstance(error, OSError) and error.errno is not None else None


def _iterate_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and the exceptions inside it, the outermost first."""
    seen, pending = {id(error)}, deque([error])
    for _ in range(MAX_CHAIN_DEPTH):
        if not pending:
            return
        current = pending.popleft()
        yield current
        for inner in _iterate_inner(current):
            if isinstance(inner, Exception) and id(inner) not in seen:
                seen.add(id(inner))
                pending.append(inner)


def _iterate_inner(error: BaseException) -> Iterator[Any]:
    yield error.__cause__
    yield _get_attribute(error, "reason")
    yield from error.args
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions
    # A TypeError in an except block is a bug, and a TimeoutError there may belong to a second call: an implicit
    # context explains only exceptions of libraries, which report on a call.
    if not error.__suppress_context__ and type(error).__module__ != "builtins":
        yield error.__context__


# -- status and headers of a response -------------------------------------------------------------

_TOO_MANY_RESPONSES: Final = re.compile(r"too many ([345][0-9]{2}) error responses")


def _get_status(error: BaseException) -> int | None:
    if _is_unparsed(error):
        return None
    response = _get_attribute(error, "response")
    sources = ((response, "status_code"), (response, "status"), (error, "status_code"), (error, "status"))
    for source, name in sources:
        status = _get_attribute(source, name)
        if isinstance(status, int) and not isinstance(status, bool) and 300 <= status < 600:  # noqa: PLR2004 - failures
            return int(status)
    # A library that retries internally keeps only this sentence of the last response.
    match = (
        _TOO_MANY_RESPONSES.search(error_message(error, raw=True))
        if get_type_name(error) == "urllib3.exceptions.ResponseError"
        else None
    )
    return int(match[1]) if match else None


def _is_unparsed(error: BaseException) -> bool:
    """Return whether the status is invented: aiohttp assigns 400 to a response that it cannot parse."""
    cause = error.__cause__
    return cause is not None and any(
        kind.__name__ == "HttpProcessingError" and kind.__module__.startswith("aiohttp.")
        for kind in type(cause).__mro__
    )


def _get_retry_after(error: BaseException, *, now: float) -> float | None:
    for source in (_get_attribute(error, "response"), error):
        headers = _get_attribute(source, "headers")
        # Each library has its own mapping type; all of them can list their items.
        pairs = headers.items() if hasattr(headers, "items") else ()
        for name, value in pairs:
            if str(name).lower() == "retry-after":
                return retry_after.parse_retry_after(str(value), now=now)
    return None


def _get_attribute(source: Any, name: str) -> Any:
    """Return an attribute of a third-party object; None if its property raises."""
    try:
        return getattr(source, name, None)
    except Exception:  # noqa: BLE001 - a property that raises has no usable value
        return None
