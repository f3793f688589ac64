"""Addresses with several hosts, and logins that are refused."""

from __future__ import annotations

import asyncio
import os
import ssl
import traceback

import pytest

from ergon_framework.connectors import Credentials, credentials_from_files, login
from ergon_framework.connectors.certificates import explain_certificate_error
from ergon_framework.connectors.login import ROTATION_SECONDS, BrokerLogin
from ergon_framework.connectors.nats.address import get_host, split_addresses
from ergon_framework.connectors.redis.address import PrimaryFinder, ServerNode, parse_address, require_primary
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.redaction import redact_text
from ergon_framework.runner.settings import load_settings

# -- NATS ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, addresses",
    [
        ("nats://one:4222", ["nats://one:4222"]),
        ("one", ["nats://one"]),
        ("nats://one, two:1 ,", ["nats://one", "nats://two:1"]),
        ("tls://app:pw@one,two", ["tls://app:pw@one", "tls://app:pw@two"]),
        ("tls://app:pw@one,nats://two,three", ["tls://app:pw@one", "nats://two", "nats://three"]),
        ("nats://a:1@one,b:2@two", ["nats://a:1@one", "nats://b:2@two"]),
        ("", []),
    ],
)
def test_a_nats_address_inherits_scheme_and_login_of_the_one_before(text, addresses):
    assert split_addresses(text) == addresses


def test_the_host_of_an_invalid_address_is_unknown():
    assert get_host("nats://one:port") is None


# -- sentinels -----------------------------------------------------------------------------------------


def test_an_address_without_sentinels_is_left_to_the_client():
    assert parse_address("redis://one:6380/2").sentinels == ()


def test_the_login_of_the_sentinels_is_not_that_of_the_server():
    url = (
        "rediss+sentinel://app:pw@one/orders/3?sentinel_username=watch&sentinel_password=s3ntinel-word&ssl_ca_certs=/ca"
    )
    address = parse_address(url)
    assert address.url == "rediss://app:pw@one:26379/3?ssl_ca_certs=%2Fca"
    assert (address.service, address.sentinel_user, address.sentinel_password) == ("orders", "watch", "s3ntinel-word")
    assert "s3ntinel" not in redact_text("the client said s3ntinel-word")


@pytest.mark.parametrize("rest", ["one", "one/", "one/orders/0/1", "one/orders/zero", "one:port/orders", "one,/orders"])
@pytest.mark.spec("SEC-03")
def test_an_invalid_address_of_sentinels_is_not_quoted(rest):
    with pytest.raises(ConfigurationError, match="address of the sentinels is invalid; expected") as raised:
        parse_address(f"redis+sentinel://app:tr0ub4dor@{rest}")
    assert "tr0ub4dor" not in str(raised.value)


ONE, TWO, THREE = (ServerNode("host", port) for port in (1, 2, 3))


def search(finder, answers):
    """Run one search; return the sentinels that were asked, and the primary or the error."""
    asked, steps = [], finder.find()
    try:
        asked.append(next(steps))
        while True:
            asked.append(steps.send(answers[asked[-1]]))
    except StopIteration as stop:
        return asked, stop.value
    except (ConfigurationError, ConnectionLostError) as error:
        return asked, error


def test_the_sentinel_that_answered_last_is_asked_first():
    finder = PrimaryFinder("orders", [ONE, TWO, THREE])
    answers = {ONE: ConnectionLostError("down"), TWO: None, THREE: [b"::1", b"6379"]}
    assert search(finder, answers) == ([ONE, TWO, THREE], ServerNode("::1", 6379))
    assert search(finder, answers) == ([THREE], ServerNode("::1", 6379))


def test_sentinels_that_may_come_back_are_a_lost_connection():
    refused = ConfigurationError("the certificate is refused")
    finder = PrimaryFinder("orders", [ONE, TWO])
    for answers, kind in (
        ({ONE: None, TWO: None}, ConfigurationError),
        ({ONE: refused, TWO: refused}, ConfigurationError),
        ({ONE: refused, TWO: ConnectionLostError("down")}, ConnectionLostError),
        ({ONE: None, TWO: ConnectionLostError("down")}, ConnectionLostError),
    ):
        assert type(search(finder, answers)[1]) is kind


def test_only_a_server_that_calls_itself_a_primary_is_used():
    for role, is_used in ((b"master", True), (b"slave", False)):
        check = require_primary(ONE)
        assert next(check) == ("ROLE",)
        with pytest.raises(StopIteration if is_used else ConnectionLostError):
            check.send([role, 0, []])


# -- logins --------------------------------------------------------------------------------------------


def test_a_refused_login_is_a_lost_connection_for_as_long_as_a_rotation_takes():
    clock = [0.0]
    source = BrokerLogin(lambda: Credentials("app", "s3cretword"), clock=lambda: clock[0])
    assert type(source.refuse("no")) is ConfigurationError  # the first one
    source.accept()
    assert type(source.refuse("no")) is ConnectionLostError
    clock[0] = ROTATION_SECONDS - 1
    assert type(source.refuse("no")) is ConnectionLostError
    clock[0] = ROTATION_SECONDS
    assert type(source.refuse("no")) is ConfigurationError
    source.accept()
    assert type(source.refuse("no")) is ConnectionLostError
    constant = BrokerLogin(None)
    constant.accept()
    assert type(constant.refuse("no")) is ConfigurationError


@pytest.mark.spec("SEC-03")
def test_an_error_of_a_source_shows_nothing_of_it():
    def fail():
        raise OSError("s3cretword")

    for source, reason in (
        (fail, "reading the credentials failed: OSError"),
        (lambda: ("a", "b"), "return Credential"),
    ):
        for read in (BrokerLogin(source).read, lambda source=source: asyncio.run(BrokerLogin(source).read_async())):
            with pytest.raises(ConfigurationError, match=reason) as raised:
                read()
            assert "s3cretword" not in "".join(traceback.format_exception(raised.value))


def test_a_file_that_is_missing_during_a_rotation_is_waited_for(tmp_path):
    path = tmp_path / "password"
    path.write_text("s3cretword")
    source = BrokerLogin(credentials_from_files(path))
    assert source.read().password == "s3cretword"
    source.accept()
    path.unlink()
    with pytest.raises(ConnectionLostError, match=r"password.*cannot be read"):
        source.read()


@pytest.fixture
def no_settings(monkeypatch):
    monkeypatch.setattr(login, "_configured", {})
    for name in [name for name in os.environ if name.startswith("ERGON_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_settings")
def test_the_files_of_the_settings_are_used_for_the_address_of_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "password").write_text("s3cretword")
    (tmp_path / "ergon.toml").write_text('[nats]\nurl = "nats://one"\npassword_file = "password"\n')
    load_settings()
    source = login.find_source("nats", None)
    assert source().password == "s3cretword"
    assert login.find_source("nats", "nats://one") is source
    assert login.find_source("nats", "nats://other") is None
    assert login.find_source("redis", None) is None


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(
    "text, reason",
    [
        ('url = "redis://one"\nuser_file = "user"', "user_file is set without password_file"),
        ('password_file = "password"', "password_file is set without url"),
    ],
)
def test_files_that_could_not_be_used_are_rejected(tmp_path, monkeypatch, text, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ergon.toml").write_text(f"[redis]\n{text}\n")
    with pytest.raises(ConfigurationError, match=reason):
        load_settings()


# -- certificates --------------------------------------------------------------------------------------


def make_refusal(code, message):
    refusal = ssl.SSLCertVerificationError(1, message)
    refusal.verify_code, refusal.verify_message = code, message
    error = ConnectionError("Error 1 connecting")
    error.__context__ = refusal
    return error


@pytest.mark.parametrize(
    "code, message, remedy",
    [
        (10, "certificate has expired", "renew it on the server"),
        (9, "certificate is not yet valid", "compare the clocks"),
        (62, "Hostname mismatch, certificate is not valid for 'a'.", "use a name of the certificate"),
        (64, "IP address mismatch", "use a name of the certificate"),
        (19, "self-signed certificate in certificate chain", "set ca_file to the certificate of the authority"),
    ],
)
def test_a_refused_certificate_is_explained_with_a_remedy(code, message, remedy):
    text = explain_certificate_error(make_refusal(code, message), trust="ca_file")
    assert message.rstrip(".") in text
    assert remedy in text
