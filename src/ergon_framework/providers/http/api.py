"""The health API: one read-only endpoint for callers whose bearer token names the requested tenant.

The token is verified here, and states the tenant that it authorizes.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from fastapi import APIRouter, FastAPI, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.providers.http.health_reader import DatabaseUnavailable, HealthReader
from ergon_framework.providers.http.settings import ApiSettings
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event
from ergon_framework.telemetry.names import Field as LogField

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
        raise ConfigurationError(f"{settings.algorithm} is verified with {name} only: remove the other key")
    return [
        _load_secret(key, settings.algorithm) if hmac else _load_public_key(key, settings.algorithm) for key in keys
    ]


def _load_secret(secret: str, algorithm: str) -> bytes:
    data = secret.encode()
    if len(data) < _MIN_SECRET_BYTES[algorithm]:
        raise ConfigurationError(
            f"the secret in ERGON_API__SECRET or ERGON_API__PREVIOUS_SECRET is too short: {algorithm} needs "
            f"{_MIN_SECRET_BYTES[algorithm]} bytes or more; generate a longer one"
        )
    if b"-----BEGIN" in data or data.startswith(b"ssh-"):
        raise ConfigurationError("ERGON_API__SECRET holds a key or certificate: set a shared secret")
    return data


def _load_public_key(pem: str, algorithm: str) -> Any:
    # Environment variables often contain line breaks as the two characters \n.
    text = pem.replace("\\n", "\n")
    if "PRIVATE KEY" in text:
        raise ConfigurationError("ERGON_API__PUBLIC_KEY is a private key: set the issuer's public key")
    try:
        key = load_pem_public_key(text.encode())
    except Exception:  # noqa: BLE001 - the library's message may quote the key
        raise ConfigurationError("ERGON_API__PUBLIC_KEY is not a public key in PEM format") from None
    if not _is_key_for(key, algorithm):
        raise ConfigurationError(f"ERGON_API__PUBLIC_KEY is not a key for {algorithm}, or too small")
    return key


def _is_key_for(key: Any, algorithm: str) -> bool:
    if algorithm in _CURVES:
        return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES[algorithm])
    if algorithm == "EdDSA":
        return isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey)
    return isinstance(key, rsa.RSAPublicKey) and key.key_size >= _MIN_RSA_BITS


log: Final = logging.getLogger(f"{LIBRARY}.providers")

SUMMARY_PATH: Final = "/api/v1/provider-health/summary"
#: Tenant names that may appear in an address; other tenants cannot be requested here.
TENANT_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$"
_BEARER_HEADER: Final = re.compile(r"^bearer +([A-Za-z0-9._~+/=-]+)$", re.IGNORECASE)
_RouteHandler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


# -- the contract -------------------------------------------------------------------------------------


class HealthRequest(BaseModel):
    """The query parameters; unknown parameters are rejected."""

    model_config = ConfigDict(extra="forbid")

    tenant_id: str = Field(pattern=TENANT_PATTERN, max_length=128, description="The tenant that the token speaks for.")


class _FromAttributes(BaseModel):
    """Base of the response models, which are built from the attributes of the database's answer."""

    model_config = ConfigDict(from_attributes=True)


class QuotaWindow(_FromAttributes):
    """The current quota window with the fewest remaining calls."""

    limit_count: int
    used_count: int
    remaining_count: int
    window_end: datetime


class ProviderHealth(_FromAttributes):
    """One provider and capability; the rates are of the last sixty minutes, and null without an attempt in them."""

    provider_name: str
    capability: str
    breaker_state: Literal["closed", "open", "half_open"]
    success_rate_1h: float | None = Field(ge=0, le=1)
    p95_latency_ms_1h: float | None = Field(ge=0)
    quota: QuotaWindow | None = Field(description="Null without a limit, or if all tenants share the limit.")
    last_error_code: str | None
    last_error_at: datetime | None
    last_success_at: datetime | None


class HealthSummary(_FromAttributes):
    """The health of all providers of one tenant."""

    tenant_id: str
    generated_at: datetime
    providers: list[ProviderHealth]


class ErrorResponse(BaseModel):
    """An error: a constant code and a constant message, and a correlation id for errors that are logged."""

    error: str
    message: str
    correlation_id: str | None = None


_ERRORS: Final = {
    401: ("unauthorized", "A valid bearer token is needed."),
    403: ("forbidden", "The token does not speak for this tenant."),
    422: ("invalid_request", "Invalid request: pass only tenant_id, a tenant name of at most 128 characters."),
    500: ("internal_error", "The summary failed; look up correlation_id in the log."),
    503: ("unavailable", "The database is unavailable; try again later."),
}
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorResponse, "description": message} for status, (_, message) in _ERRORS.items()
}


# -- the router ---------------------------------------------------------------------------------------


def router(reader: HealthReader, verifier: TokenVerifier) -> APIRouter:
    """Return the endpoint as a router for an existing application; the router's shutdown closes *reader*.

    The router answers its own failures: none of them reaches the exception handlers of the application.
    """

    class AuthenticatedRoute(APIRoute):
        """A route that authenticates the caller before it validates the request."""

        def get_route_handler(self) -> _RouteHandler:
            return _wrap_handler(super().get_route_handler(), verifier)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await reader.close()

    api_router = APIRouter(
        route_class=AuthenticatedRoute,
        lifespan=lifespan,
        dependencies=[Security(HTTPBearer(auto_error=False))],
        tags=["health"],
    )

    @api_router.get(SUMMARY_PATH, responses=_RESPONSES, summary="Health of the providers of a tenant")
    async def summary(request: Request, query: Annotated[HealthRequest, Query()]) -> HealthSummary:
        if request.state.tenant != query.tenant_id:
            # Rejected before the tenant is looked up, so the answer does not reveal whether the tenant exists.
            raise _RequestRejected(403)
        return HealthSummary.model_validate(await reader.read(query.tenant_id))

    return api_router


def app(dsn: str | None = None, *, verifier: TokenVerifier | None = None) -> FastAPI:
    """Return an application with only this endpoint; missing arguments come from the environment.

    Example: uvicorn --factory ergon_framework.providers.http.api:app
    """
    database_address = dsn or os.environ.get("ERGON_POSTGRES__DSN")
    if not database_address:
        raise ConfigurationError("health API has no database address: set ERGON_POSTGRES__DSN or pass dsn=…")
    token_verifier = JwtVerifier(ApiSettings.from_environment(os.environ)) if verifier is None else verifier
    # The HTML documentation loads scripts from third-party hosts; the description itself is at /openapi.json.
    application = FastAPI(title="Provider health", version="1", docs_url=None, redoc_url=None)
    application.include_router(router(HealthReader(database_address), token_verifier))
    return application


# -- authentication and errors --------------------------------------------------------------------------


class _RequestRejected(ErgonError):
    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


def _wrap_handler(handler: _RouteHandler, verifier: TokenVerifier) -> _RouteHandler:
    async def handle(request: Request) -> Response:
        try:
            request.state.tenant = await _authenticate(request, verifier)
            response = await handler(request)
        except _RequestRejected as rejection:
            return _to_error_response(rejection.status)
        except RequestValidationError:
            return _to_error_response(422)
        except DatabaseUnavailable as error:
            return _to_failure_response(503, error)
        except Exception as error:  # noqa: BLE001 - the process boundary: logged, and not revealed to the caller
            return _to_failure_response(500, error)
        response.headers["Cache-Control"] = "no-store"
        return response

    return handle


async def _authenticate(request: Request, verifier: TokenVerifier) -> str | None:
    match = _BEARER_HEADER.fullmatch(request.headers.get("authorization", ""))
    if match is None:
        raise _RequestRejected(401)
    try:
        return await verifier.verify(match[1])
    except InvalidTokenError:
        raise _RequestRejected(401) from None


def _to_error_response(status: int, correlation_id: str | None = None) -> JSONResponse:
    error, message = _ERRORS[status]
    body = {"error": error, "message": message, "correlation_id": correlation_id}
    headers = {"Cache-Control": "no-store"}
    if status == 401:  # noqa: PLR2004 - the status that must name the authentication scheme
        headers["WWW-Authenticate"] = 'Bearer realm="provider-health"'
    if status == 503:  # noqa: PLR2004 - the status that is worth a retry
        headers["Retry-After"] = "1"
    return JSONResponse(body, status, headers)


def _to_failure_response(status: int, error: BaseException) -> JSONResponse:
    correlation_id = secrets.token_hex(16)
    level = logging.WARNING if isinstance(error, DatabaseUnavailable) else logging.ERROR
    # Only the type is logged: the message may contain a statement with its values.
    cause = error.__cause__ or error
    fields = {LogField.CORRELATION_ID: correlation_id, LogField.ERROR_TYPE: type(cause).__name__}
    logs.log_event(level, Event.HEALTH_FAILED, fields, to=log)
    return _to_error_response(status, correlation_id)
