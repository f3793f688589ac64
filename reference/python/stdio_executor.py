"""Executor protocol 1, complete, with the standard library. A handler that returns an exception fails with it."""

import json
import os
import subprocess
import time


class Retry(Exception): ...


HANDLERS = {
    "conformance.echo": lambda value, context: value,
    "conformance.fail": lambda message, context: ValueError(message),
    "conformance.retry": lambda seconds, context: Retry(seconds),
    "conformance.context": lambda context: context,
    "conformance.sleep": lambda seconds, context: time.sleep(seconds),
    "conformance.print": lambda text, context: print(text),
    "conformance.child": lambda text, context: subprocess.call(["echo", text]) or None,
    "conformance.crash": lambda context: os._exit(9),
}
SHAPE = {"protocol_version": str, "function_name": str, "args": list, "kwargs": dict, "context": dict}
FIELDS = ("job_id", "status", "result", "error_message", "error_type", "retry_after_seconds")


def execute(request):
    reply = dict.fromkeys(FIELDS) | {"job_id": request["job_id"]}
    error = lambda kind, message: reply | {"status": "error", "error_type": kind, "error_message": message}
    if request.get("protocol_version") not in ("1", None):
        return error("unsupported_version", "this executor speaks version 1")
    if bad := [name for name, kind in SHAPE.items() if not isinstance(request.get(name), kind)]:
        return error("bad_request", f"missing, or of another type: {', '.join(bad)}")
    if request["function_name"] not in HANDLERS:
        return error("handler_not_found", f"there is no {request['function_name']!r}")
    try:
        result = HANDLERS[request["function_name"]](*request["args"], **request["kwargs"], context=request["context"])
        if isinstance(result, Exception):
            raise result
        json.dumps(result, allow_nan=False)
    except Retry as retry:
        return reply | {"status": "retry", "retry_after_seconds": retry.args[0]}
    except Exception as failure:
        return error(type(failure).__name__, str(failure))
    return reply | {"status": "success", "result": result}


requests, outcomes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # no child of a handler can read a request,
os.dup2(2, 1)  # and all printed output goes to stderr
for line in requests:
    try:
        request = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        request = None
    if isinstance(request, dict) and isinstance(request.get("job_id"), str):
        outcomes.write(json.dumps(execute(request)).encode() + b"\n")
        outcomes.flush()
    else:
        os.write(2, b"no request: a line of %d bytes\n" % len(line))
