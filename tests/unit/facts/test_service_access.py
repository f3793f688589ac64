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
from ergon_framework.facts.boundary import LogState, ObjectInfo
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown, InvalidFactError
from ergon_framework.facts.model import Buffer, StoredArtifact, ZonePair
from ergon_framework.facts.service import access
from ergon_framework.facts.service.access import AccessPolicy, Identity, RevocationList
from tests.log_events import list_events
from tests.servers.certificates import (
    CertificateAuthority,
    compute_fingerprint,
    compute_public_key_digest,
    with_other_signature,
)

pytestmark = pytest.mark.spec("FAC-18")

OUT = ZonePair("Plant A", "Enterprise")
IN = ZonePair("Enterprise", "Plant A")
OTHER_PAIR = ZonePair("Plant B", "Enterprise")
ACCESS = AccessPolicy(["Plant A"])


def make_identity(*zones, operator=None):
    return Identity(frozenset(zones), operator, 0, 2**40, "00" * 32)


PLANT, PLANT_B, PEER = make_identity("Plant A"), make_identity("Plant B"), make_identity("Enterprise")
OPERATOR = make_identity(operator="ops")


def is_allowed(rule, *args):
    try:
        rule(*args)
    except (AccessDenied, ArtifactUnknown):
        return False
    return True


@pytest.mark.parametrize(
    "caller, zones, expected",
    [
        (PLANT, ["Plant A"], True),
        (PLANT, ["Plant A", "Plant B"], False),
        (PLANT, ["plant a"], False),
        (PLANT_B, ["Plant A"], False),
        # Its own zone, but not its store: its facts come over the line.
        (PEER, ["Enterprise"], False),
        (OPERATOR, ["Plant A"], False),
        (make_identity("Plant A", "Plant B"), ["Plant B"], False),
    ],
)
def test_facts_are_appended_by_their_own_zone_to_its_own_store(caller, zones, expected):
    assert is_allowed(ACCESS.check_append, caller, zones) is expected


@pytest.mark.parametrize(
    "caller, pair, reader, expected",
    [
        (PEER, OUT, "ledger", True),
        (PLANT, IN, "ledger", True),
        (PLANT, OUT, "sender:audit", True),
        # A reader of the other side: a confirmation in its name lets retention remove facts that it never received.
        (PLANT, OUT, "ledger", False),
        (PEER, OUT, "sender:audit", False),
        (PLANT_B, OUT, "ledger", False),
        (PLANT_B, OUT, "sender:audit", False),
        (PLANT, OTHER_PAIR, "ledger", False),
        (OPERATOR, OUT, "ledger", False),
    ],
)
def test_facts_are_read_by_their_two_zones(caller, pair, reader, expected):
    assert is_allowed(ACCESS.check_read, caller, pair, reader) is expected


@pytest.mark.parametrize("caller, expected", [(PLANT, True), (PEER, True), (OPERATOR, True), (PLANT_B, False)])
def test_cursors_are_shown_to_both_zones_and_to_operators(caller, expected):
    assert is_allowed(ACCESS.check_cursor, caller, OUT) is expected


@pytest.mark.parametrize("caller, expected", [(PLANT, True), (OPERATOR, True), (PEER, False), (PLANT_B, False)])
def test_the_state_of_a_fact_is_visible_to_its_zone(caller, expected):
    assert is_allowed(ACCESS.check_lookup, caller, "Plant A") is expected


@pytest.mark.parametrize("caller, expected", [(PLANT, True), (PEER, False), (OPERATOR, False)])
def test_artifacts_are_put_by_the_zones_of_the_store(caller, expected):
    assert is_allowed(ACCESS.check_put, caller) is expected


@pytest.mark.parametrize(
    "caller, owner, named_by, expected",
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
def test_artifacts_are_read_by_their_owner_and_by_zones_that_its_facts_are_for(caller, owner, named_by, expected):
    known = (
        None if named_by is None else ObjectInfo(StoredArtifact("sha256:" + "0" * 64, 1), frozenset(named_by), owner)
    )
    assert is_allowed(ACCESS.check_get, caller, "b", "k", known) is expected


def test_a_stranger_cannot_detect_an_artifact():
    there = ObjectInfo(StoredArtifact("sha256:" + "0" * 64, 1), frozenset([OUT]))
    messages = set()
    for known in (there, None):
        with pytest.raises(ArtifactUnknown) as caught:
            ACCESS.check_get(PLANT_B, "b", "k", known)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_a_survey_shows_only_the_logs_of_the_caller():
    logs = [
        LogState(pair=pair, buffer=Buffer.ESB, epoch="e", first=1, last=1, bytes=1) for pair in (OUT, IN, OTHER_PAIR)
    ]
    assert [log.pair for log in ACCESS.filter_visible(PLANT, logs)] == [OUT, IN]
    assert [log.pair for log in ACCESS.filter_visible(PLANT_B, logs)] == [OTHER_PAIR]
    assert len(ACCESS.filter_visible(OPERATOR, logs)) == 3


def test_readers_are_retired_by_operators():
    assert ACCESS.require_operator(OPERATOR) == "ops"
    assert not is_allowed(ACCESS.require_operator, PLANT)


# -- certificates ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return CertificateAuthority(tmp_path_factory.mktemp("authority"))


def read_identity(files):
    return access.parse_certificate(files.certificate.read_bytes())


def test_the_names_are_percent_encoded_uris(authority):
    result = read_identity(authority.issue("many", zones=["Werk Süd/2 100%", "Plant A"], operator="Jane Doe"))
    assert result.zones == {"Werk Süd/2 100%", "Plant A"}
    assert result.operator == "Jane Doe"
    assert result.name == "zone Plant A, zone Werk Süd/2 100%, operator Jane Doe"


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
def test_a_certificate_without_a_valid_name_is_rejected(authority, uris):
    with pytest.raises(AccessDenied):
        read_identity(authority.issue("odd", uris=uris))


def test_an_invalid_certificate_is_rejected():
    with pytest.raises(AccessDenied):
        access.parse_certificate(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def test_an_invalid_zone_has_no_uri():
    with pytest.raises(InvalidFactError):
        access.to_zone_uri(" blank")


def test_a_certificate_is_valid_for_its_lifetime(authority):
    caller = read_identity(authority.issue("short", zones=["Plant A"], lasts=timedelta(seconds=60)))
    caller.check(time.time())
    for moment in (time.time() + 61, time.time() - 3601):
        with pytest.raises(AccessDenied, match="not valid now") as caught:
            caller.check(moment)
        # With a renewed certificate the client continues, and nothing is lost meanwhile.
        assert caught.value.not_attempted
        assert not caught.value.final


def test_a_revoked_certificate_is_rejected_as_soon_as_the_list_names_it(authority, tmp_path):
    files = authority.issue("revoked", zones=["Plant A"])
    other = read_identity(authority.issue("other", zones=["Plant A"]))
    path = tmp_path / "revoked"
    path.write_text("# none yet\n\n", encoding="utf-8")
    revoked = RevocationList(path)
    revoked.check(read_identity(files))
    digits = compute_fingerprint(files).upper()
    openssl = "sha256 Fingerprint=" + ":".join(digits[start : start + 2] for start in range(0, 64, 2))
    path.write_text(f"{openssl}  # stolen, INC-7\n", encoding="utf-8")
    with pytest.raises(AccessDenied, match="was revoked"):
        revoked.check(read_identity(files))
    revoked.check(other)


def test_no_caller_is_accepted_while_the_list_cannot_be_read(authority, tmp_path):
    caller = read_identity(authority.issue("waiting", zones=["Plant A"]))
    path = tmp_path / "revoked"
    path.write_text("", encoding="utf-8")
    revoked = RevocationList(path)
    for break_list in (lambda: path.write_text("nonsense\n", encoding="utf-8"), path.unlink):
        break_list()
        with pytest.raises(AccessDenied, match="no caller is admitted") as caught:
            revoked.check(caller)
        assert caught.value.not_attempted
    path.write_text("\n", encoding="utf-8")
    revoked.check(caller)


def test_an_invalid_list_fails_the_startup(tmp_path):
    path = tmp_path / "revoked"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        RevocationList(path)
    path.write_text("\nabc\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=":2 is not a sha256 fingerprint"):
        RevocationList(path)


# -- revocation -----------------------------------------------------------------------------------------


def is_accepted(revoked, files):
    return is_allowed(revoked.check, read_identity(files))


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize("curve, bits", [(ec.SECP256R1(), 256), (ec.SECP384R1(), 384), (ec.SECP521R1(), 521)])
@pytest.mark.parametrize("first", ["original", "twin"])
def test_a_fingerprint_revokes_both_signatures_of_a_certificate(tmp_path, curve, bits, first):
    files = CertificateAuthority(tmp_path, curve=curve).issue("stolen", zones=["Plant A"])
    both = {"original": files, "twin": with_other_signature(files, bits=bits)}
    path = tmp_path / "revoked"
    path.write_text(compute_fingerprint(both[first]), encoding="utf-8")
    assert [is_accepted(RevocationList(path), each) for each in both.values()] == [False, False]


@pytest.mark.spec("SEC-05")
def test_a_certificate_is_accepted_with_either_of_its_signatures(authority):
    # Half of the signatures of OpenSSL have a high s: refusing them would refuse every second honest certificate.
    files = authority.issue("either", zones=["Plant A"])
    assert all(is_accepted(RevocationList(), each) for each in (files, with_other_signature(files)))


@pytest.mark.spec("SEC-05")
def test_a_list_names_certificates_and_public_keys_next_to_comments(authority, tmp_path):
    by_certificate, by_key, other = (authority.issue(name, zones=["Plant A"]) for name in ("first", "second", "third"))
    path = tmp_path / "revoked"
    path.write_text(
        f"# INC-7\n{by_certificate.certificate.read_text(encoding='utf-8')}\n"
        f"public-key={compute_public_key_digest(by_key)}  # lost laptop\n",
        encoding="utf-8",
    )
    revoked = RevocationList(path)
    assert [is_accepted(revoked, each) for each in (by_certificate, by_key, other)] == [False, False, True]


@pytest.mark.spec("SEC-05")
def test_a_list_of_fingerprints_is_read_with_a_warning(authority, tmp_path, caplog):
    files = authority.issue("old list", zones=["Plant A"])
    path = tmp_path / "revoked"
    with caplog.at_level(logging.WARNING):
        path.write_text(f"public-key={compute_public_key_digest(files)}", encoding="utf-8")
        assert not is_accepted(RevocationList(path), files)
        assert list_events(caplog.records) == []
        path.write_text(compute_fingerprint(files), encoding="utf-8")
        assert not is_accepted(RevocationList(path), files)
        assert list_events(caplog.records) == ["revocation list incomplete"]


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize("encoding", [Encoding.PEM, Encoding.DER])
def test_a_crl_revokes_the_certificates_that_its_issuer_lists(tmp_path, encoding):
    authority, other_authority = CertificateAuthority(tmp_path, "ours"), CertificateAuthority(tmp_path, "foreign")
    listed_files, other_files = authority.issue("listed", zones=["Plant A"]), authority.issue("free", zones=["Plant A"])
    path = tmp_path / "crl"
    path.write_bytes(authority.create_crl(listed_files, encoding=encoding))
    revoked = RevocationList(crl=path, authorities=authority.path)
    assert [is_accepted(revoked, each) for each in (listed_files, other_files)] == [False, True]
    path.write_bytes(authority.create_crl(listed_files, other_files, encoding=encoding))
    assert not is_accepted(revoked, other_files)
    # A CRL of another authority is not believed, and without a CRL no caller is let in.
    path.write_bytes(other_authority.create_crl(encoding=encoding))
    with pytest.raises(AccessDenied, match="the CRL cannot be read") as caught:
        revoked.check(read_identity(other_files))
    assert caught.value.not_attempted


@pytest.mark.spec("SEC-05")
def test_an_expired_crl_rejects_every_certificate_of_its_issuer(tmp_path, caplog):
    authority, other = CertificateAuthority(tmp_path, "ours"), CertificateAuthority(tmp_path, "other")
    files, elsewhere = authority.issue("plant", zones=["Plant A"]), other.issue("elsewhere", zones=["Plant A"])
    path = tmp_path / "crl"
    path.write_bytes(authority.create_crl(lasts=timedelta(hours=1)))
    now = [time.time()]
    revoked = RevocationList(crl=path, authorities=authority.path, clock=lambda: now[0])
    assert is_accepted(revoked, files)
    now[0] += 3700
    for _ in range(3):
        with pytest.raises(AccessDenied, match="has expired") as caught:
            revoked.check(read_identity(files))
        assert caught.value.not_attempted
    assert list_events(caplog.records) == ["certificates unreadable"]
    assert is_accepted(revoked, elsewhere)
    path.write_bytes(authority.create_crl(lasts=timedelta(hours=2)))
    assert is_accepted(revoked, files)


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize(
    "extension, message",
    [
        (x509.DeltaCRLIndicator(1), "2.5.29.27"),
        (
            x509.IssuingDistributionPoint(None, None, False, False, None, True, False),
            "2.5.29.28",
        ),
    ],
)
def test_an_incomplete_crl_is_rejected(authority, tmp_path, extension, message):
    path = tmp_path / "crl"
    path.write_bytes(authority.create_crl(extensions=[extension]))
    with pytest.raises(ConfigurationError, match=f"{message}.*complete CRL"):
        RevocationList(crl=path, authorities=authority.path)


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize("missing", ["crl", "authorities"])
def test_an_error_about_a_missing_crl_or_authorities_file_names_that_file(authority, tmp_path, missing):
    paths = {"crl": tmp_path / "crl", "authorities": authority.path}
    paths["crl"].write_bytes(authority.create_crl())
    paths[missing] = tmp_path / "missing"
    with pytest.raises(ConfigurationError, match=r"the file .*missing cannot be read") as caught:
        RevocationList(**paths)
    assert "revoked certificates" not in str(caught.value)


@pytest.mark.spec("SEC-05")
def test_an_invalid_crl_fails_the_startup(authority, tmp_path):
    path = tmp_path / "crl"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigurationError, match="is not a CRL in PEM or DER"):
        RevocationList(crl=path, authorities=authority.path)
    path.write_bytes(authority.create_crl(lasts=timedelta(hours=1)))
    with pytest.raises(ConfigurationError, match="specify the authorities"):
        RevocationList(crl=path)
    broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="certificate that cannot be read"):
        RevocationList(path)
    path.write_bytes(b"#" * (16 * 1024 * 1024 + 1))
    with pytest.raises(ConfigurationError, match="more than 16,777,216 bytes"):
        RevocationList(path)
