"""Exposed numbers are parsed to the same values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.telemetry.names import METRICS, PAUSED, TRANSACTIONS
from ergon_framework.telemetry.prometheus import parse_prometheus, render_prometheus

#: The endpoint omits it.
EXPOSED_METRICS = [
    metric for metric in METRICS if metric.name != "ergon.queue.age.max" and metric.attributes[-1] != "le"
]


@given(st.sampled_from(EXPOSED_METRICS), st.data())
def test_exposed_numbers_are_equal_after_parsing_whatever_their_labels(metric, data):
    label = st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
    )
    values = tuple(data.draw(label) for _ in metric.attributes)
    value = data.draw(st.floats(0, 1e12))
    # A histogram is exposed when it has a bucket.
    parts = {each.name: each for each in METRICS if each.attributes[-1] == "le"}
    family = metric.name.rpartition(".")[0] + ".bucket"
    numbers = {(metric.name, values): value}
    if family in parts:
        others = [
            metric_in_family
            for metric_in_family in METRICS
            if metric_in_family.name.rpartition(".")[0] == metric.name.rpartition(".")[0]
        ]
        numbers |= {
            (metric_in_family.name, values): value for metric_in_family in others if metric_in_family.name != family
        }
        numbers[family, (*values, "+Inf")] = value
    parsed = parse_prometheus(render_prometheus(numbers).decode())
    assert {key: parsed.get(key) for key in numbers} == numbers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# HELP ergon_paused held\n",
        'python_info{version="3"} 1.0\n',
        "ergon_paused nothing\n",
        "ergon_paused{ 1.0",
        "<html>not found</html>",
    ],
)
def test_lines_without_a_known_metric_are_ignored(text):
    assert parse_prometheus(text) == {}


def test_a_missing_label_is_empty():
    first = 'ergon_transactions_total{ergon_task="a",ergon_outcome="succeeded"} 3.0'
    text = first + '\nergon_paused{ergon_reason="x\\"\\\\n\\ny"} 1'
    assert parse_prometheus(text) == {
        (TRANSACTIONS.name, ("a", "succeeded", "")): 3.0,
        (PAUSED.name, ("", 'x"\\n\ny')): 1.0,
    }
