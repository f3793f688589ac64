"""Check the health API: whom it answers, what it answers and what it never discloses."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections import Counter
from http import HTTPStatus

import jwt
import pytest
import schemathesis
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import AsyncConnection
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.http.api import SUMMARY_PATH, InvalidTokenError, JwtVerifier, app, router
from ergon_framework.providers.http.health_reader import DatabaseUnavailable, HealthReader
from ergon_framework.providers.http.settings import ApiSettings
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.runner.settings import load_settings as all_settings
from tests.integration.metering import make_attempt, query
from tests.log_events import get_event
from tests.servers.databases import create_migrated_database
from tests.servers.postgres import free_port

SECRET = "a secret of the issuer that is long enough for all hashes of the family"
OTHER_SECRET = "another secret, which this service does not have, just as long or even longer"
HMAC_SETTINGS = ApiSettings(algorithm="HS256", secret=SECRET)


def to_pem(key):
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()


RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def make_token(tenant="acme", *, key=SECRET, algorithm="HS256", lifetime=60.0, headers=None, **claims):
    payload = {"tenant_id": tenant, "exp": time.time() + lifetime, **claims}
    payload = {name: value for name, value in payload.items() if value is not None}
    return jwt.encode(payload, key, algorithm=algorithm, headers=headers)


@pytest.fixture(scope="module")
def dsn(postgres):
    address = create_migrated_database(postgres)
    writer = MetricsWriter(address)
    for tenant in ("acme", "rival"):
        writer.record(make_attempt(tenant_id=tenant, provider_name=f"pay-{tenant}"))
    assert writer.close(20)
    return address


@pytest.fixture(scope="module")
def client(dsn):
    with TestClient(app(dsn, verifier=JwtVerifier(HMAC_SETTINGS))) as client:
        yield client


def get_summary(client, bearer=None, tenant="acme", **headers):
    if bearer is not None:
        headers["Authorization"] = f"Bearer {bearer}"
    return client.get(SUMMARY_PATH, params={} if tenant is None else {"tenant_id": tenant}, headers=headers)


# -- the contract -----------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-14")
def test_the_response_follows_the_contract(client, dsn):
    query(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, used_count, remaining_count) values "
        "('acme', 'pay-acme', 'charging', now(), now() + interval '1 day', 10000, 2450, 7550) on conflict do nothing",
    )
    response = get_summary(client, make_token())
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    body = response.json()
    assert body["tenant_id"] == "acme"
    assert body["generated_at"].endswith("Z")
    (provider,) = body["providers"]
    assert list(provider) == [
        "provider_name",
        "capability",
        "breaker_state",
        "success_rate_1h",
        "p95_latency_ms_1h",
        "quota",
        "last_error_code",
        "last_error_at",
        "last_success_at",
    ]
    assert list(provider["quota"]) == ["limit_count", "used_count", "remaining_count", "window_end"]
    assert (provider["provider_name"], provider["breaker_state"], provider["success_rate_1h"]) == (
        "pay-acme",
        "closed",
        1.0,
    )
    assert (provider["quota"]["remaining_count"], provider["last_error_at"]) == (7550, None)


@pytest.mark.spec("PRV-14")
def test_a_tenant_without_providers_is_an_empty_list(client):
    assert get_summary(client, make_token("new-one"), "new-one").json()["providers"] == []


@pytest.mark.spec("PRV-14")
def test_other_methods_than_get_are_rejected(client):
    for method in ("post", "put", "patch", "delete"):
        assert getattr(client, method)(SUMMARY_PATH).status_code == 405


# -- authorization ------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-18", "PRV-27")
@pytest.mark.parametrize("tenant", ["rival", "unknown-tenant", "ACME", "acme.", "default"])
def test_another_tenant_is_rejected_identically_whether_it_exists_or_not(client, tenant):
    response = get_summary(client, make_token(), tenant)
    assert response.status_code == 403
    assert response.json() == {
        "error": "forbidden",
        "message": "The token does not speak for this tenant.",
        "correlation_id": None,
    }


@pytest.mark.spec("PRV-27")
@pytest.mark.parametrize("claim", [None, "", 7, ["acme"], {"acme": 1}, True])
def test_a_token_without_a_tenant_is_forbidden(client, claim):
    assert get_summary(client, make_token(claim)).status_code == 403


def make_unsigned_token(algorithm):
    """Return a token without a signature."""
    parts = ({"alg": algorithm, "typ": "JWT"}, {"tenant_id": "acme", "exp": time.time() + 60})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts) + "."


def make_tampered_token():
    head, body, signature = make_token("rival").split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    forged = base64.urlsafe_b64encode(json.dumps(claims | {"tenant_id": "acme"}).encode()).rstrip(b"=").decode()
    return f"{head}.{forged}.{signature}"


@pytest.mark.spec("PRV-27")
@pytest.mark.parametrize(
    "bearer",
    [
        pytest.param(lambda: None, id="none"),
        pytest.param(lambda: "", id="empty"),
        pytest.param(lambda: "nonsense", id="nonsense"),
        pytest.param(lambda: "a.b.c", id="no json"),
        pytest.param(lambda: make_token(lifetime=-11), id="expired"),
        pytest.param(lambda: make_token(exp=None), id="without an end"),
        pytest.param(lambda: make_token(exp="soon"), id="an end that is not a time"),
        pytest.param(lambda: make_token(nbf=time.time() + 60), id="not yet"),
        pytest.param(lambda: make_token(key=OTHER_SECRET), id="another key"),
        pytest.param(lambda: make_token(algorithm="HS512"), id="another algorithm of the family"),
        pytest.param(lambda: make_token(key=RSA_KEY, algorithm="RS256"), id="another family"),
        pytest.param(lambda: make_unsigned_token("none"), id="unsigned"),
        pytest.param(lambda: make_unsigned_token("NonE"), id="unsigned, disguised"),
        pytest.param(lambda: make_unsigned_token("HS256"), id="signature missing"),
        pytest.param(make_tampered_token, id="tampered"),
        pytest.param(lambda: make_token()[:-2], id="signature cut"),
        pytest.param(lambda: make_token(more="x" * 9_000), id="too long"),
        pytest.param(lambda: make_token() + " " + make_token(), id="two"),
    ],
)
def test_an_invalid_token_is_rejected_before_the_request_is_checked(client, bearer):
    for tenant in ("acme", "rival", "?not/a*tenant", None):
        response = get_summary(client, bearer(), tenant)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == 'Bearer realm="provider-health"'
        assert response.json()["error"] == "unauthorized"


def test_another_authorization_scheme_is_rejected(client):
    response = client.get(
        SUMMARY_PATH, params={"tenant_id": "acme"}, headers={"Authorization": f"Basic {make_token()}"}
    )
    assert response.status_code == 401


def test_clocks_may_differ_a_little(client):
    assert get_summary(client, make_token(lifetime=-5)).status_code == 200


@pytest.mark.spec("PRV-27")
@pytest.mark.parametrize(
    "algorithm, key",
    [
        ("RS256", RSA_KEY),
        ("PS384", RSA_KEY),
        ("ES256", ec.generate_private_key(ec.SECP256R1())),
        ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
    ],
)
def test_a_public_key_is_never_taken_for_a_secret(algorithm, key):
    public = to_pem(key.public_key())
    verifier = JwtVerifier(ApiSettings(algorithm=algorithm, public_key=public.replace("\n", "\\n")))
    tenant = verifier.verify(make_token(key=key, algorithm=algorithm))
    assert asyncio.run(tenant) == "acme"
    # Tokens that the library refuses to sign are signed by hand.
    head, body, _ = make_token(key=SECRET).split(".")
    forged = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(
        f"{head}.{body}".encode(), public.encode()
    )
    for invalid in (
        f"{head}.{body}.{base64.urlsafe_b64encode(forged).rstrip(b'=').decode()}",
        make_token(key=SECRET),
        make_unsigned_token("none"),
    ):
        with pytest.raises(InvalidTokenError):
            asyncio.run(verifier.verify(invalid))


@pytest.mark.spec("PRV-27")
def test_issuer_audience_claim_and_previous_key_are_checked():
    verifier = JwtVerifier(
        ApiSettings(
            algorithm="HS256",
            secret=OTHER_SECRET,
            previous_secret=SECRET,
            issuer="us",
            audience="health",
            tenant_claim="org",
        )
    )

    def read_tenant(**claims):
        try:
            return asyncio.run(verifier.verify(make_token("ignored", **claims)))
        except InvalidTokenError:
            return "refused"

    valid = {"iss": "us", "aud": ["x", "health"], "org": "acme"}
    assert read_tenant(**valid) == read_tenant(key=OTHER_SECRET, **valid) == "acme"
    assert read_tenant(**valid | {"org": None}) is None
    for invalid in ({"iss": "them"}, {"iss": None}, {"aud": "other"}, {"aud": None}):
        assert read_tenant(**valid | invalid) == "refused"


@pytest.mark.spec("SEC-27")
@pytest.mark.parametrize("audience", ["billing", ["billing", "reports"]])
def test_a_token_for_another_service_is_rejected_although_no_audience_is_configured(client, audience):
    assert get_summary(client, make_token(aud=audience)).status_code == 401


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "set ERGON_API__PUBLIC_KEY"),
        ({"algorithm": "HS256"}, "set ERGON_API__SECRET"),
        ({"algorithm": "HS256", "secret": "short"}, "HS256 needs 32 bytes"),
        (
            {"algorithm": "HS256", "secret": to_pem(RSA_KEY.public_key())},
            "holds a key or certificate: set a shared secret",
        ),
        (
            {"algorithm": "HS256", "secret": SECRET, "public_key": to_pem(RSA_KEY.public_key())},
            "remove the other key",
        ),
        ({"public_key": to_pem(RSA_KEY.public_key()), "secret": SECRET}, "remove the other key"),
        ({"public_key": "nonsense"}, "is not a public key in PEM format"),
        ({"public_key": to_pem(ed25519.Ed25519PrivateKey.generate().public_key())}, "is not a key for RS256"),
        (
            {"public_key": to_pem(rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key())},
            "too small",
        ),
        ({"algorithm": "ES384", "public_key": to_pem(ec.generate_private_key(ec.SECP256R1()).public_key())}, "ES384"),
        (
            {
                "public_key": RSA_KEY.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                ).decode()
            },
            "is a private key",
        ),
    ],
)
def test_unsuitable_keys_are_rejected_at_startup(options, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        JwtVerifier(ApiSettings(**options))
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(ApiSettings(**options))


@pytest.mark.parametrize("algorithm", ["none", "None", "", "HS1", "RS256,HS256"])
def test_only_signing_algorithms_are_accepted(algorithm):
    with pytest.raises(ConfigurationError):
        ApiSettings.from_environment({"ERGON_API__ALGORITHM": algorithm, "ERGON_API__SECRET": SECRET})


def test_all_settings_come_from_the_environment(dsn, monkeypatch):
    environ = {"ERGON_API__ALGORITHM": "HS256", "ERGON_API__SECRET": SECRET, "ERGON_API__LEEWAY": "1"}
    # The settings of the command use the same names.
    assert all_settings(environ=environ).api == ApiSettings.from_environment(environ)
    for name, value in (environ | {"ERGON_POSTGRES__DSN": dsn}).items():
        monkeypatch.setenv(name, value)
    with TestClient(app()) as client:
        assert get_summary(client, make_token()).status_code == 200
        assert get_summary(client, make_token(lifetime=-5)).status_code == 401
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    with pytest.raises(ConfigurationError, match="ERGON_POSTGRES__DSN"):
        app()
    for invalid in ({"ERGON_API__LEEWAY": "much"}, {"ERGON_API__LEEWAY": "61"}, {"ERGON_API__SECRETT": "x"}):
        with pytest.raises(ConfigurationError):
            ApiSettings.from_environment(environ | invalid)


# -- what it never discloses ----------------------------------------------------------------------------------


@pytest.mark.spec("PRV-27")
@pytest.mark.parametrize(
    "tenant", [None, "", "*", "a b", "a\0b", "x" * 129, "<script>", "ünï", "a'; drop table x --", "%2e"]
)
def test_an_invalid_request_is_not_echoed(client, tenant):
    response = get_summary(client, make_token(), tenant)
    assert response.status_code == 422
    assert response.json() == {
        "error": "invalid_request",
        "message": "Invalid request: pass only tenant_id, a tenant name of at most 128 characters.",
        "correlation_id": None,
    }


def test_a_request_with_other_parameters_is_rejected(client):
    response = client.get(
        SUMMARY_PATH, params={"tenant_id": "acme", "x": "y"}, headers={"Authorization": f"Bearer {make_token()}"}
    )
    assert response.status_code == 422


def test_of_two_tenants_the_one_that_is_read_is_the_one_that_is_authorized(client):
    for tenants in (["rival", "acme"], ["acme", "rival"]):
        response = client.get(
            SUMMARY_PATH, params={"tenant_id": tenants}, headers={"Authorization": f"Bearer {make_token()}"}
        )
        assert response.status_code == (200 if tenants[-1] == "acme" else 403)
        assert "rival" not in response.text


@pytest.mark.spec("PRV-27")
def test_an_unavailable_database_is_a_503_without_details(caplog):
    address = f"postgresql://me:open-sesame@127.0.0.1:{free_port()}/secret_name"
    with TestClient(app(address, verifier=JwtVerifier(HMAC_SETTINGS))) as client:
        response = get_summary(client, make_token())
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    body = response.json()
    assert body == {
        "error": "unavailable",
        "message": "The database is unavailable; try again later.",
        "correlation_id": body["correlation_id"],
    }
    (record,) = [one for one in caplog.records if get_event(one) == "provider health failed"]
    assert (record.levelno, record.correlation_id) == (logging.WARNING, body["correlation_id"])
    assert record.error_type == "ConnectFailed"
    for secret in ("open-sesame", "secret_name", "127.0.0.1"):
        assert secret not in response.text + str([vars(one) for one in caplog.records if one.name.startswith("ergon")])


@pytest.mark.spec("PRV-27")
def test_an_internal_error_is_a_500_without_details(dsn, caplog):
    class Broken:
        async def verify(self, token):
            raise RuntimeError("open-sesame")

    with TestClient(app(dsn, verifier=Broken())) as client:
        response = get_summary(client, "x")
    assert response.status_code == 500
    assert response.json()["message"] == "The summary failed; look up correlation_id in the log."
    (record,) = [one for one in caplog.records if get_event(one) == "provider health failed"]
    assert (record.levelno, record.error_type) == (logging.ERROR, "RuntimeError")
    assert "open-sesame" not in response.text + caplog.text + str(vars(record))


def test_the_router_can_be_mounted_in_another_application(dsn):
    host = FastAPI()
    reader = HealthReader(dsn)
    host.include_router(router(reader, JwtVerifier(HMAC_SETTINGS)), prefix="/ops")
    with TestClient(host) as client:
        url = f"/ops{SUMMARY_PATH}"
        valid = client.get(url, params={"tenant_id": "acme"}, headers={"Authorization": f"Bearer {make_token()}"})
        assert valid.status_code == 200
        assert client.get(url, params={"tenant_id": "acme"}).status_code == 401
        invalid = client.get(url, params={"tenant_id": "?"}, headers={"Authorization": f"Bearer {make_token()}"})
        assert (invalid.status_code, invalid.json()["error"]) == (422, "invalid_request")
        assert len(reader._idle) == 1
    assert reader._idle == []


# -- the database behind it ---------------------------------------------------------------------------------------


def test_after_a_restart_of_the_server_the_next_request_is_answered(new_postgres):
    server = new_postgres(fsync=False)
    with TestClient(app(create_migrated_database(server), verifier=JwtVerifier(HMAC_SETTINGS))) as client:
        assert get_summary(client, make_token()).status_code == 200
        server.stop("immediate")
        assert get_summary(client, make_token()).status_code == 503
        server.start()
        assert get_summary(client, make_token()).status_code == 200
        server.restart("immediate")
        assert get_summary(client, make_token()).status_code == 200


@pytest.mark.spec("PRV-27")
def test_a_server_without_response_blocks_neither_the_caller_nor_the_loop(new_postgres):
    server = new_postgres(fsync=False)
    dsn = create_migrated_database(server)

    async def main():
        reader = HealthReader(dsn, timeout=0.5)
        await reader.read("acme")
        server.partition_network()
        ticks = 0
        request = asyncio.create_task(reader.read("acme"))
        started_at = time.monotonic()
        while not request.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(DatabaseUnavailable):
            request.result()
        assert time.monotonic() - started_at < 2
        assert ticks > 10
        server.heal_network()
        await reader.close()

    try:
        asyncio.run(main())
    finally:
        server.heal_network()


@pytest.mark.spec("SEC-27")
def test_a_flood_of_one_tenant_takes_one_connection_and_the_others_are_answered(dsn):
    flood_count, other_count = 400, 8

    async def main():
        reader = HealthReader(dsn, timeout=10.0)
        connections = []
        connect = AsyncConnection.connect

        async def connect_and_record(**options):
            connections.append(await connect(**options))
            return connections[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AsyncConnection, "connect", connect_and_record)
            requests = [asyncio.create_task(reader.read("acme")) for _ in range(flood_count)]
            await asyncio.sleep(0)
            requests += [asyncio.create_task(reader.read(f"tenant-{number}")) for number in range(other_count)]
            summaries = await asyncio.gather(*requests)
        await reader.close()
        return summaries, len(connections)

    summaries, connection_count = asyncio.run(main())
    assert [summary.tenant_id for summary in summaries] == ["acme"] * flood_count + [
        f"tenant-{n}" for n in range(other_count)
    ]
    # One read for the flooding tenant: of 4 connections 3 are left to the others.
    assert len({id(summary) for summary in summaries}) == 1 + other_count
    assert connection_count <= 4


def test_a_cancelled_caller_ends_no_other_request(dsn):
    async def main():
        reader = HealthReader(dsn, timeout=10.0)
        first, second = (asyncio.create_task(reader.read("acme")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        summary = await second
        await reader.close()
        return summary

    assert asyncio.run(main()).tenant_id == "acme"


# -- generated requests -------------------------------------------------------------------------------------------


def is_empty(value):
    """Return whether *value* is an empty object or a list of empty values at any depth: an address cannot show it."""
    return value == {} or (isinstance(value, list) and all(map(is_empty, value)))


@pytest.mark.spec("PRV-14", "PRV-27")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_schemathesis_finds_no_failure(dsn, mode):
    schema = schemathesis.openapi.from_asgi("/openapi.json", app(dsn, verifier=JwtVerifier(HMAC_SETTINGS)))
    (operation,) = [result.ok() for result in schema.get_all_operations()]
    statuses = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=settings().max_examples // 3, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case):
        # Each request carries a token that permits it, so that there are answers too.
        tenant = case.query.get("tenant_id") if isinstance(case.query, dict) else None
        response = case.call_and_validate(
            headers={"Authorization": f"Bearer {make_token(str(tenant))}"}, excluded_checks=[negative_data_rejection]
        )
        statuses[response.status_code] += 1
        # Replaces that check, which counts a request as invalid although it got its missing token, or although the
        # invalid part, a list of empty values, also nested, is not visible in an address.
        if response.status_code == HTTPStatus.OK:
            names = {name for name, value in case.query.items() if not is_empty(value)}
            assert (names, response.json()["tenant_id"]) == ({"tenant_id"}, str(tenant)), case

    check()
    assert max(statuses) < 500
    assert mode is GenerationMode.NEGATIVE or set(statuses) == {200}


BAD_TOKENS = {
    "missing": dict,
    "empty": lambda: {"Authorization": ""},
    "basic": lambda: {"Authorization": f"Basic {make_token()}"},
    "unsigned": lambda: {"Authorization": f"Bearer {make_unsigned_token('none')}"},
    "tampered": lambda: {"Authorization": f"Bearer {make_tampered_token()}"},
    "expired": lambda: {"Authorization": f"Bearer {make_token(lifetime=-60)}"},
    "foreign": lambda: {"Authorization": f"Bearer {make_token(key=OTHER_SECRET)}"},
    "two": lambda: {"Authorization": f"Bearer {make_token()} {make_token()}"},
}


@pytest.mark.spec("SEC-27")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_schemathesis_with_a_bad_token_gets_401_and_nothing_else(dsn, mode):
    schema = schemathesis.openapi.from_asgi("/openapi.json", app(dsn, verifier=JwtVerifier(HMAC_SETTINGS)))
    (operation,) = [result.ok() for result in schema.get_all_operations()]
    statuses = Counter()

    @given(case=operation.as_strategy(generation_mode=mode), bad_token=st.sampled_from(sorted(BAD_TOKENS)))
    @settings(max_examples=settings().max_examples // 3, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case, bad_token):
        # The token of this test replaces any that the generator would send.
        case.headers.pop("Authorization", None)
        response = case.call(headers=BAD_TOKENS[bad_token]())
        case.validate_response(response, excluded_checks=[negative_data_rejection, positive_data_acceptance])
        statuses[response.status_code] += 1

    check()
    assert set(statuses) == {401}


@pytest.mark.spec("PRV-14")
def test_the_openapi_schema_describes_all_responses(client):
    operations = client.get("/openapi.json").json()["paths"][SUMMARY_PATH]
    assert list(operations) == ["get"]
    assert set(operations["get"]["responses"]) == {"200", "401", "403", "422", "500", "503"}
    assert operations["get"]["security"] == [{"HTTPBearer": []}]
