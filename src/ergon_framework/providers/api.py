"""The health API: one read-only endpoint for callers whose token names the requested tenant."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, Final, Literal, TypeAlias

from fastapi import APIRouter, FastAPI, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.providers.api_settings import ApiSettings
from ergon_framework.providers.sql.reader import DatabaseUnavailable, HealthReader
from ergon_framework.providers.tokens import InvalidTokenError, JwtVerifier, TokenVerifier
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event
from ergon_framework.telemetry.names import Field as LogField

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
    quota: QuotaWindow | None = Field(description="Null where there is no limit, or one for all tenants together.")
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
    422: ("invalid_request", "The question is tenant_id alone, of at most 128 characters that a tenant may have."),
    500: ("internal_error", "The summary could not be made."),
    503: ("unavailable", "The database is out of reach; try again later."),
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

    @api_router.get(SUMMARY_PATH, responses=_RESPONSES, summary="How the providers of a tenant are")
    async def summary(request: Request, query: Annotated[HealthRequest, Query()]) -> HealthSummary:
        if request.state.tenant != query.tenant_id:
            # Rejected before the tenant is looked up, so the answer does not reveal whether the tenant exists.
            raise _RequestRejected(403)
        return HealthSummary.model_validate(await reader.read(query.tenant_id))

    return api_router


def app(dsn: str | None = None, *, verifier: TokenVerifier | None = None) -> FastAPI:
    """Return an application with only this endpoint; missing arguments come from the environment.

    Example: uvicorn --factory ergon_framework.providers.api:app
    """
    database_address = dsn or os.environ.get("ERGON_POSTGRES__DSN")
    if not database_address:
        raise ConfigurationError("no database is named; set ERGON_POSTGRES__DSN")
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
