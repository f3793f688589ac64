"""The keywords of decorators and tasks: those for the usual settings of a policy, and the refusal of unknown ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, Final, TypeAlias, TypeVar, cast

from ergon_framework.errors import ConfigurationError
from ergon_framework.policy import Policy
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy

F = TypeVar("F", bound=Callable[..., Any])
PolicyT = TypeVar("PolicyT", ConsumerPolicy, ProducerPolicy)
#: By keyword: the path of its key in the policy, and how the keyword's value becomes that of the key.
_Keys: TypeAlias = Mapping[str, tuple[tuple[str, ...], Callable[[Any], Any]]]


def _to_max_attempts(retries: int) -> int:
    return retries + 1


def _keep(value: Any) -> Any:
    return value


def _keys(step: str) -> dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]]:
    return {
        "retries": (("steps", step, "retry", "max_attempts"), _to_max_attempts),
        "timeout": (("steps", step, "retry", "timeout"), _keep),
        "backoff": (("steps", step, "retry", "backoff"), _keep),
        "concurrency": (("loop", "concurrency", "value"), _keep),
    }


_CONSUMER_KEYS: Final[_Keys] = _keys("process") | {"max_deliveries": (("loop", "max_deliveries"), _keep)}
_PRODUCER_KEYS: Final[_Keys] = _keys("produce")


def apply_consumer_keywords(
    policy: ConsumerPolicy | None, keywords: Mapping[str, Any], *, owner: str
) -> ConsumerPolicy | None:
    """Return *policy* with the keywords that are not None; ConfigurationError if both set one key."""
    return _apply(policy, keywords, _CONSUMER_KEYS, ConsumerPolicy, owner)


def apply_producer_keywords(
    policy: ProducerPolicy | None, keywords: Mapping[str, Any], *, owner: str
) -> ProducerPolicy | None:
    """Return *policy* with the keywords that are not None; ConfigurationError if both set one key."""
    return _apply(policy, keywords, _PRODUCER_KEYS, ProducerPolicy, owner)


def _apply(
    policy: PolicyT | None, keywords: Mapping[str, Any], keys: _Keys, kind: type[PolicyT], owner: str
) -> PolicyT | None:
    given = {keyword: value for keyword, value in keywords.items() if value is not None}
    if not given or not isinstance(policy, kind | None):  # the task refuses an object of another type
        return policy
    settings: dict[str, Any] = {}
    for keyword, value in given.items():
        path, convert = keys[keyword]
        if policy is not None and _is_set(policy, path):
            raise ConfigurationError(
                f"{keyword}= of {owner} and {'.'.join(path)} of its policy= set the same value; remove one of the two"
            )
        if keyword == "retries" and (type(value) is not int or value < 0):
            raise ConfigurationError(f"retries= of {owner} must be a whole number of at least 0, not {value!r}")
        section = settings
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = convert(value)
    try:
        loaded = kind.load(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"{', '.join(f'{keyword}=' for keyword in given)} of {owner}: {error}") from error
    return loaded if policy is None else _merge(policy, loaded, [keys[keyword][0] for keyword in given])


def _merge(policy: PolicyT, loaded: Policy, paths: Sequence[tuple[str, ...]]) -> PolicyT:
    for path in paths:
        policy = _replace_key(policy, loaded, path)
    return policy


def _replace_key(section: Any, loaded: Any, path: tuple[str, ...]) -> Any:
    """Return *section* with the value that *loaded* has at *path*."""
    value = getattr(loaded, path[0])
    if len(path) > 1:
        value = _replace_key(getattr(section, path[0]), value, path[1:])
    return section.model_copy(update={path[0]: value})


def _is_set(policy: Policy, path: tuple[str, ...]) -> bool:
    """Return whether the key at *path* was set explicitly."""
    section: Any = policy
    for key in path:
        if key not in section.model_fields_set:
            return False
        section = getattr(section, key)
    return True


def refuse_unknown_keywords(fn: F) -> F:
    """Make a misspelt keyword of *fn*, a decorator or a constructor, an error that names the nearest one."""
    parameters = inspect.signature(fn).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    known = {p.name for p in parameters}

    @wraps(fn)
    def check(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known:
            owner = type(args[0]).__name__ if fn.__name__ == "__init__" else fn.__name__
            near = get_close_matches(name, options, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options are: {', '.join(options)}"
            raise ConfigurationError(
                f'{owner} has no option {name!r}; {hint}; pass a service with services={{"{name}": ...}}'
            )
        return fn(*args, **kwargs)

    return cast("F", check)
