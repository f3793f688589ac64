"""The health API: to whom it speaks, what it says, and what it never says."""

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
from ergon_framework.providers.api import PATH, app, router
from ergon_framework.providers.api_settings import ApiSettings
from ergon_framework.providers.sql.reader import HealthReader, Unavailable
from ergon_framework.providers.sql.writer import MetricsWriter
from ergon_framework.providers.tokens import JwtVerifier, TokenRefused
from ergon_framework.runner.settings import settings as all_settings
from tests.integration.metering import ask, attempt
from tests.log_events import event_of
from tests.servers.databases import migrated
from tests.servers.postgres import free_port

SECRET = "a secret of the issuer that is long enough for all hashes of the family"
OTHER = "another secret, which nobody has told to this service, just as long or longer"
HMAC = ApiSettings(algorithm="HS256", secret=SECRET)


def pem(key):
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()


RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def token(tenant="acme", *, key=SECRET, algorithm="HS256", lasts=60.0, headers=None, **claims):
    given = {"tenant_id": tenant, "exp": time.time() + lasts, **claims}
    given = {name: value for name, value in given.items() if value is not None}
    return jwt.encode(given, key, algorithm=algorithm, headers=headers)


@pytest.fixture(scope="module")
def dsn(postgres):
    found = migrated(postgres)
    writer = MetricsWriter(found)
    for tenant in ("acme", "rival"):
        writer.record(attempt(tenant_id=tenant, provider_name=f"pay-{tenant}"))
    assert writer.close(20)
    return found


@pytest.fixture(scope="module")
def client(dsn):
    with TestClient(app(dsn, verifier=JwtVerifier(HMAC))) as client:
        yield client


def get(client, bearer=None, tenant="acme", **headers):
    if bearer is not None:
        headers["Authorization"] = f"Bearer {bearer}"
    return client.get(PATH, params={} if tenant is None else {"tenant_id": tenant}, headers=headers)


# -- the contract -----------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-14")
def test_the_answer_is_the_contract(client, dsn):
    ask(
        dsn,
        "insert into ergon.provider_quota_states (tenant_id, provider_name, capability, window_start, window_end, "
        "limit_count, used_count, remaining_count) values "
        "('acme', 'pay-acme', 'charging', now(), now() + interval '1 day', 10000, 2450, 7550) on conflict do nothing",
    )
    answer = get(client, token())
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    body = answer.json()
    assert body["tenant_id"] == "acme"
    assert body["generated_at"].endswith("Z")
    (found,) = body["providers"]
    assert list(found) == [
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
    assert list(found["quota"]) == ["limit_count", "used_count", "remaining_count", "window_end"]
    assert (found["provider_name"], found["breaker_state"], found["success_rate_1h"]) == ("pay-acme", "closed", 1.0)
    assert (found["quota"]["remaining_count"], found["last_error_at"]) == (7550, None)


@pytest.mark.spec("PRV-14")
def test_a_tenant_without_providers_is_an_empty_list(client):
    assert get(client, token("new-one"), "new-one").json()["providers"] == []


@pytest.mark.spec("PRV-14")
def test_it_only_reads(client):
    for method in ("post", "put", "patch", "delete"):
        assert getattr(client, method)(PATH).status_code == 405


# -- who may ask --------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-18", "PRV-27")
@pytest.mark.parametrize("tenant", ["rival", "nobody-at-all", "ACME", "acme.", "default"])
def test_another_tenant_is_refused_in_the_same_words_whether_it_exists_or_not(client, tenant):
    answer = get(client, token(), tenant)
    assert answer.status_code == 403
    assert answer.json() == {
        "error": "forbidden",
        "message": "The token does not speak for this tenant.",
        "correlation_id": None,
    }


@pytest.mark.spec("PRV-27")
@pytest.mark.parametrize("claim", [None, "", 7, ["acme"], {"acme": 1}, True])
def test_a_token_that_names_no_tenant_speaks_for_nobody(client, claim):
    assert get(client, token(claim)).status_code == 403


def unsigned(algorithm):
    """A token without a signature, as if no one cared."""
    parts = ({"alg": algorithm, "typ": "JWT"}, {"tenant_id": "acme", "exp": time.time() + 60})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts) + "."


def tampered():
    head, body, signature = token("rival").split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    mine = base64.urlsafe_b64encode(json.dumps(claims | {"tenant_id": "acme"}).encode()).rstrip(b"=").decode()
    return f"{head}.{mine}.{signature}"


@pytest.mark.spec("PRV-27")
@pytest.mark.parametrize(
    "bearer",
    [
        pytest.param(lambda: None, id="none"),
        pytest.param(lambda: "", id="empty"),
        pytest.param(lambda: "nonsense", id="nonsense"),
        pytest.param(lambda: "a.b.c", id="no json"),
        pytest.param(lambda: token(lasts=-11), id="expired"),
        pytest.param(lambda: token(exp=None), id="without an end"),
        pytest.param(lambda: token(exp="soon"), id="an end that is no time"),
        pytest.param(lambda: token(nbf=time.time() + 60), id="not yet"),
        pytest.param(lambda: token(key=OTHER), id="another key"),
        pytest.param(lambda: token(algorithm="HS512"), id="another algorithm of the family"),
        pytest.param(lambda: token(key=RSA, algorithm="RS256"), id="another family"),
        pytest.param(lambda: unsigned("none"), id="unsigned"),
        pytest.param(lambda: unsigned("NonE"), id="unsigned, disguised"),
        pytest.param(lambda: unsigned("HS256"), id="signature missing"),
        pytest.param(tampered, id="tampered"),
        pytest.param(lambda: token()[:-2], id="signature cut"),
        pytest.param(lambda: token(more="x" * 9_000), id="too long"),
        pytest.param(lambda: token() + " " + token(), id="two"),
    ],
)
def test_a_token_that_proves_nothing_is_refused_before_anything_else(client, bearer):
    for tenant in ("acme", "rival", "?not/a*tenant", None):
        answer = get(client, bearer(), tenant)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == 'Bearer realm="provider-health"'
        assert answer.json()["error"] == "unauthorized"


def test_another_scheme_is_none(client):
    answer = client.get(PATH, params={"tenant_id": "acme"}, headers={"Authorization": f"Basic {token()}"})
    assert answer.status_code == 401


def test_clocks_may_differ_a_little(client):
    assert get(client, token(lasts=-5)).status_code == 200


@pytest.mark.spec("PRV-27")
@pytest.mark.parametrize(
    "algorithm, key",
    [
        ("RS256", RSA),
        ("PS384", RSA),
        ("ES256", ec.generate_private_key(ec.SECP256R1())),
        ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
    ],
)
def test_a_public_key_is_never_taken_for_a_secret(algorithm, key):
    public = pem(key.public_key())
    verifier = JwtVerifier(ApiSettings(algorithm=algorithm, public_key=public.replace("\n", "\\n")))
    tell = verifier.tenant(token(key=key, algorithm=algorithm))
    assert asyncio.run(tell) == "acme"
    # What the library would not sign itself is signed by hand.
    head, body, _ = token(key=SECRET).split(".")
    forged = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(
        f"{head}.{body}".encode(), public.encode()
    )
    for bad in (
        f"{head}.{body}.{base64.urlsafe_b64encode(forged).rstrip(b'=').decode()}",
        token(key=SECRET),
        unsigned("none"),
    ):
        with pytest.raises(TokenRefused):
            asyncio.run(verifier.tenant(bad))


@pytest.mark.spec("PRV-27")
def test_issuer_audience_claim_and_the_key_before_this_one():
    verifier = JwtVerifier(
        ApiSettings(
            algorithm="HS256", secret=OTHER, previous_secret=SECRET, issuer="us", audience="health", tenant_claim="org"
        )
    )

    def told(**claims):
        try:
            return asyncio.run(verifier.tenant(token("ignored", **claims)))
        except TokenRefused:
            return "refused"

    good = {"iss": "us", "aud": ["x", "health"], "org": "acme"}
    assert told(**good) == told(key=OTHER, **good) == "acme"
    assert told(**good | {"org": None}) is None
    for wrong in ({"iss": "them"}, {"iss": None}, {"aud": "other"}, {"aud": None}):
        assert told(**good | wrong) == "refused"


@pytest.mark.spec("SEC-27")
@pytest.mark.parametrize("audience", ["billing", ["billing", "reports"]])
def test_a_token_for_another_service_is_refused_although_no_audience_is_configured(client, audience):
    assert get(client, token(aud=audience)).status_code == 401


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "set ERGON_API__PUBLIC_KEY"),
        ({"algorithm": "HS256"}, "set ERGON_API__SECRET"),
        ({"algorithm": "HS256", "secret": "short"}, "at least 32 bytes"),
        ({"algorithm": "HS256", "secret": pem(RSA.public_key())}, "what is public cannot be a secret"),
        ({"algorithm": "HS256", "secret": SECRET, "public_key": pem(RSA.public_key())}, "take the other key away"),
        ({"public_key": pem(RSA.public_key()), "secret": SECRET}, "take the other key away"),
        ({"public_key": "nonsense"}, "no public key in PEM"),
        ({"public_key": pem(ed25519.Ed25519PrivateKey.generate().public_key())}, "no key for RS256"),
        (
            {"public_key": pem(rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key())},
            "too small for it",
        ),
        ({"algorithm": "ES384", "public_key": pem(ec.generate_private_key(ec.SECP256R1()).public_key())}, "ES384"),
        (
            {
                "public_key": RSA.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                ).decode()
            },
            "is a private key",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_at_the_start(given, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        JwtVerifier(ApiSettings(**given))
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(ApiSettings(**given))


@pytest.mark.parametrize("algorithm", ["none", "None", "", "HS1", "RS256,HS256"])
def test_there_is_no_algorithm_but_those_that_sign(algorithm):
    with pytest.raises(ConfigurationError):
        ApiSettings.from_environment({"ERGON_API__ALGORITHM": algorithm, "ERGON_API__SECRET": SECRET})


def test_all_of_it_comes_from_the_environment(dsn, monkeypatch):
    environ = {"ERGON_API__ALGORITHM": "HS256", "ERGON_API__SECRET": SECRET, "ERGON_API__LEEWAY": "1"}
    # The settings of the command know the same names.
    assert all_settings(environ=environ).api == ApiSettings.from_environment(environ)
    for name, value in (environ | {"ERGON_POSTGRES__DSN": dsn}).items():
        monkeypatch.setenv(name, value)
    with TestClient(app()) as client:
        assert get(client, token()).status_code == 200
        assert get(client, token(lasts=-5)).status_code == 401
    monkeypatch.delenv("ERGON_POSTGRES__DSN")
    with pytest.raises(ConfigurationError, match="ERGON_POSTGRES__DSN"):
        app()
    for wrong in ({"ERGON_API__LEEWAY": "much"}, {"ERGON_API__LEEWAY": "61"}, {"ERGON_API__SECRETT": "x"}):
        with pytest.raises(ConfigurationError):
            ApiSettings.from_environment(environ | wrong)


# -- what it never says ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-27")
@pytest.mark.parametrize(
    "tenant", [None, "", "*", "a b", "a\0b", "x" * 129, "<script>", "ünï", "a'; drop table x --", "%2e"]
)
def test_a_question_that_cannot_be_meant_is_not_repeated(client, tenant):
    answer = get(client, token(), tenant)
    assert answer.status_code == 422
    assert answer.json() == {
        "error": "invalid_request",
        "message": "The question is tenant_id alone, of at most 128 characters that a tenant may have.",
        "correlation_id": None,
    }


def test_a_question_with_more_in_it_is_refused(client):
    answer = client.get(PATH, params={"tenant_id": "acme", "x": "y"}, headers={"Authorization": f"Bearer {token()}"})
    assert answer.status_code == 422


def test_of_two_tenants_the_one_that_is_read_is_the_one_that_is_compared(client):
    for asked in (["rival", "acme"], ["acme", "rival"]):
        answer = client.get(PATH, params={"tenant_id": asked}, headers={"Authorization": f"Bearer {token()}"})
        assert answer.status_code == (200 if asked[-1] == "acme" else 403)
        assert "rival" not in answer.text


@pytest.mark.spec("PRV-27")
def test_a_database_that_is_away_is_a_503_and_nothing_of_it_is_told(caplog):
    address = f"postgresql://me:open-sesame@127.0.0.1:{free_port()}/secret_name"
    with TestClient(app(address, verifier=JwtVerifier(HMAC))) as client:
        answer = get(client, token())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    body = answer.json()
    assert body == {
        "error": "unavailable",
        "message": "The database is out of reach; try again later.",
        "correlation_id": body["correlation_id"],
    }
    (record,) = [one for one in caplog.records if event_of(one) == "provider health failed"]
    assert (record.levelno, record.correlation_id) == (logging.WARNING, body["correlation_id"])
    assert record.error_type in {"ConnectionFailed", "OperationalError"}
    for secret in ("open-sesame", "secret_name", "127.0.0.1"):
        assert secret not in answer.text + str([vars(one) for one in caplog.records if one.name.startswith("ergon")])


@pytest.mark.spec("PRV-27")
def test_a_fault_of_ours_is_a_500_and_nothing_of_it_is_told(dsn, caplog):
    class Broken:
        async def tenant(self, token):
            raise RuntimeError("open-sesame")

    with TestClient(app(dsn, verifier=Broken())) as client:
        answer = get(client, "x")
    assert answer.status_code == 500
    assert answer.json()["message"] == "The summary could not be made."
    (record,) = [one for one in caplog.records if event_of(one) == "provider health failed"]
    assert (record.levelno, record.error_type) == (logging.ERROR, "RuntimeError")
    assert "open-sesame" not in answer.text + caplog.text + str(vars(record))


def test_it_fits_into_an_application_of_ones_own(dsn):
    host = FastAPI()
    reader = HealthReader(dsn)
    host.include_router(router(reader, JwtVerifier(HMAC)), prefix="/ops")
    with TestClient(host) as client:
        where = f"/ops{PATH}"
        good = client.get(where, params={"tenant_id": "acme"}, headers={"Authorization": f"Bearer {token()}"})
        assert good.status_code == 200
        assert client.get(where, params={"tenant_id": "acme"}).status_code == 401
        wrong = client.get(where, params={"tenant_id": "?"}, headers={"Authorization": f"Bearer {token()}"})
        assert (wrong.status_code, wrong.json()["error"]) == (422, "invalid_request")
        assert len(reader._idle) == 1
    assert reader._idle == []


# -- the database behind it ---------------------------------------------------------------------------------------


def test_after_a_restart_of_the_server_the_very_next_question_is_answered(new_postgres):
    server = new_postgres(fsync=False)
    with TestClient(app(migrated(server), verifier=JwtVerifier(HMAC))) as client:
        assert get(client, token()).status_code == 200
        server.stop("immediate")
        assert get(client, token()).status_code == 503
        server.start()
        assert get(client, token()).status_code == 200
        server.restart("immediate")
        assert get(client, token()).status_code == 200


@pytest.mark.spec("PRV-27")
def test_a_server_that_says_nothing_holds_neither_the_caller_nor_the_loop(new_postgres):
    server = new_postgres(fsync=False)
    dsn = migrated(server)

    async def main():
        reader = HealthReader(dsn, patience=0.5)
        await reader.read("acme")
        server.cut()
        ticks = 0
        asked = asyncio.create_task(reader.read("acme"))
        began = time.monotonic()
        while not asked.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(Unavailable):
            asked.result()
        assert time.monotonic() - began < 2
        assert ticks > 10
        server.mend()
        await reader.close()

    try:
        asyncio.run(main())
    finally:
        server.mend()


@pytest.mark.spec("SEC-27")
def test_a_flood_of_one_tenant_takes_one_connection_and_the_others_are_answered(dsn):
    flood, others = 400, 8

    async def main():
        reader = HealthReader(dsn, patience=10.0)
        opened = []
        connect = AsyncConnection.connect

        async def count(**options):
            opened.append(await connect(**options))
            return opened[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AsyncConnection, "connect", count)
            questions = [asyncio.create_task(reader.read("acme")) for _ in range(flood)]
            await asyncio.sleep(0)
            questions += [asyncio.create_task(reader.read(f"tenant-{number}")) for number in range(others)]
            answers = await asyncio.gather(*questions)
        await reader.close()
        return answers, len(opened)

    answers, opened = asyncio.run(main())
    assert [answer.tenant_id for answer in answers] == ["acme"] * flood + [f"tenant-{n}" for n in range(others)]
    # One read for the tenant that floods: of 4 connections 3 are left to the others.
    assert len({id(answer) for answer in answers}) == 1 + others
    assert opened <= 4


def test_a_caller_that_leaves_ends_nobody_elses_question(dsn):
    async def main():
        reader = HealthReader(dsn, patience=10.0)
        first, second = (asyncio.create_task(reader.read("acme")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        answer = await second
        await reader.close()
        return answer

    assert asyncio.run(main()).tenant_id == "acme"


# -- by machine ---------------------------------------------------------------------------------------------------


def is_nothing(value):
    """Whether it is an empty object, or a list of nothing, however deep: it leaves no trace in an address."""
    return value == {} or (isinstance(value, list) and all(map(is_nothing, value)))


@pytest.mark.spec("PRV-14", "PRV-27")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_schemathesis_finds_no_failure(dsn, mode):
    schema = schemathesis.openapi.from_asgi("/openapi.json", app(dsn, verifier=JwtVerifier(HMAC)))
    (operation,) = [found.ok() for found in schema.get_all_operations()]
    seen = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=settings().max_examples // 3, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case):
        # Each question comes from somebody who may ask it, so that there are answers too.
        asked = case.query.get("tenant_id") if isinstance(case.query, dict) else None
        answer = case.call_and_validate(
            headers={"Authorization": f"Bearer {token(str(asked))}"}, excluded_checks=[negative_data_rejection]
        )
        seen[answer.status_code] += 1
        # In place of that check, for which a question stays wrong although it was given the token that it lacked, or
        # although what was wrong with it, a list of nothing, also within another one, cannot be seen in an address.
        if answer.status_code == HTTPStatus.OK:
            sent = {name for name, value in case.query.items() if not is_nothing(value)}
            assert (sent, answer.json()["tenant_id"]) == ({"tenant_id"}, str(asked)), case

    check()
    assert max(seen) < 500
    assert mode is GenerationMode.NEGATIVE or set(seen) == {200}


BAD_TOKENS = {
    "missing": dict,
    "empty": lambda: {"Authorization": ""},
    "basic": lambda: {"Authorization": f"Basic {token()}"},
    "unsigned": lambda: {"Authorization": f"Bearer {unsigned('none')}"},
    "tampered": lambda: {"Authorization": f"Bearer {tampered()}"},
    "expired": lambda: {"Authorization": f"Bearer {token(lasts=-60)}"},
    "foreign": lambda: {"Authorization": f"Bearer {token(key=OTHER)}"},
    "two": lambda: {"Authorization": f"Bearer {token()} {token()}"},
}


@pytest.mark.spec("SEC-27")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_schemathesis_with_a_bad_token_gets_401_and_nothing_else(dsn, mode):
    schema = schemathesis.openapi.from_asgi("/openapi.json", app(dsn, verifier=JwtVerifier(HMAC)))
    (operation,) = [found.ok() for found in schema.get_all_operations()]
    seen = Counter()

    @given(case=operation.as_strategy(generation_mode=mode), bad=st.sampled_from(sorted(BAD_TOKENS)))
    @settings(max_examples=settings().max_examples // 3, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case, bad):
        # Whatever it would put there itself: the token of this test is the one that is sent.
        case.headers.pop("Authorization", None)
        answer = case.call(headers=BAD_TOKENS[bad]())
        case.validate_response(answer, excluded_checks=[negative_data_rejection, positive_data_acceptance])
        seen[answer.status_code] += 1

    check()
    assert set(seen) == {401}


@pytest.mark.spec("PRV-14")
def test_what_it_answers_is_described(client):
    described = client.get("/openapi.json").json()["paths"][PATH]
    assert list(described) == ["get"]
    assert set(described["get"]["responses"]) == {"200", "401", "403", "422", "500", "503"}
    assert described["get"]["security"] == [{"HTTPBearer": []}]
