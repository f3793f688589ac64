"""TLS to PostgreSQL: a certificate that does not verify is refused, an address that verifies nothing is reported."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from datetime import timedelta

import pytest

from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.database.migrate import upgrade
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from tests.integration.running import ERGON
from tests.log_events import list_events
from tests.servers.certificates import CertificateAuthority
from tests.servers.postgres import free_port

EVENT = "postgres server not verified"


@pytest.fixture
def authority(tmp_path):
    return CertificateAuthority(tmp_path)


@pytest.fixture
def server(new_postgres, authority):
    server = new_postgres(fsync=False)
    upgrade(server.dsn())
    issue(server, authority)
    return server


def issue(server, authority, **options):
    files = authority.issue("database", **options)
    server.use_certificate(files.certificate, files.key)


def open_queue(dsn):
    queue = PostgresQueue("orders", dsn=dsn)
    try:
        queue.open()
    finally:
        queue.close()


def verifying(server, authority, **options):
    parameters = {"sslmode": "verify-full", "sslrootcert": authority.path, **options}
    return f"{server.dsn()}?" + "&".join(f"{name}={value}" for name, value in parameters.items())


@pytest.mark.spec("SEC-03")
def test_a_certificate_of_the_right_authority_and_host_is_accepted(server, authority):
    open_queue(verifying(server, authority))


@pytest.mark.spec("SEC-03")
def test_a_certificate_of_another_authority_is_refused(server, tmp_path):
    other = CertificateAuthority(tmp_path, "other")
    with pytest.raises(ConfigurationError, match=r"not signed by a trusted authority.*sslrootcert"):
        open_queue(verifying(server, other))


def test_an_expired_certificate_is_refused(server, authority):
    issue(server, authority, since=timedelta(days=2), lasts=-timedelta(days=1))
    with pytest.raises(ConfigurationError, match=r"expired.*renew it"):
        open_queue(verifying(server, authority))


def test_a_certificate_for_another_host_is_refused(server, authority):
    dsn = verifying(server, authority, hostaddr="127.0.0.1").replace("@127.0.0.1", "@elsewhere.example")
    with pytest.raises(
        ConfigurationError, match=r"another host name.*elsewhere.example.*use a name of the certificate"
    ):
        open_queue(dsn)


def test_a_missing_file_of_authorities_is_refused(server, authority, tmp_path):
    with pytest.raises(ConfigurationError, match=r"file of trusted authorities.*sslrootcert"):
        open_queue(verifying(server, authority, sslrootcert=tmp_path / "missing.pem"))


def test_a_host_that_does_not_answer_may_come_back_with_a_right_certificate(server, tmp_path):
    """A certificate of one host of two does not end the worker, because the other host may become the primary."""
    other = CertificateAuthority(tmp_path, "other")
    dsn = verifying(server, other).replace(f":{server.port}", f":{server.port},localhost:{free_port()}")
    with pytest.raises(ConnectionLostError):
        open_queue(dsn)


@pytest.fixture
def no_authorities(tmp_path, monkeypatch):
    """Let libpq find no file of authorities in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("no_authorities")
@pytest.mark.parametrize("with_authorities", [False, True])
def test_encryption_without_verification_is_reported(server, authority, with_authorities, caplog, tmp_path):
    dsn = f"{server.dsn()}?sslmode=require" + (f"&sslrootcert={authority.path}" if with_authorities else "")
    caplog.set_level(logging.WARNING)
    open_queue(dsn)
    assert (EVENT in list_events(caplog.records)) is not with_authorities
    assert (find_tls_finding(tmp_path, dsn) == "warning") is not with_authorities


@pytest.mark.usefixtures("no_authorities")
def test_require_with_a_file_of_authorities_refuses_another_authority(server, tmp_path):
    other = CertificateAuthority(tmp_path, "other")
    with pytest.raises(ConfigurationError, match="not signed by a trusted authority"):
        open_queue(verifying(server, other, sslmode="require"))


def find_tls_finding(folder, dsn):
    env, command = {**os.environ, "ERGON_POSTGRES__DSN": dsn}, [*ERGON, "doctor", "--json"]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    (database,) = [each for each in json.loads(result.stdout)["targets"] if each["name"] == "database"]
    findings = [each for each in database["diagnostics"] if each["check"] == "tls"]
    return findings[0]["severity"] if findings else None
