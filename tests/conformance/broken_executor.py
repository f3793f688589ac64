"""Executors that are broken in one way each: broken_executor.py NAME; `Sound` is not broken.

It imports only the standard library, so that each starts fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

REQUEST_FIELD_TYPES = {"protocol_version": str, "function_name": str, "args": list, "kwargs": dict, "context": dict}


class Sound:
    """Keeps the protocol; each method is something that a subclass gets wrong."""

    def __init__(self):
        self.requests = os.fdopen(self.open_input(), "rb")
        self.output_descriptor = self.open_output()
        self.context = None
        self.start()

    def open_input(self):
        descriptor = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return descriptor

    def open_output(self):
        descriptor = os.dup(1)
        os.dup2(2, 1)
        return descriptor

    def start(self):
        pass

    def run(self):
        for line in self.requests:
            self.process_line(line)

    def process_line(self, line):
        if not line.endswith(b"\n"):
            return
        try:
            request = self.parse(line)
        except ValueError:
            return
        if isinstance(request, dict) and isinstance(request.get("job_id"), str):
            self.answer(self.make_outcome(request))

    def parse(self, line):
        return json.loads(line)

    def answer(self, outcome):
        self.write(json.dumps(outcome).encode() + b"\n")

    def write(self, data):
        while data:
            data = data[os.write(self.output_descriptor, data) :]

    def make_outcome(self, request):
        result = self.find_error(request) or self.execute(request)
        defaults = dict.fromkeys(("status", "result", "error_message", "error_type", "retry_after_seconds"))
        return {"job_id": request["job_id"]} | defaults | result

    def find_error(self, request):
        if request.get("protocol_version") not in {"1", None}:
            return self.make_version_error()
        if any(not isinstance(request.get(name), kind) for name, kind in REQUEST_FIELD_TYPES.items()):
            return {"status": "error", "error_type": "bad_request"}
        if not hasattr(self, self.get_method_name(request)):
            return {"status": "error", "error_type": "handler_not_found"}
        return None

    def make_version_error(self):
        return {"status": "error", "error_type": "unsupported_version"}

    def get_method_name(self, request):
        return "do_" + request["function_name"].replace("conformance.", "")

    def execute(self, request):
        self.context = request["context"]
        try:
            return {"status": "success", "result": self.call(request)}
        except TimeoutError as error:  # this is how handlers ask for a retry
            return self.make_retry(error)
        except Exception as error:
            return self.make_error(error)

    def call(self, request):
        return getattr(self, self.get_method_name(request))(*request["args"], **request["kwargs"])

    def make_retry(self, error):
        return {"status": "retry", "retry_after_seconds": error.args[0]}

    def make_error(self, error):
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
        self.remaining = 10

    def answer(self, outcome):
        self.remaining -= 1
        if self.remaining >= 0:
            super().answer(outcome)


class SwapsResults(Sound):
    """Two requests that arrive together get each other's result."""

    def run(self):
        while data := os.read(self.requests.fileno(), 1 << 22):
            while not data.endswith(b"\n") and (more := os.read(self.requests.fileno(), 1 << 22)):
                data += more
            lines = data.splitlines(keepends=True)
            if len(lines) == 2:
                first, second = (self.make_outcome(self.parse(line)) for line in lines)
                self.answer(first | {"result": second["result"]})
                self.answer(second | {"result": first["result"]})
            else:
                for line in lines:
                    self.process_line(line)


class AnswersTwice(Sound):
    def answer(self, outcome):
        super().answer(outcome)
        super().answer(outcome)


class ForgetsKeywords(Sound):
    def call(self, request):
        return getattr(self, self.get_method_name(request))(*request["args"])


class SpeaksLatin(Sound):
    def do_echo(self, value):
        return json.loads(json.dumps(value, ensure_ascii=False).encode("latin-1", "replace"))


class EndsLinesInTheMiddle(Sound):
    """Splits its input as text, where more characters than a line feed end a line."""

    def process_line(self, line):
        if not line.endswith(b"\n"):
            return
        for part in line.decode(errors="surrogateescape").splitlines():
            super().process_line(f"{part}\n".encode(errors="surrogateescape"))


class RoundsNumbers(Sound):
    def parse(self, line):
        return json.loads(line, parse_float=lambda text: float(f"{float(text):.7g}"), parse_int=self.round_integer)

    def round_integer(self, text):
        return int(float(f"{float(text):.7g}")) if len(text) > 9 else int(text)


class ReadsShortLines(Sound):
    """A line that does not fit its buffer is lost."""

    def process_line(self, line):
        if len(line) <= 1_000_000:
            super().process_line(line)


class ReadsShallowValues(Sound):
    def process_line(self, line):
        if line.count(b"[") + line.count(b"{") <= 32 or len(line) > 10_000:
            super().process_line(line)


class KnowsEveryField(Sound):
    """An unknown field makes a bad request."""

    def find_error(self, request):
        known_fields = {*REQUEST_FIELD_TYPES, "job_id"}
        return (
            {"status": "error", "error_type": "bad_request"}
            if request.keys() - known_fields
            else super().find_error(request)
        )


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
    def make_error(self, error):
        return {"status": "success", "result": str(error)}


class SwallowsMessages(Sound):
    def make_error(self, error):
        return {"status": "error", "error_type": "error"}


class DiesOfErrors(Sound):
    """Answers, and exits."""

    def answer(self, outcome):
        super().answer(outcome)
        if outcome["error_message"] == "no such order":
            time.sleep(0.05)  # its answer is read before its end is seen
            os._exit(1)


class RetriesWithoutDelay(Sound):
    def make_retry(self, error):
        return {"status": "retry"}


class SpeaksEveryVersion(Sound):
    def find_error(self, request):
        return super().find_error(request | {"protocol_version": "1"})


class IsSilentAboutVersions(Sound):
    def process_line(self, line):
        if b'"protocol_version":"2"' not in line:
            super().process_line(line)


class CallsWhatIsNotThere(Sound):
    """An unknown handler is an error like any other."""

    def find_error(self, request):
        error = super().find_error(request)
        return None if error and error["error_type"] == "handler_not_found" else error


class CallsWhatIsPrivate(Sound):
    """Looks handlers up among its own methods."""

    def get_method_name(self, request):
        name = request["function_name"].replace("conformance.", "")
        return name if name == "__init__" else f"do_{name}"

    def call(self, request):
        return None if request["function_name"] == "__init__" else super().call(request)


class IsSilentAboutBadRequests(Sound):
    def answer(self, outcome):
        if outcome["error_type"] != "bad_request":
            super().answer(outcome)


class DiesOfGarbage(Sound):
    def process_line(self, line):
        json.loads(line)
        super().process_line(line)

    def run(self):
        with contextlib.suppress(ValueError):
            # It tolerates an incomplete last line.
            for line in self.requests:
                if line.endswith(b"\n"):
                    self.process_line(line)


class AnswersGarbage(Sound):
    def process_line(self, line):
        if line.strip() in {b"hello", b"null"}:
            self.answer({"job_id": "unknown", "status": "error", "error_type": "bad_request"})
        super().process_line(line)


class GreetsItsCaller(Sound):
    def start(self):
        self.write(b"executor 1.0 is ready\n")


class PrintsToStdout(Sound):
    def do_print(self, text):
        self.write(text.encode() + b"\n")


class LetsChildrenPrint(Sound):
    def do_child(self, text):
        subprocess.run(["echo", text], check=True, stdout=self.output_descriptor)


class StaysWithoutInput(Sound):
    def run(self):
        super().run()
        time.sleep(60)


class EndsBadly(Sound):
    def run(self):
        super().run()
        sys.exit(3)


class LosesTheLastOnes(Sound):
    """Requests that arrive with the end of its input are not answered."""

    def run(self):
        lines = []
        while data := os.read(self.requests.fileno(), 1 << 22):
            while not data.endswith(b"\n") and (more := os.read(self.requests.fileno(), 1 << 22)):
                data += more
            lines = data.splitlines(keepends=True)
            if len(lines) < 3 or not any(b"conformance.echo" in line for line in lines) or b"hello" in data:
                for line in lines:
                    self.process_line(line)


class AnswersHalfLines(Sound):
    def process_line(self, line):
        super().process_line(line if line.endswith(b"\n") else line + b"\n")


class CrashesInTheMiddleOfALine(Sound):
    def do_crash(self):
        self.write(b'{"job_id": "conformance-2", "stat')
        os._exit(9)


class AnswersBeforeItCrashes(Sound):
    def do_crash(self):
        self.answer({"job_id": "conformance-2", "status": "error"})
        os._exit(9)


class IgnoresSignals(Sound):
    def start(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class IgnoresSignalsAtWork(Sound):
    def do_sleep(self, seconds):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().do_sleep(seconds)


class SucceedsAtSignals(Sound):
    """An interrupted job is reported as successful."""

    def do_sleep(self, seconds):
        def report_success_and_exit(*_):
            self.answer({"job_id": self.context["job_id"], "status": "success"})
            os._exit(0)

        signal.signal(signal.SIGTERM, report_success_and_exit)
        super().do_sleep(seconds)


if __name__ == "__main__":
    globals()[sys.argv[1]]().run()
