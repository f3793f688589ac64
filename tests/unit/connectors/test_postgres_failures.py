"""What an error of the database means to a worker: waited out, a mistake of the configuration, or an error."""

from __future__ import annotations

import pytest
from psycopg import errors

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.schema.failures import translated


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize(
    "state, words",
    [
        ("53000", "the database is short of resources: "),
        ("53100", "the disk of the database is full: "),
        ("53200", "the database is out of memory: "),
        ("53300", "the database accepts no more connections: "),
        ("53400", "the database has reached a limit of its configuration: "),
        ("58000", "the database has an error of its operating system: "),
        ("58030", "the database cannot read or write its files: "),
        ("25006", "the database is read-only, as a standby is: "),
        ("55P03", "the database did not grant a lock in time: "),
        ("57014", "the database cancelled the statement: "),
        ("57P01", "the database is being stopped: "),
        ("57P02", "the database is restarting after a crash: "),
        ("57P03", "the database is starting or stopping: "),
        ("57P05", "the database ended the idle session: "),
    ],
)
def test_a_server_that_cannot_serve_at_present_is_waited_out_and_the_cause_is_named(state, words):
    error = translated(errors.lookup(state)("as the server says it"), broken=False, other=ConnectorError)
    assert type(error) is ConnectionLost
    assert str(error) == f"{words}as the server says it"


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize(
    "words", ['FATAL:  could not write file "x": No space left on device', "could not write init file"]
)
def test_a_full_disk_is_named_also_where_a_new_connection_is_refused(words):
    error = translated(errors.OperationalError(words), broken=True)
    assert type(error) is ConnectionLost
    assert str(error).startswith("the disk of the database is full")


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize(
    "state, kind",
    [
        ("42P01", ConfigurationError),
        ("42501", ConfigurationError),
        ("57P04", ConnectorError),
        ("58P01", ConnectorError),
        ("22P02", ConnectorError),
        ("23505", ConnectorError),
        ("40P01", ConnectorError),
        ("XX001", ConnectorError),
    ],
)
def test_what_waiting_does_not_cure_is_not_waited_out(state, kind):
    error = translated(errors.lookup(state)("as the server says it"), broken=False, other=ConnectorError)
    assert type(error) is kind


@pytest.mark.spec("SEC-15")
def test_a_connection_that_broke_says_why_where_the_server_has_said_it():
    assert str(translated(errors.AdminShutdown("bye"), broken=True)) == "the database is being stopped: bye"
    assert str(translated(errors.OperationalError("gone"), broken=True)) == "the database is out of reach: gone"
