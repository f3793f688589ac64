"""Pictures of dashboards: what is drawn is what was answered, and every panel has a picture in the documents."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import pytest

from tests.unit.tools.queries import ROOT, boards
from tools.pictures import COLUMNS, HEIGHT, Picture, Series, board_picture, legend, pictured, text_picture

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*pictures):
    return ET.fromstring(board_picture(pictures))


def words(picture):
    return [text.text for text in picture.iter(f"{SVG}text")]


def test_a_line_goes_through_its_points_and_has_gaps_where_there_is_no_number():
    found = drawn(Picture("a <b>", "s", [Series("x & y", [(0, 0.0), (5, 2.0), (6, math.nan), (10, 4.0)])], 10))
    assert [line.get("points") for line in found.iter(f"{SVG}polyline")] == ["40,114 165,69", "290,24"]
    assert words(found) == ["a <b>", "0", "2 s", "4 s", "x & y"]


@pytest.mark.parametrize(
    "highest, unit, label",
    [
        (0.00485, "s", "4.85 ms"),
        (2e-5, "s", "20 µs"),
        (9.46, "s", "9.46 s"),
        (1.5e6, "bytes", "1.5 MB"),
        (0.2, "percentunit", "20%"),
        (68.7, "short", "68.7"),
        (12345.0, "short", "12.3 k"),
        (0.0312, "short", "0.0312"),
    ],
)
def test_a_label_fits_beside_its_panel(highest, unit, label):
    assert words(drawn(Picture("a", unit, [Series("x", [(0, highest), (1, highest)])], 1)))[3] == label
    assert len(label) <= 7


def test_a_panel_without_data_says_so():
    assert words(drawn(Picture("a", "short", [], 10)))[-1] == "no data"


def test_more_lines_than_can_be_named_are_drawn_and_counted():
    series = [Series(f"s{number}", [(0, number), (1, number)]) for number in range(8)]
    found = drawn(Picture("a", "short", series, 1))
    assert len(list(found.iter(f"{SVG}polyline"))) == 8
    # The largest are named.
    assert words(found)[-6:] == ["s7", "s6", "s5", "s4", "s3", "+3"]


def test_panels_stand_in_rows():
    pictures = [Picture(str(number), "short", [], 1) for number in range(COLUMNS + 1)]
    assert drawn(*pictures).get("height") == str(2 * HEIGHT)


def test_a_terminal_is_drawn_letter_by_letter():
    assert words(ET.fromstring(text_picture(["TASK  <b>", "", "charge"]))) == ["TASK  <b>", None, "charge"]


def test_the_legend_is_that_of_grafana():
    assert legend("{{ergon_task}} {{ none }}p95", {"ergon_task": "charge"}) == "charge p95"
    assert legend("{{none}}", {}) == "all"


def test_what_prometheus_answers_is_what_is_drawn():
    class Server:
        def ask_range(self, expression, *, start, end, step):
            assert (round(end - start), step, "$" in expression) == (30, 2.0, False)
            return [{"metric": {"ergon_task": "charge"}, "values": [[start + 1, "2"], [end, "NaN"]]}]

    for board in boards().values():
        found = list(pictured(board, Server(), seconds=30.0))
        assert [picture.title for picture in found] == [panel["title"] for panel in board["panels"]]
        ((first, two), (last, nothing)) = found[0].series[0].points
        assert (round(first), two, round(last), math.isnan(nothing)) == (1, 2.0, 30, True)


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("name", sorted(boards()))
def test_the_documents_have_a_picture_of_every_panel_with_data(name):
    text = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    found = words(ET.fromstring(text))
    assert {panel["title"] for panel in boards()[name]["panels"]} <= set(found)
    assert "no data" not in found


def test_the_documents_have_a_picture_of_top():
    found = " ".join(filter(None, words(ET.parse(ROOT / "docs" / "pictures" / "top.svg").getroot())))
    for head in ("TASK", "QUEUE", "PROVIDER", "EXECUTORS", "FACTS"):
        assert head in found
