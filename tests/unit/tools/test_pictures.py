"""Pictures of dashboards: they show the answers of Prometheus, and every panel has a picture in the documents."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import pytest

from tests.unit.tools.queries import ROOT, load_dashboards
from tools.pictures import COLUMNS, HEIGHT, Picture, Series, draw_board, draw_text, query_pictures, render_legend

SVG = "{http://www.w3.org/2000/svg}"


def draw(*pictures):
    return ET.fromstring(draw_board(pictures))


def list_texts(picture):
    return [text.text for text in picture.iter(f"{SVG}text")]


def test_a_line_goes_through_its_points_and_has_gaps_where_there_is_no_number():
    svg = draw(Picture("a <b>", "s", [Series("x & y", [(0, 0.0), (5, 2.0), (6, math.nan), (10, 4.0)])], 10))
    assert [line.get("points") for line in svg.iter(f"{SVG}polyline")] == ["40,114 165,69", "290,24"]
    assert list_texts(svg) == ["a <b>", "0", "2 s", "4 s", "x & y"]


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
def test_a_label_fits_next_to_its_panel(highest, unit, label):
    assert list_texts(draw(Picture("a", unit, [Series("x", [(0, highest), (1, highest)])], 1)))[3] == label
    assert len(label) <= 7


def test_a_panel_without_data_shows_a_message():
    assert list_texts(draw(Picture("a", "short", [], 10)))[-1] == "no data"


def test_lines_without_room_in_the_legend_are_drawn_and_counted():
    series = [Series(f"s{number}", [(0, number), (1, number)]) for number in range(8)]
    svg = draw(Picture("a", "short", series, 1))
    assert len(list(svg.iter(f"{SVG}polyline"))) == 8
    # The largest are named.
    assert list_texts(svg)[-6:] == ["s7", "s6", "s5", "s4", "s3", "+3"]


def test_panels_are_laid_out_in_rows():
    pictures = [Picture(str(number), "short", [], 1) for number in range(COLUMNS + 1)]
    assert draw(*pictures).get("height") == str(2 * HEIGHT)


def test_the_picture_of_a_terminal_keeps_every_character_and_empty_line():
    assert list_texts(ET.fromstring(draw_text(["TASK  <b>", "", "charge"]))) == ["TASK  <b>", None, "charge"]


def test_the_legend_is_that_of_grafana():
    assert render_legend("{{ergon_task}} {{ none }}p95", {"ergon_task": "charge"}) == "charge p95"
    assert render_legend("{{none}}", {}) == "all"


def test_the_answers_of_prometheus_are_drawn():
    class FakeServer:
        def ask_range(self, expression, *, start, end, step):
            assert (round(end - start), step, "$" in expression) == (30, 2.0, False)
            return [{"metric": {"ergon_task": "charge"}, "values": [[start + 1, "2"], [end, "NaN"]]}]

    for dashboard in load_dashboards().values():
        pictures = list(query_pictures(dashboard, FakeServer(), seconds=30.0))
        assert [picture.title for picture in pictures] == [panel["title"] for panel in dashboard["panels"]]
        ((first, value), (last, missing)) = pictures[0].series[0].points
        assert (round(first), value, round(last), math.isnan(missing)) == (1, 2.0, 30, True)


@pytest.mark.spec("RUN-04")
@pytest.mark.parametrize("name", sorted(load_dashboards()))
def test_the_documents_have_a_picture_of_every_panel_with_data(name):
    text = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    texts = list_texts(ET.fromstring(text))
    assert {panel["title"] for panel in load_dashboards()[name]["panels"]} <= set(texts)
    assert "no data" not in texts


def test_the_documents_have_a_picture_of_top():
    text = " ".join(filter(None, list_texts(ET.parse(ROOT / "docs" / "pictures" / "top.svg").getroot())))
    for head in ("TASK", "QUEUE", "PROVIDER", "EXECUTORS", "FACTS"):
        assert head in text
