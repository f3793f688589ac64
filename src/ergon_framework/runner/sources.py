"""Sources of settings: a file and the environment, read into plain trees that remember where each value was."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from ergon_framework.errors import ConfigurationError
from ergon_framework.policy import Policy
from ergon_framework.telemetry import redaction

if TYPE_CHECKING:
    from pydantic import ValidationError

#: The file that is looked for in the current folder.
NAME = "ergon.toml"
#: What our variables begin with, and what stands between two keys.
PREFIX = "ERGON_"
BETWEEN = "__"
#: The longest file, variable and chain of keys that are read.
FILE = 1_000_000
VALUE = 65_536
DEPTH = 12
#: As many keys of a section are all named to whoever knows none of them.
_FEW = 5

Keys: TypeAlias = tuple[str, ...]
#: What stands behind a key whose type does not tell, by the model and the key.
Shapes: TypeAlias = Mapping[tuple[type[Policy], str], type[Policy]]

_KEYWORD = re.compile(r"(?:^|[\s?&;])(?:password|passwd|pwd|sslpassword)\s*=", re.IGNORECASE)
_ADDRESS = re.compile(r"://[^\s/@:]*:[^\s/@]+@")
#: Patterns look like what they hide.
_PATTERNS = ("telemetry", "redact_patterns")
#: A NATS address that names somebody without a password names a token.
_TOKEN = re.compile(r"^\s*(?:nats|tls|wss?)://[^\s/@:]+@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Given:
    """Plain mappings all the way down, and where each key of them came from."""

    tree: dict[str, Any] = field(default_factory=dict, repr=False)
    origin: str = ""
    #: Variables of the environment, by the keys that they set.
    variables: Mapping[Keys, str] = field(default_factory=dict)

    def under(self, upper: Given) -> Given:
        """Both; where they say something about the same key, *upper* wins."""
        return Given(merged(self.tree, upper.tree), self.origin, {**self.variables, **upper.variables})

    def at(self, keys: Keys) -> str:
        """Where what stands at *keys* came from."""
        found = [
            name for path, name in self.variables.items() if path[: len(keys)] == keys or keys[: len(path)] == path
        ]
        return found[0] if found else self.origin


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees; where they meet in a value, the one *above*."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both and old is not None else value
    return result


# -- the file -------------------------------------------------------------------------------------


def from_file(path: Path, *, needed: bool) -> Given:
    """What the TOML file says; nothing if it is not there and not *needed*."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE + 1)
    except FileNotFoundError as error:
        if not needed:
            return Given(origin=str(path))
        raise ConfigurationError(f"there is no configuration file {path}; write one, or leave --config out") from error
    except OSError as error:
        raise ConfigurationError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    if len(data) > FILE:
        raise ConfigurationError(f"the configuration file {path} is longer than {FILE} bytes; it is hardly one")
    try:
        tree = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the configuration file {path} is no TOML: {error}") from error
    for keys, said in _secrets(tree, ()):
        raise ConfigurationError(
            f"{path}: {'.'.join(keys)} {said}; secrets come from the environment only: take it out of the file and "
            f"set {variable(keys)}"
        )
    return Given(tree, str(path))


def _secrets(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            # An address has its own name among the secrets, and is one only if there is a password in it.
            if redaction.secret(key) and key != "dsn" and not isinstance(item, Mapping):
                yield (*keys, key), "is named like a secret"
            yield from _secrets(item, (*keys, key))
    elif isinstance(value, list):
        for item in value:
            yield from _secrets(item, keys)
    elif isinstance(value, str) and keys != _PATTERNS and (_ADDRESS.search(value) or _KEYWORD.search(value)):
        yield keys, "holds a password"
    elif isinstance(value, str) and _TOKEN.search(value):
        yield keys, "holds a token"
    elif isinstance(value, str) and keys != _PATTERNS and _holds_secret(value):
        yield keys, "holds a secret"


def _holds_secret(value: str) -> bool:
    """Return whether *value* is an address with a secret, also one whose name is percent-encoded."""
    return "://" in value and redaction.masked(value) != value


# -- the environment ------------------------------------------------------------------------------


def from_environment(environ: Mapping[str, str], model: type[Policy], shapes: Shapes) -> Given:
    """What the variables ``ERGON_A__B`` say. A name without a double underscore is somebody else's."""
    tree: dict[str, Any] = {}
    variables: dict[Keys, str] = {}
    slips = {variable(keys).replace(BETWEEN, "_"): variable(keys) for keys in known(model, shapes)}
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        if BETWEEN not in name:
            if name in slips:
                raise ConfigurationError(f"{name} sets nothing: between two keys stand two underscores: {slips[name]}")
            continue
        keys = tuple(name.removeprefix(PREFIX).lower().split(BETWEEN))
        if not all(keys) or len(keys) > DEPTH:
            raise ConfigurationError(f"{name} names no key; write one like ERGON_RUN__PROCESSES")
        if len(environ[name]) > VALUE:
            raise ConfigurationError(f"{name} is longer than {VALUE} characters; it is hardly a setting")
        _put(tree, keys, read(environ[name]), name=name)
        variables[keys] = name
    return Given(tree, "the environment", variables)


def read(value: str) -> Any:
    """A number, a truth value, a list or a table as TOML writes them, ``null``; anything else is text."""
    if value.strip() == "null":
        return None
    try:
        found = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return value
    # Several lines would be several keys: what was meant is the text.
    return (
        found["value"]
        if len(found) == 1 and isinstance(found["value"], bool | int | float | str | list | dict)
        else value
    )


def _put(tree: dict[str, Any], keys: Keys, value: Any, *, name: str) -> None:
    place = tree
    for key in keys[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(
                f"{name} sets a part of what another variable sets as a whole; keep one of the two"
            )
        place = inner
    if keys[-1] in place:
        raise ConfigurationError(f"{name} sets as a whole what another variable sets a part of; keep one of the two")
    place[keys[-1]] = value


def variable(keys: Keys) -> str:
    """The variable of the environment that sets *keys*."""
    return PREFIX + BETWEEN.join(keys).upper()


# -- what is known --------------------------------------------------------------------------------


def known(model: type[Policy], shapes: Shapes, above: Keys = ()) -> Iterator[Keys]:
    """Every chain of keys that ends in a value; names that are the user's own are left out."""
    for key in model.model_fields:
        inner = _inner(model, key, shapes)
        if inner is None:
            yield (*above, key)
        elif not _named(model, key):
            yield from known(inner, shapes, (*above, key))


def unknown(given: Given, model: type[Policy], shapes: Shapes) -> list[str]:
    """A sentence for each key that nobody knows: the key, where it is, and the nearest known one."""
    return [
        f"{given.at(keys)}: unknown key {'.'.join(keys)!r}; {_nearest(keys, known_here, model, shapes)}"
        for keys, known_here in _strangers(given.tree, model, shapes, ())
    ]


def _strangers(
    tree: Mapping[str, Any], model: type[Policy], shapes: Shapes, above: Keys
) -> Iterator[tuple[Keys, list[str]]]:
    for key, value in tree.items():
        if key not in model.model_fields:
            yield (*above, key), list(model.model_fields)
            continue
        inner = _inner(model, key, shapes)
        if inner is None or not isinstance(value, Mapping):
            continue
        if not _named(model, key):
            yield from _strangers(value, inner, shapes, (*above, key))
            continue
        for name, item in value.items():
            if isinstance(item, Mapping):
                yield from _strangers(item, inner, shapes, (*above, key, name))


def _inner(model: type[Policy], key: str, shapes: Shapes) -> type[Policy] | None:
    annotation = model.model_fields[key].annotation
    found = shapes.get((model, key)) or _values(annotation) or annotation
    return found if isinstance(found, type) and issubclass(found, Policy) else None


def _named(model: type[Policy], key: str) -> bool:
    """Whether the keys below are names that the user has chosen."""
    return _values(model.model_fields[key].annotation) is not None


def _values(annotation: Any) -> type[Policy] | None:
    """What a mapping from names to policies holds."""
    last = (get_args(annotation) or (None,))[-1]
    return last if isinstance(last, type) and issubclass(last, Policy) else None


def _nearest(keys: Keys, here: list[str], model: type[Policy], shapes: Shapes) -> str:
    near = get_close_matches(keys[-1], here, n=1)
    if near:
        return f"did you mean {'.'.join((*keys[:-1], near[0]))!r}?"
    # The right word in the wrong place is the next most common slip.
    ends = {path[-1]: path for path in known(model, shapes)}
    far = get_close_matches(keys[-1], ends, n=1)
    if not far:
        return f"known here are {', '.join(here)}"
    question = f"did you mean {'.'.join(ends[far[0]])!r}?"
    # Another word in the right place: of a few all can be said.
    return f"{'.'.join(keys[:-1])} has {', '.join(here)}; {question}" if keys[:-1] and len(here) <= _FEW else question


def explained(error: ValidationError, given: Given) -> str:
    """What is wrong with which value, and where it came from; text is not repeated: it may be secret."""
    faults = []
    for fault in error.errors(include_url=False):
        keys = tuple(str(part) for part in fault["loc"])
        value = fault["input"]
        shown = f", not {value!r:.40}" if isinstance(value, int | float | None) else ""
        faults.append(f"{given.at(keys)}: {'.'.join(keys)}: {fault['msg'].removeprefix('Value error, ')}{shown}")
    return "; ".join(faults)
