"""Limits of a facts service that need no connection."""

from __future__ import annotations

import logging
import subprocess
import sys

import grpc
import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.service.limits import Limits
from ergon_framework.facts.service.refusals import (
    INTERVAL_SECONDS,
    MAX_KINDS,
    Refusals,
    ignore_broken_connections,
)

FIT = """
import resource, sys
from ergon_framework.facts.service.limits import Limits
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(Limits(connections=int(sys.argv[3])).fitted().connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.spec("SEC-08")
@pytest.mark.parametrize(
    "soft, hard, asked, connections, raised",
    [
        # Raised as far as it is needed, and no further.
        (1024, 8192, 4000, 4000, 4768),
        # The connections have to fit into what there is.
        (512, 1024, 4000, 256, 1024),
        (2000, 8192, 1000, 1000, 2000),
        (64, 64, 1000, 1, 64),
    ],
)
def test_connections_fit_into_the_files_that_a_process_may_open(soft, hard, asked, connections, raised):
    words = [sys.executable, "-c", FIT, *map(str, (soft, hard, asked))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(connections), str(raised)]
    assert ("raise its limit" in done.stderr) is (connections < asked)


@pytest.mark.parametrize(
    "given",
    [{"calls": 0}, {"streams_per_identity": 0}, {"connections": -1}, {"bytes_per_identity": 4 * 1024 * 1024 - 1}],
)
def test_limits_that_let_nothing_pass_are_refused(given):
    with pytest.raises(ConfigurationError, match="at least"):
        Limits(**given)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.spec("SEC-08")
def test_repeated_refusals_are_logged_as_a_count(lines):
    now = [0.0]
    refusals = Refusals(clock=lambda: now[0])
    for port in range(2000):
        refusals.note("access denied", "GetFact", "no", f"ipv4:10.0.0.1:{port}")
    refusals.report()
    assert lines() == ["access denied operation=GetFact reason=no source=ipv4:10.0.0.1"]
    now[0] = INTERVAL_SECONDS
    refusals.report()
    refusals.report()
    assert lines()[1:] == ["access denied operation=GetFact reason=no source=ipv4:10.0.0.1 count=1999"]
    # After a quiet time it is news again; at the end everything is told.
    now[0] = 2 * INTERVAL_SECONDS
    refusals.report()
    for _ in range(3):
        refusals.note("access denied", "GetFact", "no", "ipv4:10.0.0.1:1")
    refusals.report(everything=True)
    assert lines()[2:] == [
        "access denied operation=GetFact reason=no source=ipv4:10.0.0.1",
        "access denied operation=GetFact reason=no source=ipv4:10.0.0.1 count=2",
    ]


@pytest.mark.spec("SEC-08")
def test_refusals_of_many_kinds_are_not_told_apart_without_end(lines):
    refusals = Refusals(clock=lambda: 0.0)
    for number in range(1000):
        refusals.note("access denied", "GetFact", f"reason {number}", "ipv4:10.0.0.1:1")
    refusals.report(everything=True)
    assert len(lines()) <= MAX_KINDS + 2
    assert f"count={1000 - MAX_KINDS - 1}" in lines()[-1]


@pytest.mark.spec("SEC-08")
def test_a_connection_that_a_caller_breaks_off_is_no_error_in_the_log(caplog):
    ignore_broken_connections()
    core = logging.getLogger("grpc._cython.cygrpc")
    for error in (grpc.aio.InternalError("failed grpc_call_start_batch"), ValueError("a defect")):
        try:
            raise error
        except Exception:
            core.exception("raised by a servicer method")
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]
