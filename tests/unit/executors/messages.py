"""Requests for tests, as lines and as models."""

from __future__ import annotations

import json


def build_request(function_name="echo", *args, job_id="job-1", **fields):
    context = {"job_id": job_id, "attempt": 1, "enqueue_time": "2026-01-01T12:00:00Z"} | fields.pop("context", {})
    return {
        "protocol_version": "1",
        "job_id": job_id,
        "function_name": function_name,
        "args": list(args),
        "kwargs": fields.pop("kwargs", {}),
        "context": context,
    } | fields


def encode_request(*args, **fields):
    return json.dumps(build_request(*args, **fields)).encode() + b"\n"
