"""Errors travel with all that they are."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from ergon_framework.errors import Category, ConnectionLostError
from ergon_framework.facts import errors
from ergon_framework.facts.errors import (
    AccessDenied,
    ArtifactLost,
    BufferFull,
    FactConflict,
    FactError,
    InvalidFactError,
    ServiceError,
)
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import errors as faults
from ergon_framework.facts.stores.errors import WrongBufferError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FactError)]
EXTRA_FIELDS = {
    FactConflict: {"from_zone": "Plant A", "message_id": "m-1"},
    ArtifactLost: {"from_zone": "Werk Süd", "message_id": "m-1", "bucket": "b", "key": "k/1"},
}


def read_fields(error):
    names = ("category", "retry_after", "final", "not_attempted", "code")
    return {name: getattr(error, name) for name in names} | vars(error)


def make_error(kind):
    return kind("what happened, and what to do about it", **EXTRA_FIELDS.get(kind, {}))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_it_was_sent(kind):
    sent = make_error(kind)
    received = faults.from_wire(wire.Fault.FromString(faults.to_wire(sent).SerializeToString()))
    assert type(received) is kind
    assert str(received) == str(sent)
    assert read_fields(received) == read_fields(sent) | {
        key: read_fields(received)[key] for key in read_fields(received) if key in vars(received)
    }
    assert {name: getattr(received, name) for name in EXTRA_FIELDS.get(kind, {})} == EXTRA_FIELDS.get(kind, {})


def test_an_overridden_classification_arrives_too():
    sent = BufferFull("full", category=Category.TIMEOUT, retry_after=7.5, final=True, not_attempted=False, code="disk")
    received = faults.from_wire(faults.to_wire(sent))
    assert (received.category, received.retry_after, received.final, received.not_attempted, received.code) == (
        Category.TIMEOUT,
        7.5,
        True,
        False,
        "disk",
    )


def test_an_error_of_one_store_arrives_as_its_nearest_known_class():
    received = faults.from_wire(faults.to_wire(WrongBufferError("two buffers")))
    assert type(received) is FactError
    assert received.final
    assert received.code == "misplaced"


def test_every_class_has_an_explicit_status():
    missing = {faults.to_wire(make_error(kind)).kind for kind in KINDS} - faults._STATUS.keys()
    assert missing == {"FactError", "PublishError"}
    assert faults.to_status_code(AccessDenied("no")) is grpc.StatusCode.PERMISSION_DENIED
    assert faults.to_status_code(AccessDenied("expired", final=False)) is grpc.StatusCode.UNAUTHENTICATED


def test_long_messages_fit_into_the_metadata():
    fault = faults.to_wire(InvalidFactError("ü" * 100_000))
    assert len(fault.SerializeToString()) < 2_200
    assert len(faults.to_status_message(InvalidFactError("ü" * 100_000)).encode()) <= 300


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
def test_any_fault_is_a_fact_error(hostile):
    assert isinstance(faults.from_wire(hostile), FactError)


class FailedCall:
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
        ("UNAVAILABLE", ConnectionLostError),
        ("DEADLINE_EXCEEDED", ConnectionLostError),
        ("CANCELLED", ConnectionLostError),
        ("RESOURCE_EXHAUSTED", ConnectionLostError),
        ("INTERNAL", ServiceError),
        ("UNKNOWN", ServiceError),
        ("INVALID_ARGUMENT", InvalidFactError),
        ("PERMISSION_DENIED", AccessDenied),
        ("UNIMPLEMENTED", errors.NotSupportedRemotely),
    ],
)
@pytest.mark.parametrize("trailing", [(), ((faults.METADATA_KEY, b"\xff\xff"),), None])
def test_a_status_without_a_fault_is_mapped_to_an_error(code, kind, trailing):
    received = faults.to_client_error(FailedCall(grpc.StatusCode[code], trailing), "AppendFact")
    assert type(received) is kind
    assert "AppendFact" in str(received)
    assert "said so" in str(received)


def test_the_document_names_every_status_as_it_is_sent():
    page = (Path(__file__).parents[3] / "docs" / "facts.md").read_text(encoding="utf-8")
    lines = [line.split("|") for line in page.partition("| status | fault |")[2].splitlines() if line[:2] == "| "]
    documented = {
        kind: set(re.findall("[A-Z_]{4,}", line[1]))
        for line in lines
        for kind in re.findall("(?<!in Python )`([A-Z]\\w+)`", line[2])
    }
    sent = {kind: {status.name} for kind, status in faults._STATUS.items()}
    sent["AccessDenied"].add("UNAUTHENTICATED")
    assert documented == sent
    python_names = dict(re.findall("`([A-Z]\\w+)` \\(in Python `([A-Z]\\w+)`\\)", page))
    received = {kind: type(faults.from_wire(wire.Fault(kind=kind))).__name__ for kind in sent}
    assert {kind: name for kind, name in received.items() if kind != name} == python_names
