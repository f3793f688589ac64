"""Diagnose a server and a queue in it; the checks only read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from redis.exceptions import ResponseError

from ergon_framework.connectors.redis.address import ServerNode
from ergon_framework.connectors.redis.claims import GROUP
from ergon_framework.connectors.redis.client import ServerClient
from ergon_framework.connectors.redis.connection import Operation
from ergon_framework.connectors.redis.messages import QueueKeys
from ergon_framework.diagnostics import (
    Diagnostic,
    Severity,
    WallClock,
    check_clock_skew,
    check_durability,
    check_version,
)
from ergon_framework.errors import ConfigurationError, error_message

#: The oldest server release that the tests run with.
_MIN_VERSION: Final = (7, 0)


def diagnose(
    client: ServerClient, node: ServerNode | None, keys: QueueKeys, name: str, wall: WallClock
) -> Operation[list[Diagnostic]]:
    """Diagnose the server, and the queue called *name* in it."""
    info = yield from _read_info("server")
    findings = [Diagnostic("connection", Severity.OK, f"connected to Redis, as {info.get('redis_mode', 'a server')}")]
    if version := info.get("redis_version"):
        # Valkey also reports the version of Redis with which it is compatible.
        name_of_server, own_version = (
            ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", version)
        )
        findings.append(
            check_version(own_version, server=name_of_server, number=_parse_version(version), minimum=_MIN_VERSION)
        )
    before = wall()
    seconds, micros = yield ("TIME",)
    findings.append(check_clock_skew(int(seconds) + int(micros) / 1e6, before, wall(), server="Redis"))
    if (yield from _read_info("replication")).get("role") == "slave":
        findings.append(
            Diagnostic(
                "role", Severity.ERROR, "the server is a replica and rejects writes", "use the primary's address"
            )
        )
    try:
        durability = yield from client.check_durability(node)
    except ConfigurationError as error:
        problem, _, remedy = error_message(error).partition(": ")
        findings.append(Diagnostic("eviction", Severity.ERROR, problem, remedy))
    else:
        remedy = "set appendonly to yes and appendfsync to always, in redis.conf or with CONFIG SET"
        findings.append(check_durability(durability.message, durable=durability.durable, remedy=remedy))
    rights = yield from _check_rights(keys)
    if any(each.severity is Severity.ERROR for each in rights):
        return findings + rights
    return findings + rights + (yield from _check_queue(keys, name))


def _check_queue(keys: QueueKeys, name: str) -> Operation[list[Diagnostic]]:
    """Check that the key is a stream, and whether the consumer group exists."""
    kind = _to_text((yield ("TYPE", keys.stream)))
    if kind == "none":
        observed = f"queue {name!r} does not exist yet; it is created on first use"
        return [Diagnostic("queue", Severity.OK, observed, shared=False)]
    if kind != "stream":
        mismatch = f"the key {keys.stream!r} of the queue {name!r} holds a {kind}, not a stream"
        remedy = "choose another queue name, or another database of the server"
        return [Diagnostic("queue", Severity.ERROR, mismatch, remedy, shared=False)]
    groups = yield ("XINFO", "GROUPS", keys.stream)
    has_group = any(_to_text(part) == GROUP for group in groups for part in group if isinstance(part, bytes))
    observed = (
        f"queue {name!r} exists"
        if has_group
        else f"the stream of {name!r} exists; its consumer group is created on first use"
    )
    return [Diagnostic("queue", Severity.OK, observed, shared=False)]


def _check_rights(keys: QueueKeys) -> Operation[list[Diagnostic]]:
    """Check the user's rights on the queue's keys; return nothing where the server does not allow that check."""
    commands = (
        ("XADD", keys.stream, "*", "body", ""),
        ("XREADGROUP", "GROUP", GROUP, "doctor", "STREAMS", keys.stream, ">"),
        ("EVAL", "return 1", "1", keys.stream),
        ("ZADD", keys.later, "0", "doctor"),
    )
    try:
        user = _to_text((yield ("ACL", "WHOAMI")))
        for command in commands:
            answer = _to_text((yield ("ACL", "DRYRUN", user, *command)))
            if answer != "OK":
                observed = f"the user {user!r} lacks a right that a queue needs: {answer}"
                return [Diagnostic("permissions", Severity.ERROR, observed, _build_grants(user, keys), shared=False)]
    except ResponseError:
        # The check needs the right to manage users; without it, the first rejected command reports a missing right.
        return []
    return [
        Diagnostic("permissions", Severity.OK, f"the user {user!r} has the rights that a queue needs", shared=False)
    ]


def _build_grants(user: str, keys: QueueKeys) -> str:
    prefix = keys.dead.removesuffix("dead")
    return f"grant the queue's keys and their commands: ACL SETUSER {user} ~{keys.stream} ~{prefix}* +@all -@dangerous"


def _read_info(section: str) -> Operation[Mapping[str, str]]:
    """Read a section of INFO; return nothing where the server does not allow it."""
    try:
        answer: bytes = yield ("INFO", section)
    except ResponseError:
        return {}
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _parse_version(version: str) -> Sequence[int]:
    return list(_iterate_parts(version))


def _iterate_parts(version: str) -> Iterator[int]:
    for part in version.split("."):
        if not part.isdigit():
            return
        yield int(part)


def _to_text(answer: bytes | str) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
