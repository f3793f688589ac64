"""Who may do what: by the names in a certificate."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import KnownObject, LogState
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown, InvalidFactError
from ergon_framework.facts.model import Buffer, Pair, Stored
from ergon_framework.facts.service import identity
from ergon_framework.facts.service.access import Access
from ergon_framework.facts.service.identity import Identity
from ergon_framework.facts.service.revoked import Revoked
from tests.log_events import events_of
from tests.servers.certificates import Authority, fingerprint, public_key_digest, with_other_signature

pytestmark = pytest.mark.spec("FAC-18")

OUT = Pair("Plant A", "Enterprise")
IN = Pair("Enterprise", "Plant A")
ELSEWHERE = Pair("Plant B", "Enterprise")
ACCESS = Access(["Plant A"])


def holder(*zones, operator=None):
    return Identity(frozenset(zones), operator, 0, 2**40, "00" * 32)


PLANT, PLANT_B, PEER = holder("Plant A"), holder("Plant B"), holder("Enterprise")
OPERATOR = holder(operator="ops")


def allowed(rule, *args):
    try:
        rule(*args)
    except (AccessDenied, ArtifactUnknown):
        return False
    return True


@pytest.mark.parametrize(
    "who, zones, may",
    [
        (PLANT, ["Plant A"], True),
        (PLANT, ["Plant A", "Plant B"], False),
        (PLANT, ["plant a"], False),
        (PLANT_B, ["Plant A"], False),
        # Its own zone, but not its store: its facts come over the line.
        (PEER, ["Enterprise"], False),
        (OPERATOR, ["Plant A"], False),
        (holder("Plant A", "Plant B"), ["Plant B"], False),
    ],
)
def test_facts_are_appended_by_their_own_zone_to_its_own_store(who, zones, may):
    assert allowed(ACCESS.append, who, zones) is may


@pytest.mark.parametrize(
    "who, pair, reader, may",
    [
        (PEER, OUT, "ledger", True),
        (PLANT, IN, "ledger", True),
        (PLANT, OUT, "sender:audit", True),
        # A reader of the other side: whoever confirms for him lets retention take what he never had.
        (PLANT, OUT, "ledger", False),
        (PEER, OUT, "sender:audit", False),
        (PLANT_B, OUT, "ledger", False),
        (PLANT_B, OUT, "sender:audit", False),
        (PLANT, ELSEWHERE, "ledger", False),
        (OPERATOR, OUT, "ledger", False),
    ],
)
def test_facts_are_read_by_the_two_zones_that_they_concern(who, pair, reader, may):
    assert allowed(ACCESS.read, who, pair, reader) is may


@pytest.mark.parametrize("who, may", [(PLANT, True), (PEER, True), (OPERATOR, True), (PLANT_B, False)])
def test_cursors_are_shown_to_both_zones_and_to_operators(who, may):
    assert allowed(ACCESS.look, who, OUT) is may


@pytest.mark.parametrize("who, may", [(PLANT, True), (OPERATOR, True), (PEER, False), (PLANT_B, False)])
def test_what_became_of_a_fact_is_told_to_its_zone(who, may):
    assert allowed(ACCESS.ask, who, "Plant A") is may


@pytest.mark.parametrize("who, may", [(PLANT, True), (PEER, False), (OPERATOR, False)])
def test_artifacts_are_put_by_the_zones_of_the_store(who, may):
    assert allowed(ACCESS.put, who) is may


@pytest.mark.parametrize(
    "who, owner, named_by, may",
    [
        (PLANT, "", (), True),
        (PEER, "", (OUT,), True),
        # A fact of the peer gives the peer nothing that the zones of the store own.
        (PEER, "", (IN,), False),
        (PEER, "", (), False),
        (PEER, "", None, False),
        (PLANT_B, "", (OUT, IN), False),
        (OPERATOR, "", (OUT,), False),
        # An artifact of the peer, which a replicator has brought.
        (PEER, IN.from_zone, (), True),
        (PLANT, IN.from_zone, (IN,), True),
        (PLANT, IN.from_zone, (), False),
        (PLANT, IN.from_zone, (OUT,), False),
        (PLANT_B, IN.from_zone, (IN,), False),
    ],
)
@pytest.mark.spec("SEC-10")
def test_artifacts_are_read_by_their_owner_and_by_zones_that_its_facts_are_for(who, owner, named_by, may):
    known = None if named_by is None else KnownObject(Stored("sha256:" + "0" * 64, 1), frozenset(named_by), owner)
    assert allowed(ACCESS.get, who, "b", "k", known) is may


def test_a_stranger_cannot_tell_whether_an_artifact_is_there():
    there = KnownObject(Stored("sha256:" + "0" * 64, 1), frozenset([OUT]))
    words = set()
    for known in (there, None):
        with pytest.raises(ArtifactUnknown) as caught:
            ACCESS.get(PLANT_B, "b", "k", known)
        words.add(str(caught.value))
    assert len(words) == 1


def test_a_survey_shows_what_concerns_the_caller():
    logs = [
        LogState(pair=pair, buffer=Buffer.ESB, epoch="e", first=1, last=1, bytes=1) for pair in (OUT, IN, ELSEWHERE)
    ]
    assert [log.pair for log in ACCESS.visible(PLANT, logs)] == [OUT, IN]
    assert [log.pair for log in ACCESS.visible(PLANT_B, logs)] == [ELSEWHERE]
    assert len(ACCESS.visible(OPERATOR, logs)) == 3


def test_readers_are_retired_by_operators():
    assert ACCESS.operate(OPERATOR) == "ops"
    assert not allowed(ACCESS.operate, PLANT)


# -- certificates ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


def read(files):
    return identity.read(files.certificate.read_bytes())


def test_the_names_are_percent_encoded_uris(authority):
    found = read(authority.issue("many", zones=["Werk Süd/2 100%", "Plant A"], operator="Jane Doe"))
    assert found.zones == {"Werk Süd/2 100%", "Plant A"}
    assert found.operator == "Jane Doe"
    assert found.name == "zone Plant A, zone Werk Süd/2 100%, operator Jane Doe"


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://example/plant"],
        ["ergon://zone/"],
        ["ergon://zone/%20Plant"],
        ["ergon://zone/Pl%00ant"],
        ["ergon://zone/%FF%FE"],
        ["ergon://zone/" + "x" * 65],
        ["ergon://zones/Plant"],
        ["ergon://zone/Plant%20A", "ergon://zone/"],
    ],
)
def test_a_certificate_that_names_nobody_lets_nobody_in(authority, uris):
    with pytest.raises(AccessDenied):
        read(authority.issue("odd", uris=uris))


def test_what_is_no_certificate_names_nobody():
    with pytest.raises(AccessDenied):
        identity.read(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def test_a_zone_that_cannot_be_is_not_written():
    with pytest.raises(InvalidFactError):
        identity.zone_uri(" blank")


def test_a_certificate_holds_for_its_time(authority):
    who = read(authority.issue("short", zones=["Plant A"], lasts=timedelta(seconds=60)))
    who.check(time.time())
    for moment in (time.time() + 61, time.time() - 3601):
        with pytest.raises(AccessDenied, match="not valid now") as caught:
            who.check(moment)
        # Whoever renews it comes back, and loses nothing meanwhile.
        assert caught.value.later
        assert not caught.value.final


def test_a_revoked_certificate_is_out_as_soon_as_the_list_says_so(authority, tmp_path):
    files = authority.issue("revoked", zones=["Plant A"])
    other = read(authority.issue("other", zones=["Plant A"]))
    path = tmp_path / "revoked"
    path.write_text("# nobody yet\n\n", encoding="utf-8")
    revoked = Revoked(path)
    revoked.check(read(files))
    found = fingerprint(files).upper()
    openssl = "sha256 Fingerprint=" + ":".join(found[start : start + 2] for start in range(0, 64, 2))
    path.write_text(f"{openssl}  # stolen, INC-7\n", encoding="utf-8")
    with pytest.raises(AccessDenied, match="was revoked"):
        revoked.check(read(files))
    revoked.check(other)


def test_while_the_list_cannot_be_read_nobody_is_let_in(authority, tmp_path):
    who = read(authority.issue("waiting", zones=["Plant A"]))
    path = tmp_path / "revoked"
    path.write_text("", encoding="utf-8")
    revoked = Revoked(path)
    for broken in (lambda: path.write_text("nonsense\n", encoding="utf-8"), path.unlink):
        broken()
        with pytest.raises(AccessDenied, match="nobody is let in") as caught:
            revoked.check(who)
        assert caught.value.later
    path.write_text("\n", encoding="utf-8")
    revoked.check(who)


def test_a_list_that_is_wrong_from_the_start_is_no_start(tmp_path):
    path = tmp_path / "revoked"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Revoked(path)
    path.write_text("\nabc\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=":2 is no sha256 fingerprint"):
        Revoked(path)


# -- revocation -----------------------------------------------------------------------------------------


def is_let_in(revoked, files):
    return allowed(revoked.check, read(files))


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize("curve, bits", [(ec.SECP256R1(), 256), (ec.SECP384R1(), 384), (ec.SECP521R1(), 521)])
@pytest.mark.parametrize("first", ["original", "twin"])
def test_a_fingerprint_revokes_both_signatures_of_a_certificate(tmp_path, curve, bits, first):
    files = Authority(tmp_path, curve=curve).issue("stolen", zones=["Plant A"])
    both = {"original": files, "twin": with_other_signature(files, bits=bits)}
    path = tmp_path / "revoked"
    path.write_text(fingerprint(both[first]), encoding="utf-8")
    assert [is_let_in(Revoked(path), each) for each in both.values()] == [False, False]


@pytest.mark.spec("SEC-05")
def test_a_certificate_is_let_in_whichever_of_its_signatures_the_authority_made(authority):
    # Half of the signatures of OpenSSL have a high s: refusing them would refuse every second honest certificate.
    files = authority.issue("either", zones=["Plant A"])
    assert all(is_let_in(Revoked(), each) for each in (files, with_other_signature(files)))


@pytest.mark.spec("SEC-05")
def test_a_list_names_certificates_and_public_keys_beside_comments(authority, tmp_path):
    by_certificate, by_key, other = (authority.issue(name, zones=["Plant A"]) for name in ("first", "second", "third"))
    path = tmp_path / "revoked"
    path.write_text(
        f"# INC-7\n{by_certificate.certificate.read_text(encoding='utf-8')}\n"
        f"public-key={public_key_digest(by_key)}  # lost laptop\n",
        encoding="utf-8",
    )
    revoked = Revoked(path)
    assert [is_let_in(revoked, each) for each in (by_certificate, by_key, other)] == [False, False, True]


@pytest.mark.spec("SEC-05")
def test_a_list_of_fingerprints_is_read_with_a_warning(authority, tmp_path, caplog):
    files = authority.issue("old list", zones=["Plant A"])
    path = tmp_path / "revoked"
    with caplog.at_level(logging.WARNING):
        path.write_text(f"public-key={public_key_digest(files)}", encoding="utf-8")
        assert not is_let_in(Revoked(path), files)
        assert events_of(caplog.records) == []
        path.write_text(fingerprint(files), encoding="utf-8")
        assert not is_let_in(Revoked(path), files)
        assert events_of(caplog.records) == ["revocation list weak"]


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize("encoding", [Encoding.PEM, Encoding.DER])
def test_a_crl_revokes_what_its_issuer_lists(tmp_path, encoding):
    authority, foreign = Authority(tmp_path, "ours"), Authority(tmp_path, "foreign")
    listed, free = authority.issue("listed", zones=["Plant A"]), authority.issue("free", zones=["Plant A"])
    path = tmp_path / "crl"
    path.write_bytes(authority.crl(listed, encoding=encoding))
    revoked = Revoked(crl=path, authorities=authority.path)
    assert [is_let_in(revoked, each) for each in (listed, free)] == [False, True]
    path.write_bytes(authority.crl(listed, free, encoding=encoding))
    assert not is_let_in(revoked, free)
    # A CRL of another authority is not believed, and without a CRL no caller is let in.
    path.write_bytes(foreign.crl(encoding=encoding))
    with pytest.raises(AccessDenied, match="cannot be read") as caught:
        revoked.check(read(free))
    assert caught.value.later


@pytest.mark.spec("SEC-05")
def test_an_expired_crl_lets_in_no_certificate_of_its_issuer(tmp_path, caplog):
    authority, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    files, elsewhere = authority.issue("plant", zones=["Plant A"]), other.issue("elsewhere", zones=["Plant A"])
    path = tmp_path / "crl"
    path.write_bytes(authority.crl(lasts=timedelta(hours=1)))
    now = [time.time()]
    revoked = Revoked(crl=path, authorities=authority.path, clock=lambda: now[0])
    assert is_let_in(revoked, files)
    now[0] += 3700
    for _ in range(3):
        with pytest.raises(AccessDenied, match="has expired") as caught:
            revoked.check(read(files))
        assert caught.value.later
    assert events_of(caplog.records) == ["certificates unreadable"]
    assert is_let_in(revoked, elsewhere)
    path.write_bytes(authority.crl(lasts=timedelta(hours=2)))
    assert is_let_in(revoked, files)


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize(
    "extension, words",
    [
        (x509.DeltaCRLIndicator(1), "2.5.29.27"),
        (
            x509.IssuingDistributionPoint(None, None, False, False, None, True, False),
            "2.5.29.28",
        ),
    ],
)
def test_a_crl_that_is_not_complete_is_refused(authority, tmp_path, extension, words):
    path = tmp_path / "crl"
    path.write_bytes(authority.crl(extensions=[extension]))
    with pytest.raises(ConfigurationError, match=f"{words}.*complete CRL"):
        Revoked(crl=path, authorities=authority.path)


@pytest.mark.spec("SEC-05")
def test_a_crl_that_is_wrong_from_the_start_is_no_start(authority, tmp_path):
    path = tmp_path / "crl"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigurationError, match="is no CRL in PEM or DER"):
        Revoked(crl=path, authorities=authority.path)
    path.write_bytes(authority.crl(lasts=timedelta(hours=1)))
    with pytest.raises(ConfigurationError, match="name the file of the authorities"):
        Revoked(crl=path)
    broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="certificate that cannot be read"):
        Revoked(path)
    path.write_bytes(b"#" * (16 * 1024 * 1024 + 1))
    with pytest.raises(ConfigurationError, match="more than 16,777,216 bytes"):
        Revoked(path)
