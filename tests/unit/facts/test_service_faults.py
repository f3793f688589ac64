"""Errors travel with all that they are."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from ergon_framework.errors import Category, ConnectionLost
from ergon_framework.facts import errors
from ergon_framework.facts.errors import (
    AccessDenied,
    ArtifactLost,
    BufferFull,
    FactConflict,
    FactError,
    InvalidFactError,
    ServiceFailed,
)
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import faults
from ergon_framework.facts.stores.refusals import MisplacedError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FactError)]
MORE = {
    FactConflict: {"from_zone": "Plant A", "message_id": "m-1"},
    ArtifactLost: {"from_zone": "Werk Süd", "message_id": "m-1", "bucket": "b", "key": "k/1"},
}


def told(error):
    return {name: getattr(error, name) for name in ("category", "retry_after", "final", "later", "code")} | vars(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_it_was_sent(kind):
    sent = kind("what happened, and what to do about it", **MORE.get(kind, {}))
    got = faults.read(wire.Fault.FromString(faults.write(sent).SerializeToString()))
    assert type(got) is kind
    assert str(got) == str(sent)
    assert told(got) == told(sent) | {key: told(got)[key] for key in told(got) if key in vars(got)}
    assert {name: getattr(got, name) for name in MORE.get(kind, {})} == MORE.get(kind, {})


def test_a_verdict_of_its_own_arrives_too():
    sent = BufferFull("full", category=Category.TIMEOUT, retry_after=7.5, final=True, later=False, code="disk")
    got = faults.read(faults.write(sent))
    assert (got.category, got.retry_after, got.final, got.later, got.code) == (
        Category.TIMEOUT,
        7.5,
        True,
        False,
        "disk",
    )


def test_a_class_of_one_store_arrives_as_its_nearest_known_one():
    got = faults.read(faults.write(MisplacedError("two buffers")))
    assert type(got) is FactError
    assert got.final
    assert got.code == "misplaced"


def test_every_class_has_a_status_of_its_own_choice():
    without = {kind.__name__ for kind in KINDS} - faults._STATUS.keys()
    assert without == {"FactError", "PublishError"}
    assert faults.status(AccessDenied("no")) is grpc.StatusCode.PERMISSION_DENIED
    assert faults.status(AccessDenied("expired", final=False)) is grpc.StatusCode.UNAUTHENTICATED


def test_long_words_fit_into_the_metadata():
    fault = faults.write(InvalidFactError("ü" * 100_000))
    assert len(fault.SerializeToString()) < 2_200
    assert len(faults.details(InvalidFactError("ü" * 100_000)).encode()) <= 300


@pytest.mark.parametrize(
    "hostile",
    [
        wire.Fault(),
        wire.Fault(kind="object", category="WEIRD", retry_after=-1),
        wire.Fault(kind="FactConflict"),
        wire.Fault(kind="BufferFull", retry_after=float("nan")),
        wire.Fault(kind="BufferFull", retry_after=float("inf")),
    ],
)
def test_whatever_comes_is_an_error_of_facts(hostile):
    assert isinstance(faults.read(hostile), FactError)


class Failed:
    def __init__(self, code, trailing=()):
        self._code, self._trailing = code, trailing

    def code(self):
        return self._code

    def details(self):
        return "said so"

    def trailing_metadata(self):
        return self._trailing


@pytest.mark.parametrize(
    "code, kind",
    [
        ("UNAVAILABLE", ConnectionLost),
        ("DEADLINE_EXCEEDED", ConnectionLost),
        ("CANCELLED", ConnectionLost),
        ("RESOURCE_EXHAUSTED", ConnectionLost),
        ("INTERNAL", ServiceFailed),
        ("UNKNOWN", ServiceFailed),
        ("INVALID_ARGUMENT", InvalidFactError),
        ("PERMISSION_DENIED", AccessDenied),
        ("UNIMPLEMENTED", errors.NotOffered),
    ],
)
@pytest.mark.parametrize("trailing", [(), ((faults.KEY, b"\xff\xff"),), None])
def test_a_status_without_a_fault_is_told_by_what_is_known(code, kind, trailing):
    got = faults.raised(Failed(grpc.StatusCode[code], trailing), "AppendFact")
    assert type(got) is kind
    assert "AppendFact" in str(got)
    assert "said so" in str(got)


def test_the_document_names_every_status_as_it_is_sent():
    page = (Path(__file__).parents[3] / "docs" / "facts.md").read_text(encoding="utf-8")
    lines = [
        line.split("|") for line in page.partition("| status | with a fault |")[2].splitlines() if line[:2] == "| "
    ]
    told = {
        kind: set(re.findall("[A-Z_]{4,}", line[1])) for line in lines for kind in re.findall("`([A-Z]\\w+)`", line[2])
    }
    sent = {kind: {status.name} for kind, status in faults._STATUS.items()}
    sent["AccessDenied"].add("UNAUTHENTICATED")
    assert told == sent
