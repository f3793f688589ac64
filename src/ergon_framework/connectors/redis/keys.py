"""The keys of a queue, all in one slot of a cluster."""

from __future__ import annotations

from typing import NamedTuple

from ergon_framework.errors import ConfigurationError

_MAX_NAME_CHARS = 200


class QueueKeys(NamedTuple):
    """The keys of one queue.

    Messages that are ready or in flight are in *stream*; deferred ones are in *later*, with their due
    times in *due*; *free* counts the uncounted deliveries of each entry; *dead* has the dead letters;
    *bell* notifies waiting workers of messages that are returned without being added.
    """

    stream: str
    later: str
    due: str
    free: str
    dead: str
    bell: str


def queue_keys(name: str, stream: str | None = None) -> QueueKeys:
    """Return the keys of the queue *name*; *stream* is the key that a third-party producer writes to.

    >>> queue_keys("orders").stream, queue_keys("orders").dead
    ('ergon:{orders}', 'ergon:{orders}:orders:dead')
    >>> queue_keys("orders", "shop:orders").dead
    'ergon:{shop:orders}:orders:dead'
    """
    if not 0 < len(name) <= _MAX_NAME_CHARS:
        raise ConfigurationError(f"the name of a queue has 1 to {_MAX_NAME_CHARS} characters, not {len(name)}")
    if stream is None and ("{" in name or "}" in name):
        raise ConfigurationError(f"the name of a queue in Redis has no braces, which mark a cluster's slot: {name!r}")
    stream = f"ergon:{{{name}}}" if stream is None else stream
    prefix = f"ergon:{{{_parse_hash_tag(stream)}}}:{name}"
    return QueueKeys(stream, *(f"{prefix}:{part}" for part in ("later", "due", "free", "dead", "bell")))


def _parse_hash_tag(stream: str) -> str:
    """Return the part of a key that decides its slot: the text in its first braces, otherwise the whole key."""
    _, opening, rest = stream.partition("{")
    inside, closing, _ = rest.partition("}")
    if opening and closing and inside:
        return inside
    if not stream or "}" in stream:
        raise ConfigurationError(f"no keys can be made that share a cluster's slot with the stream {stream!r}")
    return stream
