"""Limits of a facts service that need no connection."""

from __future__ import annotations

import logging
import subprocess
import sys

import grpc
import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.service.errors import (
    LOG_INTERVAL_SECONDS,
    MAX_KINDS,
    RejectionHandler,
    ignore_broken_connections,
)
from ergon_framework.facts.service.limits import Limits

FIT_PROGRAM = """
import resource, sys
from ergon_framework.facts.service.limits import Limits
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
limits = Limits(connections=int(sys.argv[3])).fit_to_open_files()
print(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.spec("SEC-08")
@pytest.mark.parametrize(
    "soft, hard, requested, connections, soft_limit",
    [
        # Raised as far as it is needed, and no further.
        (1024, 8192, 4000, 4000, 4768),
        # The connections have to fit into what there is.
        (512, 1024, 4000, 256, 1024),
        (2000, 8192, 1000, 1000, 2000),
        (64, 64, 1000, 1, 64),
    ],
)
def test_connections_fit_into_the_files_that_a_process_may_open(soft, hard, requested, connections, soft_limit):
    command = [sys.executable, "-c", FIT_PROGRAM, *map(str, (soft, hard, requested))]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == [str(connections), str(soft_limit)]
    assert ("raise its limit" in completed.stderr) is (connections < requested)


@pytest.mark.parametrize(
    "limits",
    [{"calls": 0}, {"streams_per_identity": 0}, {"connections": -1}, {"bytes_per_identity": 4 * 1024 * 1024 - 1}],
)
def test_limits_that_allow_nothing_are_rejected(limits):
    with pytest.raises(ConfigurationError, match="at least"):
        Limits(**limits)


@pytest.fixture
def log_lines(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.spec("SEC-08")
def test_repeated_rejections_are_logged_as_a_count(log_lines):
    now = [0.0]
    refusals = RejectionHandler(clock=lambda: now[0])
    for port in range(2000):
        refusals.record("access denied", "GetFact", "no", f"ipv4:10.0.0.1:{port}")
    refusals.report()
    assert log_lines() == ["access denied operation=GetFact reason=no source=ipv4:10.0.0.1"]
    now[0] = LOG_INTERVAL_SECONDS
    refusals.report()
    refusals.report()
    assert log_lines()[1:] == ["access denied operation=GetFact reason=no source=ipv4:10.0.0.1 count=1999"]
    # After a quiet time it is logged again; at the end all counts are logged.
    now[0] = 2 * LOG_INTERVAL_SECONDS
    refusals.report()
    for _ in range(3):
        refusals.record("access denied", "GetFact", "no", "ipv4:10.0.0.1:1")
    refusals.report(everything=True)
    assert log_lines()[2:] == [
        "access denied operation=GetFact reason=no source=ipv4:10.0.0.1",
        "access denied operation=GetFact reason=no source=ipv4:10.0.0.1 count=2",
    ]


@pytest.mark.spec("SEC-08")
def test_rejections_of_too_many_kinds_are_merged(log_lines):
    refusals = RejectionHandler(clock=lambda: 0.0)
    for number in range(1000):
        refusals.record("access denied", "GetFact", f"reason {number}", "ipv4:10.0.0.1:1")
    refusals.report(everything=True)
    assert len(log_lines()) <= MAX_KINDS + 2
    assert f"count={1000 - MAX_KINDS - 1}" in log_lines()[-1]


@pytest.mark.spec("SEC-08")
def test_a_connection_that_a_caller_closes_is_not_logged_as_an_error(caplog):
    ignore_broken_connections()
    core = logging.getLogger("grpc._cython.cygrpc")
    for error in (grpc.aio.InternalError("failed grpc_call_start_batch"), ValueError("a defect")):
        try:
            raise error
        except Exception:
            core.exception("raised by a servicer method")
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]
