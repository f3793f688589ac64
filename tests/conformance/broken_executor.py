"""Executors that are broken in one way each: broken_executor.py NAME; `Sound` is broken in none.

The standard library only, so that each starts in no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

SHAPE = {"protocol_version": str, "function_name": str, "args": list, "kwargs": dict, "context": dict}


class Sound:
    """Keeps the protocol; each method is something that another one gets wrong."""

    def __init__(self):
        self.requests = os.fdopen(self.take_input(), "rb")
        self.outcomes = self.take_output()
        self.context = None
        self.start()

    def take_input(self):
        kept = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return kept

    def take_output(self):
        kept = os.dup(1)
        os.dup2(2, 1)
        return kept

    def start(self):
        pass

    def run(self):
        for line in self.requests:
            self.take(line)

    def take(self, line):
        if not line.endswith(b"\n"):
            return
        try:
            request = self.read(line)
        except ValueError:
            return
        if isinstance(request, dict) and isinstance(request.get("job_id"), str):
            self.answer(self.outcome(request))

    def read(self, line):
        return json.loads(line)

    def answer(self, outcome):
        self.write(json.dumps(outcome).encode() + b"\n")

    def write(self, data):
        while data:
            data = data[os.write(self.outcomes, data) :]

    def outcome(self, request):
        told = self.refused(request) or self.executed(request)
        blank = dict.fromkeys(("status", "result", "error_message", "error_type", "retry_after_seconds"))
        return {"job_id": request["job_id"]} | blank | told

    def refused(self, request):
        if request.get("protocol_version") not in {"1", None}:
            return self.unsupported()
        if any(not isinstance(request.get(name), kind) for name, kind in SHAPE.items()):
            return {"status": "error", "error_type": "bad_request"}
        if not hasattr(self, self.method(request)):
            return {"status": "error", "error_type": "handler_not_found"}
        return None

    def unsupported(self):
        return {"status": "error", "error_type": "unsupported_version"}

    def method(self, request):
        return "do_" + request["function_name"].replace("exam.", "")

    def executed(self, request):
        self.context = request["context"]
        try:
            return {"status": "success", "result": self.call(request)}
        except TimeoutError as error:  # how a retry is asked for here
            return self.retry(error)
        except Exception as error:
            return self.failed(error)

    def call(self, request):
        return getattr(self, self.method(request))(*request["args"], **request["kwargs"])

    def retry(self, error):
        return {"status": "retry", "retry_after_seconds": error.args[0]}

    def failed(self, error):
        return {"status": "error", "error_type": type(error).__name__, "error_message": str(error)}

    # -- handlers -------------------------------------------------------------------------------------

    def do_echo(self, value):
        return value

    def do_fail(self, message):
        raise ValueError(message)

    def do_retry(self, seconds):
        raise TimeoutError(seconds)

    def do_context(self):
        return self.context

    def do_sleep(self, seconds):
        time.sleep(seconds)

    def do_print(self, text):
        print(text, flush=True)

    def do_child(self, text):
        subprocess.run(["echo", text], check=True)

    def do_crash(self):
        os._exit(9)


class NamesTheJobInAscii(Sound):
    def answer(self, outcome):
        super().answer(outcome | {"job_id": outcome["job_id"].encode("ascii", "replace").decode()})


class TiresAfterTen(Sound):
    """The eleventh request is not answered."""

    def start(self):
        self.left = 10

    def answer(self, outcome):
        self.left -= 1
        if self.left >= 0:
            super().answer(outcome)


class SwapsResults(Sound):
    """Of two that came together, each is told the other's result."""

    def run(self):
        while data := os.read(self.requests.fileno(), 1 << 22):
            while not data.endswith(b"\n") and (more := os.read(self.requests.fileno(), 1 << 22)):
                data += more
            lines = data.splitlines(keepends=True)
            if len(lines) == 2:
                first, second = (self.outcome(self.read(line)) for line in lines)
                self.answer(first | {"result": second["result"]})
                self.answer(second | {"result": first["result"]})
            else:
                for line in lines:
                    self.take(line)


class AnswersTwice(Sound):
    def answer(self, outcome):
        super().answer(outcome)
        super().answer(outcome)


class ForgetsKeywords(Sound):
    def call(self, request):
        return getattr(self, self.method(request))(*request["args"])


class SpeaksLatin(Sound):
    def do_echo(self, value):
        return json.loads(json.dumps(value, ensure_ascii=False).encode("latin-1", "replace"))


class EndsLinesInTheMiddle(Sound):
    """Reads text as lines of text are read, where more than a line feed ends a line."""

    def take(self, line):
        if not line.endswith(b"\n"):
            return
        for part in line.decode(errors="surrogateescape").splitlines():
            super().take(f"{part}\n".encode(errors="surrogateescape"))


class RoundsNumbers(Sound):
    def read(self, line):
        return json.loads(line, parse_float=lambda text: float(f"{float(text):.7g}"), parse_int=self.whole)

    def whole(self, text):
        return int(float(f"{float(text):.7g}")) if len(text) > 9 else int(text)


class ReadsShortLines(Sound):
    """A line that does not fit its buffer is lost."""

    def take(self, line):
        if len(line) <= 1_000_000:
            super().take(line)


class ReadsShallowValues(Sound):
    def take(self, line):
        if line.count(b"[") + line.count(b"{") <= 32 or len(line) > 10_000:
            super().take(line)


class KnowsEveryField(Sound):
    """A field that it does not know makes it a bad request."""

    def refused(self, request):
        known = {*SHAPE, "job_id"}
        return {"status": "error", "error_type": "bad_request"} if request.keys() - known else super().refused(request)


class NeedsEveryField(Sound):
    def call(self, request):
        missing = [name for name in ("deadline", "worker_id") if request["context"].get(name, "") is None]
        return 1 / 0 if missing else super().call(request)


class CountsNoAttempts(Sound):
    def do_context(self):
        return self.context | {"attempt": 1}


class ForgetsTheDeadline(Sound):
    def do_context(self):
        return {name: value for name, value in self.context.items() if name != "deadline"}


class StartsItsOwnTrace(Sound):
    def do_context(self):
        return self.context | {"trace_context": {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}}


class CallsErrorsSuccess(Sound):
    def failed(self, error):
        return {"status": "success", "result": str(error)}


class SwallowsMessages(Sound):
    def failed(self, error):
        return {"status": "error", "error_type": "error"}


class DiesOfErrors(Sound):
    """Answers, and is gone."""

    def answer(self, outcome):
        super().answer(outcome)
        if outcome["error_message"] == "no such order":
            time.sleep(0.05)  # its answer is read before its end is seen
            os._exit(1)


class RetriesWithoutDelay(Sound):
    def retry(self, error):
        return {"status": "retry"}


class SpeaksEveryVersion(Sound):
    def refused(self, request):
        return super().refused(request | {"protocol_version": "1"})


class IsSilentAboutVersions(Sound):
    def take(self, line):
        if b'"protocol_version":"2"' not in line:
            super().take(line)


class CallsWhatIsNotThere(Sound):
    """An unknown handler is an error like any other."""

    def refused(self, request):
        told = super().refused(request)
        return None if told and told["error_type"] == "handler_not_found" else told


class CallsWhatIsPrivate(Sound):
    """Looks handlers up where its own methods are."""

    def method(self, request):
        name = request["function_name"].replace("exam.", "")
        return name if name == "__init__" else f"do_{name}"

    def call(self, request):
        return None if request["function_name"] == "__init__" else super().call(request)


class IsSilentAboutBadRequests(Sound):
    def answer(self, outcome):
        if outcome["error_type"] != "bad_request":
            super().answer(outcome)


class DiesOfGarbage(Sound):
    def take(self, line):
        json.loads(line)
        super().take(line)

    def run(self):
        with contextlib.suppress(ValueError):
            # Half of a line at the end is what it can live with.
            for line in self.requests:
                if line.endswith(b"\n"):
                    self.take(line)


class AnswersGarbage(Sound):
    def take(self, line):
        if line.strip() in {b"hello", b"null"}:
            self.answer({"job_id": "unknown", "status": "error", "error_type": "bad_request"})
        super().take(line)


class GreetsItsCaller(Sound):
    def start(self):
        self.write(b"executor 1.0 is ready\n")


class PrintsToStdout(Sound):
    def do_print(self, text):
        self.write(text.encode() + b"\n")


class LetsChildrenPrint(Sound):
    def do_child(self, text):
        subprocess.run(["echo", text], check=True, stdout=self.outcomes)


class StaysWithoutInput(Sound):
    def run(self):
        super().run()
        time.sleep(60)


class EndsBadly(Sound):
    def run(self):
        super().run()
        sys.exit(3)


class LosesTheLastOnes(Sound):
    """What came with the end of its input is not answered."""

    def run(self):
        waiting = []
        while data := os.read(self.requests.fileno(), 1 << 22):
            while not data.endswith(b"\n") and (more := os.read(self.requests.fileno(), 1 << 22)):
                data += more
            waiting = data.splitlines(keepends=True)
            if len(waiting) < 3 or not any(b"exam.echo" in line for line in waiting) or b"hello" in data:
                for line in waiting:
                    self.take(line)


class AnswersHalfLines(Sound):
    def take(self, line):
        super().take(line if line.endswith(b"\n") else line + b"\n")


class CrashesInTheMiddleOfALine(Sound):
    def do_crash(self):
        self.write(b'{"job_id": "exam-2", "stat')
        os._exit(9)


class AnswersBeforeItCrashes(Sound):
    def do_crash(self):
        self.answer({"job_id": "exam-2", "status": "error"})
        os._exit(9)


class IgnoresSignals(Sound):
    def start(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class IgnoresSignalsAtWork(Sound):
    def do_sleep(self, seconds):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().do_sleep(seconds)


class SucceedsAtSignals(Sound):
    """A job that was interrupted is told as done."""

    def do_sleep(self, seconds):
        def leave(*_):
            self.answer({"job_id": self.context["job_id"], "status": "success"})
            os._exit(0)

        signal.signal(signal.SIGTERM, leave)
        super().do_sleep(seconds)


if __name__ == "__main__":
    globals()[sys.argv[1]]().run()
