"""The encrypting codec: keys, what is bound to a body, and what is read without the key."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from ergon_framework.connectors.base import MissingKeyError, UndecodableError
from ergon_framework.connectors.codec import ENCRYPTED_ERRORS, ENCRYPTION_KEY, JsonCodec, UnencodableError, decode
from ergon_framework.connectors.dead_letters import DeadLetterRecord, TransactionEnvelope
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
from ergon_framework.connectors.foreign_codec import ForeignCodec, from_json_pointer
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.failure import Attempt, Deferral, Failure
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.spec("SEC-26")

KEYS_VARIABLE = "ERGON_ENCRYPTION__KEYS"
REQUIRE_VARIABLE = "ERGON_ENCRYPTION__REQUIRE"


def encode_key(first: int) -> str:
    return base64.b64encode(bytes(range(first, first + 32))).decode()


OLD_KEY, NEW_KEY = f"2026-05:{encode_key(0)}", f"2026-11:{encode_key(50)}"
PAST_ATTEMPTS = (Attempt(attempt=0, category=Category.SYSTEM, error="secret of the past"),)


def make_codec(keys: str = OLD_KEY, **options: bool) -> EncryptingCodec:
    return EncryptingCodec(keys=Keys.parse(keys), **options)


def make_order(**fields: object) -> Transaction:
    return Transaction({"card": "4111"}, id="order-1", **{"source": "shop", "tenant": "acme", **fields})


# -- keys -------------------------------------------------------------------------------------------


def test_the_first_key_encrypts_and_every_key_decrypts():
    body, headers = make_codec(OLD_KEY).encode(make_order())
    two_key_codec = make_codec(f"{NEW_KEY},{OLD_KEY}")
    assert two_key_codec.decode(body, headers) == make_order()
    assert two_key_codec.encode(make_order())[1][ENCRYPTION_KEY] == "2026-11"


def test_keys_are_read_in_both_alphabets_of_base64_and_without_padding():
    key = bytes([251, 255] * 16)
    encodings = [base64.b64encode(key).decode(), base64.urlsafe_b64encode(key).decode().rstrip("=")]
    body, headers = make_codec(f"a:{encodings[0]}").encode(make_order())
    assert make_codec(f" a : {encodings[1]} ".replace(" : ", ":")).decode(body, headers) == make_order()


@pytest.mark.parametrize(
    "text, message",
    [
        ("c2VjcmV0", "key 1 has no id"),
        (f"{OLD_KEY},{OLD_KEY}", "the same id"),
        ("a:no base64!", "key 1 is not base64"),
        ("a:c2VjcmV0", "'a' has 6 bytes: AES-256 needs 32"),
        (f"a b:{encode_key(0)}", "the id of an encryption key is invalid"),
        ("", "no id"),
    ],
)
def test_an_invalid_key_is_rejected_without_being_shown(text, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        Keys.parse(text)
    assert "c2VjcmV0" not in str(caught.value)
    assert encode_key(0) not in str(caught.value)


def test_repr_does_not_show_a_key():
    assert repr(Keys.parse(f"{NEW_KEY},{OLD_KEY}")) == "Keys(2026-11, 2026-05)"
    with pytest.raises(ConfigurationError, match=KEYS_VARIABLE):
        Keys({})


# -- the codec --------------------------------------------------------------------------------------


def test_encrypting_a_body_twice_gives_different_bytes():
    first, second = (make_codec().encode(make_order())[0] for _ in range(2))
    assert first != second
    assert b"4111" not in first


def test_error_messages_are_encrypted_and_their_other_fields_are_not():
    deferral = Deferral(count=1, since=1.0, at=1.0, until=2.0, code="down", error="secret of the bank")
    body, headers = make_codec().encode(make_order(history=PAST_ATTEMPTS, deferral=deferral))
    assert "secret" not in str(headers)
    assert make_codec().decode(body, headers) == make_order(history=PAST_ATTEMPTS, deferral=deferral)
    seen = decode(make_codec(NEW_KEY), body, headers, source="shop").transaction
    assert [past.error for past in seen.history] == ["[encrypted, key 2026-05]"]
    assert (seen.deferral.error, seen.deferral.code) == ("[encrypted, key 2026-05]", "down")


def test_tampered_error_messages_stay_hidden_and_lose_no_message():
    body, headers = make_codec().encode(make_order(history=PAST_ATTEMPTS))
    for broken in ("2026-05:AAAA", "nonsense", headers[ENCRYPTED_ERRORS].replace("2026-05", "2026-11")):
        seen = make_codec().decode(body, {**headers, ENCRYPTED_ERRORS: broken})
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
def test_a_body_is_bound_to_its_envelope(header, value):
    two_key_codec = make_codec(f"{OLD_KEY},{NEW_KEY}")
    body, headers = two_key_codec.encode(make_order())
    with pytest.raises(UndecodableError, match="changed, or belong to another message"):
        two_key_codec.decode(body, {**headers, header: value})


@pytest.mark.parametrize("body", [b"", b"short", bytes(40)])
def test_an_invalid_encrypted_body_is_undecodable(body):
    _, headers = make_codec().encode(make_order())
    with pytest.raises(UndecodableError):
        make_codec().decode(body, headers)


@pytest.mark.parametrize("reader", [JsonCodec(), ForeignCodec(id=from_json_pointer("/id")), make_codec(NEW_KEY)])
def test_without_the_key_the_envelope_is_read_and_the_error_names_the_key(reader):
    body, headers = make_codec().encode(make_order(type="order"))
    with pytest.raises(MissingKeyError, match=rf"'2026-05'.*{KEYS_VARIABLE}") as caught:
        reader.decode(body, headers, source="orders")
    assert caught.value.key_id == "2026-05"
    decoded = decode(reader, body, headers, source="orders")
    assert isinstance(decoded.error, MissingKeyError)
    assert decoded.transaction == make_order(type="order").replace(payload=body)


def test_an_error_in_a_codec_on_an_encrypted_body_is_a_missing_key():
    class FailingCodec(JsonCodec):
        def decode(self, body, headers, *, source=""):
            raise RuntimeError("no idea")

    body, headers = make_codec().encode(make_order())
    assert isinstance(decode(FailingCodec(), body, headers, source="").error, MissingKeyError)
    assert isinstance(
        decode(FailingCodec(), body, {**headers, ENCRYPTION_KEY: "a b"}, source="").error, UndecodableError
    )


def test_an_invalid_envelope_is_undecodable_also_without_the_key():
    body, headers = make_codec().encode(make_order())
    decoded = decode(make_codec(NEW_KEY), body, {**headers, "ergon-attempts": "many"}, source="")
    assert (type(decoded.error), decoded.transaction.id) == (UndecodableError, "order-1")


@pytest.mark.parametrize("key_id", ["", "a b", "x" * 65])
def test_an_invalid_key_id_is_undecodable(key_id):
    body, headers = make_codec().encode(make_order())
    for reader in (make_codec(), JsonCodec()):
        with pytest.raises(UndecodableError, match="not the id of a key"):
            reader.decode(body, {**headers, ENCRYPTION_KEY: key_id})


def test_an_unencrypted_body_is_decoded_unless_encryption_is_required():
    body, headers = JsonCodec().encode(make_order())
    assert make_codec().decode(body, headers) == make_order()
    with pytest.raises(UndecodableError, match="not encrypted"):
        make_codec(require=True).decode(body, headers)


def test_a_transaction_without_a_source_is_unencodable():
    with pytest.raises(UnencodableError, match="no source"):
        make_codec().encode(make_order(source=""))


def test_the_payload_limit_is_that_of_the_inner_codec():
    small = EncryptingCodec(JsonCodec(max_bytes=10), keys=Keys.parse(OLD_KEY))
    body, headers = small.encode(make_order().replace(payload="x" * 8))
    assert small.max_bytes == len(body) == 38, "nothing that was sent is too large for a reader"
    assert small.decode(body, headers).payload == "x" * 8
    with pytest.raises(UnencodableError):
        small.encode(make_order().replace(payload="x" * 9))


# -- the environment --------------------------------------------------------------------------------


def test_the_environment_decides_whether_a_queue_encrypts(monkeypatch):
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    plain = JsonCodec()
    assert select_codec(plain) is plain
    with pytest.raises(ConfigurationError, match=KEYS_VARIABLE):
        EncryptingCodec()
    monkeypatch.setenv(KEYS_VARIABLE, OLD_KEY)
    selected = select_codec(plain)
    assert isinstance(selected, EncryptingCodec)
    assert selected.inner is plain
    assert select_codec(selected) is selected


def test_requiring_encryption_needs_a_key(monkeypatch):
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    monkeypatch.setenv(REQUIRE_VARIABLE, "true")
    with pytest.raises(ConfigurationError, match="without a key"):
        select_codec(None)
    monkeypatch.setenv(KEYS_VARIABLE, OLD_KEY)
    assert is_required()
    monkeypatch.setenv(REQUIRE_VARIABLE, "perhaps")
    with pytest.raises(ConfigurationError, match="must be true or false"):
        is_required()


# -- failures, columns and records ------------------------------------------------------------------


def make_failure() -> Failure:
    fields = {"task_name": "pay", "reason_code": "x", "error_type": "E", "error_message": "secret", "attempts": 1}
    return Failure(**fields, occurred_at=1.0, transaction_id="order-1", category=Category.SYSTEM, traceback="secret")


def test_a_failure_keeps_its_names_and_its_message_is_readable_only_with_the_key():
    keys = Keys.parse(OLD_KEY)
    stored = hide_failure(keys, make_failure())
    assert "secret" not in stored.model_dump_json()
    assert (stored.task_name, stored.error_type, stored.error_message) == ("pay", "E", "[encrypted, key 2026-05]")
    assert hide_failure(keys, stored) is stored
    assert reveal_failure(keys, stored) == make_failure()
    for other in (None, Keys.parse(NEW_KEY)):
        assert reveal_failure(other, stored) == stored
    assert reveal_failure(keys, stored.model_copy(update={"transaction_id": "order-2"})).error_message.startswith("[")


def test_an_encrypted_column_is_bound_to_its_transaction():
    keys = Keys.parse(OLD_KEY)
    stored = hide_text(keys, "secret", "order-1")
    assert "secret" not in stored
    assert reveal_text(keys, stored, "order-1") == "secret"
    assert reveal_text(keys, stored, "order-2") == reveal_text(None, stored, "order-1") == "[encrypted, key 2026-05]"
    assert (hide_text(keys, None, "a"), hide_text(keys, "", "a"), reveal_text(keys, None, "a")) == (None, "", None)


def make_record(**fields: object) -> DeadLetterRecord:
    envelope = TransactionEnvelope.model_validate(make_order(history=PAST_ATTEMPTS))
    defaults = {
        "queue": "orders",
        "envelope": envelope,
        "reason": "x",
        "deliveries": 1,
        "at": 1.0,
        "failure": make_failure(),
    }
    return DeadLetterRecord(**{**defaults, "payload": {"card": "4111"}, **fields})


def test_a_whole_record_is_hidden_and_revealed():
    stored = hide_record(make_codec(), make_record())
    text = stored.model_dump_json()
    assert not any(secret in text for secret in ("secret", "4111"))
    assert reveal_record(make_codec(), DeadLetterRecord.model_validate_json(text)) == make_record()
    assert reveal_record(make_codec(NEW_KEY), stored) == reveal_record(JsonCodec(), stored) == stored


@pytest.mark.parametrize("headers", [{}, {"x": "y"}])
def test_an_undecodable_message_is_stored_unchanged(headers):
    unread = make_record(payload=None, raw=b"not JSON", headers=headers)
    stored = hide_record(make_codec(), unread)
    assert (stored.raw, stored.headers) == (b"not JSON", headers)
    assert reveal_record(make_codec(), stored) == unread
    with pytest.raises(UnencodableError):
        hide_record(make_codec(), make_record(payload=object()))


def test_typed_payloads_are_encrypted_as_they_are_encoded():
    payload = {"at": datetime(2026, 1, 31, tzinfo=UTC), "card": {b"4111"}, "total": Decimal("1.50")}
    body, headers = make_codec().encode(Transaction(payload, id="order-7", source="orders"))
    decoded = make_codec().decode(body, headers)
    assert decoded.payload == {"at": "2026-01-31T00:00:00Z", "card": ["NDExMQ=="], "total": "1.50"}
