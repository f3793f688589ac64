"""Encryption of payloads and of the texts of failures at rest.

Keys come from the environment or from the program, never from a configuration file. A message names its key in a
header, so that older keys decrypt what they have encrypted while the first key encrypts everything new. Ids, types,
ordering keys, tenants and times stay readable, because brokers and operators find messages by them. All of these except
the times are authenticated together with the body.

To hide a text is to store a placeholder and the encrypted text in its place; to reveal it is the reverse.
"""

from __future__ import annotations

import base64
import json
import os
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, Defer, Delivery, MissingKeyError, UndecodableError
from ergon_framework.connectors.codec import (
    ENCRYPTED_ERRORS,
    ENCRYPTION_KEY,
    Codec,
    JsonCodec,
    UnencodableError,
    decode,
    encode_unchanged,
    is_key_id,
    read_key_id,
    write_headers,
)
from ergon_framework.connectors.dead_letters import DeadLetterRecord, TransactionEnvelope
from ergon_framework.errors import ConfigurationError, require_extra
from ergon_framework.failure import Attempt, Deferral, Failure
from ergon_framework.transaction import Transaction

KEYS_VARIABLE: Final = "ERGON_ENCRYPTION__KEYS"
REQUIRE_VARIABLE: Final = "ERGON_ENCRYPTION__REQUIRE"
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
#: The key in ``detail`` of a failure record, whose texts are hidden, for its encrypted original.
DETAIL_KEY: Final = "ergon.encrypted"
#: Headers that are authenticated with a body: changing them or moving the body elsewhere requires the key.
_AUTHENTICATED_HEADERS: Final = (
    *("ergon-id", "ergon-source", "ergon-type", "ergon-schema-version"),
    *("ergon-key", "ergon-tenant", "ergon-correlation", "ergon-causation"),
)
#: The prefix of an encrypted text in a column.
_COLUMN_PREFIX: Final = "ergon-encrypted:"
#: The first part of the associated data for each kind of content, so that one kind cannot stand for another.
_BODY, _ERRORS, _FAILURE, _TEXT = "body", "errors", "failure", "text"


class _TamperedError(ConnectorError):
    """Encrypted content does not match its key and its context: it was changed, or moved here from elsewhere."""


class Keys:
    """Keys of AES-256-GCM by their ids; the first one encrypts, all of them decrypt."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ConfigurationError(
                f"no encryption key is given: set {KEYS_VARIABLE} to ID:BASE64, for example 2026-11:…"
            )
        aead = require_extra("encryption", "cryptography.hazmat.primitives.ciphers.aead")
        self._invalid_tag_error: type[Exception] = require_extra("encryption", "cryptography.exceptions").InvalidTag
        for key_id, key in keys.items():
            if not is_key_id(key_id):
                raise ConfigurationError(
                    "the id of an encryption key is invalid: use 1 to 64 letters, digits, dots, underscores and hyphens"
                )
            if len(key) != KEY_BYTES:
                raise ConfigurationError(
                    f"the encryption key {key_id!r} has {len(key)} bytes: AES-256 needs {KEY_BYTES}, in base64"
                )
        self._keys: dict[str, Any] = {key_id: aead.AESGCM(key) for key_id, key in keys.items()}
        #: The id of the key that encrypts.
        self.current = next(iter(keys))

    def __repr__(self) -> str:
        return f"Keys({', '.join(self._keys)})"

    @classmethod
    def parse(cls, text: str) -> Keys:
        """Parse ``ID:BASE64,ID:BASE64``; raise ConfigurationError, without quoting the keys, if that fails."""
        keys: dict[str, bytes] = {}
        for number, part in enumerate(text.split(","), 1):
            key_id, colon, encoded = part.strip().partition(":")
            if not colon:
                raise ConfigurationError(
                    f"{KEYS_VARIABLE}: key {number} has no id; write ID:BASE64, the current key first"
                )
            if key_id in keys:
                raise ConfigurationError(f"{KEYS_VARIABLE}: two keys have the same id; give each key its own id")
            try:
                # The URL-safe alphabet is accepted too, and the padding may be omitted.
                keys[key_id] = base64.b64decode(_pad(encoded.strip()), altchars=b"-_", validate=True)
            except (Base64Error, ValueError):
                raise ConfigurationError(f"{KEYS_VARIABLE}: key {number} is not base64") from None
        return cls(keys)

    def encrypt(self, content: bytes, context: Sequence[str], *, kind: str) -> bytes:
        """Return *content* under the current key, with its random nonce as a prefix.

        It can be decrypted only with the same *context* and *kind*, so that it cannot be moved to another message.
        """
        nonce = os.urandom(NONCE_BYTES)
        encrypted: bytes = self._keys[self.current].encrypt(nonce, content, _bind(kind, self.current, context))
        return nonce + encrypted

    def decrypt(self, key_id: str, encrypted: bytes, context: Sequence[str], *, kind: str) -> bytes:
        """Return the decrypted content; raise MissingKeyError without its key."""
        key = self._keys.get(key_id)
        if key is None:
            raise MissingKeyError.for_key(key_id)
        nonce, content = encrypted[:NONCE_BYTES], encrypted[NONCE_BYTES:]
        try:
            decrypted: bytes = key.decrypt(nonce, content, _bind(kind, key_id, context))
        except (self._invalid_tag_error, ValueError):
            raise _TamperedError(f"{len(encrypted)} bytes do not match the key {key_id!r} and their context") from None
        return decrypted

    def encrypt_text(self, text: str, context: Sequence[str], *, kind: str = _TEXT) -> str:
        """Return *text* as ``ID:BASE64``."""
        content = self.encrypt(text.encode(errors="surrogatepass"), context, kind=kind)
        return f"{self.current}:{base64.b64encode(content).decode()}"

    def decrypt_text(self, encrypted: str, context: Sequence[str], *, kind: str = _TEXT) -> str | None:
        """Return the text; None if its key is missing or the content was changed."""
        key_id, _, encoded = encrypted.partition(":")
        try:
            content = self.decrypt(key_id, base64.b64decode(encoded, validate=True), context, kind=kind)
        except (MissingKeyError, _TamperedError, ValueError):
            return None
        return content.decode(errors="surrogatepass")


def _pad(encoded: str) -> str:
    plain = encoded.rstrip("=").replace("+", "-").replace("/", "_")
    return plain + "=" * (-len(plain) % 4)


def _bind(kind: str, key_id: str, context: Sequence[str]) -> bytes:
    # The length prefix distinguishes ("ab", "c") from ("a", "bc").
    parts = [part.encode(errors="surrogatepass") for part in ("ergon", kind, key_id, *context)]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def format_placeholder(key_id: str) -> str:
    """Return the placeholder that is shown instead of an encrypted text."""
    return f"[encrypted, key {key_id}]"


def hide_text(keys: Keys | None, text: str | None, owner_id: str) -> str | None:
    """Return *text* as a database column stores it: encrypted, and readable only with the transaction id *owner_id*."""
    return text if keys is None or not text else f"{_COLUMN_PREFIX}{keys.encrypt_text(text, (owner_id,))}"


def reveal_text(keys: Keys | None, text: str | None, owner_id: str) -> str | None:
    """Return the text of a database column; the placeholder if its key is missing or it was changed."""
    if text is None or not text.startswith(_COLUMN_PREFIX):
        return text
    encrypted = text.removeprefix(_COLUMN_PREFIX)
    decrypted = None if keys is None else keys.decrypt_text(encrypted, (owner_id,))
    return format_placeholder(encrypted.partition(":")[0][:64]) if decrypted is None else decrypted


# -- configuration --------------------------------------------------------------------------------


def load_environment_keys() -> Keys | None:
    """Return the keys that the environment names; None if it names none."""
    text = os.environ.get(KEYS_VARIABLE, "").strip()
    return _parse_keys(text) if text else None


_parse_keys: Final = lru_cache(4)(Keys.parse)


def is_required() -> bool:
    """Return whether the environment requires messages to be encrypted."""
    text = os.environ.get(REQUIRE_VARIABLE, "").strip().lower()
    if text not in ("", "true", "false"):
        raise ConfigurationError(f"{REQUIRE_VARIABLE} must be true or false, not {text[:20]!r}")
    if text == "true" and load_environment_keys() is None:
        raise ConfigurationError(f"{REQUIRE_VARIABLE} is true without a key: set {KEYS_VARIABLE} to ID:BASE64")
    return text == "true"


def select_codec(codec: Codec | None) -> Codec:
    """Return the codec of a queue: *codec* or JSON, encrypting if the environment names keys."""
    plain = codec or JsonCodec()
    if isinstance(plain, EncryptingCodec) or (load_environment_keys() is None and not is_required()):
        return plain
    return EncryptingCodec(plain)


# -- the codec ------------------------------------------------------------------------------------


class EncryptingCodec:
    """Encrypt the output of *codec*, and the error texts that a message stores.

    The keys are those of ``ERGON_ENCRYPTION__KEYS`` unless *keys* is given. A message that is not encrypted is
    accepted unless *require* or ``ERGON_ENCRYPTION__REQUIRE`` is true.
    """

    def __init__(self, codec: Codec | None = None, *, keys: Keys | None = None, require: bool | None = None) -> None:
        self.inner: Codec = codec or JsonCodec()
        available_keys = keys or load_environment_keys()
        if available_keys is None:
            raise ConfigurationError(
                f"no encryption key is given: set {KEYS_VARIABLE} to ID:BASE64, the current key first"
            )
        self.keys = available_keys
        self._require = is_required() if require is None else require

    @property
    def max_bytes(self) -> int | None:
        """The largest body that is stored: that of the inner codec, plus nonce and tag."""
        inner_max_bytes = self.inner.max_bytes
        return None if inner_max_bytes is None else inner_max_bytes + NONCE_BYTES + TAG_BYTES

    def encode(self, transaction: Transaction) -> tuple[bytes, dict[str, str]]:
        if not transaction.source:
            raise UnencodableError(
                f"transaction {transaction.id[:64]!r} has no source, which its encryption is bound to; dispatch it "
                "through a connector, or give it a source"
            )
        hidden_transaction, errors = self._hide(transaction)
        body, headers = self.inner.encode(hidden_transaction)
        if errors is not None:
            headers[ENCRYPTED_ERRORS] = errors
        headers[ENCRYPTION_KEY] = self.keys.current
        return self.keys.encrypt(body, _build_context(headers), kind=_BODY), headers

    def decode(self, body: bytes, headers: Mapping[str, str], *, source: str = "") -> Transaction:
        if ENCRYPTION_KEY not in headers:
            if self._require:
                raise UndecodableError(
                    f"the body ({len(body)} bytes) is not encrypted, and {REQUIRE_VARIABLE} is true; send it encrypted"
                )
            return self._reveal(self.inner.decode(body, headers, source=source), headers)
        key_id = read_key_id(headers)
        try:
            plain = self.keys.decrypt(key_id, body, _build_context(headers), kind=_BODY)
        except _TamperedError as error:
            raise UndecodableError(
                f"an encrypted body of {error}: body or headers were changed, or belong to another message"
            ) from None
        inner_headers = {name: text for name, text in headers.items() if name not in (ENCRYPTION_KEY, ENCRYPTED_ERRORS)}
        return self._reveal(self.inner.decode(plain, inner_headers, source=source), headers)

    def encode_envelope(self, transaction: Transaction) -> dict[str, str]:
        """Return the headers of *transaction* for a redelivery with its stored body, whose key header stays valid."""
        hidden_transaction, errors = self._hide(transaction)
        headers = write_headers(hidden_transaction)
        return headers if errors is None else {**headers, ENCRYPTED_ERRORS: errors}

    def _hide(self, transaction: Transaction) -> tuple[Transaction, str | None]:
        if not transaction.history and transaction.deferral is None:
            return transaction, None
        history, deferral, errors = hide_errors(self.keys, transaction, transaction.history, transaction.deferral)
        return transaction.replace(history=history, deferral=deferral), errors

    def _reveal(self, transaction: Transaction, headers: Mapping[str, str]) -> Transaction:
        errors = headers.get(ENCRYPTED_ERRORS)
        if errors is None:
            return transaction
        history, deferral = reveal_errors(self.keys, transaction, transaction.history, transaction.deferral, errors)
        return transaction.replace(history=history, deferral=deferral)


def _build_context(headers: Mapping[str, str]) -> list[str]:
    return [str(headers.get(name, "")) for name in _AUTHENTICATED_HEADERS]


def write_envelope(codec: Codec, delivery: Delivery, defer: Defer) -> dict[str, str]:
    """Return the headers of a stored message that *defer* redelivers with an unchanged body."""
    transaction, error = defer.apply(delivery.transaction), delivery.error
    if isinstance(error, MissingKeyError):
        # Its error texts need the same key, so they are copied as they are.
        return write_headers(transaction) | ({} if error.errors is None else {ENCRYPTED_ERRORS: error.errors})
    return codec.encode_envelope(transaction) if isinstance(codec, EncryptingCodec) else write_headers(transaction)


# -- error texts in messages ------------------------------------------------------------------------


def hide_errors(
    keys: Keys | None, transaction: Transaction, history: tuple[Attempt, ...], deferral: Deferral | None
) -> tuple[tuple[Attempt, ...], Deferral | None, str | None]:
    """Return *history* and *deferral* without error texts, and the encrypted texts.

    The last value is None if there are no texts or *keys* is None; nothing is hidden then.
    """
    texts = [past.error for past in history]
    deferral_error = None if deferral is None else deferral.error
    if keys is None or not (any(texts) or deferral_error):
        return history, deferral, None
    placeholder = format_placeholder(keys.current)
    errors = keys.encrypt_text(json.dumps([texts, deferral_error]), (transaction.source, transaction.id), kind=_ERRORS)
    past = tuple(each.model_copy(update={"error": placeholder}) if each.error else each for each in history)
    if deferral is not None and deferral.error:
        deferral = deferral.model_copy(update={"error": placeholder})
    return past, deferral, errors


def reveal_errors(
    keys: Keys | None,
    transaction: Transaction,
    history: tuple[Attempt, ...],
    deferral: Deferral | None,
    errors: str | None,
) -> tuple[tuple[Attempt, ...], Deferral | None]:
    """Return *history* and *deferral* with the texts that *errors* encrypts.

    The texts stay hidden without their key, or if they belong to another history.
    """
    if errors is None or keys is None:
        return history, deferral
    text = keys.decrypt_text(errors, (transaction.source, transaction.id), kind=_ERRORS)
    if text is None:
        return history, deferral
    texts, deferral_error = json.loads(text)
    # If not all attempts fit into the header, the oldest were dropped.
    texts = texts[len(texts) - len(history) :] if len(texts) > len(history) else texts
    if len(texts) == len(history):
        history = tuple(past.model_copy(update={"error": error}) for past, error in zip(history, texts, strict=True))
    if deferral is not None and deferral_error is not None:
        deferral = deferral.model_copy(update={"error": deferral_error})
    return history, deferral


def reveal_envelope(keys: Keys | None, fields: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the *fields* that were read from *headers*, with their error texts."""
    errors = headers.get(ENCRYPTED_ERRORS)
    if keys is None or errors is None:
        return fields
    transaction = Transaction(id=fields["id"], source=fields.get("source", ""))
    history, deferral = reveal_errors(keys, transaction, fields.get("history", ()), fields.get("deferral"), errors)
    return {**fields, "history": history, "deferral": deferral}


# -- failure records and dead letters ---------------------------------------------------------------


def hide_failure(keys: Keys | None, failure: Failure | None) -> Failure | None:
    """Return *failure* as it is stored: its texts hidden, the complete encrypted record next to them."""
    if failure is None or keys is None or DETAIL_KEY in failure.detail:
        return failure
    encrypted = keys.encrypt_text(failure.model_dump_json(), (failure.source, failure.transaction_id), kind=_FAILURE)
    changes = {
        "error_message": format_placeholder(keys.current),
        "traceback": None,
        "handler_error": None,
        "history": (),
        "idempotency_key": None,
        "detail": {DETAIL_KEY: encrypted},
    }
    return failure.model_copy(update=changes)


def reveal_failure(keys: Keys | None, failure: Failure | None) -> Failure | None:
    """Return *failure* with its texts; without the key they stay hidden."""
    encrypted = None if failure is None else failure.detail.get(DETAIL_KEY)
    if failure is None or keys is None or not isinstance(encrypted, str):
        return failure
    text = keys.decrypt_text(encrypted, (failure.source, failure.transaction_id), kind=_FAILURE)
    return failure if text is None else Failure.model_validate_json(text)


def get_codec_keys(codec: Codec | None) -> Keys | None:
    """Return the keys of *codec*; None for one that does not encrypt."""
    return codec.keys if isinstance(codec, EncryptingCodec) else None


def hide_record(codec: Codec | None, record: DeadLetterRecord) -> DeadLetterRecord:
    """Return *record* as a store of whole records keeps it; raise UnencodableError if it cannot be encrypted."""
    if not isinstance(codec, EncryptingCodec):
        return record
    failure = hide_failure(codec.keys, record.failure)
    with_hidden_failure = record.model_copy(update={"failure": failure})
    if record.headers:  # the message could not be decoded, so its body is still as it was received
        return with_hidden_failure
    try:
        body, headers = encode_unchanged(codec, record.transaction())
    except UnencodableError:
        if record.raw is None:
            raise
        return with_hidden_failure  # an undecodable message without headers
    original = record.envelope
    history, deferral, _ = hide_errors(codec.keys, record.transaction(), original.history, original.deferral)
    envelope = original.model_copy(update={"history": history, "deferral": deferral})
    changes = {"failure": failure, "payload": None, "raw": body, "headers": headers, "envelope": envelope}
    return record.model_copy(update=changes)


def reveal_record(codec: Codec | None, record: DeadLetterRecord) -> DeadLetterRecord:
    """Return *record* as it was before it was stored; without the key its body stays encrypted."""
    if not isinstance(codec, EncryptingCodec):
        return record
    failure = reveal_failure(codec.keys, record.failure)
    if record.raw is None or ENCRYPTION_KEY not in record.headers:
        return record.model_copy(update={"failure": failure})
    transaction, error = decode(codec, record.raw, record.headers, source=record.queue)
    if error is not None:
        return record.model_copy(update={"failure": failure})
    payload = transaction.payload
    raw = bytes(payload) if isinstance(payload, bytes | bytearray) else None
    changes: dict[str, Any] = {
        "failure": failure,
        "payload": payload if raw is None else None,
        "raw": raw,
        "headers": {},
        "envelope": TransactionEnvelope.model_validate(transaction),
    }
    return record.model_copy(update=changes)


def find_missing_key(record: DeadLetterRecord) -> str | None:
    """Return the id of the key that is missing to read the listed *record*; None if it can be read."""
    return record.headers.get(ENCRYPTION_KEY) if record.raw is not None else None
