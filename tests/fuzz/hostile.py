"""An executor that attacks its orchestrator; started by executor_process.py: hostile.py SEED MARK.

Each answer that it forges has its own process id in it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

from tests.fuzz.grammar import OUTCOME, RAW, mutated

#: A line may have 16 MiB.
TOO_LONG = 17 * 1024 * 1024
NUMBERS = (b"9" * 5000, b"1e400", b"-0", b"-1", b"1e308", b"NaN", b"1" + b"0" * 30)


class Hostile:
    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._attacks = [
            *(self._noise, self._mutations, self._blank_lines, self._too_long, self._partial, self._leave, self._forge),
            *(self._twice, self._deep, self._large, self._deafen, self._shout, self._die, self._slow, self._ignore),
            *(self._numbers, self._ahead, self._child, self._joined, self._repeated_keys),
        ]

    def serve(self) -> None:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            job = request["job_id"]
            if request["function_name"] == "ergon.ready":
                if self._dice.random() < 0.03:
                    self._dice.choice((self._noise, self._partial, self._leave, self._twice, self._die))(job)
                self._say({"job_id": job, "status": "error", "error_type": "handler_not_found"})
                continue
            if self._dice.random() < 0.7:
                self._dice.choice(self._attacks)(job)
            self._say(self._honest(job))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    def _say(self, value: dict) -> None:
        self._write(json.dumps(value).encode() + b"\n")

    def _honest(self, job: str) -> dict:
        return {"job_id": job, "status": "success", "result": {"pid": os.getpid()}}

    def _noise(self, job: str) -> None:
        self._write(self._dice.randbytes(self._dice.choice((1, 1000, 200_000))) + b"\n")

    def _mutations(self, job: str) -> None:
        for _ in range(self._dice.randrange(1, 50)):
            line = json.dumps(OUTCOME | {"job_id": self._dice.choice((job, "x"))}).encode()
            for _ in range(self._dice.randrange(1, 5)):
                line = mutated(line, dice=self._dice) or line
            self._write(line + b"\n")

    def _blank_lines(self, job: str) -> None:
        self._write(b"\n" * self._dice.choice((10, 300_000)))

    def _too_long(self, job: str) -> None:
        self._write(b'{"job_id": "' + job.encode() + b'", "result": "' + b"x" * TOO_LONG + b"\n")

    def _partial(self, job: str) -> None:
        """Half a line, and then nothing until it is killed."""
        line = json.dumps(self._honest(job)).encode()
        self._write(line[: self._dice.randrange(len(line))])
        time.sleep(30)

    def _leave(self, job: str) -> None:
        line = json.dumps(self._honest(job)).encode()
        self._write(line[: self._dice.randrange(len(line) + 1)])
        os._exit(self._dice.choice((0, 1, 9)))

    def _forge(self, job: str) -> None:
        """Answers for jobs that others have."""
        number = int(job)
        for other in range(number - 10, number + 11):
            if other != number:
                self._say(self._honest(str(other)))

    def _twice(self, job: str) -> None:
        self._write((json.dumps(self._honest(job)).encode() + b"\n") * self._dice.choice((2, 1000)))

    def _deep(self, job: str) -> None:
        depth = self._dice.choice((65, 10_000, 1_000_000))
        self._write(
            b'{"job_id":"%s","status":"success","result":' % job.encode() + b"[" * depth + b"]" * depth + b"}\n"
        )

    def _large(self, job: str) -> None:
        unit = self._dice.choice((b"[],", b"1,", b'"\\ud83d\\ude00",', b'{"a":1},'))
        body = unit * (self._dice.choice((200_000, 5_000_000)) // len(unit))
        self._write(b'{"job_id":"%s","status":"success","result":[' % job.encode() + body + b"1]}\n")

    def _deafen(self, job: str) -> None:
        os.close(1)
        time.sleep(30)

    def _shout(self, job: str) -> None:
        said = self._dice.choice(
            (b"\x1b]0;title\x07\x1b[2J\n", b"\xff\xfe\n", b"level=error forged=1\n", b"y" * 100_000)
        )
        for _ in range(self._dice.choice((1, 200))):
            os.write(2, said)

    def _die(self, job: str) -> None:
        os.kill(os.getpid(), self._dice.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)))

    def _slow(self, job: str) -> None:
        for byte in json.dumps(self._honest(job)).encode():
            self._write(bytes([byte]))
            time.sleep(0.002)
        self._write(b"\n")

    def _ignore(self, job: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(30)

    def _numbers(self, job: str) -> None:
        fields = {"retry_after_seconds": b"%s", "result": b"%s", "job_id": b"%s", "status": b"%s"}
        name, number = self._dice.choice(list(fields)), self._dice.choice(NUMBERS)
        rest = json.dumps({"job_id": job, "status": "retry"}).encode()[:-1]
        self._write(rest + b', "%s": %s}\n' % (name.encode(), number))

    def _ahead(self, job: str) -> None:
        """Answers before it is asked."""
        for number in range(int(job), int(job) + 30):
            self._say(self._honest(str(number)))

    def _child(self, job: str) -> None:
        """A child in a session of its own, which holds the pipe open and writes into it."""
        script = "import os,time\nfor _ in range(40): os.write(1, b'{\"job_id\":\"' + b'0' * 9); time.sleep(0.05)"
        subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)

    def _joined(self, job: str) -> None:
        """Two lines written into each other."""
        line = json.dumps(self._honest(job)).encode()
        self._write(line[:20] + line + b"\n" + self._dice.choice(RAW) + b"\n")

    def _repeated_keys(self, job: str) -> None:
        self._write(b'{"job_id":"%s","status":"error","status":"success","result":1}\n' % job.encode())


if __name__ == "__main__":
    Hostile(int(sys.argv[1]) + os.getpid()).serve()
