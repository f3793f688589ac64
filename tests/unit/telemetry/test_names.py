"""The document and the code have the same names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ergon_framework.telemetry import names

DOCUMENT = Path(__file__).parents[3] / "docs" / "telemetry.md"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def documented(title):
    """The first column of the table below *title*."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return ROW.findall(section)


@pytest.mark.spec("CON-41")
@pytest.mark.parametrize(
    "title, expected",
    [
        ("Spans", names.listed(names.Span)),
        ("Attributes", names.listed(names.Attribute)),
        ("Metrics", [metric.name for metric in names.METRICS]),
        ("Log events", names.listed(names.Event)),
        ("Log fields", names.listed(names.Field)),
    ],
)
def test_the_document_lists_every_name_and_no_other(title, expected):
    assert sorted(documented(title)) == sorted(expected)


def test_the_document_says_kind_unit_and_attributes_of_every_metric():
    text = DOCUMENT.read_text(encoding="utf-8")
    for metric in names.METRICS:
        attributes = ", ".join(f"`{name}`" for name in metric.attributes)
        assert f"| `{metric.name}` | {metric.kind} | {metric.unit} | {attributes} |" in text


@pytest.mark.spec("CON-16")
def test_all_attributes_of_ours_begin_alike():
    assert [name for name in names.listed(names.Attribute) if not name.startswith("ergon.")] == ["le"]


def test_no_field_is_one_that_log_records_have_of_their_own():
    taken = set(vars(__import__("logging").makeLogRecord({}))) | {"message", "asctime", "taskName"}
    assert taken.isdisjoint(names.listed(names.Field))
