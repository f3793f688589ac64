"""The settings of the health API: how bearer tokens are verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self, TypeAlias

from pydantic import Field

from ergon_framework.errors import ConfigurationError
from ergon_framework.policy import Policy

Algorithm: TypeAlias = Literal[
    "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
_ENVIRONMENT_PREFIX: Final = "ERGON_API__"


class ApiSettings(Policy):
    """The settings of token verification: one configured algorithm, whatever algorithm a token names.

    The HS… algorithms need a secret, all others a public key. The key of the other kind is rejected, so that no key
    can be used as the wrong kind. The previous key is accepted too, so that keys can be rotated.
    """

    algorithm: Algorithm = Field(default="RS256", description="The algorithm of the tokens' signatures.")
    secret: str | None = Field(default=None, repr=False, description="The shared secret; for HS… only.")
    previous_secret: str | None = Field(default=None, repr=False, description="The previous secret.")
    public_key: str | None = Field(default=None, description="The issuer's public key in PEM; not for HS….")
    previous_public_key: str | None = Field(default=None, description="The previous public key.")
    issuer: str | None = Field(default=None, description="Required iss; without it any issuer is accepted.")
    audience: str | None = Field(default=None, description="Required aud; without it a token must not have aud.")
    tenant_claim: str = Field(default="tenant_id", min_length=1, description="The claim that names the tenant.")
    leeway: float = Field(default=10.0, ge=0, le=60, description="Accepted clock difference in seconds.")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Load the settings from the variables ``ERGON_API__…``."""
        values: dict[str, Any] = {
            name.removeprefix(_ENVIRONMENT_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(_ENVIRONMENT_PREFIX)
        }
        if "leeway" in values:
            try:
                values["leeway"] = float(values["leeway"])
            except ValueError:
                raise ConfigurationError(f"{_ENVIRONMENT_PREFIX}LEEWAY must be a number of seconds") from None
        return cls.load(values)
