"""The Python runtime as a real process: its pipes, its signals, and how it ends."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.runner.loading import load_registry
from tests.unit.executors.messages import encode_request

HERE = Path(__file__).parent
SERVE = (
    "import sys; from ergon_framework.cli.executor import run_handlers; "
    "sys.exit(run_handlers('noisy:registry', grace=float(sys.argv[1]), log_level='info'))"
)
#: Starts an executor whose stdin is the starter's own, tells its pid, and stays.
MIDDLEMAN = (
    "import subprocess, sys, time; child = subprocess.Popen(sys.argv[1:], stderr=open('log', 'wb')); "
    "print(child.pid, file=sys.stderr, flush=True); time.sleep(60)"
)
TIMEOUT_SECONDS = 20.0


class Executor:
    """A running executor, with its log in a file."""

    def __init__(self, folder, *, grace=10.0):
        self.log = folder / "log"
        self._unread = b""
        self.command = [sys.executable, "-c", SERVE, str(grace)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=HERE
            )

    def send(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def answer(self):
        # Bypass the pipe's own buffer: select() does not report a line that is already in it.
        while b"\n" not in self._unread:
            assert select.select([self.process.stdout], [], [], TIMEOUT_SECONDS)[0], self.read_log()
            self._unread += os.read(self.process.stdout.fileno(), 65_536) or b"it has ended\n"
        answer, _, self._unread = self._unread.partition(b"\n")
        return json.loads(answer)

    def finish(self):
        """Close its stdin; what it still said, and its exit code."""
        out, _ = self.process.communicate(timeout=TIMEOUT_SECONDS)
        return [json.loads(each) for each in (self._unread + out).splitlines()], self.process.returncode

    def read_log(self):
        return self.log.read_text(encoding="utf-8")

    def wait_until_logged(self, text):
        wait_until(lambda: text in self.read_log())


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_exited(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def start(tmp_path):
    executors = []

    def make(**options):
        executors.append(Executor(tmp_path, **options))
        return executors[-1]

    yield make
    for executor in executors:
        executor.process.kill()
        executor.process.wait()
        executor.process.stdin.close()
        executor.process.stdout.close()


@pytest.mark.spec("EXE-01", "EXE-16")
def test_only_outcomes_reach_stdout(start):
    executor = start()
    # While stdin is still open: a child that had it would wait there, and take what comes next.
    executor.send(encode_request("child_reads"))
    assert executor.answer()["result"] == ""
    names = ("shout", "descriptors", "fork", "echo")
    # All of them before the first answer.
    executor.send(b"".join(encode_request(name, *(["ü"] if name == "echo" else []), job_id=name) for name in names))
    executor.send(encode_request("echo", "half")[:40])
    answers, code = executor.finish()
    # 3 is the descriptor with which ls itself reads the folder.
    expected = {"shout": "quiet", "descriptors": [0, 1, 2, 3], "fork": "parent", "echo": "ü"}
    assert [(each["job_id"], each["result"]) for each in answers] == list(expected.items())
    assert code == 0
    for text in ("printed at import", "written at import", "printed", "original", "descriptor", "native", "to all"):
        assert text in executor.read_log()


@pytest.mark.spec("EXE-16")
def test_leftovers_of_handlers_keep_neither_pipe_nor_process_open(start):
    executor = start()
    names = ("leave_a_child", "leave_a_fork", "leave_a_thread", "leave_a_task")
    executor.send(b"".join(encode_request(name) for name in names))
    children = [executor.answer()["result"] for _ in range(2)]
    try:
        for _ in range(2):
            executor.answer()
        assert executor.finish() == ([], 0)
        assert not any(has_exited(child) for child in children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_signal_ends_an_idle_executor(start):
    executor = start()
    executor.send(encode_request("echo", 1))
    executor.answer()
    executor.process.send_signal(signal.SIGTERM)
    assert executor.process.wait(TIMEOUT_SECONDS) == 0
    assert 'event="executor stopping" reason=SIGTERM' in executor.read_log()


def test_a_signal_cancels_an_async_handler_with_an_outcome_and_takes_no_further_request(start):
    executor = start()
    executor.send(encode_request("wait") + encode_request("echo", 1, job_id="next"))
    executor.wait_until_logged("hanging")
    executor.process.send_signal(signal.SIGTERM)
    answers, code = executor.finish()
    assert [(each["job_id"], each["error_type"]) for each in answers] == [("job-1", "terminated")]
    assert code == 0
    assert "cancelled=True" in executor.read_log()


def test_a_process_exits_after_the_grace_despite_a_handler_that_ignores_the_signal(start):
    executor = start(grace=0.2)
    executor.send(encode_request("hang"))
    executor.wait_until_logged("hanging")
    executor.process.send_signal(signal.SIGTERM)
    assert executor.finish() == ([], 70)


def test_a_second_signal_ends_it_immediately(start):
    executor = start(grace=60.0)
    executor.send(encode_request("hang"))
    executor.wait_until_logged("hanging")
    executor.process.send_signal(signal.SIGTERM)
    executor.wait_until_logged("executor stopping")
    executor.process.send_signal(signal.SIGTERM)
    assert executor.finish() == ([], 70)


@pytest.mark.spec("EXE-21")
def test_it_ends_with_its_parent_although_its_stdin_is_open_and_a_handler_runs(start, tmp_path):
    command = [sys.executable, "-c", MIDDLEMAN, sys.executable, "-c", SERVE, "10"]
    (tmp_path / "noisy.py").write_text((HERE / "noisy.py").read_text(encoding="utf-8"), encoding="utf-8")
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as middleman:
        try:
            pid = int(middleman.stderr.readline())
            middleman.stdin.write(encode_request("hang"))
            middleman.stdin.flush()
            wait_until(lambda: b"hanging" in (tmp_path / "log").read_bytes())
            assert not has_exited(pid)
            middleman.kill()
            wait_until(lambda: has_exited(pid))
        finally:
            middleman.kill()


def test_it_ends_when_its_stdout_has_no_reader(start):
    executor = start()
    executor.send(encode_request("echo", 1))
    executor.answer()
    executor.process.stdout.close()
    executor.send(encode_request("echo", 2))
    assert executor.process.wait(TIMEOUT_SECONDS) == 0
    assert "no reader" in executor.read_log()


@pytest.mark.spec("EXE-19")
def test_a_handler_that_ends_the_process_leaves_no_half_answer(start):
    executor = start()
    executor.send(encode_request("echo", "x" * 100_000) + encode_request("crash") + encode_request("echo", 2))
    answers, code = executor.finish()
    assert ([len(each["result"]) for each in answers], code) == ([100_000], 9)


def run_ergon(handlers, stdin):
    program = "from ergon_framework.cli.main import main; main()"
    command = [sys.executable, "-c", program, "executor", "run", "--handlers", handlers]
    return subprocess.run(command, input=stdin, capture_output=True, cwd=HERE, timeout=TIMEOUT_SECONDS, check=False)


def test_the_command_serves():
    completed = run_ergon("noisy:registry", encode_request("echo", [1]))
    assert (json.loads(completed.stdout)["result"], completed.returncode) == ([1], 0)


def test_missing_handlers_are_reported_on_stderr():
    completed = run_ergon("noisy:regstry", b"")
    assert (completed.stdout, completed.returncode) == (b"", 2)
    assert "did you mean 'registry'?" in completed.stderr.decode()


@pytest.mark.parametrize(
    "name, message",
    [
        ("handlers", "write MODULE:REGISTRY, for example app:registry"),
        ("handlers:regstry", "did you mean 'registry'?"),
        ("handlers:unlike", "its registries are: registry"),
        ("handlers:function", "is not a registry but a function"),
        ("empty:registry", "it has no HandlerRegistry()"),
    ],
)
def test_an_error_about_a_wrong_name_lists_the_alternatives(name, message, tmp_path, monkeypatch):
    source = "from ergon_framework.executors.registry import HandlerRegistry\n"
    source += "registry = HandlerRegistry()\ndef function(): ...\n"
    (tmp_path / "handlers.py").write_text(source, encoding="utf-8")
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("handlers", "empty"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        load_registry(name)
