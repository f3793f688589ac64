"""What an error of the database means to a worker: waited out, a mistake of the configuration, or an error."""

from __future__ import annotations

import pytest
from psycopg import errors

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.database.errors import translate_error
from ergon_framework.errors import ConfigurationError, ConnectionLostError


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize(
    "state, prefix",
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
def test_a_temporary_server_error_is_a_lost_connection_that_names_the_cause(state, prefix):
    error = translate_error(errors.lookup(state)("as the server says it"), is_broken=False, error_type=ConnectorError)
    assert type(error) is ConnectionLostError
    assert str(error) == f"{prefix}as the server says it"


@pytest.mark.spec("SEC-15")
@pytest.mark.parametrize(
    "message", ['FATAL:  could not write file "x": No space left on device', "could not write init file"]
)
def test_a_full_disk_is_named_also_when_a_new_connection_is_rejected(message):
    error = translate_error(errors.OperationalError(message), is_broken=True)
    assert type(error) is ConnectionLostError
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
def test_a_permanent_error_is_not_a_lost_connection(state, kind):
    error = translate_error(errors.lookup(state)("as the server says it"), is_broken=False, error_type=ConnectorError)
    assert type(error) is kind


@pytest.mark.spec("SEC-15")
def test_a_broken_connection_has_the_reason_that_the_server_reported():
    assert str(translate_error(errors.AdminShutdown("bye"), is_broken=True)) == "the database is being stopped: bye"
    assert str(translate_error(errors.OperationalError("gone"), is_broken=True)) == "the database is unavailable: gone"
