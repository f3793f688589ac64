"""The Rust reference with the feature otel: it passes the same suite, and its spans continue the trace of a request."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.conformance.test_executors import build_rust, find_failures

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE_CONTEXT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}


def make_request_line(job_id, function_name, trace_context):
    context = {"job_id": job_id, "attempt": 1, "enqueue_time": "2026-01-31T23:59:59Z", "trace_context": trace_context}
    fields = {"protocol_version": "1", "job_id": job_id, "function_name": function_name, "args": ["x"], "kwargs": {}}
    return json.dumps(fields | {"context": context})


@pytest.mark.spec("DX-38", "EXE-15")
def test_the_rust_executor_with_otel_passes_and_continues_the_trace(tmp_path):
    command = build_rust(tmp_path, "--features", "otel")
    assert find_failures(command, answer_timeout=30.0) == {}
    lines = [
        make_request_line("a", "conformance.echo", TRACE_CONTEXT),
        make_request_line("b", "conformance.fail", TRACE_CONTEXT),
        make_request_line("c", "conformance.echo", {"traceparent": "broken"}),
        make_request_line("d", "conformance.echo", None),
    ]
    completed = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    assert [json.loads(line)["status"] for line in completed.stdout.splitlines()] == [
        "success",
        "error",
        *["success"] * 2,
    ]
    spans = [json.loads(line) for line in completed.stderr.splitlines() if line.startswith("{")]
    assert [span["span"] for span in spans] == ["rrq.executor"] * 4
    for span in spans[:2]:
        assert (span["trace_id"], span["parent_span_id"], span["tracestate"]) == (TRACE_ID, PARENT_ID, "vendor=1")
    assert ["Error" in span["status"] for span in spans] == [False, True, False, False]
    # A missing or broken trace context begins a separate trace.
    assert len({span["trace_id"] for span in spans}) == 3
