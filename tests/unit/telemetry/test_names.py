"""The document and the code have the same names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ergon_framework.telemetry import names

DOCUMENT_PATH = Path(__file__).parents[3] / "docs" / "telemetry.md"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def list_documented(title):
    """Return the first column of the table below *title*."""
    text = DOCUMENT_PATH.read_text(encoding="utf-8")
    section = text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return ROW.findall(section)


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize(
    "title, expected",
    [
        ("Spans", names.values_of(names.Span)),
        ("Attributes", names.values_of(names.Attribute)),
        ("Metrics", [metric.name for metric in names.METRICS]),
        ("Log events", names.values_of(names.Event)),
        ("Log fields", names.values_of(names.Field)),
    ],
)
def test_the_document_lists_every_name_and_no_other(title, expected):
    assert sorted(list_documented(title)) == sorted(expected)


def test_the_document_has_kind_unit_and_attributes_of_every_metric():
    text = DOCUMENT_PATH.read_text(encoding="utf-8")
    for metric in names.METRICS:
        attributes = ", ".join(f"`{name}`" for name in metric.attributes)
        assert f"| `{metric.name}` | {metric.kind} | {metric.unit} | {attributes} |" in text


@pytest.mark.spec("CON-16")
def test_all_attributes_of_the_framework_have_its_prefix():
    assert [name for name in names.values_of(names.Attribute) if not name.startswith("ergon.")] == ["le"]


def test_no_field_has_the_name_of_a_log_record_attribute():
    reserved = set(vars(__import__("logging").makeLogRecord({}))) | {"message", "asctime", "taskName"}
    assert reserved.isdisjoint(names.values_of(names.Field))
