"""The headers of a message as text, whatever JSON a third-party producer has written."""

from __future__ import annotations

import json
from typing import Any


def headers_as_text(headers: Any) -> dict[str, str]:
    """Convert *headers* to texts by name; a value that is not an object gives none, and a null is dropped.

    >>> headers_as_text({"x-order": 7, "x-name": "seven", "x-nothing": None})
    {'x-order': '7', 'x-name': 'seven'}
    >>> headers_as_text([1, 2])
    {}
    """
    if not isinstance(headers, dict):
        return {}
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in headers.items()
        if value is not None
    }
