"""Requests for tests, as lines and as models."""

from __future__ import annotations

import json


def request(function_name="echo", *args, job_id="job-1", **more):
    context = {"job_id": job_id, "attempt": 1, "enqueue_time": "2026-01-01T12:00:00Z"} | more.pop("context", {})
    return {
        "protocol_version": "1",
        "job_id": job_id,
        "function_name": function_name,
        "args": list(args),
        "kwargs": more.pop("kwargs", {}),
        "context": context,
    } | more


def line(*args, **more):
    return json.dumps(request(*args, **more)).encode() + b"\n"
