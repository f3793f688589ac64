"""A change of a payload: made by an editor, a file or single values, and told as the paths that differ."""

from __future__ import annotations

import json
import os
import shlex
import subprocess  # nosec - the user's own editor
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.deadletters import DeadLetterRecord
from ergon_framework.errors import ConfigurationError
from ergon_framework.failure import MESSAGE
from ergon_framework.telemetry.redaction import HIDDEN, secret

#: The longest value that is told of a difference.
_VALUE: Final = 60
_ABSENT: Final = object()
_EDITORS: Final = ("VISUAL", "EDITOR")


class Difference(NamedTuple):
    """One place of a payload that is another now; *path* is empty for the whole of it."""

    path: str
    before: Any
    after: Any

    def told(self, *, values: bool) -> str:
        """The path, and with *values* what was and is there; what is named like a secret is hidden in any case."""
        name = self.path or "the payload"
        if not values:
            return name
        return f"{name}: {self._shown(self.before)} -> {self._shown(self.after)}"

    def _shown(self, value: Any) -> str:
        if value is _ABSENT:
            return "nothing"
        if any(secret(part) for part in self.path.split(".")):
            return HIDDEN
        text = json.dumps(value, ensure_ascii=False, default=repr)
        return text if len(text) <= _VALUE else text[: _VALUE - 1] + "…"


def differences(before: Any, after: Any, above: str = "") -> Iterator[Difference]:
    """Where *after* differs from *before*, as deep as both have the same shape.

    >>> [each.path for each in differences({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 3], "c": 0})]
    ['b.1', 'c']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (*before, *(key for key in after if key not in before)):
            yield from differences(before.get(key, _ABSENT), after.get(key, _ABSENT), _below(above, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, _below(above, number))
    # A number and a truth value are equal in Python, and not in JSON.
    elif type(before) is not type(after) or before != after:
        yield Difference(above, before, after)


def told(found: Sequence[Difference], *, values: bool) -> str:
    """All of them in one text that fits into a history."""
    text = "; ".join(each.told(values=values) for each in found)
    return text if len(text) <= MESSAGE // 2 else f"{text[: MESSAGE // 2]}… ({len(found)} places)"


@dataclass(frozen=True, slots=True)
class Change:
    """How the corrected payload is come by: from *file*, by *settings* of single values, or by an editor."""

    file: Path | None = None
    settings: Sequence[str] = ()
    #: Whether a setting may add a key that is not there.
    new_keys: bool = False

    def __post_init__(self) -> None:
        if self.file is not None and self.settings:
            raise ConfigurationError("--file and --set exclude each other; give one of the two")

    def made(self, record: DeadLetterRecord) -> Any:
        """The payload that *record* is to have; ConfigurationError where there is none."""
        if self.file is not None:
            return _parsed(_read(self.file), str(self.file))
        if record.size is not None:
            raise ConfigurationError(
                f"its payload of {record.size} bytes is too large to be loaded here; give --file FILE, or raise "
                "max_bytes of the codec and max_fetch_bytes of the queue"
            )
        if self.settings:
            if record.raw is not None:
                raise ConfigurationError(
                    "its payload could not be read, so no value of it can be set; give --file FILE"
                )
            payload = json.loads(json.dumps(record.payload))
            for setting in self.settings:
                payload = _set(payload, setting, new_keys=self.new_keys)
            return payload
        return _parsed(_by_hand(record), "what the editor left")


# -- single values ------------------------------------------------------------------------------------


def _set(payload: Any, setting: str, *, new_keys: bool) -> Any:
    path, equals, text = setting.partition("=")
    if not (path and equals):
        raise ConfigurationError(
            f"{setting[:60]!r} sets nothing; write PATH=VALUE, for example customer.address.zip=10115 or "
            "/customer/address/zip=10115"
        )
    try:
        value = json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        value = text
    *parents, last = _split(path)
    container = payload
    for key in parents:
        container = container[_key(container, key, path, new_keys=False)]
    container[_key(container, last, path, new_keys=new_keys)] = value
    return payload


def _split(path: str) -> list[str]:
    """Return the keys of *path*, a JSON pointer (RFC 6901) if it begins with a slash, else separated by dots.

    >>> _split("/a~1b/0"), _split("a.b.0")
    (['a/b', '0'], ['a', 'b', '0'])
    """
    if not path.startswith("/"):
        return path.split(".")
    return [key.replace("~1", "/").replace("~0", "~") for key in path[1:].split("/")]


def _key(container: Any, key: str, path: str, *, new_keys: bool) -> Any:
    """Return *key* as the key or index of *container*; with *new_keys* an object may get a new key."""
    if isinstance(container, dict) and (new_keys or key in container):
        return key
    if isinstance(container, list) and key.isascii() and key.isdigit() and int(key) < len(container):
        return int(key)
    if isinstance(container, dict):
        near = get_close_matches(key, container, n=1)
        has = (
            f"the nearest is {near[0]!r}" if near else f"there are {', '.join(map(repr, container))[:200] or 'no keys'}"
        )
        remedy = "to add a key use --new-keys"
    else:
        has = f"there is {f'a list of {len(container)}' if isinstance(container, list) else 'a plain value'}"
        remedy = "to change the shape of the payload give --file FILE"
    raise ConfigurationError(f"the payload has no {key!r} at {path!r}: {has}; {remedy}")


# -- whole payloads -----------------------------------------------------------------------------------


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the payload {file} cannot be read: {type(error).__name__}: {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is no JSON: {error}; nothing was changed") from error


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no value of JSON")


def _by_hand(record: DeadLetterRecord) -> str:
    editor = next((os.environ[name] for name in _EDITORS if os.environ.get(name, "").strip()), None)
    if editor is None:
        raise ConfigurationError("no editor is named; set EDITOR, or give --file FILE or --set PATH=VALUE")
    text = (
        record.raw.decode(errors="replace")
        if record.raw is not None
        else json.dumps(record.payload, indent=2, ensure_ascii=False)
    )
    # Readable by nobody else: payloads may be confidential.
    handle, name = tempfile.mkstemp(prefix="ergon-payload-", suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
        try:
            done = subprocess.run([*shlex.split(editor), name], check=False)  # noqa: S603 - the user's own choice
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the editor {editor!r} cannot be started: {error}") from error
        if done.returncode != 0:
            raise ConfigurationError(f"the editor ended with {done.returncode}; nothing was changed")
        return _read(Path(name))
    finally:
        with suppress(OSError):
            Path(name).unlink()


def _below(above: str, key: Any) -> str:
    return f"{above}.{key}" if above else str(key)
