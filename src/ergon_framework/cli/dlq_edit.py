"""Work of ``ergon dlq edit``: correct the payload of one dead letter, and replay it under its own id.

The corrected payload comes from an editor, a file or assignments of single values. The transaction's history and the
report describe the edit as the paths that differ.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess  # nosec - the user's own editor
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from ergon_framework.audit import act_as
from ergon_framework.cli.dlq_commands import MAX_LETTERS_PER_ID, MAX_SHOWN_CHARS, with_connector
from ergon_framework.cli.dlq_view import DlqExit, sanitize
from ergon_framework.cli.summary import print_rows
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult
from ergon_framework.connectors.encryption import find_missing_key
from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.failure import MAX_MESSAGE_CHARS
from ergon_framework.runner.loading import load_target
from ergon_framework.telemetry.redaction import HIDDEN, is_secret_name
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException

#: Maximum length of a value in the description of a difference.
_MAX_VALUE_CHARS: Final = 60
#: Stands for a value that one of the two payloads does not have.
_ABSENT: Final = object()
_EDITOR_VARIABLES: Final = ("VISUAL", "EDITOR")


class Difference(NamedTuple):
    """A value of a payload that changed; *path* is empty for the whole payload."""

    path: str
    before: Any
    after: Any

    def format(self, *, values: bool) -> str:
        """Return the path, with *values* also the old and new value; values named like a secret are always hidden."""
        name = self.path or "the payload"
        if not values:
            return name
        return f"{name}: {self._format_value(self.before)} -> {self._format_value(self.after)}"

    def _format_value(self, value: Any) -> str:
        if value is _ABSENT:
            return "nothing"
        if any(is_secret_name(part) for part in self.path.split(".")):
            return HIDDEN
        text = json.dumps(value, ensure_ascii=False, default=repr)
        return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"


def differences(before: Any, after: Any, prefix: str = "") -> Iterator[Difference]:
    """Yield where *after* differs from *before*, as deep as both have the same shape.

    >>> [each.path for each in differences({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 3], "c": 0})]
    ['b.1', 'c']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (*before, *(key for key in after if key not in before)):
            yield from differences(before.get(key, _ABSENT), after.get(key, _ABSENT), _join_path(prefix, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old_item, new_item) in enumerate(zip(before, after, strict=True)):
            yield from differences(old_item, new_item, _join_path(prefix, index))
    # Python treats a number and a boolean as equal, JSON does not.
    elif type(before) is not type(after) or before != after:
        yield Difference(prefix, before, after)


def format_differences(changes: Sequence[Difference], *, values: bool) -> str:
    """Format all differences as one text that fits into a history."""
    text = "; ".join(each.format(values=values) for each in changes)
    return (
        text if len(text) <= MAX_MESSAGE_CHARS // 2 else f"{text[: MAX_MESSAGE_CHARS // 2]}… ({len(changes)} changes)"
    )


@dataclass(frozen=True, slots=True)
class PayloadEdit:
    """The source of the corrected payload: *file*, *assignments* of single values, or an editor."""

    file: Path | None = None
    assignments: Sequence[str] = ()
    #: Whether an assignment may add a missing key.
    new_keys: bool = False

    def __post_init__(self) -> None:
        if self.file is not None and self.assignments:
            raise ConfigurationError("--file and --set exclude each other; pass one of the two")

    def apply(self, record: DeadLetterRecord) -> Any:
        """Return the corrected payload of *record*; raise ConfigurationError if there is none."""
        if self.file is not None:
            return _parse_json(_read(self.file), str(self.file))
        if record.size is not None:
            raise ConfigurationError(
                f"the payload of {record.size} bytes is too large to load; pass --file FILE, or raise "
                "max_bytes of the codec and max_fetch_bytes of the queue"
            )
        if self.assignments:
            if record.raw is not None:
                raise ConfigurationError(
                    "the payload could not be decoded, so --set cannot change it; pass --file FILE"
                )
            payload = json.loads(json.dumps(record.payload))  # a copy: the original is compared with it later
            for assignment in self.assignments:
                payload = _assign(payload, assignment, new_keys=self.new_keys)
            return payload
        return _parse_json(_edit_interactively(record), "the editor's output")


# -- single values ----------------------------------------------------------------------------------


def _assign(payload: Any, assignment: str, *, new_keys: bool) -> Any:
    """Return *payload* after one assignment ``PATH=VALUE``; a value that is not JSON is text."""
    path, separator, text = assignment.partition("=")
    if not (path and separator):
        raise ConfigurationError(
            f"{assignment[:60]!r} is not an assignment; write PATH=VALUE, for example customer.address.zip=10115 or "
            "/customer/address/zip=10115"
        )
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        value = text
    *parents, last = _split_path(path)
    container = payload
    for key in parents:
        container = container[_resolve_key(container, key, path, new_keys=False)]
    container[_resolve_key(container, last, path, new_keys=new_keys)] = value
    return payload


def _split_path(path: str) -> list[str]:
    """Return the keys of *path*, a JSON pointer (RFC 6901) if it begins with a slash, else separated by dots.

    >>> _split_path("/a~1b/0"), _split_path("a.b.0")
    (['a/b', '0'], ['a', 'b', '0'])
    """
    if not path.startswith("/"):
        return path.split(".")
    return [key.replace("~1", "/").replace("~0", "~") for key in path[1:].split("/")]


def _resolve_key(container: Any, key: str, path: str, *, new_keys: bool) -> Any:
    """Return *key* as the key or index of *container*; with *new_keys* an object may get a new key."""
    if isinstance(container, dict) and (new_keys or key in container):
        return key
    if isinstance(container, list) and key.isascii() and key.isdigit() and int(key) < len(container):
        return int(key)
    if isinstance(container, dict):
        close_matches = get_close_matches(key, container, n=1)
        available = (
            f"the nearest is {close_matches[0]!r}"
            if close_matches
            else f"there are {', '.join(map(repr, container))[:200] or 'no keys'}"
        )
        remedy = "to add a key, pass --allow-new-keys"
    else:
        available = f"there is {f'a list of {len(container)}' if isinstance(container, list) else 'a scalar value'}"
        remedy = "to change the shape of the payload, pass --file FILE"
    raise ConfigurationError(f"the payload has no {key!r} at {path!r}: {available}; {remedy}")


# -- whole payloads ---------------------------------------------------------------------------------


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the payload {file} cannot be read: {type(error).__name__}: {error}") from error


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{source} is not valid JSON: {error}; nothing was changed") from error


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")


def _edit_interactively(record: DeadLetterRecord) -> str:
    editor = next((os.environ[name] for name in _EDITOR_VARIABLES if os.environ.get(name, "").strip()), None)
    if editor is None:
        raise ConfigurationError("no editor is configured; set EDITOR, or pass --file FILE or --set PATH=VALUE")
    text = (
        record.raw.decode(errors="replace")
        if record.raw is not None
        else json.dumps(record.payload, indent=2, ensure_ascii=False)
    )
    # mkstemp makes the file readable only by its owner: payloads may be confidential.
    descriptor, name = tempfile.mkstemp(prefix="ergon-payload-", suffix=".json")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
        try:
            process = subprocess.run([*shlex.split(editor), name], check=False)  # noqa: S603 - the user's own choice
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the editor {editor!r} cannot be started: {error}") from error
        if process.returncode != 0:
            raise ConfigurationError(f"the editor exited with code {process.returncode}; nothing was changed")
        return _read(Path(name))
    finally:
        with suppress(OSError):
            Path(name).unlink()


def _join_path(prefix: str, key: Any) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


# -- replacement of the dead letter -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EditRequest:
    """A correction of one dead letter: the new payload, the operator, and the safety options."""

    #: The transaction id, and the handle of the dead letter in its store if several have this id.
    id: str
    handle: str | None
    payload_edit: PayloadEdit
    actor: str
    reason: str
    #: Task whose payload type must match too, besides the task named as the target.
    task: str | None
    show_values: bool
    dry_run: bool
    as_json: bool


def edit_dead_letter(target: str, request: EditRequest) -> DlqExit:
    """Correct and replay the dead letter that *request* selects."""
    return with_connector(target, lambda connector: _edit_record(connector, target, request))


def _edit_record(connector: Connector, target: str, request: EditRequest) -> DlqExit:
    """Select, correct and check the dead letter, then replace it unless this is a dry run."""
    reject_log_connector(connector)
    record = _select_record(connector, target, request)
    if record is None:
        return DlqExit.FAILED
    key_id = find_missing_key(record)
    if key_id is not None:
        raise ConfigurationError(
            f"the dead letter is encrypted with the key {key_id!r} and cannot be read: add the key to "
            "ERGON_ENCRYPTION__KEYS; if the key is set, the message was changed after encryption"
        )
    payload = request.payload_edit.apply(record)
    # A payload that could not be decoded has no values to compare: the whole of it is replaced.
    changes = (
        [Difference("", "bytes", payload)] if record.raw is not None else list(differences(record.payload, payload))
    )
    if not changes:
        raise ConfigurationError("the payload is unchanged, nothing was replayed; to replay it, run: ergon dlq replay")
    actor = request.actor
    corrected = record.with_payload(
        payload, by=actor, at=time.time(), summary=format_differences(changes, values=request.show_values)
    )
    for name in dict.fromkeys(name for name in (target, request.task) if name is not None):
        _reject_mismatch(name, corrected)
    if request.dry_run:
        _report(connector, request, record, changes, actor=actor, outcome="would be replayed")
        return DlqExit.OK
    with act_as(actor, reason=request.reason):
        return _replace_record(connector, request, record, corrected, changes, actor=actor)


def reject_log_connector(connector: Connector) -> None:
    """Reject log connectors: all readers share a log's records, so a corrected record would reach all of them."""
    capabilities = connector.capabilities
    # A connector that accepts an id only once would drop the corrected transaction, which keeps its id.
    if capabilities.mode == "log" or capabilities.deduplicates_ids:
        raise ConfigurationError(
            f"{connector.name!r} is a log: its records cannot be changed, and a corrected record would reach all its "
            "readers; let the producer send the correction with a new id"
        )


def _select_record(connector: Connector, target: str, request: EditRequest) -> DeadLetterRecord | None:
    """Return the one dead letter that the request names; None, with a message, if there is none."""
    records = connector.list_dead(DeadLetterQuery.load(id=request.id), limit=MAX_LETTERS_PER_ID)
    if request.handle is not None:
        records = [record for record in records if record.handle == request.handle]
    if not records:
        handle_text = "" if request.handle is None else f" at {sanitize(request.handle, MAX_SHOWN_CHARS)!r}"
        _print_stderr(
            f"{connector.name} has no dead letter of transaction "
            f"{sanitize(request.id, MAX_SHOWN_CHARS)!r}{handle_text}; to list its dead letters, run: ergon dlq "
            f"list {target}"
        )
        return None
    if len(records) > 1:
        handles = ", ".join(record.handle for record in records)
        raise ConfigurationError(f"{len(records)} dead letters have this id; select one with --entry: {handles}")
    return records[0]


def _reject_mismatch(name: str, corrected: Transaction) -> None:
    """Reject a payload that the task would reject, before anything is moved."""
    read_payload: Any = getattr(load_target(name), "read_payload", None)
    if read_payload is None:
        return
    try:
        read_payload(corrected)
    except TransactionException as error:
        raise ConfigurationError(f"{error_message(error)}; nothing was changed") from error


def _replace_record(
    connector: Connector,
    request: EditRequest,
    record: DeadLetterRecord,
    corrected: Transaction,
    changes: Sequence[Difference],
    *,
    actor: str,
) -> DlqExit:
    """Replace the dead letter with *corrected*; of two concurrent operators one succeeds."""
    result = connector.replace_dead(record.handle, corrected)
    if result.outcome is DeadLetterResult.REPLAYED:
        _report(connector, request, record, changes, actor=actor, outcome="replayed")
        return DlqExit.OK
    if result.outcome is DeadLetterResult.GONE:
        _print_stderr(
            "the dead letter was edited, replayed or discarded by another operator in the meantime; this correction "
            "was not sent"
        )
    else:
        _print_stderr(
            f"the correction was not sent: {sanitize(result.message, MAX_SHOWN_CHARS)}; the dead letter is unchanged"
        )
    return DlqExit.FAILED


def _report(
    connector: Connector,
    request: EditRequest,
    record: DeadLetterRecord,
    changes: Sequence[Difference],
    *,
    actor: str,
    outcome: str,
) -> None:
    descriptions = [each.format(values=request.show_values) for each in changes]
    if request.as_json:
        payload = {
            "queue": connector.name,
            "id": record.id,
            "entry": record.handle,
            "actor": actor,
            "changed": descriptions,
            "dry_run": request.dry_run,
            "replayed": outcome == "replayed",
        }
        typer.echo(json.dumps(payload))
        return
    rows = [("changed", sanitize(each, MAX_SHOWN_CHARS)) for each in descriptions]
    print_rows(
        sanitize(record.id, MAX_SHOWN_CHARS),
        [*rows, ("actor", sanitize(actor, MAX_SHOWN_CHARS)), (connector.name, outcome)],
    )


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)
