from __future__ import annotations

import json
import os
from queue import SimpleQueue
from threading import Thread

import pytest

from ergon_framework.runner import child_pipe
from ergon_framework.runner.child_pipe import ParentPipe, read_lines, read_reports
from ergon_framework.runner.process import ParentCommand


def open_pipe():
    """Return the child's end of the parent-child pipe, and the parent's two ends."""
    command_reader, command_writer = os.pipe()
    report_reader, report_writer = os.pipe()
    return ParentPipe(command_reader, report_writer), command_writer, report_reader


@pytest.mark.spec("RUN-01")
def test_commands_arrive_and_a_parent_that_exited_means_stop():
    pipe, command_writer, report_reader = open_pipe()
    commands = SimpleQueue()
    pipe.listen(commands.put)
    os.write(command_writer, b"stop\nnonsense\n\xff\nhur")
    os.write(command_writer, b"ry\n")
    assert [commands.get(timeout=10), commands.get(timeout=10)] == [ParentCommand.STOP, ParentCommand.STOP_NOW]
    os.close(command_writer)
    assert commands.get(timeout=10) is ParentCommand.STOP
    os.close(report_reader)


def test_child_processes_of_the_task_do_not_inherit_the_pipe():
    pipe, command_writer, report_reader = open_pipe()
    assert not any(os.get_inheritable(end) for end in (pipe._commands, pipe._reports))
    for end in (command_writer, report_reader, pipe._commands, pipe._reports):
        os.close(end)


def test_long_reports_arrive_complete():
    pipe, command_writer, report_reader = open_pipe()
    report = {"failures": ["x" * 1000] * 200}
    Thread(target=lambda: (pipe.report("ended", report), pipe.report("health", {}), os.close(pipe._reports))).start()
    assert list(read_reports(report_reader)) == [{"kind": "ended", **report}, {"kind": "health"}]
    os.close(command_writer)
    os.close(pipe._commands)


def test_a_report_without_a_reader_is_ignored():
    pipe, command_writer, report_reader = open_pipe()
    os.close(report_reader)
    pipe.report("health", {})
    for end in (command_writer, pipe._commands, pipe._reports):
        os.close(end)


def test_overlong_lines_and_lines_that_are_not_reports_are_skipped(monkeypatch):
    monkeypatch.setattr(child_pipe, "MAX_LINE_BYTES", 100_000)
    report_reader, report_writer = os.pipe()
    valid_line = json.dumps({"kind": "health"}).encode()

    def write():
        with os.fdopen(report_writer, "wb") as pipe:
            pipe.write(
                b"[]\nnonsense\n" + b"x" * 300_000 + b"\n" + valid_line + b"\n" + b"[" * 99_999 + b"\n" + valid_line
            )

    Thread(target=write).start()
    assert list(read_reports(report_reader)) == [{"kind": "health"}]


def test_the_read_end_is_closed_when_no_writer_is_left():
    report_reader, report_writer = os.pipe()
    os.close(report_writer)
    assert list(read_lines(report_reader)) == []
    with pytest.raises(OSError):
        os.fstat(report_reader)
