"""Addresses of NATS servers: several of a cluster may be in one text."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

_DEFAULT_SCHEME: Final = "nats"
_DEFAULT_PORT: Final = 4222


def split_addresses(text: str) -> list[str]:
    """Return the addresses in *text*, which commas separate; each has the scheme and login of the one before it.

    >>> split_addresses("tls://app:pw@one:4222, two:4222")
    ['tls://app:pw@one:4222', 'tls://app:pw@two:4222']
    >>> split_addresses("nats://one,nats://two")
    ['nats://one', 'nats://two']
    """
    addresses = []
    scheme, login = _DEFAULT_SCHEME, ""
    for part in filter(None, map(str.strip, text.split(","))):
        own_scheme, separator, rest = part.rpartition("://")
        own_login, at, host = rest.rpartition("@")
        if separator:
            scheme, login = own_scheme, ""
        login = f"{own_login}@" if at else login
        addresses.append(f"{scheme}://{login}{host}")
    return addresses


def get_host(address: str) -> str | None:
    """Return host and port of *address*; None if it is invalid.

    >>> get_host("nats://app:pw@one")
    'one:4222'
    """
    try:
        parts = urlsplit(address)
        port = parts.port or _DEFAULT_PORT
    except ValueError:
        return None
    return f"{parts.hostname}:{port}"
