"""The encrypting codec: keys, what is bound to a body, and what is read without the key."""

from __future__ import annotations

import base64

import pytest

from ergon_framework.connectors.base import MissingKeyError, UndecodableError
from ergon_framework.connectors.codec import ENCRYPTED_ERRORS, ENCRYPTION_KEY, JsonCodec, UnencodableError, decode
from ergon_framework.connectors.deadletters import DeadLetterRecord, Envelope
from ergon_framework.connectors.encryption import (
    EncryptingCodec,
    Keys,
    hide_failure,
    hide_record,
    hide_text,
    is_required,
    reveal_failure,
    reveal_record,
    reveal_text,
    select_codec,
)
from ergon_framework.connectors.foreign import ForeignCodec, pointer
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.failure import Attempt, Deferral, Failure
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.spec("SEC-26")

VARIABLE = "ERGON_ENCRYPTION__KEYS"
REQUIRE = "ERGON_ENCRYPTION__REQUIRE"


def encoded(first: int) -> str:
    return base64.b64encode(bytes(range(first, first + 32))).decode()


OLD, NEW = f"2026-05:{encoded(0)}", f"2026-11:{encoded(50)}"
PAST = (Attempt(attempt=0, category=Category.SYSTEM, error="secret of the past"),)


def codec(keys: str = OLD, **options: bool) -> EncryptingCodec:
    return EncryptingCodec(keys=Keys.parse(keys), **options)


def order(**fields: object) -> Transaction:
    return Transaction("order-1", {"card": "4111"}, **{"source": "shop", "tenant": "acme", **fields})


# -- keys -------------------------------------------------------------------------------------------


def test_the_first_key_encrypts_and_every_key_decrypts():
    body, headers = codec(OLD).encode(order())
    both = codec(f"{NEW},{OLD}")
    assert both.decode(body, headers) == order()
    assert both.encode(order())[1][ENCRYPTION_KEY] == "2026-11"


def test_keys_are_read_in_both_alphabets_of_base64_and_without_padding():
    key = bytes([251, 255] * 16)
    texts = [base64.b64encode(key).decode(), base64.urlsafe_b64encode(key).decode().rstrip("=")]
    body, headers = codec(f"a:{texts[0]}").encode(order())
    assert codec(f" a : {texts[1]} ".replace(" : ", ":")).decode(body, headers) == order()


@pytest.mark.parametrize(
    "text, said",
    [
        ("c2VjcmV0", "key 1 has no id"),
        (f"{OLD},{OLD}", "the same id"),
        ("a:no base64!", "key 1 is not base64"),
        ("a:c2VjcmV0", "'a' has 6 bytes: AES-256 needs 32"),
        (f"a b:{encoded(0)}", "the id of an encryption key is invalid"),
        ("", "no id"),
    ],
)
def test_a_wrong_key_is_refused_without_being_shown(text, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        Keys.parse(text)
    assert "c2VjcmV0" not in str(caught.value)
    assert encoded(0) not in str(caught.value)


def test_no_representation_shows_a_key():
    assert repr(Keys.parse(f"{NEW},{OLD}")) == "Keys(2026-11, 2026-05)"
    with pytest.raises(ConfigurationError, match=VARIABLE):
        Keys({})


# -- the codec --------------------------------------------------------------------------------------


def test_a_body_is_never_encrypted_alike_twice():
    first, second = (codec().encode(order())[0] for _ in range(2))
    assert first != second
    assert b"4111" not in first


def test_texts_of_errors_are_encrypted_and_their_shape_is_not():
    deferral = Deferral(count=1, since=1.0, at=1.0, until=2.0, code="down", error="secret of the bank")
    body, headers = codec().encode(order(history=PAST, deferral=deferral))
    assert "secret" not in str(headers)
    assert codec().decode(body, headers) == order(history=PAST, deferral=deferral)
    seen = decode(codec(NEW), body, headers, source="shop").transaction
    assert [past.error for past in seen.history] == ["[encrypted, key 2026-05]"]
    assert (seen.deferral.error, seen.deferral.code) == ("[encrypted, key 2026-05]", "down")


def test_texts_that_were_changed_stay_hidden_and_cost_no_message():
    body, headers = codec().encode(order(history=PAST))
    for broken in ("2026-05:AAAA", "nonsense", headers[ENCRYPTED_ERRORS].replace("2026-05", "2026-11")):
        seen = codec().decode(body, {**headers, ENCRYPTED_ERRORS: broken})
        assert [past.error for past in seen.history] == ["[encrypted, key 2026-05]"]


@pytest.mark.parametrize(
    "header, value",
    [
        ("ergon-id", "order-2"),
        ("ergon-source", "crm"),
        ("ergon-type", "refund"),
        ("ergon-key", "k"),
        ("ergon-tenant", "other"),
        ("ergon-correlation", "x"),
        ("ergon-schema-version", "2"),
        (ENCRYPTION_KEY, "2026-11"),
    ],
)
def test_a_body_belongs_to_its_envelope(header, value):
    both = codec(f"{OLD},{NEW}")
    body, headers = both.encode(order())
    with pytest.raises(UndecodableError, match="changed, or belong to another message"):
        both.decode(body, {**headers, header: value})


@pytest.mark.parametrize("body", [b"", b"short", bytes(40)])
def test_a_body_that_is_none_is_undecodable(body):
    _, headers = codec().encode(order())
    with pytest.raises(UndecodableError):
        codec().decode(body, headers)


@pytest.mark.parametrize("read_by", [JsonCodec(), ForeignCodec(id=pointer("/id")), codec(NEW)])
def test_without_the_key_the_envelope_is_read_and_the_error_names_the_key(read_by):
    body, headers = codec().encode(order(type="order"))
    with pytest.raises(MissingKeyError, match=rf"'2026-05'.*{VARIABLE}") as caught:
        read_by.decode(body, headers, source="orders")
    assert caught.value.key_id == "2026-05"
    found = decode(read_by, body, headers, source="orders")
    assert isinstance(found.error, MissingKeyError)
    assert found.transaction == order(type="order").replace(payload=body)


def test_a_codec_that_breaks_on_an_encrypted_body_lacks_the_key():
    class Broken(JsonCodec):
        def decode(self, body, headers, *, source=""):
            raise RuntimeError("no idea")

    body, headers = codec().encode(order())
    assert isinstance(decode(Broken(), body, headers, source="").error, MissingKeyError)
    assert isinstance(decode(Broken(), body, {**headers, ENCRYPTION_KEY: "a b"}, source="").error, UndecodableError)


def test_an_envelope_that_cannot_be_read_is_undecodable_whatever_its_key():
    body, headers = codec().encode(order())
    found = decode(codec(NEW), body, {**headers, "ergon-attempts": "many"}, source="")
    assert (type(found.error), found.transaction.id) == (UndecodableError, "order-1")


@pytest.mark.parametrize("key_id", ["", "a b", "x" * 65])
def test_what_is_no_id_of_a_key_is_undecodable(key_id):
    body, headers = codec().encode(order())
    for read_by in (codec(), JsonCodec()):
        with pytest.raises(UndecodableError, match="not the id of a key"):
            read_by.decode(body, {**headers, ENCRYPTION_KEY: key_id})


def test_what_is_not_encrypted_is_read_unless_encryption_is_required():
    body, headers = JsonCodec().encode(order())
    assert codec().decode(body, headers) == order()
    with pytest.raises(UndecodableError, match="not encrypted"):
        codec(require=True).decode(body, headers)


def test_a_transaction_without_a_source_cannot_be_bound():
    with pytest.raises(UnencodableError, match="no source"):
        codec().encode(order(source=""))


def test_the_limit_of_a_payload_is_that_of_the_codec_inside():
    small = EncryptingCodec(JsonCodec(max_bytes=10), keys=Keys.parse(OLD))
    body, headers = small.encode(order().replace(payload="x" * 8))
    assert small.max_bytes == len(body) == 38, "nothing that was sent is too large for a reader"
    assert small.decode(body, headers).payload == "x" * 8
    with pytest.raises(UnencodableError):
        small.encode(order().replace(payload="x" * 9))


# -- the environment --------------------------------------------------------------------------------


def test_the_environment_decides_whether_a_queue_encrypts(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    own = JsonCodec()
    assert select_codec(own) is own
    with pytest.raises(ConfigurationError, match=VARIABLE):
        EncryptingCodec()
    monkeypatch.setenv(VARIABLE, OLD)
    found = select_codec(own)
    assert isinstance(found, EncryptingCodec)
    assert found.inner is own
    assert select_codec(found) is found


def test_encryption_is_required_only_with_a_key(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(REQUIRE, "true")
    with pytest.raises(ConfigurationError, match="without a key"):
        select_codec(None)
    monkeypatch.setenv(VARIABLE, OLD)
    assert is_required()
    monkeypatch.setenv(REQUIRE, "perhaps")
    with pytest.raises(ConfigurationError, match="must be true or false"):
        is_required()


# -- failures, columns and records ------------------------------------------------------------------


def failure() -> Failure:
    told = {"task_name": "pay", "reason_code": "x", "error_type": "E", "error_message": "secret", "attempts": 1}
    return Failure(**told, occurred_at=1.0, transaction_id="order-1", category=Category.SYSTEM, traceback="secret")


def test_a_failure_is_found_by_its_names_and_read_with_the_key_only():
    keys = Keys.parse(OLD)
    stored = hide_failure(keys, failure())
    assert "secret" not in stored.model_dump_json()
    assert (stored.task_name, stored.error_type, stored.error_message) == ("pay", "E", "[encrypted, key 2026-05]")
    assert hide_failure(keys, stored) is stored
    assert reveal_failure(keys, stored) == failure()
    for other in (None, Keys.parse(NEW)):
        assert reveal_failure(other, stored) == stored
    assert reveal_failure(keys, stored.model_copy(update={"transaction_id": "order-2"})).error_message.startswith("[")


def test_a_text_of_a_column_is_bound_to_its_transaction():
    keys = Keys.parse(OLD)
    stored = hide_text(keys, "secret", "order-1")
    assert "secret" not in stored
    assert reveal_text(keys, stored, "order-1") == "secret"
    assert reveal_text(keys, stored, "order-2") == reveal_text(None, stored, "order-1") == "[encrypted, key 2026-05]"
    assert (hide_text(keys, None, "a"), hide_text(keys, "", "a"), reveal_text(keys, None, "a")) == (None, "", None)


def record(**fields: object) -> DeadLetterRecord:
    envelope = Envelope.model_validate(order(history=PAST))
    told = {"queue": "orders", "envelope": envelope, "reason": "x", "deliveries": 1, "at": 1.0, "failure": failure()}
    return DeadLetterRecord(**{**told, "payload": {"card": "4111"}, **fields})


def test_a_whole_record_is_hidden_and_comes_back():
    stored = hide_record(codec(), record())
    text = stored.model_dump_json()
    assert not any(secret in text for secret in ("secret", "4111"))
    assert reveal_record(codec(), DeadLetterRecord.model_validate_json(text)) == record()
    assert reveal_record(codec(NEW), stored) == reveal_record(JsonCodec(), stored) == stored


@pytest.mark.parametrize("headers", [{}, {"x": "y"}])
def test_what_could_not_be_read_is_kept_as_it_came(headers):
    unread = record(payload=None, raw=b"not JSON", headers=headers)
    stored = hide_record(codec(), unread)
    assert (stored.raw, stored.headers) == (b"not JSON", headers)
    assert reveal_record(codec(), stored) == unread
    with pytest.raises(UnencodableError):
        hide_record(codec(), record(payload=object()))
