"""Encryption of payloads and of the texts of failures where they are stored.

Keys come from the environment only. A message names its key in a header, so that older keys decrypt what they have
encrypted while the first key encrypts everything new. Ids, types, keys, tenants and times stay readable: brokers and
operators find messages by them. They are authenticated together with the body.
"""

from __future__ import annotations

import base64
import json
import os
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, Delivery, Later, MissingKeyError, UndecodableError
from ergon_framework.connectors.codec import (
    ENCRYPTED_ERRORS,
    ENCRYPTION_KEY,
    Codec,
    JsonCodec,
    UnencodableError,
    decode,
    is_key_id,
    read_key_id,
    write_headers,
)
from ergon_framework.connectors.deadletters import DeadLetterRecord, Envelope
from ergon_framework.errors import ConfigurationError, extra
from ergon_framework.failure import Attempt, Deferral, Failure
from ergon_framework.transaction import Transaction

VARIABLE: Final = "ERGON_ENCRYPTION__KEYS"
REQUIRE_VARIABLE: Final = "ERGON_ENCRYPTION__REQUIRE"
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
#: Where a failure record, whose texts are hidden, keeps its encrypted original.
DETAIL: Final = "ergon.encrypted"
#: Headers that are authenticated with a body: nobody without the key can change them or move the body elsewhere.
_AUTHENTICATED: Final = (
    *("ergon-id", "ergon-source", "ergon-type", "ergon-schema-version"),
    *("ergon-key", "ergon-tenant", "ergon-correlation", "ergon-causation"),
)
#: What an encrypted text in a column begins with.
_COLUMN: Final = "ergon-encrypted:"
#: What authentication with each kind of content begins with, so that one kind cannot stand for another.
_BODY, _ERRORS, _FAILURE, _TEXT = "body", "errors", "failure", "text"


class _Tampered(ConnectorError):
    """Encrypted content does not belong to its key and its context: it was changed, or moved here from elsewhere."""


class Keys:
    """Keys of AES-256-GCM by their ids; the first one encrypts, all of them decrypt."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ConfigurationError(f"no encryption key is given: set {VARIABLE} to ID:BASE64, for example 2026-11:…")
        aead = extra("encryption", "cryptography.hazmat.primitives.ciphers.aead")
        self._invalid: type[Exception] = extra("encryption", "cryptography.exceptions").InvalidTag
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
        """Read ``ID:BASE64,ID:BASE64``; ConfigurationError without the keys where that fails."""
        keys: dict[str, bytes] = {}
        for number, part in enumerate(text.split(","), 1):
            key_id, colon, encoded = part.strip().partition(":")
            if not colon:
                raise ConfigurationError(f"{VARIABLE}: key {number} has no id; write ID:BASE64, the current key first")
            if key_id in keys:
                raise ConfigurationError(f"{VARIABLE}: two keys have the same id; give each key an id of its own")
            try:
                # With the two characters of the alphabet for addresses too; the padding may be left out.
                keys[key_id] = base64.b64decode(_pad(encoded.strip()), altchars=b"-_", validate=True)
            except (Base64Error, ValueError):
                raise ConfigurationError(f"{VARIABLE}: key {number} is not base64") from None
        return cls(keys)

    def encrypt(self, content: bytes, context: Sequence[str], *, kind: str) -> bytes:
        """Return *content* under the current key, bound to *context*; the nonce is random and stands in front."""
        nonce = os.urandom(NONCE_BYTES)
        encrypted: bytes = self._keys[self.current].encrypt(nonce, content, _bind(kind, self.current, context))
        return nonce + encrypted

    def decrypt(self, key_id: str, encrypted: bytes, context: Sequence[str], *, kind: str) -> bytes:
        """Return what was encrypted; MissingKeyError without its key."""
        key = self._keys.get(key_id)
        if key is None:
            raise MissingKeyError.of(key_id)
        nonce, content = encrypted[:NONCE_BYTES], encrypted[NONCE_BYTES:]
        try:
            decrypted: bytes = key.decrypt(nonce, content, _bind(kind, key_id, context))
        except (self._invalid, ValueError):
            raise _Tampered(f"{len(encrypted)} bytes do not fit the key {key_id!r} and their context") from None
        return decrypted

    def encrypt_text(self, text: str, context: Sequence[str], *, kind: str = _TEXT) -> str:
        """Return *text* as ``ID:BASE64``."""
        content = self.encrypt(text.encode(errors="surrogatepass"), context, kind=kind)
        return f"{self.current}:{base64.b64encode(content).decode()}"

    def decrypt_text(self, encrypted: str, context: Sequence[str], *, kind: str = _TEXT) -> str | None:
        """Return the text; None without its key, or if it was changed."""
        key_id, _, encoded = encrypted.partition(":")
        try:
            content = self.decrypt(key_id, base64.b64decode(encoded, validate=True), context, kind=kind)
        except (MissingKeyError, _Tampered, ValueError):
            return None
        return content.decode(errors="surrogatepass")


def _pad(encoded: str) -> str:
    plain = encoded.rstrip("=").replace("+", "-").replace("/", "_")
    return plain + "=" * (-len(plain) % 4)


def _bind(kind: str, key_id: str, context: Sequence[str]) -> bytes:
    # The length in front keeps ("ab", "c") and ("a", "bc") apart.
    parts = [part.encode(errors="surrogatepass") for part in ("ergon", kind, key_id, *context)]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def hidden(key_id: str) -> str:
    """Return what is shown in the place of an encrypted text."""
    return f"[encrypted, key {key_id}]"


def hide_text(keys: Keys | None, text: str | None, whose: str) -> str | None:
    """Return *text* as it is stored in a column, encrypted and bound to the id *whose*."""
    return text if keys is None or not text else f"{_COLUMN}{keys.encrypt_text(text, (whose,))}"


def reveal_text(keys: Keys | None, text: str | None, whose: str) -> str | None:
    """Return the text of a column; without its key, what is shown in its place."""
    if text is None or not text.startswith(_COLUMN):
        return text
    encrypted = text.removeprefix(_COLUMN)
    found = None if keys is None else keys.decrypt_text(encrypted, (whose,))
    return hidden(encrypted.partition(":")[0][:64]) if found is None else found


# -- configuration --------------------------------------------------------------------------------


def environment_keys() -> Keys | None:
    """Return the keys that the environment names; None where it names none."""
    text = os.environ.get(VARIABLE, "").strip()
    return _parse(text) if text else None


_parse: Final = lru_cache(4)(Keys.parse)


def is_required() -> bool:
    """Return whether the environment asks to refuse messages that are not encrypted."""
    text = os.environ.get(REQUIRE_VARIABLE, "").strip().lower()
    if text not in ("", "true", "false"):
        raise ConfigurationError(f"{REQUIRE_VARIABLE} must be true or false, not {text[:20]!r}")
    if text == "true" and environment_keys() is None:
        raise ConfigurationError(f"{REQUIRE_VARIABLE} is true without a key: set {VARIABLE} to ID:BASE64")
    return text == "true"


def select_codec(codec: Codec | None) -> Codec:
    """Return the codec of a queue: *codec*, or JSON; encrypting if the environment names keys."""
    plain = codec or JsonCodec()
    if isinstance(plain, EncryptingCodec) or (environment_keys() is None and not is_required()):
        return plain
    return EncryptingCodec(plain)


# -- the codec ------------------------------------------------------------------------------------


class EncryptingCodec:
    """Encrypt what *codec* writes, and the texts of errors that travel with a transaction.

    The keys are those of ``ERGON_ENCRYPTION__KEYS`` unless *keys* are given. A message that is not encrypted is
    accepted unless *require*, or ``ERGON_ENCRYPTION__REQUIRE``, says otherwise.
    """

    def __init__(self, codec: Codec | None = None, *, keys: Keys | None = None, require: bool | None = None) -> None:
        self.inner: Codec = codec or JsonCodec()
        found = keys or environment_keys()
        if found is None:
            raise ConfigurationError(f"no encryption key is given: set {VARIABLE} to ID:BASE64, the current key first")
        self.keys = found
        self._require = is_required() if require is None else require

    @property
    def max_bytes(self) -> int | None:
        """The largest body that is stored: that of the codec inside, with nonce and tag."""
        most = self.inner.max_bytes
        return None if most is None else most + NONCE_BYTES + TAG_BYTES

    def encode(self, transaction: Transaction) -> tuple[bytes, dict[str, str]]:
        if not transaction.source:
            raise UnencodableError(
                f"transaction {transaction.id[:64]!r} has no source, which its encryption is bound to; dispatch it "
                "through a connector, or give it a source"
            )
        hidden_one, errors = self._hide(transaction)
        body, headers = self.inner.encode(hidden_one)
        if errors is not None:
            headers[ENCRYPTED_ERRORS] = errors
        headers[ENCRYPTION_KEY] = self.keys.current
        return self.keys.encrypt(body, _context(headers), kind=_BODY), headers

    def decode(self, body: bytes, headers: Mapping[str, str], *, source: str = "") -> Transaction:
        if ENCRYPTION_KEY not in headers:
            if self._require:
                raise UndecodableError(
                    f"a body of {len(body)} bytes is not encrypted, and {REQUIRE_VARIABLE} is true; send it encrypted"
                )
            return self._reveal(self.inner.decode(body, headers, source=source), headers)
        key_id = read_key_id(headers)
        try:
            plain = self.keys.decrypt(key_id, body, _context(headers), kind=_BODY)
        except _Tampered as error:
            raise UndecodableError(
                f"an encrypted body of {error}: body or headers were changed, or belong to another message"
            ) from None
        others = {name: text for name, text in headers.items() if name not in (ENCRYPTION_KEY, ENCRYPTED_ERRORS)}
        return self._reveal(self.inner.decode(plain, others, source=source), headers)

    def envelope(self, transaction: Transaction) -> dict[str, str]:
        """Return the headers of *transaction* without those of its body, which stays as it is."""
        hidden_one, errors = self._hide(transaction)
        headers = write_headers(hidden_one)
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


def _context(headers: Mapping[str, str]) -> list[str]:
    return [str(headers.get(name, "")) for name in _AUTHENTICATED]


def write_envelope(codec: Codec, delivery: Delivery, later: Later) -> dict[str, str]:
    """Return the headers of a stored message that comes back by *later*, and whose body stays as it is."""
    transaction, error = later.apply(delivery.transaction), delivery.error
    if isinstance(error, MissingKeyError):
        # The texts of its errors need the same key: they stay as they are.
        return write_headers(transaction) | ({} if error.errors is None else {ENCRYPTED_ERRORS: error.errors})
    return codec.envelope(transaction) if isinstance(codec, EncryptingCodec) else write_headers(transaction)


# -- errors that travel with a transaction ----------------------------------------------------------


def hide_errors(
    keys: Keys | None, transaction: Transaction, history: tuple[Attempt, ...], deferral: Deferral | None
) -> tuple[tuple[Attempt, ...], Deferral | None, str | None]:
    """Return both without their texts, and the texts encrypted; None where there are none or nothing is encrypted."""
    texts = [past.error for past in history]
    last = None if deferral is None else deferral.error
    if keys is None or not (any(texts) or last):
        return history, deferral, None
    shown = hidden(keys.current)
    errors = keys.encrypt_text(json.dumps([texts, last]), (transaction.source, transaction.id), kind=_ERRORS)
    past = tuple(each.model_copy(update={"error": shown}) if each.error else each for each in history)
    if deferral is not None and deferral.error:
        deferral = deferral.model_copy(update={"error": shown})
    return past, deferral, errors


def reveal_errors(
    keys: Keys | None,
    transaction: Transaction,
    history: tuple[Attempt, ...],
    deferral: Deferral | None,
    errors: str | None,
) -> tuple[tuple[Attempt, ...], Deferral | None]:
    """Return both with their texts; without the key, or with texts of another history, they stay hidden."""
    if errors is None or keys is None:
        return history, deferral
    text = keys.decrypt_text(errors, (transaction.source, transaction.id), kind=_ERRORS)
    if text is None:
        return history, deferral
    texts, last = json.loads(text)
    # Where not all attempts fit into the header, the oldest were left out.
    texts = texts[len(texts) - len(history) :] if len(texts) > len(history) else texts
    if len(texts) == len(history):
        history = tuple(past.model_copy(update={"error": error}) for past, error in zip(history, texts, strict=True))
    if deferral is not None and last is not None:
        deferral = deferral.model_copy(update={"error": last})
    return history, deferral


def reveal_envelope(keys: Keys | None, fields: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the *fields* that were read from *headers*, with the texts of their errors."""
    errors = headers.get(ENCRYPTED_ERRORS)
    if keys is None or errors is None:
        return fields
    whose = Transaction(fields["id"], source=fields.get("source", ""))
    history, deferral = reveal_errors(keys, whose, fields.get("history", ()), fields.get("deferral"), errors)
    return {**fields, "history": history, "deferral": deferral}


# -- failure records and dead letters ---------------------------------------------------------------


def hide_failure(keys: Keys | None, failure: Failure | None) -> Failure | None:
    """Return *failure* as it is stored: its texts hidden, the whole record encrypted beside them."""
    if failure is None or keys is None or DETAIL in failure.detail:
        return failure
    whole = keys.encrypt_text(failure.model_dump_json(), (failure.source, failure.transaction_id), kind=_FAILURE)
    changes = {
        "error_message": hidden(keys.current),
        "traceback": None,
        "handler_error": None,
        "history": (),
        "idempotency_key": None,
        "detail": {DETAIL: whole},
    }
    return failure.model_copy(update=changes)


def reveal_failure(keys: Keys | None, failure: Failure | None) -> Failure | None:
    """Return *failure* with its texts; without the key they stay hidden."""
    whole = None if failure is None else failure.detail.get(DETAIL)
    if failure is None or keys is None or not isinstance(whole, str):
        return failure
    text = keys.decrypt_text(whole, (failure.source, failure.transaction_id), kind=_FAILURE)
    return failure if text is None else Failure.model_validate_json(text)


def keys_of(codec: Codec | None) -> Keys | None:
    """Return the keys of *codec*; None for one that does not encrypt."""
    return codec.keys if isinstance(codec, EncryptingCodec) else None


def hide_record(codec: Codec | None, record: DeadLetterRecord) -> DeadLetterRecord:
    """Return *record* as a store that keeps whole records keeps it; UnencodableError if it cannot be encrypted."""
    if not isinstance(codec, EncryptingCodec):
        return record
    failure = hide_failure(codec.keys, record.failure)
    as_it_came = record.model_copy(update={"failure": failure})
    if record.headers:  # it could not be read
        return as_it_came
    try:
        body, headers = codec.encode(record.transaction())
    except UnencodableError:
        if record.raw is None:
            raise
        return as_it_came
    past = record.envelope
    history, deferral, _ = hide_errors(codec.keys, record.transaction(), past.history, past.deferral)
    envelope = past.model_copy(update={"history": history, "deferral": deferral})
    changes = {"failure": failure, "payload": None, "raw": body, "headers": headers, "envelope": envelope}
    return record.model_copy(update=changes)


def reveal_record(codec: Codec | None, record: DeadLetterRecord) -> DeadLetterRecord:
    """Return *record* as it was before it was stored; without the key its body stays as it is."""
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
        "envelope": Envelope.model_validate(transaction),
    }
    return record.model_copy(update=changes)


def missing_key(record: DeadLetterRecord) -> str | None:
    """Return the id of the key that *record*, as it was listed, would need to be read; None if it can be read."""
    return record.headers.get(ENCRYPTION_KEY) if record.raw is not None else None
