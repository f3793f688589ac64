"""Keys: where a queue lives, all of it in one slot of a cluster."""

from __future__ import annotations

from typing import NamedTuple

from ergon_framework.errors import ConfigurationError

_LONGEST = 200


class Keys(NamedTuple):
    """The keys of one queue.

    What is ready or in flight is in *stream*; what is put off is in *later*, with the moment it is
    due in *due*; *free* counts the deliveries that cost nothing, by entry; *dead* are the dead
    letters; *bell* rings for those who sleep when something comes back without being added.
    """

    stream: str
    later: str
    due: str
    free: str
    dead: str
    bell: str


def keys_of(name: str, stream: str | None = None) -> Keys:
    """The keys of the queue *name*, beside *stream* where somebody else's producer has chosen that.

    >>> keys_of("orders").stream, keys_of("orders").dead
    ('ergon:{orders}', 'ergon:{orders}:orders:dead')
    >>> keys_of("orders", "shop:orders").dead
    'ergon:{shop:orders}:orders:dead'
    """
    if not 0 < len(name) <= _LONGEST:
        raise ConfigurationError(f"the name of a queue has 1 to {_LONGEST} characters, not {len(name)}")
    if stream is None and ("{" in name or "}" in name):
        raise ConfigurationError(f"the name of a queue in Redis has no braces, which mark a cluster's slot: {name!r}")
    stream = f"ergon:{{{name}}}" if stream is None else stream
    beside = f"ergon:{{{_tag(stream)}}}:{name}"
    return Keys(stream, *(f"{beside}:{part}" for part in ("later", "due", "free", "dead", "bell")))


def _tag(stream: str) -> str:
    """The part of a key that decides its slot: what is between its first braces, else all of it."""
    _, opened, rest = stream.partition("{")
    inside, closed, _ = rest.partition("}")
    if opened and closed and inside:
        return inside
    if not stream or "}" in stream:
        raise ConfigurationError(f"no keys can be made that share a cluster's slot with the stream {stream!r}")
    return stream
