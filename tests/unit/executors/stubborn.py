"""An executor for tests of the pool, with the standard library: every request in a thread of its own, and bad manners.

stubborn.py [SECONDS to start] [ignores signals and the end of its input]
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

lock = threading.Lock()


def write(outcome):
    with lock:
        sys.stdout.write(outcome if isinstance(outcome, str) else json.dumps(outcome) + "\n")
        sys.stdout.flush()


def spin():
    while True:
        pass


def forge(job_id, other):
    """Says things that are no answer to its own job."""
    write("printed by a handler\n")
    write({"job_id": other, "status": "success", "result": "forged"})
    write('{"job_id": "' + job_id + '", "status": "succ\n')
    return "true"


def write_stderr(text):
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def fill(job_id, unit, size):
    """An outcome of so many bytes, made of one value over and over."""
    write(
        '{"job_id": "'
        + job_id
        + '", "status": "success", "result": ['
        + ",".join([unit] * (size // len(unit + ",")))
        + "]}\n"
    )


def fill_and_exit(job_id, unit, size):
    """The same, as its last words."""
    fill(job_id, unit, size)
    os._exit(0)


def escape(seconds):
    """Start a process in a session of its own, whose parent ends, and one that has no environment; then go on."""
    program = "import os, time; os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(300)"
    command = [sys.executable, "-S", "-c", program]
    orphan = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    orphan_pid = int(orphan.stdout.readline())
    orphan.wait()
    bare = subprocess.Popen(["/bin/sleep", "300"], start_new_session=True, env={}, stdout=subprocess.DEVNULL)
    sys.stderr.write(f"escaped {orphan_pid} {bare.pid}\n")
    sys.stderr.flush()
    time.sleep(seconds)


HANDLERS = {
    "fill": fill,
    "last": fill_and_exit,
    "lines": lambda _, count: write("\n" * count),
    "echo": lambda _, value: value,
    "sleep": lambda _, seconds: time.sleep(seconds),
    "spin": lambda _: spin(),
    "crash": lambda _: os._exit(9),
    "exit": lambda _, code: os._exit(code),
    "pid": lambda _: os.getpid(),
    "kill_parent": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "environment": lambda _: dict(os.environ),
    "limits": lambda _: [resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_CPU)[0]],
    "forge": forge,
    "say": lambda _, text: write_stderr(text),
    "child": lambda _: subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid,
    "session": lambda _: subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL).pid,
    "escape": lambda _, seconds: escape(seconds),
    "malformed": lambda job_id: write('{"job_id": "' + job_id + '", "status": "success", "result": NaN}\n'),
}


def execute(request):
    job_id, name = request["job_id"], request["function_name"]
    if name not in HANDLERS:
        write({"job_id": job_id, "status": "error", "error_type": "handler_not_found"})
        return
    result = HANDLERS[name](job_id, *request["args"])
    if name not in {"malformed", "fill"}:
        write({"job_id": job_id, "status": "success", "result": result})


if __name__ == "__main__":
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
    is_stubborn = len(sys.argv) > 2
    if is_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for request_line in sys.stdin:
        threading.Thread(target=execute, args=(json.loads(request_line),), daemon=not is_stubborn).start()
    if is_stubborn:
        time.sleep(300)
