"""An executor that ignores both the end of its input and SIGTERM, and has a child and a grandchild that do too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from work import RetryRequestedError, perform

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
# Ignored signals stay ignored in children. The second child is orphaned immediately.
for script in ("exec sleep 100000", "sleep 100000 & exit"):
    subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

outcomes = os.fdopen(os.dup(1), "wb", buffering=0)
os.dup2(2, 1)
for line in sys.stdin:
    request = json.loads(line)
    answer = {"job_id": request["job_id"], "status": "success"}
    if request["function_name"] != "chaos.work":
        answer |= {"status": "error", "error_type": "handler_not_found"}
    else:
        context = request["context"]
        try:
            answer["result"] = perform(*request["args"], context["job_id"], context["attempt"], "stubborn")
        except RetryRequestedError:
            answer |= {"status": "retry", "retry_after_seconds": 0.2}
        except Exception as error:
            answer |= {"status": "error", "error_type": type(error).__name__, "error_message": str(error)}
    outcomes.write(json.dumps(answer).encode() + b"\n")
time.sleep(100_000)
