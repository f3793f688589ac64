"""The redaction rules: secrets are hidden by name and by form, other text stays, and no text takes long."""

from __future__ import annotations

import time

import pytest

from ergon_framework import redaction
from ergon_framework.errors import error_message, to_one_line
from ergon_framework.failure import describe_error
from ergon_framework.redaction import HIDDEN, hide_known_password, is_secret_name, redact_address, redact_text
from ergon_framework.telemetry.redaction import is_secret_name as is_secret_field
from ergon_framework.telemetry.redaction import mask_credentials, redact, redacted_repr
from tests.secret_forms import FORMS, UNDETECTABLE


@pytest.fixture
def rules(monkeypatch):
    """Leave the rules of the process as they are."""
    monkeypatch.setattr(redaction, "_configured_rules", None)
    monkeypatch.setattr(redaction, "_known_passwords", {})
    monkeypatch.setattr(redaction, "_known_passwords_pattern", None)
    redaction._is_secret.cache_clear()
    yield monkeypatch
    redaction._is_secret.cache_clear()


@pytest.mark.spec("SEC-01", "SEC-02")
@pytest.mark.parametrize("form", FORMS)
def test_a_secret_of_a_known_form_is_hidden(form):
    message, value = FORMS[form]
    hidden = redact_text(message)
    assert value not in hidden
    assert redact_text(hidden) == hidden
    assert value not in describe_error(RuntimeError(message))
    assert value not in error_message(RuntimeError(message))
    assert value not in redacted_repr(redact, "value", {"note": message})


def test_there_are_enough_forms():
    assert len(FORMS) >= 60


@pytest.mark.spec("SEC-02")
@pytest.mark.parametrize("form", UNDETECTABLE)
def test_an_undetectable_form_is_listed_with_its_reason(form):
    message, value, reason = UNDETECTABLE[form]
    assert value in redact_text(message)
    assert reason


@pytest.mark.spec("SEC-02")
@pytest.mark.parametrize(
    "name",
    [
        "password", "db_password", "dbPassword", "DB-PASSWORD", "PGPASSWORD", "passwd", "userPwd", "clientSecret",
        "client_secret", "accessToken", "ACCESS_TOKEN", "refresh-token", "csrftoken", "apiKey", "APIKey", "api_key",
        "apikey", "x-api-key", "privateKey", "AccountKey", "SharedAccessKey", "signingKey", "sessionId", "Set-Cookie",
        "Authorization", "credentials", "signature", "sig", "nkeys_seed_str", "p%61ssword", "connectionString",
        "tokens",
    ],
)  # fmt: skip
def test_the_name_of_a_secret_is_known_in_every_style(name):
    assert is_secret_name(name)
    assert is_secret_field(name)


@pytest.mark.spec("SEC-02")
@pytest.mark.parametrize(
    "name",
    [
        "compass", "author", "authority", "authors", "tokenizer", "keyboard", "monkey", "key", "id", "primary_key",
        "idempotency_key", "routingKey", "passenger", "bypass", "passed", "secretary", "transaction_id", "signal",
        "random_seed", "oauth", "customerPin", "cookbook", "assignature",
    ],
)  # fmt: skip
def test_an_ordinary_name_is_not_a_secret_name(name):
    assert not is_secret_name(name)


@pytest.mark.spec("SEC-02")
@pytest.mark.parametrize(
    "message",
    [
        "compass: north, author: Bob, keyboard: de",
        "the tokenizer failed on keyboard input",
        "see https://example.org/a@b and https://medium.com/@bob/post",
        "GET http://host:8080/x?to=a@b.com -> 500",
        "GET http://[::1]:8080/users/a@b.com -> 500",
        "order 3f2b8c9e-1d2a-4e5f-8a9b-0c1d2e3f4a5b failed",
        "digest sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "pulling registry/app:1.2@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "mailto:bob@example.com, email:bob@example.com, bob@example.com wrote: hi",
        "KeyError: 'customer'",
        "basic tests are green and the bearer of news is here",
        "password is required; token is expired; the secretary is Ann",
        "idempotency_key=abc123 primary_key=4 routing_key=x",
        "{'key': 3, 'id': 7}",
        "bypass=1 passed=3 passenger=Bob",
        "2026-11-18 05:44:16,513 WARNING x",
        "clone git@github.com:org/repo.git at 12:30@work",
        'duplicate key value violates unique constraint "orders_pkey"',
        "unexpected token '<' at line 3",
        "missing fields: ['password', 'username']",
        "it looks like postgresql://user@host:5432/name or redis://user@host:6379/0",
        "<Token object at 0x7f> is not found",
        "a - b -- c --verbose yes",
    ],
)
def test_ordinary_text_is_unchanged(message):
    assert redact_text(message) == message


#: Each is repeated to a megabyte: beginnings of what a rule matches, without the end.
HOSTILE_PARTS = [
    "aaaa", "a.", "a:", "://", "a://,", "(a://", '"', "'", "\\", "password=", "password='", "password={", "[{(",
    "-----BEGIN A-----", "-----BEGIN ", "eyJ", "eyJaaaaaaaa.", "<a", "<password>", "--a ", "%3D", "a%41", "%41", "a%",
    "a@", "a:a@", ",a", "x=,", "token ", "bearer ", "password is ", 'name="a"\n', "api key ", "AKIA", " ", "\n",
    "machine a login a password ", "https://a:b", "hooks.slack.com/services/", 'password=\\"', "('a', ", "aA", "é",
    "-u a", "password 'a", "a://a:b@c,", "password=a,a", "identified with a",
]  # fmt: skip


def _measure(part, length):
    hostile = (part * (length // len(part) + 1))[:length] + " password bearer identified"
    start = time.process_time()
    redact_text(hostile)
    return time.process_time() - start


@pytest.mark.spec("SEC-02")
def test_hostile_text_takes_time_in_proportion_to_its_length():
    slow = {}
    for part in HOSTILE_PARTS:
        times = [min(_measure(part, length) for _ in range(3)) for length in (4_000, 32_000)]
        # Eight times the text; a quadratic rule takes 64 times as long.
        if times[1] > 30 * max(times[0], 0.005):
            slow[part] = times
    assert slow == {}


@pytest.mark.spec("SEC-02")
def test_a_megabyte_is_redacted_in_seconds():
    start = time.process_time()
    redact_text('failed: https://host/path?a=1 {\'id\': 7, "name": "Bob"} order=17 --flag x ' * 13_000 + "password=x")
    assert time.process_time() - start < 10


@pytest.mark.spec("SEC-01")
def test_a_message_is_redacted_before_it_is_cut():
    message = "x" * 480 + " postgresql://app:S3cr3tZq7vXwK9mPb2Ld-and-more@db/shop"
    assert "S3cr3t" not in describe_error(RuntimeError(message))
    assert len(describe_error(RuntimeError("x" * 2_000_000))) == 500


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.spec("SEC-03")
@pytest.mark.parametrize("scheme", ["amqp", "amqps", "redis", "nats", "postgresql", "https"])
@pytest.mark.parametrize("password", ["Sec@ret99", "Sec/ret99", "Se:c?ret99", "Sec#ret99", "S ec,ret99", "%53ecret99"])
def test_an_address_shows_no_credential(scheme, password):
    assert redact_address(f"{scheme}://app:{password}@host:1/x") == f"{scheme}://{HIDDEN}@host:1/x"


@pytest.mark.spec("SEC-03")
@pytest.mark.parametrize(
    "address, shown_as",
    [
        ("nats://n1:4222,nats://u:a@b/c@n2:4222", f"nats://n1:4222,nats://{HIDDEN}@n2:4222"),
        ("host=h password='a b, c' user=u", f"host=h password={HIDDEN} user=u"),
        ("host=h password=a,b;c user=u", f"host=h password={HIDDEN} user=u"),
        ("postgresql://h/db?password=a,b;c&x=1", f"postgresql://h/db?password={HIDDEN}&x=1"),
        ("postgresql://h:5432/db?application_name=a", "postgresql://h:5432/db?application_name=a"),
        ("postgresql://h/db?user=a@b", "postgresql://h/db?user=a@b"),
    ],
)
def test_an_address_keeps_parts_without_credentials(address, shown_as):
    assert redact_address(address) == shown_as


@pytest.mark.spec("SEC-03")
def test_parts_of_a_password_that_a_client_misreads_are_hidden():
    message = "failed to resolve host 'ret99@h': Port could not be cast to integer value as 'Sec'"
    assert hide_known_password(message, "postgresql://postgres:Sec@ret99@h/q") == (
        f"failed to resolve host '{HIDDEN}@h': Port could not be cast to integer value as '{HIDDEN}'"
    )
    assert hide_known_password("wrong pa55 x", "host=h password='pa55'") == f"wrong {HIDDEN} x"


def test_a_user_without_a_password_is_named_where_it_cannot_be_a_token():
    assert hide_known_password('grant usage to "clerk_of_orders"', "postgresql://clerk_of_orders@h/q").endswith(
        '"clerk_of_orders"'
    )
    assert hide_known_password("wrong s3cr3t-token", "nats://s3cr3t-token@h") == f"wrong {HIDDEN}"


@pytest.mark.spec("SEC-03")
def test_a_password_that_the_process_uses_is_hidden_everywhere(rules):
    redaction.learn_address("postgresql://app:Tr0ub4dor@db/shop")
    redaction.learn_address("amqp://guest:guest@mq")
    redaction.learn_address("amqp://app:visitor@mq")
    assert redact_text("Tr0ub4dor was refused") == f"{HIDDEN} was refused"
    assert redact_text("every visitor is a guest") == "every visitor is a guest"
    rules.setattr(redaction, "_MAX_KNOWN_PASSWORDS", 2)
    for number in range(4):
        redaction.learn_address(f"amqp://app:Tr0ub4dor{number}@mq")
    assert redact_text("Tr0ub4dor3 Tr0ub4dor") == f"{HIDDEN} Tr0ub4dor"


# -- rules of the user ----------------------------------------------------------------------------


@pytest.mark.spec("SEC-02")
def test_the_environment_adds_names_and_patterns(rules):
    rules.setenv("ERGON_TELEMETRY__REDACT_NAMES", '["customer_pin", "iban"]')
    rules.setenv("ERGON_TELEMETRY__REDACT_PATTERNS", r"EMP-\d{4}")
    assert redact_text("customerPin=1234 IBAN: DE89 of EMP-0042") == f"customerPin={HIDDEN} IBAN: {HIDDEN} of {HIDDEN}"
    assert redact("value", {"customer-pin": 1, "iban": 2, "id": 3}) == {"customer-pin": HIDDEN, "iban": HIDDEN, "id": 3}


@pytest.mark.spec("SEC-02")
@pytest.mark.parametrize(
    "names, patterns, expected",
    [([], ["("], "'('"), ([], ["x*"], "'x*'"), (["42"], [], "'42'")],
)
def test_an_invalid_rule_is_named(rules, names, patterns, expected):
    with pytest.raises(ValueError, match=r"name|pattern") as caught:
        redaction.configure(names, patterns)
    assert expected in str(caught.value)


@pytest.mark.spec("SEC-02")
def test_with_an_invalid_rule_in_the_environment_nothing_is_shown(rules):
    rules.setenv("ERGON_TELEMETRY__REDACT_PATTERNS", "(")
    assert redact_text("harmless") == HIDDEN


@pytest.mark.spec("SEC-04")
def test_text_on_one_line_has_no_control_characters():
    assert to_one_line("a\r\nb\x1b[2J\u2028\u202ec é") == "a\\r\\nb\\x1b[2J\\u2028\\u202ec é"
    assert to_one_line("plain") == "plain"


def test_the_old_names_in_telemetry_still_work():
    assert mask_credentials("password=x") == f"password={HIDDEN}"
