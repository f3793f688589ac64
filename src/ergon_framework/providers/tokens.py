"""Bearer tokens: verification, and the tenant that a token authorizes."""

from __future__ import annotations

from typing import Any, Final, Protocol

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.providers.api_settings import ApiSettings

#: Maximum length of a token in characters.
MAX_TOKEN_CHARS: Final = 8_192
#: Minimum length of a secret in bytes: that of its hash.
_MIN_SECRET_BYTES: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
_CURVES: Final = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}
#: Minimum length of an RSA key in bits.
_MIN_RSA_BITS: Final = 2_048


class InvalidTokenError(ErgonError):
    """An invalid token. The reason is not revealed to the caller."""


class TokenVerifier(Protocol):
    """A verifier of bearer tokens."""

    async def verify(self, token: str) -> str | None:
        """Return the tenant of *token*, None if it names none; raise InvalidTokenError if the token is not valid."""


class JwtVerifier:
    """A verifier of JSON Web Tokens with one configured algorithm and a required expiry."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._keys = _load_keys(settings)

    async def verify(self, token: str) -> str | None:
        if len(token) > MAX_TOKEN_CHARS:
            raise InvalidTokenError
        claims = self._decode_claims(token)
        tenant = claims.get(self._settings.tenant_claim)
        return tenant if isinstance(tenant, str) and tenant else None

    def _decode_claims(self, token: str) -> dict[str, Any]:
        settings = self._settings
        for key in self._keys:
            try:
                return jwt.decode(
                    token,
                    key,
                    algorithms=[settings.algorithm],
                    # Without a configured audience a token with an audience is for another service (RFC 7519, 4.1.3).
                    options={"require": ["exp"]},
                    audience=settings.audience,
                    issuer=settings.issuer,
                    leeway=settings.leeway,
                )
            except Exception:  # noqa: BLE001, S112 - any error of the library means that the token is invalid
                continue
        raise InvalidTokenError


def _load_keys(settings: ApiSettings) -> list[Any]:
    hmac = settings.algorithm in _MIN_SECRET_BYTES
    secrets = [key for key in (settings.secret, settings.previous_secret) if key is not None]
    public = [key for key in (settings.public_key, settings.previous_public_key) if key is not None]
    keys, other_keys = (secrets, public) if hmac else (public, secrets)
    name = "ERGON_API__SECRET" if hmac else "ERGON_API__PUBLIC_KEY"
    if not keys:
        raise ConfigurationError(f"tokens with {settings.algorithm} cannot be verified; set {name}")
    if other_keys:
        raise ConfigurationError(f"{settings.algorithm} is verified with {name} only; take the other key away")
    return [
        _load_secret(key, settings.algorithm) if hmac else _load_public_key(key, settings.algorithm) for key in keys
    ]


def _load_secret(secret: str, algorithm: str) -> bytes:
    data = secret.encode()
    if len(data) < _MIN_SECRET_BYTES[algorithm]:
        raise ConfigurationError(f"a secret for {algorithm} has at least {_MIN_SECRET_BYTES[algorithm]} bytes")
    if b"-----BEGIN" in data or data.startswith(b"ssh-"):
        raise ConfigurationError("ERGON_API__SECRET is a key of another kind; what is public cannot be a secret")
    return data


def _load_public_key(pem: str, algorithm: str) -> Any:
    # Environment variables often contain line breaks as the two characters \n.
    text = pem.replace("\\n", "\n")
    if "PRIVATE KEY" in text:
        raise ConfigurationError("ERGON_API__PUBLIC_KEY is a private key; only who issues tokens may have that one")
    try:
        key = load_pem_public_key(text.encode())
    except Exception:  # noqa: BLE001 - the library's message may quote the key
        raise ConfigurationError("ERGON_API__PUBLIC_KEY is no public key in PEM") from None
    if not _is_key_for(key, algorithm):
        raise ConfigurationError(f"ERGON_API__PUBLIC_KEY is no key for {algorithm}, or too small for it")
    return key


def _is_key_for(key: Any, algorithm: str) -> bool:
    if algorithm in _CURVES:
        return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES[algorithm])
    if algorithm == "EdDSA":
        return isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey)
    return isinstance(key, rsa.RSAPublicKey) and key.key_size >= _MIN_RSA_BITS
