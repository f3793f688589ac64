"""Tokens: who is asking, and for which tenant he may ask."""

from __future__ import annotations

from typing import Any, Final, Protocol

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.providers.api_settings import ApiSettings

#: The longest token that is looked at.
LONGEST: Final = 8_192
#: Bytes that a secret must have at least: those of its hash.
_SECRETS: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
_CURVES: Final = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}
#: Bits of the smallest RSA key that still counts as one.
_RSA_BITS: Final = 2_048


class TokenRefused(ErgonError):
    """A token that proves nothing. Why is nobody's business but ours."""


class Verifier(Protocol):
    """Whoever can tell what a bearer token is worth."""

    async def tenant(self, token: str) -> str | None:
        """The tenant that *token* speaks for, None if it names none; TokenRefused if it is not valid."""


class JwtVerifier:
    """JSON Web Tokens with one pinned algorithm and a time at which they end."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._keys = _keys(settings)

    async def tenant(self, token: str) -> str | None:
        if len(token) > LONGEST:
            raise TokenRefused
        claims = self._claims(token)
        found = claims.get(self._settings.tenant_claim)
        return found if isinstance(found, str) and found else None

    def _claims(self, token: str) -> dict[str, Any]:
        settings = self._settings
        for key in self._keys:
            try:
                return jwt.decode(
                    token,
                    key,
                    algorithms=[settings.algorithm],
                    # Without a configured audience a token that names one is for another service (RFC 7519, 4.1.3).
                    options={"require": ["exp"]},
                    audience=settings.audience,
                    issuer=settings.issuer,
                    leeway=settings.leeway,
                )
            except Exception:  # noqa: BLE001, S112 - whatever a token does to the library, it is refused
                continue
        raise TokenRefused


def _keys(settings: ApiSettings) -> list[Any]:
    hmac = settings.algorithm in _SECRETS
    secrets = [one for one in (settings.secret, settings.previous_secret) if one is not None]
    public = [one for one in (settings.public_key, settings.previous_public_key) if one is not None]
    wanted, other = (secrets, public) if hmac else (public, secrets)
    name = "ERGON_API__SECRET" if hmac else "ERGON_API__PUBLIC_KEY"
    if not wanted:
        raise ConfigurationError(f"tokens with {settings.algorithm} cannot be verified; set {name}")
    if other:
        raise ConfigurationError(f"{settings.algorithm} is verified with {name} only; take the other key away")
    return [_secret(one, settings.algorithm) if hmac else _public(one, settings.algorithm) for one in wanted]


def _secret(secret: str, algorithm: str) -> bytes:
    data = secret.encode()
    if len(data) < _SECRETS[algorithm]:
        raise ConfigurationError(f"a secret for {algorithm} has at least {_SECRETS[algorithm]} bytes")
    if b"-----BEGIN" in data or data.startswith(b"ssh-"):
        raise ConfigurationError("ERGON_API__SECRET is a key of another kind; what is public cannot be a secret")
    return data


def _public(pem: str, algorithm: str) -> Any:
    # Variables of the environment often carry line ends as two characters.
    text = pem.replace("\\n", "\n")
    if "PRIVATE KEY" in text:
        raise ConfigurationError("ERGON_API__PUBLIC_KEY is a private key; only who issues tokens may have that one")
    try:
        key = load_pem_public_key(text.encode())
    except Exception:  # noqa: BLE001 - the library's words may quote the key
        raise ConfigurationError("ERGON_API__PUBLIC_KEY is no public key in PEM") from None
    if not _fits(key, algorithm):
        raise ConfigurationError(f"ERGON_API__PUBLIC_KEY is no key for {algorithm}, or too small for it")
    return key


def _fits(key: Any, algorithm: str) -> bool:
    if algorithm in _CURVES:
        return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES[algorithm])
    if algorithm == "EdDSA":
        return isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey)
    return isinstance(key, rsa.RSAPublicKey) and key.key_size >= _RSA_BITS
