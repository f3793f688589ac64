"""Examining: how a server and a queue in it are, told as findings; it is only read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from redis.exceptions import ResponseError

from ergon_framework.connectors.redis.claiming import GROUP
from ergon_framework.connectors.redis.home import Home
from ergon_framework.connectors.redis.keys import Keys
from ergon_framework.connectors.redis.lines import Node
from ergon_framework.connectors.redis.operation import Operation
from ergon_framework.errors import ConfigurationError, text
from ergon_framework.finding import Finding, Wall, Weight, of_clocks, of_durability, of_version

#: The oldest release of the server that tests run with.
_OLDEST: Final = (7, 0)


def examined(home: Home, node: Node | None, keys: Keys, name: str, wall: Wall) -> Operation[list[Finding]]:
    """How the server is, and the queue called *name* in it."""
    about = yield from _about("server")
    found = [Finding("connection", Weight.FINE, f"connected to Redis, as {about.get('redis_mode', 'a server')}")]
    if version := about.get("redis_version"):
        found.append(of_version(version, server="Redis", number=_number(version), needed=_OLDEST))
    before = wall()
    seconds, micros = yield ("TIME",)
    found.append(of_clocks(int(seconds) + int(micros) / 1e6, before, wall(), server="Redis"))
    if (yield from _about("replication")).get("role") == "slave":
        found.append(
            Finding("role", Weight.BROKEN, "the server is a replica and takes no writes", "give the primary's address")
        )
    try:
        durability = yield from home.checked(node)
    except ConfigurationError as error:
        words, _, do = text(error).partition(": ")
        found.append(Finding("eviction", Weight.BROKEN, words, do))
    else:
        do = "set appendonly to yes and appendfsync to always, in redis.conf or with CONFIG SET"
        found.append(of_durability(durability.words, durable=durability.durable, do=do))
    rights = yield from _rights(keys)
    if any(each.weight is Weight.BROKEN for each in rights):
        return found + rights
    return found + rights + (yield from _queue(keys, name))


def _queue(keys: Keys, name: str) -> Operation[list[Finding]]:
    """Whether the stream is one, and who reads it."""
    kind = _word((yield ("TYPE", keys.stream)))
    if kind == "none":
        words = f"the queue {name!r} is not there yet; its first user has it"
        return [Finding("queue", Weight.FINE, words, shared=False)]
    if kind != "stream":
        seen = f"the key {keys.stream!r} of the queue {name!r} holds a {kind}, not a stream"
        do = "give the queue another name, or another database of the server"
        return [Finding("queue", Weight.BROKEN, seen, do, shared=False)]
    groups = yield ("XINFO", "GROUPS", keys.stream)
    grouped = any(_word(part) == GROUP for group in groups for part in group if isinstance(part, bytes))
    words = f"the queue {name!r} is there" if grouped else f"the stream of {name!r} is there; its first worker reads it"
    return [Finding("queue", Weight.FINE, words, shared=False)]


def _rights(keys: Keys) -> Operation[list[Finding]]:
    """What the user may not do with the queue's keys; nothing where the server does not let that be asked."""
    commands = (
        ("XADD", keys.stream, "*", "body", ""),
        ("XREADGROUP", "GROUP", GROUP, "doctor", "STREAMS", keys.stream, ">"),
        ("EVAL", "return 1", "1", keys.stream),
        ("ZADD", keys.later, "0", "doctor"),
    )
    try:
        user = _word((yield ("ACL", "WHOAMI")))
        for command in commands:
            answer = _word((yield ("ACL", "DRYRUN", user, *command)))
            if answer != "OK":
                seen = f"the user {user!r} may not do all that a queue needs: {answer}"
                return [Finding("permissions", Weight.BROKEN, seen, _granted(user, keys), shared=False)]
    except ResponseError:
        # Only those who may manage users may ask; what is missing is then told by the first command that needs it.
        return []
    return [Finding("permissions", Weight.FINE, f"the user {user!r} may do what a queue needs", shared=False)]


def _granted(user: str, keys: Keys) -> str:
    beside = keys.dead.removesuffix("dead")
    return (
        f"give it the queue's keys and their commands: ACL SETUSER {user} ~{keys.stream} ~{beside}* +@all -@dangerous"
    )


def _about(section: str) -> Operation[Mapping[str, str]]:
    """What the server tells of itself; nothing to those whom it does not."""
    try:
        answer: bytes = yield ("INFO", section)
    except ResponseError:
        return {}
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _number(version: str) -> Sequence[int]:
    return list(_parts(version))


def _parts(version: str) -> Iterator[int]:
    for part in version.split("."):
        if not part.isdigit():
            return
        yield int(part)


def _word(answer: bytes | str) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
