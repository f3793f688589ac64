"""Tracebacks: where an error was raised, as bounded and redacted text without the values of variables."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple, TypeAlias

from ergon_framework.errors import ErgonError, error_message, get_details, to_one_line, to_storable
from ergon_framework.failure import MAX_SEARCHED_CHARS, MAX_TRACEBACK_BYTES, cut, describe_error
from ergon_framework.telemetry import redaction
from ergon_framework.telemetry.names import LIBRARY, Attribute, ExceptionEvent
from ergon_framework.telemetry.options import TelemetryOptions

#: The most frames and errors of a chain that one traceback has.
MAX_FRAMES: Final = 20
MAX_ERRORS: Final = 5
#: Longest file name or source line, in characters.
MAX_LINE_CHARS: Final = 160

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]
_Frames: TypeAlias = list[tuple[FrameType, int]]


def format_traceback(error: BaseException | None, options: TelemetryOptions) -> str | None:
    """Format where *error* and its causes were raised; None if *options* or the error leave nothing to show.

    Frames of the framework above the user's function are left out. An error of the framework that no user
    code raised explains itself and has no traceback, unless it brings that of another process.
    """
    if error is None or not options.record_tracebacks:
        return None
    remote = get_details(error).get("traceback") if isinstance(error, ErgonError) else None
    if remote is not None:
        # The tail is kept, because it names the error.
        return _redact(remote, options)[-MAX_TRACEBACK_BYTES:].decode(errors="ignore")
    try:
        chain = _build_chain(find_raised(error))
        if not any(frames for _, frames in chain):
            return None
        return _redact("\n".join(_format_chain(chain, options)), options)[:MAX_TRACEBACK_BYTES].decode(errors="ignore")
    except Exception:  # noqa: BLE001 - errors and hooks are third-party code; the failure is recorded without traceback
        return None


def to_exc_info(error: BaseException, options: TelemetryOptions) -> ExcInfo:
    """Return what a log record carries of *error*: its traceback from the user's function on.

    A handler of the program may format the error itself. Where redaction changes a message of the chain, a
    stand-in with the redacted message takes the error's place.
    """
    raised = find_raised(error)
    entry = _skip_framework(raised.__traceback__)
    if all(_is_shown_as_raised(link, options) for link in _list_errors(raised)):
        return type(raised), raised, entry
    message = _redact_message(raised, options)
    return ErgonError, ErgonError(f"{type(raised).__qualname__}: {message}").with_traceback(entry), entry


def find_raised(error: BaseException) -> BaseException:
    """Return the error that user code raised: the engine wraps it in an error that was never raised itself."""
    while error.__traceback__ is None and error.__cause__ is not None and not _hides_causes(error):
        error = error.__cause__
    return error


def _is_shown_as_raised(link: _ErrorLink, options: TelemetryOptions) -> bool:
    """Return whether a log handler may format the error itself: redaction neither changes nor hides its message."""
    raised = error_message(link.error, values=True, raw=True)
    return (
        not link.hidden
        and len(raised) <= MAX_SEARCHED_CHARS
        and redaction.mask_credentials(raised) == raised
        and _redact_message(link.error, options) == cut(raised or type(link.error).__qualname__)
    )


def _redact_message(error: BaseException, options: TelemetryOptions) -> str:
    return redaction.redacted_message(
        options.redact, Attribute.EXCEPTION_MESSAGE, error, values=options.record_payloads
    )


# -- the chain ------------------------------------------------------------------------------------


class _ErrorLink(NamedTuple):
    """One error of a chain, the text that joins it to the one before, and whether its message is hidden.

    The messages of all causes of an ErgonError with ``hides_causes`` are hidden: they may hold credentials.
    """

    error: BaseException
    relation: str = ""
    hidden: bool = False


def _list_errors(error: BaseException) -> list[_ErrorLink]:
    """List *error* and its causes, outermost first."""
    pending, errors = [_ErrorLink(error)], list[_ErrorLink]()
    while pending and len(errors) < MAX_ERRORS:
        link = pending.pop(0)
        current = link.error
        if any(current is seen.error for seen in errors):
            continue
        errors.append(link)
        hidden = link.hidden or _hides_causes(current)
        if isinstance(current, BaseExceptionGroup):
            pending += [_ErrorLink(member, "member of the group:", hidden) for member in current.exceptions]
        if current.__cause__ is not None:
            pending.append(_ErrorLink(current.__cause__, "caused by:", hidden))
        elif current.__context__ is not None and not current.__suppress_context__:
            pending.append(_ErrorLink(current.__context__, "raised while handling:", hidden))
    return errors


def _hides_causes(error: BaseException) -> bool:
    return isinstance(error, ErgonError) and error.hides_causes


def _build_chain(error: BaseException) -> list[tuple[_ErrorLink, _Frames]]:
    """List the errors of a chain with their frames; no frames at all if no user code is among them."""
    chain = [(link, _list_frames(link.error.__traceback__)) for link in _list_errors(error)]
    if isinstance(error, ErgonError) and not any(_is_user_code(frame) for _, frames in chain for frame, _ in frames):
        return [(link, []) for link, _ in chain]
    return chain


def _list_frames(trace: TracebackType | None) -> _Frames:
    return list(traceback.walk_tb(_skip_framework(trace)))


def _skip_framework(trace: TracebackType | None) -> TracebackType | None:
    """Return *trace* from the first frame of user code on; all of it where there is none."""
    entry = trace
    while entry is not None and not _is_user_code(entry.tb_frame):
        entry = entry.tb_next
    return entry or trace


def _is_user_code(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package != LIBRARY and package not in sys.stdlib_module_names


# -- the text -------------------------------------------------------------------------------------


def _format_chain(chain: Sequence[tuple[_ErrorLink, _Frames]], options: TelemetryOptions) -> list[str]:
    lines: list[str] = []
    # Each error has an equal share of MAX_FRAMES; what short tracebacks leave of theirs goes to the long ones.
    spare = MAX_FRAMES - sum(min(len(frames), MAX_FRAMES // len(chain)) for _, frames in chain)
    for link, frames in chain:
        share = min(len(frames), MAX_FRAMES // len(chain))
        extra = min(spare, len(frames) - share)
        spare -= extra
        lines += [link.relation] if link.relation else []
        lines += _format_frames(frames, share + extra)
        lines.append(_format_title(link, options))
    return lines


def _format_title(link: _ErrorLink, options: TelemetryOptions) -> str:
    name = type(link.error).__qualname__
    # A message of several lines must look neither like frames nor like a separate log record.
    return name if link.hidden else f"{name}: {to_one_line(describe_error(link.error, values=options.record_payloads))}"


def _format_frames(frames: _Frames, max_frames: int) -> list[str]:
    """Format *max_frames* frames: the first ones, with the user's function, and the last ones, where it failed."""
    first = len(frames) if len(frames) <= max_frames else max_frames // 4
    last = len(frames) - (max_frames - first)
    lines = [line for frame in frames[:first] for line in _format_frame(*frame)]
    if first < last:
        lines.append(f"... {last - first} frames omitted")
    return lines + [line for frame in frames[max(first, last) :] for line in _format_frame(*frame)]


def _format_frame(frame: FrameType, number: int) -> list[str]:
    code = frame.f_code
    location = f"{code.co_filename[-MAX_LINE_CHARS:]}:{number} in {code.co_name[:MAX_LINE_CHARS]}"
    source = linecache.getline(code.co_filename, number, frame.f_globals).strip()[:MAX_LINE_CHARS]
    return [location, f"    {source}"] if source else [location]


def _redact(traceback_text: str, options: TelemetryOptions) -> bytes:
    try:
        redacted: Any = options.redact(ExceptionEvent.STACKTRACE, to_storable(traceback_text))
    except Exception:  # noqa: BLE001 - the hook is third-party code; in doubt nothing is recorded
        redacted = None
    return (redacted if isinstance(redacted, str) else redaction.HIDDEN).encode(errors="backslashreplace")
