"""Pauses of the fleet where there is nobody to hear them from."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from ergon_framework.runner.pausing import pausable
from tests.log_events import event_of


def found(dsn="postgresql://nowhere", wanted=True):
    return SimpleNamespace(postgres=SimpleNamespace(dsn=dsn), run=SimpleNamespace(pausable=wanted))


@pytest.mark.parametrize("settings", [found(dsn=None), found(wanted=False)], ids=["no database", "not wanted"])
def test_there_is_no_gate_where_nobody_can_or_shall_be_heard(settings, caplog):
    with pausable(SimpleNamespace(name="charge"), settings) as gates:
        assert gates == ()
    assert not caplog.records


@pytest.mark.spec("CON-47")
def test_a_worker_without_the_library_runs_and_says_that_pauses_do_not_reach_it(monkeypatch, caplog):
    for module in [name for name in sys.modules if name.startswith("ergon_framework.connectors.postgres")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with caplog.at_level(logging.WARNING), pausable(SimpleNamespace(name="charge"), found()) as gates:
        assert gates == ()
    (record,) = caplog.records
    assert event_of(record) == "pauses unheard"
    assert record.task == "charge"
    assert "ergon-framework[postgres]" in record.error
