"""What the fuzzer knows of the protocol: seeds, odd values, and mutations that keep a line a line."""

from __future__ import annotations

import json
import random

CONTEXT = {"job_id": "a", "attempt": 1, "enqueue_time": "2026-01-01T12:00:00Z", "queue_name": "default"}
REQUEST = {
    "protocol_version": "1",
    "job_id": "a",
    "function_name": "echo",
    "args": [],
    "kwargs": {},
    "context": CONTEXT,
}
OUTCOME = {"job_id": "a", "status": "success", "result": {"ok": True}, "error_message": None, "error_type": None}

NAMES = ("echo", "typed", "fails", "retries", "late", "none", "")
STATUSES = ("success", "retry", "timeout", "error", "done", "")
TIMES = ("2026-01-01T12:00:00Z", "2026-01-01T12:00:00.123456789+00:00", "2026-02-30T00:00:00Z", "9999-12-31T23:59:59Z")
ODD = (None, True, 0, -1, 2**31, 2**63, 10**400, 1.5, -0.0, 1e308, "", "1", "2", "\ud800", "\u2028\x00", [], {}, [[]])
#: Not to be had from a writer of JSON.
RAW = (b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b'"\\ud800"', b'"\\ud83d\\ude00"', b"\xff", b"[" * 70 + b"]" * 70)


def seeds(direction: str) -> list[bytes]:
    """Lines to begin with: all that is good, and a little that is not."""
    if direction == "requests":
        whole = CONTEXT | {"deadline": "2099-01-01T00:00:00Z", "trace_context": {"traceparent": "x"}, "worker_id": "w"}
        good = [REQUEST | {"function_name": name, "args": [1, "two"], "kwargs": {"b": [1]}} for name in NAMES]
        good += [REQUEST | {"protocol_version": "2"}, REQUEST | {"context": whole}]
    else:
        good = [OUTCOME | {"status": status} for status in STATUSES]
        good += [OUTCOME | {"retry_after_seconds": value, "error_traceback": "Traceback"} for value in (0, -1, 1e300)]
    lines = [json.dumps(each).encode() for each in good]
    return [*(line + b"\n" for line in lines), b"\n".join(lines[:3]) + b"\n", lines[0][:40], b"hello\n", *RAW]


def mutated(data: bytes, *, dice: random.Random) -> bytes | None:
    """*data* with one line of it changed as a line; None if it has none that is JSON."""
    lines = data.split(b"\n")
    place = dice.randrange(len(lines))
    try:
        value = json.loads(lines[place])
    except (ValueError, RecursionError):
        return None
    lines[place] = _written(_changed(value, dice), dice)
    if dice.random() < 0.2:
        lines.insert(dice.randrange(len(lines)), lines[place])
    return b"\n".join(lines)


def _changed(value: object, dice: random.Random) -> object:
    """*value* with something in it replaced, added or taken away."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        key = dice.choice(list(value))
        kind = dice.randrange(5)
        if kind == 0:
            return {name: item for name, item in value.items() if name != key}
        if kind == 1:
            return value | {dice.choice([*REQUEST, *CONTEXT, *OUTCOME, "x", "\u2028"]): dice.choice(ODD)}
        if kind == 2:
            return value | {key: _likely(key, dice)}
        return value | {key: _changed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        return [*value[:place], _changed(value[place], dice), *value[place + 1 :]]
    return dice.choice(
        [*ODD, [value], {"x": value}, [value, value], _nested(value, dice.choice((3, 60, 61, 62, 63, 64, 65)))]
    )


def _likely(key: str, dice: random.Random) -> object:
    """A value that may well stand under *key*."""
    known = {
        "function_name": NAMES,
        "status": STATUSES,
        "protocol_version": ("1", "2", 1),
        "job_id": ("a", "b", "ü", "", 7),
        "enqueue_time": TIMES,
        "deadline": (*TIMES, None),
        "args": ([1, ["x"]], ["1"], [{}], []),
        "kwargs": ({"a": 1, "b": []}, {"value": 1}, {}),
    }
    return dice.choice(known.get(key, ODD))


def _nested(value: object, depth: int) -> object:
    for _ in range(depth):
        value = [value]
    return value


def _written(value: object, dice: random.Random) -> bytes:
    """As JSON, mostly; sometimes with what no writer of JSON would write."""
    line = json.dumps(value, ensure_ascii=dice.random() < 0.5).encode(errors="surrogatepass")
    kind = dice.randrange(12)
    if kind == 0:
        return line.replace(b"1", dice.choice(RAW), 1)
    if kind == 1 and line.startswith(b"{") and len(line) > 2:
        return b'{"job_id": "b", ' + line[1:]  # a key twice
    if kind == 2:
        return line[: dice.randrange(len(line))]
    if kind == 3:
        place = dice.randrange(len(line))
        return line[:place] + line
    return line
