"""Check the outages of tests/chaos/provider_outage.py in short form: ``make chaos-outage`` runs them at full length."""

from __future__ import annotations

import pytest

from tests.chaos.provider_outage import is_successful, make_scenarios, run_outages

OUTAGE_SECONDS = 8.0
FACTS_OUTAGE_SECONDS = 20.0


@pytest.mark.spec("DX-27", "DX-41", "PRV-31")
def test_no_order_is_lost_doubled_or_dead_lettered_by_an_outage(tmp_path):
    results = run_outages(make_scenarios(OUTAGE_SECONDS, 8, FACTS_OUTAGE_SECONDS), tmp_path)
    assert [figures for figures in results if not is_successful(figures)] == []
