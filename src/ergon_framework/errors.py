"""The one root of our exceptions, and the verdict that each of them carries."""

from __future__ import annotations

import importlib
import pickle  # nosec - only loads what stands inside a pickle that somebody is loading already
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self, TypeAlias, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails, core_schema

from ergon_framework.redaction import redact_text


class Category(StrEnum):
    """What kind of failure this is, and so whether trying again can help."""

    BUSINESS = "BUSINESS"
    SYSTEM = "SYSTEM"
    TIMEOUT = "TIMEOUT"


class ErgonError(Exception):
    """The root of every exception this package raises; it carries its verdict.

    ``category`` says what kind of failure it is, ``retry_after`` is the least number of seconds
    to wait before another attempt, ``final`` means that a lower layer has already given up, ``later``
    that nothing was tried, so that coming back after ``retry_after`` costs no attempt, and ``code``
    is a short stable word for machines. What is BUSINESS or ``final`` is never later. ``temporary``
    means that a service which the handler depends on is unavailable: a consumer's process step defers
    the transaction at no cost, also if the error is ``final``, until ``loop.max_deferral`` has passed.
    """

    category: Category = Category.SYSTEM
    retry_after: float | None = None
    final: bool = False
    later: bool = False
    temporary: bool = False
    code: str | None = None
    #: Whether the messages of its causes are shown nowhere: a third party's may hold credentials.
    hides_causes: bool = False
    #: What a failure record says of it besides, by the names of the record's own fields.
    particulars: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        message: str = "",
        *,
        category: str | Category | None = None,
        retry_after: float | None = None,
        final: bool | None = None,
        later: bool | None = None,
        temporary: bool | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        # Only what differs from the class is stored: most errors are their class's verdict.
        if category is not None:
            self.category = Category(category)
        if retry_after is not None:
            if not 0 <= retry_after < float("inf"):  # also refuses NaN
                raise ValueError(f"retry_after must be a finite number of seconds >= 0, not {retry_after!r}")
            self.retry_after = retry_after
        if final is not None:
            self.final = final
        if later is not None:
            self.later = later
        if temporary is not None:
            self.temporary = temporary
        if code is not None:
            self.code = str(code)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__.copy(), _packed(self.__cause__))


#: The most characters of a message that are searched for secrets and shown.
MAX_TEXT: Final = 65_536


def text(error: BaseException, *, values: bool = False, raw: bool = False) -> str:
    """Return the message of *error* without secrets, also when its own ``__str__`` fails.

    Without *values* validation errors of pydantic are reduced to locations and error types. A *raw* message is not
    redacted and not cut: it is for decisions and for errors that stay in the process.
    """
    try:
        message = reduce_validation(str(error), error, values=values)
    except Exception:  # noqa: BLE001 - an error that cannot speak must not replace the one being told
        return f"{type(error).__qualname__} without a readable message"
    return message if raw else redact_text(message[:MAX_TEXT])


def reduce_validation(message: str, error: BaseException, *, values: bool = False) -> str:
    """Return *message*, the text of *error* or its causes, without the input of validation errors of pydantic.

    The text of such an error quotes the input, which is the payload. Its locations and error types take its place;
    with *values* the full texts replace them again.
    """
    for invalid in _validation_errors(error):
        full, reduced = str(invalid), explain_validation(invalid)
        message = message.replace(reduced, full) if values else message.replace(full, reduced)
    return message


#: The most errors of one chain that are searched for validation errors, and the most faults that are named.
_MAX_CHAIN: Final = 20
_MAX_FAULTS: Final = 10


def explain_validation(error: ValidationError) -> str:
    """Name each location and error type of *error*, without its input and without texts that may quote it."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    places = [f"{'.'.join(map(str, fault['loc'])) or 'value'}: {fault['type']}" for fault in faults[:_MAX_FAULTS]]
    if len(faults) > _MAX_FAULTS:
        places.append(f"and {len(faults) - _MAX_FAULTS} more")
    count = "1 validation error" if len(faults) == 1 else f"{len(faults)} validation errors"
    return f"{count} for {error.title}: {'; '.join(places)}"


#: Keys of an error context whose values come from the input and may be quoted by the message.
_INPUT_KEYS: Final = frozenset({"error", "tag", "tz_actual"})


def explain_fault(fault: ErrorDetails) -> str:
    """Return the message of pydantic for one fault, or its type if the message may quote the input."""
    known = fault["type"] in get_args(core_schema.ErrorType)
    return fault["msg"] if known and not _INPUT_KEYS.intersection(fault.get("ctx", ())) else fault["type"]


def _validation_errors(error: BaseException) -> Iterator[ValidationError]:
    """Yield the validation errors that *error* is, holds as an argument, or was raised because of."""
    waiting: list[BaseException] = [error]
    for _ in range(_MAX_CHAIN):
        if not waiting:
            return
        one = waiting.pop()
        if isinstance(one, ValidationError):
            yield one
        waiting += [each for each in (one.__cause__, one.__context__, *one.args) if isinstance(each, BaseException)]


def to_storable(message: str) -> str:
    """Return *message* in characters that every store accepts."""
    # Undecodable file names put lone surrogates into messages, and PostgreSQL keeps no NUL: a record
    # that cannot be written would lose the failure.
    return message.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def to_one_line(message: str) -> str:
    """Return *message* with line ends and control characters escaped: it starts no line and no terminal obeys it."""
    if message.isprintable():
        return message
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message)


# A cause travels as bytes of its own beside its description: many exceptions of other people can be
# pickled but not loaded again, and one of those must not take the whole error with it.
_Packed: TypeAlias = tuple[bytes | None, str] | None


def _packed(cause: BaseException | None) -> _Packed:
    if cause is None:
        return None
    try:
        data = pickle.dumps(cause)
    except Exception:  # noqa: BLE001 - any refusal means the same: this cause stays here
        data = None
    return data, f"{type(cause).__qualname__}: {text(cause)}"


def _unpacked(packed: _Packed) -> BaseException | None:
    if packed is None:
        return None
    data, description = packed
    try:
        cause = None if data is None else pickle.loads(data)  # noqa: S301  # nosec - see above
    except Exception:  # noqa: BLE001 - any refusal means the same: only the description arrived
        cause = None
    return cause if isinstance(cause, BaseException) else ErgonError(description)


def _rebuilt(kind: type[ErgonError], args: tuple[Any, ...], state: dict[str, Any], cause: _Packed) -> ErgonError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    error.__cause__ = _unpacked(cause)
    return error


def is_sound(error: ErgonError) -> bool:
    """Whether the verdict of *error* can be relied on: a subclass may say anything in its attributes."""
    category: Any = error.category
    delay: Any = error.retry_after
    code: Any = error.code
    return (
        isinstance(category, Category)
        and (delay is None or (isinstance(delay, int | float) and 0 <= delay < float("inf")))
        and (code is None or isinstance(code, str))
    )


def particulars_of(error: ErgonError) -> Mapping[str, Any]:
    """Return the particulars of *error*; nothing if a subclass uses the name for something else."""
    particulars: Any = error.particulars
    return particulars if isinstance(particulars, Mapping) else {}


class ConfigurationError(ErgonError):
    """Something was set up wrongly; trying again cannot help."""

    final = True
    code = "configuration"


class MissingExtraError(ConfigurationError, ImportError):
    """An optional part was used whose libraries are not installed."""

    code = "missing_extra"

    @classmethod
    def named(cls, extra: str, *, module: str) -> Self:
        return cls(f"{module!r} is not installed; run: pip install 'ergon-framework[{extra}]'")


class ConnectionLost(ErgonError):
    """The line to a server is down: not an empty answer, and no fault of any transaction."""

    code = "connection_lost"


def extra(name: str, module: str) -> Any:
    """Import *module*, or say which extra of ours brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError.named(name, module=module) from error
