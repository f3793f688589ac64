"""An executor that attacks its orchestrator; started by executor_process.py: hostile.py SEED MARK.

Each answer that it forges contains its own process id.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

from tests.fuzz.grammar import OUTCOME, RAW_TOKENS, mutate_line

#: A line may have 16 MiB.
TOO_LONG_BYTES = 17 * 1024 * 1024
BAD_NUMBERS = (b"9" * 5000, b"1e400", b"-0", b"-1", b"1e308", b"NaN", b"1" + b"0" * 30)


class HostileExecutor:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._attacks = [
            *(
                self._write_noise,
                self._write_mutations,
                self._write_blank_lines,
                self._write_too_long_line,
                self._write_partial_line,
                self._exit_mid_line,
                self._forge_answers,
            ),
            *(
                self._repeat_answer,
                self._nest_deeply,
                self._write_large_result,
                self._close_output,
                self._write_to_stderr,
                self._kill_itself,
                self._answer_slowly,
                self._ignore_sigterm,
            ),
            *(
                self._write_bad_numbers,
                self._answer_early,
                self._spawn_writer,
                self._write_joined_lines,
                self._write_repeated_keys,
            ),
        ]

    def serve(self) -> None:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            job = request["job_id"]
            if request["function_name"] == "ergon.ready":
                if self._rng.random() < 0.03:
                    self._rng.choice(
                        (
                            self._write_noise,
                            self._write_partial_line,
                            self._exit_mid_line,
                            self._repeat_answer,
                            self._kill_itself,
                        )
                    )(job)
                self._send({"job_id": job, "status": "error", "error_type": "handler_not_found"})
                continue
            if self._rng.random() < 0.7:
                self._rng.choice(self._attacks)(job)
            self._send(self._make_answer(job))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    def _send(self, value: dict) -> None:
        self._write(json.dumps(value).encode() + b"\n")

    def _make_answer(self, job: str) -> dict:
        return {"job_id": job, "status": "success", "result": {"pid": os.getpid()}}

    def _write_noise(self, job: str) -> None:
        self._write(self._rng.randbytes(self._rng.choice((1, 1000, 200_000))) + b"\n")

    def _write_mutations(self, job: str) -> None:
        for _ in range(self._rng.randrange(1, 50)):
            line = json.dumps(OUTCOME | {"job_id": self._rng.choice((job, "x"))}).encode()
            for _ in range(self._rng.randrange(1, 5)):
                line = mutate_line(line, rng=self._rng) or line
            self._write(line + b"\n")

    def _write_blank_lines(self, job: str) -> None:
        self._write(b"\n" * self._rng.choice((10, 300_000)))

    def _write_too_long_line(self, job: str) -> None:
        self._write(b'{"job_id": "' + job.encode() + b'", "result": "' + b"x" * TOO_LONG_BYTES + b"\n")

    def _write_partial_line(self, job: str) -> None:
        """Write half a line, and then nothing until it is killed."""
        line = json.dumps(self._make_answer(job)).encode()
        self._write(line[: self._rng.randrange(len(line))])
        time.sleep(30)

    def _exit_mid_line(self, job: str) -> None:
        line = json.dumps(self._make_answer(job)).encode()
        self._write(line[: self._rng.randrange(len(line) + 1)])
        os._exit(self._rng.choice((0, 1, 9)))

    def _forge_answers(self, job: str) -> None:
        """Answer jobs of other executors."""
        number = int(job)
        for other in range(number - 10, number + 11):
            if other != number:
                self._send(self._make_answer(str(other)))

    def _repeat_answer(self, job: str) -> None:
        self._write((json.dumps(self._make_answer(job)).encode() + b"\n") * self._rng.choice((2, 1000)))

    def _nest_deeply(self, job: str) -> None:
        depth = self._rng.choice((65, 10_000, 1_000_000))
        self._write(
            b'{"job_id":"%s","status":"success","result":' % job.encode() + b"[" * depth + b"]" * depth + b"}\n"
        )

    def _write_large_result(self, job: str) -> None:
        unit = self._rng.choice((b"[],", b"1,", b'"\\ud83d\\ude00",', b'{"a":1},'))
        body = unit * (self._rng.choice((200_000, 5_000_000)) // len(unit))
        self._write(b'{"job_id":"%s","status":"success","result":[' % job.encode() + body + b"1]}\n")

    def _close_output(self, job: str) -> None:
        os.close(1)
        time.sleep(30)

    def _write_to_stderr(self, job: str) -> None:
        text = self._rng.choice(
            (b"\x1b]0;title\x07\x1b[2J\n", b"\xff\xfe\n", b"level=error forged=1\n", b"y" * 100_000)
        )
        for _ in range(self._rng.choice((1, 200))):
            os.write(2, text)

    def _kill_itself(self, job: str) -> None:
        os.kill(os.getpid(), self._rng.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)))

    def _answer_slowly(self, job: str) -> None:
        for byte in json.dumps(self._make_answer(job)).encode():
            self._write(bytes([byte]))
            time.sleep(0.002)
        self._write(b"\n")

    def _ignore_sigterm(self, job: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(30)

    def _write_bad_numbers(self, job: str) -> None:
        fields = {"retry_after_seconds": b"%s", "result": b"%s", "job_id": b"%s", "status": b"%s"}
        name, number = self._rng.choice(list(fields)), self._rng.choice(BAD_NUMBERS)
        rest = json.dumps({"job_id": job, "status": "retry"}).encode()[:-1]
        self._write(rest + b', "%s": %s}\n' % (name.encode(), number))

    def _answer_early(self, job: str) -> None:
        """Answer before the request."""
        for number in range(int(job), int(job) + 30):
            self._send(self._make_answer(str(number)))

    def _spawn_writer(self, job: str) -> None:
        """Start a child in a separate session, which holds the pipe open and writes into it."""
        script = "import os,time\nfor _ in range(40): os.write(1, b'{\"job_id\":\"' + b'0' * 9); time.sleep(0.05)"
        subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)

    def _write_joined_lines(self, job: str) -> None:
        """Write two interleaved lines."""
        line = json.dumps(self._make_answer(job)).encode()
        self._write(line[:20] + line + b"\n" + self._rng.choice(RAW_TOKENS) + b"\n")

    def _write_repeated_keys(self, job: str) -> None:
        self._write(b'{"job_id":"%s","status":"error","status":"success","result":1}\n' % job.encode())


if __name__ == "__main__":
    HostileExecutor(int(sys.argv[1]) + os.getpid()).serve()
