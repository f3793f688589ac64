"""The delay queues of RabbitMQ: a bounded number of lengths, and every delay exact."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.transaction import MAX_DELAY_SECONDS

#: Seconds by which a delay may be exceeded: rounding up, and the shortest queue.
MAX_LATENESS_SECONDS = 0.51


@pytest.mark.spec("CNN-09")
@given(st.floats(0.0001, MAX_DELAY_SECONDS))
def test_the_parts_of_a_delay_add_up_to_it_and_to_little_more(delay):
    total, parts = 0.0, 0
    while total < delay:
        total += topology.delay_part_ms(delay - total) / 1000
        parts += 1
    assert total < delay + MAX_LATENESS_SECONDS
    assert parts <= 16


@pytest.mark.spec("CNN-09")
@given(st.lists(st.floats(0.0001, MAX_DELAY_SECONDS), min_size=1, max_size=2000))
def test_the_number_of_delay_queues_is_bounded(delays):
    decades = 10
    lengths = {topology.delay_part_ms(delay) for delay in delays}
    assert len(lengths) <= decades * len(topology.DELAY_STEPS)
    assert lengths == {topology.delay_bucket_ms(length / 1000) for length in lengths}


def test_the_examples_are_true():
    assert doctest.testmod(topology).failed == 0
