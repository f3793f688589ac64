"""The root of the framework's exceptions, and the verdict that each of them carries: what a failure means for retries.

Also the texts of errors for logs and records, without secrets and without the input of validation errors.
"""

from __future__ import annotations

import importlib
import pickle  # nosec - only loads bytes from inside a pickle that the caller is loading already
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self, TypeAlias, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails, core_schema

from ergon_framework.redaction import redact_text


class Category(StrEnum):
    """The kind of failure, which tells whether another attempt can help."""

    #: The work is impossible, so no attempt can help.
    BUSINESS = "BUSINESS"
    #: A technical failure: another attempt may help.
    SYSTEM = "SYSTEM"
    #: A deadline passed, so the outcome is unknown: another attempt may help.
    TIMEOUT = "TIMEOUT"


class ErgonError(Exception):
    """The root of every exception this package raises; it carries its verdict.

    ``category`` is the kind of failure. ``retry_after`` is the least number of seconds to wait before another
    attempt. ``final`` means that a lower layer has already given up. ``not_attempted`` means that nothing was
    attempted, so that a redelivery after ``retry_after`` counts no attempt. ``code`` is a short stable identifier
    for programs. A BUSINESS or ``final`` error is never treated as not attempted. ``temporary`` means that a service
    that the handler depends on is unavailable: a consumer's process step defers the transaction without counting an
    attempt, also if the error is ``final``, until ``loop.max_deferral`` has passed.
    """

    category: Category = Category.SYSTEM
    retry_after: float | None = None
    final: bool = False
    not_attempted: bool = False
    temporary: bool = False
    code: str | None = None
    #: Whether the messages of this error's causes are never shown: those of third-party errors may hold credentials.
    hides_causes: bool = False
    #: Further fields of a failure record, by the names of the record's own fields.
    details: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        message: str = "",
        *,
        category: str | Category | None = None,
        retry_after: float | None = None,
        final: bool | None = None,
        not_attempted: bool | None = None,
        temporary: bool | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        # Stores only what differs from the class: most errors carry the verdict of their class.
        if category is not None:
            self.category = Category(category)
        if retry_after is not None:
            if not 0 <= retry_after < float("inf"):  # also rejects NaN
                raise ValueError(f"retry_after must be a finite number of seconds >= 0, not {retry_after!r}")
            self.retry_after = retry_after
        if final is not None:
            self.final = final
        if not_attempted is not None:
            self.not_attempted = not_attempted
        if temporary is not None:
            self.temporary = temporary
        if code is not None:
            self.code = str(code)

    def __reduce__(self) -> tuple[Any, ...]:
        # Python itself does not pickle the cause, which names the error that user code raised.
        return _rebuild, (type(self), self.args, self.__dict__.copy(), _pickle_cause(self.__cause__))


#: Maximum number of characters of a message that are searched for secrets and shown.
MAX_TEXT_CHARS: Final = 65_536


def error_message(error: BaseException, *, values: bool = False, raw: bool = False) -> str:
    """Return the message of *error* without secrets, also when its own ``__str__`` fails.

    Without *values*, validation errors of pydantic are reduced to locations and error types. A *raw* message is not
    redacted and not cut: it is for decisions and for errors that stay in the process.
    """
    try:
        message = reduce_validation(str(error), error, values=values)
    except Exception:  # noqa: BLE001 - an error whose __str__ fails must not replace the one being reported
        return f"{type(error).__qualname__} with an unreadable message"
    return message if raw else redact_text(message[:MAX_TEXT_CHARS])


def reduce_validation(message: str, error: BaseException, *, values: bool = False) -> str:
    """Return *message*, the text of *error* or its causes, without the input of validation errors of pydantic.

    The text of such an error quotes the input, which is the payload. Its locations and error types take its place. With
    *values* it is the reverse: a reduced text in *message*, which was built earlier, is replaced by the full text.
    """
    for validation_error in _iter_validation_errors(error):
        full, reduced = str(validation_error), explain_validation(validation_error)
        message = message.replace(reduced, full) if values else message.replace(full, reduced)
    return message


#: Maximum number of errors of one chain that are searched for validation errors, and of faults (the single problems in
#: one validation error) that are named.
_MAX_CHAIN_ERRORS: Final = 20
_MAX_FAULTS: Final = 10


def explain_validation(error: ValidationError) -> str:
    """Name each location and error type of *error*, without its input and without texts that may quote it."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    descriptions = [f"{'.'.join(map(str, fault['loc'])) or 'value'}: {fault['type']}" for fault in faults[:_MAX_FAULTS]]
    if len(faults) > _MAX_FAULTS:
        descriptions.append(f"and {len(faults) - _MAX_FAULTS} more")
    count = "1 validation error" if len(faults) == 1 else f"{len(faults)} validation errors"
    return f"{count} for {error.title}: {'; '.join(descriptions)}"


#: Keys of an error context whose values come from the input; the message may quote them.
_INPUT_KEYS: Final = frozenset({"encoding_error", "error", "tag", "tz_actual"})


def explain_fault(fault: ErrorDetails) -> str:
    """Return the message of pydantic for one fault, or its type if the message may quote the input."""
    is_standard = fault["type"] in get_args(core_schema.ErrorType)
    return fault["msg"] if is_standard and not _INPUT_KEYS.intersection(fault.get("ctx", ())) else fault["type"]


def _iter_validation_errors(error: BaseException) -> Iterator[ValidationError]:
    """Yield the validation errors among *error*, its arguments and its causes."""
    pending: list[BaseException] = [error]
    for _ in range(_MAX_CHAIN_ERRORS):
        if not pending:
            return
        current = pending.pop()
        if isinstance(current, ValidationError):
            yield current
        pending += [
            each for each in (current.__cause__, current.__context__, *current.args) if isinstance(each, BaseException)
        ]


def to_storable(message: str) -> str:
    """Return *message* in characters that every store accepts."""
    # Undecodable file names put lone surrogates into messages, and PostgreSQL rejects NUL: an
    # unwritable record would lose the failure.
    return message.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def to_one_line(message: str) -> str:
    """Return *message* with line ends and control characters escaped: it adds no lines and no terminal commands."""
    if message.isprintable():
        return message
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in message)


# A cause is pickled separately, next to its description: many third-party exceptions can be
# pickled but not loaded, and one of those must not make the whole error unreadable.
_PickledCause: TypeAlias = tuple[bytes | None, str] | None


def _pickle_cause(cause: BaseException | None) -> _PickledCause:
    if cause is None:
        return None
    try:
        data = pickle.dumps(cause)
    except Exception:  # noqa: BLE001 - after any error the cause stays here, and only its description is sent
        data = None
    return data, f"{type(cause).__qualname__}: {error_message(cause)}"


def _unpickle_cause(pickled: _PickledCause) -> BaseException | None:
    if pickled is None:
        return None
    data, description = pickled
    try:
        # The caller is loading the pickle that contains these bytes, so they are as trusted as that pickle.
        cause = None if data is None else pickle.loads(data)  # noqa: S301  # nosec
    except Exception:  # noqa: BLE001 - after any error only the description is used
        cause = None
    return cause if isinstance(cause, BaseException) else ErgonError(description)


def _rebuild(
    error_class: type[ErgonError], args: tuple[Any, ...], state: dict[str, Any], cause: _PickledCause
) -> ErgonError:
    error = error_class.__new__(error_class, *args)
    error.args = args
    error.__dict__.update(state)
    error.__cause__ = _unpickle_cause(cause)
    return error


def has_valid_verdict(error: ErgonError) -> bool:
    """Return whether the verdict of *error* has valid types and values: a subclass may set any attributes."""
    category: Any = error.category
    delay: Any = error.retry_after
    code: Any = error.code
    return (
        isinstance(category, Category)
        and (delay is None or (isinstance(delay, int | float) and 0 <= delay < float("inf")))
        and (code is None or isinstance(code, str))
    )


def get_details(error: ErgonError) -> Mapping[str, Any]:
    """Return the details of *error*; an empty mapping if a subclass uses the name for something else."""
    details: Any = error.details
    return details if isinstance(details, Mapping) else {}


class ConfigurationError(ErgonError):
    """The setup is wrong; another attempt cannot help."""

    final = True
    code = "configuration"


class MissingExtraError(ConfigurationError, ImportError):
    """An optional part is used, but its libraries are not installed."""

    code = "missing_extra"

    @classmethod
    def for_extra(cls, extra: str, *, module: str) -> Self:
        return cls(f"{module!r} is not installed; run: pip install 'ergon-framework[{extra}]'")


class ConnectionLostError(ErgonError):
    """The connection to a server is lost: neither an empty answer nor a failure of a transaction."""

    code = "connection_lost"


def require_extra(name: str, module: str) -> Any:
    """Import *module*, or raise MissingExtraError with the extra of this package that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError.for_extra(name, module=module) from error
