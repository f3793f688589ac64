"""The health API: one read-only endpoint, open to a caller whose token names the tenant that he asks for."""

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
from ergon_framework.providers.sql.reader import HealthReader, Unavailable
from ergon_framework.providers.tokens import JwtVerifier, TokenRefused, Verifier
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event
from ergon_framework.telemetry.names import Field as LogField

log: Final = logging.getLogger(f"{LIBRARY}.providers")

PATH: Final = "/api/v1/provider-health/summary"
#: What a tenant's name may look like in an address; one that looks otherwise cannot be asked for here.
TENANT: Final = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$"
_BEARER: Final = re.compile(r"^bearer +([A-Za-z0-9._~+/=-]+)$", re.IGNORECASE)
_Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


# -- the contract -------------------------------------------------------------------------------------


class Asked(BaseModel):
    """The question, and nothing beside it."""

    model_config = ConfigDict(extra="forbid")

    tenant_id: str = Field(pattern=TENANT, max_length=128, description="The tenant that the token speaks for.")


class Shown(BaseModel):
    """A part of an answer, made from the attributes of what the database said."""

    model_config = ConfigDict(from_attributes=True)


class QuotaWindow(Shown):
    """The window of now that has least left."""

    limit_count: int
    used_count: int
    remaining_count: int
    window_end: datetime


class ProviderHealth(Shown):
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


class HealthSummary(Shown):
    """How the providers of one tenant are."""

    tenant_id: str
    generated_at: datetime
    providers: list[ProviderHealth]


class Refusal(BaseModel):
    """Why there is no summary: a word and a sentence that are always the same; an id where there is a log to search."""

    error: str
    message: str
    correlation_id: str | None = None


_SAID: Final = {
    401: ("unauthorized", "A valid bearer token is needed."),
    403: ("forbidden", "The token does not speak for this tenant."),
    422: ("invalid_request", "The question is tenant_id alone, of at most 128 characters that a tenant may have."),
    500: ("internal_error", "The summary could not be made."),
    503: ("unavailable", "The database is out of reach; try again later."),
}
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": Refusal, "description": message} for status, (_, message) in _SAID.items()
}


# -- the router ---------------------------------------------------------------------------------------


def router(reader: HealthReader, verifier: Verifier) -> APIRouter:
    """The endpoint, for an application of one's own; *reader* is closed with it.

    It answers its failures itself: nothing of them reaches the handlers of the application around it.
    """

    class Guarded(APIRoute):
        """Nobody gets as far as to be told that his question is wrong before he has said who he is."""

        def get_route_handler(self) -> _Handler:
            return _guarded(super().get_route_handler(), verifier)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await reader.close()

    made = APIRouter(
        route_class=Guarded, lifespan=lifespan, dependencies=[Security(HTTPBearer(auto_error=False))], tags=["health"]
    )

    @made.get(PATH, responses=_RESPONSES, summary="How the providers of a tenant are")
    async def summary(request: Request, asked: Annotated[Asked, Query()]) -> HealthSummary:
        if request.state.tenant != asked.tenant_id:
            # Before anybody looks whether there is such a tenant, so that the answer cannot tell.
            raise _Refused(403)
        return HealthSummary.model_validate(await reader.read(asked.tenant_id))

    return made


def app(dsn: str | None = None, *, verifier: Verifier | None = None) -> FastAPI:
    """An application that has the endpoint and nothing else; what is not given comes from the environment.

    Example: uvicorn --factory ergon_framework.providers.api:app
    """
    address = dsn or os.environ.get("ERGON_POSTGRES__DSN")
    if not address:
        raise ConfigurationError("no database is named; set ERGON_POSTGRES__DSN")
    judge = JwtVerifier(ApiSettings.from_environment(os.environ)) if verifier is None else verifier
    # The pages for people load scripts from elsewhere; the description itself is at /openapi.json.
    made = FastAPI(title="Provider health", version="1", docs_url=None, redoc_url=None)
    made.include_router(router(HealthReader(address), judge))
    return made


# -- the guard ------------------------------------------------------------------------------------------


class _Refused(ErgonError):
    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


def _guarded(handler: _Handler, verifier: Verifier) -> _Handler:
    async def guarded(request: Request) -> Response:
        try:
            request.state.tenant = await _tenant(request, verifier)
            response = await handler(request)
        except _Refused as refused:
            return _refusal(refused.status)
        except RequestValidationError:
            return _refusal(422)
        except Unavailable as error:
            return _failure(503, error)
        except Exception as error:  # noqa: BLE001 - the edge of the process: told in the log, and to nobody else
            return _failure(500, error)
        response.headers["Cache-Control"] = "no-store"
        return response

    return guarded


async def _tenant(request: Request, verifier: Verifier) -> str | None:
    given = _BEARER.fullmatch(request.headers.get("authorization", ""))
    if given is None:
        raise _Refused(401)
    try:
        return await verifier.tenant(given[1])
    except TokenRefused:
        raise _Refused(401) from None


def _refusal(status: int, correlation_id: str | None = None) -> JSONResponse:
    error, message = _SAID[status]
    body = {"error": error, "message": message, "correlation_id": correlation_id}
    headers = {"Cache-Control": "no-store"}
    if status == 401:  # noqa: PLR2004 - the one that has to say how
        headers["WWW-Authenticate"] = 'Bearer realm="provider-health"'
    if status == 503:  # noqa: PLR2004 - the one that is worth another try
        headers["Retry-After"] = "1"
    return JSONResponse(body, status, headers)


def _failure(status: int, error: BaseException) -> JSONResponse:
    correlation_id = secrets.token_hex(16)
    level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
    # The type only: a message may be a statement with its values.
    blame = error.__cause__ or error
    fields = {LogField.CORRELATION_ID: correlation_id, LogField.ERROR_TYPE: type(blame).__name__}
    logs.say(level, Event.HEALTH_FAILED, fields, to=log)
    return _refusal(status, correlation_id)
