"""Serialization of call results that are stored for idempotency keys."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from ergon_framework.providers.errors import ProviderInternalError
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Maximum number of bytes of a stored result.
MAX_RESULT_BYTES: Final = 1024 * 1024

#: Created once: json.dumps creates an encoder per call unless all options are the defaults.
_encode: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def serialize_result(value: dict[str, Any]) -> str | None:
    """Return *value* as it is stored; None if it cannot be: it is not plain JSON, or larger than 1 MiB.

    The call counts as made in any case. Its key is then stored as done without a result, so that the call is
    not made again; a later call with this key gets an error that says so.
    """
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError):
        logs.log_event(logging.WARNING, "provider result not kept", {"reason": "not_json"}, to=_log)
        return None
    # The encoder writes ASCII, so that each character is one byte.
    if len(text) > MAX_RESULT_BYTES:
        logs.log_event(logging.WARNING, "provider result not kept", {"reason": "too_large", "size": len(text)}, to=_log)
        return None
    return text


def result_not_stored_error() -> ProviderInternalError:
    """Return the error of a key whose call was made and whose result could not be stored."""
    return ProviderInternalError(
        "the call of this idempotency key was made, and its result could not be kept: "
        "it was no plain JSON, or larger than 1 MiB",
        sent=False,
        final=True,
        code="result_not_kept",
    )
