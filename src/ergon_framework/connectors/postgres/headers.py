"""Headers: those of a message as texts, whatever JSON somebody else's producer put there."""

from __future__ import annotations

import json
from typing import Any


def texts(headers: Any) -> dict[str, str]:
    """*headers* as texts by name; what has no names, or says null, is no header.

    >>> texts({"x-order": 7, "x-name": "seven", "x-nothing": None})
    {'x-order': '7', 'x-name': 'seven'}
    >>> texts([1, 2])
    {}
    """
    if not isinstance(headers, dict):
        return {}
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in headers.items()
        if value is not None
    }
