"""The fuzzer's grammar of the protocol: seeds, unusual values, and mutations that keep a line a line."""

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
UNUSUAL_VALUES = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    1.5,
    -0.0,
    1e308,
    "",
    "1",
    "2",
    "\ud800",
    "\u2028\x00",
    [],
    {},
    [[]],
)
#: Not available from a JSON writer.
RAW_TOKENS = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b'"\\ud83d\\ude00"',
    b"\xff",
    b"[" * 70 + b"]" * 70,
)


def make_seeds(direction: str) -> list[bytes]:
    """Return the seed lines: all valid ones, and a few invalid ones."""
    if direction == "requests":
        full_context = CONTEXT | {
            "deadline": "2099-01-01T00:00:00Z",
            "trace_context": {"traceparent": "x"},
            "worker_id": "w",
        }
        messages = [REQUEST | {"function_name": name, "args": [1, "two"], "kwargs": {"b": [1]}} for name in NAMES]
        messages += [REQUEST | {"protocol_version": "2"}, REQUEST | {"context": full_context}]
    else:
        messages = [OUTCOME | {"status": status} for status in STATUSES]
        messages += [
            OUTCOME | {"retry_after_seconds": value, "error_traceback": "Traceback"} for value in (0, -1, 1e300)
        ]
    lines = [json.dumps(each).encode() for each in messages]
    return [*(line + b"\n" for line in lines), b"\n".join(lines[:3]) + b"\n", lines[0][:40], b"hello\n", *RAW_TOKENS]


def mutate_line(data: bytes, *, rng: random.Random) -> bytes | None:
    """Return *data* with one JSON line of it changed; None if it has none."""
    lines = data.split(b"\n")
    index = rng.randrange(len(lines))
    try:
        value = json.loads(lines[index])
    except (ValueError, RecursionError):
        return None
    lines[index] = _encode(_change(value, rng), rng)
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines)), lines[index])
    return b"\n".join(lines)


def _change(value: object, rng: random.Random) -> object:
    """Return *value* with an element replaced, added or removed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        kind = rng.randrange(5)
        if kind == 0:
            return {name: item for name, item in value.items() if name != key}
        if kind == 1:
            return value | {rng.choice([*REQUEST, *CONTEXT, *OUTCOME, "x", "\u2028"]): rng.choice(UNUSUAL_VALUES)}
        if kind == 2:
            return value | {key: _pick_plausible(key, rng)}
        return value | {key: _change(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], _change(value[index], rng), *value[index + 1 :]]
    return rng.choice(
        [*UNUSUAL_VALUES, [value], {"x": value}, [value, value], _nest(value, rng.choice((3, 60, 61, 62, 63, 64, 65)))]
    )


def _pick_plausible(key: str, rng: random.Random) -> object:
    """Return a value that is plausible under *key*."""
    plausible_values = {
        "function_name": NAMES,
        "status": STATUSES,
        "protocol_version": ("1", "2", 1),
        "job_id": ("a", "b", "ü", "", 7),
        "enqueue_time": TIMES,
        "deadline": (*TIMES, None),
        "args": ([1, ["x"]], ["1"], [{}], []),
        "kwargs": ({"a": 1, "b": []}, {"value": 1}, {}),
    }
    return rng.choice(plausible_values.get(key, UNUSUAL_VALUES))


def _nest(value: object, depth: int) -> object:
    for _ in range(depth):
        value = [value]
    return value


def _encode(value: object, rng: random.Random) -> bytes:
    """Write it as JSON, sometimes with tokens that a JSON writer would not write."""
    line = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    kind = rng.randrange(12)
    if kind == 0:
        return line.replace(b"1", rng.choice(RAW_TOKENS), 1)
    if kind == 1 and line.startswith(b"{") and len(line) > 2:
        return b'{"job_id": "b", ' + line[1:]  # a key twice
    if kind == 2:
        return line[: rng.randrange(len(line))]
    if kind == 3:
        index = rng.randrange(len(line))
        return line[:index] + line
    return line
