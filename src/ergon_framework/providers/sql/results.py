"""Results: what of a call can be kept for its key."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from ergon_framework.providers.errors import ProviderInternalError
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: The most bytes of a result that is kept.
LARGEST: Final = 1024 * 1024

#: Made once: json.dumps makes an encoder for each text that is not written by its defaults.
_encode: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def written(value: dict[str, Any]) -> str | None:
    """*value* as it is kept; None where it cannot be: it is no plain JSON, or larger than 1 MiB.

    The call stands all the same. Its key is then kept as done without a result, so that the call is
    not made again; whoever asks for it again is told so.
    """
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError):
        logs.say(logging.WARNING, "provider result not kept", {"reason": "not_json"}, to=_log)
        return None
    # Written in ASCII, so that each character is one byte.
    if len(text) > LARGEST:
        logs.say(logging.WARNING, "provider result not kept", {"reason": "too_large", "size": len(text)}, to=_log)
        return None
    return text


def not_kept() -> ProviderInternalError:
    """The error of a key whose call was made and whose result could not be kept."""
    return ProviderInternalError(
        "the call of this idempotency key was made, and its result could not be kept: "
        "it was no plain JSON, or larger than 1 MiB",
        sent=False,
        final=True,
        code="result_not_kept",
    )
