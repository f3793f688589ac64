"""Numbers that were exposed are read back as they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.telemetry.exposition import exposed
from ergon_framework.telemetry.names import METRICS, PAUSED, TRANSACTIONS
from ergon_framework.telemetry.scraped import scraped

#: The endpoint leaves it out.
TOLD = [metric for metric in METRICS if metric.name != "ergon.queue.age.max" and metric.attributes[-1] != "le"]


@given(st.sampled_from(TOLD), st.data())
def test_what_was_exposed_is_read_back_whatever_its_labels_are(metric, data):
    label = st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
    )
    values = tuple(data.draw(label) for _ in metric.attributes)
    value = data.draw(st.floats(0, 1e12))
    # A histogram is exposed when there is a bucket.
    parts = {each.name: each for each in METRICS if each.attributes[-1] == "le"}
    family = metric.name.rpartition(".")[0] + ".bucket"
    numbers = {(metric.name, values): value}
    if family in parts:
        others = [one for one in METRICS if one.name.rpartition(".")[0] == metric.name.rpartition(".")[0]]
        numbers |= {(one.name, values): value for one in others if one.name != family}
        numbers[family, (*values, "+Inf")] = value
    found = scraped(exposed(numbers).decode())
    assert {key: found.get(key) for key in numbers} == numbers


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
def test_what_is_none_of_ours_is_passed_over(text):
    assert scraped(text) == {}


def test_what_has_no_value_is_empty():
    first = 'ergon_transactions_total{ergon_task="a",ergon_outcome="succeeded"} 3.0'
    text = first + '\nergon_paused{ergon_reason="x\\"\\\\n\\ny"} 1'
    assert scraped(text) == {
        (TRANSACTIONS.name, ("a", "succeeded", "")): 3.0,
        (PAUSED.name, ("", 'x"\\n\ny')): 1.0,
    }
